"""Row drift: how far the rows that cached predictions were made of have moved since.

A prediction is dropped once any of its rows has moved further than the tolerance. The distance is
the length of the row's path, each step relative to the norm of the row before it. A path is never
shorter than the distance, so a row that moves back drops predictions too early, and none too late.
Each row counts its path from when it is first followed, and a prediction remembers the counts of
its rows. Predictions of one row are dropped in the order of their creation, so the cost of a step
depends on how many it drops and not on how many there are.

An unknown step counts as infinite. A row is first pulled a moment after the query that made it
interesting. A change that may lie between the two, as far as the order of the shard's messages
tells, drops all predictions of the row.

To drop a prediction means that the next query of the same input gets another number (generation),
under which nothing is cached. A result that is being computed of old rows is stored under the old
number, which no query uses.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Key = tuple[int, int]
NEVER = 1 << 62  # no request has this number
generations = itertools.count(1)  # shared by all models: each number is used once


class FollowedRow:
    """A followed row.

    value: as last pulled; None before the first pull. way: length of its path. surely: number of
    the first request whose answer tells of changes after the first pull. made: (path length then,
    prediction) in order of creation. uses: number of these that are not dropped.
    """

    __slots__ = ("id", "made", "surely", "uses", "value", "way")

    def __init__(self, id: int) -> None:
        self.id = id
        self.value: Rows | None = None
        self.way, self.surely, self.uses = 0.0, NEVER, 0
        self.made: deque[tuple[float, TrackedPrediction]] = deque()


class TrackedPrediction:
    """A cached prediction: its key, its generation (0: dropped), and its rows with their tables."""

    __slots__ = ("generation", "key", "rows")

    def __init__(self, key: Key) -> None:
        self.key, self.generation = key, next(generations)
        self.rows: list[tuple[dict[int, FollowedRow], FollowedRow]] = []


class RowDrift:
    """The followed rows and predictions of one model. Threads: one at a time; `find` any.

    tolerance: relative path length after which a prediction is dropped. made_max, rows_max: limits
    of predictions and rows; beyond them the oldest is dropped. forget: called with key and
    generation of each dropped prediction.
    """

    def __init__(
        self, tolerance: float, made_max: int, rows_max: int, forget: Callable[[Key, int], object]
    ) -> None:
        self.tolerance, self._made_max, self._rows_max, self._notify = (
            tolerance,
            made_max,
            rows_max,
            forget,
        )
        self._made: dict[Key, TrackedPrediction] = {}
        self._tables: dict[str, dict[int, FollowedRow]] = {}
        self._new: dict[str, set[int]] = {}
        self.rows = 0
        self.forgotten: Counter[str] = Counter()  # why: moved, unsure, room, lost
        self.find = self._made.get

    def __len__(self) -> int:
        return len(self._made)

    def enter(self, key: Key, reads: Mapping[str, Ids]) -> int:
        """Follow the rows of a prediction before it is computed. Returns its generation."""
        there = self._made.get(key)
        if there is not None:
            return there.generation
        made = TrackedPrediction(key)
        for table, ids in reads.items():
            rows = self._tables.setdefault(table, {})
            for id in ids.tolist():
                row = rows.get(id)
                if row is None:
                    row = rows[id] = FollowedRow(id)
                    self._new.setdefault(table, set()).add(id)
                    self.rows += 1
                row.uses += 1
                row.made.append((row.way, made))
                made.rows.append((rows, row))
        self._made[key] = made
        while len(self._made) > self._made_max or (
            self.rows > self._rows_max and len(self._made) > 1
        ):
            self._forget(next(iter(self._made.values())), "room")
        return made.generation

    # -- rows as they are pulled

    @property
    def has_new(self) -> bool:
        """Tell whether some rows have not been pulled yet."""
        return any(self._new.values())

    @property
    def new(self) -> dict[str, Ids]:
        """Rows that have not been pulled yet, by table."""
        return {
            table: np.fromiter(ids, np.int64, len(ids)) for table, ids in self._new.items() if ids
        }

    def set_first_values(
        self, table: str, ids: Ids, values: Rows | None, surely: Sequence[int]
    ) -> None:
        """Store the first values of rows; None: they could not be pulled.

        surely: for each shard, the number of the first request that is sent after the pull.
        """
        rows, new = self._tables.get(table, {}), self._new.get(table, set())
        new.difference_update(ids.tolist())
        for id, value in zip(
            ids.tolist(), values if values is not None else (), strict=values is not None
        ):
            row = rows.get(id)
            if row is not None and row.value is None:
                row.value, row.surely = value.copy(), surely[id % len(surely)]

    def followed(self, table: str, ids: Ids) -> Ids:
        """Return the ids among these that must be pulled again; drop predictions of rows without a
        value."""
        rows = self._tables.get(table, {})
        there = [rows[id] for id in rows.keys() & ids.tolist()]
        for row in there:
            if row.value is None:
                self._forget_all_of(row, "unsure")
        return np.array(sorted(row.id for row in there if row.value is not None), np.int64)

    def moved(self, table: str, ids: Ids, values: Rows, request: int) -> None:
        """Store new values of rows that a shard named in its answer to `request`."""
        rows = self._tables.get(table, {})
        pairs = [(rows.get(id), value) for id, value in zip(ids.tolist(), values, strict=True)]
        # the others are not followed any more
        each = [
            (row, row.value, value)
            for row, value in pairs
            if row is not None and row.value is not None
        ]
        for (row, _, value), step in zip(
            each, steps([(old, new) for _, old, new in each]), strict=True
        ):
            row.value = value.copy()
            if request < row.surely or not step < np.inf:
                self._forget_all_of(row, "unsure" if request < row.surely else "moved")
                continue
            row.way += step
            while row.made and (
                not row.made[0][1].generation or row.way - row.made[0][0] > self.tolerance
            ):
                self._forget(row.made.popleft()[1], "moved")

    # -- forgetting

    def forget_all(self, why: str = "lost") -> None:
        """Drop all predictions. why: for the statistics."""
        for made in list(self._made.values()):
            self._forget(made, why)

    def _forget_all_of(self, row: FollowedRow, why: str) -> None:
        while row.made:
            self._forget(row.made.popleft()[1], why)

    def _forget(self, made: TrackedPrediction, why: str) -> None:
        if not made.generation:  # dropped already, because of another row
            return
        del self._made[made.key]
        self._notify(made.key, made.generation)
        made.generation = 0
        self.forgotten[why] += 1
        for rows, row in made.rows:
            row.uses -= 1
            if not row.uses:
                rows.pop(row.id)  # it may still be in `new`, and is pulled in vain then
                self.rows -= 1
            elif len(row.made) > 2 * row.uses + 16:
                row.made = deque(one for one in row.made if one[1].generation)
        made.rows = []


def steps(pairs: list[tuple[Rows, Rows]]) -> list[float]:
    """Return the length of each step relative to the norm before it; infinite for a zero row."""
    if not pairs:
        return []
    before = np.array([old for old, _ in pairs], np.float64)
    after = np.array([new for _, new in pairs], np.float64)
    gone, norm = np.linalg.norm(after - before, axis=1), np.linalg.norm(before, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: list[float] = np.where(gone == 0, 0.0, gone / norm).tolist()
    return found
