"""Who may call what: every route and method of both listeners, and every method of gRPC, with each
kind of credential that opens it not. The tables of the routes and services are those of the
server."""

import socket
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import pytest

import clipper
from clipper.credentials.credential_file import line_of, new_key
from tests.frontend.conftest import PATIENCE_S, QUICK, total, warm_workers

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# probes, and a page that a browser asks for without a token
OPEN: Final = {
    *("/livez", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"),
    *("/docs", "/docs/page.css", "/docs/page.js"),
}
SESSION: Final = ("POST", "/dashboard/session")  # its own code is its authorization


class Keys(NamedTuple):
    """The keys of a server with a file for queries and one for management; and tokens of an
    identity provider, where the package for them is there, that are not valid, and that are."""

    client: str
    manager: str
    revoked: str
    operator: str
    refused: dict[str, str]
    token: str
    published: bytes

    def wrong(self, listener: str) -> dict[str, str]:
        """Return a value of `Authorization` for each reason why it opens nothing."""
        valid, other = self.client, self.manager
        tokens = dict(self.refused)
        if listener == "management":
            valid, other = other, valid
            tokens["a token for queries"] = self.token
        return {
            **{why: f"Bearer {token}" for why, token in tokens.items()},
            "none": "",
            "unknown": f"Bearer {new_key()}",
            "revoked": f"Bearer {self.revoked}",
            "of the other listener": f"Bearer {other}",
            "of another scheme": f"Basic {valid}",
            "without a scheme": valid,
            "cut short": f"Bearer {valid[:-1]}",
            "with more behind it": f"Bearer {valid} {valid}",
        }


@pytest.fixture(scope="module")
def keys() -> Keys:
    refused, token, published = {}, "", b""
    if find_spec("jwt"):
        from tests.frontend.test_signed_tokens import WRONG, Provider

        provider = Provider()
        token, published = provider.token(), provider.published()
        reasons = ("has ended", "is of another issuer", "is of a stranger", "is not signed")
        refused = {f"a token that {why}": WRONG[why](provider) for why in reasons}
    return Keys(new_key(), new_key(), new_key(), "operator-secret", refused, token, published)


@pytest.fixture(scope="module")
def server(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clipper.ClipperServer]:
    folder = tmp_path_factory.mktemp("keys")
    files = {"clients": keys.client, "managers": keys.manager}
    for name, key in files.items():
        lines = [line_of("ann", key), line_of("gone", keys.revoked)]
        (folder / name).write_text("\n".join(lines))
    http: dict[str, Any] = {
        "address": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "api_keys_file": str(folder / "clients"),
        "tokens_file": str(folder / "managers"),
        "token": keys.operator,
        "metrics": True,
    }
    if keys.published:
        from tests.frontend.test_signed_tokens import AUDIENCE, ISSUER

        (folder / "jwks").write_bytes(keys.published)
        http |= {"jwt_keys": str(folder / "jwks"), "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE}
    calls: dict[str, Any] = {"grpc": "127.0.0.1:0"} if find_spec("grpc") else {}
    logging = {"access_lines_s_max": 0}  # so that the core answers what it can
    with clipper.start(http=http, logging=logging, **calls, **QUICK) as started:
        started._learning.states.start_writing()  # its thread stays
        started.deploy("sum", total, input="f64[3]")
        started.app("total", models=["sum"], slo_ms=5000)
        warm_workers(started)
        frontends: Any = started._endpoints.frontends
        for name, key in files.items():
            (folder / name).write_text(line_of("ann", key))
        frontends._access.check()
        yield started


def status_of(address: str, method: str, path: str, authorization: str) -> int:
    """Return the status of the response to a request with a small body."""
    host, _, port = address.rpartition(":")
    shown = f"Authorization: {authorization}\r\n" if authorization else ""
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: {address}\r\n{shown}"
            "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}".encode()
        )
        found = b""
        while b"\r\n" not in found:
            more = connection.recv(4096)
            assert more, (method, path)
            found += more
    return int(found.split()[1])


def own_routes(server: clipper.ClipperServer, listener: str) -> set[tuple[str, str]]:
    """Return the methods and patterns of the routes of a listener."""
    frontends: Any = server._endpoints.frontends
    found = {*(frontends.routes if listener == "query" else frontends.admin_routes)}
    assert len(found) > 20
    return found


def every_route(server: clipper.ClipperServer, listener: str) -> list[tuple[str, str]]:
    """Return the routes of a listener, with those methods too that a pattern does not take."""
    patterns = {pattern for _, pattern in own_routes(server, listener)}
    return [(method, pattern) for pattern in sorted(patterns) for method in METHODS]


def address_of(server: clipper.ClipperServer, listener: str) -> str:
    return server.http_address if listener == "query" else server.admin_address


def filled(pattern: str, name: str) -> str:
    """Return a path of a pattern."""
    return pattern.replace("{}", name)


def needs_a_key(method: str, pattern: str) -> bool:
    """Return whether a route is closed. Each open one is named here, and in the code."""
    is_page = pattern.startswith("/dashboard") and method in ("GET", "HEAD")
    return not (pattern in OPEN or is_page or (method, pattern) == SESSION)


BOTH = pytest.mark.parametrize("listener", ["query", "management"])


@BOTH
def test_no_route_opens_for_a_wrong_key(
    server: clipper.ClipperServer, keys: Keys, listener: str
) -> None:
    address, own = address_of(server, listener), own_routes(server, listener)
    before = server.stats()["applications"], server.catalog.view
    for method, pattern in every_route(server, listener):
        if not needs_a_key(method, pattern):
            continue
        # of a method that a route does not take, a stranger learns as little
        wrong = keys.wrong(listener)
        shown = wrong if (method, pattern) in own else {"none": ""}
        found = {
            why: status_of(address, method, filled(pattern, "total"), one)
            for why, one in shown.items()
        }
        assert found == dict.fromkeys(shown, 401), (method, pattern)
    for unknown in ("/none", "/admin/none/none", "/api/none/none/none"):
        assert status_of(address, "GET", unknown, "") == 401, "nor what there is not"
    assert (server.stats()["applications"], server.catalog.view) == before


@BOTH
def test_every_route_opens_for_its_key(
    server: clipper.ClipperServer, keys: Keys, listener: str
) -> None:
    address, own = address_of(server, listener), own_routes(server, listener)
    mine = (keys.client, keys.token) if listener == "query" else (keys.manager,)
    for method, pattern in own - {SESSION}:
        for key in filter(None, (*mine, keys.operator)):
            # nothing has this name, so that a request changes nothing
            status = status_of(address, method, filled(pattern, "none"), f"Bearer {key}")
            assert status not in (401, 403), (method, pattern)


@BOTH
def test_open_routes_need_no_key(server: clipper.ClipperServer, listener: str) -> None:
    address = address_of(server, listener)
    routes = [one for one in every_route(server, listener) if not needs_a_key(*one)]
    assert len({pattern for _, pattern in routes}) > 5
    for method, pattern in routes:
        status = status_of(address, method, filled(pattern, "none"), "")
        assert (status in (401, 403)) == ((method, pattern) == SESSION)


# -- gRPC


def methods() -> list[tuple[str, Any]]:
    from clipper.frontend.grpc.calls import OPEN_TO_ALL
    from clipper.frontend.protocols import methods_of
    from tests.frontend.test_grpc import APPLICATIONS, INFERENCE

    assert not {APPLICATIONS, INFERENCE} & {*OPEN_TO_ALL}
    return [(service, one) for service in (APPLICATIONS, INFERENCE) for one in methods_of(service)]


def code_of(client: Any, service: str, method: Any) -> str:
    """Return the name of the code with which a call of no content ends."""
    import grpc

    from clipper.frontend.protocols import message

    request = message(method.input_type.full_name)()
    sent = iter([request]) if method.client_streaming else request
    call = client.method(service, method.name)
    try:
        reply = call(sent, timeout=PATIENCE_S, metadata=client.metadata)
        if method.server_streaming:
            list(reply)
    except grpc.RpcError as error:
        code: Any = error
        return str(code.code().name)
    return "OK"


def test_no_method_of_grpc_opens_for_a_wrong_key(server: clipper.ClipperServer, keys: Keys) -> None:
    pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
    from tests.frontend.test_grpc import Client

    each = methods()
    assert len(each) > 10
    for why, shown in keys.wrong("query").items():
        client = Client(server.grpc_address, metadata=[("authorization", shown)] if shown else [])
        for service, method in each:
            assert code_of(client, service, method) == "UNAUTHENTICATED", (why, method.name)
        client.channel.close()


def test_a_client_of_grpc_queries_and_only_the_operator_manages(
    server: clipper.ClipperServer, keys: Keys
) -> None:
    pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
    from tests.frontend.test_grpc import INFERENCE, Client

    for key in filter(None, (keys.client, keys.token, keys.operator)):
        client = Client(server.grpc_address, metadata=[("authorization", f"Bearer {key}")])
        for service, method in methods():
            code = code_of(client, service, method)
            assert code != "UNAUTHENTICATED", method.name
            assert code != "PERMISSION_DENIED", method.name
        if key != keys.operator:
            error = client.refused(INFERENCE, "RepositoryModelUnload", model_name="sum")
            assert error.code().name == "PERMISSION_DENIED"
        client.channel.close()
