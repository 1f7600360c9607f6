"""Containers come and go: who has dialled in, for which model, and who is turned away.

One control thread reads the events of the engine. A HELLO is checked here, in Python (token,
name, version, types), and answered by attaching the connection to its model or by a reason its
container prints; the loop thread never waits for it. All dial in at one engine; a container whose
model another serves is handed over, and greeted again there.
"""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgpack
import msgspec

from clipper.component import Backoff, Health, Stop, Worker
from clipper.credentials.container_tokens import ContainerTokens, TokenHolder
from clipper.errors import ClipperError, NotAllowed
from clipper.serving.feedback.online_learning import OnlineLearning
from clipper.serving.models.batch_cost import cost_limit, rows_limit, with_costs
from clipper.types import CONCURRENCY_MAX, Batching, InputType, VersionedModel, check_name
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model as CoreModel
from clipper_core.runtime.status import Status
from clipper_core.scheduling.batcher import BatchingMode
from clipper_core.scheduling.scheduler import EngineEvent
from clipper_core.wire.codec import Kind, encode_frame

_log = logging.getLogger(__name__)
_HELLO_BYTES_MAX = 64 << 10
_TIMINGS_MAX = 32
_TIMING_US_MAX = 3_600_000_000
_ENDED_S = 0.1  # from the end of a container's process to that of its connection
_SPARSE = 10  # heartbeats fewer, of a container that requests it
_Line = tuple[Engine, int]  # a connection
V1_DTYPES = ("i32", "f64", "u8", "bytes", "str")


class Hello(msgspec.Struct, frozen=True):
    """Payload of a container's HELLO frame (docs/wire.md).

    timings: (rows, microseconds) of the batches that it ran to warm up. warm_lengths: of the rows
    that these repeat, in elements. gives: type of an output of these. warm_error: why they failed.
    broken: the model fails on every batch.
    """

    name: str
    version: int = 1
    replica: int = 0
    input: str = "any"
    output: str = "any"
    batch_max: int = 0
    protocol: int = 2
    token: str = ""
    pid: int = 0
    sdk: str = ""
    shared: bool = False
    corrects: bool = False
    sessions: bool = False
    quiet: bool = False
    tables: bool = False
    parts: bool = False
    cancels: bool = False
    concurrency: int = 0
    calls: bool = False
    crc: bool = False
    sparse: bool = False
    timings: tuple[tuple[int, int], ...] = ()
    warm_lengths: tuple[int, ...] = ()
    gives: str = ""
    warm_error: str = ""
    broken: bool = False

    @property
    def id(self) -> VersionedModel:
        """The name and version of the model."""
        return VersionedModel(self.name, self.version)


@dataclass(frozen=True, slots=True)
class Replica:
    """A container that is connected: its connection, its engine, its HELLO, the level of the log's
    lines about it, and whose token it has."""

    conn: int
    hello: Hello
    engine: Engine
    log_level: int = logging.INFO
    holder: TokenHolder = field(default_factory=TokenHolder)


@dataclass(frozen=True, slots=True)
class Seat:
    """The model that a connecting container serves, as `find` returns it for a HELLO.

    log_level: of the lines on its containers that come and go as they should.
    """

    model: CoreModel
    input: InputType
    output: InputType
    batching: Batching
    log_level: int = logging.INFO


@dataclass(frozen=True, slots=True)
class _Greeted:
    """A container that is let in, until the loop has attached it."""

    hello: Hello
    seat: Seat
    holder: TokenHolder


class Refused(Exception):
    """A container that is not let in; the text is what it prints."""


class Containers:
    """The connections of containers. Threads: any.

    find(hello, holder): returns the seat of a model or raises ClipperError. changed(id): called
    when a container comes or goes; served(hello): when it has come; lost(replica, data): when it
    has gone, with the data of its DISCONNECTED event.
    """

    def __init__(
        self,
        engines: Iterable[Engine],
        tokens: ContainerTokens,
        heartbeat_ms: int,
        frame_bytes_max: int,
        find: Callable[[Hello, TokenHolder], Seat],
        changed: Callable[[VersionedModel], None] = lambda _: None,
        shared_memory: bool = True,
        parts_ahead_max: int = 32,
        calls_max: int = 1024,
        online_learning: OnlineLearning | None = None,
        served: Callable[[Hello], None] = lambda _: None,
        lost: Callable[[Replica, bytes], None] = lambda *_: None,
    ) -> None:
        self._served, self._lost = served, lost
        self._ended: deque[tuple[float, VersionedModel, int, int]] = deque()
        self._engines = tuple(engines)
        self._tokens = tokens
        self._heartbeat_ms = heartbeat_ms
        self._calls_max = calls_max
        self._welcome = {
            "payload_bytes_max": frame_bytes_max,
            "accuracy": True,
            "qualifiers": True,
            "partial": True,
            "parts_ahead": parts_ahead_max,
        }
        self._find = find
        self._changed = changed
        self._shared_memory = shared_memory
        self._online_learning = online_learning or OnlineLearning()
        self._greeted: dict[_Line, _Greeted] = {}
        self._replicas: dict[_Line, Replica] = {}
        self._by_model: dict[VersionedModel, dict[_Line, Replica]] = {}
        self._arrival = threading.Condition()
        self._stopping = False
        self._turned_away = 0
        self.leaving = False  # the server closes: no warning when containers end
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._waking = threading.Lock()  # none writes to the descriptor once it is closed
        self._worker = Worker("clipper-control", self._run, again=Backoff(0.01, 1.0), vital=True)
        self._is_closed = False

    def start(self) -> None:
        """Start the control thread. Raises NotStarted."""
        self._online_learning.open()
        self._worker.start()

    def health(self) -> list[Health]:
        """Return the state of the control thread."""
        return [self._worker.health()]

    def stop(self) -> None:
        """Stop the control thread. Idempotent."""
        if self._is_closed:
            return
        self._worker.request_stop()
        self._stopping = True
        self.notify()
        os.eventfd_write(self._wake, 1)
        if self._worker.end():  # otherwise the thread may still use these
            self._is_closed = True
            self._online_learning.close()
            with self._waking:
                os.close(self._wake)
                self._wake = -1

    def of(self, model: VersionedModel) -> list[Replica]:
        """Return the connected replicas of a model version."""
        found = self._by_model.get(model)
        return [] if found is None else list(found.values())

    def model_of(self, engine: Engine, conn: int) -> VersionedModel | None:
        """Return the model of a connection; None if it has gone."""
        line = engine, conn
        found = self._replicas.get(line) or self._greeted.get(line)
        return None if found is None else found.hello.id

    def answering(self, model: VersionedModel) -> int:
        """Return how many connected replicas of a version can answer: not those whose warm-up on
        rows of their own failed."""
        return sum(not replica.hello.broken for replica in self.of(model))

    def wait_for(
        self,
        model: VersionedModel,
        count: int,
        timeout_s: float,
        hopeless: Callable[[], object] = lambda: False,
    ) -> bool:
        """Wait until `count` replicas of `model` are connected; False when the time is over first,
        or it is hopeless."""
        with self._arrival:
            self._arrival.wait_for(
                lambda: len(self.of(model)) >= count or self._stopping or hopeless(), timeout_s
            )
            return len(self.of(model)) >= count

    def notify(self) -> None:
        """Let those who wait look again."""
        with self._arrival:
            self._arrival.notify_all()

    def drain(self, model: VersionedModel, replica: int | None = None) -> None:
        """Send no new batches to the replicas of a model (or to one of them), and close them after
        their last reply."""
        for one in self.of(model):
            if replica is None or one.hello.replica == replica:
                one.engine.drain(one.conn)

    def ended(self, model: VersionedModel, number: int, pid: int) -> None:
        """Note that the process of a replica has ended. Its connection ends with it; one that a
        child of the process holds open is closed.
        """
        self._ended.append((time.monotonic() + _ENDED_S, model, number, pid))
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # -- the control thread

    def _close_ended(self) -> float | None:
        """Close connections whose process has ended a while ago; return the time to the next, in
        milliseconds.
        """
        while self._ended and self._ended[0][0] <= time.monotonic():
            _, model, number, pid = self._ended.popleft()
            for one in self.of(model):
                if pid and (one.hello.replica, one.hello.pid) == (number, pid):
                    one.engine.disconnect(one.conn)
        return max(0.0, self._ended[0][0] - time.monotonic()) * 1000 + 1 if self._ended else None

    def _run(self, stop: Stop) -> None:
        poll = select.poll()
        for engine in self._engines:
            poll.register(engine.events_fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        poll.register(self._online_learning.wake_fd, select.POLLIN)
        while not self._stopping:
            ready = poll.poll(self._close_ended())
            if any(fd == self._wake for fd, _ in ready) and not self._stopping:
                os.eventfd_read(self._wake)
            if any(fd == self._online_learning.wake_fd for fd, _ in ready):
                self._send_feedback()
            for engine in self._engines:
                self._handle_all(engine)

    def _send_feedback(self) -> None:
        try:
            self._online_learning.flush()
        except Exception:  # feedback of one model must not stop the events of all
            _log.exception("feedback could not be handed on")

    def _handle_all(self, engine: Engine) -> None:
        for kind, conn, _, status, data in engine.events():
            try:
                self._handle(engine, kind, conn, status, data)
            except Exception:  # an event of one container must not stop the events of all
                _log.exception("the news %s of connection %d could not be handled", kind.name, conn)

    def _handle(
        self, engine: Engine, kind: EngineEvent, conn: int, status: Status, data: bytes
    ) -> None:
        if kind is EngineEvent.HELLO_RECEIVED:
            self._greet(engine, conn, data)
        elif kind is EngineEvent.ATTACHED:
            self._arrived(engine, conn)
        elif kind is EngineEvent.DISCONNECTED:
            self._gone((engine, conn), status, data)
        elif kind is EngineEvent.CONNECTION_REJECTED:
            self._count_turned_away()

    def _count_turned_away(self) -> None:
        """Count a refused container, and log the first, the second, the fourth, ...: a flood must
        not fill the log."""
        self._turned_away += 1
        if self._turned_away & (self._turned_away - 1) == 0:
            _log.warning(
                "limits.connections_max is reached: %d containers refused so far",
                self._turned_away,
            )

    def _greet(self, engine: Engine, conn: int, data: bytes) -> None:
        try:
            hello = self._read(data)
            holder = self._holder(hello)
            seat = self._seat(hello, holder)
        except Refused as refusal:
            _log.warning("a container was refused: %s", refusal)
            engine.refuse(conn, str(refusal))
            return
        except Exception:
            _log.exception("a container's HELLO could not be handled")
            engine.refuse(conn, "the server failed on this HELLO; see its log")
            return
        if seat.model.engine is not engine:
            engine.move_connection(conn, seat.model.engine, encode_frame(Kind.HELLO, data))
            return
        self._greeted[engine, conn] = _Greeted(hello, seat, holder)
        self._attach(conn, hello, seat)

    def _arrived(self, engine: Engine, conn: int) -> None:
        greeted = self._greeted.pop((engine, conn))
        hello, seat = greeted.hello, greeted.seat
        self._online_learning.came(engine, conn, hello)
        self._end_others(hello.id, greeted.holder)
        with self._arrival:
            replica = Replica(conn, hello, engine, seat.log_level, greeted.holder)
            self._replicas[engine, conn] = replica
            self._by_model[hello.id] = {**self._by_model.get(hello.id, {}), (engine, conn): replica}
            self._arrival.notify_all()
        about = {"model": str(hello.id), "replica": hello.replica}
        _log.log(
            seat.log_level,
            "container %s/%d is connected (pid %d)",
            hello.id,
            hello.replica,
            hello.pid,
            extra=about,
        )
        self._served(hello)
        self._changed(hello.id)

    def _end_others(self, id_: VersionedModel, holder: TokenHolder) -> None:
        """End earlier connections with the token of a container that has connected again: a token
        is good for one. They get no new batches, and close after their last reply."""
        for one in self.of(id_) if holder.name else ():
            if one.holder == holder:
                one.engine.drain(one.conn)

    def _holder(self, hello: Hello) -> TokenHolder:
        """Return whose token a container has. Raises: Refused."""
        try:
            holder = self._tokens.check(hello.token)
        except NotAllowed as error:
            raise Refused(str(error)) from None
        if not holder.permits(hello.id, hello.replica):
            raise Refused(
                f"the token is not for '{hello.id}' as replica {hello.replica}, but for"
                f" {holder.model}:{holder.version or 'any'}, {holder.name}"
            )
        return holder

    def _read(self, data: bytes) -> Hello:
        try:
            if len(data) > _HELLO_BYTES_MAX:
                raise ValueError(f"it has {len(data)} bytes")
            hello = msgspec.convert(msgpack.unpackb(data), Hello)
            check_name(hello.name, "model")
            numbers = (
                ("replica", hello.replica, 0),
                ("version", hello.version, 1),
                ("batch_max", hello.batch_max, 0),
                ("concurrency", hello.concurrency, 0),
            )
            for key, value, least in numbers:
                if not least <= value < 1 << 31:
                    raise ValueError(
                        f"{key} is {value}: {key} is a whole number from {least}, below 2^31"
                    )
            _check_timings(hello)
        except Exception as error:
            raise Refused(f"the HELLO cannot be read: {error}") from None
        if hello.protocol not in (1, 2):
            raise Refused(
                f"this server supports protocols 1 and 2, not {hello.protocol}; install a matching"
                " clipper-container"
            )
        return hello

    def _seat(self, hello: Hello, holder: TokenHolder) -> Seat:
        try:
            given, output = InputType.parse(hello.input), InputType.parse(hello.output)
            _check_protocol(hello, given)
            if hello.protocol == 1 and (given.tensors or output.tensors):
                raise Refused("a container of protocol 1 has no named tensors; use protocol 2")
            seat = self._find(hello, holder)
            _check_protocol(hello, seat.input)
        except (ClipperError, ValueError) as error:
            raise Refused(str(error)) from None
        if not given.agrees_with(seat.input):
            raise Refused(
                f"model '{hello.id}' is registered with input {seat.input}, this container takes"
                f" {given}"
            )
        if not output.agrees_with(seat.output):
            raise Refused(
                f"model '{hello.id}' is registered with output {seat.output}, this container gives"
                f" {output}"
            )
        return seat

    def _attach(self, conn: int, hello: Hello, seat: Seat) -> None:
        batching = seat.batching
        size_max = rows_limit(batching, seat.input)
        size_max = min(size_max, hello.batch_max) if hello.batch_max > 0 else size_max
        shared = hello.shared and self._shared_memory
        quiet = hello.quiet and hello.protocol == 2
        checked = hello.crc and hello.protocol == 2
        heartbeat_ms = self._heartbeat_ms * (_SPARSE if hello.sparse and hello.protocol == 2 else 1)
        concurrency = min(hello.concurrency, CONCURRENCY_MAX) if hello.protocol == 2 else 0
        calls_max = self._calls_max if hello.calls and hello.protocol == 2 else 0
        welcome = {
            **self._welcome,
            **({"concurrency": concurrency} if concurrency else {}),
            **({"calls": calls_max} if calls_max else {}),
            "heartbeat_ms": heartbeat_ms,
            "conn": conn,
            "crc": checked,
            "shared": shared,
        }
        seat.model.engine.attach(
            conn,
            seat.model.index,
            msgpack.packb({**welcome, **({"quiet": True} if quiet else {})}),
            number=hello.replica,
            protocol=hello.protocol,
            checked=checked,
            shared=shared,
            sessions=hello.sessions,
            quiet=quiet,
            parts=hello.parts,
            cancels=hello.cancels,
            concurrency=concurrency,
            calls_max=calls_max,
            heartbeat_ms=heartbeat_ms,
            timings=with_costs(hello.timings, hello.warm_lengths, batching, seat.input),
            mode=BatchingMode[batching.mode.upper()],
            size_max=size_max,
            step=batching.step,
            backoff=batching.backoff,
            delay_us=batching.delay_us,
            budget_share=batching.budget_share,
            cost_max=cost_limit(batching),
        )

    def _gone(self, line: _Line, status: Status, data: bytes) -> None:
        self._greeted.pop(line, None)
        with self._arrival:
            replica = self._replicas.pop(line, None)
            if replica is not None:
                left = {
                    at: other
                    for at, other in self._by_model[replica.hello.id].items()
                    if at != line
                }
                if left:
                    self._by_model[replica.hello.id] = left
                else:
                    del self._by_model[replica.hello.id]
            self._arrival.notify_all()
        if replica is None:
            return
        self._lost(replica, data)
        self._online_learning.went(*line, replica.hello.id)
        level = (
            replica.log_level
            if self.leaving or status in (Status.OK, Status.CLOSED)
            else logging.WARNING
        )
        hello, why = replica.hello, status.name.lower()
        about = {"model": str(hello.id), "replica": hello.replica, "status": why}
        _log.log(level, "container %s/%d is gone (%s)", hello.id, hello.replica, why, extra=about)
        self._changed(replica.hello.id)


def _check_timings(hello: Hello) -> None:
    """Check the timings of a container's greeting. Raises: ValueError."""
    if len(hello.timings) > _TIMINGS_MAX:
        raise ValueError(f"it has {len(hello.timings)} timings, at most {_TIMINGS_MAX} are taken")
    if not all(
        1 <= rows <= 65536 and 0 <= time_us <= _TIMING_US_MAX for rows, time_us in hello.timings
    ):
        raise ValueError(
            "its timings are pairs of 1 to 65536 rows and 0 to 3600 seconds, in microseconds"
        )
    if len(hello.warm_lengths) > _TIMINGS_MAX or not all(
        0 <= length < 1 << 31 for length in hello.warm_lengths
    ):
        raise ValueError(f"warm_lengths are at most {_TIMINGS_MAX} lengths, below 2^31")
    InputType.parse(hello.gives or "any")


def _check_protocol(hello: Hello, input: InputType) -> None:
    if hello.protocol == 1 and input.dtype not in V1_DTYPES:
        known = ", ".join(V1_DTYPES)
        raise Refused(
            f"a container of protocol 1 must state an input type of {known}, not {input}; or use"
            " protocol 2"
        )
