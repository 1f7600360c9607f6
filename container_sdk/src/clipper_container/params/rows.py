"""Ids and rows as a parameter server stores and sends them."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clipper_container.errors import InvalidInput
from clipper_container.params.frames import DTYPES, padding
from clipper_container.tensor_spec import given_type

Array = np.ndarray
Ids = NDArray[np.int64]
Positions = NDArray[np.intp]
NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}  # i8 is returned as f32
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}


def as_ids(ids: ArrayLike) -> Ids:
    """Return ids as contiguous i64[n]; u64 keeps its bits. Raises InvalidInput."""
    array = np.asarray(ids)
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidInput(f"ids are whole numbers [n], not {given_type(array)}.")
    return np.ascontiguousarray(array, np.int64)


def check_gradients(table: str, n: int, dim: int, given: Array) -> None:
    """Raise InvalidInput if gradients are not [n, dim]."""
    if given.shape != (n, dim):
        raise InvalidInput(
            f"table {table!r}: gradients are f32[{n}, {dim}], not {list(given.shape)}."
        )


def check_dtype(dtype: str) -> None:
    """Raise InvalidInput if rows cannot be requested in this form."""
    if dtype not in DTYPES:
        raise InvalidInput(f"no dtype {dtype!r} of rows: {', '.join(DTYPES)}.")


def answer_bytes(n: int, dim: int, dtype: str) -> int:
    """Return the size of a payload with n rows."""
    scales = 4 * n + -4 * n % 8 if dtype == "i8" else 0
    rows = n * dim * _ELEMENT_BYTES[dtype]
    return rows + -rows % 8 + scales


def rows_in(body: memoryview, n: int, dim: int, dtype: str, at: int = 0) -> Array:
    """Return the rows of an answer, which begin at a place of its payload: [n, dim]."""
    if dtype != "i8":
        return np.frombuffer(body, NUMPY[dtype], n * dim, at).reshape(n, dim)
    rows = np.frombuffer(body, np.int8, n * dim, at).reshape(n, dim)
    scales = np.frombuffer(body, np.float32, n, at + n * dim + len(padding(n * dim)))
    return rows * scales[:, None]


def shards_of_ids(ids: Ids, shards: int) -> NDArray[np.int64]:
    """Return the shard of each row: its id mod `shards`, which is not negative."""
    return np.mod(ids, shards)


def split_by_shard(ids: Ids, shards: int) -> Iterator[tuple[int, Positions]]:
    """Yield (shard, positions in `ids`) for each shard that has some ids; positions ascend."""
    if shards == 1:
        if ids.size:
            yield 0, np.arange(ids.size)
        return
    whose = shards_of_ids(ids, shards)
    order = np.argsort(whose, kind="stable")
    bounds = np.searchsorted(whose[order], np.arange(shards + 1))
    for shard in range(shards):
        if bounds[shard] < bounds[shard + 1]:
            yield shard, order[bounds[shard] : bounds[shard + 1]]
