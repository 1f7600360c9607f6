"""Answers in parts as server-sent events: with fake containers and bodies, then over sockets; as
responses of a stream of gRPC; and their metrics."""

import asyncio
import contextlib
import http.client
import json
import pathlib
import queue
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.frontend.http.messages import DeferredResponse
from clipper.frontend.http.prediction_stream import PartEvents
from clipper.frontend.http.server_sent_events import HEARTBEAT
from clipper_core.results.part_stream import AnswerPart, PartsFuture
from tests.core.test_part_streams import AHEAD, PartContainer, PartWorld
from tests.frontend.conftest import PATIENCE_S, QUICK, Ask, ask, total
from tests.frontend.test_answer_stream import Page, events_in
from tests.memory_container import wait_until
from tests.word_model import words

# -- without sockets


@pytest.fixture
def world() -> Iterator[PartWorld]:
    made = PartWorld()
    yield made
    made.engine.finish()
    assert made.engine.completion.issued == made.engine.completion.answered


class Resolved:
    """A fake application without a default."""

    default = None


class OneAtATime(Page):
    """A fake body that waits for one future, which the test's engine ends."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: tuple[Any, Callable[[Any], None]] | None = None

    def on_done(self, query: Any, step: Callable[[Any], None]) -> bool:
        if query.done():
            return False
        self.waiting = query, step
        return True

    def request_turn(self) -> None:
        self.on_turn()

    def look(self) -> None:
        """Call what waits for a future that is done."""
        if self.waiting is not None and self.waiting[0].done():
            future, step = self.waiting
            self.waiting = None
            step(future)


def encoded(part: AnswerPart) -> bytes:
    if part.output == "bad":
        raise RuntimeError("/secret/path")
    name = b"answer" if part.is_last else b"part"
    return b"event: %s\ndata: %s\n\n" % (name, json.dumps(part.output).encode())


def failed(error: Exception) -> bytes:
    return b"event: error\ndata: %s\n\n" % json.dumps(type(error).__name__).encode()


def events_of(future: PartsFuture, heartbeat_s: float = 3600.0) -> PartEvents:
    resolved: Any = Resolved()
    return PartEvents(future, resolved, encoded, failed, b"r-1", heartbeat_s)


class Stream:
    """A query in parts whose events are written to a fake body."""

    def __init__(self, world: PartWorld) -> None:
        model = world.model("str")
        self.world, self.page = world, OneAtATime()
        self.container: PartContainer = world.part_container(model)
        self.future = world.ask(model, "x")
        self.id = self.container.queries[0][0]
        events_of(self.future).start(self.page)  # type: ignore[arg-type]

    def give(self, *parts: str) -> None:
        for part in parts:
            assert self.container.give(self.id, part)
        self.go()

    def go(self) -> None:
        self.world.step()
        self.page.look()
        self.world.step()
        self.container.take()


def in_loop(test: Callable[[], None]) -> None:
    async def run() -> None:
        test()

    asyncio.run(run())


def test_each_part_leaves_when_it_is_there(world: PartWorld) -> None:
    def check() -> None:
        stream = Stream(world)
        stream.give("a ")
        assert stream.page.events == [("part", "a ")]
        stream.give("b", "c")
        assert stream.page.events[1:] == [("part", "b"), ("part", "c")]
        assert not stream.page.ended
        stream.container.end(stream.id)
        stream.go()
        assert stream.page.events[3:] == [("answer", "a bc")]
        assert stream.page.ended

    in_loop(check)


def test_a_client_that_does_not_read_gives_the_model_no_credit(world: PartWorld) -> None:
    def check() -> None:
        stream = Stream(world)
        stream.page.room = False
        stream.give("a")
        assert stream.page.events == [("part", "a")]
        before = stream.container.allowed[stream.id]
        stream.give(*"bc")
        assert stream.page.events == [("part", "a")]
        assert stream.container.allowed[stream.id] == before - 2, "no more is allowed"
        stream.page.room = True
        stream.page.on_room()
        stream.go()
        assert [text for _, text in stream.page.events] == ["a", "b", "c"]
        assert stream.container.allowed[stream.id] == AHEAD

    in_loop(check)


def test_a_client_that_disconnects_cancels_its_query(world: PartWorld) -> None:
    def check() -> None:
        stream = Stream(world)
        stream.give("a")
        stream.page.gone = True
        stream.page.on_gone()
        stream.go()
        assert stream.container.cancelled == [stream.id]

    in_loop(check)


def test_a_part_without_a_text_ends_the_body_by_an_error(world: PartWorld) -> None:
    def check() -> None:
        stream = Stream(world)
        stream.give("a", "bad", "b")
        assert stream.page.events == [("part", "a"), ("error", "RuntimeError")]
        assert stream.page.ended
        stream.go()
        assert stream.container.cancelled == [stream.id]

    in_loop(check)


def test_a_client_that_leaves_before_the_first_part_cancels_its_query(world: PartWorld) -> None:
    model = world.model("str")
    container = world.part_container(model)
    future = world.ask(model, "x")
    deferred = events_of(future).outcome()
    assert isinstance(deferred, DeferredResponse)
    deferred.cancel()
    world.step()
    container.take()
    assert container.cancelled == [container.queries[0][0]]


def test_silence_is_broken_by_a_sign_of_life(world: PartWorld) -> None:
    async def wait() -> None:
        model = world.model("str")
        world.part_container(model)
        page, beaten = OneAtATime(), asyncio.Event()
        page.on_write = lambda data: beaten.set() if data == HEARTBEAT else None
        events = events_of(world.ask(model, "x"), 0.01)
        events.start(page)  # type: ignore[arg-type]
        await asyncio.wait_for(beaten.wait(), PATIENCE_S)
        page.on_gone()

    asyncio.run(wait())


# -- over sockets


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    doors = dict.fromkeys(("http", "admin", "grpc"), "127.0.0.1:0")
    with clipper.start(**doors, **QUICK) as started:
        started._learning.states.start_writing()  # its thread stays too
        started.deploy("words", words, input="str", output="str", row_by_row=True, cache=False)
        started.deploy("sum", total, input="f64[3]")
        app = {"models": ["words"], "policy": "single", "slo_ms": 60_000}
        started.app("writer", **app)
        started.app("modest", default="nothing", **app)
        started.app("total", models=["sum"], slo_ms=60_000)
        yield started


@pytest.fixture
def query(server: clipper.ClipperServer) -> Ask:
    return lambda *words, **more: ask(server.http_address, *words, **more)


@contextlib.contextmanager
def open_stream(
    server: clipper.ClipperServer, path: str, body: dict[str, Any]
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.http_address, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body))
        yield connection.getresponse()
    finally:
        connection.close()


def test_parts_are_events_and_the_last_one_is_the_whole(query: Ask) -> None:
    reply = query(
        "POST",
        "/api/writer/predict",
        {"input": "a b", "stream": True},
        {"X-Request-Id": "mine"},
    )
    assert (reply.status, reply.headers["x-request-id"]) == (200, "mine")
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, (name, whole) = events_in(reply.body)
    assert parts == [
        ("part", {"index": 0, "output": "a "}),
        ("part", {"index": 1, "output": "b "}),
    ]
    assert name == "answer"
    assert query("POST", "/api/writer/feedback", {"id": whole.pop("id"), "score": 1}).status == 200
    assert whole.pop("latency_us") > 0
    assert whole == {
        "output": "a b ",
        "confidence": None,
        "default": False,
        "complete": True,
        "reason": "",
        "models": ["words:1"],
        "missing": [],
        "parts": 2,
    }


def test_a_part_is_there_before_the_next_one_is_made(
    server: clipper.ClipperServer, tmp_path: pathlib.Path
) -> None:
    go = tmp_path / "go"
    body = {"input": f"a wait:{go} b", "stream": True}
    with open_stream(server, "/api/writer/predict", body) as response:
        lines = [response.readline() for _ in range(3)]
        assert lines == [b"event: part\n", b'data: {"index":0,"output":"a "}\n', b"\n"]
        go.touch()
        assert events_in(response.read())[-1][1]["output"] == "a b "


@pytest.mark.parametrize("n", range(3))
def test_a_request_that_accepts_events_gets_them(query: Ask, n: int) -> None:
    body = {"input": [1, 2, n]}
    (_, part), (_, whole) = events_in(
        query("POST", "/api/total/predict", body, {"Accept": "Text/Event-Stream"}).body
    )
    assert part == {"index": 0, "output": 3.0 + n}
    assert (whole["output"], whole["parts"]) == (3.0 + n, 1)
    assert query("POST", "/api/total/predict", body, {"Accept": "*/*"}).json["output"] == 3.0 + n
    plain = {**body, "stream": False}
    asked = query("POST", "/api/total/predict", plain, {"Accept": "text/event-stream"})
    assert asked.json["output"] == 3.0 + n


def test_a_failure_has_a_status_before_the_first_part(query: Ask, tmp_path: pathlib.Path) -> None:
    refused = query("POST", "/api/writer/predict", {"input": "fail", "stream": True})
    assert refused.status == 500
    assert "no more words" in refused.json["detail"]
    go = tmp_path / "go"
    body = {"input": f"wait:{go}", "stream": True, "slo_ms": 20}
    late = query("POST", "/api/writer/predict", body)
    go.touch()
    assert late.status == 504
    assert "slo_ms" in late.json["detail"]


def test_what_has_arrived_is_the_answer_of_what_fails_later(query: Ask) -> None:
    reply = query("POST", "/api/writer/predict", {"input": "a fail", "stream": True})
    name, whole = events_in(reply.body)[-1]
    assert (name, whole["output"], whole["complete"]) == ("answer", "a ", False)
    assert "no more words" in whole["reason"]


def test_a_default_is_a_whole_without_parts(query: Ask) -> None:
    reply = query("POST", "/api/modest/predict", {"input": "fail", "stream": True})
    ((name, whole),) = events_in(reply.body)
    assert (name, whole["output"], whole["default"]) == ("answer", "nothing", True)
    assert (whole["models"], whole["missing"]) == ([], ["words:1"])


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": ["a"], "stream": True},
        {"input": "a", "part_slo_ms": 5},
        {"input": "a", "stream": True, "part_slo_ms": 0},
        {"input": "a", "stream": True, "slo_total_ms": 1e12},
        {"input": 1, "stream": True},
    ],
)
def test_impossible_requests_have_a_status(query: Ask, body: dict[str, Any]) -> None:
    assert query("POST", "/api/writer/predict", body).status == 400


def test_the_route_of_whole_answers_has_no_parts(query: Ask) -> None:
    reply = query("POST", "/api/writer/predict/stream", {"input": "a", "stream": True})
    assert (reply.status, "not parts" in reply.json["detail"]) == (400, True)


def test_hanging_up_stops_the_model(server: clipper.ClipperServer, tmp_path: pathlib.Path) -> None:
    go, closed = tmp_path / "go", tmp_path / "closed"
    body = json.dumps({"input": f"closes:{closed} wait:{go} " + "b " * 9000, "stream": True})
    host, port = server.http_address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        head = "POST /api/writer/predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        connection.sendall((head % len(body) + body).encode())
        assert b"200 OK" in connection.recv(4096)
        go.touch()
    wait_until(closed.exists)


def test_a_closing_server_ends_what_is_left_with_a_final_part(tmp_path: pathlib.Path) -> None:
    with clipper.start(http="127.0.0.1:0", **{**QUICK, "drain_s": 0.05}) as server:
        server.deploy("words", words, input="str", output="str", row_by_row=True, cache=False)
        server.app("writer", models=["words"], policy="single", slo_ms=60_000)
        body = {"input": f"a wait:{tmp_path / 'never'} b", "stream": True}
        with open_stream(server, "/api/writer/predict", body) as response:
            server.close()
            *_, (name, whole) = events_in(response.read())
    assert (name, whole["output"], whole["complete"]) == ("answer", "a ", False)
    assert whole["reason"]


def test_generate(query: Ask) -> None:
    reply = query("POST", "/v2/models/writer/generate", {"text_input": "a b", "id": "mine"})
    assert reply.status == 200
    body = reply.json
    assert (body["model_name"], body["text_output"], body["id"]) == ("writer", "a b ", "mine")
    assert body["parameters"]["prediction_id"]
    reply = query("POST", "/v2/models/words/versions/1/generate", {"text_input": "a fail"})
    body = reply.json
    assert (body["model_version"], body["text_output"]) == ("1", "a ")
    assert body["parameters"]["complete"] is False
    assert query("POST", "/v2/models/words/generate", {"text_input": "fail"}).status == 500


def test_generate_stream(query: Ask) -> None:
    reply = query("POST", "/v2/models/words/generate_stream", {"text_input": "a b"})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [json.loads(event[6:]) for event in reply.body.decode().split("\n\n") if event]
    assert [event["text_output"] for event in events] == ["a ", "b ", ""]
    assert "parameters" not in events[0]
    assert events[2]["parameters"]["prediction_id"]
    assert query("POST", "/v2/models/words/generate_stream", {"text_input": "fail"}).status == 500


def test_generation_is_for_text(query: Ask) -> None:
    for path in ("generate", "generate_stream"):
        reply = query("POST", f"/v2/models/sum/{path}", {"text_input": "a"})
        assert (reply.status, "no text" in reply.json["error"]) == (400, True)
    assert query("POST", "/v2/models/words/generate", {}).status == 400
    body = {"text_input": "a", "parameters": {"part_timeout": -1}}
    assert query("POST", "/v2/models/words/generate", body).status == 400


# -- gRPC, by Triton's client


class Responses:
    """A stream of tritonclient, and what came on it."""

    def __init__(self, address: str) -> None:
        self.triton = pytest.importorskip(
            "tritonclient.grpc", reason="pip install 'tritonclient[grpc]'"
        )
        self.client = self.triton.InferenceServerClient(address)
        self.came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self.came.put((result, error)))

    def ask(self, text: str, id: str, wants_final: bool = True, **parameters: Any) -> None:
        tensor = self.triton.InferInput("input", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text], dtype=object))
        self.client.async_stream_infer(
            "writer",
            [tensor],
            request_id=id,
            enable_empty_final_response=wants_final,
            parameters=parameters,
        )

    def next(self) -> tuple[str, str, bool]:
        """Return the id, the text and whether it is final, of the next response."""
        result, error = self.came.get(timeout=PATIENCE_S)
        assert error is None, error
        response = result.get_response()
        output = result.as_numpy("output")
        text = "" if output is None else output[0].decode()
        return response.id, text, response.parameters["triton_final_response"].bool_param

    def error(self) -> str:
        result, error = self.came.get(timeout=PATIENCE_S)
        assert result is None
        return str(error)


@pytest.fixture
def responses(server: clipper.ClipperServer) -> Iterator[Responses]:
    made = Responses(server.grpc_address)
    yield made
    made.client.stop_stream(cancel_requests=True)
    made.client.close()


def test_each_part_is_a_response(responses: Responses) -> None:
    for id in ("one", "two"):
        responses.ask(f"{id} b", id)
    found = [responses.next() for _ in range(6)]
    assert found == [
        ("one", "one ", False),
        ("one", "b ", False),
        ("one", "", True),
        ("two", "two ", False),
        ("two", "b ", False),
        ("two", "", True),
    ]
    responses.ask("a b", "three", stream=False)
    assert responses.next() == ("three", "a b ", True)


def test_without_the_final_response_there_are_the_parts_alone(responses: Responses) -> None:
    responses.ask("a b", "one", wants_final=False)
    responses.ask("c", "two", wants_final=False)
    assert [responses.next()[:2] for _ in range(3)] == [("one", "a "), ("one", "b "), ("two", "c ")]


def test_a_failure_is_a_response_and_the_stream_goes_on(responses: Responses) -> None:
    responses.ask("fail", "one")
    assert "no more words" in responses.error()
    responses.ask("a fail", "two")
    assert responses.next() == ("two", "a ", False)
    assert "no more words" in responses.error()
    responses.ask("b", "three")
    assert responses.next() == ("three", "b ", False)


def test_cancelling_the_call_stops_the_model(
    server: clipper.ClipperServer, tmp_path: pathlib.Path
) -> None:
    closed = tmp_path / "closed"
    made = Responses(server.grpc_address)
    made.ask(f"closes:{closed} " + "b " * 50_000, "one")
    assert made.next()[2] is False
    made.client.stop_stream(cancel_requests=True)
    wait_until(closed.exists)
    made.client.close()


# -- metrics


def test_queries_parts_and_times_are_counted(server: clipper.ClipperServer, query: Ask) -> None:
    def counts() -> tuple[int, int, int]:
        row = server.stats()["models"]["words:1"]
        return row["streams"], row["parts"], row["first_part_us"].count

    before = counts()
    query("POST", "/api/writer/predict", {"input": "a b c", "stream": True})
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 3, 1]
    text = ask(server.admin_address, "GET", "/metrics").body.decode()
    assert f'clipper_part_queries_total{{model="words",version="1"}} {before[0] + 1}' in text
    assert f'clipper_parts_total{{model="words",version="1"}} {before[1] + 3}' in text
    assert 'clipper_first_part_duration_seconds_count{model="words",version="1"}' in text
