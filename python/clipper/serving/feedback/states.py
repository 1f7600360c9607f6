"""Selection states: what each application has learned, by context and set of models, and how that
survives.

An observation is in the journal before it is applied, and applied before it is acknowledged; both
under one lock, so that states see observations in the journal's order. States go to the store
behind that, each with the number of the last observation in it. After a crash the journal's newer
observations are applied again: exactly those, because the number travels with the state.

A context (a user, a session, a region) that is new starts from what all contexts of the application
have learned together, with little evidence behind it: from nothing it would be worse off than with
one state for all. So every observation of a context goes into two states, its own and the shared
one.
Until its first observation it follows the shared one; so what becomes of it depends on the journal
alone, not on when it was first used. All that follow it read one state, which the first reader
makes after a change of the shared one, without a lock.

A state belongs to a set of models and a family of policies. The states of another set begin, and
until their first observation follow, what the nearest set has learned of the same context: in
memory, or in the store, where a record lists the sets (model_sets.py). Settings of one policy share
their states; two policies never do, so that a policy can be changed while feedback for answers of
the old one still comes.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from clipper.component import Health
from clipper.errors import InvalidInput, Overloaded, PolicyFailed, StoreError
from clipper.selection import Observation, Plan, Policy, Truth
from clipper.selection.learning.batch_learning import (
    Column,
    ObservationRows,
    count_user,
    first_states_of,
    native_update_of,
    observe,
    observe_rows,
)
from clipper.selection.learning.learned_state import LearnedState
from clipper.selection.model_changes import with_models
from clipper.selection.policies.stateless_policy import learns
from clipper.selection.policy import Predictions, State
from clipper.serving.feedback.ended_servers import EndedServers
from clipper.serving.feedback.journal_records import head_of
from clipper.serving.feedback.model_sets import Models, ModelSets
from clipper.serving.feedback.state_sync import StateSync, StoreTrust
from clipper.serving.feedback.stored_state import (
    LATEST,
    PREFIX,
    SHARED,
    StateOrigin,
    publish,
    unsealed,
)
from clipper.store.journal import Journal
from clipper.store.store import ABSENT, Get, Record, Store
from clipper.types import VersionedModel
from clipper_core.learning.label_feedback import LabelCounts, LabelSteps
from clipper_core.learning.policy_states import Held
from clipper_core.learning.state_lock import StateLock

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
    """One application's policy over one set of models. Threads: any.

    Learners whose policies differ in nothing but their settings have the same states. The newest of
    them reads and writes those.
    """

    __slots__ = (
        "_all",
        "_dirty",
        "_long",
        "_node",
        "application",
        "contexts",
        "first",
        "head",
        "learns",
        "models",
        "native_update",
        "place",
        "policy",
        "prefix",
        "sets",
        "shared",
        "shared_origin",
        "states",
        "steps",
        "text",
        "watcher",
    )

    def __init__(
        self,
        states: "States",
        sets: ModelSets,
        text: str,
        policy: Policy,
        models: Models,
    ) -> None:
        application = sets.application
        self.application = application
        self.text = text
        self.policy = policy
        self.models = models
        self.sets = sets
        self.states, self._dirty, self._node = states, states.dirty, states.node
        self.learns = learns(policy)
        self.native_update = native_update_of(policy)
        self.place = {model: i for i, model in enumerate(self.models)}
        self._all = tuple(range(len(self.models)))
        self.head = head_of(application, text, self.models)  # of its records
        self.watcher: FeedbackObserver | None = None
        self.prefix = sets.prefix_of(models)
        self.shared_origin = StateOrigin(models, None, is_shared=True)
        self.first = first_states_of(policy, models)
        self.contexts: dict[str, Held] = {}
        self._long: dict[
            str, str
        ] = {}  # contexts whose names are too long for a key, by what stands in its place
        self.shared: Held
        if models in sets.learners:
            self.share(sets.learners[models])
        else:
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
            if self.shared.prior is not None:
                self._follow(SHARED, self.shared)
            return self.shared.state
        held = self.contexts.get(user)
        if held is None:
            if self.states.is_full():
                return self.first_state()
            held = self.held(user)
        held.touched = True
        prior = held.prior
        if prior is LATEST and held.origin is not None:
            return self.first_state()
        if prior is not None:
            self._follow(user, held)
        state = held.state
        return self.first_state() if state is LATEST else state

    def first_state(self) -> State:
        """Return the state of all users without an observation: made once a version of the shared
        state.

        Takes no lock: threads that come at the same time may each make it, and have equal ones.
        Nobody learns into it: the first observation of a user makes a state of its own.
        """
        if self.shared.prior is not None:
            self._follow(SHARED, self.shared)
        return self.first.of(self.shared).state

    def _follow(self, user: str, held: Held) -> None:
        """Start again from the state that this one follows, as it is now."""
        if self._is_current(held):
            return
        with self.states.lock:
            if held.prior is None:
                return
            if held.origin is None:
                self.states.start_state(self, user, held)
                return
            source = held.origin.held
            if source is not None and source.state is not held.prior:
                held.prior = source.state
                publish(held, self.started_from(held.origin, source.state))
                held.base = held.state

    def _is_current(self, held: Held) -> bool:
        """Return whether a state equals the one that it follows."""
        origin = held.origin
        if origin is None:
            return False
        return origin.held is None or origin.held.state is held.prior

    def started_from(self, origin: StateOrigin, state: State) -> State:
        """Return the first state of one that begins from that of another set of models. One that
        the policy cannot convert is left out, and its error is logged."""
        try:
            return with_models(self.policy, state, origin.models, self.models)
        except PolicyFailed as error:
            _log.error(
                "application %r begins anew with %s: %s",
                self.application,
                ", ".join(map(str, self.models)),
                error,
            )
            return self.policy.init(self.models)

    def held(self, user: str) -> Held:
        """Return the context's state, loaded or made at first use."""
        with self.states.lock:
            held = self.contexts.get(user)
            if held is None:
                held = self.contexts[user] = self.states.load(self, user)
                self.states.keep(self, user)
                if (name := _short(user)).startswith("#"):
                    self._long[name] = user
            return held

    def known(self, user: str) -> Held | None:
        """Return the context's state if it is in memory."""
        return self.contexts.get(user)

    def users(self) -> list[str]:
        """Return the contexts in memory, the shared one too."""
        return list(self.contexts)

    def read(self, record: Record) -> Held | None:
        """Return a state of the store; None, and an error in the log, for one that cannot be read,
        or is another policy's."""
        return self.states.read(self, record)

    def merged(self, base: State, mine: State, theirs: State) -> State:
        """Return what both know, over what both began with; `mine`, and an error in the log, if the
        policy cannot merge them."""
        try:
            return self.policy.merge(base, mine, theirs)
        except Exception:
            _log.exception("policy %r of %r could not merge", self.text, self.application)
            return mine

    def share(self, other: "Learner") -> None:
        """Use the states of a learner whose policy differs in its settings only."""
        self.contexts, self._long = other.contexts, other._long
        self.shared = other.shared

    def following(self) -> Iterator[tuple[str, Held]]:
        """Yield the contexts in memory that have no observation of their own."""
        for user, held in self.contexts.items():
            if held.prior is not None:
                yield user, held

    def resume(self) -> None:
        """Load the states from the store. The caller holds the lock of the states.

        Raises StoreError, and then leaves the states as they were.
        """
        before, self.contexts = self.contexts, {}
        try:
            self.shared = self.held(SHARED)
        except BaseException:
            self.contexts = before
            raise

    def key(self, user: str) -> str:
        """Return the key of a context's state in the store."""
        return self.prefix + name_of(user)

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
                publish(held, observe_rows(self.policy, held.state, seen))
            else:
                publish(held, observe(self.policy, held.state, seen, self.native_update))
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
        publish(self.shared, count_user(self.policy, self.shared.state, user, seen))

    def ready(self, context: str) -> Held:
        """Return a context's state, about to learn. Under the lock of the states."""
        held = self.contexts.get(context)
        if held is None:
            held = self.held(context)
        held.touched = True
        if held.prior is not None:
            self._follow(context, held)
            if held.state is LATEST:
                publish(held, self.policy.init(self.models, self.state(None)))
                held.base = held.state
            held.prior = held.origin = None
            self.states.has_started(self, context)
        return held

    def admit(self, user: str) -> None:
        """Raise Overloaded for feedback of a context that there is no room for."""
        if user not in self.contexts and self.learns:
            self.states.refuse_if_full()

    def clean(self) -> list[tuple[str, Held]]:
        """Return the contexts without unwritten observations."""
        return [(user, held) for user, held in self.contexts.items() if user and not held.since]

    def drop(self, user: str) -> None:
        """Remove the state of a user from memory."""
        del self.contexts[user]
        self._long.pop(_short(user), None)

    def __len__(self) -> int:
        return len(self.contexts)


class States:
    """All learners of a server, with their journal and their states in the store. Threads: any.

    node: this server's name among those that share the store; the same after a restart, if it has a
    state folder. states_max: contexts kept in memory; beyond it those that were not used lately go:
    they are in the store. Those that the store does not have yet stay, up to as many again; then
    new contexts begin with the shared state and are not kept, and feedback for them is refused with
    Overloaded.  follows: whether other servers may write to the store.  ended: leaves servers that
    have ended out of the states; None where no other server learns.  alone: whether all other names
    in states are of earlier lives of this server, whose journals do not exist any more; they are
    left out.  trust: see StateSync.
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
        trust: StoreTrust | None = None,
    ) -> None:
        self._alone = alone
        self.lock = StateLock()
        self.node = node
        self.journal = journal
        self.dirty: dict[tuple[Learner, str], None] = {}
        self._store = store
        self._states_max = states_max
        self._learners: dict[tuple[str, str, tuple[VersionedModel, ...]], Learner] = {}
        self._by_prefix: dict[str, Learner] = {}  # the newest of those with the same states
        self._sets: dict[str, dict[str, ModelSets]] = {}  # by application, by family
        self._ring: list[
            tuple[Learner, str]
        ] = []  # the contexts in memory, as a clock whose hand looks for one to forget
        self._hand = 0
        self._sync = StateSync(self, store, write_s, follows, ended, trust)
        self._reader: threading.Thread | None = None
        self._hurried = False  # once it is up, nobody waits for the store
        self._away = False  # since the start
        self.refusal = ""  # why nothing may be written to the store any more

    # -- learners

    def learner(
        self, application: str, text: str, policy: Policy, models: Sequence[VersionedModel]
    ) -> Learner:
        """Return the learner of an application as it is now.

        A new set of models begins with what the nearest set has learned.
        """
        key = (application, text, tuple(sorted(set(models))))
        with self.lock:
            learner = self._learners.get(key)
            if learner is None:
                sets = self._sets_of(application, _family(text, policy), learns(policy))
                learner = self._learners[key] = Learner(self, sets, text, policy, key[2])
                self._by_prefix[learner.prefix] = sets.learners[key[2]] = learner
            return learner

    def _sets_of(self, application: str, family: str, learns: bool) -> ModelSets:
        families = self._sets.setdefault(application, {})
        if family not in families:
            sets = ModelSets(application, family)
            if learns:
                self._read_list(sets)
            families[family] = sets
        return families[family]

    def _read_list(self, sets: ModelSets) -> None:
        """Read which sets of models the store lists."""
        try:
            sets.read(self._read((sets.key,))[0])
        except StoreError as error:
            if not self._hurried:
                raise
            _log.warning("what %r has learned is looked for later: %s", sets.application, error)

    def newest(self, learner: Learner) -> Learner:
        """Return the learner that reads and writes the states of this one."""
        return self._by_prefix[learner.prefix]

    def holders(self, key: str) -> Iterator[tuple[Learner, str]]:
        """Yield the learner that holds the state of that key, and its context. Under the lock."""
        prefix, _, name = key.rpartition("/")
        learner = self._by_prefix.get(prefix + "/")
        if learner is not None:
            user = _context_in(learner, name)
            if user is not None and learner.known(user) is not None:
                yield learner, user

    def all(self) -> Iterator[tuple[str, Held]]:
        """Yield the keys and states in memory of policies that learn. Under the lock."""
        for learner in self._by_prefix.values():
            if learner.learns:
                for user in learner.users():
                    yield learner.key(user), learner.held(user)

    def load(self, learner: Learner, user: str) -> Held:
        """Return a state from the store; else one from what a related set or the shared state
        knows; else a new one."""
        held = Held(None, None, ABSENT, {})
        return self.start_state(learner, user, held, learner.key(user))

    def start_state(self, learner: Learner, user: str, held: Held, key: str = "") -> Held:
        """Return a state from the store; `held`, which has no observation of its own, begins from
        what the nearest set has learned of the context, else from the shared state, else as a new
        one. Under the lock.

        key: of the state in the store; empty: it is not there.
        """
        sets, name = learner.sets, name_of(user)
        others = list(sets.nearest(learner.models)) if learner.learns else []
        away = [
            sets.prefix_of(other) + name for other in others if not self._knows(sets, other, user)
        ]
        found: dict[str, Record] = {}
        own = [key] if key and learner.learns else []
        try:
            records = self._read((*own, *away)) if own or away else ()
            found = {record.key: record for record in records if record is not None}
            if own and (key not in found or not user):
                for earlier in sets.earlier_keys(learner.models, name):
                    if (record := self._read((earlier,))[0]) is not None:
                        own.append(earlier)
                        found[earlier] = record
                        sets.has_earlier(learner.models)
        except StoreError as error:
            if not self._hurried:
                raise
            _log.warning("a context of %r begins as a new one: %s", learner.application, error)
            held.is_late = True
            # who writes it merges it: also in a server that gets no feedback
            self.dirty[learner, user] = None
            self.start_writing()
            if held.prior is not None:  # it continues from its prior
                is_shared = held.state is LATEST
                held.origin = StateOrigin(learner.models, None, is_shared=is_shared)
                return held
        if key in found:
            held.revision = found[key].revision
        for each in own:
            stored = self.read(learner, found[each]) if each in found else None
            if stored is not None:
                if not self._hurried:
                    self._sync.complete(each, stored)
                if each != key:
                    stored.revision = held.revision
                self.has_started(learner, user)
                return stored
        held.origin, prior = self._origin(learner, user, others, found)
        if prior is None:
            state = learner.policy.init(learner.models)
        elif prior is LATEST:
            state = LATEST
        else:
            state = learner.started_from(held.origin, prior)
        publish(held, state)
        held.base = held.state
        if learner.learns:
            held.prior = state if prior is None else prior
        return held

    def _knows(self, sets: ModelSets, models: Models, user: str) -> bool:
        """Return whether the state of a context is in memory."""
        learner = sets.learners.get(models)
        return learner is not None and learner.known(user) is not None

    def _origin(
        self, learner: Learner, user: str, others: Sequence[Models], found: Mapping[str, Record]
    ) -> tuple[StateOrigin, State]:
        """Return where a state begins, and the state there: None if there is nothing, LATEST for
        the shared one."""
        for models in others:
            other = learner.sets.learners.get(models)
            theirs = None if other is None else other.known(user)
            if theirs is not None:
                if theirs.prior is None and theirs.applied:
                    return StateOrigin(models, theirs), theirs.state
                continue
            record = found.get(learner.sets.prefix_of(models) + name_of(user))
            stored = None if record is None else self.read(learner, record)
            if stored is not None:
                return StateOrigin(models, None), stored.state
        if not user:
            return StateOrigin(learner.models, None), None
        return learner.shared_origin, LATEST

    def catch_up(self, learner: Learner, user: str, held: Held) -> None:
        """Read what a state that began while the store did not answer would have started from.
        Raises StoreError."""
        if not learner.sets.is_read:
            record = self._store.get(learner.sets.key)
            with self.lock:
                learner.sets.read(record)
        others = learner.sets.nearest(learner.models)
        away = [learner.sets.prefix_of(other) + name_of(user) for other in others]
        records = self._store.txn((), [Get(key) for key in away]).results if away else ()
        found = {record.key: record for record in records if record is not None}
        with self.lock:
            held.is_late = False
            if held.prior is not None:
                held.origin = None
                return
            origin, prior = self._origin(learner, user, others, found)
            if prior is not None and not origin.is_shared:
                started = learner.started_from(origin, prior)
                publish(held, learner.merged(held.base, held.state, started))
                held.base = started

    def has_started(self, learner: Learner, user: str) -> None:
        """Make the states of other sets that follow the state of a context search again for their
        origin. Under the lock."""
        for other in learner.sets.learners.values():
            held = None if other.prefix == learner.prefix else other.known(user)
            if held is not None and held.prior is not None:
                held.origin = None

    def on_record(self, record: Record) -> None:
        """Note that another server wrote a state that is not in memory, or a list of sets. Under
        the lock."""
        prefix, _, name = record.key.rpartition("/")
        application = prefix.removeprefix(PREFIX).rpartition("/")[0]
        for sets in self._sets.get(application, {}).values():
            if record.key == sets.key:
                sets.read(record)
            elif sets.has(prefix + "/"):
                for other in sets.learners.values():
                    user = _context_in(other, name)
                    held = None if user is None else other.known(user)
                    if held is not None and held.prior is not None:
                        held.origin = None

    def _all_sets(self) -> list[ModelSets]:
        return [
            sets
            for families in self._sets.values()
            for sets in families.values()
            if any(learner.learns for learner in sets.learners.values())
        ]

    def lists(self) -> list[str]:
        """Return the keys of the lists of sets of policies that learn. Under the lock."""
        return [sets.key for sets in self._all_sets()]

    def forget_list(self, key: str) -> None:
        """Note that the store has lost a list of sets, so that it is written again. Under the
        lock."""
        for sets in self._all_sets():
            if sets.key == key:
                sets.read(None)

    def check_origins_again(self) -> None:
        """Make all states without an observation search again for their origin. Under the lock."""
        for learner in self._by_prefix.values():
            for _, held in learner.following():
                held.origin = None

    def _read(self, keys: Sequence[str]) -> Sequence[Record | None]:
        """Read records of the store: of one on another host, once this server is up, within
        READ_S."""
        if not (self._hurried and self._store.remote):
            return self._read_now(keys)
        if self._reader is not None and self._reader.is_alive():
            raise StoreError(f"store {self._store.name} has not answered yet.")
        found: list[Sequence[Record | None] | StoreError] = []

        def read() -> None:
            try:
                found.append(self._read_now(keys))
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

    def _read_now(self, keys: Sequence[str]) -> Sequence[Record | None]:
        if len(keys) == 1:
            return (self._store.get(keys[0]),)
        return self._store.txn((), [Get(key) for key in keys]).results

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
        found = Held(None, None, record.revision, applied, own=own)
        publish(found, state)
        found.base = found.state
        return found

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
                    for learner in self._by_prefix.values():
                        learner.resume()
                except BaseException:
                    self._hurried = True
                    raise
                for learner in self._learners.values():
                    learner.share(self.newest(learner))
                for sets in self._all_sets():
                    self._read_list(sets)
                self.check_origins_again()
                self.take_dirty()
            self._away = False
            count = self.replay(read) if self.journal.mode != "memory" else 0
        self._sync.start_following()
        if self.dirty:
            self.start_writing()
        return count

    # -- writing behind

    def take_dirty(self) -> list[tuple[Learner, str]]:
        """Return the states that wait to be written, and forget that they do. Under the lock."""
        taken = list(self.dirty)
        self.dirty.clear()
        for learner, user in taken:
            held = learner.known(user)
            if held is not None:
                held.is_listed = False
        return taken

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

    def health(self) -> list[Health]:
        """Return the states of the threads that write and follow."""
        return self._sync.health()

    def close(self) -> None:
        """Write what is not written yet. Idempotent."""
        try:
            self._sync.close()
            for _ in range(3):  # a merge needs another round
                if self.dirty and not self._away:
                    self.flush()
            if not (self.dirty or self._away or self.refusal):
                self.flush()  # records that all is there
        except StoreError as error:
            _log.warning("selection states stay in the journal: %s", error)
        except Exception:
            _log.exception("selection states stay in the journal")
        finally:
            self.journal.close()


def _labelled(plan: Plan, arrived: Predictions, label: object, answer: object) -> Observation:
    return Observation(plan, arrived, Truth(label), answer)


def name_of(user: str) -> str:
    """Return the last part of the key of a context's state."""
    return "u:" + _short(user) if user else "shared"


def _context_in(learner: Learner, name: str) -> str | None:
    """Return the context of the last part of a key; None for a long one that is not in memory."""
    return SHARED if name == "shared" else learner.user_of(name.removeprefix("u:"))


def _family(text: str, policy: Policy) -> str:
    """Return the name that policies with the same kind of states share: of the class, and the one
    that it gives itself."""
    return f"{text.partition('(')[0].strip()} {policy.name}"


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
