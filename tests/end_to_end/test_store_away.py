"""A server killed by kill -9 comes back with all it had, from SQLite and from Redis; a Redis may be
away when a server starts."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import clipper
from clipper import errors
from clipper.store import cached_store
from tests.frontend.conftest import QUICK, ask
from tests.memory_container import wait_until
from tests.processes import Program
from tests.store.conftest import RedisServer, own_redis

__all__ = ["own_redis"]

PATIENCE_S = 60.0

FIRST = """
import json, sys, clipper
from clipper.frontend.http.messages import to_json
from clipper.selection import create_policy
state, folder = sys.argv[1:3]
server = clipper.start(state=state, folder=folder, restart_ms_min=20, feedback={"write_ms": 20})
for factor in (1, 2, 3):
    many = 2 if factor == 1 else 1
    server.deploy("m", lambda rows, factor=factor: rows.sum(axis=1) * factor, input="f64[2]", replicas=many, wait=factor == 2)
server.deploy("old", lambda rows: rows.sum(axis=1), input="f64[2]", replicas=0)
server.deploy("n", lambda rows: rows.sum(axis=1), input="f64[2]", replicas=(1, 3))
server.manage.by("ann").retire("old")
server.manage.by("ann").promote("m:1")
server.app("a", ["m", "n"], slo_ms=20_000, default=[1, 2], policy="exp3(eta=0.05)", roles={"n": "shadow"}, confidence_min=0.1)
server.app("b", ["m:3"], slo_ms=20_000, decider="first")
server.app("c", ["m", "n"], slo_ms=20_000, policy="stacking", default=-1)
server.manage.by("bob").rollout("a", "m:2", stages="30,100", hold="1h", guard="error<50%")
server.manage.by("bob").pause_rollout("a")
for i in range(40):
    answer = server.app("c").predict([i, 1.0]).result(60)
    server.app("c").feedback(answer, label=i + 1.0)
ids = [server.catalog.view.model(name).id for name in ("m", "n")]
learner = server._learning.states.learner("c", "stacking", create_policy("stacking"), ids)
print(to_json({
    "models": [(str(model.id), model.replicas, model.replicas_max, model.sha256) for model in server.catalog.models()],
    "latest": str(server.catalog.latest("m").id),
    "applications": server.manage.applications(),
    "rollout": server.catalog.view.rollouts["a"],
    "history": server.manage.history(),
    "journal": server.stats()["feedback"]["journal_records"],
    "learned": learner.shared.applied,
    "pids": [row["pid"] for model in server.stats()["models"].values() for row in model["replicas"]],
}).decode(), flush=True)
sys.stdin.read()
"""  # noqa: E501


def killed(state: str, folder: Path) -> dict[str, Any]:
    """Run a server that changes many things, kill it, and return its state before the kill."""
    with Program(sys.executable, "-c", FIRST, state, folder, apart=True) as process:
        before_kill: dict[str, Any] = json.loads(process.line())
        os.kill(process.pid, signal.SIGKILL)
        wait_until(
            lambda: not any(is_running(pid) for pid in before_kill["pids"]),
            "its containers die with it",
            PATIENCE_S,
        )
    return before_kill


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def has_everything(server: clipper.ClipperServer, before_kill: dict[str, Any]) -> None:
    catalog = server.catalog
    assert (
        plain(
            [(str(one.id), one.replicas, one.replicas_max, one.sha256) for one in catalog.models()]
        )
        == before_kill["models"]
    )
    assert str(catalog.latest("m").id) == before_kill["latest"] == "m:1"
    assert plain(server.manage.applications()) == before_kill["applications"]
    assert plain(catalog.view.rollouts["a"]) == before_kill["rollout"]
    assert plain(server.manage.history())[: len(before_kill["history"])] == before_kill["history"]


def serves(server: clipper.ClipperServer) -> None:
    """Check that every container is back as a new process and that the applications answer."""
    wanted = {"m:1": 2, "m:2": 1, "m:3": 1, "n:1": 1}
    stats: Callable[[], dict[str, Any]] = lambda: server.stats()["models"]  # noqa: E731
    wait_until(
        lambda: all(stats()[name]["has"] >= count for name, count in wanted.items()),
        "they connect",
        PATIENCE_S,
    )
    for name, right in (("a", (2.0, 4.0)), ("b", (6.0,)), ("c", (2.0,))):
        answer = server.app(name).predict(np.ones(2)).result(PATIENCE_S)
        assert not answer.is_default, answer
        assert name == "c" or answer.output in right


def learned(server: clipper.ClipperServer) -> dict[str, int]:
    from clipper.selection import create_policy

    ids = [server.catalog.view.model(name).id for name in ("m", "n")]
    found: dict[str, int] = server._learning.states.learner(
        "c", "stacking", create_policy("stacking"), ids
    ).shared.applied
    return found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_store, "PAUSE_S_MAX", 0.2)


@pytest.fixture(params=["sqlite", "redis"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"{tmp_path}/state"
        if request.param == "sqlite"
        else str(request.getfixturevalue("own_redis").url)
    )


def test_killed_by_kill_9_it_comes_back_with_all_it_had(state: str, tmp_path: Path) -> None:
    before_kill = killed(state, tmp_path / "folder")
    with clipper.start(state=state, folder=str(tmp_path / "folder"), **QUICK) as server:
        has_everything(server, before_kill)
        serves(server)
        assert learned(server) == before_kill["learned"]
        assert server.stats()["feedback"]["journal_records"] == before_kill["journal"] == 40
        pids = {
            row["pid"] for model in server.stats()["models"].values() for row in model["replicas"]
        }
        assert not pids & set(before_kill["pids"]), "nobody who was half-dead is taken over"
        server.manage.resume_rollout("a")
        assert server.manage.rollouts("a")[0]["state"] == "running"


def test_redis_is_away_at_the_start_and_comes(own_redis: RedisServer, tmp_path: Path) -> None:
    """A server serves from its copy, refuses changes, keeps feedback, and stores it once Redis is
    there."""
    folder = tmp_path / "folder"
    before_kill = killed(own_redis.url, folder)
    own_redis.kill()
    with clipper.start(
        state=own_redis.url, folder=str(folder), http="127.0.0.1:0", **QUICK
    ) as server:
        assert plain(server.manage.applications()) == before_kill["applications"]
        serves(server)
        store = server.stats()["store"]
        assert (store["connected"], store["copy_age_s"] >= 0) == (False, True)
        ready = ask(server.http_address, "GET", "/v2/health/ready")
        assert (ready.status, ready.json["ready"]) == (200, True)
        assert "is away for" in ready.json["store"]
        assert "the catalog is a copy of" in ready.json["store"]
        refused = "Serving continues from a copy of .* ago, and nothing can be changed"
        for change in (
            lambda: server.manage.promote("m:2"),
            lambda: server.app("new", ["m"]),
            lambda: server.manage.abort_rollout("a"),
            lambda: server.manage.history(),
        ):
            with pytest.raises(errors.StoreError, match=refused):
                change()
        for i in range(25):
            answer = server.app("c").predict([i, 7.0]).result(PATIENCE_S)
            assert server.app("c").feedback(answer, label=i + 7.0)
        own_redis.start()
        node = next(iter(before_kill["learned"]))
        wait_until(
            lambda: server.stats()["store"]["connected"] and learned(server).get(node) == 65,
            "it begins",
            PATIENCE_S,
        )
        has_everything(server, before_kill)
        assert "store" not in ask(server.http_address, "GET", "/v2/health/ready").json
        server.app("d", ["m:2"], slo_ms=20_000)
        assert not server.app("d").predict(np.ones(2)).result(PATIENCE_S).is_default
    with clipper.start(state=own_redis.url, folder=str(folder), **QUICK) as again:
        assert learned(again)[node] == 65, "each feedback once: 40 before, 25 while it was away"
        assert "d" in again.catalog.view.applications


def test_what_changed_elsewhere_meanwhile_is_followed(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    """Another server of the store retired and scaled models while this one had only its copy."""
    folder = tmp_path / "folder"
    with clipper.start(state=own_redis.url, folder=str(folder), **QUICK) as server:
        for _ in range(2):
            server.deploy("m", lambda rows: rows.sum(axis=1), input="f64[2]")
        server.app("a", ["m"], slo_ms=20_000)
    copy = (folder / "catalog.copy").read_bytes()
    with clipper.start(state=own_redis.url, **QUICK) as other:
        other.retire("m:1")
        other.manage.scale("m:2", 2)
    own_redis.kill()
    assert (folder / "catalog.copy").read_bytes() == copy
    with clipper.start(state=own_redis.url, folder=str(folder), **QUICK) as server:
        wait_until(
            lambda: server.stats()["models"]["m:1"]["has"] == 1, "as the copy says", PATIENCE_S
        )
        own_redis.start()
        wait_until(lambda: "m:1" not in server.stats()["models"], "it is retired", PATIENCE_S)
        wait_until(lambda: server.stats()["models"]["m:2"]["has"] == 2, "it is scaled", PATIENCE_S)
        assert not server.app("a").predict(np.ones(2)).result(PATIENCE_S).is_default


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "declared_here.py").write_text("def total(rows):\n    return rows.sum(axis=1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_without_a_copy_it_is_not_ready_until_redis_comes(
    own_redis: RedisServer, module: None, tmp_path: Path
) -> None:
    own_redis.kill()
    file = tmp_path / "clipper.toml"
    file.write_text(
        '[models.m]\ntarget = "declared_here:total"\ninput = "f64[2]"\n[apps.a]\nmodels ='
        ' ["m"]\nslo_ms = 20000\n'
    )
    with pytest.raises(errors.StoreError, match="cannot be reached"):
        clipper.start(file, state=own_redis.url, require_store=True)
    with clipper.start(file, state=own_redis.url, http="127.0.0.1:0", **QUICK) as server:
        ready = ask(server.http_address, "GET", "/v2/health/ready")
        assert ready.status == 503
        assert ready.json["waiting_for"] == [f"the store {own_redis.url}"]
        assert ask(server.http_address, "GET", "/v2/health/live").status == 200
        with pytest.raises(
            errors.StoreError, match="Nothing is served from it until it is there"
        ) as caught:
            server.app("b", slo_ms=10)
        assert "Start it" in caught.value.hint
        own_redis.start()
        wait_until(
            lambda: ask(server.http_address, "GET", "/v2/health/ready").status == 200,
            "it is declared",
            PATIENCE_S,
        )
        assert not server.app("a").predict(np.ones(2)).result(PATIENCE_S).is_default


def test_a_damaged_copy_is_no_copy(own_redis: RedisServer, tmp_path: Path) -> None:
    own_redis.kill()
    (tmp_path / "catalog.copy").write_bytes(b"nonsense")
    with clipper.start(state=own_redis.url, folder=str(tmp_path)) as server:
        assert server.stats()["store"]["copy_age_s"] is None
        assert server.catalog.models() == []
