"""The clocks, and durations as people write and read them. Everything inside counts microseconds
of the monotonic clock; the wall clock only stamps records for people."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Final

_DURATION: Final = re.compile(r"\s*([0-9.]+)\s*(ms|s|m|h|d)?\s*")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, None: 1.0}


def wall_time_us() -> int:
    """Return the microseconds since 1970 by the wall clock. It may jump: use it for stamps such as
    `created_us`, never for deadlines."""
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


def seconds_in(text: str) -> float:
    """Parse a duration: "500ms", "10s", "5m", "1h", "7d"; a plain number is seconds. Raises
    ValueError.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a duration")
    return float(found[1]) * _SECONDS[found[2]]


def age_of(seconds: float) -> str:
    """Format an age in the largest unit of which it has two: "90 min", "3 d"."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


_wall_ns: Callable[[], int] = time.time_ns
