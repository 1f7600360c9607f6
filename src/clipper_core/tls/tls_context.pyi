import ssl
from collections.abc import Iterable

HANDSHAKES: tuple[str, ...]
SYSTEM_LIBRARIES: tuple[str, ...]

def look_up(paths: Iterable[str | None]) -> str:
    """Look up OpenSSL's functions in the first of the libraries that has all. None as a path is the
    program itself. Return why no library can be used; empty: one can."""

def version() -> str:
    """Return the text of OpenSSL's version that is in use. Raises OSError if none can be used."""

class TlsContext:
    """A certificate chain, its key, and settings as of a context of `ssl`. Threads: any."""

    def __init__(self, cert: bytes, key: bytes, client_ca: bytes, like: ssl.SSLContext) -> None: ...
