"""Management over HTTP: each verb, who may, and that a change takes effect."""

from typing import Any

import pytest

import clipper
from tests.frontend.conftest import Ask, ask


def test_looking(manage: Ask, query: Ask) -> None:
    query("POST", "/api/total/predict", {"input": [1, 2, 3]})
    stats = manage("GET", "/admin/stats").json
    assert stats["models"]["sum:1"]["has"] == 1
    assert set(stats["models"]["sum:1"]["latency_us"]) >= {"count", "mean", "max"}
    (model,) = [row for row in manage("GET", "/admin/models").json["models"] if row["name"] == "sum"]
    assert (model["version"], model["input"], model["has"]) == (1, "f64[3]", 1)
    assert "total" in model["applications"]
    assert {app["name"] for app in manage("GET", "/admin/applications").json["applications"]} >= {"total", "learns"}
    assert manage("GET", "/admin/applications/total").json["models"] == ["sum"]
    assert "PUT /admin/applications/NAME" in manage("GET", "/").json["routes"]


def test_an_application_is_made_changed_and_deleted(manage: Ask, query: Ask) -> None:
    made = manage("PUT", "/admin/applications/made", {"models": ["sum"], "slo_ms": 5000, "default": -1})
    assert (made.status, made.json["slo_ms"], made.json["input"]) == (201, 5000, "f64[3]")
    assert query("POST", "/api/made/predict", {"input": [1, 2, 3]}).json["output"] == 6
    changed = manage("PUT", "/admin/applications/made", {"name": "made", "default": -2})
    assert (changed.status, changed.json["default"], changed.json["slo_ms"]) == (200, -2, 5000)
    patched = manage("PATCH", "/admin/applications/made", {"slo_ms": 4000})
    assert (patched.status, patched.json["slo_ms"]) == (200, 4000)
    assert query("GET", "/api/made").json["slo_ms"] == 4000
    deleted = manage("DELETE", "/admin/applications/made")
    assert (deleted.status, deleted.body) == (204, b"")
    assert query("POST", "/api/made/predict", {"input": [1, 2, 3]}).status == 404
    assert manage("DELETE", "/admin/applications/made").status == 404
    again = manage("PUT", "/admin/applications/made", {"models": ["sum"]})
    assert (again.status, again.json["default"]) == (201, None)
    assert manage("DELETE", "/admin/applications/made").status == 204


@pytest.mark.parametrize(
    ("method", "name", "body", "status", "part"),
    [
        ("PATCH", "totl", {"slo_ms": 1}, 404, "did you mean 'total'?"),
        ("PUT", "Upper", {"models": ["sum"]}, 400, "'U' is not allowed"),
        ("PUT", "x", {"models": ["sun"]}, 404, "did you mean 'sum'?"),
        ("PUT", "x", {"models": "sum"}, 400, "list of names"),
        ("PUT", "x", {"models": [1]}, 400, "list of names"),
        ("PUT", "x", {"modles": ["sum"]}, 400, "modles"),
        ("PUT", "x", {"name": "y"}, 400, "another application"),
        ("PUT", "x", {"models": ["sum"], "slo_ms": -1}, 400, "slo_ms"),
        ("PUT", "x", {"models": ["sum"], "slo_ms": "fast"}, 400, "slo_ms"),
        ("PUT", "x", {"models": ["sum"], "policy": "staking"}, 400, "staking"),
        ("PUT", "x", {"models": ["sum"], "policy": 7}, 400, "policy"),
        ("PUT", "x", {"models": ["sum"], "input": "f64[4]"}, 409, "f64[4]"),
        ("PUT", "x", {"models": ["sum"], "confidence_min": 2}, 400, "confidence_min"),
        ("PUT", "x", [1], 400, "object"),
    ],
)
def test_what_cannot_be_is_told(manage: Ask, method: str, name: str, body: Any, status: int, part: str) -> None:
    reply = manage(method, f"/admin/applications/{name}", body)
    assert reply.status == status, reply.json
    assert part in reply.json["error"]
    assert manage("GET", "/admin/applications/x").status == 404


def test_management_is_not_among_the_queries_nor_the_other_way_round(manage: Ask, query: Ask) -> None:
    assert query("GET", "/admin/stats").status == 404
    assert manage("POST", "/api/total/predict", {"input": [1, 2, 3]}).status == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "127.0.0.1"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "127.evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_a_web_page_manages_nothing(manage: Ask, headers: dict[str, str], status: int) -> None:
    assert manage("GET", "/admin/applications", None, headers).status == status


def test_a_token_is_asked_for() -> None:
    with clipper.start(http={"admin": "127.0.0.1:0", "token": "secret"}) as server:
        address = server.admin_address
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            reply = ask(address, "GET", "/admin/stats", None, given)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert ask(address, "GET", "/admin/stats", None, {"Authorization": "Bearer secret"}).status == 200
