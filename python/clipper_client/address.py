"""The address of a server: its URL in parts, the head of requests to it, and its TLS."""

import ssl
import urllib.parse
from collections.abc import Sequence
from typing import Final

from clipper_client.calls import Body, Call
from clipper_client.errors import InvalidInput, NoServer
from clipper_client.version import VERSION

_JOINED_BYTES_MAX: Final = 1 << 16  # parts of a request up to this size leave in one piece


class Address:
    """A server's address. Immutable. Threads: any."""

    __slots__ = ("_more", "host", "port", "tls", "url")

    def __init__(
        self, url: str, key: str | None, ca: str | None, cert: tuple[str, str] | None
    ) -> None:
        """Take the URL apart. key, ca, cert: as of Client. Raises InvalidInput."""
        text = url if "://" in url else f"http://{url}"
        split = urllib.parse.urlsplit(text)
        try:
            port = split.port
        except ValueError:
            port = 0
        is_origin = split.path in ("", "/") and not (split.query or split.fragment)
        is_host = bool(split.hostname) and split.username is None and text.isascii()
        if split.scheme not in ("http", "https") or port == 0 or not (is_host and is_origin):
            raise InvalidInput(
                f"url={url!r:.200} is not an address of a server.",
                hint="Write http://HOST:PORT or https://HOST:PORT.",
            )
        self.host = split.hostname or ""
        self.url = f"{split.scheme}://{split.netloc}"
        self.tls = _context(ca, cert) if split.scheme == "https" else None
        self.port = port or (443 if self.tls else 80)
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise InvalidInput(
                "key= is no key: it is a line of printable characters.",
                hint="`clipper key NAME` makes one.",
            )
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._more = (
            f" HTTP/1.1\r\nHost: {split.netloc}\r\nUser-Agent: clipper-client/{VERSION}\r\n"
            f"{authorization}"
        )

    def request(self, call: Call[object], body: Body) -> Sequence[bytes | memoryview]:
        """Return a request in parts; a small one is one part."""
        parts = body.parts
        size = sum(map(len, parts))
        length = "" if call.method == "GET" else f"Content-Length: {size}\r\n"
        head = f"{call.method} {call.path}{self._more}{body.headers}{length}\r\n".encode("latin-1")
        if size < _JOINED_BYTES_MAX:
            return (b"".join((head, *parts)),)
        return (head, *parts)

    def lost(self, why: str, may_be_done: bool) -> NoServer:
        """Return the error for a connection that was not made, or was lost."""
        if may_be_done:
            hint = "It may be done all the same: whoever sends it again may do it twice."
        else:
            host = f"[{self.host}]" if ":" in self.host else self.host
            hint = f"Start a server with: clipper up --http {host}:{self.port}"
        return NoServer(f"no server answers at {self.url}: {why}.", hint=hint)

    def untrusted(self, error: ssl.SSLError) -> NoServer:
        """Return the error for a connection over TLS that was not made."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return NoServer(
                f"the certificate of {self.url} is not trusted: {error.verify_message}.",
                hint="Name who signed it: ca=FILE; and the server as its certificate does.",
            )
        why = (error.reason or str(error)).lower().replace("_", " ")
        return NoServer(
            f"no TLS with {self.url}: {why}.",
            hint="Is it http:// there? If it requires a certificate: cert=(FILE, FILE).",
        )


def _context(ca: str | None, cert: tuple[str, str] | None) -> ssl.SSLContext:
    """Return the TLS settings of a client. Raises InvalidInput for a file that is none."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(
            f"ca={ca!r} holds no certificates: {error}.", hint="Give a PEM file."
        ) from None
    try:
        if cert is not None:
            context.load_cert_chain(*cert)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(
            f"cert={cert!r} is no certificate with its key: {error}.", hint="Give two PEM files."
        ) from None
    return context
