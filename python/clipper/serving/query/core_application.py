"""Applications whose plain queries the core schedules, combines and counts.

The core knows the built-in policies over at most 16 models, and the built-in deciders. What it does
not take is scheduled in Python (processor.py): applications with roles of models, prediction sets
or named outputs, and policies and deciders of users.
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
from clipper.serving.query.stats import ApplicationCounters
from clipper.types import UserValue, VersionedModel
from clipper_core.application.application import Application
from clipper_core.application.deciding import Answering, Deciding
from clipper_core.application.selection import Combining, Selection
from clipper_core.runtime.status import Status

MODELS_MAX = 16  # of a query that the core combines
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

    models: of the policy, which queries all of them.  stats: counts answers by step.  undecided:
    counts those by no step. Threads: any.
    """

    __slots__ = ("_measures", "_models", "_speculation", "_steps", "undecided")

    def __init__(
        self,
        speculation: Speculation,
        models: tuple[VersionedModel, ...],
        stats: ApplicationCounters,
    ) -> None:
        self._speculation = speculation
        self._models = models
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
        order = speculation.order(state, Plan(self._models), None)
        if set(order.models) != set(self._models):
            return None
        return Deciding(
            order.decider,
            order.models,
            self._models,
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


def measures(speculation: Speculation) -> bool:
    """Return whether models are queried at times that are measured."""
    return any(step.rule == "hedged" and step.after_ms is None for step in speculation.steps)


def decides_in_core(speculation: Speculation, selection: Selection) -> bool:
    """Return whether the core knows the decider of a policy that queries all models."""
    return (
        speculation.own is None
        and not selection.calls_one
        and not (measures(speculation) and len(speculation.steps) > 1)
        and set(speculation.links) == set(selection.models)
    )


def core_of(resolved: ResolvedApplication) -> Application | None:
    """Return what schedules the plain queries of an application in the core; None if Python has to
    schedule them all."""
    rollout, window = resolved.rollout, resolved.feedback.window
    is_plain = rollout.assignment is None and rollout.split is None and not resolved.output_name
    if not is_plain or window is None or rollout.stats is None:
        return None
    selection = selection_of(resolved.policy, resolved.models)
    if selection is None:
        return None
    counters = rollout.stats.counters
    orders, speculation = None, resolved.speculation
    if speculation is not None:
        if not decides_in_core(speculation, selection):
            return None
        orders = DeciderOrders(speculation, selection.models, counters)
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
    )


def selection_of(policy: Policy, models: Sequence[VersionedModel]) -> Selection | None:
    """Return a policy over these models as the core runs it; None if it does not know it."""
    ordered = sorted_models(models)
    if not 1 <= len(ordered) <= MODELS_MAX or POLICIES.get(policy.name) is not type(policy):
        return None
    if isinstance(policy, LearningPolicy):
        return _learning_selection(policy, ordered)
    if isinstance(policy, Ensemble):
        return Selection(Combining.EQUAL_VOTES, ordered)
    if isinstance(policy, SingleModel):
        return Selection(Combining.EQUAL_VOTES, (models[0],))
    if isinstance(policy, StaticWeights):
        weights = [weight_of(policy.weights, model, 1.0) for model in ordered]
        return Selection(Combining.FIXED_VOTES, ordered, weights=weights)
    if isinstance(policy, AbSplit):
        shares = [weight_of(policy.shares, model, 0.0) for model in ordered]
        return Selection(
            Combining.DRAWN_MODEL, ordered, weights=shares if any(shares) else [1.0] * len(ordered)
        )
    return None


def _learning_selection(
    policy: LearningPolicy, models: tuple[VersionedModel, ...]
) -> Selection | None:
    """Return a policy that learns as the core runs it."""
    answering, rule = policy.answering, policy.rule
    if policy.coverage is not None:
        return None
    if isinstance(policy, Ridge):
        return Selection(Combining.BLEND, models, doubt=SPREAD_COUNTS, ridge=policy.strength)
    if rule is None:
        return None
    if isinstance(answering, WeightedVotes | MixedVotes):
        return Selection(Combining.LEARNED_VOTES, models, rule=rule, doubt=DOUBT)
    if isinstance(answering, OneModel) and not answering.shadow:
        linear = policy.linear if isinstance(policy, LinUcb | LinTs) else None
        return Selection(Combining.CHOSEN_MODEL, models, rule=rule, doubt=DOUBT, linear=linear)
    return None
