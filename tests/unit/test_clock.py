"""The clock of the inside never goes back; the wall clock is for people."""

import time

from clipper.clock import Clock, SystemClock, wall_time_us


def test_the_system_clock_is_the_monotonic_one_in_microseconds() -> None:
    clock: Clock = SystemClock()
    before = time.monotonic_ns()
    now_us = clock.now_us()
    after = time.monotonic_ns()
    assert before // 1000 <= now_us <= after // 1000
    times = [clock.now_us() for _ in range(100)]
    assert times == sorted(times)
    assert isinstance(now_us, int)


def test_the_wall_clock_counts_from_1970() -> None:
    assert wall_time_us() > 1_577_836_800_000_000  # 2020
    assert isinstance(wall_time_us(), int)
