"""Process metrics from the kernel; without /proc only CPU time and the limit of descriptors."""

import contextlib
import functools
import os
import resource
import time
from pathlib import Path

from clipper.metrics.samples import Samples
from clipper_container.machine import PAGE, proportional_bytes

_TICKS = os.sysconf("SC_CLK_TCK")


def proportional_bytes_lately(pid: int) -> int:
    """Return `proportional_bytes` as it was within the last minute, for frequent readers."""
    return _proportional_bytes(pid, int(time.monotonic() // 60))


@functools.lru_cache(maxsize=4096)
def _proportional_bytes(pid: int, minute: int) -> int:
    return proportional_bytes(pid)


def collect(into: Samples) -> None:
    """Add the metrics of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    into.add("process_cpu_seconds_total", used.ru_utime + used.ru_stime)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    into.add("process_max_fds", float("inf") if most == resource.RLIM_INFINITY else most)
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        into.add("process_threads", int(fields[17]))
        into.add("process_virtual_memory_bytes", int(fields[20]))
        into.add("process_resident_memory_bytes", int(fields[21]) * PAGE)
        into.add("process_start_time_seconds", _booted_s() + int(fields[19]) / _TICKS)
        into.add("process_open_fds", len(os.listdir("/proc/self/fd")))


@functools.cache
def _booted_s() -> int:
    lines = Path("/proc/stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("btime "))
