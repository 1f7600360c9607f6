"""The registry: a transaction, a change until it is seen, a mirror of 20 000 records; writers of
one file; an etcd that hangs."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.harness import Goal, Row, Sample, absent, interleave, row
from bench.system.fixtures import store_servers
from clipper.errors import StoreError
from clipper.mesh.records import MODELS, Copy, MeshModel, decode, encode
from clipper.store import Compare, Mirror, Put, Store, open_store

RECORDS = 20_000
VALUE = bytes(64)
WRITERS = 4
WRITER_S = 60.0  # for a process of them to start


def main(quick: bool) -> list[Row]:
    rows = []
    for kind in ("memory", "sqlite", "redis", "etcd"):
        program = {"redis": "redis-server", "etcd": "etcd"}.get(kind)
        if program and shutil.which(program) is None:
            rows.append(absent(f"{kind}: transaction", "us", f"no {program} on this machine"))
            continue
        with _opened(kind) as (store, bare):
            rows += [
                *_transactions(kind, store, bare, quick),
                *_seen(kind, store, quick),
                _bootstrap(kind, store, quick),
            ]
    return [*rows, *_contention(quick), *_loss(quick)]


@contextlib.contextmanager
def _opened(kind: str) -> Iterator[tuple[Store, Callable[[], Any]]]:
    """Open a store. Yields it with the least that could be done instead of its transaction."""
    with contextlib.ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="clipper-registry-"))
        if kind == "memory":
            lock, content = threading.Lock(), dict[str, bytes]()
            yield held.enter_context(open_store("")), lambda: _locked_put(lock, content)
        elif kind == "sqlite":
            raw = sqlite3.connect(f"{folder}/bare.db", isolation_level=None)
            raw.execute("pragma journal_mode = wal")
            raw.execute("pragma synchronous = full")
            raw.execute("create table kv (key blob primary key, value blob) without rowid")
            held.callback(raw.close)
            store = held.enter_context(open_store(f"sqlite:{folder}/state.db"))
            yield (
                store,
                lambda: raw.execute("insert or replace into kv values (?, ?)", (b"a", VALUE)),
            )
        elif kind == "redis":
            store = held.enter_context(open_store(held.enter_context(store_servers.redis())))
            client: Any = store._redis  # type: ignore[attr-defined]
            yield store, lambda: client.set("a", VALUE)
        else:
            store = held.enter_context(open_store(held.enter_context(store_servers.etcd())))
            yield store, _bare_put(store)


def _locked_put(lock: threading.Lock, content: dict[str, bytes]) -> None:
    with lock:
        content["a"] = VALUE


def _bare_put(store: Any) -> Callable[[], Any]:
    """Measure one call of grpcio with the same messages and nothing else."""
    from clipper.store.etcd.protocol import message, method

    path, _, answer = method("KV.Txn")
    put = message("RequestOp")(request_put=message("PutRequest")(key=b"bare", value=VALUE))
    request = message("TxnRequest")(success=[put])
    call = store._channel._channel(0).unary_unary(
        path, type(request).SerializeToString, answer.FromString
    )
    return lambda: call(request, timeout=5)


def _per_call_us(count: int, call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count * 1e6


def _transactions(kind: str, store: Store, bare: Callable[[], Any], quick: bool) -> Iterator[Row]:
    """Compare a revision and put 64 bytes, one after another."""
    count = {"memory": 5000, "sqlite": 150, "redis": 150, "etcd": 150}[kind] // (5 if quick else 1)
    state = [store.put("a", VALUE).revision]

    def swap() -> None:
        state[0] = store.txn((Compare("a", state[0]),), (Put("a", VALUE),)).revision

    cases = {"ours": lambda: _per_call_us(count, swap), "bare": lambda: _per_call_us(count, bare)}
    found = interleave(cases, 3 if quick else 7)
    names = {
        "memory": "a dict and a lock",
        "sqlite": "bare sqlite3",
        "redis": "SET",
        "etcd": "bare grpcio",
    }
    yield row(f"{kind}: compare and put", found["ours"], "us", names[kind], found["bare"])


def _seen(kind: str, store: Store, quick: bool) -> Iterator[Row]:
    """Measure the time from before the put until another thread has the event."""
    watch, seen = store.watch("seen"), dict[int, float]()
    times: list[float] = []

    def read() -> None:
        for event in iter(watch.next, None):
            seen[event.revision] = time.perf_counter()

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50 if quick else 400):
        begun = time.perf_counter()
        revision = store.put("seen", VALUE).revision
        while revision not in seen:
            time.sleep(0.00002)
        times.append((seen[revision] - begun) * 1e6)
    watch.close()
    reader.join()
    times.sort()
    yield row(f"{kind}: put until seen, p50", statistics.median(times), "us")
    yield row(f"{kind}: put until seen, p99", times[int(len(times) * 0.99)], "us")


def _bootstrap(kind: str, store: Store, quick: bool) -> Row:
    """Measure the time until the mirror has every record."""
    count = 2000 if quick else RECORDS
    copies = {"node-1": Copy(1, 2, 123_456)}
    models = [
        MeshModel(
            id=f"m{i:05}", type="onnx", path=f"/models/m{i:05}.onnx", copies=copies, used_ms=1
        )
        for i in range(count)
    ]
    for first in range(0, count, 100):
        store.txn(
            (), [Put(f"{MODELS}{model.id}", encode(model)) for model in models[first : first + 100]]
        )

    def listed() -> float:
        begun = time.perf_counter()
        store.range(MODELS)
        return time.perf_counter() - begun

    def mirrored() -> float:
        begun = time.perf_counter()
        with Mirror(store, MODELS, lambda value: decode(value, MeshModel)) as mirror:
            assert mirror[models[-1].id] == models[-1]
            return time.perf_counter() - begun

    found = interleave({"ours": mirrored, "bare": listed}, 3 if quick else 7)
    goal = Goal("value_at_most", 0.2) if kind == "etcd" else None
    return row(
        f"{kind}: mirror of {count} records", found["ours"], "s", "range alone", found["bare"], goal
    )


# -- writers of one file


def _write_ours(path: str, seconds: float, found: Any) -> None:
    with open_store(f"sqlite:{path}") as store:
        found.put(_waits(lambda: store.put(f"w{os.getpid()}", VALUE), seconds))


def _write_bare(path: str, seconds: float, found: Any) -> None:
    raw = sqlite3.connect(path, isolation_level=None, timeout=20)
    raw.execute("pragma synchronous = full")

    def put() -> None:
        raw.execute("begin immediate")
        raw.execute("insert or replace into kv values (?, ?)", (str(os.getpid()).encode(), VALUE))
        raw.execute("commit")

    found.put(_waits(put, seconds))
    raw.close()


def _waits(put: Callable[[], Any], seconds: float) -> list[float]:
    waits, end = [], time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        put()
        waits.append((time.perf_counter() - begun) * 1e3)
    return waits


def _contention(quick: bool) -> Iterator[Row]:
    """Measure the longest wait of four processes that write one file as fast as they can."""
    spawn, seconds = multiprocessing.get_context("spawn"), 0.5 if quick else 2.0

    def run(work: Callable[..., None]) -> list[float]:
        with tempfile.TemporaryDirectory(prefix="clipper-registry-") as folder:
            path = f"{folder}/state.db"
            if work is _write_bare:
                raw = sqlite3.connect(path, isolation_level=None)
                raw.execute("pragma journal_mode = wal")
                raw.execute("create table kv (key blob primary key, value blob) without rowid")
                raw.close()
            found = spawn.Queue()
            writers = [
                spawn.Process(target=work, args=(path, seconds, found)) for _ in range(WRITERS)
            ]
            for writer in writers:
                writer.start()
            waits = [wait for _ in writers for wait in found.get(timeout=seconds + WRITER_S)]
            for writer in writers:
                writer.join()
            return sorted(waits)

    turns = [(run(_write_ours), run(_write_bare)) for _ in range(1 if quick else 3)]
    ours, bare = (
        Sample(tuple(len(waits) / seconds for waits in side)) for side in zip(*turns, strict=True)
    )
    yield row(
        f"sqlite: {WRITERS} processes write", ours, "1/s", "bare sqlite3, its own waiting", bare
    )
    for name, at in (("p99", 0.99), ("longest", 1.0)):
        ours, bare = (
            Sample(tuple(waits[int((len(waits) - 1) * at)] for waits in side))
            for side in zip(*turns, strict=True)
        )
        yield row(
            f"sqlite: {WRITERS} processes write, {name} wait",
            ours,
            "ms",
            "bare sqlite3, its own waiting",
            bare,
        )


# -- an etcd that hangs


def _loss(quick: bool) -> Iterator[Row]:
    if shutil.which("etcd") is None:
        return
    with store_servers.etcd() as url, open_store(url) as store, Mirror(store, "", bytes) as mirror:
        store.put("a", VALUE)
        process = next(_pids_of(Path("/proc"), url.rpartition(":")[2]))
        begun = time.perf_counter()
        os.kill(process, signal.SIGSTOP)
        while mirror.trouble is None:
            time.sleep(0.005)
        noticed = time.perf_counter() - begun
        os.kill(process, signal.SIGCONT)
        begun = time.perf_counter()
        while not _put(store):
            time.sleep(0.005)
        mirror.wait_for(lambda m: m.trouble is None and m.get("back") == VALUE, 20)
        yield row(
            "etcd hangs (SIGSTOP): the mirror knows", noticed, "s", goal=Goal("value_at_most", 5.0)
        )
        yield row("and follows again, after SIGCONT", time.perf_counter() - begun, "s")


def _put(store: Store) -> bool:
    try:
        store.put("back", VALUE)
    except StoreError:
        return False
    return True


def _pids_of(proc: Path, port: str) -> Iterator[int]:
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            serves = any(word.endswith(f":{port}".encode()) for word in words)
            if serves and words[0].endswith(b"etcd"):
                yield int(folder.name)
