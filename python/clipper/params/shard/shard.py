"""One shard: the core's loop, which has the rows, on one thread, and calls, answered by another.

A shard listens first: calls of other shards are answered at once, those of workers are refused
until it serves. It recovers under a new epoch, serves, and ends with a snapshot. The answering
thread alone applies what comes by calls, and pauses pushes meanwhile, so what it reads and writes
is consistent.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from clipper.clock import wall_time_us
from clipper.component import Health, Stop, Worker
from clipper.errors import ClipperError, DoesNotFit, InvalidInput, NotStarted, QuotaExceeded
from clipper.params.local.address_file import AddressFile
from clipper.params.shard.change_watchers import ChangeWatchers
from clipper.params.shard.durability.dropped_tables import DroppedTables
from clipper.params.shard.durability.recovery import Recovered, StateMark
from clipper.params.shard.durability.saved_copies import load_copy
from clipper.params.shard.health_files import HealthFiles
from clipper.params.shard.parameters import DENSE, Parameters, Piece
from clipper.params.shard.replication.change_log import PrimaryLog
from clipper.params.shard.replication.followers import FollowerSet, ReplicaFollower, pushes_paused
from clipper.params.shard.replication.replica_reads import ReplicaReads
from clipper.params.shard.resharding.fill import SetFill
from clipper.params.shard.resharding.move import CLOSED, MOVED, OPEN, SetMove
from clipper.params.shard.stats import ChangeAges, stats_of
from clipper.params.shard.table_changes import TableChanges
from clipper.params.shard.tls_relay import TlsRelay
from clipper.params.shard.training.asynchronous import AsyncTraining
from clipper.params.shard.training.gradients import PushResult, whole
from clipper.params.shard.training.synchronous import SyncTraining
from clipper.params.tokens import TokenFile, check_role, digest_of
from clipper.settings.params import ParamsSettings, shard_tls
from clipper.spec.table import ROW_BYTES, TableSpec
from clipper.tls import Certificate
from clipper_container.params import frames
from clipper_container.params.connection import ShardConnection, call_once
from clipper_container.params.frames import MessageKind, RefusalCode, packed, unpacked
from clipper_core.params.shard_loop import ShardLoop

log = logging.getLogger("clipper.params")
PROTOCOL = 1
TICK_S = 0.25
VERSION_MAX = 1 << 62  # first version that a worker may choose
EXPIRE_S = 5.0  # between two searches for expired rows
CallId = tuple[int, int, int]
_READS = {"tables", "pull_variables", "watch", "pull_replica"}  # also of a sealed shard
_OF_SHARDS = {"synchronize", "stream", "walk", "snapshot"}  # also of a closed one


class ShardConfig(msgspec.Struct, frozen=True):
    """Configuration of one shard.

    addresses: of all shards in order. folder: its own; None keeps nothing. listen: where it
    listens, if not at its address. With port 0 it publishes the port in `book`, the folder of the
    set. alive: a file to touch (health_files). plain: the address of this process's own
    connections, where others need TLS. home: folder of the set; None: it cannot be resharded while
    it runs. generation: number of the set, above those of the sets before it. fills: it serves when
    the rows of the set before have moved to it. former: where it listens too, when that is free.
    """

    number: int
    addresses: tuple[str, ...]
    settings: ParamsSettings = ParamsSettings()
    token: str = ""
    folder: Path | None = None
    listen: str = ""
    alive: Path | None = None
    book: Path | None = None
    plain: str = ""
    home: Path | None = None
    generation: int = 0
    fills: bool = False
    former: tuple[str, ...] = ()

    @property
    def shards(self) -> int:
        """Number of shards in the set."""
        return len(self.addresses)

    @property
    def replicas(self) -> int:
        """Number of replicas of each shard."""
        return min(self.settings.replicas, self.shards - 1)


class Shard:
    """A shard. Threads: `turn` and what it calls, the answering one; `post` and `end`, any."""

    def __init__(self, config: ShardConfig) -> None:
        self.config, settings = config, config.settings
        self.relay = _relay(config)
        self.core = ShardLoop(
            frame_bytes_max=settings.frame_bytes_max,
            connections_max=settings.connections_max,
            shared_bytes_max=settings.shared_bytes_max,
            spin_us=settings.spin_us,
        )
        self.core.stale(lag_max=settings.lag_max, slows=settings.lag_slows)
        self.parameters = Parameters()
        self.training = self._training(self.parameters)
        self.ended = ""  # the reason
        self.snapshots: Any = None
        self.recovery = (0.0, "")  # (seconds, source)
        self.ages = ChangeAges()
        self.mark = StateMark(config.folder)
        self.dropped = DroppedTables(config.folder)
        # called by begin_anew, if the state was lost
        self._begins: Callable[[], None] | None = None
        self.began_s = time.monotonic()
        self._tokens = TokenFile(config.token, settings.tokens_file)
        # by connection: generation, role, digest of the token
        self._admitted: dict[int, tuple[int, str, bytes]] = {}
        self._waiting: deque[tuple[int, CallId, bytes]] = deque()
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Lock()
        self._poll = select.poll()
        for fd in (self._wake, self.core.calls_fd, self.core.log_fd):
            self._poll.register(fd, select.POLLIN)
        self._expired_s = self._checked_s = self.began_s
        self._resyncing, self._known = False, -1  # the result of a check; -1: it failed
        self._watched: list[Callable[[], Iterable[Health]]] = []
        self._health_files = HealthFiles(config.alive, settings)
        self._address = (
            AddressFile(config.book).address
            if config.book is not None
            else config.addresses.__getitem__
        )
        self._now_s = self.began_s
        self.resync_log = PrimaryLog(self.core, settings.resync_ids_max if config.replicas else 0)
        self.followers = self._followers()
        self.changes = ChangeWatchers(self.core, lambda: self.parameters, self.core.answer)
        waited = settings.replication == "waited"
        self.copies = {
            of: ReplicaFollower(
                config.number,
                of,
                self.connection(of),
                0.0 if waited else settings.period_s,
                load=partial(load_copy, config.folder, of, config.shards, settings.resync_ids_max),
                resync_ids_max=settings.resync_ids_max,
                spin_us=settings.spin_us,
                progressed=self._wake_up,
            )
            for of in ((config.number - 1 - k) % config.shards for k in range(config.replicas))
        }
        self.replica_reads = ReplicaReads(self.copies, self.core.answer)
        self.changes_to_tables = TableChanges(self)
        self.move, self.fill = SetMove(self), SetFill(self)
        self._calls: dict[str, Callable[[Piece, CallId], Piece | bytes | None]] = {
            "create": self._create,
            "tables": self._tables,
            "alter": self.changes_to_tables.alter,
            "drop": self.changes_to_tables.drop,
            "erase": self.changes_to_tables.erase,
            "write": self.changes_to_tables.write,
            "push_model": self._push_model,
            "pull_variables": self._pull_variables,
            "push_gradients": self._push_gradients,
            "push_rows": self._push_rows,
            "synchronize": self._synchronize,
            "stream": self._stream,
            "walk": self._walk,
            "snapshot": self._snapshot,
            "fill": self.fill.fill,
            "fill_resync": self.fill.resync,
            "fill_open": self.fill.open,
            "move_begin": self.move.start,
            "move_seal": self.move.seal,
            "move_close": self.move.close,
            "watch": lambda message, call_id: self.changes.watch(message, call_id, self._now_s),
        }
        self._early: dict[str, Callable[[Piece, CallId], Piece | bytes | None]] = {
            "replica": self._replica,
            "get_replica": self._get_replica,
            "pull_replica": lambda request, call_id: self.replica_reads.pull(
                request, call_id, self._now_s
            ),
            "stats": self._stats,
            "begin_anew": self._begin_anew,
            "move_state": self.move.state,
            "move_finish": self.move.finish,
            "whereabouts": self.move.whereabouts,
        }

    def connection(self, shard: int, answer_s: float = 5.0) -> ShardConnection:
        """Return a connection to another shard of the set; nothing is pushed by it."""
        connect = self.relay.connect if self.relay is not None else None
        return ShardConnection(
            shard, self._address, self.config.token, None, answer_s, connect=connect
        )

    def _training(self, parameters: Parameters) -> AsyncTraining | SyncTraining:
        settings, decides = self.config.settings, self.config.number == 0
        if settings.mode == "sync":
            wait = settings.grads_to_wait
            return SyncTraining(
                self.core, parameters, decides=decides, grads_to_wait=wait, lag_max=settings.lag_max
            )
        return AsyncTraining(
            self.core, parameters, lag_max=settings.lag_max, slows=settings.lag_slows
        )

    def _followers(self) -> FollowerSet:
        config = self.config
        waited = config.settings.replication == "waited"
        return FollowerSet(
            config.number,
            config.shards,
            config.replicas,
            waited=waited,
            core=self.core,
            parameters=self.parameters,
            changes=self.resync_log,
            answer=self.core.answer,
            streams=config.settings.mode != "sync",
        )

    # -- life

    def adopt(self, found: Recovered) -> None:
        """Take over what was recovered, and serve from now on. Threads: the answering one."""
        parameters = found.parameters
        parameters.serve()
        self.parameters = parameters
        self.training = self._training(parameters)
        for place, number in enumerate(parameters.table_numbers):
            table = parameters.tables[place]
            self.core.add_table(table, number, by_python=self.training.by_python)
            if not parameters.specs[place].name:
                self.core.drop_table(number, table)
        self.set_quotas()
        self._serve_variables()
        for worker, window in found.seen.items():
            self.core.saw(worker, window)
        self.core.version, self.core.epoch = found.version, found.epoch
        self.resync_log.start(found.history, found.position, found.first, found.changed)
        self.followers = self._followers()
        self.followers.start_waiting(time.monotonic(), found.origin)
        if self.snapshots is not None and self.snapshots.log is not None:
            self.snapshots.log.start(found)
        if parameters.specs or parameters.dense.initialized:
            self.mark.set()
        self._housekeeping()
        self.move.restore()
        self.fill.restore()
        self.core.ready, self.core.state_lost = True, False

    def set_quotas(self) -> None:
        """Have the core refuse pushes that exceed a quota; to be called when tables change."""
        parameters, settings = self.parameters, self.config.settings
        pairs = zip(parameters.specs, parameters.tables, strict=True)
        quotas = [spec.row_quota(table.row_bytes) for spec, table in pairs]
        self.core.set_quotas(quotas, settings.quota_rows, settings.quota_bytes)

    def check_room(self) -> None:
        """Raise QuotaExceeded if the tables of this shard have all that its quotas allow."""
        settings, tables = self.config.settings, self.parameters.tables
        nbytes = sum(len(table) * (table.row_bytes + ROW_BYTES) for table in tables)
        for count, most, unit in (
            (self.parameters.rows, settings.quota_rows, "rows"),
            (nbytes, settings.quota_bytes, "bytes"),
        ):
            if 0 < most <= count:
                raise QuotaExceeded(
                    f"shard {self.config.number} has {count} {unit} of {most}.",
                    hint=f"Drop a table, or raise params.quota_{unit}.",
                )

    def _serve_variables(self) -> None:
        """Have the core pull and push the dense variables."""
        dense = self.parameters.dense
        self.core.set_variables(
            [(one.value, one.state, one.marks) for one in dense.variables],
            dense.optimizer if dense.initialized else None,
            by_python=self.training.by_python,
        )

    def refuse_until_reset(self, epoch: int, begins: Callable[[], None]) -> None:
        """Refuse pulls and pushes until `begin_anew`, since the state was lost. Threads: the
        answering one.

        begins: called then.
        """
        self.core.epoch, self.core.state_lost, self._begins = epoch, True, begins

    def _begin_anew(self, _: Piece, __: CallId) -> Piece:
        begins, self._begins = self._begins, None
        if begins is not None:
            log.warning("shard %d starts empty, without its former state", self.config.number)
            self.mark.clear()
            begins()
        return {"begun": begins is not None}

    def post(self, work: Callable[[], None]) -> None:
        """Have the answering thread do something."""
        self._posted.append(work)
        self._wake_up()

    def end(self, why: str) -> None:
        """End the shard. why: for the log."""
        self.ended = self.ended or why
        self._wake_up()

    def _wake_up(self) -> None:
        with self._closing:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Release what is left when the threads have ended."""
        self._health_files.end()
        with self._closing:
            os.close(self._wake)
            self._wake = -1

    def watch(self, source: Callable[[], Iterable[Health]]) -> None:
        """Add threads that belong to this shard to health(). Threads: any."""
        self._watched.append(source)

    def health(self) -> list[Health]:
        """Return the states of all threads of this shard; without a vital one it ends. Threads:
        any."""
        found = [state for source in tuple(self._watched) for state in source()]
        log = self.snapshots.log if self.snapshots is not None else None
        for part in (self.relay, self.snapshots, log, *self.copies.values()):
            if part is not None:
                found.append(part.health())
        return found

    # -- the answering thread

    def turn(self) -> None:
        """Wait for calls, and answer them."""
        for fd, _ in self._poll.poll(
            min(TICK_S, self.changes.check_s, self.replica_reads.poll_s) * 1000
        ):
            if fd != self.core.calls_fd:
                os.eventfd_read(fd)
        self._now_s = time.monotonic()
        for call_id, head, body in self.core.calls():
            self._answer(call_id, head, body)
        while self._posted:
            self._posted.popleft()()
        self.followers.answer_open_questions(self._now_s)
        self.changes.answer_open_questions(self._now_s)
        self.replica_reads.answer_open_questions(self._now_s)
        self._answer_replicated()
        if self._now_s - self._checked_s >= TICK_S:
            self._checked_s = self._now_s
            self._check_tokens()
            self._housekeeping()
            self.move.tick(self._now_s)
            self.fill.tick()
            self._health_files.update(self.core.ready, self.followers.each, self._now_s)

    def _answer(self, call_id: CallId, head: tuple[object, ...], body: bytes) -> None:
        try:
            is_call = head[0] == MessageKind.CALL
            message = unpacked(body) if is_call else {"call": "push_rows"}
            name = str(message.get("call"))
            if name == "hello":
                self._hello(message, call_id)
                return
            generation, role, _ = self._admitted.get(call_id[0], (0, "", b""))
            if generation != call_id[1]:
                self.core.answer(call_id, refused=RefusalCode.NOT_ADMITTED)
                return
            call = self._early.get(name) or self._calls.get(name)
            if call is None:
                raise InvalidInput(
                    f"no call {name!r}.",
                    hint=f"Calls: {', '.join(sorted([*self._calls, *self._early]))}.",
                )
            check_role(role, name)
            if refused := self._moving(name):
                self.core.answer(call_id, bytes(8), refused=refused)
                return
            if not self.core.ready and name not in self._early:
                self.core.answer(
                    call_id,
                    bytes(8),
                    refused=RefusalCode.STATE_LOST
                    if self.core.state_lost
                    else RefusalCode.NOT_READY,
                )
                return
            found = call(message, call_id)
            if found is not None:
                self.core.answer(call_id, found if isinstance(found, bytes) else packed(found))
        except Exception as error:
            if not isinstance(error, ClipperError):
                log.warning("a call failed", exc_info=True)
            self.core.answer(call_id, frames.failed(error), refused=RefusalCode.CALL_FAILED)

    def _moving(self, name: str) -> RefusalCode | None:
        """Return why a call cannot be made while the rows move to another set; None if it can."""
        access = self.core.access
        if access == OPEN or name in _OF_SHARDS or name.startswith(("move_", "fill")):
            return None
        if name in self._early and name not in ("pull_replica", "begin_anew"):
            return None
        if access == MOVED:
            return RefusalCode.MOVED
        return RefusalCode.NOT_READY if access == CLOSED or name not in _READS else None

    def _answer_replicated(self) -> None:
        """Send the answers whose changes the followers have."""
        if self._waiting:
            sure = self.core.sure()
            while self._waiting and self._waiting[0][0] <= sure:
                _, call_id, payload = self._waiting.popleft()
                self.core.answer(call_id, payload)
            if not self._waiting:
                self.core.python_waits = False

    def answer_when_replicated(self, pushed: PushResult, call_id: CallId) -> None:
        """Answer a call when every follower that is waited for has its changes."""
        self._waiting.append((pushed.position, call_id, packed(pushed.answer)))
        self.core.python_waits = True
        self._wake_up()

    def _housekeeping(self) -> None:
        self.core.stamp = wall_time_us() // 1_000_000
        if not self.core.ready:
            return
        if self._now_s - self._expired_s >= EXPIRE_S and self.core.access == OPEN:
            self._expired_s = self._now_s
            self.expire()
        self.ages.note(self._now_s, self.core.position)
        self.training.tick()
        self.resync_log.read()
        patience_s = self.config.settings.without_replica_s
        if patience_s and not self._resyncing and self.followers.silent(self._now_s, patience_s):
            check = Worker(
                "clipper-shard-check",
                self._check_whether_replaced,
                once=True,
                on_end=partial(self.post, self._go_on),
            )
            try:
                check.start()
                self._resyncing = True
            except NotStarted as error:  # the next look tries again
                log.warning("shard %d does not look for a successor: %s", self.config.number, error)

    def expire(self) -> None:
        """Remove rows that were not used for their table's `expire_s`, here and in replicas."""
        for number, spec in enumerate(self.parameters.specs):
            before = self.core.stamp - spec.expire_s
            if not spec.expire_s or before <= 0:
                continue
            table = self.parameters.tables[number]
            cursor: int | None = 0
            while cursor is not None:
                ids, _, stamps, cursor = table.walk(cursor)
                old = ids[stamps < before]
                if old.size:
                    with pushes_paused(self.core):
                        _, _, now = table.read(old)
                        old = old[now < before]
                        self.core.counts.expire(number, table.remove(old))
                        self.core.note(number, old)

    def _check_whether_replaced(self, stop: Stop) -> None:
        """Ask the followers for a later epoch of this shard, before it goes on without one of them.

        Threads: one of its own.
        """
        known = 0
        for one in self.followers.each:
            with contextlib.suppress(OSError, ClipperError), self.connection(one.shard) as asked:
                answer = call_once(asked, "replica", shard=self.config.number)[1]
                known = max(known, int(answer.get("known", 0)))
        self._known = known

    def _go_on(self) -> None:
        self._resyncing = False
        known = self._known
        self._known = -1
        if known < 0:  # it failed, and the next look tries again
            return
        if known > self.core.epoch:
            self.fenced(known)
            return
        for one in self.followers.silent(time.monotonic(), self.config.settings.without_replica_s):
            log.warning(
                "shard %d continues without its replica in shard %d", self.config.number, one.shard
            )
            one.give_up()

    def fenced(self, epoch: int) -> None:
        """End this shard, since a later epoch of it serves."""
        self.core.ready = False
        log.error(
            "shard %d of epoch %d: epoch %d lives; this one ends",
            self.config.number,
            self.core.epoch,
            epoch,
        )
        self.end(f"fenced by epoch {epoch}")

    def _check_tokens(self) -> None:
        """Close the connections whose token was deleted from the file, or has another role now."""
        if not self._tokens.refresh():
            return
        for number, (generation, role, digest) in tuple(self._admitted.items()):
            if self._tokens.role(digest) != role:
                del self._admitted[number]
                self.core.close_connection(number, generation)

    # -- calls of workers

    def _hello(self, message: Piece, call_id: CallId) -> None:
        self._check_tokens()
        digest = digest_of(message.get("token"))
        role = self._tokens.role(digest)
        if not role:
            self.core.answer(call_id, bytes(8), refused=RefusalCode.NOT_ADMITTED, close=True)
            return
        if message.get("protocol", PROTOCOL) != PROTOCOL:
            raise InvalidInput(f"protocol {message['protocol']!r}: this shard speaks {PROTOCOL}.")
        self._admitted[call_id[0]] = call_id[1], role, digest
        answer = {
            "shard": self.config.number,
            "shards": self.config.shards,
            "generation": self.config.generation,
            "tables": self.parameters.numbers(),
            "variables": self.parameters.dense.names(),
        }
        worker, incarnation = whole(message, "worker"), whole(message, "incarnation")
        answer["mode"], answer["role"] = self.config.settings.mode, role
        answer["replicas"] = self.config.replicas
        answer["shared"] = self.config.settings.shared_bytes_max
        answer["frame_bytes_max"] = self.config.settings.frame_bytes_max
        answer["sequence"] = self.core.highest(worker) if worker else 0
        answer |= {"ready": self.core.ready, "state_lost": self.core.state_lost, "pid": os.getpid()}
        self.core.answer(
            call_id,
            packed(answer),
            admit=True,
            worker=worker,
            incarnation=incarnation,
            pushes=role != "read",
        )

    def _create(self, message: Piece, call_id: CallId) -> None:
        try:
            spec = msgspec.convert(message.get("spec"), TableSpec)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"a table's specification: {error}.") from None
        if spec.name not in self.parameters.numbers():
            self.check_room()
        number = self.add_table(spec)
        self.answer_when_replicated(PushResult({"number": number}, self.core.position), call_id)

    def add_table(self, spec: TableSpec) -> int:
        """Have a table, and tell followers of it. Return its number. Raises InvalidInput,
        TypeConflict."""
        place, is_new = self.parameters.create(spec)
        number = self.parameters.table_numbers[place]
        if is_new:
            table = self.parameters.tables[place]
            self.core.add_table(table, number, by_python=self.training.by_python)
            self.set_quotas()
            self.followers.end_streams()
            self.core.note(DENSE, [])
            self.mark.set()
        return number

    def alter_table(self, spec: TableSpec) -> int:
        """Give a table other settings, and tell followers. Return the position. Raises as
        `Parameters.alter`."""
        with pushes_paused(self.core):
            self.parameters.alter(spec)
        self.set_quotas()
        self.followers.end_streams()
        return self.core.note(DENSE, [])

    def _tables(self, _: Piece, __: CallId) -> Piece:
        specs = {
            spec.name: msgspec.to_builtins(spec) for spec in self.parameters.specs if spec.name
        }
        return {
            "tables": specs,
            "numbers": self.parameters.numbers(),
            "variables": self.parameters.dense.names(),
        }

    def _push_model(self, message: Piece, call_id: CallId) -> None:
        settings = message.get("optimizer_settings") or {}
        if not isinstance(settings, dict) or not isinstance(message.get("variables"), dict):
            raise InvalidInput("push_model: variables and optimizer_settings are maps.")
        dense, given = self.parameters.dense, whole(message, "version")
        if given > VERSION_MAX:
            raise InvalidInput(f"push_model: version {given}; at most {VERSION_MAX}.")
        with pushes_paused(self.core):
            version = max(1, self.core.version, given)
            first = dense.initialize(
                message["variables"], str(message.get("optimizer") or "sgd"), settings, version
            )
            if first:
                self.core.version = version
        if first:
            self.serve_variables()
        position = self.core.position
        self.answer_when_replicated(
            PushResult({"accepted": first, "version": self.core.version}, position), call_id
        )

    def serve_variables(self) -> None:
        """Have the core serve the dense variables that there are now, and tell followers."""
        self.followers.end_streams()
        self._serve_variables()
        self.mark.set()
        self.core.note(DENSE, range(len(self.parameters.dense)))

    def _pull_variables(self, message: Piece, _: CallId) -> Piece:
        since, dense = message.get("since", -1), self.parameters.dense
        if not isinstance(since, int):
            raise InvalidInput(f"since is a version, not {since!r}.")
        with pushes_paused(self.core):
            version, newer = self.core.version, dense.newer(since)
        return {"initialized": dense.initialized, "version": version, "variables": newer}

    def _push_gradients(self, message: Piece, call_id: CallId) -> None:
        self.answer_when_replicated(self.training.push(message), call_id)

    def _push_rows(self, _: Piece, __: CallId) -> Piece:
        hint = "Use client.push_gradients."
        raise DoesNotFit(
            "rows alone are not a step: these shards make steps of several workers' gradients.",
            hint=hint,
        )

    # -- calls of other shards

    def _synchronize(self, message: Piece, call_id: CallId) -> bytes | None:
        self._check_known(message)
        return self.followers.synchronize(message, call_id, self._now_s)

    def _stream(self, message: Piece, call_id: CallId) -> bytes | None:
        self._check_known(message)
        return self.followers.stream(message, call_id, self._now_s)

    def _check_known(self, message: Piece) -> None:
        """End this shard if a follower knows a later epoch. Raises ClipperError then."""
        known = int(message.get("known", 0))
        if known > self.core.epoch:
            self.fenced(known)
            raise ClipperError(f"epoch {self.core.epoch} of shard {self.config.number} has ended.")

    def _walk(self, message: Piece, _: CallId) -> Piece:
        one = self.followers.of(int(message.get("shard", -1)))
        if one is not None:
            one.last_seen_s = self._now_s
        piece, following = self.parameters.piece([int(n) for n in message["cursor"]])
        return {**piece, "next": following}

    def _replica(self, message: Piece, _: CallId) -> Piece:
        """Return what this shard has of another one.

        With `epoch`: the other shard starts again under that epoch, and earlier ones are refused.
        """
        of = self.copies.get(int(message.get("shard", -1)))
        if of is None:
            return {"whole": False, "known": 0}
        known, copy = of.fence(int(message.get("epoch", 0))), of.replica
        if copy is None:
            return {"whole": False, "known": known}
        shape, seen = (
            (copy.parameters.shape(), copy.pushes_seen()) if "epoch" in message else ({}, {})
        )
        message = {
            "whole": True,
            "known": known,
            "epoch": copy.epoch,
            "version": copy.version,
            "rows": copy.parameters.rows,
            "position": copy.position,
            "history": copy.history.encode(),
            "first": copy.changes.first,
        }
        return {**message, "shape": shape, "seen": seen}

    def _get_replica(self, message: Piece, _: CallId) -> Piece:
        of = self.copies.get(int(message.get("shard", -1)))
        copy = of.replica if of is not None else None
        if copy is None:
            raise ClipperError(f"no replica of shard {message.get('shard')} here.")
        cursor = [int(n) for n in message["cursor"]]
        if "since" in message:
            part, number = copy.difference(int(message["since"]), cursor[0])
            return {**part, "next": number}
        piece, following = copy.parameters.piece(cursor)
        return {**piece, "next": following}

    # -- requests of operators

    def _snapshot(self, message: Piece, call_id: CallId) -> None:
        if self.snapshots is None:
            raise InvalidInput("this shard keeps no snapshots: it has no folder.")
        if self.core.access == MOVED:
            raise DoesNotFit(f"shard {self.config.number} has moved.")

        def on_done(answer: Piece | Exception) -> None:
            if isinstance(answer, Exception):
                self.core.answer(call_id, frames.failed(answer), refused=RefusalCode.CALL_FAILED)
            else:
                self.core.answer(call_id, packed(answer))

        whole = bool(message.get("whole"))
        self.snapshots.request(
            int(message.get("number", 0)),
            lambda answer: self.post(lambda: on_done(answer)),
            whole=whole,
        )

    def _stats(self, _: Piece, __: CallId) -> Piece:
        for one in self.followers.each:
            one.read_progress(self._now_s)
        return dict(stats_of(self, time.monotonic()))


def _relay(config: ShardConfig) -> TlsRelay | None:
    """Return the relay of a shard whose connections have TLS, or those of others."""
    files = shard_tls(config.settings)
    if files is None and not any(address.startswith("tls:") for address in config.addresses):
        return None
    certificate = Certificate(files, "params.tls") if files is not None else None
    return TlsRelay(certificate, config.settings.connections_max)
