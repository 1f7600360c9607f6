"""Inputs in JSON to rows of the type that a model takes."""

import contextlib
import functools
import math
from collections.abc import Callable
from types import GenericAlias
from typing import Any

import msgspec
import numpy as np

from clipper.errors import InvalidInput
from clipper.frontend.http.messages import read_json
from clipper.schema import FREE, Tensors, TensorSpec
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import ANY, RANK_MAX, InputType, UserValue
from clipper_core.http.json_value import RowReader

JsonText = bytes | bytearray | memoryview | msgspec.Raw
Row = UserValue  # an input, or one tensor of it
Read = Callable[[JsonText, str], Row]  # (JSON text, its place) -> a row

_ANYTHING: "msgspec.json.Decoder[Any]" = msgspec.json.Decoder()
_MEMBERS: "msgspec.json.Decoder[dict[str, msgspec.Raw]]" = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
)
_LISTS: "msgspec.json.Decoder[list[msgspec.Raw]]" = msgspec.json.Decoder(list[msgspec.Raw])
_SCALARS: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float}


class InputReaders:
    """The readers of all applications' inputs, cached. Threads: any."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[ResolvedApplication, Read]] = {}

    def reader(self, resolved: ResolvedApplication) -> Read:
        """Return the function that reads one input of an application."""
        known = self._known.get(resolved.name)
        if known is not None and known[0] is resolved:
            return known[1]
        type_ = input_of(resolved)
        read = reader_for(type_) if isinstance(type_, InputType) else tensors_reader(type_)
        if resolved.name and type_ != ANY:  # an untyped model gets its type from its first row
            self._known[resolved.name] = resolved, read
        return read


_parsed = functools.lru_cache(4096)(InputType.parse)


def input_of(resolved: ResolvedApplication) -> InputType | Tensors:
    """Return the type of one input of the application's first model: named tensors, or one input
    without a name."""
    first = next(iter(resolved.cores.values()), None)
    if first is None:
        return ANY
    tensors: Tensors | None = getattr(first, "tensors", None)
    return tensors or _parsed(first.describe_input())


def reader_for(type_: InputType) -> Read:
    """Return a function that reads one input of this type from JSON.

    It raises InvalidInput, which names the place of the error.
    """
    if type_.dtype == "any":
        return lambda text, at: read_json(_ANYTHING, text, at)
    if type_.dtype in ("str", "bytes"):
        plain = msgspec.json.Decoder({"str": str, "bytes": bytes}[type_.dtype])
        return lambda text, at: read_json(plain, text, at)
    dtype = numpy_dtype(type_)
    nested: type | GenericAlias = _SCALARS[dtype.kind]
    for _ in range(1 if type_.variable else len(type_.shape)):
        nested = GenericAlias(list, nested)
    decoder = msgspec.json.Decoder(nested)
    straight = straight_reader(type_)

    def read(text: JsonText, at: str) -> Row:
        found = straight(text) if straight is not None else None
        if found is not None:
            return found
        value = _of_numbers(decoder, nested, dtype, text, at)
        try:
            with np.errstate(over="raise"):  # JSON has no infinity
                return np.array(value, dtype)
        except (ValueError, OverflowError, FloatingPointError) as error:
            raise InvalidInput(f"the numbers at `{at}` are no {type_}: {error}.") from None

    return read


def tensors_reader(tensors: Tensors) -> Read:
    """Return a function that reads the named tensors of one row from a JSON object.

    It raises InvalidInput, which names the tensor.
    """
    readers = {spec.name: _tensor_reader(spec) for spec in tensors.specs}

    def read(text: JsonText, at: str) -> Row:
        members = read_json(_MEMBERS, text, at)
        values = {
            name: readers[name](value, f"{at}.{name}") if name in readers else None
            for name, value in members.items()
        }
        return tensors.arrays(values)

    return read


def rows_in_columns(text: JsonText, at: str, tensors: Tensors) -> list[dict[str, Row]]:
    """Return the rows of a JSON object that has a list with a value for each row for each tensor.

    Raises InvalidInput, which names the tensor.
    """
    members = read_json(_MEMBERS, text, at)
    n = tensors.rows_of({name: items_of(value, f"{at}.{name}") for name, value in members.items()})
    readers = {spec.name: _tensor_reader(spec) for spec in tensors.specs}
    columns = {
        name: [
            readers[name](value, f"{at}.{name}[{i}]")
            for i, value in enumerate(items_of(members[name], f"{at}.{name}"))
        ]
        for name in readers
    }
    rows = [{name: column[i] for name, column in columns.items()} for i in range(n)]
    return [tensors.arrays(row) for row in rows]


def _tensor_reader(spec: TensorSpec) -> Read:
    """Return a function that reads one tensor of a row from JSON."""
    kind: type | GenericAlias = {"str": str, "bytes": bytes}.get(spec.dtype) or _SCALARS[
        spec.numpy.kind
    ]
    for _ in spec.shape:
        kind = GenericAlias(list, kind)
    decoder = msgspec.json.Decoder(kind)
    is_simple = not spec.shape if spec.is_text else FREE not in spec.shape or len(spec.shape) == 1
    straight = (
        straight_reader(InputType.parse(spec.type))
        if is_simple and len(spec.shape) <= RANK_MAX
        else None
    )

    def read(text: JsonText, at: str) -> Row:
        found = straight(text) if straight is not None else None
        if found is not None:
            return found
        try:
            return read_json(decoder, text, at)
        except InvalidInput:
            if spec.dtype == "bytes":
                raise
            return spec.array(_plain(read_json(_ANYTHING, text, at), spec))

    return read


def _plain(value: Row, spec: TensorSpec) -> Row:
    """Return a value of JSON with whole floats as integers where the tensor has integers."""
    whole = _with_integers(value) if spec.numpy.kind in "iu" else None
    return value if whole is None else whole


def _of_numbers(
    decoder: "msgspec.json.Decoder[Any]",
    nested: type | GenericAlias,
    dtype: "np.dtype",
    text: JsonText,
    at: str,
) -> object:
    """Decode nested numbers. JSON does not distinguish 2.0 from the integer 2, and has no NaN:
    among floating-point numbers null is NaN."""
    try:
        return read_json(decoder, text, at)
    except InvalidInput:
        if dtype.kind == "f" and b"null" in bytes(text):
            with contextlib.suppress(InvalidInput, msgspec.ValidationError):
                return msgspec.convert(_with_nan(read_json(_ANYTHING, text, at)), nested)
        if (
            dtype.kind in "iu"
            and (value := _with_integers(read_json(_ANYTHING, text, at))) is not None
        ):
            return read_json(decoder, msgspec.json.encode(value), at)
        raise


def _with_nan(value: Row) -> Row:
    """Return nested lists with NaN for None."""
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value


def _with_integers(value: Row) -> Row:
    """Return whole floats as integers; None if there are none."""
    if isinstance(value, list):
        found = [_with_integers(item) for item in value]
        if all(new is None for new in found):
            return None
        return [item if new is None else new for item, new in zip(value, found, strict=True)]
    return int(value) if isinstance(value, float) and value.is_integer() else None


def straight_reader(type_: InputType) -> Callable[[JsonText], Row] | None:
    """Return a reader in the core for this type, or None if it has none.

    The reader returns the row, or None for text that is no such row; the general reader then gives
    the reason.
    """
    if type_.dtype in ("any", "str", "bytes", "bool", "f16"):
        return None
    read = RowReader(type_.dtype, (-1,) if type_.variable else type_.shape).read

    def straight(text: JsonText) -> Row:
        found = read(text)
        return found[0] if found is not None and found[1] == len(memoryview(text)) else None

    return straight


def numpy_dtype(type_: InputType) -> "np.dtype":
    """Return the numpy element type of an input type."""
    return np.dtype(
        "?" if type_.dtype == "bool" else f"{type_.dtype[0]}{int(type_.dtype[1:]) // 8}"
    )


def items_of(text: JsonText, at: str) -> "list[msgspec.Raw]":
    """Split a JSON array into the texts of its elements. Raises InvalidInput."""
    return read_json(_LISTS, text, at)
