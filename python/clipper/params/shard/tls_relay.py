"""TLS of a shard: a thread that decrypts what comes for the shard's loop, and encrypts what leaves.

The loop and the replicas' receivers work on descriptors without TLS. For each connection the relay
has a pair of sockets: one to the other host, with TLS, and one in this process. Of each direction
at most CHUNK bytes wait, so who does not read slows only its own sender. A handshake has
`HANDSHAKE_S`; at most a quarter of `connections_max` may be in progress, and the oldest makes room
for a new one. OpenSSL bounds the bytes of a handshake.
"""

import contextlib
import logging
import os
import selectors
import socket
import ssl
import time
from collections import deque
from typing import Final

from clipper.component import Backoff, Health, Stop, Worker
from clipper.tls import Certificate
from clipper_container.params.connection import connected, set_timeouts
from clipper_container.params.frames import HEAD_BYTES, Head, MessageKind, RefusalCode, packed
from clipper_container.params.tls import CLOSED

log = logging.getLogger("clipper.params")
CHUNK: Final = 64 << 10
HANDSHAKE_S: Final = 5.0
LINGER_S: Final = 1.0
PAUSE_S: Final = 0.02  # without descriptors
_ROUNDS_MAX: Final = 16  # of one pair, before others have their turn
_REFRESH_S: Final = 1.0
_TLS_RECORD: Final = 0x16
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class _Pair:
    """One connection. inner is None until the handshake is done. until_s: when a handshake, or the
    end of a refused connection, is given up; 0: never."""

    def __init__(self, outer: socket.socket, inner: socket.socket | None, until_s: float) -> None:
        self.outer, self.inner, self.until_s = outer, inner, until_s
        self.in_, self.out = memoryview(b""), memoryview(b"")  # read, and not yet written
        self.refused = self.ended = False
        self.wants = 0  # of the outer socket, during a handshake

    @property
    def tls(self) -> ssl.SSLSocket | None:
        """The outer socket once it encrypts."""
        return self.outer if isinstance(self.outer, ssl.SSLSocket) else None


class TlsRelay:
    """A thread with the TLS connections of one shard. Threads: any.

    certificate: of the shard; None: it only connects to others. connections_max: more are closed.
    """

    def __init__(self, certificate: Certificate | None, connections_max: int) -> None:
        self._certificate, self._connections_max = certificate, connections_max
        self._shaking_max = max(4, connections_max // 4)
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, _READ)
        self._new: deque[_Pair] = deque()
        self._pairs: set[_Pair] = set()
        self._shaking: dict[_Pair, None] = {}  # with a time limit, oldest first
        self._listener: socket.socket | None = None
        self._inner_address = ""
        self._refreshed_s = 0.0
        self._worker = Worker("clipper-shard-tls", self._run, again=Backoff(0.01, PAUSE_S))

    def start(self, listener: socket.socket | None = None, inner_address: str = "") -> None:
        """Start the thread. listener: of connections with TLS, each of which is connected to the
        unix socket at inner_address."""
        self._listener, self._inner_address = listener, inner_address
        if listener is not None:
            self._selector.register(listener, _READ)
        self._worker.start()

    def close(self) -> None:
        """Close all connections, and end the thread."""
        self._worker.request_stop()
        os.eventfd_write(self._wake, 1)
        if self._worker.end():  # else it still uses them
            self._selector.close()
            os.close(self._wake)

    def health(self) -> Health:
        """Return the state of the thread."""
        return self._worker.health()

    def connect(self, address: str, answer_s: float) -> socket.socket:
        """Connect to a shard. The returned socket has the messages without TLS. Raises as
        `connected`."""
        outer = connected(address, answer_s)
        if not isinstance(outer, ssl.SSLSocket):
            return outer
        ours, inner = socket.socketpair()
        set_timeouts(ours, answer_s)
        outer.setblocking(False)
        inner.setblocking(False)
        self._new.append(_Pair(outer, inner, 0.0))
        os.eventfd_write(self._wake, 1)
        return ours

    # -- its thread

    def _run(self, stop: Stop) -> None:
        again: set[_Pair] = set()
        while not stop.requested:
            timeout = 0.0 if again else 0.25 if self._shaking else 1.0
            ready = again | {self._of(key) for key, _ in self._selector.select(timeout)}
            while self._new:
                pair = self._new.popleft()
                self._pairs.add(pair)
                ready.add(pair)
            due = [pair for pair in ready if pair is not None and pair in self._pairs]
            again = {pair for pair in due if self._turn(pair)}
            self._expire()
        for pair in tuple(self._pairs):
            self._close(pair)

    def _of(self, key: selectors.SelectorKey) -> _Pair | None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fd == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        pair: _Pair | None = key.data
        return pair

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            outer, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a connection is not accepted: %s", error)
            time.sleep(PAUSE_S)
            return
        outer.setblocking(False)
        with contextlib.suppress(OSError):
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for level, name, value in (
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            ):
                outer.setsockopt(level, name, value)
        if len(self._shaking) >= self._shaking_max:
            self._close(next(iter(self._shaking)))
        if len(self._pairs) >= self._connections_max:
            outer.close()
            return
        pair = _Pair(outer, None, time.monotonic() + HANDSHAKE_S)
        pair.wants = _READ
        self._pairs.add(pair)
        self._shaking[pair] = None
        self._watch(pair, outer, _READ)

    def _turn(self, pair: _Pair) -> bool:
        """Move what can be moved. Returns whether there may be more at once."""
        try:
            if pair.refused:
                while pair.outer.recv(CHUNK):
                    pass
                self._close(pair)
            elif pair.inner is None and not self._shake(pair):
                self._watch(pair, pair.outer, pair.wants)
            else:
                return self._move(pair)
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:
            log.debug("a TLS connection ends: %s", error)
            self._close(pair)
        return False

    def _shake(self, pair: _Pair) -> bool:
        """Go on with a handshake. Returns whether it is done."""
        if pair.tls is None:
            first = pair.outer.recv(HEAD_BYTES, socket.MSG_PEEK)
            if not first or first[0] != _TLS_RECORD:
                self._refuse(pair, first)
                return False
            self._refresh()
            assert self._certificate is not None
            self._selector.unregister(pair.outer)
            pair.outer = self._certificate.context.wrap_socket(
                pair.outer, server_side=True, do_handshake_on_connect=False
            )
        assert pair.tls is not None
        try:
            pair.tls.do_handshake()
        except ssl.SSLWantReadError:
            pair.wants = _READ
            return False
        except ssl.SSLWantWriteError:
            pair.wants = _WRITE
            return False
        except (*CLOSED, ConnectionError):
            raise
        except ssl.SSLError as error:
            log.debug("a TLS handshake failed: %s", error)
            self._linger(pair)
            return False
        self._shaking.pop(pair, None)
        pair.until_s = 0.0
        inner = socket.socket(socket.AF_UNIX)
        try:
            inner.setblocking(False)
            inner.connect(self._inner_address)
        except OSError as error:
            inner.close()
            raise ConnectionError(f"the shard does not accept: {error}") from None
        pair.inner = inner
        return True

    def _refresh(self) -> None:
        now_s = time.monotonic()
        if self._certificate is not None and now_s - self._refreshed_s > _REFRESH_S:
            self._refreshed_s = now_s
            self._certificate.refresh()

    def _refuse(self, pair: _Pair, first: bytes) -> None:
        """Tell a client without TLS what is wrong."""
        if len(first) == HEAD_BYTES and first.startswith(b"CLPT"):
            body = packed(
                {
                    "slug": "tls-failed",
                    "message": "this address speaks TLS, and the connection came without.",
                    "hint": "Its address is tls:HOST:PORT?ca=FILE.",
                }
            )
            number = int.from_bytes(first[16:24], "little")
            head = Head(
                MessageKind.REFUSED,
                rows=RefusalCode.CALL_FAILED,
                id=number,
                payload_bytes=len(body),
            )
            pair.outer.send(head.packed() + body)
        self._linger(pair)

    def _linger(self, pair: _Pair) -> None:
        """End a connection, but read on: unread bytes would have the kernel drop what was sent."""
        pair.refused, pair.until_s, pair.wants = True, time.monotonic() + LINGER_S, _READ
        pair.outer.shutdown(socket.SHUT_WR)

    def _move(self, pair: _Pair) -> bool:
        """Move bytes both ways until both would block. Returns False then, and True after
        _ROUNDS_MAX."""
        tls, inner = pair.tls, pair.inner
        assert tls is not None
        assert inner is not None
        for _ in range(_ROUNDS_MAX):
            outer_wants = inner_wants = 0
            moved = False
            if not pair.in_ and not pair.ended:
                try:
                    data = tls.recv(CHUNK)
                    pair.in_, pair.ended, moved = memoryview(data), not data, True
                except ssl.SSLWantReadError:
                    outer_wants |= _READ
                except ssl.SSLWantWriteError:
                    outer_wants |= _WRITE
            if pair.in_:
                try:
                    pair.in_ = pair.in_[inner.send(pair.in_) :]
                    moved = True
                except BlockingIOError:
                    inner_wants |= _WRITE
            if pair.ended and not pair.in_:
                self._close(pair)
                return False
            if not pair.out:
                try:
                    data = inner.recv(CHUNK)
                    pair.out, moved = memoryview(data), True
                    if not data:
                        self._close(pair)
                        return False
                except BlockingIOError:
                    inner_wants |= _READ
            if pair.out:
                try:
                    pair.out = pair.out[tls.send(pair.out) :]
                    moved = True
                except ssl.SSLWantReadError:
                    outer_wants |= _READ
                except ssl.SSLWantWriteError:
                    outer_wants |= _WRITE
            if not moved:
                self._watch(pair, tls, outer_wants)
                self._watch(pair, inner, inner_wants)
                return False
        return True

    def _watch(self, pair: _Pair, one: socket.socket, events: int) -> None:
        try:
            key = self._selector.get_key(one)
        except KeyError:
            if events:
                self._selector.register(one, events, pair)
            return
        if not events:
            self._selector.unregister(one)
        elif key.events != events:
            self._selector.modify(one, events, pair)

    def _expire(self) -> None:
        now_s = time.monotonic()
        for pair in tuple(self._shaking):
            if pair.until_s < now_s:
                self._close(pair)

    def _close(self, pair: _Pair) -> None:
        self._pairs.discard(pair)
        self._shaking.pop(pair, None)
        for one in (pair.outer, pair.inner):
            if one is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()
