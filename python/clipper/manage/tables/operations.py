"""Operations on the parameter tables of a running server, which its history then shows.

Files of an export or import are in the folder `files` of the set of shards: a request names one of
them, and nothing outside.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Unpack

import msgspec

from clipper.catalog.catalog import Catalog
from clipper.errors import DoesNotFit, InvalidInput, refuse_unknown
from clipper.manage.verbs.table import IDS_MAX, SHARDS_MAX
from clipper.spec.field import at, converted
from clipper.spec.keywords import TableAlterations, TableKeywords
from clipper.spec.table import ALTERABLE, TableSpec
from clipper.store.history import Changed, audit_context
from clipper.types import UserValue

if TYPE_CHECKING:
    from clipper.params.client.client import Client


class TableChange(msgspec.Struct):
    """Result of a change to tables, or of its dry run. message: one line. rows: how many it was
    about. changed: what the history has of it.
    """

    verb: str
    message: str = ""
    dry_run: bool = False
    rows: int = 0
    changed: tuple[Changed, ...] = ()


class TableServer(Protocol):
    """Interface of a server with tables: see ClipperServer."""

    catalog: Catalog

    @property
    def params(self) -> "Client":
        """A client of the shards. Raises DoesNotFit without tables."""


class TableOperations:
    """Operations on tables. Threads: any. actor: who acts, for the history. dry_run: check, and
    change nothing.

    All raise DoesNotFit if the server has no tables, UnknownTable, and ShardAway.
    """

    def __init__(self, server: TableServer, actor: str, *, dry_run: bool = False) -> None:
        self._server, self._actor, self._dry_run = server, actor, dry_run

    def tables(self) -> list[dict[str, object]]:
        """Return each table: its specification, and its rows on all shards."""
        client = self._server.params
        stats = [answer["tables"] for _, answer in client.call_all("stats")]
        specs = client.call(0, "tables")["tables"]
        return [
            {**spec, "rows": sum(int(each.get(name, {}).get("rows", 0)) for each in stats)}
            for name, spec in sorted(specs.items())
        ]

    def table(self, name: str) -> dict[str, object]:
        """Return one table: its specification, and its rows on all shards."""
        self._spec(name)
        return next(row for row in self.tables() if row["name"] == name)

    def create_table(self, name: str, dim: int, **members: Unpack[TableKeywords]) -> TableChange:
        """Create a table. One that exists with the same settings stays as it is.

        members: those of `clipper.spec.table.TableSpec`.
        """
        from clipper.params.tables import checked

        stated = _stated({"name": name, "dim": dim, **members}, self.create_table)
        spec = checked(TableSpec(**stated))
        if not self._dry_run:
            self._server.params.create(spec)
        return self._record("create table", name, None, spec, f"created table {name}")

    def alter_table(self, name: str, **members: Unpack[TableAlterations]) -> TableChange:
        """Change settings of a table while it is trained: those of
        `clipper.spec.table.ALTERABLE`."""
        from clipper.params.tables import altered

        before = self._spec(name)
        changes = _stated(members, self.alter_table)
        if not changes:
            raise InvalidInput("nothing to change.", hint=f"Members: {', '.join(ALTERABLE)}.")
        after = altered(before, changes)
        if not self._dry_run:
            after = self._server.params.alter(name, **changes)
        return self._record("alter table", name, before, after, f"altered table {name}")

    def drop_table(self, name: str) -> TableChange:
        """Remove a table with its rows. Its name is free at once."""
        before = self.table(name)
        count = int(str(before["rows"])) if self._dry_run else self._server.params.drop(name)
        return self._record("drop table", name, before, None, f"dropped table {name}", count)

    def erase_rows(self, name: str, ids: list[int]) -> TableChange:
        """Remove rows of a table by their ids. The history has their number."""
        self._spec(name)
        if not 1 <= len(ids) <= IDS_MAX:
            raise InvalidInput(f"{len(ids)} ids: 1 to {IDS_MAX} in one request.")
        count = 0 if self._dry_run else self._server.params.erase(name, _checked(ids))
        message = f"erased {count} rows of table {name}"
        return self._record("erase rows", name, None, {"erased": count}, message, count)

    def copy_table(self, name: str, to: str) -> TableChange:
        """Make a table `to` with the settings, rows and state of another."""
        from clipper.params.client.table_files import copy_table
        from clipper.params.tables import checked

        after = checked(msgspec.structs.replace(self._spec(name), name=to))
        count = 0 if self._dry_run else copy_table(self._server.params, name, to)
        message = f"copied {count} rows of table {name} to {to}"
        return self._record("copy table", to, None, {"of": name, "spec": after}, message, count)

    def export_table(self, name: str, file: str) -> TableChange:
        """Write the ids and rows of a table to a file of the set's folder: .npz, .safetensors or
        .parquet."""
        from clipper.params.client.table_files import export_table

        self._spec(name)
        path = self._path(file)
        count = 0 if self._dry_run else export_table(self._server.params, name, path)
        message = f"exported {count} rows of table {name} to {path}"
        return self._record("export table", name, None, {"file": str(path)}, message, count)

    def import_table(self, name: str, file: str, create: bool = False) -> TableChange:
        """Write the rows of a file of the set's folder into a table, over those of the same ids.
        create: make the table, as wide as the rows."""
        from clipper.params.client.table_files import create_for, import_table, read_rows

        path, client = self._path(file), self._server.params
        if not create:
            self._spec(name)
        if not path.exists():
            raise InvalidInput(f"{path}: there is no such file.")
        if self._dry_run:
            count = len(read_rows(path)[0])
        else:
            if create:
                create_for(client, name, path)
            count = import_table(client, name, path)
        message = f"imported {count} rows of {path} into table {name}"
        return self._record("import table", name, None, {"file": str(path)}, message, count)

    def shards(self) -> dict[str, object]:
        """Return the shards that have the tables: `shards`, their number; `resharding`, how far the
        last change of it is; null if there was none."""
        from clipper.params.local.address_file import read_address_file
        from clipper.params.local.live_reshard import state_in

        folder = Path(self._server.params.folder)
        number = len(read_address_file(folder)["addresses"])
        return {"shards": number, "resharding": msgspec.to_builtins(state_in(folder))}

    def reshard(self, shards: int) -> TableChange:
        """Change the number of shards while they serve. `GET /admin/shards` tells how far it is."""
        from clipper.params.local.live_reshard import request
        from clipper.params.local.local_set import supervisor_of

        before, folder = self.shards(), Path(self._server.params.folder)
        if not 1 <= shards <= SHARDS_MAX:
            raise InvalidInput(f"{shards} shards: 1 to {SHARDS_MAX}.")
        if not supervisor_of(folder):
            raise DoesNotFit(
                f"the shards of {folder} have no supervisor that could start others.",
                hint=f"clipper params reshard --shards {shards} --folder {folder}",
            )
        request(folder, shards, dry_run=self._dry_run)
        after = {"shards": shards}
        return self._record("reshard", "", before, after, f"requested {shards} shards")

    def _spec(self, name: str) -> TableSpec:
        return self._server.params.spec(name)

    def _path(self, file: str) -> Path:
        """Return the path of a file in the set's folder. Raises InvalidInput."""
        folder = Path(self._server.params.folder) / "files"
        if Path(file).name != file or file.startswith(".") or "\0" in file:
            raise InvalidInput(f"file {file!r:.100}: the name of a file in {folder}.")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / file

    def _record(
        self, verb: str, name: str, before: object, after: object, message: str, rows: int = 0
    ) -> TableChange:
        with audit_context(self._actor, verb, dry=self._dry_run) as audit:
            key = f"tables/{name}" if name else "shards"
            self._server.catalog.record(verb, key, _json(before), _json(after))
        changed = tuple(one for entry in audit.entries for one in entry.changed)
        return TableChange(verb, message, self._dry_run, rows, changed)


def _stated(
    members: Mapping[str, object], verb: Callable[..., TableChange]
) -> dict[str, UserValue]:
    """Return the members of a table that a verb was given. Raises InvalidInput."""
    known = at(TableSpec, "http")
    if unknown := [key for key in members if key not in known]:
        refuse_unknown(f"TableOperations.{verb.__name__}", unknown, tuple(known))
    return converted(TableSpec, members, "http")


def _json(value: object) -> bytes:
    return b"" if value is None else msgspec.json.encode(value)


def _checked(ids: Sequence[int]) -> list[int]:
    """Return ids as signed numbers of 64 bits. Raises InvalidInput."""
    for number in ids:
        if not -(1 << 63) <= number < 1 << 64:
            raise InvalidInput(f"id {number}: a number of 64 bits.")
    return [number - (1 << 64) if number >= 1 << 63 else number for number in ids]
