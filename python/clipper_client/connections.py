"""Connections over sockets that block, and the pool that keeps them."""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Sequence

from clipper_client.address import Address
from clipper_client.attempts import ConnectionEnded
from clipper_client.http_wire import NotHttp, Response, ResponseReader

_RECEIVED_BYTES_MAX = 1 << 16  # at once


class BlockingConnection:
    """A connection, which has one request at a time. Threads: one at a time."""

    __slots__ = ("_socket",)

    def __init__(self, address: Address, until_s: float) -> None:
        """Connect. Raises OSError; ssl.SSLError where TLS fails; TimeoutError at until_s."""
        plain = socket.create_connection((address.host, address.port), _left_s(until_s))
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.tls is None:
                self._socket = plain
            else:
                plain.settimeout(_left_s(until_s))
                self._socket = address.tls.wrap_socket(plain, server_hostname=address.host)
        except BaseException:
            plain.close()
            raise

    def exchange(
        self, parts: Sequence[bytes | memoryview], reader: ResponseReader, until_s: float
    ) -> Response:
        """Send a request and return the response. Raises ConnectionEnded; TimeoutError at until_s.
        After an error the connection is to be closed."""
        is_sent = self._send(parts, until_s)
        response = self.receive(reader, until_s)
        return response if is_sent else response._replace(closes=True)

    def receive(self, reader: ResponseReader, until_s: float) -> Response:
        """Receive the response, or more of one that has events. Raises what exchange raises."""
        try:
            return self._receive(reader, until_s)
        except TimeoutError:
            raise
        except (OSError, NotHttp) as error:
            why = getattr(error, "strerror", "") or str(error) or type(error).__name__
            raise ConnectionEnded(why, reader.begun) from None

    def _send(self, parts: Sequence[bytes | memoryview], until_s: float) -> bool:
        """Send a request; return False if the server takes no more, which may have answered."""
        try:
            for part in parts:
                self._socket.settimeout(_left_s(until_s))
                self._socket.sendall(part)
        except TimeoutError:
            raise
        except OSError:
            return False
        return True

    def _receive(self, reader: ResponseReader, until_s: float) -> Response:
        while True:
            self._socket.settimeout(_left_s(until_s))
            data = self._socket.recv(_RECEIVED_BYTES_MAX)
            response = reader.feed(data) if data else reader.at_end()
            if response is not None:
                return response
            if not data:
                raise ConnectionEnded("it closed the connection", reader.begun)

    def is_stale(self) -> bool:
        """Return whether the server has closed the connection, or sent what nobody asked for."""
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _left_s(until_s: float) -> float:
    """Return the seconds that are left. Raises TimeoutError when there are none."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


class PoolClosed(Exception):
    """A connection was asked for of a pool that is closed."""


class ConnectionPool:
    """The connections to one server: those that are idle are kept, and those in use have a limit.
    Threads: any. A process that was forked has connections of its own."""

    def __init__(self, address: Address, connections_max: int) -> None:
        self._address = address
        self._connections_max = connections_max
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._idle: list[BlockingConnection] = []
        self._used = 0
        # The collector may end an AnswerParts, which gives its connection back, while this thread
        # holds the lock.
        self._changed = threading.Condition(threading.RLock())

    def take(self, until_s: float) -> BlockingConnection:
        """Return a connection, the last one that was used or a new one. Waits while all are in use.

        Raises TimeoutError at until_s; OSError, UnicodeError if there is no server; PoolClosed.
        """
        if self._process != os.getpid():
            self._begin_in_fork()
        while (idle := self._take_idle(until_s)) is not None:
            if not idle.is_stale():
                return idle
            idle.close()
            self._leave()
        try:
            return BlockingConnection(self._address, until_s)
        except BaseException:
            self._leave()
            raise

    def _take_idle(self, until_s: float) -> BlockingConnection | None:
        """Count a connection as used and return an idle one; None if there is none."""
        with self._changed:
            while self._used >= self._connections_max and not self._closed:
                self._changed.wait(_left_s(until_s))
            if self._closed:
                raise PoolClosed
            self._used += 1
            return self._idle.pop() if self._idle else None

    def _leave(self) -> None:
        with self._changed:
            self._used -= 1
            self._changed.notify()

    def give(self, connection: BlockingConnection, keep: bool) -> None:
        """Give a connection back; it is closed unless it is to be kept."""
        with self._changed:
            self._used -= 1
            self._changed.notify()
            if keep and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what is idle now, and the others when they are given back."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for connection in idle:
            connection.close()

    def _begin_in_fork(self) -> None:
        """Forget the connections of the parent; the descriptors here are copies of its own."""
        inherited = self._idle
        self._begin()
        for connection in inherited:
            connection.close()
