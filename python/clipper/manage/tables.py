"""A server and its tables of parameters: what `ClipperServer` inherits. docs/params.md says what
they are."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clipper.catalog import Catalog
from clipper.config import Config
from clipper.errors import DoesNotFit, InvalidInput, NotAllowed
from clipper.selection import create_policy, takes_context
from clipper.serving.reads import check_reads
from clipper.types import Application, Model

if TYPE_CHECKING:
    from clipper.params.client import Client
    from clipper.params.contexts import UserRows
    from clipper.params.serving import ServedSet
    from clipper.params.watching import Watching

_log = logging.getLogger(__name__)
_HINT = "Start it by clipper.start(params='FOLDER'), or set params in [server]."
_ENGINES = ("docker", "podman")


class Tabled:
    """Threads: any."""

    config: Config
    catalog: Catalog
    _tables: "ServedSet | None" = None
    _watching: "Watching | None" = None

    @property
    def params(self) -> "Client":
        """A client of the set of shards whose tables this server's models use: one request at a
        time, so a worker makes its own. NotAllowed without `params=`."""
        if self._tables is None:
            raise NotAllowed(
                "this server has no tables of parameters.",
                hint="Start it by clipper.start(params='FOLDER').",
            )
        return self._tables.client

    def _open_tables(self) -> None:
        """Where [server] params says, if it does. Imported by those who want it."""
        if self.config.server.params:
            from clipper.params.serving import ServedSet, settings_of
            from clipper.params.watching import Watching

            self._tables = ServedSet(settings_of(self.config)).start()
            self._watching = Watching(self._tables.folder)

    def _close_tables(self) -> None:
        if self._watching is not None:
            self._watching.stop()
        if self._tables is not None:
            self._tables.stop()

    def _context_rows(self, application: str, table: str) -> "UserRows | None":
        """Of an application that takes its users' vectors from a table."""
        if self._tables is None:
            what = (
                "application %r: no table %r, since this server has no tables of parameters; its"
                " queries go without a context"
            )
            _log.warning(what, application, table)
            return None
        return self._tables.users(application, table)

    def _check_context(self, name: str, settings: Mapping[str, Any]) -> None:
        """Whether the table that an application is to take contexts from can be. Raises DoesNotFit,
        UnknownTable, ShardAway."""
        table = settings.get("context_table")
        if not table:
            return
        if not isinstance(table, str):
            raise InvalidInput(
                f"context_table={table!r:.60} of application {name!r}: the name of a table."
            )
        known = self.catalog.view.applications.get(name, Application(name))
        policy = settings.get("policy", known.policy)
        if not takes_context(create_policy(policy)):
            why = (
                f"context_table={table!r}: policy {policy!r} of application {name!r} takes no"
                " context."
            )
            raise DoesNotFit(why, hint="Choose one that does: policy='linucb'.")
        if self._tables is None:
            hint = "Start it by clipper.start(params='FOLDER')."
            raise DoesNotFit(
                f"application {name!r}: context_table={table!r}, and this server has no tables.",
                hint=hint,
            )
        self._tables.check_users(name, table)


def check_read(model: Model, *, has_tables: bool) -> None:
    """Whether a model can read the tables that it says. Raises DoesNotFit where there are none, and
    what check_reads raises."""
    check_reads(model)
    if model.reads and not has_tables:
        raise DoesNotFit(f"model '{model.id}' reads tables, and this server has none.", hint=_HINT)


def make_tables(tables: "ServedSet | None", model: Model, *, networked: bool = False) -> None:
    """Those that a model declares. Raises DoesNotFit where it cannot have any, what check_read and
    ServedSet.make raise. networked: containers of an engine share a network with the shards."""
    check_read(model, has_tables=tables is not None)
    if not model.tables:
        return
    what = f"model '{model.id}' declares tables ({', '.join(model.tables)})"
    if tables is None:
        raise DoesNotFit(f"{what}, and this server has none.", hint=_HINT)
    if model.deployer in _ENGINES:
        why = tables.out_of_reach or ("" if networked else "it has no network.")
        if why:
            hint = (
                "Set params.address to HOST:PORT, and server.address to tcp://HOST:PORT; or"
                " deployer='process'."
            )
            raise DoesNotFit(
                f"{what}; a container of {model.deployer} does not reach them: {why}", hint=hint
            )
    tables.make(f"model '{model.id}'", model.tables)
