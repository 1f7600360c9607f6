"""A load generator for HTTP: some keep-alive connections on uvloop, prebuilt requests, every
answer's status looked at.

closed: each connection asks again once it is answered. paced: requests at Poisson times, each on
the connection that has been free the longest, or queued behind another when none is; every latency
counts from the time the request was meant to leave.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import uvloop

from clipper.load.open_loop import arrivals, send_on_time

Next = Callable[[], bytes]  # the next request, as bytes


@dataclass
class Found:
    """seconds: from the first request to the last response.  latency_us: of each request.  bad:
    responses that were not 200."""

    seconds: float = 0.0
    latency_us: list[float] = field(default_factory=list)
    bad: int = 0

    @property
    def per_s(self) -> float:
        return len(self.latency_us) / self.seconds

    def quantile_us(self, share: float) -> float:
        return float(np.quantile(self.latency_us, share)) if self.latency_us else float("nan")


class _Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, found: Found, freed: "Callable[[_Client], None]") -> None:
        self._found, self._freed = found, freed
        self._rest = b""
        self._since = 0.0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # of TCP there is no other

    def ask(self, request: bytes, since: float) -> None:
        self._since = since
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._rest = self._rest + data if self._rest else data
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            return
        at = self._rest.find(b"ontent-length: ", 0, end)
        if at < 0:
            at = self._rest.find(b"ontent-Length: ", 0, end)
        if at < 0:  # in chunks, as one peer answers
            if not self._rest.endswith(b"\r\n0\r\n\r\n"):
                return
        elif len(self._rest) < end + 4 + int(self._rest[at + 15 : self._rest.find(b"\r", at)]):
            return
        self._found.latency_us.append((time.perf_counter() - self._since) * 1e6)
        self._found.bad += not self._rest.startswith(b"HTTP/1.1 200")
        self._rest = b""
        self._freed(self)


async def _connect(
    host: str, port: int, count: int, found: Found, freed: "Callable[[_Client], None]"
) -> list[_Client]:
    loop = asyncio.get_running_loop()
    return [
        (await loop.create_connection(lambda: _Client(found, freed), host, port))[1]
        for _ in range(count)
    ]


def closed(address: str, requests: Next, connections: int, seconds: float) -> Found:
    return uvloop.run(_closed(address, requests, connections, seconds))


async def _closed(address: str, requests: Next, connections: int, seconds: float) -> Found:
    found, done = Found(), asyncio.Event()
    open_now = connections
    until = float("inf")

    def freed(client: _Client) -> None:
        nonlocal open_now
        now = time.perf_counter()
        if now < until:
            client.ask(requests(), now)
            return
        open_now -= 1
        if not open_now:
            done.set()

    host, _, port = address.rpartition(":")
    clients = await _connect(host, int(port), connections, found, freed)
    begun = time.perf_counter()
    until = begun + seconds
    for client in clients:
        client.ask(requests(), time.perf_counter())
    await done.wait()
    found.seconds = time.perf_counter() - begun
    for client in clients:
        client.transport.close()
    return found


def paced(
    address: str, requests: Next, rate: float, seconds: float, connections: int = 64, seed: int = 1
) -> Found:
    return uvloop.run(_paced(address, requests, rate, seconds, connections, seed))


async def _paced(
    address: str, requests: Next, rate: float, seconds: float, connections: int, seed: int
) -> Found:
    found, free, waiting = Found(), deque[_Client](), deque[float]()

    def freed(client: _Client) -> None:
        if waiting:
            client.ask(requests(), waiting.popleft())
        else:
            free.append(client)

    host, _, port = address.rpartition(":")
    clients = await _connect(host, int(port), connections, found, freed)
    free.extend(clients)
    due = arrivals(rate, seconds, seed)
    begun = time.perf_counter() + 0.01

    def send(at: float) -> None:
        if free:
            free.popleft().ask(requests(), at)
        else:
            waiting.append(at)

    await send_on_time(iter((due + begun).tolist()), send, asyncio.Event())
    while len(found.latency_us) < len(due):
        await asyncio.sleep(0.005)
    found.seconds = time.perf_counter() - begun
    for client in clients:
        client.transport.close()
    return found
