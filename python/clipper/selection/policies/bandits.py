"""Bandit policies: each query goes to one model, and the feedback shows which model is best.

Use them where predictions are expensive and one per query is enough. They trade the best model so
far against another one that may have become better. Start with `bandit`: in most measured worlds it
has the lowest error of the policies that query one model, and with `shadow` a lower one still.
docs/selection.md has the table.

T: observations, K: models. Losses lie in 0 to 1. Rows of the states are f64.
"""

import numpy as np

from clipper.errors import InvalidInput
from clipper.selection.learning.learned_state import (
    Array,
    LearnedState,
    RuleRows,
    learn_by_rule,
    log_mean,
    row_of,
)
from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.learning.one_model import (
    Accuracy,
    OneModel,
    choose_by_rule,
    mean_accuracy,
    shares_by_rule,
    shares_of_choice,
    unknown_accuracy,
)
from clipper.types import VersionedModel
from clipper_core.learning.bandit import Rule, RuleKind


class Exp3(LearningPolicy):
    """Exponential weights for adversarial losses: p is proportional to exp(row).

    The row of the chosen model falls by eta * loss / p. Assumes nothing about the losses.

    eta: step size; 0.1 follows a change within 400 queries, 0.03 is calmer.
    floor: smallest probability of a model.
    shadow: share of the queries for which the other models predict too, as observers.

    State: f64[K, 1], log-weights.  Cost: 100 ns per query.
    Regret: at most sqrt(2 T K ln K) in expectation with eta = sqrt(2 ln K / (T K)).
    Source: the Clipper paper, section 5.1; Auer, Cesa-Bianchi, Freund and Schapire 2002, section 3.
    """

    name = "exp3"

    def __init__(self, eta: float = 0.1, floor: float = 1e-6, shadow: float = 0.0) -> None:
        rule = Rule(
            RuleKind.EXP3,
            eta=check_range("eta", eta, 1e-6, 10.0),
            floor=check_range("floor", floor, 0.0, 0.5),
        )
        rows = RuleRows(rule, (0.0,), newcomer=log_mean)
        super().__init__(rows, _one_model(rule, shadow), learn_by_rule(rule), rule)


class Bandit(LearningPolicy):
    """Inverse gap weighting on losses of four memory lengths; the recommended policy for one model.

    Each model's loss is estimated with four memories, of all observations and of about 2000, 500
    and 100. Their weights follow how well each predicted that model's losses. A model is chosen
    with probability 1 / (K + width (its loss - the lowest)), where the width is 20 sqrt(n) after n
    observations; the best model has the remaining probability. Nothing is to be set.

    Use it when one prediction per query must do: it follows sudden and slow changes. Only n counts,
    not the queries, so late or rare feedback makes it explore longer. Do not use it if all models
    can be queried: `mixture` is far more accurate.

    shadow: share of the queries for which the other models predict too, as observers.

    State: f64[K, 12], by memory the right and wrong answers, then the weight of each memory.
    Cost: 150 ns per query.
    Regret: O(sqrt(K T R)), where R is the square-loss regret of the estimates.
    Source: Foster and Rakhlin 2020, "Beyond UCB", algorithm 1; Vovk 1990 and Herbster and Warmuth
    1998, section 3, for the weights of the memories.
    """

    name = "bandit"

    def __init__(self, shadow: float = 0.0) -> None:
        rule = Rule(RuleKind.MEMORIES, eta=20.0)
        rows = RuleRows(
            rule,
            (0.0,) * 8 + (0.25,) * 4,
            counts=range(8),
            newcomer=_average_of_one,
            merge=_merge_memories,
            rank=_memory_rank,
        )
        super().__init__(
            rows, _one_model(rule, shadow, _memory_accuracy), learn_by_rule(rule), rule
        )


class SquareCB(LearningPolicy):
    """Inverse gap weighting on running mean losses, with settings; `bandit` needs none.

    A model is chosen with probability 1 / (K + gamma * (its mean - the lowest mean)); the best
    model has the remaining probability.

    gamma: exploration width; larger explores less.
    rate: step of the exponential mean of the losses.
    drift: speed at which the mean of an unused model returns to its long-term mean, so that a
    model that has recovered is found.  memory: step of that long-term mean.
    shadow: share of the queries for which the other models predict too, as observers.

    State: f64[K, 3], mean loss, observations, long-term mean.  Cost: 60 ns per query.
    Regret: O(sqrt(K T R)), where R is the square-loss regret of the estimates.
    Source: Foster and Rakhlin 2020, "Beyond UCB", algorithm 1.
    """

    name = "squarecb"

    def __init__(
        self,
        gamma: float = 1000.0,
        rate: float = 0.01,
        drift: float = 0.001,
        memory: float = 0.0005,
        shadow: float = 0.0,
    ) -> None:
        rule = Rule(
            RuleKind.SQUARECB,
            eta=check_range("gamma", gamma, 1.0, 1e9),
            discount=check_range("rate", rate, 1e-6, 1.0),
            share=check_range("drift", drift, 0.0, 1.0),
            floor=check_range("memory", memory, 0.0, 1.0),
        )
        rows = RuleRows(rule, (0.0, 0.0, 0.0), counts=(1,), merge=merge_means, rank=_low_is_good)
        super().__init__(rows, _one_model(rule, shadow, mean_accuracy), learn_by_rule(rule), rule)


class EpsilonGreedy(LearningPolicy):
    """The model with the lowest mean loss; with probability epsilon a random one.

    Use it as a baseline, or where the share of exploration must be exact.

    epsilon: share of the queries that go to a model drawn uniformly.
    rate: step of the exponential mean of the losses.
    shadow: share of the queries for which the other models predict too, as observers.

    State: f64[K, 2], mean loss and observations.  Cost: 50 ns per query.
    Regret: linear in T with a constant epsilon: epsilon times the mean excess loss.
    Source: Sutton and Barto 2018, section 2.2; the design document, "Selection policies".
    """

    name = "epsilon_greedy"

    def __init__(self, epsilon: float = 0.05, rate: float = 0.02, shadow: float = 0.0) -> None:
        rule = Rule(
            RuleKind.GREEDY,
            share=check_range("epsilon", epsilon, 0.0, 1.0),
            discount=check_range("rate", rate, 1e-6, 1.0),
        )
        rows = RuleRows(rule, (0.0, 0.0), counts=(1,), merge=merge_means, rank=_low_is_good)
        super().__init__(rows, _one_model(rule, shadow, mean_accuracy), learn_by_rule(rule), rule)


class Thompson(LearningPolicy):
    """Thompson sampling: draw each model's accuracy from its Beta distribution, take the highest.

    Suits few models and delayed feedback.

    discount: of all counts, per observation; 0.9995 forgets half in 1 400 observations.
    shadow: share of the queries for which the other models predict too, as observers.

    State: f64[K, 2], discounted right and wrong answers, each plus 1.  Cost: 300 ns per query.
    Regret: O(sqrt(K T ln T)) without a discount (Agrawal and Goyal 2013).
    Source: Thompson 1933; Raj and Kalyani 2017 for the discount.
    """

    name = "thompson"

    def __init__(self, discount: float = 0.9995, shadow: float = 0.0) -> None:
        rule = Rule(RuleKind.THOMPSON, discount=check_range("discount", discount, 0.5, 1.0))
        rows = RuleRows(rule, (1.0, 1.0), counts=(0, 1), count_min=1.0)
        answering = _one_model(rule, shadow, _beta_accuracy)
        super().__init__(rows, answering, learn_by_rule(rule), rule)


class KlUcb(LearningPolicy):
    """KL-UCB: the model whose accuracy has the highest upper confidence bound.

    The bound is the largest accuracy whose Kullback-Leibler divergence from the observed one stays
    within the confidence level.

    discount: of each model's record, per observation. In theory it is
    1 - sqrt(changes / observations) / 4; the default fits one change in 10 000 observations and
    remembers about 400. 1 forgets nothing, for losses that never change.
    shadow: share of the queries for which the other models predict too, as observers.

    State: f64[K, 2], discounted losses and observations.  Cost: 1 us per query.
    Regret: asymptotically optimal for discount 1 (the bound of Lai and Robbins).
    Source: Garivier and Cappe 2011; Garivier and Moulines 2008 for the discount.
    """

    name = "kl_ucb"

    def __init__(self, discount: float = 0.9975, shadow: float = 0.0) -> None:
        rule = Rule(RuleKind.KL_UCB, discount=check_range("discount", discount, 0.5, 1.0))
        rows = RuleRows(rule, (0.0, 0.0), counts=(0, 1), rank=_laplace_rank)
        shadow = check_range("shadow", shadow, 0.0, 1.0)
        answering = OneModel(
            choose_by_rule(rule), _laplace_accuracy, shares_of_choice(rule), shadow
        )
        super().__init__(rows, answering, learn_by_rule(rule), rule)


class TsallisInf(LearningPolicy):
    """Tsallis-INF: optimal both for adversarial and for stochastic losses, without knowing which.

    least_step: smallest step size, so that the policy follows a drift.
    discount: of the estimated losses, per observation.
    floor: smallest probability of a model.
    shadow: share of the queries for which the other models predict too, as observers.

    State: f64[K, 1], estimated cumulative losses.  Cost: 300 ns per query.
    Regret: at most 4 sqrt(K T) + 1 for adversarial losses, without discount and least step.
    Source: Zimmert and Seldin 2019, with the reduced-variance estimator.
    """

    name = "tsallis_inf"

    def __init__(
        self,
        least_step: float = 0.15,
        discount: float = 0.999,
        floor: float = 1e-3,
        shadow: float = 0.0,
    ) -> None:
        rule = Rule(
            RuleKind.TSALLIS,
            eta=check_range("least_step", least_step, 0.0, 10.0),
            discount=check_range("discount", discount, 0.5, 1.0),
            floor=check_range("floor", floor, 1e-9, 0.5),
        )
        rows = RuleRows(rule, (0.0,), newcomer=_mean_row, rank=_low_is_good)
        super().__init__(rows, _one_model(rule, shadow), learn_by_rule(rule), rule)


def _one_model(rule: Rule, shadow: float, accuracy: Accuracy = unknown_accuracy) -> OneModel:
    return OneModel(
        choose_by_rule(rule),
        accuracy,
        shares_by_rule(rule),
        check_range("shadow", shadow, 0.0, 1.0),
    )


def check_range(name: str, value: float, low: float, high: float) -> float:
    """Return a policy's setting. Raises InvalidInput outside `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidInput(f"{name}={value!r}: it must lie between {low:g} and {high:g}.")
    return float(value)


def merge_means(base: Array, mine: Array, theirs: Array) -> Array:
    """Average two servers' means by what each observed since `base`; add the counts (column 1)."""
    new_mine = np.maximum(mine[:, 1:2] - base[:, 1:2], 0.0)
    new_theirs = np.maximum(theirs[:, 1:2] - base[:, 1:2], 0.0)
    total = new_mine + new_theirs
    share = np.where(total > 0, new_mine / np.maximum(total, 1e-300), 0.5)
    rows = share * mine + (1 - share) * theirs
    rows[:, 1:2] = base[:, 1:2] + total
    return rows


def _memory_rank(rows: Array) -> Array:
    """Return minus the expected losses, as the core computes them."""
    longest = (rows[:, 1] + 0.5) / (rows[:, 0] + rows[:, 1] + 1.0)
    right, wrong = rows[:, 0:8:2], rows[:, 1:8:2]
    return np.asarray(
        -(rows[:, 8:] * (wrong + longest[:, None]) / (right + wrong + 1.0)).sum(axis=1)
    )


def _memory_accuracy(state: LearnedState, model: VersionedModel) -> float:
    row = row_of(state, model)
    return 0.5 if row is None else 1.0 + float(_memory_rank(row[None])[0])


def _average_of_one(rows: Array) -> Array:
    """Return a row with the mean record of the others, as one observation."""
    if not len(rows):
        return np.array((0.0,) * 8 + (0.25,) * 4)
    row: Array = rows.mean(axis=0)
    for right in range(0, 8, 2):
        row[right : right + 2] /= max(float(row[right : right + 2].sum()), 1.0)
    return row


def _merge_memories(base: Array, mine: Array, theirs: Array) -> Array:
    """Add what both counted since `base`; multiply the changes of the memories' weights."""
    rows: Array = np.maximum(mine + theirs - base, 0.0)
    weights = mine[:, 8:] * theirs[:, 8:] / np.maximum(base[:, 8:], 1e-9)
    rows[:, 8:] = weights / weights.sum(axis=1, keepdims=True)
    return rows


def _low_is_good(rows: Array) -> Array:
    return -rows[:, 0]


def _mean_row(rows: Array) -> Array:
    return rows.mean(axis=0) if len(rows) else np.zeros(1)


def _laplace_rank(rows: Array) -> Array:
    return -(rows[:, 0] + 1) / (rows[:, 1] + 2)


def _laplace_accuracy(state: LearnedState, model: VersionedModel) -> float:
    row = row_of(state, model)
    return 0.5 if row is None else float(1 - (row[0] + 1) / (row[1] + 2))


def _beta_accuracy(state: LearnedState, model: VersionedModel) -> float:
    row = row_of(state, model)
    return 0.5 if row is None else float(row[0] / (row[0] + row[1]))
