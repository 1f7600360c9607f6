"""Load tests against a small fake server: latency counts from when a query was due, and no query is
lost."""

import asyncio
import contextlib
import http.server
import itertools
import json
import math
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clipper.errors import ClipperError, InvalidInput, NoServer
from clipper.load import page
from clipper.load.chart import Axis, Chart, Series
from clipper.load.http_target import HttpTarget, _HttpConnection
from clipper.load.inputs import rows_of
from clipper.load.measurement import Measurement, QueryOutcome, quantile
from clipper.load.open_loop import arrivals, evenly, send_on_time
from clipper.load.runs import RunPlan, bisected, offer, sweep
from clipper.types import InputType
from tests.frontend.conftest import FakeTransport
from tests.threads import join

ANSWER = {"id": "1", "output": 1, "default": False, "missing": [], "reason": ""}
# number, body -> status and body; None: hang up
Reply = Callable[[int, dict[str, Any]], tuple[int, Any] | None]


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # connections at once

    def __init__(self, reply: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.numbers, self.lock = reply, itertools.count(), threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            number = next(self.server.numbers)
        reply = self.server.reply(number, body)
        if reply is None:
            self.close_connection = True
            return
        text = json.dumps(reply[1]).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(reply[0])
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(reply: Reply) -> Iterator[str]:
    """Serve HTTP on threads; yield the URL of its application."""
    with Server(reply) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/api/app/predict"
        finally:
            server.shutdown()
            join(thread)


def run(url: str, rate: float = 200, seconds: float = 0.2, **plan: Any) -> Measurement:
    def target() -> HttpTarget:
        return HttpTarget(url, [[1.0]], 8)

    return offer(target, RunPlan(seconds, 1000, **plan), rate, lambda measured, elapsed_s: None)


# -- pace


def test_pace_calls_each_due_once_in_order_and_never_early() -> None:
    sent: list[tuple[float, float]] = []

    async def main() -> None:
        dues = (time.perf_counter() + arrivals(2000, 0.1, 3)).tolist()
        await send_on_time(
            iter(dues), lambda due: sent.append((due, time.perf_counter())), asyncio.Event()
        )
        assert [due for due, _ in sent] == dues

    asyncio.run(main())
    assert all(at >= due - 1e-4 for due, at in sent)


def test_pace_ends_on_request_and_passes_on_what_is_raised() -> None:
    async def main() -> None:
        stopping = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, stopping.set)
        await send_on_time(iter([time.perf_counter() + 3600]), lambda due: None, stopping)
        await send_on_time(iter([]), lambda due: None, asyncio.Event())
        with pytest.raises(ZeroDivisionError):
            await send_on_time(iter([0.0]), lambda due: 1 / 0, asyncio.Event())  # type: ignore[arg-type,func-returns-value,return-value]

    asyncio.run(main())


def test_even_arrivals() -> None:
    assert evenly(10, 0.5).tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


# -- outcomes


def test_every_query_is_counted_once_under_what_became_of_it() -> None:
    kinds = {
        0: (200, ANSWER),
        1: (200, ANSWER),
        2: (200, {**ANSWER, "missing": ["a:1"]}),
        3: (200, {**ANSWER, "default": True}),
        4: (429, {"detail": "full"}),
        5: (503, {"detail": "closing"}),
        6: (500, {"detail": "broken"}),
        7: (200, [1]),
        8: None,
    }
    with serving(lambda number, body: kinds.get(number, (200, ANSWER))) as url:
        measured = run(url, rate=300)
    counts = measured.counts()
    assert sum(counts.values()) == measured.total > 20
    assert {
        kind: counts[kind] for kind in ("missing", "default", "refused", "error", "unanswered")
    } == {"missing": 1, "default": 1, "refused": 2, "error": 3, "unanswered": 0}
    assert measured.errors == {
        "429 full": 1,
        "503 closing": 1,
        "500 broken": 1,
        "200 without the members of an answer": 1,
        "the connection was lost": 1,
    }
    assert len(measured.answers_ms()) == counts["ok"] + 2
    assert np.isfinite(measured.strict_ms()).sum() == counts["ok"] + 1
    assert json.loads(json.dumps(measured.summary()))["outcomes"] == counts


RESPONSES = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;a=b\r\n}\r\n0\r\n\r\n",
    b'HTTP/1.1 503 No\r\nContent-Length: 14\r\nConnection: close\r\n\r\n{"detail":"x"}',
)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_responses_are_read_however_their_bytes_are_cut(size: int) -> None:
    answered: list[tuple[int, int, bytes]] = []

    class Target:
        def connected(self, connection: Any) -> None:
            self.free = 0

        def released(self, connection: Any) -> None:
            self.free += 1

        def answered(self, number: int, status: int, body: bytes) -> None:
            answered.append((number, status, body))

    class Transport(FakeTransport):
        def write(self, data: bytes) -> None:
            pass

    target, transport = Target(), Transport()
    connection = _HttpConnection(target)  # type: ignore[arg-type]
    connection.connection_made(transport)  # type: ignore[arg-type]
    for number, response in enumerate(RESPONSES):
        connection.send(number, b"")
        for at in range(0, len(response), size):
            connection.data_received(response[at : at + size])
    assert answered == [(0, 200, b"{}"), (1, 200, b"{}"), (2, 503, b'{"detail":"x"}')]
    assert (target.free, transport.closed) == (2, True)


@pytest.mark.parametrize("response", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nDate: x\r\n\r\n"])
def test_a_response_that_is_none_ends_its_connection(response: bytes) -> None:
    transport = FakeTransport()
    connection = _HttpConnection(SimpleNamespace(connected=lambda connection: None))  # type: ignore[arg-type]
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.data_received(response)
    assert transport.aborted


def test_each_query_is_new_to_a_cache() -> None:
    salts: list[Any] = []

    def reply(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        salts.append(body.get("salt"))
        return 200, ANSWER

    with serving(reply) as url:
        measured = run(url)
    assert len(set(salts[1:])) == measured.total


def test_latency_counts_from_when_a_query_was_due() -> None:
    """There is one connection, and a server that takes 20 ms: the time that a query waits for the
    connection counts."""

    def reply(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.02)
        return 200, ANSWER

    with serving(reply) as url:
        measured = offer(
            lambda: HttpTarget(url, [1], 1), RunPlan(0.1, 1000, steady=True), 100, lambda *_: None
        )
    latency = measured.latency_ms
    assert measured.counts()["ok"] == measured.total == 10
    assert (
        np.diff(latency) > 5
    ).all()  # each waited for all before it: closed loop would say 20 ms for all
    assert measured.waited >= 8


def test_queries_that_are_never_answered_are_counted() -> None:
    gate = threading.Event()

    def reply(number: int, body: dict[str, Any]) -> tuple[int, Any] | None:
        if number > 3:
            gate.wait(30)
        return 200, ANSWER

    with serving(reply) as url:
        try:
            measured = run(url, patience_s=1.0)
        finally:
            gate.set()
    assert measured.counts()["unanswered"] == measured.total - 3


def test_each_query_whose_connection_is_lost_is_an_error_the_first_one_too() -> None:
    with serving(lambda number, body: (200, ANSWER) if number == 0 else None) as url:
        measured = run(url, rate=50)
    counts = measured.counts()
    assert counts["unanswered"] == 0
    assert counts["error"] + counts["ok"] == measured.total
    assert measured.errors["the connection was lost"] > 2
    assert measured.outcomes[0] == QueryOutcome.ERROR


def test_no_server_and_one_that_does_not_take_the_input() -> None:
    with pytest.raises(NoServer, match=r"no server answers at 127\.0\.0\.1:1: "):
        run("http://127.0.0.1:1/api/app/predict")
    wants = {"detail": "expected f64[3]"}
    with (
        serving(lambda number, body: (400, wants)) as url,
        pytest.raises(ClipperError, match="expected f64"),
    ):
        run(url)
    for wrong in ("ftp://x", "http://", "http://h:port/"):
        with pytest.raises(InvalidInput, match=r"is not a server.s URL"):
            HttpTarget(wrong, [1], 1)
    with pytest.raises(InvalidInput, match="more than"):
        run("http://127.0.0.1:1/", rate=1e6, seconds=3600)


def test_an_interrupt_gives_what_was_measured_so_far() -> None:
    def reply(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        if number == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return 200, ANSWER

    with serving(reply) as url:
        steps = sweep(
            lambda: HttpTarget(url, [1], 8), RunPlan(60, 1000), [200.0, 400.0], lambda *_: None
        )
    assert len(steps) == 1
    assert steps[0].interrupted
    assert 9 <= steps[0].total < 1000
    assert "it was interrupted after" in " ".join(page.remarks(steps))


# -- the search, on a server that is a formula


def simulated(rate: float, capacity: float, behind: float = math.inf) -> Measurement:
    measured = Measurement(rate, 1, 20)
    for i in range(1000):
        due = i / 1000
        lag = 0.1 if rate > behind else 0.0
        number = measured.sent(due, due + lag)
        measured.done(number, QueryOutcome.OK, due + lag + (0.001 if rate <= capacity else 0.1))
    return measured


@pytest.mark.parametrize("capacity", [30.0, 431.0, 5000.0])
def test_the_search_finds_the_rate(capacity: float) -> None:
    found = bisected(lambda rate: simulated(rate, capacity), 20, 100, 1e5)
    assert capacity / 1.06 <= found.rate <= capacity
    assert "miss the SLO" in found.why


def test_the_search_reports_that_the_generator_was_the_limit() -> None:
    found = bisected(lambda rate: simulated(rate, 1e5, behind=1000), 20, 100, 1e5)
    assert 900 <= found.rate <= 1000
    assert "the generator could not send" in found.why


def test_the_search_ends_without_a_rate_and_at_the_most() -> None:
    assert bisected(lambda rate: simulated(rate, 0), 20, 100, 1e5).rate == 0
    found = bisected(lambda rate: simulated(rate, 1e9), 20, 100, 1000)
    assert found.rate == 1000
    assert found.why == "no rate above 1000 per second was tried"


def test_a_generator_that_is_late_reports_it() -> None:
    late = simulated(2000, 1e9, behind=1000)
    assert late.is_behind()
    assert "the generator itself was late: p99 100 ms" in page.remarks([late])[0]
    assert not simulated(500, 1e9, behind=1000).is_behind()


# -- figures


def test_quantiles_are_those_of_the_definition() -> None:
    rng = random.Random(5)
    for n in (1, 2, 10, 999):
        values = [rng.random() for _ in range(n)]
        for share in (0.5, 0.9, 0.99, 1.0):
            slow = next(
                value
                for value in sorted(values)
                if sum(v <= value for v in values) >= share * n - 1e-9
            )
            assert quantile(np.array(values), share) == slow
    assert math.isnan(quantile(np.array([]), 0.5))


def test_the_page_stands_alone_whatever_was_measured() -> None:
    nothing = Measurement(5, 1, 20)
    broken = Measurement(10, 1, 20)
    broken.done(broken.sent(0.1, 0.1), QueryOutcome.ERROR, 0.2, "<script>alert(1)</script>")
    for steps in (
        [nothing],
        [broken],
        [simulated(100, 1e9)],
        [simulated(100, 1e9), simulated(200, 100), broken],
    ):
        rows = [page.HEAD, *(page.row_of(step) for step in steps)]
        text = page.page(
            "<t>",
            "clipper bench <x>",
            page.remarks(steps),
            rows,
            page.charts_of(steps),
            {"cpu": "<c>"},
        )
        assert text.startswith("<!doctype html>")
        assert "<script" not in text
        assert "http" not in text
        assert not re.search(r"\bnan\b|\binf\b", text)
        assert text.count("<tr>") == len(steps) + 1


@pytest.mark.parametrize("ratio", [1.0, 1.1, 3.0, 1e4, 1e9])
def test_a_logarithmic_axis_always_has_a_tick(ratio: float) -> None:
    for least in np.geomspace(0.001, 0.01, 50):
        points = [(least, 1.0), (least * ratio, 2.0)]
        drawn = Chart("c", Axis("x", log=True), Axis("y"), [Series("s", points, "c1")]).svg()
        assert re.search(r'<text class="tick"[^>]*text-anchor="middle"', drawn), points


# -- inputs


@pytest.mark.parametrize(
    "type_", ["f64[3]", "f32[2,2]", "i32[*]", "u8[4]", "bool[2]", "str", "bytes", "f64"]
)
def test_made_up_inputs_are_of_their_type(type_: str) -> None:
    rows = rows_of("random", InputType.parse(type_))
    assert len({json.dumps(row) for row in rows}) > (3 if type_ == "bool[2]" else 100)
    assert rows == rows_of("random", InputType.parse(type_))
    wanted = InputType.parse(type_)
    if wanted.dtype not in ("str", "bytes") and not wanted.variable:
        assert np.asarray(rows[0]).shape == wanted.shape


def test_inputs_of_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6.0).reshape(2, 3))
    (tmp_path / "a.json").write_text("[[1, 2], [3, 4]]")
    (tmp_path / "a.jsonl").write_text('[1]\n\n"word"\n')
    (tmp_path / "a.csv").write_text("1,2\n3,4\n")
    (tmp_path / "a.txt").write_text("one\ntwo words\n")
    any_ = InputType.parse("any")
    assert rows_of(str(tmp_path / "a.npy"), any_) == [[0, 1, 2], [3, 4, 5]]
    assert rows_of(str(tmp_path / "a.json"), any_) == [[1, 2], [3, 4]]
    assert rows_of(str(tmp_path / "a.jsonl"), any_) == [[1], "word"]
    assert rows_of(str(tmp_path / "a.csv"), any_) == [[1, 2], [3, 4]]
    assert rows_of(str(tmp_path / "a.txt"), any_) == ["one", "two words"]
    assert rows_of("[1, 2]", any_) == [[1, 2]]
    assert rows_of("hello", InputType.parse("str")) == ["hello"]


def test_inputs_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("[1]\n[2\n")
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "one.json").write_text("{}")
    type_ = InputType.parse("f64[3]")
    for text, reply in (
        (str(tmp_path / "bad.jsonl"), "line 2"),
        (str(tmp_path / "empty.json"), "has no inputs"),
        ("nowhere.npy", "cannot read"),
        (str(tmp_path / "one.json"), "a list of inputs"),
        ("[1, 2", "neither JSON nor a file"),
    ):
        with pytest.raises(InvalidInput, match=reply):
            rows_of(text, type_)
    with pytest.raises(InvalidInput, match="none can be generated"):
        rows_of("random", InputType.parse("any"))
