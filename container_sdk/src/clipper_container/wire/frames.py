"""Frames of the wire protocol in Python and numpy (docs/wire.md). Pure functions on bytes; no
sockets.

The server's codec is an independent implementation; tests/vectors holds both to the same bytes.
Every length is checked against the bytes present, and against a named limit, before memory is
reserved.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from clipper_container.model import UserValue

HEADER_BYTES = 64
WIRE_VERSION = 2
RANK_MAX = 4
PAYLOAD_BYTES_MAX = 64 << 20
ROWS_MAX = 1 << 20
CONTROL_BYTES_MAX = 1 << 16  # payload of HELLO, WELCOME and REFUSE
QUALIFIERS_MAX = 1024  # bytes of qualifiers per row of a REPLY

_MAGIC = b"CLPR"
_HEADER = struct.Struct("<4sBBBBHHIQ4IQQI")
_CRC = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_REGION = struct.Struct("<QQQ")
_RUN = struct.Struct("<IIQ")
_ZEROS = bytes(8)

Bytes = NDArray[np.uint8]
BytesLike = Any  # bytes, memoryview or array: an array has no type of a buffer before Python 3.12


class Kind(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    PREDICT = 4
    REPLY = 5
    FAILURE = 6
    HEARTBEAT = 7
    GOODBYE = 8
    REGION = 9
    FEEDBACK = 10
    ACCURACY = 11
    PART = 14
    CANCEL = 15
    CALL = 16
    ANSWER = 17


class Flag(IntFlag):
    """Flags of a frame."""

    VARIABLE = 1
    CONFIDENCE = 2
    ROW_STATUS = 4
    COMPRESSED = 8
    CHECKED = 16
    SHARED = 32
    SESSIONS = 64
    QUALIFIERS = 128
    PARTIAL = 256
    PARTS = 512


class DType(IntEnum):
    """Element types by their number on the wire."""

    ANY = 0
    BOOL = 1
    U8 = 2
    I8 = 3
    U16 = 4
    I16 = 5
    U32 = 6
    I32 = 7
    U64 = 8
    I64 = 9
    F16 = 10
    F32 = 11
    F64 = 12
    STR = 13
    BYTES = 14


NUMPY_TYPES: dict[int, np.dtype] = {
    DType.BOOL: np.dtype("?"),
    DType.U8: np.dtype("u1"),
    DType.I8: np.dtype("i1"),
    DType.U16: np.dtype("<u2"),
    DType.I16: np.dtype("<i2"),
    DType.U32: np.dtype("<u4"),
    DType.I32: np.dtype("<i4"),
    DType.U64: np.dtype("<u8"),
    DType.I64: np.dtype("<i8"),
    DType.F16: np.dtype("<f2"),
    DType.F32: np.dtype("<f4"),
    DType.F64: np.dtype("<f8"),
    DType.STR: np.dtype("u1"),
    DType.BYTES: np.dtype("u1"),
}
DTYPE_OF: dict[np.dtype, DType] = {
    NUMPY_TYPES[number]: number for number in DType if DType.ANY < number < DType.STR
}

_KINDS = frozenset(int(kind) for kind in Kind)
_ROW_KINDS = frozenset((int(Kind.PREDICT), int(Kind.REPLY)))
_EMPTY_KINDS = frozenset((int(Kind.HEARTBEAT), int(Kind.GOODBYE), int(Kind.CANCEL)))
(
    _VARIABLE,
    _CONFIDENCE,
    _ROW_STATUS,
    _COMPRESSED,
    _CHECKED,
    _SHARED,
    _SESSIONS,
    _QUALIFIERS,
    _PARTIAL,
    _PARTS,
) = (int(flag) for flag in Flag)
_FLAGS = (
    _VARIABLE
    | _CONFIDENCE
    | _ROW_STATUS
    | _COMPRESSED
    | _CHECKED
    | _SHARED
    | _SESSIONS
    | _QUALIFIERS
    | _PARTIAL
    | _PARTS
)
_ACCURACY_BYTES = (16, 24)
_BOOL = int(DType.BOOL)


class BadFrame(Exception):
    """Malformed bytes. The connection that delivered them must be closed."""


class FrameTooLarge(BadFrame):
    """A frame exceeds a limit."""


@dataclass(slots=True)
class Header:
    """The fields of a 64-byte frame header."""

    kind: int
    dtype: int = 0
    flags: int = 0
    rows: int = 0
    id: int = 0
    rank: int = 0
    dims: tuple[int, int, int, int] = (0, 0, 0, 0)
    payload_bytes: int = 0
    time_us: int = 0
    payload_crc: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one row."""
        return self.dims[: self.rank]


@dataclass(slots=True)
class Rows:
    """The rows of a PREDICT or REPLY.

    data: ndarray (n, *shape); for rows of different lengths a 1-d ndarray of all elements. lengths:
    u32 (n,), in elements, or None. confidence: f32 (n,) or None. status: u8 (n,), 1 for a failed
    row, or None; text holds the reason. sessions: u64 (n,) or None. qualifiers: a msgpack map per
    row, b"" for none; or None.
    """

    dtype: int
    n: int
    data: np.ndarray
    lengths: NDArray[np.uint32] | None = None
    confidence: NDArray[np.float32] | None = None
    status: NDArray[np.uint8] | None = None
    text: str = ""
    sessions: NDArray[np.uint64] | None = None
    qualifiers: list[bytes] | None = None


# -- headers


def encode_header(header: Header) -> bytes:
    """Encode a header as 64 bytes, including its CRC."""
    front = _HEADER.pack(
        _MAGIC,
        WIRE_VERSION,
        header.kind,
        header.dtype,
        header.rank,
        header.flags,
        0,
        header.rows,
        header.id,
        *header.dims,
        header.payload_bytes,
        header.time_us,
        header.payload_crc,
    )
    return front + _CRC.pack(zlib.crc32(front))


def decode_header(
    data: BytesLike, payload_bytes_max: int = PAYLOAD_BYTES_MAX, rows_max: int = ROWS_MAX
) -> Header:
    """Decode and check the header in the first 64 bytes of `data`.

    Raises: BadFrame, FrameTooLarge.
    """
    view = memoryview(data)
    if view.nbytes < HEADER_BYTES:
        raise BadFrame(f"a header has {HEADER_BYTES} bytes, got {view.nbytes}")
    (
        magic,
        version,
        kind,
        dtype,
        rank,
        flags,
        reserved,
        rows,
        batch,
        d0,
        d1,
        d2,
        d3,
        payload_bytes,
        time_us,
        crc,
    ) = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise BadFrame("not a clipper frame (wrong magic)")
    if version != WIRE_VERSION:
        raise BadFrame(f"the server uses wire version {version}, this container {WIRE_VERSION}")
    if zlib.crc32(view[:60]) != _CRC.unpack_from(view, 60)[0]:
        raise BadFrame("header damaged (its CRC differs)")
    header = Header(
        kind, dtype, flags, rows, batch, rank, (d0, d1, d2, d3), payload_bytes, time_us, crc
    )
    if kind not in _KINDS:
        raise BadFrame(f"unknown kind {kind}")
    if reserved or flags & ~_FLAGS:
        raise BadFrame("reserved bits are set")
    if crc and not flags & _CHECKED:
        raise BadFrame("a payload CRC without CHECKED")
    if kind in _ROW_KINDS or (kind == Kind.PART and rows):
        _check_rows(header, rows_max)
    else:
        _check_control(header)
    if payload_bytes > payload_bytes_max:
        raise FrameTooLarge(f"payload of {payload_bytes} bytes; the limit is {payload_bytes_max}")
    return header


def _check_control(header: Header) -> None:
    if header.dtype or header.rank or header.rows or any(header.dims) or header.flags & ~_CHECKED:
        raise BadFrame(f"{Kind(header.kind).name} carries no rows")
    if header.kind in _EMPTY_KINDS and header.payload_bytes:
        raise BadFrame(f"{Kind(header.kind).name} has no payload")
    if header.kind == Kind.ACCURACY and header.payload_bytes not in _ACCURACY_BYTES:
        raise BadFrame(f"ACCURACY has 16 or 24 bytes, not {header.payload_bytes}")
    if header.kind == Kind.REGION and header.payload_bytes != _REGION.size:
        raise BadFrame(f"REGION has {_REGION.size} bytes, not {header.payload_bytes}")


def _check_rows(header: Header, rows_max: int) -> None:
    flags = header.flags
    if header.dtype not in NUMPY_TYPES:
        raise BadFrame(f"unknown dtype {header.dtype}")
    if header.rank > RANK_MAX or any(header.dims[header.rank :]):
        raise BadFrame("wrong rank or dims")
    if flags & _VARIABLE:
        if header.rank != 1 or header.dims[0]:
            raise BadFrame("rows that differ in length have rank 1 and dims 0")
    elif header.dtype >= DType.STR:
        raise BadFrame("str and bytes rows are always VARIABLE")
    if flags & _COMPRESSED and (header.dtype != DType.STR or header.kind != Kind.PREDICT):
        raise BadFrame("only the str rows of a PREDICT may be COMPRESSED")
    if flags & _SHARED and (header.kind != Kind.PREDICT or flags & ~(_SHARED | _CHECKED)):
        raise BadFrame(
            "only the rows of one shape of a PREDICT may be SHARED, and nothing else beside them"
        )
    if flags & _SESSIONS and header.kind != Kind.PREDICT:
        raise BadFrame("only the rows of a PREDICT have sessions")
    if flags & _QUALIFIERS and header.kind == Kind.PREDICT:
        raise BadFrame("the rows of a PREDICT have no qualifiers")
    if flags & _PARTIAL and header.kind != Kind.REPLY:
        raise BadFrame("only a REPLY may be PARTIAL")
    if flags & _PARTS and (
        header.kind != Kind.PREDICT or header.rows != 1 or flags & (_SHARED | _COMPRESSED)
    ):
        raise BadFrame("only a PREDICT of one row, which is in the frame, asks for PARTS")
    if header.kind == Kind.PART and (header.rows != 1 or flags & _ROW_STATUS):
        raise BadFrame("a PART has one row, which has not failed")
    if header.rows == 0:
        raise BadFrame("a batch has at least one row")
    if header.rows > rows_max:
        raise FrameTooLarge(f"{header.rows} rows; the limit is {rows_max}")


# -- rows


def open_rows(header: Header, payload: Bytes, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> Rows:
    """Decode the payload of a PREDICT, REPLY or PART. The arrays of the result are views of it,
    except COMPRESSED data.

    payload: u8 (header.payload_bytes,), aligned to 8 bytes.

    Raises: BadFrame, FrameTooLarge.
    """
    if payload.size != header.payload_bytes:
        raise BadFrame(f"payload of {payload.size} bytes, header has {header.payload_bytes}")
    if header.flags & _SHARED:
        raise BadFrame("SHARED rows, but WELCOME did not enable shared memory")
    if header.flags & _CHECKED and zlib.crc32(payload.data) != header.payload_crc:
        raise BadFrame("payload damaged (its CRC differs)")
    n, kind = header.rows, NUMPY_TYPES[header.dtype]
    # fast path: rows of one shape and nothing else
    if not header.flags & ~_CHECKED and header.dtype != _BOOL:
        return Rows(header.dtype, n, _only_data(payload, kind, (n, *header.dims[: header.rank])))
    parts = _Parts(payload)
    rows = Rows(header.dtype, n, payload[:0])
    if header.flags & _VARIABLE:
        rows.lengths = parts.take(4 * n).view("<u4")
        rows.data = _open_variable(header, rows.lengths, kind, parts, payload_bytes_max)
    else:
        shape = (n, *header.shape)
        rows.data = _shaped(parts.take(math.prod(shape) * kind.itemsize).view(kind), shape)
    if header.dtype == DType.BOOL and rows.data.view(np.uint8).max(initial=0) > 1:
        raise BadFrame("a bool is 0 or 1")
    if header.flags & _SESSIONS:
        rows.sessions = parts.take(8 * n).view("<u8")
    if header.flags & _CONFIDENCE:
        rows.confidence = parts.take(4 * n).view("<f4")
    if header.flags & _QUALIFIERS:
        rows.qualifiers = _open_qualifiers(parts, n)
    if header.flags & _ROW_STATUS:
        rows.status = parts.take(n)
        if rows.status.max() > 1:
            raise BadFrame("a row's status is 0 or 1")
        rows.text = parts.rest().tobytes().decode("utf-8", "replace")
    parts.end()
    return rows


def _open_qualifiers(parts: _Parts, n: int) -> list[bytes]:
    lengths = parts.take(4 * n).view("<u4")
    if lengths.max() > QUALIFIERS_MAX:
        raise FrameTooLarge(f"qualifiers of {lengths.max()} bytes; the limit is {QUALIFIERS_MAX}")
    at = offsets(lengths)
    data = parts.take(at[-1]).tobytes()
    return [data[at[i] : at[i + 1]] for i in range(n)]


def _only_data(payload: Bytes, kind: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return the rows of a payload that holds rows of one shape, padding, and nothing else."""
    size = math.prod(shape) * kind.itemsize
    padding = -size & 7
    if payload.size != size + padding:
        raise BadFrame(f"rows of {size} bytes in a payload of {payload.size}")
    if padding:
        if payload[size:].any():
            raise BadFrame("padding is not zero")
        payload = payload[:size]
    return _shaped(payload.view(kind), shape)


def _shaped(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return data.reshape(shape)
    except ValueError as error:  # dims such as (0, 2**40, 2**40): no bytes, but too large for numpy
        raise BadFrame(f"rows of shape {shape[1:]}") from error


def _open_variable(
    header: Header,
    lengths: NDArray[np.uint32],
    kind: np.dtype,
    parts: _Parts,
    payload_bytes_max: int,
) -> np.ndarray:
    # cannot overflow: at most 2**20 lengths of 32 bits
    data_bytes = int(lengths.sum(dtype=np.uint64)) * kind.itemsize
    if not header.flags & _COMPRESSED:
        return parts.take(data_bytes).view(kind)
    if data_bytes > payload_bytes_max:
        raise FrameTooLarge(f"{data_bytes} bytes of strings; the limit is {payload_bytes_max}")
    block = parts.take_counted()
    return np.frombuffer(lz4_decode(block, data_bytes), np.uint8)


class _Parts:
    """Reads the parts of a payload in order."""

    def __init__(self, payload: Bytes) -> None:
        self.payload = payload
        self.at = 0

    def take(self, size: int) -> Bytes:
        at, padded = self.at, size + (-size & 7)
        if padded > self.payload.size - at:
            raise BadFrame("the payload is shorter than its rows")
        self.at = at + padded
        if padded != size and self.payload[at + size : self.at].any():
            raise BadFrame("padding is not zero")
        return self.payload[at : at + size]

    def take_counted(self) -> Bytes:
        at = self.at
        if self.payload.size - at < 8:
            raise BadFrame("the payload is shorter than its rows")
        size = _U64.unpack_from(self.payload.data, at)[0]
        return self.take(8 + size)[8:]

    def rest(self) -> Bytes:
        at, self.at = self.at, self.payload.size
        return self.payload[at:]

    def end(self) -> None:
        if self.at != self.payload.size:
            raise BadFrame("the payload is longer than its rows")


def lz4_decode(block: bytes | memoryview | Bytes, size: int) -> bytes:
    """Decompress an LZ4 block of exactly `size` bytes. Raises: BadFrame."""
    from lz4 import block as lz4_block

    if size > 255 * len(block):  # LZ4's largest ratio; bounds what a short block can reserve
        raise BadFrame(f"an LZ4 block of {len(block)} bytes cannot hold {size}")

    try:
        data: bytes = lz4_block.decompress(block, uncompressed_size=size)
    except Exception as error:
        raise BadFrame("damaged LZ4 block") from error
    if len(data) != size:
        raise BadFrame(f"an LZ4 block of {len(data)} bytes, {size} were announced")
    return data


def encode_rows(
    kind: Kind, rows: Rows, id: int = 0, time_us: int = 0, checked: bool = False
) -> tuple[Header, list[bytes | memoryview]]:
    """Encode a PREDICT, REPLY or PART as a header and payload pieces for a gathering send. Array
    data is not copied.
    """
    flags = _VARIABLE if rows.lengths is not None else 0
    pieces: list[bytes | memoryview] = []
    size = 0
    if rows.lengths is not None:
        size += _put(pieces, rows.lengths)
    size += _put(pieces, rows.data)
    if rows.sessions is not None:
        flags |= _SESSIONS
        size += _put(pieces, rows.sessions)
    if rows.confidence is not None:
        flags |= _CONFIDENCE
        size += _put(pieces, rows.confidence)
    if rows.qualifiers is not None:
        flags |= _QUALIFIERS
        size += _put(pieces, np.fromiter(map(len, rows.qualifiers), "<u4", rows.n))
        size += _put(pieces, np.frombuffer(b"".join(rows.qualifiers), np.uint8))
    if rows.status is not None:
        flags |= _ROW_STATUS
        text = rows.text.encode("utf-8", "replace")
        size += _put(pieces, rows.status) + len(text)
        pieces.append(text)
    shape = (0,) if rows.lengths is not None else rows.data.shape[1:]
    header = Header(
        int(kind), int(rows.dtype), flags, rows.n, id, len(shape), _dims(shape), size, time_us
    )
    if checked:
        header.flags |= _CHECKED
        for piece in pieces:
            header.payload_crc = zlib.crc32(piece, header.payload_crc)
    return header, pieces


def _dims(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    d0, d1, d2, d3 = (*shape, 0, 0, 0, 0)[:4]
    return d0, d1, d2, d3


def _put(pieces: list[bytes | memoryview], part: np.ndarray) -> int:
    size = part.nbytes
    padding = -size & 7
    if size:
        pieces.append(
            (part if part.flags.c_contiguous else np.ascontiguousarray(part)).data.cast("B")
        )
    if padding:
        pieces.append(_ZEROS[:padding])
    return size + padding


def offsets(lengths: NDArray[np.uint32]) -> list[int]:
    """Return the start of each row and the end of the last one, in elements."""
    ends = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends.tolist()


def row_values(rows: Rows) -> UserValue:
    """Return the rows as a model receives them, read-only: ndarray (n, *shape), list of 1-d
    ndarrays, list[str], or list[memoryview].

    Raises: UnicodeDecodeError for a str row that is not UTF-8.
    """
    rows.data.flags.writeable = False
    if rows.lengths is None:
        return rows.data
    spans = pairwise(offsets(rows.lengths))
    if rows.dtype == DType.STR:
        return _strings(rows.data, spans)
    if rows.dtype == DType.BYTES:
        view = rows.data.data
        return [view[a:b] for a, b in spans]
    return [rows.data[a:b] for a, b in spans]


def _strings(data: Bytes, spans: Iterable[tuple[int, int]]) -> list[str]:
    raw = data.tobytes()
    if raw.isascii():
        text = raw.decode("ascii")
        return [text[a:b] for a, b in spans]
    return [raw[a:b].decode("utf-8") for a, b in spans]


# -- rows in shared memory


def open_runs(header: Header, payload: Bytes) -> list[tuple[int, int, int]]:
    """Decode the runs of a SHARED batch as (region, first row, rows). They are not yet checked
    against the regions.

    Raises: BadFrame.
    """
    if header.flags & _CHECKED:
        check_payload(header, payload)
    if payload.size == _RUN.size:  # the common case
        region, count, first = _RUN.unpack_from(payload.data)
        if count and count == header.rows:
            return [(region, first, count)]
    if not payload.size or payload.size % _RUN.size:
        raise BadFrame(f"{payload.size} bytes are not a multiple of a run's {_RUN.size}")
    runs = [(region, first, count) for region, count, first in _RUN.iter_unpack(payload.data)]
    if sum(count for _, _, count in runs) != header.rows or not all(count for _, _, count in runs):
        raise BadFrame(f"the runs do not add up to {header.rows} rows")
    return runs


def open_region(payload: Bytes) -> tuple[int, int, int]:
    """Decode a REGION as (number, rows, bytes per row). Raises: BadFrame."""
    number, rows, row_bytes = _REGION.unpack(payload.data)
    if number >> 32 or not rows or not row_bytes:
        raise BadFrame(f"region {number} of {rows} rows of {row_bytes} bytes")
    return number, rows, row_bytes


# -- control frames


def control_frame(
    kind: Kind, payload: bytes = b"", id: int = 0, checked: bool = False
) -> list[bytes]:
    """Encode a frame without rows (HELLO, WELCOME, REFUSE, FAILURE, HEARTBEAT, GOODBYE,
    ACCURACY; PART and CANCEL without rows), in pieces.
    """
    header = Header(int(kind), id=id, payload_bytes=len(payload))
    if checked:
        header.flags, header.payload_crc = _CHECKED, zlib.crc32(payload)
    return [encode_header(header), payload]


def check_payload(header: Header, payload: BytesLike) -> None:
    """Check the CRC of a CHECKED payload. Raises: BadFrame."""
    if header.flags & _CHECKED and zlib.crc32(payload) != header.payload_crc:
        raise BadFrame("payload damaged (its CRC differs)")


def pack_map(fields: dict[str, object]) -> bytes:
    """Encode a msgpack map."""
    return bytes(msgpack.packb(fields))


def unpack_map(payload: BytesLike) -> dict[str, Any]:
    """Decode the msgpack map of a HELLO or WELCOME. Raises: BadFrame."""
    try:
        fields = msgpack.unpackb(bytes(payload), raw=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadFrame("the payload is not a msgpack map") from error
    if not isinstance(fields, dict):
        raise BadFrame("the payload is not a msgpack map")
    return fields
