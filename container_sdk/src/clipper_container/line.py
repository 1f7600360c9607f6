"""One connection of a host to a server, and what one thread reads into."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from enum import Enum
from typing import Any, TypeVar

from clipper_container.answers import Answers
from clipper_container.evaluate import Evaluator
from clipper_container.serve import Options, Welcome
from clipper_container.transport import (
    READ_BYTES,
    Backoff,
    Buffer,
    Disconnected,
    parse_address,
    send_all,
)
from clipper_container.wire import HEADER_BYTES, PAYLOAD_BYTES_MAX, Bytes

BUFFER_KEPT_BYTES = 1 << 20  # by a thread, between connections
QUICK_S = 100e-6  # less than to let another thread lead is worth
ODD_S = 3 * QUICK_S  # an answer that took longer counts as this


_T = TypeVar("_T")


def relay(source: Future[_T], target: Future[_T]) -> None:
    """What becomes of one becomes of the other."""

    def done(_: Future[_T]) -> None:
        error = source.exception()
        if error is None:
            target.set_result(source.result())
        else:
            target.set_exception(error)

    source.add_done_callback(done)


class Gate:
    """The batches that one model takes at once. usual_s: what it takes for what it is sent, of
    late.  quick: it may be evaluated by the thread that leads; not before that is known."""

    def __init__(self, places: int) -> None:
        self.usual_s = 0.0
        self.quick = False
        self._lock = threading.Lock()
        self._free = max(1, places)
        self._parked: deque[Line] = deque()

    def enter(self, line: Line) -> bool:
        """False: it is parked, and comes out of some `leave`."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            self._parked.append(line)
            return False

    def took(self, seconds: float) -> None:
        """From what was read to the last answer; less than nothing: there was none."""
        if seconds < 0:
            return
        seconds = min(seconds, ODD_S)
        self.usual_s = usual_s = (
            self.usual_s + (seconds - self.usual_s) / 8 if self.usual_s else seconds
        )
        self.quick = usual_s < QUICK_S

    def leave(self) -> Line | None:
        with self._lock:
            self._free += 1
            return self._parked.popleft() if self._parked else None


class State(Enum):
    WAITING = 0  # to dial
    CONNECTING = 1
    GREETING = 2  # HELLO is said
    SERVING = 3
    CLOSED = 4


class Line:
    """One connection of one model to one server."""

    __slots__ = (
        "address",
        "answers",
        "asked",
        "backoff",
        "busy",
        "fd",
        "gate",
        "gone",
        "heard",
        "lock",
        "options",
        "said",
        "sending",
        "sock",
        "spoke",
        "state",
        "until",
        "welcome",
        "welcomed",
    )

    def __init__(
        self, evaluator: Evaluator, gate: Gate, address: str, options: Options, until: float
    ) -> None:
        self.address, self.gate, self.options, self.until = address, gate, options, until
        self.answers: Answers | None = Answers(evaluator, PAYLOAD_BYTES_MAX, False, False)
        self.lock = threading.Lock()  # of its state; never held for long
        self.sending = threading.Lock()  # held by who sends; taken before the other
        self.state = State.WAITING
        self.asked = self.said = False  # to leave; GOODBYE
        self.busy = False  # a thread answers its batches
        self.sock: socket.socket | None = None
        self.fd = -1
        self.welcome: Welcome | None = None
        self.backoff: Backoff | None = None  # once an attempt has failed
        self.welcomed: Future[None] = Future()
        self.gone: Future[str] = Future()
        self.heard = self.spoke = 0.0

    @property
    def key(self) -> tuple[str, str]:
        return self.options.name, self.address

    def send(self, pieces: list[Any]) -> None:
        """Raises: OSError, after which nothing more can follow; its owner hears of it."""
        with self.sending:
            if self.sock is None:
                raise OSError(errno.ENOTCONN, "it is closed already")
            try:
                send_all(self.sock, pieces)
            except OSError:
                self.shutdown()
                raise
            self.spoke = time.monotonic()

    def shutdown(self) -> None:
        """Whoever has it, or gets it, will find it ended."""
        with self.lock, contextlib.suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only the thread that has it: no other may be at its socket when that is closed, and its
        number used again."""
        self.shutdown()
        with self.sending, self.lock:
            if self.sock is not None:
                self.sock.close()
            self.sock, self.fd = None, -1


class Inbox:
    """What one thread reads into. `begin`, then `take` for each part of a frame; valid until the
    next `begin`."""

    def __init__(self) -> None:
        self._buffer = Buffer(READ_BYTES + HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES_MAX)
        self._filled = self._used = 0
        self._sock: socket.socket | None = None

    def open(
        self, sock: socket.socket, payload_bytes_max: int, bytes_max: int = READ_BYTES
    ) -> bool:
        """Begin with what there is, at most `bytes_max`. False: nothing is. Raises: Disconnected,
        OSError."""
        self._sock, self._filled, self._used = sock, 0, 0
        if self._buffer.is_lent() or self._buffer.size > BUFFER_KEPT_BYTES:
            self._buffer = Buffer(READ_BYTES + HEADER_BYTES, HEADER_BYTES + payload_bytes_max)
        self._buffer.size_max = HEADER_BYTES + payload_bytes_max
        try:
            self._receive(bytes_max, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def begin(self) -> bool:
        """Move what was read beyond the last frame to an aligned address; False when there is
        none."""
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
        """Raises: Disconnected, BadFrame, OSError."""
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


def begin_connecting(address: str) -> tuple[socket.socket, int]:
    """A socket that is connecting, and how that began. Raises: OSError, when the name is not
    known."""
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
        if hasattr(socket, name):  # a quiet connection has nothing else to find a dead host by
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock, sock.connect_ex(where)
