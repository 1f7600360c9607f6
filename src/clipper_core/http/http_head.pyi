from collections.abc import Collection
from typing import Final, NamedTuple, final

KNOWN: Final[frozenset[bytes]]

class Plain(NamedTuple):
    path: bytes
    id: bytes
    bytes: int
    body_bytes: int
    json_bytes: int | None

def read_head(text: bytes) -> Plain | bool: ...

METHODS: Final[dict[bytes, str]]

class HttpSyntaxError(ValueError): ...

@final
class MessageHead:
    method: str
    target: bytes
    status: int
    minor: int
    headers: dict[bytes, bytes]
    hosts: int
    length: int
    keep_alive: bool
    end: int

def read_request(
    text: bytes, at: int, known: Collection[bytes], repeated: Collection[bytes]
) -> MessageHead | None: ...
def read_response(text: bytes, known: Collection[bytes] = ()) -> MessageHead | None: ...

@final
class ChunkedBody:
    overhead: int
    @property
    def done(self) -> bool: ...
    def feed(self, data: bytes, at: int) -> tuple[bytes, int]: ...
