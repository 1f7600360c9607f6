"""Parameters of one shard: tables in the order of their creation, and dense variables.

A replica of a shard is another object of the same class. Parameters are exchanged in pieces: maps
that `frames.packed` encodes. A piece has the values of rows, removed ids and variables, so a piece
that is taken twice does no harm. Snapshots, first copies, later changes and recovery all use
pieces.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from clipper.errors import InvalidInput, TypeConflict, UnknownTable
from clipper.params.shard.dense import Dense
from clipper.params.tables import checked, empty_table
from clipper.spec.table import ALTERABLE, TableSpec
from clipper_container.params.frames import TABLES_MAX
from clipper_core.params.embedding import Table
from clipper_core.params.optimizer import Optimizer

Ids = npt.NDArray[np.int64]
Piece = dict[str, Any]
Cursor = list[int]  # [table, position]; after the last table [tables, variable]
DENSE = 1024  # table number of variables in a shard's log
PIECE_BYTES = 4 << 20
NUMBERS_END = 1 << 31  # of tables
DROPPED = TableSpec("", 1, optimizer="sgd", rows_max=1)  # in the place of a dropped table


class Parameters:
    """Tables and dense variables. Threads: tables any; everything else one at a time.

    It is a copy until `serve` is called. A copy ignores the limits of tables, since it may get
    new rows before the removals.

    A table has a place, its index in `specs` and `tables`, and a number. A dropped table leaves an
    empty one without a name in its place; the next table there has the number TABLES_MAX higher, so
    that a number, and rows that a piece has under it, never mean another table.
    """

    def __init__(self) -> None:
        self._serves = False
        self.specs: list[TableSpec] = []
        self.created: list[TableSpec] = []  # as they were before they were altered
        self.tables: list[Table] = []
        self.table_numbers: list[int] = []
        self.drops = 0  # tables dropped so far
        self._source_numbers: list[int] = []  # by place, of the source of this copy
        self._by_number: dict[int, int] = {}  # places of the tables that it sent
        self.dense = Dense()
        self.gathered: list[Piece] = []  # pushes of open steps: see sync_training

    def place(self, name: str) -> int:
        """Return the place of a table. Raises UnknownTable."""
        for place, spec in enumerate(self.specs):
            if spec.name == name and name:
                return place
        raise UnknownTable.named(str(name), self.numbers())

    def numbers(self) -> dict[str, int]:
        """Return the numbers of all tables by name."""
        each = zip(self.specs, self.table_numbers, strict=False)
        return {spec.name: number for spec, number in each if spec.name}

    def create(self, spec: TableSpec) -> tuple[int, bool]:
        """Create a table. Returns (place, whether it is new).

        Raises InvalidInput; TypeConflict if a different table has the name.
        """
        for place, there in enumerate(self.specs):
            if there.name == spec.name:
                if spec not in (there, self.created[place]):
                    raise TypeConflict(
                        f"table {spec.name!r} exists with other settings:"
                        f" {_difference(there, spec)}."
                    )
                return place, False
        unused = (
            place
            for place, (there, number) in enumerate(
                zip(self.specs, self.table_numbers, strict=True)
            )
            if not there.name and number + TABLES_MAX < NUMBERS_END
        )
        place = next(unused, len(self.specs))
        if place >= TABLES_MAX:
            raise InvalidInput(
                f"no room for table {spec.name!r}: a shard has at most {TABLES_MAX} tables."
            )
        there_is = place < len(self.specs)
        number = self.table_numbers[place] + TABLES_MAX if there_is else place
        self._put(place, number, checked(spec))
        return place, True

    def drop(self, place: int) -> None:
        """Remove a table with its rows, while pushes are paused."""
        self._put(place, self.table_numbers[place], DROPPED)
        self.drops += 1
        for part in self.gathered:
            part["rows"] = [row for row in part["rows"] if row["table"] != place]

    def _put(self, place: int, number: int, spec: TableSpec) -> None:
        """Have an empty table in a place. Other threads read: a table before its number."""
        table = empty_table(spec)
        table.bounded = self._serves
        self.tables[place : place + 1] = [table]
        self.created[place : place + 1] = [spec]
        self.specs[place : place + 1] = [spec]
        self.table_numbers[place : place + 1] = [number]

    def _numbered(self, place: int) -> tuple[int, Table]:
        """Return the table in a place, and a number that is its own, or that of a dropped one."""
        while True:
            number, table = self.table_numbers[place], self.tables[place]
            if self.table_numbers[place] == number:
                return number, table

    def alter(self, spec: TableSpec) -> int:
        """Give the table of that name a specification that differs in ALTERABLE only, while pushes
        are paused. Returns its place. Raises UnknownTable, InvalidInput; nothing has changed then.
        """
        place = self.place(spec.name)
        optimizer = Optimizer(spec.optimizer, **spec.optimizer_settings)
        self.tables[place].alter(optimizer, rows_max=spec.rows_max, evicts=spec.evicts)
        self.specs[place] = spec
        return place

    def serve(self) -> None:
        """Apply the limits of tables from now on, and evict what is too much."""
        self._serves = True
        for table in self.tables:
            table.bounded = True

    @property
    def rows(self) -> int:
        """Number of rows in all tables."""
        return sum(len(table) for table in self.tables)

    @property
    def row_bytes(self) -> int:
        """Size of all rows and variables with their states: what a whole copy transfers."""
        dense = sum(v.value.nbytes + v.state.nbytes for v in self.dense.variables)
        return sum(len(table) * 4 * table.width for table in self.tables) + dense

    @property
    def nbytes(self) -> int:
        """Memory of all tables and variables."""
        return sum(table.nbytes for table in self.tables) + sum(
            v.value.nbytes + v.state.nbytes for v in self.dense.variables
        )

    # -- out

    def shape(self, *, tables: bool = True) -> Piece:
        """Return what precedes the rows: tables, steps, optimizers, and pushes of open steps.

        tables: False for a reader that has the specifications.
        """
        each = {"tables": self.specs, "created": self.created} if tables else {}
        return {
            **{name: [msgspec.to_builtins(spec) for spec in specs] for name, specs in each.items()},
            **({"numbers": list(self.table_numbers)} if tables else {}),
            "steps": [table.steps for table in self.tables],
            "dense": self.dense.summary(),
            "gathered": self.gathered,
        }

    def named(self) -> Piece:
        """Return the tables alone, as `shape` has them."""
        specs = [msgspec.to_builtins(spec) for spec in self.specs]
        return {"tables": specs, "numbers": list(self.table_numbers)}

    def piece(self, cursor: Cursor) -> tuple[Piece, Cursor | None]:
        """Return some parameters from a cursor on, and the next cursor. The first is [0, 0]."""
        table, at = cursor
        if table < len(self.tables):
            number, one = self._numbered(table)
            ids, rows, stamps, following = one.walk(at, max(1, PIECE_BYTES // (4 * one.width)))
            part = {"table": number, "ids": ids, "rows": rows, "stamps": stamps}
            head = self.named() if at == 0 else {}  # the table may be newer than the cursor's start
            return {**head, "rows": [part]}, (
                [table, following]
                if following is not None
                else [
                    table + 1,
                    0,
                ]
            )
        found, size = [], 0
        while at < len(self.dense) and size < PIECE_BYTES:
            found += self.dense.read([at])
            size += found[-1]["value"].nbytes + found[-1]["state"].nbytes
            at += 1
        return {"variables": found}, [table, at] if at < len(self.dense) else None

    def pieces(self) -> Iterator[Piece]:
        """Yield all parameters. Each row is whole, as it was at some moment."""
        yield self.shape()
        cursor: Cursor | None = [0, 0]
        while cursor is not None:
            part, cursor = self.piece(cursor)
            yield part

    def of(self, changed: Mapping[int, Ids]) -> Piece:
        """Return rows and variables by their ids; ids without a row are listed as gone."""
        return {
            "rows": [
                self._of_table(number, ids) for number, ids in changed.items() if number != DENSE
            ],
            "variables": self.dense.read(int(i) for i in changed.get(DENSE, ())),
        }

    def size_of(self, changed: Mapping[int, Ids]) -> int:
        """Return the size of what `of` would return."""
        rows = sum(
            ids.size * 4 * self.tables[number].width
            for number, ids in changed.items()
            if number != DENSE
        )
        variables = (self.dense.variables[int(i)] for i in changed.get(DENSE, ()))
        return rows + sum(v.value.nbytes + v.state.nbytes for v in variables)

    def chunks(self, changed: Mapping[int, Ids], nbytes: int = 0) -> Iterator[dict[int, Ids]]:
        """Split ids into chunks of at most `nbytes` of rows; 0: of a piece."""
        for number, ids in changed.items():
            each = (
                1
                if number == DENSE
                else max(1, (nbytes or PIECE_BYTES) // (4 * self.tables[number].width))
            )
            for at in range(0, ids.size, each):
                yield {number: ids[at : at + each]}

    def _of_table(self, place: int, ids: Ids) -> Piece:
        number, table = self._numbered(place)
        found, rows, stamps = table.read(ids)
        if found.all():
            return {"table": number, "ids": ids, "rows": rows, "stamps": stamps}
        return {
            "table": number,
            "ids": ids[found],
            "rows": rows[found],
            "stamps": stamps[found],
            "gone": ids[~found],
        }

    # -- in

    def take(
        self,
        piece: Piece,
        shard: int = 0,
        shards: int = 1,
        mine: Callable[[str, int], int] | None = None,
    ) -> None:
        """Write a piece of another copy.

        mine: a function that returns the shard of a name, given the number of shards; then only the
        part of `shard` of `shards` is taken, and the piece is of a shard whose tables may have
        other places.
        """
        if "tables" in piece:
            self._take_tables(piece, by_name=mine is not None)
        steps = piece.get("steps", ())
        for number, count in zip(self._source_numbers, steps, strict=False):
            table = self._table_of(number)
            if table is not None:
                table.steps = max(table.steps, int(count))
        if "dense" in piece:
            self.dense.receive(piece["dense"])
            self.gathered = list(piece.get("gathered", ())) if mine is None else []
        for part in piece.get("rows", ()):
            self._take_rows(part, shard, shards)
        variables: Iterable[Piece] = piece.get("variables", ())
        self.dense.write(
            v for v in variables if mine is None or mine(str(v["name"]), shards) == shard
        )

    def _take_tables(self, piece: Piece, *, by_name: bool) -> None:
        """Have the tables that a piece tells: with its numbers, or by their names."""
        specs = [msgspec.convert(spec, TableSpec) for spec in piece["tables"]]
        created = [msgspec.convert(spec, TableSpec) for spec in piece.get("created", ())]
        numbers = [int(number) for number in piece.get("numbers", range(len(specs)))]
        self._source_numbers, self._by_number = numbers, {}
        for i, (number, spec) in enumerate(zip(numbers, specs, strict=True)):
            if by_name and not spec.name:
                continue
            place = self._place_by_name(spec) if by_name else self._place_by_number(number, spec)
            if place < 0 or self.specs[place].name != spec.name:
                continue  # what this copy has is newer
            self._by_number[number] = place
            if spec.name:
                self._take_settings(spec)
                self.created[place] = created[i] if i < len(created) else self.created[place]

    def _place_by_name(self, spec: TableSpec) -> int:
        for place, there in enumerate(self.specs):
            if there.name == spec.name:
                return place
        return self.create(spec)[0]

    def _place_by_number(self, number: int, spec: TableSpec) -> int:
        """Return the place of a table with this number; -1 if a newer one is there."""
        place = number % TABLES_MAX
        while place > len(self.specs):  # of a message that leaves places out
            self._put(len(self.specs), len(self.specs), DROPPED)
        there = self.table_numbers[place] if place < len(self.specs) else -1
        if number < there:
            return -1
        if number > there or (self.specs[place].name and not spec.name):
            self._put(place, number, checked(spec) if spec.name else DROPPED)
        return place

    def _take_settings(self, spec: TableSpec) -> None:
        """Give a table the settings that it has been given since."""
        there = self.specs[self.place(spec.name)]
        changes = {key: getattr(spec, key) for key in ALTERABLE}
        if there != spec and msgspec.structs.replace(there, **changes) == spec:
            self.alter(spec)
        else:
            self.create(spec)

    def _table_of(self, number: int) -> Table | None:
        by_number = self._by_number or {n: i for i, n in enumerate(self.table_numbers)}
        place = by_number.get(number)
        return None if place is None or not self.specs[place].name else self.tables[place]

    def _take_rows(self, part: Piece, shard: int, shards: int) -> None:
        table, ids = self._table_of(int(part["table"])), part["ids"]
        if table is None:
            return  # it was dropped
        if "gone" in part:
            table.remove(part["gone"])
        if shards > 1:
            ours = np.mod(ids, shards) == shard
            if not ours.all():
                table.write(ids[ours], part["rows"][ours], part["stamps"][ours])
                ids = ids[:0]
        if ids.size:
            table.write(ids, part["rows"], part["stamps"])


def _difference(one: TableSpec, other: TableSpec) -> str:
    before, after = msgspec.structs.asdict(one), msgspec.structs.asdict(other)
    return ", ".join(
        f"{key} {before[key]!r} and {after[key]!r}" for key in before if before[key] != after[key]
    )
