"""The path of a query: which models it calls, until when, and how their predictions combine.

`predict` runs on the caller's thread and returns at once; the engine does the rest
(src/clipper_core/engine/engine.pxd). `finish` runs on the thread that gets the future's
result.
"""

import hashlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from clipper.errors import ForkedProcess, Overloaded, PolicyFailed, UnknownModel
from clipper.foreign_text import Sampler, last_line
from clipper.selection import (
    Combined,
    Plan,
    Policy,
    Prediction,
    Query,
    features_of,
    state_in_context,
)
from clipper.selection.policy import NO_ANSWER, State, sound_confidence
from clipper.serving.feedback.answer_records import AnswerRecords
from clipper.serving.feedback.ground_truth import user_of
from clipper.serving.feedback.online_learning import OnlineLearning
from clipper.serving.feedback.states import Learner, check_user
from clipper.serving.feedback.window import FeedbackWindow
from clipper.serving.models.model_source import ResolvedModel
from clipper.serving.query.dispatch import FORK_HINT
from clipper.serving.query.missing_outputs import combine
from clipper.serving.query.named_outputs import chosen_outputs, only
from clipper.serving.query.qualifiers import prediction_of
from clipper.serving.query.stats import ApplicationStats
from clipper.serving.rollout.decoys import Decoy
from clipper.serving.rollout.roles import RoleAssignment
from clipper.serving.rollout.traffic_split import SideStats, TrafficSplit
from clipper.types import PRIORITY_USUAL, Answer, UserValue, VersionedModel
from clipper_core.application.application import Application as CoreApplication
from clipper_core.application.application import ApplicationQuery
from clipper_core.application.output_means import OutputMeans
from clipper_core.engine.model import Model as CoreModel
from clipper_core.engine.model import predict_all
from clipper_core.results.answer import answer_of
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status
from clipper_core.scheduling.bands import band_number

if TYPE_CHECKING:
    from clipper.serving.query.speculation import EnsembleCall, Speculation

_log = logging.getLogger(__name__)
DEFAULTS_LOGGED_MAX: Final = 20  # lines a second
_defaults = Sampler(DEFAULTS_LOGGED_MAX, time.monotonic)


class UserContext(Protocol):
    """Interface of a source of user vectors: params.contexts.UserRows."""

    def __call__(self, user: str) -> tuple[float, ...] | None: ...
    def stats(self) -> dict[str, object]:
        """Return counts of the features that were read."""


class FeedbackState(msgspec.Struct, frozen=True, eq=False):
    """The part of a resolved application that feedback needs."""

    window: FeedbackWindow | None = None  # answers that await feedback; None: no application
    online_learning: OnlineLearning = OnlineLearning()  # for models that learn by themselves
    records: AnswerRecords | None = None  # in the store; None: no other server shares it


class RolloutState(msgspec.Struct, frozen=True, eq=False):
    """The part of a resolved application that roles, rollouts and statistics need."""

    stats: ApplicationStats | None = None  # None: its queries are not counted
    assignment: RoleAssignment | None = None  # None: every model is a primary
    decoys: tuple[Decoy, ...] = ()  # recorders of its queries
    split: TrafficSplit | None = None  # the rollout in progress, if there is one
    side: SideStats | None = None  # counts for the side of the rollout that this is


class ResolvedApplication(msgspec.Struct, frozen=True, eq=False):
    """An application whose model names are resolved to running models.

    Immutable. When the catalog changes, a new object replaces this one; queries in flight keep the
    one that they started with.
    """

    name: str  # empty: a query that names its models
    models: tuple[VersionedModel, ...]  # in the order in which they were linked
    cores: dict[VersionedModel, CoreModel]  # the engine's handles of these models
    policy: Policy
    learner: Learner  # what the policy has learned, per context
    slo_us: int
    default: UserValue = None
    output_name: str = ""  # of named outputs the one that the policy combines; empty: all
    confidence_min: float = 0.0  # a less sure answer is replaced by the default
    node: str = ""  # prefix of prediction ids
    means: OutputMeans | None = None  # imputed for numbers that are missing at the deadline
    speculation: "Speculation | None" = None  # the decider; None: wait for all models
    # by their queries
    on_demand: Mapping[VersionedModel, ResolvedModel] = MappingProxyType({})
    unlisted_model: ResolvedModel | None = None  # set for a query that names a model of the mesh
    rows: UserContext | None = None  # contexts of users who bring none
    feedback: FeedbackState = FeedbackState()
    rollout: RolloutState = RolloutState()
    columns: tuple[str, ...] = ()  # of arrays of its models that were fitted on one DataFrame
    core: CoreApplication | None = None  # schedules plain queries; None: Python schedules all
    priority: int = PRIORITY_USUAL  # of queries that name none

    def band(self, priority: int | None = None) -> int:
        """Return the band of a query without a share, by its own priority, 1 to 3, or that of the
        application. Raises InvalidInput."""
        return band_number(0, self.priority if priority is None else priority)

    @property
    def all_cores(self) -> dict[VersionedModel, CoreModel]:
        """The handles of its models, on both sides of a rollout."""
        split = self.rollout.split
        return self.cores if split is None else split.cores

    def context_of(self, user: str | None, context: object) -> UserValue:
        """Return the context of a query: its own, else the row of its user."""
        return self.rows(user) if context is None and user and self.rows is not None else context


NOBODY = Query()
next_uniform = (
    random.Random().random
)  # seeded by the system; what it gave is kept, as the plan's probabilities


class QueryContext(msgspec.Struct, frozen=True, eq=False):
    """State of a query until its answer is read: `Future.extra`."""

    resolved: ResolvedApplication
    plan: Plan
    state: State
    user: str = ""
    late: Sequence[
        tuple[VersionedModel, Future]
    ] = ()  # of observers: filled after the query's own models were queried
    call: "EnsembleCall | None" = None
    id: str = ""  # the caller's own
    outputs: tuple[str, ...] = ()  # of named outputs only these; empty: all

    @property
    def output_name(self) -> str:
        """The named output that its future reads: clipper_core.results.future."""
        return self.resolved.output_name

    @property
    def models(self) -> tuple[VersionedModel, ...]:
        """The queried models: task i of the future is models[i]'s."""
        return self.plan.models if self.call is None else self.call.models


def side_of(resolved: ResolvedApplication, user: str | None) -> ResolvedApplication:
    """Return the side of a rollout that this user sees; the application itself without a
    rollout.
    """
    split = resolved.rollout.split
    if split is None:
        return resolved
    return split.new if split.takes(user) else split.before


def uniform_of(id: str) -> float:
    """Return the random number of a query, in [0, 1): a hash of the caller's own id, so that the
    same query selects the same models again; without an id the next one of this process."""
    if not id:
        return next_uniform()
    digest = hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def plan_for(
    resolved: ResolvedApplication, user: str | None, context: object = None, id: str = ""
) -> tuple[State, Plan]:
    """Return the user's policy state, and the models that the policy selects by it.

    id: the caller's own, of the query. Raises UnknownModel when no model is linked; InvalidInput
    for a context that the policy cannot use, or an impossible user name.
    """
    if user:
        check_user(user)
    state = resolved.learner.state(user)
    assignment = resolved.rollout.assignment
    query = (
        Query(user, uniform_of(id))
        if assignment or resolved.policy.chance
        else Query(user)
        if user
        else NOBODY
    )
    if context is not None:
        query = Query(user, query.uniform, features_of(context))
    plan = (
        assignment.plan(resolved.policy, state, query)
        if assignment
        else resolved.policy.select(state, query, resolved.models)
    )
    if not plan.models:
        hint = f"Link one: server.app({resolved.name!r}, models=[...])."
        lacks = (
            "has no primary left, only models of other roles"
            if resolved.models
            else "links no model"
        )
        raise UnknownModel(f"application {resolved.name!r} {lacks}.", hint=hint)
    if resolved.on_demand and resolved.unlisted_model is None:
        _touch(resolved, plan)
    return state_in_context(resolved.policy, state, plan.features), plan


def _touch(resolved: ResolvedApplication, plan: Plan) -> None:
    """Let the mesh load the models that this query may use, if they are not loaded.

    With a decider this includes models that it might call later, so that they are ready by then.
    """
    for model in (
        (*plan.models, *plan.observers) if resolved.speculation is None else resolved.models
    ):
        found = resolved.on_demand.get(model)
        if found is not None:
            found.touch()


def predict(
    resolved: ResolvedApplication,
    x: UserValue,
    user: str | None,
    slo_us: int,
    salt: int,
    context: UserValue = None,
    id: str = "",
    outputs: tuple[str, ...] = (),
    band: int | None = None,
) -> Future:
    """Send a query to the models that the policy selects; return the future of its Answer.

    id: the caller's own, checked. outputs: of named outputs only these. band: of all its rows;
    None: that of the application's priority. Raises InvalidInput for a
    wrong type or shape; UnknownModel when no model is linked; Overloaded when a model of the mesh
    cannot be loaded in time, and no cached output answers the query.
    """
    user = user_of(user)
    band = resolved.band() if band is None else band
    context = resolved.context_of(user, context)
    features = None if context is None else features_of(context)
    resolved = side_of(resolved, user)
    if resolved.core is not None and not outputs:
        future = resolved.core.predict(x, user or "", slo_us, salt, id, features, band)
        if future is not None:
            return future
    if resolved.unlisted_model is not None:
        try:
            resolved.unlisted_model.admit(slo_us)
        except Overloaded as refusal:
            if not resolved.cores[resolved.unlisted_model.record.id].cached(x, salt)[0]:
                raise
            known = msgspec.structs.replace(resolved, unlisted_model=None, on_demand={})
            future = predict(known, x, user, slo_us, salt, features, id, outputs, band)
            return if_cached(future, refusal)
    try:
        state, plan = plan_for(resolved, user, features, id)
    except PolicyFailed as failure:
        return _without_query(resolved, x, slo_us, salt, failure.message, id)
    if outputs:
        outputs = chosen_outputs(resolved, outputs)
    cores, online_learning = resolved.cores, resolved.feedback.online_learning
    if online_learning.is_teaching.value:
        salt = online_learning.session(resolved.models, user, salt)
    late: list[tuple[VersionedModel, Future]] = []
    if resolved.speculation is None:
        query = QueryContext(resolved, plan, state, user or "", late, None, id, outputs)
        future = predict_all(
            tuple([cores[model] for model in plan.models]), x, slo_us, salt, finish, query, band
        )
    else:
        call = resolved.speculation.call(state, plan, user, slo_us)
        query = QueryContext(resolved, plan, state, user or "", late, call, id, outputs)
        future = call.submit(x, salt, finish, query, resolved.feedback.window is not None, band)
    if online_learning.is_teaching.value and resolved.feedback.window is not None:
        online_learning.keep(resolved.models, future.id, x, salt)
    if resolved.rollout.stats is not None:
        resolved.rollout.stats.counters.queries.add()
        if plan.observers:
            observers = (
                plan.observers
                if query.call is None
                else [m for m in plan.observers if m not in query.models]
            )
            resolved.rollout.stats.watch(
                cores,
                observers,
                x,
                slo_us,
                salt,
                late,
                resolved if resolved.output_name else None,
            )
    for decoy in resolved.rollout.decoys:
        decoy.saw(future.id, id_of(resolved, future.id), x, user or "", id)
    return future


def if_cached(future: Future, refusal: Overloaded) -> Future:
    """Return a future that was not refused because its rows are cached. Raises the refusal if the
    cache has lost one meanwhile: it would wait for a model that is not loaded in time."""
    if not (future.statuses() == Status.OK).all():
        future.cancel()
        raise refusal
    return future


class FailedQuery(msgspec.Struct, frozen=True, eq=False):
    """A query whose policy failed before any model was queried: `Future.extra`."""

    resolved: ResolvedApplication
    reason: str
    id: str = ""


def _without_query(
    resolved: ResolvedApplication, x: object, slo_us: int, salt: int, reason: str, id: str
) -> Future:
    """Return the future of the default, at once: a query to one model, which is cancelled."""
    if resolved.rollout.stats is not None:
        resolved.rollout.stats.counters.queries.add()
    core = resolved.cores[resolved.models[0]]
    future = predict_all((core,), x, slo_us, salt, finish_failed, FailedQuery(resolved, reason, id))
    future.end_now()
    return future


def finish_failed(future: Future) -> Answer:
    """Return the default answer of a query whose policy failed."""
    return default_answer(future, future.extra.resolved, future.extra.reason, future.extra.id)


def default_answer(
    future: Future, resolved: ResolvedApplication, reason: str, request_id: str = ""
) -> Answer:
    """Return the default answer of a query whose policy failed."""
    if resolved.rollout.stats is not None:
        resolved.rollout.stats.counters.duration.record(future.latency_us)
        resolved.rollout.stats.counters.defaults.policy_failed.add()
    if resolved.rollout.side is not None:
        resolved.rollout.side.answers.add(future.latency_us, True)
    log_default(resolved, future.id, request_id, reason)
    return Answer(
        resolved.default,
        0.0,
        True,
        reason,
        latency_us=future.latency_us,
        id=id_of(resolved, future.id),
        agreement=0.0,
        decided_by="",
        request_id=request_id,
    )


def finish(future: Future) -> Answer:
    """Combine the predictions that arrived.

    The answer is the default, with its reason, when none arrived or the confidence is too low.
    """
    query: QueryContext | ApplicationQuery = future.extra
    resolved = query.resolved
    try:
        outcome = (
            _arrived(future, query) if query.call is None else query.call.outcome(future, query)
        )
    except PolicyFailed as failure:
        return default_answer(future, resolved, failure.message, query.id)
    arrived, missing, combined, decided_by = outcome
    if not combined.used and not resolved.name and len(resolved.models) == 1:
        combined = _as_it_is(arrived)
    reason = ""
    if not combined.used:
        reason = _why_nothing(future, query, arrived)
    elif combined.confidence < resolved.confidence_min:
        reason = too_unsure(combined.confidence, resolved)
    number = future.id
    output = resolved.default if reason else combined.output
    if resolved.feedback.window is not None:
        late = (
            tuple(query.late)
            if query.call is None
            else (*query.late, *query.call.late(future, arrived))
        )
        resolved.feedback.window.add(
            number, resolved.learner, query.user, query.plan, arrived, output, late
        )
    if reason:
        log_default(resolved, number, query.id, reason)
    if resolved.rollout.stats is not None:
        resolved.rollout.stats.count(
            future, query.models, arrived, combined, reason, query.late, missing, decided_by
        )
    if resolved.rollout.side is not None:
        resolved.rollout.side.answers.add(future.latency_us, bool(reason))
    for decoy in resolved.rollout.decoys:
        decoy.add_reply(number, id_of(resolved, number), output, bool(reason))
    return answer_of(
        only(output, query.outputs) if query.outputs else output,
        combined,
        reason,
        missing,
        future.latency_us,
        resolved.node,
        number,
        decided_by,
        query.id,
        arrived,
    )


def _as_it_is(arrived: Mapping[VersionedModel, Prediction]) -> Combined:
    """Return the output of a model that the query names, NaN and infinities too: no policy combines
    it."""
    for model, prediction in arrived.items():
        if prediction.output is not None:
            return Combined(prediction.output, sound_confidence(prediction.confidence), (model,))
    return NO_ANSWER


Outcome = tuple[dict[VersionedModel, Prediction], Sequence[VersionedModel], Combined, str]


def _arrived(future: Future, query: QueryContext | ApplicationQuery) -> Outcome:
    """Return what arrived, which models are missing, the policy's combination, and the rule that
    decided."""
    arrived: dict[VersionedModel, Prediction] = {}
    missing: list[VersionedModel] = []
    for i, model in enumerate(query.plan.models):
        if future.status(i) is Status.OK:
            arrived[model] = prediction_of(future, i)
        else:
            missing.append(model)
    if missing and not arrived:
        refuse_fork(future, query.resolved)
    return (
        arrived,
        missing,
        combine(query.resolved.policy, query.state, query.resolved.means, arrived, missing),
        "all",
    )


def refuse_fork(future: Future, resolved: ResolvedApplication) -> None:
    """Raise ForkedProcess for a query in a fork of the server's process."""
    if future.status() is Status.FORKED:
        raise ForkedProcess(
            f"application {resolved.name!r} was queried in a fork of its server's process.",
            hint=FORK_HINT,
        )


def id_of(resolved: ResolvedApplication, number: int) -> str:
    """Return the id by which feedback names the query of this number."""
    return f"{resolved.node}-{number:x}"


def log_default(resolved: ResolvedApplication, number: int, request_id: str, reason: str) -> None:
    """Log a default answer at level INFO, and not every one of a flood."""
    if not _log.isEnabledFor(logging.INFO) or (left_out := _defaults.admit()) < 0:
        return
    more = f" ({left_out} more defaults before it are not in this log)" if left_out else ""
    _log.info(
        "application %r, request %r, prediction %s: the default, %s%s",
        resolved.name,
        request_id,
        id_of(resolved, number),
        reason,
        more,
    )


NO_FINITE_VALUE = "the output of {} is not a finite value"


def too_unsure(confidence: float, resolved: ResolvedApplication) -> str:
    """Return the reason of a default for lack of confidence."""
    return f"confidence {confidence:.2f} is below the application's {resolved.confidence_min:.2f}"


def _why_nothing(
    future: Future,
    query: QueryContext | ApplicationQuery,
    arrived: dict[VersionedModel, Prediction],
) -> str:
    if query.call is not None:
        return query.call.why_nothing(future, arrived, query.resolved)
    if arrived:
        return NO_FINITE_VALUE.format(", ".join(map(str, arrived)))
    resolved = query.resolved
    whys = [
        why_of(resolved, future.status(i), model, future.detail(i))
        for i, model in enumerate(query.plan.models)
    ]
    return "; ".join(dict.fromkeys(whys))


def why_of(
    resolved: ResolvedApplication, status: Status, model: VersionedModel, detail: str
) -> str:
    """Explain why a task of `model` has no prediction, including why a model of the mesh is not
    loaded.
    """
    found = resolved.on_demand.get(model)
    if found is not None and status in _NOT_THERE and (reason := found.reason()):
        return f"{model.name}: {reason}"
    return why(status, model, detail)


_NOT_THERE = (Status.NO_REPLICA, Status.DEADLINE)
_WHYS: dict[Status, Callable[[str], str]] = {
    Status.FULL: lambda model: f"{model} is overloaded",
    Status.DEADLINE: lambda model: f"{model} did not answer by the deadline",
    Status.DROPPED: lambda model: f"{model} could not have answered by the deadline any more",
    Status.NO_REPLICA: lambda model: f"no container of {model} is connected",
    Status.BAD_OUTPUT: lambda model: f"{model} returned a wrong count, type or shape",
    Status.REPLICA_LOST: lambda model: f"the container of {model} died with the query",
    Status.CANCELLED: lambda model: "the query was cancelled",
    Status.CLOSED: lambda model: "the server is shutting down",
    Status.FORKED: lambda model: "this process is a fork; start a server of its own",
    Status.TOO_LARGE: lambda model: f"the input of {model} is larger than a frame may be",
    Status.UNNEEDED: lambda model: f"{model} was not needed any more",
}


def why(status: Status, model: VersionedModel, detail: str) -> str:
    """Explain in one line why a task of `model` has no prediction."""
    if status is Status.MODEL_ERROR:
        return f"{model} failed: {last_line(detail)}"
    if status in (Status.TOO_LARGE, Status.REPLICA_LOST) and detail:
        return f"{model}: {last_line(detail)}"
    describe = _WHYS.get(status)
    return describe(str(model)) if describe else f"{model}: {status.name.lower()}"
