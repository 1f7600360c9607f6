"""Replicas that end in their warm-up: after a while they start with a smaller one, or none."""

from dataclasses import dataclass

DEATHS_MAX = 2  # at one batch size


@dataclass(slots=True)
class WarmUpDeaths:
    """Counts how often a replica ended in its warm-up, and bounds the next warm-up.

    rows_max: the largest batch, None for no limit, 0 for no warm-up.
    """

    rows_max: int | None = None
    _rows: int = 0  # of the batch that runs; 0: no warm-up runs
    _deadly: int = 0
    _deaths: int = 0

    def began(self, rows: int) -> None:
        """Record that a batch of so many rows runs."""
        self._rows = rows

    def over(self) -> None:
        """Record that the warm-up is over."""
        self._rows = 0

    def ended(self) -> str:
        """Record that the process ended; return what changes at the next start, "" if nothing."""
        rows, self._rows = self._rows, 0
        if not rows:
            return ""
        self._deaths = self._deaths + 1 if rows == self._deadly else 1
        self._deadly = rows
        if self._deaths < DEATHS_MAX and self.rows_max is None:
            return ""
        smaller = self.rows_max is None and rows > 1
        self.rows_max = rows // 2 if smaller else 0
        how = f"takes at most {rows // 2} rows a batch" if smaller else "has no warm-up"
        times = f"{self._deaths} times " if self._deaths > 1 else ""
        return f"it ended {times}in its warm-up at a batch of {rows} rows; from now on it {how}"
