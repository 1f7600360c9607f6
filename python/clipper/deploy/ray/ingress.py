"""One address for several servers: forwards TCP connections to servers that are ready.

Bytes are copied as they are, so HTTP, gRPC and TLS pass unchanged, and a connection stays with one
server until either side closes it; a client that only ends what it sends gets its answers. One that
has closed its connection resets it when the server writes to it; then the server's is reset too. A
server is ready while `GET /v2/health/ready` is answered with 200. A new connection goes to the next
ready server in turn, or to the one after it if that one refuses. A server that breaks a connection,
or closes it while it owes an answer, gets no new ones until its next probe. If no probe hears of a
server's machine for `SILENT_S`, its connections are aborted, so that clients try again elsewhere. A
server that was taken out or has moved is probed until its connections have ended. TCP_USER_TIMEOUT
was rejected: it also ends a connection whose server lives and reads nothing for a while. A proxy of
HTTP was rejected: it would have to answer for a query whose server was killed, and cannot know
whether it may be repeated; a broken connection says what is known.
"""

import asyncio
import contextlib
import errno
import itertools
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

from clipper.errors import ConfigError
from clipper.host_port import join_host_port

CONNECTIONS_MAX: Final = 8192  # of clients; each needs two descriptors
CONNECT_S: Final = 1.0
PROBE_GAP_S: Final = 0.1
PROBE_S: Final = 2.0
SILENT_S: Final = 5.0
_KEEPALIVE_S: Final = 2  # of a silent connection to a server
STALLED_S: Final = 60.0  # a client that takes nothing for so long is aborted
_LINGER_S: Final = 1.5  # a client is read on after its last response; a server waits 2 s
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: a socket is reset when it is closed
_HEALTH: Final = b"GET /v2/health/ready HTTP/1.1\r\nHost: clipper\r\nConnection: close\r\n\r\n"


class Backend(NamedTuple):
    """A server. addresses: URL or HOST:PORT by port name; `http` is needed, and is probed."""

    name: str
    addresses: Mapping[str, str]

    @property
    def place(self) -> tuple[str, str]:
        """Its name, and the address that is probed."""
        return self.name, self.addresses.get("http", "")


def host_port(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or of a URL. Raises: ConfigError."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(address if "//" in address else f"//{address}")
        if parts.hostname and parts.port is not None:
            return parts.hostname, parts.port
    raise ConfigError(f"{address!r} is not an address.", hint="Give HOST:PORT.")


class _Pipe(asyncio.Protocol):
    """One side of a forwarded connection: writes what it reads to the other side."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Pipe | None = None
        self.is_paused = False  # more than it can send waits, so the other side is not read
        self.has_ended = False  # it has sent all
        self.is_ended = False  # by the other side
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        self.is_paused = True
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self.transport is not None and not self.transport.is_closing():
            self._allow()
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._allow()
        if self.other is not None and self.other.transport is not None:
            self.other.is_ended = True
            self.other.limit()  # `close` waits until the peer has taken what is left
            self.other.transport.abort() if error else self.other.transport.close()

    def limit(self) -> None:
        """Abort it after `STALLED_S`, unless its peer reads or leaves."""
        self._allow()
        self._stalled = asyncio.get_running_loop().call_later(STALLED_S, _abort, self)

    def _allow(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()


class _ServerPipe(_Pipe):
    """A server's side; it notices whether the server answers."""

    def __init__(self, ingress: "Ingress", name: str, client: _Pipe) -> None:
        super().__init__()
        self._ingress, self._name, self._client = ingress, name, client
        self.other, self._has_answered = client, False
        self.owes = True  # it has sent nothing since the client did

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        end = transport.get_extra_info("socket")
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S),
        ):
            end.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        self._has_answered = True
        self.owes = False
        super().data_received(data)

    def eof_received(self) -> bool:
        """Send the client the end, and read it on, or its kernel could discard the response."""
        client = self._client.transport
        if not self._has_answered or client is None or client.is_closing():
            return False
        assert self.transport is not None
        if self.owes and not self._client.has_ended:
            self._ingress.suspect(self._name)
        self.has_ended = True
        if self._client.has_ended:
            return False
        client.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self.transport.close)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if self._client.other is not self:  # it took too long to connect
            return
        if self.has_ended:
            error = None
        elif not (self.is_ended or self._client.has_ended) and (error or self.owes):
            self._ingress.suspect(self._name)
        super().connection_lost(error)


class _ClientPipe(_Pipe):
    """A client's side, which is not read before it has a server."""

    def __init__(self, ingress: "Ingress", port: str) -> None:
        super().__init__()
        self._ingress, self._port = ingress, port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # after the loop's own start of reading, which Python 3.11.2 does in spite of a pause
        asyncio.get_running_loop().call_soon(cast("asyncio.Transport", transport).pause_reading)
        self._ingress.accept(self, self._port)

    def data_received(self, data: bytes) -> None:
        if isinstance(self.other, _ServerPipe):
            self.other.owes = True
        super().data_received(data)

    def eof_received(self) -> bool:
        """Send the server the end, and the client the response, which it may wait for."""
        server = None if self.other is None else self.other.transport
        if self.other is None or self.other.has_ended or server is None or server.is_closing():
            return False
        self.has_ended = True
        server.write_eof()
        return True

    def check(self) -> None:
        """Abort the connection if a client that has sent all has reset it: the event loop does not
        notice that while it neither reads nor writes."""
        if self.has_ended and self.transport is not None:
            end = self.transport.get_extra_info("socket")
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.limit()

    def connection_lost(self, error: Exception | None) -> None:
        """Reset the server's side too, if the server knows only that the client sends no more."""
        server = None if self.other is None else self.other.transport
        if self.has_ended and server is not None:
            end = server.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            server.abort()
        super().connection_lost(error)
        self._ingress.remove(self)


class Ingress:
    """Forwards connections at its addresses to servers that are ready.

    listen: HOST:PORT by port name (`http`, `grpc`, `admin`); port 0 is any free port. Threads:
    any; the event loop has its own.

    Raises: ConfigError for an address that cannot be used.
    """

    def __init__(self, listen: Mapping[str, str]) -> None:
        self.addresses: dict[str, str] = {}
        self._backends: dict[str, Backend] = {}
        self._seen_s: dict[tuple[str, str], float] = {}  # by place, when it replied last
        self._ready: frozenset[str] = frozenset()
        self._suspected_s: dict[str, float] = {}  # by name, when it last broke a connection
        self._in_probe: set[tuple[str, str]] = set()  # places that are being probed
        self._pipes: dict[_ClientPipe, Backend | None] = {}  # with its server
        self._turn = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="clipper-ingress", daemon=True
        )
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(listen), self._loop).result()
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> frozenset[str]:
        """The names of the servers that are ready."""
        return self._ready

    def route(self, backends: Iterable[Backend]) -> None:
        """Forward new connections to these servers; those of others stay until they end."""
        new = {one.name: one for one in backends}
        self._loop.call_soon_threadsafe(self._set_backends, new)

    def close(self) -> None:
        """Abort all connections, and stop listening."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # -- in the event loop

    async def _listen(self, listen: Mapping[str, str]) -> None:
        self._servers: list[asyncio.Server] = []
        for port, address in listen.items():
            try:
                made = partial(_ClientPipe, self, port)
                server = await self._loop.create_server(made, *host_port(address))
            except OSError as error:
                raise ConfigError(f"cannot listen at {address}: {error.strerror}.") from None
            self._servers.append(server)
            host, number = server.sockets[0].getsockname()[:2]
            self.addresses[port] = join_host_port(host, number)
        self._run(self._probe_all())

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in [*self._tasks]:
            task.cancel()
        for pipe in [*self._pipes]:
            _abort(pipe)
            if pipe.other is not None:
                _abort(pipe.other)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports report their end

    def _run(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_backends(self, new: dict[str, Backend]) -> None:
        self._ready &= {name for name, one in new.items() if self._backends.get(name) == one}
        self._backends = new
        self._suspected_s = {name: at for name, at in self._suspected_s.items() if name in new}

    def accept(self, pipe: "_ClientPipe", port: str) -> None:
        """Connect a new client to a server, or end it if there are too many."""
        if len(self._pipes) >= CONNECTIONS_MAX:
            _abort(pipe)
            return
        self._pipes[pipe] = None
        self._run(self._connect(pipe, port))

    def remove(self, pipe: "_ClientPipe") -> None:
        """Forget a client that has disconnected."""
        self._pipes.pop(pipe, None)

    def suspect(self, name: str) -> None:
        """Send no new connection to a server before a probe that begins from now on passes."""
        self._ready -= {name}
        self._suspected_s[name] = time.monotonic()

    async def _connect(self, pipe: _ClientPipe, port: str) -> None:
        """Try each ready server once, then those that are not; close the client's connection if
        none accepts."""
        turn = next(self._turn)
        ready = [one for name, one in self._backends.items() if name in self._ready]
        others = [one for name, one in self._backends.items() if name not in self._ready]
        for backend in (*_rotated(ready, turn), *_rotated(others, turn)):
            if port not in backend.addresses or pipe not in self._pipes:
                continue
            made = partial(_ServerPipe, self, backend.name, pipe)
            with contextlib.suppress(OSError, TimeoutError, ValueError, ConfigError):
                async with asyncio.timeout(CONNECT_S):
                    place = host_port(backend.addresses[port])
                    _, server = await self._loop.create_connection(made, *place)
                pipe.other = server
                if pipe not in self._pipes:
                    _abort(server)  # the client went away meanwhile
                    return
                self._pipes[pipe] = backend
                assert pipe.transport is not None
                pipe.transport.resume_reading()
                return
        _abort(pipe)

    async def _probe_all(self) -> None:
        while True:
            for pipe in self._pipes:
                pipe.check()
            left = (one for one in self._pipes.values() if one is not None)
            probed = {one.place: one for one in (*left, *self._backends.values())}
            self._seen_s = {at: when for at, when in self._seen_s.items() if at in probed}
            for place, one in probed.items():
                if place not in self._in_probe:  # a silent one does not delay the others
                    self._run(self._probe(one))
            await asyncio.sleep(PROBE_GAP_S)

    async def _probe(self, backend: Backend) -> None:
        name, place, now_s = backend.name, backend.place, time.monotonic()
        self._in_probe.add(place)
        try:
            alive, ready = await _health(place[1])
        except OSError:  # this process has no room to ask: nothing is known
            return
        finally:
            self._in_probe.discard(place)
        if alive:
            self._seen_s[place] = now_s
        elif now_s - self._seen_s.setdefault(place, now_s) > SILENT_S:
            for pipe, of in [*self._pipes.items()]:
                if of is not None and of.place == place:
                    _abort(pipe)
        if self._backends.get(name) == backend:
            ready = ready and now_s > self._suspected_s.get(name, 0.0)  # else an older state
            self._ready = self._ready | {name} if ready else self._ready - {name}


async def _health(address: str) -> tuple[bool, bool]:
    """Ask a server whether it is ready; return whether its machine replied, and whether it is
    ready. Its certificate is not checked, as by probes of Kubernetes. Raises: OSError if this
    process has no descriptor or memory for it."""
    try:
        async with asyncio.timeout(PROBE_S):
            tls = _UNCHECKED if address.startswith("https:") else None
            reader, writer = await asyncio.open_connection(*host_port(address), ssl=tls)
            try:
                writer.write(_HEALTH)
                status = await reader.readline()
                return True, b" 200 " in status
            finally:
                writer.close()
    except (ConnectionError, ssl.SSLError):  # its machine refuses: it ends, or starts
        return True, False
    except (OSError, TimeoutError, ValueError, ConfigError) as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise
        return False, False


_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNCHECKED: Final = ssl._create_unverified_context()


def _rotated(backends: list[Backend], turn: int) -> list[Backend]:
    first = turn % len(backends) if backends else 0
    return [*backends[first:], *backends[:first]]


def _abort(pipe: _Pipe) -> None:
    if pipe.transport is not None:
        pipe.transport.abort()
