"""`limits.input_bytes_max` holds for every interface: `TooLarge` in Python, 413 over HTTP."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import TooLarge
from tests.frontend.conftest import QUICK, ask

MOST = 4096
WORDS = MOST // 8


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(
        **QUICK, http="127.0.0.1:0", grpc="127.0.0.1:0", limits={"input_bytes_max": MOST}
    ) as started:
        add = lambda xs: np.array([float(len(x)) for x in xs])  # noqa: E731
        started.deploy("free", add, input="f64[*]")
        started.deploy("wide", add, input=f"f64[{WORDS + 1}]", warmup=False)
        started.deploy("text", add, input="str")
        started.deploy("cost", add, input="f64[*]", batching={"cost": "bytes"})
        for name in ("free", "wide", "text", "cost"):
            started.app(name, [name], slo_ms=5000, default=-1.0)
        started.app("both", ["free", "cost"], slo_ms=5000, default=-1.0)
        started.app("first", ["free", "cost"], slo_ms=5000, default=-1.0, decider="first")
        yield started


@pytest.mark.parametrize("name", ["free", "cost", "both", "first"])
def test_rows_that_differ_in_length(server: clipper.ClipperServer, name: str) -> None:
    app = server.app(name)
    assert app.predict(np.ones(WORDS)).result(60).output == WORDS
    with pytest.raises(TooLarge, match=r"has 4104 bytes; the limit is 4096. See limits.input_byt"):
        app.predict(np.ones(WORDS + 1))
    with pytest.raises(TooLarge):
        app.predict_many([np.ones(3), np.ones(WORDS + 1)])
    assert app.predict(np.ones(3)).result(60).output == 3


def test_rows_of_one_shape(server: clipper.ClipperServer) -> None:
    rows = np.ones((40, WORDS + 1))
    with pytest.raises(TooLarge):
        server.app("wide").predict(rows[0])
    with pytest.raises(TooLarge):
        server.app("wide").predict_many(rows)
    with pytest.raises(TooLarge):
        server.model("wide").predict(rows[0])  # type: ignore[union-attr]


def test_text_counts_its_bytes(server: clipper.ClipperServer) -> None:
    assert server.app("text").predict("x" * MOST).result(60).output == MOST
    with pytest.raises(TooLarge):
        server.app("text").predict("ä" * (MOST // 2 + 1))


@pytest.mark.parametrize("name", ["free", "cost", "both", "wide", "text"])
def test_http(server: clipper.ClipperServer, name: str) -> None:
    def post(n: int) -> Any:
        row = "x" * (8 * n) if name == "text" else [1] * n
        return ask(server.http_address, "POST", f"/api/{name}/predict", {"input": row})

    for _ in range(3):
        refused = post(WORDS + 1)
        assert refused.status == 413, refused.json
        assert "limits.input_bytes_max" in str(refused.json)
    if name != "wide":
        assert post(WORDS).status == 200


@pytest.mark.parametrize("name", ["free", "wide"])
def test_the_open_inference_protocol(server: clipper.ClipperServer, name: str) -> None:
    tensor = {"name": "input", "datatype": "FP64", "shape": [1, WORDS + 1]}
    path = f"/v2/models/{name}/infer"
    body = {"inputs": [tensor | {"data": [1.0] * (WORDS + 1)}]}
    assert ask(server.http_address, "POST", path, body).status == 413
    data = struct.pack(f"<{WORDS + 1}d", *[1.0] * (WORDS + 1))
    head = json.dumps(
        {"inputs": [tensor | {"parameters": {"binary_data_size": len(data)}}]}
    ).encode()
    lengths = {"Inference-Header-Content-Length": str(len(head))}
    assert ask(server.http_address, "POST", path, head + data, lengths).status == 413


def test_grpc(server: clipper.ClipperServer) -> None:
    client = pytest.importorskip("tritonclient.grpc")
    with client.InferenceServerClient(server.grpc_address) as triton:
        tensor = client.InferInput("input", [1, WORDS + 1], "FP64")
        tensor.set_data_from_numpy(np.ones((1, WORDS + 1)))
        with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*4096"):
            triton.infer("free", [tensor])
