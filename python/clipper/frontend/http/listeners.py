"""The addresses of HTTP and gRPC: one thread with an event loop for all of them, and worker threads
for blocking calls."""

import asyncio
import contextlib
import email.utils
import errno
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future as WorkFuture
from typing import NamedTuple, NoReturn, Protocol

from clipper.clock import wall_time_us
from clipper.component import Health, Loop, Pool, Tasks, fast_event_loop
from clipper.errors import AddressInUse, ConfigError, Overloaded
from clipper.frontend.access_log import AccessLog
from clipper.frontend.http.body_memory import BodyMemory
from clipper.frontend.http.connection import HttpConnection, HttpService
from clipper.frontend.http.exchange import Exchange
from clipper.frontend.http.fast_path import FastPath
from clipper.frontend.http.http2 import GrpcCalls
from clipper.frontend.http.messages import (
    HandlerResult,
    HttpError,
    HttpRequest,
    WorkerPoolName,
    WorkerTask,
)
from clipper.frontend.http.tls import TlsListener
from clipper.frontend.tracing.exporter import SpanExporter
from clipper.host_port import join_host_port
from clipper.metrics import HttpCounts, TlsCounts
from clipper.serving.models.address import held_by
from clipper.serving.query.future_watcher import FutureWatcher
from clipper.settings.http import HttpSettings, bodies_bytes
from clipper.settings.ports import nearby
from clipper.tls import Certificate

_WORKERS = 4  # threads per pool
_WAITING_MAX = 64  # maximum of calls that wait in a management pool
_RETRY_S = 1
_CHECK_S_MAX = 0.5
_GRACE_S = 1.0  # time to send the last responses after every query has ended
_STOP_S = 10.0  # for calls in the pools, and for the event loop
Handle = Callable[[HttpRequest], HandlerResult]
Admit = Callable[[HttpRequest], None]


class Listener:
    """Accepts the connections of one address. Threads: the event loop's.

    service: what its connections share. listener: the socket, which listens.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, service: HttpService, listener: socket.socket
    ) -> None:
        self._loop = loop
        self._service = service
        self._socket = listener
        self._server: asyncio.AbstractServer | None = None
        self._tls: TlsListener | None = None
        self._hot: FastPath | None = None
        self._ending = Tasks("listeners")

    async def open(
        self, secured: tuple[Certificate, TlsCounts] | None = None, hot: FastPath | None = None
    ) -> None:
        """Accept connections: over TLS if there is a certificate, by the fast path if there is
        one."""
        self._check()
        if hot is not None:
            self._hot = hot
            hot.open(self._loop, self._service, self._socket)
        elif secured is not None:
            self._tls = TlsListener(self._loop, self._socket, self._service, *secured)
        else:
            self._server = await self._loop.create_server(
                functools.partial(HttpConnection, self._service),
                sock=self._socket,
                backlog=self._service.settings.backlog,
            )

    def _check(self) -> None:
        """Check the time limits of all connections, again and again."""
        settings = self._service.settings
        each_s = min(_CHECK_S_MAX, settings.header_s / 4, settings.idle_s / 4)
        self._loop.call_later(each_s, self._check)  # first: an error below is not the last look
        date = email.utils.formatdate(wall_time_us() / 1e6, usegmt=True).encode()
        self._service.check(self._loop.time(), date)
        if self._hot is not None:
            self._hot.check()

    def health(self) -> list[Health]:
        """Return the state of the task that accepts, or of the threads of the fast path."""
        if self._hot is not None:
            return self._hot.health()
        return [] if self._tls is None else self._tls.health()

    @property
    def is_open(self) -> bool:
        """True while connections are open, or answers on their way."""
        if self._hot is not None and self._hot.is_busy:
            return True
        return any(one.is_open for one in self._service.connections)

    async def ended(self, until_s: float) -> None:
        """Wait until no connection is open any more. until_s: of the monotonic clock, the end of
        the wait."""
        while self.is_open and time.monotonic() < until_s:
            await asyncio.sleep(0.005)

    def drain(self) -> None:
        """Accept no new connections; close each one after its open responses. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._hot is not None:
            self._hot.drain()
        if self._service.draining:
            return
        if self._tls is not None:
            self._ending.spawn(self._tls.close())
        self._service.drain()

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self.drain()
        if self._tls is not None:
            await self._tls.close()
        await self._ending.cancel()
        if self._hot is not None:
            self._hot.close()
        for connection in tuple(self._service.connections):
            connection.abort()
        await asyncio.sleep(0)

    def stop(self) -> None:
        """End what runs outside the event loop, which has ended. Idempotent. Threads: any."""
        if self._hot is not None:
            self._hot.stop()
        self._socket.close()


class CallSource(Protocol):
    """The source of the server of gRPC's calls. Threads: the event loop's."""

    def open(self, watcher: FutureWatcher, bodies: BodyMemory) -> GrpcCalls:
        """Return the server of the calls. watcher: of its queries. bodies: the memory for
        messages."""

    def drain(self) -> None:
        """Accept no new calls; tell streams that have no end of their own."""

    async def close(self) -> None:
        """End the calls that are open."""


class ListenAddress(NamedTuple):
    """An address to listen on, and what is served there.

    setting: its name, as `http.address`. wanted: HOST:PORT. admit: see HttpService. secured: its
    certificate and the counters of its handshakes, with TLS. hot: its fast path. own_user: only
    processes of this server's user, and of root, may use it. may_move: it takes the next free port
    if its own is taken. has_calls: it serves calls of gRPC too.
    """

    setting: str
    wanted: str
    settings: HttpSettings
    handle: Handle
    counts: HttpCounts
    admit: Admit | None = None
    secured: tuple[Certificate, TlsCounts] | None = None
    hot: FastPath | None = None
    own_user: bool = False
    may_move: bool = False
    has_calls: bool = False


class HttpListeners:
    """HTTP and gRPC on a set of addresses. Threads: start, drain and stop from one; the others are
    its own.

    settings: of HTTP. calls: answers calls of gRPC, on the addresses that have them. access_log:
    logs the requests.
    """

    def __init__(
        self,
        settings: HttpSettings,
        each: Sequence[ListenAddress],
        make_watcher: Callable[[asyncio.AbstractEventLoop], FutureWatcher],
        calls: CallSource | None = None,
        exporter: SpanExporter | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        self._each, self._calls = each, calls
        self._access_log, self._exporter = access_log, exporter
        self._bodies = BodyMemory(bodies_bytes(settings))
        self._make_watcher = make_watcher
        self._sockets = _bind_all(each)
        # of each setting: HOST:PORT
        self.addresses = {
            address.setting: _address_of(listener)
            for address, listener in zip(each, self._sockets, strict=True)
        }
        self._loop = Loop(
            "clipper-http", self._listen, self._close, make=fast_event_loop, vital=True
        )
        self._pools = {
            pool: Pool(f"clipper-http-{pool.value}", _WORKERS) for pool in WorkerPoolName
        }
        # calls per pool that are not answered; used by the loop only
        self._waiting = dict.fromkeys(WorkerPoolName, 0)
        self._listeners: list[Listener] = []
        self._watcher: FutureWatcher | None = None

    def start(self) -> None:
        """Start the threads, and return when all addresses accept connections.

        Raises NotStarted, OSError, or what else kept an address from being served.
        """
        for pool in self._pools.values():
            pool.start()
        self._loop.start()

    def health(self) -> list[Health]:
        """Return the state of the event loop and of the threads."""
        pools = [pool.health() for pool in self._pools.values()]
        accepting = [one for each in tuple(self._listeners) for one in each.health()]
        return [self._loop.health(), *pools, *accepting]

    async def _close(self) -> None:
        until_s = time.monotonic() + _GRACE_S
        for listener in self._listeners:
            await listener.ended(until_s)
        if self._watcher is not None:
            self._watcher.close()
        for listener in self._listeners:
            await listener.close()
        if self._calls is not None:
            await self._calls.close()

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watcher = watcher = self._make_watcher(loop)
        calls = None if self._calls is None else self._calls.open(watcher, self._bodies)
        for address, listening in zip(self._each, self._sockets, strict=True):
            service = HttpService(
                address.settings,
                address.handle,
                watcher,
                self._run_on_worker,
                address.counts,
                self._exporter,
                address.own_user,
                admit=address.admit,
                bodies=self._bodies,
                access_log=self._access_log,
                calls=calls if address.has_calls else None,
            )
            listener = Listener(loop, service, listening)
            self._listeners.append(listener)
            await listener.open(address.secured, address.hot)

    # -- worker threads

    def _run_on_worker(self, work: WorkerTask, exchange: Exchange) -> None:
        pool = work.pool
        if pool is not WorkerPoolName.QUERIES and self._waiting[pool] >= _WORKERS + _WAITING_MAX:
            exchange.fail(
                Overloaded(
                    f"{_WAITING_MAX} calls of management wait already.", retry_after_s=_RETRY_S
                )
            )
            return
        self._waiting[pool] += 1

        def settle(done: "WorkFuture[HandlerResult]") -> None:
            self._loop.call(self._settle, pool, exchange, done)

        try:
            self._pools[pool].submit(work.run).add_done_callback(settle)
        except RuntimeError as error:  # the threads have ended: the server is closing
            self._waiting[pool] -= 1
            exchange.fail(error)

    def _settle(
        self, pool: WorkerPoolName, exchange: Exchange, done: "WorkFuture[HandlerResult]"
    ) -> None:
        self._waiting[pool] -= 1
        error = done.exception()
        if isinstance(error, Exception):
            exchange.fail(error)
        else:
            exchange.settle(done.result())

    # -- the end

    def drain(self) -> None:
        """Accept no new connections; close idle ones now, the others after their responses."""
        drained = threading.Event()
        if self._loop.is_running and self._loop.call(self._drain, drained):
            drained.wait(_GRACE_S)  # else a query could still arrive unseen

    @property
    def hot(self) -> FastPath | None:
        """The fast path of the address of queries; None if it has none."""
        return next((address.hot for address in self._each if address.hot is not None), None)

    @property
    def is_busy(self) -> bool:
        """True while connections are open."""
        return any(listener.is_open for listener in self._listeners)

    def _drain(self, drained: threading.Event) -> None:
        if self._calls is not None:
            self._calls.drain()
        for listener in self._listeners:
            listener.drain()
        drained.set()

    def stop(self) -> None:
        """Send the remaining responses, then stop the threads. Every query has ended before.

        Idempotent; also after a start that failed.
        """
        self.drain()
        for pool in self._pools.values():
            pool.shutdown()
        self._loop.end(_STOP_S)
        for listener in self._listeners:
            listener.stop()
        for listening in self._sockets:
            listening.close()


def _bind_all(each: Sequence[ListenAddress]) -> list[socket.socket]:
    with contextlib.ExitStack() as bound:
        found = []
        for one in each:
            choices = nearby(one.wanted) if one.may_move else (one.wanted,)
            listener = bind_first(one.setting, choices, one.settings.backlog)
            found.append(bound.enter_context(listener))
        bound.pop_all()
        return found


def bind_first(setting: str, choices: Iterable[str], backlog: int) -> socket.socket:
    """Listen on the first address that is free. Raises AddressInUse of the first if none is.

    setting: as for `bind_listener`.
    """
    taken: list[AddressInUse] = []
    for address in choices:
        try:
            return bind_listener(setting, address, backlog)
        except AddressInUse as error:
            taken.append(error)
    raise taken[0]


def bind_listener(setting: str, address: str, backlog: int) -> socket.socket:
    """Listen on an address, `HOST:PORT`, and return the socket.

    setting: its name, as `http.address`, for errors. Raises AddressInUse, and ConfigError for a
    host that is not known.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        hint = f"Stop what listens there, or choose another {setting}; port 0 takes any free one."
        kind = ConfigError if isinstance(error, socket.gaierror) else AddressInUse
        why = (
            f"it is taken{held_by(address)}"
            if error.errno == errno.EADDRINUSE
            else error.strerror or error
        )
        raise kind(f"cannot listen on {setting} = {address!r}: {why}.", hint=hint) from None
    return listener


def _address_of(listener: socket.socket) -> str:
    return join_host_port(*listener.getsockname()[:2])


def refuse_no_call(request: HttpRequest, *_: object) -> NoReturn:
    """Refuse a request of HTTP at an address of gRPC alone. Raises HttpError."""
    raise HttpError(
        415,
        "this address speaks gRPC, and the request is no call.",
        "Calls are POST over HTTP/2 with Content-Type: application/grpc; HTTP has http.address.",
    )
