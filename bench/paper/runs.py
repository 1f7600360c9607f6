"""Many runs of one seed each, in processes beside each other, with a line about how far they
are."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

PROCESSES = 2


def in_parallel(
    title: str, run: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], processes: int = PROCESSES
) -> list[Any]:
    """run(*job) of every job, in their order. `run` and jobs are pickled; a few jobs are run right
    here."""
    if len(jobs) <= processes:
        return [run(*job) for job in jobs]
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # of the processes to come: they are as many as the cores already
    found: list[Any] = [None] * len(jobs)
    begun = told = time.monotonic()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run, *job): i for i, job in enumerate(jobs)}
        for done, future in enumerate(as_completed(waiting), 1):
            found[waiting[future]] = future.result()
            now = time.monotonic()
            if now - told > 10 or (done == len(jobs) and now - begun > 10):
                told, left = now, (now - begun) / done * (len(jobs) - done)
                print(
                    f"{title}: {done} of {len(jobs)} runs, about {left:.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )
    return found
