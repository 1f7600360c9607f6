from collections.abc import Sequence
from enum import IntEnum
from typing import final

from clipper.types import VersionedModel
from clipper_core.results.decider import Decider
from clipper_core.runtime.histogram import Counter

class Answering(IntEnum):
    BY_POLICY = ...
    BY_VOTES = ...
    BY_WEIGHTS = ...
    BY_MEAN = ...
    BY_MEDIAN = ...
    BY_ONE = ...

@final
class Deciding:
    models: tuple[VersionedModel, ...]
    decider: Decider
    names: tuple[str, ...]
    order: object
    starts: Sequence[int] | None
    votes: Sequence[float] | None
    measures: bool
    def __init__(
        self,
        decider: Decider,
        models: tuple[VersionedModel, ...],
        selected: tuple[VersionedModel, ...],
        steps: Sequence[tuple[str, Answering, Counter]],
        starts_us: Sequence[int] | None,
        weights: Sequence[float] | None,
        until_us: int,
        margin_us: int,
        order: object = None,
        measures: bool = False,
    ) -> None: ...
