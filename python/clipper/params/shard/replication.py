"""Replicas: a follower asks its primary what has changed, over and over, and has a copy of whole
rows.

Source: the parameter server's design document, "Embedding Replica" (shard i's replicas are in
shards i+1 .. i+M; they pull), with three differences: rows come with their optimizer's state, with
the version and the pushes seen; a primary has a place in its log for each follower, not a set that
one of them clears for all; each life of a shard has an epoch, and followers refuse lower ones.

Replies have serial numbers, for each follower its own. One that asks with the last serial has all
of it; with the one before, it did not hear the answer, which is then said again; with any other it
begins anew: a walk through everything, then what changed meanwhile. The old copy is kept until the
new one is whole. Changed rows are read while pushes wait (`still`), so that a copy agrees with the
pushes that it says it has seen; where too much has changed for that, they are read beside pushes,
and such a copy agrees after the next reply.

Pushes do not wait for a follower that walks through much: it catches up beside them, and they wait
for it again from the reply on that makes its copy whole. Until then the shard is exposed, and says
so. The follower from whose copy a relaunched shard has recovered keeps it: it is told what has
changed since.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from clipper.errors import ClipperError, ShardAway
from clipper.params.client.connection import ShardConnection, call
from clipper.params.frames import Head, Kind, packed, refusal, unpacked
from clipper.params.shard.change_log import ChangeLog, History, PrimaryLog, ids_in, union
from clipper.params.shard.parameters import DENSE, Ids, Parameters, Piece
from clipper_core.params.shard_door import ShardDoor

log = logging.getLogger("clipper.params")
STILL_BYTES_MAX = 4 << 20  # read while pushes wait: about a millisecond
ROUNDS_MAX = 4  # of changes read beside pushes, before a new copy is made whole while they wait
WAIT_S = 0.5  # of a long poll
SILENT_S = (
    3.0  # of a follower that is not whole: then pushes wait for it, until it is heard or given up
)
REPLICAS_MAX = 7
ANEW = {"anew": True}


class Origin(NamedTuple):
    """The replica that a shard has recovered from: in which shard, of which epoch and version."""

    shard: int
    epoch: int
    version: int


@contextlib.contextmanager
def pushes_paused(door: ShardDoor) -> Iterator[None]:
    """Pushes wait."""
    door.hold()
    try:
        yield
    finally:
        door.resume()


def call_once(connection: ShardConnection, name: str, **fields: Any) -> tuple[Head, Piece]:
    """One call to another shard, once. Raises OSError, and what it refuses with."""
    ask = call(name, **fields)
    connection.send(ask)
    head = connection.wait(ask)
    if head.kind != Kind.ANSWER:
        raise refusal(head, ask.body, connection.name)
    return head, unpacked(ask.body)


# -- at the primary


class FollowerState:
    """One follower, as its primary sees it. Threads: the answering one.

    life: its own epoch.  left: pushes do not wait for it any more, until it has all again.
    lacking_s: since when it has no whole copy, while it has none. slot: its number in the log.
    serial: of the last reply.  position: what has been told it.  asked: whom to answer, while
    nothing changes, and until when.
    """

    def __init__(
        self,
        slot: int,
        shard: int,
        waited: bool,
        door: ShardDoor,
        parameters: Parameters,
        changes: PrimaryLog,
    ) -> None:
        self.slot, self.shard, self.waited = slot, shard, waited
        self._door, self._parameters, self._changes = door, parameters, changes
        self.on = self.left = False
        self.life = 0
        self.heard_s = 0.0
        self.lacking_s = time.monotonic()
        self.serial = 0
        self.position = 0
        self.acknowledged = 0
        self.asked: tuple[Any, float] | None = None
        self._last: bytes | None = None
        self._backlog: list[dict[int, Ids] | Piece] = []
        self._rest: Piece = {}  # the end of the backlog, with what goes with it
        self._end = 0
        self._whole = self._exact = self._confirmed = False
        self._rounds = 0
        self._origin: Origin | None = None
        self._missed: dict[int, Ids] | None = None

    def start(self, now: float, origin: Origin | None) -> None:
        """Before the first change: pushes wait for it from now on, wherever it is. origin: the
        replica that all is from."""
        self.heard_s = now
        self._origin = origin if origin is not None and origin.shard == self.shard else None
        if self.waited:
            self._door.follow(self.slot, waited=True)

    def resume(self, said: Piece) -> Piece | None:
        """Start a resync by difference: the follower keeps its copy, and is told the rows that
        have changed since.

        Return None if all must be copied: its copy is not an earlier state of this shard, or the
        log of changes does not reach back to it. A copy of an earlier epoch must be exact (its rows
        are those of its position, none is newer), or the one that this shard recovered from.
        """
        origin, self._origin = self._origin, None
        epoch, position = int(said.get("epoch", 0)), int(said.get("position", -1))
        is_origin = origin is not None and (epoch, said.get("version")) == origin[1:]
        if not said.get("keeps") or not (
            is_origin or said.get("exact") or epoch == self._door.epoch
        ):
            return None
        with pushes_paused(self._door):
            missed = self._changes.since(epoch, position)
            if missed is None:
                return None
            few = self._parameters.size_of(missed) <= STILL_BYTES_MAX
            self._follow(few)
            self._missed = missed
        return {"keep": True, "serial": self.serial, "history": self._changes.history.encode()}

    def _follow(self, few: bool) -> None:
        """It is told all changes from now on. few: what it lacks is little, so pushes wait for it
        from now on; else when it has caught up."""
        if self.is_whole:
            self.lacking_s = time.monotonic()
        self._door.follow(self.slot, waited=self.waited and few)
        self.on, self.serial, self._last, self._backlog = True, self.serial + 1, None, []
        self.acknowledged = self.position = self._rounds = 0
        self._whole = self._exact = self._confirmed = False
        self._missed = None

    def begin(self) -> Piece:
        """It has nothing: what is known without rows, and from here on all changes. While it walks
        through more than is read at once, pushes do not wait for it."""
        self._follow(self._parameters.row_bytes <= STILL_BYTES_MAX)
        with pushes_paused(self._door):
            seen = self._door.pushes_seen()
            return {
                **ANEW,
                **self._parameters.shape(),
                "serial": self.serial,
                "seen": seen,
                "version": self._door.version,
                "history": self._changes.history.encode(),
            }

    def leave(self) -> None:
        self._origin = None
        if self.is_whole:
            self.lacking_s = time.monotonic()
        self.on, self.left, self.asked, self._last = False, True, None, None
        self._door.unfollow(self.slot)

    def receive(self, serial: int) -> bytes | None:
        """It asks. -> what to say again, or None; LookupError when it must begin anew."""
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
            self.left = False
            if self.acknowledged < self.position:
                self.acknowledged = self.position
                self._door.acknowledge(self.slot, self.position)
        return None

    def expect(self) -> None:
        """Pushes wait for it from now on."""
        if self.waited and self.on:
            self._door.wait_for(self.slot)

    @property
    def is_whole(self) -> bool:
        """It has a whole copy, and has said so."""
        return self.on and self._confirmed

    @property
    def has_changes(self) -> bool:
        if self._backlog or not self._whole or not self._exact:
            return True
        return self._door.position != self.position

    def next_reply(self) -> bytes | None:
        """The next reply, where something has changed. None: it fell too far behind."""
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
        with pushes_paused(self._door):
            found = self._door.changed(self.slot)
            if found is None:
                return None
            position, changed, told = found
            seen = {}
            if self._missed is not None:
                changed, self._missed = union([self._missed, changed]), None
                seen = {"seen": self._door.pushes_seen()}
            few = self._parameters.size_of(changed) <= STILL_BYTES_MAX
            self._rounds += 1
            must = not few and not self._whole and self._rounds > ROUNDS_MAX
            if few or self._rounds >= ROUNDS_MAX:
                self.expect()  # so that the next round is a small one
            after = {
                **self._parameters.shape(),
                "version": self._door.version,
                "told": [n for pair in told for n in pair],
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
        return {"tables": self._rest["tables"], **piece, "whole": False}


class FollowerSet:
    """Those of one shard. Threads: the answering one.

    answer: (whom, payload) at once.  now: seconds.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        replicas: int,
        *,
        waited: bool,
        door: ShardDoor,
        parameters: Parameters,
        changes: PrimaryLog,
        answer: Callable[[Any, bytes], None],
    ) -> None:
        self._shard, self._shards, self._answer, self._door = shard, shards, answer, door
        self.each = [
            FollowerState(k, (shard + 1 + k) % shards, waited, door, parameters, changes)
            for k in range(min(replicas, shards - 1))
        ]

    def expect(self, now: float, origin: Origin | None = None) -> None:
        """Before the first push: those that are waited for are waited for from now on, wherever
        they are. origin: the replica that all is from."""
        for one in self.each:
            one.start(now, origin)

    def of(self, shard: int) -> FollowerState | None:
        return next((one for one in self.each if one.shard == shard), None)

    def synchronize(self, said: Piece, call_id: Any, now: float) -> bytes | None:
        """The answer to a follower, or None: later."""
        one = self.of(int(said.get("shard", -1)))
        if one is None:
            raise ClipperError(f"shard {said.get('shard')} has no replica of shard {self._shard}.")
        life = int(said.get("mine", 0))
        if life < one.life:
            raise ShardAway(f"shard {one.shard} of epoch {life} has ended: epoch {one.life} lives.")
        if one.asked is not None:
            self._answer(one.asked[0], packed({"serial": one.serial, "quiet": True}))
        one.life, one.heard_s, one.asked = life, now, None
        if int(said.get("epoch", 0)) != self._door.epoch:
            return packed(one.resume(said) or one.begin())
        try:
            again = one.receive(int(said.get("serial", -1)))
        except LookupError:
            return packed(one.resume(said) or one.begin())
        if again is not None:
            return again
        if one.has_changes:
            return one.next_reply() or packed(one.begin())
        wait_s = min(float(said.get("wait_s", 0.0)), 10 * WAIT_S)
        if wait_s <= 0:
            return packed({"serial": one.serial, "quiet": True})
        one.asked = (call_id, now + wait_s)
        return None

    def look(self, now: float) -> None:
        """Those who wait for news have it, or wait no more."""
        for one in self.each:
            if not one.is_whole and one.asked is None and now - one.heard_s > SILENT_S:
                one.expect()
            if one.asked is None:
                continue
            call_id, until = one.asked
            if one.has_changes:
                one.asked, one.heard_s = None, now
                self._answer(call_id, one.next_reply() or packed(one.begin()))
            elif now >= until:
                one.asked, one.heard_s = None, now
                self._answer(call_id, packed({"serial": one.serial, "quiet": True}))

    @property
    def exposed(self) -> bool:
        """Whether some follower has no whole copy: what is here would be lost, or set back, by the
        death of this shard."""
        return not all(one.is_whole for one in self.each)

    def away(self, now: float, patience_s: float) -> list[FollowerState]:
        """Those that pushes wait for, and that have said nothing for so long."""
        waited = (
            one
            for one in self.each
            if one.waited and one.asked is None and (one.on or not one.left)
        )
        return [one for one in waited if now - one.heard_s > patience_s]


# -- at the follower


class Replica:
    """A copy of one shard. Threads: its follower's, and whoever has fenced it off.

    epoch: of the life it is a copy of.  whole: it has been all that its primary was, at one moment.
    position, history: how far it has come; -1 while it is not whole.  exact: no row is newer than
    its position.  changes: what it has been told lately, for a primary that recovers.
    """

    def __init__(self, shard: int, epoch: int, resync_ids_max: int = 0) -> None:
        self.shard, self.epoch = shard, epoch
        self.parameters = Parameters()
        self.version = 0
        self.whole = self.exact = False
        self.position = -1
        self.history = History()
        self.changes = ChangeLog(resync_ids_max)
        self._difference: tuple[int, list[dict[int, Ids]]] = (-1, [])
        self._seen = ShardDoor()  # for its memory of pushes alone

    @classmethod
    def loaded(
        cls, shard: int, epoch: int, pieces: Iterable[Piece], resync_ids_max: int
    ) -> "Replica":
        """Return the copy that was saved as `pieces`; a position is among them."""
        copy, piece = cls(shard, epoch, resync_ids_max), Piece()
        for piece in pieces:
            copy.take(piece)
        copy.whole, copy.exact = copy.position >= 0, bool(piece.get("exact", True))
        copy.changes.restart(copy.position)
        return copy

    def saved(self) -> Iterator[Piece]:
        """Return the pieces to save; the copy must stand still meanwhile."""
        yield from self.parameters.pieces()
        yield {
            "version": self.version,
            "seen": self.pushes_seen(),
            "position": self.position,
            "history": self.history.encode(),
            "exact": self.exact,
        }

    def take(self, piece: Piece) -> None:
        self._difference = (-1, [])
        self.parameters.take(piece)
        for worker, window in piece.get("seen", {}).items():
            self._seen.saw(worker, window)
        told = piece.get("told", [])
        for worker, sequence in zip(told[::2], told[1::2], strict=True):
            if not self._seen.look(worker, sequence):
                self._seen.note(DENSE, np.empty(0, np.int64), worker, sequence)
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

    def difference(self, since: int, number: int) -> tuple[Piece, int | None]:
        """Return a piece of what has changed since a position, and the number of the next.

        The copy must stand still meanwhile. Raises ClipperError if that is not known.
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
        return self._seen.pushes_seen()


class ReplicaFollower:
    """Keeps a replica of one shard. Threads: its own, and any for `replica` and `fence`.

    line: to the primary.  period_s: between two looks; 0: all the time.  load: the newest copy
    that is on disk.  resync_ids_max: changed ids that a copy remembers.
    """

    def __init__(
        self,
        shard: int,
        of: int,
        connection: ShardConnection,
        period_s: float,
        *,
        load: Callable[[], Replica | None] = lambda: None,
        resync_ids_max: int = 0,
    ) -> None:
        self.shard, self.of, self._connection, self._period_s = shard, of, connection, period_s
        self._load, self._resync_ids_max = load, resync_ids_max
        self._lock = threading.Lock()
        self._whole: Replica | None = None
        self._making: Replica | None = None
        self.epoch_min = 0  # what is of a lower epoch is refused
        self._serial = -1
        self._mine = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"clipper-follower-{of}", daemon=True
        )

    def start(self, mine: int) -> None:
        """mine: this shard's own epoch."""
        self._mine = mine
        self._thread.start()

    def stop(self) -> None:
        """Within a long poll."""
        self._stop.set()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def replica(self) -> Replica | None:
        with self._lock:
            return self._whole

    def fence(self, epoch: int) -> int:
        """Shard `of` lives anew: from here on only `epoch` and what comes after it is heard. -> the
        highest known; if that is not less than `epoch`, it is refused."""
        with self._lock:
            known = max(
                self.epoch_min,
                self._whole.epoch if self._whole else 0,
                self._making.epoch if self._making else 0,
            )
            if epoch > known:
                self.epoch_min = epoch
            return known

    def _run(self) -> None:
        self.load()
        while not self._stop.is_set():
            try:
                next_reply = self._once()
                if self._period_s and not next_reply:
                    self._stop.wait(self._period_s)
            except (OSError, ClipperError) as error:
                log.debug("replica of shard %d: %s", self.of, error)
                self._connection.close()
                self._drop()
                self._stop.wait(0.03)
            except Exception:
                log.exception("replica of shard %d: begins anew", self.of)
                self._connection.close()
                self._drop(self._making or self._whole)
                self._stop.wait(0.5)
        self._connection.close()

    def load(self) -> None:
        """Begin with the copy that is on disk, if there is one."""
        try:
            copy = self._load()
        except (OSError, ClipperError, ValueError, KeyError) as error:
            log.warning("the saved copy of shard %d is not used: %s", self.of, error)
            return
        with self._lock:
            self._whole = self._whole or copy

    def _drop(self, broken: Replica | None = None) -> None:
        """A copy that was being made; and one that is broken."""
        with self._lock:
            if self._making is not None or broken is not None:
                self._serial = -1  # it was that of what is dropped
            self._making = None
            if broken is not None:
                self._whole = None if self._whole is broken else self._whole

    def _ask(self, name: str, **fields: Any) -> tuple[Head, Piece]:
        head, piece = call_once(self._connection, name, **fields)
        with self._lock:
            if head.epoch < self.epoch_min:
                raise ShardAway(
                    f"{self._connection.name} is of epoch {head.epoch}, and its successor of"
                    f" {self.epoch_min}."
                )
        return head, piece

    def _once(self) -> bool:
        """One question. -> whether there may be more to ask at once"""
        current = self._making or self._whole
        wait_s = 0.0 if self._period_s else WAIT_S
        epoch = current.epoch if current else 0
        said: Piece = {
            "mine": self._mine,
            "epoch": epoch,
            "known": max(epoch, self.epoch_min),
            "serial": self._serial,
        }
        if current is not None and current is self._whole:
            said |= {"keeps": True, "version": current.version}
            said |= {"position": current.position, "exact": current.exact}
        head, piece = self._ask("synchronize", shard=self.shard, wait_s=wait_s, **said)
        if piece.get("quiet"):
            return False
        if piece.get("anew"):
            self._begin(head, piece)
            return True
        if piece.get("keep") and current is not None and current is self._whole:
            self._keep(current, head.epoch, piece)
            return True
        if current is None:
            raise ShardAway(f"{self._connection.name} speaks of changes to what is not here.")
        self._apply(current, head.epoch, piece)
        self._serial = int(piece["serial"])
        if current.whole and current is self._making:
            with self._lock:
                self._whole, self._making = current, None
        return not piece.get("whole")

    def _begin(self, head: Head, piece: Piece) -> None:
        fresh = Replica(self.of, head.epoch, self._resync_ids_max)
        fresh.take(piece)
        self._serial = -1  # whatever ends this walk: it begins anew
        with self._lock:
            self._making = fresh
        cursor: Any = [0, 0]
        while cursor is not None and not self._stop.is_set():
            _, part = self._ask("walk", shard=self.shard, cursor=cursor)
            self._apply(fresh, head.epoch, part)
            cursor = part["next"]
        if cursor is None:
            self._serial = int(piece["serial"])

    def _keep(self, replica: Replica, epoch: int, piece: Piece) -> None:
        """The primary resyncs this copy by difference."""
        with self._lock:
            if epoch < self.epoch_min or epoch < replica.epoch:
                raise ShardAway(f"shard {self.of} has another primary.")
            replica.epoch, self._serial = epoch, int(piece["serial"])
            replica.history = History.decode(piece.get("history"))

    def _apply(self, replica: Replica, epoch: int, piece: Piece) -> None:
        with self._lock:  # so that a fence falls before or after it
            if epoch < self.epoch_min or epoch != replica.epoch:
                raise ShardAway(f"shard {self.of} lives anew")
            replica.take(piece)
