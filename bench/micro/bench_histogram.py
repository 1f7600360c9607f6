"""Measures what a recorded latency costs: the histogram beside a plain list and a Python Counter.

pytest bench/micro/bench_histogram.py --benchmark-columns=min,median,iqr
"""

import collections
from typing import Any

from clipper_core.runtime.histogram import Counter, LatencyHistogram, churn

OPERATIONS = 100_000


def measure(benchmark: Any, run: Any, operations: int = OPERATIONS) -> None:
    benchmark.pedantic(run, rounds=7, warmup_rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["ns_per_operation"] = round(
            benchmark.stats.stats.min / operations * 1e9, 1
        )


def test_core_record(benchmark: Any) -> None:
    measure(benchmark, lambda: churn(5_000_000), 5_000_000)


def test_record_from_python(benchmark: Any) -> None:
    record = LatencyHistogram().record

    def run() -> None:
        for value in range(OPERATIONS):
            record(value)

    measure(benchmark, run)


def test_count_from_python(benchmark: Any) -> None:
    add = Counter().add

    def run() -> None:
        for _ in range(OPERATIONS):
            add()

    measure(benchmark, run)


def test_anchor_list_append(benchmark: Any) -> None:
    def run() -> None:
        values: list[int] = []
        append = values.append
        for value in range(OPERATIONS):
            append(value)

    measure(benchmark, run)


def test_anchor_dict_of_buckets(benchmark: Any) -> None:
    """The same buckets in plain Python."""

    def run() -> None:
        counts: collections.Counter[int] = collections.Counter()
        for value in range(OPERATIONS):
            counts[
                (
                    value
                    if value < 16
                    else value >> (value.bit_length() - 4) << (value.bit_length() - 4)
                )
            ] += 1

    measure(benchmark, run)


def test_snapshot(benchmark: Any) -> None:
    histogram = LatencyHistogram()
    for value in range(10_000):
        histogram.record(value)
    benchmark(histogram.snapshot)


def test_quantile(benchmark: Any) -> None:
    snapshot = churn(100_000)
    benchmark(snapshot.quantile, 0.99)
