"""A server and its tables of parameters: what `ClipperServer` inherits. docs/params.md says what they are."""

from typing import TYPE_CHECKING

from clipper.config import Config
from clipper.errors import DoesNotFit, NotAllowed
from clipper.types import Model

if TYPE_CHECKING:
    from clipper.params.client import Client
    from clipper.params.serving import ServedSet

_ENGINES = ("docker", "podman")


class Tabled:
    """Threads: any."""

    config: Config
    _tables: "ServedSet | None" = None

    @property
    def params(self) -> "Client":
        """A client of the set of shards whose tables this server's models use: one request at a time, so a worker makes its own.
        NotAllowed without `params=`."""
        if self._tables is None:
            raise NotAllowed("this server has no tables of parameters.", hint="Start it by clipper.start(params='FOLDER').")
        return self._tables.client

    def _open_tables(self) -> None:
        """Where [server] params says, if it does. Imported by those who want it."""
        if self.config.server.params:
            from clipper.params.serving import ServedSet, settings_of

            self._tables = ServedSet(settings_of(self.config)).start()


def make_tables(tables: "ServedSet | None", model: Model) -> None:
    """Those that a model declares. Raises DoesNotFit where it cannot have any, and what ServedSet.make raises."""
    if not model.tables:
        return
    what = f"model '{model.id}' declares tables ({', '.join(model.tables)})"
    if tables is None:
        hint = "Start it by clipper.start(params='FOLDER'), or set params in [server]."
        raise DoesNotFit(f"{what}, and this server has none.", hint=hint)
    if model.deployer in _ENGINES:
        hint = "Deploy it with deployer='process'."
        raise DoesNotFit(f"{what}; a container of {model.deployer} does not reach them.", hint=hint)
    tables.make(f"model '{model.id}'", model.tables)
