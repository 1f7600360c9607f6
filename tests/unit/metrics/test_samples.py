"""Names beyond the limit share a label, and no counter ever shrinks."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clipper.metrics.families import BATCH_ROWS, FAMILIES, LATENCY_S
from clipper.metrics.samples import OTHER, Labels, Samples, SeriesLimit, cumulative
from clipper_core.runtime.histogram import LatencyHistogram

QUERIES, SLO, TOOK = (
    "clipper_queries_total",
    "clipper_slo_seconds",
    "clipper_answer_duration_seconds",
)


def histogram(*values: int) -> Any:
    one = LatencyHistogram()
    for value in values:
        one.record(value)
    return one.snapshot()


def of(name: str, count: int) -> Samples:
    samples = Samples()
    samples.add(QUERIES, count, name)
    samples.add(SLO, 0.5, name)
    samples.add(TOOK, histogram(*[10] * count), name)
    return samples


def keep(cap: SeriesLimit, counts: dict[str, int]) -> Samples:
    return cap.keep({(name,): of(name, count) for name, count in counts.items()})


def test_the_first_names_have_series_of_their_own() -> None:
    total = keep(SeriesLimit(2), {"a": 1, "b": 2, "c": 3, "d": 4})
    assert [total.get(QUERIES, name) for name in ("a", "b", "c", OTHER)] == [1, 2, None, 7]
    took: Any = total.get(TOOK, OTHER)
    assert took.count == 7


def test_values_that_do_not_add_up_are_omitted_from_other() -> None:
    total = keep(SeriesLimit(1), {"a": 1, "b": 2, "c": 3})
    assert total.get(SLO, "a") == 0.5
    assert total.get(SLO, OTHER) is None


def test_a_place_that_is_free_goes_to_a_newcomer_and_not_to_one_of_the_others() -> None:
    cap = SeriesLimit(1)
    keep(cap, {"a": 1, "b": 5})
    total = keep(cap, {"b": 6, "c": 2})
    assert total.get(QUERIES, "c") == 2
    assert total.get(QUERIES, "b") is None
    assert total.get(QUERIES, OTHER) == 6


def test_other_keeps_the_counts_of_removed_names() -> None:
    cap = SeriesLimit(1)
    assert keep(cap, {"a": 1, "b": 5, "c": 5}).get(QUERIES, OTHER) == 10
    total = keep(cap, {"a": 1, "c": 6})
    assert total.get(QUERIES, OTHER) == 11
    assert keep(cap, {"a": 1}).get(QUERIES, OTHER) == 11
    assert keep(cap, {"a": 1, "b": 1}).get(QUERIES, OTHER) == 12, "b is back, and begins anew"


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_no_counter_shrinks_when_names_come_and_go(seed: int, most: int) -> None:
    rng = random.Random(seed)
    cap = SeriesLimit(most)
    counts: dict[str, int] = {}
    before: dict[Labels, Any] = {}
    every = 0
    for _ in range(30):
        if counts and rng.random() < 0.3:
            counts.pop(rng.choice(sorted(counts)))
        if rng.random() < 0.5:
            counts.setdefault(f"n{rng.randrange(8)}", 0)
        for name in counts:
            more = rng.randrange(3)
            counts[name] += more
            every += more
        found = dict(keep(cap, counts)).get(FAMILIES[QUERIES], {})
        assert len(found) <= most + 1
        shared: Any = found.get((OTHER,), 0)
        assert shared >= before.get((OTHER,), 0)
        total: Any = sum(found.values())  # type: ignore[arg-type]
        assert total <= every
        before = {**found, (OTHER,): shared}


def test_values_below_an_edge_are_surely_below_it() -> None:
    rng = random.Random(1)
    values = [int(rng.lognormvariate(8, 3)) for _ in range(3000)]
    family = FAMILIES[TOOK]
    below, count, total = cumulative(family, histogram(*values))
    assert count == len(values)
    assert abs(total - sum(values) / 1e6) < 1e-6 * total
    assert below == sorted(below)
    for edge, at_most in zip(LATENCY_S, below, strict=True):
        exact = sum(value / 1e6 <= edge for value in values)
        surely = sum(value / 1e6 <= edge / 1.125 for value in values)
        assert surely <= at_most <= exact, edge


def test_edges_of_batches_are_exact() -> None:
    rng = random.Random(2)
    common = (1, 2, 3, 4, 7, 8, 16, 17, 18, 32, 64, 128, 256, 512, 576, 4096)
    values = [rng.choice((*common, rng.randrange(1, 5000))) for _ in range(3000)]
    below, _, total = cumulative(FAMILIES["clipper_batch_rows"], histogram(*values))
    assert below == [sum(value <= edge for value in values) for edge in BATCH_ROWS]
    assert total == sum(values)
