"""Lowers the CPU priority of a container while it loads, in favour of those that serve."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

NICE = 10  # added while the model loads, where that can be undone
_CAP_SYS_NICE = 23


def lower() -> Callable[[], None]:
    """Lower the priority of this process; return a function that restores it for every thread and
    child it has by then.

    SCHED_BATCH always, which any process may leave again; a higher nice value only if the process
    may lower it again. Does nothing where the system supports neither.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return lambda: None
    try:
        policy, nice = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
        if policy != os.SCHED_OTHER:
            return lambda: None  # the user chose a policy
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if _may_lower_nice(nice):
            os.setpriority(os.PRIO_PROCESS, 0, nice + NICE)  # at most 19: so Linux takes it
    except OSError:
        return lambda: None
    return lambda: _restore(nice)


def _restore(nice: int) -> None:
    for task in _tasks():
        with contextlib.suppress(OSError):  # the thread has ended
            if os.sched_getscheduler(task) == os.SCHED_BATCH:
                os.sched_setscheduler(task, os.SCHED_OTHER, os.sched_param(0))
            if os.getpriority(os.PRIO_PROCESS, task) == min(19, nice + NICE):
                os.setpriority(os.PRIO_PROCESS, task, nice)


def _tasks() -> Iterator[int]:
    """The threads of this process, and its children."""
    folder = f"/proc/{os.getpid()}/task"
    with contextlib.suppress(OSError):
        for task in os.listdir(folder):
            yield int(task)
            with (
                contextlib.suppress(OSError),
                open(f"{folder}/{task}/children", encoding="ascii") as children,
            ):
                yield from map(int, children.read().split())


def _may_lower_nice(nice: int) -> bool:
    """Return whether a higher nice value can be taken back."""
    import resource

    if (
        hasattr(resource, "RLIMIT_NICE")
        and resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - nice
    ):
        return True
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/self/status", encoding="ascii", errors="replace") as status,
    ):
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1)
    return False
