"""Time. Everything inside counts microseconds of the monotonic clock; the wall clock only stamps
records for people."""

import contextlib
import time
from collections.abc import Callable, Iterator


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
