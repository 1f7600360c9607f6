from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, final

class Rule(IntEnum):
    ALL = 0
    FIRST = 1
    QUORUM = 2
    WEIGHTED = 3
    BEST = 4
    SUREST = 5
    CASCADE = 6
    HEDGED = 7
    TIED = 8
    MEAN = 9
    MEDIAN = 10
    FLOOR = 11
    ROW = 12

class VoteState(IntEnum):
    UNSUBMITTED = 0
    OUTSTANDING = 1
    ARRIVED = 2
    FAILED = 3

class Step(NamedTuple):
    rule: int
    until_us: int = ...
    accept: int | None = ...
    confidence_min: float = ...
    need: int = ...
    tolerance: float = ...
    which: int = ...
    low: float = ...
    high: float = ...
    extra: float = ...

class Vote(NamedTuple):
    state: int
    value: Any = ...
    confidence: float | None = ...
    weight: float = ...
    start_us: int | None = ...
    order: int = ...

class Ruling(NamedTuple):
    kind: str
    step: int
    mask: int
    until_us: int | None
    winner: int | None

@final
class Decider:
    steps: tuple[Step, ...]
    def __init__(self, steps: Sequence[Step | Mapping[str, Any] | tuple[Any, ...]]) -> None: ...
    def replay(self, votes: Sequence[Vote], laps: int) -> int: ...
    def decide(
        self, votes: Sequence[Vote], elapsed_us: int, slo_us: int | None = None
    ) -> Ruling: ...
