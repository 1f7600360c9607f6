"""Answers that feedback may still come for, in memory of the core."""

import gc
import random
import sys
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from clipper.selection import Plan, Prediction
from clipper.types import Answer, VersionedModel
from clipper_core.learning.answer_window import AnswerWindow, Joined
from clipper_core.runtime.status import StatusError

MODELS = tuple(VersionedModel(name, 1) for name in "abcd")
VALUES: list[Any] = [
    *(0, 1, -1, 2**63 - 1, -(2**63), 2**63, True, False, 0.5, -0.0, float("inf")),
    *("", "one", "é" * 40, b"", b"raw", None, np.arange(3.0), {"a": 1}),
]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Learner:
    """An object that can be weakly referenced."""


def window_of(size: int = 1000, bytes_max: int = 1 << 30, clock: Clock | None = None) -> Any:
    return AnswerWindow(size, 60.0, bytes_max, Answer, Prediction, Plan, clock, "n")


def parts(joined: Any) -> tuple[Any, ...]:
    plan = joined.plan
    return (
        joined.learner,
        joined.user,
        (plan.models, plan.probabilities, plan.observers, plan.features),
        {model: (p.output, p.confidence, p.qualifiers) for model, p in joined.arrived.items()},
        joined.answer,
        joined.late,
    )


def typed(value: Any) -> Any:
    """Return a value that equals another only if types, signs and elements do."""
    if isinstance(value, dict):
        return {key: typed(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [typed(one) for one in value]
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.tolist())
    return (type(value).__name__, repr(value))


def drawn(draw: random.Random, learners: list[Learner]) -> tuple[Any, ...]:
    """Return what `add` takes after the number."""
    models = draw.choice([MODELS, MODELS[:1], MODELS[1:3]])
    chance = len(models) == 1 and draw.random() < 0.5
    features = (0.5, 1.0) if draw.random() < 0.1 else ()
    plan = Plan(models, (draw.random(),) if chance else (), (), features)
    arrived = {
        model: Prediction(
            draw.choice(VALUES),
            draw.choice([None, None, 0.25, float("nan")]),
            {"speed": 1} if draw.random() < 0.1 else {},
        )
        for model in draw.sample(models, draw.randint(0, len(models)))
    }
    outputs = [one.output for one in arrived.values()]
    answer = draw.choice(outputs) if outputs and draw.random() < 0.7 else draw.choice(VALUES)
    late = ((MODELS[3], "a future"),) if draw.random() < 0.1 else ()
    return draw.choice(learners), draw.choice(["", "u", "ü" * 30]), plan, arrived, answer, late


@pytest.mark.parametrize("seed", range(6))
def test_it_is_a_dictionary_that_forgets_the_oldest(seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    learners = [Learner() for _ in range(12)]
    window = window_of(200, clock=clock)
    twin: OrderedDict[int, tuple[Any, float, list[bool]]] = OrderedDict()
    numbers = [draw.randrange(1, 2**64) for _ in range(1500)]
    numbers += [engine << 56 | n for n in range(1, 800) for engine in (1, 7)]
    numbers += [step << 40 | n * step for n in range(300) for step in (3, 4, 16, 64, 4096)]
    for number in numbers:
        clock.now += draw.random() * draw.choice([0.2, 0.2, 5.0])
        given = drawn(draw, learners)
        window.add(number, *given)
        twin.setdefault(number, (given, clock.now + 60.0, [False, False, False]))
        while len(twin) > 200 or next(iter(twin.values()))[1] < clock.now:
            twin.popitem(last=False)
        some = draw.choice(list(twin))
        joined = window.get(f"n-{some:x}")
        assert typed(parts(joined)) == typed(expected(twin[some][0]))
        flags = twin[some][2]
        assert [joined.has_feedback, joined.is_written, joined.is_claimed] == flags
        which = draw.randrange(4)
        if which == 3:
            assert joined.claim() == (not flags[0])
            flags[0] = True
        else:
            flags[which] = draw.random() < 0.5
            setattr(joined, ("has_feedback", "is_written", "is_claimed")[which], flags[which])
    assert [id for id, _ in window.items()] == [f"n-{number:x}" for number in twin]
    assert len(window) == len(twin)
    window.close()
    window.add(numbers[0], *given)
    assert (len(window), window.nbytes, window.items()) == (0, 0, [])


def expected(given: tuple[Any, ...]) -> tuple[Any, ...]:
    learner, user, plan, arrived, answer, late = given
    return parts(Joined(learner, user, plan, arrived, answer, late, 0.0))


def test_an_answer_with_a_lasting_view_keeps_its_flags_when_it_is_forgotten() -> None:
    window = window_of(2)
    for number in (1, 2):
        window.add(number, Learner(), "", Plan(MODELS[:1]), {MODELS[0]: Prediction(number)}, number)
    joined, again = window.get("n-1"), window.get("n-1")
    assert joined.claim()
    assert not again.claim()
    window.add(3, Learner(), "", Plan(MODELS[:1]), {MODELS[0]: Prediction(3)}, 3)
    assert window.get("n-1") is None
    assert joined.has_feedback
    assert not joined.claim()
    joined.has_feedback = False
    assert joined.claim()


def test_what_is_forgotten_is_freed() -> None:
    learner, window = Learner(), window_of(50)
    gone = weakref.ref(learner)
    text = "a text that nobody else has " * 2
    for number in range(1, 200):
        models = MODELS[: 1 + number % 4]
        arrived = {model: Prediction(text) for model in models}
        window.add(number, learner, text, Plan(models), arrived, text)
    assert window.get("n-b4").user == text
    before = sys.getrefcount(text)
    window.close()
    # users, and one output that all models share, of 50 answers
    assert before - sys.getrefcount(text) >= 100
    del window, learner, arrived
    gc.collect()
    assert gone() is None


def test_answers_of_the_http_threads_are_found_beside_the_others() -> None:
    clock = Clock()
    window = window_of(4, clock=clock)
    owner = window.pinned_owner(Learner(), MODELS[:1])
    outputs: list[Any] = [7, 2.5, True, "seven", b"raw", np.arange(3.0)]
    for number, output in enumerate(outputs, 1):
        window.add_output(number, owner, output)
        window.add(100 + number, owner.learner, "u", Plan(MODELS[:1]), {}, output)
    assert len(window) == 8
    assert window.get("n-2") is None, "it is older than the last four"
    for number, output in enumerate(outputs[2:], 3):
        joined = window.get(f"n-{number:x}")
        assert typed(joined.answer) == typed(output)
        assert typed(joined.arrived[MODELS[0]].output) == typed(output)
        assert joined.plan.models == MODELS[:1]
        assert joined.claim()
        assert not window.get(f"n-{number:x}").claim()
    clock.now += 61.0
    assert window.get("n-6") is None
    window.add_output(7, owner, 1)
    assert len(window) == 5
    window.add_output(0, owner, 1)
    window.add(0, owner.learner, "", Plan(()), {}, 1)
    assert len(window) == 5, "number 0 is no answer"


def test_answers_of_the_http_threads_know_their_users() -> None:
    window = window_of(100)
    owner = window.pinned_owner(Learner(), MODELS[:1])
    users = ["", *("u" * n for n in range(1, 65)), "caf\u00e9", "\u00e9" * 32]
    for number, user in enumerate(users * 4, 1):
        window.add_output(number, owner, np.arange(3.0) if number % 2 else number, user)
    last = 4 * len(users)
    for number in range(last - 99, last + 1):
        joined = window.get(f"n-{number:x}")
        assert joined.user == users[(number - 1) % len(users)]
        assert joined.plan.models == MODELS[:1]
        if number % 2:
            assert joined.answer.tolist() == [0.0, 1.0, 2.0]
        else:
            assert joined.answer == number
    assert len(window.items()) == 100
    with pytest.raises(ValueError, match="65 bytes: at most 64"):
        window.add_output(last + 1, owner, 1, "u" * 65)


def test_large_outputs_are_bounded_by_their_bytes_and_the_oldest_go_first() -> None:
    window = window_of(64, 10_000)
    owner = window.pinned_owner(Learner(), MODELS[:1])
    for number in range(1, 41):
        window.add_output(number, owner, b"x" * 1000)
        window.add(100 + number, owner.learner, "", Plan(MODELS[:1]), {}, b"y" * 1000)
    assert window.nbytes <= 20_000
    assert window.get("n-28") is not None
    assert window.get("n-24") is not None
    assert window.get("n-14") is None
    window.add_output(41, owner, b"x" * 20_000)
    assert window.get("n-29") is None
    assert window.get("n-28") is not None, "nothing else was forgotten for it"


@pytest.mark.parametrize("size", [0, 1 << 40])
def test_a_size_that_is_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(StatusError, match="size_max="):
        window_of(size)


def test_an_answer_of_three_models_takes_few_bytes() -> None:
    window, learner = window_of(1 << 20), Learner()
    plan = Plan(MODELS[:3])
    gc.collect()
    before = len(gc.get_objects())
    for number in range(1, 100_001):
        arrived = {model: Prediction(number % 10) for model in MODELS[:3]}
        window.add(number, learner, "", plan, arrived, number % 10)
    assert window.nbytes / len(window) == 64.0
    assert (window.nbytes + window.index_bytes) / len(window) <= 96.0
    gc.collect()
    assert len(gc.get_objects()) < before + 1000, "the collector walks none of them"
