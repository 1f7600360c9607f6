"""A scenario: acts one after another while queries come in an open loop; latencies after each."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.harness import Row

Mark = tuple[float, str]  # seconds since the load began, and the name of an act
Seen = tuple[float, float, str]  # when a query was due, ms until its answer, why it failed


class Load:
    """Sends queries in an open loop: each is due at its time, and late if it was sent late.

    clients: each is called with the number of a query, in a thread of its own, and returns why the
    query failed, or an empty text. rate_s: queries a second of all clients. Threads: its own.
    """

    def __init__(self, rate_s: float, clients: Sequence[Callable[[int], str]]) -> None:
        self.began_s = time.monotonic()
        self.seen: list[Seen] = []
        self._gap_s = len(clients) / rate_s
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(client, i / len(clients)))
            for i, client in enumerate(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, client: Callable[[int], str], phase: float) -> None:
        for i in itertools.count():
            due_s = self.began_s + (i + phase) * self._gap_s
            if self._stop.wait(max(0.0, due_s - time.monotonic())):
                break
            try:
                why = client(next(self._numbers))
            except Exception as error:
                why = repr(error)
            self.seen.append((due_s - self.began_s, (time.monotonic() - due_s) * 1e3, why))

    def end(self) -> None:
        """Stop sending; return after the last answer."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def failures(self) -> list[str]:
        """Return why queries failed."""
        return [why for _, _, why in self.seen if why]


def play(load: Load, acts: Sequence[tuple[str, Callable[[], Any]]], rest_s: float) -> list[Mark]:
    """Run the acts, with a pause after each, and end the load; return when each began."""
    marks: list[Mark] = []
    try:
        for name, act in acts:
            marks.append((time.monotonic() - load.began_s, name))
            print(f"{marks[-1][0]:7.1f} s  {name}", file=sys.stderr, flush=True)
            act()
            time.sleep(rest_s)
    finally:
        load.end()
    return marks


def rows_of(load: Load, marks: Sequence[Mark]) -> list[Row]:
    """Return a row for each act: the latencies of the queries until the next one."""
    ends = [*[at for at, _ in marks[1:]], float("inf")]
    return [
        _row(name, [one for one in load.seen if at <= one[0] < end])
        for (at, name), end in zip(marks, ends, strict=True)
    ]


def _row(name: str, seen: Sequence[Seen]) -> Row:
    took = np.array([ms for _, ms, _ in seen] or [np.nan])
    note = (
        f"p50 {np.median(took):.2f}, max {took.max():.1f} ms of {len(seen)} queries,"
        f" {sum(bool(why) for *_, why in seen)} failed"
    )
    return Row(f"p99 after: {name}", float(np.percentile(took, 99)), "ms", note=note)
