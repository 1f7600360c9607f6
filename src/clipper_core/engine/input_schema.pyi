from collections.abc import Callable
from typing import Any

import numpy as np

from clipper_core.cache.projection import Similarity
from clipper_core.engine.engine import Engine
from clipper_core.runtime.dtype import NAMES as NAMES

class InputSchema:
    engine: Engine
    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    similar: Similarity | None
    on_untyped: Callable[[Any], tuple[Any, ...]] | None
    tensors: Any
    def __init__(self) -> None: ...
    def describe_input(self) -> str: ...
    def settle(self, dtype: str, shape: tuple[int, ...] = (), tensors: Any = None) -> None: ...
