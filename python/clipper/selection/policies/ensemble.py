"""The policy `ensemble`: all models with equal weights."""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clipper.selection.learning.learned_state import DOUBT
from clipper.selection.policies.stateless_policy import Models, StatelessPolicy
from clipper.selection.policy import NO_ANSWER, Combined, Plan, Predictions, Query
from clipper.selection.votes import answer_of_first, combine, sorted_models, usable
from clipper.types import VersionedModel
from clipper_core.learning.bandit import Rule, RuleKind
from clipper_core.learning.label_feedback import LabelVotes
from clipper_core.learning.number_votes import mean_of_numbers

_LABELS = LabelVotes(Rule(RuleKind.HEDGE), DOUBT)  # weights that never change
_NO_BINS = np.zeros((1, 2))


class Ensemble(StatelessPolicy):
    """Query all models; vote on labels with equal weights, average numbers.

    The confidence of a vote is the number of models that gave the winning label, divided by the
    number queried, so a missing prediction lowers it. Numbers are averaged over those that arrived,
    unless the application imputes the missing ones first (serving/query/missing_outputs). A single
    model keeps its own confidence.

    State: the linked models, sorted; nothing is learned.
    Guarantee: as good as the majority when errors are independent (Condorcet), no better than the
    best model otherwise.  Source: the Clipper paper, section 5.2.
    """

    name = "ensemble"
    averages = True

    def init(self, models: Sequence[VersionedModel], prior: Models | None = None) -> Models:
        """Return the models, sorted."""
        return sorted_models(models)

    def select(self, state: Models, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        """Select all candidates."""
        models = tuple(candidates)
        return Plan(models if models == state else sorted_models(models))

    def combine(
        self, state: Models, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Vote with equal weights, or average."""
        if len(arrived) == 1 and not missing:
            return answer_of_first(arrived, arrived) or NO_ANSWER
        found = _LABELS.answer(state, _equal_rows(len(state)), _NO_BINS, 0, arrived, len(missing))
        if found is not None:
            output, _, used, share = found
            share = round(share * len(state)) / len(state)
            return Combined(output, share, used, share)
        if len(arrived) + len(missing) == len(state) > 1:
            numbers = mean_of_numbers(state, arrived, None, len(state))
            if numbers is not None:
                return Combined(*numbers)
        votes = usable(arrived)
        selected = len({*arrived, *missing})
        if selected == 1 or not votes:
            return answer_of_first(votes, votes) or NO_ANSWER
        return combine(votes, dict.fromkeys(votes, 1.0), selected)


@functools.lru_cache(maxsize=64)
def _equal_rows(k: int) -> NDArray[np.float64]:
    return np.zeros((k, 1))
