"""Web pages of other origins: none as delivered, those of `http.cors_origins`, whatever comes of a
request."""

from collections.abc import Iterator

import pytest

import clipper
from tests.frontend.conftest import QUICK, Ask, Reply, ask, total, warm_workers

SHOP = "https://shop.example"


@pytest.fixture(scope="module")
def shop() -> Iterator[clipper.ClipperServer]:
    with clipper.start(
        http={"address": "127.0.0.1:0", "admin": "127.0.0.1:0", "cors_origins": [SHOP]}, **QUICK
    ) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=5000)
        warm_workers(server)
        yield server


def of_shop(
    server: clipper.ClipperServer, method: str, path: str, body: object = None, origin: str = SHOP
) -> Reply:
    return ask(server.http_address, method, path, body, {"Origin": origin})


def test_as_delivered_no_page_may(query: Ask) -> None:
    for method, path in (("GET", "/v2"), ("OPTIONS", "/api/total/predict")):
        assert (
            "access-control-allow-origin" not in query(method, path, None, {"Origin": SHOP}).headers
        )


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v2", None, 200),
        ("GET", "/v2/health/ready", None, 200),
        ("POST", "/api/total/predict", {"input": [1, 2, 3]}, 200),
        ("POST", "/api/total/predict/stream", {"input": [1, 2, 3]}, 200),
        ("POST", "/api/total/predict", {"input": [1]}, 400),
        ("POST", "/api/totl/predict", {"input": [1, 2, 3]}, 404),
        ("GET", "/nowhere", None, 404),
        ("PUT", "/v2", None, 405),
    ],
)
def test_a_page_that_is_named_may_read_whatever_comes(
    shop: clipper.ClipperServer, method: str, path: str, body: object, status: int
) -> None:
    reply = of_shop(shop, method, path, body)
    assert (reply.status, reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (
        status,
        SHOP,
        "origin",
    )
    assert (
        "access-control-allow-origin"
        not in of_shop(shop, method, path, body, "https://other.example").headers
    )


def test_a_preflight_request_gets_what_is_allowed(shop: clipper.ClipperServer) -> None:
    reply = of_shop(shop, "OPTIONS", "/api/total/predict")
    assert reply.status == 204
    assert (
        reply.headers["access-control-allow-methods"] == reply.headers["allow"] == "OPTIONS, POST"
    )
    assert "content-type" in reply.headers["access-control-allow-headers"]


def test_management_is_for_none_of_them(shop: clipper.ClipperServer) -> None:
    assert ask(shop.admin_address, "GET", "/admin/models", None, {"Origin": SHOP}).status == 403
