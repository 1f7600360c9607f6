"""The memory and the cores that this process may use: those of the machine, or of its container;
and what a process uses.

Limits are read from the control groups of the process, version 2 or 1 (kernel documentation,
Documentation/admin-guide/cgroup-v2.rst), from its own group up to the root: the smallest holds.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
PAGE = os.sysconf("SC_PAGE_SIZE")
FILES_MAX = 1 << 17  # open files; beyond it some programs count them all


def memory_bytes(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the memory that this process may use, in bytes."""
    limit = int(os.sysconf("SC_PHYS_PAGES")) * PAGE
    for folder in _folders("memory", groups, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                limit = min(limit, int((folder / name).read_text()))
    return limit


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process in bytes; 0 if it does not exist."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process in bytes, in which a page that n processes share counts
    1/n (PSS); 0 if it does not exist, or is not ours. It takes about a millisecond.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
    except (OSError, ValueError, IndexError):
        return 0


def cores(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return how many cores this process may use, at least 1; a part of one counts as one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = float(usable or 1)
    for folder in _folders("cpu", groups, own):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            limit = min(limit, int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                limit = min(limit, quota_us / int((folder / "cpu.cfs_period_us").read_text()))
    return max(1, math.ceil(limit))


def raise_files_max() -> None:
    """Raise this process's limit of open files to the hard limit, at most FILES_MAX. A server and a
    host have a socket for each connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _folders(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups, as this container sees them: its own group is the
    root of what is mounted, or lies below it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        root = groups / controller if names else groups
        place = root / path.lstrip("/")
        yield from (one for one in (place, *place.parents) if one.is_relative_to(root))
