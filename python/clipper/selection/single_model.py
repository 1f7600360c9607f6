"""One model, always the same: the first that the application links."""

from collections.abc import Sequence

from clipper.selection.policy import (
    NOTHING,
    Combined,
    Plan,
    Predictions,
    Query,
    is_usable,
    sound_confidence,
)
from clipper.selection.stateless_policy import Models, Unlearned
from clipper.types import VersionedModel


class SingleModel(Unlearned):
    """State: the linked models in their order. Threads: any."""

    name = "single"

    def select(self, state: Models, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        return Plan(tuple(candidates[:1]))

    def combine(
        self, state: Models, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """The most preferred model's output, with its own confidence, 1 if it gives none."""
        order = {model: at for at, model in enumerate(state)}
        for model in sorted(
            arrived,
            key=lambda model: (order.get(model, len(order)), model.name, model.version or 0),
        ):
            prediction = arrived[model]
            if is_usable(prediction.output):
                return Combined(
                    prediction.output, sound_confidence(prediction.confidence), (model,)
                )
        return NOTHING
