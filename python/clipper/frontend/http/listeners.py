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
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future as WorkFuture
from concurrent.futures import ThreadPoolExecutor

import uvloop

from clipper.clock import wall_time_us
from clipper.errors import AddressInUse, ConfigError, Overloaded
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
from clipper.settings.http import HttpSettings
from clipper.tls import Certificate

_log = logging.getLogger(__name__)
_WORKERS = 4  # threads per pool
_WAITING_MAX = 64  # maximum of calls that wait in a management pool
_RETRY_S = 1
_CHECK_S_MAX = 0.5
_GRACE_S = 1.0  # time to send the last responses after every query has ended
Handle = Callable[[HttpRequest], HandlerResult]


class HttpListeners:
    """HTTP on a set of addresses. Threads: start, drain and stop from one; the others are its own.

    each: (the key of [http] that holds the address, the address, its handler). counts: in the same
    order. certificates: of the listeners with TLS, by that key, with their counters. hot: the fast
    path of the query address. own_user: keys of the listeners that only processes of this server's
    user, and of root, may use.
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
    ) -> None:
        self._own_user = [key in own_user for key, _, _ in each]
        self._settings, self._exporter, self._hot = settings, exporter, hot
        self._make_watcher, self._counts = make_watcher, counts
        self._sockets = _bind_all(each, settings.backlog)
        self.addresses = [_address_of(listener) for listener, _ in self._sockets]
        self._loop = uvloop.new_event_loop()
        self._pools = {
            pool: ThreadPoolExecutor(_WORKERS, f"clipper-http-{pool.value}")
            for pool in WorkerPoolName
        }
        self._waiting = dict.fromkeys(
            WorkerPoolName, 0
        )  # calls per pool that are not answered; used by the loop only
        self._services: list[HttpService] = []
        self._certificates = [(certificates or {}).get(key) for key, _, _ in each]
        self._tls_listeners: list[TlsListener] = []
        self._closing: list[asyncio.Task[None]] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._thread = threading.Thread(target=self._run, name="clipper-http", daemon=True)
        self._serving = threading.Event()

    def start(self) -> None:
        """Start the thread, and return when all addresses accept connections."""
        self._thread.start()
        self._serving.wait()

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        watcher = self._make_watcher(loop)
        try:
            loop.run_until_complete(self._listen(watcher))
            self._check()
            self._serving.set()
            loop.run_forever()
        finally:
            self._serving.set()
            watcher.close()
            for tls_listener in self._tls_listeners:
                loop.run_until_complete(tls_listener.close())
            if self._hot is not None:
                self._hot.close()
            for service in self._services:
                for connection in tuple(service.connections):
                    connection.abort()
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _listen(self, watcher: FutureWatcher) -> None:
        each = zip(self._sockets, self._counts, self._certificates, self._own_user, strict=True)
        for (listener, handle), counts, certificate, own_user in each:
            service = HttpService(
                self._settings,
                handle,
                watcher,
                self._run_on_worker,
                counts,
                self._exporter,
                own_user,
            )
            self._services.append(service)
            if self._hot is not None and counts is self._hot.counts:
                self._hot.open(self._loop, service, listener)
                continue
            if certificate is not None:
                tls_listener = TlsListener(self._loop, listener, service, *certificate)
                self._tls_listeners.append(tls_listener)
                continue
            server = await self._loop.create_server(
                functools.partial(HttpConnection, service),
                sock=listener,
                backlog=self._settings.backlog,
            )
            self._servers.append(server)

    def _check(self) -> None:
        now_s, date = (
            self._loop.time(),
            email.utils.formatdate(wall_time_us() / 1e6, usegmt=True).encode(),
        )
        for service in self._services:
            service.check(now_s, date)
        if self._hot is not None:
            self._hot.check()
        each_s = min(_CHECK_S_MAX, self._settings.header_s / 4, self._settings.idle_s / 4)
        self._loop.call_later(each_s, self._check)

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
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._settle, pool, exchange, done)

        try:
            self._pools[pool].submit(work.run).add_done_callback(settle)
        except RuntimeError as error:  # the threads have ended: the server is closing
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
        if self._thread.is_alive():
            drained = threading.Event()
            self._loop.call_soon_threadsafe(self._drain, drained)
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
        self._closing = [self._loop.create_task(each.close()) for each in self._tls_listeners]
        drained.set()

    def stop(self) -> None:
        """Send the remaining responses, then stop the threads. Every query has ended before."""
        self.drain()
        for pool in self._pools.values():
            pool.shutdown(wait=True)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._leave, self._loop.time() + _GRACE_S)
            self._thread.join()
        else:
            self._loop.close()
        if self._hot is not None:
            self._hot.stop()
        for listener, _ in self._sockets:
            listener.close()

    def _leave(self, until_s: float) -> None:
        if self._loop.time() < until_s and self.is_busy:
            self._loop.call_later(0.005, self._leave, until_s)
        else:
            self._loop.stop()


def _bind_all(
    each: Sequence[tuple[str, str, Handle]], backlog: int
) -> list[tuple[socket.socket, Handle]]:
    with contextlib.ExitStack() as bound:
        found = [
            (bound.enter_context(_bind(key, address, backlog)), handle)
            for key, address, handle in each
        ]
        bound.pop_all()
        return found


def _bind(key: str, address: str, backlog: int) -> socket.socket:
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
        hint = f"Stop what listens there, or choose another http.{key}; port 0 takes any free one."
        kind = ConfigError if isinstance(error, socket.gaierror) else AddressInUse
        why = (
            f"it is taken{held_by(address)}"
            if error.errno == errno.EADDRINUSE
            else error.strerror or error
        )
        raise kind(f"cannot listen on http.{key} = {address!r}: {why}.", hint=hint) from None
    return listener


def _address_of(listener: socket.socket) -> str:
    return join_host_port(*listener.getsockname()[:2])
