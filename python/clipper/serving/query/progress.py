"""Progress of long work, for a person at a terminal."""

import sys
import time
from typing import TextIO

from clipper_core.results.future import Future

_AFTER_S = 2.0
_EVERY_S = 0.25
_WIDTH = 30


def progress(future: Future, noun: str = "rows", stream: TextIO | None = None) -> Future:
    """Wait for `future` and return it, done. On a terminal, show its progress once the wait has
    taken two seconds.

    stream: where to write, stderr if not given; nothing is written to what is no terminal. Ctrl-C
    interrupts it.
    """
    stream = stream or sys.stderr
    began = time.monotonic()
    shown = False
    if future.wait(_AFTER_S) or not stream.isatty():
        future.wait()
        return future
    try:
        while not future.wait(_EVERY_S):
            stream.write("\r" + line(*future.progress(), noun, time.monotonic() - began))
            stream.flush()
            shown = True
    finally:
        if shown:
            stream.write("\r\x1b[K")
            stream.flush()
    return future


def line(done: int, total: int, noun: str, seconds: float) -> str:
    """Return a line like `[#####.....] 51 %  5 120 of 10 000 rows, 1 707/s, 2.9 s left`."""
    bar = ("#" * (_WIDTH * done // max(total, 1))).ljust(_WIDTH, ".")
    per_s = done / seconds if seconds > 0 else 0.0
    left = f", {(total - done) / per_s:.1f} s left" if per_s > 0 else ""
    return (
        f"[{bar}] {100 * done // max(total, 1)} %  {_spaced(done)} of {_spaced(total)} {noun},"
        f" {_spaced(per_s)}/s{left}"
    )


def _spaced(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")
