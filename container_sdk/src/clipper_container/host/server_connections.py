"""Connections of a host to servers: thousands, mostly idle, on one epoll and a few threads
(worker_pool.py).

A thread that gets a connection (EPOLLONESHOT: no other thread gets it meanwhile) reads its frame,
evaluates the batch, replies and arms the connection again. So no batch is handed between threads,
and buffers belong to threads instead of connections. While a slow model is evaluated another thread
waits for events. When a model already evaluates as many batches as it may, its connection is parked
unread and armed later.

Only the thread that handles a connection closes it; other threads call `shutdown`, which wakes that
thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

from clipper_container.backoff import Backoff
from clipper_container.host.server_connection import (
    ConnectionState,
    Gate,
    Inbox,
    ServerConnection,
    done_with,
    needs_resolver,
    relay,
    start_connecting,
)
from clipper_container.host.timers import Timers
from clipper_container.host.worker_pool import WorkerPool
from clipper_container.threads import CallPool
from clipper_container.wire.frames import (
    CONTROL_BYTES_MAX,
    HEADER_BYTES,
    BadFrame,
    Kind,
    control_frame,
    decode_header,
    open_rows,
    pack_map,
)
from clipper_container.wire.transport import Disconnected, parse_address, set_timeouts
from clipper_container.worker.evaluation import Evaluator
from clipper_container.worker.handshake import (
    ATTEMPT_S,
    SILENCE_HEARTBEATS,
    ContainerOptions,
    ContainerRejected,
    Welcome,
    welcome_of,
)
from clipper_container.worker.replies import BatchReplies

EVENTS_MAX = 64  # events per epoll_wait
LEAVE_S = 30.0  # after GOODBYE, time for the server to close the connection
_ONESHOT = int(select.EPOLLIN | select.EPOLLONESHOT | getattr(select, "EPOLLRDHUP", 0))
_CONNECTED = int(select.EPOLLOUT | select.EPOLLONESHOT)


class ServerConnections:
    """All connections of a host. Threads: any.

    left: called as left(model, address, why) when an accepted connection ends without a request to
    leave.
    """

    def __init__(self, timers: Timers, left: Callable[[str, str, str], None]) -> None:
        self._timers, self._left = timers, left
        self._lock = threading.Lock()
        self._connections: dict[str, dict[str, ServerConnection]] = {}  # by model and address
        self._by_fd: dict[int, ServerConnection] = {}
        self._with_heartbeats: set[ServerConnection] = set()
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._stopping = False
        self._dialers = CallPool("clipper-host-dial", 4)
        self._pool = WorkerPool(self._wait, self._handle_safely, timers)

    # -- requests of the node

    def serve(
        self,
        evaluator: Evaluator,
        gate: Gate,
        address: str,
        options: ContainerOptions,
        timeout_s: float,
    ) -> Future[None]:
        """Connect to a server as a replica; the future is done once the server has accepted the
        model.

        It fails with ContainerRejected or Disconnected. Raises: ValueError for an invalid address.
        """
        parse_address(address)
        connection = ServerConnection(
            evaluator, gate, address, replace(options, quiet=True), time.monotonic() + timeout_s
        )
        with self._lock:
            of_model = self._connections.setdefault(connection.options.name, {})
            there = of_model.get(address)
            if there is not None and not there.leave_requested:
                return there.welcomed
            if there is None:
                of_model[address] = connection
        if there is not None:  # the old connection is closing: connect after it
            there.gone.add_done_callback(
                lambda _: relay(
                    self.serve(evaluator, gate, address, options, timeout_s), connection.welcomed
                )
            )
            return connection.welcomed
        if needs_resolver(address):
            self._run_blocking(lambda: self._dial(connection))
        else:
            self._dial(connection)
        return connection.welcomed

    def leave(self, model: str, address: str) -> Future[str]:
        """Disconnect a model from a server. The future holds the reason, "" when there is no
        connection.
        """
        with self._lock:
            connection = self._connections.get(model, {}).get(address)
        if connection is None:
            return done_with("")
        self._request_leave(connection)
        return connection.gone

    def leave_all(self, model: str | None = None) -> list[Future[str]]:
        """Disconnect a model, or all models, from all servers; return a future for each
        connection.
        """
        with self._lock:
            models = [*self._connections] if model is None else [model]
            connections = [one for m in models for one in self._connections.get(m, {}).values()]
        for connection in connections:
            self._request_leave(connection)
        return [connection.gone for connection in connections]

    def count(self) -> int:
        """Return the number of connections, including those that are being made."""
        with self._lock:
            return sum(map(len, self._connections.values()))

    def _request_leave(self, connection: ServerConnection) -> None:
        with connection.lock:
            if connection.leave_requested:
                return
            connection.leave_requested = True
            state, busy = connection.state, connection.busy
        if state is ConnectionState.WAITING:
            self._finish(connection, "the node no longer needs it")
        elif state is ConnectionState.SERVING and not busy:
            if connection.is_writable():
                self._send_goodbye(connection)
            else:
                self._run_blocking(lambda: self._send_goodbye(connection))
        elif state is not ConnectionState.SERVING:
            connection.shutdown()
        late = self._timers.after(LEAVE_S, connection.shutdown)
        connection.gone.add_done_callback(late.cancel)

    def _send_goodbye(self, connection: ServerConnection) -> None:
        with connection.lock:
            if connection.goodbye_sent:
                return
            connection.goodbye_sent = True
        with contextlib.suppress(OSError):
            connection.send(control_frame(Kind.GOODBYE))

    def close(self) -> None:
        """Stop the threads and close all connections. Call leave_all first to finish running
        batches.
        """
        self._stopping = True
        os.eventfd_write(self._stop, 1)
        self._pool.stop()
        self._pool.join(1.0)
        self._dialers.close()
        for connection in tuple(self._by_fd.values()):
            connection.shutdown()

    # -- dialling

    def _run_blocking(self, job: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the pool is closed
            self._dialers.submit(job).add_done_callback(_print_error)

    def _dial(self, connection: ServerConnection) -> None:
        with connection.lock:
            if connection.state is not ConnectionState.WAITING:
                return
            connection.state = ConnectionState.CONNECTING
        try:
            sock, error = start_connecting(connection.address)
        except (OSError, ValueError) as trouble:
            self._retry(connection, str(trouble))
            return
        if error not in (0, errno.EINPROGRESS):
            sock.close()
            self._retry(connection, os.strerror(error))
            return
        connection.sock, connection.fd = sock, sock.fileno()
        late = self._timers.after(ATTEMPT_S, lambda: self._give_up(connection, sock))
        connection.welcomed.add_done_callback(late.cancel)
        with self._lock:
            self._by_fd[connection.fd] = connection
        self._epoll.register(connection.fd, _CONNECTED)

    def _give_up(self, connection: ServerConnection, sock: socket.socket) -> None:
        if connection.sock is sock and connection.state in (
            ConnectionState.CONNECTING,
            ConnectionState.GREETING,
        ):
            connection.shutdown()

    def _retry(self, connection: ServerConnection, why: str) -> None:
        """Handle a failed attempt: connect again while there is time, else give up."""
        with connection.lock:
            connection.backoff = connection.backoff or Backoff(0.01, 1.0)
            pause = connection.backoff.next_s()
            over = (
                connection.leave_requested
                or self._stopping
                or time.monotonic() + pause > connection.until
            )
            if not over:
                connection.state = ConnectionState.WAITING
        if over:
            self._finish(connection, why)
        else:
            self._timers.after(pause, lambda: self._run_blocking(lambda: self._dial(connection)))

    # -- the threads

    def _wait(self) -> Iterator[ServerConnection]:
        for fd, _ in self._epoll.poll(-1, EVENTS_MAX):
            connection = self._by_fd.get(fd)
            if connection is not None:
                yield connection

    def _handle_safely(self, connection: ServerConnection, inbox: Inbox) -> None:
        try:
            self._handle(connection, inbox)
        except Exception:
            traceback.print_exc(file=sys.stderr)

    def _handle(self, connection: ServerConnection, inbox: Inbox) -> None:
        """Handle one readable connection and arm it again."""
        if connection.state is ConnectionState.SERVING and not connection.gate.enter(connection):
            return
        entered = connection.state is ConnectionState.SERVING
        if entered and not connection.gate.quick:
            self._pool.hand_over()
        try:
            over = self._serve(connection, inbox) if entered else self._advance(connection, inbox)
        except (Disconnected, BadFrame, OSError) as error:
            over = str(error)
        except ContainerRejected as refusal:
            over = str(refusal)
            connection.until = 0.0
            self._forget(connection)  # before the answer, after which it is not counted any more
            _fail(connection.welcomed, refusal)
        except BaseException:
            over = "internal error of the host"
            raise
        finally:
            parked = connection.gate.leave() if entered else None
            if parked is not None:
                self._arm(parked)
            if over:
                self._end(connection, over)
            else:
                self._arm(connection)

    def _arm(self, connection: ServerConnection) -> None:
        self._epoll.modify(connection.fd, _ONESHOT)

    def _advance(self, connection: ServerConnection, inbox: Inbox) -> str:
        """Handle the steps from connect to WELCOME. Returns the reason when the connection must
        end, else "".
        """
        sock = connection.sock
        assert sock is not None
        if connection.state is ConnectionState.CONNECTING:
            if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return os.strerror(error)
            if connection.leave_requested:
                return "the node no longer needs it"
            sock.setblocking(True)
            set_timeouts(sock, ATTEMPT_S)
            with connection.lock:
                connection.state = ConnectionState.GREETING
            connection.send(
                control_frame(Kind.HELLO, pack_map(connection.options.hello(connection.address)))
            )
            return ""
        # read WELCOME only: a batch behind it waits for the gate
        if not inbox.open(sock, CONTROL_BYTES_MAX, HEADER_BYTES):
            return ""
        header = decode_header(inbox.take(HEADER_BYTES), CONTROL_BYTES_MAX)
        welcome = welcome_of(header, inbox.take(header.payload_bytes))
        assert connection.answers is not None
        connection.answers = BatchReplies(
            connection.answers.evaluator,
            welcome.payload_bytes_max,
            welcome.crc,
            welcome.qualifiers,
            welcome.partial,
        )
        with connection.lock:
            connection.welcome, connection.state, connection.received_s = (
                welcome,
                ConnectionState.SERVING,
                time.monotonic(),
            )
            connection.backoff, is_leaving = None, connection.leave_requested
        if not welcome.quiet:
            self._beat_for(connection, welcome)
        if connection.welcomed.set_running_or_notify_cancel():
            connection.welcomed.set_result(None)
        if is_leaving:
            self._send_goodbye(connection)
        return ""

    def _serve(self, connection: ServerConnection, inbox: Inbox) -> str:
        """Answer all batches that have arrived. Returns the reason when the connection must end,
        else "".
        """
        assert connection.sock is not None
        assert connection.welcome is not None
        with connection.lock:
            connection.busy = True
        try:
            if not inbox.open(connection.sock, connection.welcome.payload_bytes_max):
                return ""
            connection.received_s, over = time.monotonic(), ""
            while not over and inbox.next_frame():
                over = self._handle_frame(connection, inbox, connection.welcome.payload_bytes_max)
            connection.gate.took(connection.spoke - connection.received_s)
            return over
        finally:
            with connection.lock:
                connection.busy = False
                is_leaving = connection.leave_requested
            if is_leaving:
                self._send_goodbye(connection)

    def _handle_frame(self, connection: ServerConnection, inbox: Inbox, limit: int) -> str:
        """Handle one frame. Nothing that is a view of the buffer may outlive this call."""
        header = decode_header(inbox.take(HEADER_BYTES), limit)
        payload = inbox.take(header.payload_bytes)
        if header.kind == Kind.PREDICT:
            assert connection.answers is not None
            connection.send(connection.answers.to(header, open_rows(header, payload, limit)))
        elif header.kind == Kind.GOODBYE:
            self._send_goodbye(connection)
            return "the server sent goodbye"
        elif header.kind != Kind.HEARTBEAT:
            raise BadFrame(f"unexpected {Kind(header.kind).name}")
        return ""

    # -- closing

    def _end(self, connection: ServerConnection, why: str) -> None:
        """Close a connection. Only for the thread that handles it."""
        served = connection.state is ConnectionState.SERVING
        with self._lock:
            self._by_fd.pop(connection.fd, None)
            self._with_heartbeats.discard(connection)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(connection.fd)
        connection.close()
        if served:
            self._finish(connection, why)
            if not connection.leave_requested:
                self._left(connection.options.name, connection.address, why)
        else:
            self._retry(connection, why)

    def _finish(self, connection: ServerConnection, why: str) -> None:
        with connection.lock:
            if connection.state is ConnectionState.CLOSED:
                return
            connection.state = ConnectionState.CLOSED
            connection.answers = None  # so that what keeps the connection does not keep the model
        self._forget(connection)
        _fail(connection.welcomed, Disconnected(f"{connection.address}: {why}"))
        connection.gone.set_result(why)

    def _forget(self, connection: ServerConnection) -> None:
        with self._lock:
            model, address = connection.options.name, connection.address
            of_model = self._connections.get(model, {})
            if of_model.get(address) is connection:
                del of_model[address]
                if not of_model:
                    del self._connections[model]

    # -- heartbeats, where the server requires them

    def _beat_for(self, connection: ServerConnection, welcome: Welcome) -> None:
        with self._lock:
            self._with_heartbeats.add(connection)
        self._timers.after(welcome.heartbeat_s, lambda: self._beat(connection, welcome.heartbeat_s))

    def _beat(self, connection: ServerConnection, every_s: float) -> None:
        now = time.monotonic()
        if connection not in self._with_heartbeats:
            return
        if now - connection.received_s > SILENCE_HEARTBEATS * every_s and not connection.busy:
            connection.shutdown()
            return
        if now - connection.spoke >= every_s:
            with contextlib.suppress(OSError):
                connection.send(control_frame(Kind.HEARTBEAT))
        self._timers.after(
            max(every_s / 4, connection.spoke + every_s - now),
            lambda: self._beat(connection, every_s),
        )


def _fail(future: Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _print_error(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        traceback.print_exception(error, file=sys.stderr)
