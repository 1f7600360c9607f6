from collections.abc import Iterable, Sequence
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

V1_HEAD_BYTES: int

class V1(IntEnum):
    V1_I32 = 1
    V1_F64 = 2
    V1_U8 = 3
    V1_VAR_I32 = 4
    V1_VAR_F64 = 5
    V1_VAR_U8 = 6
    V1_STR = 7

_Bytes: TypeAlias = bytes | bytearray | memoryview

def encode_v1(format: int, rows: Iterable[Any], search: int = 0) -> bytes: ...
def message_bytes_v1(
    head: _Bytes, *, bytes_max: int = 67108864, rows_max: int = 1048576
) -> int: ...
def decode_v1(
    message: _Bytes, *, bytes_max: int = 67108864, rows_max: int = 1048576
) -> list[NDArray[np.int32] | NDArray[np.float64]] | list[bytes] | list[str]: ...

HEADER_BYTES: int
WIRE_VERSION: int
DIMS_MAX: int
REGION_BYTES: int
RUN_BYTES: int
ACCURACY_BYTES: int
QUALIFIERS_MAX: int
EMPTY_LISTS_MAX: int
ALLOWANCE_BYTES: int

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
    PART = 14
    CANCEL = 15
    CALL = 16
    ANSWER = 17

class Flag(IntFlag):
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
    partial: bool = False,
    parts: bool = False,
) -> bytes: ...
def encode_feedback(
    inputs: NDArray[Any] | Sequence[Any],
    labels: NDArray[Any] | Sequence[Any],
    sessions: NDArray[Any] | Sequence[int],
) -> bytes: ...
def decode_feedback(payload: bytes, **limits: int) -> tuple[OpenRows, OpenRows]: ...
def feedback_frame(payload: bytes, **fields: Any) -> bytes: ...
def decode_accuracy(payload: bytes) -> tuple[int, int, float | None]: ...
def accuracy_frame(
    learned: int, failed: int, accuracy: float | None = None, **fields: Any
) -> bytes: ...
