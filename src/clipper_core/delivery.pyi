from collections.abc import Callable
from typing import Any

from clipper_core.future import Future

class Delivery:
    on_await: Callable[[Future], Any] | None
    on_callback: Callable[[Future, Callable[[Future], object]], None] | None
    def __init__(self, number: int = 0) -> None: ...
    @property
    def issued(self) -> int: ...
    @property
    def answered(self) -> int: ...
    def kill(self, status: int) -> None: ...
