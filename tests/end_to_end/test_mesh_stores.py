"""The mesh over stores that other machines reach: two nodes, and a store that is killed and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import clipper
from clipper.errors import StoreError
from clipper.testing import wait_until
from tests.end_to_end.test_mesh_nodes import MODELS, QUICK, ROW, Asking, alive, ask, holders, register
from tests.store.conftest import own_etcd, own_redis

__all__ = ["own_etcd", "own_redis"]


@pytest.fixture(params=["redis", "etcd"])
def server(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"own_{request.param}")


@pytest.fixture
def nodes(server: Any, tmp_path: Path) -> Iterator[list[clipper.ClipperServer]]:
    (tmp_path / "models.py").write_text(MODELS)
    started = []
    for name in "ab":
        mesh = {**QUICK, "name": name, "lease_s": 2.0, "rate_s": 10.0, "reaper_s": 600.0}
        started.append(clipper.start(state=server.url, folder=str(tmp_path / name), mesh=mesh, drain_s=1.0))
    yield started
    for node in started:
        node.close(drain_s=0)


def is_back(node: clipper.ClipperServer) -> bool:
    registry = node.mesh.registry
    stale_s = max(mirror.stale_s for mirror in (registry.models, registry.instances))
    return not registry.is_fenced and stale_s < 0.9


def test_a_store_that_is_killed_stops_no_query(nodes: list[clipper.ClipperServer], server: Any, tmp_path: Path) -> None:
    one, other = nodes
    wait_until(lambda: alive(one) == ["a", "b"] == alive(other))
    register(one, tmp_path)
    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda i: ask(nodes[i % 2], "m", ROW + i)[0], range(60)))
    assert asked == [2.0 * i for i in range(60)]
    assert sum(node.mesh.stats()["loads"] for node in nodes) == 1
    with Asking(one) as here, Asking(other) as there:
        server.kill()
        wait_until(lambda: one.mesh.registry.is_fenced and other.mesh.registry.is_fenced)
        before = here.count, there.count
        wait_until(lambda: here.count > before[0] + 20 and there.count > before[1] + 20)
        server.start()
        wait_until(lambda: all(is_back(node) for node in nodes))
        wait_until(lambda: alive(one) == ["a", "b"] == alive(other))
    assert not here.failed + there.failed
    register(other, tmp_path, "n")
    assert ask(one, "n").tolist() == [0.0, 2.0, 4.0]
    wait_until(lambda: [len(holders(one, id)) for id in "mn"] == [1, 1])


def test_a_node_does_not_start_without_its_store_and_leaves_nothing(server: Any, tmp_path: Path) -> None:
    server.kill()
    with pytest.raises(StoreError, match="reach"):
        clipper.start(state=server.url, folder=str(tmp_path / "a"), mesh=True)
