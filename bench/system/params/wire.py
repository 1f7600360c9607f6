"""Benchmark of rows over a loopback socket: a shard beside bare TCP, gRPC and Redis.

A second part compares shared memory with the same shard's unix socket. `python -m
bench.system.params.wire KIND` runs one contender as a process: it prints its address, and serves
until it is killed.
"""

import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import numpy as np

from bench.harness import Goal, Row, absent, interleave, row
from tests.processes import Program, free_ports

ROWS, DIM, TABLE = 512, 64, 100_000
MANY = 8192
TOKEN = "bench"
READY_WITHIN_S = 60.0
PULL = 8 * ROWS
ANSWER = 4 * ROWS * DIM
ShardRequest = Callable[[Any], object]


def rows(quick: bool = False) -> list[Row]:
    from clipper.params import Client

    n, turns = (50, 3) if quick else (400, 7)
    with ExitStack() as stack:
        client = stack.enter_context(ours())
        address = client.connections[0].name.rpartition(" ")[2]
        sleeps = stack.enter_context(Client([address], token=TOKEN, spin_us=0))
        pushed = np.random.default_rng(2).standard_normal((ROWS, DIM)).astype(np.float32)
        cases: dict[str, ShardRequest] = {
            "ours": lambda ids: client.pull("bench", ids),
            "ours, pushed": lambda ids: client.push("bench", ids, pushed),
            "bare TCP": stack.enter_context(bare()),
        }
        missing = {}
        for name, peer in (("gRPC, the document's messages", over_grpc), ("Redis MGET", redis)):
            try:
                cases[name] = stack.enter_context(peer())
            except (ImportError, FileNotFoundError) as error:
                missing[name] = f"not measured: {error}"
        draw = np.random.default_rng(1)
        timed = {name: partial(p50_us, pull, draw, n) for name, pull in cases.items()}
        of_caller = {
            "ours, CPU": partial(cpu_us, lambda ids: sleeps.pull("bench", ids), draw, n),
            "bare TCP, CPU": partial(cpu_us, cases["bare TCP"], draw, n),
        }
        found = interleave(timed | of_caller, turns)
    what = f"{ROWS} rows of {DIM} floats"
    median = {name: sample.median for name, sample in found.items()}
    more, more_cpu = (median[f"ours{part}"] - median[f"bare TCP{part}"] for part in ("", ", CPU"))
    above = (
        f"the caller's CPU, of its interpreter, is {more_cpu:.0f} us more than that of bare TCP; a"
        f" pull takes {more:.0f} us more"
    )
    out = [
        row(
            f"pull of {what}, of bare TCP",
            found["ours"],
            "us",
            "bare TCP",
            found["bare TCP"],
            Goal("at_most", 2),
            bounded_by=above,
        ),
        row(
            f"pull of {what}, without polling: CPU of the caller",
            found["ours, CPU"],
            "us",
            "bare TCP",
            found["bare TCP, CPU"],
        ),
    ]
    goals = {"gRPC, the document's messages": Goal("at_most", 0.1), "Redis MGET": None}
    for name, goal in goals.items():
        if name in found:
            share = median["bare TCP"] / median[name]
            why = f"a socket and its two wakes: bare TCP takes {share:.2g} x here; {above}"
            title = f"pull of {what}, of {name}"
            out.append(row(title, found["ours"], "us", name, found[name], goal, bounded_by=why))
        else:
            out.append(absent(f"pull of {what}, of {name}", "us", missing[name], name, goal))
    out.append(row(f"push of {what}", found["ours, pushed"], "us", "pull", found["ours"]))
    return [*out, *near(quick)]


def near(quick: bool) -> list[Row]:
    """Measure on one host: rows that are written where they are read, beside those that go through
    a socket."""
    from clipper.params import Client
    from clipper_container.tables import Tables

    out, draw = [], np.random.default_rng(1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rows-"))
        client = stack.enter_context(ours(f"unix:{folder}/shard"))
        address = client.connections[0].name.rpartition(" ")[2]
        plain = stack.enter_context(Client([address], token=TOKEN, shared=False))
        tables = stack.enter_context(Tables([address], token=TOKEN))
        for rows, n, turns in ((ROWS, 400, 7), (MANY, 60, 7)):
            cases: dict[str, ShardRequest] = {
                "shared": lambda ids: client.pull("bench", ids).sum(),
                "socket": lambda ids: plain.pull("bench", ids).sum(),
                "container": lambda ids: tables.pull("bench", ids).sum(),
            }
            n, turns = (n // 8, 3) if quick else (n, turns)
            found = interleave(
                {name: partial(p50_us, pull, draw, n, rows) for name, pull in cases.items()}, turns
            )
            what = f"pull of {rows} rows of {DIM} floats, and their sum"
            note = "unix socket, one host"
            out.append(
                row(
                    f"{what}, by shared memory",
                    found["shared"],
                    "us",
                    "the same socket",
                    found["socket"],
                    note=note,
                )
            )
            out.append(
                row(
                    f"{what}, by a container's Tables",
                    found["container"],
                    "us",
                    "Client",
                    found["shared"],
                    note=note,
                )
            )
    return out


def p50_us(pull: ShardRequest, draw: Any, n: int, rows: int = ROWS) -> float:
    took = []
    for _ in range(n):
        ids = draw.integers(0, TABLE, rows)
        begun = time.perf_counter_ns()
        pull(ids)
        took.append(time.perf_counter_ns() - begun)
    return float(np.median(took)) / 1e3


def cpu_us(pull: ShardRequest, draw: Any, n: int) -> float:
    """Return the CPU time of this thread for one pull."""
    each = draw.integers(0, TABLE, (n, ROWS))
    begun = time.thread_time_ns()
    for ids in each:
        pull(ids)
    return (time.thread_time_ns() - begun) / n / 1e3


# -- those who are asked


@contextmanager
def process(*words: str, module: str = "bench.system.params.wire") -> Iterator[str]:
    """Start `python -m module words`. Yield the first line that it prints."""
    with Program(sys.executable, "-m", module, *words, apart=True) as program:
        yield program.line(READY_WITHIN_S)


@contextmanager
def ours(*at: str) -> Iterator[Any]:
    from clipper.params import Client, TableSpec

    with process("ours", *(at or ("",))) as address, Client([address], token=TOKEN) as client:
        client.create(TableSpec("bench", DIM))
        ids = np.arange(TABLE)
        for first in range(0, TABLE, 4096):
            part = ids[first : first + 4096]
            client.push("bench", part, np.ones((len(part), DIM), np.float32))
        yield client


@contextmanager
def bare() -> Iterator[ShardRequest]:
    with process("bare") as address:
        line = socket.create_connection(("127.0.0.1", int(address)))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        out = np.empty((ROWS, DIM), np.float32)
        into = out.data.cast("B")

        def ask(ids: Any) -> None:
            line.sendall(ids)
            fill(line, into)

        with line:
            yield ask


def fill(line: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        n = line.recv_into(into[at:])
        if not n:
            raise ConnectionError("closed")
        at += n


@contextmanager
def over_grpc() -> Iterator[ShardRequest]:
    import grpc

    request, tensor = messages()
    with process("grpc") as address, grpc.insecure_channel(f"127.0.0.1:{address}") as channel:
        call = channel.unary_unary(
            "/PServer/pull_embedding_vector", request.SerializeToString, tensor.FromString
        )

        def ask(ids: Any) -> Any:
            answer = call(request(name="bench", ids=ids.tolist()))
            return np.frombuffer(answer.content, np.float32).reshape(ROWS, DIM)

        yield ask


def messages() -> tuple[Any, Any]:
    """Return the messages PullEmbeddingVectorRequest and Tensor of the design's appendix."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="pserver.proto", syntax="proto3")
    fields = {
        "PullEmbeddingVectorRequest": [("name", 1, 9, 1), ("ids", 2, 3, 3)],
        "Tensor": [
            ("name", 1, 9, 1),
            ("data_type", 2, 5, 1),
            ("dim", 3, 3, 3),
            ("content", 4, 12, 1),
            ("indices", 5, 3, 3),
        ],
    }
    for name, its in fields.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label in its:
            message.field.add(name=field, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    both = [message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in fields]
    return both[0], both[1]


@contextmanager
def redis() -> Iterator[ShardRequest]:
    import redis as peer

    if shutil.which("redis-server") is None:
        raise FileNotFoundError("no redis-server. python tools/fetch.py redis")
    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        (port,) = free_ports(1)
        command = ["redis-server", "--port", str(port), "--dir", folder, "--save", ""]
        with Program(*command, until="Ready to accept connections"):
            client = peer.Redis(port=port)
            whole = np.ones(DIM, np.float32).tobytes()
            for at in range(0, TABLE, 10_000):
                client.mset({str(i): whole for i in range(at, at + 10_000)})
            yield lambda ids: np.frombuffer(
                b"".join(cast("list[bytes]", client.mget(ids.tolist()))), np.float32
            )


# -- as processes


def serve_ours(address: str, cert: str = "", key: str = "") -> None:
    from clipper.params.shard.server import ShardServer
    from clipper.params.shard.shard import ShardConfig
    from clipper.settings.params import ParamsSettings

    address = address or f"tcp:127.0.0.1:{free_ports(1)[0]}"
    settings = ParamsSettings(shards=1, tls_cert=cert, tls_key=key)
    server = ShardServer(ShardConfig(0, (address,), settings, TOKEN, None)).start()
    server.ready.wait(20)
    print(address, flush=True)
    server.wait()


def serve_bare() -> None:
    table = np.ones((TABLE, DIM), np.float32)
    ids, out = np.empty(ROWS, np.int64), np.empty((ROWS, DIM), np.float32)
    with socket.create_server(("127.0.0.1", 0)) as door:
        print(door.getsockname()[1], flush=True)
        line, _ = door.accept()
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            fill(line, ids.data.cast("B"))
            np.take(table, ids, axis=0, out=out, mode="clip")
            line.sendall(out.data)


def serve_grpc() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    request_type, tensor = messages()
    table = np.ones((TABLE, DIM), np.float32)

    def pull(request: Any, _: Any) -> Any:
        found = np.take(table, np.array(request.ids, np.int64), axis=0)
        return tensor(
            name=request.name,
            data_type=5,
            dim=found.shape,
            content=found.tobytes(),
            indices=request.ids,
        )

    handler = grpc.unary_unary_rpc_method_handler(
        pull, request_type.FromString, tensor.SerializeToString
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("PServer", {"pull_embedding_vector": handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    servers: dict[str, Callable[..., None]] = {
        "ours": serve_ours,
        "bare": serve_bare,
        "grpc": serve_grpc,
    }
    servers[sys.argv[1]](*sys.argv[2:])
