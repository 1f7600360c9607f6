"""Applications over HTTP: real sockets, a real container."""

import json
import threading
import time
from typing import Any

import pytest

import clipper
from tests.frontend.conftest import Ask, Reply, ask
from tests.threads import join

PREDICT = "/api/total/predict"


def is_problem(reply: Reply, status: int) -> dict[str, Any]:
    """Check the body, which is the same for all errors; its id is that of the header."""
    assert reply.status == status
    body: dict[str, Any] = reply.json
    assert body["status"] == status
    assert body["error"] == f"{body['detail']} {body['hint']}".strip()
    assert body["type"].startswith("urn:clipper:error:")
    assert body["request_id"] == reply.headers["x-request-id"]
    return body


# -- asking


def test_a_query_is_answered(query: Ask) -> None:
    start = time.monotonic_ns()
    reply = query("POST", PREDICT, {"input": [1, 2, 3.5]})
    took_us = (time.monotonic_ns() - start) / 1000
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    body = reply.json
    assert body["output"] == 6.5
    assert body["models"] == ["sum:1"]
    assert (body["default"], body["reason"], body["missing"]) == (False, "", [])
    assert (body["confidence"], body["agreement"]) == (1.0, 1.0)
    assert 0 < body["latency_us"] <= took_us
    assert reply.headers["x-request-id"] == body["id"]


def test_a_request_id_goes_through_and_the_prediction_keeps_its_own(query: Ask) -> None:
    reply = query("POST", PREDICT, {"input": [1, 2, 3]}, {"X-Request-Id": "mine-7"})
    assert reply.headers["x-request-id"] == "mine-7"
    assert reply.json["id"] != "mine-7"
    refused = query("POST", PREDICT, {"input": [1]}, {"X-Request-Id": "mine-8"})
    assert is_problem(refused, 400)["request_id"] == "mine-8"


def test_several_queries_in_one_request(query: Ask) -> None:
    rows = [[i, i, 0.5] for i in range(40)]
    body = query("POST", PREDICT, {"inputs": rows}).json
    assert [one["output"] for one in body["predictions"]] == [sum(row) for row in rows]
    assert len({one["id"] for one in body["predictions"]}) == 40


def test_settings_of_a_query(query: Ask) -> None:
    body = {"input": [1, 2, 3], "user": "ann", "slo_ms": 4000, "salt": 7}
    assert query("POST", PREDICT, body).json["output"] == 6


WRONG: dict[str, tuple[bytes, str]] = {
    "not closed": (b'{"input": [1,2,3}', "(byte 16)"),
    "no JSON": (b"hello", "(byte 0)"),
    "nothing": (b"", "truncated"),
    "an array": (b"[1,2,3]", "Expected `object`, got `array`"),
    "no input": (b"{}", "lacks `input`"),
    "input and inputs": (b'{"input": [1,2,3], "inputs": []}', "not both"),
    "no inputs": (b'{"inputs": []}', "`$.inputs` holds no rows"),
    "a word": (b'{"input": [1,"2",3]}', "`$.input[1]`"),
    "a wrong row": (b'{"inputs": [[1,2,3],[1,2,true]]}', "`$.inputs[1][2]`"),
    "too short": (b'{"input": [1,2]}', "expected f64[3], got f64[2]"),
    "a scalar": (b'{"input": 1}', "`$.input`"),
    "nested": (b'{"input": [[1,2,3]]}', "`$.input[0]`"),
    "another member": (b'{"input": [1,2,3], "slo": 1}', "did you mean 'slo_ms'?"),
    "a wrong SLO": (b'{"input": [1,2,3], "slo_ms": -1}', "slo_ms=-1"),
    "an endless SLO": (b'{"input": [1,2,3], "slo_ms": 1e9}', "slo_ms"),
    "an SLO in words": (b'{"input": [1,2,3], "slo_ms": "fast"}', "`$.slo_ms`"),
    "NaN": (b'{"input": [1,2,NaN]}', "write null for a missing value"),
    "Infinity": (b'{"input": [1,2,Infinity]}', "JSON has no NaN and no Infinity"),
    "beyond a double": (b'{"input": [1,2,1e999]}', "Number out of range"),
    "digits without end": (b'{"input": [1,2,' + b"9" * 5000 + b"]}", "Number out of range"),
    "a lone surrogate": (
        b'{"input": [1,2,3], "user": "\\ud800"}',
        "a string has half of a surrogate pair: \\ud800",
    ),
    "a body that is cut off": (b'{"input": [1,2,3], "user": "\\\\ud800', "was truncated"),
    "a lone low surrogate": (b'{"input": [1,2,3], "user": "\\udc00"}', "not JSON"),
    "surrogates in the wrong order": (b'{"input": [1,2,3], "user": "\\udc00\\ud800"}', "not JSON"),
    "no UTF-8": (b'{"input": [1,2,3], "user": "\xff"}', "utf-8"),
    "deep": (b'{"input": ' + b"[" * 100_000, "nested too deeply"),
    "many": (b'{"inputs": [' + b"[1,2,3]," * 1024 + b"[1,2,3]]}", "http.queries_max"),
}


def test_what_is_on_the_other_address_is_said(query: Ask, manage: Ask) -> None:
    for path in ("/metrics", "/admin/models", "/dashboard/x"):
        assert "on the management address, http.admin" in query("GET", path).json["hint"]
    assert "on the query address, http.address" in manage("GET", "/api").json["hint"]
    assert query("GET", "/nothing").json["hint"] == "GET / lists what there is."


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(query: Ask, name: str) -> None:
    body, part = WRONG[name]
    assert part in is_problem(query("POST", PREDICT, body), 400)["error"]


@pytest.mark.parametrize(
    "headers", [{}, {"Origin": "http://elsewhere"}], ids=["compiled", "python"]
)
@pytest.mark.parametrize(
    ("body", "output"),
    [
        (b'{"input": [9,9,9], "input": [1,2,3]}', 6.0),
        (b'{"input": [9,9,9], "user": "a", "input": [1,2,3], "user": "b"}', 6.0),
        (b'{"inputs": [[9,9,9]], "inputs": [[1,2,3]]}', 6.0),
        (b'{"input": [1,2,"x"], "input": [1,2,3]}', 6.0),
        (b'{"input": [1,2,3], "input": [1,2,"x"]}', None),
    ],
)
def test_of_members_with_the_same_name_the_last_holds(
    query: Ask, headers: dict[str, str], body: bytes, output: float | None
) -> None:
    """The last member of a name counts. output: None if the request is rejected."""
    reply = query("POST", PREDICT, body, headers)
    if output is None:
        is_problem(reply, 400)
    else:
        assert [one["output"] for one in reply.json.get("predictions", [reply.json])] == [output]


def test_a_name_that_is_nearly_right(query: Ask) -> None:
    error = is_problem(query("POST", "/api/totl/predict", {"input": [1, 2, 3]}), 404)["error"]
    assert "did you mean 'total'?" in error
    assert (
        "did you mean 'predict'?"
        in is_problem(query("POST", "/api/total/predit", {}), 404)["error"]
    )


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/api/%2e%2e", "/api/a%00b", "/api/" + "a" * 9000, "/api//", "/%ff/x"],
)
def test_odd_paths_lead_nowhere(query: Ask, path: str) -> None:
    is_problem(query("GET", path), 404)


def test_an_unknown_method_is_rejected_with_the_known_ones(query: Ask) -> None:
    for method in ("GET", "DELETE", "PUT", "PATCH", "TRACE", "PROPFIND", ".", "post"):
        reply = query(method, PREDICT)
        is_problem(reply, 405)
        assert reply.headers["allow"] == "OPTIONS, POST"
    options = query("OPTIONS", "/api/total")
    assert (options.status, options.headers["allow"], options.body) == (
        204,
        "GET, HEAD, OPTIONS",
        b"",
    )


def test_head_has_the_headers_of_get(query: Ask) -> None:
    full, head = query("GET", "/api/total"), query("HEAD", "/api/total")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == str(len(full.body))


def test_read_only_routes(query: Ask) -> None:
    about = query("GET", "/api/total").json
    assert (about["name"], about["input"], about["models"], about["slo_ms"]) == (
        "total",
        "f64[3]",
        ["sum:1"],
        5000,
    )
    assert {app["name"] for app in query("GET", "/api").json["applications"]} >= {"total", "learns"}
    assert "POST /api/NAME/predict" in query("GET", "/").json["routes"]


# -- inputs of every type


@pytest.mark.parametrize(
    ("type_", "given", "seen"),
    [
        ("i32[*]", [1, 2], "[1, 2] int32"),
        ("f32[2,2]", [[1, 2], [3, 4.5]], "[[1.0, 2.0], [3.0, 4.5]] float32"),
        ("u8[3]", [0, 128, 255], "[0, 128, 255] uint8"),
        ("bool[2]", [True, False], "[True, False] bool"),
        ("f64", 2.5, "2.5 float64"),
        ("str", "été", "'été' str"),
        ("bytes", "AAEC", "b'\\x00\\x01\\x02' bytes"),
    ],
)
def test_inputs_of_every_type(
    server: clipper.ClipperServer, query: Ask, type_: str, given: Any, seen: str
) -> None:
    name = "t-" + type_.replace("[", "-").replace("]", "").replace("*", "n").replace(",", "-")

    def show(rows: Any) -> list[str]:
        rows = [bytes(row) if isinstance(row, memoryview) else row for row in rows]
        return [
            (
                f"{row.tolist()!r} {row.dtype}"
                if hasattr(row, "dtype")
                else f"{row!r} {type(row).__name__}"
            )
            for row in rows
        ]

    server.deploy(name, show, input=type_)
    server.app(name, models=[name], slo_ms=5000)
    try:
        assert query("POST", f"/api/{name}/predict", {"input": given}).json["output"] == seen
        assert (
            query("POST", f"/api/{name}/predict", {"inputs": [given]}).json["predictions"][0][
                "output"
            ]
            == seen
        )
        assert query("POST", f"/api/{name}/predict", {"input": {"a": 1}}).status == 400
        if type_ == "u8[3]":
            assert (
                "256" in query("POST", f"/api/{name}/predict", {"input": [0, 1, 256]}).json["error"]
            )
            assert (
                "-1" in query("POST", f"/api/{name}/predict", {"input": [0, 1, -1]}).json["error"]
            )
    finally:
        server.catalog.unregister_application(name)
        server.retire(name, force=True)


# -- telling


def test_feedback_by_id_counts_once(query: Ask) -> None:
    id = query("POST", "/api/learns/predict", {"input": [1, 2, 3]}).json["id"]
    assert query("POST", "/api/learns/feedback", {"id": id, "label": 6}).json == {"counted": True}
    assert query("POST", "/api/learns/feedback", {"id": id, "label": 6}).json == {"counted": False}


def test_feedback_by_input_and_of_other_kinds(query: Ask) -> None:
    assert query(
        "POST", "/api/learns/feedback", {"input": [1, 2, 3], "label": 6, "user": "ann"}
    ).json == {"counted": True}
    for truth in ({"correct": True}, {"score": 0.5}):
        id = query("POST", "/api/learns/predict", {"input": [1, 2, 3]}).json["id"]
        assert query("POST", "/api/learns/feedback", {"id": id, **truth, "weight": 2}).json == {
            "counted": True
        }


def test_feedback_about_many(query: Ask) -> None:
    predictions = query("POST", "/api/learns/predict", {"inputs": [[1, 2, 3], [4, 5, 6]]}).json[
        "predictions"
    ]
    items = [{"id": one["id"], "label": one["output"]} for one in predictions]
    counts = query(
        "POST", "/api/learns/feedback", {"feedback": [*items, {"id": "no-1", "label": 1}]}
    ).json
    assert counts == {"counted": 2, "duplicates": 0, "unknown": 1}
    again = query(
        "POST", "/api/learns/feedback", {"feedback": [{**item, "weight": 2} for item in items]}
    ).json
    assert again == {"counted": 0, "duplicates": 2, "unknown": 0}


@pytest.mark.parametrize(
    ("app", "body", "status", "part"),
    [
        ("learns", {"id": "no-1", "label": 1}, 404, "no-1"),
        ("learns", {"label": 1}, 400, "names a prediction"),
        ("learns", {"id": "x"}, 400, "one of label, correct and score"),
        ("learns", {"id": "x", "label": 1, "wight": 2}, 400, "did you mean 'weight'?"),
        ("total", {"id": "no-1", "label": 1}, 404, "no-1"),
    ],
)
def test_feedback_that_cannot_count(
    query: Ask, app: str, body: Any, status: int, part: str
) -> None:
    assert part in is_problem(query("POST", f"/api/{app}/feedback", body), status)["error"]


@pytest.mark.parametrize("form", ["compiled", "python"])
def test_feedback_on_a_default_application_counts_once(
    server: clipper.ClipperServer, query: Ask, form: str
) -> None:
    """The plain request is answered by the compiled listener, the one with a user by Python; both
    wait for feedback."""
    before = server.stats()["applications"]["total"]["answers"]["feedback"]["n"]
    body = {"input": [1.5, 2, 3], **({"user": "ann"} if form == "python" else {})}
    answer = query("POST", "/api/total/predict", body).json
    feedback = {"id": answer["id"], "label": 6.5}
    assert query("POST", "/api/total/feedback", feedback).json == {"counted": True}
    assert query("POST", "/api/total/feedback", feedback).json == {"counted": False}
    assert (
        "one of application"
        in is_problem(query("POST", "/api/learns/feedback", feedback), 404)["error"]
    )
    assert server.stats()["applications"]["total"]["answers"]["feedback"] == {
        "n": before + 1,
        "mean": 1.0,
    }


# -- the original's clients


def test_clients_of_the_original_clipper(query: Ask) -> None:
    body = query("POST", "/total/predict", {"input": [1.0, 2.0, 3.0]}).json
    assert (body["output"], body["default"]) == (6.0, False)
    assert isinstance(body["query_id"], int)
    many = query("POST", "/total/predict/", {"input_batch": [[1, 2, 3], [2, 3, 4]]}).json[
        "batch_predictions"
    ]
    assert [one["output"] for one in many] == [6, 9]
    assert query("POST", "/total/predict", {"input": [1, 2, 3], "version": "1"}).json["output"] == 6
    assert (
        "sum:2"
        in is_problem(query("POST", "/total/predict", {"input": [1, 2, 3], "version": "2"}), 404)[
            "error"
        ]
    )
    for application in ("learns", "total"):
        feedback = query(
            "POST", f"/{application}/update", {"uid": 3, "input": [1, 2, 3], "label": 6.0}
        )
        assert (feedback.status, feedback.body) == (200, b"Feedback received? 1")
    is_problem(query("POST", "/learns/update", {"uid": 3, "input": [1, 2, 3]}), 400)


def test_a_default_is_marked_as_one(server: clipper.ClipperServer, query: Ask) -> None:
    def broken(rows: Any) -> Any:
        raise ValueError("no good")

    server.deploy("broken", broken, input="f64[1]", cache=False)
    server.app("brave", models=["broken"], slo_ms=5000, default=-1)
    server.app("bare", models=["broken"], slo_ms=5000)
    try:
        body = query("POST", "/api/brave/predict", {"input": [1]}).json
        assert (body["output"], body["default"], body["models"], body["missing"]) == (
            -1,
            True,
            [],
            ["broken:1"],
        )
        assert "ValueError: no good" in body["reason"]
        old = query("POST", "/brave/predict", {"input": [1]}).json
        assert (old["default"], old["output"]) == (True, -1)
        assert "no good" in old["default_explanation"]
        error = is_problem(query("POST", "/api/bare/predict", {"input": [1]}), 500)
        assert "ValueError: no good" in error["error"]
        assert "Traceback" not in json.dumps(error)
        assert is_problem(query("POST", "/api/bare/predict", {"inputs": [[1], [2]]}), 500)
    finally:
        server.catalog.unregister_application("brave")
        server.catalog.unregister_application("bare")
        server.retire("broken", force=True)


# -- many at once


def test_many_clients_get_their_own_answers(server: clipper.ClipperServer) -> None:
    import http.client

    wrong: list[Any] = []

    def client(number: int) -> None:
        connection = http.client.HTTPConnection(server.http_address, timeout=60)
        for i in range(50):
            connection.request(
                "POST",
                PREDICT,
                json.dumps({"input": [number, i, 0.25]}),
                {"X-Request-Id": f"{number}-{i}"},
            )
            response = connection.getresponse()
            body = json.loads(response.read())
            if (
                body.get("output") != number + i + 0.25
                or response.getheader("x-request-id") != f"{number}-{i}"
            ):
                wrong.append(body)
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert not wrong


@pytest.mark.parametrize("engines", [2])
def test_several_engines_answer(engines: int) -> None:
    with clipper.start(http="127.0.0.1:0", engines=engines, heartbeat_ms=100) as server:
        for name in ("a", "b"):
            server.deploy(name, lambda rows: rows[:, 0], input="f64[1]")
        server.app("both", models=["a", "b"], slo_ms=5000)
        for i in range(20):
            assert (
                ask(server.http_address, "POST", "/api/both/predict", {"input": [i]}).json["output"]
                == i
            )


def test_the_name_of_a_user_has_a_bound(query: Ask) -> None:
    body = {"input": [1, 2, 3], "user": "x" * 100_000}
    for application in ("learns", "total"):
        found = query("POST", f"/api/{application}/predict", body)
        assert (found.status, "at most 512" in found.json["detail"]) == (400, True)
    assert query("POST", "/api/learns/feedback", {**body, "label": 6}).status == 400
