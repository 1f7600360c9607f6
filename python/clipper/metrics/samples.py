"""What one collection found, and the bound on how many names it may bring."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Final

from clipper.metrics.families import FAMILIES, Family
from clipper_core.runtime.histogram import Snapshot

OTHER: Final = "_other"
Labels = tuple[str, ...]
Value = int | float | Snapshot


class Samples:
    """Values by family and labels. Threads: one at a time. What comes twice is added up."""

    def __init__(self) -> None:
        self._rows: dict[Family, dict[Labels, Value]] = {}

    def __iter__(self) -> Iterator[tuple[Family, dict[Labels, Value]]]:
        return iter(self._rows.items())

    def in_order(self) -> Iterator[tuple[Family, dict[Labels, Value]]]:
        """As the table of families has them."""
        return (
            (family, self._rows[family]) for family in FAMILIES.values() if family in self._rows
        )

    def add(self, name: str, value: Value, *labels: str) -> None:
        self._add(FAMILIES[name], labels, value)

    def _add(self, family: Family, labels: Labels, value: Value) -> None:
        rows = self._rows.get(family)
        if rows is None:
            rows = self._rows[family] = {}
        known = rows.get(labels)
        rows[labels] = value if known is None else known + value  # type: ignore[operator]  # both of the family's kind

    def add_all(self, others: "Samples") -> None:
        for family, rows in others:
            for labels, value in rows.items():
                self._add(family, labels, value)

    def only_growing(self) -> "Samples":
        """Its counters and histograms."""
        found = Samples()
        found._rows.update(
            {family: rows for family, rows in self if family.kind in ("counter", "histogram")}
        )
        return found

    def has_more_than(self, later: "Samples") -> bool:
        """Whether something that only grows has shrunk since."""
        return any(
            _size(value) > _size(later._rows.get(family, {}).get(labels, 0))
            for family, rows in self.only_growing()
            for labels, value in rows.items()
        )

    def get(self, name: str, *labels: str) -> Value | None:
        return self._rows.get(FAMILIES[name], {}).get(labels)


def _size(value: Value) -> float:
    return value.count if isinstance(value, Snapshot) else value


class Cap:
    """Which names have series of their own. The first `most` do; all further ones share `_other`,
    for as long as they live: a name that moved to series of its own would take its past with it,
    and a counter that shrinks reads as a restart. What the others had when they went, or began
    anew, is kept. Threads: one at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._own: set[Labels] = set()
        self._others: dict[Labels, Samples] = {}
        self._gone = Samples()

    def is_own(self, name: Labels) -> bool:
        if name in self._own:
            return True
        if name in self._others or len(self._own) >= self._most:
            return False
        self._own.add(name)
        return True

    def keep(self, there: dict[Labels, Samples]) -> Samples:
        """What each name has now -> all of it, each under its own name or added to `_other`."""
        self._own.intersection_update(there)
        total = Samples()
        others = {}
        for name, samples in there.items():
            if self.is_own(name):
                total.add_all(samples)
            else:
                others[name] = _under_other(samples, len(name))
        for name, before in self._others.items():
            if name not in others or before.has_more_than(others[name]):
                self._gone.add_all(before.only_growing())
        self._others = others
        for samples in (*others.values(), self._gone):
            total.add_all(samples)
        return total


def _under_other(samples: Samples, named: int) -> Samples:
    """The same, with `_other` for each of the first `named` labels."""
    found = Samples()
    for family, rows in samples:
        if not family.adds:
            continue
        count = min(named, len(family.labels))
        for labels, value in rows.items():
            found._add(family, (OTHER,) * count + labels[count:], value)
    return found


def cumulative(family: Family, snapshot: Snapshot) -> tuple[list[int], int, float]:
    """-> how many values are surely at most each edge, how many there are, and their sum in the
    family's unit."""
    counts = [0] * (len(family.edges) + 1)
    for _, high, count in snapshot.buckets():
        counts[bisect.bisect_left(family.edges, high * family.scale)] += count
    total, below = 0, []
    for count in counts[:-1]:
        total += count
        below.append(total)
    return below, total + counts[-1], snapshot.sum * family.scale


def named(family: Family, labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(family.labels, labels, strict=True)
