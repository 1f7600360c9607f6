"""Every policy on the same fixed queries: each choice, answer, state and merge, as a whole text.

The other tests say what a policy must do; this one notices that something is computed otherwise.
"""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from clipper.errors import NotAllowed
from clipper.selection import (
    POLICIES,
    Combined,
    Observation,
    Plan,
    Prediction,
    Query,
    Truth,
    create_policy,
)
from clipper.selection.learning.batch_learning import ObservationRows, observe_rows
from clipper.selection.learning.learned_state import LearnedState
from clipper.selection.learning.learning_policy import LearningPolicy, state_in_context
from clipper.selection.learning.off_policy import PolicyEvaluator
from clipper.types import VersionedModel
from tests.expected import check_expected

A, B, C, D = (VersionedModel(name, 1) for name in "abcd")
MODELS = (C, A, B)
A2 = VersionedModel("a", 2)
LEARNING = [name for name in POLICIES if isinstance(create_policy(name), LearningPolicy)]


def text(value: object) -> str:
    """Format a value: numbers with six digits, a large array by its shape and three sums."""
    if isinstance(value, np.ndarray):
        if value.size <= 12:
            return f"{value.dtype}{text(value.tolist())}"
        numbers = value.astype(float).ravel()
        turns = np.arange(1, numbers.size + 1)
        sums = [float(np.sum(numbers * weight)) for weight in (1, np.cos(turns), np.sin(turns**2))]
        return f"{value.dtype}{list(value.shape)}{text(sums)}"
    if isinstance(value, float):
        return f"{value + 0.0:.6g}" if abs(value) > 1e-12 or value != value else "0"
    if isinstance(value, list | tuple):
        return "[" + " ".join(map(text, value)) + "]"
    if isinstance(value, dict):
        return "{" + " ".join(f"{text(key)}:{text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, VersionedModel):
        return str(value)
    if isinstance(value, LearnedState):
        parts = value.rows, value.seen, value.labels, value.sure, msgspec.to_builtins(value.tracked)
        return f"{text(value.models)} {' '.join(map(text, parts))}"
    if isinstance(value, Combined):
        shown = value.output, value.confidence, value.used, value.agreement, value.set
        return " ".join(map(text, shown))
    return repr(value)


def labels(i: int) -> tuple[list[Any], Any]:
    """Return what three models answer, of which `a` is the best, and the right label: numbers or
    texts."""
    right: Any = i * 7 % 5 if i % 4 else f"label {i % 3}"
    wrong: Any = (i * 7 + 1) % 5 if i % 4 else "other"
    return [right if i * k % 11 < most else wrong for k, most in ((3, 9), (5, 6), (7, 3))], right


def numbers(i: int) -> tuple[list[Any], Any]:
    """Return what three models answer, and the right number; every fifth is an array of two."""
    right = math.sin(i) * 3 + 5
    outputs = [right + 0.1 * math.cos(i), right * 1.2, 4.0 + i % 3]
    if i % 5 == 4:
        return [np.array([one, -one]) for one in outputs], np.array([right, -right])
    return outputs, right


def observations(policy: Any, state: Any, kind: Any, start: int) -> Iterator[Observation]:
    """Yield twenty queries with feedback: some models silent, unsure or broken; some answers
    scored."""
    for i in range(start, start + 20):
        outputs, right = kind(i)
        features = (math.sin(i), 0.5) if i % 3 == 2 and i > 5 else ()
        query = Query("u", i * 0.37 % 1, features)
        plan = policy.select(state, query, MODELS)
        sure = [None if i % 3 else 0.3 + (i * k) % 7 / 10 for k in (1, 2, 3)]
        predictions = {
            model: Prediction(output, confidence)
            for model, output, confidence in zip((A, B, C), outputs, sure, strict=True)
            if (i + ord(model.name)) % 9
        }
        if i % 13 == 6:
            predictions[B] = Prediction(math.nan)
        if i % 6 == 5:
            answer = next((one.output for one in predictions.values()), None)
            yield Observation(plan, predictions, Truth(score=(i % 4) / 3), answer, 1.0)
        else:
            yield Observation(plan, predictions, Truth(right), weight=1.0 + (i % 8 == 7))


def arrivals(kind: Any) -> Iterator[tuple[dict[VersionedModel, Prediction], list[VersionedModel]]]:
    outputs, _ = kind(9)
    other, _ = kind(13)
    each = {
        m: Prediction(one, sure)
        for m, one, sure in zip((A, B, C), outputs, (0.9, None, 0.4), strict=True)
    }
    yield each, []
    yield {C: each[C], A: Prediction(other[0], 0.6)}, [B]
    yield {B: each[B]}, []
    yield {B: Prediction(math.inf), C: each[C]}, [A]
    yield {**each, D: Prediction(other[1], math.nan)}, []
    yield {A: Prediction("text"), B: Prediction(1.5), C: Prediction(True)}, []
    yield {A: Prediction(math.nan)}, [B]
    yield {}, [A, B]


def answers(policy: Any, state: Any, kind: Any) -> Iterator[str]:
    for arrived, missing in arrivals(kind):
        yield f"answer {text(policy.combine(state, arrived, missing))}"
        if isinstance(policy, LearningPolicy):
            yield f"  raw {text(policy.answering.raw_confidence(state, arrived, missing))}"
    for uniform in (0.0, 0.45, 0.8, 0.999):
        for features in ((), (0.2, -1.0)):
            query = Query("u", uniform, features)
            plans = [policy.select(state, query, some) for some in (MODELS, (B, D), (C,), ())]
            shown = [text((one.models, one.probabilities, one.features)) for one in plans]
            yield f"plans {' '.join(shown)}"
    yield f"best first {text(policy.rank_models_desc(state, None))}"


def learned(policy: Any, state: Any, kind: Any, start: int) -> Any:
    for seen in observations(policy, state, kind, start):
        state = policy.observe(state, seen)
    return state


def changed(policy: Any, base: Any, mine: Any, theirs: Any) -> Iterator[str]:
    """Return the states after models, servers and users are added and removed."""
    again = policy.decode(policy.encode(mine))
    yield f"stored {policy.encode(again) == policy.encode(mine)} {text(again)}"
    yield f"with d {text(policy.add_model(mine, D))}"
    yield f"without b {text(policy.remove_model(mine, B))}"
    alone = policy.remove_model(policy.remove_model(mine, B), C)
    yield f"a alone {text(alone)}, and b {text(policy.add_model(alone, B))}"
    yield f"of nobody {text(policy.add_model(policy.remove_model(alone, A), B))}"
    yield f"new a {text(policy.update_model_version(mine, A, A2))}"
    for old, new in ((D, A2), (A, B)):
        yield f"no change {policy.update_model_version(mine, old, new) is mine}"
    yield f"of a user {text(policy.init(MODELS, mine))}"
    yield f"of a user with d {text(policy.init((A2, B, D), theirs))}"
    yield f"merged {text(policy.merge(base, mine, theirs))}"
    yield f"merged with d {text(policy.merge(base, policy.add_model(mine, D), theirs))}"
    if isinstance(policy, LearningPolicy):
        for features in ((), (0.3, -0.2)):
            yield f"in context {text(state_in_context(policy, mine, features))}"
        yield f"shares {text(policy.portions(mine))} of {text(policy.standing(mine))}"
        yield f"initial {text(policy.initial_like(mine))}"
        for row in (0, -1):
            rows = mine.rows.copy()
            rows[row, 0] = math.nan
            seen = Observation(Plan((A,)), {A: Prediction(1)}, Truth(1))
            broken = msgspec.structs.replace(mine, rows=rows)
            yield f"repaired {text(policy.observe(broken, seen))}"


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_step_by_step(name: str) -> None:
    shown = []
    for kind in (labels, numbers):
        policy: Any = create_policy(name)
        base = policy.init(MODELS)
        shown += [f"-- {kind.__name__}", f"initial {text(base)}", *answers(policy, base, kind)]
        base = learned(policy, base, kind, 0)
        mine, theirs = (learned(policy, base, kind, start) for start in (20, 40))
        shown += [f"learned {text(mine)}", *answers(policy, mine, kind)]
        shown += changed(policy, base, mine, theirs)
        if name in LEARNING:
            careful = policy.with_coverage(0.8)
            states = [careful.init(MODELS)]
            states += [learned(careful, states[0], kind, start) for start in (3, 5, 30)]
            shown += [f"sets {text(states[1])}", f"sets {text(careful.merge(*states[1:]))}"]
            shown += answers(careful, states[1], kind)
    check_expected(f"policies/{name}.txt", "\n".join(shown) + "\n")


def batches() -> Iterator[tuple[str, ObservationRows]]:
    """Yield thirty labels at once, of every type, with and without gaps and with one model
    queried."""
    n = 30
    rng = np.random.default_rng(7)
    right = rng.integers(0, 4, n)
    of_models = [np.where(rng.random(n) < share, right, right + 1) for share in (0.9, 0.6, 0.3)]
    exists = rng.random(n) < 0.8
    sure = np.where(rng.random(n) < 0.5, rng.random(n), math.nan)
    everyone, certain = np.array([-1], np.int32), np.ones(1)
    queried = rng.integers(0, 3, n).astype(np.int32)
    for kind_of in (int, float, str):
        columns = [
            one.astype(float) / 3 if kind_of is float else one for one in (right, *of_models)
        ]
        if kind_of is str:
            columns = [np.array([f"l{k}" for k in one], object) for one in columns]
        truth, *outputs = columns
        for some, confidence in ((None, None), (exists, sure)):
            for places, p in ((everyone, certain), (queried, rng.random(n) / 2 + 0.5)):
                rows = ObservationRows(
                    (A, B, C),
                    tuple(outputs),
                    (None, some, None),
                    (confidence, None, None),
                    truth,
                    places,
                    p,
                )
                yield kind_of.__name__, rows


def test_every_policy_learns_batches() -> None:
    shown = []
    for name in LEARNING:
        policy: Any = create_policy(name)
        for kind_of, rows in batches():
            state = observe_rows(policy, policy.init(MODELS), rows)
            half = observe_rows(policy, policy.init((A, B)), rows.take(np.arange(0, len(rows), 2)))
            shown += [f"{name} {kind_of} {text(state)}", f"  a, b: {text(half)}"]
    check_expected("policies/batches.txt", "\n".join(shown) + "\n")


def evaluated(evaluator: PolicyEvaluator) -> str:
    try:
        return text(msgspec.to_builtins(evaluator.result()))
    except NotAllowed as error:
        return str(error)


def test_every_policy_is_evaluated() -> None:
    shown = []
    for logged_by in ("exp3", "ensemble"):
        logged: Any = create_policy(logged_by)
        for name in POLICIES:
            evaluator = PolicyEvaluator(create_policy(name), MODELS, seed=3)
            shown.append(f"-- {name} on the log of {logged_by}: {evaluated(evaluator)}")
            state = logged.init(MODELS)
            for start in (0, 20, 40):
                for seen in observations(logged, state, labels, start):
                    evaluator.add(seen)
                    state = logged.observe(state, seen)
                shown.append(evaluated(evaluator))
    check_expected("policies/evaluated.txt", "\n".join(shown) + "\n")
