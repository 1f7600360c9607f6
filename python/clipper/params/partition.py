"""Partition of parameters over shards.

Source: the parameter server's design document, "Model Parameter Partition".
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from clipper_core.params.embedding import key_of

Ids = npt.NDArray[np.int64]


def shard_of_name(name: str, shards: int) -> int:
    """Return the shard of a dense variable: a hash of its name, equal in every process, mod
    `shards`."""
    return key_of(name) % shards


def shards_of_ids(ids: Ids, shards: int) -> npt.NDArray[np.int64]:
    """Return the shard of each row: its id mod `shards`, which is not negative."""
    return np.mod(ids, shards)


def split_by_shard(ids: Ids, shards: int) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield (shard, positions in `ids`) for each shard that has some ids; positions ascend."""
    if shards == 1:
        if ids.size:
            yield 0, np.arange(ids.size)
        return
    whose = shards_of_ids(ids, shards)
    order = np.argsort(whose, kind="stable")
    bounds = np.searchsorted(whose[order], np.arange(shards + 1))
    for shard in range(shards):
        if bounds[shard] < bounds[shard + 1]:
            yield shard, order[bounds[shard] : bounds[shard + 1]]
