"""Time. Everything inside counts microseconds of the monotonic clock; the wall clock only stamps
records for people."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol


class Clock(Protocol):
    """A clock for durations and deadlines."""

    def now_us(self) -> int:
        """Microseconds of a clock that never goes back; only differences mean something."""


class SystemClock:
    """CLOCK_MONOTONIC, the clock the core reads too. Threads: any."""

    __slots__ = ()

    def now_us(self) -> int:
        """Return CLOCK_MONOTONIC in microseconds."""
        return time.monotonic_ns() // 1000


def wall_time_us() -> int:
    """Microseconds since 1970 by the wall clock. It may jump: for stamps such as `created_us`,
    never for deadlines."""
    return _wall_ns() // 1000


@contextlib.contextmanager
def wall_clock(now_ns: Callable[[], int]) -> Iterator[None]:
    """Make `wall_time_us` read another clock, in nanoseconds since 1970: for simulations."""
    global _wall_ns
    known, _wall_ns = _wall_ns, now_ns
    try:
        yield
    finally:
        _wall_ns = known


_wall_ns: Callable[[], int] = time.time_ns
