from collections.abc import Sequence
from enum import IntEnum
from typing import final

from clipper.types import VersionedModel
from clipper_core.learning.bandit import Rule
from clipper_core.learning.linear import Context

class Combining(IntEnum):
    EQUAL_VOTES = 1
    FIXED_VOTES = 2
    LEARNED_VOTES = 3
    BLEND = 4
    DRAWN_MODEL = 5
    CHOSEN_MODEL = 6

@final
class Selection:
    models: tuple[VersionedModel, ...]
    primaries: tuple[VersionedModel, ...]
    calls_one: bool
    learns: bool
    reads_context: bool
    reads_classes: bool
    makes_sets: bool
    def __init__(
        self,
        how: Combining,
        models: tuple[VersionedModel, ...],
        *,
        rule: Rule | None = None,
        doubt: float = 0.0,
        weights: Sequence[float] | None = None,
        ridge: float = 0.0,
        linear: Context | None = None,
        primaries: Sequence[VersionedModel] | None = None,
        makes_sets: bool = False,
    ) -> None: ...
