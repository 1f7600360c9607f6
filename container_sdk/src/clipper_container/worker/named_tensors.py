"""Runs a model with named tensors: the records of a batch become a dict of arrays, and the dict of
arrays that it returns becomes records (docs/wire.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clipper_container.model import Model, Scored, UserValue
from clipper_container.schema import InvalidTensor, Tensors, is_named, type_text
from clipper_container.worker.outputs import InvalidOutput, as_array


class RecordModel(Model):
    """Adapts a model with named tensors to batches of records.

    inputs, outputs: its tensors; None for a side with one unnamed tensor. row_by_row: the model
    takes one row and returns one output.
    """

    def __init__(
        self,
        inner: Model,
        inputs: Tensors | None,
        outputs: Tensors | None,
        name: str,
        row_by_row: bool,
    ) -> None:
        self.inner, self.inputs, self.outputs = inner, inputs, outputs
        self.name, self.row_by_row = name, row_by_row
        self.input = type_text(inner.input) if inputs is None else str(inputs)
        self.output = type_text(inner.output) if outputs is None else str(outputs)
        self.batch_max, self.sessions, self.tables = inner.batch_max, inner.sessions, inner.tables

    @property
    def opens_batches(self) -> bool:
        """True if `predict_batch` takes the records of a batch, not those of a row."""
        return self.inputs is not None and not self.row_by_row

    def predict_batch(self, inputs: UserValue, *sessions: object) -> UserValue:
        """Open the records, call the model, and pack what it returns."""
        return self._records(self.inner.predict_tensors(self._opened(inputs), *sessions), inputs)

    async def begin(self, inputs: UserValue, *sessions: object) -> UserValue:
        """Do the same for an async model, which is awaited."""
        inner: UserValue = self.inner
        return self._records(await inner.begin(self._opened(inputs), *sessions), inputs)

    def _opened(self, inputs: UserValue) -> UserValue:
        """Return the records of a batch, or that of a row, as the model takes them."""
        if self.inputs is None:
            return inputs
        if self.row_by_row:
            return self.inputs.unpack(inputs)
        return self.inputs.unpack_many(inputs, copy=False)

    def _records(self, returned: UserValue, inputs: UserValue) -> UserValue:
        """Return the outputs of a batch, or of a row, as records."""
        n = 1 if self.row_by_row else len(inputs)
        if isinstance(returned, Scored):
            packed = self._packed(returned.outputs, n)
            return Scored(packed, returned.confidence, returned.qualifiers)
        return self._packed(returned, n)

    def _packed(self, returned: object, n: int) -> object:
        if self.outputs is None:
            return returned
        if isinstance(returned, tuple) and len(returned) == len(self.outputs) > 1:
            returned = dict(zip(self.outputs.by_name, returned, strict=True))
        if not isinstance(returned, (dict, Mapping)):
            if len(self.outputs) > 1:
                raise InvalidOutput(
                    f"model '{self.name}' returned a {type(returned).__name__}; return a dict of"
                    f" {self.outputs}."
                )
            returned = {next(iter(self.outputs.by_name)): returned}
        arrays = returned
        try:
            if any(type(value) is not np.ndarray for value in returned.values()):
                arrays = {name: _array_or_list(value) for name, value in returned.items()}
            if self.row_by_row:
                return self.outputs.pack(arrays)
            packed = self.outputs.pack_many(arrays)
            if len(packed) != n:
                first = self.outputs.specs[0].name
                raise InvalidTensor(
                    first, f"tensor {first!r} has {len(packed)} rows for a batch of {n}."
                )
            return packed
        except InvalidTensor as error:
            raise InvalidOutput(f"model '{self.name}' returned wrong outputs: {error}") from None

    def correct(self, inputs: UserValue, labels: UserValue, sessions: UserValue) -> None:
        """Open the records and call the model's correct()."""
        given = inputs if self.inputs is None else self.inputs.unpack_many(inputs)
        self.inner.correct(given, labels, sessions)

    def accuracy(self) -> float | None:
        """Return the model's accuracy, if it reports one."""
        return self.inner.accuracy()

    @property
    def corrects(self) -> bool:
        """Return True if the model learns from feedback."""
        return self.inner.corrects


def with_tensors(model: Model, input: str, output: str, name: str, row_by_row: bool) -> Model:
    """Return the model itself, or adapted to records if its input or output has named tensors.

    input, output: types as text. Raises: what the model's check_input raises.
    """
    model.check_input(is_named(input))
    if not is_named(input) and not is_named(output):
        return model
    inputs = Tensors.parse(input) if is_named(input) else None
    outputs = Tensors.parse(output) if is_named(output) else None
    return RecordModel(model, inputs, outputs, name, row_by_row)


def _array_or_list(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_array_or_list(each) if hasattr(each, "detach") else each for each in value]
    array = as_array(value)
    return value if array is None else array
