"""Ends a process with the thread that started it (PR_SET_PDEATHSIG).

Run by its path, which needs nothing but the standard library, it becomes a program that ends so:
PARENT FOLDER NICE PROGRAM ARGUMENT... `command` makes these words.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

EXIT_NOT_FOUND: Final = 127
GROUP_ENV: Final = "CLIPPER_CONTROL_GROUP"  # the file by which a process joins its control group
LIMITS_ENV: Final = "CLIPPER_PROCESS_LIMITS"  # bytes of data, and cores, of each process; 0: any
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent(
    parent: int = 0,
    sent: signal.Signals = signal.SIGKILL,
    ignores_ctrl_c: bool = False,
) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends, and join
    the control group that was made for this process, if any: all that it starts ends with it. Then
    take the limits that the group does not have.

    parent: process id that its parent must have; with another one the parent has ended already,
    and the signal is sent at once. 0: whichever it is. ignores_ctrl_c: Ctrl-C reaches all processes
    of a terminal; its parent decides what to end.
    """
    group = os.environ.pop(GROUP_ENV, "")
    if group:
        with contextlib.suppress(OSError), open(group, "w", encoding="ascii") as file:
            file.write("0")
    limits = os.environ.pop(LIMITS_ENV, "")
    if limits:
        _limit(*map(int, limits.split()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sent, 0, 0, 0)
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), sent)
    if ignores_ctrl_c:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _limit(data_bytes: int, cores: int) -> None:
    """Limit the memory that this process writes to, with what it reserves, and the cores that it
    runs on; what it starts has the same limits, each for itself.

    cores: those after the one that its process id names, so that processes share them evenly.
    """
    if data_bytes:
        # not above: the command says on Windows, which has no such module, where models run
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bound = data_bytes if hard == resource.RLIM_INFINITY else min(data_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    if cores:
        allowed = sorted(os.sched_getaffinity(0))
        at = os.getpid() * cores % len(allowed)
        os.sched_setaffinity(0, (allowed * 2)[at : at + min(cores, len(allowed))])


def command(words: Sequence[str], folder: str, nice: int = 0) -> list[str]:
    """Return the command line of a child of this process that becomes a program and is killed with
    the thread that started it.

    words: path of the program and its arguments. folder: where it runs. nice: by how much its
    priority is lower than that of this process.
    """
    start = [sys.executable, "-I", "-S", __file__, str(os.getpid()), folder, str(nice)]
    return [*start, *words]


def main(parent: int, folder: str, nice: int, words: list[str]) -> int:
    """Become the program; return only if it cannot be run."""
    end_with_parent(parent, ignores_ctrl_c=True)
    try:
        os.nice(nice)
        os.chdir(folder)
        os.execv(words[0], words)
    except OSError as error:
        sys.stderr.write(f"cannot run {words[0]}: {error.strerror}\n")
    return EXIT_NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
