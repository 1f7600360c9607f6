"""The interface of models: `Model`, `Scored`, and adapters for plain functions and objects.

This module does not import numpy (see `__main__`).
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UserValue = Any
"""A value whose type only its user knows: the inputs of a model, its outputs, a label, an object to
serve.
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """Predictions with a confidence or qualifiers for each row.

    outputs: what `predict_batch` would return without it, one output per row.

    confidence: one number per row, sent as f32, usually from 0 to 1; None for none.

    qualifiers: named values of each row: a list of n dicts (None for a row without), from str to
    str, bool, int or float, at most 1 KiB per row. A decider can use them, and they are returned
    with the answer.
    """

    outputs: UserValue
    confidence: UserValue = None
    qualifiers: UserValue = None


@dataclass(frozen=True, slots=True)
class RowPart:
    """The next part of the answer to one row of a batch: what a `predict_batch` that is a generator
    yields. One that takes single rows (row_by_row) yields outputs as they are.

    row: the index of the row in the batch.  output: of this part.  confidence: in the answer until
    now, or None.
    """

    row: int
    output: UserValue
    confidence: float | None = None


class OneRowFailed(Exception):
    """A model raises it for a batch in which a row failed that does not mention the others: they
    are evaluated singly, and only the bad rows fail.
    """


class SeveralOutputs(TypeError):
    """A model returned several outputs for each row where one is expected, and no batch will have
    one. The text names them, and says what to change.
    """


def session_of(user: str) -> int:
    """Return the number (u64) of a user, session or region as models see it; 0 for the empty
    string.
    """
    return (
        int.from_bytes(hashlib.blake2b(user.encode(), digest_size=8).digest(), "little")
        if user
        else 0
    )


class Model(ABC):
    """A model: subclass it and write `predict_batch`.

    input: type of one row: "f64[64]", "f32[3,224,224]", "f64[*]" (rows of different lengths),
    "str", "bytes", or "any". output: type of one output, or "any". Either may be a dict of types by
    name, {"ids": "i64[*]", "mask": "i64[*]"}: then `predict_batch` takes, or returns, a dict of
    arrays. batch_max: most rows of one batch; 0 for no limit.

    sessions: True to also receive the user of each row: `predict_batch(self, inputs, sessions)`
    with sessions as ndarray (n,) of u64, `clipper_container.session_of(user)` each, 0 for none. The
    predictions of such a model are cached per session.

    tables: parameter tables of the model, by name: {"factors": {"dim": 8, "optimizer": "adagrad"}}.
    In the container `self.tables` is a `clipper_container.tables.Tables`, available from `load` on,
    to pull rows and push gradients.

    fork: False if the model must run in a process that was started anew, never in one forked from
    a process which has imported its frameworks.

    A model that learns from feedback also has `correct`, and may report its own `accuracy`.
    """

    input: str | Mapping[str, str] = "any"
    output: str | Mapping[str, str] = "any"
    batch_max: int = 0
    sessions: bool = False
    fork: bool = True
    tables: UserValue = None

    def load(self) -> None:  # noqa: B027  # a hook: most models need none
        """Open files, sockets and devices. Called once, in the model's own process, before the
        first batch.
        """

    @abstractmethod
    def predict_batch(self, inputs: UserValue) -> UserValue:
        """Return one output for each row of `inputs`, in the same order.

        inputs: rows of one shape: ndarray (n, *shape), read-only, aligned to 64 bytes; rows of
        different lengths: list of 1-d ndarrays; str: list[str]; bytes: list[memoryview]. The model
        may keep them.

        Returns: an ndarray (n, ...), or a list of n numbers, strs, bytes or arrays; or `Scored`
        around either. It may be a generator of `RowPart`s, in any order of the rows: a query with
        stream=True gets each as it is yielded, as a batch of one row, and any other query their
        whole.

        Raises: any exception; the batch fails with its traceback and the process goes on.
        """

    def predict_tensors(self, inputs: UserValue, *sessions: object) -> UserValue:
        """Return the outputs of a batch of a model with named inputs or outputs; by default what
        `predict_batch` returns.

        inputs: a dict of arrays (n, *shape), read-only, whose rows may lie apart; of lists of n
        arrays for tensors whose rows differ in shape, and of lists of n strs or bytes for scalars
        of them; or as for `predict_batch`, if the input has no names.

        Returns: a dict of arrays (n, ...) or lists of n; or `Scored` around one.
        """
        return self.predict_batch(inputs, *sessions)

    def check_input(self, named: bool) -> None:  # noqa: B027  # a hook: most models take any
        """Refuse an input of the wrong kind before the model serves. named: it has named tensors.

        Raises: any exception; the container ends with it.
        """

    def correct(self, inputs: UserValue, labels: UserValue, sessions: UserValue) -> None:  # noqa: B027  # a hook: most models do not learn
        """Learn from feedback: `labels[i]` is the correct output for `inputs[i]`. Only called when
        overridden.

        inputs: as for `predict_batch`. labels: ndarray (n, ...) or list, as `predict_batch`
        returns. sessions: ndarray (n,) of u64, see the class.

        Called between batches on the thread that predicts, when no batch waits. Each feedback
        reaches each running replica at most once (with tables: one replica only), so persist what
        must survive, or push it to a table.

        Raises: any exception; it is logged and counted, and predictions go on.
        """

    def accuracy(self) -> float | None:
        """Return the model's own estimate of its accuracy, from 0 to 1, or None. Called now and
        then after `correct`.
        """
        return None

    @property
    def corrects(self) -> bool:
        """Return True if the model learns from feedback."""
        return type(self).correct is not Model.correct


class _Adapter(Model):
    """Adapts an object that is no Model and may have some of its attributes."""

    def __init__(self, inner: UserValue) -> None:
        self.inner = inner
        self.input = getattr(inner, "input", "any")
        self.output = getattr(inner, "output", "any")
        self.batch_max = getattr(inner, "batch_max", 0)
        self.sessions = bool(getattr(inner, "sessions", False))
        self.fork = bool(getattr(inner, "fork", True))


class FunctionModel(_Adapter):
    """Adapts a plain function."""

    def predict_batch(self, inputs: UserValue, *sessions: object) -> UserValue:
        """Call the function."""
        return self.inner(inputs, *sessions)


class BorrowedModel(_Adapter):
    """Adapts an object that has `predict_batch` but does not inherit from Model."""

    def load(self) -> None:
        """Call the object's load(), if it has one."""
        load = getattr(self.inner, "load", None)
        if load is not None:
            load()

    def predict_batch(self, inputs: UserValue, *sessions: object) -> UserValue:
        """Call the object's predict_batch()."""
        return self.inner.predict_batch(inputs, *sessions)

    def correct(self, inputs: UserValue, labels: UserValue, sessions: UserValue) -> None:
        """Call the object's correct()."""
        self.inner.correct(inputs, labels, sessions)

    def accuracy(self) -> float | None:
        """Return the object's accuracy, if it reports one."""
        accuracy = getattr(self.inner, "accuracy", None)
        return accuracy() if callable(accuracy) else None

    @property
    def corrects(self) -> bool:
        """Return True if the object has correct()."""
        return callable(getattr(self.inner, "correct", None))


def _adapter_of(thing: object, confidence: bool) -> Model | None:
    """Return the adapter of a framework's object that is no estimator; None if there is none.
    Imports no framework that is not imported.
    """
    if _is_of(thing, "sentence_transformers", "SentenceTransformer"):
        from clipper_container.adapters.sentences import SentenceModel

        return SentenceModel(thing)
    if _is_of(thing, "keras", "Model"):
        from clipper_container.adapters.keras import KerasModel

        return KerasModel(thing)
    if is_own_estimator(thing, "catboost", "CatBoost"):
        from clipper_container.adapters.catboost import CatboostModel

        return CatboostModel(thing, confidence)
    if is_torch_module(thing) and not callable(getattr(thing, "predict_batch", None)):
        from clipper_container.adapters.torch import TorchModel

        return TorchModel(thing)
    if _is_of(thing, "xgboost", "Booster"):
        from clipper_container.adapters.xgboost import XgboostModel

        return XgboostModel(thing, confidence=confidence)
    if is_own_estimator(thing, "xgboost", "XGBModel"):
        from clipper_container.adapters import xgboost

        return xgboost.adapted(thing, confidence)
    if is_own_estimator(thing, "lightgbm", "LGBMModel"):
        from clipper_container.adapters import lightgbm

        return lightgbm.adapted(thing, confidence)
    return None


def is_own_estimator(thing: object, framework: str, kind: str) -> bool:
    """Return whether it is an estimator of this framework, of its own class: one of a user's
    class may have another predict(). Imports nothing.
    """
    return type(thing).__module__.partition(".")[0] == framework and _is_of(thing, framework, kind)


def is_torch_module(thing: object) -> bool:
    """Return whether it is a torch.nn.Module. Imports nothing."""
    return _is_of(thing, "torch.nn", "Module")


def _is_of(thing: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)


def as_model(thing: UserValue, confidence: bool = True) -> Model:
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
