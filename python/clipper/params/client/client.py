"""`Client`: what a worker, or a model that serves, asks of a set of shards."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from clipper.errors import InvalidInput, ShardAway, StalePush, UnknownTable
from clipper.params.client.connection import ShardConnection, ShardRequest, addresses_in, call
from clipper.params.frames import DTYPES, DUPLICATE, PUSHED, Head, Kind, padding, unpacked
from clipper.params.partition import Ids, shard_of_name, split_by_shard
from clipper.params.tables import TableSpec
from clipper_container.params.push_identity import PushIdentity, renew_after_fork

Array = npt.NDArray[Any]
Variables = Mapping[str, npt.NDArray[np.float32]]
_NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
SPIN_US = 50
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}


class Pushed(msgspec.Struct, frozen=True):
    """What became of a push. versions: of the model on each shard that took part.  repeated: shards
    that had applied this push before, which do not say again what became of their ids.

    applied: distinct ids whose rows were changed.  unadmitted: ids not seen often enough for a row
    (`admit_after`). no_room: ids that found their table full: nothing is kept of their gradients.
    evicted: rows that had to go for others.
    """

    sequence: int
    versions: dict[int, int]
    repeated: tuple[int, ...] = ()
    applied: int = 0
    unadmitted: int = 0
    no_room: int = 0
    evicted: int = 0


class Prefetched:
    """Rows that are on their way. result(): as `pull` gives them; once."""

    def __init__(self, take: Callable[[], Array]) -> None:
        self._take = take

    def result(self) -> Array:
        return self._take()


class Client:
    """Threads: any; those that ask the same shard wait for each other, a shard that does not answer
    delays only who asks it. A forked child may use it: it has connections and a worker number of
    its own there.

    shards: the folder of a set that runs on this host, or the addresses of all shards in order
    (`unix:/path`, `tcp:host:port`). worker: its number; pushes are told from their repetitions by
    it. Made up when not given. While a client lives, another of the same number is refused
    (AlreadyExists). patience_s: how long to wait for a shard that is away, or recovers, before
    ShardAway. shared: large pulls come by memory that a shard on this host writes; a forked child
    that keeps such rows must copy them. spin_us: how long to poll for an answer before sleeping,
    while that pays (docs/params.md); 0: never.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str],
        *,
        token: str = "",
        worker: int = 0,
        patience_s: float = 10.0,
        answer_s: float = 10.0,
        shared: bool = True,
        spin_us: int = SPIN_US,
    ) -> None:
        addresses: list[str]
        self._folder, known = "", ""
        if isinstance(shards, str) and shards.startswith(("unix:", "tcp:")):
            addresses = [shards]
        elif isinstance(shards, str | os.PathLike):
            self._folder = os.fspath(shards)
            addresses, known = addresses_in(self._folder)
        else:
            addresses = list(shards)
        if not addresses:
            raise InvalidInput(
                "a set of no shards.", hint="Give the addresses of all of them, in order."
            )
        self._addresses = addresses
        self.patience_s = patience_s
        self._specs: dict[str, TableSpec] = {}
        self._token = token or known or os.environ.get("CLIPPER_PARAMS__TOKEN", "")
        self._answer_s, self._shared, self._spin_us = answer_s, shared, spin_us
        self._identity = PushIdentity(worker)
        self.connections = self._new_connections()
        renew_after_fork(self)

    def _new_connections(self) -> list[ShardConnection]:
        return [
            ShardConnection(
                i,
                self._address,
                self._token,
                self._identity,
                self._answer_s,
                shares=self._shared,
                spin_us=self._spin_us,
            )
            for i in range(len(self._addresses))
        ]

    def forked(self) -> None:
        """In a forked child, before anything else: its connections are the parent's, and so is its
        number."""
        parents = self.connections
        self._identity = PushIdentity()
        self.connections = self._new_connections()
        for connection in parents:
            connection.close()

    @property
    def worker(self) -> int:
        """Its number, as shards know it."""
        return self._identity.worker

    def close(self) -> None:
        for connection in self.connections:
            with connection.lock:
                connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.connections)

    @property
    def versions(self) -> list[int]:
        """Of the model on each shard, as last heard."""
        return [connection.version for connection in self.connections]

    # -- tables

    def create(self, spec: TableSpec) -> None:
        """Make the table on every shard that does not have it. Raises InvalidInput, TypeConflict
        (it is there, and another)."""
        spec.check()
        for connection, said in self.call_all("create", spec=msgspec.to_builtins(spec)):
            connection.tables[spec.name] = int(said["number"])
        self._specs[spec.name] = spec

    def begin_anew(self) -> list[int]:
        """Tell shards that came back without what they had (StateLost) to go on with nothing;
        others go on as they are. The tables that this client knows are made again; their rows begin
        as untrained. -> the shards that were told
        """
        begun = [
            connection.number for connection, said in self.call_all("begin_anew") if said["begun"]
        ]
        for spec in self._specs.values():
            self.create(spec)
        return begun

    def spec(self, table: str) -> TableSpec:
        """Of a table. Raises UnknownTable."""
        if table not in self._specs:
            said = self.call(0, "tables")["tables"]
            self._specs.update(
                {name: msgspec.convert(spec, TableSpec) for name, spec in said.items()}
            )
        try:
            return self._specs[table]
        except KeyError:
            raise UnknownTable.named(table, self._specs) from None

    def pull(
        self, table: str, ids: npt.ArrayLike, dtype: str = "f32", *, unique: bool = False
    ) -> Array:
        """[n, dim]: the rows of n ids, in their order; of one without a row, what it would begin
        as.

        ids: i64[n] or u64[n].  dtype: f32, f16, bf16 (as u16), i8 (given as f32, each row by its
        scale).  unique: ask for each distinct id once, where many are equal and the way is long.
        Raises UnknownTable, InvalidInput, ShardAway.
        """
        if unique:
            each, where = np.unique(as_ids(ids), return_inverse=True)
            return np.take(self._pulling(table, each, dtype)(), where, axis=0)
        return self._pulling(table, as_ids(ids), dtype)()

    def prefetch(self, table: str, ids: npt.ArrayLike, dtype: str = "f32") -> Prefetched:
        """Ask now, take later: the rows come while the caller computes."""
        return Prefetched(self._pulling(table, as_ids(ids), dtype))

    def push(
        self,
        table: str,
        ids: npt.ArrayLike,
        gradients: npt.ArrayLike,
        *,
        scale: float = 1.0,
        versioned: bool = False,
        sequence: int = 0,
    ) -> Pushed:
        """One step of the table's optimizer for each distinct id, by the sum of its gradients
        f32[n, dim].

        Applied exactly once, also when a connection breaks and it is sent again. With replicas that
        are waited for it survives the death of a shard once this has returned.  scale: of the rate.
        versioned: say of which version the gradients are, for shards that mind.  sequence: that of
        an error, to send again a push that some shards may have applied: they do not twice. Raises
        InvalidInput (nothing was changed on that shard), StalePush, ShardAway; TooLarge (nothing
        was changed).
        """
        each = as_ids(ids)
        rows = np.ascontiguousarray(gradients, np.float32)
        dim = self.spec(table).dim
        if rows.shape != (each.size, dim):
            raise _misshapen(table, each.size, dim, rows)
        sequence = sequence or self._new_sequence()
        asks = []
        for shard, mine, places in self._parts(each):
            part = rows if places is None else rows[places]
            buffers = mine, part.reshape(-1), padding(part.nbytes)
            model = self.connections[shard].version if versioned else 0
            size = mine.nbytes + part.nbytes + len(buffers[2])
            head = Head(
                Kind.PUSH, 0, 0, 0, mine.size, 0, 0, self.worker, sequence, model, scale, size
            )
            asks.append((shard, self._of_rows(table, shard, head, buffers)))
        with _numbered(sequence):
            answers = self._request_all(asks)
        repeated = tuple(shard for shard, head in answers if head.flags & DUPLICATE)
        counts = [PUSHED.unpack(ask.body) for _, ask in asks if len(ask.body) == PUSHED.size]
        sums = (sum(each) for each in zip(*counts, strict=True))
        return Pushed(sequence, {shard: head.model for shard, head in answers}, repeated, *sums)

    # -- dense variables, and the model as a whole

    def push_model(
        self, variables: Variables, tables: Sequence[TableSpec] = (), **settings: Any
    ) -> None:
        """Initialize: the first worker's values win, later ones are ignored.  settings:
        `optimizer`, `optimizer_settings`."""
        for spec in tables:
            self.create(spec)
        for shard, mine in enumerate(self._by_shard(variables)):
            self.call(shard, "push_model", variables=mine, **settings)

    def pull_variables(
        self, since: Sequence[int] | None = None
    ) -> tuple[list[int], dict[str, Array]]:
        """(version of each shard, variables): all, or with `since` those of shards whose version is
        newer. Raises InvalidInput while no worker has initialized them."""
        versions, found = [], {}
        for connection, said in self.call_all(
            "pull_variables", each=[{"since": v} for v in since] if since is not None else None
        ):
            if not said["initialized"]:
                raise InvalidInput(
                    f"{connection.name} has no variables yet.",
                    hint="Push them first: client.push_model({...}).",
                )
            versions.append(int(said["version"]))
            found.update(said["variables"])
        return versions, found

    def push_gradients(
        self,
        variables: Variables | None = None,
        rows: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]] | None = None,
        *,
        versions: Sequence[int] | None = None,
        scale: float = 1.0,
        sequence: int = 0,
    ) -> dict[str, Any]:
        """A step of the whole model: gradients of dense variables, and of rows by table (ids,
        f32[n, dim]).

        versions: of each shard, that the gradients were computed at. -> {"accepted": bool,
        "versions": [...], "why": [...], "sequence": int, "no_room": ids that found a table full};
        by all shards or by none, where shards sum the gradients of several workers (`sync`).
        Asynchronous shards decide each for itself: those computed anew, sent with the same
        sequence, are applied only where they were refused. sequence: 0 for a new push; see also
        `push`.
        """
        sequence = sequence or self._new_sequence()
        parts: list[dict[str, Any]] = [
            {"variables": mine, "rows": {}} for mine in self._by_shard(variables or {})
        ]
        for table, (ids, gradients) in (rows or {}).items():
            each, given = as_ids(ids), np.ascontiguousarray(gradients, np.float32)
            if given.shape != (each.size, self.spec(table).dim):
                raise _misshapen(table, each.size, self.spec(table).dim, given)
            for shard, places in split_by_shard(each, len(self.connections)):
                parts[shard]["rows"][table] = {"ids": each[places], "gradients": given[places]}
        for shard, part in enumerate(parts):
            part |= {"worker": self.worker, "sequence": sequence, "scale": scale}
            part["version"] = versions[shard] if versions is not None else 0
        with _numbered(sequence):
            answers = self._push_parts(parts)
        return {
            "accepted": all(said["accepted"] for said in answers),
            "versions": [int(said["version"]) for said in answers],
            "why": [said.get("why", "") for said in answers],
            "sequence": sequence,
            "no_room": sum(int(said.get("no_room", 0)) for said in answers),
        }

    # -- calls

    def call(self, shard: int, name: str, **fields: Any) -> dict[str, Any]:
        """Ask one shard. Raises what it refuses with, and ShardAway."""
        ask = call(name, **fields)
        self._wait_with_retries(shard, ask, time.monotonic() + self.patience_s)
        return unpacked(ask.body)

    def call_all(
        self, name: str, *, each: Sequence[Mapping[str, Any]] | None = None, **fields: Any
    ) -> list[tuple[ShardConnection, dict[str, Any]]]:
        """Ask every shard at once; each: what else to tell them, by shard."""
        asks = [
            (i, call(name, **fields, **(each[i] if each else {})))
            for i in range(len(self.connections))
        ]
        self._request_all(asks)
        return [(self.connections[shard], unpacked(ask.body)) for shard, ask in asks]

    # -- inside

    def _push_parts(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Asynchronous shards each take theirs. Of synchronous ones the others check it, shard 0
        decides, and they follow."""
        if self.connections[0].mode != "sync" or len(self.connections) == 1:
            return [said for _, said in self.call_all("push_gradients", each=parts)]
        self.call_all("push_gradients", each=[{**part, "check": True} for part in parts])
        first = self.call(0, "push_gradients", **parts[0])
        if not first["accepted"]:
            return [first] * len(parts)
        step = {"step": first["step"]}
        return [
            said
            for _, said in self.call_all(
                "push_gradients", each=[{**part, **step} for part in parts]
            )
        ]

    def _new_sequence(self) -> int:
        """Above all that shards know of this worker: its number may have been another process's
        before. Raises InvalidInput."""
        if not self._identity.has_pushed:
            self.call_all("tables")  # every shard has said
            self._identity.start_after(max(connection.sequence for connection in self.connections))
        try:
            return self._identity.next()
        except OverflowError as error:
            raise InvalidInput(f"{error}.") from None

    def _address(self, shard: int) -> str:
        if self._folder:
            self._addresses, _ = addresses_in(self._folder)
        return self._addresses[shard]

    def _by_shard(self, variables: Variables) -> list[dict[str, Array]]:
        parts: list[dict[str, Array]] = [{} for _ in self.connections]
        for name, value in variables.items():
            parts[shard_of_name(name, len(parts))][name] = np.ascontiguousarray(value, np.float32)
        return parts

    def _of_rows(
        self, table: str, shard: int, head: Head, buffers: Sequence[Any], expects: int = 0
    ) -> ShardRequest:
        connection = self.connections[shard]
        if table not in connection.tables:
            found = self.call(shard, "tables")["numbers"]
            connection.tables.update({str(name): int(number) for name, number in found.items()})
            if table not in connection.tables:
                raise UnknownTable.named(table, connection.tables)
        return ShardRequest(head, buffers, table=table, expects=expects)

    def _parts(self, ids: Ids) -> list[tuple[int, Ids, npt.NDArray[np.intp] | None]]:
        """(shard, its ids, their places: None for all) of each shard that has some."""
        if len(self.connections) == 1:
            return [(0, ids, None)] if ids.size else []
        return [
            (shard, ids[places], places)
            for shard, places in split_by_shard(ids, len(self.connections))
        ]

    def _request_all(self, asks: Sequence[tuple[int, ShardRequest]]) -> list[tuple[int, Head]]:
        """All are sent before the first is waited for. Raises TooLarge before anything is sent."""
        until = time.monotonic() + self.patience_s
        for shard, ask in asks:
            self.connections[shard].check(ask)
        for shard, ask in asks:
            self._try_to_send(shard, ask, until)
        return [(shard, self._wait_with_retries(shard, ask, until)) for shard, ask in asks]

    def _try_to_send(self, shard: int, ask: ShardRequest, until: float) -> None:
        connection = self.connections[shard]
        try:
            with self._asking(connection, until):
                connection.send(ask)
        except OSError:
            ask.id = 0  # `settled` sends it again

    def _wait_with_retries(self, shard: int, ask: ShardRequest, until: float) -> Head:
        connection = self.connections[shard]
        with self._asking(connection, until):
            return connection.wait_with_retries(ask, until)

    @contextlib.contextmanager
    def _asking(self, connection: ShardConnection, until: float) -> Iterator[None]:
        """Wait for other threads that ask the same shard. Raises ShardAway."""
        if not connection.lock.acquire(timeout=max(0.0, until - time.monotonic()) + self._answer_s):
            raise ShardAway(f"{connection.name}: it does not answer others of this client.")
        try:
            yield
        finally:
            connection.lock.release()

    def _pulling(self, table: str, ids: Ids, dtype: str) -> Callable[[], Array]:
        """Sends the requests; what it returns waits for them."""
        if dtype not in DTYPES:
            raise InvalidInput(f"no dtype {dtype!r} of rows: {', '.join(DTYPES)}.")
        dim, parts, until = self.spec(table).dim, [], time.monotonic() + self.patience_s
        for shard, mine, places in self._parts(ids):
            head = Head(Kind.PULL, DTYPES[dtype], rows=mine.size, payload_bytes=mine.nbytes)
            ask = self._of_rows(table, shard, head, (mine,), answer_bytes(mine.size, dim, dtype))
            self._try_to_send(shard, ask, until)
            parts.append((shard, ask, places))

        def take() -> Array:
            for shard, ask, _ in parts:
                self._wait_with_retries(shard, ask, until)
            if len(parts) == 1:
                return rows_in(parts[0][1].body, ids.size, dim, dtype)
            out: Array = np.empty((ids.size, dim), _NUMPY.get(dtype, np.float32))
            for _, ask, places in parts:
                out[places] = rows_in(ask.body, ask.head.rows, dim, dtype)
            return out

        return take


@contextlib.contextmanager
def _numbered(sequence: int) -> Iterator[None]:
    """Errors after which a push may be sent again say its sequence."""
    try:
        yield
    except (ShardAway, StalePush) as error:
        raise type(error)(error.message, hint=error.hint, sequence=sequence) from error


def answer_bytes(n: int, dim: int, dtype: str) -> int:
    """Of the payload that has n rows."""
    scales = 4 * n + -4 * n % 8 if dtype == "i8" else 0
    rows = n * dim * _ELEMENT_BYTES[dtype]
    return rows + -rows % 8 + scales


def _misshapen(table: str, n: int, dim: int, given: Array) -> InvalidInput:
    return InvalidInput(f"table {table!r}: gradients are f32[{n}, {dim}], not {list(given.shape)}.")


def rows_in(body: memoryview, n: int, dim: int, dtype: str) -> Array:
    """The rows of an answer."""
    if dtype != "i8":
        return np.frombuffer(body, _NUMPY[dtype], n * dim).reshape(n, dim)
    rows = np.frombuffer(body, np.int8, n * dim).reshape(n, dim)
    scales = np.frombuffer(body, np.float32, n, n * dim + len(padding(n * dim)))
    found: Array = rows * scales[:, None]
    return found


def as_ids(ids: npt.ArrayLike) -> Ids:
    """i64[n], contiguous; u64 as the same bits. Raises InvalidInput."""
    array = np.asarray(ids)
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidInput(f"ids are whole numbers [n], not {array.dtype}{list(array.shape)}.")
    return np.ascontiguousarray(array, np.int64)


__all__ = ["Client", "Prefetched", "Pushed", "as_ids"]
