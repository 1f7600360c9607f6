"""HTTP listeners: one thread with an event loop for all of them, and worker threads for blocking
calls."""

import asyncio
import contextlib
import email.utils
import errno
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future as WorkFuture

from clipper.clock import wall_time_us
from clipper.component import Health, Loop, Pool, fast_event_loop
from clipper.errors import AddressInUse, ConfigError, Overloaded
from clipper.frontend.access_log import AccessLog
from clipper.frontend.http.body_memory import BodyMemory
from clipper.frontend.http.connection import HttpConnection, HttpService
from clipper.frontend.http.exchange import Exchange
from clipper.frontend.http.fast_path import FastPath
from clipper.frontend.http.messages import HandlerResult, HttpRequest, WorkerPoolName, WorkerTask
from clipper.frontend.http.tls import TlsListener
from clipper.frontend.tracing.exporter import SpanExporter
from clipper.host_port import join_host_port
from clipper.metrics import HttpCounts, TlsCounts
from clipper.serving.models.address import held_by
from clipper.serving.query.future_watcher import FutureWatcher
from clipper.settings.http import HttpSettings, bodies_bytes
from clipper.settings.ports import nearby
from clipper.tls import Certificate

_log = logging.getLogger(__name__)
_WORKERS = 4  # threads per pool
_WAITING_MAX = 64  # maximum of calls that wait in a management pool
_RETRY_S = 1
_CHECK_S_MAX = 0.5
_GRACE_S = 1.0  # time to send the last responses after every query has ended
_STOP_S = 10.0  # for calls in the pools, and for the event loop
Handle = Callable[[HttpRequest], HandlerResult]
Admit = Callable[[HttpRequest], None]


class HttpListeners:
    """HTTP on a set of addresses. Threads: start, drain and stop from one; the others are its own.

    each: (the key of [http] that holds the address, the address, its handler). counts: in the same
    order. certificates: of the listeners with TLS, by that key, with their counters. hot: the fast
    path of the query address. admits: by that key, raises for a request that may not be made; see
    HttpService. own_user: keys of the listeners that only processes of this server's
    user, and of root, may use. may_move: keys of the listeners that take the next free port if
    theirs is taken. access_log: logs the requests.
    """

    def __init__(
        self,
        settings: HttpSettings,
        each: Sequence[tuple[str, str, Handle]],
        make_watcher: Callable[..., FutureWatcher],
        counts: Sequence[HttpCounts],
        certificates: Mapping[str, tuple[Certificate, TlsCounts]] | None = None,
        exporter: SpanExporter | None = None,
        hot: FastPath | None = None,
        own_user: Collection[str] = (),
        admits: Mapping[str, Admit] | None = None,
        may_move: Collection[str] = (),
        access_log: AccessLog | None = None,
    ) -> None:
        self._access_log = access_log
        self._admits = [(admits or {}).get(key) for key, _, _ in each]
        self._bodies = BodyMemory(bodies_bytes(settings))
        self._own_user = [key in own_user for key, _, _ in each]
        self._settings, self._exporter, self._hot = settings, exporter, hot
        self._make_watcher, self._counts = make_watcher, counts
        self._sockets = _bind_all(each, settings.backlog, may_move)
        self.addresses = [_address_of(listener) for listener, _ in self._sockets]
        self._loop = Loop(
            "clipper-http", self._listen, self._close, make=fast_event_loop, vital=True
        )
        self._pools = {
            pool: Pool(f"clipper-http-{pool.value}", _WORKERS) for pool in WorkerPoolName
        }
        # calls per pool that are not answered; used by the loop only
        self._waiting = dict.fromkeys(WorkerPoolName, 0)
        self._services: list[HttpService] = []
        self._certificates = [(certificates or {}).get(key) for key, _, _ in each]
        self._tls_listeners: list[TlsListener] = []
        self._closing: list[asyncio.Task[None]] = []
        self._servers: list[asyncio.AbstractServer] = []
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
        accepting = [one for each in tuple(self._tls_listeners) for one in each.health()]
        hot = self._hot.health() if self._hot is not None else []
        return [self._loop.health(), *pools, *accepting, *hot]

    async def _close(self) -> None:
        until_s = time.monotonic() + _GRACE_S
        while self.is_busy and time.monotonic() < until_s:
            await asyncio.sleep(0.005)
        if self._watcher is not None:
            self._watcher.close()
        for tls_listener in self._tls_listeners:
            await tls_listener.close()
        if self._hot is not None:
            self._hot.close()
        for service in self._services:
            for connection in tuple(service.connections):
                connection.abort()
        await asyncio.sleep(0)

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watcher = watcher = self._make_watcher(loop)
        each = zip(
            self._sockets,
            self._counts,
            self._certificates,
            self._own_user,
            self._admits,
            strict=True,
        )
        for (listener, handle), counts, certificate, own_user, admit in each:
            service = HttpService(
                self._settings,
                handle,
                watcher,
                self._run_on_worker,
                counts,
                self._exporter,
                own_user,
                admit=admit,
                bodies=self._bodies,
                access_log=self._access_log,
            )
            self._services.append(service)
            if self._hot is not None and counts is self._hot.counts:
                self._hot.open(loop, service, listener)
                continue
            if certificate is not None:
                tls_listener = TlsListener(loop, listener, service, *certificate)
                self._tls_listeners.append(tls_listener)
                continue
            server = await loop.create_server(
                functools.partial(HttpConnection, service),
                sock=listener,
                backlog=self._settings.backlog,
            )
            self._servers.append(server)
        self._check(loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        each_s = min(_CHECK_S_MAX, self._settings.header_s / 4, self._settings.idle_s / 4)
        loop.call_later(each_s, self._check, loop)  # first: an error below is not the last look
        now_s, date = (
            loop.time(),
            email.utils.formatdate(wall_time_us() / 1e6, usegmt=True).encode(),
        )
        for service in self._services:
            service.check(now_s, date)
        if self._hot is not None:
            self._hot.check()

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
    def is_busy(self) -> bool:
        """True while connections are open."""
        return any(service.connections for service in self._services) or (
            self._hot is not None and self._hot.is_busy
        )

    def _drain(self, drained: threading.Event) -> None:
        for server in self._servers:
            server.close()
        if self._hot is not None:
            self._hot.drain()
        for service in self._services:
            service.drain()
        loop = asyncio.get_running_loop()
        self._closing = [loop.create_task(each.close()) for each in self._tls_listeners]
        drained.set()

    def stop(self) -> None:
        """Send the remaining responses, then stop the threads. Every query has ended before.

        Idempotent; also after a start that failed.
        """
        self.drain()
        for pool in self._pools.values():
            pool.shutdown()
        self._loop.end(_STOP_S)
        if self._hot is not None:
            self._hot.stop()
        for listener, _ in self._sockets:
            listener.close()


def _bind_all(
    each: Sequence[tuple[str, str, Handle]], backlog: int, may_move: Collection[str]
) -> list[tuple[socket.socket, Handle]]:
    with contextlib.ExitStack() as bound:
        found = []
        for key, address, handle in each:
            choices = nearby(address) if key in may_move else (address,)
            found.append((bound.enter_context(bind_first(f"http.{key}", choices, backlog)), handle))
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
