"""Blocking sockets that carry frames.

One buffer receives everything. A frame's header is put at an address that is a multiple of 64, so
the payload behind it is aligned for every type and the model's arrays are views into the buffer.
What was read beyond a frame is moved to the front before the next; a first read takes at most
READ_BYTES, so that such a move stays small. When the model kept a view, the buffer is left to it
and a new one is taken.
"""

from __future__ import annotations

import array
import contextlib
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from clipper_container.wire import HEADER_BYTES, BadFrame, Bytes

READ_BYTES = 64 << 10
ALIGNMENT = 64
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 10.0
_JOINED_BYTES_MAX = 16 << 10
_PIECES_MAX = 512  # of one sendmsg; the kernel's own limit is 1024
_DESCRIPTORS_MAX = 4  # that have come and whose frame has not
_DONTWAIT, _TRUNCATED = int(socket.MSG_DONTWAIT), int(socket.MSG_CTRUNC)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_DESCRIPTORS_BYTES = socket.CMSG_SPACE(_DESCRIPTORS_MAX * 4)
SPIN_NS = 50_000
SPIN_SCORE_MAX = 16
SPIN_TRIAL = 64


class Disconnected(Exception):
    """The server closed the connection, broke it, or fell silent."""


class Stopping(Exception):
    """This process was asked to stop."""


class StopSwitch:
    """Asks the serving loop to stop, from a signal or another thread; a file descriptor wakes the
    loop's poll.

    Threads: any.
    """

    def __init__(self) -> None:
        self.requested = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def request(self) -> None:
        self.requested = True
        with contextlib.suppress(OSError):
            self._write.send(b"x")

    def on_signals(self, *numbers: int) -> None:
        """A first signal asks to stop, a second one ends the process. Main thread only."""

        def ask(number: int, frame: Any) -> None:
            signal.signal(number, signal.SIG_DFL)
            self.request()

        for number in numbers:
            signal.signal(number, ask)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def wait(self, seconds: float) -> None:
        """Sleep. Raises: Stopping."""
        if not self.requested:
            select.select([self], [], [], seconds)
        if self.requested:
            raise Stopping

    def drain(self) -> None:
        """Swallow the wake of another signal, one that the model handles itself."""
        with contextlib.suppress(OSError):
            self._read.recv(4096)

    def close(self) -> None:
        self._read.close()
        self._write.close()


class Buffer:
    """Bytes at an address that is a multiple of 64; they grow up to a bound."""

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
        return self.bytes.size

    def reserve(self, size: int, keep: int) -> None:
        """Have room for `size` bytes; the first `keep` stay."""
        if size > self.size_max:
            raise BadFrame(f"a frame of {size} bytes; the limit is {self.size_max}")
        if size > self.size:
            kept = self.bytes[:keep]
            self._take(min(self.size_max, max(size, 2 * self.size)))
            self.bytes[:keep] = kept

    def is_lent(self) -> bool:
        """Does anyone else still hold a view?"""
        return sys.getrefcount(self._raw) > self._own_refs

    def renew(self) -> None:
        """Leave the memory to whoever holds a view of it, and go on in new one."""
        self._take(self.size)


def parse_address(address: str) -> tuple[str, str, int]:
    """("unix", path, 0) or ("tcp", host, port).

    Raises: ValueError.
    """
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return kind, rest, 0
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"cannot connect to {address!r}: write unix:/path or tcp:host:port")
    return kind, host.strip("[]"), int(port)


def connect(address: str, timeout_s: float) -> socket.socket:
    """Dial `unix:/path` or `tcp:host:port`.

    Raises: OSError; ValueError for another kind of address.
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


class Backoff:
    """Pauses between attempts: 0.1 s doubling to 10 s, each cut at random by up to half so that
    herds spread out."""

    def __init__(self, s_min: float = BACKOFF_S_MIN, s_max: float = BACKOFF_S_MAX) -> None:
        self._s_min, self._s_max = s_min, s_max
        self._random = (
            random.Random()
        )  # not by the process's id: in its image each container is process 1
        self.reset()

    def reset(self) -> None:
        self._s = self._s_min

    def next_s(self) -> float:
        pause = self._s * self._random.uniform(0.5, 1.0)
        self._s = min(self._s_max, self._s * 2)
        return pause


class Connection:
    """One connection to the server.

    Threads: one reads; any may send.
    """

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
        self._spin_score, self._spells = 0, 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(stop, select.POLLIN)
        sock.settimeout(None)
        self.set_silence(silence_s)

    def set_silence(self, seconds: float) -> None:
        """How long the server may say nothing, between frames or within one; infinity for ever."""
        self._silence_ms = None if seconds == float("inf") else seconds * 1000
        set_timeouts(self._sock, seconds)

    def take_descriptors(self) -> None:
        """From now on descriptors may come with frames."""
        self._descriptors = []

    def descriptor(self) -> int | None:
        """The next descriptor that has come, now the caller's; None when there is none."""
        return self._descriptors.pop(0) if self._descriptors else None

    # -- reading: begin(), take(n) once or more, and the bytes taken stay valid until the next
    # begin()

    def is_readable(self) -> bool:
        """Is there anything to read, or are we asked to stop?"""
        return self._filled > self._used or bool(self._poll.poll(0))

    def begin(self, offset: int = 0) -> None:
        """Wait for a message and put its first byte at `offset` from an aligned address.

        Raises: Stopping, when asked to before the message began; Disconnected.
        """
        self._tidy(offset)
        if self._filled > self._used:
            if self._stop.requested:
                raise Stopping
            return
        if not self._spin(offset + READ_BYTES):
            self._wait()
            self._receive(offset + READ_BYTES)

    def take(self, n: int) -> Bytes:
        """The next `n` bytes of the message.

        Raises: Disconnected; BadFrame when they are more than the buffer may hold.
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
        """Move what was read beyond the last message to where the next one begins."""
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
        """Poll for a moment instead of sleeping: to be woken costs more than most models. True:
        something was received.

        Only with a second core, and while it pays: a spell that ends with bytes counts for it, one
        that does not against, and below zero only one message in SPIN_TRIAL is polled for.
        """
        self._spells += 1
        if not self._spins or (self._spin_score < 0 and self._spells % SPIN_TRIAL):
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
            raise Disconnected("the server fell silent within a frame") from error
        except OSError as error:
            raise Disconnected(f"connection lost: {error}") from error
        if count == 0:
            raise Disconnected("the server closed the connection")
        self._filled += count

    def _receive_with(self, room: memoryview, flags: int, descriptors: list[int]) -> int:
        """Bytes, and the descriptors that came with them."""
        count, messages, said, _ = self._sock.recvmsg_into(
            [room], _DESCRIPTORS_BYTES, flags | _CLOEXEC
        )
        if not messages and not said & _TRUNCATED:
            return count
        for level, kind, data in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors += array.array("i", data[: len(data) // 4 * 4])
        if said & _TRUNCATED or len(descriptors) > _DESCRIPTORS_MAX:
            raise BadFrame("more descriptors than frames that need one")
        return count

    # -- sending

    def send(self, pieces: Sequence[Any]) -> None:
        """Send all pieces, one after another, as one message.

        Raises: Disconnected.
        """
        with self._lock:
            try:
                send_all(self._sock, pieces)
            except OSError as error:
                self.shutdown()  # perhaps half a frame was sent: nothing more can follow it
                raise Disconnected(f"connection lost: {error}") from error
            self.last_sent = time.monotonic()

    def shutdown(self) -> None:
        """End the connection both ways; a thread that waits on it wakes."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
        while (fd := self.descriptor()) is not None:
            os.close(fd)


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """How long a blocking receive or send may take; infinity for ever."""
    limit = (
        struct.pack("ll", 0, 0)
        if seconds == float("inf")
        else struct.pack("ll", *divmod(int(seconds * 1e6), 1_000_000))
    )
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send_all(sock: socket.socket, pieces: Sequence[Any]) -> None:
    """All pieces, one after another. Raises: OSError, perhaps after some of them."""
    if (
        sum(map(len, pieces)) <= _JOINED_BYTES_MAX
    ):  # copying a little is quicker than describing the pieces
        sock.sendall(b"".join(pieces))
        return
    views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while views:
        sent = sock.sendmsg(views[:_PIECES_MAX])
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


class Heart:
    """A thread that calls `beat` whenever nothing was sent for `every_s`, and sends the pieces of
    `news`, if any, as often."""

    def __init__(self, connection: Connection, every_s: float, beat: Any, news: Any = None) -> None:
        self._connection, self._every_s, self._beat, self._news = connection, every_s, beat, news
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clipper-heart", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(
            max(0.0, self._connection.last_sent + self._every_s - time.monotonic())
        ):
            try:
                if self._news is not None and (pieces := self._news()):
                    self._connection.send(pieces)
                if time.monotonic() - self._connection.last_sent >= self._every_s:
                    self._beat()
            except Disconnected:
                return

    def stop(self) -> None:
        self._done.set()
        self._connection.shutdown()
        self._thread.join()
