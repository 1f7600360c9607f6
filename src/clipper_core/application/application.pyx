"""A query to an application, from its arguments to its answer."""
cimport cython
from cpython.dict cimport PyDict_GetItemWithError
from cpython.list cimport PyList_GET_ITEM
from cpython.object cimport PyObject
from libc.math cimport NAN, rint
from libc.string cimport memset

import os

from numpy import float64, ndarray

from clipper_core.application.deciding cimport Deciding
from clipper_core.application.output_means cimport OutputMean
from clipper_core.application.prediction_sets cimport set_of
from clipper_core.application.roles cimport NOBODY, Drawn
from clipper_core.application.selection cimport (
    NO_WINNER, TASKS_MAX, Combination, first_bits, key_of_answer, output_read, outputs_read,
    view_copy,
)
from clipper_core.cache.clock_cache cimport CacheState, cache_lookup, key_of, row_hashed
from clipper_core.engine.model cimport Model, ensemble_future, is_elsewhere, mix, salt_of
from clipper_core.learning.answer_counts cimport StatusCounts
from clipper_core.learning.answer_window cimport OUTPUTS_MAX, window_keep
from clipper_core.learning.class_evidence cimport class_evidence_read, reports_classes
from clipper_core.learning.feedback_update cimport is_label
from clipper_core.learning.first_states cimport FirstState, FirstStates
from clipper_core.learning.label_feedback cimport LEARNED, LEFT, label_learned
from clipper_core.learning.policy_states cimport Held
from clipper_core.results.completion cimport (
    Block, CompletionState, block_drop, id_claim, slot_fill, slots_claim,
)
from clipper_core.results.decider cimport (
    ANSWER, SUBMIT, UNSUBMITTED, RulingData, VoteData, decide, decider_query,
)
from clipper_core.results.ensemble_call cimport EnsembleCall
from clipper_core.results.future cimport LateTask, future_answered, future_new
from clipper_core.runtime.dtype cimport ANY
from clipper_core.runtime.histogram cimport count, count_held
from clipper_core.runtime.machine cimport relaxed, u8
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.runtime.status cimport (
    BAD_INPUT, CANCELLED, DEADLINE, DROPPED, FORKED, FULL, NO_MEMORY, OK, PENDING, UNNEEDED,
    raise_for,
)
from clipper_core.scheduling.bands cimport PRIORITY_USUAL, band_of, priority_of
from clipper_core.wire.comparison cimport (
    ARRAY_KEY, BOOL_KEY, BYTES_KEY, FLOAT_KEY, WHOLE_KEY, ValueKey, key_is_usable, key_number,
    label_of_key, number_key,
)
from clipper_core.wire.prediction cimport (
    Value, value_drop, value_hold, value_object, value_prediction,
)

from clipper_core.runtime.status import Status as StatusName

cdef extern from "Python.h":
    bint PyUnicode_IS_COMPACT_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)

cdef ObjectMember OUTPUT, QUALIFIERS            # of a prediction
OUTPUT.name, QUALIFIERS.name = b"output", b"qualifiers"
cdef ObjectMember SHARED, CONTEXTS, FIRST       # of a learner
SHARED.name = b"shared"
CONTEXTS.name = b"contexts"
FIRST.name = b"first"
cdef ObjectMember FOLLOWED                      # of the origin of a state
FOLLOWED.name = b"held"
cdef ObjectMember TRACKED                       # of a state
TRACKED.name = b"tracked"
cdef ObjectMember APPLICATION, CANDIDATES, INPUT, USER, SLO_MS, SALT, CONTEXT, ID, OUTPUTS
cdef ObjectMember PRIORITY
APPLICATION.name = b"application"               # of a request
CANDIDATES.name = b"candidate_models"
INPUT.name = b"input"
USER.name = b"user"
SLO_MS.name = b"slo_ms"
SALT.name = b"salt"
PRIORITY.name = b"priority"
CONTEXT.name = b"context"
ID.name = b"id"
OUTPUTS.name = b"outputs"

cdef enum:
    USER_CHARS_MAX = 512        # of a user's name that is not checked in Python

# The largest size of a feature.
cdef double FEATURE_MAX = 1e6

cdef u64 GOLDEN = 0x9E3779B97F4A7C15
cdef tuple NOTHING = ()
cdef str NO_ID = ""
cdef str ALL_MODELS = "all"
cdef object CERTAIN = 1.0
cdef object UNDECIDED = object()                # a state that no application has


@cython.final
@cython.freelist(32)
cdef class ApplicationQuery:
    """A query until its answer is read: `Future.extra`. Threads: any; it never changes."""

    @property
    def resolved(self):
        """The application."""
        return self.application.resolved

    @property
    def plan(self):
        """The plan of its models."""
        return self.application.plan_of(self, self.asked.probability, self.features)

    @property
    def state(self):
        """The state that it is combined by."""
        if self.learned is None:
            return self.application.learner.state(None)
        if self.features is None:
            return _read_state(self.learned)
        return self.application.resolved.policy.in_context(_read_state(self.learned),
                                                           self.features)

    @property
    def late(self):
        """The futures of its observers, by model."""
        return NOTHING if self.watched is None else self.watched

    @property
    def call(self):
        """The call of a decider; None without one."""
        if self.deciding is None:
            return None
        return self.application.orders.call(self.deciding, self.slo_us)

    @property
    def outputs(self):
        """Names of the outputs that were asked for: it has none."""
        return NOTHING

    @property
    def output_name(self):
        """The named output that its future reads: it has none."""
        return ""


@cython.final
cdef class Application:
    """An application whose queries the core schedules, combines and counts.

    resolved: its description, which Python's parts of a query read.  selection: its policy over all
    of its models.  cores: handles of the models, in the order of the selection's.  learner: the
    states of the policy.  window: answers that feedback may come for.  kept: called with the number
    of each answer; None: nobody is.  counts, queries, decided: what is counted of an answer.
    slowest: takes queries that took longer than `bar_us`.  means: running means of numbers; None:
    they are not kept.  is_teaching: not 0 while models learn by themselves; then queries are
    Python's.  opened: decodes qualifiers.  has_contexts: users have contexts in a table, which
    Python reads.  by_python: makes an answer of a future in Python.  plan_type: makes a plan of
    models and their probabilities.  latest: what a context follows that has no state of its own.
    side: counts the answers of a side of a rollout.  orders: its `deciding(state)` returns the
    Deciding of a state, None if Python decides; None: all models are waited for.  defaults: has the
    `default`, explains by `why(status, model, detail)` why a task has no prediction, and is told of
    each default by `log(number, id, reason)` and of each task that was refused for overload by
    `overloaded()`.  links: by place, what is told by `touch()` that a query uses the model, so that
    it is loaded; None: a model that is there.  uniform_of: the random number of a caller's own id.
    decoys: told of each query by `saw(number, x, user, id)`, and of its answer by `replied(number,
    output, is_default)`; None: there are none.  roles: None where all models answer.  observing:
    queries observers by `watch(models, x, slo_us, salt)`, which returns (model, future) of those
    that were, and compares them by `compare(arrived, output, watched)` with an answer.  compare:
    compares the outputs of an answer, (arrived, output), where `counts` are of too many models.

    Threads: any.
    """

    def __init__(self, resolved, Selection selection not None, cores not None, learner,
                 AnswerWindow window not None, kept, AnswerCounts counts not None,
                 Counter queries not None, Counter decided not None, slowest,
                 Gauge bar_us not None, OutputMeans means, Gauge is_teaching not None,
                 bint has_contexts, by_python, opened, plan_type, latest, str node not None,
                 u64 slo_us, double confidence_min, defaults, uniform_of, orders=None,
                 SideCounts side=None, links=None, decoys=None, Roles roles=None, observing=None,
                 compare=None, u32 priority=PRIORITY_USUAL):
        cdef u32 i, k = <u32> len(selection.models)
        if len(cores) != k:
            raise_for(BAD_INPUT, f"{len(cores)} cores for {k} models")
        self.resolved = resolved
        self.selection = selection
        self.learner = learner
        self.models = selection.models
        self.primaries = selection.primaries
        self.cores = [<Model?> core for core in cores]
        self.window = window
        self.kept = kept
        self.counts = counts
        self.side = side
        self.uniform_of = uniform_of
        self.links = None if links is None else list(links)
        if links is not None and len(self.links) != k:
            raise_for(BAD_INPUT, f"{len(self.links)} links for {k} models")
        self.decoys = decoys
        self.queries = queries
        self.decided = decided
        self.slowest = slowest
        self.means = means
        self.is_teaching = is_teaching
        self.has_contexts = has_contexts
        self.bar_us = bar_us
        self.by_python = by_python
        self.opened = opened
        self.plan_type = plan_type
        self.latest = latest
        self.node = node
        self.slo_us = slo_us
        self.priority = priority
        self.confidence_min = confidence_min
        self.defaults = defaults
        self.orders = orders
        self.undecided = None if orders is None else <Counter?> orders.undecided
        self.decided_for = UNDECIDED
        self.draws = int.from_bytes(os.urandom(8), "little")
        self.called = [(model,) for model in self.models]
        self.roles, self.observing = roles, observing
        self.compare = compare
        self.odds = NOTHING
        if roles is not None and roles.left < 1.0:
            self.odds = tuple([roles.left for _ in self.primaries])
        self.owners = [AnswerOwner(learner, models, plan_type(models)) for models in self.called]
        self.owners.append(AnswerOwner(learner, self.primaries,
                                       plan_type(self.primaries, self.odds)))
        self.output_means = [None if means is None else means.mean_of(model)
                             for model in self.models]
        for i in range(selection.n):
            self.counted[i] = <u32> counts.place(self.primaries[i])
            self.order[selection.called[i]] = i
        for i in range(k):
            self.single[i] = i
            self.places[i] = <u32> counts.place(self.models[i])
            self.mixed = self.mixed or is_elsewhere(self.cores[i], self.cores[0])
            self.is_similar = self.is_similar or (<Model> self.cores[i]).near
        self.shares_rows = all([_same_rows(core, self.cores[0]) for core in self.cores])

    def retire(self):
        """Let go of what refers to this application itself, so that it is freed with its last query
        and need not wait for the garbage collector. It is complete as before when it is queried."""
        self.quick = None
        self.decided_for = UNDECIDED
        self.deciding = None
        self.decided_query = None

    cdef object plan_of(self, ApplicationQuery query, double probability, tuple features):
        cdef tuple models = query.models if query.deciding is None else self.primaries
        cdef tuple odds = NOTHING
        if probability == probability:
            odds = (probability,)
        elif query.asked.chosen == self.selection.k:
            odds = self.odds
        return self.plan_type(models, odds, NOTHING if query.observers is None else query.observers,
                              NOTHING if features is None else features)

    cdef list make_quick(self):
        """Make what is known of queries that are answered at once, by the model that they call; the
        last one calls all."""
        self.quick = [self._quick(i, models) for i, models in
                      enumerate((*self.called, self.primaries))]
        return self.quick

    def _quick(self, u32 chosen, tuple models):
        """Return what is known of a query that is answered at once."""
        cdef ApplicationQuery query = ApplicationQuery.__new__(ApplicationQuery)
        query.application = self
        query.models = models
        query.user = query.id = ""
        query.asked.chosen = chosen
        query.asked.probability = NAN
        return query

    def predict(self, x, str user not None, u64 slo_us, u64 salt, str id not None,
                tuple features=None, u32 band=0):
        """Schedule a query and return its future; None if Python has to schedule it.

        user: "" for nobody's.  id: the caller's own, "" for none.  features: 1 to 32 floats, those
        of its user's context too; None for a query without a context.  band: of all its rows.
        """
        if features is not None and not 1 <= len(features) <= CONTEXT_MAX:
            raise_for(BAD_INPUT, f"{len(features)} features: a context has 1 to {CONTEXT_MAX}")
        return self._scheduled(x, NULL, 0, user, slo_us, salt, id, features, band)

    cdef u32 band_for(self, object priority) except? 0xFFFFFFFF:
        if priority is None:
            return band_of(0, self.priority)
        return band_of(0, priority_of(priority))

    cdef Future schedule(self, object x, str user, u64 slo_us, u64 salt, str id, tuple features,
                         u32 band):
        if self.has_contexts and user and features is None:
            return None
        return self._scheduled(x, NULL, 0, user, slo_us, salt, id, features, band)

    cdef Future schedule_row(self, const void* row, u64 nbytes, str user, u64 slo_us, str id,
                             u32 band):
        if not self.shares_rows or (self.has_contexts and user) or self.decoys is not None:
            return None
        # observers are queried with the input
        if self.roles is not None:
            return None
        return self._scheduled(None, row, nbytes, user, slo_us, 0, id, None, band)

    cdef Future _scheduled(self, object x, const void* given, u64 nbytes, str user, u64 slo_us,
                           u64 salt, str id, tuple features, u32 band):
        """Schedule a query of an input, or of a row that has been read."""
        cdef StateView view
        cdef Context context
        cdef Asked asked
        cdef Future future
        cdef double uniform = 0.0
        cdef object state = None
        if self.is_teaching.value or self.is_similar:
            return None
        asked.chosen = self.selection.k
        asked.probability = NAN
        asked.watching, asked.shadowed = 0, False
        view.features = 0
        if features is not None and not self.selection.reads_context:
            # the plan of a challenger has them all the same
            if self.odds is not NOTHING:
                return None
            return self._scheduled(x, given, nbytes, user, slo_us, salt, id, None, band)
        if self.selection.learns:
            state = self.state_of(user)
            if not self.view_of(state, &view):
                return None
            if features is not None:
                _see(self.selection, &view, &context, features)
        if self.orders is not None:
            # the order of the models follows the context
            if features is not None:
                return None
            if self.roles is not None:
                self.draw(self.uniform() if id is NO_ID or not id else self.uniform_of(id), &asked)
            future = self.by_decider(x, given, nbytes, slo_us, salt, band, &asked, user, id, state,
                                     &view)
            if future is not None and self.decoys is not None:
                self.decoys.saw(future.id, x, user, id)
            return future
        if self.selection.calls_one or self.roles is not None:
            if self.selection.calls_one and not self.selection.can_choose(&view):
                return None
            uniform = self.uniform() if id is NO_ID or not id else self.uniform_of(id)
            if self.roles is not None:
                uniform = self.draw(uniform, &asked)
        if self.selection.calls_one and asked.chosen == self.selection.k:
            asked.chosen = self.selection.choose(&view, uniform, &asked.probability)
            if self.roles is not None:
                _share(&asked, self.roles.left)
                asked.shadowed = self.roles.is_shadowed(uniform)
        future = self.look_up(x, given, nbytes, slo_us, salt, band, &asked, user, id, features,
                              state, &view)
        if future is not None:
            count_held(self.queries, 1)
            if self.decoys is not None:
                self.decoys.saw(future.id, x, user, id)
        return future

    cdef double draw(self, double uniform, Asked* asked) noexcept:
        cdef Drawn drawn
        self.roles.draw(uniform, &drawn)
        asked.watching = drawn.watching
        if drawn.challenger != NOBODY:
            asked.chosen, asked.probability = drawn.challenger, drawn.share
        elif self.selection.n == 1 and not self.selection.calls_one:
            _share(asked, self.roles.left)
        return drawn.rest

    cdef tuple observers_of(self, const Asked* asked):
        cdef tuple others = NOTHING
        cdef tuple found
        if not asked.watching and not asked.shadowed:
            return None
        if asked.shadowed:
            others = tuple([model for model in self.primaries
                            if model is not self.models[asked.chosen]])
        found = self.roles.watched(asked.watching, others)
        return found if found else None

    cdef tuple watch(self, tuple observers, object x, u64 slo_us, u64 salt):
        return self.observing.watch(observers, x, slo_us, salt)

    cdef Future by_decider(self, object x, const void* given, u64 nbytes, u64 slo_us, u64 salt,
                           u32 band, const Asked* asked, str user, str id, object state,
                           const StateView* view):
        """Answer by the decider if all that it needs is cached; else call the models. Return None
        if Python has to decide: then nothing was counted."""
        cdef Deciding deciding = self.deciding_of(state)
        cdef Model model = <Model> self.cores[0]
        cdef Decision decision
        cdef ApplicationQuery query = None
        cdef tuple observers = self.observers_of(asked)
        cdef Future future
        # the object that owns the row
        cdef object row = None
        cdef bint plain = self.shares_rows
        if deciding is None:
            return None
        if observers is not None:
            query = self.query_for(deciding, slo_us, user, id, state)
            query.observers = tuple([one for one in observers if one not in deciding.models])
        for core in self.cores:
            plain = plain and (<Model> core).watch is None
            if given != NULL and (<Model> core).cost is not None:
                return None
        if not plain:
            if given != NULL:
                return None
            if self.links is not None:
                self.touch(self.single, self.selection.k)
            if query is None:
                query = self.query_for(deciding, slo_us, user, id, state)
            return self.call_models(deciding, x, NULL, 0, slo_us, salt, band, query, x)
        decision.row = given
        decision.nbytes = nbytes
        decision.salt = salt
        if given == NULL:
            row = model._row(x, &decision.row, &decision.nbytes)
        model._check_bytes(decision.nbytes)
        if self.links is not None:
            self.touch(self.single, self.selection.k)
        future = self.decide_at_once(deciding, &decision, slo_us, query, x, user, id, view)
        if future is None:
            if query is None:
                query = self.query_for(deciding, slo_us, user, id, state)
            future = self.call_models(deciding, row, decision.row, decision.nbytes, slo_us, salt,
                                      band, query, x)
        return future

    cdef ApplicationQuery query_for(self, Deciding deciding, u64 slo_us, str user, str id,
                                    object state):
        cdef ApplicationQuery query = ApplicationQuery.__new__(ApplicationQuery)
        query.application = self
        query.models = deciding.models
        query.user, query.id = user, id
        query.learned = state
        query.asked.chosen = self.selection.k
        query.asked.probability = NAN
        query.deciding = deciding
        query.slo_us = deciding.time_us(slo_us)
        return query

    cdef Future decide_at_once(self, Deciding deciding, Decision* decision, u64 slo_us,
                               ApplicationQuery query, object x, str user, str id,
                               const StateView* view):
        """Answer by the decider if all that it needs is cached. Return None, and count nothing, if
        it is not."""
        cdef Future future
        cdef Model model
        cdef u32 rank
        try:
            if not self.find_decision(deciding, deciding.time_us(slo_us), decision):
                return None
            if query is not None:
                query.watched = self.watch(query.observers, x, slo_us, decision.salt)
            future = self.answer_decided(deciding, decision, query, user, id, view)
        finally:
            for rank in range(deciding.n):
                if decision.known >> rank & 1:
                    value_drop(&decision.outputs.value[rank])
        if future is None:
            return None
        decider_query(deciding.decider.state)
        count_held(self.queries, 1)
        for rank in range(deciding.n):
            if decision.known >> rank & 1:
                model = <Model> self.cores[deciding.places[rank]]
                count(&model.state.tally.hits, 1)
        return future

    cdef Future call_models(self, Deciding deciding, object owner, const void* row, u64 nbytes,
                            u64 slo_us, u64 salt, u32 band, ApplicationQuery query, object x):
        """Have the models called until the decider has an answer.

        owner: the input, or the object that owns the row of all models.  x: the input.
        """
        cdef Future future
        starts_us = deciding.starts
        if deciding.measures:
            starts_us = self.orders.starts_us(deciding, query.slo_us)
        future = ensemble_future(
            tuple([self.cores[deciding.places[rank]] for rank in range(deciding.n)]),
            deciding.decider, owner, row, nbytes, query.slo_us, salt, band, self.finish, query,
            deciding.votes, starts_us, True, "")
        count_held(self.queries, 1)
        if query.observers is not None and query.watched is None:
            query.watched = self.watch(query.observers, x, slo_us, salt)
        return future

    cdef Deciding deciding_of(self, object state):
        """Return the order of the models and the decider for a state; None if Python decides."""
        cdef Deciding deciding
        if state is self.decided_for:
            return self.deciding
        deciding = self.orders.deciding(self.learner.state(None) if state is None
                                        else _read_state(state))
        self.deciding = deciding
        self.decided_for = state
        if deciding is not None:
            self.decided_query = self._decided(deciding)
        return deciding

    def _decided(self, Deciding deciding):
        """Return what is known of a query that its decider answers at once."""
        cdef ApplicationQuery query = self._quick(self.selection.k, deciding.models)
        query.deciding = deciding
        return query

    cdef bint find_decision(self, Deciding deciding, u64 time_us, Decision* decision) noexcept:
        """Look up the outputs that the decider asks for, until it answers. False: it needs one that
        is not cached."""
        cdef VoteData[TASKS_MAX] votes
        cdef RulingData* ruling = &decision.ruling
        cdef u64 now = 0
        cdef u8 order = 0
        cdef u32 rank
        decision.known = 0
        decision.outputs.n = deciding.n
        memset(votes, 0, deciding.n * sizeof(VoteData))
        for rank in range(deciding.n):
            votes[rank].state = UNSUBMITTED
            votes[rank].weight = deciding.weights[deciding.places[rank]]
            votes[rank].start_us = deciding.starts_us[rank]
            now |= <u64> (deciding.starts_us[rank] == 0) << rank
        while True:
            for rank in range(deciding.n):
                if not now >> rank & 1:
                    continue
                if not self.find_output(<Model> self.cores[deciding.places[rank]], rank, decision):
                    return False
                if not deciding.weigh(&decision.outputs, rank, order, votes):
                    return False
                votes[rank].start_us = 0
                order += 1
            ruling[0] = decide(deciding.decider.state, votes, deciding.n, 0, time_us)
            if ruling.kind != SUBMIT or ruling.extra:
                return ruling.kind == ANSWER and ruling.mask != 0
            now = ruling.mask

    cdef bint find_output(self, Model model, u32 rank, Decision* decision) noexcept:
        """Look an output up in the cache, and read it."""
        cdef CacheState* cache = model.engine.state.cache
        cdef Key key
        if not model.state.cached or model.engine.state.refusing.load(relaxed):
            return False
        key = key_of(cache, model.state.spec.uid, decision.salt, decision.row, decision.nbytes)
        if not cache_lookup(cache, &key, &decision.outputs.value[rank]):
            return False
        decision.known |= <u64> 1 << rank
        return output_read(&decision.outputs, rank)

    cdef Future answer_decided(self, Deciding deciding, Decision* decision, ApplicationQuery query,
                               str user, str id, const StateView* view):
        """Return the future of the answer that a decider gives; None, and do nothing, if Python has
        to."""
        cdef Outputs outputs
        cdef Combination found
        cdef Answer answer
        cdef Ending ending
        cdef u64 used
        cdef u32 one, rank, at, i = 0
        cdef Model model = <Model> self.cores[0]
        for at in range(deciding.n):
            rank = deciding.sorted_ranks[at]
            if not decision.known >> rank & 1:
                continue
            outputs.place[i] = deciding.places[rank]
            outputs.value[i] = decision.outputs.value[rank]
            outputs.key[i] = decision.outputs.key[rank]
            outputs.confidence[i] = decision.outputs.confidence[rank]
            outputs.is_sure[i] = decision.outputs.is_sure[rank]
            i += 1
        outputs.n, outputs.queried = i, deciding.n
        outputs.named = NULL
        ending.step = decision.ruling.step
        used = deciding.used_of(&outputs, decision.ruling.mask, &one)
        if not deciding.combine(self.selection, view, &outputs, ending.step, used, one, &found):
            return None
        if found.used == 0:             # the models that were not needed are asked why
            return None
        ending.number = id_claim(model.engine.state.completion)
        ending.took_us = ending.missing = 0
        ending.seen = decision.known
        ending.probability = NAN
        ending.features = 0
        if query is None:
            query = self.decided_query
        # the application was retired meanwhile
        if query is None:
            query = self._decided(deciding)
        answer = self.end(None, &outputs, &found, query, &ending, user, id, None, NOTHING)
        return future_answered(model.engine.completion, deciding.n, ending.number, answer, query)

    cdef bint view_of(self, object state, StateView* view) except -1:
        """Set the view of a state; False if Python has to read it."""
        if state is not self.viewed:
            if not self.selection.view(state, view):
                return False
            self.viewed = state
            view_copy(&self.last_view, view, self.selection.k)
            return True
        view_copy(view, &self.last_view, self.selection.k)
        return True

    cdef object thresholds_of(self, object state):
        """Return the thresholds of the prediction sets of a state."""
        if type(state) is FirstState and (<FirstState> state).block is not None:
            return (<FirstState> state).parts.tracked
        return read_member(&TRACKED, _read_state(state))

    cdef object state_of(self, str user):
        """Return the state of a context; a FirstState for most that have no feedback. Python makes
        those that follow another state, after that has changed."""
        cdef Held held
        cdef PyObject* found
        if not user:
            held = <Held> read_member(&SHARED, self.learner)
            return held.state if _is_current(held) else self.learner.state(None)
        found = PyDict_GetItemWithError(read_member(&CONTEXTS, self.learner), user)
        if found == NULL:
            return self.learner.state(user)
        held = <Held> <object> found
        held.touched = True
        if held.prior is None:
            return self.learner.state(user) if held.state is self.latest else held.state
        if held.prior is not self.latest or held.origin is None:
            return self.learner.state(user)
        held = <Held> read_member(&SHARED, self.learner)
        if not _is_current(held):
            return self.learner.state(user)
        return (<FirstStates> read_member(&FIRST, self.learner)).newest(held)

    cdef Future look_up(self, object x, const void* given, u64 nbytes, u64 slo_us, u64 salt,
                        u32 band, const Asked* asked, str user, str id, tuple features,
                        object state, const StateView* view):
        """Look the query up in the cache. Return a future that is answered, or that has tasks for
        what is not there; None if Python has to schedule the query.

        given: the row of all models, of nbytes; NULL: it is read from `x`.
        """
        cdef Rows rows
        cdef Outputs outputs
        cdef Model model
        cdef Answer answer
        cdef Future future
        cdef ApplicationQuery query = _quick_of(self, asked.chosen)
        # the objects that own the rows
        cdef object row = None
        cdef object thresholds = self.thresholds_of(state) if self.selection.makes_sets else None
        cdef list more = None
        cdef const u32* places = self.places_of(asked.chosen)
        cdef u32 i, n = <u32> len(query.models)
        cdef tuple observers = None
        cdef Ending ending
        for i in range(n):
            model = <Model> self.cores[places[i]]
            if model.watch is not None or (given != NULL and model.cost is not None):
                return None
            if given != NULL:
                rows.data[i], rows.sizes[i] = given, nbytes
                model._check_bytes(nbytes)
                continue
            if i and self.shares_rows:
                rows.data[i], rows.sizes[i] = rows.data[0], rows.sizes[0]
                continue
            if i:
                more = [] if more is None else more
                more.append(row)
            row = model._row(x, &rows.data[i], &rows.sizes[i])
            model._check_bytes(rows.sizes[i])
        outputs.n = outputs.queried = n
        for i in range(n):
            outputs.place[i] = places[i]
        if self.links is not None:
            self.touch(places, n)
        if self.roles is not None:
            observers = self.observers_of(asked)
        self.find(&rows, &outputs, salt)
        if rows.hits != first_bits(n):
            query = self.query_of(asked, user, id, features, state)
            future = self.submit(&rows, row, more, &outputs, slo_us, salt, band, query)
            if observers is not None:
                query.observers = observers
                query.watched = self.watch(observers, x, slo_us, salt)
            return future
        model = <Model> self.cores[places[0]]
        ending.number = id_claim(model.engine.state.completion)
        ending.took_us = ending.missing = 0
        ending.probability = asked.probability
        ending.context, ending.features = view.context, view.features
        ending.thresholds = <PyObject*> thresholds
        try:
            if observers is not None:
                query = self.query_of(asked, user, id, features, state)
                query.observers = observers
                query.watched = self.watch(observers, x, slo_us, salt)
            answer = self.answer(None, &outputs, query, &ending, user, id, view)
            if answer is None:
                if observers is None:
                    query = self.query_of(asked, user, id, features, state)
                return self.answer_later(&outputs, query)
        finally:
            for i in range(n):
                value_drop(&outputs.value[i])
        future = future_answered(model.engine.completion, n, ending.number, answer, query)
        self.look_at_slowest(future, query.models, 0, answer)
        return future

    cdef int touch(self, const u32* places, u32 n) except -1:
        """Have models loaded that a query may use, and are not."""
        cdef u32 i
        for i in range(n):
            if self.links[places[i]] is not None:
                self.links[places[i]].touch()
        return 0

    cdef void find(self, Rows* rows, Outputs* outputs, u64 salt) noexcept:
        """Look the rows up in the cache."""
        cdef Model model = <Model> self.cores[outputs.place[0]]
        cdef bint is_one_row = outputs.n > 1 and self.shares_rows and not self.mixed
        cdef bint found
        cdef Key hashed
        cdef u32 i
        rows.hits = 0
        if is_one_row:
            hashed = row_hashed(model.engine.state.cache, rows.data[0], rows.sizes[0])
        for i in range(outputs.n):
            model = <Model> self.cores[outputs.place[i]]
            if is_one_row:
                found = model._look_up_hashed(hashed, rows.sizes[0], salt, &rows.keys[i],
                                              &outputs.value[i])
            else:
                found = model._look_up(rows.data[i], rows.sizes[i], salt, 0, &rows.keys[i],
                                       &outputs.value[i])
            rows.hits |= <u64> found << i

    cdef const u32* places_of(self, u32 chosen) noexcept:
        if chosen < self.selection.k:
            return self.single + chosen
        return self.selection.called

    cdef ApplicationQuery query_of(self, const Asked* asked, str user, str id, tuple features,
                                   object state):
        """Return what is known of a query until its answer is read."""
        cdef ApplicationQuery query = ApplicationQuery.__new__(ApplicationQuery)
        query.application = self
        query.models = _quick_of(self, asked.chosen).models
        query.user = user
        query.id = id
        query.features = features
        query.learned = state
        query.asked = asked[0]
        return query

    cdef Future submit(self, Rows* rows, object row, list more, Outputs* outputs, u64 slo_us,
                       u64 salt, u32 band, ApplicationQuery query):
        """Submit tasks for the rows that are not cached. Takes over the values of the others.

        row, more: the objects that own the rows: the last one, and those before it.
        """
        cdef u32 i, slot = 0, n = outputs.n
        cdef const u32* places = self.places_of(query.asked.chosen)
        cdef u32[TASKS_MAX] costs
        cdef Block* block = NULL
        cdef Model model = <Model> self.cores[places[0]]
        cdef CompletionState* home = model.engine.state.completion
        cdef Future future
        try:
            for i in range(n):
                costs[i] = 0
                if rows.hits >> i & 1 == 0 and (<Model> self.cores[places[i]]).cost is not None:
                    costs[i] = (<Model> self.cores[places[i]])._cost(
                        row if more is None or i == n - 1 else more[i], rows.data[i],
                        rows.sizes[i])
            if n == 1:
                return model._evaluate(rows.data[0], rows.sizes[0], &rows.keys[0], salt, slo_us,
                                       band, costs[0], self.finish, query)
            if not slots_claim(home, n, &block, &slot):
                raise_for(NO_MEMORY, "no memory for a future")
        except BaseException:
            for i in range(n):
                if rows.hits >> i & 1:
                    value_drop(&outputs.value[i])
            raise
        future = future_new(model.engine.completion, block, slot, n, self.finish, query)
        for i in range(n):
            if rows.hits >> i & 1:
                slot_fill(home, block, slot + i, OK, &outputs.value[i])
                block_drop(home, block, 1)
                continue
            (<Model> self.cores[places[i]])._submit_missed(
                rows.data[i], rows.sizes[i], &rows.keys[i], salt, slo_us, band, 0, block,
                slot + i, costs[i])
        if self.mixed:
            mix(future, tuple([self.cores[places[i]] for i in range(n)]))
        return future

    cdef Future answer_later(self, Outputs* outputs, ApplicationQuery query):
        """Return a future whose answer Python makes of these outputs."""
        cdef u32 i, slot = 0, n = outputs.n
        cdef Block* block = NULL
        cdef Model model = <Model> self.cores[outputs.place[0]]
        cdef CompletionState* home = model.engine.state.completion
        cdef Value value
        if not slots_claim(home, n, &block, &slot):
            raise_for(NO_MEMORY, "no memory for a future")
        for i in range(n):
            value = outputs.value[i]
            value_hold(&value)
            slot_fill(home, block, slot + i, OK, &value)
            block_drop(home, block, 1)
        return future_new(model.engine.completion, block, slot, n, self.by_python, query)

    def finish(self, Future future not None):
        """Return the answer of a query whose tasks have ended."""
        cdef ApplicationQuery query = future.extra
        cdef StateView view
        cdef Context context
        cdef Outputs outputs
        cdef Ending ending
        cdef Answer answer = None
        cdef object thresholds = None
        ending.number = future.id
        ending.took_us = future.latency_us
        ending.missing = 0
        ending.probability = query.asked.probability
        view.features = 0
        if query.learned is not None and not self.selection.view(query.learned, &view):
            return self.by_python(future)
        if query.features is not None:
            _see(self.selection, &view, &context, query.features)
        ending.context, ending.features = view.context, view.features
        if self.selection.makes_sets:
            thresholds = self.thresholds_of(query.learned)
        ending.thresholds = <PyObject*> thresholds
        # a query in a fork raises
        if future._state_of(0) == FORKED:
            return self.by_python(future)
        if query.deciding is not None:
            answer = self.finish_decided(future, query, &ending, &view)
        else:
            self.collect(future, query, &outputs, &ending)
            answer = self.answer(future, &outputs, query, &ending, query.user, query.id, &view)
        if answer is None:
            return self.by_python(future)
        self.look_at_slowest(future, query.models, ending.took_us, answer)
        return answer

    cdef void collect(self, Future future, ApplicationQuery query, Outputs* outputs,
                      Ending* ending) noexcept:
        """Set the outputs that have arrived, which the future keeps, and what is missing."""
        cdef const u32* places = self.places_of(query.asked.chosen)
        cdef u32 i, n = 0
        for i in range(future.count):
            if future._state_of(i) != OK:
                ending.missing |= <u64> 1 << i
                continue
            outputs.place[n] = places[i]
            outputs.value[n] = future._held(i)
            n += 1
        outputs.n, outputs.queried = n, future.count

    cdef Answer finish_decided(self, Future future, ApplicationQuery query, Ending* ending,
                               const StateView* view):
        """Answer by the verdict of the decider. Return None, and do nothing, if Python has to."""
        cdef Deciding deciding = query.deciding
        cdef EnsembleCall* call = future.ensemble_call
        cdef Outputs outputs
        cdef Combination found
        cdef u64 used, mask = 0
        cdef u32 at, rank, one, n = 0
        ending.step, ending.seen = 0, 0
        # no verdict: the query was given up
        if future._state_of(future.count) == OK:
            ending.step = call.step
            mask = call.used
            ending.seen = call.arrived | call.used
        for at in range(deciding.n):
            rank = deciding.sorted_ranks[at]
            if ending.seen >> rank & 1:
                outputs.place[n] = deciding.places[rank]
                outputs.value[n] = future._held(rank)
                n += 1
        outputs.n, outputs.queried = n, deciding.n
        if not outputs_read(&outputs):
            return None
        used = deciding.used_of(&outputs, mask, &one)
        if not deciding.combine(self.selection, view, &outputs, ending.step, used, one, &found):
            return None
        self.find_missing(future, query, ending)
        return self.end(future, &outputs, &found, query, ending, query.user, query.id, None,
                        NOTHING)

    cdef void find_missing(self, Future future, ApplicationQuery query, Ending* ending) noexcept:
        """Set the tasks without a prediction at the decision: they had failed by then, or the time
        of a step, or of the query, was over. One that was not started, or could not have changed
        the answer any more, is not missing."""
        cdef Deciding deciding = query.deciding
        cdef bint in_vain = ending.step > 0 or ending.took_us >= query.slo_us
        cdef bint is_open
        cdef u32 rank, ended_us
        cdef u8 status
        for rank in range(deciding.n):
            status = future._state_of(rank)
            if ending.seen >> rank & 1 or (status == UNNEEDED and deciding.starts_us[rank]):
                continue
            is_open = status == PENDING or status == UNNEEDED or status == OK
            ended_us = 0 if status == CANCELLED else future.block.latency_us[future.first + rank]
            if in_vain or (not is_open and ended_us <= ending.took_us):
                ending.missing |= <u64> 1 << rank

    cdef Answer answer(self, Future future, Outputs* outputs, ApplicationQuery query,
                       Ending* ending, str user, str id, const StateView* state):
        """Combine the outputs of the models, count the answer and remember it for feedback. Return
        None, and do nothing, if Python has to. future: None of a query that is answered at once."""
        cdef Combination found
        if not outputs_read(outputs):
            return self.answer_qualified(future, outputs, query, ending, user, id, state)
        if not self.selection.combine(state, outputs, &found):
            return None
        if self.means is not None:
            self.add_to_means(outputs)
            if outputs.n < outputs.queried:
                self.fill_in(outputs, state, &found)
        return self.end(future, outputs, &found, query, ending, user, id, None,
                        self.make_set(state, outputs, &found, ending))

    cdef Answer answer_qualified(self, Future future, Outputs* outputs, ApplicationQuery query,
                                 Ending* ending, str user, str id, const StateView* state):
        """Combine outputs of which some have qualifiers: as `answer`."""
        cdef ClassEvidence named
        cdef Combination found
        cdef dict arrived = self.predictions_of(outputs)
        if self.selection.reads_classes and not self.read_classes(outputs, arrived, &named):
            return None
        if not self.selection.combine(state, outputs, &found):
            return None
        if self.means is not None:
            self.add_to_means(outputs)
            if outputs.n < outputs.queried:
                self.fill_in(outputs, state, &found)
        return self.end(future, outputs, &found, query, ending, user, id, arrived,
                        self.make_set(state, outputs, &found, ending))

    cdef tuple make_set(self, const StateView* state, const Outputs* outputs,
                         const Combination* found, const Ending* ending):
        if not self.selection.makes_sets or found.used == 0:
            return NOTHING
        return set_of(self.selection, state, outputs, found, _output_of(outputs, found),
                      <object> ending.thresholds)

    cdef dict predictions_of(self, const Outputs* outputs):
        """Return the predictions by model."""
        cdef dict found = {}
        cdef tuple read
        cdef Value value
        cdef u32 i
        for i in range(outputs.n):
            value = outputs.value[i]
            read = value_prediction(&value)
            if len(read) > 2:
                read = (read[0], read[1], self.opened(read[2]))
            found[self.models[outputs.place[i]]] = self.window.prediction_type(*read)
        return found

    cdef bint read_classes(self, Outputs* outputs, dict arrived, ClassEvidence* named) except -1:
        """Read the class probabilities of the models, if there are any. False: Python has to."""
        cdef PyObject* said[TASKS_MAX]
        cdef PyObject* beside[TASKS_MAX]
        cdef bint reported = False
        cdef u32 i, place
        memset(said, 0, sizeof(said))
        for i in range(outputs.n):
            place = outputs.place[i]
            prediction = arrived[self.models[place]]
            output = read_member(&OUTPUT, prediction)
            qualifiers = read_member(&QUALIFIERS, prediction)
            # the prediction keeps both
            said[place], beside[place] = <PyObject*> output, <PyObject*> qualifiers
            reported = reported or reports_classes(qualifiers)
        if not reported:
            return True
        kind = type(<object> said[outputs.place[0]])
        for i in range(outputs.n):
            if type(<object> said[outputs.place[i]]) is not kind:
                return False
        # numbers are averaged whatever is said of labels
        if kind is float:
            return True
        if not is_label(kind):
            return False
        outputs.named = named
        return class_evidence_read(named, self.selection.k, said, beside, kind)

    cdef Answer end(self, Future future, Outputs* outputs, const Combination* found,
                    ApplicationQuery query, const Ending* ending, str user, str id, dict arrived,
                    tuple held):
        """Make the answer of a combination, or the default; count it, and remember it for
        feedback. arrived: the predictions, if any has qualifiers.  held: the prediction set."""
        cdef Answer answer
        cdef ValueKey right = key_of_answer(outputs, found)
        cdef str reason = NO_ID
        cdef double now_s
        if found.used == 0:
            reason = self.why_nothing(future, query, ending, outputs)
        elif found.confidence < self.confidence_min:
            reason = _too_unsure(found.confidence, self.confidence_min)
        answer = _answer_of(self, outputs, found, query, ending, reason, id, held)
        now_s = self.window.now_s()
        if arrived is not None:
            answer.beside = _qualifiers(arrived)
        elif query.observers is not None:
            arrived = self.predictions_of(outputs)
        if arrived is None and _fits_entry(self, future, outputs, query, ending):
            _remember(self, outputs, found, query, ending, user, answer, now_s)
        else:
            _remember_objects(self, future, outputs, query, ending, user, arrived, answer)
        if self.kept is not None:
            self.kept(ending.number)
        if _count_answer(self, outputs, found, &right, query, ending, now_s, reason is not NO_ID):
            if arrived is None:
                arrived = self.predictions_of(outputs)
            self.compare(arrived, _output_of(outputs, found))
        if self.side is not None:
            self.side.add_answer(ending.took_us, reason is not NO_ID)
        if self.decoys is not None:
            self.decoys.replied(ending.number, answer.output, answer.is_default)
        if reason is not NO_ID:
            self.defaults.log(ending.number, id, reason)
            self.count_default(future, outputs, found)
        if ending.missing:
            self.count_missing(future, query, ending)
        if query.watched:
            self.observing.compare(arrived, _output_of(outputs, found), query.watched)
        return answer

    cdef int count_default(self, Future future, const Outputs* outputs,
                           const Combination* found) except -1:
        """Count a default by its reason."""
        if found.used:
            count_held(self.counts.defaults.unsure, 1)
        elif outputs.n:
            count_held(self.counts.defaults.not_finite, 1)
        else:
            self.counts.defaults.ended.add(future._state_of(0))
        return 0

    cdef int count_missing(self, Future future, ApplicationQuery query,
                           const Ending* ending) except -1:
        """Count the predictions that are missing, by the status of their tasks."""
        cdef const u32* places = self.places_of(query.asked.chosen)
        cdef u32 i, place
        cdef u8 status
        for i in range(future.count):
            if not ending.missing >> i & 1:
                continue
            status = future._state_of(i)
            place = places[i] if query.deciding is None else query.deciding.places[i]
            (<StatusCounts> self.counts.missing[self.places[place]]).add(status)
            if status == FULL or status == DROPPED:
                self.defaults.overloaded()
        return 0

    cdef str why_nothing(self, Future future, ApplicationQuery query, const Ending* ending,
                         const Outputs* outputs):
        """Return the reason of a default that no model answered."""
        cdef list whys = []
        cdef u32 i
        cdef u8 status
        if outputs.n and query.deciding is None:
            return _not_finite([self.models[outputs.place[i]] for i in range(outputs.n)])
        for i in range(future.count):
            status = future._state_of(i)
            if query.deciding is not None:
                if ending.seen >> i & 1 or status == UNNEEDED:
                    continue
                if status == PENDING or status == OK:
                    status = DEADLINE
            why = self.defaults.why(StatusName(status), query.models[i], future.detail(i))
            if why not in whys:
                whys.append(why)
        if whys:
            return "; ".join(whys)
        arrived = [query.models[i] for i in range(query.deciding.n) if ending.seen >> i & 1]
        return _not_finite(arrived or query.models)

    cdef int add_to_means(self, Outputs* outputs) except -1:
        """Add numbers to the means of their models."""
        cdef u32 i
        for i in range(outputs.n):
            if outputs.key[i].kind == ARRAY_KEY:
                self.means.add(self.models[outputs.place[i]], value_object(&outputs.value[i]))
            elif outputs.key[i].kind == FLOAT_KEY and key_is_usable(&outputs.key[i]):
                (<OutputMean> self.output_means[outputs.place[i]]).add_number(
                    key_number(&outputs.key[i]))
        return 0

    cdef void fill_in(self, const Outputs* outputs, const StateView* state,
                      Combination* found) noexcept:
        """Replace a mean by one with the models' means in the place of numbers that are missing."""
        cdef Outputs filled
        cdef Combination whole
        cdef OutputMean mean
        cdef u32 at, place, i = 0, n = 0
        if found.used == 0 or found.winner != NO_WINNER:
            return
        for at in range(self.selection.n):
            place = self.selection.called[at]
            if i < outputs.n and outputs.place[i] == place:
                filled.key[n] = outputs.key[i]
                filled.confidence[n], filled.is_sure[n] = outputs.confidence[i], outputs.is_sure[i]
                i += 1
            else:
                mean = <OutputMean> self.output_means[place]
                if mean.n == 0 or mean.array is not None:
                    continue
                filled.key[n] = number_key(mean.number)
                filled.confidence[n], filled.is_sure[n] = NAN, False
            filled.place[n] = place
            n += 1
        filled.n, filled.queried = n, outputs.queried
        filled.named = NULL
        if n > outputs.n and self.selection.combine(state, &filled, &whole):
            if whole.used and whole.winner == NO_WINNER:
                found.mean = whole.mean

    cdef int look_at_slowest(self, Future future, tuple models, u32 took_us,
                             Answer answer) except -1:
        """Write a query down that is among the slowest."""
        if took_us > self.bar_us.value:
            self.slowest.add(future, models, answer.models, answer.reason)
        return 0

    cdef double uniform(self) noexcept:
        """Return the next random number in [0, 1)."""
        cdef u64 z
        self.draws += GOLDEN
        z = self.draws
        z = (z ^ z >> 30) * <u64> 0xBF58476D1CE4E5B9
        z = (z ^ z >> 27) * <u64> 0x94D049BB133111EB
        z ^= z >> 31
        return <double> (z >> 11) * 2.0 ** -53


cdef inline ApplicationQuery _quick_of(Application self, u32 chosen):
    """Return what is known of a query to this model that is answered at once."""
    cdef list quick = self.quick
    if quick is None:
        quick = self.make_quick()
    return <ApplicationQuery> <object> PyList_GET_ITEM(quick, <Py_ssize_t> chosen)


cdef inline void _share(Asked* asked, double left) noexcept nogil:
    """Have a choice be one that challengers leave so many of the queries for."""
    if left < 1.0:
        asked.probability = (left if asked.probability != asked.probability
                             else left * asked.probability)


cdef inline bint _fits_entry(Application self, Future future, const Outputs* outputs,
                             ApplicationQuery query, const Ending* ending) noexcept:
    """Return whether an answer without qualifiers and observers has room in an entry: it is of few
    models, no prediction of it is late, and its plan is its owner's."""
    if outputs.queried > OUTPUTS_MAX:
        return False
    if outputs.n < outputs.queried and query.deciding is not None and future is not None:
        return False
    return self.odds is NOTHING or not ending.features or outputs.queried == 1


cdef inline int _remember(Application self, const Outputs* outputs, const Combination* found,
                          ApplicationQuery query, const Ending* ending, str user, Answer answer,
                          double now_s) except -1:
    """Keep an answer for its feedback."""
    cdef AnswerOwner owner = <AnswerOwner> self.owners[query.asked.chosen]
    cdef u32 i, winner = found.winner
    cdef u32 arrived = <u32> first_bits(outputs.n)
    cdef PyObject* other = NULL
    if outputs.n < outputs.queried:
        arrived = 0
        for i in range(outputs.n):
            arrived |= <u32> 1 << (self.order[outputs.place[i]]
                                   if query.asked.chosen == self.selection.k else 0)
    if answer.reason is not NO_ID:
        winner, other = NO_WINNER, <PyObject*> answer.output
    return window_keep(self.window, now_s, ending.number, owner, user, outputs.n, arrived,
                       outputs.value, outputs.key, outputs.confidence, outputs.is_sure,
                       winner, found.mean, other, ending.probability, ending.context,
                       ending.features)


cdef int _remember_objects(Application self, Future future, const Outputs* outputs,
                           ApplicationQuery query, const Ending* ending, str user, dict arrived,
                           Answer answer) except -1:
    """Keep an answer as objects: with the tasks that it did not wait for, and the observers'."""
    cdef u32 i
    cdef list late = []
    cdef tuple features = NOTHING
    if ending.features:
        features = tuple([ending.context[i] for i in range(ending.features)])
    if arrived is None:
        arrived = self.predictions_of(outputs)
    if query.watched is not None:
        late.extend(query.watched)
    if query.deciding is not None:
        arrived = {model: arrived[model] for model in query.models if model in arrived}
    if query.deciding is not None and future is not None:
        for i in range(query.deciding.n):
            if not ending.seen >> i & 1:
                late.append((query.models[i], LateTask(future, i)))
    self.window.add(ending.number, self.learner, user,
                    self.plan_of(query, ending.probability, features), arrived, answer.output,
                    tuple(late))
    return 0


cdef dict _qualifiers(dict arrived):
    """Return the qualifiers of the predictions that have some; None if none has."""
    cdef dict found = {}
    for model, prediction in arrived.items():
        qualifiers = read_member(&QUALIFIERS, prediction)
        if qualifiers:
            found[model] = qualifiers
    return found if found else None


cdef object _named_label(const Outputs* outputs, const Combination* found):
    """Return a label that class probabilities name, and no model voted for."""
    cdef u8 kind = outputs.key[0].kind
    cdef object type_ = str
    if kind == BOOL_KEY:
        type_ = bool
    elif kind == WHOLE_KEY:
        type_ = int
    elif kind == BYTES_KEY:
        type_ = bytes
    return label_of_key(&outputs.named.label[found.label - 1], type_)


cdef inline tuple _models_used(Application self, const Outputs* outputs, u64 used,
                               ApplicationQuery query):
    """Return the models whose outputs are in the answer."""
    if used == first_bits(outputs.queried):
        return self.primaries if query.asked.chosen == self.selection.k else query.models
    return tuple([self.models[outputs.place[i]] for i in range(outputs.n) if used >> i & 1])


cdef inline object _output_of(const Outputs* outputs, const Combination* found):
    """Return what the models say together; None if nothing."""
    cdef Value value
    if found.label:
        return _named_label(outputs, found)
    if found.winner != NO_WINNER:
        value = outputs.value[found.winner]
        return value_object(&value)
    return found.mean if found.used else None


cdef inline Answer _answer_of(Application self, const Outputs* outputs, const Combination* found,
                              ApplicationQuery query, const Ending* ending, str reason, str id,
                              tuple held):
    """Return the answer that models give together, or the default."""
    cdef Answer answer = Answer.__new__(Answer)
    answer.output = self.defaults.default if reason is not NO_ID else _output_of(outputs, found)
    answer.confidence = CERTAIN if found.confidence == 1.0 else found.confidence
    answer.agreement = CERTAIN if found.agreement == 1.0 else found.agreement
    answer.is_default = reason is not NO_ID
    answer.reason = reason
    answer.models = _models_used(self, outputs, found.used, query)
    answer.missing = NOTHING
    if ending.missing:
        answer.missing = tuple([query.models[i] for i in range(len(query.models))
                                if ending.missing >> i & 1])
    answer.set = held
    answer.latency_us = ending.took_us
    answer.node = self.node
    answer.number = ending.number
    answer.decided_by = ALL_MODELS
    if query.deciding is not None:
        answer.decided_by = query.deciding.names[ending.step] if found.used else NO_ID
    answer.request_id = id
    return answer


cdef inline int _count_answer(Application self, const Outputs* outputs, const Combination* found,
                              const ValueKey* right, ApplicationQuery query, const Ending* ending,
                              double now_s, bint is_default) except -1:
    """Count an answer by its models and by the step that decided it. Return 1 if Python has to
    compare the outputs."""
    cdef u32[TASKS_MAX] counted
    cdef const u32* places = self.counted
    cdef u32 i
    if query.asked.chosen < self.selection.k:
        places = self.places + query.asked.chosen
    if query.deciding is None:
        count_held(self.decided, 1)
    elif found.used:
        count_held(<Counter> query.deciding.counters[ending.step], 1)
    else:
        count_held(self.undecided, 1)
    if outputs.n < outputs.queried:
        for i in range(outputs.n):
            counted[i] = self.places[outputs.place[i]]
        places = counted
    return self.counts.add_answer(now_s, ending.took_us, outputs.n, places, found.used,
                                  is_default, outputs.key, right)


cdef str _too_unsure(double confidence, double least):
    """Return the reason of a default for lack of confidence."""
    return f"confidence {confidence:.2f} is below the application's {least:.2f}"


cdef str _not_finite(models):
    """Return the reason of a default for outputs of these models."""
    return f"the output of {', '.join([str(model) for model in models])} is not a finite value"


cdef int _see(Selection selection, StateView* view, Context* context, tuple features) except -1:
    """Have a view be for a query with these features."""
    cdef u32 i
    context.n = <u32> len(features)
    for i in range(context.n):
        context.features[i] = features[i]
    selection.in_context(view, context.features, context.n)
    return 0


cdef tuple features_in(object context):
    cdef list found = []
    cdef double feature
    if type(context) is ndarray and context.dtype == float64 and context.ndim == 1:
        context = context.tolist()
    if type(context) is not list and type(context) is not tuple:
        return None
    for value in context:
        if type(value) is int and -FEATURE_MAX <= value <= FEATURE_MAX:
            value = float(value)
        if type(value) is not float:
            return None
        feature = value
        if not -FEATURE_MAX <= feature <= FEATURE_MAX:
            return None
        found.append(value)
    return tuple(found) if 1 <= len(found) <= CONTEXT_MAX else None


cdef object _read_state(object state):
    """Return a state as Python reads it."""
    return (<FirstState> state).made_state() if type(state) is FirstState else state


cdef bint _is_current(Held held) except -1:
    """Return whether a state is what it follows, or follows none."""
    cdef object followed
    if held.prior is None:
        return True
    if held.origin is None:
        return False
    followed = read_member(&FOLLOWED, held.origin)
    return followed is None or (<Held?> followed).state is held.prior


cdef bint _same_rows(Model one, Model other) except -1:
    """Return whether two models read the same row from an input."""
    if one.guessed or other.guessed or one.tensors is not None or other.tensors is not None:
        return False
    # the type of one that has none is found with its first row
    if one.state.spec.dtype == ANY or one.state.spec.dtype != other.state.spec.dtype:
        return False
    return one.shape == other.shape and one.state.finite == other.state.finite


@cython.final
cdef class ApplicationTable:
    """The applications of a server whose queries the core schedules, by name. Threads: any."""

    def __init__(self):
        self.by_name = {}

    def replace(self, dict by_name not None):
        """Replace all of them."""
        self.by_name = by_name

    cdef Application application(self, object name):
        cdef PyObject* found = PyDict_GetItemWithError(self.by_name, name)
        return None if found == NULL else <Application> <object> found

    def schedule(self, request):
        """Schedule a request to an application and return its future; None if Python has to."""
        return self.scheduled(request)

    cdef Future scheduled(self, object request):
        cdef Application application
        cdef object user = read_member(&USER, request), slo_ms = read_member(&SLO_MS, request)
        cdef object name = read_member(&APPLICATION, request)
        cdef object context = read_member(&CONTEXT, request)
        cdef tuple features = None
        if type(name) is not str or len(read_member(&CANDIDATES, request)):
            return None
        if len(read_member(&OUTPUTS, request)):
            return None
        if context is not None:
            features = features_in(context)
            if features is None:
                return None
        application = self.application(name)
        if application is None or slo_ms is not None or not _is_plain_name(user):
            return None
        if read_member(&ID, request) != "":
            return None
        return application.schedule(read_member(&INPUT, request), "" if user is None else user,
                                    application.slo_us, salt_of(read_member(&SALT, request)), "",
                                    features, application.band_for(read_member(&PRIORITY, request)))


cdef class RequestScheduler:
    """The part of a server that schedules requests. Threads: any.

    table: of all applications.  others: its `schedule` schedules the requests that the core does
    not take.
    """

    def __init__(self, ApplicationTable table not None, others):
        self.requests = table
        self.other_requests = others

    @cython.binding(False)
    def schedule_prediction(self, request):
        """Schedule one query and return its future at once: see PredictionRequest.

        Raises UnknownApplication, UnknownModel, InvalidInput.
        """
        cdef Future future = self.requests.scheduled(request)
        return self.other_requests.schedule(request) if future is None else future


cdef inline bint _is_plain_name(object user) noexcept:
    """Return whether it is a user's name, or nobody's, that needs no closer look."""
    if user is None:
        return True
    return (type(user) is str and PyUnicode_IS_COMPACT_ASCII(user)
            and PyUnicode_GET_LENGTH(user) <= USER_CHARS_MAX)


cdef class QueryHandle:
    """The part of an application's handle that schedules queries and takes feedback. Threads: any.

    name: of the application.  table: of all applications.  slo_ms_max: longest deadline, in
    milliseconds.  others: its `predict` schedules, and checks, the queries that the core does not
    take, and its `feedback` learns, and checks, the feedback that it does not; they get all
    arguments.
    """

    def __init__(self, str name not None, ApplicationTable table not None, double slo_ms_max,
                 others):
        self.others = others
        self.seen = None
        self.name = name
        self.table = table
        self.slo_ms_max = slo_ms_max

    @cython.binding(False)
    def predict(self, x, user=None, slo_ms=None, salt=0, context=None, id="", outputs=(),
                bint stream=False, part_slo_ms=None, slo_total_ms=None, priority=None):
        """Schedule one query and return the Future of its `Answer` at once.

        x: one input of the application's type; of named tensors a dict.  user: whose selection
        state applies.  slo_ms: instead of the application's; the answer is there by then, from the
        models or the default. salt: another cache entry. context: array-like f64[d], d up to 32,
        by which a contextual policy (linucb, lints) chooses the model; others ignore it.  id:
        your own name for the query, up to 512 printable characters, for `Answer.request_id`, logs
        and decoys. A query whose models are chosen at random gets the same ones again when it is
        made with the same id and the policy has learned nothing since. outputs: of named outputs
        only these.  stream: return a PartsFuture, whose parts arrive one by one, for a policy that
        chooses one model; then slo_ms is the time until the first part, part_slo_ms between two
        parts, and slo_total_ms until the end, a minute if not given.  priority: 1, the highest, to
        3, instead of the application's; a query in parts takes no place in a queue, and has none.
        Raises InvalidInput (type, shape, SLO, context, id, priority), UnknownApplication, and
        UnknownModel when no model is linked; the future never raises for a model's failure.
        """
        cdef Application application = self.application()
        cdef Future future
        cdef u64 slo_us, number
        cdef tuple features = None
        if stream or part_slo_ms is not None or slo_total_ms is not None:
            return self.others.predict_parts(x, user, slo_ms, salt, context, id, outputs, stream,
                                             part_slo_ms, slo_total_ms, priority)
        number = salt_of(salt)
        if context is not None:
            features = features_in(context)
        if (application is None or (features is None and context is not None) or id is not NO_ID
                or outputs is not NOTHING or not _is_plain_name(user)):
            return self.others.predict(x, user, slo_ms, salt, context, id, outputs, priority)
        slo_us = application.slo_us
        if slo_ms is not None:
            slo_us = self._slo_us(slo_ms)
        if slo_us == 0:
            return self.others.predict(x, user, slo_ms, salt, context, id, outputs, priority)
        future = application.schedule(x, "" if user is None else user, slo_us, number, NO_ID,
                                      features, application.band_for(priority))
        if future is None:
            return self.others.predict(x, user, slo_ms, salt, context, id, outputs, priority)
        return future

    @cython.binding(False)
    def feedback(self, prediction=None, *, label=None, correct=None, score=None, input=None,
                 user=None, weight=1.0, context=None):
        """Learn what was right about a query. The application's policy has learned it when this
        returns, and a crash after that does not lose it.

        prediction: an `Answer` or its id; or `input` instead (and `user`, `context`), and the
        models are queried again.  label: the right output; or `correct`: whether the answer was; or
        `score`: how good it was, 0 to 1.  weight: as so many feedbacks. Returns True when it
        counts, False when this prediction had feedback before. Raises InvalidInput,
        UnknownPrediction (too old, of a server that has ended or shares no store, another
        application's), Overloaded, StoreError. Threads: any.
        """
        cdef Application application = self.application()
        cdef int outcome
        if (application is not None and not application.is_teaching.value and correct is None
                and score is None and input is None and user is None and context is None
                and type(weight) is float and weight == 1.0):
            outcome = label_learned(application.window, prediction, self.name, label)
            if outcome != LEFT:
                return outcome == LEARNED
        return self.others.feedback(prediction, label, correct, score, input, user, weight, context)

    cdef Application application(self):
        """Return the application; None if Python schedules its queries."""
        if self.table.by_name is not self.seen:
            self.seen = self.table.by_name
            self.found = self.table.application(self.name)
        return self.found

    cdef u64 _slo_us(self, object slo_ms) except? 0:
        """Convert an SLO to microseconds; 0 for one that Python has to look at."""
        cdef double given
        if type(slo_ms) is not float and type(slo_ms) is not int:
            return 0
        given = slo_ms
        if not 0.0 < given <= self.slo_ms_max:
            return 0
        return max(<u64> rint(given * 1000.0), <u64> 1)
