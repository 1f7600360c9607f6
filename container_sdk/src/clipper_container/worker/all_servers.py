"""Serves one model to several servers at once: to all that are listed, or that a host name resolves
to.

Each server has a connection and a thread of its own; the model evaluates one batch at a time, in
the order in which they came. The name is looked up again and again, so servers that come are
connected to, and those that are gone from the name are left once their connection is lost. A server
that says GOODBYE or rejects the container is tried again later, for as long as its address is
listed.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable

from clipper_container import backoff
from clipper_container.backoff import Backoff
from clipper_container.model import Model
from clipper_container.wire.transport import (
    Stopping,
    StopSwitch,
    parse_address,
)
from clipper_container.worker.handshake import ContainerOptions, ContainerRejected
from clipper_container.worker.serve import serve
from clipper_container.worker.turns import Turns

CHECK_S = 2.0  # between two look-ups of the names
SERVERS_MAX = 1024
JOIN_S = 30.0  # for batches that are being answered when a stop is requested


class _Server(threading.Thread):
    """The connection to one server. over: it has ended; rejected: why, if the server did not let
    this container in."""

    def __init__(self, address: str, run: Callable[[], None]) -> None:
        super().__init__(name=f"clipper-server-{address}", daemon=True)
        self._run = run
        self.started_s = time.monotonic()
        self.over = False
        self.rejected = ""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except ContainerRejected as refused:
            self.rejected = str(refused)
        except BaseException as error:
            self.error = error
        finally:
            self.over = True


class AllServers:
    """The servers of one container. Threads: one calls run().

    addresses: each `unix:/path` or `tcp:host:port`; a host name stands for all its addresses.
    resolve: returns what these are at present.
    """

    def __init__(
        self,
        model: Model,
        addresses: str,
        options: ContainerOptions,
        stop: StopSwitch,
        alive: str = "",
        resolve: Callable[[Iterable[str]], list[str]] | None = None,
    ) -> None:
        self._model, self._options, self._stop, self._alive = model, options, stop, alive
        self._addresses = addresses.split(",")
        for address in self._addresses:
            parse_address(address)
        self._resolve = resolve or resolved
        self._turn = Turns()
        self._listed: list[str] = []
        self._servers: dict[str, _Server] = {}
        self._pauses: dict[str, tuple[Backoff, float]] = {}

    def run(self) -> None:
        """Serve until a stop is requested. Raises: ContainerRejected when all servers reject this
        container; ValueError for an invalid address; what ended a connection unexpectedly."""
        has_found = True
        try:
            while True:
                found = self._resolve(self._addresses)
                if has_found and not found:
                    why = f"cannot resolve {', '.join(self._addresses)}; trying again"
                    print(f"model '{self._options.name}': {why}", file=sys.stderr, flush=True)
                has_found = bool(found)
                self._listed = found or self._listed
                self._check_addresses()
                self._stop.wait(CHECK_S)
                self._stop.drain()
        except Stopping:
            until = time.monotonic() + JOIN_S
            for server in self._servers.values():
                server.join(max(0.0, until - time.monotonic()))

    def _check_addresses(self) -> None:
        rejections = []
        for address, server in list(self._servers.items()):
            if server.error is not None:
                raise server.error
            if server.over:
                del self._servers[address]
                if server.rejected and address in self._listed:
                    rejections.append(f"{address}: {server.rejected}")
                known, _ = self._pauses.get(address, (Backoff(steady_s=backoff.S_MAX), 0.0))
                now_s = time.monotonic()
                self._pauses[address] = known, now_s + known.ended(now_s - server.started_s)
        self._pauses = {at: pause for at, pause in self._pauses.items() if at in self._listed}
        if rejections:
            why = "; ".join(rejections)
            print(f"model '{self._options.name}': rejected by {why}", file=sys.stderr)
            if len(rejections) == len(self._listed):
                raise ContainerRejected(why)
        for address in self._listed[:SERVERS_MAX]:
            if address not in self._servers and self._is_due(address):
                self._start(address)

    def _is_due(self, address: str) -> bool:
        return time.monotonic() >= self._pauses.get(address, (None, 0.0))[1]

    def _start(self, address: str) -> None:
        server = self._servers[address] = _Server(
            address,
            lambda: serve(
                self._model,
                address,
                self._options,
                self._stop,
                self._alive,
                turn=self._turn,
                is_wanted=lambda: address in self._listed,
            ),
        )
        server.start()


def resolved(addresses: Iterable[str]) -> list[str]:
    """Return all addresses that these stand for; those of a name that cannot be resolved now are
    missing."""
    found: dict[str, None] = {}
    for address in addresses:
        kind, host, port = parse_address(address)
        if kind == "unix":
            found[address] = None
            continue
        try:
            each = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            continue
        for family, *_, place in each:
            if family == each[0][0]:  # a host of two families is one server
                ip = str(place[0])
                found[f"tcp:[{ip}]:{port}" if ":" in ip else f"tcp:{ip}:{port}"] = None
    return list(found)
