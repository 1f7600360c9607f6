"""Control groups (cgroup v2) in which children run, so that all that a child has started ends with
it, also what has left its process group.

A supervisor has a group of its own below the one that its process is in, and one below that for
each start. No controller is enabled in them, so memory and cores are limited and shared as without
them. A server that is killed leaves its group; the next one that starts in the same place removes
it, with what is in it. A lock on the folder tells which groups are in use.
"""

import contextlib
import fcntl
import itertools
import os
import re
import secrets
import signal
import time
from pathlib import Path
from typing import Final

NAME: Final = "clipper-"
MOUNTS: Final = Path("/proc/self/mountinfo")
OWN: Final = Path("/proc/self/cgroup")
END_S: Final = 5.0  # from SIGKILL to the end of processes; the kernel may hold them for longer
_PAUSE_S: Final = 0.002
_KILL: Final = "cgroup.kill"  # Linux 5.14
_PROCESSES: Final = "cgroup.procs"
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
                return found
            why = f"{found} cannot be written"
    raise OSError(why)


class ControlGroups:
    """The groups of a supervisor's children. Threads: the supervisor's.

    Where none can be made, children run without.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = -1
        self._numbers = itertools.count(1)

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

    def new(self) -> Path | None:
        """Make a group; return the file by which a process joins it. None where there is none."""
        if self._folder is None:
            return None
        group = self._folder / str(next(self._numbers))
        try:
            group.mkdir()
        except OSError:  # there are limits
            return None
        return group / _PROCESSES

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
