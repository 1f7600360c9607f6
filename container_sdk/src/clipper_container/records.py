"""Records: the named tensors of one row as bytes (docs/wire.md), and batches of them.

Batches are packed and opened by the column: numpy computes where each part begins, for all rows at
once.
"""

import contextlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import cast, overload

import numpy as np
import numpy.typing as npt

from clipper_container.tensor_spec import (
    FREE,
    NUMPY_TYPES,
    ROW_BYTES_MAX,
    Array,
    Column,
    InvalidTensor,
    TensorSpec,
    true_bools,
)

FEW_ROWS = 10  # so few are packed and opened sooner one by one
PACKED_BYTES = 1 << 18  # of records that are packed together
GATHER_BYTES_MAX = 512  # longer rows are copied row by row, which is faster than by index
PART_BYTES_MAX = 1 << 40  # no record is larger; a product of sizes beyond it is damage

Bytes = npt.NDArray[np.uint8]
Sizes = npt.NDArray[np.int64]
Given = Array | Sequence[object]  # a tensor of many rows, not yet checked

_PADDINGS = [bytes(size) for size in range(8)]


@dataclass(frozen=True)
class Records:
    """The records of a batch that differ in length, one after another; a sequence of their bytes.

    data: all bytes. offsets: i64 (n + 1,), where each record begins, and where the last one ends.
    """

    data: Bytes
    offsets: Sizes

    @classmethod
    def of(cls, records: "Records | Array | Sequence[bytes | memoryview]") -> "Records":
        """Return a sequence of records as a batch."""
        if isinstance(records, Records):
            return records
        return cls.joined(records, np.fromiter(map(len, records), np.int64, len(records)))

    @classmethod
    def joined(cls, pieces: Iterable[bytes | memoryview], sizes: Sizes) -> "Records":
        """Return the batch of records whose bytes are these pieces. sizes: bytes of each record."""
        return cls(np.frombuffer(b"".join(pieces), np.uint8), offsets_of(sizes))

    @cached_property
    def sizes(self) -> Sizes:
        """The bytes of each record."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, at: int) -> memoryview: ...

    @overload
    def __getitem__(self, at: slice) -> "Records": ...

    def __getitem__(self, at: int | slice) -> "memoryview | Records":
        """Return the bytes of a record, or the batch of a slice of them."""
        if isinstance(at, slice):
            first, end, _ = at.indices(len(self))
            return Records(self.data, self.offsets[first : max(first, end) + 1])
        if not -len(self) <= at < len(self):
            raise IndexError(f"record {at} of a batch of {len(self)}")
        at %= len(self)
        return self.data.data[self.offsets[at] : self.offsets[at + 1]]

    def __iter__(self) -> Iterator[memoryview]:
        view = self.data.data
        return (view[start:end] for start, end in pairwise(self.offsets.tolist()))

    def padded(self, count: int) -> "Records":
        """Return the batch with `count` copies of its last record behind it."""
        return Records.of([*self, *([self[-1]] * count)])


@dataclass(frozen=True, slots=True)
class FixedRecords:
    """The records of a batch, all of `row_bytes` bytes, before they are packed.

    items: for each tensor its bytes or numbers, (n,). offsets: where each tensor begins in a
    record.
    """

    items: Sequence[Array]
    offsets: Sequence[int]
    row_bytes: int

    def __len__(self) -> int:
        return len(self.items[0])

    def packed(self) -> Bytes:
        """Return the records, u8 (n, row_bytes): a view of a single tensor that fills them."""
        n, first = len(self), self.items[0]
        if first.itemsize == self.row_bytes:
            return np.ascontiguousarray(first).view(np.uint8).reshape(n, self.row_bytes)
        rows = np.zeros((n, self.row_bytes), np.uint8)
        block = max(1, PACKED_BYTES // self.row_bytes)
        for start in range(0, n, block):  # a block stays in the processor's cache
            part = rows[start : start + block]
            for column, offset in zip(self.items, self.offsets, strict=True):
                field = part[:, offset : offset + column.itemsize].view(column.dtype)
                field[:, 0] = column[start : start + block]
        return rows


# -- many rows


def pack_columns(
    specs: Sequence[TensorSpec],
    n: int,
    columns: Mapping[str, Given],
    check: Callable[[TensorSpec, Array], object],
) -> Records:
    """Return the records of n rows.

    columns: for each tensor an array (n, ...), or a list of n values. check: called with the
    numbers of each tensor that has some. Raises: InvalidTensor.
    """
    parts = [
        _text_part(spec, columns[spec.name], n)
        if spec.is_text
        else _number_part(spec, columns[spec.name], n)
        for spec in specs
    ]
    for spec, part in zip(specs, parts, strict=True):
        if part.numbers is not None:
            check(spec, part.numbers)
    head = np.empty((n, sum(len(part.head) for part in parts)), "<u4")
    for i, numbers in enumerate(number for part in parts for number in part.head):
        head[:, i] = numbers
    bodies: list[list[Bytes] | _Pieces] = [[head.view(np.uint8)]]
    for part in parts:
        before = bodies[-1]
        if isinstance(part.body, _Pieces):
            bodies.append(part.body)
        elif isinstance(before, _Pieces):
            bodies.append([part.body])
        else:  # what has one size in all rows is copied together
            before.append(part.body)
    if len(bodies) == 1 and isinstance(bodies[0], list):
        rows = _joined_blocks(bodies[0], n)
        _check_size(rows.shape[1])
        return Records(rows.reshape(-1), np.arange(n + 1) * rows.shape[1])
    sizes = np.zeros(n, np.int64)
    pieces: list[Sequence[bytes | memoryview]] = []
    for body in bodies:
        if not isinstance(body, _Pieces):
            rows = _joined_blocks(body, n)
            body = _Pieces.of(rows, np.full(n, rows.shape[1], np.int64))
        padding = -body.sizes & 7
        sizes += body.sizes + padding
        pieces.append(body.pieces)
        if padding.any():
            pieces.append([_PADDINGS[size] for size in padding.tolist()])
    _check_size(int(sizes.max(initial=0)))
    woven: list[bytes | memoryview] = [b""] * (n * len(pieces))
    for i, column in enumerate(pieces):
        woven[i :: len(pieces)] = column
    return Records.joined(woven, sizes)


def open_columns(specs: Sequence[TensorSpec], records: Records) -> dict[str, Column]:
    """Return the tensors of records by name: an array (n, ...) for each of a fixed shape, a list of
    n arrays for a ragged one, a list of n strings or bytes for a scalar of them.

    Arrays of ragged tensors are views of the records. Raises: InvalidTensor for a damaged record.
    """
    data, begins, ends = records.data, records.offsets[:-1], records.offsets[1:]
    count = sum(spec.shape.count(FREE) + spec.is_text for spec in specs)
    first = padded(4 * count)
    damaged = ((begins | ends) & 7 != 0) | (records.sizes < first)
    if damaged.any():
        size = records.sizes[damaged][0]
        raise InvalidTensor("", f"a record of {size} bytes is cut short.")
    places = (begins >> 2)[:, None] + np.arange(count)
    head = iter(data[: len(data) & ~7].view("<u4")[places].astype(np.int64).T)
    at, columns = begins + first, {}
    for spec in specs:
        dims = [next(head) if size == FREE else np.full(len(at), size) for size in spec.shape]
        if spec.is_text:
            sizes = next(head)
        else:
            product = math.prod((np.float64(dim) for dim in dims), start=np.float64(1.0))
            counted = np.minimum(product * spec.numpy.itemsize, PART_BYTES_MAX)
            sizes = np.broadcast_to(counted, at.shape).astype(np.int64)
        if (sizes > ends - at).any():
            raise InvalidTensor(
                spec.name, f"tensor {spec.name!r}: its record is cut short or damaged."
            )
        columns[spec.name] = _opened(spec, data, at, at + sizes, dims)
        at = (at + sizes + 7) & ~7
    if (at != ends).any():
        i = int((at != ends).argmax())
        raise InvalidTensor(
            "", f"a record of {records.sizes[i]} bytes; its tensors have {at[i] - begins[i]}."
        )
    return columns


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The data of a tensor, a piece for each row. sizes: the bytes of each."""

    pieces: Sequence[bytes | memoryview]
    sizes: Sizes

    @classmethod
    def of(cls, data: Array, sizes: Sizes) -> "_Pieces":
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        return cls([view[start:end] for start, end in pairwise(offsets_of(sizes).tolist())], sizes)


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the records of a batch. head: its numbers in the head of a record, i64 (n,) each.
    body: u8 (n, bytes) if all rows have one size. numbers: those of all rows.
    """

    head: Sequence[Sizes]
    body: Bytes | _Pieces
    numbers: Array | None = None


def _number_part(spec: TensorSpec, value: Given, n: int) -> _Part:
    is_array = isinstance(value, np.ndarray) and value.dtype != object
    if n and (is_array or not spec.is_ragged):
        array = np.ascontiguousarray(spec.array(value, batch=True))
        zipped = zip(spec.shape, array.shape[1:], strict=True)
        head = [np.full(n, size) for mine, size in zipped if mine == FREE]
        return _Part(head, array.reshape(n, -1).view(np.uint8), array)
    rows = cast(Sequence[Array], value)  # what is no array yet is made one below
    flat = np.empty(0, object)
    if spec.shape == (FREE,):
        with contextlib.suppress(TypeError, ValueError):  # named below, if it is an error
            flat = np.concatenate(rows)
    if flat.dtype == spec.numpy and flat.ndim == 1 and type(flat) is np.ndarray:
        flat = true_bools(flat) if spec.dtype == "bool" else flat
        dims = np.fromiter(map(len, rows), np.int64, n).reshape(n, 1)
    else:
        rows = [spec.array(row) for row in value]
        flat = np.concatenate([np.empty(0, spec.numpy), *(row.reshape(-1) for row in rows)])
        dims = np.array([row.shape for row in rows], np.int64).reshape(n, len(spec.shape))
    head = [dims[:, i] for i, size in enumerate(spec.shape) if size == FREE]
    if n and (dims == dims[0]).all():
        return _Part(head, flat.reshape(n, math.prod(dims[0].tolist())).view(np.uint8), flat)
    return _Part(head, _Pieces.of(flat, dims.prod(axis=1) * spec.numpy.itemsize), flat)


def _text_part(spec: TensorSpec, value: Given, n: int) -> _Part:
    pieces: list[bytes]
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not spec.shape and {*map(type, value)} <= {str if spec.dtype == "str" else bytes}:
        pieces = _encoded(spec, cast(Sequence[str | bytes], value))
        dims = np.empty((n, 0), np.int64)
    elif spec.is_ragged:
        rows = [spec.array(row) for row in value]
        pieces = [text_bytes(spec, row) for row in rows]
        dims = np.array([row.shape for row in rows], np.int64).reshape(n, len(spec.shape))
    else:
        array = spec.array(value, batch=True)
        pieces = [text_bytes(spec, array[i, ...]) for i in range(n)]
        dims = np.empty((n, len(spec.shape)), np.int64)
    sizes = np.fromiter(map(len, pieces), np.int64, n)
    head = [dims[:, i] for i, size in enumerate(spec.shape) if size == FREE]
    return _Part([*head, sizes], _Pieces(pieces, sizes))


def _opened(
    spec: TensorSpec, data: Bytes, begins: Sizes, ends: Sizes, dims: Sequence[Sizes]
) -> Column:
    """Return a tensor of a batch. begins, ends: where the data of each row is."""
    size = 1 if spec.is_text else spec.numpy.itemsize
    spans = zip((begins // size).tolist(), (ends // size).tolist(), strict=True)
    if spec.is_text and not spec.shape:
        view = data.data
        if spec.dtype == "bytes":
            return [bytes(view[start:end]) for start, end in spans]
        try:
            return [str(view[start:end], "utf-8") for start, end in spans]
        except UnicodeDecodeError:
            raise damaged_strings(spec) from None
    n = len(begins)
    if not spec.is_text and (not spec.is_ragged or len(spec.shape) == 1):
        numbers = data[: len(data) & ~7].view(spec.numpy)
        if spec.is_ragged:
            rows = [numbers[start:end] for start, end in spans]
            if spec.dtype == "bool":
                check_bools(spec, np.concatenate(rows))
            return rows
        count = math.prod(spec.shape)
        if count * size <= GATHER_BYTES_MAX:
            column = numbers[(begins // size)[:, None] + np.arange(count)]
        else:
            column = np.stack([numbers[start:end] for start, end in spans])
        if spec.dtype == "bool":
            check_bools(spec, column)
        found: Array = column.reshape(n, *spec.shape)
        return found
    shapes = np.stack(dims, axis=1).tolist()
    open_one = strings_of if spec.is_text else shaped
    opened = [
        open_one(spec, tuple(shape), data[start * size : end * size])
        for shape, (start, end) in zip(shapes, spans, strict=True)
    ]
    return column_of(spec, opened)


def offsets_of(sizes: Sizes | npt.NDArray[np.uint32]) -> Sizes:
    """Return where each row begins, and where the last one ends."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _check_size(size: int) -> None:
    if size > ROW_BYTES_MAX:
        raise InvalidTensor("", f"a row of {size} bytes; at most {ROW_BYTES_MAX} are possible.")


def _joined_blocks(blocks: Sequence[Bytes], n: int) -> Bytes:
    """Return u8 (n, bytes): the rows of blocks side by side, each padded."""
    joined = np.zeros((n, sum(padded(block.shape[1]) for block in blocks)), np.uint8)
    at = 0
    for block in blocks:
        joined[:, at : at + block.shape[1]] = block
        at += padded(block.shape[1])
    return joined


def as_items(column: Array) -> Array:
    """Return numbers (n, ...) as n items of bytes, of which numpy copies each in one go."""
    rows = column.reshape(len(column), math.prod(column.shape[1:]))
    if rows.shape[1] != 1 and rows.strides[1] != rows.itemsize:
        rows = np.ascontiguousarray(rows)
    items: Array = rows.view(f"V{rows.shape[1] * rows.itemsize}") if rows.shape[1] != 1 else rows
    return items[:, 0]


def column_of(spec: TensorSpec, rows: list[Array]) -> Column:
    """Return a tensor of a batch by its rows."""
    if spec.is_ragged:
        return rows
    if spec.is_text and not spec.shape:
        return [row.item() for row in rows]
    column = np.empty((len(rows), *spec.shape), spec.numpy)
    for i, row in enumerate(rows):
        column[i] = row
    return column


# -- one row


def padded(size: int) -> int:
    """Return a number of bytes, rounded up to a multiple of 8."""
    return size + (-size & 7)


def put(parts: list[bytes], data: bytes) -> None:
    """Append the data of a tensor and its padding."""
    parts.append(data)
    if padding := -len(data) & 7:
        parts.append(_PADDINGS[padding])


def check_bools(spec: TensorSpec, array: Array) -> None:
    """Check the bytes of bools. Raises: InvalidTensor."""
    if array.size and array.view(np.uint8).max() > 1:
        raise InvalidTensor(spec.name, f"tensor {spec.name!r}: a bool is 0 or 1.")


def shaped(spec: TensorSpec, shape: tuple[int, ...], data: Array) -> Array:
    """Return the numbers of a tensor as an array. Raises: InvalidTensor."""
    array: Array = data.view(NUMPY_TYPES[spec.dtype])
    try:
        array = array if len(shape) == 1 else array.reshape(shape)
    except ValueError:  # sizes such as 0 x 2**32 x 2**32: no bytes, but too large for numpy
        raise InvalidTensor(spec.name, f"tensor {spec.name!r} has the shape {shape}.") from None
    if spec.dtype == "bool":
        check_bools(spec, array)
    return array


def text_bytes(spec: TensorSpec, array: Array) -> bytes:
    """Return the data of strings: with dimensions, a u32 length of each; then their bytes."""
    items = _encoded(spec, array.reshape(-1))
    if not spec.shape:
        return items[0]
    return struct.pack(f"<{len(items)}I", *map(len, items)) + b"".join(items)


def _encoded(spec: TensorSpec, items: Iterable[str | bytes]) -> list[bytes]:
    try:
        return [item.encode() if isinstance(item, str) else bytes(item) for item in items]
    except UnicodeEncodeError as error:
        raise InvalidTensor(spec.name, f"tensor {spec.name!r}: {error}.") from None


def damaged_strings(spec: TensorSpec) -> InvalidTensor:
    """Return the error of strings that cannot be read."""
    return InvalidTensor(spec.name, f"tensor {spec.name!r}: its strings are damaged.")


def strings_of(spec: TensorSpec, shape: tuple[int, ...], data: Array) -> Array:
    """Return the strings of a tensor as an array of objects. Raises: InvalidTensor."""
    count = math.prod(shape)
    raw = data.tobytes()
    if not spec.shape:
        items = [raw]
    else:
        if 4 * count > len(raw):
            raise damaged_strings(spec)
        lengths = struct.unpack_from(f"<{count}I", raw)
        at, items = 4 * count, []
        for length in lengths:
            items.append(raw[at : at + length])
            at += length
        if at != len(raw):
            raise damaged_strings(spec)
    try:
        values: list[object] = [*map(bytes.decode, items)] if spec.dtype == "str" else [*items]
    except UnicodeDecodeError:
        raise damaged_strings(spec) from None
    array = np.empty(count, object)
    array[:] = values
    return _reshaped(spec, array, shape)


def _reshaped(spec: TensorSpec, array: Array, shape: tuple[int, ...]) -> Array:
    try:
        return array.reshape(shape)
    except ValueError:
        raise InvalidTensor(spec.name, f"tensor {spec.name!r} has the shape {shape}.") from None
