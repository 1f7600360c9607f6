from types import TracebackType
from typing import final

@final
class StateLock:
    """A reentrant lock. Threads: any."""

    def __enter__(self) -> StateLock: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
