"""Replication: a follower requests the changes of its primary again and again, and keeps a copy of
whole rows.

Source: the parameter server's design document, "Embedding Replica" (the replicas of shard i are in
shards i+1 .. i+M; they pull). There are three differences. Rows come with their optimizer's state,
and with the version and the pushes that were seen. A primary keeps a position in its log for each
follower, instead of a set that is cleared for all. Each life of a shard has an epoch, and followers
refuse lower ones.

Replies have a serial number, separately for each follower. A follower that sends the last
serial has all replies. One that sends the serial before it has missed the last reply, which is
sent again. Any other is resynced: by difference if the log of changes reaches back to the position
of its copy (change_log), else it copies everything and then what changed meanwhile. The old copy is
kept until the new one is whole.

A follower that is waited for and has caught up is sent changes as they come (the core's
shard_stream), over the connection on which it requested the stream. It acknowledges the position up
to which it has all; a push is acknowledged with one message each way, and messages do not wait for
each other. The stream ends when a table or a model is made, which only a reply can say, or when the
connection does; then the follower is resynced by difference. Where both compute the same, the
follower is sent pushes and applies them (the core's shard_stream). It says that it has one before
it applies it, under its lock: whoever takes the lock, as a shard that recovers does, finds it
applied.

Changed rows are read while pushes are paused, so that a copy agrees with the pushes that it has
seen. If too much has changed, rows are read beside pushes, and such a copy agrees after the next
reply. Pushes do not wait for a follower that copies much. They wait for it again from the reply on
that makes its copy whole. Until then the shard is exposed, and its statistics say so.
"""

import contextlib
import logging
import math
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import ClipperError, ShardAway
from clipper.params.shard.parameters import DENSE, Cursor, Ids, Parameters, Piece
from clipper.params.shard.replication.change_log import (
    SLOT,
    ChangeLog,
    History,
    PrimaryLog,
    ids_in,
    union,
)
from clipper.version import VERSION
from clipper_container.params.connection import ShardConnection, call_once
from clipper_container.params.frames import Head, packed
from clipper_core.params.change_receiver import ChangeReceiver, Changes
from clipper_core.params.embedding import Table
from clipper_core.params.shard_loop import ShardLoop

log = logging.getLogger("clipper.params")
END_S = 60.0  # for a long poll that is under way when the shard ends
STILL_BYTES_MAX = 4 << 20  # read while pushes are paused: about a millisecond
ROUNDS_MAX = 4  # of reading beside pushes, before pushes are paused to complete a copy
WAIT_S = 0.5  # of a long poll
# an incomplete follower silent for so long is waited for until it returns or is given up
SILENT_S = 3.0
REPLICAS_MAX = 7
ANEW = {"anew": True}
REPLAYS = f"{VERSION} {platform.machine()}"  # shards that agree on it compute the same


class Origin(NamedTuple):
    """The replica that a shard has recovered from: the shard that has it, its epoch and version."""

    shard: int
    epoch: int
    version: int


@contextlib.contextmanager
def pushes_paused(core: ShardLoop) -> Iterator[None]:
    """Pause pushes, so that several rows are read or changed as one."""
    core.hold()
    try:
        yield
    finally:
        core.resume()


def note_pushes(seen: ShardLoop, piece: Piece) -> None:
    """Note the pushes that a piece says were seen, in a loop that does not run."""
    for worker, window in piece.get("seen", {}).items():
        seen.saw(worker, window)
    pairs = piece.get("told", [])
    for worker, sequence in zip(pairs[::2], pairs[1::2], strict=True):
        if not seen.look(worker, sequence):
            seen.note(DENSE, np.empty(0, np.int64), worker, sequence)


# -- at the primary


class FollowerState:
    """State of one follower at its primary. Threads: the answering one.

    life: the follower's own epoch. given_up: pushes do not wait for it until its copy is whole.
    incomplete_since_s: since when it has no whole copy. slot: its number in the log. serial: of
    the last reply. position: of the last reply, as the log counts. waiting_call: (call, until) of a
    request that is not answered yet.
    """

    def __init__(
        self,
        slot: int,
        shard: int,
        waited: bool,
        core: ShardLoop,
        parameters: Parameters,
        changes: PrimaryLog,
    ) -> None:
        self.slot, self.shard, self.waited = slot, shard, waited
        self._core, self._parameters, self._changes = core, parameters, changes
        self.on = self.given_up = False
        self.life = 0
        self.last_seen_s = 0.0
        self.incomplete_since_s = time.monotonic()
        self.serial = 0
        self.position = 0
        self.acknowledged = 0
        self.waiting_call: tuple[object, float] | None = None
        self._last: bytes | None = None
        self._backlog: list[dict[int, Ids] | Piece] = []
        self._rest: Piece = {}  # sent with the last piece of the backlog
        self._end = 0
        self._whole = self._exact = self._confirmed = False
        self._rounds = 0
        self.streaming = False  # changes are sent as they come
        self._needs_reply = False  # a table or a model was made since the last one
        self._received = 0
        self._origin: Origin | None = None
        self._missed: dict[int, Ids] | None = None

    def start(self, now: float, origin: Origin | None) -> None:
        """Let pushes wait for this follower, before the first push. origin: what was recovered
        from."""
        self.last_seen_s = now
        self._origin = origin if origin is not None and origin.shard == self.shard else None
        if self.waited:
            self._core.follow(self.slot, waited=True)

    def start_resync(self, message: Piece) -> Piece | None:
        """Start a resync by difference: the follower keeps its copy, and gets the rows that
        have changed since.

        Return None if all must be copied: its copy is not an earlier state of this shard, or the
        log of changes does not reach back to it. A copy of an earlier epoch must be exact (its rows
        are those of its position, none is newer), or the one that this shard recovered from.
        """
        origin, self._origin = self._origin, None
        epoch, position = int(message.get("epoch", 0)), int(message.get("position", -1))
        is_origin = origin is not None and (epoch, message.get("version")) == origin[1:]
        if not message.get("keeps") or not (
            is_origin or message.get("exact") or epoch == self._core.epoch
        ):
            return None
        with pushes_paused(self._core):
            missed = self._changes.since(epoch, position)
            if missed is None:
                return None
            few = self._parameters.size_of(missed) <= STILL_BYTES_MAX
            self._follow(few)
            self._missed = missed
        return {"keep": True, "serial": self.serial, "history": self._changes.history.encode()}

    def _follow(self, few: bool) -> None:
        """Send it all changes from now on. few: pushes wait for it at once, not only when it has
        caught up."""
        if self.is_whole:
            self.incomplete_since_s = time.monotonic()
        self._core.follow(self.slot, waited=self.waited and few)
        self.on, self.serial, self._last, self._backlog = True, self.serial + 1, None, []
        self.acknowledged = self.position = self._rounds = 0
        self._whole = self._exact = self._confirmed = False
        self._missed = None

    def start_full_sync(self) -> Piece:
        """Start a full sync: return the metadata; the follower copies all rows and then requests
        changes."""
        self._follow(self._parameters.row_bytes <= STILL_BYTES_MAX)
        with pushes_paused(self._core):
            seen = self._core.pushes_seen()
            return {
                **ANEW,
                **self._parameters.shape(),
                "serial": self.serial,
                "seen": seen,
                "version": self._core.version,
                "history": self._changes.history.encode(),
            }

    @property
    def can_stream(self) -> bool:
        """Tell whether the follower has all but changes that can be streamed to it."""
        whole = self.is_whole and self._exact and not self._backlog
        return self.waited and whole and not self._needs_reply

    def start_stream(self, now: float) -> Piece:
        """Send changes as they come, from the answer to this call on. Return that answer."""
        self.streaming, self.last_seen_s = True, now
        return {"streams": True, "base": self._changes.position_of(0)}

    def require_reply(self) -> None:
        """Send no changes as they come before the next reply: it alone can say what has changed."""
        self._needs_reply = True
        self.end_stream()

    def end_stream(self) -> None:
        """Stop the stream of changes: the follower gets a notice, and requests a resync."""
        if self.streaming:
            self.streaming = False
            self._core.end_stream(self.slot)

    def read_progress(self, now: float) -> None:
        """Note what the follower has acknowledged of the changes that were sent as they came."""
        if self.streaming:
            on, acknowledged, received = self._core.streams(self.slot)
            if on and (received != self._received or acknowledged >= self._core.position):
                self._received, self.last_seen_s = received, now
            self.acknowledged = self.position = max(self.acknowledged, acknowledged)

    def give_up(self) -> None:
        """Give the follower up: pushes do not wait for it, and its changes are no longer kept."""
        self.end_stream()
        self._origin = None
        if self.is_whole:
            self.incomplete_since_s = time.monotonic()
        self.on, self.given_up, self.waiting_call, self._last = False, True, None, None
        self._core.unfollow(self.slot)

    def confirm(self, serial: int) -> bytes | None:
        """Take a question. Returns the reply to repeat, or None.

        Raises LookupError if the follower must be resynced.
        """
        if (
            not self.on
            or serial not in (self.serial, self.serial - 1)
            or (serial < self.serial and self._last is None)
        ):
            raise LookupError
        if serial < self.serial:
            return self._last
        self._last, self._confirmed = None, self._whole
        if self._whole and not self._backlog:
            self.given_up = False
            if self.acknowledged < self.position:
                self.acknowledged = self.position
                self._core.acknowledge(self.slot, self.position)
        return None

    def start_waiting(self) -> None:
        """Let pushes wait for this follower from now on."""
        if self.waited and self.on:
            self._core.wait_for(self.slot)

    @property
    def is_whole(self) -> bool:
        """Tell whether the follower has confirmed a whole copy."""
        return self.on and self._confirmed

    @property
    def has_changes(self) -> bool:
        """Tell whether there is something to send."""
        if self._backlog or not self._whole or not self._exact:
            return True
        return self._core.position != self.position

    def next_reply(self) -> bytes | None:
        """Return the next reply; None if the follower has fallen too far behind."""
        if not self._backlog:
            piece = self._changed()
            if piece is None:
                return None
        else:
            piece = self._next_of_backlog()
        self.serial += 1
        self._last = packed({**piece, "serial": self.serial})
        return self._last

    def _changed(self) -> Piece | None:
        with pushes_paused(self._core):
            found = self._core.changed(self.slot)
            if found is None:
                return None
            position, changed, notice = found
            self._needs_reply = False
            seen = {}
            if self._missed is not None:
                changed, self._missed = union([self._missed, changed]), None
                seen = {"seen": self._core.pushes_seen()}
            few = self._parameters.size_of(changed) <= STILL_BYTES_MAX
            self._rounds += 1
            must = not few and not self._whole and self._rounds > ROUNDS_MAX
            if few or self._rounds >= ROUNDS_MAX:
                self.start_waiting()  # the next round is small then
            after = {
                **self._parameters.shape(),
                "version": self._core.version,
                "told": [n for pair in notice for n in pair],
                "position": self._changes.position_of(position),
                **seen,
            }
            piece = self._parameters.of(changed) if few else {}
            chunks = self._parameters.chunks(changed) if not few else ()
            backlog = [self._parameters.of(chunk) if must else chunk for chunk in chunks]
        if few:
            self.position, self._whole, self._exact = position, True, True
            return {**after, **piece, "whole": True}
        self._rest, self._end, self._backlog = {**after, "whole": must}, position, backlog
        return self._next_of_backlog()

    def _next_of_backlog(self) -> Piece:
        following: Any = self._backlog.pop(0)
        piece: Piece = following if "rows" in following else self._parameters.of(following)
        if not self._backlog:
            self.position = self._end
            self._whole, self._exact = self._whole or self._rest["whole"], self._rest["whole"]
            return {**piece, **self._rest}
        named = {key: self._rest[key] for key in ("tables", "numbers")}
        return {**named, **piece, "whole": False}


class FollowerSet:
    """The followers of one shard. Threads: the answering one.

    answer: ShardLoop.answer. streams: followers may be sent changes as they come.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        replicas: int,
        *,
        waited: bool,
        core: ShardLoop,
        parameters: Parameters,
        changes: PrimaryLog,
        answer: Callable[..., None],
        streams: bool = False,
    ) -> None:
        self._streams = streams
        self._shard, self._shards, self._answer, self._core = shard, shards, answer, core
        self.each = [
            FollowerState(k, (shard + 1 + k) % shards, waited, core, parameters, changes)
            for k in range(min(replicas, shards - 1))
        ]

    def start_waiting(self, now: float, origin: Origin | None = None) -> None:
        """Let pushes wait for all followers, before the first push. origin: what was recovered
        from."""
        for one in self.each:
            one.start(now, origin)

    def of(self, shard: int) -> FollowerState | None:
        """Return the state of the follower in a shard; None if it is none."""
        return next((one for one in self.each if one.shard == shard), None)

    def _requesting_follower(self, message: Piece, now: float) -> FollowerState:
        """Return the follower of a request. Raises ClipperError, ShardAway."""
        one = self.of(int(message.get("shard", -1)))
        if one is None:
            raise ClipperError(
                f"shard {message.get('shard')} has no replica of shard {self._shard}."
            )
        life = int(message.get("mine", 0))
        if life < one.life:
            raise ShardAway(f"shard {one.shard} of epoch {life} has ended: epoch {one.life} lives.")
        if one.waiting_call is not None:
            self._answer(one.waiting_call[0], packed({"serial": one.serial, "quiet": True}))
        one.life, one.last_seen_s, one.waiting_call = life, now, None
        one.end_stream()
        return one

    def stream(self, message: Piece, call_id: object, now: float) -> bytes | None:
        """Send a follower changes as they come, from now on. Return the answer if that cannot be.

        The question confirms the last reply, as one of `synchronize` does.
        """
        one = self._requesting_follower(message, now)
        if not self._streams or int(message.get("epoch", 0)) != self._core.epoch:
            return packed({"streams": False, "ever": self._streams})
        try:
            again = one.confirm(int(message.get("serial", -1)))
        except LookupError:
            again = b""
        if again is not None or not one.can_stream:
            return packed({"streams": False, "ever": True})
        replays = message.get("replays") == REPLAYS
        answer = packed(one.start_stream(now))
        self._answer(call_id, answer, stream=one.slot + 1, replays=replays)
        return None

    def end_streams(self) -> None:
        """Let followers ask again: there is something that only a reply can say."""
        for one in self.each:
            one.require_reply()

    def synchronize(self, message: Piece, call_id: object, now: float) -> bytes | None:
        """Return the answer to a follower; None if it is sent later."""
        one = self._requesting_follower(message, now)
        if int(message.get("epoch", 0)) != self._core.epoch:
            return packed(one.start_resync(message) or one.start_full_sync())
        try:
            again = one.confirm(int(message.get("serial", -1)))
        except LookupError:
            return packed(one.start_resync(message) or one.start_full_sync())
        if again is not None:
            return again
        if one.has_changes:
            return one.next_reply() or packed(one.start_full_sync())
        wait_s = min(float(message.get("wait_s", 0.0)), 10 * WAIT_S)
        if wait_s <= 0:
            return packed({"serial": one.serial, "quiet": True})
        one.waiting_call = (call_id, now + wait_s)
        return None

    def answer_open_questions(self, now: float) -> None:
        """Answer open questions for which something has changed, or whose time is over."""
        for one in self.each:
            one.read_progress(now)
            if not one.is_whole and one.waiting_call is None and now - one.last_seen_s > SILENT_S:
                one.start_waiting()
            if one.waiting_call is None:
                continue
            call_id, until = one.waiting_call
            if one.has_changes:
                one.waiting_call, one.last_seen_s = None, now
                self._answer(call_id, one.next_reply() or packed(one.start_full_sync()))
            elif now >= until:
                one.waiting_call, one.last_seen_s = None, now
                self._answer(call_id, packed({"serial": one.serial, "quiet": True}))

    @property
    def exposed(self) -> bool:
        """Tell whether some follower has no whole copy, so that the death of this shard may lose
        data."""
        return not all(one.is_whole for one in self.each)

    def silent(self, now: float, patience_s: float) -> list[FollowerState]:
        """Return the followers that pushes wait for and that have been silent for `patience_s`."""
        waited = (
            one
            for one in self.each
            if one.waited and one.waiting_call is None and (one.on or not one.given_up)
        )
        return [one for one in waited if now - one.last_seen_s > patience_s]


# -- at the follower


class ShardReplica:
    """A copy of one shard. Threads: its follower's, and any that has fenced it off.

    epoch: of the life that it is a copy of. whole: it has been equal to its primary at one moment.
    position, history: how far it has come; -1 before it is whole. exact: no row is newer than its
    position. changes: what it got recently, for a primary that recovers. fresh_s: the time, of
    the monotonic clock, from which on it has all that its primary had. complete_version: of the
    model then.
    """

    def __init__(self, shard: int, epoch: int, resync_ids_max: int = 0) -> None:
        self.shard, self.epoch = shard, epoch
        self.parameters = Parameters()
        self.version = 0
        self.whole = self.exact = False
        self.position = -1
        self.history = History()
        self.changes = ChangeLog(resync_ids_max)
        self.fresh_s, self.complete_version = -math.inf, -1
        self._difference: tuple[int, list[dict[int, Ids]]] = (-1, [])
        self._seen = ShardLoop()  # does not run: the record of pushes, and what is streamed to
        self._streamed: list[Table] = []  # tables that it has

    @classmethod
    def loaded(
        cls, shard: int, epoch: int, pieces: Iterable[Piece], resync_ids_max: int
    ) -> "ShardReplica":
        """Return the copy that was saved as `pieces`; its position is -1 if they have none."""
        copy, piece = cls(shard, epoch, resync_ids_max), Piece()
        for piece in pieces:
            copy.take(piece)
        copy.whole, copy.exact = copy.position >= 0, bool(piece.get("exact", True))
        copy.changes.restart(copy.position)
        return copy

    def saved(self) -> Iterator[Piece]:
        """Yield the pieces to save. The copy must not change meanwhile."""
        yield from self.parameters.pieces()
        yield {
            "version": self.version,
            "seen": self.pushes_seen(),
            "position": self.position,
            "history": self.history.encode(),
            "exact": self.exact,
        }

    def take(self, piece: Piece) -> None:
        """Write a piece of the primary."""
        self._difference = (-1, [])
        self.parameters.take(piece)
        note_pushes(self._seen, piece)
        self.version = max(self.version, int(piece.get("version", 0)))
        if "history" in piece:
            self.history = History.decode(piece.get("history"))
        self._note(piece)

    def _note(self, piece: Piece) -> None:
        position, is_new = piece.get("position"), not self.whole
        self.whole = self.whole or bool(piece.get("whole"))
        self.exact = bool(piece.get("whole"))
        if position is not None:
            self.position = int(position)
        if self.whole and is_new:
            self.changes.restart(self.position)
        elif self.whole:
            self.changes.add(ids_in(piece, self.parameters), position)

    def confirm(self, clock_s: float) -> None:
        """Note that it has all that its primary had at that time, of this host's clock."""
        if self.whole and self.exact:
            self.fresh_s = max(self.fresh_s, clock_s)
            self.complete_version = self.version

    def has(self, since_s: float, push: tuple[int, int] | None) -> bool:
        """Return whether it has all that its primary had at a time, and the push that made a
        version of an epoch."""
        return self.fresh_s >= since_s and (
            push is None or (self.epoch == push[0] and self.complete_version >= push[1])
        )

    def start_stream(self) -> ShardLoop:
        """Return what a stream of changes is written to."""
        numbered = list(zip(self.parameters.tables, self.parameters.table_numbers, strict=True))
        for place, (table, number) in enumerate(numbered):
            if self._streamed[place : place + 1] != [table]:
                self._seen.add_table(table, number)
        self._streamed = [table for table, _ in numbered]
        dense = self.parameters.dense
        self._seen.set_variables(
            [(one.value, one.state, one.marks) for one in dense.variables],
            dense.optimizer if dense.initialized else None,
        )
        self._seen.follow(SLOT)
        return self._seen

    def streamed(self, changes: Changes, base: int) -> None:
        """Note changes that were written. base: what the primary's position is above the core's."""
        self._difference = (-1, [])
        self.version = max(self.version, changes.version)
        self.position, self.exact = base + changes.position, changes.exact
        self.confirm(changes.clock_s)

    def settle(self) -> None:
        """Note the ids that were streamed, so that `changes` knows them."""
        if not self._streamed:
            return
        found = self._seen.changed(SLOT)
        if found is None:
            self._seen.follow(SLOT)
            self.changes.restart(self.position)
        else:
            self.changes.add(found[1], self.position)

    def difference(self, since: int, number: int) -> tuple[Piece, int | None]:
        """Return the piece `number` of what has changed since a position, and the number of the
        next.

        The copy must not change meanwhile. Raises ClipperError if the changes are not known.
        """
        if self._difference[0] != since:
            changed = self.changes.since(since)
            if changed is None:
                raise ClipperError(f"the changes since {since} are not known here.")
            self._difference = (since, list(self.parameters.chunks(changed)))
        chunks = self._difference[1]
        piece = self.parameters.of(chunks[number]) if chunks else {}
        return piece, number + 1 if number + 1 < len(chunks) else None

    def pushes_seen(self) -> dict[int, bytes]:
        """Return the windows of pushes that were seen, by worker."""
        return self._seen.pushes_seen()


class ReplicaFollower:
    """Keeps a replica of one shard. Threads: its own; any for `replica` and `fence`.

    connection: to the primary. period_s: between two questions; 0: long polls. load: returns the
    newest copy on disk. resync_ids_max: changed ids that a copy remembers. spin_us: time to poll
    for changes that are sent as they come, while that pays. progressed: is called after `hurry`, by
    the thread.
    """

    def __init__(
        self,
        shard: int,
        of: int,
        connection: ShardConnection,
        period_s: float,
        *,
        load: Callable[[], ShardReplica | None] = lambda: None,
        resync_ids_max: int = 0,
        spin_us: int = 0,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._spin_us, self._progressed = spin_us, progressed
        self._awaited = False
        self._receiver: ChangeReceiver | None = None
        self._receiver_lock = threading.Lock()  # while `_receiver` may be used by others
        self.shard, self.of, self._connection, self._period_s = shard, of, connection, period_s
        self._load, self._resync_ids_max = load, resync_ids_max
        self._lock = threading.Lock()
        self._whole: ShardReplica | None = None
        self._making: ShardReplica | None = None
        self.epoch_min = 0  # lower epochs are refused
        self._may_stream = period_s == 0
        self._serial = -1
        self._mine = 0
        self._worker = Worker(
            f"clipper-follower-{of}", self._run, once=True, again=Backoff(0.03, 0.5)
        )

    def start(self, mine: int) -> None:
        """Start the thread. mine: this shard's own epoch."""
        self._mine = mine
        self._worker.start()

    def stop(self) -> None:
        """Tell the thread to end; it does within a long poll."""
        self._worker.request_stop()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._worker.end(END_S)

    def health(self) -> Health:
        """Return the state of the thread."""
        return self._worker.health()

    @property
    def replica(self) -> ShardReplica | None:
        """The whole copy; None if there is none yet."""
        with self._lock:
            return self._whole

    def fence(self, epoch: int) -> int:
        """Refuse everything below `epoch` from now on, since shard `of` starts again.

        Returns the highest epoch known; if it is not less than `epoch`, nothing changes.
        """
        with self._lock:
            known = max(
                self.epoch_min,
                self._whole.epoch if self._whole else 0,
                self._making.epoch if self._making else 0,
            )
            if epoch > known:
                self.epoch_min = epoch
                if self._whole is not None:
                    self._whole.settle()
            return known

    def hurry(self) -> None:
        """Have `progressed` called when the copy is next confirmed or changed. A primary that sends
        changes as they come gets a request at once."""
        if self._awaited:
            return
        self._awaited = True
        with self._receiver_lock, contextlib.suppress(ConnectionError):
            if self._receiver is not None:
                self._receiver.acknowledge(0, wants_reply=True)

    def _report_progress(self) -> None:
        if self._awaited:
            self._awaited = False
            self._progressed()

    def _run(self, stop: Stop) -> None:
        self.load()
        while not stop.requested:
            try:
                next_reply = self._once()
                if self._period_s and not next_reply:
                    stop.wait(self._period_s)
                elif self._may_stream and not next_reply:
                    self._stream()
            except (OSError, ClipperError) as error:
                log.debug("replica of shard %d: %s", self.of, error)
                self._connection.close()
                self._drop()
                stop.wait(0.03)
            except Exception:
                log.exception("replica of shard %d: it starts from scratch", self.of)
                self._connection.close()
                self._drop(self._making or self._whole)
                stop.wait(0.5)
        self._connection.close()

    def load(self) -> None:
        """Start with the copy on disk, if there is one."""
        try:
            copy = self._load()
        except (OSError, ClipperError, ValueError, KeyError) as error:
            log.warning("the saved copy of shard %d is not used: %s", self.of, error)
            return
        with self._lock:
            self._whole = self._whole or copy

    def _drop(self, broken: ShardReplica | None = None) -> None:
        """Drop a copy that was being made, and one that is broken."""
        with self._lock:
            if self._making is not None or broken is not None:
                self._serial = -1  # the dropped copy's
            self._making = None
            if broken is not None:
                self._whole = None if self._whole is broken else self._whole

    def _call(self, name: str, **fields: object) -> tuple[Head, Piece]:
        head, piece = call_once(self._connection, name, **fields)
        with self._lock:
            if head.epoch < self.epoch_min:
                raise ShardAway(
                    f"{self._connection.name} is of epoch {head.epoch}, and its successor of"
                    f" {self.epoch_min}."
                )
        return head, piece

    def _once(self) -> bool:
        """Ask once. Returns whether to ask again at once."""
        current = self._making or self._whole
        wait_s = 0.0 if self._period_s else WAIT_S
        epoch = current.epoch if current else 0
        message: Piece = {
            "mine": self._mine,
            "epoch": epoch,
            "known": max(epoch, self.epoch_min),
            "serial": self._serial,
        }
        if current is not None and current is self._whole:
            message |= {
                "keeps": True,
                "version": current.version,
                "position": current.position,
                "exact": current.exact,
            }
        sent_s = time.monotonic()
        head, piece = self._call("synchronize", shard=self.shard, wait_s=wait_s, **message)
        if piece.get("quiet"):
            if current is not None:
                current.confirm(sent_s)
                self._report_progress()
            return False
        if piece.get("anew"):
            self._start_copy(head, piece)
            return True
        if piece.get("keep") and current is not None and current is self._whole:
            self._keep(current, head.epoch, piece)
            return True
        if current is None:
            raise ShardAway(f"{self._connection.name} sent changes to a copy that is not here.")
        self._apply(current, head.epoch, piece)
        current.confirm(sent_s)
        self._serial = int(piece["serial"])
        if current.whole and current is self._making:
            with self._lock:
                self._whole, self._making = current, None
        self._report_progress()
        return not piece.get("whole")

    def _stream(self) -> None:
        """Receive changes as they come, until the primary ends that."""
        copy = self._whole
        if copy is None or self._making is not None:
            return
        message: Piece = {
            "shard": self.shard,
            "mine": self._mine,
            "epoch": copy.epoch,
            "known": max(copy.epoch, self.epoch_min),
            "serial": self._serial,
            "replays": REPLAYS,
        }
        _, answer = self._call("stream", **message)
        if not answer["streams"]:
            self._may_stream = bool(answer.get("ever", True))
            return
        self._serial = -1  # how far it has come is its position, from here on
        base, position = int(answer["base"]), copy.position - int(answer["base"])
        fd, spin_us = self._connection.fileno(), self._spin_us
        receiver = ChangeReceiver(fd, copy.start_stream(), spin_us=spin_us)
        with self._receiver_lock:
            self._receiver = receiver
        try:
            self._receive(copy, receiver, base, position)
        finally:
            with self._receiver_lock:
                self._receiver = None

    def _receive(
        self, copy: ShardReplica, receiver: ChangeReceiver, base: int, position: int
    ) -> None:
        while not self._worker.stop.requested:
            changes = receiver.receive(WAIT_S)
            with self._lock:  # a fence comes before or after a message, not within
                if copy.epoch < self.epoch_min or (changes and changes.epoch != copy.epoch):
                    raise ShardAway(f"shard {self.of} has been restarted.")
                if changes is None or changes.ends:
                    copy.settle()
                else:
                    receiver.apply()
                    copy.streamed(changes, base)
            if changes is not None:
                if changes.ends:
                    return
                position = changes.position
                self._report_progress()
            else:
                receiver.acknowledge(position)

    def _start_copy(self, head: Head, piece: Piece) -> None:
        fresh = ShardReplica(self.of, head.epoch, self._resync_ids_max)
        fresh.take(piece)
        self._serial = -1  # if this copy is interrupted, the next one starts from scratch
        with self._lock:
            self._making = fresh
        cursor: Cursor | None = [0, 0]
        while cursor is not None and not self._worker.stop.requested:
            _, part = self._call("walk", shard=self.shard, cursor=cursor)
            self._apply(fresh, head.epoch, part)
            cursor = part["next"]
        if cursor is None:
            self._serial = int(piece["serial"])

    def _keep(self, replica: ShardReplica, epoch: int, piece: Piece) -> None:
        """Keep this copy: the primary resyncs it by difference."""
        with self._lock:
            if epoch < self.epoch_min or epoch < replica.epoch:
                raise ShardAway(f"shard {self.of} has another primary.")
            replica.epoch, self._serial = epoch, int(piece["serial"])
            replica.fresh_s, replica.complete_version = -math.inf, -1
            replica.history = History.decode(piece.get("history"))

    def _apply(self, replica: ShardReplica, epoch: int, piece: Piece) -> None:
        with self._lock:  # a fence comes before or after a piece, not within
            if epoch < self.epoch_min or epoch != replica.epoch:
                raise ShardAway(f"shard {self.of} has been restarted.")
            replica.take(piece)
