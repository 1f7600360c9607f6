"""A decider of the user's own: one class with one method, asked after each arrival and at the times
it names.

class TwoOfThree:
    def decide(self, view: View) -> Wait | AnswerFrom:
        return AnswerFrom(tuple(view.arrived)) if len(view.arrived) >= 2 else Wait()

server.app("a", models=["x", "y", "z"], decider="mine:TwoOfThree")
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from clipper.selection.policy import Policy, Prediction, State
from clipper.types import VersionedModel


class View(msgspec.Struct, frozen=True, eq=False):
    """One query as it stands. It never changes; the next call gets another.

    models: all asked, best first.  arrived: their predictions so far.  failed: ended without one.
    outstanding: the rest. elapsed_ms, slo_ms: since the query came, and in all.
    """

    models: tuple[VersionedModel, ...]
    arrived: Mapping[VersionedModel, Prediction]
    failed: tuple[VersionedModel, ...]
    outstanding: tuple[VersionedModel, ...]
    elapsed_ms: float
    slo_ms: float


class Wait(msgspec.Struct, frozen=True):
    """Ask me again at the next arrival, and, if nothing has come by then, at `until_ms` after the
    query came."""

    until_ms: float | None = None


class AnswerFrom(msgspec.Struct, frozen=True):
    """Answer now, from these models and no other: with one model's output, or what the policy makes
    of several."""

    models: tuple[VersionedModel, ...]


class Decider(Protocol):
    """Threads: one at a time for each of a few; keep no state about queries in it. It must be
    quick: what takes longer than the query has, or raises, costs that query its say (it waits for
    all models, or for the deadline), and nobody else anything. Source: the design document,
    "Selection policies"; the speculative serving document, its one-method decider.
    """

    def decide(self, view: View) -> Wait | AnswerFrom:
        """Called after each arrival and each failure, and at the times that it asks for; no more
        once the query is decided."""
        ...


class DecidingPolicy(Policy, Protocol):
    """A policy that also says when to answer; it does so for applications whose decider is left at
    `all`."""

    def decide(self, state: State, view: View) -> Wait | AnswerFrom:
        """As Decider.decide, knowing what was learned."""
        ...


def checked(said: Any, view: View) -> Wait | AnswerFrom:
    """`said`, if it makes sense; else TypeError or ValueError."""
    if isinstance(said, Wait):
        until = said.until_ms
        if until is not None and (
            isinstance(until, bool) or not isinstance(until, int | float) or math.isnan(until)
        ):
            raise ValueError(f"decide returned Wait(until_ms={until!r})")
        return said
    if not isinstance(said, AnswerFrom):
        raise TypeError(f"decide returned a {type(said).__name__}, neither Wait nor AnswerFrom")
    if not said.models:
        raise ValueError("decide answers from no model")
    for model in said.models:
        if model not in view.arrived:
            raise ValueError(f"decide answers from {model!s}, which has not arrived")
    return said
