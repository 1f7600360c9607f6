"""Schemas: the named input and output tensors of a model, and the record that holds the tensors of
one row as bytes.

Text form: `{"ids": "i64[*]", "mask": "i64[*]"} -> {"embedding": "f32[384]"}`; a `*` is a size that
may differ from row to row. A model with one tensor without a name has the short form,
`f64[64] -> f64[10]`. docs/wire.md describes the record.
"""

import contextlib
import difflib
import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from clipper_container.model import UserValue
from clipper_container.records import (
    FEW_ROWS,
    FixedRecords,
    Given,
    Records,
    as_items,
    check_bools,
    column_of,
    open_columns,
    pack_columns,
    padded,
    put,
    shaped,
    strings_of,
    text_bytes,
)
from clipper_container.tensor_spec import (
    FREE,
    NAME_MAX,
    NUMPY_TYPES,
    RANK_MAX,
    ROW_BYTES_MAX,
    TEXTS,
    Array,
    Column,
    InvalidTensor,
    NumpyType,
    TensorSpec,
    given_type,
)

__all__ = [
    "FREE",
    "NAME_MAX",
    "NUMPY_TYPES",
    "RANK_MAX",
    "ROW_BYTES_MAX",
    "TENSORS_MAX",
    "TEXTS",
    "Array",
    "Column",
    "InvalidTensor",
    "Records",
    "Schema",
    "TensorSpec",
    "Tensors",
    "is_named",
    "type_text",
]

TENSORS_MAX = 64

Record = Array | bytes | memoryview
# A function of a sequence of arrays for each tensor, and of their types, that returns `data` and
# `offsets` of Records, or None if a value is not a contiguous 1-d array of the type.
PackVectors = Callable[[list[Given], list[NumpyType]], tuple[Array, Array] | None]
ColumnT = TypeVar("ColumnT", bound=Column)


@dataclass(frozen=True)
class Tensors:
    """The named tensors of one row, in order: the inputs of a model, or its outputs.

    The tensors of one row are one record, contiguous bytes; the layout is in docs/wire.md. If all
    tensors have fixed sizes, all records have `row_bytes` bytes and are u8 arrays; otherwise they
    are bytes of different lengths. finite: refuse NaN and infinities. Threads: any.
    """

    specs: tuple[TensorSpec, ...]
    finite: bool = field(default=False, compare=False)

    @classmethod
    def parse(cls, tensors: "Side") -> "Tensors":
        """Return the tensors of a JSON object or dict from name to type. Raises: InvalidTensor."""
        if isinstance(tensors, Tensors):
            return tensors
        if isinstance(tensors, str):
            try:
                tensors = json.loads(tensors, object_pairs_hook=_no_duplicates)
            except ValueError as error:
                raise InvalidTensor("", f"bad schema {str(tensors)[:100]!r}: {error}.") from None
        if not isinstance(tensors, Mapping) or not tensors:
            raise InvalidTensor(
                "", f'a schema is a dict of types by name such as {{"ids": "i64[*]"}}: {tensors!r}.'
            )
        if len(tensors) > TENSORS_MAX:
            raise InvalidTensor(
                "", f"a schema of {len(tensors)} tensors; at most {TENSORS_MAX} are possible."
            )
        for name in tensors:
            if not name:
                raise InvalidTensor("", "a tensor of a schema needs a name.")
        return cls.of(TensorSpec.parse(name, type) for name, type in tensors.items())

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> "Tensors":
        """Return the tensors of these specs. Raises: InvalidTensor if a row is too large."""
        tensors = cls(tuple(specs))
        size = sum(
            8 + math.prod(max(size, 1) for size in spec.shape) * spec.numpy.itemsize
            for spec in tensors.specs
        )
        if size > ROW_BYTES_MAX:
            raise InvalidTensor(
                "", f"a row of {tensors} has {size} bytes; at most {ROW_BYTES_MAX} are possible."
            )
        return tensors

    def to_json(self) -> dict[str, str]:
        """Return the types by name."""
        return {spec.name: spec.type for spec in self.specs}

    def __str__(self) -> str:
        return json.dumps(self.to_json(), ensure_ascii=False)

    def __len__(self) -> int:
        return len(self.specs)

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """The tensors by name."""
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def is_fixed(self) -> bool:
        """True if all rows have the same number of bytes."""
        return all(spec.is_fixed for spec in self.specs)

    @cached_property
    def row_bytes(self) -> int:
        """The bytes of a record; 0 if they differ."""
        return int(self._record.itemsize) if self.is_fixed else 0

    @property
    def row_type(self) -> str:
        """The type of a record as one row: `u8[64]` or `bytes`."""
        return f"u8[{self.row_bytes}]" if self.is_fixed else "bytes"

    def select(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of some of the tensors, in the order of the schema. Raises:
        InvalidTensor for an unknown one.
        """
        wanted = set(names)
        self._check_names(wanted, ())
        return tuple(name for name in self.by_name if name in wanted)

    # -- one row

    def arrays(self, values: object) -> dict[str, Array]:
        """Return the values of one row as arrays of the declared types, in order.

        values: a dict with a value for each tensor. Raises: InvalidTensor.
        """
        given = self._check(values)
        if not self.finite:
            return {spec.name: spec.array(given[spec.name]) for spec in self.specs}
        return {spec.name: self._checked(spec, spec.array(given[spec.name])) for spec in self.specs}

    def pack(self, values: object) -> Array | bytes:
        """Return the record of one row: u8 (row_bytes,) or bytes. Raises: InvalidTensor."""
        arrays = self.arrays(values)
        if not self.is_fixed:
            return self._joined(arrays)
        parts: list[bytes] = []
        for array in arrays.values():
            put(parts, array.tobytes())
        return np.frombuffer(b"".join(parts), np.uint8)

    def unpack(self, record: Record) -> dict[str, object]:
        """Return the tensors of a record by name: arrays, numpy scalars for shape (), and str or
        bytes. Arrays are views of the record. Raises: InvalidTensor for a damaged record.
        """
        arrays = self._open(np.frombuffer(record, np.uint8))
        return {
            spec.name: array if spec.shape else array[()]
            for spec, array in zip(self.specs, arrays, strict=True)
        }

    # -- many rows

    def rows_of(self, values: object) -> int:
        """Return the number of rows of a batch: a dict of arrays with the rows first, or of lists.

        Raises: InvalidTensor if a tensor is missing or unknown, or has another number of rows.
        """
        given = self._check(values)
        n, first = -1, ""
        for spec in self.specs:
            value = given[spec.name]
            if not isinstance(value, np.ndarray) and (
                not isinstance(value, Sized) or isinstance(value, (str, bytes, dict))
            ):
                raise InvalidTensor(
                    spec.name,
                    f"tensor {spec.name!r}: a batch is an array or a list of rows, not a"
                    f" {type(value).__name__}.",
                )
            try:
                rows = len(value)
            except TypeError:  # an array without dimensions
                raise InvalidTensor(
                    spec.name, f"tensor {spec.name!r}: a batch has its rows as first dimension."
                ) from None
            if n >= 0 and rows != n:
                raise InvalidTensor(
                    spec.name, f"tensor {spec.name!r} has {rows} rows, and {first!r} has {n}."
                )
            n, first = rows, first or spec.name
        return n

    def batch(self, values: object) -> tuple[int, dict[str, Column]]:
        """Return the number of rows, and each tensor as an array (n, ...) or, if its rows differ
        in shape, as a list of arrays. Raises: InvalidTensor.
        """
        n, given = self.rows_of(values), self._check(values)
        return n, {
            spec.name: self._checked(spec, _batched(spec, given[spec.name])) for spec in self.specs
        }

    def pack_many(self, values: object) -> Array | Records:
        """Return the records of a batch: u8 (n, row_bytes), or Records if they differ in length.

        values: a dict with an array (n, ...), or a list of n values, for each tensor; a list of
        dicts, a row each; or a DataFrame of pandas or polars, or an Arrow table or batch. Raises:
        InvalidTensor.
        """
        records = self._pack_exact(values)
        if records is not None:
            return records
        rows = self.by_tensor(values)
        return rows if isinstance(rows, Records) else rows.packed()

    def _pack_exact(self, values: object) -> Array | None:
        """Return the records of a batch of arrays that have the declared types and fixed sizes:
        the hot path of a container. None for any other batch.
        """
        if (
            not self.is_fixed
            or self.finite
            or type(values) is not dict
            or values.keys() != self.by_name.keys()
        ):
            return None
        n = -1
        for spec in self.specs:
            column = values[spec.name]
            if (
                type(column) is not np.ndarray
                or column.dtype != spec.numpy
                or column.ndim != 1 + len(spec.shape)
                or column.shape[1:] != spec.shape
                or n not in (-1, len(column))
            ):
                return None
            n = len(column)
        if len(values) == 1 and column.nbytes == n * self.row_bytes:
            return np.ascontiguousarray(column).view(np.uint8).reshape(n, self.row_bytes)
        rows = np.zeros(n, self._record)
        for name, column in values.items():
            rows[name] = column
        return rows.view(np.uint8).reshape(n, self.row_bytes)

    def by_tensor(
        self, values: object, pack_vectors: "PackVectors | None" = None
    ) -> FixedRecords | Records:
        """Return the records of a batch, not yet packed if all have `row_bytes` bytes.

        values: see `pack_many`. pack_vectors: packs lists of 1-d arrays if all tensors are numbers
        of a free length. Raises: InvalidTensor.
        """
        if isinstance(values, (list, tuple)):
            rows_given = [self._check(row) for row in values]
            table: object = {name: [row[name] for row in rows_given] for name in self.by_name}
        else:
            table = by_column(values)
        if self.is_fixed:
            columns = self.batch(table)[1].values()
            items = [as_items(np.asarray(column)) for column in columns]
            return FixedRecords(items, self._offsets, self.row_bytes)
        n, given = self.rows_of(table), self._check(table)
        if pack_vectors is not None and self._vector_types:
            packed = pack_vectors([given[name] for name in self.by_name], self._vector_types)
            if packed is not None:
                return Records(*packed)
        each = zip(*given.values(), strict=True) if n <= FEW_ROWS else ()
        with contextlib.suppress(InvalidTensor):  # named below, with all its rows in view
            few = [self.pack(dict(zip(given, row, strict=True))) for row in each]
            if few:
                return Records.of([*map(bytes, few)])
        return pack_columns(self.specs, n, given, self._checked)

    def unpack_many(
        self, records: Array | Records | Sequence[bytes | memoryview], copy: bool = True
    ) -> dict[str, Column]:
        """Return the tensors of records by name, with the rows as first dimension.

        records: u8 (n, row_bytes), or Records or a sequence of bytes. copy: False for views where
        all sizes are fixed, with the bytes of a record from row to row. Returns an array (n, ...)
        for each tensor of a fixed shape, contiguous if it is a copy; a list of n arrays for a
        ragged one; a list of n strings or bytes for a scalar of them.

        Raises: InvalidTensor for a damaged record.
        """
        if self.is_fixed:
            views = self._columns(np.ascontiguousarray(records, np.uint8)).items()
            return {name: np.ascontiguousarray(view) if copy else view for name, view in views}
        if len(records) > FEW_ROWS:
            return open_columns(self.specs, Records.of(records))
        rows = [self._open(np.frombuffer(record, np.uint8)) for record in records]
        return {
            spec.name: column_of(spec, [row[i] for row in rows])
            for i, spec in enumerate(self.specs)
        }

    def _columns(self, records: Array) -> dict[str, Array]:
        """Return a view of each tensor in the records, u8 (n, row_bytes)."""
        if records.ndim != 2 or records.shape[1] != self.row_bytes:
            raise InvalidTensor(
                "", f"records of shape {list(records.shape)}; a record of {self} has"
                f" {self.row_bytes} bytes."
            )  # fmt: skip
        by_type: dict[str, Array] = {}
        columns: dict[str, Array] = {}
        for spec, index in self._indices:  # a hot path: views of one type are sooner than fields
            view = by_type.get(spec.dtype)
            if view is None:
                view = by_type[spec.dtype] = records.view(spec.numpy)
            column = view[index]
            if len(spec.shape) > 1:
                column = column.reshape(len(records), *spec.shape)
            if spec.dtype == "bool":
                check_bools(spec, column)
            columns[spec.name] = column
        return columns

    @cached_property
    def _indices(self) -> list[tuple[TensorSpec, tuple[slice, slice | int]]]:
        """The place of each tensor in records of fixed sizes, seen as arrays of its type."""
        found: list[tuple[TensorSpec, tuple[slice, slice | int]]] = []
        for spec, offset in zip(self.specs, self._offsets, strict=True):
            at = offset // spec.numpy.itemsize
            part = slice(at, at + math.prod(spec.shape)) if spec.shape else at
            found.append((spec, (slice(None), part)))
        return found

    # -- names

    def _check(self, values: object) -> Mapping[str, Given]:
        if not isinstance(values, (dict, Mapping)):  # the latter is slow to ask
            raise InvalidTensor(
                self.specs[0].name,
                f"expected a dict of {self}, got {_kind_of(values)}.",
            )
        if values.keys() != self.by_name.keys():
            self._check_names(values, self.by_name)
        return values

    def _checked(self, spec: TensorSpec, column: ColumnT) -> ColumnT:
        if self.finite and spec.numpy.kind == "f":
            for array in column if isinstance(column, list) else (column,):
                if not np.isfinite(array).all():
                    raise InvalidTensor(
                        spec.name,
                        f"tensor {spec.name!r} holds NaN or an infinity, and this model was"
                        " deployed with finite=True.",
                    )
        return column

    def _check_names(self, names: Collection[str], needed: Iterable[str]) -> None:
        for name in names:
            if name not in self.by_name:
                close = difflib.get_close_matches(str(name), self.by_name, n=1)
                guess = f" - did you mean {close[0]!r}?" if close else "."
                raise InvalidTensor(
                    str(name), f"unknown tensor {str(name)[:NAME_MAX]!r}{guess} Expected: {self}."
                )
        for name in needed:
            if name not in names:
                raise InvalidTensor(name, f"tensor {name!r} is missing. Expected: {self}.")

    # -- records

    @cached_property
    def _vector_types(self) -> list[NumpyType]:
        """The types of the tensors if all are unchecked numbers of a free length; else none."""
        plain = all(spec.shape == (FREE,) and not spec.is_text for spec in self.specs)
        return [spec.numpy for spec in self.specs] if plain and not self.finite else []

    @cached_property
    def _record(self) -> NumpyType:
        """The numpy type of a record whose tensors have fixed sizes."""
        offsets, at = [], 0
        for spec in self.specs:
            offsets.append(at)
            at = padded(at + math.prod(spec.shape) * spec.numpy.itemsize)
        return np.dtype(
            {
                "names": list(self.by_name),
                "formats": [(spec.numpy, spec.shape) for spec in self.specs],
                "offsets": offsets,
                "itemsize": at,
            }
        )

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """The byte at which each tensor begins in a record of fixed sizes."""
        return tuple(sorted([field[1] for field in (self._record.fields or {}).values()]))

    @cached_property
    def _head(self) -> struct.Struct:
        """The sizes at the front of a record: for each tensor its free sizes, then, for strings
        and bytes, the number of bytes of its data.
        """
        count = sum(spec.shape.count(FREE) + spec.is_text for spec in self.specs)
        return struct.Struct(f"<{count}I")

    def _joined(self, arrays: Mapping[str, Array]) -> bytes:
        sizes: list[int] = []
        parts: list[bytes] = []
        for spec in self.specs:
            array = arrays[spec.name]
            for mine, size in zip(spec.shape, array.shape, strict=True):
                if mine == FREE:
                    sizes.append(size)
            if spec.is_text:
                data = text_bytes(spec, array)
                sizes.append(len(data))
            else:
                data = array.tobytes()
            put(parts, data)
        head = self._head.pack(*sizes)
        total = len(head) + sum(map(len, parts))
        if total > ROW_BYTES_MAX:
            raise InvalidTensor(
                "", f"a row of {total} bytes; at most {ROW_BYTES_MAX} are possible."
            )
        return b"".join((head, bytes(-len(head) & 7), *parts))

    def _open(self, record: Array) -> list[Array]:
        """Return the arrays of a record, in order."""
        if self.is_fixed:
            return [column[0, ...] for column in self._columns(record[None]).values()]
        if record.size < self._head.size:
            raise InvalidTensor("", f"a record of {record.size} bytes is cut short.")
        sizes = iter(self._head.unpack_from(record.data))
        at, arrays = padded(self._head.size), []
        for spec in self.specs:
            shape = tuple([next(sizes) if size == FREE else size for size in spec.shape])
            data_bytes = (
                next(sizes) if spec.is_text else math.prod(shape) * NUMPY_TYPES[spec.dtype].itemsize
            )
            if data_bytes > record.size - at:
                raise InvalidTensor(
                    spec.name, f"tensor {spec.name!r}: its record is cut short or damaged."
                )
            data = record[at : at + data_bytes]
            arrays.append(
                strings_of(spec, shape, data) if spec.is_text else shaped(spec, shape, data)
            )
            at = padded(at + data_bytes)
        if at != record.size:
            raise InvalidTensor("", f"a record of {record.size} bytes; its tensors have {at}.")
        return arrays


Side = str | Mapping[str, str] | Tensors  # the inputs of a model, or its outputs


@dataclass(frozen=True, slots=True)
class Schema:
    """The inputs and outputs of a model. A side with one tensor without a name is the short form,
    `f64[64]`; `any` is not known.

    inputs, outputs: named tensors; None for the short form. input, output: the type of one row as
    text, `f64[64]` or `{"ids": "i64[*]"}`.
    """

    input: str = "any"
    output: str = "any"
    inputs: Tensors | None = None
    outputs: Tensors | None = None

    @classmethod
    def parse(cls, text: "str | Schema") -> "Schema":
        """Return the schema of a text: `INPUTS -> OUTPUTS`, or only the inputs. Raises:
        InvalidTensor.
        """
        if isinstance(text, Schema):
            return text
        left, arrow, right = _parted(text)
        if not left or (arrow and not right):
            raise InvalidTensor("", f"bad schema {text[:100]!r}: write 'inputs -> outputs'.")
        return cls.of(left, right or "any")

    @classmethod
    def of(
        cls,
        inputs: "Side" = "any",
        outputs: "Side" = "any",
    ) -> "Schema":
        """Return the schema of two sides: types such as `f64[64]`, or named tensors. Raises:
        InvalidTensor.
        """
        sides = [
            side.strip() if isinstance(side, str) and not is_named(side) else Tensors.parse(side)
            for side in (inputs, outputs)
        ]
        for side in sides:
            if isinstance(side, str) and side != "any":
                TensorSpec.parse("", side)
        named = [side if isinstance(side, Tensors) else None for side in sides]
        return cls(str(sides[0]), str(sides[1]), named[0], named[1])

    def to_json(self) -> dict[str, str | dict[str, str]]:
        """Return {"inputs": ..., "outputs": ...}: a dict of types by name, or one type."""
        return {
            "inputs": self.input if self.inputs is None else self.inputs.to_json(),
            "outputs": self.output if self.outputs is None else self.outputs.to_json(),
        }

    def input_specs(self, unnamed: str = "input") -> tuple[TensorSpec, ...]:
        """Return the input tensors, as metadata lists them; none for `any`.

        unnamed: the name of a tensor without one.
        """
        return _listed(self.input, self.inputs, unnamed)

    def output_specs(self, unnamed: str = "output") -> tuple[TensorSpec, ...]:
        """Return the output tensors, as `input_specs` does the input tensors."""
        return _listed(self.output, self.outputs, unnamed)

    def __str__(self) -> str:
        return self.input if self.output == "any" else f"{self.input} -> {self.output}"


def is_named(type: object) -> bool:
    """Return whether a type is of named tensors: a dict of types, its JSON, or Tensors."""
    return not isinstance(type, str) or type.lstrip().startswith("{")


def type_text(type: Side) -> str:
    """Return a type as text: that of named tensors as JSON, another as it is. Raises:
    InvalidTensor.
    """
    return type if isinstance(type, str) and not is_named(type) else str(Tensors.parse(type))


def _listed(type: str, tensors: Tensors | None, unnamed: str) -> tuple[TensorSpec, ...]:
    if tensors is not None:
        return tensors.specs
    return () if type == "any" else (TensorSpec.parse(unnamed, type),)


def _parted(text: str) -> tuple[str, str, str]:
    """Return the text before an arrow, the arrow, and the text behind it; arrows within strings
    do not count.
    """
    if not isinstance(text, str):
        raise InvalidTensor("", f"a schema is a text 'inputs -> outputs', not {_kind_of(text)}.")
    start = text.lstrip()
    if not start.startswith("{"):
        left, arrow, right = text.partition("->")
        return left.strip(), arrow, right.strip()
    try:
        end = json.JSONDecoder().raw_decode(start)[1]
    except ValueError as error:
        raise InvalidTensor("", f"bad schema {text[:100]!r}: {error}.") from None
    rest = start[end:].strip()
    if rest and not rest.startswith("->"):
        raise InvalidTensor("", f"bad schema {text[:100]!r}: '->' is expected at {rest[:20]!r}.")
    return start[:end], rest[:2], rest[2:].strip()


def _no_duplicates(pairs: list[tuple[str, str]]) -> dict[str, str]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a tensor is named twice")
    return found


def by_column(table: UserValue) -> object:
    """Return a table of pandas, polars or Arrow as a dict of arrays; anything else as it is."""
    if isinstance(table, (dict, Mapping)):
        return table
    if hasattr(table, "to_pydict"):  # Arrow
        names = table.schema.names
        return {name: table.column(name).to_numpy(zero_copy_only=False) for name in names}
    if hasattr(table, "iloc"):  # pandas
        return {
            str(name): column.to_numpy()
            if isinstance(column.dtype, np.dtype) and column.dtype != object
            else column.astype(object).where(column.notna(), None).to_numpy()
            for name, column in table.items()
        }
    if hasattr(table, "get_columns"):  # polars
        return {column.name: column.to_numpy() for column in table.get_columns()}
    return table


def _kind_of(value: object) -> str:
    if isinstance(value, np.ndarray):
        return given_type(value)
    return f"a {type(value).__name__}"


def _batched(spec: TensorSpec, value: Given) -> Column:
    """Return a tensor of a batch as an array (n, ...), or as a list of arrays if it is ragged."""
    if not spec.is_ragged or (isinstance(value, np.ndarray) and value.dtype != object):
        if isinstance(value, np.ndarray) and value.dtype == object and spec.shape:
            value = list(value)  # a column of lists
        return spec.array(value, batch=True)
    return [spec.array(row) for row in value]
