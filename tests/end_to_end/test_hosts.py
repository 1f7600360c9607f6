"""A model host beside real servers: many models of one process, each a replica of the servers that
it should serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from container_sdk.tests.fake_node import Node
from tests.memory_container import wait_until

onnx = pytest.importorskip("onnx")
skops = pytest.importorskip("skops.io")
pytest.importorskip("onnxruntime")

ROW = np.array([1.0, 2.0, 3.0], np.float32)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("host")
    node = Node(folder)
    node.folder = folder
    yield node
    node.close()


def onnx_file(path: Path, factor: float) -> str:
    """Write a model y = sum(x) * factor for rows of three; return its path."""
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [3, 1], [factor] * 3)
    rows = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 3])
    sums = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, 1])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [rows], [sums], [tensor]
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9
    )
    path.write_bytes(model.SerializeToString())
    return str(path)


def skops_file(path: Path) -> str:
    from sklearn.linear_model import LinearRegression

    x = np.random.default_rng(1).normal(size=(20, 3))
    skops.dump(LinearRegression().fit(x, x.sum(axis=1)), path)
    return str(path)


def predict(server: Any, name: str, row: Any = ROW) -> Any:
    wait_until(lambda: f"{name}:1" in server.stats()["models"])
    return server.model(name).predict(row, slo_ms=20_000).result(20)


def test_models_of_several_types_are_queried_through_one_process(
    server: Any, node: Node, tmp_path: Path
) -> None:
    (tmp_path / "twice.py").write_text("def f(xs):\n    return xs.sum(axis=1) * 2\n")
    models: dict[str, dict[str, str]] = {
        "h-onnx": {"type": "onnx", "path": onnx_file(tmp_path / "m.onnx", 10.0)},
        "h-skops": {"type": "skops", "path": skops_file(tmp_path / "m.skops"), "input": "f64[3]"},
        "h-python": {"type": "python", "path": "twice:f", "key": str(tmp_path), "input": "f32[3]"},
    }
    for name, about in models.items():
        assert node.request("load", model=name, **about)["size_bytes"] >= 4096
    for name in models:
        assert (
            node.request("serve", model=name, address=server.address, token=server.token, replica=1)
            == {}
        )
    assert predict(server, "h-onnx") == pytest.approx(60.0)
    assert predict(server, "h-skops") == pytest.approx(6.0)
    assert predict(server, "h-python") == pytest.approx(12.0)
    many = np.tile(ROW, (5000, 1))
    assert server.model("h-onnx").predict_many(many, slo_ms=20_000).result(
        20
    ).tolist() == pytest.approx([60.0] * 5000)
    for name in models:
        assert node.request("unload", model=name) == {}
        wait_until(lambda name=name: server.stats()["models"][f"{name}:1"]["replicas"] == [])
        server.retire(f"{name}:1", force=True)
    assert node.events == []


def test_one_loaded_model_serves_two_servers(server: Any, node: Node, tmp_path: Path) -> None:
    node.request("load", model="h-two", type="onnx", path=onnx_file(tmp_path / "m.onnx", 2.0))
    with clipper.start(address="tcp://127.0.0.1:0", drain_s=0.1) as other:
        for one in (server, other):
            node.request("serve", model="h-two", address=one.address, token=one.token, replica=7)
            assert predict(one, "h-two") == pytest.approx(12.0)
        node.request("leave", model="h-two", address=server.address)
        wait_until(lambda: server.stats()["models"]["h-two:1"]["replicas"] == [])
        assert predict(other, "h-two", ROW * 2) == pytest.approx(24.0)
        assert node.events == []
    assert node.event()["why"] in ("the server sent goodbye", "the server closed the connection")
    node.request("unload", model="h-two")
    server.retire("h-two:1", force=True)


def test_a_server_that_does_not_know_the_token_refuses(
    server: Any, node: Node, tmp_path: Path
) -> None:
    node.request("load", model="h-refused", type="onnx", path=onnx_file(tmp_path / "m.onnx", 2.0))
    with pytest.raises(Exception, match="token is missing or wrong"):
        node.request("serve", model="h-refused", address=server.address, token="wrong")
    node.request("unload", model="h-refused")
