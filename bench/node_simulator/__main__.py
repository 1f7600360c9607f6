"""Runs worlds by seed, all kinds of each seed; prints progress, and writes what did not hold.

    nice -n 10 python -m bench.node_simulator --seeds 0:3334 --jobs 2 --out worlds.txt

A line of the file is a seed that has been run: its kind and number, and then what did not hold. A
run that was interrupted continues after what its file has.
"""

import argparse
import gc
import logging
import multiprocessing
import signal
import time
from pathlib import Path

from bench.node_simulator.plans import churning, planned, rare, shown
from bench.runs import exit_on_sigterm

KINDS = {"plain": planned, "rare": rare, "churning": churning}
REPORT_EACH = 50  # worlds


def run(what: tuple[str, int]) -> tuple[str, str]:
    """Run a world; return its name and what did not hold."""
    kind, seed = what
    gc.disable()  # a tenth of the time
    try:
        found = shown(KINDS[kind](seed))
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    gc.collect()
    return f"{kind} {seed}", "; ".join(found)


def prepare() -> None:
    """Prepare a process that runs worlds: SIGTERM ends it at once, and what is imported by now is
    never looked at by the collector, which takes a tenth of the time otherwise.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()


def main() -> None:
    """Run the worlds that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m bench.node_simulator", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="first seed, and the one after the last")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[*KINDS])
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=Path("worlds.txt"))
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    first, end = map(int, asked.seeds.split(":"))
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    known = {" ".join(line.split()[:2]) for line in lines}
    todo = [
        (kind, seed)
        for seed in range(first, end)
        for kind in asked.kinds
        if f"{kind} {seed}" not in known
    ]
    began_s, failed = time.monotonic(), 0
    pools = multiprocessing.Pool(asked.jobs, prepare, maxtasksperchild=REPORT_EACH)
    with asked.out.open("a", buffering=1) as out, pools as pool:
        for count, (name, why) in enumerate(pool.imap_unordered(run, todo), 1):
            out.write(f"{name} {why}".rstrip() + "\n")
            failed += bool(why)
            if why:
                print(f"{name}: {why}", flush=True)
            if count % REPORT_EACH == 0 or count == len(todo):
                each_s = (time.monotonic() - began_s) / count
                print(
                    f"{count} of {len(todo)} worlds, {failed} failed, {each_s:.2f} s each,"
                    f" {each_s * (len(todo) - count) / 60:.0f} min left",
                    flush=True,
                )


if __name__ == "__main__":
    exit_on_sigterm()
    main()
