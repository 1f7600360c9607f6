from collections.abc import Iterable, Sequence
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES: int
WIRE_VERSION: int
DIMS_MAX: int
REGION_BYTES: int
RUN_BYTES: int
ACCURACY_BYTES: int
QUALIFIERS_MAX: int
EMPTY_LISTS_MAX: int

class Kind(IntEnum):
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

class Flag(IntFlag):
    VARIABLE = 1
    CONFIDENCE = 2
    ROW_STATUS = 4
    COMPRESSED = 8
    CHECKED = 16
    SHARED = 32
    SESSIONS = 64
    QUALIFIERS = 128

_Bytes: TypeAlias = bytes | bytearray | memoryview

class FrameHeader(NamedTuple):
    kind: int
    dtype: int
    flags: int
    rows: int
    id: int
    shape: tuple[int, ...]
    payload_bytes: int
    time_us: int
    payload_crc: int

class OpenRows(NamedTuple):
    dtype: int
    n: int
    data: NDArray[Any]
    lengths: NDArray[np.uint32] | None
    confidence: NDArray[np.float32] | None
    status: NDArray[np.uint8] | None
    text: bytes
    sessions: NDArray[np.uint64] | None
    qualifiers: list[bytes] | None

def checksum(data: _Bytes, crc: int = 0) -> int: ...
def encode_frame(
    kind: int,
    payload: _Bytes = b"",
    *,
    dtype: int = 0,
    shape: Sequence[int] = (),
    flags: int = 0,
    rows: int = 0,
    id: int = 0,
    time_us: int = 0,
    checked: bool = False,
) -> bytes: ...
def decode_header(
    data: _Bytes, *, payload_bytes_max: int = 67108864, rows_max: int = 1048576
) -> FrameHeader | None: ...
def open_rows(
    header: FrameHeader,
    payload: _Bytes,
    *,
    payload_bytes_max: int = 67108864,
    rows_max: int = 1048576,
    output_bytes_max: int = 16777216,
) -> OpenRows: ...
def open_runs(header: FrameHeader, payload: _Bytes) -> list[tuple[int, int, int]]: ...
def encode_rows(
    kind: int,
    rows: NDArray[Any] | Iterable[str] | Iterable[bytes] | Iterable[NDArray[Any]],
    *,
    confidence: Sequence[float] | NDArray[Any] | None = None,
    status: Sequence[int] | NDArray[Any] | None = None,
    text: str = "",
    id: int = 0,
    time_us: int = 0,
    checked: bool = False,
    compressed: bool = False,
    search: int = ...,
    sessions: Sequence[int] | NDArray[Any] | None = None,
    qualifiers: Sequence[bytes] | None = None,
) -> bytes: ...
