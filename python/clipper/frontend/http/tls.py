"""TLS for HttpConnection: a transport to the connection, a protocol to the event loop.

The event loop's own TLS would hide what must be visible here: a handshake has a time limit
(`http.header_s`) and counts as a connection (`http.connections_max`) before it is complete, a
client that sends plain HTTP gets a readable error, and each new connection uses the current
certificate. OpenSSL works on memory buffers, as it does in the event loop.
"""

import asyncio
import contextlib
import logging
import ssl

from clipper.frontend.http.connection import HttpConnection, HttpService
from clipper.frontend.http.messages import HttpError, head_of, problem
from clipper.metrics import TlsCounts
from clipper.tls import Certificate

_log = logging.getLogger(__name__)
_CHUNK = 64 << 10
_LINGER_S = 2.0


class TlsListener:
    """The shared state of the TLS connections of one listener. Threads: the event loop's."""

    def __init__(self, service: HttpService, certificate: Certificate, counts: TlsCounts) -> None:
        self.service, self.certificate, self.counts = service, certificate, counts
        self.waiting: set[TlsTransport] = set()  # handshakes in progress or rejected

    def __call__(self) -> "TlsTransport":
        return TlsTransport(self)

    def check(self, now_s: float) -> None:
        """Check the time limits of handshakes."""
        for each in tuple(self.waiting):
            each.check(now_s)

    def close(self) -> None:
        """Abort the handshakes in progress."""
        for each in tuple(self.waiting):
            each.abort()


class TlsTransport(asyncio.Protocol, asyncio.Transport):
    """The TLS layer of one client. Threads: the event loop's."""

    def __init__(self, listener: TlsListener) -> None:
        asyncio.Transport.__init__(self)
        self._listener = listener
        self._wire: asyncio.Transport
        self._inner: HttpConnection | None = None
        self._closing = self._deaf = False
        self._is_first = True
        self._since_s = listener.service.now_s
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = listener.certificate.context.wrap_bio(
            self._incoming, self._outgoing, server_side=True
        )

    # -- the wire

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of TCP there is no other
        """Start the handshake; abort it if there are too many connections."""
        self._wire = transport
        listener = self._listener
        listener.waiting.add(self)
        if (
            len(listener.waiting) + len(listener.service.connections)
            > listener.service.settings.connections_max
        ):
            self._end("full")
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Count an unfinished handshake, and tell the HTTP connection."""
        if self in self._listener.waiting:
            if not self._deaf:
                self._end("gone")
            self._listener.waiting.discard(self)
        if self._inner is not None:
            self._inner.connection_lost(error)

    def eof_received(self) -> bool:
        """Close the connection. A close_notify is not required, because HTTP marks the end of
        its messages."""
        if self._inner is not None:
            return self._inner.eof_received()
        return False

    def pause_writing(self) -> None:
        """Pass it on to the HTTP connection."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on to the HTTP connection."""
        if self._inner is not None:
            self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Decrypt received bytes, or continue the handshake."""
        if self._deaf:
            return
        is_plain, self._is_first = (
            self._is_first and data[:1].isalpha(),
            False,
        )  # a TLS connection starts with the byte 0x16
        if is_plain:
            self._answer_in_plain_http()
            return
        self._incoming.write(data)
        if self._inner is not None:
            self._read(self._inner)
        else:
            self._shake()

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            _log.debug("a TLS handshake failed: %s", error)
            self._end("failed")
            self._flush()  # the alert with the reason
            self._wire.close()
            return
        self._flush()
        self._listener.counts.count("ok")
        self._listener.waiting.discard(self)
        self._inner = inner = HttpConnection(self._listener.service)
        inner.connection_made(self)
        self._read(inner)

    def _read(self, inner: HttpConnection) -> None:
        try:
            while not self._closing:
                data = self._tls.read(_CHUNK)
                if not data:
                    inner.eof_received()
                    self.close()
                    return
                inner.data_received(data)
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            _log.debug("a TLS connection broke: %s", error)
            self.abort()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._wire.is_closing():
            self._wire.write(self._outgoing.read())

    def _end(self, outcome: str) -> None:
        """End the handshake with this outcome, and ignore further bytes."""
        self._deaf = self._closing = True
        self._listener.counts.count(outcome)

    def _answer_in_plain_http(self) -> None:
        error = HttpError(
            400,
            "this address speaks TLS, and the request came without.",
            "Write https:// instead of http://.",
        )
        response = problem(error, b"-")
        self._wire.write(head_of(response, b"-", self._listener.service.date, True) + response.body)
        self._end("plain")
        self._since_s = self._listener.service.now_s
        # closed later: data that still arrives would make the kernel discard the response
        self._wire.write_eof()

    def check(self, now_s: float) -> None:
        """Check the time limit of an unfinished or a rejected handshake."""
        if self._deaf:
            if now_s - self._since_s > _LINGER_S:
                self._wire.abort()
        elif now_s - self._since_s > self._listener.service.settings.header_s:
            self._end("slow")
            self._wire.abort()

    # -- the transport of a Connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        self._flush()

    def close(self) -> None:
        """Send close_notify and close the connection."""
        if not self._closing:
            self._farewell()
            self._wire.close()

    def write_eof(self) -> None:
        """Send close_notify and shut down the sending side. What still arrives is discarded."""
        if not self._closing:
            self._farewell()
            self._deaf = True  # further bytes are discarded
            self._wire.write_eof()

    def _farewell(self) -> None:
        self._closing = True
        with contextlib.suppress(ssl.SSLError):  # the client's close_notify is not waited for
            self._tls.unwrap()
        self._flush()

    def abort(self) -> None:
        """Close the connection at once."""
        self._closing = True
        self._wire.abort()

    def is_closing(self) -> bool:
        """Return whether the transport is closing."""
        return self._closing or self._wire.is_closing()

    def can_write_eof(self) -> bool:
        """Return True."""
        return True

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Return information on the TCP transport below."""
        return self._wire.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """Return how many encrypted bytes are not sent."""
        return self._wire.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Stop reading from the TCP transport."""
        self._wire.pause_reading()

    def resume_reading(self) -> None:
        """Read from the TCP transport again."""
        self._wire.resume_reading()
