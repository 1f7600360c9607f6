"""The batcher compared with slow reference models, and the guarantees of docs/design.md as
properties of closed loops."""

import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.scheduling.batcher import BatchingMode, BatchSizer

SLO_US = 20_000
ADAPTIVE = ["aimd", "fit", "quantile"]
MODES = [*ADAPTIVE, "static"]
LINES = {"svm": (200.0, 5.0), "gpu": (3000.0, 30.0), "kernel": (100.0, 1000.0)}
PLENTY = 1_000_000
PROBE_US = 100_000


class Loop:
    """A replica with a queue that never empties; yields the batch sizes it was sent."""

    def __init__(
        self, sizer: BatchSizer, line: tuple[float, float], noise: float, seed: int
    ) -> None:
        self.sizer, self.line, self.noise = sizer, line, noise
        self.rng = random.Random(seed)
        self.now = 0

    def run(self, batches: int, factor: float = 1.0, queued: int = PLENTY) -> Iterator[int]:
        for _ in range(batches):
            n = self.sizer.size(queued)
            took = (
                (self.line[0] + self.line[1] * n)
                * factor
                * max(0.6, 1 + self.noise * self.rng.gauss(0, 1))
            )
            self.now += int(took)
            self.sizer.learn(n, took, SLO_US, self.now)
            yield n


def best(line: tuple[float, float], factor: float = 1.0, size_max: int = 4096) -> int:
    """Return the most rows within the budget: half the SLO, or 0.4 of what a single row leaves of
    it."""
    alone = factor * (line[0] + line[1])
    budget = max(SLO_US / 2, alone + 0.4 * (SLO_US - alone))
    return max(1, min(size_max, int((budget / factor - line[0]) / line[1] + 1e-9)))


# -- twins


class AimdTwin:
    """A reference model of AIMD over plain numbers. What the batcher measures is an argument:
    whether a batch missed its SLO, the room, whether no outliers run, and the predicted time of a
    size over its budget."""

    def __init__(self, step: int, backoff: float, size_max: int) -> None:
        self.step, self.backoff, self.size_max = step, backoff, size_max
        self.limit, self.slow_start, self.jumped = 1.0, True, False
        self.clean, self.missed, self.patience = 0, 0, 4

    def learn(
        self, n: int, missed: bool, room: float, calm: bool, over: Callable[[float], float]
    ) -> None:
        full = n >= math.floor(self.limit)
        if missed:
            self.decrease(n)
        else:
            self.missed, self.clean = 0, self.clean + 1
            if full:
                self.increase(room, calm, over)
        self.limit = min(max(self.limit, 1.0), self.size_max)

    def decrease(self, n: int) -> None:
        self.missed, self.clean = self.missed + 1, 0
        if 2 * n < self.limit and self.missed < 3:
            return
        self.limit = self.limit * self.backoff if 2 * n >= self.limit else max(self.limit / 2, n)
        self.slow_start = False
        if self.jumped:
            self.jumped, self.patience = False, min(2 * self.patience, 4096)

    def increase(self, room: float, calm: bool, over: Callable[[float], float]) -> None:
        if self.jumped:
            self.jumped, self.patience = False, max(4, self.patience // 2)
        if self.slow_start:
            self.limit *= 2
        elif calm and self.clean >= self.patience and room >= 1.1 * self.limit:
            self.limit = min(room, 2 * self.limit)
            self.jumped = True
        elif not calm or over(self.limit + self.step) <= 0:
            self.limit += self.step


def budget_of(sizer: BatchSizer, slo_us: float, share: float, batches: int) -> float:
    alone = sizer.fit[0] + sizer.fit[1]
    if batches < 3:
        return slo_us * share
    if alone >= slo_us:
        return slo_us
    return max(slo_us * share, alone + 0.8 * share * (slo_us - alone))


@pytest.mark.parametrize("seed", range(20))
def test_aimd_is_its_twin(seed: int) -> None:
    rng = random.Random(seed)
    step, backoff, size_max = rng.choice([1, 4]), rng.choice([0.5, 0.9]), rng.choice([7, 300, 5000])
    share = rng.choice([0.3, 0.5])
    sizer = BatchSizer("aimd", step=step, backoff=backoff, size_max=size_max, budget_share=share)
    twin = AimdTwin(step, backoff, size_max)
    line, factor = rng.choice(list(LINES.values())), 1.0
    jumps, halvings = 0, 0
    for i in range(1500):
        if rng.random() < 0.01:
            factor = rng.choice([0.3, 1.0, 3.0])
        n = sizer.size(PLENTY if rng.random() < 0.7 else rng.randrange(1, 10))
        took = (line[0] + line[1] * n) * factor * rng.uniform(0.9, 1.1) + (
            20_000 if rng.random() < 0.02 else 0
        )
        sizer.learn(n, took, SLO_US, i * 10_000)
        before = twin.limit
        budget, (a, b, _) = budget_of(sizer, SLO_US, share, i + 1), sizer.fit
        twin.learn(
            n,
            took > budget,
            sizer.room,
            sizer.outliers == 0,
            lambda rows, a=a, b=b, y=budget: a + b * rows - y,
        )
        jumps += twin.jumped
        halvings += twin.limit == before / 2
        assert sizer.limit == pytest.approx(twin.limit, rel=1e-9)
        assert sizer.slow_start == twin.slow_start
        assert sizer.limit >= before * min(backoff, 0.5) - 1e-9, "one decrease a batch"
    if size_max == 5000:
        assert jumps > 0


@pytest.mark.parametrize("seed", range(5))
def test_fit_is_weighted_least_squares_with_a_held_slope(seed: int) -> None:
    rng = random.Random(seed)
    sizer = BatchSizer("static", size_max=4096)
    sizes: list[int] = []
    times: list[float] = []
    slope = 0.0
    for i in range(120):
        n = rng.randrange(50, 200)
        took = (3000 + 30 * n) * rng.uniform(0.95, 1.05)
        budget = budget_of(sizer, SLO_US, 0.5, i + 1)
        sizer.learn(n, took, SLO_US, i)
        sizes.append(n)
        times.append(took)
        weight = (15 / 16) ** np.arange(i, -1, -1.0)
        mean_n, mean_y = np.average(sizes, weights=weight), np.average(times, weights=weight)
        spread = np.average((np.array(sizes) - mean_n) ** 2, weights=weight)
        cov = np.average((np.array(sizes) - mean_n) * (np.array(times) - mean_y), weights=weight)
        ridge = 0.005 * mean_n**2
        held = slope * (1 - max(0.0, 1 - mean_y / budget) / 32)
        slope = min(max((cov + ridge * held) / (spread + ridge), 0.0), mean_y / mean_n)
        assert sizer.fit[1] == pytest.approx(slope, rel=1e-6)
        assert sizer.fit[0] == pytest.approx(max(mean_y - slope * mean_n, 0.0), rel=1e-6, abs=1e-6)
    assert sizer.fit[0] == pytest.approx(3000, rel=0.2)
    assert sizer.fit[1] == pytest.approx(30, rel=0.2)


def test_profile_is_a_mean_by_power_of_two() -> None:
    rng = random.Random(3)
    sizer = BatchSizer("aimd")
    means: dict[int, tuple[float, int]] = {}
    for i in range(500):
        n = int(2 ** rng.uniform(0, 12))
        took = rng.uniform(10, 1000) + n
        sizer.learn(n, took, SLO_US, i)
        bucket = 1 << (n.bit_length() - 1)
        mean, count = means.get(bucket, (0.0, 0))
        means[bucket] = (mean + (took - mean) / min(count + 1, 16), count + 1)
    assert [row[::2] for row in sizer.profile()] == [
        (n, count) for n, (_, count) in sorted(means.items())
    ]
    assert [row[1] for row in sizer.profile()] == pytest.approx(
        [mean for _, (mean, _) in sorted(means.items())]
    )
    sizer.learn(2**32 - 1, 5, SLO_US, 0)
    assert sizer.profile()[-1][::2] == (1 << 23, 1)


# -- what always holds

LATENCIES = st.one_of(
    st.floats(0, 1e7), st.sampled_from([0.0, 1.0, 1e13, math.inf, math.nan, -5.0])
)
SIZES = st.one_of(st.integers(0, 50), st.integers(0, 2**32 - 1))
BATCHES = st.lists(st.tuples(SIZES, LATENCIES, st.sampled_from([0.0, 1e3, 2e4, 1e18])), max_size=60)


@settings(max_examples=150, deadline=None)
@given(
    mode=st.sampled_from(MODES), size_max=st.sampled_from([1, 2, 64, 2**32 - 1]), batches=BATCHES
)
def test_any_history_leaves_sound_answers(
    mode: str, size_max: int, batches: list[tuple[int, float, float]]
) -> None:
    sizer = BatchSizer(mode, size_max=size_max, delay_us=1000)
    now = 0
    for n, took, slo in batches:
        now += 1000
        sizer.learn(n, took, slo, now)
        assert 1 <= sizer.limit <= size_max
        worst = [sizer.worst(k) for k in (1, 2, 10, 1000, 2**32 - 1)]
        mean = [sizer.predict(k) for k in (1, 2, 10, 1000, 2**32 - 1)]
        assert all(
            math.isfinite(x) and x >= 0 for x in (*worst, *mean, *sizer.fit, *sizer.quantile)
        )
        assert worst == sorted(worst)
        assert mean == sorted(mean)
        assert all(w >= m for w, m in zip(worst, mean, strict=True))
    for queued in (0, 1, 7, PLENTY):
        assert 1 <= sizer.size(queued) <= max(1, min(queued, size_max))
    sheds = [sizer.must_shed(now, now, 3, now + due) for due in (1, 100, 10_000, 10**15)]
    assert sheds == sorted(sheds, reverse=True), "a later deadline is never harder"
    late = now + 10 * PROBE_US
    assert sizer.must_shed(late, late, 1, late), "what is due has had its time, and is no probe"


@pytest.mark.parametrize("mode", MODES)
def test_unknown_sheds_and_holds_nothing(mode: str) -> None:
    sizer = BatchSizer(mode, size_max=64, delay_us=2000)
    for i in range(3):
        assert sizer.predict(10) == sizer.worst(10) == 0
        assert not sizer.must_shed(10, 10, 10, 11)
        assert sizer.hold_until(1, 10, 10**9) == 0
        sizer.learn(1, 1000, SLO_US, i)
    assert sizer.worst(10) > sizer.predict(10) > 0
    assert sizer.hold_until(1, 10, 10**9) == (0 if sizer.limit < 2 else 2010)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("sizes", "latency"),
    [
        ([1], lambda n: 700.0),
        ([64], lambda n: 5000.0),
        ([1, 2, 3], lambda n: 0.0),
        ([10, 100], lambda n: 9000.0 - 50 * n),
        ([100], lambda n: 100.0 * n),
    ],
    ids=["one", "equal", "zero", "falling", "proportional"],
)
def test_degenerate_histories_predict_what_was_seen(
    mode: str, sizes: list[int], latency: Callable[[int], float]
) -> None:
    rng = random.Random(1)
    sizer = BatchSizer(mode, size_max=128)
    seen: dict[int, float] = {}
    for i in range(200):
        n = rng.choice(sizes)
        seen[n] = latency(n)
        sizer.learn(n, latency(n), SLO_US, i * 1000)
    mean_n, mean_y = float(np.mean(list(seen))), float(np.mean(list(seen.values())))
    assert sizer.predict(round(mean_n)) == pytest.approx(mean_y, rel=0.3, abs=2)
    assert sizer.predict(1) >= 0


# -- closed loops


@pytest.mark.parametrize("noise", [0.02, 0.05])
@pytest.mark.parametrize("mode", ADAPTIVE)
@pytest.mark.parametrize("name", LINES)
def test_nine_tenths_of_the_best_batch_within_20(mode: str, name: str, noise: float) -> None:
    for seed in range(10):
        loop = Loop(BatchSizer(mode), LINES[name], noise, seed)
        reached = [loop.sizer.limit for _ in loop.run(20)]
        assert max(reached) >= 0.9 * best(LINES[name])
        held = list(loop.run(200))
        assert np.mean(held) >= 0.85 * best(LINES[name])
        assert np.mean(held) <= 1.2 * best(LINES[name])


@pytest.mark.parametrize("mode", ADAPTIVE)
@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1)])
def test_a_threefold_step_is_followed_within_20(
    mode: str, name: str, first: float, second: float
) -> None:
    for seed in range(10):
        loop = Loop(BatchSizer(mode), LINES[name], 0.02, seed)
        list(loop.run(150, first))
        list(loop.run(20, second))
        target = best(LINES[name], second)
        settled = np.mean(list(loop.run(20, second)))
        assert 0.75 * target - 1 <= settled <= 1.2 * target + 1.5
        truth = second * (LINES[name][0] + LINES[name][1] * target)
        assert loop.sizer.predict(target) == pytest.approx(truth, rel=0.15)


def grown(limit: float) -> Loop:
    loop = Loop(BatchSizer("aimd"), (200.0, 10.0), 0.0, 0)
    while loop.sizer.limit < limit:
        list(loop.run(1))
    return loop


def test_rare_pauses_of_small_batches_leave_a_large_limit_alone() -> None:
    loop = grown(800)
    limit = loop.sizer.limit
    for i in range(2000):
        loop.now += 1000
        loop.sizer.learn(3, 20_000 if i % 50 == 0 else 230, SLO_US, loop.now)
    assert loop.sizer.limit == limit
    assert loop.sizer.misses >= 40


def test_a_lasting_slowdown_of_small_batches_brings_a_large_limit_down_within_20() -> None:
    loop = grown(800)
    for _ in range(20):
        loop.now += 30_000
        loop.sizer.learn(3, 19_990 * 1.5, SLO_US, loop.now)
    assert loop.sizer.limit <= 4


def test_a_jump_that_misses_makes_the_next_one_wait_longer() -> None:
    """A model with a cliff at 512 rows: jumps over it become rare."""
    sizer = BatchSizer("aimd")
    now, over = 0, [0, 0]
    for i in range(4000):
        n = sizer.size(PLENTY)
        took = 1000 + 5 * n + (15_000 if n > 512 else 0)
        now += took
        sizer.learn(n, took, SLO_US, now)
        over[i >= 2000] += n > 512
    assert over[1] <= 0.06 * 2000


@pytest.mark.parametrize("mode", ADAPTIVE)
@pytest.mark.parametrize("name", LINES)
def test_one_pause_sheds_nothing(mode: str, name: str) -> None:
    loop = Loop(BatchSizer(mode), LINES[name], 0.02, 4)
    list(loop.run(200))
    n = loop.sizer.size(PLENTY)
    before = loop.sizer.predict(n)
    loop.sizer.learn(n, before + 20_000, SLO_US, loop.now)
    assert loop.sizer.predict(n) <= 1.06 * before
    assert loop.sizer.size(PLENTY) >= 0.85 * n - 1
    for share in (0.7, 1.0):
        assert not loop.sizer.must_shed(loop.now, loop.now, n, loop.now + int(share * SLO_US))


@pytest.mark.parametrize("mode", ["fit", "quantile"])
def test_one_batch_in_a_hundred_exceeds_the_worst(mode: str) -> None:
    rng = random.Random(5)
    sizer = BatchSizer(mode, size_max=500)
    exceeded = 0
    for i in range(12_000):
        n = rng.randrange(1, 300)
        took = 2000 + 20 * n + abs(rng.gauss(0, 200))
        exceeded += i >= 2000 and took > sizer.worst(n)
        sizer.learn(n, took, SLO_US, i * 1000)
    assert 0.006 <= exceeded / 10_000 <= 0.014


@pytest.mark.parametrize("mode", ["fit", "quantile"])
def test_the_limit_rises_from_batches_that_nearly_fill_it(mode: str) -> None:
    """A second batch is sent a little before it is full: if only full ones raised the limit, noise
    would lower it for ever."""
    loop = Loop(BatchSizer(mode), LINES["gpu"], 0.05, 3)
    list(loop.run(60))
    limits = []
    for _ in range(500):
        list(loop.run(1, queued=int(0.95 * loop.sizer.limit)))
        limits.append(loop.sizer.limit)
    assert np.mean(limits[100:]) >= 0.9 * best(LINES["gpu"])


def test_aimd_takes_no_step_that_is_predicted_to_miss_every_other_time() -> None:
    loop = Loop(BatchSizer("aimd"), LINES["kernel"], 0.05, 5)
    list(loop.run(50))
    sizes = list(loop.run(1000))
    assert np.mean(np.array(sizes) > best(LINES["kernel"])) <= 0.05
    assert np.mean(sizes) >= 0.85 * best(LINES["kernel"])


# -- a second batch


@pytest.mark.parametrize("mode", MODES)
def test_a_second_batch_is_full_or_costs_little_more_a_row_or_keeps_up(mode: str) -> None:
    sizer = BatchSizer(mode, size_max=200)
    list(Loop(sizer, LINES["gpu"], 0.02, 1).run(60))
    (a, b, _), limit = sizer.fit, sizer.limit
    for queued in range(1, 260):
        for rate in (0.0, 0.002, 0.01, 0.012, 0.5):
            cost = a / queued + b
            cheap = cost <= 1.02 * (a / limit + b)
            keeps_up = b * queued >= a and cost * rate <= 0.7
            wanted = queued >= int(limit) or (queued >= 64 and (cheap or keeps_up))
            assert sizer.second(queued, rate) == wanted, (queued, rate)


@pytest.mark.parametrize("mode", ADAPTIVE)
def test_no_second_batch_while_the_size_doubles(mode: str) -> None:
    sizer = BatchSizer(mode, size_max=64)
    loop = Loop(sizer, LINES["svm"], 0.0, 1)
    while sizer.limit < 64:  # of some 1000 that fit into half the budget
        assert not sizer.second(PLENTY, 0.0)
        list(loop.run(1))
    assert sizer.second(64, 0.0)
    assert not sizer.second(63, 0.0)


def test_a_fixed_size_has_its_second_batch_at_once() -> None:
    sizer = BatchSizer("static", size_max=64)
    assert sizer.second(64, 0.0)
    assert not sizer.second(63, 0.0)


# -- starvation


def answered(
    sizer: BatchSizer, latency: Callable[[int, int], float], until_us: int, every_us: int = 500
) -> list[int]:
    """Run the engine's rule under steady arrivals; return the times at which rows were answered
    within their SLO."""
    now, head, done = 0, 0, []
    while now < until_us:
        tail = now // every_us + 1
        while head < tail and sizer.must_shed(
            now, now, sizer.size(tail - head), head * every_us + SLO_US
        ):
            head += 1
        if head == tail:
            now = tail * every_us
            continue
        n = sizer.size(tail - head)
        took = latency(n, now)
        now += int(took)
        done += [now] * sum(row * every_us + SLO_US >= now for row in range(head, head + n))
        head += n
        sizer.learn(n, took, SLO_US, now)
    return done


@pytest.mark.parametrize("mode", MODES)
def test_a_cold_model_is_not_starved(mode: str) -> None:
    """The first batches take a second each; then 2 ms a batch."""
    for cold in (1, 2, 3, 6):
        left = [cold]

        def latency(n: int, now: int, left: list[int] = left) -> float:
            left[0] -= 1
            return 1e6 if left[0] >= 0 else 2000.0 + 10 * n

        done = answered(BatchSizer(mode, size_max=64), latency, 9_000_000)
        last_second = sum(t >= 8_000_000 for t in done)
        assert last_second >= 0.98 * 2000


@pytest.mark.parametrize("mode", MODES)
def test_a_stall_is_probed_and_left_behind(mode: str) -> None:
    """Between 1 s and 3 s every batch takes 200 ms; afterwards all is as before within 0.3 s."""
    done = answered(
        BatchSizer(mode, size_max=64),
        lambda n, now: 200_000.0 if 1e6 <= now < 3e6 else 2000.0 + 10 * n,
        5_000_000,
    )
    assert sum(t >= 3_500_000 for t in done) >= 0.98 * 3000


@pytest.mark.parametrize("mode", ADAPTIVE)
def test_a_high_fixed_cost_does_not_trap_it_at_one_row(mode: str) -> None:
    """A batch takes 12 ms + 30 us a row: the batcher must not predict twice the time of one row for
    two."""
    done = answered(BatchSizer(mode), lambda n, now: 12_000.0 + 30 * n, 8_000_000, every_us=1000)
    assert sum(t >= 6_000_000 for t in done) / 2000 >= 0.5  # at one row a batch it would be 0.08


def test_the_hopeless_is_probed_ten_times_a_second() -> None:
    sizer = BatchSizer("fit")
    for i in range(10):
        sizer.learn(1, 1e6, SLO_US, i)
    now = 100
    for _ in range(50):
        assert sizer.must_shed(now, now, 2, now + SLO_US + PROBE_US), (
            "only a batch of one is a probe"
        )
        assert sizer.must_shed(now, now, 1, now + SLO_US)
        now += PROBE_US
        assert not sizer.must_shed(now, now, 1, now + SLO_US)
        sizer.learn(1, 1e6, SLO_US, now)
    sizer.learn(1, 1000, SLO_US, now + PROBE_US + 1)
    assert sizer.predict(1) < 2000, "a stale estimate believes at once that the replica is fast"


# -- delay, static


@settings(max_examples=200, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    delay=st.integers(0, 2000),
    queued=st.integers(1, 300),
    oldest=st.integers(0, 10**9),
    slo=st.integers(0, 40_000),
)
def test_a_held_batch_still_makes_it(
    mode: str, delay: int, queued: int, oldest: int, slo: int
) -> None:
    sizer = BatchSizer(mode, size_max=200, delay_us=delay)
    list(Loop(sizer, LINES["gpu"], 0.02, 1).run(40))
    until = sizer.hold_until(queued, oldest, oldest + slo)
    if until:
        assert queued < int(sizer.limit)
        assert oldest < until <= oldest + delay
        assert until + sizer.worst(int(sizer.limit)) + 500 <= oldest + slo + 1
    else:
        assert delay == 0 or queued >= int(sizer.limit) or slo < sizer.worst(int(sizer.limit)) + 502


def test_static_pads_its_predictions() -> None:
    plain, padded = (BatchSizer("static", size_max=32, pad=pad) for pad in (False, True))
    for sizer in (plain, padded):
        for i in range(100):
            sizer.learn(1 + i % 32, 1000 + 100 * (32 if sizer is padded else 1 + i % 32), SLO_US, i)
        assert sizer.size(PLENTY) == sizer.limit == 32
        assert sizer.size(5) == 5
    assert padded.predict(1) == padded.predict(32) == pytest.approx(4200, rel=0.01)
    assert plain.predict(1) == pytest.approx(1100, rel=0.1)
    ((n, mean_us, count),) = padded.profile()
    assert (n, count) == (32, 100)
    assert mean_us == pytest.approx(4200)


def test_mixed_slos_keep_to_the_tightest_of_late() -> None:
    loop = Loop(BatchSizer("fit"), LINES["svm"], 0.02, 1)
    for i in range(200):
        n = loop.sizer.size(PLENTY)
        loop.now += 10_000
        loop.sizer.learn(n, 200 + 5 * n, SLO_US if i % 2 else 10 * SLO_US, loop.now)
        assert loop.sizer.limit <= 1.1 * best(LINES["svm"]) or i < 20
    for _ in range(150):
        loop.sizer.learn(
            loop.sizer.size(PLENTY), 200 + 5 * loop.sizer.size(PLENTY), 10 * SLO_US, loop.now
        )
    assert loop.sizer.limit == 4096, "and forget it once it is gone"


# -- the door


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"mode": "fastest"}, "fastest"),
        ({"size_max": 0}, "size_max is 0"),
        ({"step": 0}, "step 0"),
        ({"backoff": 1.0}, "backoff is 1.0"),
        ({"backoff": math.nan}, "backoff is nan"),
        ({"budget_share": 0.0}, "budget_share is 0"),
        ({"budget_share": 1.5}, "budget_share is 1.5"),
    ],
)
def test_bad_settings_are_named(settings_: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BatchSizer(**settings_)  # type: ignore[arg-type]


def test_modes_have_numbers() -> None:
    assert [mode.name.lower() for mode in BatchingMode] == MODES


@pytest.mark.parametrize("mode", ADAPTIVE)
def test_a_warm_up_seeds_the_limit_and_the_fit(mode: str) -> None:
    """Timings that a container measured before it was ready count like answered batches; the first
    SLO cuts the limit."""
    sizer = BatchSizer(mode, size_max=512)
    for n in (1, 1, 1, *(1 << k for k in range(1, 9) for _ in range(2))):
        sizer.seed(n, 100 + 40 * n, 0)
    assert sizer.limit >= 256
    assert sizer.predict(100) == pytest.approx(4_150, rel=0.1)
    sizer.know_slo(SLO_US)
    assert 128 <= sizer.limit <= 260, "half of 20 ms holds 245 rows of 40 us"
    slow = BatchSizer(mode, size_max=512)
    for _ in range(3):
        slow.seed(1, 200_000, 0)
    slow.know_slo(SLO_US)
    assert slow.limit == 1
    assert slow.must_shed(0, 0, 2, SLO_US)


def test_a_warm_up_does_not_change_a_fixed_size() -> None:
    sizer = BatchSizer("static", size_max=64)
    sizer.seed(1, 1_000_000, 0)
    sizer.know_slo(SLO_US)
    assert sizer.limit == 64
