"""Hearings on an engine whose clock is the test's: who is asked when, what decides, what becomes of the rest."""

from typing import Any

import numpy as np

from clipper_core.decider import Decider, Rule, Step
from clipper_core.ensemble import predict_heard
from clipper_core.future import Future

World = Any  # tests/core/conftest.py

FIRST = Decider([Step(Rule.FIRST)])
ALL = Decider([Step(Rule.ALL)])
MAJORITY = Decider([Step(Rule.QUORUM)])


def models_of(world: World, n: int, **options: Any) -> tuple[Any, ...]:
    return tuple(world.model(**options) for _ in range(n))


def containers_of(world: World, models: tuple[Any, ...]) -> list[Any]:
    return [world.container(model) for model in models]


def answer(world: World, container: Any, value: float) -> None:
    assert container.read()
    container.reply(lambda rows: np.full(len(rows), value))
    world.step()


def statuses_of(future: Future) -> list[str]:
    return [future.status(i).name for i in range(len(future))]


def test_the_first_answers_and_the_others_are_given_up(world: World) -> None:
    models = models_of(world, 3)
    containers = containers_of(world, models)
    future = predict_heard(models, FIRST, 1.0, 50_000)
    assert future.verdict is None
    assert not future.done()
    world.step()
    answer(world, containers[1], 7.0)
    assert future.done()
    assert future.verdict == (0, 0b010, 0b010)
    assert future.result(0) == [7.0]
    assert statuses_of(future) == ["UNNEEDED", "OK", "UNNEEDED"]
    answer(world, containers[0], 8.0)
    assert future.verdict == (0, 0b010, 0b010)
    assert models[0].cached(1.0) == (True, 8.0), "a late prediction still fills the cache"
    answer(world, containers[2], 9.0)
    assert world.counts()["UNNEEDED"] == 2


def test_a_delayed_start_happens_when_its_time_comes(world: World) -> None:
    models = models_of(world, 2)
    containers = containers_of(world, models)
    future = predict_heard(models, ALL, 1.0, 50_000, starts_us=(0, 5_000))
    world.step()
    answer(world, containers[0], 7.0)
    world.step(4_000)
    assert not containers[1].read()
    world.step(1_100)
    answer(world, containers[1], 8.0)
    assert future.result(0) == [7.0, 8.0]
    assert future.verdict == (0, 0b11, 0b11)


def test_a_delayed_start_does_not_happen_once_decided(world: World) -> None:
    models = models_of(world, 2)
    containers = containers_of(world, models)
    future = predict_heard(models, FIRST, 1.0, 50_000, starts_us=(0, 5_000))
    world.step()
    answer(world, containers[0], 7.0)
    assert future.done()
    world.step(60_000)
    assert not containers[1].read()
    assert statuses_of(future) == ["OK", "UNNEEDED"]


def test_a_cascade_asks_until_one_is_sure(world: World) -> None:
    models = models_of(world, 3)
    containers = containers_of(world, models)
    cascade = Decider([Step(Rule.CASCADE, confidence_min=0.8)])
    future = predict_heard(models, cascade, 1.0, 50_000, starts_us=(-1, -1, -1))
    for i, sure in enumerate((0.5, 0.9)):
        world.step()
        assert containers[i].read()
        containers[i].reply(lambda rows: np.ones(len(rows)), confidence=np.array([sure], np.float32))
        world.step()
    assert future.verdict == (0, 0b010, 0b011)
    assert statuses_of(future) == ["OK", "OK", "UNNEEDED"]


def test_all_hits_answer_at_submit(world: World) -> None:
    models = models_of(world, 3)
    for model, value in zip(models, (1.0, 2.0, 2.0), strict=True):
        model.put(5.0, value)
    future = predict_heard(models, MAJORITY, 5.0)
    assert future.verdict == (0, 0b111, 0b111)
    assert predict_heard(models, FIRST, 5.0).verdict == (0, 0b001, 0b111)


def test_at_the_deadline_with_what_there_is(world: World) -> None:
    models = models_of(world, 3)
    containers = containers_of(world, models)
    future = predict_heard(models, MAJORITY, 1.0, 20_000)
    world.step()
    answer(world, containers[2], 7.0)
    world.pass_deadline(20_000)
    assert future.verdict == (0, 0b100, 0b100)
    nobody = predict_heard(models, MAJORITY, 2.0, 20_000)
    world.step()
    world.pass_deadline(20_000)
    assert nobody.verdict == (0, 0, 0)
