from typing import Any

from clipper_core.runtime.dtype import NAMES as NAMES

class RowReader:
    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None: ...
    def read(self, text: Any, at: int = 0) -> tuple[Any, int] | None: ...
