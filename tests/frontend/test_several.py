"""Several models in one request, and methods of gRPC that are no services of ours."""

import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

import clipper
from clipper.errors import ConfigError, InvalidInput, UnknownModel
from clipper.frontend.inference.multi_model import (
    IDS_MAX,
    ModelIds,
    ids_in,
    submit_each,
    those_known,
)
from clipper.frontend.protocols import message
from clipper.mesh.data_plane import DataPlane
from clipper.mesh.splice import inject
from tests.frontend.conftest import PATIENCE_S, QUICK, ask, total, warm_workers
from tests.frontend.test_grpc import tensor_of

TABLE = {
    "rpcConfigs": {
        "my.Service/Ask": {"idExtractionPath": [3, 1]},
        "my.Service/Put": {"idInjectionPath": [7], "vModelId": True},
        "inference.GRPCInferenceService/ModelInfer": {
            "idExtractionPath": [3]
        },  # `id` of the request
    }
}


def twice(rows: Any) -> Any:
    return total(rows) * 2


def echo(rows: Any) -> Any:
    return [bytes(row) for row in rows]


def backwards(rows: Any) -> Any:
    return [bytes(row)[::-1] for row in rows]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clipper.ClipperServer]:
    table = tmp_path_factory.mktemp("data-plane") / "methods.json"
    table.write_text(json.dumps(TABLE))
    with clipper.start(
        grpc="127.0.0.1:0", http="127.0.0.1:0", mesh={"data_plane": str(table)}, **QUICK
    ) as started:
        started._learning.states.start_writing()  # its thread stays
        warm_workers(started)
        started.deploy("sum", total, input="f64[3]")
        started.deploy("twice", twice, input="f64[3]")
        started.deploy("short", total, input="f64[2]")
        started.deploy("echo", echo, input="bytes")
        started.deploy("backwards", backwards, input="bytes")
        yield started


@pytest.fixture
def channel(server: clipper.ClipperServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc_address) as made:
        yield made


def infer(
    channel: Any, rows: Any, *metadata: tuple[str, str | bytes], model: str = "", id: str = ""
) -> Any:
    call = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=lambda sent: sent.SerializeToString(),
        response_deserializer=message("inference.ModelInferResponse").FromString,
    )
    return call(tensor_of(model, rows, id=id), timeout=PATIENCE_S, metadata=metadata)


def refused(run: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        run()
    return caught.value


# -- ids


@pytest.mark.parametrize(
    ("headers", "ids"),
    [
        ([], None),
        ([("mm-required", "true"), ("x-request-id", "mm-model-id")], None),
        ([("mm-model-id", "a")], ModelIds(("a",))),
        (
            [("mm-model-id", "a"), ("mm-model-id", "b"), ("mm-required", "True")],
            ModelIds(("a", "b"), True),
        ),
        (
            [("mm-model-id", "a, b"), ("mm-model-id-bin", b"c"), ("mm-required", "no")],
            ModelIds(("a", "b", "c")),
        ),
        (
            [("mm-vmodel-id", "v"), ("mm-vmodel-id-bin", b"w"), ("mm-balanced", "true")],
            ModelIds(("v", "w")),
        ),
    ],
)
def test_ids_of_headers(headers: Any, ids: Any) -> None:
    assert ids_in(headers) == ids


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([("mm-model-id", "a"), ("mm-vmodel-id", "b")], "this one has both"),
        ([("mm-model-id-bin", b"\xff")], "mm-model-id-bin is no UTF-8"),
        ([("mm-model-id", "a,,b")], "mm-model-id: bad model name ''"),
        ([("mm-model-id", "A b")], "'A' is not allowed"),
        ([("mm-model-id", ",".join("abcde" * 13))], f"up to {IDS_MAX} are possible"),
    ],
)
def test_headers_that_name_no_models(headers: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        ids_in(headers)


def test_those_missing_are_left_out_unless_they_may_not() -> None:
    def length(name: str) -> int:
        if name.startswith("no"):
            raise UnknownModel(f"no model {name!r}.")
        return len(name)

    assert those_known(ModelIds(("a", "no", "bb")), length) == [1, 2]
    assert those_known(ModelIds(("a", "bb"), True), length) == [1, 2]
    with pytest.raises(UnknownModel, match="'no'"):
        those_known(ModelIds(("a", "no", "bb"), True), length)
    with pytest.raises(UnknownModel, match="'no1'"):
        those_known(ModelIds(("no1", "no2")), length)


def test_if_one_cannot_be_queried_those_before_it_are_cancelled() -> None:
    class Future:
        cancelled = 0

        def cancel(self) -> None:
            self.cancelled += 1

    class Submission:
        def __init__(self) -> None:
            self.futures: Any = [Future(), Future()]

    def fails() -> Submission:
        raise InvalidInput("a row of another shape")

    submission = Submission()
    with pytest.raises(InvalidInput):
        submit_each([lambda: submission, fails])
    assert [future.cancelled for future in submission.futures] == [1, 1]


# -- over the Open Inference Protocol


def test_answers_over_grpc_are_those_of_each_in_order(channel: Any) -> None:
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    found = infer(
        channel, rows, ("mm-model-id", "twice"), ("mm-model-id", "sum"), ("mm-model-id", "twice")
    )
    assert [out.parameters["model_name"].string_param for out in found.outputs] == [
        "twice",
        "sum",
        "twice",
    ]
    values = [np.frombuffer(raw).tolist() for raw in found.raw_output_contents]
    assert values == [[12.0, 30.0], [6.0, 15.0], [12.0, 30.0]]
    # merged as protobuf does: the last
    assert (found.model_name, found.model_version) == ("twice", "1")


def test_an_array_goes_to_several_models_as_well(channel: Any) -> None:
    found = infer(channel, np.ones((100, 3)), ("mm-model-id", "twice,sum"))
    assert [np.frombuffer(raw).tolist() for raw in found.raw_output_contents] == [
        [6.0] * 100,
        [3.0] * 100,
    ]


def test_one_that_is_missing_is_left_out_or_refused(channel: Any) -> None:
    row = [[1.0, 2.0, 3.0]]
    found = infer(channel, row, ("mm-model-id", "nobody"), ("mm-model-id", "sum"))
    assert [out.parameters["model_name"].string_param for out in found.outputs] == ["sum"]
    for words in (
        [("mm-model-id", "nobody"), ("mm-model-id", "sum"), ("mm-required", "true")],
        [("mm-model-id", "nobody")],
    ):
        error = refused(lambda words=words: infer(channel, row, *words))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "no model 'nobody'" in error.details()


def test_a_tensor_that_one_does_not_take_is_refused_for_all(channel: Any) -> None:
    error = refused(
        lambda: infer(channel, [[1.0, 2.0, 3.0]], ("mm-model-id", "sum"), ("mm-model-id", "short"))
    )
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "[-1, 2] is taken" in error.details()


def test_over_http_ids_stand_in_the_path(server: clipper.ClipperServer) -> None:
    body = {
        "id": "7",
        "inputs": [
            {"name": "input", "shape": [2, 3], "datatype": "FP64", "data": [1, 2, 3, 4, 5, 6]}
        ],
    }
    reply = ask(server.http_address, "POST", "/v2/models/twice,nobody,sum/infer", body)
    assert reply.status == 200
    outputs = reply.json["outputs"]
    assert [(one["parameters"]["model_name"], one["data"]) for one in outputs] == [
        ("twice", [12.0, 30.0]),
        ("sum", [6.0, 15.0]),
    ]
    assert (reply.json["id"], reply.json["model_name"], reply.json["model_version"]) == (
        "7",
        "sum",
        "1",
    )
    refused = ask(
        server.http_address, "POST", "/v2/models/twice,nobody/infer", body, {"mm-required": "true"}
    )
    assert (refused.status, "nobody" in refused.json["detail"]) == (404, True)
    assert ask(server.http_address, "POST", "/v2/models/nobody,nothing/infer", body).status == 404
    assert (
        ask(server.http_address, "POST", "/v2/models/twice,sum/versions/1/infer", body).status
        == 400
    )
    assert ask(server.http_address, "POST", "/v2/models/twice,,/infer", body).status == 400


def test_over_http_ids_stand_in_headers_too_and_go_first(server: clipper.ClipperServer) -> None:
    """Asked where queries without them are answered by the core."""
    body = {
        "inputs": [{"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [1.0, 2.0, 3.0]}]
    }
    connection = http.client.HTTPConnection(server.http_address, timeout=60)
    try:
        for path in ("sum", "nobody"):
            connection.putrequest("POST", f"/v2/models/{path}/infer")
            text = json.dumps(body).encode()
            for name, value in (
                ("Mm-Model-Id", "twice"),
                ("mm-model-id", "nobody, sum"),
                ("Content-Length", str(len(text))),
            ):
                connection.putheader(name, value)
            connection.endheaders(text)
            outputs = json.loads(connection.getresponse().read())["outputs"]
            assert [one["parameters"]["model_name"] for one in outputs] == ["twice", "sum"]
            assert [one["data"] for one in outputs] == [[12.0], [6.0]]
    finally:
        connection.close()
    both = {"mm-model-id": "sum", "mm-vmodel-id": "twice"}
    assert ask(server.http_address, "POST", "/v2/models/sum/infer", body, both).status == 400
    required = {"mm-vmodel-id": "sum,nobody", "mm-required": "true"}
    assert ask(server.http_address, "POST", "/v2/models/sum/infer", body, required).status == 404
    assert (
        ask(
            server.http_address, "POST", "/v2/models/sum/infer", body, {"mm-balanced": "true"}
        ).status
        == 200
    )


def test_over_http_as_binary_data_too(server: clipper.ClipperServer) -> None:
    rows = np.arange(120.0).reshape(40, 3)
    tensor = {
        "name": "input",
        "shape": [40, 3],
        "datatype": "FP64",
        "parameters": {"binary_data_size": rows.nbytes},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    reply = ask(
        server.http_address, "POST", "/v2/models/sum,twice/infer", head + rows.tobytes(), headers
    )
    size = int(reply.headers["inference-header-content-length"])
    sizes = [
        one["parameters"]["binary_data_size"] for one in json.loads(reply.body[:size])["outputs"]
    ]
    assert sizes == [320, 320]
    values = np.frombuffer(reply.body[size:])
    np.testing.assert_array_equal(values, [*rows.sum(axis=1), *rows.sum(axis=1) * 2])


# -- other methods


def other(channel: Any, method: str, payload: bytes, *metadata: tuple[str, str]) -> bytes:
    found: bytes = channel.unary_unary(f"/{method}")(payload, timeout=PATIENCE_S, metadata=metadata)
    return found


def test_the_id_in_a_payload_selects_the_model(channel: Any) -> None:
    payload = inject(b"\x10\x05", (3, 1), "backwards")
    assert other(channel, "my.Service/Ask", payload) == payload[::-1]
    assert other(channel, "my.Service/Ask", inject(payload, (3, 1), "echo")) == inject(
        payload, (3, 1), "echo"
    )


def test_a_header_goes_first_and_its_ids_replies_are_one(channel: Any) -> None:
    payload = inject(b"", (3, 1), "nobody")
    ids = [("mm-model-id", "echo"), ("mm-model-id", "gone"), ("mm-model-id", "backwards")]
    assert other(channel, "my.Service/Ask", payload, *ids) == payload + payload[::-1]


def test_the_id_is_put_where_the_table_states(channel: Any) -> None:
    found = other(channel, "my.Service/Put", b"\x10\x05", ("mm-vmodel-id", "echo"))
    assert found == inject(b"\x10\x05", (7,), "echo")


def test_a_payload_for_a_vmodel_gets_the_id_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(
        "def echo(rows):\n    return [bytes(row) for row in rows]\n"
    )
    (tmp_path / "methods.json").write_text(json.dumps(TABLE))
    mesh = {"enabled": True, "data_plane": str(tmp_path / "methods.json")}
    with clipper.start(grpc="127.0.0.1:0", mesh=mesh, **QUICK) as server:
        server.register_model("echo1", "models.py:echo", key=str(tmp_path), input="bytes")
        server.mesh.set_vmodel("vecho", "echo1", sync=True)
        named = ("mm-vmodel-id", "vecho")
        with grpc.insecure_channel(server.grpc_address) as channel:
            found = other(channel, "my.Service/Put", b"\x10\x05", named)
    assert found == inject(b"\x10\x05", (7,), "echo1")


def test_the_id_of_model_infer_may_stand_elsewhere(channel: Any) -> None:
    found = infer(channel, [[1.0, 2.0, 3.0]], model="nobody", id="sum")
    assert np.frombuffer(found.raw_output_contents[0]).tolist() == [6.0]


@pytest.mark.parametrize(
    ("method", "payload", "code", "why"),
    [
        (
            "my.Service/Ask",
            b"",
            "INVALID_ARGUMENT",
            "names no model: field 3.1 of its payload, or the header mm-model-id would",
        ),
        ("my.Service/Put", b"", "INVALID_ARGUMENT", "names no model: the header mm-model-id would"),
        ("my.Service/Ask", b"\x1a\x40", "INVALID_ARGUMENT", "no protobuf message"),
        ("my.Service/Ask", inject(b"", (3, 1), "nobody"), "NOT_FOUND", "no model 'nobody'"),
        (
            "my.Service/Ask",
            inject(b"", (3, 1), "sum"),
            "INVALID_ARGUMENT",
            r"takes f64\[3\], and no payloads",
        ),
        ("my.Service/More", b"", "UNIMPLEMENTED", ""),
        ("inference.GRPCInferenceService/More", b"", "UNIMPLEMENTED", ""),
    ],
)
def test_what_is_wrong_with_a_call_is_reported(
    channel: Any, method: str, payload: bytes, code: str, why: str
) -> None:
    error = refused(lambda: other(channel, method, payload))
    assert error.code() is grpc.StatusCode[code]
    assert re.search(why, error.details())


# -- the table


def test_the_table_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now_s = tmp_path / "methods.json", [100.0]

    def write(text: str) -> None:
        path.write_text(text)
        os.utime(path, ns=(0, round(now_s[0] * 1e9)))
        now_s[0] += 2

    write('{"rpcConfigs": {"a.B/C": {"idExtractionPath": [1]}}}')
    table = DataPlane(str(path), lambda: now_s[0])
    found = table.of("a.B/C")
    assert found is not None
    assert found.id_extraction_path == (1,)
    assert table.of("a.B/D") is None
    write('{"rpcConfigs": {"a.B/D": {}}, "allowOtherRpcs": true}')
    assert table.of("a.B/D") is not None
    assert table.of("z.Z/Z") is not None
    write('{"rpcConfigs": {"a.B/D": {"idExtractionPath": [0]}}}')
    assert table.of("z.Z/Z") is not None
    assert "has changed, and is not used: [0] is not a path of protobuf fields" in caplog.text
    path.unlink()
    now_s[0] += 2
    assert table.of("z.Z/Z") is not None
    write("{}")
    assert table.of("z.Z/Z") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "mesh.data_plane"),
        ("[]", "Expected `object`"),
        ('{"rpcConfig": {}}', "unknown field `rpcConfig`"),
        ('{"rpcConfigs": {"Ask": {}}}', "'Ask' is not a method"),
        ('{"rpcConfigs": {"a.B/C": {"idExtractionPath": [1, 0]}}}', "not a path"),
        ('{"rpcConfigs": {"a.B/C": {"idInjectionPath": ["1"]}}}', "Expected `int`"),
        (json.dumps({"rpcConfigs": {f"a.B/C{i}": {} for i in range(1001)}}), "up to 1000"),
    ],
)
def test_a_table_that_is_none_is_refused_at_the_start(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "methods.json").write_text(text)
    with pytest.raises(ConfigError, match=why):
        DataPlane(str(tmp_path / "methods.json"), lambda: 0.0)
    with pytest.raises(ConfigError, match="No such file"):
        DataPlane(str(tmp_path / "nothing.json"), lambda: 0.0)
