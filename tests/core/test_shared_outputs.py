"""Outputs that are large arrays: their readers share the bytes of the prediction."""

import gc

import numpy as np

from tests.core.conftest import World


def test_arrays_of_one_cached_answer_share_its_bytes(world: World) -> None:
    model = world.model()
    whole = np.arange(1000.0).reshape(10, 100)
    model.put(1.0, whole)
    found = [model.cached(1.0)[1] for _ in range(3)]
    for one in found:
        assert np.array_equal(one, whole)
        assert not one.flags.writeable
        assert np.shares_memory(one, found[0])
    model.put(1.0, whole + 1)  # the first answer leaves the cache
    kept = found.pop()
    found.clear()
    gc.collect()
    assert np.array_equal(kept, whole), "as long as somebody has it"


def test_small_arrays_are_copies(world: World) -> None:
    model = world.model()
    model.put(1.0, np.arange(4.0))
    first, second = (model.cached(1.0)[1] for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.shares_memory(first, second)
