"""Control groups (cgroup v2) in which children run, so that all that a child has started ends with
it, also what has left its process group.

A supervisor has a group of its own below the one that its process is in, and one below that for
each start. A server that is killed leaves its group; the next one that starts in the same place
removes it, with what is in it. A lock on the folder tells which groups are in use.

The memory and the cores of a start that has limits are limited by its group, if that has the
controllers. The kernel allows them only below a group without processes: below the root, or below
the group of a unit of systemd with `DelegateSubgroup=`, which puts the server itself into a group
below. Elsewhere each process of the start has limits of its own (`clipper_container.parent_death`).
"""

import contextlib
import fcntl
import itertools
import math
import os
import re
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from clipper.processes.handle import NO_LIMITS, End, ProcessLimits
from clipper_container.parent_death import GROUP_ENV, LIMITS_ENV

NAME: Final = "clipper-"
MOUNTS: Final = Path("/proc/self/mountinfo")
OWN: Final = Path("/proc/self/cgroup")
END_S: Final = 5.0  # from SIGKILL to the end of processes; the kernel may hold them for longer
_PAUSE_S: Final = 0.002
_KILL: Final = "cgroup.kill"  # Linux 5.14
_PROCESSES: Final = "cgroup.procs"
CONTROLLERS: Final = ("memory", "cpu")
_CONTROL: Final = "cgroup.subtree_control"
_DELEGATED: Final = "user.delegate"  # set by systemd on a group that is another's to divide
_PERIOD_US: Final = 100_000  # of `cpu.max`
_KILLED_FOR_MEMORY: Final = 137  # as of a shell: by SIGKILL, but not from outside
_TRIES: Final = 3  # another server may take a new group for an old one


def own_group(mounts: Path = MOUNTS, own: Path = OWN) -> Path:
    """Return the folder of the group that this process is in. Raises: OSError with the reason if no
    groups can be made below it.
    """
    why = "no cgroup v2 is mounted that has this process"
    places = [Path(line[3:]) for line in own.read_text().splitlines() if line.startswith("0::")]
    for fields in map(str.split, mounts.read_text().splitlines()):
        root, point = map(_unescaped, fields[3:5])
        for place in places if fields[fields.index("-") + 1] == "cgroup2" else ():
            if not place.is_relative_to(root) or ".." in place.parts:
                continue  # outside of what this container sees
            found = Path(point) / place.relative_to(root)
            if os.access(found, os.W_OK) and os.access(found / _PROCESSES, os.W_OK):
                return found.parent if _is_delegated(found.parent) else found
            why = f"{found} cannot be written"
    raise OSError(why)


@dataclass(frozen=True, slots=True)
class StartGroup:
    """The control group and the limits of the processes of one start. folder: of the group; None:
    they have none. held: the controllers that limit the group; other limits are those of each
    process.
    """

    folder: Path | None
    limits: ProcessLimits = NO_LIMITS
    held: frozenset[str] = frozenset()

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables by which the process of the start joins the group, and limits
        itself."""
        found = {} if self.folder is None else {GROUP_ENV: str(self.folder / _PROCESSES)}
        data_bytes = 0 if "memory" in self.held else self.limits.memory_mib << 20
        cores = 0 if "cpu" in self.held else math.ceil(self.limits.cpus)
        return {**found, LIMITS_ENV: f"{data_bytes} {cores}"} if data_bytes or cores else found

    @property
    def text(self) -> str:
        """The limits, and what holds them, for people; empty without limits."""
        memory = "its group" if "memory" in self.held else "the data of each process (RLIMIT_DATA)"
        cpu = "its group" if "cpu" in self.held else "the cores it may run on"
        each = (
            (self.limits.memory_mib, f"memory_mib={self.limits.memory_mib} of {memory}"),
            (self.limits.cpus, f"cpus={self.limits.cpus:g} of {cpu}"),
        )
        return ", ".join(text for limit, text in each if limit)

    def explained(self, end: End) -> End:
        """Return the end of its process, with the limit that it met."""
        limit = f"its limit, memory_mib, is {self.limits.memory_mib}"
        if not self.limits.memory_mib or end.own or end.code == 0:
            return end
        if "memory" not in self.held:
            text = f"{end.detail} (the limit of its data, memory_mib, is {self.limits.memory_mib})"
            return end if end.is_stop else replace(end, detail=text)
        if self.folder is not None and _was_short_of_memory(self.folder):
            return replace(end, code=_KILLED_FOR_MEMORY, detail=f"killed for memory ({limit})")
        return end

    def _hold(self) -> None:
        """Set the limits of the group. Raises: OSError."""
        assert self.folder is not None
        if "memory" in self.held:
            (self.folder / "memory.max").write_text(str(self.limits.memory_mib << 20))
            (self.folder / "memory.oom.group").write_text("1")
            with contextlib.suppress(FileNotFoundError):  # the kernel counts no swap
                (self.folder / "memory.swap.max").write_text("0")
        if "cpu" in self.held:
            quota_us = max(1000, round(self.limits.cpus * _PERIOD_US))
            (self.folder / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")


class ControlGroups:
    """The groups of a supervisor's children. Threads: the supervisor's.

    Where none can be made, children run without.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = -1
        self._numbers = itertools.count(1)
        self._holds: frozenset[str] = frozenset()  # controllers of the groups of starts

    def open(self) -> None:
        """Remove the groups of servers that have ended, and make one for this one."""
        try:
            place = own_group()
        except OSError:  # `clipper doctor` tells
            return
        until_s = time.monotonic() + END_S
        with contextlib.suppress(OSError):  # there are limits
            for left in place.glob(f"{NAME}*"):
                if (lock := _locked(left)) >= 0:
                    _end_until(left, until_s)
                    os.close(lock)
            for _ in range(_TRIES):
                if self._make(place / f"{NAME}{os.getpid()}-{secrets.token_hex(4)}"):
                    self._holds = _enabled(place) & _enabled(self._folder)
                    return

    def _make(self, folder: Path) -> bool:
        """Make the group of this server; return False if another has taken it for an old one.
        Raises: OSError; then it is not there."""
        folder.mkdir()
        try:
            lock = _locked(folder)
        except OSError:
            folder.rmdir()
            raise
        if lock >= 0:
            self._folder, self._lock = folder, lock
        return lock >= 0

    def new(self, limits: ProcessLimits = NO_LIMITS) -> StartGroup:
        """Make a group for a start with these limits."""
        if self._folder is None:
            return StartGroup(None, limits)
        wanted = {"memory": limits.memory_mib, "cpu": limits.cpus}
        held = frozenset(name for name in self._holds if wanted[name])
        group = StartGroup(self._folder / str(next(self._numbers)), limits, held)
        assert group.folder is not None
        try:
            group.folder.mkdir()
        except OSError:  # there are limits
            return StartGroup(None, limits)
        try:
            group._hold()
        except OSError:
            return replace(group, held=frozenset())
        return group

    def close(self) -> None:
        """End all that is left in the groups. Idempotent."""
        folder, self._folder = self._folder, None
        if folder is not None:
            _end_until(folder, time.monotonic() + END_S)
            os.close(self._lock)


def end(group: Path) -> bool:
    """Kill what is in a group, and remove it; return whether it is gone. Killed processes end a
    little later."""
    with contextlib.suppress(OSError):  # most are empty
        group.rmdir()
        return True
    with contextlib.suppress(OSError):
        _kill(group)
        for folder, _, _ in os.walk(group, topdown=False):
            os.rmdir(folder)
    return not group.exists()


def _is_delegated(group: Path) -> bool:
    """Return whether a group is this user's to divide, and has no process of its own."""
    try:
        is_ours = os.getxattr(group, _DELEGATED) == b"1"
        return is_ours and os.access(group, os.W_OK) and not (group / _PROCESSES).read_bytes()
    except OSError:
        return False


def _enabled(group: Path | None) -> frozenset[str]:
    """Enable the controllers in a group for those below it; return those that are."""
    if group is None:
        return frozenset()
    found: set[str] = set()
    for name in CONTROLLERS:
        with contextlib.suppress(OSError):  # it has none, or it has processes
            (group / _CONTROL).write_text(f"+{name}")
    with contextlib.suppress(OSError):
        found = {*(group / _CONTROL).read_text().split()}
    return frozenset(CONTROLLERS) & found


def _was_short_of_memory(group: Path) -> bool:
    """Return whether the kernel has killed a process of a group because of its limit."""
    with contextlib.suppress(OSError):
        counts = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
        return int(counts.get("oom_kill", 0)) > 0
    return False


def _end_until(group: Path, until_s: float) -> None:
    while not end(group) and time.monotonic() < until_s:
        time.sleep(_PAUSE_S)


def _kill(group: Path) -> None:
    """Kill all processes of a group, and of those below it. Raises: OSError."""
    if (group / _KILL).exists():
        (group / _KILL).write_text("1")
        return
    for processes in group.rglob(_PROCESSES):
        for pid in map(int, processes.read_text().split()):
            if pid:  # 0: of another pid namespace
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _locked(group: Path) -> int:
    """Lock the folder of a group; return its descriptor, -1 if the group is gone or in use."""
    try:
        fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if group.exists():
                undo.pop_all()
                return fd
    return -1


def _unescaped(path: str) -> str:
    """Return a path of the table of mounts, where a space is `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
