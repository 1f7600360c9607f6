"""TLS: contexts made from PEM files, and made anew when the files change. Nothing here opens a
socket.

A listener reads `context` at each connection, so that what a new certificate changes is new
connections; those that are open keep theirs. TLS 1.2 is the least.
"""

import hashlib
import logging
import ssl
import threading
from pathlib import Path
from typing import NamedTuple

from clipper.credentials.credential_file import stamp_of
from clipper.errors import ConfigError
from clipper.settings.http import TlsFiles

_log = logging.getLogger(__name__)
_PEM_START, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


class Pem(NamedTuple):
    """Content of the files when they were last valid."""

    cert: bytes
    key: bytes
    client_ca: bytes


class Certificate:
    """A listener's own. Threads: any.

    context: for new connections.  pem: what it was made of.  ends_s: when the certificate does, in
    seconds since the epoch; 0 when that is unknown.  where: the section and beginning of the
    settings' names, as `http.tls`.
    """

    def __init__(self, files: TlsFiles, where: str = "http.tls") -> None:
        """Read the files. Raises ConfigError for files that cannot be read, or do not belong
        together."""
        self.files, self._where = files, where
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self.context, self.pem, self.ends_s = self._made()

    def refresh(self) -> bool:
        """Reload changed files; return whether there was a valid change.

        Invalid files are logged, and the previous content stays. Reads files: do not call it on
        an event loop.
        """
        with self._lock:
            stamps = self._stamps()
            if stamps == self._seen:
                return False
            self._seen = stamps
            try:
                self.context, self.pem, self.ends_s = self._made()
            except ConfigError as error:
                _log.warning("the certificate that was loaded before stays in use: %s", error)
                return False
            _log.info("%s_cert: %s is in use from now on", self._where, self.files.cert)
            return True

    def _stamps(self) -> list[tuple[int, ...]]:
        return [stamp_of(path) for path in self.files]

    def _made(self) -> tuple[ssl.SSLContext, Pem, int]:
        pem = Pem(
            *(
                self._read(*each)
                for each in zip(("cert", "key", "client_ca"), self.files, strict=True)
            )
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.set_alpn_protocols(["h2", "http/1.1"])
        try:
            context.load_cert_chain(self.files.cert, self.files.key, password=self._no_password)
        except (ssl.SSLError, OSError) as error:
            why = (
                f"{self._where}_cert = {self.files.cert!r} and {self._where}_key ="
                f" {self.files.key!r} do not go together"
            )
            hint = "Both are PEM files; the key is that of the first certificate."
            raise ConfigError(f"{why}: {_reason(error)}.", hint=hint) from None
        if self.files.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(cadata=pem.client_ca.decode("ascii", "replace"))
            except (ssl.SSLError, ValueError) as error:
                why = (
                    f"{self._where}_client_ca = {self.files.client_ca!r} holds no certificates:"
                    f" {_reason(error)}."
                )
                raise ConfigError(
                    why, hint="It is a PEM file of who signs the certificates of clients."
                ) from None
        return context, pem, ends_s(self.files.cert, self.files.key)

    def _read(self, key: str, path: str) -> bytes:
        if not path:
            return b""
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{self._where}_{key} = {path!r} cannot be read: {error.strerror}."
            ) from None

    def _no_password(self) -> str:
        hint = f"Write it without: openssl pkey -in {self.files.key} -out plain.key"
        raise ConfigError(
            f"{self._where}_key = {self.files.key!r} is encrypted, and a password cannot be given.",
            hint=hint,
        )


def _reason(error: Exception) -> str:
    return (getattr(error, "reason", "") or str(error)).lower().replace("_", " ")


def ends_s(cert: str, key: str) -> int:
    """Return the expiry of the first certificate of a file, in seconds since the epoch; 0 when it
    has expired or is unknown.

    It is found by a handshake with oneself, since `ssl` has no public function that reads an
    unverified certificate.
    """
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname = False
    theirs.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        ours.load_cert_chain(cert, key, password="")
        theirs.load_verify_locations(cadata=first_of(Path(cert).read_text()))
        sides = theirs.wrap_bio(back, there), ours.wrap_bio(there, back, server_side=True)
        for side in (*sides, *sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
        found = sides[0].getpeercert()
    except (ssl.SSLError, OSError, ValueError):
        return 0
    return int(ssl.cert_time_to_seconds(str(found["notAfter"]))) if found else 0


def first_of(pem: str) -> str:
    """Return the first certificate of a chain. Raises ValueError when there is none."""
    start = pem.index(_PEM_START)
    return pem[start : pem.index(_END, start) + len(_END)]


def fingerprint_of(pem: str) -> str:
    """Return the SHA-256 of the first certificate, hexadecimal: of its bytes as a peer sends
    them."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first_of(pem))).hexdigest()


def client_context(
    ca: str = "", cert: str = "", key: str = "", *, pinned: bool = False
) -> ssl.SSLContext:
    """Return a TLS context for clients.

    ca: PEM file of the certificate authority; empty: those that this host trusts. cert, key: the
    client's own, where servers require it. pinned: the caller compares fingerprints; neither
    name nor issuer is checked. Raises ConfigError for an invalid file.
    """
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"ca={ca!r} holds no certificates: {_reason(error)}.", hint="It is a PEM file."
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if pinned:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert:
        try:
            context.load_cert_chain(cert, key or None)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"cert={cert!r} and key={key!r} do not go together: {_reason(error)}."
            ) from None
    return context
