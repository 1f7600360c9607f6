"""Admission to a lane: its forecast, when it admits again, and that it rejects at once."""

import random
from typing import Any

import numpy as np
import pytest

from clipper_core.runtime.status import Status
from clipper_core.scheduling.admission import AdmissionGate

World = Any  # tests/core/conftest.py
AIMD, STATIC = 0, 3
PROBE_US = 100_000
LINE = {"own_us": 1_000.0, "row_us": 10.0, "full_us": 2_000.0, "size": 100}


def slow_finish(
    now: int, seen: int, ahead: int, begin: float, margin: float, tail: int, later: int
) -> float:
    """Return the forecast for a row, computed row by row: its batch, and the time that the batches
    before it take."""
    begins, rows = now + margin * begin, ahead
    for _ in range(seen, tail):
        rows += 1
        if rows == LINE["size"]:
            begins = max(begins, later) + margin * LINE["full_us"]
            rows = 0
    return max(begins, later) + margin * min(
        LINE["own_us"] + rows * LINE["row_us"], LINE["full_us"]
    )


@pytest.mark.parametrize("seed", range(50))
def test_the_forecast_is_that_of_a_walk_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    gate = AdmissionGate()
    for i in range(rng.randrange(60)):
        gate.learn(rng.uniform(0.5, 2.5), 1.0, 1_000 * i)
    now, seen = 10_000_000 + rng.randrange(10**9), rng.randrange(10**6) + 100
    ahead, begin = rng.randrange(100), rng.choice([0.0, 500.0, 30_000.0])
    gate.publish(now, seen, ahead=ahead, begin_us=begin, **LINE)
    for _ in range(20):
        tail, later = seen + rng.choice([0, 1, 50, 99, 1234]), now + rng.choice([0, 100, 40_000])
        expected = slow_finish(now, seen, ahead, begin, gate.margin(now), tail, later)
        assert abs(gate.finish(tail, later) - expected) <= 20 + 0.002 * (expected - now), (
            "whole microseconds"
        )


def test_admission_without_an_estimate_accepts() -> None:
    gate = AdmissionGate()
    assert gate.finish(0, 1_000) == 1_000
    assert gate.finish(10**6, 1_000) == 1_000


def test_without_a_replica_it_is_open_until_one_is_expected() -> None:
    gate = AdmissionGate()
    gate.publish(0, 0, begin_us=1e9, **LINE)
    gate.close()
    assert gate.finish(5, 1_000) == 1_000
    gate.close(50_000)
    assert (gate.finish(5, 1_000), gate.finish(5, 60_000)) == (50_000, 60_000)
    assert not gate.probe(1 << 62), "it is no estimate that could be tried"


def test_an_old_tail_counts_as_none() -> None:
    """A submitter may read the tail before the loop moves the base past it."""
    gate = AdmissionGate()
    gate.publish(0, 1_000, begin_us=0.0, **LINE)
    assert gate.finish(990, 0) == gate.finish(1_000, 0)


def test_time_opens_it() -> None:
    gate = AdmissionGate()
    gate.publish(0, 0, begin_us=50_000.0, **LINE)
    assert gate.finish(0, 0) == 51_000
    assert gate.finish(0, 60_000) == 61_000


def test_one_probe_in_a_while() -> None:
    gate = AdmissionGate()
    gate.publish(0, 0, begin_us=0.0, probe_us=PROBE_US, **LINE)
    assert not gate.probe(PROBE_US - 1)
    assert [gate.probe(PROBE_US + i) for i in range(5)] == [True, False, False, False, False]
    assert gate.probe(2 * PROBE_US)


def test_the_margin_is_the_98th_percentile_of_actual_over_forecast() -> None:
    rng = np.random.default_rng(1)
    gate, inside = AdmissionGate(), 0
    for i in range(6_000):
        actual = float(1_000 * np.exp(0.1 * rng.standard_normal()))
        inside += i >= 1_000 and actual <= gate.margin(10_000 * i) * 1_000
        gate.learn(actual, 1_000, 10_000 * i)
    assert 0.96 <= inside / 5_000 <= 0.995


def test_the_margin_is_bounded_and_comes_to_rest() -> None:
    gate = AdmissionGate()
    for i in range(1_000):
        gate.learn(1e9, 1.0, 100 * i)
    assert gate.margin(100_000) == 2.0
    assert gate.margin(100_000 + 50_000) == 2.0, "a pause is no rest"
    assert gate.margin(100_000 + 3_100_000) < 1.06
    for i in range(1_000):
        gate.learn(0.0, 1.0, 10_000_000 + i)
    assert gate.margin(10_001_000) == 0.8
    for nonsense in (float("nan"), -1.0):
        gate.learn(nonsense, 1.0, 10_001_001)
    gate.learn(1.0, 0.0, 10_001_001)
    assert gate.margin(10_001_000) == 0.8


# -- in the engine


def taught(world: World, took_us: int = 1_000, size: int = 4, slo_ms: int = 10) -> tuple[Any, Any]:
    """Return a model of one replica whose batches of `size` rows are known to take `took_us`, with
    a forecast for queries of `slo_ms`."""
    model = world.model(cached=False)
    container = world.container(model, mode=STATIC, size_max=size)
    for k in range(40):
        for _ in range(size):
            model.predict(float(k), 60_000)
        world.step()
        container.read()
        world.step(took_us)
        container.reply()
        world.step()
    model.predict(0.0, slo_ms)
    world.step()
    container.reply_all()
    world.step(500)
    return model, container


def test_what_cannot_finish_is_refused_at_once_and_names_a_time_to_retry(world: World) -> None:
    model, container = taught(world)
    futures = [model.predict(float(k), 10) for k in range(100)]
    refused = [future for future in futures if future.done()]
    assert 40 <= len(refused) <= 80, "10 ms are ten batches of four, less the margin"
    assert all(future.status() == Status.FULL for future in refused)
    assert refused == futures[-len(refused) :], "who came first is served"
    error = refused[-1].exception()
    assert 0.001 <= error.retry_after_s <= 1.0
    while not all(future.done() for future in futures):
        world.step()
        container.read()
        world.step(1_000)
        container.reply()
    admitted = futures[: -len(refused)]
    assert [future.status() for future in admitted] == [Status.OK] * len(admitted)


def test_a_tight_query_is_refused_where_an_easy_one_is_not(world: World) -> None:
    model, _ = taught(world, 20_000, slo_ms=5)
    assert model.predict(1.0, 5).status() == Status.FULL
    assert not model.predict(1.0, 500).done()


def test_admission_accepts_again_when_the_queue_is_served(world: World) -> None:
    model, container = taught(world)

    def admitted() -> int:
        return next(n for n in range(1_000) if model.predict(1.0, 10).done())

    full = admitted()
    assert full >= 20
    world.step()
    assert admitted() <= full // 4
    while container.read():
        world.step(1_000)
        container.reply()
        world.step()
    assert admitted() >= 0.8 * full


def test_an_estimate_that_is_wrong_is_tried_again(world: World) -> None:
    """A model that was slow refuses all rows but single ones; these show that it is fast again."""
    model, container = taught(world, 20_000, size=1, slo_ms=5)
    sent = []
    for _ in range(60):
        future = model.predict(1.0, 5)
        sent.append(future)
        world.step()
        if container.read():
            world.step(100)
            container.reply()
        world.step(10_000)
    statuses = [future.status() for future in sent]
    assert statuses[0] == Status.FULL
    assert Status.OK in statuses
    assert statuses[-20:] == [Status.OK] * 20


def slow_and_cached(world: World) -> tuple[Any, Any]:
    """Return a cached model of one replica that is known to take 200 ms for a row; queries have 500
    ms."""
    model = world.model(cached=True)
    container = world.container(model, mode=STATIC, size_max=1)
    for k in range(12):
        model.predict(-1.0 - k, 500)
        world.step()
        container.read()
        world.step(200_000)
        container.reply()
        world.step()
    return model, container


def test_queries_equal_to_one_in_flight_are_never_refused(world: World) -> None:
    """Bursts of 50 identical queries cost one evaluation each, so admission has no reason to refuse
    any of them."""
    model, container = slow_and_cached(world)
    evaluated = world.engine.model_counts(model.index)["evaluated"]
    for burst in range(6):
        futures = [model.predict(float(burst), 500) for _ in range(25)]
        world.step()
        futures += [model.predict(float(burst), 500) for _ in range(25)]
        world.step()
        assert [rows.tolist() for _, rows in container.read()] == [[float(burst)]]
        world.step(200_000)
        container.reply()
        world.step()
        assert {future.status() for future in futures} == {Status.OK}
    assert world.engine.model_counts(model.index)["evaluated"] == evaluated + 6


def test_a_query_let_in_only_to_join_ends_as_full_without_an_equal_one(world: World) -> None:
    model, container = slow_and_cached(world)
    for k in range(3):
        model.predict(float(k), 500)
    late = model.predict(7.0, 500)
    assert not late.done(), (
        "the loop has not looked at the rows before it, one of which may be equal"
    )
    world.step()
    assert late.status() == Status.FULL
    error = late.exception()
    assert 0.001 <= error.retry_after_s <= 1.0
    assert model.predict(8.0, 500).status() == Status.FULL, "nobody asks the same"
    container.reply_all()


def test_a_query_whose_answer_has_just_been_cached_is_not_refused(world: World) -> None:
    model, container = slow_and_cached(world)
    for k in range(3):
        model.predict(float(k), 500)
    world.step()
    assert model.predict(9.0, 500).status() == Status.FULL
    model.put(9.0, 81.0)
    assert model.predict(9.0, 500).result() == 81.0
    container.reply_all()


def test_equal_queries_take_no_place_from_others(world: World) -> None:
    """A joined query adds no row to the forecast or to the rate of arriving rows."""
    model, container = slow_and_cached(world)
    for _ in range(100):
        model.predict(1.0, 500)
        world.step(10)
    other = model.predict(2.0, 500)
    world.step()
    assert not other.done()
    container.reply_all()
    assert other.status() == Status.OK


def test_the_first_burst_of_a_warm_replica_is_answered(world: World) -> None:
    """5000 queries come within 25 ms of a new replica, which takes 100 us for a batch and 1 us for
    a row."""
    model = world.model(cached=False)
    sizes = [1, 1, 1, *(1 << k for k in range(1, 9))]
    container = world.container(
        model, mode=AIMD, size_max=512, timings=[(n, 50 + n) for n in sizes]
    )
    world.step()
    futures, ends_us = [], dict[int, int]()
    for k in range(5000):
        futures.append(model.predict(float(k), 20))
        world.step(5)
        for number, rows in container.read():
            if number not in ends_us:
                ends_us[number] = (
                    max(world.now_us, max(ends_us.values(), default=0)) + 100 + len(rows)
                )
        if container.inbox and ends_us[container.inbox[0][0]] <= world.now_us:
            container.reply()
    container.reply_all()
    assert sum(future.status() != Status.OK for future in futures) <= 100, "2 %"


def test_a_model_without_a_replica_admits_what_one_may_still_come_for(world: World) -> None:
    model, container = taught(world)
    container.lose()
    world.step()
    waiting, soon = model.predict(1.0, 10), model.predict(2.0, 60_000)
    assert not waiting.done()
    world.engine.set_earliest_replica(model.index, world.now_us + 1_000_000)
    world.step()
    assert waiting.status() == Status.NO_REPLICA, "it waited, and need not any more"
    assert not soon.done()
    hopeless, patient = model.predict(3.0, 10), model.predict(4.0, 60_000)
    assert hopeless.status() == Status.NO_REPLICA, "none comes before its deadline"
    assert not patient.done()
    world.container(model)
    world.serve()
    assert (soon.result(), patient.result()) == (2.0, 4.0)
    again = model.predict(5.0, 10)
    world.serve()
    assert again.result() == 5.0
    with pytest.raises(Exception, match="no model"):
        world.engine.set_earliest_replica(99, 0)


def test_all_queries_that_wait_in_vain_are_answered_at_once(world: World) -> None:
    """Queries with rows in several lanes, joined rows, pieces of arrays and rows of a closed
    container end at once; those that may still be in time wait."""
    model, container = taught(world)
    in_hand = model.predict(7.0, 500)
    world.step()
    container.lose()
    world.step()
    unsent = [
        in_hand,
        *(
            model.predict(float(x % 3), slo_ms)
            for x, slo_ms in enumerate([5, 60, 60, 300, 500, 900])
        ),
    ]
    many = model.predict_many(np.arange(200.0), 800)
    later = model.predict(9.0, 1100)
    world.step()
    assert not any(future.done() for future in (*unsent, many, later))
    world.engine.set_earliest_replica(model.index, world.now_us + 1_000_000)
    world.step()
    assert {future.status() for future in unsent} == {Status.NO_REPLICA}
    assert {many.status(i) for i in range(200)} == {Status.NO_REPLICA}
    assert not later.done()
    world.container(model)
    world.serve()
    assert later.result() == 9.0
