"""Many runs of one seed each, in processes beside each other, with a line about how far they
are."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any

PROCESSES = 2


def exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit in the main thread, so that all that a `with` statement or a
    `finally` ends is ended, such as processes.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def in_parallel(
    title: str,
    run: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    processes: int = PROCESSES,
    limit_s: float | None = None,
) -> list[Any]:
    """Return run(*job) of every job, in their order. `run` and jobs are pickled; a few jobs are run
    right here. The processes end at once when a run fails, when `limit_s` seconds are over
    (TimeoutError), or when this process ends.
    """
    if len(jobs) <= processes:
        return [run(*job) for job in jobs]
    # of the processes to come: they are as many as the cores already
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: list[Any] = [None] * len(jobs)
    begun = told = time.monotonic()
    context = multiprocessing.get_context("spawn")
    watched, held = context.Pipe(duplex=False)
    with ProcessPoolExecutor(processes, context, _end_with, (watched,)) as pool:
        try:
            waiting = {pool.submit(run, *job): i for i, job in enumerate(jobs)}
            for done, future in enumerate(as_completed(waiting, limit_s), 1):
                found[waiting[future]] = future.result()
                now = time.monotonic()
                if now - told > 10 or (done == len(jobs) and now - begun > 10):
                    told, left = now, (now - begun) / done * (len(jobs) - done)
                    print(
                        f"{title}: {done} of {len(jobs)} runs, about {left:.0f} s left",
                        file=sys.stderr,
                        flush=True,
                    )
        except BaseException:
            held.close()
            raise
    held.close()
    watched.close()
    return found


def _end_with(watched: Connection) -> None:
    """End this process when the other end of a pipe is closed, also by a kill of its holder."""

    def wait() -> None:
        watched.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
