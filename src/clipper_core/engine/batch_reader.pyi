from collections.abc import Iterable
from typing import final

from clipper_core.engine.engine import Engine

@final
class BatchLog:
    def __init__(self, engine: Engine, keep: int = 1 << 18) -> None: ...
    @property
    def lost(self) -> int: ...
    def find(self, ids: Iterable[int]) -> dict[int, tuple[int, int, int, int, int]]: ...
