"""Instructions of the hot calls, counted and compared with those on record: what a busy machine
cannot blur.

    python -m bench.instructions            counts, prints, exits 1 when a call takes more than 3 %
    above its record
    python -m bench.instructions --record   writes bench/instructions.json anew

Every call is made n times and then 2n times under `valgrind --tool=callgrind`, in one process; the
difference, over n, is its price: whatever comes before and after is in both. A marker,
`os.getppid()`, tells callgrind to write out its counters, so one start of the interpreter serves
all calls.

Two figures a call. `core` counts the instructions inside the compiled core, which depend on the
code and its compiler alone, and is compared where the compiler's major version is the one on
record. `all` counts the interpreter and the C library too; it is compared where those are the same
as well. Elsewhere the figures are printed, and nothing fails.
"""

import argparse
import gc
import hashlib
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

RECORD = Path(__file__).with_suffix(".json")
TOLERANCE = 0.03
# nothing is written behind while calls are counted
WRITE_S = 3600.0
ROOT = Path(__file__).parent.parent
CORE = "/clipper_core/"  # in the path of every shared object of the core
MARKER = "getppid"
Counts = dict[str, float]  # "core" and "all", instructions

# -- the calls: each makes something, and returns what runs its call n times


def repeat(call: Callable[[], object]) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            call()

    return run


def model_of(dtype: str, floats: int, **options: Any) -> Any:
    from clipper_core.engine.engine import Engine
    from clipper_core.engine.model import Model

    engine = Engine(manual_clock=True, seed=1, cache_bytes_max=1 << 22, tasks_max=1 << 15)
    return Model(engine, "m:1", 1, dtype, (floats,), lane_rows=1 << 14, **options)


def method_call() -> Callable[[int], None]:
    return repeat(model_of("f64", 1).engine.now_us)


def hit(dtype: str, floats: int) -> Callable[[int], None]:
    model, x = model_of(dtype, floats), np.ones(floats, {"f32": "f4", "f64": "f8"}[dtype])
    model.put(x, 1.0)
    return repeat(lambda: model.predict(x).result())


def miss() -> Callable[[int], None]:
    model, x = model_of("f64", 1), np.ones(1)
    return repeat(lambda: model.predict(x))


def query() -> Callable[[int], None]:
    """Submit 64 queries, send them as one batch, answer them by one frame, and read the answers."""
    from clipper_core.wire.codec import Kind, encode_frame, encode_rows

    model, xs = model_of("f64", 1, cached=False), [np.full(1, float(i)) for i in range(64)]
    engine = model.engine
    conn = engine.open(0)
    engine.receive(conn, encode_frame(Kind.HELLO, b"hello"), 0)
    engine.attach(conn, 0, b"welcome", mode=3, size_max=64)
    replies = iter([encode_rows(Kind.REPLY, np.arange(64.0), id=i + 1) for i in range(1000)])
    engine.step(0)
    engine.outgoing(conn, 0)

    def turn() -> None:
        futures = [model.predict(x) for x in xs]
        engine.step(0)
        engine.outgoing(conn, 0)
        engine.receive(conn, next(replies), 0)
        engine.step(0)
        if [future.result() for future in futures][63] != 63.0:
            raise AssertionError("the reply of another batch")

    return repeat(turn)


def ring() -> Callable[[int], None]:
    from clipper_core.runtime.ring import WorkRing

    cells = WorkRing(1 << 16, 8)

    def run(n: int) -> None:
        cells.churn(0, n)
        cells.drain(n)

    return run


def timer() -> Callable[[int], None]:
    from clipper_core.runtime.timer_wheel import churn

    return lambda n: (churn(n, 1_000_000, 20_000, 30_000), None)[1]


def lookup() -> Callable[[int], None]:
    from clipper_core.cache.clock_cache import ClockCache

    cache, rows = ClockCache(1 << 21, 1), [struct.pack("<Q", i) for i in range(10_000)]
    for row in rows:
        cache.fill(1, row, 1.0)
    some = b"".join(rows)
    return lambda n: (cache.lookup_many(1, some[: 8 * n], 8), None)[1]


def application(
    policy: str, models: int, user: str = "", decider: str = "all"
) -> Callable[[int], None]:
    """Return queries to an application that the cache answers."""
    handle, x = handle_of(policy, models, decider)
    if user:
        return repeat(lambda: handle.predict(x, user).result())
    return repeat(lambda: handle.predict(x).result())


def feedback(policy: str, models: int, user: str = "", newcomer: str = "") -> Callable[[int], None]:
    """Return queries to an application and their feedback; and then, if one is named, a query of
    another user."""
    handle, x = handle_of(policy, models)

    def turn() -> None:
        if not handle.feedback(handle.predict(x, user or None).result(), label=0):
            raise AssertionError("the feedback does not count")
        if newcomer:
            handle.predict(x, newcomer).result()

    return repeat(turn)


def handle_of(policy: str, models: int, decider: str = "all") -> tuple[Any, Any]:
    """Return a handle of an application, and an input that the cache knows. The models say 0, 0,
    1, ...; with floats 0.5, 1.5, ..."""
    import msgspec

    from clipper.selection import create_policy
    from clipper.serving.feedback.states import States
    from clipper.serving.feedback.window import FeedbackWindow
    from clipper.serving.query.core_application import core_of
    from clipper.serving.query.processor import FeedbackState, ResolvedApplication, RolloutState
    from clipper.serving.query.speculation import speculation_of
    from clipper.serving.query.stats import ApplicationCounters
    from clipper.store.journal import Journal
    from clipper.store.memory import MemoryStore
    from clipper.types import VersionedModel
    from clipper_core.application.application import ApplicationTable, QueryHandle

    name, _, kind = policy.partition(" ")
    ids, x = tuple(VersionedModel("m", i + 1) for i in range(models)), np.ones(4)
    first = model_of("f64", 4)
    others = [type(first)(first.engine, f"m:{i}", i, "f64", (4,)) for i in range(2, models + 1)]
    cores = [first, *others]
    for i, core in enumerate(cores):
        core.put(x, i + 0.5 if kind else i // 2)
    made = create_policy(name)
    states = States(MemoryStore(), Journal(None), "node", 100, WRITE_S)
    learner = states.learner("a", name, made, ids)
    counters = ApplicationCounters()
    learner.watcher = counters
    resolved = ResolvedApplication(
        "a",
        ids,
        dict(zip(ids, cores, strict=True)),
        made,
        learner,
        20_000,
        node="node",
        feedback=FeedbackState(FeedbackWindow(1000, 60.0, node="node")),
        rollout=RolloutState(counters.for_models(ids, None)),
    )
    table = ApplicationTable()
    # it has no decider of a user's, so no thread runs it
    threads: Any = None
    speculation = speculation_of(decider, resolved, threads)
    core = core_of(msgspec.structs.replace(resolved, speculation=speculation))
    if core is None:
        raise AssertionError(f"the core does not take {policy}")
    table.replace({"a": core})
    return QueryHandle("a", table, 60_000.0, None), x


KEY = b"a-key-as-long-as-those-that-clipper-key-makes"
TRACE_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
USER_AND_SLO = ', "user": "ann@example.org", "slo_ms": 20'


def http(head: str = "", members: str = "", keyed: bool = False) -> Callable[[int], None]:
    """Return requests to a thread of the HTTP server, one after another, that the cache answers.
    The server begins and ends with them.

    head: further lines of headers. members: of the body, beside the input. keyed: the server needs
    a key, and each request has one.
    """
    from clipper_core.http.http_route import HotRoute, HotTable
    from clipper_core.http.http_server import HttpServer
    from clipper_core.http.key_table import KeyTable
    from clipper_core.runtime.histogram import Counter, LatencyHistogram

    model = model_of("f64", 1)
    model.put(np.ones(1), 1.0)
    counts = [Counter() for _ in range(5)]
    took, requests = LatencyHistogram(), LatencyHistogram()
    route = HotRoute(
        model,
        "predict",
        "node",
        b'["m:1"]',
        20_000,
        0.0,
        counts,
        took,
        Counter(),
        requests,
        None,
        slo_ms_max=1000.0,
        takes_users=True,
    )
    keys = KeyTable([hashlib.sha256(KEY).digest()]) if keyed else None
    table = HotTable({b"/api/a/predict": route}, keys)
    body = f'{{"input": [1.0]{members}}}'
    lines = f"Host: a\r\n{head}Content-Length: {len(body)}"
    if keyed:
        lines += f"\r\nAuthorization: Bearer {KEY.decode()}"
    request = f"POST /api/a/predict HTTP/1.1\r\n{lines}\r\n\r\n{body}".encode()

    def run(n: int) -> None:
        server = HttpServer(
            [model.engine],
            1,
            b"made",
            header_s=60.0,
            idle_s=600.0,
            connections_max=10,
            header_bytes_max=4096,
            body_bytes_max=4096,
            pipeline_max=8,
            unsent_bytes_max=4096,
            finish=lambda future: future,
            encode=lambda value: b"",
        )
        server.set_table(table)
        thread = threading.Thread(target=server.run, args=(0,))
        thread.start()
        client, there = socket.socketpair()
        there.setblocking(False)
        server.adopt(there.detach())
        with client:
            for _ in range(n):
                client.sendall(request)
                if not client.recv(4096).startswith(b"HTTP/1.1 200"):
                    raise AssertionError("the core does not answer the request")
        server.stop()
        thread.join()

    return run


def encode(version: int, search: int) -> Callable[[int], None]:
    from clipper_core.wire.codec import Kind, encode_rows, encode_v1

    texts = [f"{i % 7} the quick brown fox jumps over the lazy dog " * 2 for i in range(1000)]
    if version == 1:
        return repeat(lambda: encode_v1(7, texts, search))
    return repeat(lambda: encode_rows(Kind.PREDICT, texts))


CALLS: dict[str, tuple[int, Callable[[], Callable[[int], None]]]] = {  # name -> n, what to make
    "a method call that does nothing": (2000, method_call),
    "cache hit f64[1], predict and result": (2000, lambda: hit("f64", 1)),
    "cache hit f32[784], predict and result": (2000, lambda: hit("f32", 784)),
    "miss f64[1], submit": (2048, miss),
    "64 queries f64[1], submitted, sent, answered, read": (32, query),
    "hit, an application of one model": (1000, lambda: application("ensemble", 1)),
    "the same, for a user": (1000, lambda: application("ensemble", 1, "ann")),
    "hit, ensemble of three": (1000, lambda: application("ensemble", 3)),
    "hit, ensemble of three floats": (1000, lambda: application("ensemble floats", 3)),
    "hit, mixture of three": (1000, lambda: application("mixture", 3)),
    "hit, stacking of three for a user": (1000, lambda: application("stacking", 3, "ann")),
    "hit, exp3 of three": (1000, lambda: application("exp3", 3)),
    "hit, ridge of three floats": (1000, lambda: application("ridge floats", 3)),
    "hit, majority of three": (1000, lambda: application("ensemble", 3, decider="majority")),
    "mixture of three, a query and its feedback": (500, lambda: feedback("mixture", 3)),
    "the same for a user": (500, lambda: feedback("mixture", 3, "ann")),
    "the same for nobody, and a new user's query": (
        500,
        lambda: feedback("mixture", 3, newcomer="newcomer"),
    ),
    "HTTP, a query that the cache answers": (1000, http),
    "HTTP, the same with a key": (1000, lambda: http(keyed=True)),
    "HTTP, the same with a trace": (1000, lambda: http(f"Traceparent: {TRACE_PARENT}\r\n")),
    "HTTP, the same with a user and an SLO": (1000, lambda: http(members=USER_AND_SLO)),
    "ring, a row published and consumed": (8192, ring),
    "timer, inserted and expired": (50_000, timer),
    "cache lookup below the Python door": (4096, lookup),
    "1000 strings encoded, version 2": (8, lambda: encode(2, 0)),
    "1000 strings encoded, version 1, literals": (8, lambda: encode(1, 0)),
    "1000 strings encoded, version 1, quick LZ4": (8, lambda: encode(1, 8)),
}

# calls whose figures vary by more than the tolerance: they are shown and not compared
VARYING = frozenset(
    (
        "mixture of three, a query and its feedback",
        "the same for a user",
        "the same for nobody, and a new user's query",
    )
)


def perform() -> None:
    """Run the process whose instructions are counted."""
    gc.disable()
    for n, make in CALLS.values():
        run = make()
        run(n)
        os.getppid()
        run(n)
        os.getppid()
        run(2 * n)
        os.getppid()


# -- counting


def count() -> dict[str, Counts]:
    """Return the instructions per call, by name. Raises CalledProcessError when valgrind or the
    calls fail."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--tool=callgrind",
            "--cache-sim=no",
            "--branch-sim=no",
            f"--dump-before={MARKER}",
        ]
        options += [
            "--compress-strings=no",
            "--compress-pos=no",
            f"--callgrind-out-file={folder}/counts",
        ]
        words = [
            "valgrind",
            "-q",
            *options,
            sys.executable,
            "-m",
            "bench.instructions",
            "--perform",
        ]
        subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "0"}, check=True)
        parts = [
            read((Path(folder) / f"counts.{i + 1}").read_text().splitlines())
            for i in range(3 * len(CALLS))
        ]
    figures = {}
    for i, (name, (n, _)) in enumerate(CALLS.items()):
        once, twice = parts[3 * i + 1], parts[3 * i + 2]
        figures[name] = {kind: round((twice[kind] - once[kind]) / n, 1) for kind in ("core", "all")}
    return figures


def read(lines: Iterable[str]) -> Counts:
    """Return the sum of one part of callgrind's output. A line after `calls=` repeats what the
    callee counts for itself."""
    core = total = 0
    ours = repeated = False
    for line in lines:
        if line.startswith("ob="):
            ours = CORE in line
        elif line.startswith("calls="):
            repeated = True
        elif line[:1].isdigit():
            cost = 0 if repeated else int(line.split()[1])
            repeated = False
            total += cost
            core += cost if ours else 0
    return {"core": core, "all": total}


def machine() -> dict[str, str]:
    """Return what the counts depend on beside the code."""
    version = subprocess.run(
        ["g++", "-dumpversion"], capture_output=True, text=True, check=True
    ).stdout
    libc = " ".join(platform.libc_ver())
    surroundings = (
        f"{platform.python_implementation()} {platform.python_version()}, {libc},"
        f" {platform.machine()}"
    )
    return {"compiler": f"g++ {version.partition('.')[0].strip()}", "surroundings": surroundings}


# -- judging


def judge(
    found: dict[str, Counts], here: dict[str, str], record: dict[str, Any]
) -> Iterator[tuple[str, bool]]:
    """Return a line for each call, and whether it takes more than its limit."""
    compared = {"core": here["compiler"] == record.get("compiler")}
    compared["all"] = compared["core"] and here["surroundings"] == record.get("surroundings")
    for name, counts in found.items():
        text, worse = f"{name:52}", False
        for kind in ("core", "all"):
            was = record.get("calls", {}).get(name, {}).get(kind)
            text += f"{counts[kind]:14,.1f}"
            if not compared[kind] or was is None:
                text += " " * 9
                continue
            change = counts[kind] / was - 1
            worse = worse or change > TOLERANCE
            text += f" {change:+8.1%}"
        yield text + ("   MORE THAN ON RECORD" if worse else ""), worse


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.instructions", description="Instructions of the hot calls."
    )
    parser.add_argument("--record", action="store_true", help="write the record anew")
    parser.add_argument("--perform", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.perform:
        perform()
        return 0
    if shutil.which("valgrind") is None:
        print("skipped: no valgrind to count with. python tools/fetch.py valgrind")
        return 0
    here, found = machine(), count()
    record = json.loads(RECORD.read_text()) if RECORD.exists() and not options.record else {}
    print(f"{'instructions a call':52}{'core':>14}{'':9}{'all':>14}")
    verdicts = list(judge(found, here, record))
    print(*(line for line, _ in verdicts), sep="\n")
    if options.record:
        kept = {name: counts for name, counts in found.items() if name not in VARYING}
        RECORD.write_text(json.dumps({**here, "calls": kept}, indent=2) + "\n")
        return 0
    if here["compiler"] != record["compiler"]:
        print(f"not compared: the record is of {record['compiler']}, this is {here['compiler']}")
    elif any(worse for _, worse in verdicts):
        print(
            "A hot call takes more instructions than on record. If it is worth it: make count"
            " ARGS=--record, and say why."
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
