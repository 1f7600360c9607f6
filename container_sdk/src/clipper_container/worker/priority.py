"""Lowers the CPU priority of a container while it loads, in favour of those that serve."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

NICE = 10  # added while the model loads, where that can be undone
SLICE_NS = 100_000_000  # requested of the scheduler: processes with shorter ones have precedence
_CAP_SYS_NICE = 23
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of the system call


class _Attributes(ctypes.Structure):
    """The `struct sched_attr` of Linux, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def lower() -> Callable[[], None]:
    """Lower the priority of this thread, and so of threads and processes that it starts; return a
    function that restores it for every thread and child of the process that calls it.

    SCHED_BATCH and a long time slice always, which any process may leave again: since Linux 6.12 a
    thread that wakes takes the core at once from one with a longer slice. A higher nice value only
    if the process may lower it again. Does nothing where the system supports none of this.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return lambda: None
    try:
        policy, nice = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
        if policy != os.SCHED_OTHER:
            return lambda: None  # the user chose a policy
        _set(0, os.SCHED_BATCH, min(19, nice + NICE) if _may_lower_nice(nice) else nice, SLICE_NS)
    except OSError:
        return lambda: None
    return lambda: _restore(nice)


def _restore(nice: int) -> None:
    for task in _tasks():
        with contextlib.suppress(OSError):  # the thread has ended
            now = os.getpriority(os.PRIO_PROCESS, task)
            if os.sched_getscheduler(task) == os.SCHED_BATCH:
                _set(task, os.SCHED_OTHER, nice if now == min(19, nice + NICE) else now, 0)


def _set(task: int, policy: int, nice: int, slice_ns: int) -> None:
    """Set policy, nice value and time slice of a thread; 0 for its own, and for the usual slice.
    Raises: OSError.
    """
    number = _SCHED_SETATTR.get(os.uname().machine)
    wanted = _Attributes(ctypes.sizeof(_Attributes), policy, 0, nice, 0, slice_ns)
    if number is None or ctypes.CDLL(None).syscall(number, task, ctypes.byref(wanted), 0):
        os.sched_setscheduler(task, policy, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, task, nice)


def _tasks() -> Iterator[int]:
    """Return the threads of this process, and its children."""
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
