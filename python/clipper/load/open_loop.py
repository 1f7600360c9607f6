"""Open-loop load generation: each query is sent at its own time, whatever the state of earlier
ones.

A generator that waits for answers sends less to a slow server and so hides its slowness
("coordinated omission", Tene 2015). Here the times are fixed beforehand, latency counts from them,
and the generator's own lateness is reported.

`send_on_time` drives an event loop. Event loops round timers to milliseconds, longer than many
answers take, and spinning takes a core that the server may need; a timerfd wakes the loop within
about 50 us of any time, for one system call.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

_BURST = 128  # queries sent at once when late, before answers are read
_SOON_S = 20e-6  # a query due this soon is sent at once
_CLOCK_MONOTONIC = 1  # what time.perf_counter reads on Linux
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1


def arrivals(rate: float, seconds: float, seed: int) -> NDArray[np.float64]:
    """Return Poisson arrival times in seconds, at `rate` per second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds * 1.2) + 100)
    times = np.cumsum(gaps)
    return times[times < seconds]


def evenly(rate: float, seconds: float) -> NDArray[np.float64]:
    """Return arrival times in seconds, one every 1 / rate."""
    return np.arange(max(int(rate * seconds), 1)) / rate


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


class TimerFd:
    """A timerfd that becomes readable at a given time of `time.perf_counter()`. Threads: one."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, when_s: float) -> None:
        """Arm the timer."""
        ns = max(round(when_s * 1e9), 1)
        spec = _TimerSpec(0, 0, ns // 1_000_000_000, ns % 1_000_000_000)
        if self._libc.timerfd_settime(self.fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


async def send_on_time(
    dues: Iterator[float], send: Callable[[float], None], stopping: asyncio.Event
) -> None:
    """Call `send(due)` at each time of `dues` (time.perf_counter seconds). Returns after the
    last, or when `stopping` is set.
    """
    loop, alarm = asyncio.get_running_loop(), TimerFd()
    over: asyncio.Future[None] = loop.create_future()
    due = next(dues, None)

    def ring() -> None:
        nonlocal due
        try:
            for _ in range(_BURST):
                if due is None or due > time.perf_counter() + _SOON_S or stopping.is_set():
                    break
                send(due)
                due = next(dues, None)
            if due is None or stopping.is_set():
                if not over.done():
                    over.set_result(None)
                alarm.set(1e12)
            else:
                alarm.set(due)
        except BaseException as error:
            loop.remove_reader(alarm.fd)
            if not over.done():
                over.set_exception(error)

    loop.add_reader(alarm.fd, ring)
    halt = asyncio.ensure_future(stopping.wait())
    try:
        ring()
        await asyncio.wait((over, halt), return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            over.result()
    finally:
        halt.cancel()
        loop.remove_reader(alarm.fd)
        alarm.close()
