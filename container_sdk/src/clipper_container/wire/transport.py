"""Blocking sockets that carry frames.

One buffer receives everything. Each frame's header starts at a multiple of 64 bytes, so the payload
behind it is aligned for every type and the model's arrays are views of the buffer. Bytes read
beyond a frame are moved to the front before the next; the first read takes at most READ_BYTES,
which keeps the move small. If the model keeps a view, the buffer is left to it and a new one is
allocated.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import numpy as np

from clipper_container.threads import KeptThread
from clipper_container.wire.frames import HEADER_BYTES, BadFrame, Bytes, BytesLike

READ_BYTES = 64 << 10
ALIGNMENT = 64
_JOINED_BYTES_MAX = 16 << 10
_PIECES_MAX = 512  # per sendmsg; the kernel's limit is 1024
_DESCRIPTORS_MAX = 4  # received ahead of their frames
_DONTWAIT, _TRUNCATED = int(socket.MSG_DONTWAIT), int(socket.MSG_CTRUNC)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_DESCRIPTORS_BYTES = socket.CMSG_SPACE(_DESCRIPTORS_MAX * 4)
SPIN_NS = 50_000
SPIN_SCORE_MAX = 16
SPIN_TRIAL = 64


class Disconnected(Exception):
    """The server closed the connection, broke it, or was silent for too long."""


class Stopping(Exception):
    """A stop of this process was requested."""


class StopSwitch:
    """Requests a stop from a signal or another thread; its descriptor wakes the loop's poll().
    Threads: any.
    """

    def __init__(self) -> None:
        self.requested = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on a request."""
        return self._read.fileno()

    def request(self) -> None:
        """Request the stop."""
        self.requested = True
        with contextlib.suppress(OSError):
            self._write.send(b"x")

    def on_signals(self, *numbers: int) -> None:
        """Stop on the first of these signals; a second one ends the process. Main thread only."""

        def on_signal(number: int, frame: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            self.request()

        for number in numbers:
            signal.signal(number, on_signal)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def wait(self, seconds: float) -> None:
        """Sleep. Raises: Stopping."""
        if not self.requested:
            select.select([self], [], [], seconds)
        if self.requested:
            raise Stopping

    def drain(self) -> None:
        """Discard a wake-up caused by a signal that the model handles itself."""
        with contextlib.suppress(OSError):
            self._read.recv(4096)

    def close(self) -> None:
        """Close the descriptors."""
        self._read.close()
        self._write.close()


class Buffer:
    """Receive buffer, aligned to 64 bytes, that grows up to size_max."""

    def __init__(self, size: int, size_max: int) -> None:
        self.size_max = size_max
        self._take(size)

    def _take(self, size: int) -> None:
        self._raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -self._raw.ctypes.data % ALIGNMENT
        self.bytes: Bytes = self._raw[start : start + size]
        self.view = self.bytes.data
        self._own_refs = sys.getrefcount(self._raw)

    @property
    def size(self) -> int:
        """Return the capacity in bytes."""
        return self.bytes.size

    def reserve(self, size: int, keep: int) -> None:
        """Grow to `size` bytes, preserving the first `keep`. Raises: BadFrame beyond size_max."""
        if size > self.size_max:
            raise BadFrame(f"a frame of {size} bytes; the limit is {self.size_max}")
        if size > self.size:
            stored = self.bytes[:keep]
            self._take(min(self.size_max, max(size, 2 * self.size)))
            self.bytes[:keep] = stored

    def is_lent(self) -> bool:
        """Return True if anything else refers to the memory."""
        return sys.getrefcount(self._raw) > self._own_refs

    def renew(self) -> None:
        """Allocate new memory and leave the old to its views."""
        self._take(self.size)


def parse_address(address: str) -> tuple[str, str, int]:
    """Return ("unix", path, 0) or ("tcp", host, port). Raises: ValueError.

    `tcp://host:port`, as a server's settings have it, is `tcp:host:port`.
    """
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return kind, rest, 0
    host, _, port = rest.removeprefix("//").rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"cannot connect to {address!r}: write unix:/path or tcp:host:port")
    return kind, host.strip("[]"), int(port)


def connect(address: str, timeout_s: float) -> socket.socket:
    """Connect to `unix:/path` or `tcp:host:port`. Raises: OSError; ValueError for another
    address.
    """
    kind, host, port = parse_address(address)
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(host)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((host, port), timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


class FrameConnection:
    """A connection to the server. Threads: one reads; any may send."""

    def __init__(
        self, sock: socket.socket, stop: StopSwitch, payload_bytes_max: int, silence_s: float
    ) -> None:
        self.buffer = Buffer(READ_BYTES + HEADER_BYTES, HEADER_BYTES + payload_bytes_max)
        self.last_sent = time.monotonic()
        self._sock, self._fd = sock, sock.fileno()
        self._stop = stop
        self._lock = threading.Lock()
        self._filled, self._used = 0, 0
        self._descriptors: list[int] | None = None
        self._spins = (
            len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else False
        )
        self._spin_score, self._spin_count = 0, 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(stop, select.POLLIN)
        self._bytes_poll = select.poll()
        self._bytes_poll.register(sock, select.POLLIN)
        sock.settimeout(None)
        self.set_silence(silence_s)

    def set_silence(self, seconds: float) -> None:
        """Set how long the server may be silent, between frames or within one; infinity disables
        it.
        """
        self._silence_ms = None if seconds == float("inf") else seconds * 1000
        set_timeouts(self._sock, seconds)

    def take_descriptors(self) -> None:
        """Accept descriptors along with frames from now on."""
        self._descriptors = []

    def descriptor(self) -> int | None:
        """Return the next received descriptor, which the caller then owns; None when there is
        none.
        """
        return self._descriptors.pop(0) if self._descriptors else None

    # -- reading: next_message(), then take(n) for each part; the bytes are valid until the next
    # next_message()

    def is_readable(self) -> bool:
        """Return True if bytes wait or a stop is requested."""
        return self._filled > self._used or bool(self._poll.poll(0))

    def has_bytes(self, seconds: float = 0.0) -> bool:
        """Return True if bytes wait, or the connection has ended; wait at most so long."""
        if self._filled > self._used:
            return True
        return bool(self._bytes_poll.poll(seconds * 1000))

    def next_message(self, offset: int = 0, *, until_stop: bool = True) -> None:
        """Wait for a message and place its first byte at `offset` from an aligned address.

        Raises: Stopping when a stop is requested before the message begins, if `until_stop`;
        Disconnected.
        """
        self._tidy(offset)
        if self._filled > self._used:
            if until_stop and self._stop.requested:
                raise Stopping
            return
        if not until_stop:
            self._receive(offset + READ_BYTES)
        elif not self._spin(offset + READ_BYTES):
            self._wait()
            self._receive(offset + READ_BYTES)

    def take(self, n: int) -> Bytes:
        """Return the next `n` bytes of the message. Raises: Disconnected; BadFrame beyond the
        buffer's limit.
        """
        end = self._used + n
        if end > self._filled:
            self.buffer.reserve(end, self._filled)
            while self._filled < end:
                self._receive(end)
        taken = self.buffer.bytes[self._used : end]
        self._used = end
        return taken

    def _tidy(self, offset: int) -> None:
        """Move the bytes read beyond the last message to the start of the next."""
        if self._used == self._filled and not self.buffer.is_lent():
            self._used = self._filled = offset
            return
        rest = self.buffer.bytes[self._used : self._filled].copy()
        if self.buffer.is_lent():
            self.buffer.renew()
        self.buffer.reserve(offset + rest.size, 0)
        self.buffer.bytes[offset : offset + rest.size] = rest
        self._used, self._filled = offset, offset + rest.size

    def _wait(self) -> None:
        while True:
            ready = self._poll.poll(self._silence_ms)
            if self._stop.requested:
                raise Stopping
            if not ready:
                raise Disconnected("the server has been silent for too long")
            if any(fd == self._fd for fd, _ in ready):
                return
            self._stop.drain()

    def _spin(self, end: int) -> bool:
        """Poll for SPIN_NS instead of sleeping, because a wake-up costs more than most models.
        Returns True if bytes came.

        Only with a second core and while it pays: a success raises the score, a failure lowers it,
        and below zero only one message in SPIN_TRIAL is polled for.
        """
        self._spin_count += 1
        if not self._spins or (self._spin_score < 0 and self._spin_count % SPIN_TRIAL):
            return False
        until = time.perf_counter_ns() + SPIN_NS
        while not self._stop.requested:
            try:
                self._receive(end, _DONTWAIT)
            except BlockingIOError:
                if time.perf_counter_ns() < until:
                    continue
                self._spin_score = max(self._spin_score - 1, -1)
                return False
            self._spin_score = min(self._spin_score + 1, SPIN_SCORE_MAX)
            return True
        return False

    def _receive(self, end: int, flags: int = 0) -> None:
        room = self.buffer.view[self._filled : min(end, self.buffer.size)]
        try:
            if self._descriptors is None:
                count = self._sock.recv_into(room, 0, flags)
            else:
                count = self._receive_with(room, flags, self._descriptors)
        except BlockingIOError as error:
            if flags:
                raise
            raise Disconnected("the server stopped sending within a frame") from error
        except OSError as error:
            raise Disconnected(f"connection lost: {error}") from error
        if count == 0:
            raise Disconnected("the server closed the connection")
        self._filled += count

    def _receive_with(self, room: memoryview, flags: int, descriptors: list[int]) -> int:
        """Receive bytes and the descriptors that came with them."""
        count, messages, message_flags, _ = self._sock.recvmsg_into(
            [room], _DESCRIPTORS_BYTES, flags | _CLOEXEC
        )
        if not messages and not message_flags & _TRUNCATED:
            return count
        for level, kind, data in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors += array.array("i", data[: len(data) // 4 * 4])
        if message_flags & _TRUNCATED or len(descriptors) > _DESCRIPTORS_MAX:
            raise BadFrame("more descriptors than frames that need one")
        return count

    # -- sending

    def send(self, pieces: Sequence[BytesLike]) -> None:
        """Send all pieces as one message. Raises: Disconnected."""
        with self._lock:
            try:
                send_all(self._sock, pieces)
            except OSError as error:
                self.shutdown()  # part of a frame may be sent; nothing can follow it
                raise Disconnected(f"connection lost: {error}") from error
            self.last_sent = time.monotonic()

    def shutdown(self) -> None:
        """Shut the connection down; a thread that waits on it wakes."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and all received descriptors."""
        self._sock.close()
        while (fd := self.descriptor()) is not None:
            os.close(fd)


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Set the kernel's receive and send timeouts in seconds; infinity for none."""
    limit = (
        struct.pack("ll", 0, 0)
        if seconds == float("inf")
        else struct.pack("ll", *divmod(int(seconds * 1e6), 1_000_000))
    )
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send_all(sock: socket.socket, pieces: Sequence[BytesLike]) -> None:
    """Send all pieces in order. Raises: OSError, possibly after some of them."""
    # below this size a copy is faster than a gathering send
    if sum(map(len, pieces)) <= _JOINED_BYTES_MAX:
        sock.sendall(b"".join(pieces))
        return
    views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while views:
        sent = sock.sendmsg(views[:_PIECES_MAX])
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


HEART_END_S = 10.0  # for its last beat


class Heart:
    """Heartbeat thread: calls `beat` when nothing was sent for every_s seconds, and sends the
    pieces of `news` as often.
    """

    def __init__(
        self,
        connection: FrameConnection,
        every_s: float,
        beat: Callable[[], None],
        on_change: Callable[[], list[BytesLike] | None] | None = None,
    ) -> None:
        self._connection, self._every_s, self._beat, self._on_change = (
            connection,
            every_s,
            beat,
            on_change,
        )
        self._done = threading.Event()
        self._thread = KeptThread("clipper-heart", self._run)

    def _run(self) -> None:
        """Beat until the connection ends. After an unexpected error it is shut down, since the
        error may have left half a frame; its reader then connects again."""
        try:
            self._beat_until_done()
        except Disconnected:
            return
        except Exception:
            self._connection.shutdown()
            traceback.print_exc(file=sys.stderr)

    def _beat_until_done(self) -> None:
        while not self._done.wait(
            max(0.0, self._connection.last_sent + self._every_s - time.monotonic())
        ):
            if self._on_change is not None and (pieces := self._on_change()):
                self._connection.send(pieces)
            if time.monotonic() - self._connection.last_sent >= self._every_s:
                self._beat()

    def stop(self) -> None:
        """Stop the thread and shut the connection down."""
        self._done.set()
        self._connection.shutdown()
        self._thread.join(HEART_END_S)
