"""The parameter tables of a server: its own shards, or those of another. See docs/params.md."""

import logging
from typing import TYPE_CHECKING

from clipper.component import Health
from clipper.config import Config
from clipper.errors import DoesNotFit, InvalidInput
from clipper.selection import create_policy, takes_context
from clipper.serving.models.reads import check_reads
from clipper.types import Model

if TYPE_CHECKING:
    from clipper.params.client.client import Client
    from clipper.params.client.row_watcher import RowWatcher
    from clipper.params.client.user_rows import UserRows
    from clipper.params.local.served_set import ServedSet

_log = logging.getLogger(__name__)
_HINT = "Start it by clipper.start(params='FOLDER'), or set params in [server]."
_ENGINES = ("docker", "podman")


class ParameterSet:
    """The set of shards that `[server] params` names. Without that setting there are no tables.

    Threads: any, after start().
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.served: ServedSet | None = None
        self.watching: RowWatcher | None = None

    def start(self) -> None:
        """Start the shards, or connect to running ones.

        Raises ShardAway, ConfigError, DoesNotFit.
        """
        if self._config.server.params:
            from clipper.params.client.row_watcher import RowWatcher
            from clipper.params.local.served_set import ServedSet, settings_of

            self.served = ServedSet(settings_of(self._config)).start()
            self.watching = RowWatcher(self.served.folder)

    def health(self) -> list[Health]:
        """Return the state of the threads that watch rows, read statistics and run shards."""
        found = [] if self.watching is None else self.watching.health()
        return found if self.served is None else [*found, *self.served.health()]

    def stop(self) -> None:
        """Stop watching rows, and the shards if this server started them."""
        try:
            if self.watching is not None:
                self.watching.stop()
        finally:
            if self.served is not None:
                self.served.stop()

    @property
    def client(self) -> "Client":
        """A client of the shards. Raises DoesNotFit without tables."""
        if self.served is None:
            raise DoesNotFit(
                "this server has no tables of parameters.",
                hint="Start it by clipper.start(params='FOLDER').",
            )
        return self.served.client

    def stats(self) -> dict[str, object] | None:
        """Return the shards' statistics; None without tables."""
        return None if self.served is None else self.served.stats()

    def users(self, application: str, table: str) -> "UserRows | None":
        """Return the user vectors of an application; None, with a warning, without tables."""
        if self.served is None:
            _log.warning(
                "application %r: no table %r, since this server has no tables of parameters; its"
                " queries go without a context",
                application,
                table,
            )
            return None
        return self.served.users(application, table)

    def check_context_table(self, application: str, table: object, policy: str) -> None:
        """Check that an application can take its contexts from a table.

        Raises InvalidInput, DoesNotFit, UnknownTable, ShardAway.
        """
        if not table:
            return
        if not isinstance(table, str):
            raise InvalidInput(
                f"context_table={table!r:.60} of application {application!r}: the name of a table."
            )
        if not takes_context(create_policy(policy)):
            why = (
                f"context_table={table!r}: policy {policy!r} of application {application!r} takes"
                " no context."
            )
            raise DoesNotFit(why, hint="Choose one that does: policy='linucb'.")
        if self.served is None:
            raise DoesNotFit(
                f"application {application!r}: context_table={table!r}, and this server has no"
                " tables.",
                hint="Start it by clipper.start(params='FOLDER').",
            )
        self.served.check_users(application, table)


def check_read(model: Model, *, has_tables: bool) -> None:
    """Check that a model can read the tables that it names.

    Raises DoesNotFit without tables, and the errors of check_reads().
    """
    check_reads(model)
    if model.reads and not has_tables:
        raise DoesNotFit(f"model '{model.id}' reads tables, and this server has none.", hint=_HINT)


def make_tables(tables: "ServedSet | None", model: Model, *, networked: bool = False) -> None:
    """Make the tables that a model declares, where they do not exist.

    networked: whether containers of Docker or Podman reach the shards over a network. Raises
    DoesNotFit when the model cannot have tables, and the errors of check_read() and
    ServedSet.make().
    """
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
