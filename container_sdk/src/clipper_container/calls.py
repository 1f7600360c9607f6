"""Calls of other models and applications by a model (docs/async.md).

A model that has a parameter or an attribute `calls: clipper_container.Calls` gets it. Calls go over
the connection on which the batch came that the model evaluates, and end by its deadline.

This module does not import numpy (see `__main__`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from clipper_container.current import current_evaluation
from clipper_container.errors import ClipperError
from clipper_container.model import BorrowedModel, FunctionModel, Model, UserValue

PARAMETER = "calls"


class CallFailed(ClipperError):
    """A call of a model failed. code: the kind of the error, as in `slug` of the server's error."""

    slug = "call-failed"

    def __init__(self, message: str, code: str = "call-failed") -> None:
        super().__init__(message)
        self.code = code


class CallNotAllowed(CallFailed):
    """The model does not list in `calls` what it called."""


class CallCycle(CallFailed):
    """A call of what would call the caller again, in the end."""


class CallLimit(CallFailed):
    """A limit of calls was reached: how deep they go, or how many are open."""


KINDS: dict[str, type[CallFailed]] = {
    "call-not-allowed": CallNotAllowed,
    "call-cycle": CallCycle,
    "call-limit": CallLimit,
}


@dataclass(frozen=True, slots=True)
class CalledAnswer:
    """The answer of an application that was called. output, confidence, is_default, reason, id: as
    those of `clipper.Answer`."""

    output: UserValue
    confidence: float | None = None
    is_default: bool = False
    reason: str | None = None
    id: str = ""


class Caller(Protocol):
    """Sends the calls of a batch that is being evaluated."""

    def call(
        self, target: str, rows: UserValue, many: bool, options: dict[str, object]
    ) -> PendingCall:
        """Send a call. Raises: CallFailed."""


class PendingCall:
    """A call whose answer may not be there yet. `result()` waits for it in a model that is not
    async, `await` in one that is. Threads: one reads; any ends it.

    read: waits for frames until this call has ended; None: another thread reads them.
    """

    def __init__(self, read: UserValue = None) -> None:
        self._read = read
        self._outcome: UserValue = None
        self._ended = False
        self._future: asyncio.Future[UserValue] | None = None
        if read is None:
            self._future = asyncio.get_running_loop().create_future()

    def done(self) -> bool:
        """Return whether the answer is there."""
        return self._ended

    def end(self, outcome: UserValue) -> None:
        """Keep the answer, or the CallFailed; in the thread that waits for it."""
        if self._ended:
            return
        self._outcome = outcome
        self._ended = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def result(self) -> UserValue:
        """Wait for the answer and return it. Raises: CallFailed; RuntimeError in an async model."""
        if not self._ended and self._read is None:
            raise RuntimeError("in an async model a call is awaited: await calls.model(...)")
        while not self._ended:
            self._read()
        if isinstance(self._outcome, CallFailed):
            raise self._outcome
        return self._outcome

    def __await__(self) -> Generator[object, None, UserValue]:
        if self._future is not None and not self._ended:
            yield from self._future
        return self.result()


class Target:
    """A model or an application that is called; `Calls` makes it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def predict(self, x: UserValue, *, slo_ms: float | None = None, user: str = "") -> PendingCall:
        """Call it with one input.

        x: a number, a text, bytes, an array, or a dict of these. slo_ms: time for the answer, if
        that is less than the caller has left. user: of an application. Its result is an output of
        a model, a `CalledAnswer` of an application. Raises: CallFailed, RuntimeError outside of a
        batch.
        """
        return self._call(x, False, slo_ms, user)

    def predict_many(
        self, rows: UserValue | Sequence[UserValue], *, slo_ms: float | None = None, user: str = ""
    ) -> PendingCall:
        """Call it with several inputs, an array whose first dimension they are or a list. The
        result is a list; it is an error if one of them fails."""
        return self._call(rows, True, slo_ms, user)

    def _call(self, rows: UserValue, many: bool, slo_ms: float | None, user: str) -> PendingCall:
        caller: UserValue = getattr(current_evaluation(), "caller", None)
        if caller is None:
            raise RuntimeError(
                f"{self._name} can be called while a batch is evaluated, by the thread or the task"
                " that evaluates it, and at a server that takes calls"
            )
        options: dict[str, object] = {}
        if slo_ms is not None:
            options["slo_ms"] = float(slo_ms)
        if user:
            options["user"] = user
        made: PendingCall = caller.call(self._name, rows, many, options)
        return made


class Calls:
    """Calls other models and applications, those that the deployment lists in `calls`."""

    def app(self, name: str) -> Target:
        """Return an application."""
        return Target(f"app:{name}")

    def model(self, name: str, version: int = 0) -> Target:
        """Return a model; version 0: the one that serves."""
        return Target(f"model:{name}:{version}" if version else f"model:{name}")


def give_calls(model: Model) -> tuple[Model, bool]:
    """Give a model its `Calls`, if it has a parameter or an attribute of that name and type; return
    the model, and whether it has."""
    if isinstance(model, FunctionModel):
        if not _wants(model.inner):
            return model, False
        model.inner = functools.partial(model.inner, **{PARAMETER: Calls()})
        return model, True
    owner: UserValue = model.inner if isinstance(model, BorrowedModel) else model
    if not _is_calls(_annotations(type(owner)).get(PARAMETER)):
        return model, False
    setattr(owner, PARAMETER, Calls())
    return model, True


def _annotations(kind: type) -> dict[str, object]:
    found: dict[str, object] = {}
    for each in reversed(kind.__mro__):
        found.update(inspect.get_annotations(each))
    return found


def _wants(function: UserValue) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get(PARAMETER)
    except (TypeError, ValueError):
        return False
    return parameter is not None and _is_calls(parameter.annotation)


def _is_calls(annotation: object) -> bool:
    """Return whether an annotation is Calls, also as text."""
    return annotation is Calls or (
        isinstance(annotation, str) and annotation.rpartition(".")[2] == "Calls"
    )
