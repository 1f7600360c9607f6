"""Runs a query whose application has a decider: its models are queried by rank, the core decides
after each prediction, and the answer uses only predictions that had arrived at the decision.

`Speculation.call` and `EnsembleCall.ask` run on the caller's thread and return at once;
`EnsembleCall.outcome` on the thread that gets the result. In between the core runs the schedule
(clipper_core.results.decider), and a user-defined decider runs on threads of `DeciderThreads`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import msgspec

from clipper.errors import DoesNotFit, InvalidInput, did_you_mean
from clipper.selection import (
    DeciderStep,
    Plan,
    Policy,
    Prediction,
    Schedule,
    parse_decider,
    user_defined_decider,
)
from clipper.selection.deciders.answer import (
    DecisionInputs,
    decided_answer,
    rank_models,
    vote_weights,
)
from clipper.selection.policy import State
from clipper.selection.user_defined import UserCodeFailures
from clipper.serving.query.decider_threads import OWN_STEP, DeciderThreads, Listener
from clipper.serving.query.processor import (
    NO_FINITE_VALUE,
    Outcome,
    QueryContext,
    ResolvedApplication,
    refuse_fork,
    why_of,
)
from clipper.serving.query.qualifiers import prediction_of
from clipper.types import Answer, UserValue, VersionedModel
from clipper_core.application.application import ApplicationQuery
from clipper_core.engine.model import Model as CoreModel
from clipper_core.engine.model import predict_ensemble
from clipper_core.results.decider import Decider, Rule
from clipper_core.results.decider import Step as CoreStep
from clipper_core.results.future import Future, LateTask
from clipper_core.runtime.histogram import Snapshot
from clipper_core.runtime.status import Status

MODELS_MAX = 64  # of one query with a decider
MEASURED_MIN = 100  # predictions before a 99th percentile, or a 95th, means anything
HEDGE_MS_MIN = 1.0
HEDGE_CHECK_S = 1.0  # how long a measured percentile is good for
NEVER = -1  # a start: when the rule submits it
_ORDERS_MAX = 1024

_RULES = {
    "all": Rule.ALL,
    "first": Rule.FIRST,
    "majority": Rule.QUORUM,
    "quorum": Rule.QUORUM,
    "weighted": Rule.WEIGHTED,
    "best_quality": Rule.BEST,
    "surest": Rule.SUREST,
    "cascade": Rule.CASCADE,
    "hedged": Rule.HEDGED,
    "tied": Rule.TIED,
    "mean": Rule.MEAN,
    "median": Rule.MEDIAN,
    "guaranteed_time": Rule.BEST,
    "floor": Rule.FLOOR,
    "row": Rule.ROW,
}
_OF_THE_PLAN = ("all", "floor")  # rules that need no more models than the policy queries


class Order(msgspec.Struct, frozen=True, eq=False):
    """The models that are queried, best first, and the decider of their answers, for one state of
    the policy and one choice by it.
    """

    state: State
    chosen: tuple[VersionedModel, ...]
    models: tuple[VersionedModel, ...]
    cores: tuple[CoreModel, ...]
    decider: Decider
    weights: tuple[float, ...] | None


class EnsembleCall(msgspec.Struct, frozen=True, eq=False):
    """One query with a decider.

    models: best first; task i is models[i]'s. starts_us: when each starts, if not all at once.
    slo_us: time until the decision. started_s: start by the monotonic clock.
    """

    speculation: "Speculation"
    order: Order
    starts_us: tuple[int, ...] | None
    slo_us: int
    started_s: float

    @property
    def models(self) -> tuple[VersionedModel, ...]:
        """The queried models, best first."""
        return self.order.models

    def submit(
        self,
        x: object,
        salt: int,
        finish: Callable[[Future], Answer],
        query: QueryContext,
        learn: bool,
        band: int = 0,
    ) -> Future:
        """Send the query; return the future of its Answer.

        learn: models keep working after the decision. band: of all rows. Raises InvalidInput for a
        wrong type or shape.
        """
        order, speculation = self.order, self.speculation
        future = predict_ensemble(
            order.cores,
            order.decider,
            x,
            self.slo_us,
            salt,
            finish,
            query,
            order.weights,
            self.starts_us,
            learn,
            self.speculation.output,
            band,
        )
        if speculation.own is not None and not future.done():
            speculation.decider_threads.listen(Listener(future, self, query.state))
        return future

    def outcome(self, future: Future, query: QueryContext | ApplicationQuery) -> Outcome:
        """Return what had arrived, which models are missing, the answer, and the rule that decided.

        It reads only the snapshot of the decision, nothing that arrived later.
        """
        verdict, resolved = future.verdict, query.resolved
        if verdict is None:
            refuse_fork(future, resolved)
        at, used, seen = verdict or (0, 0, 0)  # none: the query was given up
        seen |= used  # a ruling of Python's may be ahead of the core's own count by a moment
        answered = [(i, model) for i, model in enumerate(self.models) if seen >> i & 1]
        arrived = {model: prediction_of(future, i) for i, model in answered}
        if not arrived:
            refuse_fork(future, resolved)
        rule, name = self.speculation.decided(at)
        inputs_of_all = DecisionInputs(
            resolved.policy, query.state, query.plan, self.models, arrived
        )
        combined = decided_answer(
            rule, inputs_of_all, [model for i, model in enumerate(self.models) if used >> i & 1]
        )
        return arrived, self._missing(future, at, seen), combined, name if combined.used else ""

    def _missing(self, future: Future, at: int, seen: int) -> list[VersionedModel]:
        """Return the models without a prediction at the decision: they had failed by then, or the
        time of a step, or of the query, was over. A model that was not queried, or could not have
        changed the answer any more, is not missing.
        """
        if seen.bit_count() == len(self.models):
            return []
        latencies, took = future.latencies_us(), future.latency_us
        in_vain = at > 0 or took >= self.slo_us
        found = []
        for i, model in enumerate(self.models):
            status = future.status(i)
            if seen >> i & 1 or (
                status is Status.UNNEEDED and self.starts_us is not None and self.starts_us[i]
            ):
                continue
            still_open = status in (Status.PENDING, Status.UNNEEDED, Status.OK)
            if in_vain or (not still_open and latencies[i] <= took):
                found.append(model)
        return found

    def late(
        self, future: Future, arrived: Mapping[VersionedModel, Prediction]
    ) -> list[tuple[VersionedModel, Future]]:
        """Return the models whose predictions the answer did not wait for, for the feedback
        window.
        """
        if len(arrived) == len(self.models):
            return []
        return [
            (model, cast(Future, LateTask(future, i)))
            for i, model in enumerate(self.models)
            if model not in arrived
        ]

    def why_nothing(
        self,
        future: Future,
        arrived: Mapping[VersionedModel, Prediction],
        resolved: ResolvedApplication,
    ) -> str:
        """Explain why no prediction was used."""
        whys = []
        for i, model in enumerate(self.models):
            status = future.status(i)
            if model in arrived or status is Status.UNNEEDED:
                continue
            status = Status.DEADLINE if status in (Status.PENDING, Status.OK) else status
            whys.append(why_of(resolved, status, model, future.detail(i)))
        return "; ".join(dict.fromkeys(whys)) or NO_FINITE_VALUE.format(
            ", ".join(map(str, arrived or self.models))
        )


class Speculation:
    """One application's decider over its models as they are now. output: the named output that it
    compares; empty: the whole. Threads: any.
    """

    __slots__ = (
        "_cores",
        "_deciders",
        "_hedge",
        "_last",
        "decider_threads",
        "failures",
        "links",
        "output",
        "own",
        "policy",
        "schedule",
        "steps",
        "text",
    )

    def __init__(
        self,
        text: str,
        policy: Policy,
        links: Sequence[VersionedModel],
        cores: Mapping[VersionedModel, CoreModel],
        decider_threads: DeciderThreads,
        output: str = "",
    ) -> None:
        self.text, self.output = text, output
        self.schedule = parse_decider(text)
        self.policy = policy
        self.links, self._cores = tuple(links), dict(cores)
        self.decider_threads = decider_threads
        self._deciders: dict[tuple[object, ...], Decider] = {}
        self._last: Order | None = None
        self._hedge = (0.0, 0)  # until when it is good, and the time in us
        self.failures = UserCodeFailures(f"decider {self.schedule.own!r}")
        self.steps = self.schedule.steps
        own = getattr(policy, "decide", None)
        self.own: UserValue = None
        if self.schedule.own:
            self.own = lambda _, view: user_defined_decider(self.schedule.own).decide(view)
        elif self.schedule.waits_for_all and callable(own):
            self.own = own
            self.failures = getattr(policy, "failures", self.failures)

    def decided(self, at: int) -> tuple[str, str]:
        """Return the rule of the step that decided, and its name in answers."""
        if at == OWN_STEP and self.own is not None:
            return "own", self.schedule.own or "policy"
        step = self.steps[at]
        if step.rule != "row":
            return step.rule, step.name
        start_ms = self.steps[at - 1].until_ms if at else 0.0
        return "row", f"table({start_ms:g})"

    # -- the query

    def call(self, state: object, plan: Plan, user: str | None, slo_us: int) -> EnsembleCall:
        """Return the call of a query: its models and deadline, by the policy's state and choice."""
        order = self._last
        if order is None or order.state is not state or order.chosen != plan.models:
            order = self._last = self.order(state, plan, user)
        slo_us = self._until_us(slo_us)
        return EnsembleCall(
            self, order, self.starts_us(order.models, slo_us), slo_us, time.monotonic()
        )

    def order(self, state: object, plan: Plan, user: str | None) -> Order:
        """Return the order of the models and their decider, by the policy's state and choice."""
        policy, chosen, first = self.policy, plan.models, self.steps[0].rule
        if first == "cascade":
            models: tuple[VersionedModel, ...] = self.links
        else:
            models = rank_models(policy, state, user, self.links)
            if len(chosen) == 1:
                models = (*chosen, *(model for model in models if model not in chosen))
        named = self.named(self.schedule.models)
        if (
            len(chosen) > 1 or chosen[0] not in self.links or not self._wants_more()
        ):  # not in them: a challenger
            models = tuple(model for model in models if model in chosen or model in named)
        models = (*models, *(model for model in (*chosen, *named) if model not in models))
        weights = None
        if any(step.rule in ("weighted", "mean") for step in self.steps):
            each = vote_weights(policy, state, models)
            weights = tuple([each[model] for model in models])
        cores = tuple([self._cores[model] for model in models])
        return Order(state, chosen, models, cores, self._decider_for(models), weights)

    def _wants_more(self) -> bool:
        """Return whether a rule has use for more models than one that the policy chose."""
        return self.own is not None or any(
            step.rule not in _OF_THE_PLAN and not (step.rule == "guaranteed_time" and step.models)
            for step in self.steps
        )

    def named(self, names: Sequence[str]) -> tuple[VersionedModel, ...]:
        """Return the linked models that these name, whatever their role."""
        return tuple(model for model in self._cores if model.name in names or str(model) in names)

    def _decider_for(self, models: tuple[VersionedModel, ...]) -> Decider:
        key: tuple[object, ...] = (
            models if self.schedule.models else (len(models),)
        )  # else one bucket of hedges for all
        decider = self._deciders.get(key)
        if decider is None:
            if len(self._deciders) >= _ORDERS_MAX:
                self._deciders.clear()
            decider = Decider([self._core_step(step, models) for step in self.steps])
            self._deciders[key] = decider
        return decider

    def _core_step(self, step: DeciderStep, models: tuple[VersionedModel, ...]) -> CoreStep:
        named = [
            i
            for i, model in enumerate(models)
            if model.name in step.models or str(model) in step.models
        ]
        accept = sum(1 << i for i in named) if step.rule == "row" and step.models else None
        need = step.need
        if step.rule in ("mean", "median") and step.tolerance and not need:
            need = max(2, len(models) // 2 + 1)
        return CoreStep(
            _RULES[step.rule],
            0 if step is self.steps[-1] else round(step.until_ms * 1000),
            accept,
            step.confidence,
            need,
            step.tolerance,
            which=named[0] if step.rule == "floor" else 0,
            low=step.low,
            high=step.high,
            extra=step.budget,
        )

    def _until_us(self, slo_us: int) -> int:
        """Return the end of the last step: its own time, or the deadline less a margin."""
        last = self.steps[-1]
        if last.until_ms:
            return min(slo_us, max(1, round(last.until_ms * 1000)))
        return max(1, slo_us - round(last.margin_ms * 1000))

    def starts_us(self, models: tuple[VersionedModel, ...], slo_us: int) -> tuple[int, ...] | None:
        """Return when each model is queried after the query came; None: all at once."""
        step = self.steps[0]
        if step.rule not in ("cascade", "hedged"):
            return None
        at_once = self.named(
            [
                name
                for step in self.steps
                if step.rule in ("floor", "guaranteed_time")
                for name in step.models
            ]
        )
        if step.rule == "cascade":
            return tuple(
                [0 if i == 0 or model in at_once else NEVER for i, model in enumerate(models)]
            )
        after = (
            self._hedge_us(models[0], slo_us)
            if step.after_ms is None
            else round(step.after_ms * 1000)
        )
        return tuple([0 if model in at_once else i * after for i, model in enumerate(models)])

    def _hedge_us(self, primary: VersionedModel, slo_us: int) -> int:
        """Return the 95th percentile of the first model's latency; half the SLO until that is
        known."""
        until, after = self._hedge
        now = time.monotonic()
        if now >= until:
            latency = measured(self._cores[primary])
            after = (
                0
                if latency.count < MEASURED_MIN
                else max(round(latency.quantile(0.95)), round(HEDGE_MS_MIN * 1000))
            )
            self._hedge = (now + HEDGE_CHECK_S, after)
        return after or max(slo_us // 2, round(HEDGE_MS_MIN * 1000))


def speculation_of(
    text: str, resolved: ResolvedApplication, decider_threads: DeciderThreads
) -> Speculation | None:
    """Return an application's decider; None when there is nothing to decide, as all models are
    waited for. Raises InvalidInput when it does not fit."""
    if resolved.models:
        check_decider(resolved.name, text, resolved.models)
    primaries = (
        resolved.models
        if resolved.rollout.assignment is None
        else resolved.rollout.assignment.primaries
    )
    found = Speculation(
        text, resolved.policy, primaries, resolved.cores, decider_threads, resolved.output_name
    )
    return (
        None
        if (found.own is None and found.schedule.waits_for_all) or not resolved.models
        else found
    )


def check_decider(application: str, text: str, links: Sequence[VersionedModel]) -> Schedule:
    """Return the schedule if it fits the application's models. Raises InvalidInput otherwise."""
    schedule = parse_decider(text)
    if schedule.own:
        user_defined_decider(schedule.own)
    if schedule.waits_for_all:
        return schedule
    if len(links) > MODELS_MAX:
        raise InvalidInput(
            f"application {application!r} links {len(links)} models; a decider takes at most"
            f" {MODELS_MAX}."
        )
    for name in schedule.models:
        if not any(name in (model.name, str(model)) for model in links):
            linked = [model.name for model in links]
            guess = did_you_mean(name, linked) or "."
            reason = (
                f"decider {text!r} names {name!r}, which application {application!r} does not"
                f" link{guess}"
            )
            raise DoesNotFit(reason, hint=f"Linked: {', '.join(linked) or 'none'}.")
    for step in schedule.steps:
        if step.need > len(links):
            raise InvalidInput(
                f"{step} of application {application!r} needs {step.need} models; it links"
                f" {len(links)}."
            )
    return schedule


def check_times(application: str, schedule: Schedule, slo_ms: float) -> None:
    """Check that every step has some time of its own before the deadline. Raises InvalidInput
    otherwise."""
    for step in schedule.steps:
        if step.until_ms >= slo_ms and step is not schedule.steps[-1]:
            hint = (
                "Times count from the query's arrival: give it more time by slo_ms, or the step"
                " less."
            )
            reason = (
                f"{step} ends after the {slo_ms:g} ms of application {application!r}: no step after"
                " it decides."
            )
            raise InvalidInput(reason, hint=hint)
        if step.margin_ms >= slo_ms:
            raise InvalidInput(
                f"margin_ms={step.margin_ms:g} of {step.name} leaves nothing of the {slo_ms:g} ms."
            )


def check_guarantee(
    application: str,
    schedule: Schedule,
    slo_ms: float,
    cores: Mapping[VersionedModel, CoreModel],
    since: dict[VersionedModel, Snapshot],
) -> None:
    """Check that a guaranteed time has a model that is measured to answer by then: by the 99th
    percentile of its latency. The InvalidInput names what was measured and what to do. since: its
    latencies when it was last refused; what came after is measured by itself, so that arrays, whose
    rows wait for each other, and a slow start can be left behind."""
    step = schedule.guaranteed
    if step is None:
        return
    by_ms = slo_ms - step.margin_ms
    floors = {
        model: core
        for model, core in cores.items()
        if not step.models or step.models[0] in (model.name, str(model))
    }
    notes = []
    for model, core in floors.items():
        latency = measured(core)
        recent = latency - since[model] if model in since else latency
        if any(
            part.count >= MEASURED_MIN and part.quantile(0.99) <= by_ms * 1000
            for part in (latency, recent)
        ):
            return
        since[model] = latency
        if latency.count < MEASURED_MIN:
            notes.append(
                f"{model} has made {latency.count} predictions of the {MEASURED_MIN} that a"
                " measurement takes"
            )
        else:
            notes.append(
                f"{model} takes {latency.quantile(0.99) / 1000:.3g} ms (99th percentile of"
                f" {latency.count})"
            )
    first = str(next(iter(floors)))
    call = f"server.model({first!r}).predict(x).result()"
    hint = f"Measure: run {call} {MEASURED_MIN} times; or raise slo_ms, or name a faster floor."
    raise InvalidInput(
        f"{step} of application {application!r}: no model is known to answer within {by_ms:g} ms:"
        f" {'; '.join(notes)}.",
        hint=hint,
    )


def measured(core: CoreModel) -> Snapshot:
    """Return a model's latency from submit to prediction, us, since it was deployed; what the cache
    had is not in it."""
    return core.engine.model_latency(core.index)
