"""Selection states: what each application has learned, by context and set of models, and how that survives.

An observation is in the journal before it is applied, and applied before it is acknowledged; both under one lock, so that states
see observations in the journal's order. States go to the store behind that, each with the number of the last observation in it.
After a crash the journal's newer observations are applied again: exactly those, because the number travels with the state.

A context (a user, a session, a region) that is new starts from what all contexts of the application have taught together, with
little evidence behind it: from nothing it would be worse off than with one state for all. So every observation of a context
teaches two states, its own and the shared one. Until its first observation it follows the shared one; so what becomes of it
depends on the journal alone, not on when it was first asked.

Two servers on one store never overwrite each other: a write that meets a newer revision merges (policy.merge over the state that
both began with) and tries again. A write whose answer was lost may have been carried out: then the number in the stored state
says that it was, and what is in it is not added again.

A store elsewhere may be slow or gone. Nobody who predicts or tells waits for it: a context that it does not hand out at once
begins as a new one, and is merged with what the store has when that is back.
"""

import hashlib
import logging
import threading
import urllib.parse
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from clipper.errors import InvalidInput, StoreConflict, StoreError
from clipper.selection import Observation, Policy
from clipper.selection.lessons import Column, Rows, lesson_of, observe, observe_rows
from clipper.store.journal import Journal
from clipper.store.store import ABSENT, Record, Store
from clipper.types import VersionedModel

USER_CHARS_MAX: Final = 512  # of the name of a user

_log = logging.getLogger(__name__)
PREFIX = "selection/"
SHARED = ""  # the context of those without one
READ_S = 0.02  # a context's first query waits so long for a store elsewhere


Seen = Observation | Rows


class Watcher(Protocol):
    """Who else hears of feedback, once it is written down."""

    def told(self, seen: Observation) -> bool:
        """False when it was not looked at: there is more than is worth it."""
        ...

    def told_rows(self, rows: Rows, answers: Column) -> None: ...


class _Stored(msgspec.Struct, array_like=True):
    """applied: by node, the number of the last of its observations that is in here."""

    policy: str
    models: tuple[VersionedModel, ...]
    applied: dict[str, int]
    state: bytes


@dataclass(slots=True, eq=False)
class _Held:
    """One state in memory. base: as the store has it; since: journal number of the first observation it has not.

    prior: the shared state that this one is a beginning of, until its first observation.  doubts: what was written without an
    answer, by the number of its last observation.
    """

    state: Any
    base: Any
    revision: int
    applied: dict[str, int]
    since: int = 0
    touched: bool = True
    prior: Any = None
    doubts: dict[int, Any] = field(default_factory=dict)


class Learner:
    """One application's policy over one set of models. Threads: any."""

    __slots__ = (
        "_all", "_dirty", "_held", "_node", "_prefix", "application", "head", "lesson", "models", "place", "policy", "shared",
        "states", "text", "watcher",
    )  # fmt: skip

    def __init__(
        self, states: "States", application: str, text: str, policy: Policy, models: Sequence[VersionedModel]
    ) -> None:
        self.application, self.text, self.policy, self.models = application, text, policy, tuple(models)
        self.states, self._dirty, self._node = states, states.dirty, states.node
        self.lesson = lesson_of(policy)
        self.place = {model: i for i, model in enumerate(self.models)}
        self._all = tuple(range(len(self.models)))
        self.head = b""  # of its records, once there is one
        self.watcher: Watcher | None = None
        self._prefix = f"{PREFIX}{application}/{set_id(models)}/"
        self._held: dict[str, _Held] = {}
        self.shared = self.held(SHARED)

    def asked(self, models: Sequence[VersionedModel]) -> tuple[int, ...]:
        """The places of those that are the learner's own."""
        place = self.place
        if len(models) == 1:
            return (place[models[0]],) if models[0] in place else ()
        return self._all if models == self.models else tuple([place[model] for model in models if model in place])

    def state(self, user: str | None) -> Any:
        """The context's state, made at first use."""
        if not user:
            return self.shared.state
        held = self._held.get(user)
        if held is None:
            held = self.held(user)
        held.touched = True
        if held.prior is not None and held.prior is not self.shared.state:
            self._follow(held)
        return held.state

    def _follow(self, held: _Held) -> None:
        """Begin anew from the shared state as it is now."""
        with self.states.lock:
            if held.prior is not None:
                held.prior = self.shared.state
                held.state = held.base = self.policy.init(self.models, held.prior)

    def held(self, user: str) -> _Held:
        with self.states.lock:
            held = self._held.get(user)
            if held is None:
                held = self._held[user] = self.states.load(self, user)
            return held

    def begin_again(self) -> None:
        """From what the store has. Under the lock of the states; StoreError leaves it as it was."""
        before, self._held = self._held, {}
        try:
            self.shared = self.held(SHARED)
        except BaseException:
            self._held = before
            raise

    def key(self, user: str) -> str:
        return self._prefix + ("u:" + _short(user) if user else "shared")

    def observe(self, user: str, seen: Seen, number: int) -> None:
        """Apply what was observed to the context's state and to the shared one. Under the lock of the states."""
        if user:
            self._apply(user, seen, number)
        self._apply(SHARED, seen, number)

    def _apply(self, context: str, seen: Seen, number: int) -> None:
        held = self._held.get(context)
        if held is None:
            held = self.held(context)
        if held.applied.get(self._node, 0) >= number:
            return
        if held.prior is not None:
            self._follow(held)
            held.prior = None
        try:
            if isinstance(seen, Rows):
                held.state = observe_rows(self.policy, held.state, seen)
            else:
                held.state = observe(self.policy, held.state, seen, self.lesson)
        except Exception:  # it learns nothing of it, now and whenever the journal is read again
            _log.exception("policy %r of application %r could not observe", self.text, self.application)
        held.applied[self._node] = number
        if not held.since:
            held.since = number
        self._dirty[(self, context)] = None

    def clean(self) -> list[tuple[str, _Held]]:
        return [(user, held) for user, held in self._held.items() if user and not held.since]

    def drop(self, user: str) -> None:
        del self._held[user]

    def __len__(self) -> int:
        return len(self._held)


class States:
    """Threads: any. All learners of a server, their journal and their place in the store.

    node: this server's name among those that share the store; the same after a restart, if it has a state folder.
    states_max: contexts kept in memory; beyond it the clean ones that were not used lately go, they are in the store.
    """

    def __init__(self, store: Store, journal: Journal, node: str, states_max: int, write_s: float) -> None:
        self.lock = threading.RLock()
        self.node = node
        self.journal = journal
        self.dirty: dict[tuple[Learner, str], None] = {}
        self._store = store
        self._states_max = states_max
        self._write_s = write_s
        self._learners: dict[tuple[str, str, tuple[VersionedModel, ...]], Learner] = {}
        self._count = 0
        self._wake = threading.Event()
        self._closing = False
        self._writer: threading.Thread | None = None
        self._reader: threading.Thread | None = None
        self._hurried = False  # once it is up, nobody waits for the store
        self._away = False  # since the start

    # -- learners

    def learner(self, application: str, text: str, policy: Policy, models: Sequence[VersionedModel]) -> Learner:
        """Of an application as it is now; another set of models takes over what the last one learned."""
        key = (application, text, tuple(sorted(set(models))))
        with self.lock:
            if key not in self._learners:
                self._learners[key] = Learner(self, application, text, policy, key[2])
            return self._learners[key]

    def load(self, learner: Learner, user: str) -> _Held:
        """A state from the store; else what a related set or the shared state knows; else a fresh one."""
        self._make_room()
        self._count += 1
        record, late = None, False
        try:
            record = self._get(learner.key(user))
        except StoreError as error:
            if not self._hurried:
                raise
            _log.warning("a context of %r begins as a new one: %s", learner.application, error)
            late = True
        if record is not None and (held := self._read(learner, record)) is not None:
            return held
        revision = record.revision if record else ABSENT
        state = self._related(learner, user)
        if state is not None:
            held = _Held(state, state, revision, {})
        else:
            prior = learner.shared.state if user else None
            state = learner.policy.init(learner.models, prior)
            held = _Held(state, state, revision, {}, prior=prior)
        if late:
            self.dirty[(learner, user)] = None  # to be merged
        return held

    def _get(self, key: str) -> Record | None:
        """From the store; of one elsewhere, once this server is up, within READ_S."""
        if not (self._hurried and self._store.remote):
            return self._store.get(key)
        if self._reader is not None and self._reader.is_alive():
            raise StoreError(f"store {self._store.name} has not answered yet.")
        found: list[Record | StoreError | None] = []

        def read() -> None:
            try:
                found.append(self._store.get(key))
            except StoreError as error:
                found.append(error)

        self._reader = threading.Thread(target=read, name="clipper-states-reader", daemon=True)
        self._reader.start()
        self._reader.join(READ_S)
        if not found:
            raise StoreError(f"store {self._store.name} did not answer within {READ_S * 1000:g} ms.")
        if isinstance(found[0], StoreError):
            raise found[0]
        return found[0]

    def _read(self, learner: Learner, record: Record) -> _Held | None:
        try:
            stored = _unsealed(record.value)
            if stored.policy != learner.policy.name:
                return None
            state = learner.policy.decode(stored.state)
        except (msgspec.MsgspecError, ValueError) as error:
            _log.error("the selection state %s cannot be read and begins anew: %s", record.key, error)
            return None
        self.journal.skip_to(stored.applied.get(self.node, 0))
        return _Held(state, state, record.revision, stored.applied)

    def _related(self, learner: Learner, user: str) -> Any:
        """From the set of models of the same application and policy with most in common."""
        others = [
            other for other in self._learners.values()
            if (other.application, other.text) == (learner.application, learner.text) and other.models != learner.models
        ]  # fmt: skip
        fitting = getattr(learner.policy, "fitting", None)
        if not others or fitting is None:
            return None
        nearest = max(reversed(others), key=lambda other: _in_common(other.models, learner.models))
        if _in_common(nearest.models, learner.models) == 0 or (user and user not in nearest._held):
            return None
        return fitting(nearest.held(user).state, learner.models)

    def _make_room(self) -> None:
        """Second chance: contexts that were used since the last look stay."""
        if self._count < self._states_max:
            return
        for learner in list(self._learners.values()):
            for user, held in learner.clean():
                if held.touched:
                    held.touched = False
                else:
                    learner.drop(user)
                    self._count -= 1

    # -- learning

    def observe_one(self, learner: Learner, user: str, seen: Seen, record: bytes) -> int:
        """Write down and apply; -> the number to `commit`."""
        with self.lock:
            number = self.journal.append(record)
            learner.observe(user, seen, number)
        return number

    def observe_many(self, items: Sequence[tuple[Learner, str, Seen, bytes]]) -> int:
        """Write down all at once, and apply one after another; -> the number to `commit`."""
        with self.lock:
            last = self.journal.append_many([record for *_, record in items])
            for number, (learner, user, seen, _) in enumerate(items, last - len(items) + 1):
                learner.observe(user, seen, number)
        return last

    def commit(self, number: int) -> None:
        """Return once the records up to that number are as sure as the journal's mode says."""
        if self.journal.mode == "fsync":
            self.journal.commit(number)
        if self._writer is None:
            self.start_writing()

    def replay(self, read: Callable[[bytes], tuple[Learner, str, Seen] | None]) -> int:
        """Apply what the journal has and the states have not; -> how many were applied. Once, before the first observation."""
        applied = 0
        with self.lock:
            for number, record in self.journal.replay():
                found = read(record)
                if found is None:
                    continue
                learner, user, seen = found
                if learner.held(SHARED).applied.get(self.node, 0) < number:
                    applied += len(seen) if isinstance(seen, Rows) else 1
                learner.observe(user, seen, number)
        self._hurried = True
        if applied:
            self.start_writing()
        return applied

    def begin_without(self) -> None:
        """The store is away at the start: states begin as new ones, and what is observed waits in the journal."""
        self._away = self._hurried = True

    def begin_again(self, read: Callable[[bytes], tuple[Learner, str, Seen] | None]) -> int:
        """The store is there: begin from what is in it, and apply what the journal has beyond that, as after a start. Without a
        journal on disk, what was learned meanwhile is merged. StoreError: it is gone again, and nothing has changed."""
        with self.lock:
            if self.journal.mode != "memory":
                self._hurried = False
                try:
                    for learner in self._learners.values():
                        learner.begin_again()
                except BaseException:
                    self._hurried = True
                    raise
                self.dirty.clear()
            self._away = False
            count = self.replay(read) if self.journal.mode != "memory" else 0
        if self.dirty:
            self.start_writing()
        return count

    # -- writing behind

    def start_writing(self) -> None:
        """The thread that writes behind; it starts with the first observation."""
        if self._writer is None and not self._away:
            with self.lock:
                if self._writer is None and not self._closing:
                    self._writer = threading.Thread(target=self._write_behind, name="clipper-states", daemon=True)
                    self._writer.start()

    def _write_behind(self) -> None:
        while not self._wake.wait(self._write_s):
            try:
                self.flush()
            except StoreError as error:  # the journal has it all; the next round tries again
                _log.warning("selection states wait to be written: %s", error)

    def flush(self) -> None:
        """Write every dirty state to the store, then forget what the journal need not keep.

        As they are at one moment, and the shared ones last: a shared state in the store never knows of an observation before
        which a context began that is not there yet; in a replay that context would find it too old.
        """
        with self.lock:
            todo = [(learner, user, learner.held(user)) for learner, user in self.dirty]
            snapshots = [(learner, user, held, held.state, dict(held.applied)) for learner, user, held in todo]
            self.dirty.clear()
        snapshots.sort(key=lambda snapshot: snapshot[1] == SHARED)
        done = 0
        try:
            self.journal.commit(self.journal.last)
            for snapshot in snapshots:
                self._write(*snapshot)
                done += 1
        finally:
            with self.lock:
                self.dirty.update({(learner, user): None for learner, user, *_ in snapshots[done:]})
        with self.lock:
            waiting = [learner.held(user).since for learner, user in self.dirty]
            self.journal.forget(min(waiting, default=self.journal.last + 1) - 1)

    def _write(self, learner: Learner, user: str, held: _Held, state: Any, upto: dict[str, int]) -> None:
        if self.node not in upto:  # there was nothing to write at that moment; the store was not there when it was asked
            self._merge(learner, user)
            return
        stored = _Stored(learner.policy.name, learner.models, upto, learner.policy.encode(state))
        try:
            record = self._store.put_if(learner.key(user), _sealed(stored), held.revision)
        except StoreConflict:
            self._merge(learner, user)
            return
        except BaseException:
            with self.lock:
                held.doubts[upto.get(self.node, 0)] = state
            raise
        with self.lock:
            held.base, held.revision = state, record.revision
            held.doubts.clear()
            held.since = 0 if held.state is state else upto[self.node] + 1

    def _merge(self, learner: Learner, user: str) -> None:
        """Somebody else wrote: what both learned since the common state is added up, and written in the next round. Or nobody
        did: the answer to a write of ours was lost, or the store was killed and knows less than before; then ours has it all."""
        record = self._store.get(learner.key(user))
        with self.lock:
            held = learner.held(user)
            theirs = self._read(learner, record) if record else None
            if theirs is not None and held.prior is not None:
                held.state, held.applied, held.prior = theirs.state, theirs.applied, None
            elif theirs is not None:
                if any(number > held.applied.get(node, 0) for node, number in theirs.applied.items()):
                    base = held.doubts.get(theirs.applied.get(self.node, 0), held.base)
                    held.state = learner.policy.merge(base, held.state, theirs.state)
                held.applied = {**theirs.applied, self.node: held.applied.get(self.node, 0)}
                self.dirty[(learner, user)] = None
            elif held.prior is None:
                self.dirty[(learner, user)] = None
            held.doubts.clear()
            held.revision = record.revision if record else ABSENT
            held.base = held.base if theirs is None else theirs.state

    def close(self) -> None:
        """Write what is not written yet. Idempotent."""
        self._closing = True
        self._wake.set()
        if self._writer is not None:
            self._writer.join()
        try:
            for _ in range(3):  # a merge asks for another round
                if self.dirty and not self._away:
                    self.flush()
        except StoreError as error:
            _log.warning("selection states stay in the journal: %s", error)
        self.journal.close()


def _sealed(stored: _Stored) -> bytes:
    """With a checksum in front."""
    body = msgspec.msgpack.encode(stored)
    return zlib.crc32(body).to_bytes(4, "little") + body


def _unsealed(data: bytes) -> _Stored:
    if len(data) < 4 or zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
        raise ValueError(f"the checksum does not fit its {len(data)} bytes")
    return msgspec.msgpack.decode(data[4:], type=_Stored)


def set_id(models: Sequence[VersionedModel]) -> str:
    """Of a set of models, whatever its order."""
    names = "\n".join(sorted({str(model) for model in models}))
    return hashlib.blake2b(names.encode(), digest_size=12).hexdigest()


def check_user(user: str) -> None:
    """Raise InvalidInput for what cannot name a context: it is kept in memory and in the store for as long as the context is."""
    if not isinstance(user, str):
        raise InvalidInput(f"user={str(user)[:40]!r}: a user is named by a str, not by a {type(user).__name__}.")
    if len(user) > USER_CHARS_MAX:
        raise InvalidInput(f"the user's name {user[:40]!r} has {len(user)} characters: at most {USER_CHARS_MAX} are possible.")
    try:
        user.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"the user's name {user[:40]!r} cannot be written as UTF-8.") from None


def _short(user: str) -> str:
    """A context as part of a key: readable, unless it is very long."""
    quoted = urllib.parse.quote(user, safe="@._-")
    return quoted if len(quoted) <= 256 else "#" + hashlib.blake2b(user.encode(), digest_size=16).hexdigest()


def _in_common(some: Sequence[VersionedModel], others: Sequence[VersionedModel]) -> int:
    return len({model.name for model in some} & {model.name for model in others})
