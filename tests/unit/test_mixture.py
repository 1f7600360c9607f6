"""The policy `mixture`: its arithmetic beside numpy, and what it does before, after and without
feedback."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from clipper.errors import InvalidInput
from clipper.selection import Observation, Plan, Prediction, Query, Truth, create_policy
from clipper.selection.learning.batch_learning import (
    ObservationRows,
    native_update_of,
    observe_rows,
)
from clipper.selection.learning.learning_policy import state_in_context
from clipper.selection.policies.class_probabilities import evidence_of
from clipper.selection.policies.mixture import cell_of
from clipper.selection.votes import label_key
from clipper.types import VersionedModel
from clipper_core.learning import mixture
from clipper_core.runtime.status import StatusError

MODELS = tuple(VersionedModel(name, 1) for name in ("a", "b", "c"))
POLICY: Any = create_policy("mixture")
K, SHARE = 3, 1e-3


class Reference:
    """A reference model of the mixture, written with dictionaries: no buckets, no columns.

    user: whether it is a user's state, in which one of the models may be better.
    """

    def __init__(self, user: bool = False) -> None:
        self.user = user
        self.best = np.full(K, 1 / K)
        self.w = [dict.fromkeys(range(K), 1.0) for _ in range(6)]
        self.v = [dict.fromkeys(range(K), 0.0) for _ in range(6)]
        self.u: list[dict[Any, float]] = [{} for _ in range(6)]
        self.sums: dict[Any, float] = {}
        self.share = np.full(6 + user, 1 / (6 + user))

    def favoured(self, i: int, said: list[Any], sure: list[float], classes: float) -> Any:
        """Return the probabilities if model i is the better one."""
        p, other = self.p(2, said, sure, classes)
        times = {label: math.exp(1.5) if label == said[i] else 1.0 for label in p}
        total = sum(p[label] * times[label] for label in p) + 1 - sum(p.values())
        return {label: p[label] * times[label] / total for label in p}, other / total

    def p(
        self, j: int, said: list[Any], sure: list[float], classes: float, context: Any = ()
    ) -> Any:
        if j == 6:
            each = [self.favoured(i, said, sure, classes) for i in range(K)]
            mean = {
                label: sum(self.best[i] * each[i][0][label] for i in range(K))
                for label in each[0][0]
            }
            return mean, sum(self.best[i] * each[i][1] for i in range(K))
        labels = list(dict.fromkeys(label for label in said if label is not None))
        scores = []
        for label in labels:
            score = self.u[j].get(("label", label), 0.0) if j >= 3 else 0.0
            for i in range(K):
                if said[i] == label:
                    score += self.w[j][0 if j == 0 else i]
                    if j >= 2:
                        score += self.v[j][i] * logit(sure[i])
                    if j >= 3:
                        score += self.u[j].get((i, label), 0.0)
                    if j == 5:
                        score += sum(
                            self.u[j].get(("feature", i, f), 0.0) * x for f, x in enumerate(context)
                        )
            scores.append(score)
        odds = np.exp(scores)
        total = odds.sum() + max(classes - len(labels), 0)
        return dict(zip(labels, odds / total, strict=True)), 1 / total

    def move(
        self, table: Any, key: Any, j: int, g: float, h: float, low: float, high: float
    ) -> None:
        """Update a weight. g, h: first and second derivative of the loss by the weight."""
        step: float
        if j in (1, 2):
            step = (0, 0.02, 0.1)[j]
        else:
            name = (j, id(table), key)
            self.sums[name] = min(self.sums.get(name, 0.0) + (h if j == 5 else g * g), 1000.0)
            step = (
                1 / (1 + self.sums[name])
                if j == 5
                else {0: 0.5, 3: 0.1, 4: 0.3}[j] / math.sqrt(0.01 + self.sums[name])
            )
        table[key] = min(max(table.get(key, 0.0) - step * g, low), high)

    def learn(
        self, said: list[Any], sure: list[float], classes: float, label: Any, context: Any = ()
    ) -> None:
        found = np.empty(len(self.share))
        for j in range(6):
            p, other = self.p(j, said, sure, classes, context)
            found[j] = max(p.get(label, other), 1e-6)
            if j == 2 and self.user:
                self.learn_best(found, said, sure, classes, label)
            slope = {one: p[one] - (one == label) for one in p}
            bend = {one: p[one] * (1 - p[one]) for one in p}
            heard = [i for i in range(K) if said[i] is not None]
            if j == 0:
                mean = sum(slope[said[i]] for i in heard) / len(heard)
                self.move(self.w[0], 0, 0, mean, 0.0, 0.01, 20)
                continue
            for i in heard:
                g, h, x = slope[said[i]], bend[said[i]], logit(sure[i])
                self.move(self.w[j], i, j, g, h, 0 if j == 1 else -20, 20)
                if j >= 2 and x:
                    self.move(self.v[j], i, j, g * x, h * x * x, -10, 10)
                if j >= 3:
                    self.move(self.u[j], (i, said[i]), j, g, h, -20, 20)
                for f, y in enumerate(context if j == 5 else ()):
                    self.move(self.u[j], ("feature", i, f), j, g * y, h * y * y, -20, 20)
            for one in slope if j >= 3 else ():
                self.move(self.u[j], ("label", one), j, slope[one], bend[one], -20, 20)
        self.share *= found
        self.share = SHARE / len(found) + (1 - SHARE) * self.share / self.share.sum()

    def learn_best(
        self, found: Any, said: list[Any], sure: list[float], classes: float, label: Any
    ) -> None:
        p, other = self.p(6, said, sure, classes)
        found[6] = max(p.get(label, other), 1e-6)
        for i in range(K):
            p, other = self.favoured(i, said, sure, classes)
            self.best[i] *= max(p.get(label, other), 1e-6)
        self.best = SHARE / K + (1 - SHARE) * self.best / self.best.sum()


def logit(sure: float) -> float:
    if math.isnan(sure):
        return 0.0
    sure = min(max(sure, 0.01), 0.99)
    return math.log(sure / (1 - sure))


def votes_of(rng: np.random.Generator, labels: int) -> tuple[list[Any], list[float], int]:
    said = [int(x) if rng.random() < 0.8 else None for x in rng.integers(0, labels, K)]
    sure = [float(x) if rng.random() < 0.7 else math.nan for x in rng.random(K)]
    right = int(rng.integers(0, labels)) if rng.random() < 0.5 or said[0] is None else said[0]
    return said, sure, right


@pytest.mark.parametrize("user", [False, True])
def test_the_core_computes_what_its_definition_states(user: bool) -> None:
    """Queries have a context from the 300th on."""
    rng, reference, rows = np.random.default_rng(5), Reference(user), mixture.initial(K)
    if user:
        rows = mixture.of_user(rows)
    components = range(6 + user)
    for t in range(1500):
        labels = 5 if t < 500 else 40  # more labels than buckets: the rows become wider
        said, sure, right = votes_of(rng, labels)
        if said == [None] * K:
            continue
        context = rng.normal(size=2) if t >= 300 else ()
        codes = [0 if one is None else one + 2 if one != right else 1 for one in said]
        cells = [0 if one is None else one for one in said]
        there = mixture.in_context(rows, context)
        p, other = mixture.tallied(there, codes, cells, sure, labels)
        each = [reference.p(j, said, sure, labels, context) for j in components]
        for i in range(K):
            if said[i] is not None:
                expected = sum(reference.share[j] * each[j][0][said[i]] for j in components)
                assert p[codes[i] - 1] == pytest.approx(expected, abs=1e-9)
        assert other == pytest.approx(
            sum(reference.share[j] * each[j][1] for j in components), abs=1e-9
        )
        rows = mixture.widened(rows, 0, len(context))
        rows = mixture.learned(rows, codes, cells, sure, labels, 1, right, 1.0, 1.0, context)
        reference.learn(said, sure, labels, right, context)
    assert rows.shape == (K + 1, 16 + 6 * 64 + 2 * 2)


class Pool:
    """A reference model of component 8, written with dictionaries."""

    def __init__(self) -> None:
        self.weights: dict[Any, float] = dict.fromkeys(range(K), 1.0)
        self.sums: dict[Any, float] = {}

    def p(self, evidence: Any, labels: list[int], classes: float) -> Any:
        w = self.weights
        scores = [
            w.get(("label", label), 0.0)
            + sum((w[i] + w.get((i, label), 0.0)) * evidence[i, at] for i in range(K))
            for at, label in enumerate(labels)
        ]
        total = np.exp(scores).sum() + max(classes - len(labels), 0)
        return np.exp(scores) / total, 1 / total

    def learn(self, evidence: Any, labels: list[int], classes: float) -> None:
        """Learn from an observation whose first label is right."""
        p, _ = self.p(evidence, labels, classes)
        slope, bend = p - (np.arange(len(p)) == 0), p * (1 - p)
        for at, label in enumerate(labels):
            self.move(("label", label), slope[at], bend[at])
            for i in range(K):
                x = evidence[i, at]
                if x:
                    self.move((i, label), slope[at] * x, bend[at] * x * x)
        for i in range(K):
            x = evidence[i]
            self.move(i, slope @ x, p @ (x * x) - (p @ x) ** 2)

    def move(self, key: Any, g: float, h: float) -> None:
        self.sums[key] = min(self.sums.get(key, 0.0) + h, 1000.0)
        moved = self.weights.get(key, 0.0) - g / (1 + self.sums[key])
        self.weights[key] = min(max(moved, -20.0), 20.0)


@pytest.mark.parametrize("user", [False, True])
def test_the_core_weighs_class_probabilities_as_its_definition_states(user: bool) -> None:
    rng, reference, pool = np.random.default_rng(8), Reference(user), Pool()
    rows = mixture.of_user(mixture.initial(K)) if user else mixture.initial(K)
    rows = mixture.widened(rows, 0, 0, True)
    n = 6 + user
    reference.share = np.full(n + 1, 1 / (n + 1))
    for t in range(600):
        classes = 5 if t < 300 else 40
        said, sure, right = votes_of(rng, classes)
        if said == [None] * K:
            continue
        named = [right, *(one for one in said if one is not None)]
        labels = list(dict.fromkeys([*named, *rng.integers(0, classes, 3).tolist()]))
        evidence = rng.random((K, len(labels))) * (rng.random((K, len(labels))) < 0.8)
        evidence[[i for i in range(K) if said[i] is None]] = 0.0
        codes = [0 if one is None else labels.index(one) + 1 for one in said]
        cells = [0 if one is None else one for one in said]
        p, other = mixture.tallied(rows, codes, cells, sure, classes, evidence, labels)
        each = [reference.p(j, said, sure, classes) for j in range(n)]
        pooled, rest = pool.p(evidence, labels, classes)
        for at, label in enumerate(labels):
            of = [found.get(label, others) for found, others in each]
            assert p[at] == pytest.approx(reference.share @ [*of, pooled[at]], abs=1e-9)
        others = [one for _, one in each]
        assert other == pytest.approx(reference.share @ [*others, rest], abs=1e-9)
        rows = mixture.learned(
            rows, codes, cells, sure, classes, 1, right, 1.0, 1.0, (), evidence, labels
        )
        share = reference.share
        reference.share = share[:n] / share[:n].sum()
        reference.learn(said, sure, classes, right)
        found = [max(one.get(right, others), 1e-6) for one, others in each] + [pooled[0]]
        share = share * found
        reference.share = SHARE / (n + 1) + (1 - SHARE) * share / share.sum()
        pool.learn(evidence, labels, classes)
    assert rows.shape == (K + 1, 16 + 6 * 64 + 2 + 2 * 64)


@pytest.mark.parametrize("component", range(6))
def test_probabilities_are_exact_for_scores_of_any_size(component: int) -> None:
    """Scores from 0 to 720, of which one label has the highest."""
    column = [7, 0, 1, 3, 7, 11][component]
    for voters in (1, 2, 3, 5, 20, 35, 36):
        rows = mixture.initial(voters + 1)
        rows[-1, :7] = 0.0
        rows[-1, component] = 1.0
        rows[-1 if component == 0 else np.s_[:-1], column] = 20.0
        codes = [1] * voters + [2]
        hashes = [0] * (voters + 1)
        p, other = mixture.tallied(rows, codes, hashes, [math.nan] * (voters + 1), 9.0)
        scores = [math.exp(20.0 * (n - voters)) for n in (voters, 1, 0)]
        total = scores[0] + scores[1] + 7 * scores[2]
        assert [*p, other] == pytest.approx([x / total for x in scores], rel=1e-14, abs=1e-307)


def test_evidence_is_the_scaled_logarithm_of_the_probability() -> None:
    votes = {
        MODELS[0]: Prediction(1, None, {"p:1": 1.0, "p:2": 0.1, "p:3": 0.0, "p:x": 0.5}),
        MODELS[2]: Prediction(2),
    }
    numbers: dict[object, int] = {2: 1, 1: 2}
    evidence = evidence_of(MODELS, votes, numbers)
    assert evidence == pytest.approx(np.array([[0.5, 1, 0], [0, 0, 0], [1, 0, 0]]))
    assert numbers == {2: 1, 1: 2, 3: 3}
    assert evidence_of(MODELS, predictions({0: 1}), {1: 1}) is None


NAMES = [
    *("p:1", "p:01", "p:-0", "p:-77", "p:--1", "p:", "p:-", "p:x", "p:é", "p:\u0663", "p:1\u0663"),
    *("p:\u00b2", "p:True", "p:False", "p", "speed", "q:1"),
    *(f"p:{sign}{digit * n}" for sign in ("", "-") for digit in "19" for n in (17, 18, 19, 20)),
]
NUMBERS = [0.5, 0.25, 0.001, 1.0, 2.0, -1.0, 0, 1, True, math.nan, math.inf, None, "x", 10**18]


def labels_named(qualifiers: dict[str, Any], kind: type) -> dict[object, float]:
    """Return the evidence of one model by label key, as it is defined."""
    found: dict[object, float] = {}
    for name, p in qualifiers.items():
        if not name.startswith("p:") or not isinstance(p, int | float) or p != p:
            continue
        text = name[2:]
        key: object = text.encode() if kind is bytes else text
        if kind is bool:
            key = {"True": ("bool", True), "False": ("bool", False)}.get(text)
        elif kind is int:
            is_int = text.removeprefix("-").isdecimal() and len(text) < 20
            key = int(text) if is_int else None
        if key is not None:
            found[key] = 1.0 + math.log(min(max(p, 0.01), 1.0)) / -math.log(0.01)
    return found


@pytest.mark.parametrize("kind", [int, bool, str, bytes])
def test_evidence_of_any_names_and_numbers_is_as_defined(kind: Any) -> None:
    rng = np.random.default_rng(11)
    votes_by_kind: Any = {int: [0, 1, -77], bool: [True, False], str: ["x", "é"], bytes: [b"1"]}
    for t in range(1000):
        votes = {
            model: Prediction(
                votes_by_kind[kind][rng.integers(len(votes_by_kind[kind]))],
                None,
                {
                    NAMES[rng.integers(len(NAMES))]: NUMBERS[rng.integers(len(NUMBERS))]
                    for _ in range(rng.integers(8))
                },
            )
            for model in MODELS
            if rng.random() < 0.9
        }
        numbers: dict[object, int] = {}
        for one in votes.values():
            numbers.setdefault(label_key(one.output), len(numbers) + 1)
        for i in range(254 if t % 10 == 0 else 0):
            numbers.setdefault(f"of others {i}", len(numbers) + 1)
        expected = dict(numbers)
        any_named = any(labels_named(one.qualifiers, str) for one in votes.values())
        is_expected = any_named and len(numbers) <= 256
        matrix = np.zeros((K, 256))
        for i, model in enumerate(MODELS):
            row: dict[object, float] = {}
            said = labels_named(votes[model].qualifiers, kind) if model in votes else {}
            for key, x in said.items():
                if key in expected or len(expected) < 256:
                    expected.setdefault(key, len(expected) + 1)
                    row[key] = x
            if model in votes and not row:
                row[label_key(votes[model].output)] = 1.0
            for key, x in row.items():
                matrix[i, expected[key] - 1] = x
        evidence = evidence_of(MODELS, votes, numbers)
        assert (evidence is not None) == is_expected
        if evidence is not None:
            assert numbers == expected
            assert [type(key) for key in numbers] == [type(key) for key in expected]
            assert np.array_equal(evidence, matrix[:, : len(numbers)])


def probable(rng: np.random.Generator, label: int) -> dict[VersionedModel, Any]:
    """Return predictions in which each model prefers another wrong label, and gives the right one
    nearly the same probability."""
    found = {}
    for i, model in enumerate(MODELS):
        wrong = (label + 1 + i + int(rng.integers(0, 2)) * 3) % 10
        found[model] = Prediction(wrong, 0.5, {f"p:{wrong}": 0.5, f"p:{label}": 0.4, "p:x": 0.1})
    return found


@pytest.mark.parametrize("name", ["mixture", "mixture(coverage=0.9)", "stacking"])
def test_class_probabilities_find_a_label_that_no_model_answers(name: str) -> None:
    rng, policy = np.random.default_rng(9), create_policy(name)
    state: Any = policy.init(MODELS)
    for t in range(60):
        arrived = probable(rng, t % 10)
        state = policy.observe(state, Observation(Plan(MODELS), arrived, Truth(t % 10)))
    for label in range(10):
        answer = policy.combine(state, probable(rng, label), ())
        assert answer.output == label
        assert type(answer.output) is int
        assert 0 <= answer.confidence <= 1
        assert 0 <= answer.agreement <= 1
        assert not answer.set or answer.set[0] == label
    without = {model: Prediction(3, 0.9) for model in MODELS}
    assert policy.combine(state, without, ()).output == 3


@pytest.mark.parametrize(
    ("text", "label"), [("7", 7), ("-7", -7), ("cat", "cat"), ("cat", b"cat"), ("True", True)]
)
def test_the_name_of_a_probability_is_the_text_of_a_label(text: str, label: Any) -> None:
    kind = type(label)
    others = [kind(not label)] * 3 if kind is bool else [kind(b"%d" % i) for i in range(3)] \
        if kind is bytes else [kind(str(i)) for i in range(3)]  # fmt: skip
    arrived = {
        model: Prediction(other, None, {f"p:{text}": 0.9, f"p:{other!s}": 0.001, "speed": 3})
        for model, other in zip(MODELS, others, strict=True)
    }
    state = observed(POLICY.init(MODELS), {0: 1, 1: 2, 2: 1}, 1)
    for _ in range(40):
        state = POLICY.observe(state, Observation(Plan(MODELS), arrived, Truth(label)))
    answer = POLICY.combine(state, arrived, ())
    assert answer.output == label
    assert type(answer.output) is kind


@pytest.mark.parametrize(
    "odd",
    [
        *({}, {"speed": 1.0}, {"p:": 0.5}, {"p:no number": 0.5}, {"p:9999999999999999999999": 1}),
        *({"p:1": float("nan")}, {"p:1": float("inf"), "p:2": -5.0}, {"p:1": "much"}),
        {f"p:{i}": 0.001 for i in range(1000)},
    ],
)
@pytest.mark.parametrize("name", ["mixture", "stacking"])
def test_odd_probabilities_leave_a_sound_state(name: str, odd: dict[str, Any]) -> None:
    policy = create_policy(name)
    state: Any = policy.init(MODELS)
    for t in range(30):
        arrived = {model: Prediction((t + i) % 3, 0.5, odd) for i, model in enumerate(MODELS)}
        state = policy.observe(state, Observation(Plan(MODELS), arrived, Truth(t % 3)))
        assert np.isfinite(state.rows).all()
        answer = policy.combine(state, arrived, ())
        assert 0 <= answer.confidence <= 1
        assert answer.output in (0, 1, 2) or name == "mixture" or len(odd) == 1000


def test_an_old_state_learns_probabilities_and_is_stored_and_merged() -> None:
    rng, old = np.random.default_rng(10), trained(60)
    state = POLICY.decode(POLICY.encode(old))
    for t in range(40):
        seen = Observation(Plan(MODELS), probable(rng, t % 10), Truth(t % 10))
        state = POLICY.observe(state, seen)
    assert mixture.shape(state.rows)[2]
    assert state.rows[-1, [*range(7), 10]].sum() == pytest.approx(1.0)
    assert np.array_equal(POLICY.decode(POLICY.encode(state)).rows, state.rows)
    other = trained(80)
    one, two = POLICY.merge(old, state, other), POLICY.merge(old, other, state)
    assert one.rows == pytest.approx(two.rows, abs=1e-12)
    for found in (one, POLICY.init(MODELS, state), POLICY.add_model(state, VersionedModel("d", 1))):
        assert np.isfinite(found.rows).all()
        assert POLICY.combine(found, probable(rng, 4), ()).output == 4
    broken = msgspec.structs.replace(state, rows=np.where(state.rows == 1.0, np.nan, state.rows))
    seen = Observation(Plan(MODELS), probable(rng, 4), Truth(4))
    assert np.isfinite(POLICY.observe(broken, seen).rows).all()


def test_the_rows_of_a_user_equal_numpy() -> None:
    rng, sums = np.random.default_rng(12), [5, 6, 9, 10, 13, 14]
    for state in (POLICY.init(MODELS), trained(60), trained(200)):
        for counts in (1.0, 30.0, 300.0, *rng.integers(1, 50, 20).astype(float)):
            expected = state.rows.copy()
            evidence = expected[:-1, sums].max(axis=1) / 0.25
            share = np.minimum(1.0, counts / np.maximum(evidence, 1e-300))
            expected[:-1, sums] *= share[:, None]
            expected[:-1, 17::2] *= share[:, None]
            limited = mixture.limited(state.rows, counts)
            assert np.array_equal(limited, expected)
            others = [*range(6), 10]
            expected[-1, others] *= 6.0 / 7.0 / expected[-1, others].sum()
            expected[-1, 6], expected[:-1, 15] = 1 / 7, 1 / 3
            assert np.array_equal(mixture.of_user(limited), expected)


def test_stacking_learns_the_same_from_certain_probabilities_and_votes() -> None:
    policy: Any = create_policy("stacking")
    one = two = policy.init(MODELS)
    rng = np.random.default_rng(11)
    for t in range(100):
        said = {i: int(rng.integers(0, 4)) for i in range(K)}
        certain = {MODELS[i]: Prediction(x, None, {f"p:{x}": 1.0}) for i, x in said.items()}
        one = policy.observe(one, Observation(Plan(MODELS), predictions(said), Truth(t % 4)))
        two = policy.observe(two, Observation(Plan(MODELS), certain, Truth(t % 4)))
        assert two.rows == pytest.approx(one.rows, abs=1e-12)
        assert policy.combine(two, certain, ()).confidence == pytest.approx(
            policy.combine(one, predictions(said), ()).confidence
        )


def predictions(said: dict[int, Any], sure: float | None = None) -> dict[VersionedModel, Any]:
    return {MODELS[i]: Prediction(label, sure) for i, label in said.items()}


def observed(state: Any, said: dict[int, Any], label: Any, **of: Any) -> Any:
    return POLICY.observe(state, Observation(Plan(MODELS), predictions(said), Truth(label), **of))


@pytest.mark.parametrize("kind", [int, str, float])
def test_before_feedback_it_answers_as_ensemble_does(kind: Any) -> None:
    rng, still = np.random.default_rng(1), create_policy("ensemble")
    for _ in range(50):
        arrived = {
            model: Prediction(kind(rng.integers(0, 3)), float(rng.random()))
            for model in MODELS
            if rng.random() < 0.8
        }
        missing = [model for model in MODELS if model not in arrived]
        one = POLICY.combine(POLICY.init(MODELS), arrived, missing)
        other = still.combine(still.init(MODELS), arrived, missing)
        assert (one.output, one.confidence, one.used, one.agreement) == (
            other.output,
            other.confidence,
            other.used,
            other.agreement,
        )


def test_it_learns_which_model_knows_which_label() -> None:
    """Model 0 knows the labels below 5, model 1 the others; model 2 knows nothing."""
    rng, state, wrong = np.random.default_rng(2), POLICY.init(MODELS), 0
    for t in range(1500):
        label = int(rng.integers(0, 10))
        said = {i: int(rng.integers(0, 10)) for i in range(3)}
        said[label // 5] = label
        answer = POLICY.combine(state, predictions(said), ())
        wrong += t >= 1000 and answer.output != label
        state = observed(state, said, label)
    assert wrong < 140  # of 500; the equal vote has 267


def test_feedback_counts_when_two_models_never_agree() -> None:
    """The slope of the equal vote's weight is exactly 0 then: half of the models are right."""
    models = MODELS[:2]
    state = POLICY.init(models)
    for t in range(50):
        arrived = {models[0]: Prediction(1 - t % 2), models[1]: Prediction(t % 2)}
        truth = Truth(t % 2)
        state = POLICY.observe(state, Observation(Plan(models), arrived, truth))
    for label in (0, 1):
        arrived = {models[0]: Prediction(1 - label), models[1]: Prediction(label)}
        assert POLICY.combine(state, arrived, ()).output == label


def test_it_follows_the_model_with_honest_confidences() -> None:
    rng, state, wrong = np.random.default_rng(3), POLICY.init(MODELS), 0
    for t in range(1500):
        label = int(rng.integers(0, 10))
        sure = rng.random(3)
        arrived = {
            model: Prediction(
                label if rng.random() < sure[i] else int(rng.integers(0, 10)), float(sure[i])
            )
            for i, model in enumerate(MODELS)
        }
        wrong += t >= 1000 and POLICY.combine(state, arrived, ()).output != label
        state = POLICY.observe(state, Observation(Plan(MODELS), arrived, Truth(label)))
    assert wrong < 130  # of 500; the surest model alone has 113, the equal vote 165


def test_it_learns_which_model_is_right_in_which_context() -> None:
    """Model 0 is right where the feature is 1, model 1 where it is -1; model 2 never."""
    rng, state, wrong = np.random.default_rng(6), POLICY.init(MODELS), 0
    for t in range(500):
        label, x = int(rng.integers(0, 10)), float(rng.choice([-1.0, 1.0]))
        said = {i: int(rng.integers(0, 10)) for i in range(3)}
        said[int(x < 0)] = label
        plan = POLICY.select(state, Query(features=(x,)), MODELS)
        there = state_in_context(POLICY, state, plan.features)
        wrong += t >= 300 and POLICY.combine(there, predictions(said), ()).output != label
        state = POLICY.observe(state, Observation(plan, predictions(said), Truth(label)))
    assert wrong < 15  # of 200; without the context 80
    assert POLICY.decode(POLICY.encode(state)).rows == pytest.approx(state.rows)
    merged = POLICY.merge(trained(), state, trained())
    assert mixture.shape(merged.rows)[1] == 1


def test_a_user_finds_another_best_model_within_few_queries() -> None:
    """Each user has a best model; that of a new one is model 2."""

    def drawn(rng: np.random.Generator, best: int, label: int) -> dict[int, int]:
        right = rng.random(3) < np.where(np.arange(3) == best, 0.9, 0.5)
        return {i: label if right[i] else int(rng.integers(0, 10)) for i in range(3)}

    rng, shared, found = np.random.default_rng(7), POLICY.init(MODELS), 0
    for t in range(500):
        shared = observed(shared, drawn(rng, int(rng.integers(0, 3)), t % 7), t % 7)
    for _ in range(20):
        own = POLICY.init(MODELS, shared)
        assert own.rows[:K, 15] == pytest.approx(1 / K)
        for t in range(20):
            own = observed(own, drawn(rng, 2, t % 7), t % 7)
        found += own.rows[:K, 15].argmax() == 2
    assert found >= 15
    assert shared.rows[-1, 6] == 0.0  # users that share a state have no best model


def test_right_and_wrong_are_feedback_without_labels() -> None:
    """Model 0 is always right, the others agree on another label."""
    rng, state = np.random.default_rng(4), POLICY.init(MODELS)
    for _ in range(60):
        label = int(rng.integers(0, 10))
        said = {0: label, 1: (label + 1) % 10, 2: (label + 1) % 10}
        answer = POLICY.combine(state, predictions(said), ()).output
        score = Truth(score=float(answer == label))
        plan = Plan(MODELS)
        state = POLICY.observe(state, Observation(plan, predictions(said), score, answer))
    assert answer == label
    assert state.labels, "an answer that was right is a label"


@pytest.mark.parametrize("weight", [1e-300, 1.0, 1e300])
def test_a_state_stays_finite_for_any_weight(weight: float) -> None:
    state = POLICY.init(MODELS)
    for t in range(300):
        state = observed(state, {0: t % 3, 1: t % 2, 2: 0}, t % 5, weight=weight)
        assert np.isfinite(state.rows).all()
    answer = POLICY.combine(state, predictions({0: 1, 1: 1, 2: 0}), ())
    assert 0 <= answer.confidence <= 1


def trained(count: int = 200) -> Any:
    state = POLICY.init(MODELS)
    for t in range(count):
        state = observed(state, {0: t % 7, 1: (t + t % 2) % 7, 2: 0}, t % 7)
    return state


def test_labels_with_a_high_hash_widen_the_rows_in_every_way_of_learning() -> None:
    labels = ["cat", "dog", "bird", "fish", "ant"]
    high = max(cell_of(label) for label in labels)
    state = POLICY.init(MODELS)
    outputs = tuple([labels[(t * i) % 5] for t in range(100)] for i in (1, 2, 3))
    rows = ObservationRows(
        MODELS, outputs, (None,) * 3, (None,) * 3, outputs[0], np.array([-1], np.int32), np.ones(1)
    )
    at_once = observe_rows(POLICY, state, rows)
    for i in range(100):
        state = POLICY.observe(state, rows.observation(i))
    assert native_update_of(POLICY) is not None
    assert np.array_equal(at_once.rows, state.rows)
    assert np.array_equal(at_once.sure, state.sure)
    assert (state.rows.shape[1] - 16) // 6 > high


def test_models_come_and_go_and_a_state_is_stored() -> None:
    state = trained()
    again = POLICY.decode(POLICY.encode(state))
    assert np.array_equal(again.rows, state.rows)
    new = VersionedModel("d", 1)
    larger = POLICY.add_model(state, new)
    assert larger.rows.shape[0] == 5
    assert np.array_equal(POLICY.remove_model(larger, new).rows, state.rows)
    updated = POLICY.update_model_version(state, MODELS[0], VersionedModel("a", 2))
    assert POLICY.rank_models_desc(updated, None)[0] == VersionedModel("a", 2)
    answer = POLICY.combine(state, {**predictions({0: 3, 1: 3}), new: Prediction(3)}, ())
    assert answer.output == 3


def test_a_new_user_starts_with_what_was_learned_from_all() -> None:
    state = trained()
    own = POLICY.init(MODELS, state)
    said = predictions({0: 5, 1: 0, 2: 0})
    assert POLICY.combine(state, said, ()).output == 5
    assert POLICY.combine(own, said, ()).output == 5


def test_two_servers_learn_together() -> None:
    base, more = trained(50), trained(200)
    merged = POLICY.merge(base, more, base)
    assert merged.rows == pytest.approx(more.rows, abs=1e-9)
    both = POLICY.merge(base, more, trained(100))
    assert np.isfinite(both.rows).all()
    assert POLICY.combine(both, predictions({0: 5, 1: 0, 2: 0}), ()).output == 5


def test_a_state_of_stacking_is_refused_and_one_of_a_wrong_size_too() -> None:
    stacking = create_policy("stacking")
    with pytest.raises(ValueError, match="a state of stacking"):
        POLICY.decode(stacking.encode(stacking.init(MODELS)))
    with pytest.raises(ValueError, match="rows of a mixture"):
        POLICY.rows.parse(np.zeros(4 * 65), 3)


def test_it_queries_all_models_and_refuses_rows_of_other_shapes() -> None:
    assert POLICY.select(POLICY.init(MODELS), Query(), MODELS).models == MODELS
    with pytest.raises((StatusError, InvalidInput), match="rows of a mixture"):
        mixture.weights(np.zeros((3, 12)))
    with pytest.raises((StatusError, InvalidInput), match="1 to 256 models"):
        mixture.initial(0)
    with pytest.raises((StatusError, InvalidInput), match="must have 3 numbers"):
        mixture.tallied(mixture.initial(3), [1, 1], [0, 0], [0.5, 0.5], 2.0)
    with pytest.raises((StatusError, InvalidInput), match="right must lie"):
        mixture.learned(mixture.initial(1), [1], [0], [0.5], 2.0, 1, 0, 1.5)
