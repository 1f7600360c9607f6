"""The life of an array of queries: one future, one pass through cache, queue and batches, one
combination at the end.

The policy selects once, for the whole array; observers are not queried. Feedback may come for the
array as for an answer. A policy that learns nothing and queries one model combines as a whole: no
Python object a row. Every other combination goes row by row through `policy.combine`.
"""

from collections.abc import Iterable, Sized

import msgspec
import numpy as np
from numpy.typing import NDArray

from clipper.errors import ForkedProcess, InvalidInput, Overloaded, PolicyFailed
from clipper.schema import by_column
from clipper.selection import Plan, Prediction
from clipper.selection.policies.stateless_policy import StatelessPolicy
from clipper.selection.policy import NO_ANSWER, State
from clipper.serving.feedback.ground_truth import user_of
from clipper.serving.feedback.window import JoinedRows
from clipper.serving.query.dispatch import FORK_HINT
from clipper.serving.query.missing_outputs import combine
from clipper.serving.query.named_outputs import (
    chosen_outputs,
    columns_of,
    only,
    with_default,
)
from clipper.serving.query.processor import (
    NO_FINITE_VALUE,
    FailedQuery,
    ResolvedApplication,
    id_of,
    if_cached,
    plan_for,
    side_of,
    too_unsure,
    why_of,
)
from clipper.types import Answers, UserValue, VersionedModel
from clipper_core.engine.model import predict_rows
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status

ARRAY_SLO_MS = 60_000.0  # of an array for which no SLO is named: it is work, not a request


class ArrayQueryContext(msgspec.Struct, frozen=True, eq=False):
    """State of an array query until its answers are read: `Future.extra`."""

    resolved: ResolvedApplication
    plan: Plan
    state: State  # the policy's, by which it selected
    user: str = ""
    outputs: tuple[str, ...] = ()  # of named outputs only these; empty: all

    @property
    def output_name(self) -> str:
        """The named output that its future reads: clipper_core.results.future."""
        return self.resolved.output_name


def repeatable(rows: UserValue) -> UserValue:
    """Return rows that may be read several times: those of an iterator as a list."""
    return rows if isinstance(rows, Sized) or not isinstance(rows, Iterable) else list(rows)


def in_columns(resolved: ResolvedApplication, rows: UserValue) -> UserValue:
    """Return a DataFrame, or an Arrow table, as the array that models take which were fitted on
    one: its columns by name, in their order. Return anything else, and rows for records, unchanged.

    Raises: InvalidInput for other columns, and for models that know no names.
    """
    core = next(iter(resolved.cores.values()), None)
    if core is None or isinstance(rows, dict | list | np.ndarray) or core.tensors is not None:
        return rows
    table = by_column(rows)
    if not isinstance(table, dict):
        return rows
    wanted, takes = resolved.columns, core.describe_input()
    given = ", ".join(map(repr, table))
    if not wanted:
        raise InvalidInput(
            f"predict_many was given a table with columns {given}; {core.name} takes {takes} and"
            " knows no names of columns.",
            hint="Pass table[names].to_numpy(), or deploy the model with inputs=.",
        )
    if table.keys() != {*wanted}:
        raise InvalidInput(
            f"predict_many was given a table with columns {given}; {core.name} was fitted on"
            f" {', '.join(map(repr, wanted))}."
        )
    try:
        return np.column_stack([np.asarray(table[name], np.float64) for name in wanted])
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"predict_many was given a table with a column that is no number: {error}."
        ) from None


def predict_array(
    resolved: ResolvedApplication,
    inputs: UserValue,
    user: str | None,
    slo_us: int,
    salt: int,
    outputs: tuple[str, ...] = (),
    band: int | None = None,
) -> Future:
    """Query the models that the policy selects for every row and return the future of `Answers`.
    band: of all rows; None: that of the application's priority.
    Raises InvalidInput for a wrong type or shape; UnknownModel when nothing is linked;
    Overloaded when a model of the mesh cannot be loaded in time, and not all rows are cached."""
    if outputs:
        outputs = chosen_outputs(resolved, outputs)
    user, inputs = user_of(user), in_columns(resolved, repeatable(inputs))
    band = resolved.band() if band is None else band
    if resolved.unlisted_model is not None:
        try:
            resolved.unlisted_model.admit(slo_us)
        except Overloaded as refusal:
            if not resolved.cores[resolved.unlisted_model.record.id].cached_rows(inputs, salt):
                raise
            known = msgspec.structs.replace(resolved, unlisted_model=None, on_demand={})
            future = predict_array(known, inputs, user, slo_us, salt, outputs, band)
            return if_cached(future, refusal)
    resolved = side_of(resolved, user)
    try:
        state, plan = plan_for(resolved, user)
    except PolicyFailed as failure:
        core = resolved.cores[resolved.models[0]]
        future = predict_rows(
            (core,), inputs, slo_us, salt, _finish_failed, FailedQuery(resolved, failure.message)
        )
        future.end_now()
        return future
    cores = tuple([resolved.cores[model] for model in plan.models])
    salt = resolved.feedback.online_learning.session(resolved.models, user, salt)
    return predict_rows(
        cores,
        inputs,
        slo_us,
        salt,
        finish_array,
        ArrayQueryContext(resolved, plan, state, user or "", outputs),
        band,
    )


def _finish_failed(future: Future) -> Answers:
    failed: FailedQuery = future.extra
    n = len(future)
    outputs = _as_array([failed.resolved.default] * n)
    return Answers(
        outputs, np.zeros(n), np.ones(n, np.bool_), {}, {failed.reason: n}, np.zeros(n, np.uint32)
    )


def finish_array(future: Future) -> Answers:
    """Combine what arrived, row by row; the default where nothing did or it is not sure enough."""
    query: ArrayQueryContext = future.extra
    models, resolved = query.plan.models, query.resolved
    n = len(future) // len(models)
    by_model = future.statuses().reshape(len(models), n)
    if n and (by_model == Status.FORKED).all():
        raise ForkedProcess(
            f"application {resolved.name!r} was queried in a fork of its server's process.",
            hint=FORK_HINT,
        )
    statuses = dict(zip(models, by_model, strict=True))
    if len(models) == 1 and isinstance(resolved.policy, StatelessPolicy):
        outputs, confidence, reasons, is_default = _alone(future, resolved, models[0], by_model[0])
    else:
        outputs, confidence, reasons, is_default = _row_by_row(future, query, statuses)
    id = id_of(resolved, future.id)
    if n and resolved.feedback.window is not None:
        resolved.feedback.window.add_rows(
            id, JoinedRows(resolved.learner, query.user, query.plan, future, outputs)
        )
    latency_us = future.latencies_us().reshape(len(models), n).max(axis=0)
    if resolved.rollout.side is not None:
        resolved.rollout.side.count_rows(latency_us, is_default)
    return Answers(
        outputs=only(outputs, query.outputs) if query.outputs else outputs,
        confidence=confidence,
        is_default=is_default,
        statuses=statuses,
        reasons=reasons,
        latency_us=latency_us,
        id=id,
    )


Combination = tuple[UserValue, NDArray[np.float64], dict[str, int], NDArray[np.bool_]]


def _alone(
    future: Future,
    resolved: ResolvedApplication,
    model: VersionedModel,
    statuses: NDArray[np.uint8],
) -> Combination:
    """Combine the outputs of one model, with its own confidence."""
    named = None if resolved.output_name else resolved.cores[model].outputs
    outputs = future.outputs(resolved.default if named is None else None)
    if named is not None and not isinstance(outputs, dict):
        outputs = columns_of(outputs, named)
    confidence = np.clip(np.nan_to_num(future.confidences(), nan=1.0), 0.0, 1.0)
    absent = statuses != Status.OK
    reasons = _whys(resolved, future, model, statuses)
    unusable = (
        _unusable(outputs) & ~absent if resolved.name else np.zeros(len(absent), np.bool_)
    )  # a model by name: as it is
    if unusable.any():
        reasons[NO_FINITE_VALUE.format(model)] = int(unusable.sum())
    nothing = absent | unusable
    confidence[nothing] = 0.0
    unsure = ~nothing & (confidence < resolved.confidence_min)
    if unsure.any():
        reasons[too_unsure(float(confidence[unsure].max()), resolved)] = int(unsure.sum())
    is_default = nothing | unsure
    filled = (
        with_default(outputs, is_default, resolved.default)
        if named is not None
        else _with_default(outputs, is_default, resolved.default)
    )
    return filled, confidence, reasons, is_default


def _whys(
    resolved: ResolvedApplication,
    future: Future,
    model: VersionedModel,
    statuses: NDArray[np.uint8],
) -> dict[str, int]:
    """Count the reasons why rows have no prediction; each kind has its first row's message."""
    reasons: dict[str, int] = {}
    kinds, at, counts = np.unique(statuses, return_index=True, return_counts=True)
    for kind, i, count in zip(kinds.tolist(), at.tolist(), counts.tolist(), strict=True):
        if kind != Status.OK:
            reasons[why_of(resolved, Status(kind), model, future.detail(i))] = count
    return reasons


def _unusable(outputs: UserValue) -> NDArray[np.bool_]:
    """Return which rows hold NaN or an infinity."""
    if isinstance(outputs, dict):
        return np.asarray(np.any([*map(_unusable, outputs.values())], axis=0))
    if isinstance(outputs, np.ndarray):
        if outputs.dtype.kind != "f":
            return np.zeros(len(outputs), np.bool_)
        return np.asarray(~np.isfinite(outputs).reshape(len(outputs), -1).all(axis=1))
    return np.array(
        [isinstance(row, float | np.ndarray) and not np.isfinite(row).all() for row in outputs],
        np.bool_,
    )


def _with_default(outputs: UserValue, is_default: NDArray[np.bool_], default: UserValue) -> object:
    """Return the application's default in the rows that need it; a list when it does not fit among
    the others."""
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
    future: Future, query: ArrayQueryContext, statuses: dict[VersionedModel, NDArray[np.uint8]]
) -> Combination:
    resolved, models = query.resolved, query.plan.models
    n = len(statuses[models[0]])
    outputs: list[object] = []
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
            combined = combine(resolved.policy, query.state, resolved.means, arrived, missing)
        except PolicyFailed as failure:
            combined, reason = NO_ANSWER, failure.message
        if reason:
            pass
        elif arrived and not combined.used:
            reason = NO_FINITE_VALUE.format(", ".join(map(str, arrived)))
        elif not combined.used:
            each = [
                why_of(resolved, Status(statuses[m][i]), m, future.detail(j * n + i))
                for j, m in enumerate(models)
            ]
            reason = "; ".join(dict.fromkeys(each))
        elif combined.confidence < resolved.confidence_min:
            reason = too_unsure(combined.confidence, resolved)
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
        confidence[i], is_default[i] = combined.confidence, bool(reason)
        outputs.append(resolved.default if reason else combined.output)
    return _as_array(outputs), confidence, reasons, is_default


def _as_array(outputs: list[object]) -> object:
    """Return an ndarray of numbers of one shape, or the list itself."""
    if all(isinstance(output, int | float | np.number | np.ndarray) for output in outputs):
        try:
            return np.array(outputs)
        except ValueError:
            return outputs
    return outputs
