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
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import InvalidInput, StoreError
from clipper.serving.feedback.ended_servers import EndedServers
from clipper.serving.feedback.stored_state import LEFT_OUT, PREFIX, SHARED, publish, sealed
from clipper.store.follower import Follower
from clipper.store.store import (
    ABSENT,
    TXN_OPS_MAX,
    VALUE_BYTES_MAX,
    Compare,
    Event,
    Get,
    Put,
    Record,
    Store,
)
from clipper_core.learning.policy_states import Held

if TYPE_CHECKING:
    from clipper.serving.feedback.states import Learner, States

_log = logging.getLogger(__name__)
BATCH_MAX: Final = TXN_OPS_MAX // 2  # states of a transaction: each is a comparison and a write
BATCH_BYTES_MAX: Final = 512 << 10
LOGGED_EVERY: Final = 1000  # states of a learner that cannot be written, between two in the log
LOOK_S: Final = 2.0  # between two looks whether the store still has what was written
WAITING_LOGGED_S: Final = 60.0  # between two warnings that the states wait

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


class StoreTrust(Protocol):
    """The interface of what knows whether the store is the one of before: the catalog."""

    def require_same_store(self) -> None:
        """Raise StoreError if the store came back empty, older or as another one."""


class StateSync:
    """Writes states to the store and merges those of other servers. Threads: any. It has two of its
    own: one writes, one follows the store.

    write_s: between two writes.  follows: whether other servers may write to the store.  ended:
    leaves servers that have ended out of the states.  trust: knows whether the store is the
    one of before; None: it always is.
    """

    def __init__(
        self,
        states: "States",
        store: Store,
        write_s: float,
        follows: bool,
        ended: EndedServers | None,
        trust: "StoreTrust | None" = None,
    ) -> None:
        self._states, self._store, self._write_s, self._follows = states, store, write_s, follows
        self._ended = ended
        self._trust = trust
        self._waited = 0  # tries to write that failed in a row
        self._logged_s = 0.0  # when that was last logged
        self._closing = False
        self._flushing = threading.Lock()
        self._written = ABSENT  # newest revision that this server has written
        self._seen = ABSENT  # newest revision that its watch has told
        self._looked_s = 0.0
        self._unwritten: dict[Learner, int] = {}  # how often one of its states was not written
        self.writes = False  # whether the thread that writes behind was started
        self._writer: Worker | None = None
        self._follower: Follower | None = None

    # -- writing behind

    def start_writing(self) -> None:
        """Start the thread that writes behind, if it does not run. The first observation does."""
        if self._writer is None:
            with self._states.lock:
                if self._writer is None and not self._closing:
                    writer = Worker("clipper-states", self._write_behind, again=Backoff())
                    writer.start()
                    self._writer, self.writes = writer, True

    def health(self) -> list[Health]:
        """Return the states of the threads that were started."""
        return [thread.health() for thread in (self._writer, self._follower) if thread is not None]

    def _write_behind(self, stop: Stop) -> None:
        # by chance, so that servers that write at the same time do not always collide
        while not stop.wait(self._write_s * random.uniform(0.5, 1.0)):
            try:
                self.flush()
                if self._ended is not None and self._ended.is_due:
                    self.leave_out_ended()
            except StoreError as error:  # the journal has it all; the next round tries again
                self._wait_for_store(error)
            except Exception:
                _log.exception("selection states could not be written")
            else:
                self._has_written()

    def _wait_for_store(self, error: StoreError) -> None:
        """Log that the states wait: the first time, then once in WAITING_LOGGED_S."""
        now_s = self._store.threads.now_s()
        if not self._waited or now_s - self._logged_s >= WAITING_LOGGED_S:
            tried = f" after {self._waited} tries" if self._waited else ""
            _log.warning("selection states wait to be written%s: %s", tried, error)
            self._logged_s = now_s
        self._waited += 1

    def _has_written(self) -> None:
        if self._waited:
            _log.info("selection states are written again, after %d tries", self._waited)
        self._waited = 0

    def flush(self) -> None:
        """Write every dirty state to the store, then forget what the journal need not keep.

        The shared states are written last, as they were before the first context was: a shared
        state in the store never knows of an observation before which a context began that is not
        there yet; in a replay that context would find it too old.
        """
        states = self._states
        if states.refusal:
            raise StoreError(states.refusal)
        if self._trust is not None:
            self._trust.require_same_store()
        with self._flushing:
            with states.lock:
                # one key of the store once, whichever settings it was learned with
                dirty = dict.fromkeys((states.newest(of), user) for of, user in states.take_dirty())
                contexts = [key for key in dirty if key[1] != SHARED]
                shared = [self._snapshot(*key) for key in dirty if key[1] == SHARED]
            left: dict[Key, None] = dict.fromkeys(
                [*contexts, *((each.learner, each.user) for each in shared)]
            )
            try:
                states.journal.commit(states.journal.last)
                self._list_sets(shared)
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

    def _list_sets(self, shared: Sequence[Snapshot]) -> None:
        """List the sets of models that have their first feedback: the one with the oldest first."""
        for each in sorted(shared, key=_since):
            learner = each.learner
            if not learner.learns or learner.sets.is_listed(learner.models):
                continue
            try:
                record = learner.sets.add(self._store, learner.models)
            except InvalidInput as error:  # of the key; the states are written all the same
                _log.error("a set of models of %r is not listed: %s", learner.application, error)
                continue
            with self._states.lock:
                learner.sets.read(record)

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
        for snapshot in batch:
            each = self._sealed(snapshot)
            if each is None:
                left.pop((snapshot.learner, snapshot.user), None)
                continue
            if part and (len(part) == BATCH_MAX or nbytes + len(each.data) > BATCH_BYTES_MAX):
                self._write_part(part, left)
                part, nbytes = [], 0
            part.append(each)
            nbytes += len(each.data)
        if part:
            self._write_part(part, left)

    def _sealed(self, each: Snapshot) -> Snapshot | None:
        """Return a state with its bytes; None if there is nothing to write, or if it cannot be
        written, which is logged. Raises StoreError."""
        learner, user = each.learner, each.user
        try:
            if each.held.is_late:
                self._states.catch_up(learner, user, each.held)
                with self._states.lock:
                    each = self._snapshot(learner, user)
            if self._states.node not in each.upto:
                # it began while the store was not there; or the store has lost what others wrote
                record = self._store.get(learner.key(user))
                if record is not None or not each.upto or each.revision != ABSENT:
                    self._merge(each, record)
                    return None
            each.data = sealed(learner.policy, learner.models, each.upto, each.state)
            if len(each.data) > VALUE_BYTES_MAX:
                raise ValueError(f"it has {len(each.data)} bytes: at most {VALUE_BYTES_MAX}")
        except StoreError:
            raise
        except Exception:  # of the policy: the store keeps the state that it has
            count = self._unwritten[learner] = self._unwritten.get(learner, 0) + 1
            if count % LOGGED_EVERY == 1:
                _log.exception(
                    "a state of %r is not written, by policy %r (%d times so far)",
                    learner.application,
                    learner.text,
                    count,
                )
            return None
        return each

    def _write_part(self, part: list[Snapshot], left: dict[Key, None]) -> None:
        """Write states in one transaction. States that another server changed are merged and stay
        dirty; the rest is tried once more without them."""
        for _ in range(2):
            keys = [each.learner.key(each.user) for each in part]
            with self._states.lock:
                for each in part:
                    # until it is known whether this was written, and the watch has it
                    each.held.doubts[each.upto.get(self._states.node, 0)] = each.state
            compares = [Compare(key, each.revision) for key, each in zip(keys, part, strict=True)]
            writes = [Put(key, each.data) for key, each in zip(keys, part, strict=True)]
            try:
                found = self._store.txn(compares, writes, [Get(key) for key in keys])
            except InvalidInput as error:  # of a key; the others are written without it
                self._write_alone(part, left, error)
                return
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

    def _write_alone(
        self, part: list[Snapshot], left: dict[Key, None], error: InvalidInput
    ) -> None:
        """Write states that the store refuses to write together, each alone."""
        if len(part) == 1:
            _log.error("a state of %r is not written: %s", part[0].learner.application, error)
            left.pop((part[0].learner, part[0].user), None)
            return
        for each in part:
            self._write_part([each], left)

    def _is_written(self, each: Snapshot, record: Record | None) -> None:
        with self._states.lock:
            held, number = each.held, each.upto.get(self._states.node, 0)
            held.doubts.clear()
            if record is not None:
                self._written = max(self._written, record.revision)
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
            held.publish(theirs.state)
            held.base = theirs.state
            held.applied, held.revision = theirs.applied, theirs.revision
            held.prior, held.origin = None, None
            held.own = theirs.own
            self._states.has_started(learner, user)
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
            publish(held, learner.merged(base, held.state, theirs.state) if lacks else theirs.state)
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
                self._follower = Follower(
                    self._store,
                    PREFIX,
                    self,
                    name="clipper-states-watch",
                    accepts=None if self._trust is None else self._trust.require_same_store,
                    reads_itself=True,
                )
                self._follower.start()

    # -- a sink of the follower

    @property
    def known(self) -> int:
        """Return 0: deleted states stay in memory."""
        return 0

    def begin(self, stop: Stop) -> bool:
        """Follow again, unless this is closing."""
        return not self._closing

    def reset(self, records: Sequence[Record], revision: int) -> None:
        """Check all states in memory: changes may have been missed."""
        self._seen = min(self._seen, revision)
        with self._states.lock:
            self._written = min(self._written, revision)
            keys = [*self._states.lists(), *(key for key, _ in self._states.all())]
            self._states.check_origins_again()
        for at in range(0, len(keys), BATCH_MAX):
            with self._states.lock:  # before it is read: this server may write meanwhile
                known = max((held.revision for _, held in self._states.all()), default=ABSENT)
            part = keys[at : at + BATCH_MAX]
            found = self._store.txn((), [Get(key) for key in part])
            for key, record in zip(part, found.results, strict=True):
                if record is not None:
                    self._came(record, found.revision < known)
                else:
                    self._is_gone(key)
            if self._closing:
                return

    def changed(self, events: Sequence[Event]) -> None:
        """Merge what other servers have written."""
        for event in events:
            self._seen = max(self._seen, event.revision)
            if event.record is not None and not self._closing:
                self._came(event.record)

    def poll(self) -> None:
        """Look from time to time whether the store still has what this server wrote last and its
        watch has not told yet: the watch does not know that it is gone."""
        now_s = self._store.threads.now_s()
        if self._written <= self._seen or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        revision = self._store.revision
        if revision < self._written:
            if self._trust is not None:
                self._trust.require_same_store()
            self.reset((), revision)

    def _is_gone(self, key: str) -> None:
        """Write a state again that the store has lost: no server deletes one."""
        with self._states.lock:
            self._states.forget_list(key)
            for learner, user in self._states.holders(key):
                if learner.held(user).revision != ABSENT:
                    self._states.dirty[(learner, user)] = None
                    self._states.start_writing()

    def _came(self, record: Record, has_lost: bool = False) -> None:
        """Take in a record of the store. has_lost: whether the store has lost some of its history,
        so that it may be older than what is known."""
        states = self._states
        with states.lock:
            states.on_record(record)
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

    def close(self) -> None:
        """Write what is not written yet. Idempotent."""
        with self._states.lock:
            self._closing = True
        for thread in (self._writer, self._follower):
            if thread is not None:
                thread.end()


def _since(each: Snapshot) -> int:
    return each.held.since


def _left_out(held: Held) -> int:
    """Return how often servers that have ended were left out of a state."""
    return held.applied.get(LEFT_OUT, 0)
