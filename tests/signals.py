"""Stopping processes for tests of peers that hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

PATIENCE_S = 20.0


def freeze(process: int) -> None:
    """Send SIGSTOP and return when no thread of the process runs any more; kill() alone returns
    earlier.

    process: its id.  Raises TimeoutError after PATIENCE_S.
    """
    os.kill(process, signal.SIGSTOP)
    give_up = time.monotonic() + PATIENCE_S
    while not is_frozen(process):
        if time.monotonic() > give_up:
            raise TimeoutError(f"process {process} did not stop within {PATIENCE_S:g} s of SIGSTOP")
        time.sleep(0.001)


def has_ended(process: int) -> bool:
    """Return whether a process runs no more; its parent may not have waited for it."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def is_frozen(process: int) -> bool:
    stats = [stat.read_text() for stat in Path(f"/proc/{process}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}
