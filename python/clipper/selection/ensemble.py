"""The policy `ensemble`: all models with equal weights."""

from collections.abc import Sequence

from clipper.selection.policy import NO_ANSWER, Combined, Plan, Predictions, Query
from clipper.selection.stateless_policy import Models, StatelessPolicy
from clipper.selection.votes import answer_of_first, combine, sorted_models, usable
from clipper.types import VersionedModel


class Ensemble(StatelessPolicy):
    """Ask all models; vote on labels with equal weights, average numbers.

    The confidence of a vote is the number of models that gave the winning label, divided by the
    number asked, so a missing prediction lowers it. Numbers are averaged over those that arrived,
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
        """Ask all candidates."""
        return Plan(sorted_models(candidates))

    def combine(
        self, state: Models, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Vote with equal weights, or average."""
        votes = usable(arrived)
        asked = len({*arrived, *missing})
        if asked == 1 or not votes:
            return answer_of_first(votes, votes) or NO_ANSWER
        return combine(votes, dict.fromkeys(votes, 1.0), asked)
