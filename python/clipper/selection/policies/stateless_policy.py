"""The common part of policies that do not learn: their state is the tuple of their models."""

from collections.abc import Sequence

import msgspec

from clipper.selection.policy import Observation, Policy
from clipper.types import InputType, VersionedModel

Models = tuple[VersionedModel, ...]


class StatelessPolicy(Policy):
    """The base of policies with fixed weights. Threads: any.

    It is the one level between the interface and the named policies: all of them keep their models
    alike, and feedback changes nothing. The state is the tuple of the models in their order.
    """

    schema = 1
    chance = False

    def init(self, models: Sequence[VersionedModel], prior: Models | None = None) -> Models:
        """Return the models in the order of their links."""
        return tuple(models)

    def observe(self, state: Models, observation: Observation) -> Models:
        """Return `state`: nothing is learned."""
        return state

    def add_model(self, state: Models, model: VersionedModel) -> Models:
        """Append a model."""
        return state if model in state else (*state, model)

    def remove_model(self, state: Models, model: VersionedModel) -> Models:
        """Remove a model."""
        return tuple(other for other in state if other != model)

    def update_model_version(
        self, state: Models, old: VersionedModel, new: VersionedModel
    ) -> Models:
        """Replace a version at its place."""
        return tuple(new if model == old else model for model in state)

    def merge(self, base: Models, mine: Models, theirs: Models) -> Models:
        """Return the models of both servers."""
        return tuple(dict.fromkeys((*mine, *theirs)))

    def encode(self, state: Models) -> bytes:
        """Encode the models in MessagePack."""
        return msgspec.msgpack.encode(state)

    def decode(self, data: bytes) -> Models:
        """Decode the models. Raises ValueError."""
        try:
            return msgspec.msgpack.decode(data, type=tuple[VersionedModel, ...])
        except msgspec.MsgspecError as error:
            raise ValueError(f"no state of {type(self).__name__.lower()}: {error}") from None

    def accepts_input_type(self, input: InputType) -> bool:
        """Accept every input type."""
        return True

    def rank_models_desc(self, state: Models, user: str | None) -> Models:
        """Return the models in their order."""
        return tuple(state)


def learns(policy: object) -> bool:
    """Return True if feedback changes the policy's state."""
    return not isinstance(policy, StatelessPolicy) and bool(getattr(policy, "learns", True))
