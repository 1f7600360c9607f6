"""Goodput of the batcher in an event simulation: one replica, Poisson arrivals, a cold start,
seconds of virtual time.

The replica is L(n) = a + b n with 5 % noise and, in 2 batches of 1000, a pause of 10-20 ms.
Sources: the three cost models and the goals of the batching study behind docs/design.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from clipper_core.scheduling.batcher import BatchSizer

SLO_US = 20_000
PAUSES = 0.002


@dataclass(frozen=True)
class Model:
    name: str
    fixed_us: float
    row_us: float
    seconds: float

    def best(self, size_max: int = 4096) -> int:
        """Return the rows of the best static batch: the largest that takes at most half the SLO."""
        return max(1, min(size_max, int((SLO_US / 2 - self.fixed_us) / self.row_us + 1e-9)))

    def capacity(self) -> float:
        """Return the rows per us at the best static batch."""
        return self.best() / (self.fixed_us + self.row_us * self.best())


SVM = Model("svm-like", 200, 5, 3)
GPU = Model("gpu-like", 3000, 30, 8)
KERNEL = Model("kernel-like", 100, 1000, 60)
MODELS = [SVM, GPU, KERNEL]


@dataclass
class Tally:
    arrived: int = 0
    in_time: int = 0
    late: int = 0
    shed: int = 0
    sizes: list[int] = field(default_factory=list)


class Replica:
    """A simulated replica that takes batches one at a time; `factor(now_us)` scales its latency."""

    def __init__(
        self, model: Model, seed: int, factor: Callable[[int], float] = lambda now: 1.0
    ) -> None:
        self.model, self.factor = model, factor
        self.rng = np.random.default_rng(seed)

    def serve_us(self, n: int, now: int) -> float:
        took = (self.model.fixed_us + self.model.row_us * n) * self.factor(now)
        took *= max(0.5, 1 + 0.05 * self.rng.standard_normal())
        if self.rng.random() < PAUSES:
            took += self.rng.uniform(10_000, 20_000)
        return took


class PaperAimd:
    """The paper's AIMD, for comparison: it begins at 1, adds 1 after a full batch, and sheds only
    rows that could not finish even alone."""

    def __init__(self, model: Model) -> None:
        self.alone_us = model.fixed_us + model.row_us
        self.limit = 1.0

    def size(self, queued: int) -> int:
        return min(queued, int(self.limit))

    def must_shed(self, now_us: int, start_us: int, n: int, deadline_us: int) -> bool:
        return deadline_us < start_us + self.alone_us

    def hold_until(self, queued: int, oldest_us: int, deadline_us: int) -> int:
        return 0

    def learn(self, n: int, service_us: float, slo_us: float, now_us: int) -> None:
        if service_us > slo_us / 2:
            self.limit = max(1.0, self.limit * 0.9)
        elif n >= int(self.limit):
            self.limit += 1


Sizer = BatchSizer | PaperAimd


def shed_head(sizer: Sizer, due: np.ndarray, head: int, tail: int, now: int) -> int:
    """Return the head of the queue after shedding by the engine's rule: drop rows from the head,
    with the size computed anew each time, until the batch is in time for its oldest row."""
    while head < tail and sizer.must_shed(now, now, sizer.size(tail - head), int(due[head])):
        head += 1
    return head


def simulate(sizer: Sizer, replica: Replica, arrivals: np.ndarray) -> Tally:
    """Runs until the last arrival is answered or shed; `arrivals` in us, sorted."""
    tally = Tally(arrived=len(arrivals))
    due = arrivals + SLO_US
    now, head, tail = 0, 0, 0
    while head < len(arrivals):
        if head == tail:
            now = max(now, int(arrivals[head]) + 1)
        tail = int(np.searchsorted(arrivals, now, "right"))
        kept = shed_head(sizer, due, head, tail, now)
        tally.shed += kept - head
        head = kept
        if head == tail:
            continue
        n = sizer.size(tail - head)
        hold = sizer.hold_until(tail - head, int(arrivals[head]), int(due[head]))
        if hold > now:
            following = int(arrivals[tail]) + 1 if tail < len(arrivals) else hold
            now = min(hold, following)
            continue
        took = replica.serve_us(n, now)
        now += int(took)
        tally.sizes.append(n)
        in_time = int(np.count_nonzero(due[head : head + n] >= now))
        tally.in_time += in_time
        tally.late += n - in_time
        head += n
        sizer.learn(n, took, SLO_US, now)
    assert tally.in_time + tally.late + tally.shed == tally.arrived
    return tally


def poisson(rate_per_us: float, seconds: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    count = int(rate_per_us * seconds * 1e6)
    return np.cumsum(rng.exponential(1 / rate_per_us, count)).astype(np.int64)


def goodput(mode: str, model: Model, load: float, seed: int = 1) -> tuple[float, float]:
    """Return (rows in time / the lesser of offered rows and capacity, late rows / arrivals)."""
    arrivals = poisson(load * model.capacity(), model.seconds, seed)
    tally = simulate(BatchSizer(mode), Replica(model, seed), arrivals)
    reachable = min(len(arrivals), model.capacity() * float(arrivals[-1]))
    return tally.in_time / reachable, tally.late / tally.arrived


@pytest.mark.parametrize("load", [0.3, 0.9, 1.3])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize(("mode", "least"), [("fit", 0.95), ("aimd", 0.9), ("quantile", 0.9)])
def test_goodput_holds_below_and_beyond_saturation(
    mode: str, least: float, model: Model, load: float
) -> None:
    good, late = goodput(mode, model, load)
    print(f"{mode:9} {model.name:12} {load:.1f}x goodput {good:.3f} late {late:.4%}")
    assert good >= least
    assert late <= 0.005


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_early_drop_has_seven_times_the_goodput_of_the_papers_rule(model: Model) -> None:
    arrivals = poisson(1.3 * model.capacity(), model.seconds, 1)
    sizers: list[Sizer] = [BatchSizer("aimd"), PaperAimd(model)]
    ours, paper = (simulate(sizer, Replica(model, 1), arrivals).in_time for sizer in sizers)
    print(f"{model.name:12} {ours / max(paper, 1):.1f} x")
    assert ours >= 7 * paper


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("mode", ["fit", "aimd", "quantile"])
def test_overload_leaves_nothing_behind(mode: str, model: Model) -> None:
    """The load is 0.5 x, 2 x, then 0.8 x the capacity: the last third is as good as without the
    overload."""
    span = model.seconds / 3
    parts = [
        poisson(load * model.capacity(), span, seed) for seed, load in enumerate((0.5, 2.0, 0.8))
    ]
    arrivals = np.concatenate([part + int(i * span * 1e6) for i, part in enumerate(parts)])
    arrivals.sort()
    sizer, replica = BatchSizer(mode), Replica(model, 3)
    tally = simulate(sizer, replica, arrivals)
    possible = len(parts[0]) + model.capacity() * span * 1e6 + len(parts[2])
    assert tally.in_time >= 0.93 * possible
    assert tally.late <= 0.005 * tally.arrived


@pytest.mark.parametrize("mode", ["fit", "aimd", "quantile"])
def test_goodput_recovers_after_a_slowdown(mode: str) -> None:
    """The replica is three times slower in the middle third, at a load above its capacity then."""
    third = SVM.seconds * 1e6 / 3
    arrivals = poisson(0.6 * SVM.capacity(), SVM.seconds, 5)
    replica = Replica(SVM, 5, lambda now: 3.0 if third <= now < 2 * third else 1.0)
    tally = simulate(BatchSizer(mode), replica, arrivals)
    possible = len(arrivals) * 2 / 3 + SVM.capacity() / 3 * third
    assert tally.in_time >= 0.93 * possible
    assert tally.late <= 0.01 * tally.arrived


def test_delay_makes_larger_batches_and_keeps_deadlines() -> None:
    """A delay (Clipper, Figure 5) makes fewer and larger batches at a moderate load."""
    arrivals = poisson(0.1 * SVM.capacity(), 1, 1)
    sent, held = (
        simulate(BatchSizer("aimd", delay_us=delay), Replica(SVM, 1), arrivals)
        for delay in (0, 2000)
    )
    assert np.mean(held.sizes) >= 3 * np.mean(sent.sizes)
    assert held.in_time >= sent.in_time - 0.002 * len(arrivals)
