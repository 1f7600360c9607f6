"""The mesh: a hop, a cold load, 20 000 models in a process, exact copies, a registry in etcd
(--rows way,paced,many)."""

import asyncio
import ctypes
import gc
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

import clipper
from bench.harness import FAILED, Goal, Load, Row, Sample, UnknownRows, absent, open_loop, row
from bench.system.fixtures.store_servers import NO_ETCD, etcd
from clipper.cli.servers.up import keep_pauses_short
from clipper.load.open_loop import arrivals, send_on_time
from clipper.mesh.records import MODELS, MeshModel, decode, encode
from clipper.serving.query.future_watcher import FutureWatcher
from clipper.store import Mirror, Put, open_store

CODE = "def double(rows):\n    return rows * 2\n"
QUICK = {"enabled": True, "publish_s": 0.2, "rate_s": 1.0, "drain_s": 1.0}
PATIENCE_S = 60.0
MESH = "model-mesh, as published"
CORES = (
    f"{os.cpu_count()} cores for the node, its host and the sender: a latency counts from when its"
    " query was due, also when the sender is late"
)
# By tracemalloc, over 3000 registrations.
RECORDS = (
    "the record as it is used, .77 KiB in twelve objects, and as it is stored, .24 KiB; the rest"
    " are entries of the store, of its mirror and of the list of models"
)


def main(quick: bool = False, rows: Sequence[str] | None = None) -> list[Row]:
    groups: dict[str, Callable[[bool, Path], list[Row]]] = {
        "way": way,
        "paced": paced,
        "many": many,
        "copies": copies,
        "registry": registry,
    }
    if rows and (unknown := [name for name in rows if name not in groups]):
        raise UnknownRows(f"no rows {unknown[0]!r}: {', '.join(groups)}")
    found: list[Row] = []
    for name in rows or groups:
        with tempfile.TemporaryDirectory(prefix="mesh-") as folder:
            Path(folder, "models.py").write_text(CODE)
            try:
                found += groups[name](quick, Path(folder))
            except Exception as error:
                found.append(absent(name, "", f"{FAILED}: {type(error).__name__}: {error}"))
    return found


# -- the way of one query


def way(quick: bool, folder: Path) -> list[Row]:
    """Measure the hop between two nodes in this process; the model is loaded in the second, whose
    host serves both."""
    n = 300 if quick else 3000
    with nodes(folder, 2) as (a, b):
        a.mesh.joined.loader.set_stopping(True)  # so that the second gets it
        wait_until(lambda: a.mesh.joined.registry.instances[a.mesh.instance].stopping)
        register(b, folder, "m")
        for node in (b, a):
            ask(node, "m", np.zeros(3))
        holder = [copy.instance for copy in a.mesh.status("m").copies]
        assert holder == [b.mesh.instance], holder
        plain = Sample(tuple(latencies_us(b, "m", n)))
        hop = Sample(tuple(latencies_us(a, "m", n)))
        decided = Sample(tuple(route_us(a, 2000) for _ in range(7)))
        a.mesh.joined.loader.set_stopping(False)
        cold = Sample(tuple(cold_ms(b, folder, 20 if quick else 200)))
        deployed = a.deploy("plain", _double, input="f64[3]", cache=False)
        direct = Sample(tuple(one_by_one(lambda x: deployed.predict(x), n)))
    return [
        row("route: from an id to its queue", decided, "us", goal=Goal("value_at_most", 10)),
        row(
            "a query, held by another node",
            hop,
            "us",
            "held by the node asked",
            plain,
            note=_tails(hop),
        ),
        row(
            "a query, held by another node, of a Ray actor call",
            hop,
            "us",
            "recorded: 1200 us",
            1200.0,
        ),
        row("a hop", hop.map(lambda us: us / 1000), "ms", goal=Goal("value_at_most", 0.3)),
        row("a query of the mesh", plain, "us", "a deployed model", direct, note=_tails(plain)),
        row("cold: from the first query to its answer", cold, "ms", note=_tails(cold)),
    ]


def route_us(node: clipper.ClipperServer, n: int) -> float:
    """Measure a lookup that counts a use, in microseconds, minus an empty loop."""
    request = clipper.PredictionRequest(np.zeros(3), candidate_models=("m",))
    resolve = node._resolver.request
    begun = time.perf_counter_ns()
    for _ in range(n):
        resolve(request)
    return (time.perf_counter_ns() - begun) / n / 1e3


def cold_ms(node: clipper.ClipperServer, folder: Path, n: int) -> Iterator[float]:
    for i in range(n):
        register(node, folder, f"cold{i}")
        begun = time.perf_counter()
        ask(node, f"cold{i}", np.zeros(3))
        yield (time.perf_counter() - begun) * 1e3


def paced(quick: bool, folder: Path) -> list[Row]:
    """Measure the published run: ten models, a hundred queries per second."""
    seconds = 3 if quick else 10
    with nodes(folder, 1) as (node,):
        ids = [f"m{i}" for i in range(10)]
        for id in ids:
            register(node, folder, id)
            ask(node, id, np.zeros(3))
        draw = np.random.default_rng(0)
        times = np.cumsum(draw.exponential(0.01, 100 * seconds))
        rows = list(draw.standard_normal((len(times), 3)))
        at = iter(range(len(times) + 1))
        load = open_loop(lambda x: node.predict(ids[next(at) % 10], x, slo_ms=1000), rows, times)
    p50, p99 = load.quantile_us(0.5) / 1e3, load.quantile_us(0.99) / 1e3
    return [
        row(
            "10 models at 100 q/s, p50",
            p50,
            "ms",
            MESH,
            3.58,
            Goal("value_at_most", 1),
            note=_wrong(load),
        ),
        row("10 models at 100 q/s, p99", p99, "ms", MESH, 29.71, Goal("value_at_most", 5)),
    ]


# -- many models


def many(quick: bool, folder: Path) -> list[Row]:
    """Measure many registered models in one process: popular ones stay loaded, the others are
    loaded and evicted."""
    n, warm, seconds = (1000, 200, 3.0) if quick else (20_000, 2000, 15.0)
    before = resident_mib()
    with nodes(folder, 1, capacity_mib=4096, loaded_max=warm + warm // 4) as (node,):
        base = resident_mib()
        switch_s = sys.getswitchinterval()
        keep_pauses_short()  # as `clipper node` does
        begun = time.perf_counter()
        for i in range(n):
            register(node, folder, f"m{i:05d}")
        registered_s = time.perf_counter() - begun
        kept = (resident_mib() - base) * 1024 / n
        begun = time.perf_counter()
        futures = [node.predict(f"m{i:05d}", np.zeros(3), slo_ms=50_000) for i in range(warm)]
        for future in futures:
            answer = future.result(PATIENCE_S)
            assert not answer.is_default, answer.reason
        loaded_s = time.perf_counter() - begun
        rate = 2000 if quick else 10_000
        half = _offered(node, rate / 2, seconds, lambda draw, k: draw.integers(0, warm, k))
        hits = _offered(node, rate, seconds, lambda draw, k: draw.integers(0, warm, k))
        top = _closed(node, seconds / 3, warm)
        loads = node.mesh.stats()["loads"]
        mixed = _offered(
            node, rate / 10, seconds, lambda draw, k: np.minimum(draw.zipf(1.3, k) - 1, n - 1)
        )
        missed = node.mesh.stats()["loads"] - loads
        gc.unfreeze()
        sys.setswitchinterval(switch_s)
    return [
        row("registrations", n / registered_s, "/s", note=f"{n} models"),
        row(
            "memory of a registered model",
            kept,
            "KiB",
            goal=Goal("value_at_most", 1),
            note=f"beside {base - before:.0f} MiB",
            bounded_by=RECORDS,
        ),
        row("loads", warm / loaded_s, "/s", note=f"{warm} models, one after another in one host"),
        row(
            "queries over loaded models, closed loop",
            top,
            "/s",
            MESH,
            1000.0,
            Goal("times_better", 10),
            note=f"of {n}",
        ),
        row(f"{rate / 2:g} q/s over {warm} loaded models, p50", half.quantile_us(0.5) / 1e3, "ms"),
        row(
            f"{rate / 2:g} q/s over {warm} loaded models, p99",
            half.quantile_us(0.99) / 1e3,
            "ms",
            goal=Goal("value_at_most", 10),
            note=f"{_wrong(half)}; sender late by {half.sender_late_us / 1e3:.1f} ms at its p99",
            bounded_by=CORES,
        ),
        row(f"{rate} q/s over {warm} loaded models, p50", hits.quantile_us(0.5) / 1e3, "ms"),
        row(
            f"{rate} q/s over {warm} loaded models, p99",
            hits.quantile_us(0.99) / 1e3,
            "ms",
            goal=Goal("value_at_most", 10),
            note=f"{_wrong(hits)}; sender late by {hits.sender_late_us / 1e3:.1f} ms at its p99",
            bounded_by=CORES,
        ),
        row(
            f"{rate / 10:g} q/s, zipf 1.3 over all {n}, p50",
            mixed.quantile_us(0.5) / 1e3,
            "ms",
            note=f"{missed} loads",
        ),
        row(
            f"{rate / 10:g} q/s, zipf 1.3 over all {n}, p99",
            mixed.quantile_us(0.99) / 1e3,
            "ms",
            note=_wrong(mixed),
        ),
    ]


def _offered(
    node: clipper.ClipperServer, rate: float, seconds: float, draw_ids: Callable[[Any, int], Any]
) -> Load:
    # other rows than the last time: none is answered by the cache
    draw = np.random.default_rng(time.perf_counter_ns())
    times = arrivals(rate, seconds, seed=1)
    ids = [f"m{i:05d}" for i in draw_ids(draw, len(times))]
    rows = list(draw.standard_normal((len(times), 3)))
    return uvloop.run(_send(node, lambda i: node.predict(ids[i], rows[i], slo_ms=5000), times))


async def _send(node: clipper.ClipperServer, predict: Callable[[int], Any], times: Any) -> Load:
    """Run an open loop whose single thread sends and receives, like an application with an event
    loop. With two threads the benchmark would measure the GIL: each waits 5 ms for it while the
    other is busy."""
    latencies, late = np.full(len(times), np.nan), np.zeros(len(times))
    load, numbers, finished = (
        Load(float(times[-1]), latencies, np.zeros(len(times), np.bool_), Counter()),
        iter(range(len(times))),
        asyncio.Event(),
    )
    watcher = FutureWatcher(asyncio.get_running_loop(), list(node._engines))
    zero_s, left = time.perf_counter() + 0.01, len(times)

    asked: dict[
        int, tuple[int, float]
    ] = {}  # by future: nothing more for Python to look through for garbage

    def on_done(future: Any) -> None:
        nonlocal left
        i, due_s = asked.pop(future.id)
        latencies[i] = (time.perf_counter() - due_s) * 1e6
        load.is_default[i] = future.result().is_default
        left -= 1
        if not left:
            finished.set()

    def send(due_s: float) -> None:
        i = next(numbers)
        late[i] = time.perf_counter() - due_s
        future = predict(i)
        asked[future.id] = i, due_s
        if not watcher.on_done(future, on_done):
            on_done(future)

    try:
        await send_on_time(iter((times + zero_s).tolist()), send, asyncio.Event())
        with suppress(TimeoutError):
            await asyncio.wait_for(finished.wait(), PATIENCE_S)
    finally:
        watcher.close()
    load.errors = Counter({"never answered": left} if left else {})
    load.sender_late_us = float(np.quantile(late, 0.99) * 1e6)
    return load


def _closed(node: clipper.ClipperServer, seconds: float, warm: int) -> float:
    """Return the answers per second with 512 queries always open."""
    draw, count, waiting = np.random.default_rng(2), 0, []
    rows = draw.standard_normal((4096, 3))
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        ids = draw.integers(0, warm, 512)
        waiting.append(
            [
                node.predict(f"m{i:05d}", rows[(count + j) % 4096] + count, slo_ms=5000)
                for j, i in enumerate(ids)
            ]
        )
        if len(waiting) > 1:
            count += sum(not future.result(PATIENCE_S).is_default for future in waiting.pop(0))
    return count / (time.perf_counter() - begun)


# -- copies


def copies(quick: bool, folder: Path) -> list[Row]:
    """Send as many first queries of one model as threads can, at three nodes at once: how many
    copies come of it."""
    rounds, wrong = (3 if quick else 20), 0
    with nodes(folder, 3) as servers:
        for i in range(rounds):
            register(servers[0], folder, f"m{i}")
            for server in servers:
                wait_until(partial(_is_known, server, f"m{i}"))
            gate = threading.Barrier(3, timeout=PATIENCE_S)

            def burst(
                server: clipper.ClipperServer, i: int = i, gate: threading.Barrier = gate
            ) -> None:
                gate.wait()
                futures = [
                    server.predict(f"m{i}", np.full(3, float(k)), slo_ms=20_000) for k in range(333)
                ]
                for future in futures:
                    assert not future.result(PATIENCE_S).is_default

            threads = [threading.Thread(target=burst, args=(server,)) for server in servers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wrong += len(servers[0].mesh.status(f"m{i}").copies) != 1
    return [
        row(
            "rounds of 999 first queries at 3 nodes that made another number of copies than 1",
            wrong,
            "rounds",
            goal=Goal("value_at_most", 0),
            note=f"of {rounds}",
        )
    ]


# -- the registry


def registry(quick: bool, folder: Path) -> list[Row]:
    n = 2000 if quick else 20_000
    name = f"mirror of {n} records from etcd"
    if shutil.which("etcd") is None:
        return [absent(name, "s", NO_ETCD, goal=Goal("value_at_most", 0.2))]
    with etcd() as url, open_store(url) as store:
        begun = time.perf_counter()
        for at in range(0, n, 100):
            records = (
                MeshModel(f"m{i:05d}", "onnx", f"/srv/models/{i}.onnx") for i in range(at, at + 100)
            )
            store.txn((), [Put(MODELS + one.id, encode(one)) for one in records])
        wrote_s = time.perf_counter() - begun

        def bootstrap() -> float:
            begun = time.perf_counter()
            mirror = Mirror(store, MODELS, lambda value: decode(value, MeshModel))
            took = time.perf_counter() - begun
            assert len(mirror) == n
            mirror.close()
            return took

        took = Sample(tuple(bootstrap() for _ in range(3 if quick else 7)))
    return [
        row(name, took, "s", goal=Goal("value_at_most", 0.2)),
        row("records written, 100 a transaction", n / wrote_s, "/s"),
    ]


# -- nodes and queries


@contextmanager
def nodes(folder: Path, count: int, **mesh: Any) -> Iterator[list[clipper.ClipperServer]]:
    """Start nodes in this process, over one file."""
    with ExitStack() as stack:
        started = []
        for i in range(count):
            settings: dict[str, Any] = {"mesh": {**QUICK, "name": f"n{i}", **mesh}, "drain_s": 1.0}
            if count > 1:
                settings |= {"state": f"sqlite:{folder}/mesh.db", "folder": str(folder / f"n{i}")}
            started.append(stack.enter_context(clipper.start(**settings)))
        for server in started:
            wait_until(partial(_sees, server, count))
        yield started


def _sees(server: clipper.ClipperServer, count: int) -> bool:
    return len(server.mesh.instances()) == count


def _is_known(server: clipper.ClipperServer, id: str) -> bool:
    return server.mesh.status(id).status != "NOT_FOUND"


def register(node: clipper.ClipperServer, folder: Path, id: str) -> None:
    node.register_model(id, "models.py:double", key=str(folder), input="f64[3]", output="f64[3]")


def ask(node: clipper.ClipperServer, id: str, x: Any) -> Any:
    answer = node.predict(id, x, slo_ms=20_000).result(PATIENCE_S)
    assert not answer.is_default, answer.reason
    return answer.output


def latencies_us(node: clipper.ClipperServer, id: str, n: int) -> Iterator[float]:
    return one_by_one(lambda x: node.predict(id, x, slo_ms=5000), n)


def one_by_one(predict: Callable[[Any], Any], n: int) -> Iterator[float]:
    rows = np.random.default_rng(time.perf_counter_ns()).standard_normal((n, 3))
    for x in rows:
        begun = time.perf_counter_ns()
        predict(x).result()
        yield (time.perf_counter_ns() - begun) / 1e3


def wait_until(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the mesh did not come to what was expected")
        time.sleep(0.01)


def resident_mib() -> float:
    """Return the memory in use: what was freed is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def _double(rows: Any) -> Any:
    return rows * 2


def _tails(sample: Sample) -> str:
    values = np.array(sample.values)
    return f"p99 {np.percentile(values, 99):.0f}, max {values.max():.0f} of {len(values)}"


def _wrong(load: Any) -> str:
    errors = dict(load.errors or {})
    return f"{load.offered} queries, {load.defaults} defaults" + (f", {errors}" if errors else "")
