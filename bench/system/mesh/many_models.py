"""5 000 ONNX models in a node that holds 500, over HTTP: what share is answered within 100 ms,
refusals counted as failures?

The node is `clipper node` in a process of its own; an open loop sends requests of the Open
Inference Protocol. Popularity follows Zipf's law with exponent 1; in the second run the ranks move
all the time, as users' interests do, and in the third half of the models change places at once.
Each request states its deadline, as clients of Clockwork do.

Beside each result stands its bound: what a node would answer that knew all queries in advance,
keeps the models that are used next (L. Belady, 1966), and loads the others one after another at
the rate that this node reaches when every query needs a load. The note says what the queries that
were not answered in time died of, as the node tells it, and what the processes used of a core.
Source of the question: A. Gujarati et al., "Serving DNNs like Clockwork", OSDI 2020, section 6.
"""

import asyncio
import contextlib
import heapq
import json
import os
import re
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httptools
import numpy as np

from bench.harness import Goal, Row, absent, row
from bench.system.mesh.story import Node
from clipper.load.open_loop import arrivals, send_on_time

MODELS, LOADED_MAX = 5000, 500
WIDTH = 64
RATE = 300.0  # queries a second
SLO_MS = 100.0
CONNECTIONS = 128
PATIENCE_S = 20.0
DRIFT_S = 0.2  # after so long the next model enters the ranks at the top
Array = np.ndarray[Any, Any]


def main(quick: bool = False) -> list[Row]:
    """Register the models, warm the node up, and measure the three kinds of popularity."""
    seconds, count = (3.0, 300) if quick else (60.0, MODELS)
    title = "many models over HTTP"
    try:
        import onnx
    except ImportError:
        return [absent(title, "%", "not measured: no onnx. pip install onnx onnxruntime")]
    del onnx
    with tempfile.TemporaryDirectory(prefix="many-") as name:
        folder = Path(name)
        (folder / "linear.onnx").write_bytes(linear())
        node = Node("a", folder, f"sqlite:{folder}/mesh.db", "[mesh]\n", places(count))
        try:
            register(node, folder, count)
            rate = loads_per_s(node, count, seconds / 4)
            warm = steady(count, RATE, seconds / 2, seed=1)
            offer(node, warm, seconds / 2)
            found = [row("loads while every query needs one", rate, "1/s")]
            for kind, draw in KINDS.items():
                models, cpu_s = draw(count, RATE, seconds, seed=2), used_s(node.program.pid)
                loads, began_s = node.mesh().stats()["loads"], time.perf_counter()
                outcome = offer(node, models, seconds)
                took_s = time.perf_counter() - began_s
                outcome.loads = node.mesh().stats()["loads"] - loads
                outcome.cores = [
                    (after - before) / took_s
                    for before, after in zip(cpu_s, used_s(node.program.pid), strict=True)
                ]
                best = bound(warm, models, arrivals(RATE, seconds, seed=1), places(count), rate)
                found += rows_of(kind, outcome, *best)
                warm = models
        finally:
            node.stop()
    return found


def linear() -> bytes:
    """Build an ONNX model, f32[n, 64] to f32[n, 10]."""
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(1).standard_normal((WIDTH, 10)).astype("f4")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())


def register(node: Node, folder: Path, count: int) -> None:
    """Register the models m0 to m<count - 1>, each with a file of its own."""

    def one(number: int) -> None:
        path = folder / f"m{number}.onnx"
        path.hardlink_to(folder / "linear.onnx")
        node.mesh().register(f"m{number}", str(path), input=f"f32[{WIDTH}]", output="f32[10]")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(count)))


def places(count: int) -> int:
    """Return how many of the models the node holds."""
    return min(LOADED_MAX, count // 10)


def loads_per_s(node: Node, count: int, seconds: float) -> float:
    """Return the rate of loads while each query is of a model that is not loaded."""
    in_turn = np.arange(len(arrivals(RATE, seconds, seed=1))) % count
    offer(node, in_turn, seconds)  # the framework is imported, and the hosts are warm
    loads, began_s = node.mesh().stats()["loads"], time.perf_counter()
    offer(node, in_turn[::-1], seconds)
    return float(node.mesh().stats()["loads"] - loads) / (time.perf_counter() - began_s)


# -- what is possible


def used_s(pid: int) -> list[float]:
    """Return the seconds of CPU that a process, its children together, and this one have used."""
    ticks, own, children = os.sysconf("SC_CLK_TCK"), 0.0, 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / ticks
            own += seconds if stat.parent.name == str(pid) else 0.0
            children += seconds if fields[1] == str(pid) else 0.0
    return [own, children, time.process_time()]


def bound(warm: Array, asked: Array, times: Array, size: int, rate: float) -> tuple[float, int]:
    """Return the share of `asked` that the best node answers within SLO_MS, and its loads.

    It has `size` models, at first those that `warm` leaves, evicts the model whose next query is
    farthest away, and makes `rate` loads in a second, one after another. A load that cannot be in
    time is not made.
    """
    every = np.concatenate([warm, asked])
    last: dict[int, int] = {}
    following = np.full(len(every), len(every))
    for at in range(len(every) - 1, -1, -1):
        following[at] = last.get(every[at], len(every))
        last[every[at]] = at
    next_use: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    free_s, answered, loads = 0.0, 0, 0
    for at, model in enumerate(every.tolist()):
        due_s = float(times[at - len(warm)]) if at >= len(warm) else -1.0
        if model not in next_use and due_s >= 0:
            ready_s = max(free_s, due_s) + 1 / rate
            if ready_s > due_s + SLO_MS / 1000:
                continue
            free_s, loads = ready_s, loads + 1
        answered += due_s >= 0
        next_use[model] = int(following[at])
        heapq.heappush(heap, (-next_use[model], model))
        while len(next_use) > size:
            use, gone = heapq.heappop(heap)
            if next_use.get(gone) == -use:
                del next_use[gone]
    return answered / len(asked), loads


# -- which model is asked next


def ranks(count: int, queries: int, seed: int) -> Array:
    """Draw ranks by Zipf's law with exponent 1: int[queries] from 0."""
    weights = 1 / np.arange(1, count + 1)
    drawn: Array = np.random.default_rng(seed).choice(count, queries, p=weights / weights.sum())
    return drawn


def steady(count: int, rate: float, seconds: float, seed: int) -> Array:
    """Return the model of each query; a model keeps its rank."""
    return ranks(count, len(arrivals(rate, seconds, seed=1)), seed)


def drifting(count: int, rate: float, seconds: float, seed: int) -> Array:
    """Return the model of each query; every DRIFT_S another model enters at the top."""
    times = arrivals(rate, seconds, seed=1)
    moved: Array = (ranks(count, len(times), seed) - (times / DRIFT_S).astype(int)) % count
    return moved


def changing(count: int, rate: float, seconds: float, seed: int) -> Array:
    """Return the model of each query; after half of the time half of the models swap places."""
    asked, half = steady(count, rate, seconds, seed), count // 2
    late = np.arange(len(asked)) >= len(asked) // 2
    return np.where(late, (asked + half) % count, asked)


KINDS: dict[str, Callable[..., Array]] = {
    "Zipf": steady,
    "Zipf, ranks that move": drifting,
    "Zipf, half of the ranks change at once": changing,
}


# -- the client


class Outcome:
    """Outcomes of the queries. ms: of each answer, from when it was due; NaN for a failure.
    loads: of the node. cores: used by the node, its host, and the client.
    """

    def __init__(self, count: int) -> None:
        self.ms = np.full(count, np.nan)
        self.failures: Counter[str] = Counter()
        self.late_ms = np.zeros(count)  # how late the client sent
        self.loads, self.cores = 0, [0.0]


def offer(node: Node, models: Array, seconds: float) -> Outcome:
    """Send one query for each of `models` at the times of a Poisson process."""
    return asyncio.run(Client(node.http, models).run(arrivals(RATE, seconds, seed=1)))


class Client:
    """Sends each query over one of CONNECTIONS kept-alive connections. Threads: the loop's."""

    def __init__(self, port: int, models: Array) -> None:
        self._port, self._models = port, models
        self._outcome = Outcome(len(models))
        self._free: deque[Connection] = deque()
        self._waiting: deque[tuple[int, float]] = deque()
        self._left = len(models)
        self._done = asyncio.Event()
        self._row = np.random.default_rng(3).random(WIDTH).round(4).tolist()

    async def run(self, times: Array) -> Outcome:
        """Send the queries; return when all are answered, or after PATIENCE_S."""
        loop = asyncio.get_running_loop()
        for _ in range(CONNECTIONS):
            await loop.create_connection(lambda: Connection(self), "127.0.0.1", self._port)
        start, number = time.perf_counter() + 0.05, iter(range(len(times)))
        await send_on_time(
            iter((times + start).tolist()), lambda due: self._send(next(number), due), self._done
        )
        try:
            await asyncio.wait_for(self._done.wait(), PATIENCE_S)
        except TimeoutError:
            self._outcome.failures["no answer"] += self._left
        return self._outcome

    def _send(self, number: int, due: float) -> None:
        self._outcome.late_ms[number] = (time.perf_counter() - due) * 1000
        if self._free:
            self._free.popleft().ask(number, due, self._request(number))
        else:
            self._waiting.append((number, due))

    def _request(self, number: int) -> bytes:
        values = [number / 1e3, *self._row[1:]]  # no two are equal, so that no cache answers
        tensor = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "data": values}
        given = {"inputs": [tensor], "parameters": {"timeout": int(1000 * SLO_MS)}}
        body = json.dumps(given).encode()
        path = f"/v2/models/m{self._models[number]}/infer"
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def free(self, connection: "Connection") -> None:
        """Use a connection for the next waiting query."""
        if self._waiting:
            number, due = self._waiting.popleft()
            connection.ask(number, due, self._request(number))
        else:
            self._free.append(connection)

    def answered(self, number: int, due: float, failure: str) -> None:
        """Record what became of a query."""
        if failure:
            self._outcome.failures[failure] += 1
        else:
            self._outcome.ms[number] = (time.perf_counter() - due) * 1000
        self._left -= 1
        if not self._left:
            self._done.set()


class Connection(asyncio.Protocol):
    """A connection with at most one query under way."""

    def __init__(self, client: Client) -> None:
        self._client, self._parser = client, httptools.HttpResponseParser(self)
        self._number, self._due, self._body = -1, 0.0, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Offer the connection for queries."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._client.free(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Count the query under way as failed."""
        if self._number >= 0:
            self._client.answered(self._number, self._due, "the connection was lost")

    def ask(self, number: int, due: float, request: bytes) -> None:
        """Send a query that was due at `due`."""
        assert self._transport is not None
        self._number, self._due = number, due
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body."""
        self._body += data

    def on_message_complete(self) -> None:
        """Pass the answer on."""
        status, number, body = self._parser.get_status_code(), self._number, self._body
        self._number, self._body = -1, b""
        why = "" if status == 200 else f"{status}, {cause(body)}"
        self._client.answered(number, self._due, why)
        self._client.free(self)


def cause(body: bytes) -> str:
    """Return why a query failed, from the error in a response, without names and numbers."""
    try:
        said = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        said = repr(body[:80])
    if "loads wait in" in said:
        return "what it would evict is used more" if "is used more" in said else "it would be late"
    return re.sub(r"'[^']*'|\d[\d.]*", "#", said.partition("by the deadline: ")[2] or said)[:100]


def rows_of(kind: str, outcome: Outcome, best: float, best_loads: int) -> list[Row]:
    """Return the figures of one run, and its bound. Queries that failed are late."""
    ms, count = outcome.ms, len(outcome.ms)
    within = float(np.sum(ms <= SLO_MS)) / count
    answered = ms[~np.isnan(ms)]
    lost = outcome.failures + Counter({"answered late": int(np.sum(answered > SLO_MS))})
    failures = "; ".join(f"{number} ({why})" for why, number in lost.most_common()) or "none"
    cores = ", ".join(f"{cores:.2f}" for cores in outcome.cores)
    note = (
        f"{count} queries at {RATE:g}/s, {outcome.loads} loads (the best policy: {best_loads});"
        f" lost: {failures}. Cores used by node, host and client: {cores}; the client was late by"
        f" {np.quantile(outcome.late_ms, 0.99):.1f} ms at its p99"
    )
    goal = Goal("value_at_least", 99.99)
    title = f"popularity by {kind}"
    why = f"the best policy at this rate of loads answers {100 * best:.2f} %"
    return [
        row(f"{title}: within {SLO_MS:g} ms", 100 * within, "%", "", None, goal, note, why),
        row(f"{title}: possible at this rate of loads", 100 * best, "%"),
        row(f"{title}: p50", float(np.quantile(answered, 0.5)), "ms"),
        row(f"{title}: p99.9", float(np.quantile(answered, 0.999)), "ms"),
    ]
