from typing import ClassVar

import numpy as np
import numpy.typing as npt

class Initializer:
    SETTINGS: ClassVar[dict[str, dict[str, float]]]
    name: str
    settings: dict[str, float]
    def __init__(self, name: str, **settings: float) -> None: ...
    def rows(self, key: int, ids: npt.ArrayLike, dim: int) -> npt.NDArray[np.float32]: ...
