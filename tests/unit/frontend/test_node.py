"""When a server is ready, and what it waits for if it is not."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from clipper.frontend.server_interface import ServerInterface
from clipper.mesh.records import Instance
from clipper.metrics.stats import ServerStats


def node_of(mesh: Any, **stats: Any) -> ServerInterface:
    catalog: Any = SimpleNamespace(view=SimpleNamespace(applications={}))
    nothing: Any = None
    return ServerInterface(
        "0",
        nothing,
        catalog,
        nothing,
        nothing,
        lambda: cast(ServerStats, {"models": {}, **stats}),
        lambda: False,
        nothing,
        mesh,
    )


@pytest.mark.parametrize(
    ("instances", "waiting"),
    [
        ([Instance("a", 1, "", "", types=("onnx",)), Instance("b", 2, "", "")], []),
        (
            [Instance("a", 1, "", ""), Instance("b", 2, "", "", types=("onnx",))],
            ["the processes that hold models"],
        ),
        ([Instance("a", 1, "", "", types=("onnx",), stopping=True)], ["the node leaves its mesh"]),
        (
            [Instance("b", 2, "", "", stopping=True)],
            [],
        ),  # fenced: the store is away, and what is loaded answers
    ],
)
def test_a_node_of_a_mesh_is_ready_while_it_can_load_models(
    instances: list[Instance], waiting: list[str]
) -> None:
    mesh = SimpleNamespace(instance="a", instances=lambda: instances)
    assert node_of(mesh).unready() == waiting
    assert node_of(None).unready() == []
