from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipper_core.wire.record import RecordLayout

def register_record(
    key: str,
    layout: RecordLayout,
    open_one: Callable[[bytes], Any],
    open_many: Callable[[NDArray[np.uint8], NDArray[np.int64] | None], Any],
) -> int: ...
