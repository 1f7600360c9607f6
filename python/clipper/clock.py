"""Time. Everything inside counts microseconds of the monotonic clock; the wall clock only stamps
records for people."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_us(self) -> int:
        """Microseconds of a clock that never goes back; only differences mean something."""
        ...


class SystemClock:
    """CLOCK_MONOTONIC, the clock the core reads too. Threads: any."""

    __slots__ = ()

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000


def wall_time_us() -> int:
    """Microseconds since 1970 by the wall clock. It may jump: for stamps such as `created_us`,
    never for deadlines."""
    return time.time_ns() // 1000
