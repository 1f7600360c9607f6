"""Requests over HTTP/2 that the core answers: the responses that Python gives to the same requests
over HTTP/1.1, and what becomes of connections, large answers and clients that leave."""

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clipper
from clipper.credentials.credential_file import line_of, new_key
from clipper.credentials.key_limits import KeyLimits
from tests.core.test_http2_protocol import frames_of
from tests.frontend.conftest import PATIENCE_S
from tests.frontend.test_core_http import (
    exchanged,
    normalized,
    open_connections,
    reach_connections,
    request,
    server,
    some_infer,
    some_request,
    started,
    trusted,
)
from tests.frontend.test_http2 import Line
from tests.memory_container import wait_until

__all__ = ["server"]  # a fixture
ROW = {"input": [1, 2, 3]}
KEPT = ("content-type", "x-request-id", "inference-header-content-length", "retry-after")
GOAWAY = 7  # the type of a frame


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture
def line(server: clipper.ClipperServer) -> Iterator[Line]:
    assert reach_connections(server, 0)
    with Line(server.http_address, trusted.get(server.http_address)) as line:
        yield line


@pytest.fixture
def stuck(server: clipper.ClipperServer, gates: Path) -> Iterator[Path]:
    """Yield a file: queries to `stuck` and `both` are answered once it exists."""
    gate = gates / str(time.monotonic_ns())

    def waiting(rows: Any) -> Any:
        while not gate.exists():
            time.sleep(0.005)
        return rows[:, 0]

    for name in ("stuck1", "stuck2"):
        server.deploy(name, waiting, input="f64[3]", cache=False)
    server.app("stuck", models=["stuck1"], slo_ms=60_000)
    server.app("both", models=["stuck1", "stuck2"], slo_ms=60_000)
    yield gate
    gate.touch()
    for name in ("stuck", "both"):
        server.remove_app(name)
    for name in ("stuck1", "stuck2"):
        server.retire(name, force=True)


def outside(server: clipper.ClipperServer) -> int:
    """Return the number of connections that Python has."""
    frontends: Any = server._endpoints.frontends
    return int(frontends._listeners.hot.core_server.outside)


def over_http2(line: Line, text: bytes) -> int:
    """Send a request of HTTP/1.1 on a stream; return its number."""
    head, _, body = text.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "a")]
    for one in rest:
        name, _, value = one.partition(": ")
        if name != "Host":
            fields.append((name.lower(), value))
    h2 = line.client.h2
    stream = int(h2.get_next_available_stream_id())
    h2.send_headers(stream, fields, end_stream=not body)
    if body:
        h2.send_data(stream, body, end_stream=True)
    line.client.flush()
    return stream


def found_on(line: Line, stream: int) -> bytes:
    """Return the response on a stream as one of HTTP/1.1, without what differs from call to call
    and between the protocols."""
    status, fields, body = line.client.replies[stream]
    kept = "".join(f"{name}: {fields[name]}\r\n" for name in KEPT if name in fields)
    return normalized(f"{status}\r\n{kept}\r\n".encode() + body)


def as_python(server: clipper.ClipperServer, text: bytes) -> bytes:
    """Return the same of Python's response over HTTP/1.1."""
    (found,) = exchanged(server, text)
    head, _, body = found.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    fields = dict(one.split(": ", 1) for one in rest)
    kept = "".join(f"{name}: {fields[name]}\r\n" for name in KEPT if name in fields)
    return normalized(f"{first.split(' ')[1]}\r\n{kept}\r\n".encode() + body)


@pytest.mark.parametrize("seed", range(3))
def test_the_core_answers_as_python_over_http_1(server: clipper.ClipperServer, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        make = rng.choice((some_request, some_infer))(rng)
        if not make(False).startswith(b"POST"):
            continue
        with Line(server.http_address, trusted.get(server.http_address)) as line:
            stream = over_http2(line, make(False))
            line.wait(stream)
            assert found_on(line, stream) == as_python(server, make(True)), make(False)


def replied(line: Line, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    """Send a request in one piece; return the status and the body of its response."""
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    stream = over_http2(line, request(path, json.dumps(body), more=more))
    line.wait(stream)
    status, _, text = line.client.replies[stream]
    return status, text


def tensor(rows: int) -> dict[str, Any]:
    numbers = [1.0, 2.0, 3.0] * rows
    return {"inputs": [{"name": "x", "shape": [rows, 3], "datatype": "FP64", "data": numbers}]}


def test_plain_requests_stay_in_the_core(server: clipper.ClipperServer, line: Line) -> None:
    for name in ("total", "ensemble", "mixture", "learns", "half", "unsure"):
        status, text = replied(line, f"/api/{name}/predict", ROW)
        assert (status, open_connections(server)) == (200, 1)
        told = {"id": json.loads(text)["id"], "label": 6.0}
        assert replied(line, f"/api/{name}/feedback", told) == (200, b'{"counted":true}')
    for rows in (1, 2, 32):
        _, text = replied(line, "/v2/models/total/infer", tensor(rows))
        assert json.loads(text)["outputs"][0]["data"] == [6.0] * rows
    assert replied(line, "/api/none/predict", ROW)[0] == 500
    assert (open_connections(server), outside(server)) == (1, 0)


def test_heads_first_and_bodies_then(server: clipper.ClipperServer, line: Line) -> None:
    h2 = line.client.h2
    streams = [int(h2.get_next_available_stream_id()) + 2 * i for i in range(8)]
    fields = [(":method", "POST"), (":scheme", "http"), (":authority", "a")]
    fields += [(":path", "/api/total/predict"), ("content-length", "20")]
    for stream in streams:
        h2.send_headers(stream, fields)
    for i, stream in enumerate(streams):
        h2.send_data(stream, b'{"input": [%d, 2, 3]}' % i, end_stream=True)
    line.client.flush()
    line.wait(*streams)
    for i, stream in enumerate(streams):
        assert json.loads(line.client.replies[stream][2])["output"] == i + 5.0
    assert (open_connections(server), outside(server)) == (1, 0)


def test_a_body_may_come_after_its_head(server: clipper.ClipperServer, line: Line) -> None:
    """One that does not become complete is Python's, which knows how slow it may be."""
    h2 = line.client.h2
    fields = [(":method", "POST"), (":scheme", "http"), (":authority", "a")]
    h2.send_headers(1, [*fields, (":path", "/api/total/predict"), ("content-length", "20")])
    h2.send_data(1, b'{"input": [4, 2')
    line.client.flush()
    wait_until(lambda: outside(server) == 1, "Python has it")
    h2.send_data(1, b", 3]}", end_stream=True)
    line.client.flush()
    line.wait(1)
    assert json.loads(line.client.replies[1][2])["output"] == 9.0


@pytest.mark.parametrize("seed", range(2))
def test_large_answers_among_small_ones(
    server: clipper.ClipperServer, line: Line, seed: int
) -> None:
    """Streams take turns; a client whose windows are small gets all."""
    rng = random.Random(seed)
    line.client.h2.update_settings({4: rng.choice((20_000, 1 << 20))})  # INITIAL_WINDOW_SIZE
    line.client.flush()
    sent: dict[int, tuple[str, str]] = {}
    for _ in range(4):
        asked = []
        for _ in range(8):
            body = f'{{"input": [{rng.randrange(8)}]}}'
            one = rng.choice([("/api/kinds/predict", body), ("/kinds/predict", body),
                              ("/api/big/predict", body)])  # fmt: skip
            asked.append(over_http2(line, request(*one)))
            sent[asked[-1]] = one
        line.wait(*asked)
    assert (open_connections(server), outside(server)) == (1, 0)
    for stream, one in sent.items():
        assert found_on(line, stream) == as_python(server, request(*one, True))


def test_a_client_that_does_not_read_is_not_answered_on(
    server: clipper.ClipperServer, line: Line
) -> None:
    """Large answers of which the client takes nothing; others are answered beside them."""
    line.client.h2.update_settings({4: 0})
    line.client.flush()
    large = [over_http2(line, request("/api/big/predict", '{"input":[1]}')) for _ in range(3)]
    small = over_http2(line, request("/api/total/predict", json.dumps(ROW)))
    line.client.h2.increment_flow_control_window(1 << 16, small)
    line.client.flush()
    line.wait(small)
    for _ in range(10):
        (reply,) = exchanged(server, request("/api/total/predict", json.dumps(ROW)))
        assert b'"output":6.0' in reply
    assert reach_connections(server, 1)
    for stream in large:
        line.client.h2.increment_flow_control_window(1 << 24, stream)
    line.client.flush()
    line.wait(*large)
    for stream in large:
        assert len(json.loads(line.client.replies[stream][2])["output"]) == 100_000
    assert (open_connections(server), outside(server)) == (1, 0)


def test_clients_that_leave_in_the_middle_leave_nothing(
    server: clipper.ClipperServer, stuck: Path
) -> None:
    for i in range(4):
        with Line(server.http_address, trusted.get(server.http_address)) as line:
            if i % 2:  # nothing of an answer can leave
                line.client.h2.update_settings({4: 0})
                line.client.flush()
            for path in ("huge", "stuck", "both", "huge"):
                row = "[1]" if path == "huge" else "[1, 2, 3]"
                over_http2(line, request(f"/api/{path}/predict", f'{{"input": {row}}}'))
            first = over_http2(line, request("/api/huge/predict", '{"input":[1]}'))
            line.client.h2.reset_stream(first, 8)
            line.client.flush()
            assert line.socket.recv(20_000)
    assert reach_connections(server, 0)
    frontends: Any = server._endpoints.frontends
    hot = frontends._listeners.hot
    wait_until(lambda: not hot._scheduled, "their queries are cancelled")
    wait_until(lambda: hot._fast.table.users == 1, "only the thread uses the table")


def test_a_reset_cancels_a_query(server: clipper.ClipperServer, line: Line, stuck: Path) -> None:
    frontends: Any = server._endpoints.frontends
    scheduled = frontends._listeners.hot._scheduled
    streams = [
        over_http2(line, request(f"/api/{name}/predict", json.dumps(ROW)))
        for name in ("stuck", "both")
    ]
    wait_until(lambda: len(scheduled) == 1, "the one of two models is with Python")
    for stream in streams:
        line.client.h2.reset_stream(stream, 8)
    line.client.flush()
    wait_until(lambda: not scheduled, "it is cancelled")
    stuck.touch()
    assert replied(line, "/api/total/predict", ROW)[0] == 200
    assert open_connections(server) == 1


def test_a_request_that_is_reset_at_once_is_forgotten(
    server: clipper.ClipperServer, line: Line
) -> None:
    h2 = line.client.h2
    fields = [(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/api")]
    h2.send_headers(1, fields)
    h2.send_data(1, b"abc")
    h2.reset_stream(1, 8)
    assert replied(line, "/api/total/predict", ROW)[0] == 200
    assert (open_connections(server), outside(server)) == (1, 0)


def test_queries_go_along_to_python(server: clipper.ClipperServer, line: Line, stuck: Path) -> None:
    """Queries go that wait in the core, and that Python has; one of each is reset there."""
    names = ("stuck", "both", "stuck", "both")
    streams = [over_http2(line, request(f"/api/{name}/predict", json.dumps(ROW))) for name in names]
    frontends: Any = server._endpoints.frontends
    hot = frontends._listeners.hot
    wait_until(lambda: len(hot._scheduled) == 2, "the queries are under way")
    assert open_connections(server) == 1
    assert line.ask("GET", "/api/total").status == 200
    assert (open_connections(server), outside(server)) == (0, 1)
    for stream in streams[2:]:
        line.client.h2.reset_stream(stream, 8)
    line.client.flush()
    wait_until(lambda: len(hot._scheduled) == 2, "two are cancelled")
    stuck.touch()
    line.wait(*streams[:2])
    for stream in streams[:2]:
        assert json.loads(line.client.replies[stream][2])["output"] == 1.0
    wait_until(lambda: not (hot._scheduled or hot._service.moved), "nothing is left")


def test_a_connection_comes_back(server: clipper.ClipperServer, line: Line) -> None:
    for returns in range(3):
        assert line.ask("GET", "/api/total").status == 200
        assert reach_connections(server, 0)
        for i in range(2 << returns):
            row = {"input": [returns, i, time.monotonic()]}  # hits, and misses
            assert line.ask("POST", "/api/total/predict", row).status == 200
        assert reach_connections(server, 1)
        assert replied(line, "/api/total/predict", ROW)[0] == 200
        assert open_connections(server) == 1


def test_a_server_that_closes_answers_first(gates: Path) -> None:
    gate = gates / "closing"

    def waiting(rows: Any) -> Any:
        while not gate.exists():
            time.sleep(0.005)
        return rows[:, 0]

    with started({"address": "127.0.0.1:0"}) as server:
        server.deploy("waiting", waiting, input="f64[3]", cache=False)
        server.app("waiting", models=["waiting"], slo_ms=60_000)
        with Line(server.http_address) as line:
            over_http2(line, request("/api/waiting/predict", json.dumps(ROW)))
            wait_until(lambda: server.stats()["applications"]["waiting"]["queries"] == 1, "asked")
            assert open_connections(server) == 1
            closing = threading.Thread(target=server.close)
            closing.start()
            data = line.socket.recv(1 << 16)
            while GOAWAY not in [kind for kind, *_ in frames_of(data)]:
                data += line.socket.recv(1 << 16)
            gate.touch()
            while piece := line.socket.recv(1 << 16):
                data += piece
            assert b'"output":1.0' in data
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def test_keys_are_looked_at_in_the_core(tmp_path: Path) -> None:
    key, other = new_key(), new_key()
    lines = [
        line_of("mine", key, "", KeyLimits.of("", ["total"])),
        line_of("other", other, "", KeyLimits.of("2/h")),
    ]
    (tmp_path / "keys").write_text("\n".join(lines) + "\n")
    http = {"address": "127.0.0.1:0", "api_keys_file": str(tmp_path / "keys")}
    with started(http) as server, Line(server.http_address) as line:
        mine = f"Bearer {key}"
        assert replied(line, "/api/total/predict", ROW, Authorization=mine)[0] == 200
        assert replied(line, "/api/single/predict", ROW, Authorization=mine)[0] == 403
        limited = f"Bearer {other}"
        found = [replied(line, "/api/total/predict", ROW, Authorization=limited) for _ in range(4)]
        assert [status for status, _ in found] == [200, 200, 429, 429]
        assert (open_connections(server), outside(server)) == (1, 0)
        assert replied(line, "/api/total/predict", ROW)[0] == 401
