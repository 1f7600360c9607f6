"""Applications whose plain queries the core schedules, combines and counts.

The core knows the built-in policies over at most 64 models, and the built-in deciders. What it does
not take is scheduled in Python (processor.py): applications with named outputs, and policies and
deciders of users. It asks Python to query observers.
"""

from collections.abc import Sequence
from typing import cast

from clipper.selection import POLICIES, Plan, Policy
from clipper.selection.learning.learned_state import DOUBT
from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.learning.one_model import OneModel
from clipper.selection.policies.contextual import LinTs, LinUcb
from clipper.selection.policies.ensemble import Ensemble
from clipper.selection.policies.experts import WeightedVotes
from clipper.selection.policies.mixture import MixedVotes
from clipper.selection.policies.ridge import SPREAD_COUNTS, Ridge
from clipper.selection.policies.single_model import SingleModel
from clipper.selection.policies.weighted import AbSplit, StaticWeights, weight_of
from clipper.selection.policy import State
from clipper.selection.votes import sorted_models
from clipper.serving.feedback.stored_state import LATEST
from clipper.serving.query.processor import (
    ResolvedApplication,
    finish,
    id_of,
    log_default,
    uniform_of,
    why_of,
)
from clipper.serving.query.qualifiers import opened
from clipper.serving.query.speculation import EnsembleCall, Order, Speculation
from clipper.serving.query.stats import ApplicationCounters, ApplicationStats
from clipper.serving.rollout.roles import RoleAssignment
from clipper.types import UserValue, VersionedModel
from clipper_core.application.application import Application
from clipper_core.application.deciding import Answering, Deciding
from clipper_core.application.roles import Roles
from clipper_core.application.selection import Combining, Selection
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status

MODELS_MAX = 64  # of an application that the core combines
# by rule; the others answer with the output of one model
_ANSWERING = {
    "all": Answering.BY_POLICY,
    "majority": Answering.BY_VOTES,
    "quorum": Answering.BY_VOTES,
    "weighted": Answering.BY_WEIGHTS,
    "mean": Answering.BY_MEAN,
    "median": Answering.BY_MEDIAN,
}


class DeciderOrders:
    """Describes an application's decider to the core, for each state of its policy.

    selection: of the policy, which queries all primaries.  stats: counts answers by step.
    undecided: counts those by no step. Threads: any.
    """

    __slots__ = ("_measures", "_selection", "_speculation", "_steps", "undecided")

    def __init__(
        self, speculation: Speculation, selection: Selection, stats: ApplicationCounters
    ) -> None:
        self._speculation = speculation
        self._selection = selection
        self.undecided = stats.step("")
        self._measures = measures(speculation)
        decided = [speculation.decided(i) for i in range(len(speculation.steps))]
        self._steps = [
            (name, _ANSWERING.get(rule, Answering.BY_ONE), stats.step(name))
            for rule, name in decided
        ]

    def deciding(self, state: State) -> Deciding | None:
        """Return the order of the models and the decider; None if Python has to decide."""
        speculation, last = self._speculation, self._speculation.steps[-1]
        order = speculation.order(state, Plan(self._selection.primaries), None)
        if set(order.models) != set(self._selection.primaries):
            return None
        return Deciding(
            order.decider,
            order.models,
            self._selection.models,
            self._steps,
            speculation.starts_us(order.models, 0),
            order.weights,
            round(last.until_ms * 1000),
            round(last.margin_ms * 1000),
            order,
            self._measures,
        )

    def starts_us(self, deciding: Deciding, slo_us: int) -> tuple[int, ...] | None:
        """Return when each model is queried by the times that are measured now."""
        return self._speculation.starts_us(deciding.models, slo_us)

    def call(self, deciding: Deciding, slo_us: int) -> EnsembleCall:
        """Return the call of a query whose answer Python makes."""
        order = cast(Order, deciding.order)
        starts_us = self._speculation.starts_us(order.models, slo_us)
        return EnsembleCall(self._speculation, order, starts_us, slo_us, 0.0)


class DefaultAnswers:
    """The answers of an application without a usable prediction, and who is told. Threads: any."""

    __slots__ = ("_resolved", "default", "overloaded")

    def __init__(self, resolved: ResolvedApplication, stats: ApplicationCounters) -> None:
        self._resolved = resolved
        self.default = resolved.default
        self.overloaded = stats.watched.overloaded

    def why(self, status: Status, model: VersionedModel, detail: str) -> str:
        """Explain why a task of a model has no prediction."""
        return why_of(self._resolved, status, model, detail)

    def log(self, number: int, request_id: str, reason: str) -> None:
        """Log a default answer."""
        log_default(self._resolved, number, request_id, reason)


class DecoyRecords:
    """The decoys of an application, as the core tells them of its queries. Threads: any."""

    __slots__ = ("_resolved",)

    def __init__(self, resolved: ResolvedApplication) -> None:
        self._resolved = resolved

    def saw(self, number: int, x: object, user: str, id: str) -> None:
        """Record a query."""
        for decoy in self._resolved.rollout.decoys:
            decoy.saw(number, id_of(self._resolved, number), x, user, id)

    def replied(self, number: int, output: UserValue, is_default: bool) -> None:
        """Record the answer of a query."""
        for decoy in self._resolved.rollout.decoys:
            decoy.add_reply(number, id_of(self._resolved, number), output, is_default)


class ObserverQueries:
    """Queries the observers of an application for the core, and compares what they say with
    answers. Threads: any."""

    __slots__ = ("_resolved", "_stats", "compare")

    def __init__(self, resolved: ResolvedApplication, stats: ApplicationStats) -> None:
        self._resolved = resolved
        self._stats = stats
        self.compare = stats.counters.watched.add

    def watch(
        self, models: tuple[VersionedModel, ...], x: object, slo_us: int, salt: int
    ) -> tuple[tuple[VersionedModel, Future], ...]:
        """Send a query to those of these observers whose rate limits allow it, and return their
        futures."""
        for model in models:
            link = self._resolved.on_demand.get(model)
            if link is not None:
                link.touch()
        watched: list[tuple[VersionedModel, Future]] = []
        self._stats.watch(self._resolved.cores, models, x, slo_us, salt, watched)
        return tuple(watched)


def roles_of(resolved: ResolvedApplication, selection: Selection) -> Roles | None:
    """Return what the models of an application do beside answering; None if nothing."""
    assignment, policy = resolved.rollout.assignment, resolved.policy
    shadow = 0.0
    if isinstance(policy, LearningPolicy) and isinstance(policy.answering, OneModel):
        shadow = policy.answering.shadow
    if assignment is None:
        return Roles((), (), shadow) if shadow else None
    challengers = [
        (selection.models.index(model), end, share) for end, model, share in assignment.challengers
    ]
    return Roles(assignment.observers, challengers, shadow)


def measures(speculation: Speculation) -> bool:
    """Return whether models are queried at times that are measured."""
    return any(step.rule == "hedged" and step.after_ms is None for step in speculation.steps)


def decides_in_core(speculation: Speculation, selection: Selection) -> bool:
    """Return whether the core knows the decider of a policy that queries all models."""
    return (
        speculation.own is None
        and not selection.calls_one
        and not selection.makes_sets
        and not (measures(speculation) and len(speculation.steps) > 1)
        and set(speculation.links) == set(selection.primaries)
    )


def core_of(resolved: ResolvedApplication) -> Application | None:
    """Return what schedules the plain queries of an application in the core; None if Python has to
    schedule them all."""
    rollout, window = resolved.rollout, resolved.feedback.window
    is_plain = rollout.split is None and not resolved.output_name
    if not is_plain or window is None or rollout.stats is None:
        return None
    selection = selection_of(resolved.policy, resolved.models, rollout.assignment)
    if selection is None:
        return None
    roles = roles_of(resolved, selection)
    counters = rollout.stats.counters
    orders, speculation = None, resolved.speculation
    if speculation is not None:
        # a challenger is a decider's only model
        if not decides_in_core(speculation, selection) or (roles is not None and roles.left < 1.0):
            return None
        orders = DeciderOrders(speculation, selection, counters)
    return Application(
        resolved,
        selection,
        [resolved.cores[model] for model in selection.models],
        resolved.learner,
        window.table,
        window.keep if window.keeps(resolved.learner) else None,
        rollout.stats.answer_counts,
        counters.queries,
        counters.step("all"),
        counters.slowest,
        counters.slowest.bar,
        resolved.means,
        resolved.feedback.online_learning.is_teaching,
        resolved.rows is not None,
        finish,
        opened,
        Plan,
        LATEST,
        resolved.node,
        resolved.slo_us,
        resolved.confidence_min,
        DefaultAnswers(resolved, counters),
        uniform_of,
        orders,
        None if rollout.side is None else rollout.side.answers,
        [resolved.on_demand.get(model) for model in selection.models]
        if resolved.on_demand
        else None,
        DecoyRecords(resolved) if rollout.decoys else None,
        roles,
        None if roles is None else ObserverQueries(resolved, rollout.stats),
        counters.compare,
        resolved.priority,
    )


def selection_of(
    policy: Policy, models: Sequence[VersionedModel], assignment: RoleAssignment | None = None
) -> Selection | None:
    """Return a policy over these models as the core runs it; None if it does not know it, and if
    no model is left to answer."""
    primaries = tuple(models) if assignment is None else assignment.primaries
    if not primaries or POLICIES.get(policy.name) is not type(policy):
        return None
    if isinstance(policy, LearningPolicy):
        found = sorted_models(models)
    else:
        answering = primaries[:1] if isinstance(policy, SingleModel) else primaries
        primaries = sorted_models(answering)
        found = sorted_models((*primaries, *_challengers(assignment)))
    watching = () if assignment is None else assignment.observers
    if max(len(found), len(watching)) > MODELS_MAX:
        return None
    # roles may be of models that the policy has not learned of
    if not {*primaries, *_challengers(assignment)} <= {*found}:
        return None
    if isinstance(policy, LearningPolicy):
        return _learning_selection(policy, found, primaries)
    if isinstance(policy, Ensemble | SingleModel):
        return Selection(Combining.EQUAL_VOTES, found, primaries=primaries)
    if isinstance(policy, StaticWeights):
        weights = [weight_of(policy.weights, model, 1.0) for model in found]
        return Selection(Combining.FIXED_VOTES, found, weights=weights, primaries=primaries)
    if isinstance(policy, AbSplit):
        shares = [weight_of(policy.shares, model, 0.0) for model in found]
        if not any(weight_of(policy.shares, model, 0.0) for model in primaries):
            shares = [1.0] * len(found)
        return Selection(Combining.DRAWN_MODEL, found, weights=shares, primaries=primaries)
    return None


def _challengers(assignment: RoleAssignment | None) -> tuple[VersionedModel, ...]:
    """Return the models that answer queries alone."""
    return () if assignment is None else tuple(model for _, model, _ in assignment.challengers)


def _learning_selection(
    policy: LearningPolicy,
    models: tuple[VersionedModel, ...],
    primaries: tuple[VersionedModel, ...],
) -> Selection | None:
    """Return a policy that learns as the core runs it."""
    answering = policy.answering
    rule = policy.rule
    makes_sets = policy.coverage is not None
    if isinstance(policy, Ridge):
        return Selection(
            Combining.BLEND,
            models,
            doubt=SPREAD_COUNTS,
            ridge=policy.strength,
            primaries=primaries,
            makes_sets=makes_sets,
        )
    if rule is None:
        return None
    if isinstance(answering, WeightedVotes | MixedVotes):
        return Selection(
            Combining.LEARNED_VOTES,
            models,
            rule=rule,
            doubt=DOUBT,
            primaries=primaries,
            makes_sets=makes_sets,
        )
    if isinstance(answering, OneModel):
        linear = policy.linear if isinstance(policy, LinUcb | LinTs) else None
        return Selection(
            Combining.CHOSEN_MODEL,
            models,
            rule=rule,
            doubt=DOUBT,
            linear=linear,
            primaries=primaries,
            makes_sets=makes_sets,
        )
    return None
