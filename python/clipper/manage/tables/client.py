"""Parameter tables of a running server from elsewhere: `clipper.connect().tables`."""

import urllib.parse
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypedDict, Unpack, cast

import msgspec

from clipper.spec.keywords import TableAlterations

if TYPE_CHECKING:
    from clipper.manage.rows import ChangedRecord
    from clipper.spec.table import TableSpec

_AT = "/admin/tables"


class TableInfo(NamedTuple):
    """A table. rows: how many it has on all shards."""

    spec: "TableSpec"
    rows: int


class TableChangeResult(TypedDict):
    """Result of a change to tables, or of its dry run. message: one line. rows: how many it was
    about. changed: what the history has of it."""

    verb: str
    message: str
    dry_run: bool
    rows: int
    changed: list["ChangedRecord"]


class TableRequests(Protocol):
    """Interface of manage.client.Client that this module needs."""

    def request(
        self, method: str, path: str, members: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Send a request, and return the object that answers it."""


class TableClient:
    """The routes `/admin/tables` and `/admin/shards` as methods. Threads: any, as Client.

    With dry_run a change is checked, and nothing is changed. A change is in the history. All
    methods raise DoesNotFit if the server has no tables, UnknownTable, InvalidInput, and ShardAway.
    """

    def __init__(self, client: TableRequests) -> None:
        self._client = client

    def list(self) -> list[TableInfo]:
        """Return all tables."""
        found = self._client.request("GET", _AT)["tables"]
        return [_info(one) for one in msgspec.convert(found, list[dict[str, object]])]

    def get(self, name: str) -> TableInfo:
        """Return one table."""
        return _info(self._client.request("GET", _path(name)))

    def create(self, spec: "TableSpec", *, dry_run: bool = False) -> TableChangeResult:
        """Create a table. Raises TypeConflict if it exists with other settings."""
        members = msgspec.to_builtins(spec)
        return self._change(members.pop("name"), "create", members, dry_run)

    def alter(
        self, name: str, *, dry_run: bool = False, **changes: Unpack[TableAlterations]
    ) -> TableChangeResult:
        """Change settings and quotas of a table while it is trained; None: as it is."""
        given = {key: value for key, value in changes.items() if value is not None}
        return self._change(name, "alter", given, dry_run)

    def drop(self, name: str, *, dry_run: bool = False) -> TableChangeResult:
        """Remove a table with its rows. Its name is free at once."""
        return self._change(name, "drop", {}, dry_run)

    def erase(self, name: str, ids: Sequence[int], *, dry_run: bool = False) -> TableChangeResult:
        """Remove rows by their ids."""
        return self._change(name, "erase", {"ids": [int(one) for one in ids]}, dry_run)

    def copy(self, name: str, to: str, *, dry_run: bool = False) -> TableChangeResult:
        """Make a table `to` with the settings, rows and state of another."""
        return self._change(name, "copy", {"to": to}, dry_run)

    def export_rows(self, name: str, file: str, *, dry_run: bool = False) -> TableChangeResult:
        """Write a table to a file in the folder `files` of the set: .npz, .safetensors or
        .parquet."""
        return self._change(name, "export", {"file": file}, dry_run)

    def import_rows(
        self, name: str, file: str, *, create: bool = False, dry_run: bool = False
    ) -> TableChangeResult:
        """Write the rows of a file in the folder `files` of the set into a table. create: make the
        table, as wide as the rows."""
        return self._change(name, "import", {"file": file, "create": create}, dry_run)

    def shards(self) -> dict[str, object]:
        """Return the number of `shards`, and how far its last change is, `resharding`."""
        return self._client.request("GET", "/admin/shards")

    def reshard(self, shards: int, *, dry_run: bool = False) -> TableChangeResult:
        """Change the number of shards while they serve; `shards` tells how far it is. Raises
        DoesNotFit."""
        path = f"/admin/shards/reshard{'?dry_run=true' if dry_run else ''}"
        return cast(TableChangeResult, self._client.request("POST", path, {"shards": shards}))

    def _change(
        self, name: str, verb: str, members: dict[str, object], dry_run: bool
    ) -> TableChangeResult:
        path = f"{_path(name)}/{verb}{'?dry_run=true' if dry_run else ''}"
        return cast(TableChangeResult, self._client.request("POST", path, members))


def _path(name: str) -> str:
    return f"{_AT}/{urllib.parse.quote(name, safe='')}"


def _info(members: dict[str, object]) -> TableInfo:
    from clipper.spec.table import TableSpec

    return TableInfo(
        msgspec.convert(members, TableSpec), msgspec.convert(members.get("rows", 0), int)
    )
