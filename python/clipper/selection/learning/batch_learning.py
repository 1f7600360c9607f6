"""Learning from many observations at once, as columns instead of objects.

The core (clipper_core.learning.feedback_update) learns the policies that have a rule, from labels
and from float numbers, in the order of the rows; with a coverage, float numbers one row at a time.
Other policies, and columns of other or mixed types, are learned by a loop over `policy.observe`.
Both give the same state, bit for bit.
"""

import functools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from clipper.selection.learning.learned_state import DOUBT, LABEL_BITS, LearnedState, label_bit
from clipper.selection.learning.learning_policy import FADE, LearningPolicy
from clipper.selection.learning.one_model import OneModel
from clipper.selection.learning.prediction_sets import (
    KNOWN_MAX,
    STEP,
    LabelSets,
    after_rows,
    knowable,
)
from clipper.selection.policy import Observation, Plan, Policy, Prediction, State, Truth
from clipper.types import UserValue, VersionedModel
from clipper_core.learning.bandit import Rule
from clipper_core.learning.feedback_update import FeedbackUpdate as NativeUpdate
from clipper_core.learning.first_states import FirstStates

_replace = msgspec.structs.replace
_PLAIN = frozenset((int, str, bytes))
_INTEGERS: tuple[set[np.dtype | None], ...] = ({np.dtype(np.int64)}, {np.dtype(np.bool_)})

Column = UserValue  # ndarray of shape (n,), or a list of n values


class ObservationRows(msgspec.Struct, frozen=True, eq=False):
    """n observations with labels, of one user.

    models: one per column.
    outputs: one column per model.
    arrived: per model bool (n,), where a prediction exists; None if all exist.
    confidence: per model f64 (n,), NaN where the model reported none; None if it never did.
    labels: the column of right outputs.
    queried: i32 (n,) or (1,), index of the only model that was queried; -1 if all were.
    p: f64 (n,) or (1,), the probability of that choice.
    """

    models: tuple[VersionedModel, ...]
    outputs: tuple[Column, ...]
    arrived: tuple[NDArray[np.bool_] | None, ...]
    confidence: tuple[NDArray[np.float64] | None, ...]
    labels: Column
    queried: NDArray[np.int32]
    p: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, places: NDArray[np.intp]) -> "ObservationRows":
        """Return the rows at these indices, in this order."""
        return ObservationRows(
            self.models,
            tuple(_taken(column, places) for column in self.outputs),
            tuple(None if column is None else column[places] for column in self.arrived),
            tuple(None if column is None else column[places] for column in self.confidence),
            _taken(self.labels, places),
            self.queried if len(self.queried) == 1 else self.queried[places],
            self.p if len(self.p) == 1 else self.p[places],
        )

    def observation(self, i: int) -> Observation:
        """Return row `i` as an object."""
        predictions = {
            model: Prediction(_plain(self.outputs[j][i]), self._confidence(j, i))
            for j, model in enumerate(self.models)
            if self._exists(j, i)
        }
        selected = int(self.queried[i if len(self.queried) > 1 else 0])
        p = float(self.p[i if len(self.p) > 1 else 0])
        plan = Plan(self.models) if selected < 0 else Plan((self.models[selected],), (p,))
        return Observation(plan, predictions, Truth(_plain(self.labels[i])))

    def _exists(self, j: int, i: int) -> bool:
        column = self.arrived[j]
        return column is None or bool(column[i])

    def _confidence(self, j: int, i: int) -> float | None:
        column = self.confidence[j]
        return None if column is None or np.isnan(column[i]) else float(column[i])


def observe(
    policy: Policy, state: State, observation: Observation, native: NativeUpdate | None
) -> State:
    """Learn one observation, in the core if possible, else by `policy.observe`.

    native: from `native_update_of(policy)`.
    """
    truth, plan = observation.truth, observation.plan
    if native is None or truth.score is not None:
        return policy.observe(state, observation)
    found = native.one(
        state.models,
        state.rows,
        state.sure,
        state.seen,
        state.labels,
        state.tracked,
        plan.models,
        plan.probabilities,
        observation.predictions,
        truth.label,
        observation.weight,
        plan.features,
    )
    if found is None:
        return policy.observe(state, observation)
    return _replace(found, differences=state.differences) if found else state


def observe_rows(policy: Policy, state: State, rows: ObservationRows) -> State:
    """Learn all rows in their order and return the state after the last."""
    native = native_update_of(policy)
    if native is not None and isinstance(policy, LearningPolicy) and _fits(policy, state, rows):
        coded = _votes(rows)
        if coded is not None:
            return _learn_votes(native, policy.coverage, state, rows, *coded)
        losses = _losses(rows) if policy.coverage is None else None
        if losses is not None:
            return _learn_losses(native, state, rows, losses)
    for i in range(len(rows)):
        state = observe(policy, state, rows.observation(i), native)
    return state


def count_user(
    policy: Policy, state: State, user: str, seen: Observation | ObservationRows
) -> State:
    """Return the state that all users share, after it has learned feedback of this user, with the
    differences between users that the feedback shows."""
    if isinstance(policy, LearningPolicy):
        for i in range(len(seen) if isinstance(seen, ObservationRows) else 1):
            if not state.wants(user):
                break
            one = seen.observation(i) if isinstance(seen, ObservationRows) else seen
            state = policy.with_user(state, user, one)
    return state


def native_update_of(policy: Policy) -> NativeUpdate | None:
    """Return the core's update of a policy; None if it has no rule."""
    if isinstance(policy, LearningPolicy) and policy.rule is not None:
        return _native_update(policy.rule, policy.coverage)
    return None


def first_states_of(policy: Policy, models: tuple[VersionedModel, ...]) -> FirstStates:
    """Return what makes the state of users without an observation."""
    if isinstance(policy, LearningPolicy):
        return policy.first_states(models)
    return FirstStates(models, policy.init, LearnedState)


@functools.lru_cache(maxsize=1024)
def _native_update(rule: Rule, coverage: float | None) -> NativeUpdate:
    sets = None if coverage is None else LabelSets(coverage, STEP, DOUBT)
    return NativeUpdate(rule, FADE, LearnedState, sets)


def _fits(policy: LearningPolicy, state: LearnedState, rows: ObservationRows) -> bool:
    is_finite = bool(np.isfinite(state.rows).all() and np.isfinite(state.sure).all())
    queries_one = isinstance(policy.answering, OneModel)
    return (
        is_finite
        and state.models == rows.models
        and not (queries_one and rows.queried.min(initial=0) < 0)
    )


def _chosen(rows: ObservationRows) -> NDArray[np.uint32]:
    return np.where(rows.queried < 0, len(rows.models), rows.queried).astype(np.uint32)


def _learn_votes(
    native: NativeUpdate,
    coverage: float | None,
    state: LearnedState,
    rows: ObservationRows,
    values: NDArray[np.int64],
    labels: NDArray[np.int64],
    bits: NDArray[np.uint8],
    cells: NDArray[np.uint8],
) -> LearnedState:
    shape = values.shape
    exists = np.ones(shape, np.uint8)
    confidence = np.full(shape, np.nan)
    for j in range(shape[0]):
        if (column := rows.arrived[j]) is not None:
            exists[j] = column
        if (reported := rows.confidence[j]) is not None:
            confidence[j] = reported
    names, numbers, before = list[UserValue](), None, state.tracked
    if coverage is not None:
        _, first, numbers = np.unique(labels, return_index=True, return_inverse=True)
        names = [_plain(rows.labels[i]) for i in first.tolist()]
    updated, sure, seen, bits_seen, threshold, known = native.many(
        state.rows,
        state.sure,
        state.seen,
        state.labels,
        values,
        exists,
        confidence,
        labels,
        bits,
        _chosen(rows),
        rows.p,
        cells,
        before.labels,
        numbers,
        knowable(before, names),
        KNOWN_MAX - len(before.known),
    )
    tracked = after_rows(before, threshold, names, known)
    return _replace(state, rows=updated, seen=seen, labels=bits_seen, sure=sure, tracked=tracked)


def _learn_losses(
    native: NativeUpdate, state: LearnedState, rows: ObservationRows, losses: NDArray[np.float64]
) -> LearnedState:
    updated, seen = native.graded(state.rows, state.seen, losses, _chosen(rows), rows.p)
    return _replace(state, rows=updated, seen=seen)


# -- columns as numbers


def _votes(
    rows: ObservationRows,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8]] | None:
    """Encode labels as integers that are equal when the labels are.

    Returns the outputs, i64 (k, n), the labels, i64 (n,), the labels' bits, u8 (n,), and those of
    the outputs, u8 (k, n); None if an output or a label is not a label.
    """
    if _kinds(rows) in _INTEGERS:
        labels, outputs = np.asarray(rows.labels, np.int64), np.array(rows.outputs, np.int64)
        return outputs, labels, _bits(labels), _bits(outputs)
    codes: dict[object, int] = {}
    values = np.zeros((len(rows.models), len(rows)), np.int64)
    for j, column in enumerate(rows.outputs):
        if (found := _coded(column, rows.arrived[j], codes)) is None:
            return None
        values[j] = found
    if (right := _coded(rows.labels, None, codes)) is None:
        return None
    bits = np.array(
        [label_bit(key[1] if isinstance(key, tuple) else key).bit_length() - 1 for key in codes],
        np.uint8,
    )
    return values, right, bits[right], bits[values]


def _bits(labels: NDArray[np.int64]) -> NDArray[np.uint8]:
    return (labels & (LABEL_BITS - 1)).astype(np.uint8)


def _kinds(rows: ObservationRows) -> set[np.dtype | None]:
    """Return the dtypes of the columns; None stands for a column that is no 1-D array."""
    columns = (*rows.outputs, rows.labels)
    return {
        column.dtype if isinstance(column, np.ndarray) and column.ndim == 1 else None
        for column in columns
    }


def _coded(
    column: Column, arrived: NDArray[np.bool_] | None, codes: dict[object, int]
) -> NDArray[np.int64] | None:
    if isinstance(column, np.ndarray):
        if column.ndim != 1 or column.dtype.kind not in "biu":
            return None
        column = column.tolist()
    if arrived is not None:
        column = [
            value if exists else 0 for value, exists in zip(column, arrived.tolist(), strict=True)
        ]
    kinds = set(map(type, column))
    if not kinds <= _PLAIN:
        if not kinds <= {*_PLAIN, bool}:
            return None
        column = [("bool", value) if type(value) is bool else value for value in column]
    return np.array([codes.setdefault(value, len(codes)) for value in column], np.int64)


def _losses(rows: ObservationRows) -> NDArray[np.float64] | None:
    """Return f64 (k, n), the losses of f64 columns, NaN where there is none; None for others."""
    if not all(
        isinstance(c, np.ndarray) and c.ndim == 1 and c.dtype == np.float64
        for c in (*rows.outputs, rows.labels)
    ):
        return None
    outputs = np.array(rows.outputs, np.float64)
    usable = np.isfinite(outputs)
    with np.errstate(all="ignore"):
        right = rows.labels / 4  # a quarter, so that the difference cannot overflow
        distance, size = np.abs(outputs / 4 - right), np.abs(right)
        losses = np.where(distance == 0.0, 0.0, distance / (distance + size))
    return _where_exists(rows, np.where(usable, losses, np.nan))


def _where_exists(rows: ObservationRows, losses: NDArray[np.float64]) -> NDArray[np.float64]:
    for j, exists in enumerate(rows.arrived):
        if exists is not None:
            losses[j, ~exists] = np.nan
    return losses


def losses_by_model(rows: ObservationRows) -> NDArray[np.float64] | None:
    """Return f64 (k, n), the losses as by `policy.losses`, NaN where there is none.

    None unless all columns are arrays of the same dtype: i64, bool or f64.
    """
    if _kinds(rows) not in _INTEGERS:
        return _losses(rows)
    return _where_exists(rows, (np.array(rows.outputs) != rows.labels).astype(np.float64))


def _taken(column: Column, places: NDArray[np.intp]) -> Column:
    return (
        column[places] if isinstance(column, np.ndarray) else [column[i] for i in places.tolist()]
    )


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def column_of(
    values: Sequence[object], plain: Callable[..., object] = lambda value: value
) -> Column:
    """Return the values as an array of i64, bool or f64 if all have that type, else as a list.

    plain: applied to each value of a list.
    """
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return list(values)
    if kinds == {bool}:
        return np.array(values, np.bool_)
    if kinds == {float}:
        return np.array(values, np.float64)
    return [plain(value) for value in values]
