from typing import ClassVar

import numpy as np
import numpy.typing as npt

class Optimizer:
    SETTINGS: ClassVar[dict[str, dict[str, float]]]
    SLOTS: ClassVar[dict[str, tuple[str, ...]]]
    name: str
    settings: dict[str, float]
    def __init__(self, name: str, **settings: float) -> None: ...
    @property
    def slots(self) -> tuple[str, ...]: ...
    def state(self, n: int) -> npt.NDArray[np.float32]: ...
    def step(
        self,
        weights: npt.NDArray[np.float32],
        state: npt.NDArray[np.float32],
        gradient: npt.NDArray[np.float32],
        t: int = 1,
        scale: float = 1.0,
    ) -> None: ...

class Initializer:
    SETTINGS: ClassVar[dict[str, dict[str, float]]]
    name: str
    settings: dict[str, float]
    def __init__(self, name: str, **settings: float) -> None: ...
    def rows(self, key: int, ids: npt.ArrayLike, dim: int) -> npt.NDArray[np.float32]: ...
