"""Converts what a model returned to the rows of a REPLY. Output i belongs to row i."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from clipper_container.model import Scored
from clipper_container.schema import InvalidTensor, Records, TensorSpec
from clipper_container.wire.frames import DTYPE_OF, QUALIFIERS_MAX, RANK_MAX, DType, Rows, pack_map

_SCALARS = (bool, int, float, np.generic)
_BYTES = (bytes, bytearray, memoryview)


class InvalidOutput(Exception):
    """A model returned something that is not one prediction per row. The text says what to
    change.
    """


class WrongCount(InvalidOutput):
    """A model returned another number of outputs than rows."""

    def __init__(self, name: str, n: int, returned: str) -> None:
        super().__init__(
            f"model '{name}' got a batch of {n} and returned {returned}. predict() takes a"
            " list/array of inputs and returns one output per input. For a function of one input,"
            " deploy it with row_by_row=True."
        )


def to_rows(returned: object, n: int, name: str) -> Rows:
    """Convert what `predict_batch` returned for a batch of `n` rows.

    returned: ndarray (n, ...) of numbers or strings; a list of n numbers, strs, bytes or arrays (of
    one shape, or 1-d of different lengths); an iterable of these; an object with to_numpy(),
    numpy() or __array__(); packed records; or `Scored` around either.

    Raises: WrongCount, InvalidOutput.
    """
    if isinstance(returned, Scored):
        rows = to_rows(returned.outputs, n, name)
        if returned.confidence is not None:
            rows.confidence = _confidence(returned.confidence, n, name)
        if returned.qualifiers is not None:
            rows.qualifiers = _qualifiers(returned.qualifiers, n, name)
        return rows
    if isinstance(returned, Records):
        return Rows(DType.BYTES, n, returned.data, returned.sizes.astype(np.uint32))
    values = _values(returned, n, name)
    if len(values) != n:
        raise WrongCount(name, n, _count(len(values)))
    if isinstance(values, np.ndarray) and values.dtype.kind != "O":
        return _array(values, name)
    return _list(list(values), name)


def _values(returned: object, n: int, name: str) -> Sequence[object] | np.ndarray:
    """Return `returned` as an ndarray of at least one dimension, or as a list."""
    if type(returned) is np.ndarray and returned.ndim:
        return returned
    if isinstance(returned, (list, tuple)):
        return returned
    if isinstance(returned, (str, *_BYTES, *_SCALARS)):
        raise WrongCount(name, n, "1 value")
    if returned is None:
        raise WrongCount(name, n, "None")
    if isinstance(returned, Mapping):
        raise InvalidOutput(
            f"model '{name}' returned a dict; deploy it with the types of its outputs, as"
            f" outputs={_types_of(returned)}."
        )
    if isinstance(returned, (set, frozenset)):
        raise InvalidOutput(
            f"model '{name}' returned a {type(returned).__name__}; return an array or a list, one"
            " output per input."
        )
    array = as_array(returned)
    if array is None:
        if not hasattr(returned, "__iter__"):
            raise InvalidOutput(
                f"model '{name}' returned a {type(returned).__name__}; return an array or a list,"
                " one output per input."
            )
        return list(returned)
    if array.ndim == 0:
        raise WrongCount(name, n, "1 value")
    return array


def as_array(value: object) -> np.ndarray | None:
    """Convert a pandas, polars, torch, jax or similar object to an ndarray; None if it is not
    one.
    """
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    for verb in ("to_numpy", "numpy"):
        if callable(getattr(value, verb, None)):
            return np.asarray(getattr(value, verb)())
    if hasattr(value, "toarray"):
        return np.asarray(value.toarray())
    return np.asarray(value) if hasattr(value, "__array__") else None


def _array(values: np.ndarray, name: str) -> Rows:
    n, kind = len(values), values.dtype.kind
    if kind in "US":
        if values.ndim != 1:
            raise InvalidOutput(
                f"model '{name}' returned strings of shape {values.shape}; return one string per"
                " input."
            )
        return _list(values.tolist(), name)
    native = values.dtype if values.dtype.isnative else values.dtype.newbyteorder("<")
    dtype = DTYPE_OF.get(native)
    if dtype is None:
        raise InvalidOutput(
            f"model '{name}' returned dtype {values.dtype}; cast it to a bool, int or float type of"
            " at most 64 bits."
        )
    if values.ndim - 1 > RANK_MAX:
        raise InvalidOutput(
            f"model '{name}' returned shape {values.shape}; one output has at most {RANK_MAX}"
            " dimensions."
        )
    if 0 in values.shape[1:]:
        if values.ndim != 2:
            raise InvalidOutput(
                f"model '{name}' returned shape {values.shape}: outputs without elements."
            )
        return Rows(dtype, n, np.empty(0, native), np.zeros(n, np.uint32))
    return Rows(dtype, n, np.ascontiguousarray(values, native))


def _list(values: list[object], name: str) -> Rows:
    first = values[0]
    if isinstance(first, str):
        return _joined(DType.STR, [_text(value, i, name) for i, value in enumerate(values)])
    if isinstance(first, _BYTES):
        return _joined(DType.BYTES, [_blob(value, i, name) for i, value in enumerate(values)])
    if isinstance(first, _SCALARS):
        return _array(_numbers(values, name), name)
    return _arrays(values, name)


def _text(value: object, i: int, name: str) -> bytes:
    if not isinstance(value, str):
        raise _mixed(name, "a str", i, value)
    return value.encode("utf-8", "replace")


def _blob(value: object, i: int, name: str) -> bytes:
    if not isinstance(value, _BYTES):
        raise _mixed(name, "bytes", i, value)
    return bytes(value)


def _joined(dtype: DType, values: list[bytes]) -> Rows:
    lengths = np.fromiter(map(len, values), np.uint32, len(values))
    return Rows(dtype, len(values), np.frombuffer(b"".join(values), np.uint8), lengths)


def _numbers(values: list[object], name: str) -> np.ndarray:
    for i, value in enumerate(values):
        if not isinstance(value, _SCALARS):
            raise _mixed(name, "a number", i, value)
    array = np.asarray(values)
    if array.dtype.kind in "fO" and all(isinstance(value, (int, np.integer)) for value in values):
        try:  # numpy would round integers beyond i64 to floats; use u64
            return np.asarray(values, np.uint64)
        except OverflowError:
            raise InvalidOutput(
                f"model '{name}' returned integers that do not fit in 64 bits."
            ) from None
    return array


def _arrays(values: list[object], name: str) -> Rows:
    arrays = [_one_array(value, i, name) for i, value in enumerate(values)]
    if all(array.shape == arrays[0].shape for array in arrays):
        return _array(np.stack(arrays), name)
    if any(array.ndim != 1 for array in arrays):
        shapes = sorted({array.shape for array in arrays})
        raise InvalidOutput(
            f"model '{name}' returned outputs of different shapes {shapes[:4]}; only 1-d outputs"
            " may differ in length."
        )
    # A row without elements, such as [], does not contribute a type.
    dtype = np.result_type(*{array.dtype for array in arrays if array.size})
    lengths = np.fromiter(map(len, arrays), np.uint32, len(arrays))
    rows = _array(np.concatenate([array.astype(dtype) for array in arrays]), name)
    return Rows(rows.dtype, len(arrays), rows.data, lengths)


def _one_array(value: object, i: int, name: str) -> np.ndarray:
    try:
        array = np.asarray(value) if isinstance(value, (list, tuple)) else as_array(value)
    except ValueError as error:
        raise InvalidOutput(
            f"model '{name}' returned for row {i} a ragged nested list; one output is one array."
        ) from error
    if array is None or array.dtype.kind not in "biuf":
        raise InvalidOutput(
            f"model '{name}' returned for row {i} {_a(value)}; an output is a number, a str, bytes,"
            " or an array of numbers."
        )
    return array


def _mixed(name: str, first: str, i: int, value: object) -> InvalidOutput:
    return InvalidOutput(
        f"model '{name}' returned {first} for row 0 and {_a(value)} for row {i}; all outputs are of"
        " one kind."
    )


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _confidence(values: object, n: int, name: str) -> NDArray[np.float32]:
    try:
        confidence = np.ascontiguousarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidOutput(
            f"model '{name}' returned a confidence that is not an array of numbers."
        ) from error
    if confidence.shape != (n,):
        raise InvalidOutput(
            f"model '{name}' got a batch of {n} and returned a confidence of shape"
            f" {confidence.shape}; return one per row."
        )
    return confidence


def _qualifiers(values: object, n: int, name: str) -> list[bytes] | None:
    """Return a msgpack map per row, b"" for a row without; None when no row has any."""
    if not isinstance(values, (list, tuple)) or len(values) != n:
        got = (
            f"{len(values)} of them"
            if isinstance(values, (list, tuple))
            else f"a {type(values).__name__}"
        )
        raise InvalidOutput(
            f"model '{name}' got a batch of {n} and returned as qualifiers {got};"
            " return a list, one dict per row."
        )
    packed = [_packed(value, i, name) for i, value in enumerate(values)]
    return packed if any(packed) else None


def _packed(value: object, i: int, name: str) -> bytes:
    if not value and (value is None or isinstance(value, dict)):
        return b""
    if not isinstance(value, dict):
        raise InvalidOutput(
            f"model '{name}' returned as the qualifiers of row {i} a {type(value).__name__}; return"
            " a dict."
        )
    plain = {
        key: each.item() if isinstance(each, np.generic) else each for key, each in value.items()
    }
    for key, each in plain.items():
        if not isinstance(key, str) or not isinstance(each, (str, bool, int, float)):
            raise InvalidOutput(
                f"model '{name}' returned for row {i} the qualifier {key!r:.60} = {each!r:.60}; a"
                " qualifier has a name and is a str, bool, int or float."
            )
    try:
        packed = pack_map(plain)
    except (OverflowError, ValueError) as error:
        raise InvalidOutput(
            f"model '{name}': the qualifiers of row {i} cannot be sent: {error}."
        ) from None
    if len(packed) > QUALIFIERS_MAX:
        raise InvalidOutput(
            f"model '{name}' returned for row {i} qualifiers of {len(packed)} bytes; at most"
            f" {QUALIFIERS_MAX} are sent."
        )
    return packed


def _count(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"


def first_rows(rows: Rows, n: int) -> Rows:
    """Return the first `n` rows, without padding."""
    if n == rows.n:
        return rows
    confidence = None if rows.confidence is None else rows.confidence[:n]
    qualifiers = None if rows.qualifiers is None else rows.qualifiers[:n]
    if rows.lengths is None:
        return Rows(rows.dtype, n, rows.data[:n], None, confidence, qualifiers=qualifiers)
    lengths = rows.lengths[:n]
    data = rows.data[: int(lengths.sum(dtype=np.uint64))]
    return Rows(rows.dtype, n, data, lengths, confidence, qualifiers=qualifiers)


def spread(rows: Rows, failed: NDArray[np.bool_], text: str) -> Rows:
    """Place the rows of the successful rows at their positions and mark the others as failed.

    failed: bool (n,), with as many False as `rows` has rows.
    """
    n, good = len(failed), ~failed
    spreaded = Rows(rows.dtype, n, rows.data, status=failed.astype(np.uint8), text=text)
    if rows.lengths is None:
        spreaded.data = np.zeros((n, *rows.data.shape[1:]), rows.data.dtype)
        spreaded.data[good] = rows.data
    else:
        spreaded.lengths = np.zeros(n, np.uint32)
        spreaded.lengths[good] = rows.lengths
    if rows.confidence is not None:
        spreaded.confidence = np.zeros(n, np.float32)
        spreaded.confidence[good] = rows.confidence
    if rows.qualifiers is not None:
        qualifiers = iter(rows.qualifiers)
        spreaded.qualifiers = [b"" if bad else next(qualifiers) for bad in failed]
    return spreaded


def _types_of(returned: Mapping[object, object]) -> str:
    """Return the types of arrays that a model returned, as far as they can be seen."""
    types = {}
    for name, value in returned.items():
        array = as_array(value)
        kind = "" if array is None else f"{array.dtype.kind}{8 * array.dtype.itemsize}"
        shape = () if array is None else array.shape[1:]
        try:
            found = TensorSpec.parse(str(name), kind.replace("b8", "bool")).dtype
        except InvalidTensor:
            found = "str"
        types[str(name)] = TensorSpec(str(name), found, shape).type
    return repr(types)
