"""Connections of a client to all shards of a set: requests that are sent together, repeated until
they are answered, and the rows of one table.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from clipper_container.backoff import Backoff
from clipper_container.errors import (
    ClipperError,
    InvalidInput,
    ShardAway,
    ShardsMoved,
    StalePush,
    TableLost,
    UnknownTable,
)
from clipper_container.model import UserValue
from clipper_container.params.connection import (
    PAUSE_S,
    PAUSE_S_MAX,
    Fill,
    SetAddress,
    ShardConnection,
    ShardRequest,
    call,
    call_once,
    set_in,
)
from clipper_container.params.frames import DTYPES, Head, MessageKind, padding, unpacked
from clipper_container.params.push_identity import (
    JUMP,
    SEQUENCE_MAX,
    PushIdentity,
    origin_worker,
    renew_after_fork,
)
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

FILE_S = 0.5  # for the supervisor to write the addresses of a new set
MOVED_S = 1.0  # for shard 0 to answer those who wait for another, since it may hang
TOKEN_VARIABLE = "CLIPPER_PARAMS__TOKEN"
Spec = TypeVar("Spec")
Result = TypeVar("Result")
Given = TypeVar("Given")
Rows = tuple[Ids, Array]
Renamed = Callable[[int, int], int]  # origin_worker(worker, shard), for one set
Divide = Callable[[Given, int, Renamed], Iterable[tuple[int, Given]]]


class Past(NamedTuple):
    """Knowledge of a client about the set before: its number of shards, the last push that was
    numbered before the move, and the last one before the set before."""

    shards: int
    boundary: int
    before: int


class Layout:
    """One set that a client is connected to; after a move there is another. Threads: any.

    past: of the set before, if this client has seen the move. folder: whose file has the addresses;
    empty if another shard reported them. skipped: its successor is not the next set, but a later
    one.
    """

    def __init__(self, place: SetAddress, past: Past | None, folder: str) -> None:
        self.place, self.past, self.folder = place, past, folder
        self.connections: list[ShardConnection] = []
        self.successor: Layout | None = None
        self.retired = self.skipped = False

    def address(self, shard: int) -> str:
        """Return the address of a shard, which may change. Raises ShardsMoved, InvalidInput."""
        if self.retired:
            raise _moved()
        if self.folder:
            place = set_in(self.folder)
            if place.generation != self.place.generation:
                raise _moved()
            self.place = place
        return self.place.addresses[shard]

    def check(self, generation: int) -> None:
        """Check that a shard is of this set. Raises ShardsMoved."""
        if self.place.generation < 0:
            self.place = self.place._replace(generation=generation)
        if generation != self.place.generation:
            raise _moved()


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
        self.folder = ""
        if isinstance(shards, str) and shards.startswith(("unix:", "tcp:", "tls:")):
            place = SetAddress([shards], "")
        elif isinstance(shards, str | os.PathLike):
            self.folder = os.fspath(shards)
            place = set_in(self.folder)
        else:
            place = SetAddress(list(shards), "")
        if not place.addresses:
            raise InvalidInput(
                "a set of no shards.", hint="Give the addresses of all of them, in order."
            )
        self.patience_s = patience_s
        self.specs: dict[str, Spec] = {}
        self._parse_spec = parse_spec
        self._token = token or place.token or os.environ.get(TOKEN_VARIABLE, "")
        self._answer_s, self._shared, self._new_fill = answer_s, shared, fill
        self.identity = PushIdentity(worker)
        self._held, self._moving = threading.local(), threading.Lock()
        self._is_behind = False  # the shards may know higher sequences of this worker
        self._layout = self._connected(place, self.folder)
        renew_after_fork(self)

    def _connected(
        self, place: SetAddress, folder: str, past: "Past | None" = None, sent: int = 0
    ) -> "Layout":
        layout = Layout(place, past, folder)
        layout.connections = [
            ShardConnection(
                i,
                layout.address,
                self._token,
                self.identity,
                self._answer_s,
                shares=self._shared,
                fill=self._new_fill() if self._new_fill is not None else None,
                check=layout.check,
                sent=sent,
            )
            for i in range(len(place.addresses))
        ]
        return layout

    def forked(self) -> None:
        """Replace connections and worker number in a forked child; they belong to the parent."""
        parents = self._layout
        self.identity, self._moving = PushIdentity(), threading.Lock()
        self._layout = self._connected(parents.place, parents.folder)
        for connection in parents.connections:
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in self.connections:
            with connection.lock:
                connection.close()

    def __len__(self) -> int:
        return len(self.connections)

    # -- sets that move

    @property
    def layout(self) -> "Layout":
        """The set as this thread's request sees it, else the one that serves."""
        return getattr(self._held, "layout", None) or self._layout

    @property
    def connections(self) -> list[ShardConnection]:
        """The connections of `layout`."""
        return self.layout.connections

    def held(self, layout: "Layout", work: Callable[[], Result]) -> Result:
        """Run a part of a request, all of it with one layout. Raises ShardsMoved."""
        before = getattr(self._held, "layout", None)
        self._held.layout = layout
        try:
            return work()
        finally:
            self._held.layout = before

    def following(self, work: Callable[[], Result]) -> Result:
        """Run a request that may be repeated; again if the rows have moved meanwhile."""
        while True:
            layout = self.layout
            try:
                return self.held(layout, work)
            except ShardsMoved:
                if getattr(self._held, "layout", None) is not None:
                    raise  # a part of another request, which is repeated as a whole
                self.successor(layout)

    def started(self, start: Callable[[], Callable[[], Result]]) -> Callable[[], Result]:
        """Start a request that may be repeated; the function that is returned waits for its end."""
        layout, take = self.layout, None
        with contextlib.suppress(ShardsMoved):
            take = self.held(layout, start)

        def result() -> Result:
            if take is not None:
                with contextlib.suppress(ShardsMoved):
                    return self.held(layout, take)
            return self.following(lambda: start()())

        return result

    def once(
        self,
        push: Given,
        sequence: int,
        send: Callable[[Given, int], Callable[[], Result]],
        divide: Divide[Given],
    ) -> Callable[[], list[Result]]:
        """Send a push; the function that is returned waits for its end, and returns the result of
        each set that took a part. The push is applied once, also if the set moves meanwhile.

        send: starts a push as a worker. divide: returns (shard, its part) for a number of shards of
        the set before; its last argument returns the worker as which a shard's part is sent.
        """
        layout, past, worker = self._layout, self._layout.past, self.identity.worker
        if past is not None and sequence <= past.boundary:
            if sequence <= past.before:
                raise _stale()
            return lambda: self._divided(push, worker, past.shards, layout, send, divide)
        take: Callable[[], Result] | None = None
        with contextlib.suppress(ShardsMoved):
            take = self.held(layout, lambda: send(push, worker))

        def result() -> list[Result]:
            if take is not None:
                with contextlib.suppress(ShardsMoved):
                    return [self.held(layout, take)]
            past = self.successor(layout).past
            if past is not None and 0 < past.boundary < sequence:  # no old shard has it
                return self.once(push, sequence, send, divide)()
            new = self._next(layout)
            return self._divided(push, worker, len(layout.connections), new, send, divide)

        return result

    def _divided(
        self,
        push: Given,
        worker: int,
        shards: int,
        layout: "Layout",
        send: Callable[[Given, int], Callable[[], Result]],
        divide: Divide[Given],
    ) -> list[Result]:
        """Send each old shard's part of a push to the set that has its rows: set_move says why."""
        found = []

        def renamed(worker: int, shard: int) -> int:
            return origin_worker(worker, layout.place.generation, shard)

        for shard, part in divide(push, shards, renamed):
            origin = renamed(worker, shard)
            try:
                found.append(self.held(layout, partial(_finished, send, part, origin)))
            except ShardsMoved:
                new = self._next(layout)
                again = len(layout.connections)
                found += self._divided(part, origin, again, new, send, divide)
        return found

    def successor(self, layout: "Layout") -> "Layout":
        """Return the set that has the rows of one that has moved. Raises ShardAway."""
        with self._moving:
            if layout.successor is None:
                place, folder = self._new_place(layout)
                before = layout.past.boundary if layout.past is not None else 0
                last = self.identity.jump()
                if place.before != layout.place.generation >= 0:
                    # each set in between has raised what the shards know of this worker
                    layout.skipped = self._is_behind = True
                    before = last
                sent = SEQUENCE_MAX if self._is_behind else last + JUMP
                past = Past(len(layout.connections), last, before)
                layout.successor = self._connected(place, folder, past, sent)
                self._layout = layout.successor
                layout.retired = True
                for connection in layout.connections:
                    connection.interrupt()
                    with connection.lock:
                        connection.close()
        return layout.successor

    def _next(self, layout: "Layout") -> "Layout":
        """Return the successor. Raises ShardAway; StalePush if it does not know the pushes that
        were made to this set, since it is a later one."""
        found = self.successor(layout)
        if layout.skipped:
            raise _stale()
        return found

    def _new_place(self, layout: "Layout") -> tuple[SetAddress, str]:
        """Return where the rows have moved to, and the folder that says so; empty if an old shard
        has reported it, since there is no folder, or its file stays the same in a container."""
        began, backoff = time.monotonic(), Backoff(PAUSE_S, PAUSE_S_MAX)
        until = began + self.patience_s
        while True:
            if self.folder:
                place, known = set_in(self.folder), layout.place.generation
                if place.generation > known or (layout.folder and place.generation != known):
                    return place, self.folder
            queries = not self.folder or time.monotonic() - began > min(FILE_S, self.patience_s / 2)
            for number, own in enumerate(layout.place.addresses if queries else ()):
                answer = self._place_from(number, own, self._answer_s)
                if answer is not None and answer.generation != layout.place.generation:
                    return answer, ""
            pause_s = backoff.next_s()
            if time.monotonic() + pause_s > until:
                raise ShardAway("the set has moved, and no shard sends its new addresses.")
            time.sleep(pause_s)

    def _place_from(self, number: int, own: str, answer_s: float) -> SetAddress | None:
        """Return what the shard at an address says of where its rows are: of an old set, or one
        that listens there in its place. None if it does not say."""
        try:
            with ShardConnection(number, lambda _: own, self._token, None, answer_s) as connection:
                answer = call_once(connection, "whereabouts")[1]
            addresses = [_at_host_of(own, str(one)) for one in answer["addresses"]]
            numbers = int(answer["generation"]), int(answer["before"])
            return SetAddress(addresses, self._token, *numbers)
        except (OSError, ClipperError, KeyError, TypeError, ValueError):
            return None

    # -- requests

    def call(self, shard: int, name: str, **fields: object) -> dict[str, Any]:
        """Call one shard and return its answer. Raises the error that the shard answers, and
        ShardAway."""
        return self.following(lambda: self._call(shard, call(name, **fields)))

    def _call(self, shard: int, request: ShardRequest) -> dict[str, Any]:
        self.wait(shard, request, time.monotonic() + self.patience_s)
        return unpacked(request.body)

    def call_all(
        self, name: str, *, each: Sequence[Mapping[str, object]] | None = None, **fields: object
    ) -> list[tuple[ShardConnection, dict[str, Any]]]:
        """Call all shards at once. each: additional fields, by shard."""

        def answered() -> list[tuple[ShardConnection, ShardRequest]]:
            shards = range(len(self.connections))
            made = [(i, call(name, **fields, **(each[i] if each else {}))) for i in shards]
            self.request_all(made)
            return [(self.connections[i], request) for i, request in made]

        each_answered = self.following(answered)
        return [(shard, unpacked(request.body)) for shard, request in each_answered]

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
        answers, ShardAway, and ShardsMoved."""
        connection = self.connections[shard]
        with self._locked(connection, until):
            while True:
                soon_s = min(until, time.monotonic() + FILE_S) if shard else until
                try:
                    return connection.wait_with_retries(request, soon_s)
                except ShardAway:
                    if shard:
                        self._check_moved()
                    if soon_s == until:
                        raise

    def _check_moved(self) -> None:
        """Ask shard 0 whether the set has moved: shards that have ended cannot tell it, and a copy
        of the addresses does not. Raises ShardsMoved."""
        place = self.layout.place
        found = self._place_from(0, place.addresses[0], min(MOVED_S, self._answer_s))
        if found is not None and found.generation != place.generation >= 0:
            raise _moved()

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
        if self._is_behind or not self.identity.has_pushed:
            self.call_all("tables")  # connects to every shard, which tells its highest sequence
            self.identity.start_after(max(connection.sequence for connection in self.connections))
            self._is_behind = False
        try:
            return self.identity.next()
        except OverflowError as error:
            raise InvalidInput(f"{error}.") from None

    def pushing(
        self, sequence: int, start: Callable[[int], Callable[[], Result]]
    ) -> Callable[[], Result]:
        """Start a push under its sequence, or a new one if that is 0; the function that is returned
        waits for its end. Errors have the sequence. If the set was resharded twice before any part
        of the push was sent, the push is made again under a new sequence. Raises what `start` and
        the function that it returns raise."""
        number = sequence or self.new_sequence()
        try:
            with numbered(number):
                take = start(number)
        except StalePush:
            if not self.identity.sent(number):
                raise
            return self.pushing(0, start)

        def result() -> Result:
            try:
                with numbered(number):
                    return take()
            except StalePush:
                if not self.identity.sent(number):
                    raise
                return self.pushing(0, start)()

        return result

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
        return self.started(lambda: self._pulling(table, dim, ids, dtype))

    def _pulling(self, table: str, dim: int, ids: Ids, dtype: str) -> Callable[[], Array]:
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

        def send(push: Rows, worker: int) -> Callable[[], list[tuple[int, Head, memoryview]]]:
            requests = self._push_requests(
                table, *push, worker, sequence, scale, versioned=versioned, all_shards=all_shards
            )
            sent = self.send_all(requests)
            return lambda: [
                (shard, self.wait(shard, request, until), request.body)
                for shard, request, until in sent
            ]

        def divide(push: Rows, shards: int, _: Renamed) -> Iterator[tuple[int, Rows]]:
            for shard, places in split_by_shard(push[0], shards):
                yield shard, (push[0][places], push[1][places])

        each = self.once((ids, gradients), sequence, send, divide)()
        return [answer for answers in each for answer in answers]

    def _push_requests(
        self,
        table: str,
        ids: Ids,
        gradients: Array,
        worker: int,
        sequence: int,
        scale: float,
        *,
        versioned: bool,
        all_shards: bool,
    ) -> list[tuple[int, ShardRequest]]:
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
                worker=worker,
                sequence=sequence,
                model=self.connections[shard].version if versioned else 0,
                scale=scale,
                payload_bytes=mine.nbytes + part.nbytes + len(buffers[2]),
            )
            self.check_tables(shard, [table])
            requests.append((shard, ShardRequest(head, buffers, table=table)))
        return requests


def _finished(
    send: Callable[[Given, int], Callable[[], Result]], push: Given, worker: int
) -> Result:
    return send(push, worker)()


def _moved() -> ShardsMoved:
    return ShardsMoved("the set has moved.", hint="Make the request again.")


def _at_host_of(own: str, other: str) -> str:
    """Return the address of another shard of a host, as this client names the host, and with its
    files for TLS. own: the address of one, as the client has it."""
    if own[:4] != other[:4] or other.startswith("unix:"):
        return other
    where, mark, files = own.partition("?")
    port = other.partition("?")[0].rpartition(":")[2]
    return f"{where.rpartition(':')[0]}:{port}{mark}{files}"


def _stale() -> StalePush:
    return StalePush(
        "the set was resharded twice, or while it was stopped, since this push was sent; whether it"
        " was applied is not known.",
        hint="Do not send it again.",
    )


@contextlib.contextmanager
def numbered(sequence: int) -> Iterator[None]:
    """Add the push's sequence to errors after which it may be sent again."""
    try:
        yield
    except (ShardAway, StalePush) as error:
        raise type(error)(error.message, hint=error.hint, sequence=sequence) from error
