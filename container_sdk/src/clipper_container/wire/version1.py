"""Batches of protocol version 1 (docs/wire.md): format byte, row count, then row length or
content bytes.
"""

from __future__ import annotations

import struct

import numpy as np

from clipper_container.wire.frames import (
    NUMPY_TYPES,
    PAYLOAD_BYTES_MAX,
    ROWS_MAX,
    BadFrame,
    Bytes,
    BytesLike,
    DType,
    FrameTooLarge,
    Rows,
    lz4_decode,
)

V1_HEAD_BYTES = 9
_V1_HEAD = struct.Struct("<BII")
_LENGTH = struct.Struct("<I")
_V1_TYPES = {
    1: DType.I32,
    2: DType.F64,
    3: DType.U8,
    4: DType.I32,
    5: DType.F64,
    6: DType.U8,
    7: DType.STR,
}


def v1_content_bytes(
    head: BytesLike, payload_bytes_max: int = PAYLOAD_BYTES_MAX, rows_max: int = ROWS_MAX
) -> int:
    """Return how many bytes follow the first 9 of a version 1 batch. Raises: BadFrame,
    FrameTooLarge.
    """
    kind, n, length = _V1_HEAD.unpack_from(head)
    if kind not in _V1_TYPES:
        raise BadFrame(f"unknown format {kind} of a version 1 batch")
    if n == 0:
        raise BadFrame("a batch has at least one row")
    if n > rows_max:
        raise FrameTooLarge(f"{n} rows; the limit is {rows_max}")
    size: int = n * length * NUMPY_TYPES[_V1_TYPES[kind]].itemsize if kind <= 3 else length
    if size > payload_bytes_max:
        raise FrameTooLarge(f"payload of {size} bytes; the limit is {payload_bytes_max}")
    return size


def v1_open(head: BytesLike, content: Bytes, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> Rows:
    """Decode a version 1 batch from its first 9 bytes and its content. Raises: BadFrame,
    FrameTooLarge.
    """
    kind, n, length = _V1_HEAD.unpack_from(head)
    dtype = _V1_TYPES[kind]
    if kind <= 3:
        return Rows(dtype, n, content.view(NUMPY_TYPES[dtype]).reshape(n, length))
    if kind == 7:
        return _v1_strings(n, content, payload_bytes_max)
    return _v1_variable(dtype, n, content)


def _v1_variable(dtype: DType, n: int, content: Bytes) -> Rows:
    kind = NUMPY_TYPES[dtype]
    if 4 * n > content.size:
        raise BadFrame("the content is shorter than its rows")
    lengths, pieces, at = np.empty(n, np.uint32), [], 0
    for i in range(n):
        if content.size - at < 4:
            raise BadFrame("the content is shorter than its rows")
        length = _LENGTH.unpack_from(content.data, at)[0]
        at += 4
        size = length * kind.itemsize
        if size > content.size - at:
            raise BadFrame("the content is shorter than its rows")
        lengths[i] = length
        pieces.append(content[at : at + size])
        at += size
    if at != content.size:
        raise BadFrame("the content is longer than its rows")
    return Rows(dtype, n, np.concatenate(pieces).view(kind), lengths)


def _v1_strings(n: int, content: Bytes, payload_bytes_max: int) -> Rows:
    if 4 * n > content.size:
        raise BadFrame("the content is shorter than its rows")
    lengths = content[: 4 * n].view("<i4")
    if lengths.min() < 0:
        raise BadFrame("a negative length")
    size = int(lengths.sum(dtype=np.uint64))
    if size > payload_bytes_max:
        raise FrameTooLarge(f"{size} bytes of strings; the limit is {payload_bytes_max}")
    data = np.frombuffer(lz4_decode(content[4 * n :], size), np.uint8)
    return Rows(DType.STR, n, data, lengths.astype(np.uint32))
