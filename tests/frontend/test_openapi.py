"""The described interface: every route is in it, and nothing else; its schemas are those of what
travels."""

import re
from typing import Any

import pytest

import clipper
from clipper.frontend.openapi.document import example_of_input, named, schema_of_input
from clipper.manage.http.described import of_management
from clipper.types import InputType
from tests.frontend.conftest import Ask, ask

BOTH = pytest.mark.parametrize("listener", ["query", "management"])


def routes_of(server: clipper.ClipperServer, listener: str) -> Any:
    frontends: Any = server._endpoints.frontends
    return frontends.routes if listener == "query" else frontends.admin_routes


def document_of(query: Ask, manage: Ask, listener: str) -> Any:
    return (query if listener == "query" else manage)("GET", "/openapi.json").json


@BOTH
def test_every_route_is_described_and_nothing_else(
    server: clipper.ClipperServer, query: Ask, manage: Ask, listener: str
) -> None:
    routes = routes_of(server, listener)
    assert {route for route in routes if route not in routes.about} == set()
    optional = {("GET", "/metrics")}  # of http.metrics
    assert {*routes.about} - {*routes} <= optional
    expected = {
        (method, named(pattern, routes.about[method, pattern].names)) for method, pattern in routes
    }
    paths = document_of(query, manage, listener)["paths"]
    found = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    assert expected <= found
    own = {
        (method, re.sub("^/api/[^/{}]+/", "/api/{application}/", path))
        for method, path in found - expected
    }
    assert own <= expected, "an application's own path is a route's"


def test_bodies_of_management_have_named_members_and_no_others() -> None:
    bodies = [about.takes for about in of_management().values() if about.takes]
    closed = [body for body in bodies if "properties" in body]
    assert len(closed) >= 10
    assert [body for body in closed if body.get("additionalProperties") is not False] == []


@BOTH
def test_it_is_openapi(
    server: clipper.ClipperServer, query: Ask, manage: Ask, listener: str
) -> None:
    validator = pytest.importorskip(
        "openapi_spec_validator", reason="pip install openapi-spec-validator"
    )
    document = document_of(query, manage, listener)
    assert document["openapi"] == "3.1.0"
    validator.validate(document)
    ids = [
        operation["operationId"]
        for operations in document["paths"].values()
        for operation in operations.values()
    ]
    assert len(ids) == len(set(ids))


def test_an_application_has_paths_with_schemas_of_its_own(
    server: clipper.ClipperServer, query: Ask
) -> None:
    document = query("GET", "/openapi.json").json
    about = document["paths"]["/api/total/predict"]["post"]
    assert about["requestBody"]["content"]["application/json"]["example"] == {
        "input": [0.5, 0.5, 0.5]
    }
    row = document["components"]["schemas"]["Input.total"]
    assert (row["minItems"], row["maxItems"], row["items"]["type"]) == (3, 3, "number")
    assert {"/api/total/feedback", "/api/learns/feedback"} <= document["paths"].keys()
    server.app("later", models=["sum"])
    try:
        assert "/api/later/predict" in query("GET", "/openapi.json").json["paths"]
    finally:
        server.remove_app("later")
    assert "/api/later/predict" not in query("GET", "/openapi.json").json["paths"]


def test_parameters_of_the_query_and_headers_are_described(manage: Ask) -> None:
    document = manage("GET", "/openapi.json").json
    about = document["paths"]["/admin/import"]["post"]
    assert {(one["in"], one["name"]) for one in about["parameters"]} == {
        ("query", "dry_run"),
        ("header", "Clipper-Actor"),
    }


@BOTH
def test_a_client_that_has_the_page_gets_not_modified(
    server: clipper.ClipperServer, query: Ask, manage: Ask, listener: str
) -> None:
    ask = query if listener == "query" else manage
    tag = ask("GET", "/openapi.json").headers["etag"]
    for known in (tag, f"W/{tag}", f'"x", {tag}', "*"):
        reply = ask("GET", "/openapi.json", None, {"If-None-Match": known})
        assert (reply.status, reply.body, reply.headers["etag"]) == (304, b"", tag)
    assert ask("GET", "/openapi.json", None, {"If-None-Match": '"other"'}).status == 200


@pytest.mark.parametrize(
    ("type_", "schema", "example"),
    [
        ("str", {"type": "string"}, "hello"),
        ("any", {"description": "an input of any type"}, None),
        ("u8", {"type": "integer", "minimum": 0, "maximum": 255}, 0),
        (
            "bool[2]",
            {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
            [False, False],
        ),
        (
            "i8[*]",
            {"type": "array", "items": {"type": "integer", "minimum": -128, "maximum": 127}},
            [0, 0, 0],
        ),
    ],
)
def test_the_schema_of_an_input_type(type_: str, schema: Any, example: Any) -> None:
    assert schema_of_input(InputType.parse(type_)) == schema
    assert example_of_input(InputType.parse(type_)) == example


def test_a_large_input_has_no_example() -> None:
    assert example_of_input(InputType.parse("f32[28,28]")) is None


PAGE = {"/docs": "text/html", "/docs/page.css": "text/css", "/docs/page.js": "text/javascript"}


@BOTH
@pytest.mark.parametrize("path", PAGE)
def test_the_page_is_served_and_sends_requests_to_no_other_host(
    query: Ask, manage: Ask, listener: str, path: str
) -> None:
    reply = (query if listener == "query" else manage)("GET", path)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith(PAGE[path])
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert b"http://" not in reply.body
    assert b"https://" not in reply.body


def test_the_page_is_small(query: Ask) -> None:
    assert sum(len(query("GET", path).body) for path in PAGE) <= 20_000


def test_with_a_token_the_page_can_be_read_and_nothing_else() -> None:
    with clipper.start(http={"admin": "127.0.0.1:0", "token": "secret"}) as server:
        for path in PAGE:
            assert ask(server.admin_address, "GET", path).status == 200
        assert ask(server.admin_address, "GET", "/openapi.json").status == 401
        document = ask(
            server.admin_address, "GET", "/openapi.json", None, {"Authorization": "Bearer secret"}
        ).json
        assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
        assert document["security"] == [{"bearer": []}]


def test_a_page_of_our_own_may_manage_and_others_may_not(
    server: clipper.ClipperServer, manage: Ask
) -> None:
    at = server.admin_address
    assert manage("GET", "/admin/models", None, {"Origin": f"http://{at}"}).status == 200
    for other in ("http://127.0.0.1:1", "http://example.org", "null", f"http://{at}.example.org"):
        assert manage("GET", "/admin/models", None, {"Origin": other}).status == 403
    assert (
        manage(
            "GET", "/admin/models", None, {"Origin": "http://evil.example", "Host": "evil.example"}
        ).status
        == 403
    )


def test_management_has_both(query: Ask, manage: Ask) -> None:
    assert manage("GET", "/openapi.json?of=queries").json == query("GET", "/openapi.json").json
    assert manage("GET", "/openapi.json?of=querys").status == 400
