"""What a user writes: a `Model`, or a plain function. Numpy is not imported here (see
`__main__`)."""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scored:
    """Predictions with a confidence for each, or with qualifiers.

    outputs: what `predict_batch` would return without it, one output a row.
    confidence: one number a row, sent as f32; by custom between 0 and 1. None: nothing is said of
    it. qualifiers: what else is said of each row, by name: a list of n dicts (or None for a row),
    str -> str, bool, int or float;
        up to 1 KiB a row. A decider of the application may go by them, and they come back with the
        answer.
    """

    outputs: Any
    confidence: Any = None
    qualifiers: Any = None


def session_of(user: str) -> int:
    """The number (u64) by which a model knows a user, a session or a region; 0 for the empty
    one."""
    return (
        int.from_bytes(hashlib.blake2b(user.encode(), digest_size=8).digest(), "little")
        if user
        else 0
    )


class Model(ABC):
    """A model: subclass it and write `predict_batch`.

    input: type of one row: "f64[64]", "f32[3,224,224]", "f64[*]" (rows differ in length), "str",
    "bytes", or "any". output: type of one output, or "any". batch_max: most rows that one batch may
    have; 0 for no limit of the model's own. sessions: whose query each row is, is told too: write
    `predict_batch(self, inputs, sessions)`. sessions: ndarray (n,) of u64,
        `clipper_container.session_of(user)` each; 0: nobody's. Such a model's predictions are
        cached by session.

    tables: of parameters that it uses, declared by the class: {"factors": {"dim": 8, "optimizer":
    "adagrad"}}. In the container
        `self.tables` is then, from `load` on, a `clipper_container.tables.Tables` to pull their
        rows from and push gradients to.

    A model that learns from feedback has `correct` as well, and may say by `accuracy` how well it
    does.
    """

    input: str = "any"
    output: str = "any"
    batch_max: int = 0
    sessions: bool = False
    tables: Any = None

    def load(self) -> None:  # noqa: B027  # a hook: most models need none
        """Called once, in the model's own process, before the first batch. Open files, sockets and
        devices here."""

    @abstractmethod
    def predict_batch(self, inputs: Any) -> Any:
        """Return one output for each row of `inputs`, in the same order.

        inputs: rows of one shape: ndarray (n, *shape), read-only, aligned to 64 bytes; rows that
        differ in length: list
            of 1-d ndarrays; str: list[str]; bytes: list[memoryview]. They may be kept.
        Returns: an ndarray (n, ...), or a list of n numbers, strs, bytes or arrays; or `Scored`
        around either. Raises: whatever it likes; the batch fails with that traceback, and the
        process lives on.
        """

    def correct(self, inputs: Any, labels: Any, sessions: Any) -> None:  # noqa: B027  # a hook: most models do not learn
        """Learn from feedback: `labels[i]` would have been right for `inputs[i]`. Only a model that
        has its own is told.

        inputs: as `predict_batch` has them.  labels: an ndarray (n, ...) or a list, as
        `predict_batch` would return them. sessions: ndarray (n,) of u64; see `sessions` above.
        Called between batches, when none waits, on the thread that predicts; a batch that comes
        meanwhile waits for this one call. Each feedback is told at most once, to each replica that
        runs then (of a model with tables: to one of them): keep what must survive yourself, or push
        it to a table. Raises: whatever it likes; it is logged and counted, and predictions go on.
        """

    def accuracy(self) -> float | None:
        """How right the model finds itself, from 0 to 1; None while it cannot say. Asked after
        `correct`, now and then."""
        return None

    @property
    def corrects(self) -> bool:
        """Does it learn from feedback?"""
        return type(self).correct is not Model.correct


class FunctionModel(Model):
    """A plain function as a model."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.input = getattr(function, "input", "any")
        self.output = getattr(function, "output", "any")
        self.batch_max = getattr(function, "batch_max", 0)
        self.sessions = bool(getattr(function, "sessions", False))

    def predict_batch(self, inputs: Any, *sessions: Any) -> Any:
        return self.function(inputs, *sessions)


class BorrowedModel(Model):
    """Any object with `predict_batch` and perhaps `load`, without our base class."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.input = getattr(inner, "input", "any")
        self.output = getattr(inner, "output", "any")
        self.batch_max = getattr(inner, "batch_max", 0)
        self.sessions = bool(getattr(inner, "sessions", False))

    def load(self) -> None:
        load = getattr(self.inner, "load", None)
        if load is not None:
            load()

    def predict_batch(self, inputs: Any, *sessions: Any) -> Any:
        return self.inner.predict_batch(inputs, *sessions)

    def correct(self, inputs: Any, labels: Any, sessions: Any) -> None:
        self.inner.correct(inputs, labels, sessions)

    def accuracy(self) -> float | None:
        accuracy = getattr(self.inner, "accuracy", None)
        return accuracy() if callable(accuracy) else None

    @property
    def corrects(self) -> bool:
        return callable(getattr(self.inner, "correct", None))


def _adapter_of(thing: Any, confidence: bool) -> Model | None:
    """Of an object of a framework that is no estimator. Imports none that is not imported."""
    if is_torch_module(thing) and not callable(getattr(thing, "predict_batch", None)):
        from clipper_container.adapters.torch import TorchModel

        return TorchModel(thing)
    if _is_of(thing, "xgboost", "Booster"):
        from clipper_container.adapters.xgboost import XgboostModel

        return XgboostModel(thing, confidence=confidence)
    return None


def is_torch_module(thing: Any) -> bool:
    """Is it a torch.nn.Module? Imports nothing."""
    return _is_of(thing, "torch.nn", "Module")


def _is_of(thing: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)


def as_model(thing: Any, confidence: bool = True) -> Model:
    """Make a `Model` of a Model, a class of them, an estimator, or a function.

    confidence: an estimator that knows probabilities sends the largest as the confidence of each
    row. Raises: TypeError for anything else, naming what would do.
    """
    if isinstance(thing, type):
        if not callable(getattr(thing, "predict_batch", None)):
            raise TypeError(
                f"class {thing.__name__!r} has no predict_batch(self, inputs); subclass"
                " clipper_container.Model"
            )
        thing = thing()
    if isinstance(thing, Model):
        return thing
    if (adapter := _adapter_of(thing, confidence)) is not None:
        return adapter
    if callable(getattr(thing, "predict_batch", None)):
        return BorrowedModel(thing)
    if callable(getattr(thing, "predict", None)):
        from clipper_container.adapters.sklearn import EstimatorModel

        return EstimatorModel(thing, confidence=confidence)
    if callable(thing):
        return FunctionModel(thing)
    raise TypeError(
        f"cannot serve a {type(thing).__name__}: give a function, an estimator with predict(), or a"
        " Model"
    )
