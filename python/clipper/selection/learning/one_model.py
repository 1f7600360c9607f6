"""Answering a query with one model: the choice of a bandit, and the confidence of its answer."""

from collections.abc import Callable, Sequence

import numpy as np

from clipper.selection.learning.learned_state import Array, LearnedState, calibrated, row_of
from clipper.selection.learning.prediction_sets import LabelProbabilities
from clipper.selection.policy import (
    NO_ANSWER,
    Combined,
    Plan,
    Predictions,
    Query,
    is_usable,
    sound_confidence,
)
from clipper.selection.votes import label_key, sorted_models
from clipper.types import UserValue, VersionedModel
from clipper_core.learning.bandit import Rule

# (state, rows of the candidates, query) -> index of the chosen row, and its probability if known
Accuracy = Callable[[LearnedState, VersionedModel], float]
Choose = Callable[[LearnedState, Array, Query], tuple[int, tuple[float, ...]]]


class OneModel:
    """Chooses one model per query and answers with its output. Threads: any.

    choose: the choice among the candidates.
    accuracy: share of right answers of a model, its confidence when it reports none.
    shares: probability that each model is chosen.
    shadow: share of the queries, 0 to 1, for which the other models predict too, as observers.
    uses_context: plans keep the query's features, because the policy learns from them.
    """

    random = True

    def __init__(
        self,
        choose: Choose,
        accuracy: Accuracy,
        shares: Callable[[LearnedState], dict[VersionedModel, float]],
        shadow: float,
        uses_context: bool = False,
    ) -> None:
        self._choose, self._accuracy, self.shares = choose, accuracy, shares
        self.shadow, self._uses_context = shadow, uses_context

    def select(
        self, state: LearnedState, query: Query, candidates: Sequence[VersionedModel]
    ) -> Plan:
        """Choose one candidate, and observers for a share `shadow` of the queries."""
        features = query.features if self._uses_context else ()
        known = [i for i, model in enumerate(state.models) if model in candidates]
        if not known:
            return Plan(sorted_models(candidates)[:1], features=features)
        is_all = len(known) == len(state.models)
        rows = state.rows if is_all else np.ascontiguousarray(state.rows[known])
        i, probability = self._choose(state, rows, query)
        chosen = state.models[known[i]]
        others: tuple[VersionedModel, ...] = ()
        if self.shadow and (query.uniform * 2**20) % 1.0 < self.shadow:
            others = tuple(model for model in sorted_models(candidates) if model != chosen)
        return Plan((chosen,), probability, others, features)

    def combine(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Return the output of the first usable prediction, by name and version."""
        for model in sorted_models(arrived):
            if is_usable(arrived[model].output):
                output, raw = self.raw_confidence(state, {model: arrived[model]}, ())
                return Combined(output, calibrated(state, raw), (model,))
        return NO_ANSWER

    def raw_confidence(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> tuple[UserValue, float]:
        """Return the first usable output with the model's confidence, or else its accuracy."""
        for model, prediction in arrived.items():
            if is_usable(prediction.output):
                if prediction.confidence is not None:
                    return prediction.output, sound_confidence(prediction.confidence)
                return prediction.output, self._accuracy(state, model)
        return None, 0.0

    def probabilities(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> LabelProbabilities:
        """Return the calibrated confidence for the output; other labels share the rest evenly."""
        in_order = {model: arrived[model] for model in sorted_models(arrived)}
        output, raw = self.raw_confidence(state, in_order, missing)
        sure = calibrated(state, raw)
        rest = (1.0 - sure) / max(state.classes - 1.0, 1.0)
        return LabelProbabilities({label_key(output): (output, sure)}, rest)


def choose_by_rule(rule: Rule) -> Choose:
    """Return the choice of a bandit's rule, with its probability."""

    def choose(state: LearnedState, rows: Array, query: Query) -> tuple[int, tuple[float, ...]]:
        i, probability = rule.choose(rows, state.seen, query.uniform)
        return i, (probability,)

    return choose


def shares_by_rule(rule: Rule) -> Callable[[LearnedState], dict[VersionedModel, float]]:
    """Return the probability of each model by a bandit's rule."""

    def shares(state: LearnedState) -> dict[VersionedModel, float]:
        odds = rule.probabilities(state.rows, state.seen) if state.models else np.zeros(0)
        return dict(zip(state.models, odds.tolist(), strict=True))

    return shares


def shares_of_choice(rule: Rule) -> Callable[[LearnedState], dict[VersionedModel, float]]:
    """Return 1 for the model that a deterministic rule would choose now, 0 for the others."""

    def shares(state: LearnedState) -> dict[VersionedModel, float]:
        found = dict.fromkeys(state.models, 0.0)
        if state.models:
            found[state.models[rule.choose(state.rows, state.seen, 0.5)[0]]] = 1.0
        return found

    return shares


def unknown_accuracy(state: LearnedState, model: VersionedModel) -> float:
    """Return one half: the rows do not contain an accuracy."""
    return 0.5


def mean_accuracy(state: LearnedState, model: VersionedModel) -> float:
    """Return 1 less the mean loss (column 0) if the model was observed (column 1), else 0.5."""
    row = row_of(state, model)
    return 0.5 if row is None or row[1] <= 0 else float(1 - row[0])
