"""Requests with an id, a trace, a user, an SLO or a salt, on the HTTP path without the GIL.

Each request goes twice, as in test_core_http: plain, and with a header that makes it Python's; the
responses are the same but for the ids that are made up.
"""

import json
import logging
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import clipper
from clipper.frontend.tracing.context import trace_of
from clipper_core.http.trace_parent import answered
from tests.frontend.conftest import PATIENCE_S, QUICK, total, warm_workers
from tests.frontend.test_core_http import (
    broken,
    connect,
    exchanged,
    normalized,
    open_connections,
    reach_connections,
    request,
    responses,
    sure,
)

SEEDS = range(4)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-00"
SLO_MS = 10_000
INFER = '{"inputs": [{"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}]}'


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(http={"address": "127.0.0.1:0"}, **QUICK) as started:
        started.deploy("sum", total, input="f64[3]")
        started.deploy("fresh", total, input="f64[3]", cache=False)
        started.deploy("sure", sure, input="f32[2]")
        started.deploy("broken", broken, input="f64[1]")
        for name in ("fresh", "broken"):
            started.app(name, models=[name], slo_ms=SLO_MS)
        started.app("total", models=["sum"], slo_ms=SLO_MS)
        started.app("sure", models=["sure"], slo_ms=SLO_MS, confidence_min=0.4, default=-1)
        started.app("learns", models=["sum"], slo_ms=SLO_MS, policy="stacking")
        started._learning.states.start_writing()
        warm_workers(started)
        yield started


def same(response: bytes) -> bytes:
    """Return a response without what differs from call to call."""
    return re.sub(rb"(traceparent: 00-\w+-)[0-9a-f]{16}-", rb"\1SPAN-", normalized(response))


TRACES = [
    PARENT,
    PARENT[:-2] + "01",
    PARENT[:-2] + "ff",
    PARENT[:-2] + "02",
    "cc" + PARENT[2:],
    "cc" + PARENT[2:] + "-more",
    "cc" + PARENT[2:] + "-",
    "cc" + PARENT[2:] + ".",
    PARENT + "-more",
    PARENT + "0",
    "ff" + PARENT[2:],
    "fe" + PARENT[2:],
    PARENT.upper(),
    PARENT[:-1],
    PARENT[:-1] + "g",
    PARENT.replace(TRACE, "0" * 32),
    PARENT.replace(SPAN, "0" * 16),
    PARENT.replace("-", "_"),
    PARENT + ", " + PARENT,
    "",
]
HEADERS = {
    "Traceparent": TRACES,
    "Tracestate": ["a=b", "a=b,c=d"],
    "X-Request-Id": ["mine-7", "two words", "i" * 128, "i" * 129, 'a"b'],
    "Clipper-Deadline-Ms": [
        *("9000", "9000.5", "1e4", "09000", "+9000", "9_000", "0", "-1", "", "nan", "inf", "soon"),
        *("1e999", "60001", "0x10", "9000 ", "9000,5"),
    ],
    "Accept": ["*/*", "application/json;q=0.9", "text/html, */*", "text/event-stream", ""],
    "User-Agent": ["curl/8"],
}
MEMBERS = {
    "user": [
        *(
            '"ann"',
            '""',
            '"b\\u0062"',
            '"caf\u00e9"',
            "null",
            "7",
            f'"{"u" * 64}"',
            f'"{"u" * 65}"',
        ),
        *(f'"{"u" * 513}"', '"a b"', '"a\\"b"', '"', '"\u007f"'),
    ],
    "slo_ms": [
        "9000",
        "9000.5",
        "1e4",
        "0",
        "-1",
        "1e99",
        "null",
        '"5"',
        "true",
        "60001",
        "09",
        "",
    ],
    "salt": ["0", "7", "7.0", "1e3", "-1", "7.5", str(2**63 - 1), str(2**63), "null", "07", "-0"],
    "priority": ["1", "2", "3", "0", "4", "-1", "1.0", '"1"', "null"],
    "context": ["[1.0]", "null"],
    "unknown": ["1"],
}
PARAMETERS = {
    "binary_data_output": ["true", "false", "1"],
    "timeout": ["9000000", "9000001", "0", "-1", "60000001", '"9000000"', "9e6", "true", "null"],
    "user": MEMBERS["user"],
    "salt": ["7", "0", '"7"', "-1", "7.0", "null"],
    "priority": ["1", "2", "3", "0", "4", "-1", "1.0", '"1"', "null"],
}


def some_request(rng: random.Random) -> tuple[str, str, str]:
    """Return the path, the body and lines of headers of a request."""
    lines = "".join(
        f"{rng.choice([name, name.lower()])}: {rng.choice(values)}\r\n"
        for name, values in HEADERS.items()
        if rng.random() < 0.3
    )
    path, numbers = rng.choice(
        [
            *[("/api/total/predict", 3), ("/api/fresh/predict", 3), ("/api/sure/predict", 2)],
            *[("/total/predict", 3), ("/api/broken/predict", 1), ("/api/learns/predict", 3)],
            ("/v2/models/total/infer", 3),
        ]
    )
    if path.startswith("/v2"):
        parameters = [
            f'"{name}": {rng.choice(values[:2] if rng.random() < 0.5 else values)}'
            for name, values in PARAMETERS.items()
            if rng.random() < 0.3
        ]
        said = f', "parameters": {{{", ".join(parameters)}}}}}'
        return path, (INFER[:-1] + said if rng.random() < 0.8 else INFER), lines
    row = [rng.randrange(9) for _ in range(numbers)]
    members = [f'"input": {json.dumps(row)}']
    for name, values in MEMBERS.items():
        if rng.random() < 0.25:
            some = values[:2] if rng.random() < 0.5 else values
            members.append(f'"{name}": {rng.choice(some)}')
    if rng.random() < 0.05:
        members.append(rng.choice(members))
    rng.shuffle(members)
    return path, "{" + rng.choice([", ", ",", "\n,"]).join(members) + "}", lines


@pytest.mark.parametrize("seed", SEEDS)
def test_every_combination_is_answered_alike(server: clipper.ClipperServer, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(250):
        path, body, lines = some_request(rng)
        plain, by_python = (
            exchanged(server, request(path, body, by_python, lines))[0]
            for by_python in (False, True)
        )
        assert same(plain) == same(by_python), (path, body, lines)


@pytest.mark.parametrize("value", TRACES)
def test_traces_are_read_as_python_reads_them(value: str) -> None:
    trace = trace_of(value.encode())
    found = answered(value.encode(), 0xABC)
    assert (found is None) == (trace is None)
    if trace is not None and found is not None:
        assert found.decode() == trace.header.decode().replace(trace.span_id, f"{0xABC:016x}")


def is_answered_by_the_core(
    server: clipper.ClipperServer, path: str, body: str, lines: str = ""
) -> bool:
    """Return whether a request, which is answered by 200, stays with the core."""
    assert reach_connections(server, 0)
    with connect(server) as connection:
        connection.sendall(request(path, body, more=lines))
        (found,) = responses(connection, 1)
        assert found.startswith(b"HTTP/1.1 200"), found
        return open_connections(server) == 1


@pytest.mark.parametrize(
    "lines",
    [
        f"Traceparent: {PARENT}\r\n",
        f"Traceparent: {PARENT[:-1]}1\r\n",
        "X-Request-Id: mine\r\n",
        "Accept: text/html, */*;q=0.1\r\n",
        f"Traceparent: {PARENT}\r\nX-Request-Id: mine\r\nClipper-Deadline-Ms: {SLO_MS}\r\n",
    ],
)
def test_headers_stay_with_the_core(server: clipper.ClipperServer, lines: str) -> None:
    for path in ("/api/total/predict", "/total/predict"):
        assert is_answered_by_the_core(server, path, '{"input": [1, 2, 3]}', lines)
    said = f'{INFER[:-1]}, "parameters": {{"timeout": {SLO_MS * 1000}, "user": "ann", "salt": 3}}}}'
    for body in (INFER, said):
        assert is_answered_by_the_core(server, "/v2/models/total/infer", body, lines)


@pytest.mark.parametrize(
    "members", ['"user": "ann"', f'"slo_ms": {SLO_MS}', '"salt": 7', '"salt": 8, "user": ""']
)
@pytest.mark.parametrize("application", ["total", "fresh"])
def test_members_stay_with_the_core(
    server: clipper.ClipperServer, application: str, members: str
) -> None:
    path = f"/api/{application}/predict"
    assert is_answered_by_the_core(server, path, f'{{"input": [1, 2, 3], {members}}}')
    assert is_answered_by_the_core(server, path, f'{{{members}, "input": [3, 2, 1]}}')


def test_an_slo_of_a_new_class_is_pythons_once(server: clipper.ClipperServer) -> None:
    """Python makes the queue of the class, with the GIL; the core knows it soon after."""
    body = '{"input": [1, 2, 3], "slo_ms": 2000}'
    assert not is_answered_by_the_core(server, "/api/fresh/predict", body)
    until = time.monotonic() + PATIENCE_S
    while not is_answered_by_the_core(server, "/api/fresh/predict", body):
        assert time.monotonic() < until
        threading.Event().wait(0.01)


def test_a_deadline_that_passes_gives_the_default(server: clipper.ClipperServer) -> None:
    """The SLO that counts is the query's own, not the application's of ten seconds."""
    server.deploy("slow", slow_total, input="f64[3]", cache=False)
    server.app("slow", models=["slow"], slo_ms=SLO_MS, default=-7.0)
    for _ in range(3):
        (found,) = exchanged(
            server, request("/api/slow/predict", '{"input": [1, 2, 3], "slo_ms": 1}')
        )
        assert b'"output":-7.0' in found
        assert b'"default":true' in found


def slow_total(rows: Any) -> Any:
    time.sleep(0.2)
    return total(rows)


def test_salts_have_entries_of_their_own(server: clipper.ClipperServer) -> None:
    def took_us(salt: int, by_python: bool) -> int:
        body = f'{{"input": [4, 4, 4], "salt": {salt}}}'
        (found,) = exchanged(server, request("/api/total/predict", body, by_python))
        return int(found.partition(b'"latency_us":')[2].rstrip(b"}"))

    for salt, by_python in ((71, False), (72, True)):
        assert took_us(salt, by_python) > 0, "it was not asked before"
        assert took_us(salt, False) == took_us(salt, True) == 0, "both find the same entry"


@pytest.mark.parametrize("user", ["", "a", "ann@host", "u" * 8, "u" * 63, "u" * 64])
def test_feedback_knows_the_user(server: clipper.ClipperServer, user: str) -> None:
    body = json.dumps({"input": [1, 2, 3], "user": user})
    (found,) = exchanged(server, request("/api/total/predict", body))
    id = json.loads(found.partition(b"\r\n\r\n")[2])["id"]
    resolved: Any = server._endpoints.frontends._node.resolve("total")  # type: ignore[attr-defined]  # the server's own
    assert resolved.feedback.window.table.get(id).user == user
    (told,) = exchanged(
        server, request("/api/total/feedback", json.dumps({"id": id, "label": 6.0}))
    )
    assert b'{"counted":true}' in told


def test_a_request_that_its_caller_records_is_logged(
    server: clipper.ClipperServer, caplog: pytest.LogCaptureFixture
) -> None:
    lines = f"Traceparent: {PARENT[:-1]}1\r\nX-Request-Id: mine\r\n"
    ask = ("/api/total/predict", '{"input": [1, 2, 3]}', lines)
    assert is_answered_by_the_core(server, *ask)
    assert not caplog.records
    with caplog.at_level(logging.INFO, "clipper.requests"):
        until = time.monotonic() + PATIENCE_S
        while is_answered_by_the_core(server, *ask):
            assert time.monotonic() < until
            threading.Event().wait(0.01)
        record: Any = caplog.records[-1]
        assert (record.request_id, record.trace_id) == ("mine", TRACE)
        unrecorded = f"Traceparent: {PARENT}\r\n"
        assert is_answered_by_the_core(server, ask[0], ask[1], unrecorded)
