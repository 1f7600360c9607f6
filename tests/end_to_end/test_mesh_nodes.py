"""The mesh on several nodes over one store: a query may reach a node without a copy, and nodes with
copies may die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import StoreError, UnknownModel
from clipper.mesh.decisions import vmodels
from clipper.mesh.records import Policy
from clipper.mesh.registry import now_ms
from clipper.mesh.reports import Info
from tests.memory_container import wait_until
from tests.processes import Program
from tests.store.conftest import RedisServer, own_redis
from tests.threads import join

MODELS = """
import time

def double(rows):
    return rows * 2

def triple(rows):
    return rows * 3

def slow(rows):
    time.sleep(0.03 * len(rows))
    return rows
"""
QUICK = {
    "enabled": True,
    "publish_s": 0.05,
    "rate_s": 0.1,
    "rate_per_copy": 1 << 30,
    "lease_s": 5.0,
    "reaper_s": 0.2,
    "janitor_s": 0.2,
    "drain_s": 5.0,
}
ROW = np.arange(3.0)
NODE = """
import json, sys, clipper
state, folder, mesh = sys.argv[1:]
with clipper.start(state=state, folder=folder, mesh=json.loads(mesh), drain_s=1.0) as server:
    print("ready", flush=True)
    sys.stdin.read()
"""
MORTAL_S = 1.0  # lease of a node that is to die
Start = Callable[..., clipper.ClipperServer]
Spawn = Callable[..., "Program"]
__all__ = ["own_redis"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Yield a function that starts a node in this process."""
    nodes: list[clipper.ClipperServer] = []

    def do(name: str, state: str = "", **mesh: Any) -> clipper.ClipperServer:
        settings = {**QUICK, "name": name, **mesh}
        node = clipper.start(
            state=state or f"sqlite:{folder}/mesh.db",
            folder=str(folder / name),
            mesh=settings,
            drain_s=1.0,
        )
        nodes.append(node)
        return node

    yield do
    for node in nodes:
        node.close(drain_s=0)


@pytest.fixture
def spawn(folder: Path) -> Iterator[Spawn]:
    """Yield a function that starts a node as a process."""
    with contextlib.ExitStack() as stack:

        def do(name: str, state: str = "") -> Program:
            mesh = json.dumps({**QUICK, "name": name, "lease_s": MORTAL_S})
            words = ["-c", NODE, state or f"sqlite:{folder}/mesh.db", folder / name, mesh]
            return stack.enter_context(Program(sys.executable, *words, until="ready\n"))

        yield do


def register(node: clipper.ClipperServer, folder: Path, id: str = "m", **settings: Any) -> None:
    node.register_model(id, "models.py:double", key=str(folder), **settings)


def predict(node: clipper.ClipperServer, id: str = "m", row: Any = ROW) -> Any:
    answer = node.predict(id, row, slo_ms=20_000).result(30)
    assert not answer.is_default, answer.reason
    return answer.output


def holders(node: clipper.ClipperServer, id: str = "m") -> list[str]:
    return sorted(copy.instance for copy in node.mesh.status(id).copies if copy.state == "LOADED")


def alive(node: clipper.ClipperServer) -> list[str]:
    return [instance.id for instance in node.mesh.instances()]


def hold_back(node: clipper.ClipperServer, stops: bool, *seen_by: clipper.ClipperServer) -> None:
    """Have a node take no models, so that others get them; or take them again."""
    node.mesh.joined.loader.set_stopping(stops)
    id = node.mesh.instance

    def knows(other: clipper.ClipperServer) -> bool:
        seen = other.mesh.joined.registry.instances.get(id)
        return seen is not None and seen.stopping == stops

    for other in (node, *seen_by):
        wait_until(lambda other=other: knows(other))


class QueryLoop:
    """A thread that sends queries one after another, each with another row; `failed` has the
    unexpected errors."""

    def __init__(self, node: clipper.ClipperServer, id: str = "m") -> None:
        self.failed: list[str] = []
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(node, id))

    def _run(self, node: clipper.ClipperServer, id: str) -> None:
        while not self._stop.wait(0.001):  # the nodes of this process need the interpreter, too
            self.count += 1
            answer = node.predict(id, ROW + self.count, slo_ms=20_000).result(30)
            if answer.is_default:
                self.failed.append(answer.reason)

    def __enter__(self) -> QueryLoop:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        join(self._thread)


def test_any_node_answers_and_one_holds(start: Start, folder: Path) -> None:
    nodes = [start(name) for name in "abc"]
    register(nodes[0], folder)
    for n, node in enumerate(nodes):
        wait_until(lambda node=node: "m" in node.mesh.joined.registry.models)
        assert predict(node, row=ROW + n)[0] == 2.0 * n
    assert len(holders(nodes[1])) == 1
    nodes[1].mesh.unregister("m")
    wait_until(lambda: not any(node.mesh.joined.loader.held for node in nodes))
    for node in nodes:
        wait_until(lambda node=node: node.mesh.router.get("m") is None)
        with pytest.raises(UnknownModel):
            node.predict("m", ROW)


def test_many_first_requests_at_once_make_one_copy(start: Start, folder: Path) -> None:
    nodes = [start(name, rate_s=10.0) for name in "abc"]
    for id in ("m", "n"):
        register(nodes[0], folder, id)
    wait_until(lambda: all("n" in node.mesh.joined.registry.models for node in nodes))
    with ThreadPoolExecutor(16) as pool:
        results = list(
            pool.map(lambda i: predict(nodes[i % 3], "mn"[i % 2], ROW + i)[0], range(300))
        )
    assert results == [2.0 * i for i in range(300)]
    assert sum(node.mesh.stats()["loads"] for node in nodes) == 2
    assert [len(holders(node, id)) for node in nodes for id in ("m", "n")] == [1] * 6


def test_node_that_does_not_know_a_holder_makes_no_second_copy(start: Start, folder: Path) -> None:
    """Mirrors of models and of instances are followed separately: a node may know a copy before it
    knows the instance that holds it."""
    first, second = start("a", reaper_s=3600.0), start("b", reaper_s=3600.0)
    register(second, folder)
    assert predict(second)[0] == 0.0
    wait_until(
        lambda: (
            "m" in first.mesh.joined.registry.models
            and first.mesh.joined.registry.models["m"].loaded
        )
    )
    (holder,) = holders(second)
    late = first if holder == "b" else second
    late.mesh.joined.registry.instances.close()
    late.mesh.joined.registry.instances._records.pop(holder, None)
    answer = late.predict("m", ROW + 1, slo_ms=500).result(30)
    assert answer.is_default
    assert sum(node.mesh.stats()["loads"] for node in (first, second)) == 1
    assert holders(first if holder == "a" else second) == [holder]


def test_what_was_just_registered_elsewhere_is_found(start: Start, folder: Path) -> None:
    one, other = start("a"), start("b")
    for n in range(10):
        register(one, folder, f"m{n}")
        assert predict(other, f"m{n}").tolist() == [0.0, 2.0, 4.0]


def test_a_node_that_is_killed_takes_no_query_with_it(
    start: Start, spawn: Spawn, folder: Path
) -> None:
    node = start("a")
    process = spawn("b")
    wait_until(lambda: alive(node) == ["a", "b"])
    hold_back(node, True)
    register(node, folder)
    predict(node)
    assert holders(node) == ["b"]
    hold_back(node, False)
    with QueryLoop(node) as loop:
        wait_until(lambda: loop.count > 20)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: holders(node) == ["a"])
        before = loop.count
        wait_until(lambda: loop.count > before + 20)
    assert not loop.failed
    wait_until(lambda: "b" not in node.mesh.joined.registry.models["m"].copies)


def test_a_node_that_hangs_is_buried_and_comes_back_in_order(
    start: Start, spawn: Spawn, own_redis: RedisServer, folder: Path
) -> None:
    node = start("a", own_redis.url)  # a process that stands still may have SQLite's lock
    process = spawn("b", own_redis.url)
    wait_until(lambda: alive(node) == ["a", "b"])
    hold_back(node, True)
    register(node, folder)
    predict(node)
    hold_back(node, False)
    with QueryLoop(node) as loop:
        wait_until(lambda: loop.count > 20)
        os.killpg(process.pid, signal.SIGSTOP)
        wait_until(lambda: holders(node) == ["a"])
        before = loop.count
        wait_until(lambda: loop.count > before + 20)
        os.killpg(process.pid, signal.SIGCONT)
        wait_until(lambda: alive(node) == ["a", "b"])
    assert not loop.failed
    wait_until(lambda: sum(instance.models for instance in node.mesh.instances()) == 1)
    assert holders(node) == ["a"]


def test_what_is_loaded_is_served_while_the_store_is_away(start: Start, folder: Path) -> None:
    # which would load it proactively
    one, other = (start("a", lease_s=MORTAL_S, reaper_s=600.0), start("b", reaper_s=600.0))
    wait_until(lambda: alive(one) == ["a", "b"] == alive(other))
    hold_back(other, True, one)
    for id in ("m", "n"):
        register(one, folder, id)
    predict(one)
    hold_back(other, False, one)
    store = one.mesh.joined.registry.store

    def unreachable(*_: Any, **__: Any) -> Any:
        raise StoreError("away")

    names = ("get", "txn", "range", "grant", "renew", "put", "put_if")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(store, name, unreachable, raising=False)
        with QueryLoop(one) as loop:
            wait_until(lambda: one.mesh.joined.registry.is_fenced)
            before = loop.count
            wait_until(lambda: loop.count > before + 20 and "a" not in alive(other))
            # the other node loads it, and lends it
            assert predict(one, "n").tolist() == [0.0, 2.0, 4.0]
            assert "n" not in one.mesh.joined.loader.held
    assert not loop.failed
    wait_until(lambda: not one.mesh.joined.registry.is_fenced and alive(other) == ["a", "b"])
    assert predict(other).tolist() == [0.0, 2.0, 4.0]
    wait_until(lambda: len(holders(one)) == 1)


def test_holders_learn_of_queries_at_other_nodes(start: Start, folder: Path) -> None:
    one, other = start("a", rate_s=10.0), start("b", rate_s=10.0)
    wait_until(lambda: alive(one) == ["a", "b"] == alive(other))
    hold_back(other, True, one)
    register(one, folder)
    predict(other)
    resident = one.mesh.joined.loader.cache.get("m")
    assert resident is not None
    used_ms = resident.used_ms
    predict(other, row=ROW + 1)
    wait_until(lambda: one.mesh.joined.loader.cache.get("m").used_ms > used_ms)


def test_types_go_where_their_labels_are(start: Start, folder: Path) -> None:
    constraints = folder / "constraints.json"
    constraints.write_text(json.dumps({"python": {"required": ["big"]}}))
    one = start("a", constraints=str(constraints))
    start("b", labels=("big",))
    wait_until(lambda: alive(one) == ["a", "b"])
    register(one, folder)
    predict(one)
    assert holders(one) == ["b"]
    why = {verdict.instance: verdict.why for verdict in one.mesh.explain("m").verdicts}
    assert "big" in why["a"]
    constraints.write_text("{}")
    wait_until(lambda: not one.mesh.joined.constraints.constraints)


def test_what_made_room_here_is_loaded_where_there_is_room(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, free = (
        start(name, load_s=1.0, loaded_max=most, reaper_s=600.0)
        for name, most in (("full", 1), ("free", 100))
    )
    wait_until(lambda: alive(full) == ["free", "full"] == alive(free))
    for id in ("old", "new"):
        register(full, folder, id)
    hold_back(free, True, full)
    predict(full, "old")
    assert holders(full, "old") == ["full"]
    hold_back(free, False, full)
    claimed_ms = full.mesh.joined.registry.models.get("old").copies["full"].claimed_ms
    wait_until(lambda: now_ms() - claimed_ms > 2 * 1000 + 100, "it was not just loaded")
    mirror, stale = full.mesh.joined.registry.models, full.mesh.joined.registry.models.get("old")
    known = mirror.get
    with monkeypatch.context() as late:  # the mirror has not heard yet that it was released
        late.setattr(mirror, "get", lambda id: stale if id == "old" else known(id))
        full.mesh._loop.run(full.mesh.joined.loader.load("new", now_ms(), waiting=True))
        wait_until(lambda: "old" in free.mesh.joined.loader.held)
    wait_until(lambda: (holders(full, "new"), holders(full, "old")) == (["full"], ["free"]))
    assert any(decision.what == "wanted elsewhere" for decision in full.mesh.explain("old").history)
    assert predict(full, "old").tolist() == (ROW * 2).tolist()
    assert holders(full, "new") == ["full"]


def test_all_nodes_are_replaced_one_by_one_under_load(start: Start, folder: Path) -> None:
    queried, nodes = start("asked"), [start("a"), start("b")]
    hold_back(queried, True, *nodes)
    for n in range(4):
        register(queried, folder, f"m{n}")
        predict(queried, f"m{n}")
    with QueryLoop(queried, "m0") as one, QueryLoop(queried, "m3") as other:
        for n, node in enumerate(nodes):
            fresh = start(f"new{n}")
            wait_until(lambda fresh=fresh: fresh.mesh.instance in alive(queried))
            node.close()
        before = one.count
        wait_until(lambda: min(one.count, other.count) > before + 10)
    assert not one.failed + other.failed
    wait_until(
        lambda: {name for n in range(4) for name in holders(queried, f"m{n}")} <= {"new0", "new1"}
    )


def test_a_node_that_leaves_has_its_models_moved_first(start: Start, folder: Path) -> None:
    one, other = start("a", drain_s=60.0), start("b")
    wait_until(lambda: alive(one) == ["a", "b"] == alive(other))
    hold_back(other, True, one)
    for n in range(5):
        register(one, folder, f"m{n}")
        predict(one, f"m{n}")
    assert holders(one, "m4") == ["a"]
    hold_back(other, False, one)
    seen = []
    with QueryLoop(other, "m0") as loop:
        wait_until(lambda: loop.count > 5)
        progress = one.mesh.drain(seen.append)
        assert (progress.total, progress.done, progress.failed) == (5, 5, 0)
        before = loop.count
        one.close()
        wait_until(lambda: loop.count > before + 5)
    assert not loop.failed
    assert seen[0].left == 5
    wait_until(lambda: {tuple(holders(other, f"m{n}")) for n in range(5)} == {("b",)})


def test_a_node_that_was_taken_for_dead_comes_back_with_what_it_holds(
    start: Start, folder: Path
) -> None:
    one, other = start("a"), start("b")
    wait_until(lambda: alive(one) == ["a", "b"] == alive(other))
    hold_back(other, True, one)
    register(one, folder)
    predict(one)
    hold_back(other, False, one)
    lease = one.mesh.joined.registry.lease
    assert lease is not None
    one.mesh.joined.registry.store.revoke(lease.id)
    lease.lost.set()
    wait_until(lambda: not one.mesh.joined.registry.is_fenced and alive(other) == ["a", "b"])
    assert predict(other, row=ROW + 5)[0] == 10.0

    def agreed() -> bool:
        held = [node.mesh.instance for node in (one, other) if "m" in node.mesh.joined.loader.held]
        return len(held) == 1 and holders(other) == held

    wait_until(agreed)
    assert predict(other, row=ROW + 6)[0] == 12.0


def test_a_model_much_used_has_another_copy_and_both_serve(start: Start, folder: Path) -> None:
    one, other = start("a", rate_per_copy=10), start("b", rate_per_copy=10)
    wait_until(lambda: alive(one) == ["a", "b"] == alive(other))
    register(one, folder)
    with QueryLoop(one) as loop:
        wait_until(lambda: holders(one) == ["a", "b"])
        route = one.mesh.router.get("m")
        assert route is not None
        wait_until(lambda: len(route.lenders) == 2)
    assert not loop.failed


def test_a_policy_is_kept(start: Start, folder: Path) -> None:
    nodes = [start(name) for name in "ab"]
    wait_until(lambda: len(alive(nodes[0])) == 2)
    register(nodes[0], folder, policy=Policy(copies_min=2))
    wait_until(lambda: holders(nodes[0]) == ["a", "b"])


def test_a_vmodel_is_switched_without_a_lost_query(start: Start, folder: Path) -> None:
    nodes = [start(name) for name in "ab"]
    register(nodes[0], folder)
    nodes[0].register_model("t", "models.py:triple", key=str(folder))
    nodes[0].mesh.set_vmodel("v", "m")
    wait_until(lambda: nodes[1].mesh.router.route("v") is not None)
    with QueryLoop(nodes[1], "v") as loop:
        wait_until(lambda: loop.count > 5)
        status = nodes[1].mesh.set_vmodel("v", "t", sync=True)
        assert (status.active, status.previous) == ("t", "m")
        wait_until(lambda: predict(nodes[1], "v", ROW + 1000.5)[0] == 3001.5)
    assert not loop.failed
    assert nodes[0].mesh.rollback_vmodel("v").target == "m"
    wait_until(lambda: nodes[0].mesh.vmodel_status("v").active == "m")


def test_a_vmodel_whose_models_go_with_it_is_switched_without_a_lost_query(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [start(name) for name in "ab"]
    wait_until(lambda: len(alive(nodes[0])) == 2 == len(alive(nodes[1])))

    def switch(n: int) -> None:
        info = Info("models.py:double", key=str(folder))
        nodes[n % 2].mesh.set_vmodel("v", f"m{n}", model=info, auto_delete=True, sync=True)

    switch(0)
    wait_until(lambda: nodes[1].mesh.router.route("v") is not None)
    with QueryLoop(nodes[0], "v") as one, QueryLoop(nodes[1], "v") as other:
        for n in range(1, 8):
            counts = one.count, other.count
            switch(n)
            wait_until(
                lambda counts=counts: one.count > counts[0] + 5 and other.count > counts[1] + 5
            )
    assert not one.failed + other.failed
    monkeypatch.setattr(vmodels, "LINGER_MS", 0)
    wait_until(lambda: list(nodes[0].mesh.joined.registry.models) == ["m7"])
    wait_until(lambda: {id for node in nodes for id in node.mesh.joined.loader.held} == {"m7"})


def test_rows_that_wait_long_for_their_slo_get_a_second_copy(start: Start, folder: Path) -> None:
    nodes = [start("one"), start("two")]
    wait_until(lambda: len(alive(nodes[0])) == 2)
    nodes[0].register_model("m", "models.py:slow", key=str(folder), policy=Policy(slo_ms=200.0))
    waiting = []

    def has_two() -> bool:
        waiting.extend(
            nodes[0].predict("m", ROW + len(waiting) + n, slo_ms=60_000) for n in range(4)
        )
        time.sleep(0.05)
        return len(holders(nodes[0])) == 2

    wait_until(has_two, patience_s=30)
    assert any("rows wait" in said.why for node in nodes for said in node.mesh.explain("m").history)
    assert all(not future.result(60).is_default for future in waiting)
