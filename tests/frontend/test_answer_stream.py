"""Answers in the order in which they are ready: errors among them, clients that do not read or
disconnect; then over a socket."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import clipper
from clipper.errors import DeadlineExceeded
from clipper.frontend.http.prediction_stream import PredictionStream
from clipper.frontend.http.server_sent_events import HEARTBEAT
from tests.frontend.conftest import PATIENCE_S, Ask


class Query:
    """A fake future that is done when the test says so."""

    def __init__(self, outcome: bytes | Exception) -> None:
        self.outcome, self.is_done, self.cancelled = outcome, False, False
        self.step: Callable[[Any], None] | None = None

    def cancel(self) -> bool:
        self.cancelled = True
        return True

    def finish(self) -> None:
        self.is_done = True
        assert self.step is not None
        self.step(self)


class Page:
    """A fake response body that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.room, self.ended, self.gone = True, False, False
        self.on_room: Callable[[], None]
        self.on_turn: Callable[[], None]
        self.on_gone: Callable[[], None]
        self.on_write: Callable[[bytes], None] = lambda data: None

    def listen(
        self, room: Callable[[], None], turn: Callable[[], None], gone: Callable[[], None]
    ) -> None:
        self.on_room = room
        self.on_turn = turn
        self.on_gone = gone

    def on_done(self, query: Query, step: Callable[[Any], None]) -> bool:
        query.step = step
        return not query.is_done

    def write(self, data: bytes) -> bool:
        assert not self.ended
        self.written.append(data)
        self.on_write(data)
        return self.room

    def end(self) -> None:
        self.ended = True

    @property
    def events(self) -> list[tuple[str, Any]]:
        return events_in(b"".join(self.written))


def events_in(text: bytes) -> list[tuple[str, Any]]:
    found = []
    for event in text.decode().split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in event.splitlines() if not line.startswith(":")
        )
        if fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def result_of(query: Any) -> bytes:
    if isinstance(query.outcome, Exception):
        raise query.outcome
    found: bytes = query.outcome
    return found


def streamed(*outcome: bytes | Exception, done: tuple[int, ...] = ()) -> tuple[list[Query], Page]:
    """Return a started stream on the running loop."""
    queries, page = [Query(one) for one in outcome], Page()
    for i in done:
        queries[i].is_done = True
    stream = PredictionStream(queries, result_of, b"r-1", 3600.0)  # type: ignore[arg-type]
    stream.start(page)  # type: ignore[arg-type]
    return queries, page


def in_loop(test: Callable[[], None]) -> None:
    async def run() -> None:
        test()

    asyncio.run(run())


A, B, C = b'{"output":1}', b'{"output":2}', b'{"output":3}'


def test_each_answer_leaves_when_it_is_there() -> None:
    def check() -> None:
        (first, second, third), page = streamed(A, B, C, done=(1,))
        assert page.events == [("answer", {"index": 1, "output": 2})]
        third.finish()
        first.finish()
        assert [body["index"] for _, body in page.events[:3]] == [1, 2, 0]
        assert page.events[3:] == [("done", {"answers": 3, "errors": 0})]
        assert page.ended
        assert not second.cancelled

    in_loop(check)


def test_an_empty_set_of_queries_is_done_at_once() -> None:
    def check() -> None:
        _, page = streamed()
        assert page.events == [("done", {"answers": 0, "errors": 0})]
        assert page.ended

    in_loop(check)


def test_what_has_no_answer_gives_the_reason_and_the_others_follow() -> None:
    def check() -> None:
        _, page = streamed(
            DeadlineExceeded("too late."), B, RuntimeError("/secret/path"), done=(0, 1, 2)
        )
        late, answer, broken, done = page.events
        assert (late[0], late[1]["index"], late[1]["status"], late[1]["request_id"]) == (
            "error",
            0,
            504,
            "r-1",
        )
        assert answer == ("answer", {"index": 1, "output": 2})
        assert (broken[0], broken[1]["status"], "secret" in broken[1]["error"]) == (
            "error",
            500,
            False,
        )
        assert done == ("done", {"answers": 1, "errors": 2})

    in_loop(check)


def test_no_data_is_written_to_a_client_that_does_not_read() -> None:
    def check() -> None:
        queries, page = streamed(A, B, C)
        page.room = False
        for query in queries:
            query.finish()
        assert [name for name, _ in page.events] == ["answer"]
        page.room = True
        page.on_room()
        assert [name for name, _ in page.events] == ["answer", "answer", "answer", "done"]

    in_loop(check)


def test_a_client_that_disconnects_cancels_its_queries() -> None:
    def check() -> None:
        queries, page = streamed(A, B)
        queries[0].finish()
        page.gone = True
        page.on_gone()
        assert queries[1].cancelled
        queries[1].finish()
        assert [name for name, _ in page.events] == ["answer"]
        assert not page.ended

    in_loop(check)


def test_silence_is_broken_by_a_sign_of_life() -> None:
    async def wait() -> None:
        query, page, beaten = Query(A), Page(), asyncio.Event()
        page.on_write = lambda data: beaten.set() if data == HEARTBEAT else None
        PredictionStream([query], result_of, b"", 0.01).start(page)  # type: ignore[arg-type, list-item]
        await asyncio.wait_for(beaten.wait(), PATIENCE_S)
        query.finish()
        assert page.events[-1] == ("done", {"answers": 1, "errors": 0})

    asyncio.run(wait())


# -- over a socket


def test_a_batch_comes_as_events(query: Ask) -> None:
    reply = query(
        "POST",
        "/api/total/predict/stream",
        {"inputs": [[1, 2, 3], [0, 0, 1]]},
        {"X-Request-Id": "mine"},
    )
    assert (reply.status, reply.headers["content-type"]) == (
        200,
        "text/event-stream; charset=utf-8",
    )
    assert reply.headers["x-request-id"] == "mine"
    events = events_in(reply.body)
    assert {body["index"]: body["output"] for name, body in events if name == "answer"} == {
        0: 6.0,
        1: 1.0,
    }
    assert events[-1] == ("done", {"answers": 2, "errors": 0})


def test_one_input_is_one_answer(query: Ask) -> None:
    (name, body), _ = events_in(
        query("POST", "/api/total/predict/stream", {"input": [1, 2, 3]}).body
    )
    assert (name, body["index"], body["output"], body["models"]) == ("answer", 0, 6.0, ["sum:1"])


def test_impossible_queries_have_a_status(query: Ask) -> None:
    assert query("POST", "/api/total/predict/stream", {"inputs": [[1, 2, 3], [1]]}).status == 400
    assert query("POST", "/api/total/predict/stream", {}).status == 400
    assert query("POST", "/api/totl/predict/stream", {"input": [1, 2, 3]}).status == 404


def test_hanging_up_leaves_nothing_behind(server: clipper.ClipperServer, query: Ask) -> None:
    def stuck(rows: Any) -> Any:
        import time

        time.sleep(0.2)
        return rows[:, 0]

    server.deploy("sleepy", stuck, input="f64[1]", cache=False)
    server.app("sleepy", models=["sleepy"], slo_ms=10_000)
    try:
        body = json.dumps({"inputs": [[i] for i in range(20)]}).encode()
        host, port = server.http_address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            head = (
                b"POST /api/sleepy/predict/stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                % len(body)
            )
            connection.sendall(head + body)
            assert b"200 OK" in connection.recv(4096)
        assert query("POST", "/api/total/predict", {"input": [1, 2, 3]}).status == 200
    finally:
        server.remove_app("sleepy")
        server.retire("sleepy", force=True)
