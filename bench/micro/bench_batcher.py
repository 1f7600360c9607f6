"""The price of one decision: size, shed check and learning, through the Python door, beside AIMD in
plain Python."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from clipper_core.scheduling.batcher import BatchSizer

SLO_US = 20_000


class PlainAimd:
    """The anchor: the paper's AIMD alone, in Python; no fit, no profile."""

    def __init__(self) -> None:
        self.limit, self.slow_start = 1.0, True

    def size(self, queued: int) -> int:
        return min(queued, int(self.limit))

    def learn(self, n: int, service_us: float, slo_us: float, now_us: int) -> None:
        if service_us > slo_us / 2:
            self.limit, self.slow_start = max(1.0, self.limit * 0.9), False
        elif n >= int(self.limit):
            self.limit = self.limit * 2 if self.slow_start else self.limit + 1


def warmed(mode: str) -> BatchSizer:
    sizer = BatchSizer(mode)
    for i in range(200):
        n = sizer.size(10_000)
        sizer.learn(n, 200.0 + 5 * n, SLO_US, i * 1000)
    return sizer


@pytest.mark.parametrize("mode", ["aimd", "fit", "quantile", "static"])
def test_decide_and_learn(benchmark: BenchmarkFixture, mode: str) -> None:
    sizer = warmed(mode)

    def batch() -> None:
        n = sizer.size(700)
        sizer.must_shed(1000, 1000, n, 1000 + SLO_US)
        sizer.learn(n, 3700.0, SLO_US, 1000)

    benchmark(batch)


def test_decide_and_learn_plain_python(benchmark: BenchmarkFixture) -> None:
    plain = PlainAimd()

    def batch() -> None:
        n = plain.size(700)
        plain.learn(n, 3700.0, SLO_US, 1000)

    benchmark(batch)


def test_shed_check(benchmark: BenchmarkFixture) -> None:
    benchmark(warmed("fit").must_shed, 1000, 1000, 700, 1000 + SLO_US)
