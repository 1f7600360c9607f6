"""Policies that ask all models and learn how far to trust each: the most accurate, at the price of
every evaluation.

`stacking` is the one to begin with: it learns one weight a model by logistic regression on the
votes, keeps the ensemble's diversity and hardly minds delayed or rare feedback. Exp4 (Hedge)
converges to one model by design; a fixed share of the weight for everybody keeps it alive.
docs/selection.md has the table.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from clipper.selection.bandits import log_mean, within
from clipper.selection.learning_policy import Array, LearnedState, LearningPolicy
from clipper.selection.policy import (
    NOTHING,
    Combined,
    Observation,
    Plan,
    Predictions,
    Query,
    is_number,
    sound_confidence,
)
from clipper.selection.prediction_sets import Chances
from clipper.selection.votes import Votes, combine, in_order, label_key, scores, usable
from clipper.types import VersionedModel
from clipper_core.learning.bandit import Rule, RuleKind


class Experts(LearningPolicy):
    """Threads: any. averages: numbers, so a missing one may be replaced by its model's mean
    (serving/stragglers)."""

    averages = True

    def select(
        self, state: LearnedState, query: Query, candidates: Sequence[VersionedModel]
    ) -> Plan:
        return Plan(in_order(candidates))

    def combine(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        votes = usable(arrived)
        if not votes:
            return NOTHING
        if len({*arrived, *missing}) == 1:
            ((model, only),) = votes.items()
            found = Combined(only.output, sound_confidence(only.confidence), (model,))
            return self.with_set(state, found, lambda: self.chances(state, arrived, missing))
        weights = self.weights(state, {*arrived, *missing})
        found = combine(votes, weights, sum(weights.values()))
        if not is_number(found.output):
            raw = self._raw(state, votes, weights, found)
            found = Combined(found.output, self.sureness(state, raw), found.used, found.agreement)
        return self.with_set(state, found, lambda: self._chances(state, votes, weights))

    def weights(
        self, state: LearnedState, models: set[VersionedModel]
    ) -> dict[VersionedModel, float]:
        """Of the votes; a model that the state does not know yet weighs as much as the mean."""
        if not state.models:
            return dict.fromkeys(models, 1.0)
        learned = self.rule.weights(state.rows, state.classes).tolist()
        known = dict(zip(state.models, learned, strict=True))
        found = {model: known.get(model, 1.0 / len(learned)) for model in models}
        return found if any(weight > 0 for weight in found.values()) else dict.fromkeys(models, 1.0)

    def raw_confidence(
        self, state: LearnedState, heard: Predictions, missing: Sequence[VersionedModel]
    ) -> tuple[object, float]:
        votes = usable(heard)
        if not votes:
            return None, 0.0
        weights = self.weights(state, {*heard, *missing})
        found = combine(votes, weights, sum(weights.values()))
        return found.output, (
            0.0 if is_number(found.output) else self._raw(state, votes, weights, found)
        )

    def _raw(
        self,
        state: LearnedState,
        votes: Votes,
        weights: Mapping[VersionedModel, float],
        found: Combined,
    ) -> float:
        return found.confidence

    def chances(
        self, state: LearnedState, heard: Predictions, missing: Sequence[VersionedModel]
    ) -> Chances:
        return self._chances(state, usable(heard), self.weights(state, {*heard, *missing}))

    def _chances(
        self, state: LearnedState, votes: Votes, weights: Mapping[VersionedModel, float]
    ) -> Chances:
        """The share of the weight behind each; what is behind nobody is shared by the labels
        without a vote."""
        asked = sum(weights.values())
        behind = {key: score / asked for key, score in scores(votes, weights).items()}
        outputs = {label_key(vote.output): vote.output for vote in votes.values()}
        rest = max(1.0 - sum(behind.values()), 0.0) / max(state.classes - len(behind), 1.0)
        return Chances({key: (outputs[key], share) for key, share in behind.items()}, rest)


class Exp4(Experts):
    """All models weigh in; each loses weight by its own loss, and a fixed share goes round to
    everybody.

    eta: step.  share: of the weight that is dealt out evenly after each observation; 0 is the
    paper's rule, which does not come back from a failure.  Cost: all models a query, 200 ns.
    Regret: sqrt(T ln K / 2) without the share. Source: the paper, section 5.2; Herbster and Warmuth
    1998 for the share.
    """

    name = "exp4"
    fresh = (0.0,)

    def __init__(self, eta: float = 0.1, share: float = 0.03) -> None:
        self.rule = Rule(
            RuleKind.HEDGE,
            eta=within("eta", eta, 1e-6, 10.0),
            share=within("share", share, 0.0, 0.5),
        )

    def _newcomer(self, rows: Array) -> Array:
        return log_mean(rows)


class LogOdds(Experts):
    """Votes weighed by ln(accuracy (C - 1) / (1 - accuracy)): the best there is when errors are
    independent.

    discount: of each model's record.  Cost: all models a query, 150 ns.  Use: very different
    models.
    """

    name = "logodds"
    fresh = (0.0, 0.0)
    counts = (0, 1)

    def __init__(self, discount: float = 0.998) -> None:
        self.rule = Rule(RuleKind.LOGODDS, discount=within("discount", discount, 0.5, 1.0))


class Stacking(Experts):
    """Logistic regression on the votes, online: a label's score is the sum of the weights of those
    who voted for it.

    rate: step of the regression.  Cost: all models a query, 150 ns.  Use: the default ensemble that
    learns; with one dominant model it comes to follow that one, with equals it is a majority.  Only
    labels teach it, right or wrong does not.
    """

    name = "stacking"
    fresh = (1.0,)

    def __init__(self, rate: float = 0.02) -> None:
        self.rule = Rule(RuleKind.STACKING, eta=within("rate", rate, 1e-6, 1.0))

    def _newcomer(self, rows: Array) -> Array:
        return rows.mean(axis=0) if len(rows) else np.ones(1)

    def _merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        return np.clip(mine + theirs - base, 0.0, 20.0)

    def _learned(
        self, state: LearnedState, observation: Observation, told: Mapping[VersionedModel, float]
    ) -> Array:
        if not observation.truth.known or is_number(observation.truth.label):
            return state.rows
        codes = {label_key(observation.truth.label): 1}
        votes = [
            (
                codes.setdefault(label_key(observation.predictions[model].output), len(codes) + 1)
                if model in told
                else 0
            )
            for model in state.models
        ]
        return self.rule.stack(
            state.rows, votes, 1, max(state.classes, len(codes)), observation.weight
        )

    def _raw(
        self,
        state: LearnedState,
        votes: Votes,
        weights: Mapping[VersionedModel, float],
        found: Combined,
    ) -> float:
        """Softmax of the scores, labels without a vote included."""
        behind, others, _ = self._softmax(state, votes, weights)
        return behind[label_key(found.output)] / (sum(behind.values()) + others)

    def _softmax(
        self, state: LearnedState, votes: Votes, weights: Mapping[VersionedModel, float]
    ) -> tuple[dict[object, float], float, float]:
        """Return exp(score) by label, the sum for all labels without a vote, and that of one of
        them, whose score is 0.

        All are divided by the largest, so that none overflows.
        """
        total = float(state.rows.sum())
        score_of = {key: score * total for key, score in scores(votes, weights).items()}
        high = max(0.0, *score_of.values())
        behind = {key: math.exp(score - high) for key, score in score_of.items()}
        each = math.exp(-high)
        return behind, max(state.classes - len(behind), 0.0) * each, each

    def _chances(
        self, state: LearnedState, votes: Votes, weights: Mapping[VersionedModel, float]
    ) -> Chances:
        behind, others, each = self._softmax(state, votes, weights)
        total = sum(behind.values()) + others
        outputs = {label_key(vote.output): vote.output for vote in votes.values()}
        return Chances(
            {key: (outputs[key], share / total) for key, share in behind.items()}, each / total
        )
