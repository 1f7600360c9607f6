"""Records of the journal: observations as bytes, one by one or many in columns.

An observation is a msgpack array that begins with its application, policy and models. Many in
columns begin with a byte that no msgpack does, and keep whole numbers as narrow as they are.
Both end with the time of the feedback, which no state depends on.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from clipper.clock import wall_time_us
from clipper.selection import Observation, Plan, Prediction, Truth
from clipper.selection.learning.batch_learning import Column, ObservationRows
from clipper.store.journal import RECORD_BYTES_MAX
from clipper.types import Qualifiers, UserValue, VersionedModel
from clipper_core.learning.label_feedback import record_of

if TYPE_CHECKING:
    from clipper.serving.feedback.states import Learner

NDARRAY = 1  # extension type of msgpack
COLUMNS = b"\xc1"  # first byte of a record of columns
CHUNK = 1 << 14  # rows of a record, at most


class _Reported(msgspec.Struct, array_like=True):
    place: int  # of the model in the record's list
    output: UserValue
    confidence: float | None
    qualifiers: Qualifiers = {}


class _Record(msgspec.Struct, array_like=True):
    application: str
    policy: str
    models: tuple[str, ...]
    user: str
    queried: tuple[int, ...]
    probabilities: tuple[float, ...]
    predictions: tuple[_Reported, ...]
    label: UserValue
    score: float | None
    answer: UserValue
    weight: float
    features: tuple[float, ...] = ()
    time_us: int = 0  # Unix time; 0 in records of older servers


class _RowsRecord(msgspec.Struct, array_like=True):
    application: str
    policy: str
    models: tuple[str, ...]
    user: str
    outputs: tuple[UserValue, ...]
    arrived: tuple[UserValue, ...]
    confidence: tuple[UserValue, ...]
    labels: UserValue
    queried: UserValue
    p: UserValue
    time_us: int = 0


_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda value: packed(value))
_DECODER = msgspec.msgpack.Decoder(_Record, ext_hook=lambda code, data: unpacked(code, data))
_ROWS_DECODER = msgspec.msgpack.Decoder(
    _RowsRecord, ext_hook=lambda code, data: unpacked(code, data)
)


def written(learner: "Learner", user: str, seen: Observation) -> bytes:
    """Return an observation as the journal keeps it: models by their place in the learner's
    list."""
    place, plan, truth = learner.place, seen.plan, seen.truth
    selected, odds = learner.positions(plan.models), plan.probabilities
    if odds and len(selected) != len(odds):
        odds = ()
    time_us = wall_time_us()
    if record := record_of(learner.head, user, place, selected, odds, seen, time_us):
        return record
    reported = []
    for model, arrived in seen.predictions.items():
        if model in place:
            one = (place[model], arrived.output, arrived.confidence)
            reported.append((*one, arrived.qualifiers) if arrived.qualifiers else one)
    rest = _ENCODER.encode(
        (
            user,
            selected,
            odds,
            reported,
            truth.label,
            truth.score,
            seen.answer,
            seen.weight,
            plan.features,
            time_us,
        )
    )
    return learner.head + rest[1:]


def head_of(application: str, policy: str, models: Iterable[VersionedModel]) -> bytes:
    """Return the first three fields of every record of a learner, in an array of thirteen."""
    return b"\x9d" + _ENCODER.encode((application, policy, tuple(map(str, models))))[1:]


def written_rows(
    learner: "Learner", user: str, rows: ObservationRows
) -> Iterator[tuple[ObservationRows, bytes]]:
    """Yield the records of many observations, each with the rows that are in it."""
    for at in range(0, len(rows), CHUNK):
        yield from _halved(
            learner,
            user,
            rows if len(rows) <= CHUNK else rows.take(np.arange(at, min(at + CHUNK, len(rows)))),
        )


def _halved(
    learner: "Learner", user: str, rows: ObservationRows
) -> Iterator[tuple[ObservationRows, bytes]]:
    """Yield one record of all rows if it is not too long, else those of each half."""
    names = tuple(map(str, learner.models))
    arrived = tuple(None if column is None or column.all() else column for column in rows.arrived)
    outputs = tuple(map(_narrow, rows.outputs))
    record = COLUMNS + _ENCODER.encode(
        _RowsRecord(
            learner.application,
            learner.text,
            names,
            user,
            outputs,
            arrived,
            rows.confidence,
            _narrow(rows.labels),
            _narrow(rows.queried),
            rows.p,
            wall_time_us(),
        )
    )
    if len(record) <= RECORD_BYTES_MAX or len(rows) == 1:
        yield rows, record
        return
    middle = len(rows) // 2
    yield from _halved(learner, user, rows.take(np.arange(middle)))
    yield from _halved(learner, user, rows.take(np.arange(middle, len(rows))))


def _narrow(column: Column) -> Column:
    """Return whole numbers in as few bytes as they need."""
    if (
        not isinstance(column, np.ndarray)
        or column.dtype != np.int64
        or column.ndim != 1
        or not column.size
    ):
        return column
    low, high = int(column.min()), int(column.max())
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return column.astype(kind)
    return column


# application, policy, models, user, and what was observed
Read = tuple[str, str, tuple[VersionedModel, ...], str, Observation | ObservationRows]


def read(record: bytes) -> Read:
    """Return the application, policy, models, user, and what was observed, of a record. Raises
    ValueError for bytes that are no record."""
    return read_with_time(record)[0]


def read_with_time(record: bytes) -> tuple[Read, int]:
    """Return what a record holds, as `read`, and its Unix time in microseconds.

    The time is 0 in records of older servers. Raises ValueError for what is no record.
    """
    if record[:1] == COLUMNS:
        return _read_rows(record)
    try:
        found = _DECODER.decode(record)
        models = tuple(VersionedModel.parse(name) for name in found.models)
        arrived = {
            models[one.place]: Prediction(one.output, one.confidence, one.qualifiers)
            for one in found.predictions
        }
        plan = Plan(
            tuple(models[i] for i in found.queried), found.probabilities, (), found.features
        )
    except (msgspec.MsgspecError, IndexError) as error:
        raise ValueError(f"no record of feedback: {error}") from None
    truth = Truth(found.label, found.score)
    seen = Observation(plan, arrived, truth, found.answer, found.weight)
    return (found.application, found.policy, models, found.user, seen), found.time_us


def _read_rows(record: bytes) -> tuple[Read, int]:
    try:
        found = _ROWS_DECODER.decode(memoryview(record)[1:])
        models = tuple(VersionedModel.parse(name) for name in found.models)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no record of feedback: {error}") from None
    selected = np.asarray(found.queried, np.int32)
    rows = ObservationRows(
        models,
        tuple(map(_wide, found.outputs)),
        found.arrived,
        found.confidence,
        _wide(found.labels),
        selected,
        found.p,
    )
    columns = (*rows.outputs, *rows.arrived, *rows.confidence)
    alike = all(column is None or len(column) == len(rows) for column in columns)
    if not alike or not len(models) == len(rows.outputs) == len(rows.arrived) == len(
        rows.confidence
    ):
        raise ValueError("no record of feedback: columns of different lengths")
    return (found.application, found.policy, models, found.user, rows), found.time_us


def _wide(column: Column) -> Column:
    """Return the array as it was before `_narrow`."""
    if isinstance(column, np.ndarray) and column.dtype.kind == "i" and column.ndim == 1:
        return np.asarray(column, np.int64)
    return column


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def packed(value: object) -> UserValue:
    """Return a value of NumPy as msgpack holds it. Raises TypeError for other values."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        array = _Array(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
        return msgspec.msgpack.Ext(NDARRAY, msgspec.msgpack.encode(array))
    raise TypeError(f"no feedback record holds a {type(value).__name__}")


def unpacked(code: int, data: memoryview) -> UserValue:
    """Return the array of an extension of msgpack. Raises ValueError."""
    if code != NDARRAY:
        raise ValueError(f"extension {code}")
    array = msgspec.msgpack.decode(data, type=_Array)
    if np.dtype(array.dtype).kind not in "biuf":
        raise ValueError(f"an array of {array.dtype}")
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)
