from collections.abc import Iterable
from enum import IntEnum
from typing import final

class Http2Error(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11

class Http2EventKind(IntEnum):
    BEGAN = 0
    WENT_ON = 1
    TOO_LARGE = 2
    ENDED = 3
    CALLED = 4
    CALL_ENDED = 5
    CALL_TOO_LARGE = 6

@final
class Http2Protocol:
    def __init__(
        self,
        streams_max: int,
        header_bytes_max: int,
        now_us: int = 0,
        calls: bool = False,
        ping_us_min: int = 0,
    ) -> None: ...
    @property
    def is_shut(self) -> bool: ...
    @property
    def error(self) -> tuple[int, str]: ...
    @property
    def waits_since_us(self) -> int: ...
    @property
    def has_left(self) -> bool: ...
    @property
    def is_going(self) -> bool: ...
    @property
    def streams(self) -> int: ...
    @property
    def is_crowded(self) -> bool: ...
    def feed(self, data: bytes, now_us: int = 0) -> None: ...
    def events(self) -> list[tuple[int, int, bytes, int]]: ...
    def consumed(self, stream: int, n: int) -> None: ...
    def answer(self, stream: int, data: bytes) -> bool: ...
    def reply(
        self,
        stream: int,
        message: bytes | None,
        trailers: Iterable[tuple[bytes, bytes]] | None = None,
    ) -> bool: ...
    def finish(self, stream: int, code: int = ...) -> None: ...
    def unsent(self, stream: int) -> int: ...
    @property
    def unsent_bytes(self) -> int: ...
    def take(self, room: int) -> bytes: ...
    def go_away(self, warn: bool = False) -> None: ...
    def fail(self, code: int) -> None: ...
    def ping(self) -> None: ...
