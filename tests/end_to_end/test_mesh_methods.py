"""Models of a mesh behind any gRPC methods, and several of them in one call: none is loaded before
a query."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

import clipper
from clipper.frontend.protocols import message
from clipper.mesh.splice import inject
from tests.frontend.test_grpc import tensor_of

PATIENCE_S = 30.0
MODELS = """
def backwards(rows):
    return [bytes(row)[::-1] for row in rows]

def double(rows):
    return rows * 2
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clipper.ClipperServer]:
    folder = tmp_path_factory.mktemp("methods")
    (folder / "ours.py").write_text(MODELS)
    (folder / "methods.json").write_text(
        json.dumps({"rpcConfigs": {"my.Service/Ask": {"idExtractionPath": [3, 1]}}})
    )
    mesh = {
        "enabled": True,
        "data_plane": str(folder / "methods.json"),
        "publish_s": 0.05,
        "drain_s": 1.0,
    }
    with clipper.start(mesh=mesh, grpc="127.0.0.1:0", drain_s=1.0) as started:
        started.register_model(
            "backwards", "ours.py:backwards", key=str(folder), input="bytes", output="bytes"
        )
        for id in ("double", "other"):
            started.register_model(id, "ours.py:double", key=str(folder), input="f64[3]")
        started.mesh.set_vmodel("best", "backwards")
        yield started


@pytest.fixture
def channel(server: clipper.ClipperServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc_address) as made:
        yield made


def test_the_id_in_a_payload_names_a_model_of_the_mesh(
    server: clipper.ClipperServer, channel: Any
) -> None:
    call = channel.unary_unary("/my.Service/Ask")
    assert server.mesh.status("backwards").status == "NOT_LOADED"
    for id in ("backwards", "best"):
        payload = inject(b"\x10\x05", (3, 1), id)
        assert call(payload, timeout=PATIENCE_S) == payload[::-1]
    both = (("mm-model-id", "backwards"), ("mm-model-id", "nobody"), ("mm-model-id", "best"))
    assert call(b"abc", timeout=PATIENCE_S, metadata=both) == b"cbacba"
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=PATIENCE_S, metadata=(("mm-vmodel-id", "nobody"),))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_several_models_of_the_mesh_are_loaded_for_one_call(
    server: clipper.ClipperServer, channel: Any
) -> None:
    infer = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=lambda sent: sent.SerializeToString(),
        response_deserializer=message("inference.ModelInferResponse").FromString,
    )
    ids = (("mm-model-id", "double,other"), ("mm-required", "true"))
    found = infer(tensor_of("", [[1.0, 2.0, 3.0]]), timeout=PATIENCE_S, metadata=ids)
    assert [np.frombuffer(raw).tolist() for raw in found.raw_output_contents] == [
        [2.0, 4.0, 6.0]
    ] * 2
    assert [one.parameters["model_name"].string_param for one in found.outputs] == [
        "double",
        "other",
    ]
    assert {server.mesh.status(id).status for id in ("double", "other")} == {"LOADED"}
