"""Observers with futures and models of the test's own."""

import threading

import pytest

from clipper.errors import InvalidInput
from clipper.selection import Prediction
from clipper.serving.rollout.observers import OPEN_MAX, PENDING_MAX, REST_S, Watch, Watched
from clipper.serving.rollout.roles import Role
from clipper.types import VersionedModel
from clipper_core.runtime.status import Status
from tests.threads import join

A, B, C = (VersionedModel(name, 1) for name in "abc")
SHADOW, CANARY = Role("shadow"), Role("canary")


class FakeTask:
    """A future of one task."""

    def __init__(self, output=None, status=Status.OK, done=True):
        self.value, self.ended, self.is_done = output, status, done

    def done(self):
        return self.is_done

    def status(self, i=0):
        return self.ended

    def output(self, i=0):
        return self.value


class Core:
    """A fake model that returns what the test sets."""

    def __init__(self, give):
        self.give, self.queries = give, []

    def predict(self, x, slo_ms, salt):
        self.queries.append((x, slo_ms, salt))
        return self.give()


def watch_queries(watch, core, times, role=SHADOW, now_s=0.0, rests=0.0):
    return [watch.submit(core, "x", 20_000, 7, now_s, role, rests) for _ in range(times)]


def test_an_observer_is_queried_by_the_deadline_of_the_query():
    watch, core = Watch(), Core(lambda: FakeTask(1))
    assert watch_queries(watch, core, 1)[0].output() == 1
    assert core.queries == [("x", 20.0, 7)]
    assert watch.stats()["answered"] == 1


def test_a_stuck_observer_has_few_tasks():
    watch, core = Watch(), Core(lambda: FakeTask(done=False))
    futures = watch_queries(watch, core, 1000)
    assert len(core.queries) == OPEN_MAX
    stats = watch.stats()
    assert (stats["sent"], stats["shed"], stats["open"]) == (OPEN_MAX, 1000 - OPEN_MAX, OPEN_MAX)
    for future in futures[:OPEN_MAX]:
        future.is_done, future.ended = True, Status.DEADLINE
    stats = watch.stats()
    assert (stats["late"], stats["open"]) == (OPEN_MAX, 0)


def test_what_it_refuses_is_counted():
    def refuse():
        raise InvalidInput("no")

    watch = Watch()
    assert watch_queries(watch, Core(refuse), 3) == [None] * 3
    watch_queries(watch, Core(lambda: FakeTask(status=Status.FULL)), 2, CANARY)
    watch_queries(watch, Core(lambda: FakeTask(status=Status.MODEL_ERROR)), 2, CANARY)
    stats = watch.stats()
    assert (stats["refused"], stats["failed"], stats["answered"]) == (5, 2, 0)
    assert (
        stats["sent"]
        == stats["answered"] + stats["late"] + stats["refused"] + stats["failed"] + stats["open"]
    )


def test_a_shadow_rests_when_there_is_no_room_and_a_canary_does_not():
    for role, times in ((SHADOW, 1), (CANARY, 5)):
        watch, core = Watch(), Core(lambda: FakeTask(status=Status.FULL))
        watch_queries(watch, core, 5, role, now_s=1.0)
        assert len(core.queries) == times
        watch_queries(watch, core, 1, role, now_s=1.0 + 1.01 * REST_S)
        assert len(core.queries) == times + 1
    watch, core = Watch(), Core(lambda: FakeTask(1))
    watch_queries(watch, core, 5, SHADOW, now_s=1.0, rests=1.05)
    assert core.queries == [], "the application's own tasks found no room"
    watch_queries(watch, core, 5, SHADOW, now_s=1.1, rests=1.05)
    assert len(core.queries) == 5


def test_a_budget_in_queries_a_second():
    watch, core = Watch(), Core(lambda: FakeTask(1))
    for i in range(1000):
        watch_queries(watch, core, 1, Role("canary", rate_max=20.0), now_s=i / 100)
    assert 200 <= len(core.queries) <= 203
    assert watch.stats()["over_budget"] == 1000 - len(core.queries)


def test_a_canary_is_what_others_are_measured_against():
    watched = Watched(lambda: 0.0)
    watched.canaries = frozenset([C])
    for i in range(100):
        arrived = {A: Prediction(i % 10), B: Prediction(i % 10 if i % 4 else -1)}
        watched.add(arrived, i % 10, [(C, FakeTask(i % 10))])
    stats = watched.stats()
    others = stats["canaries"]["c:1"]["others"]
    assert others == {"a:1": {"n": 100, "agreement": 1.0}, "b:1": {"n": 100, "agreement": 0.75}}
    assert stats["canaries"]["c:1"]["drift"] == {"first": 100, "latest": 0}
    assert stats["observers"] == {"c:1": {"n": 100, "agreement": 1.0}}


def test_numbers_are_measured_by_their_difference():
    watched = Watched(lambda: 0.0)
    watched.canaries = frozenset([C])
    for i in range(100):
        watched.add(
            {A: Prediction(10.0 + i / 100)}, 10.0, [(C, FakeTask(8.0)), (B, FakeTask(float("nan")))]
        )
    away = watched.stats()["canaries"]["c:1"]["others"]["a:1"]["difference"]
    assert away["min"] == 2.0
    assert away["p50"] == pytest.approx(2.5, rel=0.03)
    assert away["max"] == 2.99
    assert (
        "b:1" not in watched.stats()["canaries"]["c:1"]["others"]
        or watched.stats()["observers"]["b:1"]["n"] == 0
    )


def test_pending_observations_are_bounded():
    watched, never = Watched(lambda: 0.0), FakeTask(done=False)
    for _ in range(PENDING_MAX + 10):
        watched.add({A: Prediction(1)}, 1, [(B, never)])
    assert watched.stats() == {"unlooked": 10}
    for _ in range(PENDING_MAX):
        watched.add({A: Prediction(1)}, 1, [(C, FakeTask(1))])
    never.is_done, never.ended = True, Status.DEADLINE
    stats = watched.stats()
    assert stats["observers"]["c:1"]["agreement"] == 1.0, "those behind a stuck one are looked at"
    assert "b:1" not in stats["observers"]


def test_all_that_wait_are_compared_when_they_are_complete():
    watched, late = Watched(lambda: 0.0), FakeTask(1, done=False)
    watched.canaries = frozenset([C])
    for _ in range(PENDING_MAX):
        watched.add({A: Prediction(1)}, 1, [(C, late)])
    late.is_done = True
    assert watched.compared(C, A) == (PENDING_MAX, PENDING_MAX)


def test_a_model_that_is_linked_no_more_is_forgotten():
    watched = Watched(lambda: 0.0)
    watched.canaries = frozenset([C])
    watched.add({A: Prediction(1), B: Prediction(2)}, 1, [(C, FakeTask(1))])
    watched.stats()
    watched.keep((B, C))
    assert set(watched.stats()["canaries"]["c:1"]["others"]) == {"b:1"}
    watched.keep((A, B))
    assert watched.stats() == {}


def test_counts_are_exact_with_any_number_of_threads():
    watch, core = Watch(), Core(lambda: FakeTask(1))
    threads = [threading.Thread(target=watch_queries, args=(watch, core, 500)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    stats = watch.stats()
    assert stats["sent"] + stats["shed"] == 4000
    assert stats["answered"] == stats["sent"]
