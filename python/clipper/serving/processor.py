"""The life of a query: which models to ask, by when, and what to make of what they said.

Read with the engine (src/clipper_core/engine.pxd) below it: `predict` runs on the caller's thread and returns at once; `finish`
runs when somebody asks the future for its result, on that thread.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from clipper.errors import ForkedProcess, UnknownModel
from clipper.selection import Plan, Policy, Prediction, Query
from clipper.serving.dispatch import FORK_HINT
from clipper.serving.feedback import Window
from clipper.serving.recorder import Decoy
from clipper.serving.roles import Cast
from clipper.serving.states import Learner
from clipper.serving.stragglers import Means, combine
from clipper.serving.tally import Lineup
from clipper.serving.teaching import Teaching
from clipper.types import Answer, VersionedModel
from clipper_core.future import Future
from clipper_core.model import Model as CoreModel
from clipper_core.model import predict_all
from clipper_core.status import Status


class Question(msgspec.Struct, frozen=True, eq=False):
    """An application as queries see it: resolved to running models, swapped as a whole when the catalog changes.

    models: resolved versions, in link order.  cores: the engine's models, alike.  learner: holds what the policy has learned.
    window: where answers wait for feedback; None for a policy that learns nothing.  lineup: counts what queries come to.
    cast: roles, if not all are primaries.  means: for numbers that are missing.  teaching: models that learn themselves.
    """

    name: str
    models: tuple[VersionedModel, ...]
    cores: dict[VersionedModel, CoreModel]
    policy: Policy
    learner: Learner
    slo_us: int
    default: Any = None
    confidence_min: float = 0.0
    node: str = ""
    window: Window | None = None
    lineup: Lineup | None = None
    cast: Cast | None = None
    decoys: tuple[Decoy, ...] = ()
    means: Means | None = None
    teaching: Teaching = Teaching()


NOBODY = Query()
next_uniform = random.Random().random  # seeded by the system; what it gave is kept, as the plan's probabilities


class Asked(msgspec.Struct, frozen=True, eq=False):
    """What a query remembers until its answer: `Future.extra`."""

    question: Question
    plan: Plan
    state: Any
    user: str = ""
    late: Sequence[tuple[VersionedModel, Future]] = ()  # of observers: filled after the query's own models were asked


def plan_for(question: Question, user: str | None) -> tuple[Any, Plan]:
    """The user's state, and the models that the policy asks by it. UnknownModel when nothing is linked."""
    state = question.learner.state(user)
    cast = question.cast
    query = Query(user, next_uniform()) if cast or question.policy.chance else Query(user) if user else NOBODY
    plan = cast.plan(question.policy, state, query) if cast else question.policy.select(state, query, question.models)
    if not plan.models:
        hint = f"Link one: server.app({question.name!r}, models=[...])."
        lacks = "has no primary left, only models of other roles" if question.models else "links no model"
        raise UnknownModel(f"application {question.name!r} {lacks}.", hint=hint)
    return state, plan


def predict(question: Question, x: Any, user: str | None, slo_us: int, salt: int) -> Future:
    """Ask the models that the policy selects; -> the future of one Answer. InvalidInput for a wrong type or shape;
    UnknownModel when nothing is linked."""
    state, plan = plan_for(question, user)
    cores, teaching = question.cores, question.teaching
    if teaching.active:
        salt = teaching.session(question.models, user, salt)
    late: list[tuple[VersionedModel, Future]] = []
    asked = Asked(question, plan, state, user or "", late)
    future = predict_all(tuple([cores[model] for model in plan.models]), x, slo_us, salt, finish, asked)
    if teaching.active and question.window is not None:
        teaching.keep(question.models, future.id, x, salt)
    if question.lineup is not None:
        question.lineup.tally.asked.add()
        if plan.observers:
            question.lineup.watch(cores, plan.observers, x, slo_us, salt, late)
    for decoy in question.decoys:
        decoy.saw(future.id, f"{question.node}-{future.id:x}", x, user or "")
    return future


def finish(future: Future) -> Answer:
    """Combine what arrived; the default, with its reason, when nothing did or it is not sure enough."""
    asked: Asked = future.extra
    question = asked.question
    arrived: dict[VersionedModel, Prediction] = {}
    missing: list[VersionedModel] = []
    for i, model in enumerate(asked.plan.models):
        if future.status(i) is Status.OK:
            arrived[model] = Prediction(future.output(i), future.confidence(i))
        else:
            missing.append(model)
    if missing and not arrived and future.status() is Status.FORKED:
        raise ForkedProcess(f"application {question.name!r} was asked in a fork of its server's process.", hint=FORK_HINT)
    combined = combine(question.policy, asked.state, question.means, arrived, missing)
    reason = ""
    if not combined.used:
        reason = _why_nothing(future, asked, arrived)
    elif combined.confidence < question.confidence_min:
        reason = too_unsure(combined.confidence, question)
    id = f"{question.node}-{future.id:x}"
    if question.window is not None and arrived:
        question.window.add(id, question.learner, asked.user, asked.plan, arrived, combined.output, tuple(asked.late))
    output = question.default if reason else combined.output
    if question.lineup is not None:
        question.lineup.count(future, asked.plan, arrived, combined, reason, asked.late)
    for decoy in question.decoys:
        decoy.said(future.id, id, output, bool(reason))
    return Answer(
        output=output,
        confidence=combined.confidence,
        is_default=bool(reason),
        reason=reason,
        models=combined.used,
        missing=tuple(missing),
        latency_us=future.latency_us,
        id=id,
        agreement=combined.agreement,
    )


NO_FINITE_VALUE = "the output of {} is not a finite value"


def too_unsure(confidence: float, question: Question) -> str:
    return f"confidence {confidence:.2f} is below the application's {question.confidence_min:.2f}"


def _why_nothing(future: Future, asked: Asked, arrived: dict[VersionedModel, Prediction]) -> str:
    if arrived:
        return NO_FINITE_VALUE.format(", ".join(map(str, arrived)))
    whys = [why(future.status(i), model, future.detail(i)) for i, model in enumerate(asked.plan.models)]
    return "; ".join(dict.fromkeys(whys))


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
}


def why(status: Status, model: VersionedModel, detail: str) -> str:
    """Why a task of `model` has no prediction, in one line for a person."""
    if status is Status.MODEL_ERROR:
        return f"{model} failed: {last_line(detail)}"
    describe = _WHYS.get(status)
    return describe(str(model)) if describe else f"{model}: {status.name.lower()}"


def last_line(text: str) -> str:
    """The last line of a traceback: the error itself."""
    lines: Sequence[str] = text.strip().splitlines()
    return lines[-1][:500] if lines else "no reason given"
