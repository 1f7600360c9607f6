"""All models, with equal weights: they vote on labels and average numbers.

Confidence of a vote: models that gave the winning label / models asked. So a missing prediction
lowers it: it replaces nothing, and agrees with nobody. A missing number leaves the mean to those
that arrived, unless the application has it replaced by its model's own mean before
(serving/stragglers). One model alone is believed as far as it believes itself.
"""

from collections.abc import Sequence

from clipper.selection.policy import NOTHING, Combined, Plan, Predictions, Query, sound_confidence
from clipper.selection.stateless_policy import Models, Unlearned
from clipper.selection.votes import combine, in_order, usable
from clipper.types import VersionedModel


class Ensemble(Unlearned):
    """State: the linked models, sorted. Threads: any."""

    name = "ensemble"
    averages = True

    def init(self, models: Sequence[VersionedModel], prior: Models | None = None) -> Models:
        return in_order(models)

    def select(self, state: Models, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        return Plan(in_order(candidates))

    def combine(
        self, state: Models, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        votes = usable(arrived)
        asked = len({*arrived, *missing})
        if not votes:
            return NOTHING
        if asked == 1:
            ((model, only),) = votes.items()
            return Combined(only.output, sound_confidence(only.confidence), (model,))
        return combine(votes, dict.fromkeys(votes, 1.0), asked)
