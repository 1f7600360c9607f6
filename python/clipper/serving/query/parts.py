"""Queries to applications that are answered in parts: `predict(x, stream=True)`."""

from clipper.errors import InvalidInput
from clipper.selection import Plan, Prediction
from clipper.serving.feedback.ground_truth import user_of
from clipper.serving.query.named_outputs import only
from clipper.serving.query.processor import (
    ResolvedApplication,
    id_of,
    log_default,
    plan_for,
    side_of,
    why,
)
from clipper.types import AnswerPart, PartsFuture, UserValue, VersionedModel
from clipper_core.runtime.status import Status


class WholeAnswers:
    """Makes the whole of an answer in parts: counts it, keeps it for feedback, and replaces one
    without a part by the default. Threads: any.

    plan: of the query, with one model. user: of the query, or "". request_id: the caller's own.
    outputs: of named outputs only these; empty: all.
    """

    def __init__(
        self,
        resolved: ResolvedApplication,
        plan: Plan,
        user: str,
        request_id: str,
        outputs: tuple[str, ...],
    ) -> None:
        self._resolved = resolved
        self._plan = plan
        self._user = user
        self._request_id = request_id
        self._outputs = outputs

    def __call__(self, whole: AnswerPart, status: int, number: int) -> AnswerPart:
        """Return the whole answer. whole: what the parts are.  status: how they ended.  number: of
        the query."""
        resolved, model = self._resolved, self._plan.models[0]
        is_default = whole.index == 0 and status != Status.OK
        output = resolved.default if is_default else whole.output
        reason = self._why(Status(status), model, whole.reason or "")
        if resolved.feedback.window is not None:
            arrived = {} if is_default else {model: Prediction(whole.output, whole.confidence)}
            resolved.feedback.window.add(
                number, resolved.learner, self._user, self._plan, arrived, output
            )
        if is_default:
            log_default(resolved, number, self._request_id, reason or "")
        self._count(whole, Status(status), is_default)
        return AnswerPart(
            output if is_default or not self._outputs else only(output, self._outputs),
            whole.index,
            confidence=whole.confidence,
            is_last=True,
            complete=whole.complete,
            is_default=is_default,
            reason=reason,
            latency_us=whole.latency_us,
            id=id_of(resolved, number),
            request_id=self._request_id,
            models=() if is_default else (model,),
            missing=(model,) if is_default else (),
        )

    def _why(self, status: Status, model: VersionedModel, detail: str) -> str | None:
        if status is Status.OK:
            return None
        if status is Status.DEADLINE and detail:
            return f"{model}: {detail}"
        return why(status, model, detail)

    def _count(self, whole: AnswerPart, status: Status, is_default: bool) -> None:
        stats, side = self._resolved.rollout.stats, self._resolved.rollout.side
        if stats is not None:
            stats.counters.answered.add()
            stats.counters.duration.record(whole.latency_us)
            if is_default:
                stats.counters.defaults.ended.add(status)
        if side is not None:
            side.answers.add(whole.latency_us, is_default)


def no_priority_of_parts() -> InvalidInput:
    """Return the error for a query in parts that has a priority."""
    return InvalidInput(
        "a query in parts has no priority: it takes no place in a queue.",
        hint="Leave priority out, or query without parts.",
    )


def predict_parts(
    resolved: ResolvedApplication,
    x: UserValue,
    user: str | None,
    slo_us: int,
    salt: int,
    context: UserValue,
    id: str,
    outputs: tuple[str, ...],
    part_slo_ms: float | None,
    slo_total_ms: float | None,
) -> PartsFuture:
    """Send a query to the model that the policy selects; return the future of its parts.

    slo_us: until the first part. Raises InvalidInput also for an application that may query several
    models; PolicyFailed; and what `processor.predict` raises.
    """
    user = user_of(user)
    resolved = side_of(resolved, user)
    _, plan = plan_for(resolved, user, resolved.context_of(user, context), id)
    if resolved.speculation is not None or len(plan.models) != 1:
        raise InvalidInput(
            f"application {resolved.name!r} queries several models for one answer; stream=True is"
            " for applications with one model, or with a policy that chooses one.",
            hint="Query one of its models: server.model(NAME).predict(x, stream=True).",
        )
    if resolved.unlisted_model is not None:
        resolved.unlisted_model.admit(slo_us)
    online_learning = resolved.feedback.online_learning
    if online_learning.is_teaching.value:
        salt = online_learning.session(resolved.models, user, salt)
    if resolved.rollout.stats is not None:
        resolved.rollout.stats.counters.queries.add()
    finish = WholeAnswers(resolved, plan, user or "", id, outputs)
    return resolved.cores[plan.models[0]].predict_parts(
        x, slo_us / 1000, salt, True, part_slo_ms, slo_total_ms, finish
    )
