"""The Open Inference Protocol over HTTP, by bytes of our own and by clients that others wrote."""

import json
from typing import Any

import numpy as np
import pytest

import clipper
from tests.frontend.conftest import QUICK, Ask, ask

INFER = "/v2/models/total/infer"


def infer(data: Any, shape: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "input", "shape": shape, "datatype": "FP64", "data": data}], **more}


def test_metadata(query: Ask) -> None:
    assert query("GET", "/v2").json["name"] == "clipper"
    assert query("GET", "/v2/").json == query("GET", "/v2").json
    assert "binary_tensor_data" in query("GET", "/v2").json["extensions"]
    inputs = [{"name": "input", "datatype": "FP64", "shape": [-1, 3]}]
    about = query("GET", "/v2/models/total").json
    assert (about["name"], about["platform"], about["inputs"]) == ("total", "clipper", inputs)
    assert query("GET", "/v2/models/sum").json["versions"] == ["1"]
    assert query("GET", "/v2/models/sum/versions/1").json["inputs"] == inputs


def test_health(query: Ask) -> None:
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/total/ready",
        "/v2/models/sum/versions/1/ready",
    ):
        assert query("GET", path).status == 200


def test_both_addresses_say_whether_the_server_lives(query: Ask, manage: Ask) -> None:
    for each in (query, manage):
        for path, like in (
            ("/livez", "/v2/health/live"),
            ("/healthz", "/v2/health/live"),
            ("/readyz", "/v2/health/ready"),
        ):
            reply = each("GET", path)
            assert (reply.status, reply.json) == (200, each("GET", like).json)
            assert each("HEAD", path).status == 200
            assert each("POST", path, {}).status == 405


def test_an_application_without_a_container_is_not_ready(
    server: clipper.ClipperServer, query: Ask
) -> None:
    assert query("GET", "/v2/health/ready").status == 200
    server.deploy("gone", lambda rows: rows, input="f64[1]")
    server.app("absent", models=["gone"])
    try:
        assert query("GET", "/v2/models/absent/ready").status == 200
        server.scale("gone", 0)
        reply = query("GET", "/v2/models/absent/ready")
        assert (reply.status, reply.json["ready"]) == (503, False)
        assert query("GET", "/v2/health/ready").status == 200, "the others are served"
        assert query("GET", "/v2/health/live").status == 200
        index = {
            (row["name"], row.get("version")): row["state"]
            for row in query("POST", "/v2/repository/index", {}).json
        }
        assert index[("absent", None)] == index[("gone", "1")] == "UNAVAILABLE"
        assert index[("total", None)] == index[("sum", "1")] == "READY"
        assert all(
            row["state"] == "READY"
            for row in query("POST", "/v2/repository/index", {"ready": True}).json
        )
    finally:
        server.catalog.unregister_application("absent")
        server.retire("gone", force=True)


def test_configuration(query: Ask) -> None:
    config = query("GET", "/v2/models/sum/versions/1/config").json
    assert config["input"] == [{"name": "input", "data_type": "TYPE_FP64", "dims": [3]}]
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("sum", "clipper", 512)
    assert query("GET", "/v2/models/totl/config").status == 404


def test_statistics_move(query: Ask) -> None:
    def counts(path: str) -> tuple[int, int]:
        (row,) = query("GET", path).json["model_stats"]
        return (
            row["inference_stats"]["success"]["count"],
            row["inference_stats"]["cache_hit"]["count"],
        )

    paths = ("/v2/models/total/stats", "/v2/models/sum/versions/1/stats", "/v2/models/sum/stats")
    before = [counts(path) for path in paths]
    for _ in range(2):
        assert query("POST", INFER, infer([[7, 7, 7.25]], (1, 3))).status == 200
    after = [counts(path) for path in paths]
    assert [now[0] - then[0] for now, then in zip(after, before, strict=True)] == [2, 2, 2]
    assert [now[1] - then[1] for now, then in zip(after, before, strict=True)] == [0, 1, 1]
    every = {
        (row["name"], row["version"])
        for row in query("GET", "/v2/models/stats").json["model_stats"]
    }
    assert {("total", "1"), ("sum", "1")} <= every
    assert query("GET", "/v2/models/totl/stats").status == 404


def test_load_and_unload_are_for_management(
    server: clipper.ClipperServer, query: Ask, manage: Ask
) -> None:
    server.deploy("pages", lambda rows: rows[:, 0], input="f64[1]")
    server.app("paging", models=["pages"], slo_ms=5000, default=-1)
    at = "/v2/repository/models/pages"
    try:
        assert query("POST", f"{at}/load", {}).status == 200
        refused = query("POST", f"{at}/unload", {})
        assert (refused.status, refused.json["type"]) == (403, "urn:clipper:error:forbidden")
        assert manage("POST", f"{at}/unload", {}).status == 200
        assert query("POST", f"{at}/load", {}).status == 403
        answer = query("POST", "/v2/models/paging/infer", infer([5], (1, 1))).json
        assert (answer["outputs"][0]["data"], answer["parameters"]["default"]) == ([-1], True)
        assert query("GET", "/v2/models/pages/ready").status == 503
        assert manage("POST", f"{at}/load", {}).status == 200
        assert query("GET", "/v2/models/pages/ready").status == 200
        answer = query("POST", "/v2/models/paging/infer", infer([5], (1, 1))).json
        assert answer["outputs"][0]["data"] == [5.0]
        assert manage("POST", "/v2/repository/models/page/load", {}).status == 404
    finally:
        server.catalog.unregister_application("paging")
        server.retire("pages", force=True)


@pytest.mark.parametrize("path", [INFER, "/v2/models/sum/infer", "/v2/models/sum/versions/1/infer"])
def test_infer(query: Ask, path: str) -> None:
    body = query("POST", path, infer([[1, 2, 3], [4, 5, 6]], (2, 3), id="q1")).json
    assert body["id"] == "q1"
    assert body["outputs"] == [
        {"name": "output", "datatype": "FP64", "shape": [2], "data": [6.0, 15.0]}
    ]


def test_one_row_has_a_confidence(query: Ask) -> None:
    body = query("POST", "/v2/models/learns/infer", infer([1, 2, 3], (3,))).json
    feedback = {"id": body["parameters"]["prediction_id"], "label": 6}
    assert query("POST", "/api/learns/feedback", feedback).json == {"counted": True}
    assert 0 <= body["parameters"]["confidence"] <= 1


@pytest.mark.parametrize("n", [1, 32, 33, 3000])
def test_arrays_of_any_length_in_binary(query: Ask, n: int) -> None:
    rows = np.arange(3.0 * n).reshape(n, 3)
    head = {
        "inputs": [
            {
                "name": "input",
                "shape": [n, 3],
                "datatype": "FP64",
                "parameters": {"binary_data_size": rows.nbytes},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    reply = query(
        "POST", INFER, text + rows.tobytes(), {"Inference-Header-Content-Length": str(len(text))}
    )
    assert (reply.status, reply.headers["content-type"]) == (200, "application/octet-stream")
    size = int(reply.headers["inference-header-content-length"])
    assert json.loads(reply.body[:size])["outputs"][0]["shape"] == [n]
    np.testing.assert_array_equal(np.frombuffer(reply.body[size:]), rows.sum(axis=1))


def test_the_content_type_does_not_decide(query: Ask) -> None:
    for kind in ("application/octet-stream", "text/plain", ""):
        assert query("POST", INFER, infer([1, 2, 3], (1, 3)), {"Content-Type": kind}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        (INFER, infer([1, 2], (1, 2)), 400, "[-1, 3] is taken"),
        (INFER, infer([1, 2, 3], (1, 3), parameters={"timeout": -1}), 400, "timeout"),
        (INFER, infer([1, 2, 3], (1, 3), parameters={"timeout": 10**15}), 400, "slo_ms"),
        (INFER, infer([1, 2, 3], (1, 3), parameters={"priority": "x"}), 400, "priority"),
        (INFER, infer([1, 2, 3], (1, 3), parameters={"user": 1}), 400, "user"),
        ("/v2/models/totl/infer", infer([1, 2, 3], (1, 3)), 404, "did you mean 'total'?"),
        ("/v2/models/sum/versions/9/infer", infer([1, 2, 3], (1, 3)), 404, "sum:9"),
        ("/v2/models/sum/versions/x/infer", infer([1, 2, 3], (1, 3)), 400, "version"),
    ],
)
def test_errors_are_what_clients_of_the_protocol_read(
    query: Ask, path: str, body: Any, status: int, part: str
) -> None:
    reply = query("POST", path, body)
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    assert part in reply.json["error"]


def test_deadlines_come_in_microseconds_or_by_a_header(
    server: clipper.ClipperServer, query: Ask
) -> None:
    def stuck(rows: Any) -> Any:
        import time

        time.sleep(0.3)
        return rows[:, 0]

    server.deploy("slow", stuck, input="f64[1]", cache=False)
    try:
        late = query(
            "POST", "/v2/models/slow/infer", infer([1], (1, 1), parameters={"timeout": 20_000})
        )
        assert (late.status, "deadline" in late.json["error"]) == (504, True)
        by_header = query(
            "POST", "/v2/models/slow/infer", infer([2], (1, 1)), {"Clipper-Deadline-Ms": "20"}
        )
        assert by_header.status in (429, 504)
        assert (
            query(
                "POST", "/v2/models/slow/infer", infer([2], (1, 1)), {"Clipper-Deadline-Ms": "soon"}
            ).status
            == 400
        )
        patient = infer([3], (1, 1), parameters={"timeout": 10_000_000, "priority": 1})
        assert query("POST", "/v2/models/slow/infer", patient).json["outputs"][0]["data"] == [3.0]
    finally:
        server.retire("slow", force=True)


# -- clients that others wrote


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_tritonclient(server: clipper.ClipperServer, binary: bool, compression: str | None) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="pip install 'tritonclient[http]'")
    with triton.InferenceServerClient(server.http_address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("total")
        assert client.is_model_ready("sum", "1")
        assert client.get_server_metadata()["name"] == "clipper"
        assert client.get_model_metadata("total")["inputs"][0]["name"] == "input"
        assert {row["name"] for row in client.get_model_repository_index()} >= {"total", "sum"}
        rows = np.arange(12.0).reshape(4, 3)
        given = triton.InferInput("input", [4, 3], "FP64")
        given.set_data_from_numpy(rows, binary_data=binary)
        wanted = [triton.InferRequestedOutput("output", binary_data=binary)]
        result = client.infer(
            "total",
            [given],
            request_id="7",
            outputs=wanted,
            request_compression_algorithm=compression,
            timeout=5_000_000,
        )
        np.testing.assert_array_equal(result.as_numpy("output"), rows.sum(axis=1))
        assert result.get_response()["id"] == "7"
        plain = client.async_infer(
            "total", [given]
        ).get_result()  # no outputs named: it asks for binary ones
        np.testing.assert_array_equal(plain.as_numpy("output"), rows.sum(axis=1))
        with pytest.raises(Exception, match="did you mean 'total'"):
            client.infer("totl", [given])


def test_tritonclient_on_asyncio(server: clipper.ClipperServer) -> None:
    aio = pytest.importorskip("tritonclient.http.aio", reason="pip install 'tritonclient[http]'")
    import asyncio

    async def go() -> Any:
        async with aio.InferenceServerClient(server.http_address) as client:
            given = aio.InferInput("input", [2, 3], "FP64")
            given.set_data_from_numpy(np.ones((2, 3)), binary_data=False)
            return (await client.infer("total", [given])).as_numpy("output")

    np.testing.assert_array_equal(asyncio.run(go()), [3, 3])


def test_tritonclient_reads_configuration_statistics_and_repository(
    server: clipper.ClipperServer,
) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="pip install 'tritonclient[http]'")
    with triton.InferenceServerClient(server.http_address) as client:
        config = client.get_model_config("total")
        assert (config["name"], config["input"]) == (
            "total",
            [{"name": "input", "data_type": "TYPE_FP64", "dims": [3]}],
        )
        stats = client.get_inference_statistics("sum", "1")["model_stats"]
        assert [(row["name"], row["version"]) for row in stats] == [("sum", "1")]
        client.load_model("sum")
        with pytest.raises(Exception, match="is not unloaded by a client"):
            client.unload_model("sum")
    with triton.InferenceServerClient(server.admin_address) as manager:
        manager.load_model("sum")
        with pytest.raises(Exception, match="did you mean 'sum'"):
            manager.unload_model("sun")


def holed(rows: Any) -> Any:
    found = np.array(rows, float)
    found[:, 0] = np.nan
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_model_queried_by_name_may_return_nan(count: int) -> None:
    with clipper.start(http="127.0.0.1:0", **QUICK) as server:
        server.deploy("holed", holed, input="f64[2]")
        tensor = {
            "name": "input",
            "shape": [count, 2],
            "datatype": "FP64",
            "data": [1.0, 2.0] * count,
        }
        body: dict[str, Any] = {"inputs": [tensor]}
        found = ask(server.http_address, "POST", "/v2/models/holed/infer", body)
        assert (found.status, found.json["outputs"][0]["data"]) == (200, [None, 2.0] * count)
        found = ask(
            server.http_address,
            "POST",
            "/v2/models/holed/infer",
            {**body, "parameters": {"binary_data_output": True}},
        )
        size = int(found.headers["inference-header-content-length"])
        rows = np.frombuffer(found.body[size:]).reshape(count, 2)
        assert found.status == 200
        assert np.isnan(rows[:, 0]).all()
        assert (rows[:, 1] == 2.0).all()
        assert np.isnan(server.model("holed").predict(np.ones(2)).result(60)[0])


def test_a_server_is_ready_once_its_models_are_and_until_none_is() -> None:
    with clipper.start(http="127.0.0.1:0", drain_s=0.1) as other_server:

        def ready() -> tuple[int, list[str]]:
            reply = ask(other_server.http_address, "GET", "/v2/health/ready")
            return reply.status, reply.json.get("waiting_for", [])

        for name in ("one", "two"):
            other_server.deploy(name, lambda rows: rows, input="f64[1]", replicas=0)
            other_server.app(name, models=[name])
        assert ready() == (503, ["one", "two"])
        other_server.scale("one", 1)
        other_server.wait_ready(models=["one"])
        assert ready() == (503, ["two"]), "no query comes before all are warm"
        other_server.scale("two", 1)
        other_server.wait_ready()
        assert ready() == (200, [])
        other_server.scale("two", 0)
        assert ready() == (200, []), "a broken model leaves the others in service"
        other_server.scale("one", 0)
        assert ready() == (503, ["one", "two"])
