"""The interface of a user-defined decider, which decides when a query is answered.

class TwoOfThree:
    def decide(self, view: View) -> Wait | AnswerFrom:
        return AnswerFrom(tuple(view.arrived)) if len(view.arrived) >= 2 else Wait()

server.app("a", models=["x", "y", "z"], decider="mine:TwoOfThree")
"""

import math
from collections.abc import Mapping
from typing import Protocol

import msgspec

from clipper.selection.policy import Policy, Prediction, State
from clipper.types import VersionedModel


class View(msgspec.Struct, frozen=True, eq=False):
    """The progress of one query. Immutable; each call of `decide` gets a new one.

    models: all models of the query, best first.
    arrived: their predictions so far.
    failed: models that ended without a prediction.
    outstanding: the other models.
    elapsed_ms: time since the query arrived.  slo_ms: the query's deadline, from its arrival.
    """

    models: tuple[VersionedModel, ...]
    arrived: Mapping[VersionedModel, Prediction]
    failed: tuple[VersionedModel, ...]
    outstanding: tuple[VersionedModel, ...]
    elapsed_ms: float
    slo_ms: float


class Wait(msgspec.Struct, frozen=True):
    """Do not answer yet: call `decide` again at the next arrival.

    until_ms: call again at this time after the query's arrival at the latest; None for no limit.
    """

    until_ms: float | None = None


class AnswerFrom(msgspec.Struct, frozen=True):
    """Answer now from these models only: with the one output, or with the policy's combination."""

    models: tuple[VersionedModel, ...]


class Decider(Protocol):
    """The interface of a decider: one method.

    Threads: a few objects exist, and each is called by one thread at a time; it must not keep state
    about queries. A decider that raises, or takes longer than the query has, is ignored for that
    query, which then waits for all models or for the deadline. Other queries are not affected.
    Source: the design document, "Selection policies"; the speculative serving document.
    """

    def decide(self, view: View) -> Wait | AnswerFrom:
        """Decide on one query.

        Called after each arrival and each failure and at the times that it returned, until it
        answers.
        """


class DecidingPolicy(Policy, Protocol):
    """A policy that also decides when to answer, for applications whose decider is `all`."""

    def decide(self, state: State, view: View) -> Wait | AnswerFrom:
        """Decide as `Decider.decide` does, with the policy's state."""


def check_decision(decision: object, view: View) -> Wait | AnswerFrom:
    """Return a valid decision. Raises TypeError or ValueError for any other value."""
    if isinstance(decision, Wait):
        until = decision.until_ms
        if until is not None and (
            isinstance(until, bool) or not isinstance(until, int | float) or math.isnan(until)
        ):
            raise ValueError(f"decide returned Wait(until_ms={until!r})")
        return decision
    if not isinstance(decision, AnswerFrom):
        raise TypeError(f"decide returned a {type(decision).__name__}, neither Wait nor AnswerFrom")
    if not decision.models:
        raise ValueError("decide answers from no model")
    for model in decision.models:
        if model not in view.arrived:
            raise ValueError(f"decide answers from {model!s}, which has not arrived")
    return decision
