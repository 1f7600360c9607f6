"""Management over HTTP: each verb, its permissions, and the effect of a change."""

import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import clipper
from clipper.frontend.http import listeners
from clipper.manage.operations import Operations
from tests.frontend.conftest import Ask, ask


def test_read_only_routes(manage: Ask, query: Ask) -> None:
    query("POST", "/api/total/predict", {"input": [1, 2, 3]})
    stats = manage("GET", "/admin/stats").json
    assert stats["models"]["sum:1"]["has"] == 1
    assert set(stats["models"]["sum:1"]["latency_us"]) >= {"count", "mean", "max"}
    (model,) = [
        row for row in manage("GET", "/admin/models").json["models"] if row["name"] == "sum"
    ]
    assert (model["version"], model["input"], model["has"]) == (1, "f64[3]", 1)
    assert "total" in model["applications"]
    assert {app["name"] for app in manage("GET", "/admin/applications").json["applications"]} >= {
        "total",
        "learns",
    }
    assert manage("GET", "/admin/applications/total").json["models"] == ["sum"]
    assert "PUT /admin/applications/NAME" in manage("GET", "/").json["routes"]


def test_an_application_is_made_changed_and_deleted(manage: Ask, query: Ask) -> None:
    made = manage(
        "PUT", "/admin/applications/made", {"models": ["sum"], "slo_ms": 5000, "default": -1}
    )
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


def test_links_roles_and_the_latest(manage: Ask, query: Ask, server: clipper.ClipperServer) -> None:
    server.deploy("late", lambda rows: rows.sum(axis=1) + 100, input="f64[3]")
    server.deploy("late", lambda rows: rows.sum(axis=1) + 200, input="f64[3]", promote=False)
    manage("PUT", "/admin/applications/linked", {"models": ["late"], "slo_ms": 5000})
    query_body = {"input": [1, 2, 3]}
    assert query("POST", "/api/linked/predict", query_body).json["output"] == 106
    rehearsed = manage("POST", "/admin/models/late:2/promote?dry_run=true", {}).json
    assert (rehearsed["dry_run"], [one["key"] for one in rehearsed["changed"]]) == (
        True,
        ["promoted/late"],
    )
    assert query("POST", "/api/linked/predict", query_body).json["output"] == 106
    assert (
        manage("POST", "/admin/models/late:2/promote", {}, {"Clipper-Actor": "ann"}).status == 200
    )
    assert manage("POST", "/admin/applications/linked/predict", query_body).json["output"] == 206
    assert [row["latest"] for row in manage("GET", "/admin/models/late").json["models"]] == [
        False,
        True,
    ]
    assert (
        manage("POST", "/admin/models/late/rollback").json["message"]
        == "late:1 is now the latest version of late, instead of late:2"
    )
    assert (
        manage("POST", "/admin/models/late/rollback")
        .json["error"]
        .startswith("model 'late' has no version below 1")
    )
    challenged = manage(
        "POST", "/admin/applications/linked/challenge", {"model": "late:2", "share": 0.25}
    ).json
    assert challenged["changed"][0]["after"]["roles"] == {"late:2": "challenger(share=0.25)"}
    assert manage("POST", "/admin/applications/linked/unlink", {"model": "late:2"}).status == 200
    record = manage("GET", "/admin/applications/linked").json
    assert (record["models"], record["roles"]) == (["late"], {})
    last = manage("GET", "/admin/history?count=5").json["history"]
    assert [row["verb"] for row in last] == ["set", "promote", "rollback", "challenge", "unlink"]
    assert [row["actor"] for row in last] == ["http", "ann", "http", "http", "http"]
    manage("POST", "/admin/applications/linked/remove")
    for version in (1, 2):
        assert manage("POST", f"/admin/models/late:{version}/retire").status == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("models/sun:1/promote", {}, 404, "did you mean 'sum'?"),
        ("models/sum/promote", {}, 400, "which version"),
        ("models/sum:1/promote?dry_run=maybe", {}, 400, "dry_run"),
        ("models/sum:1/promote?dryrun=true", {}, 400, "did you mean 'dry_run'?"),
        ("models/sum/scale", {"replicas": -1}, 400, "replicas"),
        ("models/sum/scale", {"replicas": [2, 1]}, 400, "no bounds"),
        ("models/sum/scale", {"replicsa": 1}, 400, "did you mean 'replicas'?"),
        ("models/sum/scale", {}, 400, "lacks `replicas`"),
        ("models/sum/retire", {"force": "yes"}, 400, "force"),
        ("models/sum/retire", {}, 409, "still linked"),
        ("models/x/deploy", {}, 400, "lacks what to run"),
        ("models/x/deploy", {"model": "nothing"}, 400, "cannot deploy 'nothing'"),
        ("models/x/deploy", {"model": "missing.onnx"}, 400, "cannot read"),
        ("models/X/deploy?dry_run=true", {"model": "a:b"}, 400, "'X' is not allowed"),
        ("models/sum/deploy?dry_run=true", {"model": "a:b", "version": 1}, 409, "already exists"),
        ("applications/total/link", {"model": "sun"}, 404, "did you mean 'sum'?"),
        (
            "applications/total/link",
            {"model": "sum", "role": "shadw"},
            400,
            "did you mean 'shadow'?",
        ),
        ("applications/total/unlink", {"model": "other"}, 404, "does not link 'other'"),
        ("applications/total/challenge", {"model": "sum", "share": 2}, 400, "share"),
        ("applications/totl/remove", {}, 404, "did you mean 'total'?"),
    ],
)
def test_what_a_verb_refuses(manage: Ask, path: str, body: Any, status: int, part: str) -> None:
    before = manage("GET", "/admin/history?count=1").json
    reply = manage("POST", f"/admin/{path}", body)
    assert reply.status == status, reply.json
    assert part in reply.json["error"]
    assert manage("GET", "/admin/history?count=1").json == before


@pytest.mark.parametrize(
    ("method", "name", "body", "status", "part"),
    [
        ("PATCH", "totl", {"slo_ms": 1}, 404, "did you mean 'total'?"),
        ("PUT", "Upper", {"models": ["sum"]}, 400, "'U' is not allowed"),
        ("PUT", "x", {"models": ["sun"]}, 404, "did you mean 'sum'?"),
        ("PUT", "x", {"models": "sum"}, 400, "`models`: Expected"),
        ("PUT", "x", {"models": [1]}, 400, "`models`: Expected"),
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
def test_impossible_requests_are_rejected_with_a_reason(
    manage: Ask, method: str, name: str, body: Any, status: int, part: str
) -> None:
    reply = manage(method, f"/admin/applications/{name}", body)
    assert reply.status == status, reply.json
    assert part in reply.json["error"]
    assert manage("GET", "/admin/applications/x").status == 404


def test_management_is_not_among_the_queries_nor_the_other_way_round(
    manage: Ask, query: Ask
) -> None:
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


def test_a_token_is_requested() -> None:
    with clipper.start(http={"admin": "127.0.0.1:0", "token": "secret"}) as server:
        address = server.admin_address
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            reply = ask(address, "GET", "/admin/stats", None, given)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert (
            ask(address, "GET", "/admin/stats", None, {"Authorization": "Bearer secret"}).status
            == 200
        )


def test_a_speculative_server_is_made_changed_watched_and_removed(manage: Ask, query: Ask) -> None:
    body = {
        "models": ["sum", "beside"],
        "slo_ms": 5000,
        "default": -1,
        "decider": "first within 2000 ms, else all",
        "policy": "stacking",
        "roles": {"beside": "shadow"},
        "coverage": 0.9,
        "missing": "skip",
    }
    made = manage("PUT", "/admin/applications/wine", body)
    assert made.status == 201, made.json
    assert {key: made.json[key] for key in body} == body
    headers = {"X-Request-Id": "r-17"}
    for i in range(8):
        reply = query("POST", "/api/wine/predict", {"input": [i, 2, 3]}, headers)
        assert (reply.status, reply.headers["x-request-id"]) == (200, "r-17")
    stats = manage("GET", "/admin/applications/wine/stats").json
    assert (stats["decider"], stats["policy"], stats["slo_ms"]) == (
        body["decider"],
        "stacking",
        5000,
    )
    assert (stats["queries"], stats["decided_by"], stats["duration_us"]["count"]) == (
        8,
        {"first": 8},
        8,
    )
    assert set(stats["models"]["sum:1"]) >= {"used", "wins", "in_time", "late", "failed"}
    assert (
        manage("PATCH", "/admin/applications/wine", {"decider": "all", "roles": {}}).json["decider"]
        == "all"
    )
    assert query("POST", "/api/wine/predict", {"input": [1, 2, 3]}).json["output"] == 6
    assert manage("GET", "/admin/applications/wine/stats").json["decider"] == "all"
    assert manage("DELETE", "/admin/applications/wine").status == 204
    for path in ("/admin/applications/wine/stats", "/admin/applications/wine"):
        assert manage("GET", path).status == 404
    refused = query("POST", "/api/wine/feedback", {"id": "x", "label": 6})
    assert (refused.status, refused.json["type"]) == (
        404,
        "urn:clipper:error:application-not-found",
    )


def test_statistics_of_a_model(manage: Ask, query: Ask) -> None:
    query("POST", "/api/total/predict", {"input": [1, 2, 4]})
    for name in ("sum", "sum:1"):
        stats = manage("GET", f"/admin/models/{name}/stats").json
        assert stats["has"] == 1
        assert stats["since_us"] > 0
        assert stats["duration_us"]["count"] == stats["latency_us"]["count"] > 0
    assert manage("GET", "/admin/models/sun/stats").status == 404
    assert manage("GET", "/admin/models/sum:7/stats").status == 404


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"decider": "fist"}, "did you mean 'first'?"),
        ({"decider": 7}, "decider"),
        ({"decider": "floor(nobody)"}, "nobody"),
        ({"roles": {"nobody": "shadow"}}, "nobody"),
        ({"roles": {"sum": "shdow"}}, "shadow"),
        ({"roles": ["sum"]}, "roles"),
        ({"coverage": 0.9}, "does not learn"),
        ({"coverage": "wide"}, "coverage"),
        ({"missing": "median"}, "missing"),
        ({"policy": "nobody.such:Class"}, "no module"),
    ],
)
def test_settings_that_cannot_be_leave_the_application_as_it_was(
    server: clipper.ClipperServer, manage: Ask, body: Any, part: str
) -> None:
    before = manage("GET", "/admin/applications/total").json
    reply = manage("PATCH", "/admin/applications/total", body)
    assert reply.status == (409 if part in ("nobody", "does not learn") else 400), reply.json
    assert part in reply.json["error"] + reply.json.get("hint", "")
    assert manage("GET", "/admin/applications/total").json == before
    settings = {
        key: value
        for key, value in body.items()
        if key not in ("coverage", "decider") or isinstance(value, str | float)
    }
    if settings and not any(isinstance(value, list) for value in settings.values()):
        with pytest.raises(clipper.ClipperError) as raised:
            server.app("total", **settings)
        assert raised.value.message in reply.json["error"] or "`" in reply.json["error"], (
            "the same words in Python"
        )


def test_qualifiers_of_models_are_in_the_answer(query: Ask) -> None:
    reply = query("POST", "/api/beside/predict", {"input": [1, 2, 3]}).json
    assert reply["qualifiers"] == {"beside:1": {"quality": 3, "note": "fine"}}
    many = query("POST", "/api/beside/predict", {"inputs": [[1, 2, 3], [4, 5, 6]]}).json
    assert [each["qualifiers"]["beside:1"]["quality"] for each in many["predictions"]] == [3, 3]
    assert (
        not {"qualifiers", "decided_by", "set"}
        & query("POST", "/api/total/predict", {"input": [1, 2, 3]}).json.keys()
    )


def test_the_step_that_decided_and_the_set_are_in_the_answer(query: Ask, manage: Ask) -> None:
    manage(
        "PUT", "/admin/applications/first", {"models": ["sum"], "slo_ms": 5000, "decider": "first"}
    )
    assert query("POST", "/api/first/predict", {"input": [1, 2, 3]}).json["decided_by"] == "first"
    manage(
        "PUT",
        "/admin/applications/sets",
        {"models": ["sum"], "slo_ms": 5000, "policy": "stacking", "coverage": 0.9},
    )
    for i in range(3):
        reply = query("POST", "/api/sets/predict", {"input": [1, 2, i]}).json
        query("POST", "/api/sets/feedback", {"id": reply["id"], "label": 3.5 + i})
    assert reply["set"][0] <= reply["output"] <= reply["set"][1]


def test_queries_feedback_and_reads_do_not_wait_for_changes_by_management(
    manage: Ask, query: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More deployments than there are threads are under way; a large query, feedback and `ps` are
    answered all the same."""
    release, under_way = threading.Event(), threading.Semaphore(0)

    def deploy(self: Operations, **_: Any) -> None:
        under_way.release()
        assert release.wait(60)

    monkeypatch.setattr(Operations, "scale", deploy)
    with ThreadPoolExecutor(8) as callers:
        changes = [
            callers.submit(manage, "POST", "/admin/models/sum/scale", {"replicas": 1})
            for _ in range(8)
        ]
        try:
            assert all(under_way.acquire(timeout=60) for _ in range(4))
            rows = {
                "inputs": [
                    {"name": "x", "shape": [40_000, 3], "datatype": "FP64", "data": [1.0] * 120_000}
                ]
            }
            answer = query("POST", "/v2/models/total/infer", rows)
            assert (answer.status, len(answer.json["outputs"][0]["data"])) == (200, 40_000)
            accepted = query(
                "POST", "/api/learns/feedback", {"input": [1.0, 2.0, 3.0], "label": 6.0}
            )
            assert accepted.status == 200, accepted.body
            assert manage("GET", "/admin/ps").status == 200
            assert not any(change.done() for change in changes)
        finally:
            release.set()
        assert {change.result(30).status for change in changes} == {200}


def test_changes_that_wait_in_too_great_a_number_are_refused(
    manage: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_WAITING_MAX", 1)
    release, under_way = threading.Event(), threading.Semaphore(0)

    def scale(self: Operations, **_: Any) -> None:
        under_way.release()
        assert release.wait(60)

    monkeypatch.setattr(Operations, "scale", scale)
    with ThreadPoolExecutor(6) as callers:
        try:
            changes = [
                callers.submit(manage, "POST", "/admin/models/sum/scale", {"replicas": 1})
                for _ in range(6)
            ]
            assert all(under_way.acquire(timeout=60) for _ in range(4))
            refused, _ = futures.wait(changes, 10, futures.FIRST_COMPLETED)
            assert {change.result().status for change in refused} == {429}
            assert refused.pop().result().headers["retry-after"] == "1"
        finally:
            release.set()
