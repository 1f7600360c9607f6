"""Limits of keys: their rates, and the applications that they are for, over every door."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import clipper
from clipper.cli import main
from clipper.credentials.credential_file import line_of, new_key, owners_in
from clipper.credentials.key_limits import KeyLimits
from clipper.errors import ConfigError, InvalidInput
from clipper.frontend.auth.api_keys import ApiKeys
from tests.frontend.conftest import QUICK, ask, total, warm_workers
from tests.frontend.test_core_http import (
    connect,
    exchanged,
    normalized,
    open_connections,
    reach_connections,
    request,
    responses,
)

BODY = '{"input": [1, 2, 3]}'
INFER = '{"inputs": [{"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}]}'
NAMES = ("shop", "tight", "free")
KEYS = {name: new_key() for name in NAMES}
LIMITS = {
    "shop": KeyLimits.of("1000/h", ["total"], ["web", "mobile"]),
    "tight": KeyLimits.of("4/h"),
    "free": KeyLimits(),
}


def write(file: Path, limits: dict[str, KeyLimits]) -> None:
    lines = [line_of(name, KEYS[name], "", one) for name, one in limits.items()]
    file.with_suffix(".new").write_text("\n".join(lines))
    file.with_suffix(".new").replace(file)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write(tmp_path / "keys", LIMITS)
    return tmp_path / "keys"


@pytest.fixture
def server(keys: Path) -> Iterator[clipper.ClipperServer]:
    http = {"address": "127.0.0.1:0", "api_keys_file": str(keys), "metrics": True}
    more = {"logging": {"access_lines_s_max": 0}}
    with clipper.start(http=http, **more, **QUICK) as started:
        started.deploy("sum", total, input="f64[3]", cache=False)
        for name in ("total", "other"):
            started.app(name, models=["sum"], slo_ms=10_000, default=-1.0)
        warm_workers(started)
        yield started


def bearing(name: str) -> str:
    return f"Authorization: Bearer {KEYS[name]}\r\n"


def stats_of(server: clipper.ClipperServer, application: str) -> dict[str, Any]:
    stats: Any = server.stats()
    return dict(stats["applications"][application])


def counts_of(server: clipper.ClipperServer) -> dict[str, dict[str, int]]:
    """Return the requests of each key by outcome, as the metrics have them."""
    shown = {"Authorization": f"Bearer {KEYS['free']}"}
    text = ask(server.http_address, "GET", "/metrics", None, shown).body.decode()
    found: dict[str, dict[str, int]] = {}
    pattern = r'clipper_key_requests_total\{key="(\w+)",outcome="(\w+)"\} (\d+)'
    for key, outcome, count in re.findall(pattern, text):
        found.setdefault(key, {})[outcome] = int(count)
    return found


def without_close(response: bytes) -> bytes:
    """Return a response as on a connection that stays open: Python reads no body of a request that
    it refuses."""
    return re.sub(rb"(content-length|retry-after|t=)[=:] ?\d+", rb"\1", response).replace(
        b"connection: close\r\n", b""
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/{}/predict", BODY), ("/{}/predict", BODY), ("/v2/models/{}/infer", INFER)],
)
def test_the_core_and_python_refuse_alike(
    server: clipper.ClipperServer, path: str, body: str
) -> None:
    mine, foreign = path.format("total"), path.format("other")
    for _ in range(4):
        (response,) = exchanged(server, request(mine, body, more=bearing("tight")))
        assert response.startswith(b"HTTP/1.1 200")
    before = stats_of(server, "total"), stats_of(server, "other")
    for where, key, status in ((mine, "tight", 429), (foreign, "shop", 403)):
        both = [
            exchanged(server, request(where, body, by_python, bearing(key)))[0]
            for by_python in (False, True)
        ]
        assert both[0].startswith(b"HTTP/1.1 %d" % status)
        assert without_close(normalized(both[0])) == without_close(normalized(both[1]))
        problem = json.loads(both[0].partition(b"\r\n\r\n")[2])
        assert problem["status"] == status
        assert key in problem["detail"]
        assert KEYS[key].encode() not in both[0]
        if status == 429:
            assert b'\r\nratelimit-policy: "key";q=4;w=3600\r\n' in both[0]
            assert re.search(rb'\r\nratelimit: "key";r=0;t=(\d+)\r\nretry-after: \1\r\n', both[0])
    assert (stats_of(server, "total"), stats_of(server, "other")) == before, "no query, no default"


def test_a_refused_request_costs_no_connection_and_no_place(server: clipper.ClipperServer) -> None:
    """The core answers, and goes on, also where requests are sent one after another."""
    assert reach_connections(server, 0)
    asked = [request("/api/total/predict", BODY, more=bearing("tight")) for _ in range(7)]
    with connect(server) as connection:
        connection.sendall(b"".join(asked))
        found = responses(connection, 7)
        assert [one[9:12] for one in found] == [b"200"] * 4 + [b"429"] * 3
        connection.sendall(request("/api/other/predict", BODY, more=bearing("tight")))
        assert b"HTTP/1.1 200" in responses(connection, 1)[0], "another application"
        connection.sendall(request("/api/total/predict", BODY, more=bearing("free")))
        assert b"HTTP/1.1 200" in responses(connection, 1)[0], "another key"
        assert open_connections(server) == 1
    seen = counts_of(server)
    assert seen["tight"] == {"admitted": 5, "not_permitted": 0, "limited": 3}
    assert seen["shop"] == {"admitted": 0, "not_permitted": 0, "limited": 0}


def test_a_request_that_the_core_leaves_to_python_counts_once(
    server: clipper.ClipperServer,
) -> None:
    body = '{"inputs": [[1, 2, 3], [4, 5, 6]]}'
    asked = [request("/api/total/predict", body, more=bearing("tight")) for _ in range(6)]
    found = [exchanged(server, one)[0][9:12] for one in asked]
    assert found == [b"200"] * 4 + [b"429"] * 2
    assert counts_of(server)["tight"] == {"admitted": 4, "not_permitted": 0, "limited": 2}


@pytest.mark.parametrize(
    "path",
    [
        "/api/other/predict",
        "/api/%6fther/predict",
        "/api/other",
        "/other/predict",
        "/v2/models/sum/infer",
        "/v2/models/other/versions/1/infer",
        "/v2/models/total,other/infer",
        "/api/none/predict",
    ],
)
def test_a_key_for_an_application_opens_no_other(server: clipper.ClipperServer, path: str) -> None:
    shown = {"Authorization": f"Bearer {KEYS['shop']}"}
    assert ask(server.http_address, "POST", path, json.loads(BODY), shown).status == 403


def test_a_header_names_no_model_that_the_key_is_not_for(server: clipper.ClipperServer) -> None:
    more = bearing("shop") + "MM-Model-Id: total, sum\r\n"
    (response,) = exchanged(server, request("/v2/models/total/infer", INFER, more=more))
    assert response.startswith(b"HTTP/1.1 403")


def test_new_limits_hold_on_open_connections(server: clipper.ClipperServer, keys: Path) -> None:
    frontends: Any = server._endpoints.frontends
    with connect(server) as connection:
        connection.sendall(request("/api/total/predict", BODY, more=bearing("free")))
        assert b"HTTP/1.1 200" in responses(connection, 1)[0]
        write(keys, {**LIMITS, "free": KeyLimits.of("1/h", ["other", "total"])})
        frontends._access.check()
        asked = request("/api/total/predict", BODY, more=bearing("free"))
        connection.sendall(asked + asked)
        assert [one[9:12] for one in responses(connection, 2)] == [b"200", b"429"]
        write(keys, {"shop": LIMITS["shop"], "free": KeyLimits.of("2/h", ["other"])})
        frontends._access.check()
        connection.sendall(asked)
        assert b"HTTP/1.1 403" in responses(connection, 1)[0]


def test_the_access_log_has_the_name_and_the_groups(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "clipper.requests")
    http = {"address": "127.0.0.1:0", "api_keys_file": str(keys)}
    with clipper.start(http=http, logging={"access_lines_s_max": 1000}, **QUICK) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=10_000)
        shown = {"Authorization": f"Bearer {KEYS['shop']}"}
        for path in ("/api/total/predict", "/api/none/predict"):
            ask(server.http_address, "POST", path, json.loads(BODY), shown)
    lines = [vars(one) for one in caplog.records if one.name == "clipper.requests"]
    assert [(one["status"], one.get("key"), one.get("groups")) for one in lines] == [
        (200, "shop", "web,mobile"),
        (403, None, None),
    ]
    assert KEYS["shop"] not in repr(lines)


# -- gRPC


@pytest.fixture
def calls(keys: Path) -> Iterator[tuple[clipper.ClipperServer, Any]]:
    pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
    from tests.frontend.test_grpc import Client, start

    with start(http={"api_keys_file": str(keys)}) as server:
        server.deploy("sum", total, input="f64[3]")
        for name in ("total", "other"):
            server.app(name, models=["sum"], slo_ms=10_000, default=-1.0)
        clients = {
            name: Client(server.grpc_address, metadata=[("authorization", f"Bearer {KEYS[name]}")])
            for name in NAMES
        }
        yield server, clients
        for client in clients.values():
            client.channel.close()


def test_calls_are_limited_as_requests_are(calls: tuple[clipper.ClipperServer, Any]) -> None:
    from tests.frontend.test_grpc import APPLICATIONS, INFERENCE, numbers, tensor_of

    server, clients = calls
    query = {"application": "total", "input": numbers(1, 2, 3)}
    for _ in range(4):
        clients["tight"](APPLICATIONS, "Predict", **query)
    before = stats_of(server, "total")
    error = clients["tight"].refused(APPLICATIONS, "Predict", **query)
    assert error.code().name == "RESOURCE_EXHAUSTED"
    assert "'tight' makes more requests than its key allows: 4/h" in error.details()
    assert stats_of(server, "total") == before
    for service, method, fields in (
        (APPLICATIONS, "Predict", {**query, "application": "other"}),
        (APPLICATIONS, "Feedback", {"application": "other", "id": "x"}),
        (INFERENCE, "ModelInfer", {"model_name": "sum"}),
    ):
        error = clients["shop"].refused(service, method, **fields)
        assert error.code().name == "PERMISSION_DENIED", method
    assert clients["shop"](APPLICATIONS, "Predict", **query).output.number == 6
    # calls of ModelInfer that are plain are the core's, up to the limit
    for _ in range(4):
        clients["tight"](INFERENCE, "ModelInfer", tensor_of("other", [[1, 2, 3]]))
    plain = tensor_of("other", [[1, 2, 3]])
    error = clients["tight"].refused(INFERENCE, "ModelInfer", plain)
    assert error.code().name == "RESOURCE_EXHAUSTED"
    frontends: Any = server._endpoints.frontends
    uses = frontends._access.keys._uses
    assert uses["tight"].requests == (8, 0, 2)
    assert uses["shop"].requests == (1, 3, 0)


# -- the file


@pytest.mark.parametrize(
    "words",
    [
        "rate=",
        "rate=5",
        "rate=0/s",
        "rate=5/d",
        "rate=1000001/s",
        "rate=-5/s",
        "rate=5/s rate=6/s",
        "apps=A",
        "apps=a,,b",
        "apps=" + ",".join(f"a{i}" for i in range(65)),
        "groups=a b=c",
        "groups=" + ",".join(f"g{i}" for i in range(17)),
        "share=130%",
        "priority=4",
        "x rate=5/s",
    ],
)
def test_a_line_with_limits_that_are_none(tmp_path: Path, words: str) -> None:
    file = tmp_path / "k"
    file.write_text(f"ann {words} sha256:{64 * '0'}\n")
    with pytest.raises(ConfigError, match=r"k:1: "):
        ApiKeys(str(file))


@pytest.mark.parametrize("rate", ["500/s", "30/min", "1/h", "1000000/s", "60000000/min", ""])
def test_limits_are_read_as_they_are_written(rate: str) -> None:
    limits = KeyLimits.of(rate, ["digits", "fraud"], ["web"])
    assert KeyLimits.parse(limits.words) == limits
    assert limits.rate == rate
    assert bool(limits.interval_ns) == bool(rate)


def test_tokens_of_management_have_no_limits(tmp_path: Path) -> None:
    file = tmp_path / "k"
    file.write_text(line_of("ann", new_key(), "", KeyLimits.of("5/s")))
    with pytest.raises(ConfigError, match="a line is `NAME sha256:HEX`"):
        ApiKeys(str(file), setting="http.tokens_file", limited=False)


def test_the_shell_makes_keys_with_limits(tmp_path: Path) -> None:
    file = tmp_path / "api-keys"
    words = ["--rate", "500/s", "--apps", "digits, fraud", "--groups", "web", "--file", str(file)]
    done = CliRunner().invoke(main, ["key", "create", "shop", *words])
    assert done.exit_code == 0, done.output
    (owner,) = owners_in(file)
    assert owner == ("shop", "", "rate=500/s apps=digits,fraud groups=web")
    key = done.output.splitlines()[0]
    assert ApiKeys(str(file)).admit(f"Bearer {key}".encode(), ["digits"]).groups == ("web",)
    shown = CliRunner().invoke(main, ["key", "list", "--file", str(file)])
    assert "rate=500/s apps=digits,fraud groups=web" in shown.output
    for wrong in (["--rate", "5"], ["--apps", "A"], ["--rate", "5/s", "--role", "read"]):
        done = CliRunner().invoke(main, ["key", "create", "x", *wrong, "--file", str(file)])
        assert done.exit_code == 1
    with pytest.raises(InvalidInput):
        KeyLimits.of("5")
    assert len(owners_in(file)) == 1
