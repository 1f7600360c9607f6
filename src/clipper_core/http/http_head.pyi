from typing import Final, NamedTuple

KNOWN: Final[frozenset[bytes]]

class Plain(NamedTuple):
    path: bytes
    id: bytes
    bytes: int
    body_bytes: int
    json_bytes: int | None

def read_head(text: bytes) -> Plain | bool: ...
