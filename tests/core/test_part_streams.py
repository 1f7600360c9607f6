"""Queries that are answered in parts, with a fake container and a clock that the test sets."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from clipper_core.results.part_stream import AnswerPart, PartsFuture, joined_parts
from clipper_core.runtime.status import StatusError
from clipper_core.wire.codec import Flag, Kind, decode_header, encode_frame, encode_rows
from tests.core.conftest import Container, World, rows_of

AHEAD = 4
MS = 1000


class PartContainer(Container):
    """A fake container that answers in parts when a test says so."""

    def __init__(self, world: World, model: Any, **attach: Any) -> None:
        super().__init__(world, model, parts=True, **attach)
        self.allowed: dict[int, int] = {}
        self.cancelled: list[int] = []
        self.queries: list[tuple[int, Any]] = []

    def take(self) -> None:
        """Read what the engine has sent: queries, further parts that are allowed, cancels."""
        self.unread += self.world.engine.outgoing(self.conn, self.world.now_us)
        while (header := decode_header(self.unread)) is not None:
            end = 64 + header.payload_bytes
            payload, self.unread = self.unread[64:end], self.unread[end:]
            if header.kind == Kind.PREDICT and header.flags & Flag.PARTS:
                self.queries.append((header.id, rows_of(header, payload)[0]))
                self.allowed[header.id] = AHEAD
            elif header.kind == Kind.PREDICT:
                self.inbox.append((header.id, rows_of(header, payload)))
            elif header.kind == Kind.PART:
                self.allowed[header.id] += int.from_bytes(payload, "little")
            elif header.kind == Kind.CANCEL:
                self.cancelled.append(header.id)

    def give(self, id: int, part: Any, **fields: Any) -> bool:
        rows = [part] if isinstance(part, str | bytes) else np.array([part])
        self.allowed[id] -= 1
        return self.send(encode_rows(Kind.PART, rows, id=id, checked=self.checked, **fields))

    def end(self, id: int, text: str = "") -> bool:
        return self.send(encode_frame(Kind.PART, text.encode(), id=id, checked=self.checked))


class PartWorld(World):
    """A world whose engine has small limits for answers in parts."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**{"parts_ahead_max": AHEAD, "streams_max": 2, **limits})

    def part_container(self, model: Any, **attach: Any) -> PartContainer:
        container = PartContainer(self, model, **attach)
        self.step()
        container.take()
        return container

    def ask(self, model: Any, x: Any, **limits: Any) -> PartsFuture:
        future: PartsFuture = model.predict(x, stream=True, **limits)
        self.step()
        for container in self.containers:
            if isinstance(container, PartContainer):
                container.take()
        return future


@pytest.fixture
def world() -> Iterator[PartWorld]:
    made = PartWorld()
    yield made
    made.close()


def taken(future: PartsFuture) -> list[Any]:
    """Return the outputs that have arrived and are not the whole."""
    found = []
    for part in future:
        if part.is_last:
            return found
        found.append(part.output)
    return found


@pytest.mark.parametrize("checked", [False, True])
def test_parts_arrive_in_order_and_the_last_one_is_the_whole(
    world: PartWorld, checked: bool
) -> None:
    model = world.model("str")
    container = world.part_container(model, checked=checked)
    future = world.ask(model, "count")
    (id, row) = container.queries[0]
    assert row == "count"
    assert container.give(id, "one ")
    assert container.give(id, "two", confidence=[0.5])
    assert not future.done()
    assert container.end(id)
    world.step()
    found = list(future)
    assert [(part.output, part.index, part.is_last) for part in found] == [
        ("one ", 0, False),
        ("two", 1, False),
        ("one two", 2, True),
    ]
    assert found[1].confidence == 0.5
    assert future.result(0) is found[2]
    assert found[2].complete
    assert found[2].reason is None


def test_the_sessions_of_its_queries_reach_the_container(world: PartWorld) -> None:
    model = world.model("f64", (2,))
    container = world.part_container(model, sessions=True)
    future = model.predict(np.array([1.0, 2.0]), None, 77, stream=True)
    world.step()
    data = world.engine.outgoing(container.conn, world.now_us)
    header = decode_header(data)
    assert header is not None
    assert header.flags == Flag.PARTS | Flag.SESSIONS
    assert int.from_bytes(data[-8:], "little") == 77
    assert not future.done()


def test_a_container_may_send_no_more_than_was_read_and_a_few(world: PartWorld) -> None:
    model = world.model("f64")
    container = world.part_container(model)
    future, other = world.ask(model, 1.0), world.ask(model, 2.0)
    (id, _), (second, _) = container.queries
    for i in range(AHEAD):
        assert container.give(id, float(i))
    world.step()
    container.take()
    assert container.allowed[id] == 0, "nobody has read"
    assert container.give(second, 9.0), "the other query goes on"
    assert next(other).output == 9.0
    assert [next(future).output, next(future).output] == [0.0, 1.0]
    world.step()
    container.take()
    assert container.allowed[id] == 2
    assert container.give(id, 4.0)
    assert container.give(id, 5.0)
    assert not container.give(id, 6.0), "one too many: the connection is closed"


def test_a_slow_reader_is_not_a_slow_model(world: PartWorld) -> None:
    model = world.model("f64")
    container = world.part_container(model)
    future = world.ask(model, 1.0, part_slo_ms=10)
    id = container.queries[0][0]
    for i in range(AHEAD):
        assert container.give(id, float(i))
    world.step(1000 * MS)
    assert not future.done(), "no part is due while none may be sent"
    assert [next(future).output for _ in range(AHEAD)] == [0.0, 1.0, 2.0, 3.0]
    world.step()
    world.pass_deadline(11 * MS)
    assert future.done()
    assert "part_slo_ms" in (future.result(0).reason or "")


@pytest.mark.parametrize(
    ("limits", "parts", "after_ms", "named"),
    [
        ({"slo_ms": 20}, 0, 21, "slo_ms"),
        ({"slo_ms": 20, "part_slo_ms": 30}, 1, 31, "part_slo_ms"),
        ({"slo_ms": 20, "slo_total_ms": 100}, 1, 101, "slo_total_ms"),
    ],
)
def test_what_has_arrived_is_the_answer_when_time_is_over(
    world: PartWorld, limits: dict[str, float], parts: int, after_ms: int, named: str
) -> None:
    model = world.model("str")
    container = world.part_container(model)
    future = world.ask(model, "x", **limits)
    id = container.queries[0][0]
    for _ in range(parts):
        assert container.give(id, "a")
    world.step((after_ms - 2) * MS)
    assert not future.done()
    world.pass_deadline(2 * MS)
    assert future.done()
    container.take()
    assert container.cancelled == [id]
    if parts:
        whole = future.result(0)
        assert (whole.output, whole.complete, whole.index) == ("a", False, 1)
        assert named in (whole.reason or "")
    else:
        with pytest.raises(Exception, match=named):
            future.result(0)
    assert container.give(id, "late"), "it was under way"
    assert container.end(id)
    assert not container.end(id), "it has ended already"


def test_queries_wait_while_a_container_has_no_room(world: PartWorld) -> None:
    model = world.model("f64")
    container = world.part_container(model)
    futures = [world.ask(model, float(i)) for i in range(4)]
    assert [row for _, row in container.queries] == [0.0, 1.0]
    assert container.end(container.queries[0][0])
    world.step()
    container.take()
    assert [row for _, row in container.queries] == [0.0, 1.0, 2.0]
    futures[3].cancel()
    world.step()
    assert container.end(container.queries[1][0])
    world.step()
    container.take()
    assert [row for _, row in container.queries] == [0.0, 1.0, 2.0], "the last was cancelled"


def test_the_oldest_query_gets_the_next_place(world: PartWorld) -> None:
    model = world.model("f64")
    container = world.part_container(model)
    old = [world.ask(model, float(i)) for i in range(6)]
    for n in range(2):  # their places in the table are free again, in any order
        assert container.end(container.queries[1 - n][0])
    world.step()
    new = [world.ask(model, float(i)) for i in range(6, 10)]
    for n in range(2, 10):
        container.take()
        assert container.end(container.queries[n][0])
        world.step()
    assert [row for _, row in container.queries] == [float(i) for i in range(10)]
    assert all(future.result(0).complete for future in old + new)


def test_they_go_to_the_container_with_the_fewest(world: PartWorld) -> None:
    model = world.model("f64")
    containers = [world.part_container(model) for _ in range(2)]
    futures = [world.ask(model, float(i)) for i in range(4)]
    assert [len(container.queries) for container in containers] == [2, 2]
    assert len(futures) == 4


def test_a_dropped_query_is_cancelled_in_its_container(world: PartWorld) -> None:
    model = world.model("f64")
    container = world.part_container(model)
    future = world.ask(model, 1.0)
    id = container.queries[0][0]
    del future
    world.step()
    container.take()
    assert container.cancelled == [id]
    assert container.end(id)


def test_a_lost_container_ends_what_had_begun_and_another_begins_the_rest(
    world: PartWorld,
) -> None:
    model = world.model("str")
    container = world.part_container(model)
    begun, waiting = world.ask(model, "a"), world.ask(model, "b")
    assert container.give(container.queries[0][0], "one")
    container.lose()
    world.step()
    assert begun.done()
    whole = begun.result(0)
    assert (whole.output, whole.complete) == ("one", False)
    assert not waiting.done()
    second = world.part_container(model)
    assert [row for _, row in second.queries] == ["b"]
    second.lose()
    world.step()
    assert waiting.done(), "two containers died before its first part"
    with pytest.raises(Exception, match="lost"):
        waiting.result(0)


def test_a_failed_model_says_why(world: PartWorld) -> None:
    model = world.model("str")
    container = world.part_container(model)
    future = world.ask(model, "a")
    id = container.queries[0][0]
    assert container.give(id, "one")
    assert container.end(id, "ValueError: no")
    world.step()
    assert taken(future) == ["one"]
    assert "ValueError: no" in (future.result(0).reason or "")


def test_a_part_of_another_type_than_declared_ends_the_answer(world: PartWorld) -> None:
    model = world.model("str", output="str")
    container = world.part_container(model)
    future = world.ask(model, "a")
    id = container.queries[0][0]
    assert container.give(id, "one")
    assert container.give(id, 2.0)
    world.step()
    container.take()
    assert (taken(future), container.cancelled) == (["one"], [id])
    assert "another type" in (future.result(0).reason or "")


def test_all_parts_together_have_a_limit(new_world: Any) -> None:
    world = PartWorld(answer_bytes_max=100)
    model = world.model("bytes")
    container = world.part_container(model)
    future = world.ask(model, b"a")
    id = container.queries[0][0]
    assert container.give(id, b"x" * 40)
    assert container.give(id, b"y" * 60)
    world.step()
    assert taken(future) == [b"x" * 40]
    assert "answer_bytes_max" in (future.result(0).reason or "")
    world.close()


def test_a_model_that_gives_no_parts_answers_in_one(world: PartWorld) -> None:
    model = world.model("f64")
    container = world.container(model)
    future = model.predict(3.0, stream=True)
    world.step()
    container.reply_all()
    assert [(part.output, part.is_last) for part in future] == [(3.0, False), (3.0, True)]
    assert future.result(0).complete


def test_a_container_without_parts_is_no_use_to_a_query_that_waits_for_one(
    world: PartWorld,
) -> None:
    model = world.model("f64")
    future = world.ask(model, 1.0)
    world.container(model)
    world.step()
    with pytest.raises(Exception, match="one part"):
        future.result(0)


def test_nothing_else_may_come_from_a_container(world: PartWorld) -> None:
    model = world.model("f64")
    plain = world.container(model)
    assert not plain.send(encode_rows(Kind.PART, np.array([1.0]), id=1)), "it has no parts"
    for data in (
        encode_rows(Kind.PART, np.array([1.0]), id=5 << 16),
        encode_frame(Kind.PART, b"", id=1 << 16),
        encode_frame(Kind.CANCEL, b"", id=1 << 16),
    ):
        container = world.part_container(model)
        assert not container.send(data)


def test_a_container_cannot_answer_for_another(world: PartWorld) -> None:
    model = world.model("f64")
    first = world.part_container(model)
    future = world.ask(model, 1.0)
    second = world.part_container(model)
    id = first.queries[0][0]
    second.allowed[id] = 1
    assert not second.give(id, 2.0)
    assert first.give(id, 1.0)
    assert next(future).output == 1.0


def test_a_draining_container_ends_its_answers_first(world: PartWorld) -> None:
    model = world.model("f64")
    container = world.part_container(model)
    future = world.ask(model, 1.0)
    id = container.queries[0][0]
    world.engine.drain(container.conn)
    world.step(30 * MS)
    assert Kind.GOODBYE not in kinds(world, container)
    assert container.end(id)
    world.step(30 * MS)
    assert Kind.GOODBYE in kinds(world, container)
    assert future.result(0).complete


def kinds(world: World, container: Container) -> list[int]:
    """Return the kinds of the frames that were sent to a container since the last call."""
    data, found = world.engine.outgoing(container.conn, world.now_us), []
    while (header := decode_header(data)) is not None:
        found.append(header.kind)
        data = data[64 + header.payload_bytes :]
    return found


def test_an_engine_that_ends_ends_its_answers(world: PartWorld) -> None:
    model = world.model("f64")
    container = world.part_container(model)
    begun, waiting = world.ask(model, 1.0), world.ask(model, 2.0)
    assert container.give(container.queries[0][0], 1.0)
    new = model.predict(3.0, stream=True)
    world.engine.finish()
    assert begun.result(0).output.tolist() == [1.0]
    for future in (waiting, new):
        with pytest.raises(StatusError):
            future.result(0)
    with pytest.raises(StatusError):
        model.predict(1.0, stream=True)


def test_limits_without_stream_are_refused(world: PartWorld) -> None:
    model = world.model("f64")
    for limits in ({"part_slo_ms": 5}, {"slo_total_ms": 5}):
        with pytest.raises(StatusError, match="stream=True"):
            model.predict(1.0, **limits)
    with pytest.raises(StatusError):
        model.predict(1.0, stream=True, part_slo_ms=-1)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (["a", "b"], "ab"),
        ([b"a", b"b"], b"ab"),
        ([1.0, 2.0], np.array([1.0, 2.0])),
        ([np.zeros(2), np.ones(2)], np.array([[0.0, 0.0], [1.0, 1.0]])),
        ([np.zeros(1), np.ones(2)], [np.zeros(1), np.ones(2)]),
        (["a", 1.0], ["a", 1.0]),
        ([], np.empty(0)),
    ],
)
def test_the_whole_of_parts(parts: list[Any], whole: Any) -> None:
    found = joined_parts(parts)
    assert type(found) is type(whole)
    np.testing.assert_equal(found, whole)


def test_a_part_shows_what_it_is() -> None:
    assert repr(AnswerPart("a", 3)) == "<AnswerPart part 3: 'a'>"
    assert "incomplete" in repr(AnswerPart("a", 3, is_last=True, complete=False))
