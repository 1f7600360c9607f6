"""The mesh over stores that other machines reach: two nodes, and a store that is killed and comes
back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import clipper
from clipper.errors import StoreError
from clipper.mesh.registry import Registry
from clipper.store import cached_store
from tests.end_to_end.test_mesh_nodes import (
    MODELS,
    QUICK,
    ROW,
    QueryLoop,
    alive,
    holders,
    predict,
    register,
)
from tests.frontend.conftest import ask as http
from tests.memory_container import wait_until
from tests.store.conftest import own_etcd, own_redis

NodesOf = Callable[..., list[clipper.ClipperServer]]
PATIENCE_S = 60.0
MIRRORS = 4  # of one node: three of the registry, one of its election
__all__ = ["own_etcd", "own_redis"]


@pytest.fixture(params=["redis", "etcd"])
def server(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"own_{request.param}")


@pytest.fixture
def nodes_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NodesOf]:
    """Yield a function that starts nodes by the letters of their names."""
    (tmp_path / "models.py").write_text(MODELS)
    of = "server" if "server" in request.fixturenames else "own_redis"
    url, started = request.getfixturevalue(of).url, []

    def do(names: str, mesh: Any = None, **settings: Any) -> list[clipper.ClipperServer]:
        for name in names:
            its = {
                **QUICK,
                "name": name,
                "lease_s": 2.0,
                "rate_s": 10.0,
                "reaper_s": 600.0,
                **(mesh or {}),
            }
            started.append(
                clipper.start(
                    state=url, folder=str(tmp_path / name), mesh=its, drain_s=1.0, **settings
                )
            )
        return started[-len(names) :]

    yield do
    for node in started:
        node.close(drain_s=0)


@pytest.fixture
def nodes(server: Any, nodes_of: NodesOf) -> list[clipper.ClipperServer]:
    return nodes_of("ab")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_store, "PAUSE_S_MAX", 0.2)


def is_back(node: clipper.ClipperServer) -> bool:
    registry = node.mesh.joined.registry
    stale_s = max(mirror.stale_s for mirror in (registry.models, registry.instances))
    return not registry.is_fenced and stale_s < 0.9


def test_a_store_that_is_killed_stops_no_query(
    nodes: list[clipper.ClipperServer], server: Any, tmp_path: Path
) -> None:
    one, other = nodes
    wait_until(lambda: alive(one) == ["a", "b"] == alive(other))
    register(one, tmp_path)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: predict(nodes[i % 2], "m", ROW + i)[0], range(60)))
    assert results == [2.0 * i for i in range(60)]
    assert sum(node.mesh.stats()["loads"] for node in nodes) == 1
    with QueryLoop(one) as here, QueryLoop(other) as there:
        server.kill()
        wait_until(
            lambda: one.mesh.joined.registry.is_fenced and other.mesh.joined.registry.is_fenced
        )
        before = here.count, there.count
        wait_until(lambda: here.count > before[0] + 20 and there.count > before[1] + 20)
        server.start()
        wait_until(lambda: all(is_back(node) for node in nodes))
        wait_until(lambda: alive(one) == ["a", "b"] == alive(other))
    assert not here.failed + there.failed
    register(other, tmp_path, "n")
    assert predict(one, "n").tolist() == [0.0, 2.0, 4.0]
    wait_until(lambda: [len(holders(one, id)) for id in "mn"] == [1, 1])


def test_a_node_that_does_not_wait_for_its_store_does_not_start_and_leaves_nothing(
    server: Any, tmp_path: Path
) -> None:
    server.kill()
    with pytest.raises(StoreError, match="reach"):
        clipper.start(
            state=server.url, folder=str(tmp_path / "a"), mesh={"enabled": True, "enter_s": 0}
        )


def test_a_node_waits_for_its_store_and_serves_when_it_comes(
    server: Any, nodes_of: NodesOf, tmp_path: Path
) -> None:
    """Once the store is back, the node serves models of others and its own applications of them;
    until then queries fail with the reason."""
    (one,) = nodes_of("a")
    register(one, tmp_path)
    one.app("twice", ["m"], slo_ms=20_000)
    one.close()
    server.kill()
    (late,) = nodes_of(
        "b", http="127.0.0.1:0", apps={"declared": {"models": ["m"], "slo_ms": 20_000}}
    )
    assert late.mesh.awaits == f"the store {late.stats()['store']['name']}"
    assert late.stats()["mesh"] == {"instance": "b", "awaits": late.mesh.awaits}
    ready = http(late.http_address, "GET", "/v2/health/ready")
    assert (ready.status, ready.json["waiting_for"]) == (503, [late.mesh.awaits])
    assert http(late.http_address, "GET", "/v2/health/live").status == 200
    for refused in (
        lambda: predict(late, "m"),
        lambda: late.mesh.status("m"),
        lambda: register(late, tmp_path, "n"),
        lambda: late.mesh.instances(),
        lambda: next(late.mesh.watch()),
        lambda: late.mesh.drain(),
    ):
        with pytest.raises(StoreError, match="node b is not in its mesh: it awaits the store"):
            refused()
    assert http(late.http_address, "GET", "/v2/models/m").status == 503
    server.start()
    wait_until(lambda: not late.mesh.awaits, "it enters", PATIENCE_S)
    assert predict(late, "m").tolist() == [0.0, 2.0, 4.0]
    wait_until(lambda: late.stats()["store"]["connected"], "what waited has begun", PATIENCE_S)
    for app in ("twice", "declared"):
        assert late.app(app).predict(ROW).result(PATIENCE_S).output.tolist() == [0.0, 2.0, 4.0]
    assert http(late.http_address, "GET", "/v2/health/ready").status == 200


def lease_threads() -> int:
    """Return the number of threads that keep a lease alive."""
    return sum(thread.name == "clipper-lease" for thread in threading.enumerate())


def test_a_store_that_goes_again_while_a_node_enters_is_waited_for_again(
    own_redis: Any, nodes_of: NodesOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed try leaves nothing behind, at whatever step it failed."""
    own_redis.kill()
    failing = ["number", "token", "enter"]

    def failed(of: str) -> Any:
        was = getattr(Registry, of)

        def once(self: Registry, *args: Any) -> Any:
            if failing and failing[0] == of:
                failing.pop(0)
                raise StoreError(f"gone again, at {of}")
            return was(self, *args)

        return once

    for of in tuple(failing):
        monkeypatch.setattr(Registry, of, failed(of))
    (late,) = nodes_of("a")
    own_redis.start()
    wait_until(lambda: not late.mesh.awaits, "it enters", PATIENCE_S)
    assert not failing
    wait_until(lambda: late.stats()["store"]["connected"], "what waited has begun", PATIENCE_S)
    wait_until(lambda: lease_threads() == 2, "those of node and server are kept", PATIENCE_S)
    assert sum(thread.name == "clipper-mirror" for thread in threading.enumerate()) == MIRRORS
    register(late, tmp_path)
    assert predict(late, "m").tolist() == [0.0, 2.0, 4.0]


def test_a_node_gives_up_when_its_store_does_not_come(own_redis: Any, nodes_of: NodesOf) -> None:
    own_redis.kill()
    (late,) = nodes_of("a", mesh={"enter_s": 0.1})
    wait_until(lambda: late.mesh.given_up, "it gives up", PATIENCE_S)
    assert "did not come within 0.1 s (mesh.enter_s)" in late.mesh.awaits
    own_redis.start()
    wait_until(lambda: late.stats()["store"]["connected"], "the server has its store", PATIENCE_S)
    with pytest.raises(StoreError, match="it awaits another start of this node"):
        late.mesh.status("m")


@pytest.mark.parametrize("reached", ["number", "enter"])
def test_a_node_that_is_closed_while_it_enters_leaves_nothing(
    own_redis: Any, nodes_of: NodesOf, monkeypatch: pytest.MonkeyPatch, reached: str
) -> None:
    own_redis.kill()
    there, goes_on = threading.Event(), threading.Event()
    was = getattr(Registry, reached)

    def slow(self: Registry, *args: Any) -> Any:
        there.set()
        assert goes_on.wait(PATIENCE_S)
        return was(self, *args)

    monkeypatch.setattr(Registry, reached, slow)
    (late,) = nodes_of("a")
    own_redis.start()
    assert there.wait(PATIENCE_S)
    closing = threading.Thread(target=late.close)
    closing.start()
    wait_until(lambda: late.mesh._loop.stopping)
    goes_on.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
