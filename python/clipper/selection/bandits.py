"""Policies that ask one model a query and learn which: good when models are dear, and one is
enough.

All of them meet the same trade: the best model so far, or another that may have become better.
`squarecb` is the one to begin with; in the world of Figure 8 its error over 20 000 queries is the
lowest of those that evaluate one model a query, and with `shadow` (a share of the queries also
evaluates the others, off the critical path) lower still. docs/selection.md has the table.
"""

from collections.abc import Sequence

import numpy as np

from clipper.errors import InvalidInput
from clipper.selection.learning_policy import Array, LearnedState, LearningPolicy
from clipper.selection.policy import (
    NOTHING,
    Combined,
    Plan,
    Prediction,
    Predictions,
    Query,
    is_usable,
    sound_confidence,
)
from clipper.selection.prediction_sets import Chances
from clipper.selection.votes import in_order, label_key
from clipper.types import VersionedModel
from clipper_core.learning.bandit import Rule, RuleKind


class Bandit(LearningPolicy):
    """Threads: any. shadow: share of queries, 0 to 1, on which the models not chosen are evaluated
    too, as observers."""

    chance = True
    shadow: float = 0.0

    def select(
        self, state: LearnedState, query: Query, candidates: Sequence[VersionedModel]
    ) -> Plan:
        known = [i for i, model in enumerate(state.models) if model in candidates]
        if not known:
            return Plan(in_order(candidates)[:1])
        rows = (
            state.rows
            if len(known) == len(state.models)
            else np.ascontiguousarray(state.rows[known])
        )
        i, p = self.rule.choose(rows, state.seen, query.uniform)
        chosen = state.models[known[i]]
        others: tuple[VersionedModel, ...] = ()
        if self.shadow and (query.uniform * 2**20) % 1.0 < self.shadow:
            others = tuple(model for model in in_order(candidates) if model != chosen)
        return Plan((chosen,), (p,), others)

    def portions(self, state: LearnedState) -> dict[VersionedModel, float]:
        odds = self.rule.probabilities(state.rows, state.seen) if len(state.models) else np.zeros(0)
        return dict(zip(state.models, odds.tolist(), strict=True))

    def combine(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        for model in in_order(arrived):
            if is_usable(arrived[model].output):
                return self._alone(state, model, arrived[model])
        return NOTHING

    def _alone(self, state: LearnedState, model: VersionedModel, said: Prediction) -> Combined:
        heard = {model: said}
        _, raw = self.raw_confidence(state, heard, ())
        found = Combined(said.output, self.sureness(state, raw), (model,))
        return self.with_set(state, found, lambda: self.chances(state, heard, ()))

    def raw_confidence(
        self, state: LearnedState, heard: Predictions, missing: Sequence[VersionedModel]
    ) -> tuple[object, float]:
        """The model's own; if it gives none, how often it was right."""
        for model, prediction in heard.items():
            if is_usable(prediction.output):
                if prediction.confidence is not None:
                    return prediction.output, sound_confidence(prediction.confidence)
                return prediction.output, self._accuracy(state, model)
        return None, 0.0

    def chances(
        self, state: LearnedState, heard: Predictions, missing: Sequence[VersionedModel]
    ) -> Chances:
        output, raw = self.raw_confidence(state, heard, missing)
        sure = self.sureness(state, raw)
        return Chances(
            {label_key(output): (output, sure)}, (1.0 - sure) / max(state.classes - 1.0, 1.0)
        )

    def _accuracy(self, state: LearnedState, model: VersionedModel) -> float:
        return 0.5


class Exp3(Bandit):
    """Exp3 as in the paper: weights fall by exp(-eta loss / p), the choice is proportional to them.

    eta: step; .1 follows a change within 400 queries, .03 is calmer.  floor: least probability of a
    model. Cost: one model a query, 100 ns.  Regret: sqrt(2 T K ln K).  Use: adversarial losses, no
    assumption at all. Source: the paper, section 5.1; Auer, Cesa-Bianchi, Freund and Schapire 2002.
    """

    name = "exp3"
    fresh = (0.0,)

    def __init__(self, eta: float = 0.1, floor: float = 1e-6, shadow: float = 0.0) -> None:
        self.rule = Rule(
            RuleKind.EXP3,
            eta=within("eta", eta, 1e-6, 10.0),
            floor=within("floor", floor, 0.0, 0.5),
        )
        self.shadow = within("shadow", shadow, 0.0, 1.0)

    def _newcomer(self, rows: Array) -> Array:
        return log_mean(rows)


class ByMean(Bandit):
    """Those whose first two columns are a model's mean loss and how often it was seen."""

    def _accuracy(self, state: LearnedState, model: VersionedModel) -> float:
        return mean_accuracy(state, model)

    def _merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        return merged_means(base, mine, theirs)

    def standing(self, state: LearnedState) -> Array:
        return -state.rows[:, 0]


class SquareCB(ByMean):
    """Inverse gap weighting: a model is asked with probability 1 / (K + gamma x its excess loss),
    the best with the rest.

    gamma: width; larger explores less.  rate: of the exponential mean of losses.  drift: how fast
    the mean of a model that is not asked goes back to its long memory, so that one that has
    recovered is found.  memory: rate of that memory. Cost: one model a query, 60 ns.  Use: the
    default for one model a query.  Source: Foster and Rakhlin 2020.
    """

    name = "squarecb"
    fresh = (0.0, 0.0, 0.0)
    counts = (1,)

    def __init__(
        self,
        gamma: float = 1000.0,
        rate: float = 0.01,
        drift: float = 0.001,
        memory: float = 0.0005,
        shadow: float = 0.0,
    ) -> None:
        self.rule = Rule(
            RuleKind.SQUARECB,
            eta=within("gamma", gamma, 1.0, 1e9),
            discount=within("rate", rate, 1e-6, 1.0),
            share=within("drift", drift, 0.0, 1.0),
            floor=within("memory", memory, 0.0, 1.0),
        )
        self.shadow = within("shadow", shadow, 0.0, 1.0)


class EpsilonGreedy(ByMean):
    """The best model so far, and with probability epsilon any of them.

    Cost: one model a query, 50 ns.  Use: as a baseline, or where the share of exploration must be
    exact. Source: the design document, "Selection policies".
    """

    name = "epsilon_greedy"
    fresh = (0.0, 0.0)
    counts = (1,)

    def __init__(self, epsilon: float = 0.05, rate: float = 0.02, shadow: float = 0.0) -> None:
        self.rule = Rule(
            RuleKind.GREEDY,
            share=within("epsilon", epsilon, 0.0, 1.0),
            discount=within("rate", rate, 1e-6, 1.0),
        )
        self.shadow = within("shadow", shadow, 0.0, 1.0)


class Thompson(Bandit):
    """A draw from each model's Beta distribution of being right; the highest is asked. Counts are
    discounted.

    discount: .9995 forgets half in 1400 observations.  Cost: one model a query, 300 ns.  Use: few
    models, delayed feedback. Source: Thompson 1933; Raj and Kalyani 2017 for the discount.
    """

    name = "thompson"
    fresh = (1.0, 1.0)
    counts = (0, 1)
    least = 1.0

    def __init__(self, discount: float = 0.9995, shadow: float = 0.0) -> None:
        self.rule = Rule(RuleKind.THOMPSON, discount=within("discount", discount, 0.5, 1.0))
        self.shadow = within("shadow", shadow, 0.0, 1.0)

    def _accuracy(self, state: LearnedState, model: VersionedModel) -> float:
        if model not in state.models:
            return 0.5
        right, wrong = state.rows[state.models.index(model)]
        return float(right / (right + wrong))


class KlUcb(Bandit):
    """The model with the highest accuracy that its record still allows, by Kullback-Leibler
    divergence.

    discount: of each model's record, an observation. Its theory takes 1 - sqrt(changes /
    observations) / 4; the default is that of one change in 10 000 observations, and remembers 400
    of them. 1 forgets nothing: for losses that never change. Cost: one model a query, 1 us.
    Source: Garivier and Cappe 2011; Garivier and Moulines 2008 for the discount.
    """

    name = "kl_ucb"
    fresh = (0.0, 0.0)
    counts = (0, 1)

    def __init__(self, discount: float = 0.9975, shadow: float = 0.0) -> None:
        self.rule = Rule(RuleKind.KL_UCB, discount=within("discount", discount, 0.5, 1.0))
        self.shadow = within("shadow", shadow, 0.0, 1.0)

    def _accuracy(self, state: LearnedState, model: VersionedModel) -> float:
        if model not in state.models:
            return 0.5
        lost, count = state.rows[state.models.index(model)]
        return float(1 - (lost + 1) / (count + 2))

    def standing(self, state: LearnedState) -> Array:
        return -(state.rows[:, 0] + 1) / (state.rows[:, 1] + 2)


class TsallisInf(Bandit):
    """Best of both worlds: the optimal rate for losses chosen by an adversary and for those by
    chance, without knowing which.

    least_step: keeps the step from vanishing, so that it follows a drift.  discount: of the
    estimates. Cost: one model a query, 300 ns.  Source: Zimmert and Seldin 2019, reduced variance.
    """

    name = "tsallis_inf"
    fresh = (0.0,)

    def __init__(
        self,
        least_step: float = 0.15,
        discount: float = 0.999,
        floor: float = 1e-3,
        shadow: float = 0.0,
    ) -> None:
        self.rule = Rule(
            RuleKind.TSALLIS,
            eta=within("least_step", least_step, 0.0, 10.0),
            discount=within("discount", discount, 0.5, 1.0),
            floor=within("floor", floor, 1e-9, 0.5),
        )
        self.shadow = within("shadow", shadow, 0.0, 1.0)

    def _newcomer(self, rows: Array) -> Array:
        return rows.mean(axis=0) if len(rows) else np.zeros(1)

    def standing(self, state: LearnedState) -> Array:
        return -state.rows[:, 0]


# -- parts


def within(name: str, value: float, low: float, high: float) -> float:
    """A setting of a policy, if it lies in its range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidInput(f"{name}={value!r}: it must lie between {low:g} and {high:g}.")
    return float(value)


def log_mean(rows: Array) -> Array:
    """Row of log-weights at the mean of the weights."""
    if not len(rows):
        return np.zeros(1)
    high: Array = rows.max(axis=0)
    return np.asarray(high + np.log(np.exp(rows - high).mean(axis=0)))


def mean_accuracy(state: LearnedState, model: VersionedModel) -> float:
    if model not in state.models:
        return 0.5
    row = state.rows[state.models.index(model)]
    return float(1 - row[0]) if row[1] > 0 else 0.5


def merged_means(base: Array, mine: Array, theirs: Array) -> Array:
    """Means weighed by what each has seen since `base`; counts added."""
    new_mine = np.maximum(mine[:, 1:2] - base[:, 1:2], 0.0)
    new_theirs = np.maximum(theirs[:, 1:2] - base[:, 1:2], 0.0)
    total = new_mine + new_theirs
    share = np.where(total > 0, new_mine / np.maximum(total, 1e-300), 0.5)
    rows = share * mine + (1 - share) * theirs
    rows[:, 1:2] = base[:, 1:2] + total
    return rows
