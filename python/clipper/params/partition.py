"""Which shard has what. Source: the parameter server's design document, "Model Parameter
Partition"."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from clipper_core.params.embedding import key_of

Ids = npt.NDArray[np.int64]


def shard_of_name(name: str, shards: int) -> int:
    """Of a dense variable: a hash that is the same in every process, mod `shards`."""
    return key_of(name) % shards


def shards_of_ids(ids: Ids, shards: int) -> npt.NDArray[np.int64]:
    """Of each row: its id mod `shards`, from 0 for negative ids too."""
    return np.mod(ids, shards)


def split_by_shard(ids: Ids, shards: int) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """(shard, the places in `ids` that are its) for each shard that has some; places ascend."""
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
