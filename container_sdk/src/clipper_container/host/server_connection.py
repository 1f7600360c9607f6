"""One connection of a host to a server, and the buffer that a thread reads into."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import select
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from enum import Enum
from typing import TypeVar

from clipper_container.backoff import Backoff
from clipper_container.wire.frames import HEADER_BYTES, PAYLOAD_BYTES_MAX, Bytes, BytesLike
from clipper_container.wire.transport import (
    READ_BYTES,
    Buffer,
    Disconnected,
    parse_address,
    send_all,
)
from clipper_container.worker.evaluation import Evaluator
from clipper_container.worker.handshake import ContainerOptions, Welcome
from clipper_container.worker.replies import BatchReplies

BUFFER_REUSED_BYTES = 1 << 20  # a larger buffer is dropped between connections
QUICK_S = 100e-6  # a faster model is evaluated by the leading thread
ODD_S = 3 * QUICK_S  # cap of one sample of the average, against outliers


_T = TypeVar("_T")


def done_with(result: _T) -> Future[_T]:
    """Return a future that has this result."""
    future: Future[_T] = Future()
    future.set_result(result)
    return future


def relay(source: Future[_T], target: Future[_T]) -> None:
    """Copy the outcome of one future to another."""

    def done(ended: Future[_T]) -> None:  # does not refer to `source`, which refers to it
        error = ended.exception()
        if error is None:
            target.set_result(ended.result())
        else:
            target.set_exception(error)

    source.add_done_callback(done)


class Gate:
    """Limits the batches that one model evaluates at once.

    usual_s: moving average of the evaluation time. quick: the leading thread may evaluate the model
    itself; False until measured.
    """

    def __init__(self, places: int) -> None:
        self.usual_s = 0.0
        self.quick = False
        self._lock = threading.Lock()
        self._free = max(1, places)
        self._parked: deque[ServerConnection] = deque()

    def enter(self, connection: ServerConnection) -> bool:
        """Take a place. False: none is free; the connection is parked until a `leave` returns
        it.
        """
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            self._parked.append(connection)
            return False

    def took(self, seconds: float) -> None:
        """Add a sample of the evaluation time in seconds; a negative one is ignored."""
        if seconds < 0:
            return
        seconds = min(seconds, ODD_S)
        self.usual_s = usual_s = (
            self.usual_s + (seconds - self.usual_s) / 8 if self.usual_s else seconds
        )
        self.quick = usual_s < QUICK_S

    def leave(self) -> ServerConnection | None:
        """Free a place and return a parked connection, if any."""
        with self._lock:
            self._free += 1
            return self._parked.popleft() if self._parked else None


class ConnectionState(Enum):
    """State of a connection; it moves downwards only."""

    WAITING = 0  # to dial
    CONNECTING = 1
    GREETING = 2  # HELLO is sent
    SERVING = 3
    CLOSED = 4


class ServerConnection:
    """One connection of one model to one server."""

    __slots__ = (
        "address",
        "answers",
        "backoff",
        "busy",
        "fd",
        "gate",
        "gone",
        "goodbye_sent",
        "leave_requested",
        "lock",
        "options",
        "received_s",
        "sending",
        "sock",
        "spoke",
        "state",
        "until",
        "welcome",
        "welcomed",
    )

    def __init__(
        self,
        evaluator: Evaluator,
        gate: Gate,
        address: str,
        options: ContainerOptions,
        until: float,
    ) -> None:
        self.address, self.gate, self.options, self.until = address, gate, options, until
        self.answers: BatchReplies | None = BatchReplies(evaluator)
        self.lock = threading.Lock()  # guards the state; held briefly
        self.sending = threading.Lock()  # held while sending; acquired before `lock`
        self.state = ConnectionState.WAITING
        self.leave_requested = self.goodbye_sent = False
        self.busy = False  # a thread evaluates its batches
        self.sock: socket.socket | None = None
        self.fd = -1
        self.welcome: Welcome | None = None
        self.backoff: Backoff | None = None  # set after a failed attempt
        self.welcomed: Future[None] = Future()
        self.gone: Future[str] = Future()
        self.received_s = self.spoke = 0.0

    def send(self, pieces: list[BytesLike]) -> None:
        """Send the pieces of a frame. Raises: OSError, after which the connection is unusable."""
        with self.sending:
            if self.sock is None:
                raise OSError(errno.ENOTCONN, "it is closed already")
            try:
                send_all(self.sock, pieces)
            except OSError:
                self.shutdown()
                raise
            self.spoke = time.monotonic()

    def is_writable(self) -> bool:
        """Return whether a short frame can be sent without a wait."""
        poll = select.poll()
        with self.lock:
            if self.sock is None or self.sending.locked():
                return False
            poll.register(self.sock, select.POLLOUT)
            return bool(poll.poll(0))

    def shutdown(self) -> None:
        """Shut the socket down; the thread that reads it sees the end. Threads: any."""
        with self.lock, contextlib.suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Only the thread that handles the connection may call this: no other
        may use the descriptor once its number is free again.
        """
        self.shutdown()
        with self.sending, self.lock:
            if self.sock is not None:
                self.sock.close()
            self.sock, self.fd = None, -1


class Inbox:
    """Read buffer of one thread. Call `next_frame`, then `take` for each part; the bytes are
    valid until the next `next_frame`.
    """

    def __init__(self) -> None:
        self._buffer = Buffer(READ_BYTES + HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES_MAX)
        self._filled = self._used = 0
        self._sock: socket.socket | None = None

    def open(
        self, sock: socket.socket, payload_bytes_max: int, bytes_max: int = READ_BYTES
    ) -> bool:
        """Read what has arrived, at most `bytes_max`. Returns False when there is nothing.

        Raises: Disconnected, OSError.
        """
        self._sock, self._filled, self._used = sock, 0, 0
        if self._buffer.is_lent() or self._buffer.size > BUFFER_REUSED_BYTES:
            self._buffer = Buffer(READ_BYTES + HEADER_BYTES, HEADER_BYTES + payload_bytes_max)
        self._buffer.size_max = HEADER_BYTES + payload_bytes_max
        try:
            self._receive(bytes_max, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def next_frame(self) -> bool:
        """Move what was read beyond the last frame to an aligned address; False when nothing is
        left.
        """
        rest = self._buffer.bytes[self._used : self._filled]
        if not rest.size:
            return False
        if self._used:
            rest = rest.copy()
            if self._buffer.is_lent():
                self._buffer.renew()
            self._buffer.bytes[: rest.size] = rest
            self._used, self._filled = 0, rest.size
        return True

    def take(self, n: int) -> Bytes:
        """Return the next `n` bytes of the frame. Raises: Disconnected, BadFrame, OSError."""
        end = self._used + n
        if end > self._filled:
            self._buffer.reserve(end, self._filled)
            while self._filled < end:
                try:
                    self._receive(end, 0)
                except BlockingIOError:
                    raise Disconnected("the server fell silent within a frame") from None
        taken = self._buffer.bytes[self._used : end]
        self._used = end
        return taken

    def _receive(self, end: int, flags: int) -> None:
        assert self._sock is not None
        count = self._sock.recv_into(
            self._buffer.view[self._filled : min(end, self._buffer.size)], 0, flags
        )
        if count == 0:
            raise Disconnected("the server closed the connection")
        self._filled += count


def needs_resolver(address: str) -> bool:
    """Return whether the host of an address is a name, whose look-up may take long."""
    kind, host, _ = parse_address(address)
    if kind == "unix":
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def start_connecting(address: str) -> tuple[socket.socket, int]:
    """Return a socket that is connecting, and the errno of connect(). Raises: OSError when the
    name does not resolve; ValueError for an invalid address, or name.
    """
    kind, host, port = parse_address(address)
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        return sock, sock.connect_ex(host)
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 30_000),
    ):
        if hasattr(socket, name):  # without heartbeats only keep-alive detects a dead peer
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock, sock.connect_ex(where)
