"""Feedback: the truth about a query, joined with what its models predicted.

An answer is remembered for a while by its id (the join window), with the plan that chose its models: feedback may come long after
the state has moved on, and must be weighed by the probabilities of then. Feedback by id counts once, however often it is sent.
Feedback with the input itself needs no window: the models are asked again, and the cache has most of it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from clipper.errors import InvalidInput, UnknownPrediction
from clipper.selection import Observation, Plan, Prediction, Truth
from clipper.serving.states import Learner
from clipper.types import VersionedModel
from clipper_core.future import Future
from clipper_core.status import Status

NDARRAY = 1  # extension type of msgpack


class Joined(msgspec.Struct, eq=False):
    """An answered query that feedback may still come for. late: futures of observers, and of nobody else."""

    learner: Learner
    user: str
    plan: Plan
    arrived: dict[VersionedModel, Prediction]
    answer: Any
    late: tuple[tuple[VersionedModel, Future], ...]
    until_s: float
    told: bool = False

    def observation(self, truth: Truth, weight: float) -> Observation:
        heard = dict(self.arrived)
        for model, future in self.late:
            if future.done() and future.status() is Status.OK:
                heard[model] = Prediction(future.output(0), future.confidence(0))
        return Observation(self.plan, heard, truth, self.answer, weight)


class Window:
    """Answers by id, the last `size_max` of them, each for `window_s` seconds. Threads: any."""

    def __init__(self, size_max: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size_max, self._window_s, self._clock = size_max, window_s, clock
        self._joined: OrderedDict[str, Joined] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._joined)

    def add(
        self, id: str, learner: Learner, user: str, plan: Plan, arrived: dict[VersionedModel, Prediction], answer: Any,
        late: tuple[tuple[VersionedModel, Future], ...] = (),
    ) -> None:  # fmt: skip
        joined = Joined(learner, user, plan, arrived, answer, late, self._clock() + self._window_s)
        with self._lock:
            self._joined.setdefault(id, joined)
            while len(self._joined) > self._size_max or self._is_over(next(iter(self._joined.values()))):
                self._joined.popitem(last=False)
                if not self._joined:
                    break

    def _is_over(self, joined: Joined) -> bool:
        return joined.until_s < self._clock()

    def take(self, id: str, application: str) -> Joined | None:
        """The query of that id, once; None when its feedback has come already. UnknownPrediction if it is not here."""
        with self._lock:
            joined = self._joined.get(id)
            if joined is None or self._is_over(joined):
                hint = f"The server that answered remembers its last {self._size_max} answers, for {self._window_s:g} s."
                raise UnknownPrediction(f"no prediction {id[:64]!r} is waiting for feedback.", hint=hint)
            if joined.learner.application != application:
                whose = joined.learner.application
                raise UnknownPrediction(f"prediction {id!r} is one of application {whose!r}, not of {application!r}.")
            if joined.told:
                return None
            joined.told = True
            return joined


# -- what feedback says


def truth_of(label: Any, correct: bool | None, score: float | None) -> Truth:
    """Exactly one of them. InvalidInput otherwise, and for what can be no label."""
    given = [name for name, value in (("label", label), ("correct", correct), ("score", score)) if value is not None]
    if len(given) != 1:
        found = " and ".join(given) or "nothing"
        raise InvalidInput(f"feedback takes one of label, correct and score; this has {found}.")
    if label is not None:
        return Truth(plain_label(label))
    if correct is not None:
        if not isinstance(correct, bool | np.bool_):
            raise InvalidInput(f"correct={correct!r}: it is True or False.", hint="A degree is score=, 0 to 1.")
        return Truth(score=float(correct))
    if isinstance(score, bool | str) or not isinstance(score, int | float | np.number) or not 0 <= score <= 1:
        raise InvalidInput(f"score={score!r}: it must lie between 0 and 1.")
    return Truth(score=float(score))


def plain_label(label: Any) -> Any:
    """A label as the models give it: a Python scalar, str, bytes, or a finite array."""
    if isinstance(label, np.generic):
        label = label.item()
    if isinstance(label, list | tuple):
        label = np.asarray(label)
    if isinstance(label, np.ndarray):
        if label.dtype.kind not in "biuf" or not np.isfinite(label).all():
            raise InvalidInput(f"a label of dtype {label.dtype}: an array label holds finite numbers.")
        return label
    if isinstance(label, float) and not np.isfinite(label):
        raise InvalidInput(f"label={label!r}: it must be finite.")
    if not isinstance(label, bool | int | float | str | bytes):
        raise InvalidInput(f"a label is a number, str, bytes or an array, not {type(label).__name__}.")
    return label


def weight_of(weight: float) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1000:
        raise InvalidInput(f"weight={weight!r}: it must lie above 0 and at most at 1000.")
    return float(weight)


# -- records of the journal


class _Record(msgspec.Struct, array_like=True):
    application: str
    policy: str
    models: tuple[str, ...]
    user: str
    asked: tuple[int, ...]
    probabilities: tuple[float, ...]
    predictions: tuple[tuple[int, Any, float | None], ...]
    label: Any
    score: float | None
    answer: Any
    weight: float
    features: tuple[float, ...] = ()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda value: packed(value))
_DECODER = msgspec.msgpack.Decoder(_Record, ext_hook=lambda code, data: unpacked(code, data))


def written(learner: Learner, user: str, seen: Observation) -> bytes:
    """An observation as the journal keeps it: models by their place in the learner's list."""
    place = {model: i for i, model in enumerate(learner.models)}
    said = tuple(
        (place[model], prediction.output, prediction.confidence)
        for model, prediction in seen.predictions.items()
        if model in place
    )
    asked = tuple(place[model] for model in seen.plan.models if model in place)
    odds = seen.plan.probabilities if len(asked) == len(seen.plan.models) else ()
    names = tuple(map(str, learner.models))
    return _ENCODER.encode(
        _Record(
            learner.application, learner.text, names, user, asked, odds, said, seen.truth.label, seen.truth.score,
            seen.answer, seen.weight, seen.plan.features,
        )
    )  # fmt: skip


def read(record: bytes) -> tuple[str, str, tuple[VersionedModel, ...], str, Observation]:
    """-> application, policy, models, user, and the observation. ValueError for what `written` did not write."""
    try:
        found = _DECODER.decode(record)
        models = tuple(VersionedModel.parse(name) for name in found.models)
        heard = {models[i]: Prediction(output, confidence) for i, output, confidence in found.predictions}
        plan = Plan(tuple(models[i] for i in found.asked), found.probabilities, (), found.features)
    except (msgspec.MsgspecError, IndexError) as error:
        raise ValueError(f"no record of feedback: {error}") from None
    truth = Truth(found.label, found.score)
    return found.application, found.policy, models, found.user, Observation(plan, heard, truth, found.answer, found.weight)


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def packed(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        array = _Array(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
        return msgspec.msgpack.Ext(NDARRAY, msgspec.msgpack.encode(array))
    raise TypeError(f"no feedback record holds a {type(value).__name__}")


def unpacked(code: int, data: memoryview) -> Any:
    if code != NDARRAY:
        raise ValueError(f"extension {code}")
    array = msgspec.msgpack.decode(data, type=_Array)
    if np.dtype(array.dtype).kind not in "biuf":
        raise ValueError(f"an array of {array.dtype}")
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)
