"""Selection states: what each application has learned, by context and set of models, and how that survives.

An observation is in the journal before it is applied, and applied before it is acknowledged; both under one lock, so that states
see observations in the journal's order. States go to the store behind that, each with the number of the last observation in it.
After a crash the journal's newer observations are applied again: exactly those, because the number travels with the state.

A context (a user, a session, a region) that is new starts from what all contexts of the application have taught together, with
little evidence behind it: from nothing it would be worse off than with one state for all. So every observation of a context
teaches two states, its own and the shared one.

Two servers on one store never overwrite each other: a write that meets a newer revision merges (policy.merge over the state that
both began with) and tries again.
"""

import hashlib
import logging
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from clipper.errors import StoreConflict, StoreError
from clipper.selection import Observation, Policy
from clipper.store.journal import Journal
from clipper.store.store import ABSENT, Record, Store
from clipper.types import VersionedModel

_log = logging.getLogger(__name__)
PREFIX = "selection/"
SHARED = ""  # the context of those without one


class _Stored(msgspec.Struct, array_like=True):
    """applied: by node, the number of the last of its observations that is in here."""

    policy: str
    models: tuple[VersionedModel, ...]
    applied: dict[str, int]
    state: bytes


@dataclass(slots=True, eq=False)
class _Held:
    """One state in memory. base: as the store has it; since: journal number of the first observation it has not."""

    state: Any
    base: Any
    revision: int
    applied: dict[str, int]
    since: int = 0
    touched: bool = field(default=True)


class Learner:
    """One application's policy over one set of models. Threads: any."""

    __slots__ = ("_held", "_prefix", "application", "models", "policy", "shared", "states", "text", "told")

    def __init__(
        self, states: "States", application: str, text: str, policy: Policy, models: Sequence[VersionedModel]
    ) -> None:
        self.application, self.text, self.policy, self.models = application, text, policy, tuple(models)
        self.states = states
        self.told: Callable[[Observation], None] | None = None  # who else hears of feedback
        self._prefix = f"{PREFIX}{application}/{set_id(models)}/"
        self._held: dict[str, _Held] = {}
        self.shared = self.held(SHARED)

    def state(self, user: str | None) -> Any:
        """The context's state, made at first use."""
        if not user:
            return self.shared.state
        held = self._held.get(user)
        if held is None:
            held = self.held(user)
        held.touched = True
        return held.state

    def held(self, user: str) -> _Held:
        with self.states.lock:
            held = self._held.get(user)
            if held is None:
                held = self._held[user] = self.states.load(self, user)
            return held

    def key(self, user: str) -> str:
        return self._prefix + ("u:" + _short(user) if user else "shared")

    def observe(self, user: str, observation: Observation, number: int) -> None:
        """Apply one observation to the context's state and to the shared one. Under the lock of the states."""
        for context in dict.fromkeys((user, SHARED)):
            held = self.held(context)
            if held.applied.get(self.states.node, 0) >= number:
                continue
            held.state = self.policy.observe(held.state, observation)
            held.applied[self.states.node] = number
            held.since = held.since or number
            self.states.dirty[(self, context)] = None

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
        record = self._store.get(learner.key(user))
        if record is not None and (held := self._read(learner, record)) is not None:
            return held
        revision = record.revision if record else ABSENT
        state = self._related(learner, user)
        if state is None:
            prior = learner.shared.state if user else None
            state = learner.policy.init(learner.models, prior)
        return _Held(state, state, revision, {})

    def _read(self, learner: Learner, record: Record) -> _Held | None:
        try:
            stored = msgspec.msgpack.decode(record.value, type=_Stored)
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

    def observe_many(self, items: Sequence[tuple[Learner, str, Observation, bytes]]) -> None:
        """Write down, apply, and return once it is as sure as the journal's mode says: one write, one wait for all."""
        with self.lock:
            last = self.journal.append_many([record for *_, record in items])
            for number, (learner, user, observation, _) in enumerate(items, last - len(items) + 1):
                learner.observe(user, observation, number)
        self.journal.commit(last)
        self.start_writing()

    def replay(self, read: Callable[[bytes], tuple[Learner, str, Observation] | None]) -> int:
        """Apply what the journal has and the states have not; -> how many were applied. Once, before the first observation."""
        applied = 0
        with self.lock:
            for number, record in self.journal.replay():
                found = read(record)
                if found is None:
                    continue
                learner, user, observation = found
                if learner.held(SHARED).applied.get(self.node, 0) < number:
                    applied += 1
                learner.observe(user, observation, number)
        if applied:
            self.start_writing()
        return applied

    # -- writing behind

    def start_writing(self) -> None:
        """The thread that writes behind; it starts with the first observation."""
        if self._writer is None:
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
        """Write every dirty state to the store, then forget what the journal need not keep."""
        with self.lock:
            todo = list(self.dirty)
        self.journal.commit(self.journal.last)
        for learner, user in todo:
            self._write(learner, user)
        with self.lock:
            waiting = [learner.held(user).since for learner, user in self.dirty]
            self.journal.forget(min(waiting, default=self.journal.last + 1) - 1)

    def _write(self, learner: Learner, user: str) -> None:
        with self.lock:
            held = learner.held(user)
            state, upto = held.state, dict(held.applied)
            self.dirty.pop((learner, user), None)
        stored = _Stored(learner.policy.name, learner.models, upto, learner.policy.encode(state))
        try:
            record = self._store.put_if(learner.key(user), msgspec.msgpack.encode(stored), held.revision)
        except StoreConflict:
            self._merge(learner, user)
            return
        except BaseException:
            with self.lock:
                self.dirty[(learner, user)] = None
            raise
        with self.lock:
            held.base, held.revision = state, record.revision
            held.since = 0 if held.state is state else upto[self.node] + 1

    def _merge(self, learner: Learner, user: str) -> None:
        """Somebody else wrote: what both learned since the common state is added up, and written in the next round."""
        record = self._store.get(learner.key(user))
        with self.lock:
            held = learner.held(user)
            self.dirty[(learner, user)] = None
            theirs = self._read(learner, record) if record else None
            if theirs is None:
                held.revision = record.revision if record else ABSENT
                return
            held.state = learner.policy.merge(held.base, held.state, theirs.state)
            held.base, held.revision = theirs.state, theirs.revision
            held.applied = {**theirs.applied, self.node: held.applied.get(self.node, 0)}

    def close(self) -> None:
        """Write what is not written yet. Idempotent."""
        self._closing = True
        self._wake.set()
        if self._writer is not None:
            self._writer.join()
        try:
            for _ in range(3):  # a merge asks for another round
                if self.dirty:
                    self.flush()
        except StoreError as error:
            _log.warning("selection states stay in the journal: %s", error)
        self.journal.close()


def set_id(models: Sequence[VersionedModel]) -> str:
    """Of a set of models, whatever its order."""
    names = "\n".join(sorted({str(model) for model in models}))
    return hashlib.blake2b(names.encode(), digest_size=12).hexdigest()


def _short(user: str) -> str:
    """A context as part of a key: readable, unless it is very long."""
    quoted = urllib.parse.quote(user, safe="@._-")
    return quoted if len(quoted) <= 256 else "#" + hashlib.blake2b(user.encode(), digest_size=16).hexdigest()


def _in_common(some: Sequence[VersionedModel], others: Sequence[VersionedModel]) -> int:
    return len({model.name for model in some} & {model.name for model in others})
