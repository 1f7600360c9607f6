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
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent(
    parent: int = 0,
    sent: signal.Signals = signal.SIGKILL,
    ignores_ctrl_c: bool = False,
) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends, and join
    the control group that was made for this process, if any: all that it starts ends with it.

    parent: process id that its parent must have; with another one the parent has ended already,
    and the signal is sent at once. 0: whichever it is. ignores_ctrl_c: Ctrl-C reaches all processes
    of a terminal; its parent decides what to end.
    """
    group = os.environ.pop(GROUP_ENV, "")
    if group:
        with contextlib.suppress(OSError), open(group, "w", encoding="ascii") as file:
            file.write("0")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sent, 0, 0, 0)
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), sent)
    if ignores_ctrl_c:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


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
