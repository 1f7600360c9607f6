"""The core and Python answer the same bytes to the same requests, however a request is cut, in
whatever order.

Each request goes twice: plain, and with a header that makes it Python's (`Origin`, which means
nothing to queries). What may differ is taken out of the responses: the number in an answer's id,
ids made up for requests, how long a query took, and the date.
"""

import concurrent.futures
import contextlib
import ctypes
import http.client
import json
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper_container.model import Scored
from tests.frontend.certificates import Authority
from tests.frontend.conftest import PATIENCE_S, QUICK, ask, total, warm_workers

SEEDS = range(4)
OTHER_ORIGIN = "Origin: http://elsewhere\r\n"


def outputs(rows: Any) -> Any:
    """Return outputs of every kind: numbers, text, arrays, confidences, and some not plain."""
    return [KINDS[int(row[0]) % len(KINDS)] for row in rows]


KINDS: list[Any] = [
    7,
    "plain",
    "caf\u00e9",
    'a "b"',
    np.array([1.5, 2.0]),
    np.array([1.0, np.nan]),
    float("inf"),
    b"bytes",
    True,
]


def sure(rows: Any) -> Any:
    return Scored(
        np.asarray(rows).sum(axis=1), confidence=[0.25 * (int(row[0]) % 5) for row in rows]
    )


def twice(rows: Any) -> Any:
    return 2 * total(rows)


def big(rows: Any) -> Any:
    return np.full((len(rows), 100_000), 0.25)


def huge(rows: Any) -> Any:
    return np.full((len(rows), 400_000), 0.25)


def many_kinds(rows: Any) -> Any:
    """Return large outputs of each kind of number, with several dimensions, and of text."""
    rng = np.random.default_rng(7)
    large = [
        rng.standard_normal(5000),
        rng.standard_normal((3, 700, 2)).astype("f4"),
        rng.integers(-9, 9, (90, 100)),
        rng.integers(0, 255, 20_000, np.uint8),
        rng.integers(0, 2, 20_000).astype(bool),
        "text " * 5000,
        'a "quote"' * 5000,
        np.append(rng.standard_normal(5000), np.nan),
    ]
    return [large[int(row[0]) % len(large)] for row in rows]


def broken(rows: Any) -> Any:
    raise ValueError("it is broken")


@pytest.fixture(scope="module", params=["in plain", "over TLS"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[clipper.ClipperServer]:
    http: dict[str, Any] = {
        "address": "127.0.0.1:0",
        "pipeline_max": 8,
        "header_bytes_max": 1024,
    }
    if request.param == "in plain":
        with started(http) as server:
            yield server
        return
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    http["tls_cert"], http["tls_key"] = authority.sign("server")
    with started(http) as server:
        trusted[server.http_address] = ssl.create_default_context(cafile=authority.ca)
        yield server


trusted: dict[str, ssl.SSLContext] = {}  # by the address of a server that speaks TLS


@contextlib.contextmanager
def started(http: dict[str, Any]) -> Iterator[clipper.ClipperServer]:
    with clipper.start(
        http=http,
        feedback={"window_bytes_max": 1 << 20},
        **QUICK,
    ) as started:
        started.deploy("sum", total, input="f64[3]")
        started.deploy("twice", twice, input="f64[3]")
        started.deploy("int", total, input="i32[2,2]")
        started.deploy("any", outputs, input="f64[1]", row_by_row=False)
        started.deploy("sure", sure, input="f32[2]")
        started.deploy("long", lambda rows: [float(len(row)) for row in rows], input="f64[*]")
        started.deploy("big", big, input="f64[1]")
        started.app("big", models=["big"], slo_ms=10_000)
        started.deploy("huge", huge, input="f64[1]")
        started.app("huge", models=["huge"], slo_ms=10_000)
        started.deploy("fresh", huge, input="f64[1]", cache=False)
        started.app("fresh", models=["fresh"], slo_ms=10_000)
        started.deploy("kinds", many_kinds, input="f64[1]", row_by_row=False)
        started.app("kinds", models=["kinds"], slo_ms=10_000, default="none")
        started.deploy("broken", broken, input="f64[1]")
        started.app("total", models=["sum"], slo_ms=10_000)
        started.app("single", models=["sum"], slo_ms=10_000, policy="single")
        started.app("ints", models=["int"], slo_ms=10_000)
        started.app("any", models=["any"], slo_ms=10_000, default="none")
        started.app("sure", models=["sure"], slo_ms=10_000, confidence_min=0.4, default=-1)
        started.app("long", models=["long"], slo_ms=10_000)
        started.app("broken", models=["broken"], slo_ms=10_000)
        started.app("learns", models=["sum"], slo_ms=10_000, policy="stacking")
        started.deploy("sum2", total, input="f64[3]")
        started.deploy("broken3", broken, input="f64[3]")
        started.deploy("broken4", broken, input="f64[3]")
        three = ["sum", "sum2", "twice"]
        for policy in ("ensemble", "mixture", "stacking", "ridge"):
            started.app(policy, models=three, slo_ms=10_000, policy=policy)
        started.app("majority", models=["sum", "sum2"], slo_ms=10_000, decider="majority")
        started.app("unsure", models=three, slo_ms=10_000, confidence_min=0.9, default=-1)
        started.app("half", models=["sum", "broken3"], slo_ms=10_000)
        started.app("none", models=["broken3", "broken4"], slo_ms=10_000)
        started._learning.states.start_writing()
        warm_workers(started)
        yield started


def open_connections(server: clipper.ClipperServer) -> int:
    """Return the number of connections that the core's HTTP server holds."""
    frontends: Any = server._endpoints.frontends
    return int(frontends._listeners.hot.core_server.connections)


def reach_connections(server: clipper.ClipperServer, count: int) -> bool:
    """Wait until the core's HTTP server holds `count` connections; return whether it does."""
    until = time.monotonic() + PATIENCE_S
    while open_connections(server) != count and time.monotonic() < until:
        time.sleep(0.002)
    return open_connections(server) == count


def request(
    path: str, body: str, by_python: bool = False, more: str = "", method: str = "POST"
) -> bytes:
    """Return a request. by_python: with a header that the core leaves to the Python server."""
    headers = f"Host: a\r\n{OTHER_ORIGIN if by_python else ''}{more}"
    length = len(body.encode())
    return f"{method} {path} HTTP/1.1\r\n{headers}Content-Length: {length}\r\n\r\n{body}".encode()


def connect(server: clipper.ClipperServer) -> socket.socket:
    host, _, port = server.http_address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    context = trusted.get(server.http_address)
    if context is None:
        return connection
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        secured = context.wrap_socket(connection, server_hostname=host)
        undo.pop_all()
    return secured


def whole(text: bytes) -> tuple[bytes, bytes] | None:
    """Split `text` after its first response; return None if that is incomplete.

    A chunked response is returned with its length in the head instead.
    """
    head, found, rest = text.partition(b"\r\n\r\n")
    if not found:
        return None
    if length := re.search(rb"content-length: (\d+)", head):
        size = int(length[1])
        return (head + found + rest[:size], rest[size:]) if len(rest) >= size else None
    assert b"transfer-encoding: chunked" in head
    at, chunks = 0, []
    while (end := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:end], 16)
        chunks.append(rest[end + 2 : end + 2 + size])
        at = end + 4 + size
        if len(rest) < at:
            break
        assert rest[at - 2 : at] == b"\r\n"
        if not size:
            body = b"".join(chunks)
            length_header = b"content-length: %d" % len(body)
            return head.replace(b"transfer-encoding: chunked", length_header) + found + body, rest[
                at:
            ]
    return None


def responses(
    connection: socket.socket, count: int, receive: Callable[[], bytes] | None = None
) -> list[bytes]:
    """Read `count` responses, or fewer if the server closes. receive: reads some bytes."""
    found, rest = [], b""
    while len(found) < count:
        if one := whole(rest):
            found.append(one[0])
            rest = one[1]
            continue
        chunk = receive() if receive else connection.recv(1 << 16)
        if not chunk:
            break
        rest += chunk
    assert len(found) < count or not rest
    return found


VARIABLE_PARTS = (
    (rb"date: [^\r]*", b"date: D"),
    (rb'"id":"[0-9a-f]{8}-[0-9a-f]+"', b'"id":"I"'),
    (rb'"latency_us":\d+', b'"latency_us":L'),
    (rb'"query_id":\d+', b'"query_id":Q'),
    (rb'"prediction_id":"[0-9a-f]{8}-[0-9a-f]+"', b'"prediction_id":"I"'),
    (rb"inference-header-content-length: \d+", b"inference-header-content-length: N"),
    (rb"x-request-id: [0-9a-f]{8,12}-[0-9a-f]+\r", b"x-request-id: R\r"),
    (rb'"request_id":"[0-9a-f]{12}-[0-9a-f]+"', b'"request_id":"R"'),
    (rb"content-length: \d+", b"content-length: N"),
)


def normalized(response: bytes) -> bytes:
    """Return a response with the parts that differ from call to call replaced."""
    for pattern, word in VARIABLE_PARTS:
        response = re.sub(pattern, word, response)
    return response


def exchanged(
    server: clipper.ClipperServer, *requests: bytes, cuts: Callable[[int], list[int]] | None = None
) -> list[bytes]:
    """Send requests on one connection, at once or cut in pieces; return their responses."""
    text = b"".join(requests)
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        at = 0
        for cut in [*(cuts(len(text)) if cuts else []), len(text)]:
            with contextlib.suppress(ConnectionError):
                connection.sendall(text[at:cut])
            at = cut
        return responses(connection, len(requests))


def some_number(rng: random.Random) -> str:
    return rng.choice(
        [
            str(rng.randrange(-9, 9)),
            repr(round(rng.uniform(-99, 99), 3)),
            "1e3",
            "-0.0",
            "1E-2",
            "0.1000000000000000055511151231",
        ]
    )


def some_body(rng: random.Random, numbers: int) -> str:
    blank = rng.choice(["", "", " ", "\n\t "])
    row = f",{blank}".join(some_number(rng) for _ in range(numbers))
    good = f'{blank}{{{blank}"input"{blank}:{blank}[{blank}{row}{blank}]{blank}}}{blank}'
    bad = [
        "",
        "{",
        "[]",
        '{"input": 3}',
        '{"input": [1, 2, "x"]}',
        '{"input": [1, 2]}',
        '{"input": [01, 2, 3]}',
        '{"inputs": [[1, 2, 3]]}',
        '{"input": [1, 2, NaN]}',
        f'{{"input": [{row}], "user": "ann"}}',
        f'{{"user" : "ann" ,"input": [{row}]}}',
        f'{{"input": [{row}], "user": ""}}',
        f'{{"input": [{row}], "user": null}}',
        f'{{"input": [{row}], "user": "Zo\u00eb"}}',
        f'{{"input": [{row}], "user": "{"u" * 513}"}}',
        f'{{"input": [{row}], "user": "a", "user": "b"}}',
        f'{{"input": [{row}], "slo_ms": 9000}}',
        f'{{"input": [{row}], "unknown": 1}}',
        f'{{"input": [{row}]}} x',
        f'{{"inp\\u0075t": [{row}]}}',
        f'{{"input": [{row}], "input": [{row}]}}',
        '{"input": [1, 2, 1e999]}',
        f'{{"input": [{row}],}}',
        '{"input": "\ud83d"}'.encode("utf-8", "replace").decode(),
    ]
    return good if rng.random() < 0.6 else rng.choice(bad)


def some_request(rng: random.Random) -> Callable[[bool], bytes]:
    path, numbers = rng.choice(
        [
            ("/api/total/predict", 3),
            ("/api/single/predict", 3),
            ("/total/predict", 3),
            ("/api/ints/predict", 2),
            ("/api/any/predict", 1),
            ("/any/predict", 1),
            ("/api/sure/predict", 2),
            ("/sure/predict", 2),
            ("/api/long/predict", 4),
            ("/api/broken/predict", 1),
            ("/api/learns/predict", 3),
            ("/api/ensemble/predict", 3),
            ("/api/mixture/predict", 3),
            ("/api/stacking/predict", 3),
            ("/api/ridge/predict", 3),
            ("/api/majority/predict", 3),
            ("/api/unsure/predict", 3),
            ("/api/half/predict", 3),
            ("/api/none/predict", 3),
            ("/ensemble/predict", 3),
            ("/api/nobody/predict", 3),
            ("/api/total/predict?x=1", 3),
        ]
    )
    body = some_body(rng, numbers)
    if path == "/api/ints/predict" and rng.random() < 0.7:
        body = f'{{"input": [[1, {rng.randrange(9)}], [3, -4]]}}'
    more = rng.choice(
        [
            "",
            "",
            "X-Request-Id: mine-7\r\n",
            "X-Request-Id: two words\r\n",
            "Accept: */*\r\n",
            "Via: me\r\n",
        ]
    )
    method = rng.choice(["POST"] * 12 + ["GET", "PUT"])
    return lambda by_python: request(path, body, by_python, more, method)


def binary(rng: random.Random, path: str, shape: list[int], dtype: str) -> Callable[[bool], bytes]:
    """Return an infer request as tritonclient writes it, either valid or with one error."""
    if rng.random() < 0.4:
        shape = [rng.choice([1, 2, 3, 7, 32, 33]), *shape[-(len(shape) > 2) - 1 :]]
    count = int(np.prod(shape))
    row = np.array([rng.choice([0, 1, -2, 7.5, 1e9]) for _ in range(count)]).astype(dtype)
    tensor: dict[str, Any] = {"name": "input", "shape": shape, "datatype": DATATYPES[dtype]}
    data = b""
    if rng.random() < 0.5:
        data = row.tobytes()
        tensor["parameters"] = {"binary_data_size": len(data) + (rng.random() < 0.1)}
    else:
        tensor["data"] = row.tolist() if rng.random() < 0.8 else [row.tolist()]
    body: dict[str, Any] = {"inputs": [tensor]}
    if rng.random() < 0.5:
        body = {"id": rng.choice(["", "mine", "two words", 'a"b']), **body}
    if rng.random() < 0.4:
        parameters = (
            {"parameters": {"binary_data": rng.random() < 0.5}} if rng.random() < 0.6 else {}
        )
        body["outputs"] = [{"name": "output", **parameters}]
    if rng.random() < 0.4:
        body["parameters"] = rng.choice(
            [{"binary_data_output": rng.random() < 0.5}, {}, {"salt": 7}, {"user": "ann"}]
        )
    head = json.dumps(body, separators=rng.choice([(",", ":"), (", ", ": ")])).encode()
    more = f"Inference-Header-Content-Length: {len(head)}\r\n" if data else ""
    more += rng.choice(["", "", "X-Request-Id: mine-7\r\n", 'X-Request-Id: a"b\r\n'])

    def make(by_python: bool) -> bytes:
        lines = f"Host: a\r\n{OTHER_ORIGIN if by_python else ''}{more}"
        length = len(head + data)
        return (
            f"POST {path} HTTP/1.1\r\n{lines}Content-Length: {length}\r\n\r\n".encode()
            + head
            + data
        )

    return make


DATATYPES = {"f8": "FP64", "f4": "FP32", "i4": "INT32", "i8": "INT64"}


def some_infer(rng: random.Random) -> Callable[[bool], bytes]:
    name, shape, dtype = rng.choice(
        [
            ("total", [1, 3], "f8"),
            ("total", [3], "f8"),
            ("single", [1, 3], "f8"),
            ("total", [2, 3], "f8"),
            ("total", [1, 4], "f8"),
            ("total", [1, 3], "f4"),
            ("ints", [1, 2, 2], "i4"),
            ("ints", [2, 2], "i4"),
            ("ints", [1, 2, 2], "i8"),
            ("any", [1, 1], "f8"),
            ("any", [1], "f8"),
            ("sure", [1, 2], "f4"),
            ("long", [1, 3], "f8"),
            ("broken", [1, 1], "f8"),
            ("sum", [1, 3], "f8"),
            ("sum/versions/1", [1, 3], "f8"),
            ("sum/versions/9", [1, 3], "f8"),
            ("nobody", [1, 3], "f8"),
            ("learns", [1, 3], "f8"),
            ("ensemble", [1, 3], "f8"),
            ("mixture", [1, 3], "f8"),
            ("majority", [3], "f8"),
            ("unsure", [1, 3], "f8"),
            ("half", [1, 3], "f8"),
            ("none", [1, 3], "f8"),
            ("kinds", [2, 1], "f8"),
            ("stacking", [2, 3], "f8"),
            ("half", [2, 3], "f8"),
        ]
    )
    return binary(rng, f"/v2/models/{name}/infer", shape, dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_infer_alike(server: clipper.ClipperServer, seed: int) -> None:
    rng = random.Random(200 + seed)
    for _ in range(200):
        make = some_infer(rng)
        (plain,), (by_python,) = exchanged(server, make(False)), exchanged(server, make(True))
        assert normalized(plain) == normalized(by_python), make(False)


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("others", [[], [0], [1], [1, 1, 3], [4, 4], [0, 8, 2]])
def test_infer_of_every_kind_of_output(
    server: clipper.ClipperServer, kind: int, wanted: bool, others: list[int]
) -> None:
    data = [kind, *(kind if other == 0 else other for other in others)]
    tensor = {"name": "x", "shape": [len(data), 1], "datatype": "FP64", "data": data}
    body = json.dumps({"id": "a", "inputs": [tensor], "parameters": {"binary_data_output": wanted}})
    requests = [
        exchanged(server, request("/v2/models/any/infer", body, by_python))[0]
        for by_python in (False, True, False)
    ]
    assert len({normalized(one) for one in requests}) == 1


@pytest.mark.parametrize("rows", [1, 2, 32])
def test_infer_is_served_by_the_core(server: clipper.ClipperServer, rows: int) -> None:
    tensor = {"name": "x", "shape": [rows, 3], "datatype": "FP64", "data": [1, 2, 3] * rows}
    body = json.dumps({"inputs": [tensor]})
    assert reach_connections(server, 0)
    with connect(server) as connection:
        for path in ("total", "sum", "sum/versions/1", "learns", "ensemble", "majority", "mixture"):
            connection.sendall(request(f"/v2/models/{path}/infer", body))
            output = b"8.0" if path in ("ensemble", "mixture") else b"6.0"
            assert b'"data":[%s]' % b",".join([output] * rows) in responses(connection, 1)[0]
        assert open_connections(server) == 1


@pytest.mark.parametrize("path", ["total", "broken"])
def test_clients_that_leave_while_their_rows_are_open(
    server: clipper.ClipperServer, path: str
) -> None:
    numbers = 3 if path == "total" else 1
    for i in range(30):
        data = [i + 0.5] * (5 * numbers)
        tensor = {"name": "x", "shape": [5, numbers], "datatype": "FP64", "data": data}
        with connect(server) as connection:
            body = json.dumps({"inputs": [tensor]})
            connection.sendall(request(f"/v2/models/{path}/infer", body))
    assert reach_connections(server, 0)


INFER = '{"inputs": [{"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}]}'


def test_the_core_serves_http(server: clipper.ClipperServer) -> None:
    with connect(server) as connection:
        connection.sendall(request("/api/total/predict", '{"input": [1, 2, 3]}'))
        assert b'"output":6.0' in responses(connection, 1)[0]
        assert reach_connections(server, 1)
        connection.sendall(request("/api/total/predict", '{"input": [1, 2, 3]}', by_python=True))
        assert b'"output":6.0' in responses(connection, 1)[0]
        assert reach_connections(server, 0)


@pytest.mark.parametrize(
    "path", ["ensemble", "mixture", "stacking", "ridge", "majority", "half", "learns"]
)
def test_the_core_reads_what_several_models_or_users_are_asked(
    server: clipper.ClipperServer, path: str
) -> None:
    """Their connections stay in the core, whoever schedules the queries."""
    with connect(server) as connection:
        for user in ("", ', "user": "ann"'):
            body = f'{{"input": [1, 2, 3]{user}}}'
            connection.sendall(request(f"/api/{path}/predict", body))
            assert b'"default":false' in responses(connection, 1)[0]
            assert open_connections(server) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_both_answer_alike(server: clipper.ClipperServer, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        make = some_request(rng)
        (plain,), (by_python,) = exchanged(server, make(False)), exchanged(server, make(True))
        assert normalized(plain) == normalized(by_python), make(False)


def test_cold_and_hot_alike(server: clipper.ClipperServer) -> None:
    """The first request is a cache miss, which is read by one parser; the next is a hit, read by
    the other."""
    for i in range(40):
        order = [bool(i % 2), not i % 2, bool(i % 2)]
        for path in ("/api/any/predict", "/api/sure/predict", "/any/predict"):
            numbers = [i + 100] * (2 if "sure" in path else 1)
            found = [
                exchanged(server, request(path, json.dumps({"input": numbers}), by_python))[0]
                for by_python in order
            ]
            assert len({normalized(one) for one in found}) == 1, found


@pytest.mark.parametrize(
    "path", ["/api/total/predict", "/total/predict", "/api/broken/predict", "/api/any/predict"]
)
def test_cut_at_every_byte(server: clipper.ClipperServer, path: str) -> None:
    body = '{"input": [1, 2, 3]}' if "total" in path else '{"input": [2]}'
    whole, wanted = (
        request(path, body),
        normalized(exchanged(server, request(path, body, by_python=True))[0]),
    )
    for cut in range(1, len(whole)):
        (found,) = exchanged(server, whole, cuts=lambda n, cut=cut: [cut])  # type: ignore[misc]  # a default that binds
        assert normalized(found) == wanted, cut


@pytest.mark.parametrize("seed", SEEDS)
def test_pipelined_and_cut_anywhere(server: clipper.ClipperServer, seed: int) -> None:
    """Pipelined requests are answered in order, more of them than may be open at once. The first
    malformed one is answered last."""
    rng = random.Random(100 + seed)
    for _ in range(25):
        requests = [some_request(rng) for _ in range(rng.randrange(1, 20))]
        if rng.random() < 0.3:
            requests.insert(rng.randrange(len(requests) + 1), lambda by_python: b"NONSENSE\r\n\r\n")
        cuts = lambda n: sorted(rng.sample(range(1, n), min(n - 1, rng.randrange(5))))  # noqa: E731
        plain = exchanged(server, *[make(False) for make in requests], cuts=cuts)
        by_python = exchanged(server, *[make(True) for make in requests])
        assert [normalized(one) for one in plain] == [normalized(one) for one in by_python]


def test_a_connection_goes_and_comes_back(server: clipper.ClipperServer) -> None:
    plain = request("/api/total/predict", '{"input": [1, 2, 3]}')
    with connect(server) as connection:
        for returns in range(3):
            connection.sendall(request("/api/total", "", method="GET"))
            assert b'"sum:1"' in responses(connection, 1)[0]
            assert reach_connections(server, 0)
            for _ in range(2 << returns):
                connection.sendall(plain)
                assert b'"output":6.0' in responses(connection, 1)[0]
            assert reach_connections(server, 1)
            connection.sendall(plain)
            assert b'"output":6.0' in responses(connection, 1)[0]
            assert reach_connections(server, 1)


def test_a_connection_that_went_before_comes_back_after_more_requests(
    server: clipper.ClipperServer,
) -> None:
    plain = request("/api/total/predict", '{"input": [1, 2, 3]}')
    with connect(server) as connection:
        for returns in range(3):
            connection.sendall(request("/api/total", "", method="GET"))
            assert b'"sum:1"' in responses(connection, 1)[0]
            for _ in range((2 << returns) - 1):
                connection.sendall(plain)
                assert b'"output":6.0' in responses(connection, 1)[0]
                assert reach_connections(server, 0)
            connection.sendall(plain)
            assert b'"output":6.0' in responses(connection, 1)[0]
            assert reach_connections(server, 1)


def counted_body(rng: random.Random, i: int, rows: int) -> tuple[str, str]:
    """Return the path and the body of a query of one row, or of an infer request."""
    row = [rng.random(), i, 2]
    if not rows:
        return "/api/counted/predict", json.dumps({"input": row})
    tensor = {"name": "x", "shape": [rows, 3], "datatype": "FP64", "data": row * rows}
    return "/v2/models/counted/infer", json.dumps({"inputs": [tensor]})


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("models", [["sum"], ["sum", "twice"]])
def test_what_is_counted_is_the_same(
    server: clipper.ClipperServer, models: list[str], rows: int
) -> None:
    server.app("counted", models=models, slo_ms=10_000, policy='static(weights={"sum": 2})')
    rng = random.Random(7)
    counts = []
    for by_python in (False, True):
        before = server.stats()["applications"]["counted"]
        for i in range(20):
            path, body = counted_body(rng, i, rows)
            (found,) = exchanged(server, request(path, body, by_python))
            assert found.startswith(b"HTTP/1.1 200")
        after = server.stats()["applications"]["counted"]
        of, was = after["models"]["sum:1"], before["models"].get("sum:1", {"used": 0, "wins": 0})
        counts.append(
            (
                after["queries"] - before["queries"],
                after["answers"]["ok"] - before["answers"]["ok"],
                of["used"] - was["used"],
                of["wins"] - was["wins"],
                after["decided_by"]["all"] - before["decided_by"].get("all", 0),
                after["latency_us"].count - before["latency_us"].count,
            )
        )
    assert counts[0] == counts[1]
    assert counts[0][:2] == (20 * max(rows, 1), 20 * max(rows, 1))


def test_feedback_and_ids(server: clipper.ClipperServer) -> None:
    """Ids of answers by the core and by Python are from one sequence of numbers, and none occurs
    twice."""
    ids = []
    for i in range(30):
        (found,) = exchanged(
            server, request("/api/total/predict", f'{{"input": [1, 2, {i % 3}]}}', bool(i % 2))
        )
        ids.append(json.loads(found.partition(b"\r\n\r\n")[2])["id"])
    nodes, numbers = (
        {id.partition("-")[0] for id in ids},
        [int(id.partition("-")[2], 16) for id in ids],
    )
    assert len(nodes) == 1
    assert len(set(numbers)) == 30


def test_a_change_is_seen_by_the_next_request(server: clipper.ClipperServer) -> None:
    with connect(server) as connection:
        for i in range(30):
            server.app("changing", models=["sum"] if i % 2 else ["twice"], slo_ms=10_000, default=i)
            connection.sendall(request("/api/changing/predict", '{"input": [1, 2, 5]}'))
            (found,) = responses(connection, 1)
            assert (b'"output":8.0' if i % 2 else b'"output":16.0') in found
        assert reach_connections(server, 1)
        server.remove_app("changing")
        connection.sendall(request("/api/changing/predict", '{"input": [1, 2, 5]}'))
        assert responses(connection, 1)[0].startswith(b"HTTP/1.1 404")


def test_too_many_connections_are_refused_wherever_they_are() -> None:
    with clipper.start(http={"address": "127.0.0.1:0", "connections_max": 4}, **QUICK) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=10_000)
        with contextlib.ExitStack() as connections:
            for by_python in (False, True, False, True):
                connection = connections.enter_context(connect(server))
                connection.sendall(request("/api/total/predict", '{"input": [1, 2, 3]}', by_python))
                assert responses(connection, 1)[0].startswith(b"HTTP/1.1 200")
            connection = connections.enter_context(connect(server))
            assert responses(connection, 1)[0].startswith(b"HTTP/1.1 503")


def test_timeouts_hold_in_the_core() -> None:
    http = {"address": "127.0.0.1:0", "header_s": 0.5, "idle_s": 0.6}
    with clipper.start(http=http, **QUICK) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=10_000)
        plain = request("/api/total/predict", '{"input": [1, 2, 3]}')
        # sent at once: on a busy machine the time of one that waits for its turn is over
        with connect(server) as idle:
            idle.sendall(plain)
            (answer,) = responses(idle, 2)
            assert answer.startswith(b"HTTP/1.1 200")
        for begun in (plain[:30], plain[:-3]):
            with connect(server) as connection:
                connection.sendall(plain + begun)
                answer, late = responses(connection, 2)
                assert answer.startswith(b"HTTP/1.1 200")
                assert late.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_share_the_connections(workers: int) -> None:
    with clipper.start(http={"address": "127.0.0.1:0", "workers": workers}, **QUICK) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=10_000)
        connections = [
            http.client.HTTPConnection(server.http_address, timeout=PATIENCE_S) for _ in range(9)
        ]

        def talk(connection: http.client.HTTPConnection, seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(30):
                row = [rng.randrange(5) for _ in range(3)]
                connection.request("POST", "/api/total/predict", json.dumps({"input": row}))
                assert json.loads(connection.getresponse().read())["output"] == sum(row)

        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            for done in [
                pool.submit(talk, connection, i) for i, connection in enumerate(connections)
            ]:
                done.result(PATIENCE_S)
        if workers:
            assert reach_connections(server, 9)
        for connection in connections:
            connection.close()
        assert ask(server.http_address, "GET", "/api/total").status == 200


def answered_by(server: clipper.ClipperServer, pattern: str) -> int:
    frontends: Any = server._endpoints.frontends
    return int(frontends._counts["address"].row("POST", pattern).codes().get(200, 0))


@pytest.mark.parametrize("by_python", [False, True])
def test_a_client_that_does_not_read_is_not_answered_on(
    server: clipper.ClipperServer, by_python: bool
) -> None:
    """64 KiB of requests for a cached answer of 500 kB: few of them are answered, and others are
    served meanwhile."""
    one = request("/api/big/predict", '{"input":[1]}', by_python)
    exchanged(server, one)
    before = answered_by(server, "/api/{}/predict")
    count = (64 << 10) // len(one)
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        connection.sendall(one * count)
        for _ in range(20):
            (reply,) = exchanged(
                server, request("/api/total/predict", '{"input":[1,2,3]}', by_python)
            )
            assert b'"output":6.0' in reply
        assert answered_by(server, "/api/{}/predict") - before <= 20 + 4 < count, (
            "neither here nor in the kernel"
        )
        received = 0
        while received < 64 * 500_000:
            chunk = connection.recv(1 << 20)
            assert chunk
            received += len(chunk)


@pytest.mark.parametrize("seed", SEEDS)
def test_large_answers_in_pieces_among_small_ones(server: clipper.ClipperServer, seed: int) -> None:
    """A client that reads varying amounts gets responses of every kind in order over one
    connection, equal to those of the path through Python."""
    rng = random.Random(seed)
    requests = []
    for _ in range(12):
        body = f'{{"input": [{rng.randrange(8)}]}}'
        tensor = {"name": "x", "shape": [1, 1], "datatype": "FP64", "data": [rng.randrange(8)]}
        binary = {"binary_data_output": rng.random() < 0.5}
        infer = json.dumps({"inputs": [tensor], "parameters": binary})
        requests.append(
            rng.choice(
                [
                    ("/api/kinds/predict", body),
                    ("/kinds/predict", body),
                    ("/v2/models/kinds/infer", infer),
                    ("/api/total/predict", '{"input": [1, 2, 3]}'),
                ]
            )
        )
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        connection.sendall(b"".join(request(*one) for one in requests))
        plain = responses(
            connection,
            len(requests),
            lambda: connection.recv(rng.choice([100, 5000, 1 << 14, 1 << 18])),
        )
    for one, found in zip(requests, plain, strict=True):
        (by_python,) = exchanged(server, request(*one, True))
        assert normalized(found) == normalized(by_python)


def test_clients_that_close_in_the_middle_of_a_large_answer_leave_nothing(
    server: clipper.ClipperServer,
) -> None:
    one, small = (request(f"/api/{name}/predict", '{"input":[1]}') for name in ("huge", "any"))
    exchanged(server, one)
    for _ in range(8):
        with connect(server) as connection:
            connection.sendall(one * 2 + small)
            assert connection.recv(20_000).startswith(b"HTTP/1.1 200 OK")
    assert reach_connections(server, 0)
    frontends: Any = server._endpoints.frontends
    table = frontends._listeners.hot._fast.table
    assert table.users == 1, "the thread's own"


def test_the_output_of_an_answer_that_nobody_takes_is_freed(server: clipper.ClipperServer) -> None:
    """Clients close in the middle of answers whose outputs, of 3.2 MB each, no cache keeps."""
    one, before = request("/api/fresh/predict", '{"input":[1]}'), 0
    for _ in range(2):  # the first time makes buffers that stay
        ctypes.CDLL(None).malloc_trim(0)
        before = memory_kib("VmRSS")
        for _ in range(8):
            with connect(server) as connection:
                connection.sendall(one)
                assert connection.recv(20_000).startswith(b"HTTP/1.1 200 OK")
        assert reach_connections(server, 0)
    ctypes.CDLL(None).malloc_trim(0)
    assert memory_kib("VmRSS") - before < 8 << 10


def memory_kib(connection: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{connection}:")[2].split()[0])


@pytest.mark.parametrize("by_python", [False, True])
def test_the_text_of_an_unread_answer_is_not_kept(
    server: clipper.ClipperServer, by_python: bool
) -> None:
    """Clients that read nothing of an answer of 2 MB; its text is made as they take it."""
    one = request("/api/huge/predict", '{"input":[1]}', by_python)
    exchanged(server, one)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(6)]
        ctypes.CDLL(None).malloc_trim(0)  # or what is free already would be used
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_kib("VmRSS")
        for connection in connections:
            connection.sendall(one * 2)
        for connection in connections:
            assert connection.recv(20).startswith(b"HTTP/1.1 200 OK")
        assert memory_kib("VmHWM") - before < 4 << 10
        (answer,) = exchanged(server, request("/api/total/predict", '{"input":[1,2,3]}', by_python))
        assert b'"output":6.0' in answer


def test_large_answers_of_many_new_clients_and_small_ones_beside_them(
    server: clipper.ClipperServer,
) -> None:
    """The large answers are made in pieces. All are complete, and other clients are served
    meanwhile."""
    requests = request("/api/big/predict", '{"input": [1.0]}')
    small = request("/api/total/predict", '{"input": [1, 2, 3]}')
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(12)]
        for connection in connections:
            connection.sendall(requests * 2)
        beside = stack.enter_context(connect(server))
        for _ in range(5):
            beside.sendall(small)
            (answer,) = responses(beside, 1)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b'"output":6' in answer
        for connection in connections:
            found = responses(connection, 2)
            assert len(found) == 2
            assert all(one.count(b"0.25") == 100_000 for one in found)


def some_label(rng: random.Random) -> str:
    return rng.choice(
        [
            *("6.0", "6", "-0", "-7.5e1", "1e999", "123456789012345678901", "012", "1.", "+1"),
            *('"a"', '""', '"caf\u00e9"', '"a\\"b"', '"a\tb"', '"a', "true", "false"),
            *("tru", "null", "[1, 2]", "{}", ""),
        ]
    )


def told(rng: random.Random) -> tuple[str, str]:
    """Return an application, and the body of feedback about an answer of it, `ID`."""
    id = rng.choice(['"ID"'] * 6 + ['"no id"', '""', '"00000000-1"', '"I\\u0044"', "7", '"ID\n"'])
    label = "6.0" if rng.random() < 0.5 else some_label(rng)
    members = [f'"id": {id}', f'"label": {label}']
    more = rng.choice(
        ["", "", "", '"user": "ann"', '"weight": 2', '"score": 1', '"x": 1', members[0], members[1]]
    )
    members += [more] if more else []
    rng.shuffle(members)
    body = "{" + rng.choice([", ", ",", " ,\n"]).join(members) + "}"
    return rng.choice(["total", "any", "ensemble", "mixture", "learns", "nobody"]), body


def new_answer(server: clipper.ClipperServer, application: str) -> str:
    numbers = 1 if application == "any" else 3
    app = "total" if application == "nobody" else application
    body = json.dumps({"input": [3.0] * numbers})
    (found,) = exchanged(server, request(f"/api/{app}/predict", body))
    return str(json.loads(found.partition(b"\r\n\r\n")[2])["id"])


@pytest.mark.parametrize("seed", SEEDS)
def test_feedback_alike(server: clipper.ClipperServer, seed: int) -> None:
    """The same label of two answers; each is sent again, when it does not count any more."""
    rng = random.Random(700 + seed)
    for _ in range(60):
        application, body = told(rng)
        found = []
        for by_python in (False, True):
            id = new_answer(server, application)
            ask = request(f"/api/{application}/feedback", body.replace("ID", id), by_python)
            twice = exchanged(server, ask) + exchanged(server, ask)
            # where the text is wrong depends on the length of the id
            told_of = [normalized(one).replace(id.encode(), b"ID") for one in twice]
            found.append([re.sub(rb"byte \d+", b"byte N", one) for one in told_of])
        assert found[0] == found[1], (application, body)


def test_feedback_pipelined_and_cut_anywhere(server: clipper.ClipperServer) -> None:
    rng = random.Random(800)
    for _ in range(10):
        bodies = [
            json.dumps({"id": new_answer(server, "ensemble"), "label": 6.0}) for _ in range(6)
        ]
        asks = [request("/api/ensemble/feedback", body) for body in bodies * 2]
        cuts = lambda n: sorted(rng.sample(range(1, n), 5))  # noqa: E731
        found = exchanged(server, *asks, cuts=cuts)
        counted = [one.endswith(b'{"counted":true}') for one in found]
        both = zip(counted[:6], counted[6:], strict=True)
        assert [first + again for first, again in both] == [1] * 6


def test_feedback_stays_with_the_core(server: clipper.ClipperServer) -> None:
    assert reach_connections(server, 0)
    with connect(server) as connection:
        for application in ("total", "ensemble", "mixture", "any"):
            for id in (new_answer(server, application), "00000000-9"):
                body = json.dumps({"id": id, "label": 6.0})
                connection.sendall(request(f"/api/{application}/feedback", body))
                assert responses(connection, 1)
                assert open_connections(server) == 1
