"""Contexts are made of the bytes of PEM files, with the settings of a context of Python's `ssl`,
which has checked the same files and names their errors.

The library is the one that Python's `_ssl` has loaded, so what updates that updates this. An
interpreter with OpenSSL linked into it hides its functions; then it is the system's library.
"""
import ssl
import sys

from clipper_core.tls.libssl cimport Libssl, tls_no_password, tls_set_protocols

cdef enum:
    # numbers of OpenSSL's macros
    CONTROL_MODE = 33
    CONTROL_SESSION_CACHE = 44
    CONTROL_CHAIN_CERT = 89
    CONTROL_MINIMUM_VERSION = 123
    MODE_PARTIAL_WRITE = 1
    MODE_MOVING_BUFFER = 2
    MODE_RELEASE_BUFFERS = 16
    VERIFY_PEER = 1
    VERIFY_REQUIRED = 3
    TICKETS = 1                         # of a handshake of TLS 1.3

cdef Libssl LIBRARY
cdef str reason = "it was not looked up"

HANDSHAKES = ("ok", "failed", "plain", "slow", "gone", "full")     # by HandshakeOutcome
SYSTEM_LIBRARIES = ("libssl.so.3", "libssl.so.1.1")


def look_up(paths):
    """Look up OpenSSL's functions in the first of the libraries that has all. None as a path is the
    program itself. Return why no library can be used; empty: one can."""
    reasons = []
    for path in paths:
        name = None if path is None else path.encode()
        if LIBRARY.load(<const char*> NULL if name is None else <const char*> name):
            return ""
        reasons.append(f"{path or sys.executable} lacks {LIBRARY.missing.decode()}")
    return "; ".join(reasons)


def _libraries():
    own = getattr(sys.modules["_ssl"], "__file__", None)
    return own, *SYSTEM_LIBRARIES


reason = look_up(_libraries())


def version():
    """Return the text of OpenSSL's version that is in use. Raises OSError if none can be used."""
    if reason:
        raise OSError(reason)
    return LIBRARY.OpenSSL_version(0).decode()


cdef object _error(str what):
    """Return an error that says what was wrong, with OpenSSL's reason."""
    cdef const char* text = LIBRARY.ERR_reason_error_string(LIBRARY.ERR_peek_last_error())
    why = "no reason given" if text == NULL else text.decode()
    LIBRARY.ERR_clear_error()
    return ssl.SSLError(f"{what}: {why}")


cdef class TlsContext:
    """A certificate chain, its key and the settings of a context of Python's `ssl`. Threads: any.

    cert, key, client_ca: bytes of PEM files; without client_ca clients show no certificates.
    like: has the versions, ciphers and options. Raises OSError if there is no library, and
    ssl.SSLError for bytes that it does not take.
    """

    def __init__(self, bytes cert, bytes key, bytes client_ca, like):
        if reason:
            raise OSError(reason)
        self.state.lib = &LIBRARY
        self.state.ctx = LIBRARY.SSL_CTX_new(LIBRARY.TLS_server_method())
        if not self.state.is_set():
            raise _error("no context")
        self._set_up(like)
        self._use(cert, key)
        if client_ca:
            self._trust(client_ca)
        LIBRARY.ERR_clear_error()

    cdef int _set_up(self, like) except -1:
        cdef void* ctx = self.state.ctx
        older = [each["name"] for each in like.get_ciphers() if each["protocol"] != "TLSv1.3"]
        names = ":".join(older).encode()
        LIBRARY.SSL_CTX_set_options(ctx, <unsigned long> int(like.options))
        LIBRARY.SSL_CTX_set_security_level(ctx, like.security_level)
        LIBRARY.SSL_CTX_ctrl(ctx, CONTROL_MINIMUM_VERSION, int(like.minimum_version), NULL)
        LIBRARY.SSL_CTX_ctrl(ctx, CONTROL_MODE,
                             MODE_PARTIAL_WRITE | MODE_MOVING_BUFFER | MODE_RELEASE_BUFFERS, NULL)
        # clients come again by tickets, which take no memory here
        LIBRARY.SSL_CTX_ctrl(ctx, CONTROL_SESSION_CACHE, 0, NULL)
        LIBRARY.SSL_CTX_set_num_tickets(ctx, TICKETS)
        LIBRARY.SSL_CTX_set_session_id_context(ctx, b"clipper", 7)
        tls_set_protocols(&LIBRARY, ctx)
        if names and not LIBRARY.SSL_CTX_set_cipher_list(ctx, names):
            raise _error("ciphers")
        return 0

    cdef int _use(self, bytes cert, bytes key) except -1:
        cdef void* ctx = self.state.ctx
        cdef void* text = LIBRARY.BIO_new_mem_buf(<const char*> cert, <int> len(cert))
        cdef void* one = LIBRARY.PEM_read_bio_X509_AUX(text, NULL, tls_no_password, NULL)
        cdef bint taken = one != NULL and LIBRARY.SSL_CTX_use_certificate(ctx, one) == 1
        while taken and one != NULL:
            LIBRARY.X509_free(one)
            one = LIBRARY.PEM_read_bio_X509(text, NULL, tls_no_password, NULL)
            if one != NULL:
                taken = LIBRARY.SSL_CTX_ctrl(ctx, CONTROL_CHAIN_CERT, 1, one) == 1
        LIBRARY.X509_free(one)
        LIBRARY.BIO_free(text)
        if not taken:
            raise _error("certificate")
        LIBRARY.ERR_clear_error()
        text = LIBRARY.BIO_new_mem_buf(<const char*> key, <int> len(key))
        one = LIBRARY.PEM_read_bio_PrivateKey(text, NULL, tls_no_password, NULL)
        taken = one != NULL and LIBRARY.SSL_CTX_use_PrivateKey(ctx, one) == 1
        LIBRARY.EVP_PKEY_free(one)
        LIBRARY.BIO_free(text)
        if not taken or LIBRARY.SSL_CTX_check_private_key(ctx) != 1:
            raise _error("key")
        return 0

    cdef int _trust(self, bytes client_ca) except -1:
        """Take clients only with a certificate that one of these has signed."""
        cdef void* store = LIBRARY.SSL_CTX_get_cert_store(self.state.ctx)
        cdef void* text = LIBRARY.BIO_new_mem_buf(<const char*> client_ca, <int> len(client_ca))
        cdef void* one = LIBRARY.PEM_read_bio_X509(text, NULL, tls_no_password, NULL)
        cdef bint taken = one != NULL
        while one != NULL:
            taken = LIBRARY.X509_STORE_add_cert(store, one) == 1 and taken
            LIBRARY.X509_free(one)
            one = LIBRARY.PEM_read_bio_X509(text, NULL, tls_no_password, NULL)
        LIBRARY.BIO_free(text)
        if not taken:
            raise _error("CA of clients")
        LIBRARY.SSL_CTX_set_verify(self.state.ctx, VERIFY_REQUIRED, NULL)
        return 0
