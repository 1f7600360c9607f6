from collections.abc import Sequence
from typing import final

from clipper.types import VersionedModel

@final
class Roles:
    observers: tuple[VersionedModel, ...]
    left: float
    shadow: float
    def __init__(
        self,
        observers: Sequence[tuple[VersionedModel, float]],
        challengers: Sequence[tuple[int, float, float]],
        shadow: float,
    ) -> None: ...
