"""TLS by the event loop: handshakes with limits; the connections are those of the event loop.

Where the core can speak TLS (clipper_core.tls), queries come by it, and this is for the others.

A listener looks at the first byte of a client before the event loop's TLS gets the socket, so that
a client that sends plain HTTP gets a readable error. A handshake has a time limit
(`http.header_s`) and counts as a connection (`http.connections_max`) before it is complete. Each
new connection uses the current certificate.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl

from clipper.component import Backoff, Health, Tasks
from clipper.frontend.http.connection import HttpConnection, HttpService
from clipper.frontend.http.messages import HttpError, head_of, problem
from clipper.metrics import TlsCounts
from clipper.tls import Certificate
from clipper_core.tls.tls_context import HANDSHAKES, TlsContext, version

_log = logging.getLogger(__name__)
_LINGER_S = 2.0  # a rejected client is read so long
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_S = 1.0  # without a free descriptor, the next connection is accepted then
_UNSENT_BYTES = 64 << 10  # the event loop's limit for TCP; its own for TLS is higher


class TlsListener:
    """Accepts the TLS connections of one address. Threads: the event loop's.

    waiting: handshakes in progress or rejected.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        service: HttpService,
        certificate: Certificate,
        counts: TlsCounts,
    ) -> None:
        self._loop, self._service = loop, service
        self._certificate, self._counts = certificate, counts
        self.waiting = Tasks("TLS handshakes")
        self._listener = listener
        self._tasks = Tasks("HTTPS")
        self._tasks.keep("clipper-https", self._accept, Backoff(_RETRY_S, _RETRY_S))

    async def close(self) -> None:
        """Accept no more connections, and abort the handshakes in progress. Idempotent."""
        await self._tasks.cancel()
        await self.waiting.cancel()
        self._listener.close()

    def health(self) -> list[Health]:
        """Return the state of the task that accepts."""
        return self._tasks.health()

    async def _accept(self) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("a connection cannot be accepted: %s", error)
                if error.errno in _NO_ROOM:
                    await asyncio.sleep(_RETRY_S)
                continue
            self.waiting.spawn(self._connect(client))

    async def _connect(self, client: socket.socket) -> None:
        """Shake hands with a client, and count how that ends."""
        with contextlib.ExitStack() as undo:
            undo.callback(client.close)
            service = self._service
            connections = len(self.waiting) + len(service.connections)
            if connections > service.settings.connections_max:
                self._counts.count("full")
                return
            until_s = self._loop.time() + service.settings.header_s
            try:
                async with asyncio.timeout_at(until_s):
                    first = await self._first_byte(client)
                if not first:
                    self._counts.count("gone")
                elif first.isalpha():  # a TLS connection starts with the byte 0x16
                    self._counts.count("plain")
                    await tell_to_speak_tls(client, self._service)
                else:
                    await self._shake(client, until_s)
                    undo.pop_all()
            except (TimeoutError, ConnectionAbortedError):
                self._counts.count("slow")
            except ssl.SSLError as error:
                _log.debug("a TLS handshake failed: %s", error)
                self._counts.count("failed")
            except OSError:
                self._counts.count("gone")

    async def _first_byte(self, client: socket.socket) -> bytes:
        """Wait for the first byte, and leave it in the socket; empty: the client has
        disconnected."""
        arrived = asyncio.Event()
        self._loop.add_reader(client, arrived.set)
        try:
            await arrived.wait()
        finally:
            self._loop.remove_reader(client)
        return client.recv(1, socket.MSG_PEEK)

    async def _shake(self, client: socket.socket, until_s: float) -> None:
        service = self._service
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: HttpConnection(service),
            client,
            ssl=self._certificate.context,
            ssl_handshake_timeout=max(0.001, until_s - self._loop.time()),
            ssl_shutdown_timeout=service.settings.idle_s,  # `check` ends what does not go on
        )
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        self._counts.count("ok")


async def tell_to_speak_tls(client: socket.socket, service: HttpService) -> None:
    """Answer a client that speaks without TLS where TLS is needed, and read on for a moment: data
    that still arrives would make the kernel discard the response. Raises OSError."""
    error = HttpError(
        400,
        "this address speaks TLS, and the request came without.",
        "Write https:// instead of http://.",
    )
    response = problem(error, b"-")
    loop = asyncio.get_running_loop()
    client.send(head_of(response, b"-", service.date, True) + response.body)
    client.shutdown(socket.SHUT_WR)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while await loop.sock_recv(client, 1 << 16):
                pass


class SecuredBy:
    """The context of a certificate for the core. Threads: one.

    context: of the certificate's files when they were last valid. Raises OSError if the core cannot
    speak TLS here, or not with this certificate.
    """

    def __init__(self, certificate: Certificate, counts: TlsCounts) -> None:
        self._certificate = certificate
        self._seen = certificate.context
        self.context = self._made()
        self.counters = [counts.counters[outcome] for outcome in HANDSHAKES]

    def _made(self) -> TlsContext:
        certificate = self._certificate
        return TlsContext(*certificate.pem, certificate.context)

    def refresh(self) -> bool:
        """Take over what the certificate has reloaded; return whether there was a change."""
        if self._certificate.context is self._seen:
            return False
        self._seen = self._certificate.context
        try:
            self.context = self._made()
        except OSError as error:
            _log.warning("connections still use the certificate that was loaded before: %s", error)
            return False
        return True


def openssl() -> str:
    """Return the version of the OpenSSL by which the core speaks TLS. Raises OSError if it has
    none, so that Python speaks it."""
    return version()


def secured_by(secured: tuple[Certificate, TlsCounts]) -> SecuredBy | None:
    """Return the certificate for the core; None, and a line in the log, if Python has to speak
    TLS."""
    try:
        return SecuredBy(*secured)
    except OSError as error:
        _log.warning("TLS is spoken by Python, which is slower: %s", error)
        return None
