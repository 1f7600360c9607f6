"""Tests of the core's update of a state by an observation; the reference in Python is in
tests/unit/test_batch_learning.py."""

import math

import numpy as np
import pytest

from clipper.selection.learning.prediction_sets import LabelSets
from clipper_core.learning import mixture
from clipper_core.learning.bandit import Rule, RuleKind
from clipper_core.learning.feedback_update import FeedbackUpdate
from clipper_core.runtime.status import StatusError

K, N, BINS = 3, 500, 10


class Predicted:
    def __init__(self, output, confidence=None):
        self.output, self.confidence, self.qualifiers = output, confidence, {}


def update_of(kind=RuleKind.HEDGE, **settings):
    rule = Rule(kind, **{"eta": 0.1, "share": 0.03, "floor": 1e-6, **settings})
    return FeedbackUpdate(rule, 0.998, lambda *state: state[:5])


def columns(seed):
    rng = np.random.default_rng(seed)
    confidence = np.where(rng.random((K, N)) < 0.5, np.nan, rng.random((K, N)))
    return (
        rng.integers(0, 4, (K, N)),
        rng.random((K, N)) < 0.8,
        confidence,
        rng.integers(0, 4, N),
        rng,
    )


@pytest.mark.parametrize(
    "kind", [RuleKind.HEDGE, RuleKind.EXP3, RuleKind.STACKING, RuleKind.MIXTURE]
)
def test_one_by_one_and_all_at_once(kind):
    """States are compared bit for bit; for the rules that choose one model, each row has other
    models and probabilities."""
    update = update_of(kind)
    values, arrived, confidence, label, rng = columns(1)
    alone = kind == RuleKind.EXP3
    chosen = rng.integers(0, K, N) if alone else np.full(N, K)
    p = rng.uniform(0.1, 1.0, N)
    mixed = kind == RuleKind.MIXTURE
    rows, sure = mixture.initial(K) if mixed else np.full((K, 1), 0.5), np.zeros((BINS, 2))
    bits, cells = (label & 63).astype(np.uint8), (values & 63).astype(np.uint8)
    many = update.many(
        rows, sure, 0.0, 0, values, arrived, confidence, label, bits, chosen, p, cells
    )
    names = tuple("abc")
    state = (names, rows, 0.0, 0, sure)
    for i in range(N):
        predictions = {
            name: Predicted(
                int(values[j, i]), None if math.isnan(confidence[j, i]) else confidence[j, i]
            )
            for j, name in enumerate(names)
            if arrived[j, i]
        }
        queried = (names[chosen[i]],) if alone else names
        found = update.one(
            names,
            state[1],
            state[4],
            state[2],
            state[3],
            None,
            queried,
            (p[i],),
            predictions,
            int(label[i]),
            1.0,
        )
        state = found or state
    assert np.array_equal(state[1], many[0])
    assert np.array_equal(state[4], many[1])
    assert (state[2], state[3]) == many[2:4]
    assert 0 < many[2] <= N
    assert many[3] == 0b1111


def test_nothing_is_changed_in_place():
    update = update_of()
    rows, sure = np.zeros((K, 1)), np.zeros((BINS, 2))
    values, arrived, confidence, label, _ = columns(2)
    update.many(rows, sure, 0.0, 0, values, arrived, confidence, label, label, [K], [1.0])
    update.graded(rows, 0.0, np.ones((K, 5)), [K], [1.0])
    assert not rows.any()
    assert not sure.any()


def test_rows_without_any_prediction_do_not_count():
    update = update_of()
    lost = np.full((K, 10), np.nan)
    lost[0, ::2] = 0.5
    rows, seen = update.graded(np.zeros((K, 1)), 7.0, lost, [K], [1.0])
    assert seen == 12.0
    assert np.isfinite(rows).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": np.zeros((K, 2))},
        {"rows": np.zeros(K)},
        {"sure": np.zeros(BINS)},
        {"sure": np.zeros((BINS, 3))},
        {"sure": np.zeros((0, 2))},
        {"values": np.zeros((K, N - 1), int)},
        {"values": np.zeros((K + 1, N), int)},
        {"arrived": np.ones(N, bool)},
        {"confidence": np.zeros((N, K))},
        {"label": np.zeros(N + 1, int)},
        {"bits": np.zeros(3, int)},
        {"chosen": [0, 1]},
        {"p": [0.5, 0.5]},
        {"chosen": []},
    ],
)
def test_arrays_that_do_not_go_together_are_refused(wrong):
    values, arrived, confidence, label, _ = columns(3)
    given = {
        "rows": np.zeros((K, 1)),
        "sure": np.zeros((BINS, 2)),
        "seen": 0.0,
        "labels": 0,
        "values": values,
        "arrived": arrived,
        "confidence": confidence,
        "label": label,
        "bits": label,
        "chosen": [K],
        "p": [1.0],
    }
    with pytest.raises(StatusError, match="must be"):
        update_of().many(**{**given, **wrong})
    with pytest.raises(StatusError, match="losses must be"):
        update_of().graded(np.zeros((K, 1)), 0.0, np.zeros((K + 1, N)), [K], [1.0])


@pytest.mark.parametrize(
    "wrong", [{"named": [0, 1]}, {"named": [0]}, {"known": [2]}, {"known": []}, {"room": 65}]
)
def test_labels_of_sets_that_do_not_go_together_are_refused(wrong):
    rule = Rule(RuleKind.HEDGE, eta=0.1, share=0.03)
    update = FeedbackUpdate(rule, 0.998, tuple, LabelSets(0.9, 0.03, 20.0))
    rows, sure = np.zeros((2, 1)), np.zeros((BINS, 2))
    outputs = [[7, 8, 7], [7, 7, 8]]
    given = {"threshold": 0.5, "named": [0, 1, 0], "known": [1, 2], "room": 64}

    def many(given):
        sure_of_all, nan = np.ones((2, 3)), np.full((2, 3), np.nan)
        told = [7, 8, 7], [7, 8, 7], [2], [1.0]
        return update.many(rows, sure, 0.0, 0, outputs, sure_of_all, nan, *told, **given)

    assert many(given)[5].tolist() == [1, 3], "label 1 became known, the first of these rows"
    assert many({**given, "room": 0})[5].tolist() == [1, 2]
    with pytest.raises(StatusError, match="must"):
        many({**given, **wrong})
