"""Types of named tensors: the element type and the shape of one row, and the check of values."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clipper_container.errors import InvalidInput
from clipper_container.model import UserValue

NAME_MAX = 128  # characters
RANK_MAX = 8
ROW_BYTES_MAX = 1 << 30
DIM_MAX = 2**32 - 1
FREE = -1  # a size that may differ from row to row, `*` in the text

Array = np.ndarray
NumpyType = np.dtype
Column = Array | list[UserValue]  # a tensor of many rows

NUMPY_TYPES: dict[str, NumpyType] = {
    "bool": np.dtype("?"),
    "u8": np.dtype("u1"),
    "i8": np.dtype("i1"),
    "u16": np.dtype("<u2"),
    "i16": np.dtype("<i2"),
    "u32": np.dtype("<u4"),
    "i32": np.dtype("<i4"),
    "u64": np.dtype("<u8"),
    "i64": np.dtype("<i8"),
    "f16": np.dtype("<f2"),
    "f32": np.dtype("<f4"),
    "f64": np.dtype("<f8"),
}
TEXTS = ("str", "bytes")
_OTHER_NAMES = {
    "string": "str",
    "object": "str",
    "float": "f64",
    "double": "f64",
    "int": "i64",
    "half": "f16",
    "boolean": "bool",
    **{str(dtype): name for name, dtype in NUMPY_TYPES.items()},
}
_TYPE = re.compile(r"([a-z]+[0-9]*)(?:\[([0-9,*\s]*)\])?")


class InvalidTensor(InvalidInput):
    """A value that does not fit a schema. tensor: the name of the tensor; empty if it concerns all
    of them.
    """

    def __init__(self, tensor: str, message: str) -> None:
        super().__init__(message)
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of one row. dtype: `bool`, `u8` to `f64`, `str` or `bytes`. shape: () for a scalar;
    FREE for a size that may differ from row to row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @classmethod
    def parse(cls, name: str, text: str) -> "TensorSpec":
        """Return the tensor of a type such as `i64[*]`; numpy's names (`int64[*]`) are understood
        too. Raises: InvalidTensor.
        """
        if not isinstance(name, str) or len(name) > NAME_MAX or not name.isprintable():
            raise InvalidTensor(
                str(name)[:NAME_MAX],
                f"bad tensor name {str(name)[:NAME_MAX]!r}: a name has at most {NAME_MAX} printable"
                " characters.",
            )
        found = _TYPE.fullmatch(text.strip().lower()) if isinstance(text, str) else None
        dtype = _OTHER_NAMES.get(found[1], found[1]) if found else ""
        if found is None or (dtype not in NUMPY_TYPES and dtype not in TEXTS):
            raise InvalidTensor(
                name,
                f"tensor {name!r}: {str(text)[:64]!r} is not a type. Write an element type and the"
                f" shape of one row, 'f32[3,224]', 'i64[*]' or 'str'. Element types:"
                f" {', '.join((*NUMPY_TYPES, *TEXTS))}.",
            )
        sizes = [size.strip() for size in found[2].split(",")] if found[2] else []
        if len(sizes) > RANK_MAX:
            raise InvalidTensor(
                name,
                f"tensor {name!r} has {len(sizes)} dimensions; at most {RANK_MAX} are possible.",
            )
        shape = tuple(FREE if size == "*" else int(size) if size.isdigit() else 0 for size in sizes)
        if not all(size == FREE or 1 <= size <= DIM_MAX for size in shape):
            raise InvalidTensor(
                name, f"tensor {name!r}: sizes in {text!r} are whole numbers from 1, or '*'."
            )
        return cls(name, dtype, shape)

    @property
    def type(self) -> str:
        """The type as text, `f32[3,224]`."""
        if not self.shape:
            return self.dtype
        return (
            f"{self.dtype}[{','.join('*' if size == FREE else str(size) for size in self.shape)}]"
        )

    @property
    def is_text(self) -> bool:
        """True for strings and bytes."""
        return self.dtype in TEXTS

    @property
    def is_fixed(self) -> bool:
        """True if all rows have the same number of bytes."""
        return not self.is_text and FREE not in self.shape

    @property
    def is_ragged(self) -> bool:
        """True if rows may have different shapes."""
        return FREE in self.shape

    @property
    def numpy(self) -> NumpyType:
        """The numpy type of its arrays: object for strings and bytes."""
        return NUMPY_TYPES.get(self.dtype) or np.dtype(object)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether an array of one row may have this shape."""
        if len(shape) != len(self.shape):
            return False
        for mine, size in zip(self.shape, shape, strict=True):  # a hot path
            if mine != size and mine != FREE:
                return False
        return True

    def array(self, value: object, batch: bool = False) -> Array:
        """Return a value as an array of this type.

        batch: the first dimension of the value is the rows.

        Raises: InvalidTensor for another type or shape.
        """
        if (
            type(value) is np.ndarray
            and value.dtype == NUMPY_TYPES.get(self.dtype)
            and value.ndim == len(self.shape) + batch
            and self.fits(value.shape[batch:])
        ):
            return true_bools(value) if self.dtype == "bool" else value
        array = self._strings(value) if self.is_text else self._numbers(value)
        shape = array.shape[1:] if batch else array.shape
        if not self.fits(shape) or (batch and array.ndim == 0):
            rows = "rows of " if batch else ""
            raise InvalidTensor(
                self.name,
                f"tensor {self.name!r}: expected {rows}{self.type}, got shape {list(array.shape)}.",
            )
        return array

    def _numbers(self, value: object) -> Array:
        wanted = self.numpy
        try:
            if isinstance(value, np.ndarray):
                array = plain_array(value)
            else:
                array = _from_sequence(value, wanted)
        except InvalidTensor as error:
            raise self._refusal(error.message) from None
        except (TypeError, ValueError, OverflowError) as error:
            raise self._refusal(f"a {type(value).__name__} ({error})") from None
        if array.dtype == wanted:
            return true_bools(array) if wanted == np.bool_ else array
        if array.dtype.kind in "iu" and wanted.kind in "iu" and array.size:
            bounds = np.iinfo(wanted)
            if array.min() < bounds.min or array.max() > bounds.max:
                raise self._refusal(f"a value beyond {bounds.min} to {bounds.max}")
            if array is not value:
                return array.astype(wanted)
        if array.dtype == object and wanted.kind == "f":
            array = _with_nan(array)
        if _has_nulls(array) and wanted.kind != "f":
            raise self._refusal(
                "a null (or NaN), which only numbers of floating point can be; declare"
                f" {self.name!r} as f64, or replace nulls before"
            )
        if array.dtype.kind not in "biuf" or (
            array.size and not np.can_cast(array.dtype, wanted, "same_kind")
        ):
            is_array = isinstance(value, np.ndarray)
            raise self._refusal(
                given_type(array)
                if is_array or array.dtype.kind in "biuf"
                else f"a {type(value).__name__}"
            )
        return self._converted(array)

    def _converted(self, array: Array) -> Array:
        """Return numbers as this type. Raises: InvalidTensor for one that it cannot hold, of which
        numpy would make an infinity."""
        wanted = self.numpy
        with np.errstate(over="ignore"):
            converted: Array = array.astype(wanted)
        if wanted.kind == "f" and (np.isinf(converted) & np.isfinite(array)).any():
            most = np.finfo(wanted).max
            raise self._refusal(f"a value beyond {-most:g} to {most:g}")
        return converted

    def _strings(self, value: object) -> Array:
        kinds = (str, np.str_) if self.dtype == "str" else (bytes, bytearray, memoryview)
        if isinstance(value, (str, bytes, bytearray, memoryview)):
            array = np.empty((), object)
            array[()] = value
        else:
            try:
                array = np.asarray(value, object)
            except ValueError as error:
                raise self._refusal(f"a {type(value).__name__} ({error})") from None
        for item in array.reshape(-1):
            if not isinstance(item, kinds):
                got = "a null" if item is None else f"a {type(item).__name__}"
                raise self._refusal(got)
        return array

    def _refusal(self, got: str) -> InvalidTensor:
        return InvalidTensor(self.name, f"tensor {self.name!r}: expected {self.type}, got {got}.")


def given_type(array: Array) -> str:
    """Return the type of an array in the public notation, for texts of errors: `f64[2,3]`. Types of
    numpy that rows cannot have keep numpy's name."""
    numpy_name = str(array.dtype)
    name = _OTHER_NAMES.get(numpy_name, numpy_name)
    return f"{name}[{','.join(map(str, array.shape))}]" if array.ndim else name


def true_bools(array: Array) -> Array:
    """Return an array of bools, each of whose bytes is 0 or 1, as bools are sent. One that was made
    of other bytes, such as a mask of 0 and 255, is copied."""
    data = array.view(np.uint8)
    return array if data.max(initial=0) <= 1 else data != 0


def plain_array(array: Array) -> Array:
    """Return an array without a mask: with NaN where it hides floats. bfloat16 becomes f32.

    Raises: InvalidTensor if it hides other values, which are not meant to be used.
    """
    if type(array) is not np.ndarray:
        mask = getattr(array, "mask", None)
        if mask is not None and np.any(mask):
            if array.dtype.kind != "f":
                raise InvalidTensor("", "a masked array that hides values; only floats may do so")
            array = array.filled(np.nan)  # type: ignore[attr-defined]
        array = np.asarray(array)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _from_sequence(value: object, wanted: NumpyType) -> Array:
    """Return what is no array as an array of the type that numpy gives it; whole numbers that no
    i64 holds as u64. Raises: TypeError, ValueError, OverflowError."""
    array = plain_array(np.asarray(value))
    if wanted.kind == "u" and array.dtype.kind == "f" and array.size:
        # numpy makes floats of a list in which some numbers fit i64 and others only u64
        plain = np.asarray(value, object)
        if all(isinstance(item, int | np.integer) for item in plain.reshape(-1).tolist()):
            return plain.astype(np.uint64)
    return array


def _with_nan(array: Array) -> Array:
    """Return an array of Python's numbers as f64, a None as NaN; of anything else as it is."""
    items = array.reshape(-1).tolist()
    if not all(item is None or isinstance(item, int | float | np.number) for item in items):
        return array
    try:
        return array.astype(np.float64)
    except OverflowError:  # of an integer without bounds
        return array


def _has_nulls(array: Array) -> bool:
    """Return whether a value is None or NaN."""
    if array.dtype == object:
        return any(item is None for item in array.reshape(-1).tolist())
    return array.dtype.kind == "f" and bool(np.isnan(array).any())
