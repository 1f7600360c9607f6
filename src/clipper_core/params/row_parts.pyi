from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Ids = npt.NDArray[np.int64]
_F32 = npt.NDArray[np.float32]

def distinct(ids: npt.ArrayLike) -> tuple[_Ids, _Ids]: ...
def combine(ids: npt.ArrayLike, gradients: npt.ArrayLike) -> tuple[_Ids, _F32]: ...
def split_parts(
    parts: Sequence[npt.ArrayLike], shards: int
) -> list[tuple[int, list[int], list[int], _Ids, _Ids]]: ...
def put_rows(out: _F32, places: _Ids, rows: _F32) -> None: ...
