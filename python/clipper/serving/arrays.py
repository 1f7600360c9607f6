"""The life of an array of queries: one future, one pass through cache, queue and batches, one
combination at the end.

The policy selects once, for the whole array; observers are not asked. Feedback may come for the
array as for an answer. A policy that learns nothing and asks one model combines as a whole: no
Python object a row. Every other combination goes row by row through `policy.combine`.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from clipper.errors import ForkedProcess, PolicyFailed
from clipper.selection import Plan, Prediction
from clipper.selection.policy import NO_ANSWER
from clipper.selection.stateless_policy import StatelessPolicy
from clipper.serving.dispatch import FORK_HINT
from clipper.serving.feedback import JoinedRows
from clipper.serving.processor import (
    NO_FINITE_VALUE,
    Question,
    Unasked,
    plan_for,
    side_of,
    too_unsure,
    why_of,
)
from clipper.serving.stragglers import combine
from clipper.serving.truths import user_of
from clipper.types import Answers, VersionedModel
from clipper_core.engine.model import predict_rows
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status

ARRAY_SLO_MS = 60_000.0  # of an array for which no SLO is named: it is work, not a request


class AskedArray(msgspec.Struct, frozen=True, eq=False):
    """What an array remembers until its answers: `Future.extra`."""

    question: Question
    plan: Plan
    state: Any  # the policy's, by which it selected
    user: str = ""


def predict_array(
    question: Question, inputs: Any, user: str | None, slo_us: int, salt: int
) -> Future:
    """Ask the models that the policy selects about every row; -> the future of `Answers`.
    InvalidInput for a wrong type or shape, or no rows; UnknownModel when nothing is linked."""
    user = user_of(user)
    question = side_of(question, user)
    try:
        state, plan = plan_for(question, user)
    except PolicyFailed as failure:
        core = question.cores[question.models[0]]
        future = predict_rows(
            (core,), inputs, slo_us, salt, _finish_unasked, Unasked(question, failure.message)
        )
        future.end_now()
        return future
    cores = tuple([question.cores[model] for model in plan.models])
    salt = question.teaching.session(question.models, user, salt)
    return predict_rows(
        cores, inputs, slo_us, salt, finish_array, AskedArray(question, plan, state, user or "")
    )


def _finish_unasked(future: Future) -> Answers:
    unasked: Unasked = future.extra
    n = len(future)
    outputs = _as_array([unasked.question.default] * n)
    return Answers(
        outputs, np.zeros(n), np.ones(n, np.bool_), {}, {unasked.reason: n}, np.zeros(n, np.uint32)
    )


def finish_array(future: Future) -> Answers:
    """Combine what arrived, row by row; the default where nothing did or it is not sure enough."""
    asked: AskedArray = future.extra
    models, question = asked.plan.models, asked.question
    n = len(future) // len(models)
    by_model = future.statuses().reshape(len(models), n)
    if (by_model == Status.FORKED).all():
        raise ForkedProcess(
            f"application {question.name!r} was asked in a fork of its server's process.",
            hint=FORK_HINT,
        )
    statuses = dict(zip(models, by_model, strict=True))
    if len(models) == 1 and isinstance(question.policy, StatelessPolicy):
        outputs, confidence, reasons, is_default = _alone(future, question, models[0], by_model[0])
    else:
        outputs, confidence, reasons, is_default = _row_by_row(future, asked, statuses)
    id = f"{question.node}-{future.id:x}"
    if question.window is not None:
        question.window.add_rows(
            id, JoinedRows(question.learner, asked.user, asked.plan, future, outputs)
        )
    latency_us = future.latencies_us().reshape(len(models), n).max(axis=0)
    if question.arm is not None:
        question.arm.count_rows(latency_us, is_default)
    return Answers(
        outputs=outputs,
        confidence=confidence,
        is_default=is_default,
        statuses=statuses,
        reasons=reasons,
        latency_us=latency_us,
        id=id,
    )


Combination = tuple[Any, NDArray[np.float64], dict[str, int], NDArray[np.bool_]]


def _alone(
    future: Future, question: Question, model: VersionedModel, statuses: NDArray[np.uint8]
) -> Combination:
    """One model, believed as far as it believes itself."""
    outputs = future.outputs(question.default)
    confidence = np.clip(np.nan_to_num(future.confidences(), nan=1.0), 0.0, 1.0)
    absent = statuses != Status.OK
    reasons = _whys(question, future, model, statuses)
    unusable = (
        _unusable(outputs) & ~absent if question.name else np.zeros(len(absent), np.bool_)
    )  # a model by name: as it is
    if unusable.any():
        reasons[NO_FINITE_VALUE.format(model)] = int(unusable.sum())
    nothing = absent | unusable
    confidence[nothing] = 0.0
    unsure = ~nothing & (confidence < question.confidence_min)
    if unsure.any():
        reasons[too_unsure(float(confidence[unsure].max()), question)] = int(unsure.sum())
    is_default = nothing | unsure
    return _with_default(outputs, is_default, question.default), confidence, reasons, is_default


def _whys(
    question: Question, future: Future, model: VersionedModel, statuses: NDArray[np.uint8]
) -> dict[str, int]:
    """Why rows have no prediction of this model, counted; of equal kinds the first row's words."""
    reasons: dict[str, int] = {}
    kinds, at, counts = np.unique(statuses, return_index=True, return_counts=True)
    for kind, i, count in zip(kinds.tolist(), at.tolist(), counts.tolist(), strict=True):
        if kind != Status.OK:
            reasons[why_of(question, Status(kind), model, future.detail(i))] = count
    return reasons


def _unusable(outputs: Any) -> NDArray[np.bool_]:
    """Rows that hold NaN or an infinity."""
    if isinstance(outputs, np.ndarray):
        if outputs.dtype.kind != "f":
            return np.zeros(len(outputs), np.bool_)
        return np.asarray(~np.isfinite(outputs).reshape(len(outputs), -1).all(axis=1))
    return np.array(
        [isinstance(row, float | np.ndarray) and not np.isfinite(row).all() for row in outputs],
        np.bool_,
    )


def _with_default(outputs: Any, is_default: NDArray[np.bool_], default: Any) -> Any:
    """The application's default in the rows that need it; a list when it does not fit among the
    others."""
    if not is_default.any():
        return outputs
    if isinstance(outputs, np.ndarray):
        filler = np.asarray(np.nan if default is None and outputs.dtype.kind == "f" else default)
        fits = filler.dtype.kind in "biuf" and (filler.dtype.kind == "b") == (
            outputs.dtype.kind == "b"
        )
        if fits and filler.shape in ((), outputs.shape[1:]):
            outputs = outputs.astype(np.result_type(outputs, filler), copy=True)
            outputs[is_default] = filler
            return outputs
    return [
        default if instead else output
        for output, instead in zip(outputs, is_default.tolist(), strict=True)
    ]


def _row_by_row(
    future: Future, asked: AskedArray, statuses: dict[VersionedModel, NDArray[np.uint8]]
) -> Combination:
    question, models = asked.question, asked.plan.models
    n = len(statuses[models[0]])
    outputs: list[Any] = []
    confidence, is_default = np.zeros(n), np.zeros(n, np.bool_)
    reasons: dict[str, int] = {}
    for i in range(n):
        arrived = {
            model: Prediction(future.output(j * n + i), future.confidence(j * n + i))
            for j, model in enumerate(models)
            if statuses[model][i] == Status.OK
        }
        missing = [model for model in models if model not in arrived]
        reason = ""
        try:
            combined = combine(question.policy, asked.state, question.means, arrived, missing)
        except PolicyFailed as failure:
            combined, reason = NO_ANSWER, failure.message
        if reason:
            pass
        elif arrived and not combined.used:
            reason = NO_FINITE_VALUE.format(", ".join(map(str, arrived)))
        elif not combined.used:
            each = [
                why_of(question, Status(statuses[m][i]), m, future.detail(j * n + i))
                for j, m in enumerate(models)
            ]
            reason = "; ".join(dict.fromkeys(each))
        elif combined.confidence < question.confidence_min:
            reason = too_unsure(combined.confidence, question)
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
        confidence[i], is_default[i] = combined.confidence, bool(reason)
        outputs.append(question.default if reason else combined.output)
    return _as_array(outputs), confidence, reasons, is_default


def _as_array(outputs: list[Any]) -> Any:
    """An ndarray of numbers of one shape, or the list itself."""
    if all(isinstance(output, int | float | np.number | np.ndarray) for output in outputs):
        try:
            return np.array(outputs)
        except ValueError:
            return outputs
    return outputs
