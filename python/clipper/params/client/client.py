"""Client of a set of shards, for workers and for models that serve."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypedDict, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from clipper.errors import InvalidInput, ShardAway, StalePush, UnknownTable, UnknownVariable
from clipper.options import refusing_unknown_keywords
from clipper.params.partition import shard_of_name
from clipper.params.tables import checked
from clipper.spec.table import TableSpec
from clipper_container.params.connection import (
    Fill,
    RequestPart,
    ShardConnection,
    ShardRequest,
    call,
)
from clipper_container.params.frames import (
    DTYPES,
    DUPLICATE,
    PART_BYTES,
    PUSHED,
    TABLES_MAX,
    Head,
    MessageKind,
    RefusalCode,
    padding,
    unpacked,
)
from clipper_container.params.rows import (
    NUMPY,
    Array,
    Ids,
    answer_bytes,
    as_ids,
    check_dtype,
    check_gradients,
    rows_in,
    split_by_shard,
)
from clipper_container.params.shard_set import Divide, Renamed, ShardSet
from clipper_container.wire.frames import BytesLike
from clipper_core.params.row_parts import put_rows, split_parts
from clipper_core.runtime.spin import Receiver

Variables = Mapping[str, npt.NDArray[np.float32]]
SPIN_US = 50
REPLICA_WAIT_S = 0.05  # for a replica, before the shard itself is read
Token = dict[int, tuple[int, int]]  # shard -> (epoch, version)


class Pushed(msgspec.Struct, frozen=True):
    """Result of a push.

    versions: version of the model on each shard that took part. repeated: shards that had applied
    this push before; they do not report their counts again. applied: distinct ids whose rows were
    changed. unadmitted: ids that were not pushed often enough for a row (`admit_after`). no_room:
    ids that found their table full, so that their gradients were dropped. evicted: rows that were
    removed for new ones. token: names this push for reads of replicas that must have it (`after` of
    `pull`); `one.token | other.token` names two pushes of one client, the later one last.
    """

    sequence: int
    versions: dict[int, int]
    token: Token
    repeated: tuple[int, ...] = ()
    applied: int = 0
    unadmitted: int = 0
    no_room: int = 0
    evicted: int = 0


class StepResult(TypedDict):
    """Result of a step of a whole model.

    accepted: by all shards. versions, why: of each shard; `why` is empty if it was accepted.
    no_room: ids that found a table full. token: as of `Pushed`.
    """

    accepted: bool
    versions: list[int]
    why: list[str]
    sequence: int
    no_room: int
    token: Token


class ModelStep(NamedTuple):
    """Gradients of one step: of variables by name, and (ids, f32[n, dim]) by table. versions: of
    each shard, that they were computed at. workers: as which all shards of earlier sets have seen
    the step, if any has."""

    variables: Mapping[str, Array]
    tables: Mapping[str, tuple[Ids, Array]]
    versions: Sequence[int] | None
    scale: float
    workers: tuple[int, ...] = ()


Result = TypeVar("Result")


class Pending(Generic[Result]):
    """An answer of the shards that was requested and is on its way."""

    def __init__(self, take: Callable[[], Result]) -> None:
        self._take = take

    def result(self) -> Result:
        """Wait for the answer, and return it. To be called once.

        Raises what the method raises that waits at once.
        """
        return self._take()


@refusing_unknown_keywords
class Client:
    """Connections to all shards of a set.

    Threads: any. Threads that use the same shard wait for each other; a shard that does not answer
    delays only those that use it. A forked child may use the client too: it gets its own
    connections and worker number.

    shards: the folder of a set that runs on this host, or the addresses of all shards in order
    (`unix:/path`, `tcp:host:port`). worker: number that identifies this client's pushes; chosen at
    random by default. A second live client with the same number is refused (AlreadyExists).
    patience_s: time to wait for a shard that is away or recovers, before ShardAway. shared: large
    pulls from shards on this host use shared memory; a forked child that keeps such rows must copy
    them. spin_us: time to poll for an answer before sleeping, while that pays; 0: never.
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
        self._shards = ShardSet(
            shards,
            lambda answer: msgspec.convert(answer, TableSpec),
            token=token,
            worker=worker,
            patience_s=patience_s,
            answer_s=answer_s,
            shared=shared,
            fill=lambda: _spinning(spin_us),
        )
        self._replica = 0  # that was read last

    @property
    def folder(self) -> str:
        """Folder of the set; empty if the addresses were given."""
        return self._shards.folder

    @property
    def worker(self) -> int:
        """Worker number of this client."""
        return self._shards.identity.worker

    @property
    def connections(self) -> list[ShardConnection]:
        """Connection to each shard."""
        return self._shards.connections

    def close(self) -> None:
        """Close all connections."""
        self._shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.connections)

    @property
    def versions(self) -> list[int]:
        """Version of the model on each shard, as of its last answer."""
        return [connection.version for connection in self.connections]

    # -- tables

    def create(self, spec: TableSpec) -> None:
        """Make the table on every shard that does not have it. Raises InvalidInput, TypeConflict
        (it exists with other settings)."""
        checked(spec)
        self._shards.create(spec, msgspec.to_builtins(spec))

    def begin_anew(self, *, dry_run: bool = False) -> list[int]:
        """Let shards that lost their state continue with empty tables (StateLost); others are not
        changed. dry_run: only tell which they are.

        Creates the tables again that this client knows; their rows are untrained. Returns the
        numbers of the shards that started anew.
        """
        if dry_run:
            stats = self.call_all("stats")
            return [connection.number for connection, answer in stats if answer["state_lost"]]
        started = [
            connection.number
            for connection, answer in self.call_all("begin_anew")
            if answer["begun"]
        ]
        for spec in self._shards.specs.values():
            self.create(spec)
        return started

    def spec(self, table: str) -> TableSpec:
        """Return the specification of a table. Raises UnknownTable."""
        return self._shards.spec(table)

    def alter(self, table: str, **changes: object) -> TableSpec:
        """Change settings of a table while it is trained, on all shards. Return what it is now.

        changes: optimizer_settings (merged with those there are: `{"rate": 0.01}`), rows_max,
        evicts, expire_s, quota_rows, quota_bytes. Workers that create the table as it was before
        still may. Raises UnknownTable, InvalidInput (nothing was changed), ShardAway (some shards
        may have changed;
        call it again).
        """
        self.call_all("alter", table=table, changes=changes, check=True)
        answer = self.call_all("alter", table=table, changes=changes)[0][1]
        self._shards.specs[table] = msgspec.convert(answer["spec"], TableSpec)
        return self._shards.specs[table]

    def drop(self, table: str) -> int:
        """Remove a table, with its rows, on the shards and their replicas. Return how many rows
        there were.

        It does not come back after a kill; earlier snapshots have it until they are deleted. Its
        name may be used again at once: clients that know the dropped one get UnknownTable from
        their next request, and use the new one after that. Raises UnknownTable; StoreError and
        ShardAway (some shards may have dropped it; call it again).
        """
        answers = [answer for _, answer in self.call_all("drop", table=table)]
        self._shards.specs.pop(table, None)
        for connection in self.connections:
            connection.forget_names()
        if not any(one["dropped"] for one in answers):
            raise UnknownTable.named(table, self.call(0, "tables")["tables"])
        return sum(int(one["rows"]) for one in answers)

    def erase(self, table: str, ids: npt.ArrayLike) -> int:
        """Remove rows, with their state, on the shards and their replicas. Return how many there
        were.

        Snapshots lose them when the next one is taken; a whole one (`clipper params snapshot
        --whole`) does not have them, earlier ones do until they are deleted. A later pull gives
        the initial value. Raises UnknownTable, InvalidInput, ShardAway.
        """
        self.spec(table)
        each = as_ids(ids)

        def work() -> int:
            parts = self._shards.parts(each)
            requests = [(shard, call("erase", table=table, ids=mine)) for shard, mine, _ in parts]
            self._shards.request_all(requests)
            return sum(int(unpacked(request.body)["erased"]) for _, request in requests)

        return self._shards.following(work)

    def write(self, table: str, ids: npt.ArrayLike, rows: npt.ArrayLike, *, steps: int = 0) -> int:
        """Set rows to values, as of embeddings that were trained elsewhere. Return how many ids
        found no room.

        rows: f32[n, dim], which keeps the optimizer's state of rows that exist, or f32[n, width]
        with it. steps: the table has had at least so many. Raises UnknownTable, InvalidInput
        (nothing was changed on that shard), TooLarge, ShardAway.
        """
        self.spec(table)
        each, values = as_ids(ids), np.ascontiguousarray(rows, np.float32)
        if values.ndim != 2 or len(values) != each.size:
            check_gradients(table, each.size, self.spec(table).dim, values)

        def work() -> int:
            requests = []
            for shard, mine, places in self._shards.parts(each):
                part = values if places is None else values[places]
                fields = {"table": table, "ids": mine, "rows": part, "steps": steps}
                requests.append((shard, call("write", **fields)))
            self._shards.request_all(requests)
            return sum(int(unpacked(request.body)["no_room"]) for _, request in requests)

        return self._shards.following(work)

    def walk(self, table: str) -> Iterator[tuple[Ids, Array]]:
        """Yield all rows with their state: (i64[n], f32[n, width]). The first dim floats are the
        row.

        Each row is whole as it was at one moment. Raises UnknownTable, ShardAway, ShardsMoved (to
        be called again).
        """
        layout, held = self._shards.layout, self._shards.held
        for shard, connection in enumerate(layout.connections):
            held(layout, partial(self._shards.check_tables, shard, [table]))
            number = connection.tables[table]
            place = number % TABLES_MAX
            cursor: list[int] | None = [place, 0]
            while cursor is not None and cursor[0] == place:
                answer = held(layout, partial(self.call, shard, "walk", cursor=cursor))
                for part in answer.get("rows", ()):
                    if part["table"] != number or table not in connection.tables:
                        raise UnknownTable(f"table {table!r} was dropped.")
                    if part["ids"].size:
                        yield part["ids"], part["rows"]
                cursor = answer["next"]

    def pull(
        self,
        table: str,
        ids: npt.ArrayLike,
        dtype: str = "f32",
        *,
        unique: bool = False,
        max_staleness_s: float | None = None,
        after: Token | None = None,
    ) -> Array:
        """Return the rows of n ids in their order, [n, dim]; an id without a row has its initial
        value.

        ids: i64[n] or u64[n]. dtype: f32, f16, bf16 (as u16), or i8 (returned as f32, scaled by
        row). unique: request each distinct id once; useful if many are equal and the network is
        slow.

        max_staleness_s: replicas may answer that have all that their shard had so long ago;
        `math.inf`: any. after: the token of a push that the rows must have; rows of shards that the
        token does not name may be of any age. With both, both hold. Where no replica answers within
        REPLICA_WAIT_S, the shard itself does. Raises UnknownTable, InvalidInput, ShardAway.
        """
        if unique:
            each, where = np.unique(as_ids(ids), return_inverse=True)
            rows = self.pull(table, each, dtype, max_staleness_s=max_staleness_s, after=after)
            return np.take(rows, where, axis=0)
        if max_staleness_s is not None or after is not None:
            each = as_ids(ids)
            return self._shards.following(
                lambda: self._pull_replicas(table, each, dtype, max_staleness_s, after or {})
            )
        return self._pulling(table, as_ids(ids), dtype)()

    def _pull_replicas(
        self, table: str, ids: Ids, dtype: str, max_staleness_s: float | None, after: Token
    ) -> Array:
        dim, until = self.spec(table).dim, time.monotonic() + REPLICA_WAIT_S
        if not any(connection.frame_bytes_max for connection in self.connections):
            self.call_all("tables")  # connects, which tells the number of replicas
        replicas = max(connection.replicas for connection in self.connections)
        if not replicas:
            return self._pulling(table, ids, dtype)()
        self._replica = (self._replica + 1) % replicas
        fields = {"table": table, "dtype": dtype, "wait_s": REPLICA_WAIT_S}
        requests = []
        for shard, mine, places in self._shards.parts(ids):
            holder = (shard + 1 + self._replica) % len(self.connections)
            request = call(
                "pull_replica",
                shard=shard,
                ids=mine,
                max_staleness_s=max_staleness_s,
                after=after.get(shard),
                **fields,
            )
            self._shards.send(holder, request, until)
            requests.append((holder, request, mine, places))
        out: Array = np.empty((ids.size, dim), NUMPY.get(dtype, np.float32))
        for holder, request, mine, places in requests:
            rows = None
            with contextlib.suppress(ShardAway):
                self._shards.wait(holder, request, until)
                rows = unpacked(request.body).get("rows")
            if rows is None or rows.shape[1] != dim:  # of a table that was dropped since
                rows = self._pulling(table, mine, dtype)()
            out[slice(None) if places is None else places] = rows
        return out

    def prefetch(self, table: str, ids: npt.ArrayLike, dtype: str = "f32") -> Pending[Array]:
        """Request rows now; `result()` of what is returned waits for them."""
        return Pending(self._pulling(table, as_ids(ids), dtype))

    def pull_tables(self, ids: Mapping[str, npt.ArrayLike], dtype: str = "f32") -> dict[str, Array]:
        """Return the rows of several tables, requested in one message for each shard.

        ids: by table, i64[n] or u64[n]. dtype: as of `pull`. Raises what `pull` raises.
        """
        return self.prefetch_tables(ids, dtype).result()

    def prefetch_tables(
        self, ids: Mapping[str, npt.ArrayLike], dtype: str = "f32"
    ) -> Pending[dict[str, Array]]:
        """Request rows of several tables now; `result()` of what is returned waits for them."""
        check_dtype(dtype)
        each = {name: as_ids(given) for name, given in ids.items()}
        return Pending(self._shards.started(lambda: self._start_pulling_tables(each, dtype)))

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
        """Apply one step of the table's optimizer to each distinct id, by the sum of its gradients.

        gradients: f32[n, dim]. scale: factor of the learning rate. versioned: tell the shards which
        version the gradients were computed at, so that they can refuse stale ones. sequence: that
        of an earlier error, to send the same push again; shards that applied it do not apply it
        twice.

        A push is applied exactly once, also if a connection breaks and it is sent again. With
        `replication = "waited"` it survives the death of a shard once this method has returned.
        Raises InvalidInput and TooLarge (nothing was changed), StalePush, ShardAway.
        """
        each, rows = self._checked_rows(table, ids, gradients)

        def push(number: int) -> Pushed:
            all_shards = len(self.connections) > 1 and self.spec(table).corrects_bias
            answers = self._shards.push(
                table,
                each,
                rows,
                number,
                scale=scale,
                versioned=versioned,
                all_shards=all_shards,
            )
            repeated = tuple(shard for shard, head, _ in answers if head.flags & DUPLICATE)
            counts = [PUSHED.unpack(body) for _, _, body in answers if len(body) == PUSHED.size]
            sums = (sum(each) for each in zip(*counts, strict=True))
            versions = {shard: head.model for shard, head, _ in answers}
            token = {shard: (head.epoch, head.model) for shard, head, _ in answers}
            return Pushed(number, versions, token, repeated, *sums)

        return self._shards.pushing(sequence, lambda number: partial(push, number))()

    # -- dense variables, and the model as a whole

    def push_model(
        self,
        variables: Variables,
        tables: Sequence[TableSpec] = (),
        *,
        optimizer: str = "",
        optimizer_settings: Mapping[str, float] | None = None,
    ) -> None:
        """Initialize the dense variables. The values of the first worker are kept, later calls are
        ignored.

        optimizer, optimizer_settings: of the variables, as of a table; empty: "sgd".
        """
        how = {"optimizer": optimizer, "optimizer_settings": dict(optimizer_settings or {})}
        for spec in tables:
            self.create(spec)

        def work() -> None:
            for shard, mine in enumerate(self._by_shard(variables)):
                self.call(shard, "push_model", variables=mine, **how)

        self._shards.following(work)

    def pull_variables(
        self, since: Sequence[int] | None = None
    ) -> tuple[list[int], dict[str, Array]]:
        """Return (version of each shard, dense variables by name).

        since: versions; shards that have no newer one send no variables. Raises InvalidInput before
        any worker has initialized the variables.
        """
        return self.prefetch_variables(since).result()

    def prefetch_variables(
        self, since: Sequence[int] | None = None
    ) -> Pending[tuple[list[int], dict[str, Array]]]:
        """Request dense variables now; `result()` of what is returned waits for them."""

        def start() -> Callable[[], tuple[list[int], dict[str, Array]]]:
            shards = len(self.connections)
            least = [one + 1 for one in since or ()]
            least = least if len(least) == shards else [0] * shards  # of another number of shards
            requests = [
                (i, ShardRequest(Head(MessageKind.PULL_DENSE, model=least[i])))
                for i in range(shards)
            ]
            sent = self._shards.send_all(requests)

            def take() -> tuple[list[int], dict[str, Array]]:
                versions, found = [], {}
                for shard, request, until in sent:
                    head = self._shards.wait(shard, request, until)
                    found.update(self._dense_in(shard, head.rows, request.body))
                    versions.append(head.model)
                return versions, found

            return take

        return Pending(self._shards.started(start))

    def push_gradients(
        self,
        variables: Variables | None = None,
        rows: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]] | None = None,
        *,
        versions: Sequence[int] | None = None,
        scale: float = 1.0,
        sequence: int = 0,
    ) -> StepResult:
        """Push one step of a whole model: gradients of dense variables, and of rows by table.

        rows: by table, (ids, f32[n, dim]). versions: of each shard, that the gradients were
        computed at. sequence: 0 for a new push; see `push`.

        Returns {"accepted": bool, "versions": [...], "why": [...], "sequence": int, "no_room":
        number of ids that found a table full}. Synchronous shards accept a push all or none.
        Asynchronous shards decide each for itself: gradients that are computed anew and pushed with
        the same sequence are applied only where they were refused.
        """
        return self.start_push_gradients(
            variables, rows, versions=versions, scale=scale, sequence=sequence
        ).result()

    def start_push_gradients(
        self,
        variables: Variables | None = None,
        rows: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]] | None = None,
        *,
        versions: Sequence[int] | None = None,
        scale: float = 1.0,
        sequence: int = 0,
    ) -> Pending[StepResult]:
        """Send what `push_gradients` pushes; `result()` of what is returned waits for the answers.

        What is requested after this sees the push. The gradients must not change before `result`.
        Synchronous shards are waited for here.
        """
        dense = {k: np.ascontiguousarray(v, np.float32) for k, v in (variables or {}).items()}
        tables = {name: self._checked_rows(name, *given) for name, given in (rows or {}).items()}
        first = self.connections[0]
        if not first.frame_bytes_max:
            first = self.call_all("tables")[0][0]  # connects, which tells the mode

        is_sync = first.mode == "sync"
        send = self._push_gathered if is_sync else self._push_step
        divide: Divide[ModelStep] = _whole_step if is_sync else _divided_step
        step = ModelStep(dense, tables, versions, scale or 1.0, (self.worker,))

        def start(number: int) -> Callable[[], StepResult]:
            take = self._shards.once(
                step, number, lambda part, worker: send(part, worker, number), divide
            )
            return lambda: _merged(take())

        return Pending(self._shards.pushing(sequence, start))

    # -- calls

    def call(self, shard: int, name: str, **fields: object) -> dict[str, Any]:
        """Call one shard and return its answer. Raises the error that the shard answers, and
        ShardAway."""
        return self._shards.call(shard, name, **fields)

    def call_all(
        self, name: str, *, each: Sequence[Mapping[str, object]] | None = None, **fields: object
    ) -> list[tuple[ShardConnection, dict[str, Any]]]:
        """Call all shards at once. each: additional fields, by shard."""
        return self._shards.call_all(name, each=each, **fields)

    # -- inside

    def _checked_rows(
        self, table: str, ids: npt.ArrayLike, gradients: npt.ArrayLike
    ) -> tuple[Ids, Array]:
        each, given = as_ids(ids), np.ascontiguousarray(gradients, np.float32)
        check_gradients(table, each.size, self.spec(table).dim, given)
        return each, given

    def _push_step(self, step: "ModelStep", worker: int, sequence: int) -> Callable[[], StepResult]:
        """Push a step to asynchronous shards: to each its part, in one message."""
        dense, tables, versions = self._by_shard(step.variables), step.tables, step.versions
        if versions is not None and len(versions) != len(dense):
            versions = [min(versions)] * len(dense)  # of another number of shards
        parts: list[list[RequestPart]] = [[] for _ in dense]
        buffers: list[list[BytesLike]] = [[] for _ in dense]
        sizes = [0] * len(dense)  # bytes of the buffers
        names, given = list(tables), list(tables.values())
        for shard, numbers, counts, ids, places in self._split([ids for ids, _ in given]):
            self._shards.check_tables(shard, [names[n] for n in numbers])
            at = 0
            for number, count in zip(numbers, counts, strict=True):
                gradients = given[number][1]
                if places is not None:
                    gradients = np.take(gradients, places[at : at + count], axis=0)
                parts[shard].append(RequestPart(names[number], count))
                mine = ids[number] if places is None else ids[0][at : at + count]
                buffers[shard] += mine, gradients.reshape(-1)
                sizes[shard] += 8 * count + gradients.nbytes
                if gradients.nbytes % 8:
                    buffers[shard].append(padding(gradients.nbytes))
                    sizes[shard] += 4
                at += count
        counted = [name for name in names if tables[name][0].size and self.spec(name).corrects_bias]
        self._add_counted(parts, counted)
        for shard, variables in enumerate(dense):
            for name, value in variables.items():
                self._check_variable(shard, name, value)
                parts[shard].append(RequestPart(name, value.size, is_variable=True))
                buffers[shard] += value.reshape(-1), padding(value.nbytes)
                sizes[shard] += value.nbytes + len(padding(value.nbytes))
        requests = []
        for shard, each in enumerate(parts):
            head = Head(
                MessageKind.PUSH_STEP,
                rows=len(each),
                worker=worker,
                sequence=sequence,
                model=versions[shard] if versions is not None else 0,
                scale=step.scale,
                payload_bytes=PART_BYTES * len(each) + sizes[shard],
            )
            requests.append((shard, ShardRequest(head, buffers[shard], parts=each)))
        sent = self._shards.send_all(requests)

        def take() -> StepResult:
            try:
                return self._step_answers(sent, sequence)
            except InvalidInput:
                _check_finite(dense, tables)
                raise

        return take

    def _add_counted(self, parts: list[list[RequestPart]], tables: Sequence[str]) -> None:
        """Let all shards count the step of tables whose optimizer corrects its bias by it, so that
        rows are the same for any number of shards."""
        for shard, each in enumerate(parts):
            there = {one.name for one in each}
            self._shards.check_tables(shard, tables)
            each += [RequestPart(table, 0) for table in tables if table not in there]

    def _step_answers(
        self, sent: Sequence[tuple[int, ShardRequest, float]], sequence: int
    ) -> StepResult:
        why: list[str] = []
        versions: list[int] = []
        no_room = 0
        token: Token = {}
        for shard, request, until in sent:
            try:
                head = self._shards.wait(shard, request, until)
            except StalePush as error:
                if request.answer is None or request.answer.rows != RefusalCode.TOO_STALE:
                    raise
                head = request.answer
                why.append(error.message)
            else:
                why.append("")
                no_room += PUSHED.unpack(request.body)[2] if len(request.body) == PUSHED.size else 0
            versions.append(head.model)
            token[shard] = head.epoch, head.model
        return {
            "accepted": not any(why),
            "versions": versions,
            "why": why,
            "sequence": sequence,
            "no_room": no_room,
            "token": token,
        }

    def _push_gathered(
        self, step: "ModelStep", worker: int, sequence: int
    ) -> Callable[[], StepResult]:
        """Push to synchronous shards. All but shard 0 check first; then shard 0 decides, and the
        others follow."""
        parts: list[dict[str, Any]] = [
            {"variables": mine, "rows": {}} for mine in self._by_shard(step.variables)
        ]
        versions = step.versions
        if versions is not None and len(versions) != len(parts):
            versions = [min(versions)] * len(parts)  # of another number of shards
        for table, (ids, gradients) in step.tables.items():
            for shard, places in split_by_shard(ids, len(parts)):
                parts[shard]["rows"][table] = {"ids": ids[places], "gradients": gradients[places]}
        for shard, part in enumerate(parts):
            part |= {"worker": worker, "sequence": sequence, "scale": step.scale}
            part["workers"] = step.workers[1:]
            part["version"] = versions[shard] if versions is not None else 0
        if len(parts) > 1:
            self.call_all("push_gradients", each=[{**part, "check": True} for part in parts])
        first = self.call(0, "push_gradients", **parts[0])
        answers = [first] * len(parts)
        if first["accepted"] and len(parts) > 1:
            each = [{**part, "step": first["step"]} for part in parts]
            answers = [answer for _, answer in self.call_all("push_gradients", each=each)]
        result: StepResult = {
            "accepted": all(answer["accepted"] for answer in answers),
            "versions": [int(answer["version"]) for answer in answers],
            "why": [answer.get("why", "") for answer in answers],
            "sequence": sequence,
            "no_room": sum(int(answer.get("no_room", 0)) for answer in answers),
            "token": {
                connection.number: (connection.epoch, int(answer["version"]))
                for connection, answer in zip(self.connections, answers, strict=True)
            },
        }
        return lambda: result

    def _by_shard(self, variables: Variables) -> list[dict[str, Array]]:
        parts: list[dict[str, Array]] = [{} for _ in self.connections]
        for name, value in variables.items():
            parts[shard_of_name(name, len(parts))][name] = np.ascontiguousarray(value, np.float32)
        return parts

    def _check_variable(self, shard: int, name: str, gradient: Array) -> None:
        """Raise UnknownVariable, or InvalidInput for another shape."""
        connection = self.connections[shard]
        if name not in connection.variables:
            connection.note_names(self.call(shard, "tables"), "numbers")
            if name not in connection.variables:
                raise UnknownVariable.named(
                    name, {one for each in self.connections for one in each.variables}
                )
        shape = connection.variables[name][1]
        if gradient.shape != shape:
            raise InvalidInput(
                f"variable {name!r}: its gradient is {list(gradient.shape)}, and it is"
                f" {list(shape)}."
            )

    def _dense_in(self, shard: int, count: int, body: memoryview) -> dict[str, Array]:
        """Return the variables of an answer to PULL_DENSE. Raises InvalidInput before any worker
        has initialized them."""
        connection = self.connections[shard]
        if not np.frombuffer(body, np.uint64, 1)[0]:
            raise InvalidInput(
                f"{connection.name} has no variables yet.",
                hint="Push them first: client.push_model({...}).",
            )
        parts = np.frombuffer(body, np.uint32, 2 * count, 8).reshape(count, 2).tolist()
        if count and max(number for number, _ in parts) >= len(connection.variables):
            connection.note_names(self.call(shard, "tables"), "numbers")
        names = list(connection.variables.items())
        found, at = {}, 8 + PART_BYTES * count
        for number, n in parts:
            name, (_, shape) = names[number]
            found[name] = np.frombuffer(body, np.float32, n, at).reshape(shape)
            at += 4 * n + 4 * n % 8
        return found

    def _split(
        self, each: Sequence[Ids]
    ) -> Sequence[tuple[int, Sequence[int], Sequence[int], Sequence[Ids], Ids | None]]:
        """Return (shard, numbers of the parts, their sizes, arrays with the ids, their places) for
        each shard that has some. With one shard the arrays are `each`, and the places None."""
        if len(self.connections) > 1:
            return [
                (shard, numbers, sizes, (ids,), places)
                for shard, numbers, sizes, ids, places in split_parts(each, len(self.connections))
            ]
        numbers = [n for n, ids in enumerate(each) if ids.size]
        return [(0, numbers, [each[n].size for n in numbers], each, None)] if numbers else []

    def _pulling(self, table: str, ids: Ids, dtype: str) -> Callable[[], Array]:
        return self._shards.pulling(table, self.spec(table).dim, ids, dtype)

    def _start_pulling_tables(
        self, ids: Mapping[str, Ids], dtype: str
    ) -> Callable[[], dict[str, Array]]:
        """Send the requests of `pull_tables`; the function that is returned waits for the rows."""
        names, each = list(ids), list(ids.values())
        dims, until = (
            [self.spec(name).dim for name in names],
            time.monotonic() + self._shards.patience_s,
        )
        requests = []
        for shard, numbers, counts, mine, places in self._split(each):
            self._shards.check_tables(shard, [names[n] for n in numbers])
            parts = [RequestPart(names[n], k) for n, k in zip(numbers, counts, strict=True)]
            size = PART_BYTES * len(parts) + 8 * sum(counts)
            sizes = [answer_bytes(k, dims[n], dtype) for n, k in zip(numbers, counts, strict=True)]
            head = Head(MessageKind.PULL_TABLES, DTYPES[dtype], rows=len(parts), payload_bytes=size)
            request = ShardRequest(head, mine, parts=parts, expects=sum(sizes))
            self._shards.send(shard, request, until)
            requests.append(
                (shard, request, list(zip(numbers, counts, sizes, strict=True)), places)
            )

        def take() -> dict[str, Array]:
            of = NUMPY.get(dtype, np.float32)
            found: dict[str, Array] = {}
            for n, name in enumerate(names):
                if not each[n].size or len(self.connections) > 1:
                    found[name] = np.empty((each[n].size, dims[n]), of)
            for shard, request, parts, places in requests:
                self._shards.wait(shard, request, until)
                at = first = 0
                for n, count, size in parts:
                    rows = rows_in(request.body, count, dims[n], dtype, at)
                    at += size
                    if places is None:
                        found[names[n]] = rows
                    elif of is np.float32:
                        put_rows(found[names[n]], places[first : first + count], rows)
                    else:
                        found[names[n]][places[first : first + count]] = rows
                    first += count
            return found

        return take


def _divided_step(
    step: ModelStep, shards: int, _: Renamed | None = None
) -> Iterator[tuple[int, ModelStep]]:
    """Yield (shard, its part of a step) for each shard that has some."""
    dense: list[dict[str, Array]] = [{} for _ in range(shards)]
    tables: list[dict[str, tuple[Ids, Array]]] = [{} for _ in range(shards)]
    for name, value in step.variables.items():
        dense[shard_of_name(name, shards)][name] = value
    for table, (ids, gradients) in step.tables.items():
        for shard, places in split_by_shard(ids, shards):
            tables[shard][table] = ids[places], gradients[places]
    for shard in range(shards):
        if dense[shard] or tables[shard] or (shard == 0 and not (any(dense) or any(tables))):
            versions = None if step.versions is None else [min(step.versions)]
            yield shard, ModelStep(dense[shard], tables[shard], versions, step.scale)


def _whole_step(step: ModelStep, shards: int, renamed: Renamed) -> list[tuple[int, ModelStep]]:
    """Return a step of synchronous shards, which either all or none of them have accepted: the new
    shards check it."""
    workers = (renamed(worker, shard) for worker in step.workers for shard in range(shards))
    return [(0, step._replace(workers=tuple(workers)))]


def _merged(parts: Sequence[StepResult]) -> StepResult:
    """Return the result of a step that was pushed in several parts, because the set has moved."""
    found = parts[-1]
    for one in parts[:-1]:
        found["accepted"] = found["accepted"] and one["accepted"]
        found["no_room"] += one["no_room"]
        if len(one["why"]) == len(found["why"]):
            found["why"] = [a or b for a, b in zip(one["why"], found["why"], strict=True)]
    return found


def _check_finite(
    dense: Sequence[Mapping[str, Array]], tables: Mapping[str, tuple[Ids, Array]]
) -> None:
    """Raise InvalidInput that names the first gradient that is not finite."""
    for name, value in ((name, value) for mine in dense for name, value in mine.items()):
        if not np.isfinite(value).all():
            raise InvalidInput(
                f"variable {name!r}: its gradient holds NaN or infinity.",
                hint="Nothing was changed.",
            )
    for name, (ids, gradients) in tables.items():
        bad = ids[~np.isfinite(gradients).all(axis=1)]
        if bad.size:
            raise InvalidInput(
                f"table {name!r}: the gradient of id {bad[0]} holds NaN or infinity.",
                hint="Nothing was changed.",
            )


def _spinning(spin_us: int) -> Fill:
    """Return a function that polls for an answer before it sleeps, while that pays."""
    receiver = Receiver(spin_us=spin_us)
    return lambda connection, into: receiver.fill(connection.fileno(), into)


__all__ = ["Client", "Pending", "Pushed", "StepResult", "as_ids"]
