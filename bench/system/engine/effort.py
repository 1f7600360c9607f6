"""The effort of a measurement, and the few words that the groups of rows share."""

import statistics
from dataclasses import dataclass

from bench.harness import Sample

US, MS = 1e-3, 1e-6  # of nanoseconds


@dataclass(frozen=True)
class Effort:
    """repetitions of each case, turn by turn, and the share of the full size that one of them
    has."""

    repetitions: int
    share: float

    def of(self, full: int, least: int = 1) -> int:
        return max(int(full * self.share), least)

    def at_most(self, repetitions: int) -> int:
        """Return the repetitions of cases that take seconds."""
        return min(self.repetitions, repetitions)


TINY, QUICK, FULL = Effort(1, 0.01), Effort(3, 0.1), Effort(15, 1.0)


def rate(nanoseconds: Sample) -> Sample:
    """Convert ns per operation to million operations per second."""
    return nanoseconds.map(lambda ns: 1e3 / ns)


def micro(nanoseconds: Sample) -> Sample:
    return nanoseconds.map(lambda ns: ns * US)


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")
