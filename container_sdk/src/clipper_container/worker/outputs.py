"""Converts what a model returned to the rows of a REPLY. Output i belongs to row i."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from clipper_container.model import Scored, UserValue
from clipper_container.schema import InvalidTensor, Records, TensorSpec
from clipper_container.tensor_spec import plain_array, true_bools
from clipper_container.wire.frames import DTYPE_OF, QUALIFIERS_MAX, RANK_MAX, DType, Rows, pack_map

_NUMBERS: Final = frozenset(DTYPE_OF.values()) - {DType.BOOL}
_I64_MAX: Final = 2**63 - 1
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


class PairReturned(InvalidOutput):
    """A model returned several arrays, each with a value for every row, in place of the rows."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(
            f"model '{name}' returned {count} arrays, such as labels and scores, and one output per"
            " input is needed. Name them when you deploy it, outputs={'label': 'i64', 'score':"
            " 'f64'}, or return Scored(labels, confidence), or one array or list of rows."
        )


class SeveralKinds(InvalidOutput):
    """A model returned outputs of several kinds, which must be sent in one frame."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"model '{name}' returned outputs of several kinds, such as numbers and strings, for"
            " the rows of one batch; this server takes one kind for each batch."
        )


def to_parts(returned: object, n: int, name: str) -> list[Rows]:
    """Convert what `predict_batch` returned for a batch of `n` rows: to one batch of rows, or to
    several, one after another, if neighbours are of different kinds. So what a row is answered
    with does not depend on the others of its batch.

    returned: ndarray (n, ...) of numbers or strings; a list of n numbers, strs, bytes or arrays; an
    iterable of these; an object with to_numpy(), numpy() or __array__(); packed records; or
    `Scored` around either.

    Raises: WrongCount, PairReturned, InvalidOutput.
    """
    if isinstance(returned, Scored):
        parts = to_parts(returned.outputs, n, name)
        if returned.confidence is not None:
            confidence = _confidence(returned.confidence, n, name)
            for rows, start in _with_starts(parts):
                rows.confidence = confidence[start : start + rows.n]
        if returned.qualifiers is not None:
            qualifiers = _qualifiers(returned.qualifiers, n, name)
            for rows, start in _with_starts(parts if qualifiers is not None else []):
                rows.qualifiers = None if qualifiers is None else qualifiers[start : start + rows.n]
        return parts
    if isinstance(returned, Records):
        return [Rows(DType.BYTES, n, returned.data, returned.sizes.astype(np.uint32))]
    values = _values(returned, n, name)
    if len(values) != n:
        if isinstance(values, list) and len(values) > 1 and _are_columns(values, n):
            raise PairReturned(name, len(values))
        raise WrongCount(name, n, _count(len(values)))
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OUS":
        return [_array(values, name)]
    if isinstance(values, np.ndarray) and values.dtype.kind != "O":
        if values.ndim != 1:
            raise InvalidOutput(
                f"model '{name}' returned strings of shape {values.shape}; return one string per"
                " input."
            )
        return _list(values.tolist(), name)
    return _list(list(values), name)


def to_rows(returned: object, n: int, name: str) -> Rows:
    """Convert what `predict_batch` returned to one batch of rows. Raises: as to_parts, and
    SeveralKinds.
    """
    return one_part(to_parts(returned, n, name), name)


def one_part(parts: list[Rows], name: str) -> Rows:
    """Return the parts of a reply as one, of numbers in the type that holds them all. Raises:
    SeveralKinds.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(
        rows.lengths is not None or rows.status is not None or rows.data.shape[1:] != shape
        for rows in parts
        for shape in [first.data.shape[1:]]
    ):
        raise SeveralKinds(name)
    rows = _array(np.concatenate([rows.data for rows in parts]), name)
    if first.confidence is not None:
        rows.confidence = np.concatenate([cast(np.ndarray, each.confidence) for each in parts])
    if first.qualifiers is not None:
        rows.qualifiers = [one for each in parts for one in each.qualifiers or ()]
    return rows


def _with_starts(parts: list[Rows]) -> Iterator[tuple[Rows, int]]:
    """Yield each part with the number of its first row."""
    start = 0
    for rows in parts:
        yield rows, start
        start += rows.n


def _are_columns(values: Sequence[object], n: int) -> bool:
    """Return whether values are arrays or lists of n, of which each has a value for every row."""
    return all(
        isinstance(value, list) or (hasattr(value, "shape") and len(value.shape))
        for value in values
    ) and all(len(cast(Sized, value)) == n for value in values)


def _values(returned: object, n: int, name: str) -> Sequence[object] | np.ndarray:
    """Return `returned` as an ndarray of at least one dimension, or as a list."""
    if type(returned) is np.ndarray and returned.ndim:
        return returned
    if isinstance(returned, tuple) and len(returned) > 1 and _are_arrays(returned):
        raise PairReturned(name, len(returned))
    if isinstance(returned, list) and 1 < len(returned) == n and _are_columns_of_types(returned, n):
        raise PairReturned(name, len(returned))
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
    array = _as_output(returned, name)
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


def _are_arrays(values: Sequence[object]) -> bool:
    """Return whether all values are arrays of at least one dimension, or lists."""
    return all(isinstance(value, list) or len(getattr(value, "shape", ())) > 0 for value in values)


def _are_columns_of_types(values: Sequence[object], n: int) -> bool:
    """Return whether n arrays of n values each are of different types, as labels and scores are
    and the outputs of n rows are not."""
    first = values[0]
    return (
        isinstance(first, np.ndarray)
        and all(isinstance(value, np.ndarray) and value.shape[:1] == (n,) for value in values)
        and any(cast(np.ndarray, value).dtype != first.dtype for value in values)
    )


def as_array(value: object) -> np.ndarray | None:
    """Convert a pandas, polars, torch, jax or similar object to an ndarray; None if it is not
    one. Numbers of bfloat16 become f32.

    Raises: InvalidTensor for a masked array that hides other values than floats.
    """
    if isinstance(value, np.ndarray):
        return plain_array(value)
    if hasattr(value, "detach"):
        tensor: UserValue = value.detach().cpu()
        # numpy has no bfloat16
        is_brief = str(getattr(tensor, "dtype", "")) == "torch.bfloat16"
        value = tensor.float() if is_brief else tensor
    for verb in ("to_numpy", "numpy"):
        if callable(getattr(value, verb, None)):
            return plain_array(np.asarray(getattr(value, verb)()))
    if hasattr(value, "toarray"):
        return np.asarray(value.toarray())
    return plain_array(np.asarray(value)) if hasattr(value, "__array__") else None


def _as_output(value: object, name: str) -> np.ndarray | None:
    """Convert what a model returned to an ndarray; None if it is not one. Raises: InvalidOutput."""
    try:
        return as_array(value)
    except InvalidTensor as error:
        raise InvalidOutput(f"model '{name}' returned {error.message}.") from None


def _array(values: np.ndarray, name: str) -> Rows:
    n = len(values)
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
    data = np.ascontiguousarray(values, native)
    return Rows(dtype, n, true_bools(data) if dtype == DType.BOOL else data)


def _list(values: list[object], name: str) -> list[Rows]:
    """Return the rows of a list; of several kinds, those of each run of one kind."""
    kinds = {*map(type, values)}
    kind = kinds.pop()
    if not kinds and issubclass(kind, _SCALARS):  # a hot path
        array = np.asarray(values)
        if array.dtype.kind in "biu" or (array.dtype.kind == "f" and not issubclass(kind, int)):
            return [_array(array, name)]
    plain = [_plain(value, i, name) for i, value in enumerate(values)]
    whole = [value for value in plain if isinstance(value, int) and not isinstance(value, bool)]
    beyond = min(whole, default=0) >= 0 and max(whole, default=0) > _I64_MAX
    keys = [_kind(value, np.dtype(np.uint64 if beyond else np.int64)) for value in plain]
    parts = []
    start = 0
    of_run = keys[0]
    for end in range(1, len(plain) + 1):
        if end < len(plain) and (keys[end] == of_run or _are_vectors(keys[end], of_run)):
            of_run = keys[end] if of_run is _EMPTY else of_run
            continue
        parts.append(_run(plain[start:end], name))
        start, of_run = end, keys[end] if end < len(plain) else _EMPTY
    return parts


def _are_vectors(kind: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Return whether both are 1-d arrays, one of them without elements: such a row, as [], has no
    type of its own.
    """
    return (kind is _EMPTY and other[0] == 1) or (other is _EMPTY and kind[0] == 1)


_EMPTY = ("empty",)


def _plain(value: object, i: int, name: str) -> object:
    """Return the output of row `i` as a str, bytes, a number or an array."""
    if isinstance(value, (str, *_BYTES, *_SCALARS)):
        return value
    return _one_array(value, i, name)


def _kind(value: object, whole: np.dtype) -> tuple[object, ...]:
    """Return what outputs that are sent together have in common. whole: the type of int."""
    if isinstance(value, str):
        return (str,)
    if isinstance(value, _BYTES):
        return (bytes,)
    if isinstance(value, np.ndarray):
        if value.ndim == 1:
            return (1, value.dtype) if value.size else _EMPTY
        return (value.shape, value.dtype)
    if isinstance(value, np.generic):
        return ((), value.dtype)
    if isinstance(value, int) and not isinstance(value, bool):
        return ((), np.dtype(np.uint64) if value > _I64_MAX else whole)
    return ((), np.dtype(bool if isinstance(value, bool) else float))


def _run(values: list[object], name: str) -> Rows:
    """Return the rows of outputs of one kind."""
    first = values[0]
    if isinstance(first, str):
        return _joined(DType.STR, [_text(cast(str, value), name) for value in values])
    if isinstance(first, _BYTES):
        return _joined(DType.BYTES, [bytes(cast(bytes, value)) for value in values])
    if not isinstance(first, np.ndarray):
        return _array(_numbers(values, name), name)
    return _arrays(cast(list[np.ndarray], values), name)


def _text(value: str, name: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidOutput(
            f"model '{name}' returned a str that is not valid Unicode ({error.reason}):"
            f" {value!r:.60}"
        ) from None


def _joined(dtype: DType, values: list[bytes]) -> Rows:
    lengths = np.fromiter(map(len, values), np.uint32, len(values))
    return Rows(dtype, len(values), np.frombuffer(b"".join(values), np.uint8), lengths)


def _numbers(values: list[object], name: str) -> np.ndarray:
    """Return numbers of one kind as an array."""
    array = np.asarray(values)
    if array.dtype.kind in "fO" and all(isinstance(value, (int, np.integer)) for value in values):
        try:  # numpy would round integers beyond i64 to floats; use u64
            return np.asarray(values, np.uint64)
        except OverflowError:
            raise InvalidOutput(
                f"model '{name}' returned integers that do not fit in 64 bits."
            ) from None
    return array


def _arrays(arrays: list[np.ndarray], name: str) -> Rows:
    """Return arrays of one type, either of one shape or of one dimension."""
    if all(array.shape == arrays[0].shape for array in arrays):
        return _array(np.stack(arrays), name)
    # A row without elements, such as [], does not contribute a type.
    dtype = next((array.dtype for array in arrays if array.size), arrays[0].dtype)
    lengths = np.fromiter(map(len, arrays), np.uint32, len(arrays))
    rows = _array(np.concatenate([array.astype(dtype) for array in arrays]), name)
    return Rows(rows.dtype, len(arrays), rows.data, lengths)


def _one_array(value: object, i: int, name: str) -> np.ndarray:
    try:
        array = np.asarray(value) if isinstance(value, (list, tuple)) else _as_output(value, name)
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


def widened(rows: Rows, dtype: np.dtype) -> Rows:
    """Return numbers in the declared type if it holds all values of theirs, such as whole numbers
    in f64; other rows as they are.
    """
    own = rows.data.dtype
    if rows.dtype not in _NUMBERS or own == dtype or not np.can_cast(own, dtype, "safe"):
        return rows
    return replace(rows, dtype=DTYPE_OF[dtype], data=rows.data.astype(dtype))


def first_parts(parts: list[Rows], n: int) -> list[Rows]:
    """Return the first `n` rows of the parts of a reply, without padding."""
    return [
        slice_rows(rows, 0, min(rows.n, n - start))
        for rows, start in _with_starts(parts)
        if start < n
    ]


def slice_rows(rows: Rows, start: int, end: int) -> Rows:
    """Return the rows from `start` to before `end`, as views."""
    if start == 0 and end == rows.n:
        return rows
    found = Rows(rows.dtype, end - start, rows.data[start:end], text=rows.text)
    if rows.lengths is not None:
        found.lengths = rows.lengths[start:end]
        at = int(rows.lengths[:start].sum(dtype=np.uint64))
        found.data = rows.data[at : at + int(found.lengths.sum(dtype=np.uint64))]
    if rows.confidence is not None:
        found.confidence = rows.confidence[start:end]
    if rows.qualifiers is not None:
        found.qualifiers = rows.qualifiers[start:end]
    if rows.status is not None:
        found.status = rows.status[start:end]
    return found


def spread(parts: list[Rows], failed: NDArray[np.bool_], text: str) -> list[Rows]:
    """Place the rows of the successful rows at their positions and mark the others as failed.

    failed: bool (n,), with as many False as `parts` have rows.
    """
    ends = np.cumsum([rows.n for rows in parts])
    at = np.flatnonzero(~failed)[ends[:-1]].tolist()  # where each part but the first begins
    return [
        _spread(rows, failed[start:end], text)
        for rows, start, end in zip(parts, [0, *at], [*at, len(failed)], strict=True)
    ]


def _spread(rows: Rows, failed: NDArray[np.bool_], text: str) -> Rows:
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
