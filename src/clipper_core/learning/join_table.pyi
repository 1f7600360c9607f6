from collections.abc import Callable
from typing import Any, final

@final
class Joined:
    """An answered query that feedback may still come for."""

    learner: Any
    plan: Any
    arrived: Any
    answer: Any
    user: str
    late: tuple[Any, ...]
    until_s: float
    has_feedback: bool
    is_written: bool
    is_claimed: bool
    nbytes: int
    def __init__(
        self,
        learner: object,
        user: str,
        plan: object,
        arrived: object,
        answer: object,
        late: tuple[Any, ...],
        until_s: float,
        has_feedback: bool = False,
    ) -> None: ...
    def claim(self) -> bool: ...

@final
class JoinTable:
    """The last answers by id, each for a while. Threads: any."""

    @property
    def nbytes(self) -> int: ...
    def __init__(
        self,
        size_max: int,
        window_s: float,
        bytes_max: int,
        answer_type: type,
        clock: Callable[[], float] | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    def get(self, id: str) -> Joined | None: ...
    def items(self) -> list[tuple[str, Joined]]: ...
    def add(
        self,
        id: str,
        learner: object,
        user: str,
        plan: object,
        arrived: object,
        answer: object,
        late: tuple[Any, ...] = (),
    ) -> Joined: ...
