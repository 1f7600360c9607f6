# The functions of OpenSSL that TLS takes, and one TLS connection over them: bytes in, bytes out.
# Declared from libssl.hpp.
#
# Threads: load() once, with the GIL, before everything else. A session is one thread's; a context
# is shared once it is complete.
from libc.stdint cimport int64_t
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u64, u8

cdef extern from "tls/libssl.hpp" namespace "clipper" nogil:
    ctypedef int (*Password)(char*, int, int, void*) noexcept
    cdef cppclass Libssl:
        const char* missing                     # the first function that is not there
        # Look up all functions in the library at `path`, and in those that it needs; NULL: in the
        # program. False: some are missing.
        bint load(const char* path) noexcept
        const char* OpenSSL_version(int which) noexcept
        void ERR_clear_error() noexcept
        unsigned long ERR_peek_last_error() noexcept
        const char* ERR_reason_error_string(unsigned long error) noexcept
        void* BIO_new_mem_buf(const void* text, int n) noexcept
        int BIO_free(void* bio) noexcept
        void* PEM_read_bio_X509(void* bio, void** into, Password password, void* with_) noexcept
        void* PEM_read_bio_X509_AUX(void* bio, void** into, Password password, void* with_) noexcept
        void* PEM_read_bio_PrivateKey(void* bio, void** into, Password password,
                                      void* with_) noexcept
        void X509_free(void* certificate) noexcept
        void EVP_PKEY_free(void* key) noexcept
        int X509_STORE_add_cert(void* store, void* certificate) noexcept
        const void* TLS_server_method() noexcept
        void* SSL_CTX_new(const void* method) noexcept
        long SSL_CTX_ctrl(void* ctx, int command, long number, void* argument) noexcept
        unsigned long SSL_CTX_set_options(void* ctx, unsigned long options) noexcept
        int SSL_CTX_set_cipher_list(void* ctx, const char* names) noexcept
        void SSL_CTX_set_security_level(void* ctx, int level) noexcept
        int SSL_CTX_set_num_tickets(void* ctx, size_t n) noexcept
        int SSL_CTX_set_session_id_context(void* ctx, const u8* name, unsigned n) noexcept
        void SSL_CTX_set_verify(void* ctx, int mode, void* callback) noexcept
        int SSL_CTX_use_certificate(void* ctx, void* certificate) noexcept
        int SSL_CTX_use_PrivateKey(void* ctx, void* key) noexcept
        int SSL_CTX_check_private_key(const void* ctx) noexcept
        void* SSL_CTX_get_cert_store(const void* ctx) noexcept
    int tls_no_password(char* to, int n, int writes, void* with_) noexcept
    # Let handshakes choose `h2` before `http/1.1`; neither: no protocol.
    void tls_set_protocols(const Libssl* lib, void* ctx) noexcept

    # A complete SSL_CTX, and the library that it is of. Freed when nobody shares it any more.
    cdef cppclass TlsContextState:
        const Libssl* lib
        void* ctx
        bint is_set() noexcept
        void share(const TlsContextState& other) noexcept   # replace it by the context of another
        void drop() noexcept

    cdef enum TlsOutcome:
        TLS_FAILED "clipper::kTlsFailed"
        TLS_WANTS "clipper::kTlsWants"          # bytes of the peer
        TLS_DONE "clipper::kTlsDone"

    # The server's side of one connection.
    cdef cppclass TlsSession:
        u64 given_bytes                         # of those given, that are not used
        Bytes out                               # to be sent to the peer
        bint has_ended                          # the peer has said that it sends no more
        bint open(const TlsContextState& context) noexcept  # False: no memory
        # Take bytes of the peer. They stay where they are until they are used.
        void give(const u8* at, u64 n) noexcept
        TlsOutcome shake() noexcept
        # Decrypt into `to`. Return how many bytes; less than `room` once all that was given is
        # used. -1: the peer breaks the protocol, or there is no memory.
        int64_t read(u8* to, u64 room) noexcept
        bint write(const u8* at, u64 n) noexcept            # encrypt into `out`
        void say_end() noexcept                 # that nothing more is sent
