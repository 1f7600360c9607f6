"""Which cached predictions were made of which rows of tables, and how far these have moved since.

A prediction is forgotten once any of its rows has moved further than the tolerance: the length of
the row's way, each step as a share of the row's norm before it. A way is never shorter than the
distance, so what has come back is forgotten too early, and nothing too late. Each row counts its
way from when it is first followed, and a prediction remembers where its rows' counts stood when it
was asked for. So those made of one row leave in the order in which they came, and a step costs what
it forgets, however many predictions are made of the row.

What is not known counts as any distance. A row is first pulled a moment after the prediction that
brought it here was asked for; a change that may lie between the two, as far as the shard's
questions and answers tell, forgets all that was made of the row.

To forget is to give the next query of the same input another number, under which nothing is cached:
what is being computed of old rows meanwhile comes in under a number that nobody asks for any more.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Key = tuple[int, int]
NEVER = 1 << 62  # the number of a question that is not asked
generations = itertools.count(1)  # of all models: no number comes twice


class Row:
    """value: as last pulled, None before that.  way: how far it has gone.  surely: a change in an
    answer to a question from this on came after `value` was pulled first.  made: of it, with where
    `way` stood then; in that order.  uses: those of them that are not forgotten."""

    __slots__ = ("id", "made", "surely", "uses", "value", "way")

    def __init__(self, id: int) -> None:
        self.id = id
        self.value: Rows | None = None
        self.way, self.surely, self.uses = 0.0, NEVER, 0
        self.made: deque[tuple[float, TrackedPrediction]] = deque()


class TrackedPrediction:
    """A prediction: its key in the cache, the number under which it is found, its rows and the
    tables that have them."""

    __slots__ = ("generation", "key", "rows")

    def __init__(self, key: Key) -> None:
        self.key, self.generation = key, next(generations)
        self.rows: list[tuple[dict[int, Row], Row]] = []


class RowDrift:
    """Of one model. Threads: one at a time; `find` any.

    tolerance: see above.  made_max, rows_max: predictions and rows that are followed; beyond them
    the oldest is forgotten. forget: told of each that is forgotten, by its key and number.
    """

    def __init__(
        self, tolerance: float, made_max: int, rows_max: int, forget: Callable[[Key, int], object]
    ) -> None:
        self.tolerance, self._made_max, self._rows_max, self._tell = (
            tolerance,
            made_max,
            rows_max,
            forget,
        )
        self._made: dict[Key, TrackedPrediction] = {}
        self._tables: dict[str, dict[int, Row]] = {}
        self._new: dict[str, set[int]] = {}
        self.rows = 0
        self.forgotten: Counter[str] = Counter()  # why: moved, unsure, room, lost
        self.find = self._made.get

    def __len__(self) -> int:
        return len(self._made)

    def enter(self, key: Key, reads: Mapping[str, Ids]) -> int:
        """A prediction that is about to be asked for. -> its number"""
        there = self._made.get(key)
        if there is not None:
            return there.generation
        made = TrackedPrediction(key)
        for table, ids in reads.items():
            rows = self._tables.setdefault(table, {})
            for id in ids.tolist():
                row = rows.get(id)
                if row is None:
                    row = rows[id] = Row(id)
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
        return any(self._new.values())

    @property
    def new(self) -> dict[str, Ids]:
        """Rows that were not pulled yet, by table."""
        return {
            table: np.fromiter(ids, np.int64, len(ids)) for table, ids in self._new.items() if ids
        }

    def begin(self, table: str, ids: Ids, values: Rows | None, surely: Sequence[int]) -> None:
        """They were pulled for the first time; None: they could not be. surely: by shard, the
        question from whose answer on a change came after that."""
        rows, new = self._tables.get(table, {}), self._new.get(table, set())
        new.difference_update(ids.tolist())
        for id, value in zip(
            ids.tolist(), values if values is not None else (), strict=values is not None
        ):
            row = rows.get(id)
            if row is not None and row.value is None:
                row.value, row.surely = value.copy(), surely[id % len(surely)]

    def followed(self, table: str, ids: Ids) -> Ids:
        """Those of them that predictions were made of, and that were pulled before: to be pulled
        again. What was made of the others is forgotten."""
        rows = self._tables.get(table, {})
        there = [rows[id] for id in rows.keys() & ids.tolist()]
        for row in there:
            if row.value is None:
                self._forget_all_of(row, "unsure")
        return np.array(sorted(row.id for row in there if row.value is not None), np.int64)

    def moved(self, table: str, ids: Ids, values: Rows, question: int) -> None:
        """They were pulled again, since the answer to this question named them."""
        rows = self._tables.get(table, {})
        pairs = [(rows.get(id), value) for id, value in zip(ids.tolist(), values, strict=True)]
        each = [
            (row, row.value, value)
            for row, value in pairs
            if row is not None and row.value is not None
        ]  # else they left
        for (row, _, value), step in zip(
            each, steps([(old, new) for _, old, new in each]), strict=True
        ):
            row.value = value.copy()
            if question < row.surely or not step < np.inf:
                self._forget_all_of(row, "unsure" if question < row.surely else "moved")
                continue
            row.way += step
            while row.made and (
                not row.made[0][1].generation or row.way - row.made[0][0] > self.tolerance
            ):
                self._forget(row.made.popleft()[1], "moved")

    # -- forgetting

    def forget_all(self, why: str = "lost") -> None:
        for made in list(self._made.values()):
            self._forget(made, why)

    def _forget_all_of(self, row: Row, why: str) -> None:
        while row.made:
            self._forget(row.made.popleft()[1], why)

    def _forget(self, made: TrackedPrediction, why: str) -> None:
        if not made.generation:  # it was, for another of its rows
            return
        del self._made[made.key]
        self._tell(made.key, made.generation)
        made.generation = 0
        self.forgotten[why] += 1
        for rows, row in made.rows:
            row.uses -= 1
            if not row.uses:
                rows.pop(row.id)  # it may be among the new ones still: then it is pulled for nobody
                self.rows -= 1
            elif len(row.made) > 2 * row.uses + 16:
                row.made = deque(one for one in row.made if one[1].generation)
        made.rows = []


def steps(pairs: list[tuple[Rows, Rows]]) -> list[float]:
    """How far each went, as a share of its norm before."""
    if not pairs:
        return []
    before = np.array([old for old, _ in pairs], np.float64)
    after = np.array([new for _, new in pairs], np.float64)
    gone, norm = np.linalg.norm(after - before, axis=1), np.linalg.norm(before, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: list[float] = np.where(gone == 0, 0.0, gone / norm).tolist()
    return found
