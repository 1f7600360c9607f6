"""Policies that query all models and learn how much to trust each.

They are the most accurate, and every query costs a prediction of every model. Start with
`stacking`: it learns one weight per model by logistic regression on the votes, keeps the diversity
of the ensemble, and works with delayed or rare feedback. Exp4 (Hedge) converges to one model by
design; a fixed share of the weight for all models keeps the others in play. docs/selection.md has
the table.

T: observations, K: models. Rows of the states are f64.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from clipper.selection.learning.learned_state import (
    DOUBT,
    Array,
    Learn,
    LearnedState,
    RuleRows,
    calibrated,
    learn_by_rule,
    log_mean,
)
from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.learning.prediction_sets import LabelProbabilities
from clipper.selection.policies.bandits import check_range
from clipper.selection.policies.class_probabilities import evidence_of, has_probabilities, label_of
from clipper.selection.policy import (
    NO_ANSWER,
    Combined,
    Observation,
    Plan,
    Predictions,
    Query,
    is_number,
    is_usable,
    sound_confidence,
)
from clipper.selection.votes import (
    Votes,
    combine,
    label_key,
    label_weights,
    sorted_models,
    usable,
)
from clipper.types import UserValue, VersionedModel
from clipper_core.learning.bandit import Rule, RuleKind
from clipper_core.learning.label_feedback import LabelVotes

Weights = Mapping[VersionedModel, float]
# label key -> its probability, and the probability of each label without a vote
Odds = Callable[[LearnedState, Votes, Weights], tuple[dict[object, float], float]]


class WeightedVotes:
    """Queries all models and combines their votes, or numbers, by the weights of a rule.

    rule: gives the weights.
    odds: label probabilities from the votes.
    best: returns the answer and its confidence before calibration, instead of the label with the
    most weight and its share.
    Threads: any.
    """

    random = False

    def __init__(
        self,
        rule: Rule,
        odds: Odds,
        best: Callable[[LearnedState, Votes, Weights, Combined], tuple[Combined, float]]
        | None = None,
    ) -> None:
        self._rule, self._odds, self._best = rule, odds, best
        self._labels = LabelVotes(rule, DOUBT)

    def select(
        self, state: LearnedState, query: Query, candidates: Sequence[VersionedModel]
    ) -> Plan:
        """Select all candidates."""
        models = tuple(candidates)
        return Plan(models if models == state.models else sorted_models(models))

    def combine(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Combine the votes; the confidence of a label is calibrated."""
        if (answer := answer_of_labels(self._labels, state, arrived, missing)) is not None:
            return answer
        votes = usable(arrived)
        if not votes:
            return NO_ANSWER
        if len({*arrived, *missing}) == 1:
            ((model, only),) = votes.items()
            return Combined(only.output, sound_confidence(only.confidence), (model,))
        found, raw = self._combined(state, votes, {*arrived, *missing})
        if is_number(found.output):
            return found
        return Combined(found.output, calibrated(state, raw), found.used, found.agreement)

    def _combined(
        self, state: LearnedState, votes: Votes, models: set[VersionedModel]
    ) -> tuple[Combined, float]:
        weights = self.weights(state, models)
        found = combine(votes, weights, sum(weights.values()))
        if is_number(found.output):
            return found, 0.0
        if self._best is None:
            return found, found.confidence
        return self._best(state, votes, weights, found)

    def weights(
        self, state: LearnedState, models: set[VersionedModel]
    ) -> dict[VersionedModel, float]:
        """Return the weight of each vote; a model unknown to the state has the mean weight."""
        if not state.models:
            return dict.fromkeys(models, 1.0)
        learned = self._rule.weights(state.rows, state.classes).tolist()
        known = dict(zip(state.models, learned, strict=True))
        found = {model: known.get(model, 1.0 / len(learned)) for model in models}
        return found if any(weight > 0 for weight in found.values()) else dict.fromkeys(models, 1.0)

    def raw_confidence(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> tuple[UserValue, float]:
        """Return the answer and its confidence before calibration."""
        votes = usable(arrived)
        if not votes:
            return None, 0.0
        found, raw = self._combined(state, votes, {*arrived, *missing})
        return found.output, raw

    def probabilities(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> LabelProbabilities:
        """Return the probability of each label."""
        votes, weights = usable(arrived), self.weights(state, {*arrived, *missing})
        by_key, other = self._odds(state, votes, weights)
        return LabelProbabilities({key: (label_of(key), p) for key, p in by_key.items()}, other)

    def shares(self, state: LearnedState) -> dict[VersionedModel, float]:
        """Return the normalised weights of the models."""
        if not state.models:
            return {}
        weights = self._rule.weights(state.rows, state.classes)
        return dict(zip(state.models, (weights / (weights.sum() or 1.0)).tolist(), strict=True))


def answer_of_labels(
    labels: LabelVotes,
    state: LearnedState,
    arrived: Predictions,
    missing: Sequence[VersionedModel],
) -> Combined | None:
    """Return the answer as the core combines labels of one type; None for other predictions."""
    found = labels.answer(state.models, state.rows, state.sure, state.labels, arrived, len(missing))
    return None if found is None else Combined(*found)


class Exp4(LearningPolicy):
    """Hedge with a fixed share: every model's weight falls by its own loss.

    eta: step size.
    share: part of the weight that is spread evenly after each observation. 0 is the paper's rule,
    does not recover from the failure of its best model.

    Where a score leaves open whether a model was right, it has the mean loss of the answers so far,
    at most one half, as far as the answer was wrong: then the weight moves to a model that is right
    more often than the answers, and not to others, as long as errors are independent and half of
    the answers are right.

    State: f64[K, 1], log-weights.  Cost: 200 ns per query, beside all predictions.
    Regret: at most sqrt(T ln K / 2) without the share, with eta = sqrt(8 ln K / T).
    Source: the Clipper paper, section 5.2; Herbster and Warmuth 1998 for the share.
    """

    name = "exp4"
    averages = True

    def __init__(self, eta: float = 0.1, share: float = 0.03) -> None:
        rule = Rule(
            RuleKind.HEDGE,
            eta=check_range("eta", eta, 1e-6, 10.0),
            share=check_range("share", share, 0.0, 0.5),
        )
        rows = RuleRows(rule, (0.0,), newcomer=log_mean)
        super().__init__(rows, WeightedVotes(rule, _odds_by_share), _learn_by_hedge(rule), rule)


class LogOdds(LearningPolicy):
    """A vote weighted by ln(accuracy (C - 1) / (1 - accuracy)), for C labels.

    Optimal when the models' errors are independent, so it suits very different models. Weights
    below 0 are cut to 0; if no model is better than chance, the weights are the odds themselves.
    Models of which a score says nothing learn nothing of it.

    discount: of each model's record, per observation.

    State: f64[K, 2], discounted right answers and observations.
    Cost: 150 ns per query, beside all predictions.
    Guarantee: the Bayes-optimal vote for independent errors; no bound for dependent ones.
    Source: Nitzan and Paroush 1982; Kuncheva 2004, section 4.3 for several labels.
    """

    name = "logodds"
    averages = True

    def __init__(self, discount: float = 0.998) -> None:
        rule = Rule(RuleKind.LOGODDS, discount=check_range("discount", discount, 0.5, 1.0))
        rows = RuleRows(rule, (0.0, 0.0), counts=(0, 1))
        super().__init__(rows, WeightedVotes(rule, _odds_by_share), learn_by_rule(rule), rule)


class Stacking(LearningPolicy):
    """Online logistic regression on the votes; the default ensemble that learns.

    The score of a label is the sum of the weights of the models that voted for it; of models that
    report class probabilities, each label has a part of the weight
    (class_probabilities.py). With one dominant model the policy follows it, with equal ones it is
    a majority vote. It learns from labels, and from `correct=` and `score=` about the answer: with
    the score s, the loss is -s ln(p) - (1 - s) ln(1 - p), where p is the probability of the answer.

    rate: step of the gradient descent.

    State: f64[K, 1], weights in 0 to 20.  Cost: 150 ns per query, beside all predictions.
    Regret: that of online gradient descent on the logistic loss, O(sqrt(T)) against the best fixed
    weights; with the constant step it tracks changes instead.
    Source: Wolpert 1992, "Stacked generalization"; Zinkevich 2003 for the online step.
    """

    name = "stacking"
    averages = True

    def __init__(self, rate: float = 0.02) -> None:
        rule = Rule(RuleKind.STACKING, eta=check_range("rate", rate, 1e-6, 1.0))
        rows = RuleRows(rule, (1.0,), newcomer=_mean_weight, merge=_merge_weights)
        answering = WeightedVotes(rule, _odds_by_softmax, _most_probable)
        super().__init__(rows, answering, _learn_by_stacking(rule), rule)


def _odds_by_share(
    state: LearnedState, votes: Votes, weights: Weights
) -> tuple[dict[object, float], float]:
    """Take each label's share of the weight; labels without a vote split what is left."""
    total = sum(weights.values())
    by_key = {key: weight / total for key, weight in label_weights(votes, weights).items()}
    other = max(1.0 - sum(by_key.values()), 0.0) / max(state.classes - len(by_key), 1.0)
    return by_key, other


def _odds_by_softmax(
    state: LearnedState, votes: Votes, weights: Weights
) -> tuple[dict[object, float], float]:
    voted, others, each = _softmax(state, votes, weights)
    total = sum(voted.values()) + others
    return {key: value / total for key, value in voted.items()}, each / total


def _most_probable(
    state: LearnedState, votes: Votes, weights: Weights, found: Combined
) -> tuple[Combined, float]:
    """Return the answer by the votes with its probability, or by the class probabilities."""
    voted, others, _ = _softmax(state, votes, weights)
    key, total = label_key(found.output), sum(voted.values()) + others
    if voted[key] < (top := max(voted.values()) * (1 - 1e-12)) and has_probabilities(votes):
        key = next(key for key, value in voted.items() if value >= top)
        behind = label_weights(votes, weights).get(key, 0.0) / sum(weights.values())
        found = Combined(label_of(key), behind, found.used, behind)
    return found, voted[key] / total


def _softmax(
    state: LearnedState, votes: Votes, weights: Weights
) -> tuple[dict[object, float], float, float]:
    """Return exp(score) by label key, its sum over the labels without a vote, and that of each.

    Labels without a vote have the score 0. All values are divided by the largest, so that none
    overflows.
    """
    total = float(state.rows.sum())
    by_vote = label_weights(votes, weights)
    numbers = {key: i for i, key in enumerate(by_vote, 1)}
    evidence = evidence_of(list(votes), votes, numbers)
    if evidence is not None:
        pooled = np.array([weights[model] for model in votes]) @ evidence
        by_vote = dict(zip(numbers, pooled.tolist(), strict=True))
    scores = {key: weight * total for key, weight in by_vote.items()}
    high = max(0.0, *scores.values())
    voted = {key: math.exp(score - high) for key, score in scores.items()}
    each = math.exp(-high)
    return voted, max(state.classes - len(voted), 0.0) * each, each


def _learn_by_stacking(rule: Rule) -> Learn:
    def learn(
        state: LearnedState, observation: Observation, losses: Mapping[VersionedModel, float]
    ) -> Array:
        truth = observation.truth
        label = truth.label if truth.known else observation.answer
        right = 1.0 if truth.score is None else min(max(float(truth.score), 0.0), 1.0)
        if label is None or is_number(label):
            return state.rows
        codes = {label_key(label): 1}
        reported = {
            model: one
            for model in state.models
            if (one := observation.predictions.get(model)) is not None and is_usable(one.output)
        }
        votes = [
            codes.setdefault(label_key(reported[model].output), len(codes) + 1)
            if model in reported
            else 0
            for model in state.models
        ]
        evidence = evidence_of(state.models, reported, codes)
        classes = max(state.classes, len(codes))
        if evidence is not None:
            return rule.stack_evidence(state.rows, evidence, 1, classes, observation.weight, right)
        return rule.stack(state.rows, votes, 1, classes, observation.weight, right)

    return learn


def _learn_by_hedge(rule: Rule) -> Learn:
    by_rule = learn_by_rule(rule)

    def learn(
        state: LearnedState, observation: Observation, losses: Mapping[VersionedModel, float]
    ) -> Array:
        if not observation.truth.known:
            # with the loss of the answers, a model gains on them only if it is right more often; at
            # most one half, for where all answers are wrong, others have to be tried
            right, count = state.sure.sum(axis=0)
            where_wrong = min(1.0 - (float(right) + 1.0) / (float(count) + 2.0), 0.5)
            score = min(max(float(observation.truth.score or 0.0), 0.0), 1.0)
            unknown = score + (1.0 - score) * where_wrong
            losses = {
                model: losses.get(model, unknown)
                for model, one in observation.predictions.items()
                if is_usable(one.output)
            }
        return by_rule(state, observation, losses)

    return learn


def _mean_weight(rows: Array) -> Array:
    return rows.mean(axis=0) if len(rows) else np.ones(1)


def _merge_weights(base: Array, mine: Array, theirs: Array) -> Array:
    return np.clip(mine + theirs - base, 0.0, 20.0)
