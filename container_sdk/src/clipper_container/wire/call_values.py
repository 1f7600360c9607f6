"""The payloads of CALL and ANSWER: msgpack maps whose values may be arrays (docs/wire.md)."""

from __future__ import annotations

from typing import cast

import msgpack
import numpy as np

from clipper_container.model import UserValue
from clipper_container.wire.frames import DTYPE_OF, NUMPY_TYPES, BadFrame, DType

ARRAY = 1  # type of msgpack's extension
RANK_MAX = 32
_HEAD_BYTES = 4  # dtype, rank, two zeros


def pack_call(fields: dict[str, object]) -> bytes:
    """Encode a map. Raises: TypeError for a value that has no form here."""
    return cast(bytes, msgpack.packb(fields, default=_packed))


def unpack_call(payload: bytes) -> dict[str, UserValue]:
    """Decode a map; arrays are read-only views. Raises: BadFrame."""
    try:
        found = msgpack.unpackb(payload, ext_hook=_unpacked, strict_map_key=False)
    except Exception as error:
        raise BadFrame(f"the payload of a call cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise BadFrame("the payload of a call is a map")
    return found


def _packed(value: UserValue) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a {type(value).__name__} cannot be sent in a call")
    kind = DTYPE_OF.get(value.dtype.newbyteorder("<"))
    if kind is None or value.ndim > RANK_MAX:
        if value.dtype.kind in "OUS":
            return value.tolist()
        raise TypeError(f"an array of {value.dtype} cannot be sent in a call")
    head = bytes((int(kind), value.ndim, 0, 0)) + np.asarray(value.shape, "<u4").tobytes()
    data = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
    return msgpack.ExtType(ARRAY, head + data)


def _unpacked(code: int, data: bytes) -> UserValue:
    if code != ARRAY or len(data) < _HEAD_BYTES or data[0] not in NUMPY_TYPES:
        raise ValueError(f"unknown extension {code}")
    dtype, rank = NUMPY_TYPES[data[0]], data[1]
    start = _HEAD_BYTES + 4 * rank
    if data[0] >= DType.STR or rank > RANK_MAX or len(data) < start:
        raise ValueError("a damaged array")
    shape = tuple(int(size) for size in np.frombuffer(data, "<u4", rank, _HEAD_BYTES))
    count = 1
    for size in shape:
        count *= size
    if count * dtype.itemsize != len(data) - start:
        raise ValueError("an array whose shape does not fit its bytes")
    return np.frombuffer(data, dtype, count, start).reshape(shape)
