"""Servers that are measured over HTTP, each in a process of its own: our server, and the
least that uvloop and httptools can do.

`python -m bench.system.frontends.http_servers KIND` prints its address, then its CPU seconds for
every line it reads.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import httptools
import msgspec
import numpy as np
import uvloop

import clipper
from bench.system.fixtures.noop import first, fragile
from clipper_demo import digits
from tests.processes import Program


class Trivial(asyncio.Protocol):
    """The ceiling: reads a request, and writes an answer that is always the same."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.answer(self._body)
        self._body = b""

    def answer(self, body: bytes) -> None:
        text = b'{"output":1.0}'
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(text)
        )
        self._transport.write(head + text)


class _Body(msgspec.Struct):
    input: list[float]


_DECODER = msgspec.json.Decoder(_Body)


class Parsing(Trivial):
    """The same, but it reads the numbers: JSON by msgspec, and an array of them."""

    def answer(self, body: bytes) -> None:
        row = np.array(_DECODER.decode(body).input)
        text = msgspec.json.encode({"output": float(row[0])})
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(text)
        )
        self._transport.write(head + text)


async def _trivial(kind: type[Trivial]) -> None:
    server = await asyncio.get_running_loop().create_server(kind, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    await asyncio.get_running_loop().run_in_executor(None, report, f"{host}:{port}")
    server.close()


def _ours(workers: int, pid_file: str = "") -> None:
    """Serve the models of the benchmark.

    workers: threads that answer without Python; 0: Python answers all. pid_file: if given, the
    linear model is the one of noop.fragile, as the peers of rest_peers have it.
    """
    from sklearn.svm import LinearSVC  # type: ignore[import-untyped,unused-ignore]

    scans = digits.load()
    linear = LinearSVC(max_iter=50).fit(scans.train_x / 16, scans.train_y)
    model = fragile(linear, pid_file) if pid_file else linear
    with clipper.start(http={"address": "127.0.0.1:0", "workers": workers}) as server:
        _deploy_noops(server)
        server.deploy("linear", model, input="f64[64]", retry_singly=bool(pid_file))
        server.app("linear", models=["linear"], slo_ms=1000)
        report(server.http_address)


def _deploy_noops(server: clipper.ClipperServer) -> None:
    for size in (1, 784):
        server.deploy(f"noop{size}", first, input=f"f64[{size}]")
        server.app(f"noop{size}", models=[f"noop{size}"], slo_ms=1000)


def _noops(keys_file: str = "", cert: str = "", key: str = "") -> None:
    """Serve the models that do nothing, which the cache answers for, and applications of three of
    them. keys_file: of API keys, which queries need then. cert, key: of TLS."""
    http = {"address": "127.0.0.1:0", "workers": 1, "api_keys_file": keys_file}
    http |= {"tls_cert": cert, "tls_key": key}
    with clipper.start(http=http) as server:
        _deploy_noops(server)
        three = [f"three{i}" for i in range(3)]
        for name in three:
            server.deploy(name, first, input="f64[1]")
        for policy in ("ensemble", "stacking", "exp3"):
            server.app(f"{policy}3", models=three, slo_ms=1000, policy=policy)
        server.app("majority3", models=three, slo_ms=1000, decider="majority")
        report(server.http_address)


def report(address: str) -> None:
    """Print where it listens, then CPU seconds for every line read."""
    print(address, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


class Process:
    """A server in a process of its own. address: host:port.  cpu_s(): what it has used so far, its
    containers aside."""

    def __init__(self, *kind: str, module: str = "bench.system.frontends.http_servers") -> None:
        self._program = Program(sys.executable, "-W", "ignore", "-m", module, *kind, apart=True)
        self.address, self.pid = self._program.line(), self._program.pid

    def cpu_s(self) -> float:
        self._program.say()
        return float(self._program.line())

    def close(self) -> None:
        self._program.end_input()
        self._program.wait()


@contextlib.contextmanager
def running(
    *kinds: str, module: str = "bench.system.frontends.http_servers"
) -> Iterator[list[Process]]:
    with contextlib.ExitStack() as stack:
        started = []
        for kind in kinds:
            started.append(Process(kind, module=module))
            stack.callback(started[-1].close)
        yield started


if __name__ == "__main__":
    which = sys.argv[1]
    if which == "fragile":
        _ours(1, sys.argv[2])
    elif which == "noops":
        _noops(*sys.argv[2:])
    elif which in ("ours", "python"):
        _ours(1 if which == "ours" else 0)
    else:
        uvloop.run(_trivial(Parsing if which == "parsing" else Trivial))
