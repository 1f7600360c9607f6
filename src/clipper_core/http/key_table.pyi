from collections.abc import Sequence
from typing import final

@final
class KeyTable:
    def __init__(self, digests: Sequence[bytes], token: bytes = b"") -> None: ...
    def find(self, authorization: bytes) -> int | None: ...
