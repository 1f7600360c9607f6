from collections.abc import Sequence
from typing import final

def application_of(path: bytes) -> str: ...

@final
class KeyUse:
    def __init__(self) -> None: ...
    @property
    def requests(self) -> tuple[int, int, int]: ...

_Limits = tuple[KeyUse, int, int, Sequence[str], bytes, bytes, bytes, int, int]

@final
class KeyTable:
    def __init__(
        self,
        digests: Sequence[bytes],
        token: bytes = b"",
        limits: Sequence[_Limits] | None = None,
    ) -> None: ...
    def find(self, authorization: bytes) -> int | None: ...
    def admit(self, number: int, application: str) -> tuple[int, int]: ...
