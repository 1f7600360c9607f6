"""The core combines and learns class probabilities as the policies do for any predictions."""

import math
from typing import Any

import numpy as np
import pytest

from clipper.errors import InvalidInput
from clipper.selection import Observation, Plan, Prediction, Truth, create_policy
from clipper.selection.learning.batch_learning import native_update_of, observe
from clipper.selection.votes import label_key
from clipper.types import VersionedModel
from clipper_core.learning.class_evidence import class_evidence
from clipper_core.runtime.status import StatusError

MODELS = tuple(VersionedModel(name, 1) for name in ("a", "b", "c", "d"))
LABELS: dict[str, list[Any]] = {
    "int": [0, 1, -77, 9, 64, 2**63 - 1],
    "str": ["x", "é", "", "label 5", "\N{GRINNING FACE}", "7"],
    "bytes": [b"x", "é".encode(), b"", b"\xff", b"label 5", b"7"],
    "bool": [True, False],
}
NAMES = [
    *("p:x", "p:é", "p:", "p:-", "p:--1", "p:label 5", "p:\N{GRINNING FACE}", "p:True", "p:False"),
    *("p:0", "p:1", "p:01", "p:-0", "p:-77", "p:7", "p:9", "p:64", "p:\u0663", "p:1\u0663", "p:²"),
    *("p", "speed", "q:1", "p:9223372036854775807", "p:999999999999999999", "p:" + "1" * 20),
]
ODD = [0.001, 2.0, -1.0, 0, 1, True, math.nan, math.inf, None, "x", 10**18]


class NotADict(dict[VersionedModel, Prediction]):
    """Predictions that the core leaves to Python."""


def drawn(rng: np.random.Generator, labels: list[Any], share_named: float) -> dict[Any, Any]:
    found = {}
    for model in MODELS:
        if rng.random() < 0.1:
            continue
        n = int(rng.integers(1, 8)) if rng.random() < share_named else 0
        named = {
            NAMES[int(i)]: ODD[int(rng.integers(len(ODD)))] if rng.random() < 0.2 else rng.random()
            for i in rng.integers(0, len(NAMES), n)
        }
        sure = [None, math.nan, rng.random(), 3.0][int(rng.integers(4))]
        found[model] = Prediction(labels[int(rng.integers(len(labels)))], sure, named)
    return found


@pytest.mark.parametrize(
    "name", ["mixture", "mixture(coverage=0.9)", "stacking", "stacking(coverage=0.8)"]
)
@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("share_named", [1.0, 0.2])
def test_the_core_learns_and_answers_as_the_policy_does(
    name: str, kind: str, share_named: float
) -> None:
    """Queries have a context from the 40th on; some labels are given or named by no model."""
    policy: Any = create_policy(name)
    labels, rng = LABELS[kind], np.random.default_rng(12)
    native = native_update_of(policy)
    assert native is not None
    fast, slow = policy.init(MODELS), policy.init(MODELS)
    learned = 0
    for t in range(80):
        arrived = drawn(rng, labels, share_named)
        missing = [model for model in MODELS if model not in arrived]
        found = policy.combine(fast, arrived, missing)
        expected = policy.combine(fast, NotADict(arrived), missing)
        assert type(found.output) is type(expected.output)
        assert (found.output, found.used, found.set) == (
            expected.output,
            expected.used,
            expected.set,
        ), t
        assert abs(found.confidence - expected.confidence) < 1e-12
        assert abs(found.agreement - expected.agreement) < 1e-12
        context = tuple(rng.random(2).tolist()) if t >= 40 else ()
        truth = Truth(labels[int(rng.integers(len(labels)))])
        seen = Observation(Plan(MODELS, features=context), arrived, truth, found.output)
        before = fast
        fast, slow = observe(policy, fast, seen, native), policy.observe(slow, seen)
        learned += core_learns(native, before, seen)
        assert fast.rows.shape == slow.rows.shape
        assert np.isfinite(fast.rows).all()
        assert np.allclose(fast.rows, slow.rows, rtol=1e-12, atol=1e-12), t
        assert np.array_equal(fast.sure, slow.sure), t
        assert (fast.labels, fast.seen, fast.tracked.known) == (
            slow.labels,
            slow.seen,
            slow.tracked.known,
        )
        assert fast.tracked.labels == pytest.approx(slow.tracked.labels, abs=1e-12)
    assert learned > 70


def core_learns(native: Any, state: Any, seen: Observation) -> bool:
    found = native.one(
        state.models,
        state.rows,
        state.sure,
        state.seen,
        state.labels,
        state.tracked,
        seen.plan.models,
        seen.plan.probabilities,
        seen.predictions,
        seen.truth.label,
        seen.weight,
        seen.plan.features,
    )
    return found is not None


@pytest.mark.parametrize("name", ["mixture", "stacking"])
@pytest.mark.parametrize("each", [60, 90, 300])
def test_more_labels_than_the_core_reads_are_learned_by_the_policy(name: str, each: int) -> None:
    """Each of four models names different labels, 240, 360 or 1200 in all."""
    policy: Any = create_policy(name)
    native = native_update_of(policy)
    fast = slow = policy.init(MODELS)
    for t in range(20):
        arrived = {
            model: Prediction(t % 5, 0.5, {f"p:{1000 * i + j}": 0.3 for j in range(each)})
            for i, model in enumerate(MODELS)
        }
        seen = Observation(Plan(MODELS), arrived, Truth([t % 5, 77_777][t % 2]))
        assert core_learns(native, fast, seen) == (each == 60)
        fast, slow = observe(policy, fast, seen, native), policy.observe(slow, seen)
        assert np.allclose(fast.rows, slow.rows, rtol=1e-12, atol=1e-12)
        answers = [policy.combine(fast, one, ()) for one in (arrived, NotADict(arrived))]
        assert answers[0].output == answers[1].output
        assert answers[0].confidence == pytest.approx(answers[1].confidence, abs=1e-12)


def test_the_order_of_equals_is_that_of_the_first_model_that_names_them() -> None:
    policy: Any = create_policy("mixture")
    state = policy.init(MODELS[:2])
    for t in range(40):
        seen = {
            model: Prediction(20 + i, None, {f"p:{t % 4}": 0.9})
            for i, model in enumerate(MODELS[:2])
        }
        state = policy.observe(state, Observation(Plan(MODELS[:2]), seen, Truth(t % 4)))
    named = {"p:8": 1.0, "p:9": 1.0}
    arrived = {MODELS[0]: Prediction(4, None, named), MODELS[1]: Prediction(5, None, named)}
    answers = [policy.combine(state, one, ()) for one in (arrived, NotADict(arrived))]
    assert answers[0].output == answers[1].output == 8


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("named", [{}, {"p:x": 0.5, "p:7": 0.5}])
def test_a_context_that_overflows_the_weights_gives_an_output_of_a_model(
    kind: str, named: dict[str, Any]
) -> None:
    """Servers refuse such a context: its numbers are finite, but their sums are not, so the
    probabilities are no numbers."""
    policy: Any = create_policy("mixture")
    state, labels = policy.init(MODELS), LABELS[kind][:2]
    arrived = {model: Prediction(labels[i % 2], 0.5, named) for i, model in enumerate(MODELS)}
    for t in range(40):
        plan = Plan(MODELS, features=(1.0,) * 32)
        state = policy.observe(state, Observation(plan, arrived, Truth(labels[t % 3 == 0])))
    with np.errstate(all="ignore"):
        state = policy.in_context(state, (1.7e308,) * 32)
    assert not np.isfinite(state.rows).all()
    assert policy.combine(state, arrived, ()).output in labels
    arrived.pop(MODELS[0])
    assert policy.combine(state, arrived, MODELS[:1]).output in labels


@pytest.mark.parametrize("number", [-3, 0, 3, 100_000])
@pytest.mark.parametrize("named", [{}, {"p:1": 0.5}])
def test_numbers_of_labels_outside_the_evidence_are_refused(
    number: int, named: dict[str, Any]
) -> None:
    votes = {MODELS[0]: Prediction(1, None, named)}
    with pytest.raises((StatusError, InvalidInput), match="numbers must be"):
        class_evidence(MODELS, votes, {1: number}, int, label_key, 2)


def test_names_that_come_while_evidence_is_read_have_no_room() -> None:
    named = {"p:1": 0.5}
    votes = {MODELS[0]: Prediction(1), MODELS[1]: Prediction(1, None, named)}

    def key_of(output: Any) -> Any:
        named.update({f"p:{i}": 0.5 for i in range(100)})
        return output

    assert class_evidence(MODELS[:2], votes, {1: 1}, int, key_of, 256).shape == (2, 2)


class Computed:
    """A prediction whose attributes are made anew each time they are read."""

    def __init__(self, i: int) -> None:
        self.i = i

    @property
    def output(self) -> str:
        return "a label of model " + "xyz"[self.i % 2 :]

    @property
    def confidence(self) -> float:
        return self.i / 7

    @property
    def qualifiers(self) -> dict[str, float]:
        return {f"p:{self.i} {j}": 0.5 + self.i / 10 for j in range(20)}


@pytest.mark.parametrize("name", ["mixture", "stacking"])
def test_attributes_of_predictions_may_be_computed(name: str) -> None:
    policy: Any = create_policy(name)
    native, fast = native_update_of(policy), policy.init(MODELS)
    arrived: Any = {model: Computed(i) for i, model in enumerate(MODELS)}
    seen = Observation(Plan(MODELS), arrived, Truth("a label of model xyz"))
    for _ in range(20):
        answers = [policy.combine(fast, one, ()) for one in (arrived, NotADict(arrived))]
        assert answers[0].output == answers[1].output
        assert answers[0].confidence == pytest.approx(answers[1].confidence, abs=1e-12)
        slow = policy.observe(fast, seen)
        fast = observe(policy, fast, seen, native)
        assert np.allclose(fast.rows, slow.rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("arrived_as", [dict, NotADict])
def test_labels_that_are_equal_but_for_rounding_keep_their_order(arrived_as: Any) -> None:
    """Three labels have the same sums, added up in other orders: the first that is named wins."""
    policy: Any = create_policy("stacking")
    models, numbers = MODELS[:3], np.random.default_rng(3).uniform(0.5, 1.0, (200, 3)).tolist()
    for p in numbers:
        arrived = {
            model: Prediction(20 + i, None, {f"p:{7 - j}": p[(i + j) % 3] for j in range(3)})
            for i, model in enumerate(models)
        }
        state = policy.init(models)
        assert policy.combine(state, arrived_as(arrived), ()).output == 7
        seen = Observation(Plan(models), arrived_as(arrived), Truth(7))
        assert observe(policy, state, seen, native_update_of(policy)).sure[:, 0].sum() == 1.0
