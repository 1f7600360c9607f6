from collections.abc import AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Any, final

from clipper_core.results.future import Future

@final
class AnswerPart:
    output: Any
    index: int
    confidence: float | None
    is_last: bool
    complete: bool
    is_default: bool
    reason: str | None
    latency_us: int
    id: str | None
    request_id: str
    models: tuple[Any, ...]
    missing: tuple[Any, ...]
    def __init__(
        self,
        output: Any,
        index: int,
        *,
        confidence: float | None = None,
        is_last: bool = False,
        complete: bool = True,
        is_default: bool = False,
        reason: str | None = None,
        latency_us: int = 0,
        id: str | None = None,
        request_id: str = "",
        models: tuple[Any, ...] = (),
        missing: tuple[Any, ...] = (),
    ) -> None: ...

def joined_parts(outputs: list[Any]) -> Any: ...

@final
class PartsFuture:
    def __init__(self) -> None: ...
    def pending(self) -> Future | None: ...
    def ending(self) -> Future | None: ...
    def error(self) -> Exception | None: ...
    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def cancel(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> PartsFuture: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def __iter__(self) -> Iterator[AnswerPart]: ...
    def __next__(self) -> AnswerPart: ...
    def __aiter__(self) -> AsyncIterator[AnswerPart]: ...
    async def __anext__(self) -> AnswerPart: ...
    def result(self, timeout: float | None = None) -> AnswerPart: ...
    def __await__(self) -> Generator[Any, None, AnswerPart]: ...
