"""Becomes a program that ends with the thread that started it.

Run by its path, in an interpreter without site packages: PARENT FOLDER PROGRAM ARGUMENT...
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
EXIT_NOT_FOUND = 127


def main(parent: int, folder: str, words: list[str]) -> int:
    """Ask the kernel for SIGKILL when the parent thread ends, ignore Ctrl-C, and run the program.

    Returns only if it cannot be run.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 0  # the parent ended before the call
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        os.chdir(folder)
        os.execv(words[0], words)
    except OSError as error:
        sys.stderr.write(f"cannot run {words[0]}: {error.strerror}\n")
    return EXIT_NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
