"""Asking several models at once and answering as soon as that is decided: the door to ensemble
calls.

What the cache holds is heard before anything is queued: if that decides, no row is. The rest is
submitted, and from then on the ensemble call belongs to whoever brings the next arrival. Rows that
may be asked later are copied, and their lanes made, here, because a lane is made under the GIL.
"""
cimport cython
from libc.string cimport memcpy

from clipper_core.engine.model cimport Model, is_elsewhere, mix, slo_of
from clipper_core.results.completion cimport (
    Block, CompletionState, block_drop, slot_fill, slots_claim,
)
from clipper_core.results.decider cimport (
    ANSWER, ASK, ENSEMBLE_TASKS_MAX, NEVER_US, OUTSTANDING, UNASKED, Decider, RulingData,
    decider_may_extra, decider_query,
)
from clipper_core.results.ensemble_call cimport (
    EnsembleCall, ensemble_call_answer, ensemble_call_decide, ensemble_call_lock,
    ensemble_call_new, ensemble_call_record, ensemble_call_refused, ensemble_call_submitted,
    ensemble_call_submitting, ensemble_call_unlock, task_bit,
)
from clipper_core.results.future cimport Future, future_of_ensemble
from clipper_core.runtime.histogram cimport count
from clipper_core.runtime.machine cimport relaxed, u32, u64, u8
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, OK, UNNEEDED, Status, raise_for
from clipper_core.scheduling.cost_batch cimport row_cost
from clipper_core.scheduling.deferred_calls cimport DeferredCall
from clipper_core.scheduling.lane cimport lane_new
from clipper_core.scheduling.model_state cimport ModelState
from clipper_core.scheduling.task cimport Lane
from clipper_core.wire.prediction cimport TAG_NONE, Value

cdef extern from *:
    """
    static inline int clipper_log2(unsigned long long n) { return 63 - __builtin_clzll(n | 1); }
    """
    int log2_of "clipper_log2"(u64 n) noexcept nogil


@cython.final
cdef class EnsembleRequest:
    """Threads: one. A query on its way to its models; predict_ensemble makes it."""

    def __init__(self):
        raise TypeError("it is made by predict_ensemble()")

    cdef u64 read(self, object x) except? 0:
        """Every row is checked before the first is submitted; -> bytes of them all."""
        cdef Row row
        cdef u64 total = 0
        self.kept = []
        for model in self.models:
            is_elsewhere(model, self.models[0])
            self.kept.append((<Model> model)._row(x, &row.data, &row.nbytes))
            (<Model> model)._check_bytes(row.nbytes)
            row.mark = (<Model> model)._mark(self.kept[len(self.kept) - 1], row.data, row.nbytes,
                                             self.salt)
            row.cost = (<Model> model)._cost(self.kept[len(self.kept) - 1])
            self.rows.push_back(row)
            total += (row.nbytes + 7) & ~<u64> 7
        return total

    cdef int set_votes(self, object weights, object starts_us) except -1:
        """And what is needed to ask those later that do not start at once."""
        cdef EnsembleCall* h = self.ensemble_call
        cdef u8* to = <u8*> h.asks + h.n * sizeof(DeferredCall) if h.asks != NULL else NULL
        cdef u32 i
        for i in range(h.n):
            h.unneeded[i] = &(<Model> self.models[i]).state.tally.refused[<u32> UNNEEDED]
            h.votes[i].state = UNASKED
            h.votes[i].weight = 1.0 if weights is None else weights[i]
            h.votes[i].start_us = (0 if starts_us is None else NEVER_US if starts_us[i] < 0
                                   else starts_us[i])
            if h.votes[i].start_us:
                self.set_deferred(i, to)
                to += (self.rows[i].nbytes + 7) & ~<u64> 7
        return 0

    cdef int set_deferred(self, u32 i, u8* to) except -1:
        cdef EnsembleCall* h = self.ensemble_call
        cdef DeferredCall* ask = &(<DeferredCall*> h.asks)[i]
        cdef Model model = self.models[i]
        cdef ModelState* m = model.state
        cdef u64 start_us = h.votes[i].start_us
        cdef int klass = log2_of(h.slo_us - start_us if start_us < h.slo_us else h.slo_us)
        ask.lanes, ask.tally, ask.refusing = (model.engine.state.lanes, &m.tally,
                                              &model.engine.state.refusing)
        ask.gate = &m.gates[klass]
        ask.lane = _lane(model, klass)
        ask.by_cost = m.by_cost != NULL
        if ask.by_cost:
            ask.cost = row_cost(m.by_cost, self.rows[i].nbytes, self.rows[i].cost)
        ask.keyed = m.cached
        ask.salt = self.salt
        ask.row, ask.nbytes = to, <u32> self.rows[i].nbytes
        memcpy(to, self.rows[i].data, self.rows[i].nbytes)
        if m.cached:
            ask.key = model._key(to, self.rows[i].nbytes, self.salt, self.rows[i].mark)
        return 0

    cdef int look_up(self, u64 now) except -1:
        """Tasks of `now` are asked: a hit has arrived, the others are on their way, or will be."""
        cdef EnsembleCall* h = self.ensemble_call
        cdef Value value
        cdef u32 i
        for i in range(h.n):
            if now >> i & 1 == 0:
                continue
            h.votes[i].start_us = 0
            h.votes[i].state = OUTSTANDING
            if (<Model> self.models[i])._look_up(self.rows[i].data, self.rows[i].nbytes, self.salt,
                                                 self.rows[i].mark,
                                                 &self.rows[i].key, &value):
                slot_fill(h.home, h.block, h.first + i, OK, &value)
                block_drop(h.home, h.block, 1)
                ensemble_call_record(h, i, OK)
        return 0

    cdef RulingData use_cache_hits(self) except *:
        """What the hits say; more is asked at once, where the decider wants that."""
        cdef EnsembleCall* h = self.ensemble_call
        cdef RulingData ruling
        cdef u32 i
        cdef u64 now = 0
        for i in range(h.n):
            now |= task_bit(i) if h.votes[i].start_us == 0 else 0
        self.look_up(now)
        ruling = ensemble_call_decide(h)
        while ruling.kind == ASK:
            if ruling.extra and not decider_may_extra(h.decider):
                for i in range(h.n):
                    if ruling.mask >> i & 1:
                        h.votes[i].start_us = NEVER_US
            else:
                self.look_up(ruling.mask)
            ruling = ensemble_call_decide(h)
        return ruling

    cdef int answer_at_once(self, const RulingData* ruling, u64 queued) except -1:
        """Nothing was queued yet. Unless others are to learn of them, the rest need not be."""
        cdef EnsembleCall* h = self.ensemble_call
        cdef u32 i
        for i in range(h.n):
            if queued >> i & 1 and not h.learn:
                h.votes[i].state = UNASKED
        ensemble_call_answer(h, NULL, ruling.step, ruling.mask)
        return 0

    cdef int submit(self, u64 queued) except -1:
        cdef EnsembleCall* h = self.ensemble_call
        cdef u32 i
        for i in range(h.n):
            if queued >> i & 1:
                self.submit_one(i)
        return 0

    cdef int submit_one(self, u32 i) except -1:
        cdef EnsembleCall* h = self.ensemble_call
        cdef Model model = self.models[i]
        cdef CompletionState* d = model.engine.state.completion
        cdef Status status
        ensemble_call_submitting(h, i)
        if d != h.home:
            d.tasks_of_peers.fetch_add(1, relaxed)
        status = model._queue(self.rows[i].data, self.rows[i].nbytes, &self.rows[i].key, self.salt,
                              self.slo_us, self.now_us,
                              h.block, h.first + i, self.rows[i].cost)
        if status == OK:
            return 0
        if d != h.home:
            d.tasks_of_peers.fetch_sub(1, relaxed)
        count(&model.state.tally.refused[<u32> status], 1)
        ensemble_call_lock(h)
        ensemble_call_refused(h, i, status)
        ensemble_call_unlock(h)
        return 0


cdef Lane* _lane(Model model, int klass) except NULL:
    """Of its class of SLO; made at first use, under the GIL."""
    cdef ModelState* m = model.state
    if m.lanes[klass] == NULL:
        m.lanes[klass] = lane_new(model.engine.state.lanes, m.index, <u64> 2 << klass,
                                  <u64> 1 << log2_of(m.lane_rows | 2),
                                  m.spec.row_bytes, 0, &m.tally, m.shares.load(relaxed) != 0)
    if m.lanes[klass] == NULL:
        raise_for(NO_MEMORY, f"no memory for a queue of {model.name}")
    return m.lanes[klass]


cdef int _check(tuple models, Decider decider, object weights, object starts_us) except -1:
    if not 1 <= len(models) <= ENSEMBLE_TASKS_MAX:
        raise_for(BAD_INPUT,
                  f"predict_ensemble hears 1 to {ENSEMBLE_TASKS_MAX} models, not {len(models)}")
    for name, values in (("weights", weights), ("starts_us", starts_us)):
        if values is not None and len(values) != len(models):
            raise_for(BAD_INPUT,
                      f"predict_ensemble was given {len(values)} {name} for {len(models)} models")
    if weights is not None and not all([0 <= weight < float("inf") for weight in weights]):
        raise_for(BAD_INPUT, f"weights are numbers from 0 on, not {weights}")
    if starts_us is not None and not all([-1 <= start < 1 << 62 for start in starts_us]):
        raise_for(BAD_INPUT,
                  f"starts_us are microseconds from 0 on, or -1: only when the decider asks; not "
                  f"{starts_us}")
    if decider is None:
        raise_for(BAD_INPUT, "predict_ensemble was given no decider")
    return 0


cdef bint _starts_later(object starts_us) except -1:
    return starts_us is not None and any([start != 0 for start in starts_us])


def predict_ensemble(tuple models, Decider decider, x, slo_us=None, u64 salt=0, finish=None,
                  extra=None, weights=None,
                  starts_us=None, bint learn=False):
    """One future over the same input on several models, done as soon as `decider` has an answer.
    Threads: any.

    Task i is models[i]'s; models are ranked, the best first. `starts_us[i]`: when it is asked,
    microseconds after now; 0: at once; -1: when the decider asks for it. `weights`: of votes and
    means. With `learn` the tasks that are on their way when the answer falls go on; without, they
    end as UNNEEDED, as do those never asked. `future.verdict` says what the answer is made of,
    `finish(future)` makes it; without it the result is the list of the used predictions, in rank
    order. Raises BAD_INPUT (nothing was asked), NO_MEMORY.
    """
    _check(models, decider, weights, starts_us)
    cdef Model model = models[0]
    cdef EnsembleRequest request = EnsembleRequest.__new__(EnsembleRequest)
    cdef CompletionState* home = model.engine.state.completion
    cdef Block* block = NULL
    cdef u32 first = 0, i, n = <u32> len(models)
    cdef u64 row_bytes, queued = 0
    cdef RulingData ruling
    cdef Future future
    request.models, request.salt, request.slo_us = models, salt, slo_of(slo_us, model.slo_us)
    row_bytes = request.read(x)
    if not slots_claim(home, n + 1, &block, &first):
        raise_for(NO_MEMORY, "no memory for a future")
    request.now_us = model._now_us()
    request.ensemble_call = ensemble_call_new(home, block, first, n, decider.state, request.now_us,
                                              request.slo_us,
                                learn,
                                n * sizeof(DeferredCall) + row_bytes if _starts_later(starts_us)
                                else 0)
    if request.ensemble_call == NULL:
        _give_back(home, block, first, n + 1)
        raise_for(NO_MEMORY, "no memory for an ensemble call")
    request.set_votes(weights, starts_us)
    decider_query(decider.state)
    future = future_of_ensemble(model.engine.completion, request.ensemble_call, models, finish,
                                extra)
    ruling = request.use_cache_hits()
    for i in range(n):
        queued |= task_bit(i) if request.ensemble_call.votes[i].state == OUTSTANDING else 0
    if ruling.kind == ANSWER:
        request.answer_at_once(&ruling, queued)
    if ruling.kind != ANSWER or learn:
        request.submit(queued)
    ensemble_call_submitted(request.ensemble_call)
    if any([is_elsewhere(each, model) for each in models]):
        mix(future, models)
    return future


cdef void _give_back(CompletionState* home, Block* block, u32 first, u32 n) noexcept:
    cdef Value nothing
    cdef u32 i
    nothing.word = 0
    nothing.tag = TAG_NONE
    for i in range(n):
        slot_fill(home, block, first + i, NO_MEMORY, &nothing)
    block_drop(home, block, 2 * n)
