"""Waiting for the first load of a mesh model whose tensors are known only then."""

import time

from clipper.errors import DeadlineExceeded
from clipper.frontend.inference.json_inputs import input_of
from clipper.serving.models.model_source import ResolvedModel
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import ANY

_POLL_S = 0.01


def types_are_known(resolved: ResolvedApplication) -> bool:
    """Return whether the tensors of a model are stated, or all that a loaded copy states; of an
    application, those of its first model.
    """
    first = _first_on_demand(resolved)
    return first is None or first.is_ready or input_of(resolved) != ANY


def wait_for_types(resolved: ResolvedApplication, name: str, limit_us: int) -> int:
    """Wait until the tensors are known; return the microseconds that it took. Blocks.

    The wait counts as a use, so that the model is loaded. name: of the model or the application.
    Raises DeadlineExceeded after limit_us; Overloaded if it cannot be loaded until then.
    """
    began = time.monotonic()
    if resolved.unlisted_model is not None:
        resolved.unlisted_model.admit(limit_us)
    else:
        for model in resolved.on_demand.values():
            model.touch()
    first = _first_on_demand(resolved)
    while first is not None and not types_are_known(resolved):
        if time.monotonic() - began > limit_us / 1e6:
            raise DeadlineExceeded(
                f"the tensors of {name!r} are known once its model is loaded: {first.reason()}.",
                hint="State them where the model is registered (input=, output=), or load it"
                " first.",
            )
        time.sleep(_POLL_S)
    return int((time.monotonic() - began) * 1e6)


def _first_on_demand(resolved: ResolvedApplication) -> ResolvedModel | None:
    """Return the first model if its queries have it loaded."""
    return resolved.on_demand.get(resolved.models[0]) if resolved.models else None
