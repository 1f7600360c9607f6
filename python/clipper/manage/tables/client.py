"""Parameter tables of a running server from elsewhere: `clipper.connect().tables`."""

from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from clipper.manage.verbs.calls import TableCalls
from clipper.manage.verbs.sending import Requests, quoted
from clipper.types import UserValue

if TYPE_CHECKING:
    from clipper.manage.rows import TableChangeResult
    from clipper.spec.table import TableSpec

_AT = "/admin/tables"


class TableInfo(NamedTuple):
    """A table. rows: how many it has on all shards."""

    spec: "TableSpec"
    rows: int


class TableClient(TableCalls):
    """The routes `/admin/tables` and `/admin/shards` as methods. Threads: any, as Client.

    With dry_run a change is checked, and nothing is changed. A change is in the history. All
    methods raise DoesNotFit if the server has no tables, UnknownTable, InvalidInput, and ShardAway.
    """

    def __init__(self, client: Requests) -> None:
        self._client = client

    def request(
        self, method: str, path: str, members: dict[str, object] | None = None
    ) -> dict[str, UserValue]:
        """Send a request by the client of the server."""
        return self._client.request(method, path, members)

    def list(self) -> list[TableInfo]:
        """Return all tables."""
        found = self.request("GET", _AT)["tables"]
        return [_info(one) for one in msgspec.convert(found, list[dict[str, object]])]

    def get(self, name: str) -> TableInfo:
        """Return one table."""
        return _info(self.request("GET", f"{_AT}/{quoted(name)}"))

    def create(self, spec: "TableSpec", *, dry_run: bool = False) -> "TableChangeResult":
        """Create a table. Raises TypeConflict if it exists with other settings."""
        members = msgspec.to_builtins(spec)
        path = f"{_AT}/{quoted(members.pop('name'))}/create{'?dry_run=true' if dry_run else ''}"
        return cast("TableChangeResult", self.request("POST", path, members))


def _info(members: dict[str, object]) -> TableInfo:
    from clipper.spec.table import TableSpec

    return TableInfo(
        msgspec.convert(members, TableSpec), msgspec.convert(members.get("rows", 0), int)
    )
