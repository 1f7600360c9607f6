"""Parameters of one shard: tables in the order of their creation, and dense variables.

A replica of a shard is another object of the same class. Parameters are exchanged in pieces: maps
that `frames.packed` encodes. A piece has the values of rows, removed ids and variables, so a piece
that is taken twice does no harm. Snapshots, first copies, later changes and recovery all use
pieces.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from clipper.errors import InvalidInput, TypeConflict, UnknownTable
from clipper.params.shard.dense import Dense
from clipper.params.tables import ALTERABLE, TableSpec
from clipper_core.params.embedding import Table
from clipper_core.params.optimizer import Optimizer

Ids = npt.NDArray[np.int64]
Piece = dict[str, Any]
Cursor = list[int]  # [table, position]; after the last table [tables, variable]
DENSE = 1024  # table number of variables in a shard's log
PIECE_BYTES = 4 << 20
TABLES_MAX = 1024


class Parameters:
    """Tables and dense variables. Threads: tables any; everything else one at a time.

    It is a copy until `serve` is called. A copy ignores the limits of tables, since it may be told
    new rows before removed ones.
    """

    def __init__(self) -> None:
        self._serves = False
        self.specs: list[TableSpec] = []
        self.created: list[TableSpec] = []  # as they were before they were altered
        self.tables: list[Table] = []
        self.dense = Dense()
        self.gathered: list[Piece] = []  # pushes of open steps: see sync_training

    def number(self, name: str) -> int:
        """Return the number of a table. Raises UnknownTable."""
        for number, spec in enumerate(self.specs):
            if spec.name == name:
                return number
        raise UnknownTable.named(str(name), [spec.name for spec in self.specs])

    def numbers(self) -> dict[str, int]:
        """Return the numbers of all tables by name."""
        return {spec.name: number for number, spec in enumerate(self.specs)}

    def create(self, spec: TableSpec) -> tuple[int, bool]:
        """Create a table. Returns (number, whether it is new).

        Raises InvalidInput; TypeConflict if a different table has the name.
        """
        for number, there in enumerate(self.specs):
            if there.name == spec.name:
                if spec not in (there, self.created[number]):
                    raise TypeConflict(
                        f"table {spec.name!r} exists with other settings:"
                        f" {_difference(there, spec)}."
                    )
                return number, False
        if len(self.specs) >= TABLES_MAX:
            raise InvalidInput(
                f"no room for table {spec.name!r}: a shard has at most {TABLES_MAX} tables."
            )
        table = spec.check().made()
        table.bounded = self._serves
        self.tables.append(table)
        self.specs.append(spec)
        self.created.append(spec)
        return len(self.specs) - 1, True

    def alter(self, spec: TableSpec) -> int:
        """Give the table of that name a specification that differs in ALTERABLE only, while pushes
        are paused. Returns its number. Raises UnknownTable, InvalidInput; nothing has changed then.
        """
        number = self.number(spec.name)
        optimizer = Optimizer(spec.optimizer, **spec.optimizer_settings)
        self.tables[number].alter(optimizer, rows_max=spec.rows_max, evicts=spec.evicts)
        self.specs[number] = spec
        return number

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
            "steps": [table.steps for table in self.tables],
            "dense": self.dense.said(),
            "gathered": self.gathered,
        }

    def piece(self, cursor: Cursor) -> tuple[Piece, Cursor | None]:
        """Return some parameters from a cursor on, and the next cursor. The first is [0, 0]."""
        table, at = cursor
        if table < len(self.tables):
            one = self.tables[table]
            ids, rows, stamps, following = one.walk(at, max(1, PIECE_BYTES // (4 * one.width)))
            part = {"table": table, "ids": ids, "rows": rows, "stamps": stamps}
            head = (
                {"tables": self.shape()["tables"]} if at == 0 else {}
            )  # the table may be newer than the cursor's start
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

    def _of_table(self, number: int, ids: Ids) -> Piece:
        found, rows, stamps = self.tables[number].read(ids)
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

    def take(self, piece: Piece, shard: int = 0, shards: int = 1, mine: Any = None) -> None:
        """Write a piece of another copy.

        mine: a function (name, shards) -> shard; then only the part of `shard` of `shards` is
        taken.
        """
        for said in piece.get("tables", ()):
            self._take_table(msgspec.convert(said, TableSpec))
        for said in piece.get("created", ()):
            created = msgspec.convert(said, TableSpec)
            self.created[self.number(created.name)] = created
        for table, steps in zip(self.tables, piece.get("steps", ()), strict=False):
            table.steps = max(table.steps, int(steps))
        if "dense" in piece:
            self.dense.receive(piece["dense"])
            self.gathered = list(piece.get("gathered", ())) if mine is None else []
        for part in piece.get("rows", ()):
            self._take_rows(part, shard, shards)
        variables: Iterable[Mapping[str, Any]] = piece.get("variables", ())
        self.dense.write(
            v for v in variables if mine is None or mine(str(v["name"]), shards) == shard
        )

    def _take_table(self, spec: TableSpec) -> None:
        """Create a table, or give it the settings that it has been given since."""
        there = next((one for one in self.specs if one.name == spec.name), spec)
        changes = {key: getattr(spec, key) for key in ALTERABLE}
        if there != spec and msgspec.structs.replace(there, **changes) == spec:
            self.alter(spec)
        else:
            self.create(spec)

    def _take_rows(self, part: Mapping[str, Any], shard: int, shards: int) -> None:
        table, ids = self.tables[part["table"]], part["ids"]
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
