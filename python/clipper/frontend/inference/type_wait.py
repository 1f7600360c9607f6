"""Waiting for the first load of a mesh model whose tensors are known only then."""

import time

from clipper.errors import DeadlineExceeded
from clipper.frontend.inference.json_inputs import input_of
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import ANY

_POLL_S = 0.01


def types_are_known(resolved: ResolvedApplication) -> bool:
    """Return whether the tensors of a model are stated, or all that a loaded copy states; of an
    application, those of its first model.
    """
    return not _why_not_loaded(resolved) or input_of(resolved) != ANY


def wait_for_types(resolved: ResolvedApplication, name: str, limit_us: int) -> int:
    """Wait until the tensors are known; return the microseconds that it took. Blocks.

    The wait counts as a use, so that the model is loaded. name: of the model or the application.
    Raises DeadlineExceeded after limit_us; Overloaded if it cannot be loaded until then.
    """
    began = time.monotonic()
    if resolved.unlisted_model is not None:
        resolved.unlisted_model.admit(limit_us)
    for link in resolved.links.values():
        link.touch()
    while not types_are_known(resolved):
        if time.monotonic() - began > limit_us / 1e6:
            raise DeadlineExceeded(
                f"the tensors of {name!r} are known once its model is loaded:"
                f" {_why_not_loaded(resolved)}.",
                hint="State them where the model is registered (input=, output=), or load it"
                " first.",
            )
        time.sleep(_POLL_S)
    return int((time.monotonic() - began) * 1e6)


def _why_not_loaded(resolved: ResolvedApplication) -> str:
    """Return why the first model of a mesh is not loaded; empty if it is, or is of no mesh."""
    if resolved.unlisted_model is not None:
        return resolved.unlisted_model.why()
    link = resolved.links.get(resolved.models[0]) if resolved.models else None
    return "" if link is None else link.reason()
