"""Ensemble calls on an engine whose clock the test sets: which models are queried and when, what
decides, and how the other tasks end."""

import gc
import math
import random
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from clipper.schema import Tensors
from clipper_core.engine.model import predict_ensemble
from clipper_core.results.decider import Decider, Rule, Step
from clipper_core.results.future import Future, MailboxReader
from clipper_core.runtime.status import Status, StatusError
from clipper_core.wire.prediction import register_record
from clipper_core.wire.record import RecordLayout

World = Any  # tests/core/conftest.py
TICK_US = 64  # a deadline is kept this late at most
HELD_US = 100_000

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
    future = predict_ensemble(models, FIRST, 1.0, 50_000)
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
    future = predict_ensemble(models, ALL, 1.0, 50_000, starts_us=(0, 5_000))
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
    future = predict_ensemble(models, FIRST, 1.0, 50_000, starts_us=(0, 5_000))
    world.step()
    answer(world, containers[0], 7.0)
    assert future.done()
    world.step(60_000)
    assert not containers[1].read()
    assert statuses_of(future) == ["OK", "UNNEEDED"]


def test_a_cascade_queries_until_one_is_sure(world: World) -> None:
    models = models_of(world, 3)
    containers = containers_of(world, models)
    cascade = Decider([Step(Rule.CASCADE, confidence_min=0.8)])
    future = predict_ensemble(models, cascade, 1.0, 50_000, starts_us=(-1, -1, -1))
    for i, sure in enumerate((0.5, 0.9)):
        world.step()
        assert containers[i].read()
        containers[i].reply(
            lambda rows: np.ones(len(rows)), confidence=np.array([sure], np.float32)
        )
        world.step()
    assert future.verdict == (0, 0b010, 0b011)
    assert statuses_of(future) == ["OK", "OK", "UNNEEDED"]


def test_all_hits_answer_at_submit(world: World) -> None:
    models = models_of(world, 3)
    for model, value in zip(models, (1.0, 2.0, 2.0), strict=True):
        model.put(5.0, value)
    future = predict_ensemble(models, MAJORITY, 5.0)
    assert future.verdict == (0, 0b111, 0b111)
    assert predict_ensemble(models, FIRST, 5.0).verdict == (0, 0b001, 0b111)


def test_at_the_deadline_with_what_there_is(world: World) -> None:
    models = models_of(world, 3)
    containers = containers_of(world, models)
    future = predict_ensemble(models, MAJORITY, 1.0, 20_000)
    world.step()
    answer(world, containers[2], 7.0)
    world.pass_deadline(20_000)
    assert future.verdict == (0, 0b100, 0b100)
    nobody = predict_ensemble(models, MAJORITY, 2.0, 20_000)
    world.step()
    world.pass_deadline(20_000)
    assert nobody.verdict == (0, 0, 0)


def test_what_waits_in_a_queue_is_given_up_and_never_sent(world: World) -> None:
    models = models_of(world, 2)
    quick = world.container(models[1])
    future = predict_ensemble(models, FIRST, 1.0, 50_000)
    world.step()
    answer(world, quick, 7.0)
    assert statuses_of(future) == ["UNNEEDED", "OK"]
    late = world.container(models[0])
    world.step(1)
    assert late.read() == [], "nobody needs that row any more"
    assert world.engine.snapshot()["models"][0]["ended"]["UNNEEDED"] == 1
    world.step(30_000)
    assert world.engine.snapshot()["models"][0]["queued"] == 0


def test_tasks_continue_after_the_verdict_if_the_policy_learns(world: World) -> None:
    models = models_of(world, 2)
    containers = containers_of(world, models)
    future = predict_ensemble(models, FIRST, 1.0, 50_000, learn=True)
    world.step()
    answer(world, containers[1], 7.0)
    assert future.verdict == (0, 0b10, 0b10)
    assert statuses_of(future) == ["PENDING", "OK"]
    answer(world, containers[0], 8.0)
    assert future.output(0) == 8.0
    assert future.verdict == (0, 0b10, 0b10), "a late reply never leaks into an answer"
    assert future.result(0) == [7.0]


def test_a_policy_that_learns_queries_all_even_if_hits_decide(world: World) -> None:
    models = models_of(world, 2)
    containers = containers_of(world, models)
    models[0].put(1.0, 7.0)
    assert statuses_of(predict_ensemble(models, FIRST, 1.0, 50_000)) == ["OK", "UNNEEDED"]
    future = predict_ensemble(models, FIRST, 1.0, 50_000, learn=True)
    assert future.verdict == (0, 0b01, 0b01)
    world.step()
    answer(world, containers[1], 8.0)
    assert future.output(1) == 8.0
    assert world.counts()["OK"] == 1


def test_a_failure_is_an_arrival_of_nothing(world: World) -> None:
    models = models_of(world, 2)
    containers = containers_of(world, models)
    future = predict_ensemble(models, FIRST, 1.0, 50_000)
    world.step()
    containers[0].read()
    containers[0].fail("broken")
    world.step()
    assert not future.done()
    answer(world, containers[1], math.nan)
    assert future.verdict == (0, 0, 0), "no number is no vote"
    assert future.status(1) is Status.OK


def test_hedges_are_bounded(world: World) -> None:
    """There is one token at the start, and each query adds an eighth: of 16 queries that would all
    be hedged, three are."""
    models = models_of(world, 2, cached=False)
    containers = containers_of(world, models)
    decider = Decider([Step(Rule.HEDGED, extra=0.125)])
    futures = []
    for i in range(16):
        futures.append(predict_ensemble(models, decider, float(i), 50_000, starts_us=(0, 1_000)))
        world.step(10)
    world.step(1_100)
    assert sum(len(rows) for _, rows in containers[1].read()) == 3
    containers[0].reply_all()
    assert all(future.done() for future in futures)
    containers[1].reply_all()


def test_a_hedge_is_queried_at_once_when_the_first_fails(world: World) -> None:
    models = models_of(world, 2)
    containers = containers_of(world, models)
    future = predict_ensemble(
        models, Decider([Step(Rule.HEDGED, extra=0.0)]), 1.0, 50_000, starts_us=(0, 20_000)
    )
    world.step()
    containers[0].read()
    containers[0].fail("broken")
    world.step()
    answer(world, containers[1], 7.0)
    assert future.verdict == (0, 0b10, 0b10)


def test_of_the_tied_the_first_sent_gives_up_those_that_wait(world: World) -> None:
    models = models_of(world, 3, cached=False)
    future = predict_ensemble(models, Decider([Step(Rule.TIED)]), 1.0, 50_000)
    world.step()
    assert statuses_of(future) == ["PENDING"] * 3
    second = world.container(models[1])
    assert statuses_of(future) == ["UNNEEDED", "PENDING", "UNNEEDED"]
    first = world.container(models[0])
    assert first.read() == []
    answer(world, second, 7.0)
    assert future.result(0) == [7.0]


def test_the_next_step_decides_when_the_time_of_one_is_over(world: World) -> None:
    models = models_of(world, 3)
    containers = containers_of(world, models)
    decider = Decider(
        [Step(Rule.QUORUM, 12_000), Step(Rule.BEST, 20_000), Step(Rule.FLOOR, which=2)]
    )
    future = predict_ensemble(models, decider, 1.0, 50_000)
    world.step()
    answer(world, containers[0], 7.0)
    assert not future.done()
    assert world.step(11_900) <= 12_000 + world.now_us
    assert not future.done()
    world.step(200)
    assert future.verdict == (1, 0b001, 0b001)
    assert future.latency_us >= 12_000


@pytest.mark.parametrize("starts_us", [(0, 60_000), (0, -1)])
def test_a_task_that_would_start_after_the_deadline_never_does(
    world: World, starts_us: tuple[int, int]
) -> None:
    models = models_of(world, 2)
    future = predict_ensemble(models, ALL, 1.0, 20_000, starts_us=starts_us)
    world.step()
    world.pass_deadline(20_000)
    assert future.verdict == (0, 0, 0)
    assert statuses_of(future) == ["NO_REPLICA", "UNNEEDED"]


def test_refused_at_submit(world: World) -> None:
    """A model whose container cannot be ready in time is refused, and another one is queried
    instead."""
    models = models_of(world, 2)
    for _ in range(3):
        predict_ensemble(models[:1], ALL, 1.0, 10_000)
    world.engine.refuse_new()
    future = predict_ensemble(models, FIRST, 5.0, 20_000)
    assert future.verdict == (0, 0, 0)
    assert statuses_of(future) == ["CLOSED", "CLOSED"]


@pytest.mark.parametrize("learn", [False, True])
def test_given_up(world: World, learn: bool) -> None:
    models = models_of(world, 3)
    containers = containers_of(world, models)
    future = predict_ensemble(models, ALL, 1.0, 50_000, starts_us=(0, 5_000, -1), learn=learn)
    world.step()
    assert future.cancel()
    assert future.cancel()
    assert future.cancelled()
    assert future.done()
    assert future.verdict is None
    assert statuses_of(future) == ["CANCELLED", "UNNEEDED", "UNNEEDED"]
    with pytest.raises(CancelledError):
        future.result(0)
    answer(world, containers[0], 7.0)
    world.step(6_000)
    assert containers[1].read() == []


def test_a_dropped_future_sends_no_more_queries(world: World) -> None:
    models = models_of(world, 3)
    containers = containers_of(world, models)
    future = predict_ensemble(models, ALL, 1.0, 50_000, starts_us=(0, 5_000, -1))
    world.step()
    del future
    gc.collect()
    answer(world, containers[0], 7.0)
    assert models[0].cached(1.0) == (True, 7.0)
    world.step(6_000)
    assert containers[1].read() == []
    world.pass_deadline(50_000)
    assert world.engine.completion.ensemble_calls_held == 0


@pytest.mark.parametrize("starts_us", [(0, 0), (0, 5_000), (5_000, -1)])
def test_the_engine_closes(world: World, starts_us: tuple[int, int]) -> None:
    models = models_of(world, 2)
    future = predict_ensemble(models, ALL, 1.0, 50_000, starts_us=starts_us)
    world.step()
    world.engine.finish()
    assert future.wait(60)
    assert future.verdict == (0, 0, 0)
    assert set(statuses_of(future)) <= {"CLOSED", "UNNEEDED"}
    del future
    assert world.engine.completion.ensemble_calls_held == 0
    late = predict_ensemble(models, ALL, 2.0, 50_000, starts_us=starts_us)
    assert late.verdict == (0, 0, 0)


def test_a_killed_engine_leaves_no_waiter_blocked(world: World) -> None:
    future = predict_ensemble(models_of(world, 2), ALL, 1.0, 50_000)
    world.step()
    world.engine.kill(Status.FORKED)
    with pytest.raises(StatusError):
        future.wait(60)


def test_a_mailbox_is_notified_once_by_the_verdict(world: World) -> None:
    models = models_of(world, 3)
    containers = containers_of(world, models)
    mailbox = MailboxReader(world.engine.completion)
    future = predict_ensemble(models, MAJORITY, 1.0, 50_000)
    assert mailbox.add(future, "item")
    world.step()
    answer(world, containers[0], 7.0)
    assert mailbox.drain() == []
    answer(world, containers[1], 7.0)
    assert mailbox.drain() == [(future, "item")]
    assert not mailbox.add(future, "again")


def test_votes_are_delivered_until_the_verdict_and_python_may_decide(world: World) -> None:
    models = models_of(world, 3)
    containers = containers_of(world, models)
    mailbox = MailboxReader(world.engine.completion)
    world.engine.completion.on_callback = mailbox.add
    models[0].put(1.0, 7.0)
    seen: list[list[str]] = []
    future = predict_ensemble(models, ALL, 1.0, 50_000)
    future.on_vote(lambda votes: seen.append(statuses_of(votes)))

    def call_back() -> None:
        for view, fn in mailbox.drain():
            fn(view)

    assert seen == [["OK", "PENDING", "PENDING"]]
    world.step()
    answer(world, containers[1], 8.0)
    call_back()
    assert seen[1:] == [["OK", "OK", "PENDING"]]
    with pytest.raises(ValueError, match="have not all arrived"):
        future.rule(3, 0b110)
    assert future.rule(3, 0b010, 40_000)
    assert not future.rule(3, 0b001)
    assert future.verdict == (3, 0b010, 0b011)
    assert future.latency_us == 40_000
    assert future.result(0) == [8.0]
    call_back()
    assert len(seen) == 2, "reported until the verdict"
    del future
    assert mailbox.drain() == []
    with pytest.raises(StatusError, match="only a query with a decider"):
        models[0].predict(1.0).rule(0, 0)


def test_votes_of_many_kinds(world: World) -> None:
    """Equal values count together whatever their width, and nothing else does."""
    models = tuple(world.model(shape=(), output="") for _ in range(6))
    for values, same in [
        ([np.int32(-1), np.int64(-1), np.int8(-1), np.uint8(255), -1.0, True], 0b000111),
        (["a", "a", b"a", "b", "a", 1], 0b010011),
        ([np.float32(0.5), 0.5, np.float16(0.5), -0.0, 0.0, 0], 0b000111),
        (
            [np.ones(2), np.ones(2), np.ones((2, 1)), np.ones(2, "f4"), np.zeros(2), np.ones(2)],
            0b100011,
        ),
        ([True, True, 1, np.uint8(1), np.float64(1), np.bool_(True)], 0b100011),
    ]:
        for model, value in zip(models, values, strict=True):
            model.put(3.0, value)
        need = same.bit_count()
        quorum = Decider([Step(Rule.QUORUM, 1_000, need=need), Step(Rule.FIRST)])
        assert predict_ensemble(models, quorum, 3.0).verdict == (0, 0b111111, 0b111111), values
        more = Decider([Step(Rule.QUORUM, 1_000, need=need + 1), Step(Rule.FIRST)])
        assert predict_ensemble(models, more, 3.0).verdict[0] == 1, values


@pytest.mark.parametrize("cached", [True, False])
def test_one_tensor_of_a_record_is_compared(world: World, cached: bool) -> None:
    """Records of equal labels agree, whatever else they hold, and where the label is in them; so
    does a label without a name.
    """
    wide = Tensors.parse({"score": "f32[3]", "label": "i64", "box": "f64[2]"})
    slim = Tensors.parse({"label": "i32", "score": "f64"})
    free = Tensors.parse({"why": "str", "score": "f32[*]", "label": "i16", "tags": "str[*]"})

    def named(tensors: Tensors) -> Any:
        layout = RecordLayout(tensors.specs)
        number = register_record(str(tensors), layout, tensors.unpack, tensors.unpack_many)
        fixed = tensors.is_fixed
        return world.model(
            output="u8" if fixed else "bytes",
            output_shape=(tensors.row_bytes,) if fixed else None,
            outputs=tensors,
            output_record=number,
            cached=cached,
        )

    outputs: list[tuple[Any, Any]] = [
        (named(wide), {"score": [1, 2, 3], "label": 7, "box": [1, math.nan]}),
        (named(slim), {"label": 7, "score": 0.5}),
        (world.model(cached=cached), 7),
        (named(wide), {"score": [4, 5, 6], "label": 8, "box": [1, 2]}),
        (named(free), {"why": "so", "score": [1], "label": 7, "tags": ["a", "bc"]}),
        (named(free), {"why": "so what", "score": [1, 2], "label": 9, "tags": ["a", "bc"]}),
        (named(free), {"why": "so", "score": [1, 2], "label": 10, "tags": ["ab", "c"]}),
    ]
    models = tuple(model for model, _ in outputs)
    containers = [] if cached else containers_of(world, models)
    for model, output in outputs if cached else []:
        model.put(3.0, output)

    def verdict(field: str, need: int) -> Any:
        quorum = Decider([Step(Rule.QUORUM, 1_000, need=need), Step(Rule.FIRST)])
        future = predict_ensemble(models, quorum, 3.0, 50_000, field=field, learn=True)
        world.step()
        for container, (model, output) in zip(containers, outputs, strict=False):
            container.read()
            packed = output if model.outputs is None else model.outputs.pack(output)
            container.reply(
                lambda rows, one=packed: (
                    [one] * len(rows) if isinstance(one, bytes) else np.array([one] * len(rows))
                )
            )
            world.step()
        world.pass_deadline(1_000)
        return future.verdict[:2]

    assert verdict("label", 4) == (0, 0b0011111 if not cached else 0b1111111)
    assert verdict("label", 5)[0] == 1, "the others have other labels"
    assert verdict("nothing", 2)[0] == 1, "as a whole no two are equal"
    assert verdict("box", 1) == (0, 0b1111110), "a box with NaN is no vote"
    assert verdict("why", 2)[0] == 0, "two strings are equal"
    assert verdict("why", 3)[0] == 1
    assert verdict("tags", 2)[0] == 0
    assert verdict("tags", 3)[0] == 1, "the same letters, parted otherwise"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"weights": (1.0,)}, "1 weights for 2 models"),
        ({"starts_us": (0, 0, 0)}, "3 starts_us for 2 models"),
        ({"weights": (1.0, -1.0)}, "weights are numbers from 0 on"),
        ({"weights": (1.0, math.nan)}, "weights are numbers from 0 on"),
        ({"starts_us": (0, -2)}, "when the decider submits it"),
    ],
)
def test_what_is_refused(world: World, options: dict[str, Any], why: str) -> None:
    models = models_of(world, 2)
    with pytest.raises(StatusError, match=why) as caught:
        predict_ensemble(models, ALL, 1.0, **options)
    assert caught.value.status == Status.BAD_INPUT
    with pytest.raises(StatusError, match="takes 1 to 64 models, not 0"):
        predict_ensemble((), ALL, 1.0)
    with pytest.raises(StatusError, match="expected f64"):
        predict_ensemble((models[0], world.model("str")), ALL, 1.0 + 2j)


# -- everything at once


def random_decider(rng: random.Random, n: int) -> Decider:
    ends = sorted(rng.sample(range(500, 9_000, 100), rng.randrange(3)))
    rules = [rng.choice(list(Rule)) for _ in range(len(ends) + 1)]
    return Decider(
        [
            Step(
                rule,
                end,
                None,
                rng.choice([0.0, 0.6]),
                rng.choice([0, 2]),
                0.5,
                rng.randrange(n),
                extra=1.0,
            )
            for rule, end in zip(rules, [*ends, 0], strict=True)
        ]
    )


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_every_query_is_answered_once_by_its_deadline(
    world: World, seed: int
) -> None:
    rng = random.Random(seed)
    models = models_of(world, 5, cached=rng.random() < 0.5)
    containers = containers_of(world, models[: rng.randrange(1, 6)])
    futures: list[tuple[Future, int]] = []
    for _ in range(300):
        if rng.random() < 0.6:
            n, slo = rng.randrange(1, 6), rng.choice([2_000, 10_000])
            some = tuple(rng.sample(models, n))
            starts = tuple(rng.choice([0, 0, -1, 700, 3_000]) for _ in range(n))
            x = float(rng.randrange(20))
            future = predict_ensemble(
                some, random_decider(rng, n), x, slo, starts_us=starts, learn=rng.random() < 0.5
            )
            futures.append((future, world.now_us + slo))
        world.step(rng.choice([0, 10, 300]))
        for container in rng.sample(containers, len(containers) // 2):
            if container.read() and rng.random() < 0.9:
                container.reply(lambda rows: np.array([float(rng.randrange(2)) for _ in rows]))
            elif container.inbox:
                container.fail("broken")
        if futures and rng.random() < 0.1:
            rng.choice(futures)[0].cancel()
        if futures and rng.random() < 0.1:
            futures.pop(rng.randrange(len(futures)))
        for future, due in futures:
            assert future.done() or world.now_us <= due + TICK_US
    world.pass_deadline(10_000)
    world.step()
    for future, _ in futures:
        step_used_arrived = future.verdict
        assert future.cancelled() or step_used_arrived is not None
        if step_used_arrived is not None:
            _, used, arrived = step_used_arrived
            assert used & ~arrived == 0
            assert all(
                future.status(i) is Status.OK for i in range(len(future)) if arrived >> i & 1
            )
    for container in containers:
        container.reply_all()
    futures.clear()
    del future
    world.step(10_000)
    world.step(HELD_US)
    assert world.engine.completion.ensemble_calls_held == 0
