"""What a user writes: a `Model`, or a plain function. Numpy is not imported here (see `__main__`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scored:
    """Predictions with a confidence for each.

    outputs: what `predict_batch` would return without it, one output a row.
    confidence: one number a row, sent as f32; by custom between 0 and 1.
    """

    outputs: Any
    confidence: Any


class Model(ABC):
    """A model: subclass it and write `predict_batch`.

    input: type of one row: "f64[64]", "f32[3,224,224]", "f64[*]" (rows differ in length), "str", "bytes", or "any".
    output: type of one output, or "any".
    batch_max: most rows that one batch may have; 0 for no limit of the model's own.
    """

    input: str = "any"
    output: str = "any"
    batch_max: int = 0

    def load(self) -> None:  # noqa: B027  # a hook: most models need none
        """Called once, in the model's own process, before the first batch. Open files, sockets and devices here."""

    @abstractmethod
    def predict_batch(self, inputs: Any) -> Any:
        """Return one output for each row of `inputs`, in the same order.

        inputs: rows of one shape: ndarray (n, *shape), read-only, aligned to 64 bytes; rows that differ in length: list
            of 1-d ndarrays; str: list[str]; bytes: list[memoryview]. They may be kept.
        Returns: an ndarray (n, ...), or a list of n numbers, strs, bytes or arrays; or `Scored` around either.
        Raises: whatever it likes; the batch fails with that traceback, and the process lives on.
        """


class FunctionModel(Model):
    """A plain function as a model."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.input = getattr(function, "input", "any")
        self.output = getattr(function, "output", "any")
        self.batch_max = getattr(function, "batch_max", 0)

    def predict_batch(self, inputs: Any) -> Any:
        return self.function(inputs)


class BorrowedModel(Model):
    """Any object with `predict_batch` and perhaps `load`, without our base class."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.input = getattr(inner, "input", "any")
        self.output = getattr(inner, "output", "any")
        self.batch_max = getattr(inner, "batch_max", 0)

    def load(self) -> None:
        load = getattr(self.inner, "load", None)
        if load is not None:
            load()

    def predict_batch(self, inputs: Any) -> Any:
        return self.inner.predict_batch(inputs)


def as_model(thing: Any, confidence: bool = True) -> Model:
    """Make a `Model` of a Model, a class of them, an estimator, or a function.

    confidence: an estimator that knows probabilities sends the largest as the confidence of each row.
    Raises: TypeError for anything else, naming what would do.
    """
    if isinstance(thing, type):
        if not callable(getattr(thing, "predict_batch", None)):
            raise TypeError(
                f"class {thing.__name__!r} has no predict_batch(self, inputs); subclass clipper_container.Model"
            )
        thing = thing()
    if isinstance(thing, Model):
        return thing
    if callable(getattr(thing, "predict_batch", None)):
        return BorrowedModel(thing)
    if callable(getattr(thing, "predict", None)):
        from clipper_container.adapters.sklearn import EstimatorModel

        return EstimatorModel(thing, confidence=confidence)
    if callable(thing):
        return FunctionModel(thing)
    raise TypeError(f"cannot serve a {type(thing).__name__}: give a function, an estimator with predict(), or a Model")
