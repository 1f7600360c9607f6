"""The rules, compared with twenty lines of numpy each, and with inputs that an adversary may
choose."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.learning.bandit import Rule, RuleKind
from clipper_core.runtime.status import StatusError

STEPS = 20_000
RULES = {
    "exp3": (Rule(RuleKind.EXP3, eta=0.1, floor=1e-6), (0.0,)),
    "hedge": (Rule(RuleKind.HEDGE, eta=0.1, share=0.03), (0.0,)),
    "greedy": (Rule(RuleKind.GREEDY, share=0.1, discount=0.02), (0.0, 0.0)),
    "squarecb": (
        Rule(RuleKind.SQUARECB, eta=1000, discount=0.01, share=0.001, floor=0.0005),
        (0.0, 0.0, 0.0),
    ),
    "thompson": (Rule(RuleKind.THOMPSON, discount=0.999), (1.0, 1.0)),
    "kl_ucb": (Rule(RuleKind.KL_UCB), (0.0, 0.0)),
    "tsallis": (Rule(RuleKind.TSALLIS, eta=0.15, discount=0.999, floor=1e-3), (0.0,)),
    "logodds": (Rule(RuleKind.LOGODDS, discount=0.998), (0.0, 0.0)),
}
CHOOSING = {name: rule for name, rule in RULES.items() if name not in ("hedge", "logodds")}
every_rule = pytest.mark.parametrize(("rule", "fresh"), RULES.values(), ids=RULES)
every_choice = pytest.mark.parametrize(("rule", "fresh"), CHOOSING.values(), ids=CHOOSING)


def start(fresh, k=5):
    return np.tile(np.array(fresh), (k, 1)).reshape(k, len(fresh))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.mark.parametrize(("least", "columns"), [(0.0, [1, 2]), (1.0, [0, 1]), (0.0, [2])])
def test_limited_counts_equal_numpy(least, columns):
    rule, rng = RULES["squarecb"][0], np.random.default_rng(4)
    for _ in range(200):
        rows, counts = least + 100 * rng.random((5, 3)), float(rng.integers(1, 120))
        evidence = (rows[:, columns] - least).max(axis=1)
        share = np.minimum(1.0, counts / np.maximum(evidence, 1e-300))
        expected = rows.copy()
        expected[:, columns] = least + share[:, None] * (rows[:, columns] - least)
        before, which = rows.copy(), np.array(columns, np.uint32)
        assert np.array_equal(rule.limited(rows, which, least, counts), expected)
        assert np.array_equal(rows, before), "nothing is changed in place"


@pytest.mark.parametrize("columns", [np.array([3], np.uint32), np.zeros((1, 1), np.uint32)])
def test_columns_that_a_row_has_not_are_refused(columns):
    with pytest.raises(StatusError):
        RULES["squarecb"][0].limited(np.zeros((5, 3)), columns, 0.0, 1.0)
    with pytest.raises(StatusError):
        RULES["squarecb"][0].limited(np.zeros((5, 3)), np.array([0]), 0.0, 1.0)


def test_exp3_equals_numpy():
    """Compare with the paper's rule, section 5.1, in log space: s_i <- s_i exp(-eta L / p_i)."""
    rule, rng = Rule(RuleKind.EXP3, eta=0.1, floor=1e-6), np.random.default_rng(1)
    errors = rng.random((STEPS, 5)) < [0.38, 0.34, 0.30, 0.26, 0.20]
    rows, logs = start((0.0,)), np.zeros(5)
    for t in range(STEPS):
        u = rng.random()
        p = 1e-6 + (1 - 5e-6) * softmax(logs)
        i = min(int(np.searchsorted(np.cumsum(p), u, side="right")), 4)
        assert rule.choose(rows, t, u) == (i, pytest.approx(p[i], rel=1e-9))
        losses = np.full(5, np.nan)
        losses[i] = float(errors[t, i])
        rows = rule.learn(rows, t, losses, i, p[i])
        logs[i] -= 0.1 * losses[i] / p[i]
        logs = np.maximum(logs - logs.max(), -700.0)
    assert np.abs(rows[:, 0] - logs).max() <= 1e-9 * np.abs(logs).max()


def test_exp4_equals_numpy():
    """Compare with the rule of the paper's section 5.2, with a fixed share."""
    rule, rng = Rule(RuleKind.HEDGE, eta=0.1, share=0.03), np.random.default_rng(2)
    losses = rng.random((STEPS, 5)) ** np.array([1, 1, 2, 2, 3])
    rows, w = start((0.0,)), np.full(5, 0.2)
    for t in range(STEPS):
        rows = rule.learn(rows, t, losses[t])
        w = w * np.exp(-0.1 * losses[t])
        w = 0.97 * w / w.sum() + 0.03 / 5
    assert np.abs(rule.weights(rows) - w).max() <= 1e-9


def test_stacking_equals_numpy():
    rule, rng = Rule(RuleKind.STACKING, eta=0.02), np.random.default_rng(3)
    rows, w = start((1.0,)), np.ones(5)
    for _ in range(2000):
        label, votes = int(rng.integers(1, 6)), rng.integers(0, 6, 5)
        rows = rule.stack(rows, votes, label, 5.0)
        scores = np.array([w[votes == c].sum() for c in range(6)])
        p = np.exp(scores[1:]) / np.exp(scores[1:]).sum()
        step = np.array([p[v - 1] - (v == label) if v else 0.0 for v in votes])
        w = np.clip(w - 0.02 * step, 0, 20)
    assert np.abs(rows[:, 0] - w).max() <= 1e-9


def test_stacking_of_a_label_that_is_right_in_part_equals_numpy():
    """The loss is -s ln(p) - (1 - s) ln(1 - p): of votes, and of the same as evidence."""
    rule, rng = Rule(RuleKind.STACKING, eta=0.02), np.random.default_rng(3)
    rows, w = start((1.0,)), np.ones(5)
    for _ in range(2000):
        label = int(rng.integers(1, 6))
        votes = rng.integers(0, 6, 5)
        s = rng.choice([0, 0.4, 1])
        evidence = np.eye(6)[votes][:, 1:]
        by_evidence = rule.stack_evidence(rows, evidence, label, 5.0, right=s)
        rows = rule.stack(rows, votes, label, 5.0, right=s)
        assert np.abs(by_evidence - rows).max() <= 1e-9
        scores = np.array([w[votes == c].sum() for c in range(6)])
        p = np.exp(scores[1:]) / np.exp(scores[1:]).sum()
        step = np.array([p[v - 1] - (v == label) if v else 0.0 for v in votes])
        w = np.clip(w - 0.02 * step * (s - p[label - 1]) / (1 - p[label - 1]), 0, 20)
    assert np.abs(rows[:, 0] - w).max() <= 1e-9


def test_a_label_that_is_certain_and_wrong_is_learned():
    rule = Rule(RuleKind.STACKING, eta=0.02)
    after = rule.stack(np.full((5, 1), 20.0), [1, 1, 1, 1, 1], 1, 2.0, right=0.0)
    assert np.isfinite(after).all()
    assert (after < 20.0).all()


def test_log_odds_without_a_model_that_is_better_than_chance_are_odds():
    rule = Rule(RuleKind.LOGODDS)
    rows = np.array([(0.0, 0.0), (0.0, 8.0), (1.0, 8.0)])
    accuracy = np.array([1 / 2, 1 / 10, 2 / 10])
    for classes in (2.0, 3.0):
        log_odds = np.log(accuracy * (classes - 1) / (1 - accuracy))
        odds = accuracy / (1 - accuracy)
        wanted = np.maximum(log_odds, 0) if (log_odds > 0).any() else odds
        assert np.allclose(rule.weights(rows, classes), wanted / wanted.sum())


def test_tsallis_probabilities_solve_their_equation():
    rule, rng = (
        Rule(RuleKind.TSALLIS, eta=0.15, discount=0.999, floor=1e-3),
        np.random.default_rng(4),
    )
    for _ in range(300):
        rows = (rng.random((int(rng.integers(1, 9)), 1)) * 10 ** rng.uniform(-3, 4)).copy()
        seen = float(rng.integers(0, 10**6))
        p = rule.probabilities(rows, seen)
        eta = max(4 / math.sqrt(seen + 1), 0.15)
        x = rows[:, 0] - 2 / (eta * np.sqrt(p))  # the same x for all of them
        assert p.sum() == pytest.approx(1)
        assert np.ptp(x) <= 1e-6 * (1 + np.abs(x).max())


@every_rule
def test_many_observations_are_one_after_the_other(rule, fresh):
    rng = np.random.default_rng(5)
    losses = np.where(rng.random((500, 5)) < 0.3, np.nan, rng.random((500, 5)))
    chosen, p = rng.integers(0, 5, 500), rng.uniform(0.1, 1.0, 500)
    rows = start(fresh)
    for t in range(500):
        rows = rule.learn(rows, t, losses[t], int(chosen[t]), p[t])
    assert np.array_equal(rule.learn_many(start(fresh), 0, losses, chosen, p), rows)


wild = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1))


@every_rule
@settings(max_examples=30)
@given(data=st.data())
def test_nothing_that_can_be_observed_breaks_a_state(rule, fresh, data):
    rows, k = start(fresh), 5
    for t in range(data.draw(st.integers(1, 12))):
        losses = data.draw(st.lists(wild, min_size=k, max_size=k))
        p = data.draw(st.floats(1e-300, 1.0))
        rows = rule.learn(rows, t, losses, data.draw(st.integers(-1, k - 1)), p)
    assert np.isfinite(rows).all()
    weights, probabilities = rule.weights(rows), rule.probabilities(rows, 10.0)
    assert np.isfinite(weights).all()
    assert weights.sum() == pytest.approx(1)
    assert (probabilities >= 0).all()
    assert np.isfinite(probabilities).all()


@every_rule
def test_an_observation_without_losses_only_advances_the_time(rule, fresh):
    rows = rule.learn_many(start(fresh), 0, np.random.default_rng(6).random((50, 5)))
    after = rule.learn(rows, 50, np.full(5, np.nan))
    order = np.argsort(rule.weights(rows), kind="stable")
    assert np.array_equal(order, np.argsort(rule.weights(after), kind="stable"))


@every_rule
def test_rows_are_never_changed_in_place(rule, fresh):
    rows = start(fresh)
    rows.setflags(write=False)
    rule.learn(rows, 0, np.zeros(5), 0)
    rule.learn_many(rows, 0, np.zeros((3, 5)))
    assert np.array_equal(rows, start(fresh))


@every_choice
def test_the_better_model_is_selected_more_often(rule, fresh):
    draw = random.Random(7)
    rows, queried = start(fresh, 2), [0, 0]
    for t in range(4000):
        i, p = rule.choose(rows, t, draw.random())
        assert 0 < p <= 1
        losses = [math.nan, math.nan]
        losses[i] = float(draw.random() < (0.6, 0.2)[i])
        rows = rule.learn(rows, t, losses, i, p)
        queried[i] += 1
    assert queried[1] > 2 * queried[0]


@pytest.mark.parametrize("name", ["exp3", "greedy", "squarecb", "tsallis"])
def test_models_are_selected_as_often_as_the_probabilities_state(name):
    rule, fresh = RULES[name]
    rows = rule.learn_many(
        start(fresh),
        0,
        np.random.default_rng(8).random((40, 5)),
        np.arange(40) % 5,
        np.full(40, 0.2),
    )
    p = rule.probabilities(rows, 40.0)
    found = (
        np.bincount(
            [rule.choose(rows, 40.0, (u + 0.5) / 20_000)[0] for u in range(20_000)], minlength=5
        )
        / 20_000
    )
    assert np.abs(found - p).max() < 1e-3


@pytest.mark.parametrize(
    "call",
    [
        lambda: Rule(77),
        lambda: RULES["exp3"][0].choose(np.zeros((5, 2)), 0, 0.5),
        lambda: RULES["exp3"][0].choose(np.zeros((0, 1)), 0, 0.5),
        lambda: RULES["exp3"][0].choose(np.zeros((300, 1)), 0, 0.5),
        lambda: RULES["exp3"][0].choose(np.zeros((5, 1), np.float32), 0, 0.5),
        lambda: RULES["exp3"][0].learn(np.zeros((5, 1)), 0, np.zeros(4)),
        lambda: RULES["exp3"][0].learn(np.zeros((5, 1)), 0, np.zeros(5), 5),
        lambda: RULES["exp3"][0].learn_many(np.zeros((5, 1)), 0, np.zeros((2, 4))),
        lambda: RULES["exp3"][0].learn_many(np.zeros((5, 1)), 0, np.zeros((2, 5)), [0]),
        lambda: Rule(RuleKind.STACKING, eta=0.1).stack(np.ones((2, 1)), [[1, 2], [1, 1]], [1]),
    ],
)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(StatusError):
        call()
