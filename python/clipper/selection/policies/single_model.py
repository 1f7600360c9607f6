"""The policy `single`: one model, the first that the application links."""

from collections.abc import Sequence

from clipper.selection.policies.stateless_policy import Models, StatelessPolicy
from clipper.selection.policy import NO_ANSWER, Combined, Plan, Predictions, Query
from clipper.selection.votes import answer_of_first
from clipper.types import VersionedModel


class SingleModel(StatelessPolicy):
    """Ask the first linked model and return its output with its own confidence, 1 without one.

    State: the linked models in their order; nothing is learned.  Guarantee: none.
    """

    name = "single"

    def select(self, state: Models, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        """Ask the first candidate."""
        return Plan(tuple(candidates[:1]))

    def combine(
        self, state: Models, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Return the output of the first linked model that has one."""
        order = {model: at for at, model in enumerate(state)}
        models = sorted(
            arrived,
            key=lambda model: (order.get(model, len(order)), model.name, model.version or 0),
        )
        return answer_of_first(arrived, models) or NO_ANSWER
