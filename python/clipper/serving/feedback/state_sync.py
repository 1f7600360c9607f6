"""Keeps the selection states of a server and those in its store alike: writes behind, and takes in
what other servers wrote.

What changed here is written in batches, a transaction each, at most once an interval. What others
wrote comes by a watch, so that a state that this server holds has the feedback of all of them
within the time of a write and of a message. Neither ever overwrites the other: each state in the
store records by server up to which of its observations it has learned, which shows what is new in
it, and what is new on both sides is merged (policy.merge over the state that both began with).
"""

import logging
import random
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from clipper.errors import StoreError
from clipper.serving.feedback.ended_servers import EndedServers
from clipper.serving.feedback.stored_state import LEFT_OUT, PREFIX, SHARED, Held, sealed
from clipper.store.store import (
    ABSENT,
    TXN_OPS_MAX,
    VALUE_BYTES_MAX,
    Compare,
    Get,
    Put,
    Record,
    Store,
    Watch,
)

if TYPE_CHECKING:
    from clipper.serving.feedback.states import Learner, States

_log = logging.getLogger(__name__)
BATCH_MAX: Final = TXN_OPS_MAX // 2  # states of a transaction: each is a comparison and a write
BATCH_BYTES_MAX: Final = 512 << 10
AGAIN_S_MIN, AGAIN_S_MAX = 0.1, 5.0  # between two tries to follow a store that is away

Key = tuple["Learner", str]


class Snapshot(msgspec.Struct, eq=False):
    """A state as it is to be written, over the one of that revision. upto: of each server, the
    number of its last observation that is in it."""

    learner: "Learner"
    user: str
    held: Held
    state: object
    upto: dict[str, int]
    revision: int
    data: bytes = b""


class StateSync:
    """Threads: any. Two of its own: one writes behind, one follows the store.

    write_s: between two writes.  follows: whether other servers may write to the store.  ended:
    leaves servers that have ended out of the states.
    """

    def __init__(
        self,
        states: "States",
        store: Store,
        write_s: float,
        follows: bool,
        ended: EndedServers | None,
    ) -> None:
        self._states, self._store, self._write_s, self._follows = states, store, write_s, follows
        self._ended = ended
        self._wake = threading.Event()
        self._closing = False
        self._flushing = threading.Lock()
        self.writes = False  # whether the thread that writes behind was started
        self._writer: threading.Thread | None = None
        self._follower: threading.Thread | None = None
        self._watch: Watch | None = None

    # -- writing behind

    def start_writing(self) -> None:
        """Start the thread that writes behind, if it does not run. The first observation does."""
        if self._writer is None:
            with self._states.lock:
                if self._writer is None and not self._closing:
                    self._writer = threading.Thread(
                        target=self._write_behind, name="clipper-states", daemon=True
                    )
                    self._writer.start()
                    self.writes = True

    def _write_behind(self) -> None:
        # by chance, so that servers that write at the same time do not always collide
        while not self._wake.wait(self._write_s * random.uniform(0.5, 1.0)):
            try:
                self.flush()
                if self._ended is not None and self._ended.is_due:
                    self.leave_out_ended()
            except StoreError as error:  # the journal has it all; the next round tries again
                _log.warning("selection states wait to be written: %s", error)
            except Exception:
                _log.exception("selection states could not be written")

    def flush(self) -> None:
        """Write every dirty state to the store, then forget what the journal need not keep.

        The shared states are written last, as they were before the first context was: a shared
        state in the store never knows of an observation before which a context began that is not
        there yet; in a replay that context would find it too old.
        """
        states = self._states
        if states.refusal:
            raise StoreError(states.refusal)
        with self._flushing:
            with states.lock:
                contexts = [key for key in states.dirty if key[1] != SHARED]
                shared = [self._snapshot(*key) for key in states.dirty if key[1] == SHARED]
                states.dirty.clear()
            left: dict[Key, None] = dict.fromkeys(
                [*contexts, *((each.learner, each.user) for each in shared)]
            )
            try:
                states.journal.commit(states.journal.last)
                for at in range(0, len(contexts), BATCH_MAX):
                    part = contexts[at : at + BATCH_MAX]
                    with states.lock:
                        batch = [self._snapshot(*key) for key in part]
                    self._write(batch, left)
                self._write(shared, left)
            finally:
                with states.lock:
                    states.dirty.update(left)
            with states.lock:
                waiting = [learner.held(user).since for learner, user in states.dirty]
                upto = min((n for n in waiting if n), default=states.journal.last + 1) - 1
                states.journal.forget(upto)
            if self._ended is not None:
                self._ended.write_learned(upto, at_once=self._closing)

    def leave_out_ended(self) -> None:
        """Take servers that have ended out of the states in memory, as the store has them; this
        server learns of that as all do. Raises StoreError."""
        if self._ended is None:
            return
        with self._states.lock:
            named = {key: (*held.applied,) for key, held in self._states.all()}
        ended = self._ended.read({name for names in named.values() for name in names})
        for key, names in named.items():
            if not ended.isdisjoint(names):
                self._ended.leave_out(key, ended)

    def complete(self, key: str, theirs: Held) -> None:
        """Find out which of this server's observations a state of the store has that does not name
        it. StoreError."""
        node = self._states.node
        if self._ended is not None and LEFT_OUT in theirs.applied and node not in theirs.applied:
            theirs.own = self._ended.number_in(key)
            self._states.journal.skip_to(theirs.own)
            if theirs.own:
                theirs.applied[node] = theirs.own

    def _snapshot(self, learner: "Learner", user: str) -> Snapshot:
        held = learner.held(user)
        return Snapshot(learner, user, held, held.state, dict(held.applied), held.revision)

    def _write(self, batch: Sequence[Snapshot], left: dict[Key, None]) -> None:
        """Write these states, in transactions of bounded size; what is done is taken out of
        `left`."""
        part: list[Snapshot] = []
        nbytes = 0
        for each in batch:
            if (
                self._states.node not in each.upto
            ):  # nothing to write at that moment: the store was not there
                self._merge(each, self._store.get(each.learner.key(each.user)))
                left.pop((each.learner, each.user), None)
                continue
            each.data = sealed(each.learner.policy, each.learner.models, each.upto, each.state)
            if len(each.data) > VALUE_BYTES_MAX:
                _log.error(
                    "a state of %r has %d bytes: it is not written",
                    each.learner.application,
                    len(each.data),
                )
                left.pop((each.learner, each.user), None)
                continue
            if part and (len(part) == BATCH_MAX or nbytes + len(each.data) > BATCH_BYTES_MAX):
                self._write_part(part, left)
                part, nbytes = [], 0
            part.append(each)
            nbytes += len(each.data)
        if part:
            self._write_part(part, left)

    def _write_part(self, part: list[Snapshot], left: dict[Key, None]) -> None:
        """Write states in one transaction. States that another server changed are merged and stay
        dirty; the rest is tried once more without them."""
        for _ in range(2):
            keys = [each.learner.key(each.user) for each in part]
            with self._states.lock:
                for (
                    each
                ) in part:  # until it is known whether this was written, and the watch has it
                    each.held.doubts[each.upto[self._states.node]] = each.state
            compares = [Compare(key, each.revision) for key, each in zip(keys, part, strict=True)]
            writes = [Put(key, each.data) for key, each in zip(keys, part, strict=True)]
            found = self._store.txn(compares, writes, [Get(key) for key in keys])
            if found.ok:
                for each, record in zip(part, found.results, strict=True):
                    self._is_written(each, record)
                    left.pop((each.learner, each.user), None)
                return
            same: list[Snapshot] = []
            for each, record in zip(part, found.results, strict=True):
                if (record.revision if record else ABSENT) == each.revision:
                    same.append(each)
                else:
                    self._merge(each, record)
                    left.pop((each.learner, each.user), None)
            part = same
            if not part:
                return

    def _is_written(self, each: Snapshot, record: Record | None) -> None:
        with self._states.lock:
            held, number = each.held, each.upto[self._states.node]
            held.doubts.clear()
            if (
                record is not None and record.revision > held.revision
            ):  # else somebody wrote after it, and that is here already
                held.base, held.revision, held.own = each.state, record.revision, number
            held.since = (
                0
                if held.applied.get(self._states.node, 0) <= number
                else max(held.since, number + 1)
            )

    # -- what others wrote

    def _merge(self, each: Snapshot, record: Record | None) -> None:
        """Merge a state with that of the store, which this server did not write.

        Either another server did; or the answer to a write was lost, or the store was killed and
        knows less than before: then the state that is here has it all.
        """
        learner, user = each.learner, each.user
        theirs = learner.read(record) if record else None
        if theirs is not None:
            self.complete(learner.key(user), theirs)
        with self._states.lock:
            held = learner.held(user)
            if held.revision != each.revision:  # another one has been taken in meanwhile
                self._states.dirty[(learner, user)] = None
            elif theirs is not None:
                self._take_in(learner, user, held, theirs)
            else:
                if held.prior is None:
                    self._states.dirty[(learner, user)] = None
                held.doubts.clear()
                held.revision = record.revision if record else ABSENT

    def _take_in(self, learner: "Learner", user: str, held: Held, theirs: Held) -> None:
        """Learn what is new in a state of the store. Under the lock of the states."""
        if held.prior is not None:  # nothing of its own
            held.state = held.base = theirs.state
            held.applied, held.revision = theirs.applied, theirs.revision
            held.prior, held.own = None, theirs.own
            return
        known = held.applied
        if _left_out(theirs) > _left_out(held):  # it has learned all of those that it names no more
            known = {
                node: number
                for node, number in known.items()
                if node in theirs.applied or (held.since and node == self._states.node)
            }
        is_older = _left_out(theirs) < _left_out(held)  # and may name servers that have left here
        has_news = (
            any(
                number > known.get(node, number if is_older else 0)
                for node, number in theirs.applied.items()
            )
            or held.own < theirs.own < held.since
        )
        lacks = any(number > theirs.applied.get(node, 0) for node, number in known.items())
        if has_news:
            base = held.doubts.get(theirs.own, held.base)
            held.state = (
                learner.policy.merge(base, held.state, theirs.state) if lacks else theirs.state
            )
        held.applied = {
            node: max(known.get(node, 0), theirs.applied.get(node, 0))
            for node in {*theirs.applied, *known}
        }
        held.base, held.revision, held.own = theirs.state, theirs.revision, theirs.own
        held.doubts.clear()
        if lacks:
            self._states.dirty[(learner, user)] = None
        else:
            held.since = 0

    # -- following the store

    def start_following(self) -> None:
        """Start the thread that follows what other servers write, if there may be any and it does
        not run."""
        with self._states.lock:
            if self._follows and self._follower is None and not self._closing:
                self._follower = threading.Thread(
                    target=self._follow, name="clipper-states-watch", daemon=True
                )
                self._follower.start()

    def _follow(self) -> None:
        again_s = AGAIN_S_MIN
        while not self._closing:
            try:
                with_watch = self._watch = self._store.watch(PREFIX)
                if self._closing:
                    with_watch.close()
                self._read_all()
                again_s = AGAIN_S_MIN
                self._receive(with_watch)
            except StoreError as error:
                if not self._closing:
                    _log.info("what other servers learn cannot be read: %s", error)
            except Exception:
                _log.exception("a selection state of another server could not be taken in")
            if self._wake.wait(again_s):
                return
            again_s = min(2 * again_s, AGAIN_S_MAX)

    def _receive(self, watch: Watch) -> None:
        while not self._closing and not watch.closed:
            event = watch.next(1.0)
            if event is None:
                continue
            if event.kind == "RESET":
                self._read_all()
            elif event.kind == "PUT" and event.record is not None:
                self._came(event.record)

    def _came(self, record: Record, has_lost: bool = False) -> None:
        """Take in a record of the store. has_lost: whether the store has lost some of its history,
        so that it may be older than what is known."""
        states = self._states
        with states.lock:
            for learner, user in states.holders(record.key):
                held = learner.held(user)
                if record.revision == held.revision or (
                    record.revision < held.revision and not has_lost
                ):
                    continue
                theirs = learner.read(record)
                if theirs is None:
                    continue
                if (
                    held.since
                    and states.node not in theirs.applied
                    and _left_out(theirs) > _left_out(held)
                ):
                    states.dirty[(learner, user)] = None  # who writes it finds out what it has
                else:
                    self._take_in(learner, user, held, theirs)

    def _read_all(self) -> None:
        """Look at all states that are held: changes may have been missed."""
        with self._states.lock:
            keys = list(dict.fromkeys(key for key, _ in self._states.all()))
        for at in range(0, len(keys), BATCH_MAX):
            with self._states.lock:  # before it is read: this server may write meanwhile
                known = max((held.revision for _, held in self._states.all()), default=ABSENT)
            found = self._store.txn((), [Get(key) for key in keys[at : at + BATCH_MAX]])
            for record in found.results:
                if record is not None:
                    self._came(record, found.revision < known)
            if self._closing:
                return

    def close(self) -> None:
        """Write what is not written yet. Idempotent."""
        with self._states.lock:
            self._closing = True
        self._wake.set()
        if self._watch is not None:
            self._watch.close()
        for thread in (self._writer, self._follower):
            if thread is not None:
                thread.join()


def _left_out(held: Held) -> int:
    """Return how often servers that have ended were left out of a state."""
    return held.applied.get(LEFT_OUT, 0)
