"""Requests as clients of other servers send them: members that are null, missing values, bodies
in several parts, and applications and models whose names are words of paths."""

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput, TooLarge
from clipper.frontend.http.messages import inflate
from tests.frontend.conftest import QUICK, Reply, ask, total, warm_workers

TENSOR = {"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}


def holes(rows: Any) -> Any:
    """Return how many values of each row are missing."""
    return np.isnan(rows).sum(axis=1)


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(http="127.0.0.1:0", **QUICK) as started:
        started.deploy("sum", total, input="f64[3]")
        started.deploy("stats", total, input="f64[3]")
        started.deploy("holes", holes, input="f64[3]", cache=False)
        started.deploy("holes32", holes, input="f32[3]", cache=False)
        started.deploy("exact", holes, input="f64[3]", finite=True)
        started.deploy("whole", total, input="i64[3]")
        for name in ("sum", "holes", "holes32", "exact", "whole"):
            started.app(f"a-{name}", models=[name], slo_ms=5000)
        started.app("api", models=["sum"], slo_ms=5000)
        started._learning.states.start_writing()  # its thread stays
        warm_workers(started)
        yield started


@pytest.fixture(params=["fast path", "python"])
def path(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return headers that lead a request to one of the two HTTP servers."""
    return {} if request.param == "fast path" else {"Origin": "http://elsewhere"}


def predict(server: clipper.ClipperServer, name: str, body: Any, headers: Any = None) -> Reply:
    return ask(server.http_address, "POST", f"/api/{name}/predict", body, headers)


def infer(server: clipper.ClipperServer, name: str, body: Any, headers: Any = None) -> Reply:
    return ask(server.http_address, "POST", f"/v2/models/{name}/infer", body, headers)


# -- members that are null


@pytest.mark.parametrize(
    "body",
    [
        {"id": None},
        {"parameters": None},
        {"outputs": None},
        {"inputs": [{**TENSOR, "parameters": None}]},
        {"inputs": [{**TENSOR, "parameters": {"binary_data_size": None}}]},
        {"outputs": [{"name": "output", "parameters": None}]},
        {"outputs": [{"name": "output", "parameters": {"binary_data": None}}]},
        {"parameters": {"timeout": None, "binary_data_output": None, "user": None}},
    ],
)
def test_an_optional_member_that_is_null_is_absent(
    server: clipper.ClipperServer, path: dict[str, str], body: dict[str, Any]
) -> None:
    reply = infer(server, "sum", {"inputs": [TENSOR], **body}, path)
    assert (reply.status, reply.json["outputs"][0]["data"]) == (200, [6.0])


def test_null_data_beside_binary_data_is_absent(server: clipper.ClipperServer) -> None:
    tensor = {**TENSOR, "data": None, "parameters": {"binary_data_size": 24}}
    text = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    reply = infer(server, "sum", text + np.array([1.0, 2, 3]).tobytes(), headers)
    assert (reply.status, reply.json["outputs"][0]["data"]) == (200, [6.0])
    reply = infer(server, "sum", {"inputs": [{**TENSOR, "data": None}]})
    assert (reply.status, "neither data nor" in reply.json["error"]) == (400, True)


# -- missing values


@pytest.mark.parametrize("name", ["holes", "holes32"])
def test_null_is_nan_among_floats(
    server: clipper.ClipperServer, path: dict[str, str], name: str
) -> None:
    reply = predict(server, f"a-{name}", {"input": [1, None, None]}, path)
    assert (reply.status, reply.json["output"]) == (200, 2)
    reply = predict(server, f"a-{name}", {"inputs": [[1, None, 3], [1, 2, 3]]}, path)
    assert [one["output"] for one in reply.json["predictions"]] == [1, 0]
    for data in ([1, None, 2, 3, 4, None], [[1, None, 2], [3, 4, None]]):
        tensor = {**TENSOR, "shape": [2, 3], "data": data}
        reply = infer(server, name, {"inputs": [tensor]}, path)
        assert (reply.status, reply.json["outputs"][0]["data"]) == (200, [1, 1])


def test_null_is_refused_where_a_model_takes_none(
    server: clipper.ClipperServer, path: dict[str, str]
) -> None:
    for name, part in (("exact", "finite"), ("whole", "null")):
        reply = predict(server, f"a-{name}", {"input": [1, None, 3]}, path)
        assert (reply.status, part in reply.json["error"]) == (400, True), reply.json
        tensor = {**TENSOR, "data": [1, None, 3]}
        reply = infer(server, name, {"inputs": [tensor]}, path)
        assert (reply.status, part in reply.json["error"]) == (400, True), reply.json
    for wrong in ([1, None, "x"], [1, None, [2]], None, [1, None, True], [1, None]):
        assert predict(server, "a-holes", {"input": wrong}, path).status == 400


def test_nan_is_no_json_and_the_error_says_what_to_write(server: clipper.ClipperServer) -> None:
    for number in ("NaN", "-Infinity"):
        error = predict(server, "a-holes", f'{{"input": [1, {number}, 3]}}').json["error"]
        assert "write null for a missing value" in error
    assert "NaN" not in predict(server, "a-holes", '{"input": [1, x, 3]}').json["error"]


# -- requests without rows


def test_a_request_without_rows_is_refused_alike(server: clipper.ClipperServer) -> None:
    each = (
        ("/api/a-sum/predict", {"inputs": []}),
        ("/api/a-sum/predict/stream", {"inputs": []}),
        ("/a-sum/predict", {"input_batch": []}),
        ("/v2/models/sum/infer", {"inputs": [{**TENSOR, "shape": [0, 3], "data": []}]}),
    )
    for where, body in each:
        reply = ask(server.http_address, "POST", where, body)
        assert (reply.status, "holds no rows" in reply.json["error"]) == (400, True), where


# -- parameters and bytes that are wrong


def test_an_slo_in_the_words_of_another_route_is_refused(server: clipper.ClipperServer) -> None:
    reply = infer(server, "sum", {"inputs": [TENSOR], "parameters": {"slo_ms": 50}})
    assert (reply.status, "parameters.timeout, in microseconds" in reply.json["error"]) == (
        400,
        True,
    )


@pytest.mark.parametrize("place", ["id", "name", "value", "data"])
def test_bytes_that_are_no_utf8_are_the_clients_fault(
    server: clipper.ClipperServer, place: str
) -> None:
    body: dict[str, Any] = {"inputs": [dict(TENSOR)]}
    if place == "id":
        body["id"] = "?!"
    elif place == "name":
        body["inputs"][0]["name"] = "?!"
    elif place == "value":
        body["parameters"] = {"user": "?!"}
    else:
        body["inputs"][0] |= {"datatype": "BYTES", "data": ["?!", "a", "b"]}
    for bad in (b"\xff", b"\xed\xa0\x80", b"\xc3"):
        reply = infer(server, "sum", json.dumps(body).encode().replace(b"?!", bad))
        assert reply.status == 400, reply.body


# -- bodies that are compressed


def test_a_body_of_gzip_may_have_several_members(server: clipper.ClipperServer) -> None:
    text = json.dumps({"input": [1, 2, 3]}).encode()
    for cuts in ((5,), (0, 1, 9), (len(text),)):
        ends = [0, *cuts, len(text)]
        body = b"".join(gzip.compress(text[a:b]) for a, b in pairwise(ends))
        reply = predict(server, "a-sum", body, {"Content-Encoding": "gzip"})
        assert (reply.status, reply.json["output"]) == (200, 6.0)


def test_members_of_gzip_have_one_bound() -> None:
    part = gzip.compress(bytes(1000))
    assert len(inflate(10 * part, b"gzip", 10_000)) == 10_000
    with pytest.raises(TooLarge):
        inflate(10 * part, b"gzip", 9_999)
    with pytest.raises(TooLarge):
        inflate(part * 1_000, b"gzip", 10_000)
    for wrong in (part + b"x", part + part[:-1], part[:-1], part + gzip.compress(b"")[:5]):
        with pytest.raises(InvalidInput):
            inflate(wrong, b"gzip", 10_000)
    with pytest.raises(InvalidInput):
        inflate(2 * zlib.compress(b"x"), b"deflate", 100)


# -- names that are words of paths


def test_an_application_named_api_is_served(server: clipper.ClipperServer) -> None:
    assert predict(server, "api", {"input": [1, 2, 3]}).json["output"] == 6
    reply = ask(server.http_address, "POST", "/api/predict", {"input": [1, 2, 3]})
    assert (reply.status, reply.json["output"]) == (200, 6.0)
    update = {"input": [1, 2, 3], "label": 6.0, "uid": 0}
    assert ask(server.http_address, "POST", "/api/update", update).status == 200
    assert ask(server.http_address, "GET", "/api/api").json["name"] == "api"
    reply = ask(server.http_address, "DELETE", "/api/predict")
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD, OPTIONS")


def test_a_model_named_stats_has_its_metadata(server: clipper.ClipperServer) -> None:
    about = ask(server.http_address, "GET", "/v2/models/stats").json
    assert (about["name"], about["inputs"][0]["shape"]) == ("stats", [-1, 3])
    one = ask(server.http_address, "GET", "/v2/models/stats/stats").json
    assert [each["name"] for each in one["model_stats"]] == ["stats"]
    assert infer(server, "stats", {"inputs": [TENSOR]}).json["outputs"][0]["data"] == [6.0]
