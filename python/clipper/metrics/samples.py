"""The values of one collection, and the bound on the number of their series."""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from clipper.metrics.families import BY_PART, FAMILIES, OLD_NAMES, Family
from clipper_core.runtime.histogram import Snapshot

OTHER: Final = "_other"
Labels = tuple[str, ...]
Value = int | float | Snapshot
Stats = Mapping[str, Any]  # of the server, or a part of them: docs/monitoring.md


class Samples:
    """Values by family and labels; a series that is added twice is summed.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._rows: dict[Family, dict[Labels, Value]] = {}

    def __iter__(self) -> Iterator[tuple[Family, dict[Labels, Value]]]:
        return iter(self._rows.items())

    def in_order(self, old_names: bool = False) -> Iterator[tuple[Family, dict[Labels, Value]]]:
        """Iterate in the order of the table of families.

        old_names: with the metrics that only users of version 0.1 and of model-mesh need, and with
        renamed ones under both names.
        """
        for family in FAMILIES.values():
            rows = self._rows.get(family)
            if rows is None or (family.old and not old_names):
                continue
            yield family, rows
            if family.renamed and old_names:
                yield OLD_NAMES[family], rows

    def add(self, name: str, value: Value, *labels: str) -> None:
        """Add a value to the series of the metric `name` with these labels."""
        self._add(FAMILIES[name], labels, value)

    def add_part(self, part: str, stats: Stats, *labels: str) -> None:
        """Add the values that the families of a part read.

        stats: of the part; what is not there, or None, is left out.
        """
        for family, path in BY_PART[part]:
            value = _at(stats, path)
            if value is None:
                continue
            if isinstance(value, Mapping):
                for last, count in value.items():
                    self._add(family, (*labels, str(last)), count)
            elif isinstance(value, Snapshot):
                self._add(family, labels, value)
            else:
                # also turns True into 1
                self._add(family, labels, value * family.scale if family.scale != 1 else +value)

    def add_by(
        self, name: str, counts: Mapping[str, Value] | Mapping[int, Value], *labels: str
    ) -> None:
        """Add values of one metric. counts: by the last label."""
        for last, count in counts.items():
            self.add(name, count, *labels, str(last))

    def _add(self, family: Family, labels: Labels, value: Value) -> None:
        rows = self._rows.get(family)
        if rows is None:
            rows = self._rows[family] = {}
        known = rows.get(labels)
        # both values are of the family's kind
        rows[labels] = value if known is None else known + value  # type: ignore[operator]

    def add_all(self, others: "Samples") -> None:
        """Add all series of other samples."""
        for family, rows in others:
            for labels, value in rows.items():
                self._add(family, labels, value)

    def only_growing(self) -> "Samples":
        """Return the counters and histograms."""
        found = Samples()
        found._rows.update(
            {family: rows for family, rows in self if family.kind in ("counter", "histogram")}
        )
        return found

    def has_more_than(self, later: "Samples") -> bool:
        """Return True if a counter or histogram is larger here than in `later`, so it was reset."""
        return any(
            _size(value) > _size(later._rows.get(family, {}).get(labels, 0))
            for family, rows in self.only_growing()
            for labels, value in rows.items()
        )

    def get(self, name: str, *labels: str) -> Value | None:
        """Return the value of a series; None if there is none."""
        return self._rows.get(FAMILIES[name], {}).get(labels)


def _at(stats: Stats, path: Sequence[str]) -> Value | Mapping[str, Value] | None:
    """Return the value at a path; None if there is none."""
    *parts, last = path
    for member in parts:
        stats = stats.get(member) or {}
    found: Value | Mapping[str, Value] | None = stats.get(last)
    return found


def _size(value: Value) -> float:
    return value.count if isinstance(value, Snapshot) else value


class SeriesLimit:
    """Bounds the number of names that have series of their own. Threads: one at a time.

    The first `most` names get their own series; all later ones share `_other` while they exist. A
    name never moves to its own series, because the sum in `_other` would shrink, and a shrinking
    counter reads as a restart. What names in `_other` had counted when they disappeared or
    restarted is kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._own: set[Labels] = set()
        self._others: dict[Labels, Samples] = {}
        self._gone = Samples()

    def is_own(self, name: Labels) -> bool:
        """Return True if a name has its own series; assigns one while there is room."""
        if name in self._own:
            return True
        if name in self._others or len(self._own) >= self._most:
            return False
        self._own.add(name)
        return True

    def keep(self, there: dict[Labels, Samples]) -> Samples:
        """Return all samples, each under its own name or added to `_other`.

        there: the current samples by name.
        """
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
    """Return the samples with `_other` in place of the first `named` labels."""
    found = Samples()
    for family, rows in samples:
        if not family.adds:
            continue
        count = min(named, len(family.labels))
        for labels, value in rows.items():
            found._add(family, (OTHER,) * count + labels[count:], value)
    return found


def cumulative(family: Family, snapshot: Snapshot) -> tuple[list[int], int, float]:
    """Return the counts up to each edge, the total count, and the sum in the family's unit."""
    counts = [0] * (len(family.edges) + 1)
    for _, high, count in snapshot.buckets():
        counts[bisect.bisect_left(family.edges, high * family.scale)] += count
    total, below = 0, []
    for count in counts[:-1]:
        total += count
        below.append(total)
    return below, total + counts[-1], snapshot.sum * family.scale


def named(family: Family, labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Return pairs of label name and value."""
    return zip(family.labels, labels, strict=True)
