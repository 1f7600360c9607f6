"""The step of a policy's state from one set of models to another, by the three methods of a
policy."""

from collections.abc import Iterable

from clipper.selection.policy import Policy, State
from clipper.types import VersionedModel


def with_models(
    policy: Policy, state: State, before: Iterable[VersionedModel], after: Iterable[VersionedModel]
) -> State:
    """Return a state of the models `before` as one of the models `after`.

    First the models that are new, sorted by name and version: `update_model_version` if the state
    has another version of the name that is not used any more (of several the highest), otherwise
    `add_model`. Then `remove_model` for each that is left over, sorted alike. For equal sets no
    method is called. Raises what the methods raise.
    """
    known, wanted = set(before), set(after)
    for new in sorted(wanted - known):
        replaced = [old for old in known - wanted if old.name == new.name]
        if replaced:
            state = policy.update_model_version(state, max(replaced), new)
            known.remove(max(replaced))
        else:
            state = policy.add_model(state, new)
        known.add(new)
    for gone in sorted(known - wanted):
        state = policy.remove_model(state, gone)
    return state
