"""The set of shards that a server's models use: one that runs, or one of the server's own."""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from clipper.component import Health
from clipper.config import Config
from clipper.errors import (
    AlreadyExists,
    ClipperError,
    ConfigError,
    InvalidInput,
    ShardAway,
    did_you_mean,
)
from clipper.metrics.stats import ShardReading
from clipper.params.client.client import Client
from clipper.params.client.stats_cache import StatsCache
from clipper.params.client.stats_reader import StatsReader
from clipper.params.client.user_rows import UserRows, check_context_table
from clipper.params.local.address_file import ShardAddresses, read_address_file
from clipper.params.local.local_set import LocalSet, snapshot_all, supervisor_of
from clipper.params.tables import checked
from clipper.settings.params import ParamsSettings
from clipper.spec.table import TableSpec
from clipper.types import UserValue
from clipper_container.params.connection import SHARDS_FILE, addresses_in

_log = logging.getLogger(__name__)
PATIENCE_S = 60.0  # for a set that starts or recovers
TABLES_ENV = "CLIPPER_TABLES"  # environment of a container: the folder
DECLARED_ENV = "CLIPPER_TABLES_DECLARED"  # the tables that deploy() declared, as JSON
CARRIED = "/run/secrets/clipper_tables"  # mounted into a container that cannot see the folder
Tables = Mapping[str, Mapping[str, UserValue]]


class ServedSet:
    """The parameter set of a server. Call start(), then use `client`; then stop(). Threads: any."""

    def __init__(self, settings: ParamsSettings) -> None:
        self.settings, self.folder = settings, Path(settings.folder)
        self._own: LocalSet | None = None
        self._client: Client | None = None
        self._users: dict[str, UserRows] = {}
        self._guard = threading.Lock()
        self._reader = StatsReader(self.folder)
        self.observer = StatsCache(self.shards)

    def start(self, patience_s: float = PATIENCE_S) -> Self:
        """Connect to the set in the folder, or start one, and wait until all shards serve.

        Raises ShardAway, ConfigError, DoesNotFit (the folder has another number of shards).
        """
        # with an engine, shards run elsewhere
        if not (supervisor_of(self.folder) or read_address_file(self.folder).get("engine")):
            try:
                self._own = LocalSet(self.settings).start()
            except AlreadyExists:
                _log.info("another began the set of shards in %s just now: it is used", self.folder)
        try:
            if self._own is not None:
                self._own.wait_ready(patience_s)
            else:
                with Client(self.folder, patience_s=patience_s, answer_s=patience_s) as client:
                    client.call_all("tables")
        except BaseException:
            self.stop(snapshot=False)
            raise
        return self

    def stop(self, *, snapshot: bool = True) -> None:
        """Close all connections, and end the set if it is the server's own, with a snapshot."""
        with self._guard:
            client, self._client = self._client, None
            users, self._users = self._users, {}
        for one in (client, *users.values()):
            if one is not None:
                one.close()
        self.observer.stop()
        self._reader.close()
        own, self._own = self._own, None
        if own is not None:
            own.stop(snapshot=snapshot)

    @property
    def client(self) -> Client:
        """Client that is shared by everything that is not urgent.

        Raises InvalidInput if the folder has no address file.
        """
        with self._guard:
            if self._client is None:
                self._client = Client(self.folder)
            return self._client

    def make(self, whose: str, tables: Tables) -> None:
        """Create the tables that a model declares, if they do not exist, and take a snapshot of
        them.

        The snapshot lets a shard that is killed recover the new tables. Raises InvalidInput,
        TypeConflict (a different table has the name), ShardAway.
        """
        specs = [spec_of(whose, name, spec) for name, spec in tables.items()]
        there = self.client.call(0, "tables")["numbers"]
        for spec in specs:
            try:
                self.client.create(spec)
            except ShardAway:
                raise
            except ClipperError as error:
                raise type(error)(
                    f"{whose} declares table {spec.name!r}: {error.message}", hint=error.hint
                ) from None
        if any(spec.name not in there for spec in specs):
            self._keep()

    def users(self, application: str, table: str) -> UserRows:
        """Return the rows of a table as contexts of an application's queries."""
        with self._guard:
            found = self._users.get(application)
            if found is None or found.table != table:
                self._users[application] = found = UserRows(self.folder, table)
            return found

    def check_users(self, application: str, table: str) -> None:
        """Check that they can be contexts. Raises UnknownTable, DoesNotFit, ShardAway."""
        check_context_table(application, table, self.client)

    def _keep(self) -> None:
        addresses, token = addresses_in(self.folder)
        try:
            snapshot_all(addresses, token, self.folder)
        except ClipperError as error:
            _log.warning(
                "no snapshot of the new tables: a shard that is killed before the next one forgets"
                " them: %s",
                error,
            )

    def carried(self, tables: Tables) -> tuple[dict[str, str], dict[str, str]]:
        """Return (environment, secrets by path) for a container that cannot see the folder.

        Both are empty if such a container cannot reach the shards.
        """
        if self.out_of_reach:
            return {}, {}
        known = read_address_file(self.folder)
        content: ShardAddresses = {
            "addresses": known["addresses"],
            "token": known["token"],
            "generation": known.get("generation", 0),
            "before": known.get("before", 0),
        }
        return {**self.environment(tables), TABLES_ENV: CARRIED}, {
            f"{CARRIED}/{SHARDS_FILE}": json.dumps(content)
        }

    @property
    def out_of_reach(self) -> str:
        """Reason for which a container that cannot see the folder reaches no shard; empty if it
        does."""
        if read_address_file(self.folder).get("engine"):
            return "the shards' addresses change with their lives."
        if not all(address.startswith("tcp:") for address in addresses_in(self.folder)[0]):
            return "the shards listen at unix sockets, or with TLS."
        return ""

    def environment(self, tables: Tables) -> dict[str, str]:
        """Return the environment of a container on this host. It holds no secret."""
        declared = (
            {DECLARED_ENV: json.dumps({name: dict(spec) for name, spec in tables.items()})}
            if tables
            else {}
        )
        return {TABLES_ENV: str(self.folder), **declared}

    def shards(self) -> Sequence[ShardReading]:
        """Return the statistics of each shard; nothing if the folder has no address file."""
        try:
            return self._reader.read()
        except InvalidInput:
            return ()

    def health(self) -> list[Health]:
        """Return the states of the threads: of the set's own, and of the one that reads
        statistics."""
        own = self._own
        return [*self.observer.health(), *([] if own is None else own.health())]

    def stats(self) -> dict[str, object]:
        """Return statistics: folder; own: the set ends with this server; restarts of shards since
        the start."""
        own = self._own
        return {
            "folder": str(self.folder),
            "own": own is not None,
            "restarts": own.restarts if own is not None else 0,
        }


def spec_of(whose: str, name: str, fields: Mapping[str, object]) -> TableSpec:
    """Return the specification of a table that a model declares. Raises InvalidInput."""
    if not isinstance(fields, Mapping) or "dim" not in fields:
        hint = f'tables = {{"{name}": {{"dim": 8}}}}'
        raise InvalidInput(
            f"{whose} declares table {name!r} by {fields!r:.100}: a mapping with `dim` is needed.",
            hint=hint,
        )
    known = TableSpec.__struct_fields__[1:]
    if unknown := [key for key in fields if key not in known]:
        guess = did_you_mean(str(unknown[0]), known) or f". Known: {', '.join(known)}."
        raise InvalidInput(f"{whose} declares table {name!r} with {unknown[0]!r}{guess}")
    try:
        return checked(msgspec.convert({"name": name, **fields}, TableSpec))
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{whose} declares table {name!r}: {error}.") from None


def settings_of(config: Config) -> ParamsSettings:
    """Return [params] for the folder of server.params. Raises ConfigError, InvalidInput.

    Settings that the configuration does not name are those that the set in the folder had.
    """
    folder = Path(config.server.params).absolute()
    before = read_address_file(folder).get("settings", {})
    fields = msgspec.structs.fields(ParamsSettings)
    current = {field.name: getattr(config.params, field.name) for field in fields}
    given = {
        f.name
        for f in fields
        if f"params.{f.name}" in config.origins or current[f.name] != f.default
    }
    if "folder" in given and Path(config.params.folder).absolute() != folder:
        why = (
            f"server.params is {config.server.params!r}, and params.folder"
            f" {config.params.folder!r}."
        )
        raise ConfigError(why, hint="Leave out params.folder.")
    known = {key: value for key, value in before.items() if key in current and key not in given}
    try:
        return msgspec.convert({**current, **known, "folder": str(folder)}, ParamsSettings)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{folder}/shards.json: {error}.") from None
