"""The address of a gRPC server: its listening socket, its connections and their time limits."""

import asyncio
import email.utils
import functools
import socket
import time
from typing import NoReturn

from clipper.clock import wall_time_us
from clipper.frontend.grpc.call_stream import CallServer
from clipper.frontend.http.connection import HttpConnection, HttpService
from clipper.frontend.http.messages import HttpError, HttpRequest
from clipper.frontend.http.tls import TlsListener
from clipper.metrics import TlsCounts
from clipper.serving.query.future_watcher import FutureWatcher
from clipper.settings.http import HttpSettings
from clipper.tls import Certificate

_CHECK_S_MAX = 0.5
GRACE_S = 1.0  # time to send the last replies after every query has ended


class CallListener:
    """Connections of gRPC. Threads: the event loop's.

    settings: those of its connections, in the words of HTTP.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        calls: CallServer,
        settings: HttpSettings,
        watcher: FutureWatcher,
    ) -> None:
        self._loop, self._calls = loop, calls
        self._service = HttpService(
            settings, _refuse_http, watcher, _refuse_http, bodies=calls.memory, calls=calls
        )
        self._listener: asyncio.AbstractServer | TlsListener | None = None
        self._is_draining = False

    async def listen(
        self, listener: socket.socket, secured: tuple[Certificate, TlsCounts] | None
    ) -> None:
        """Accept connections, over TLS if there is a certificate."""
        self._check()
        if secured is not None:
            self._listener = TlsListener(self._loop, listener, self._service, *secured)
            return
        self._listener = await self._loop.create_server(
            functools.partial(HttpConnection, self._service),
            sock=listener,
            backlog=self._service.settings.backlog,
        )

    def _check(self) -> None:
        """Check the time limits of all connections, again and again."""
        settings = self._service.settings
        each_s = min(_CHECK_S_MAX, settings.header_s / 4, settings.idle_s / 4)
        self._loop.call_later(each_s, self._check)  # first: an error below is not the last look
        date = email.utils.formatdate(wall_time_us() / 1e6, usegmt=True).encode()
        self._service.check(self._loop.time(), date)

    def drain(self) -> None:
        """Accept no new connections and calls; let the open ones finish. Idempotent."""
        if not self._is_draining:
            self._is_draining = True
            self._calls.tasks.spawn(self._end_listener())
            self._service.drain()

    async def _end_listener(self) -> None:
        if isinstance(self._listener, TlsListener):
            await self._listener.close()
        elif self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """Let open calls finish for a moment, then close all connections."""
        self.drain()
        until_s = time.monotonic() + GRACE_S
        while self._is_busy() and time.monotonic() < until_s:
            await asyncio.sleep(0.005)
        for connection in tuple(self._service.connections):
            connection.abort()
        await asyncio.sleep(0)
        await self._calls.tasks.cancel()
        await self._end_listener()

    def _is_busy(self) -> bool:
        """Return whether calls are open, or answers on their way."""
        return any(one.is_busy for one in self._service.connections)


def _refuse_http(request: HttpRequest, *_: object) -> NoReturn:
    """Refuse a request that is no call."""
    raise HttpError(
        415,
        "this address speaks gRPC, and the request is no call.",
        "Calls are POST over HTTP/2 with Content-Type: application/grpc; HTTP has http.address.",
    )
