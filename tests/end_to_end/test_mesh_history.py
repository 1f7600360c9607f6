"""A store that comes back empty, and nodes of one name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import AlreadyExists, UnknownModel
from tests.end_to_end.test_mesh_nodes import MODELS, QUICK, ROW, alive, predict, register
from tests.memory_container import wait_until
from tests.store.conftest import own_redis

Start = Callable[..., clipper.ClipperServer]
__all__ = ["own_redis"]


@pytest.fixture
def start(own_redis: Any, tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "models.py").write_text(MODELS)
    nodes: list[clipper.ClipperServer] = []

    def do(name: str, folder: str = "", **mesh: Any) -> clipper.ClipperServer:
        settings = {**QUICK, "name": name, "lease_s": 2.0, "rate_s": 10.0, **mesh}
        place = str(tmp_path / (folder or name))
        nodes.append(clipper.start(state=own_redis.url, folder=place, mesh=settings, drain_s=0.5))
        return nodes[-1]

    yield do
    for node in nodes:
        node.close(drain_s=0)


def emptied(nodes: list[clipper.ClipperServer], server: Any) -> None:
    """Delete the content of the store, and wait until all nodes have noticed."""
    assert server.ask("FLUSHALL") == b"+OK"
    for node in nodes:
        wait_until(lambda node=node: node.mesh.stats()["other_history"])


@pytest.mark.slow
@pytest.mark.parametrize("restore", [True, False])
def test_emptied_store_takes_no_model_away_until_an_operator_confirms(
    start: Start, own_redis: Any, tmp_path: Path, restore: bool
) -> None:
    one, other = nodes = [start("a"), start("b")]
    register(one, tmp_path)
    for node in nodes:
        wait_until(lambda node=node: "m" in node.mesh.joined.registry.models)
        assert predict(node)[2] == 4.0
    numbers = {node.mesh.joined.loader.number for node in nodes}
    emptied(nodes, own_redis)
    assert "has lost its history" in one.mesh.stats()["other_history"]
    for n, node in enumerate(nodes):
        assert node.mesh.stats()["other_history"]
        assert predict(node, row=ROW + 1 + n)[0] == 2.0 * (1 + n)
    late = start("c")
    assert late.mesh.joined.loader.number not in numbers
    assert late.mesh.joined.registry._token == one.mesh.joined.registry._token
    assert "has lost its history" in other.stats()["store"]["refused"]
    if restore:
        assert other.mesh.take_store(restore=True) == 1
    else:
        other.manage.by("ann").accept_store(restore=False)
    for node in nodes:
        wait_until(lambda node=node: not node.mesh.stats()["other_history"])
        wait_until(lambda node=node: alive(node) == ["a", "b", "c"])
    if restore:
        for n, node in enumerate((*nodes, late)):
            wait_until(lambda node=node: "m" in node.mesh.joined.registry.models)
            assert predict(node, row=ROW + 10 + n)[0] == 2.0 * (10 + n)
        return
    for node in nodes:
        wait_until(lambda node=node: node.mesh.router.get("m") is None)
        with pytest.raises(UnknownModel):
            node.predict("m", np.zeros(3))


@pytest.mark.slow
def test_node_with_the_name_of_one_that_lives_is_refused(start: Start, tmp_path: Path) -> None:
    node = start("a", lease_s=0.5)
    register(node, tmp_path)
    assert predict(node)[0] == 0.0
    with pytest.raises(AlreadyExists, match="a node named 'a' is in this mesh already"):
        start("a", folder="second", lease_s=0.5)
    assert predict(node, row=ROW + 1)[0] == 2.0
    assert node.mesh.joined.registry.read("m").copies  # type: ignore[union-attr]
    node.close(drain_s=0)
    assert predict(start("a", folder="second", lease_s=0.5), row=ROW + 2)[0] == 4.0
