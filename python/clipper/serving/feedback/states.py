"""Selection states: what each application has learned, by context and set of models, and how that
survives.

An observation is in the journal before it is applied, and applied before it is acknowledged; both
under one lock, so that states see observations in the journal's order. States go to the store
behind that, each with the number of the last observation in it. After a crash the journal's newer
observations are applied again: exactly those, because the number travels with the state.

A context (a user, a session, a region) that is new starts from what all contexts of the application
have taught together, with little evidence behind it: from nothing it would be worse off than with
one state for all. So every observation of a context teaches two states, its own and the shared one.
Until its first observation it follows the shared one; so what becomes of it depends on the journal
alone, not on when it was first used.

Two servers on one store never overwrite each other: a write that meets a newer revision merges
(policy.merge over the state that both began with) and tries again. A write whose answer was lost
may have been carried out: then the number in the stored state shows that it was, and what is in it
is not added again.

What other servers learn is merged as they write it (serving/feedback/state_sync), so that all of
them use all feedback.

A store elsewhere may be slow or gone. No prediction and no feedback waits for it: a context that it
does not hand out at once begins as a new one, and is merged with what the store has when that is
back.
"""

import hashlib
import logging
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

from clipper.errors import InvalidInput, Overloaded, StoreError
from clipper.selection import Observation, Plan, Policy, Truth
from clipper.selection.learning.batch_learning import (
    Column,
    ObservationRows,
    count_user,
    native_update_of,
    observe,
    observe_rows,
)
from clipper.selection.learning.learned_state import LearnedState
from clipper.selection.policies.stateless_policy import learns
from clipper.selection.policy import Predictions, State
from clipper.serving.feedback.ended_servers import EndedServers
from clipper.serving.feedback.journal_records import head_of
from clipper.serving.feedback.state_sync import StateSync
from clipper.serving.feedback.stored_state import PREFIX, SHARED, Held, unsealed
from clipper.store.journal import Journal
from clipper.store.store import ABSENT, Record, Store
from clipper.types import VersionedModel
from clipper_core.learning.label_feedback import LabelCounts, LabelSteps

USER_CHARS_MAX: Final = 512  # of the name of a user

_log = logging.getLogger(__name__)
READ_S = 0.02  # a context's first query waits so long for a store elsewhere
CHECKS_MAX = 64  # contexts that one new context looks at for one to forget

Seen = Observation | ObservationRows


class FeedbackObserver(Protocol):
    """Observer of feedback, called once the feedback is in the journal."""

    @property
    def labels(self) -> LabelCounts | None:
        """Return what counts labels without a call of `on_label`; None if it needs the calls."""

    def on_feedback(self, seen: Observation) -> bool:
        """Observe one feedback. Returns False when there is more than the budget covers."""

    def on_label(
        self, arrived: Predictions, label: object, answer: object, weight: float = 1.0
    ) -> bool:
        """Observe a label. Returns False, and observes nothing, if it is not of the type of all
        outputs and of the answer.
        """

    def on_feedback_rows(self, rows: ObservationRows, answers: Column) -> None:
        """Observe feedback of many rows. answers: the answer of each row."""


class Learner:
    """One application's policy over one set of models. Threads: any."""

    __slots__ = (
        "_all",
        "_dirty",
        "_held",
        "_long",
        "_node",
        "application",
        "head",
        "learns",
        "models",
        "native_update",
        "place",
        "policy",
        "prefix",
        "shared",
        "states",
        "steps",
        "text",
        "watcher",
    )

    def __init__(
        self,
        states: "States",
        application: str,
        text: str,
        policy: Policy,
        models: Sequence[VersionedModel],
    ) -> None:
        self.application, self.text, self.policy, self.models = (
            application,
            text,
            policy,
            tuple(models),
        )
        self.states, self._dirty, self._node = states, states.dirty, states.node
        self.learns = learns(policy)
        self.native_update = native_update_of(policy)
        self.place = {model: i for i, model in enumerate(self.models)}
        self._all = tuple(range(len(self.models)))
        self.head = head_of(application, text, self.models)  # of its records
        self.watcher: FeedbackObserver | None = None
        self.prefix = f"{PREFIX}{application}/{set_id(models)}/"
        self._held: dict[str, Held] = {}
        self._long: dict[
            str, str
        ] = {}  # contexts whose names are too long for a key, by what stands in its place
        self.shared = self.held(SHARED)
        self.steps = LabelSteps(
            self,
            states.lock,
            states.journal,
            self.native_update,
            states.node,
            states.dirty,
            _labelled,
            states.commit,
        )

    def positions(self, models: Sequence[VersionedModel]) -> tuple[int, ...]:
        """Return the positions of those models that are the learner's own."""
        place = self.place
        if len(models) == 1:
            return (place[models[0]],) if models[0] in place else ()
        return (
            self._all
            if models == self.models
            else tuple([place[model] for model in models if model in place])
        )

    def state(self, user: str | None) -> State:
        """Return the context's state, made at first use."""
        if not user or not self.learns:
            return self.shared.state
        held = self._held.get(user)
        if held is None:
            if self.states.is_full():
                return self.policy.init(self.models, self.shared.state)
            held = self.held(user)
        held.touched = True
        if held.prior is not None and held.prior is not self.shared.state:
            self._follow(held)
        return held.state

    def _follow(self, held: Held) -> None:
        """Begin anew from the shared state as it is now."""
        with self.states.lock:
            if held.prior is not None:
                held.prior = self.shared.state
                held.state = held.base = self.policy.init(self.models, held.prior)

    def held(self, user: str) -> Held:
        """Return the context's state, loaded or made at first use."""
        with self.states.lock:
            held = self._held.get(user)
            if held is None:
                held = self._held[user] = self.states.load(self, user)
                self.states.keep(self, user)
                if (name := _short(user)).startswith("#"):
                    self._long[name] = user
            return held

    def known(self, user: str) -> Held | None:
        """Return the context's state if it is in memory."""
        return self._held.get(user)

    def users(self) -> list[str]:
        """Return the contexts in memory, the shared one too."""
        return list(self._held)

    def read(self, record: Record) -> Held | None:
        """Return a state of the store; None, and an error in the log, for one that cannot be read,
        or is another policy's."""
        return self.states.read(self, record)

    def resume(self) -> None:
        """Load the states from the store. The caller holds the lock of the states.

        Raises StoreError, and then leaves the states as they were.
        """
        before, self._held = self._held, {}
        try:
            self.shared = self.held(SHARED)
        except BaseException:
            self._held = before
            raise

    def key(self, user: str) -> str:
        """Return the key of a context's state in the store."""
        return self.prefix + ("u:" + _short(user) if user else "shared")

    def user_of(self, name: str) -> str | None:
        """Return the context that a key names; None if it is not in memory."""
        return self._long.get(name) if name.startswith("#") else urllib.parse.unquote(name)

    def observe(self, user: str, seen: Seen, number: int) -> None:
        """Apply what was observed to the context's state and to the shared one. Under the lock of
        the states.

        A policy that does not learn has nothing to apply: its feedback is in the journal, and
        counted.
        """
        if not self.learns:
            return
        if user:
            self.apply(user, seen, number)
        self.apply(SHARED, seen, number, user)

    def apply(self, context: str, seen: Seen, number: int, user: str = "") -> None:
        """Apply what was observed to one context's state. user: whose observation the shared state
        learns. Under the lock of the states."""
        held = self.ready(context)
        if held.applied.get(self._node, 0) >= number:
            return
        try:
            if isinstance(seen, ObservationRows):
                held.state = observe_rows(self.policy, held.state, seen)
            else:
                held.state = observe(self.policy, held.state, seen, self.native_update)
            if user:
                self.count_user(user, seen)
        except Exception:  # it learns nothing of it, now and whenever the journal is read again
            _log.exception(
                "policy %r of application %r could not observe", self.text, self.application
            )
        held.applied[self._node] = number
        if not held.since:
            held.since = number
        self._dirty[(self, context)] = None

    def wants(self, user: str) -> bool:
        """Return whether `count_user` is to be called for this user's next observation."""
        state: LearnedState = self.shared.state
        return state.wants(user)

    def count_user(self, user: str, seen: Seen) -> None:
        """Count what the shared state has learned for how much users differ. Under the lock of the
        states."""
        self.shared.state = count_user(self.policy, self.shared.state, user, seen)

    def ready(self, context: str) -> Held:
        """Return a context's state, about to learn. Under the lock of the states."""
        held = self._held.get(context)
        if held is None:
            held = self.held(context)
        held.touched = True
        if held.prior is not None:
            self._follow(held)
            held.prior = None
        return held

    def admit(self, user: str) -> None:
        """Raise Overloaded for feedback of a context that there is no room for."""
        if user not in self._held and self.learns:
            self.states.refuse_if_full()

    def clean(self) -> list[tuple[str, Held]]:
        """Return the contexts without unwritten observations."""
        return [(user, held) for user, held in self._held.items() if user and not held.since]

    def drop(self, user: str) -> None:
        """Remove the state of a user from memory."""
        del self._held[user]
        self._long.pop(_short(user), None)

    def __len__(self) -> int:
        return len(self._held)


class States:
    """Threads: any. All learners of a server, their journal and their place in the store.

    node: this server's name among those that share the store; the same after a restart, if it has a
    state folder. states_max: contexts kept in memory; beyond it those that were not used lately go:
    they are in the store. Those that the store does not have yet stay, up to as many again; then
    new contexts begin with the shared state and are not kept, and feedback for them is refused with
    Overloaded.  follows: whether other servers may write to the store.  ended: leaves servers that
    have ended out of the states; None where no other server learns.  alone: whether all other names
    in states are of earlier lives of this server, whose journals do not exist any more; they are
    left out.
    """

    def __init__(
        self,
        store: Store,
        journal: Journal,
        node: str,
        states_max: int,
        write_s: float,
        follows: bool = False,
        ended: EndedServers | None = None,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self.lock = threading.RLock()
        self.node = node
        self.journal = journal
        self.dirty: dict[tuple[Learner, str], None] = {}
        self._store = store
        self._states_max = states_max
        self._learners: dict[tuple[str, str, tuple[VersionedModel, ...]], Learner] = {}
        self._by_prefix: dict[str, list[Learner]] = {}
        self._ring: list[
            tuple[Learner, str]
        ] = []  # the contexts in memory, as a clock whose hand looks for one to forget
        self._hand = 0
        self._sync = StateSync(self, store, write_s, follows, ended)
        self._reader: threading.Thread | None = None
        self._hurried = False  # once it is up, nobody waits for the store
        self._away = False  # since the start
        self.refusal = ""  # why nothing may be written to the store any more

    # -- learners

    def learner(
        self, application: str, text: str, policy: Policy, models: Sequence[VersionedModel]
    ) -> Learner:
        """Return the learner of an application as it is now.

        A new set of models inherits what the previous set has learned.
        """
        key = (application, text, tuple(sorted(set(models))))
        with self.lock:
            if key not in self._learners:
                learner = self._learners[key] = Learner(self, application, text, policy, key[2])
                self._by_prefix.setdefault(learner.prefix, []).append(learner)
            return self._learners[key]

    def holders(self, key: str) -> Iterator[tuple[Learner, str]]:
        """Yield the learners that hold the state of that key, and its context. Under the lock."""
        prefix, _, name = key.rpartition("/")
        for learner in self._by_prefix.get(prefix + "/", ()):
            user = SHARED if name == "shared" else learner.user_of(name.removeprefix("u:"))
            if user is not None and learner.known(user) is not None:
                yield learner, user

    def all(self) -> Iterator[tuple[str, Held]]:
        """Yield the keys and states in memory of policies that learn. Under the lock."""
        for learner in self._learners.values():
            if learner.learns:
                for user in learner.users():
                    yield learner.key(user), learner.held(user)

    def load(self, learner: Learner, user: str) -> Held:
        """Return a state from the store; else one from what a related set or the shared state
        knows; else a new one."""
        record, late = None, False
        try:
            record = self._get(learner.key(user))
        except StoreError as error:
            if not self._hurried:
                raise
            _log.warning("a context of %r begins as a new one: %s", learner.application, error)
            late = True
        if record is not None and (held := self.read(learner, record)) is not None:
            if not self._hurried:
                self._sync.complete(learner.key(user), held)
            return held
        revision = record.revision if record else ABSENT
        state = self._related(learner, user)
        if state is not None:
            held = Held(state, state, revision, {})
        else:
            prior = learner.shared.state if user else None
            state = learner.policy.init(learner.models, prior)
            held = Held(state, state, revision, {}, prior=prior)
        if late:
            self.dirty[(learner, user)] = None  # to be merged
        return held

    def _get(self, key: str) -> Record | None:
        """Read a record of the store: of one on another host, once this server is up, within
        READ_S."""
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
            raise StoreError(
                f"store {self._store.name} did not answer within {READ_S * 1000:g} ms."
            )
        if isinstance(found[0], StoreError):
            raise found[0]
        return found[0]

    def read(self, learner: Learner, record: Record) -> Held | None:
        """Return the state of a record; None if it is of another policy, or cannot be read."""
        try:
            stored = unsealed(record.value)
            if stored.policy != learner.policy.name:
                return None
            state = learner.policy.decode(stored.state)
        except (msgspec.MsgspecError, ValueError) as error:
            _log.error(
                "the selection state %s cannot be read and starts empty: %s", record.key, error
            )
            return None
        own = stored.applied.get(self.node, 0)
        self.journal.skip_to(own)
        applied = {self.node: own} if self._alone else stored.applied
        return Held(state, state, record.revision, applied, own=own)

    def _related(self, learner: Learner, user: str) -> State:
        """Return the state of the set of models of the same application and policy that has most in
        common with this one."""
        others = [
            other
            for other in self._learners.values()
            if (other.application, other.text) == (learner.application, learner.text)
            and other.models != learner.models
        ]
        fitting = getattr(learner.policy, "fitted", None)
        if not others or fitting is None:
            return None
        nearest = max(reversed(others), key=lambda other: _in_common(other.models, learner.models))
        if _in_common(nearest.models, learner.models) == 0 or (user and user not in nearest._held):
            return None
        return fitting(nearest.held(user).state, learner.models)

    def keep(self, learner: Learner, user: str) -> None:
        """Note that a context was loaded. Another one is removed from memory if there are too many.
        The caller holds the lock."""
        if user:
            self._make_room()
            self._ring.append((learner, user))

    def _make_room(self) -> None:
        """Make room by the second-chance rule: the hand skips a context that was used since it was
        last there, and removes one that was not. It looks at a few for each new context, so that no
        new one waits for a walk over all."""
        checks, ring = 0, self._ring
        while len(ring) >= self._states_max and checks < CHECKS_MAX:
            checks += 1
            self._hand = self._hand if self._hand < len(ring) else 0
            learner, user = ring[self._hand]
            held = learner.known(user)
            if held is not None and (held.touched or held.since or (learner, user) in self.dirty):
                held.touched = False
                self._hand += 1
                continue
            if held is not None:
                learner.drop(user)
            ring[self._hand] = ring[-1]
            ring.pop()

    def is_full(self) -> bool:
        """Return whether no more contexts are kept until some have been written to the store."""
        if len(self._ring) < 2 * self._states_max:
            return False
        with self.lock:
            self._make_room()
            return len(self._ring) >= 2 * self._states_max

    def refuse_if_full(self) -> None:
        """Raise Overloaded if no more contexts are kept."""
        if self.is_full():
            hint = "The store is too slow, or away; or raise feedback.contexts_max."
            raise Overloaded(
                f"{len(self._ring)} contexts wait to be written to the store.", hint=hint
            )

    # -- learning

    def observe_one(self, learner: Learner, user: str, seen: Seen, record: bytes) -> int:
        """Append the record to the journal and apply the observation. Return the number to
        `commit`."""
        with self.lock:
            if user:
                learner.admit(user)
            number = self.journal.append(record)
            learner.observe(user, seen, number)
        return number

    def observe_many(self, items: Sequence[tuple[Learner, str, Seen, bytes]]) -> int:
        """Append all records to the journal together and apply the observations one after another.
        Return the number to `commit`."""
        with self.lock:
            for learner, user, _, _ in items:
                if user:
                    learner.admit(user)
            last = self.journal.append_many([record for *_, record in items])
            for number, (learner, user, seen, _) in enumerate(items, last - len(items) + 1):
                learner.observe(user, seen, number)
        return last

    def commit(self, number: int) -> bool:
        """Return once the records up to that number are as safe as the journal's mode requires:
        True if the next ones need such a call, too."""
        if self.journal.mode == "fsync":
            self.journal.commit(number)
        if not self._sync.writes:
            self.start_writing()
        return self.journal.mode == "fsync" or not self._sync.writes

    def replay(self, read: Callable[[bytes], tuple[Learner, str, Seen] | None]) -> int:
        """Apply the observations that the journal has and the states lack. Return how many were
        applied. Called once, before the first observation."""
        applied = 0
        with self.lock:
            for number, record in self.journal.replay():
                found = read(record)
                if found is None:
                    continue
                learner, user, seen = found
                if learner.learns and learner.shared.applied.get(self.node, 0) < number:
                    applied += len(seen) if isinstance(seen, ObservationRows) else 1
                learner.observe(user, seen, number)
        self._hurried = True
        if applied:
            self.start_writing()
        if not self._away:
            self._sync.start_following()
        return applied

    def start_without_store(self) -> None:
        """Start while the store is unreachable: states begin as new ones, and what is observed
        waits in the journal."""
        self._away = self._hurried = True

    def resume(self, read: Callable[[bytes], tuple[Learner, str, Seen] | None]) -> int:
        """Resume once the store is reachable: begin from what is in it, and apply what the journal
        has beyond that, as after a start. Without a journal on disk, what was learned meanwhile is
        merged. Raises StoreError when the store is unreachable again; then nothing has changed.
        """
        with self.lock:
            if self.journal.mode != "memory":
                self._hurried = False
                try:
                    for learner in self._learners.values():
                        learner.resume()
                except BaseException:
                    self._hurried = True
                    raise
                self.dirty.clear()
            self._away = False
            count = self.replay(read) if self.journal.mode != "memory" else 0
        self._sync.start_following()
        if self.dirty:
            self.start_writing()
        return count

    # -- writing behind

    def start_writing(self) -> None:
        """Start the thread that writes behind, if it does not run and the store is not away since
        the start."""
        if not self._away:
            self._sync.start_writing()

    def stop_writing(self, why: str) -> None:
        """Write nothing to the store any more: what is learned stays in the journal."""
        self.refusal = why

    def flush(self) -> None:
        """Write every dirty state to the store, then forget what the journal need not keep.
        StoreError."""
        self._sync.flush()

    def close(self) -> None:
        """Write what is not written yet. Idempotent."""
        self._sync.close()
        try:
            for _ in range(3):  # a merge needs another round
                if self.dirty and not self._away:
                    self.flush()
            if not (self.dirty or self._away or self.refusal):
                self.flush()  # records that all is there
        except StoreError as error:
            _log.warning("selection states stay in the journal: %s", error)
        self.journal.close()


def _labelled(plan: Plan, arrived: Predictions, label: object, answer: object) -> Observation:
    return Observation(plan, arrived, Truth(label), answer)


def set_id(models: Sequence[VersionedModel]) -> str:
    """Return an id of a set of models; their order does not matter."""
    names = "\n".join(sorted({str(model) for model in models}))
    return hashlib.blake2b(names.encode(), digest_size=12).hexdigest()


def check_user(user: str) -> None:
    """Raise InvalidInput for what cannot name a context: it is kept in memory and in the store for
    as long as the context is."""
    if not isinstance(user, str):
        raise InvalidInput(
            f"user={str(user)[:40]!r}: a user is named by a str, not by a {type(user).__name__}."
        )
    if len(user) > USER_CHARS_MAX:
        raise InvalidInput(
            f"the user's name {user[:40]!r} has {len(user)} characters: at most {USER_CHARS_MAX}"
            " are possible."
        )
    try:
        user.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"the user's name {user[:40]!r} cannot be written as UTF-8.") from None


def _short(user: str) -> str:
    """Return a context as part of a key: readable, unless it is very long."""
    quoted = urllib.parse.quote(user, safe="@._-")
    return (
        quoted
        if len(quoted) <= 256
        else "#" + hashlib.blake2b(user.encode(), digest_size=16).hexdigest()
    )


def _in_common(some: Sequence[VersionedModel], others: Sequence[VersionedModel]) -> int:
    return len({model.name for model in some} & {model.name for model in others})
