"""Connections of a client to all shards of a set: requests that are sent together, repeated until
they are answered, and the rows of one table.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from clipper_container.errors import InvalidInput, ShardAway, StalePush, TableLost, UnknownTable
from clipper_container.model import UserValue
from clipper_container.params.connection import (
    Fill,
    ShardConnection,
    ShardRequest,
    addresses_in,
    call,
)
from clipper_container.params.frames import DTYPES, Head, MessageKind, padding, unpacked
from clipper_container.params.push_identity import PushIdentity, renew_after_fork
from clipper_container.params.rows import (
    NUMPY,
    Array,
    Ids,
    Positions,
    answer_bytes,
    check_dtype,
    rows_in,
    split_by_shard,
)
from clipper_container.wire.frames import BytesLike

TOKEN_VARIABLE = "CLIPPER_PARAMS__TOKEN"
Spec = TypeVar("Spec")


class ShardSet(Generic[Spec]):
    """Connections to all shards of a set. Threads: any.

    Threads that use the same shard wait for each other; a shard that does not answer delays only
    those that use it. A forked child may use the object too: it gets its own connections and
    worker number.

    shards: the folder of a set that runs on this host, or the addresses of all shards in order.
    parse_spec: makes the specification of a table from the map that a shard sends. fill: makes the
    function that reads from the socket of one connection.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str],
        parse_spec: Callable[[Mapping[str, UserValue]], Spec],
        *,
        token: str = "",
        worker: int = 0,
        patience_s: float = 10.0,
        answer_s: float = 10.0,
        shared: bool = True,
        fill: Callable[[], Fill] | None = None,
    ) -> None:
        addresses: list[str]
        self.folder, known = "", ""
        if isinstance(shards, str) and shards.startswith(("unix:", "tcp:", "tls:")):
            addresses = [shards]
        elif isinstance(shards, str | os.PathLike):
            self.folder = os.fspath(shards)
            addresses, known = addresses_in(self.folder)
        else:
            addresses = list(shards)
        if not addresses:
            raise InvalidInput(
                "a set of no shards.", hint="Give the addresses of all of them, in order."
            )
        self._addresses = addresses
        self.patience_s = patience_s
        self.specs: dict[str, Spec] = {}
        self._parse_spec = parse_spec
        self._token = token or known or os.environ.get(TOKEN_VARIABLE, "")
        self._answer_s, self._shared, self._new_fill = answer_s, shared, fill
        self.identity = PushIdentity(worker)
        self.connections = self._new_connections()
        renew_after_fork(self)

    def _new_connections(self) -> list[ShardConnection]:
        return [
            ShardConnection(
                i,
                self._address,
                self._token,
                self.identity,
                self._answer_s,
                shares=self._shared,
                fill=self._new_fill() if self._new_fill is not None else None,
            )
            for i in range(len(self._addresses))
        ]

    def forked(self) -> None:
        """Replace connections and worker number in a forked child; they belong to the parent."""
        parents = self.connections
        self.identity = PushIdentity()
        self.connections = self._new_connections()
        for connection in parents:
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in self.connections:
            with connection.lock:
                connection.close()

    def __len__(self) -> int:
        return len(self.connections)

    def _address(self, shard: int) -> str:
        if self.folder:
            self._addresses, _ = addresses_in(self.folder)
        return self._addresses[shard]

    # -- requests

    def call(self, shard: int, name: str, **fields: object) -> dict[str, Any]:
        """Call one shard and return its answer. Raises the error that the shard answers, and
        ShardAway."""
        request = call(name, **fields)
        self.wait(shard, request, time.monotonic() + self.patience_s)
        return unpacked(request.body)

    def call_all(
        self, name: str, *, each: Sequence[Mapping[str, object]] | None = None, **fields: object
    ) -> list[tuple[ShardConnection, dict[str, Any]]]:
        """Call all shards at once. each: additional fields, by shard."""
        requests = [
            (i, call(name, **fields, **(each[i] if each else {})))
            for i in range(len(self.connections))
        ]
        self.request_all(requests)
        return [(self.connections[i], unpacked(request.body)) for i, request in requests]

    def request_all(self, requests: Sequence[tuple[int, ShardRequest]]) -> list[tuple[int, Head]]:
        """Send all requests, then wait for the answers. Raises TooLarge before anything is sent."""
        return [
            (shard, self.wait(shard, request, until))
            for shard, request, until in self.send_all(requests)
        ]

    def send_all(
        self, requests: Sequence[tuple[int, ShardRequest]]
    ) -> list[tuple[int, ShardRequest, float]]:
        """Send all requests. Raises TooLarge before anything is sent."""
        until = time.monotonic() + self.patience_s
        for shard, request in requests:
            self.connections[shard].check(request)
        for shard, request in requests:
            self.send(shard, request, until)
        return [(shard, request, until) for shard, request in requests]

    def send(self, shard: int, request: ShardRequest, until: float) -> None:
        """Send a request if the shard can be reached now; else `wait` sends it."""
        connection = self.connections[shard]
        try:
            with self._locked(connection, until):
                connection.send(request)
        except OSError:
            request.id = 0

    def wait(self, shard: int, request: ShardRequest, until: float) -> Head:
        """Wait for an answer until a time of the monotonic clock. Raises the error that the shard
        answers, and ShardAway."""
        connection = self.connections[shard]
        with self._locked(connection, until):
            return connection.wait_with_retries(request, until)

    @contextlib.contextmanager
    def _locked(self, connection: ShardConnection, until: float) -> Iterator[None]:
        """Hold a connection while a request is sent or awaited. Raises ShardAway."""
        if not connection.lock.acquire(timeout=max(0.0, until - time.monotonic()) + self._answer_s):
            raise ShardAway(f"{connection.name}: it does not answer others of this client.")
        try:
            yield
        except TableLost:
            raise
        except UnknownTable:  # what is known of tables may be of dropped ones
            self.specs.clear()
            for one in self.connections:
                one.forget_names()
            raise
        finally:
            connection.lock.release()

    def new_sequence(self) -> int:
        """Return the next sequence number, above all that the shards know of this worker number.

        Raises InvalidInput if there is none left.
        """
        if not self.identity.has_pushed:
            self.call_all("tables")  # connects to every shard, which tells its highest sequence
            self.identity.start_after(max(connection.sequence for connection in self.connections))
        try:
            return self.identity.next()
        except OverflowError as error:
            raise InvalidInput(f"{error}.") from None

    # -- tables

    def create(self, spec: Spec, fields: Mapping[str, object]) -> None:
        """Make a table on every shard that does not have it. fields: its specification, as it is
        sent. Raises InvalidInput, TypeConflict (it exists with other settings)."""
        name = str(fields["name"])
        for connection, answer in self.call_all("create", spec=fields):
            connection.tables[name] = int(answer["number"])
        self.specs[name] = spec

    def spec(self, table: str) -> Spec:
        """Return the specification of a table. Raises UnknownTable."""
        if table not in self.specs:
            answer = self.call(0, "tables")["tables"]
            self.specs.update({name: self._parse_spec(spec) for name, spec in answer.items()})
        try:
            return self.specs[table]
        except KeyError:
            raise UnknownTable.named(table, self.specs) from None

    def check_tables(self, shard: int, tables: Sequence[str]) -> None:
        """Learn the numbers of tables on a shard. Raises TableLost."""
        known = self.connections[shard].tables
        if not all(table in known for table in tables):
            self.connections[shard].note_names(self.call(shard, "tables"), "numbers")
            known = self.connections[shard].tables
            for table in tables:
                if table not in known:
                    raise TableLost.named(table, known)

    def parts(self, ids: Ids) -> list[tuple[int, Ids, Positions | None]]:
        """Return (shard, its ids, their positions; None for all) for each shard that has some."""
        if len(self.connections) == 1:
            return [(0, ids, None)] if ids.size else []
        return [
            (shard, ids[places], places)
            for shard, places in split_by_shard(ids, len(self.connections))
        ]

    def pulling(self, table: str, dim: int, ids: Ids, dtype: str) -> Callable[[], Array]:
        """Send the requests of a pull; the function that is returned waits for the rows."""
        check_dtype(dtype)
        parts, until = [], time.monotonic() + self.patience_s
        for shard, mine, places in self.parts(ids):
            self.check_tables(shard, [table])
            head = Head(MessageKind.PULL, DTYPES[dtype], rows=mine.size, payload_bytes=mine.nbytes)
            size = answer_bytes(mine.size, dim, dtype)
            request = ShardRequest(head, (mine,), table=table, expects=size)
            self.send(shard, request, until)
            parts.append((shard, request, places))

        def take() -> Array:
            for shard, request, _ in parts:
                self.wait(shard, request, until)
            if len(parts) == 1:
                return rows_in(parts[0][1].body, ids.size, dim, dtype)
            out: Array = np.empty((ids.size, dim), NUMPY.get(dtype, np.float32))
            for _, request, places in parts:
                out[places] = rows_in(request.body, request.head.rows, dim, dtype)
            return out

        return take

    def push(
        self,
        table: str,
        ids: Ids,
        gradients: Array,
        sequence: int,
        *,
        scale: float = 1.0,
        versioned: bool = False,
        all_shards: bool = False,
    ) -> list[tuple[int, Head, memoryview]]:
        """Push gradients f32[n, dim] of rows; return (shard, header, payload) of each answer.

        all_shards: shards that have none of the ids count the step too.
        """
        parts = self.parts(ids)
        if parts and all_shards:
            there = {shard for shard, _, _ in parts}
            none = np.empty(0, np.int64), np.empty(0, np.intp)
            parts += [(i, *none) for i in range(len(self.connections)) if i not in there]
        requests = []
        for shard, mine, places in parts:
            part = gradients if places is None else gradients[places]
            buffers: tuple[BytesLike, ...] = mine, part.reshape(-1), padding(part.nbytes)
            head = Head(
                MessageKind.PUSH,
                rows=mine.size,
                worker=self.identity.worker,
                sequence=sequence,
                model=self.connections[shard].version if versioned else 0,
                scale=scale,
                payload_bytes=mine.nbytes + part.nbytes + len(buffers[2]),
            )
            self.check_tables(shard, [table])
            requests.append((shard, ShardRequest(head, buffers, table=table)))
        answers = self.request_all(requests)
        return [
            (shard, head, request.body)
            for (shard, head), (_, request) in zip(answers, requests, strict=True)
        ]


@contextlib.contextmanager
def numbered(sequence: int) -> Iterator[None]:
    """Add the push's sequence to errors after which it may be sent again."""
    try:
        yield
    except (ShardAway, StalePush) as error:
        raise type(error)(error.message, hint=error.hint, sequence=sequence) from error
