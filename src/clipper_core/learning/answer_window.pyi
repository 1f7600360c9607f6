from collections.abc import Callable
from typing import Any, final

@final
class AnswerOwner:
    """The learner whose models gave an answer, and the models that were queried."""

    learner: Any
    models: tuple[Any, ...]
    plan: Any
    def __init__(self, learner: object, models: tuple[Any, ...], plan: object) -> None: ...

@final
class Joined:
    """An answered query that feedback may still come for."""

    learner: Any
    @property
    def plan(self) -> Any: ...
    @property
    def arrived(self) -> Any: ...
    answer: Any
    user: str
    late: tuple[Any, ...]
    until_s: float
    nbytes: int
    has_feedback: bool
    is_written: bool
    is_claimed: bool
    def __init__(
        self,
        learner: object,
        user: str,
        plan: object,
        arrived: dict[Any, Any],
        answer: object,
        late: tuple[Any, ...],
        until_s: float,
        has_feedback: bool = False,
    ) -> None: ...
    def claim(self) -> bool: ...

@final
class AnswerWindow:
    """The last answers, each for a while. Threads: any."""

    window_s: float
    @property
    def nbytes(self) -> int: ...
    @property
    def index_bytes(self) -> int: ...
    def __init__(
        self,
        size_max: int,
        window_s: float,
        bytes_max: int,
        answer_type: type,
        prediction_type: Callable[..., Any],
        plan_type: Callable[..., Any],
        clock: Callable[[], float] | None = None,
        node: str = "",
        numbers: object = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    def pinned_owner(self, learner: object, models: tuple[Any, ...]) -> AnswerOwner: ...
    def add(
        self,
        number: int,
        learner: object,
        user: str,
        plan: object,
        arrived: dict[Any, Any],
        answer: object,
        late: tuple[Any, ...] = (),
    ) -> None: ...
    def add_output(
        self, number: int, owner: AnswerOwner, output: object, user: str = ""
    ) -> None: ...
    def get(self, id: object) -> Joined | None: ...
    def close(self) -> None: ...
    def items(self) -> list[tuple[str, Joined]]: ...
