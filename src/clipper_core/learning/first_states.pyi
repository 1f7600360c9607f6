from collections.abc import Callable, Sequence
from typing import Any, final

from clipper_core.learning.bandit import Rule
from clipper_core.learning.policy_states import Held

@final
class FirstState:
    """A state that users without an observation read. Threads: any."""

    models: tuple[Any, ...]
    @property
    def state(self) -> Any: ...

@final
class FirstStates:
    """Makes the state of users without an observation. Threads: any."""

    def __init__(
        self,
        models: tuple[Any, ...],
        init: Callable[[tuple[Any, ...], Any], Any],
        make: Callable[..., Any],
        rule: Rule | None = None,
        columns: Sequence[int] = (),
        least: float = 0.0,
    ) -> None: ...
    def of(self, shared: Held) -> FirstState: ...
