"""Measures what the table of evaluations in flight costs beside dict: 1000 keys put, found and
removed, one call each.

pytest bench/micro/bench_pending.py --benchmark-columns=min,median,iqr
"""

import random
from typing import Any

import pytest

from clipper_core.scheduling.pending import Pending


@pytest.mark.parametrize("held", [Pending, dict], ids=["table", "dict_anchor"])
def test_pending_put_find_remove_python(benchmark: Any, held: type) -> None:
    rng = random.Random(1)
    keys = [(rng.getrandbits(64), rng.getrandbits(56)) for _ in range(1000)]

    def table() -> None:
        pending = Pending(2000)
        for lo, hi in keys:
            pending.put(lo, hi, 7)
        for lo, hi in keys:
            pending.find(lo, hi)
            pending.remove(lo, hi, 7)

    def plain() -> None:
        pending: dict[tuple[int, int], int] = {}
        for lo, hi in keys:
            pending[lo, hi] = 7
        for lo, hi in keys:
            pending.get((lo, hi))
            pending.pop((lo, hi))

    benchmark.pedantic(table if held is Pending else plain, rounds=15, warmup_rounds=1)
