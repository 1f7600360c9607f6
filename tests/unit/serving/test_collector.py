"""Queries started in one place and collected in another, on futures that end when the test sets
them."""

import itertools
import threading

import pytest

from clipper.errors import InvalidInput, Overloaded, ShuttingDown, UnknownApplication
from clipper.serving.query.collector import CAPACITY_MAX, Collector
from clipper.types import Answer
from tests.conftest import PATIENCE_S


class Open:
    """A fake query, which `end` decides."""

    def __init__(self, request, id):
        self.request, self.id, self.extra = request, id, self
        self.resolved, self.node = self, "n"
        self.collected = []

    def add_done_callback(self, fn):
        self.collected.append(fn)

    def end(self):
        for fn in self.collected:
            fn(self)

    def result(self, timeout):
        return Answer(self.request.input, request_id=self.request.id)


class World:
    def __init__(self, capacity=4):
        self.queries = []
        self.collector = Collector(self.schedule, capacity)

    def schedule(self, request):
        if request.application == "nobody":
            raise UnknownApplication("no application 'nobody'.")
        self.queries.append(Open(request, len(self.queries) + 1))
        return self.queries[-1]


def test_answers_come_in_the_order_in_which_they_were_decided():
    world = World()
    assert [world.collector.start("wine", x, id=f"r-{x}") for x in range(3)] == [
        "r-0",
        "r-1",
        "r-2",
    ]
    for i in (1, 2, 0):
        world.queries[i].end()
    world.collector.close()
    replies = list(world.collector)
    assert [(reply.id, reply.application, reply.answer.output) for reply in replies] == [
        ("r-1", "wine", 1), ("r-2", "wine", 2), ("r-0", "wine", 0),
    ]  # fmt: skip


def test_an_id_is_made_up_when_none_is_given():
    world = World()
    assert world.collector.start("wine", 1) == "n-1"
    world.queries[0].end()
    assert world.collector.get(0).id == "n-1"


def test_what_start_is_given_reaches_the_query():
    world = World()
    world.collector.start("wine", 1, id="r", user="u", slo_ms=5.0, salt=3, context=[1.0])
    request = world.queries[0].request
    assert (request.application, request.id, request.user, request.slo_ms, request.salt) == (
        "wine",
        "r",
        "u",
        5.0,
        3,
    )
    assert request.context == [1.0]


def test_a_collector_is_full_until_a_reply_is_taken():
    world = World(capacity=2)
    world.collector.start("wine", 1)
    world.collector.start("wine", 2)
    with pytest.raises(Overloaded, match="2 queries of this collector") as refused:
        world.collector.start("wine", 3)
    assert refused.value.retry_after_s > 0
    assert len(world.queries) == 2, "nothing was started"
    world.queries[0].end()
    with pytest.raises(Overloaded):
        world.collector.start("wine", 3)
    world.collector.get(0)
    world.collector.start("wine", 3)
    assert len(world.collector) == 2


def test_what_cannot_be_started_takes_no_room():
    world = World(capacity=1)
    for _ in range(3):
        with pytest.raises(UnknownApplication):
            world.collector.start("nobody", 1)
    assert len(world.collector) == 0
    world.collector.start("wine", 1)


def test_closing():
    world = World()
    world.collector.start("wine", 1)
    with world.collector as collector:
        pass
    with pytest.raises(ShuttingDown, match="closed"):
        collector.start("wine", 2)
    with pytest.raises(TimeoutError, match="1 queries"):
        collector.get(0.0)
    world.queries[0].end()
    assert collector.get(0).answer.output == 1
    with pytest.raises(ShuttingDown, match="collected"):
        collector.get()
    assert list(collector) == []
    collector.close()


def test_closing_ends_all_that_wait_when_the_last_is_collected():
    world = World()
    world.collector.start("wine", 1)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(len(list(world.collector)))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    world.collector.close()
    world.queries[0].end()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(found) == [0, 0, 1]


def test_a_query_that_could_not_be_started_ends_a_wait_too():
    """A closed collector that waits for this query alone ends."""
    world = World()
    over = []
    inside, may_fail = threading.Event(), threading.Event()

    def fail(request):
        inside.set()
        may_fail.wait(PATIENCE_S)
        raise InvalidInput("no")

    def start():
        with pytest.raises(InvalidInput):
            collector.start("wine", 1)

    collector = Collector(fail, 1)
    starter = threading.Thread(target=start)
    starter.start()
    assert inside.wait(PATIENCE_S)
    collector.close()
    getter = threading.Thread(target=lambda: over.append(list(collector)))
    getter.start()
    may_fail.set()
    for thread in (starter, getter):
        thread.join(PATIENCE_S)
    assert over == [[]]
    assert world.queries == []


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5, "8", CAPACITY_MAX + 1, None])
def test_capacities_that_are_none(capacity):
    with pytest.raises(InvalidInput, match="capacity"):
        World(capacity)


def test_many_starters_and_collectors_lose_nothing_and_double_nothing():
    world = World(capacity=64)
    numbers, ended = itertools.count(), threading.Event()
    found: list[int] = []

    def start():
        for _ in range(300):
            x = next(numbers)
            while True:
                try:
                    world.collector.start("wine", x)
                    break
                except Overloaded:
                    ended.wait(0.0005)

    def end():
        done = 0
        while done < 900:
            for query in world.queries[done:]:
                if not query.collected:  # it has not been told yet whom to tell
                    break
                query.end()
                done += 1
            ended.wait(0.0001)

    def collect():
        for reply in world.collector:
            found.append(reply.answer.output)

    threads = [threading.Thread(target=job) for job in (start, start, start, end, collect, collect)]
    for thread in threads:
        thread.start()
    for thread in threads[:4]:
        thread.join(30)
    world.collector.close()
    for thread in threads[4:]:
        thread.join(30)
    assert sorted(found) == list(range(900))
