"""Many observations at once: columns instead of objects, learned from by the core in their order.

The policies of this package that vote on labels, or lose by numbers, learn in
`clipper_core.learning.lesson`; for every other policy, and for outputs of kinds that do not go
together, `observe_rows` is the loop over `policy.observe`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from clipper.selection.bandits import EpsilonGreedy, Exp3, KlUcb, SquareCB, Thompson, TsallisInf
from clipper.selection.experts import Exp4, LogOdds, Stacking
from clipper.selection.learning_policy import (
    FADE,
    LABEL_BITS,
    LearnedState,
    LearningPolicy,
    label_bit,
)
from clipper.selection.policy import Observation, Plan, Policy, Prediction, State, Truth
from clipper.types import VersionedModel
from clipper_core.learning.bandit import Rule
from clipper_core.learning.lesson import Lesson

_IN_THE_CORE: tuple[type[Any], ...] = (
    Exp3,
    EpsilonGreedy,
    KlUcb,
    SquareCB,
    Thompson,
    TsallisInf,
    Exp4,
    LogOdds,
    Stacking,
)
_OF_ONE_MODEL = (Exp3, EpsilonGreedy, KlUcb, SquareCB, Thompson, TsallisInf)
_PLAIN = frozenset((int, str, bytes))
_WHOLE: tuple[set[np.dtype[Any] | None], ...] = ({np.dtype(np.int64)}, {np.dtype(np.bool_)})

Column = Any  # ndarray of shape (n,), or a list of n


class ObservationRows(msgspec.Struct, frozen=True, eq=False):
    """n observations of labels, of one context.

    models: of the columns.  outputs, heard, confidence: a column a model; heard bool (n,), or None
    for all of them; confidence f64 (n,), NaN where the model gave none, or None for none at all.
    labels: a column.  asked: i32 (n,) or (1,), the place of the only model that was asked, -1 when
    all were.  p: f64 (n,) or (1,), its probability then.
    """

    models: tuple[VersionedModel, ...]
    outputs: tuple[Column, ...]
    heard: tuple[NDArray[np.bool_] | None, ...]
    confidence: tuple[NDArray[np.float64] | None, ...]
    labels: Column
    asked: NDArray[np.int32]
    p: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, places: NDArray[np.intp]) -> "ObservationRows":
        """These rows only, in this order."""
        return ObservationRows(
            self.models,
            tuple(_taken(column, places) for column in self.outputs),
            tuple(None if column is None else column[places] for column in self.heard),
            tuple(None if column is None else column[places] for column in self.confidence),
            _taken(self.labels, places),
            self.asked if len(self.asked) == 1 else self.asked[places],
            self.p if len(self.p) == 1 else self.p[places],
        )

    def observation(self, i: int) -> Observation:
        """Row i as an object."""
        heard = {
            model: Prediction(_plain(self.outputs[j][i]), self._confidence(j, i))
            for j, model in enumerate(self.models)
            if self._was_heard(j, i)
        }
        asked = int(self.asked[i if len(self.asked) > 1 else 0])
        p = float(self.p[i if len(self.p) > 1 else 0])
        plan = Plan(self.models) if asked < 0 else Plan((self.models[asked],), (p,))
        return Observation(plan, heard, Truth(_plain(self.labels[i])))

    def _was_heard(self, j: int, i: int) -> bool:
        column = self.heard[j]
        return column is None or bool(column[i])

    def _confidence(self, j: int, i: int) -> float | None:
        column = self.confidence[j]
        return None if column is None or np.isnan(column[i]) else float(column[i])


def observe(policy: Policy, state: State, seen: Observation, lesson: Lesson | None) -> State:
    """`policy.observe`, in the core where it can be: the state that `observe_rows` comes to by the
    same row. lesson: the policy's, by `native_update_of`."""
    truth, plan = seen.truth, seen.plan
    if lesson is None or truth.score is not None:
        return policy.observe(state, seen)
    found = lesson.one(
        state.models,
        state.rows,
        state.sure,
        state.seen,
        state.labels,
        state.tracked,
        plan.models,
        plan.probabilities,
        seen.predictions,
        truth.label,
        seen.weight,
    )
    if found is None:
        return policy.observe(state, seen)
    return found or state


def observe_rows(policy: Policy, state: State, rows: ObservationRows) -> State:
    """What is known after these observations, one after another."""
    lesson = native_update_of(policy)
    if lesson is not None and _fits(policy, state, rows):
        coded = _votes(rows)
        if coded is not None:
            return _of_votes(lesson, state, rows, *coded)
        lost = _losses(rows)
        if lost is not None:
            return _of_losses(lesson, state, rows, lost)
    for i in range(len(rows)):
        state = observe(policy, state, rows.observation(i), lesson)
    return state


def native_update_of(policy: Policy) -> Lesson | None:
    """How this policy learns in the core; None if it does not, or not all of it: the sets of a
    coverage."""
    if (
        isinstance(policy, LearningPolicy)
        and type(policy) in _IN_THE_CORE
        and policy.coverage is None
    ):
        return _lesson(policy.rule)
    return None


@functools.lru_cache(maxsize=1024)
def _lesson(rule: Rule) -> Lesson:
    return Lesson(rule, FADE, LearnedState, label_bit)


def _fits(policy: Policy, state: LearnedState, rows: ObservationRows) -> bool:
    is_finite = bool(np.isfinite(state.rows).all() and np.isfinite(state.sure).all())
    return (
        is_finite
        and state.models == rows.models
        and not (isinstance(policy, _OF_ONE_MODEL) and rows.asked.min(initial=0) < 0)
    )


def _chosen(rows: ObservationRows) -> NDArray[np.uint32]:
    return np.where(rows.asked < 0, len(rows.models), rows.asked).astype(np.uint32)


def _of_votes(
    lesson: Lesson,
    state: LearnedState,
    rows: ObservationRows,
    values: NDArray[np.int64],
    labels: NDArray[np.int64],
    bits: NDArray[np.uint8],
) -> LearnedState:
    shape = values.shape
    heard = np.ones(shape, np.uint8)
    confidence = np.full(shape, np.nan)
    for j in range(shape[0]):
        if (was_heard := rows.heard[j]) is not None:
            heard[j] = was_heard
        if (own := rows.confidence[j]) is not None:
            confidence[j] = own
    learned = lesson.many(
        state.rows,
        state.sure,
        state.seen,
        state.labels,
        values,
        heard,
        confidence,
        labels,
        bits,
        _chosen(rows),
        rows.p,
    )
    taught, sure, seen, bits_seen = learned
    return LearnedState(state.models, taught, seen, bits_seen, sure, state.tracked)


def _of_losses(
    lesson: Lesson, state: LearnedState, rows: ObservationRows, lost: NDArray[np.float64]
) -> LearnedState:
    taught, seen = lesson.graded(state.rows, state.seen, lost, _chosen(rows), rows.p)
    return LearnedState(state.models, taught, seen, state.labels, state.sure, state.tracked)


# -- columns as numbers


def _votes(
    rows: ObservationRows,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]] | None:
    """Labels as numbers that are equal when they are: i64 (k, n), i64 (n,), and the bit of each, u8
    (n,). None when some output or label is none."""
    if _kinds(rows) in _WHOLE:
        labels = np.asarray(rows.labels, np.int64)
        return (
            np.array(rows.outputs, np.int64),
            labels,
            (labels & (LABEL_BITS - 1)).astype(np.uint8),
        )
    codes: dict[object, int] = {}
    values = np.zeros((len(rows.models), len(rows)), np.int64)
    for j, column in enumerate(rows.outputs):
        if (found := _coded(column, rows.heard[j], codes)) is None:
            return None
        values[j] = found
    if (right := _coded(rows.labels, None, codes)) is None:
        return None
    bits = np.array(
        [label_bit(key[1] if isinstance(key, tuple) else key).bit_length() - 1 for key in codes],
        np.uint8,
    )
    return values, right, bits[right]


def _kinds(rows: ObservationRows) -> set[np.dtype[Any] | None]:
    """Of its columns; None for what is no array of one dimension."""
    columns = (*rows.outputs, rows.labels)
    return {
        column.dtype if isinstance(column, np.ndarray) and column.ndim == 1 else None
        for column in columns
    }


def _coded(
    column: Column, heard: NDArray[np.bool_] | None, codes: dict[object, int]
) -> NDArray[np.int64] | None:
    if isinstance(column, np.ndarray):
        if column.ndim != 1 or column.dtype.kind not in "biu":
            return None
        column = column.tolist()
    if heard is not None:
        column = [
            value if was_heard else 0
            for value, was_heard in zip(column, heard.tolist(), strict=True)
        ]
    kinds = set(map(type, column))
    if not kinds <= _PLAIN:
        if not kinds <= {*_PLAIN, bool}:
            return None
        column = [("bool", value) if type(value) is bool else value for value in column]
    return np.array([codes.setdefault(value, len(codes)) for value in column], np.int64)


def _losses(rows: ObservationRows) -> NDArray[np.float64] | None:
    """f64 (k, n) of numbers, as `clipper.selection.policy.loss` has it, NaN where there is none;
    None for what are no numbers."""
    if not all(
        isinstance(c, np.ndarray) and c.ndim == 1 and c.dtype == np.float64
        for c in (*rows.outputs, rows.labels)
    ):
        return None
    said = np.array(rows.outputs, np.float64)
    usable = np.isfinite(said)
    with np.errstate(all="ignore"):
        right = rows.labels / 4  # a quarter of what might overflow
        distance, size = np.abs(said / 4 - right), np.abs(right)
        lost = np.where(distance == 0.0, 0.0, distance / (distance + size))
    return _where_heard(rows, np.where(usable, lost, np.nan))


def _where_heard(rows: ObservationRows, lost: NDArray[np.float64]) -> NDArray[np.float64]:
    for j, was_heard in enumerate(rows.heard):
        if was_heard is not None:
            lost[j, ~was_heard] = np.nan
    return lost


def losses_by_model(rows: ObservationRows) -> NDArray[np.float64] | None:
    """f64 (k, n): as `clipper.selection.policy.losses` has them, NaN where there is none; None
    unless all columns are arrays of whole numbers, of truth values, or of numbers."""
    if _kinds(rows) not in _WHOLE:
        return _losses(rows)
    return _where_heard(rows, (np.array(rows.outputs) != rows.labels).astype(np.float64))


def _taken(column: Column, places: NDArray[np.intp]) -> Column:
    return (
        column[places] if isinstance(column, np.ndarray) else [column[i] for i in places.tolist()]
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def column_of(values: Sequence[Any], plain: Callable[[Any], Any] = lambda value: value) -> Column:
    """As narrow as these values allow: i64, bool or f64, else a list."""
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
