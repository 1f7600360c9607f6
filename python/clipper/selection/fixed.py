"""One model, always the same: the first that the application links."""

from collections.abc import Mapping, Sequence

from clipper.selection.policy import NOTHING, Combined, Prediction, State, is_usable, sound_confidence
from clipper.types import InputType, VersionedModel


class Fixed:
    """State: the linked models in their order. Threads: any."""

    name = "single"

    def init(self, models: Sequence[VersionedModel]) -> State:
        return tuple(models)

    def select(
        self, state: State, user: str | None, candidates: Sequence[VersionedModel]
    ) -> tuple[VersionedModel, ...]:
        preferred = next((model for model in state if model in candidates), None)
        return tuple(candidates[:1]) if preferred is None else (preferred,)

    def combine(
        self, state: State, arrived: Mapping[VersionedModel, Prediction], missing: Sequence[VersionedModel]
    ) -> Combined:
        """The most preferred model's output, with its own confidence, 1 if it gives none."""
        order = {model: at for at, model in enumerate(state)}
        for model in sorted(arrived, key=lambda model: (order.get(model, len(order)), model.name, model.version or 0)):
            prediction = arrived[model]
            if is_usable(prediction.output):
                return Combined(prediction.output, sound_confidence(prediction.confidence), (model,))
        return NOTHING

    def accepts_input_type(self, input: InputType) -> bool:
        return True

    def rank_models_desc(self, state: State, user: str | None) -> tuple[VersionedModel, ...]:
        return tuple(state)
