"""The errors of a client: the classes of `clipper.errors` where that can be imported, else those of
`clipper_client.own_errors`, which have the same names."""

import importlib
import json
from types import ModuleType
from typing import TYPE_CHECKING, Final

from clipper_client import own_errors
from clipper_client.http_wire import Response
from clipper_client.own_errors import (
    BadOutput,
    ClipperError,
    ContainerDied,
    DeadlineExceeded,
    DoesNotFit,
    Forbidden,
    InvalidInput,
    ModelFailed,
    NoReplica,
    NoServer,
    NotAllowed,
    OutOfMemory,
    Overloaded,
    PolicyFailed,
    RateExceeded,
    ReplicaLost,
    ShuttingDown,
    StoreError,
    TooLarge,
    TypeConflict,
    Unknown,
    UnknownApplication,
    UnknownModel,
    UnknownPrediction,
    UnknownVersion,
)

__all__ = (
    "BadOutput",
    "ClipperError",
    "ContainerDied",
    "DeadlineExceeded",
    "DoesNotFit",
    "Forbidden",
    "InvalidInput",
    "ModelFailed",
    "NoReplica",
    "NoServer",
    "NotAllowed",
    "OutOfMemory",
    "Overloaded",
    "PolicyFailed",
    "RateExceeded",
    "ReplicaLost",
    "ShuttingDown",
    "StoreError",
    "TooLarge",
    "TypeConflict",
    "Unknown",
    "UnknownApplication",
    "UnknownModel",
    "UnknownPrediction",
    "UnknownVersion",
)


def source_of_classes() -> ModuleType:
    """Return `clipper.errors` if it has all of the classes, else `clipper_client.own_errors`."""
    try:
        shared = importlib.import_module("clipper.errors")
    except ImportError:  # no clipper here, an unrelated package, or one that is not whole
        return own_errors
    return shared if all(hasattr(shared, name) for name in __all__) else own_errors


if not TYPE_CHECKING:
    _SOURCE = source_of_classes()
    globals().update({name: getattr(_SOURCE, name) for name in __all__})

_BY_SLUG: Final[dict[str, type[ClipperError]]] = {
    kind.slug: kind for name in __all__ for kind in (globals()[name],)
}


def error_of(response: Response, url: str) -> ClipperError:
    """Return the error that the server at `url` raised, as it is in its answer."""
    problem = problem_of(response)
    if problem is None:
        return not_clipper(url, f"status {response.status}")
    slug = str(problem.get("type", "")).rpartition(":")[2]
    message = str(problem.get("detail") or problem.get("error") or f"status {response.status}")
    hint = str(problem.get("hint") or "")
    if response.status in (401, 403) and slug != Forbidden.slug:
        return NotAllowed(f"{url}: {message}", hint=hint or "Give a key of that server: key=.")
    if slug.startswith("http-"):
        return ClipperError(f"{url}: {message}", hint=hint)
    kind = _BY_SLUG.get(slug, ClipperError)
    if issubclass(kind, Overloaded):
        return kind(message, hint=hint, retry_after_s=response.retry_after_s or 1.0)
    return kind(message, hint=hint)


def problem_of(response: Response) -> dict[str, object] | None:
    """Return the object that the body of an error is; None for another body."""
    try:
        found = json.loads(response.body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def not_clipper(url: str, why: str) -> NoServer:
    """Return the error for an answer that no Clipper server gives."""
    return NoServer(
        f"what answers at {url} is not a Clipper server ({why}).",
        hint="See server.http_address, or http.address in its configuration.",
    )
