"""Stop a process that another command has started."""

import contextlib
import os
import select
import signal
import sys

import click

_EXIT_STILL_THERE = 1
_SECOND_S = 0.3  # from the first signal to the second


def end_process(pid: int, wait_s: float, otherwise: str, *, now: bool = False) -> None:
    """Send SIGTERM to a process and wait for its end.

    wait_s: seconds after which this command prints `otherwise` and ends with exit code 1. now: send
    the signal twice, which `clipper up` takes as not to wait for queries. Raises ProcessLookupError
    if there is no such process.
    """
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if now and not _ended(process, _SECOND_S):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGTERM)
        if not _ended(process, wait_s):
            click.echo(otherwise, err=True)
            sys.exit(_EXIT_STILL_THERE)
    finally:
        os.close(process)


def _ended(process: int, patience_s: float) -> bool:
    """Wait for a process to end; its pidfd becomes readable then."""
    return bool(select.select([process], [], [], patience_s)[0])
