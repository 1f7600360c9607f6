"""Runs the deciders of ensemble calls on the home's loop, which submits tasks and sets timers.

Why only there: a timer wheel has one writer, its loop; and publishing a row may run a turn of a
peer's loop, which must not happen under the lock of an ensemble call. So a thread that decides that
a task must be submitted, or a time awaited, puts the ensemble call on the home's list and wakes its
loop. An arrival by the home's loop itself is handled in the same step.

The row of a deferred task is copied once, at submit, beside the ensemble call. It is put into the
lane for the time that it is expected to have left, because lanes are made at submit. Its deadline
is the query's.
"""
from clipper_core.results.decider cimport (
    ANSWER, SUBMIT, NEVER_US, OUTSTANDING, UNSUBMITTED, RulingData, decider_may_extra,
)
from clipper_core.results.ensemble_call cimport (
    NO_TICKET, ensemble_call_answer, ensemble_call_close, ensemble_call_decide, ensemble_call_lock,
    ensemble_call_refused, ensemble_call_release, ensemble_call_submitting, ensemble_call_unlock,
    ensemble_calls_queued, timers_add, timers_take,
)
from clipper_core.runtime.histogram cimport count
from clipper_core.runtime.machine cimport relaxed, release
from clipper_core.runtime.status cimport CLOSED, OK, Status
from clipper_core.scheduling.admission cimport lane_offer, lane_offer_cost
from clipper_core.scheduling.lane cimport lanes_set_timer, submitter_enter, submitter_leave

cdef Status _queue(DeferredCall* call, EnsembleCall* h, u32 i, u64 now_us) noexcept nogil:
    if call.by_cost:
        return lane_offer_cost(call.lanes, call.lane, call.gate, call.row, call.nbytes,
                               &call.key if call.keyed else NULL, call.salt,
                               h.received_us + h.slo_us, now_us, h.block, h.first + i, call.cost)
    return lane_offer(call.lanes, call.lane, call.gate, call.row, call.nbytes,
                      &call.key if call.keyed else NULL, call.salt,
                      h.received_us + h.slo_us, now_us, h.block, h.first + i)


cdef Status _submit_unlocked(DeferredCall* call, EnsembleCall* h, u32 i, u64 now_us) noexcept nogil:
    """Submit a task. Without the lock."""
    cdef Status status = CLOSED
    cdef bint task_of_peer = call.lanes.completion != h.home
    if not submitter_enter(call.lanes[0], call.refusing[0]):
        return status
    if task_of_peer:
        call.lanes.completion.tasks_of_peers.fetch_add(1, relaxed)
    status = _queue(call, h, i, now_us)
    if status != OK and task_of_peer:
        call.lanes.completion.tasks_of_peers.fetch_sub(1, relaxed)
    submitter_leave(call.lanes[0])
    return status


cdef void _submit_one(EnsembleCall* h, u32 i, u64 now_us) noexcept nogil:
    """Submit a task. With the lock, which is released meanwhile."""
    cdef DeferredCall* call = &(<DeferredCall*> h.deferred)[i]
    cdef Status status
    h.votes[i].state = OUTSTANDING
    h.votes[i].start_us = h.elapsed_us
    ensemble_call_submitting(h, i)
    h.submitting.store(1, relaxed)
    ensemble_call_unlock(h)
    status = _submit_unlocked(call, h, i, now_us)
    ensemble_call_lock(h)
    if status != OK:
        count(&call.tally.refused[<u32> status], 1)
        ensemble_call_refused(h, i, status)
    h.submitting.store(0, release)


cdef void _submit_due(EnsembleCall* h, const RulingData* ruling, u64 now_us) noexcept nogil:
    cdef u32 i
    for i in range(h.n):
        if ruling.mask >> i & 1 and not h.over and h.votes[i].state == UNSUBMITTED:
            if ruling.extra and not decider_may_extra(h.decider):
                h.votes[i].start_us = NEVER_US          # only if all others fail
            else:
                _submit_one(h, i, now_us)


cdef void _set_timer(Lanes* lanes, EnsembleCall* h, u64 until_us) noexcept nogil:
    cdef u64 ticket
    if until_us >= h.slo_us or h.timer_us:
        return
    ticket = timers_add(lanes.timers, h)
    if ticket == NO_TICKET:
        return                  # no memory: what arrives still decides, and the deadline
    if lanes_set_timer(lanes, h.received_us + until_us, ticket):
        h.timer_us = until_us
    else:
        # as full as can be: what arrives still decides
        ensemble_call_release(timers_take(lanes.timers, ticket))


cdef void _decide(Lanes* lanes, EnsembleCall* h, u64 now_us) noexcept nogil:
    cdef RulingData ruling
    ensemble_call_lock(h)
    h.called = False
    h.elapsed_us = max(h.elapsed_us, now_us - h.received_us if now_us > h.received_us else 0)
    while not h.over:
        ruling = ensemble_call_decide(h)
        if ruling.kind == SUBMIT:
            _submit_due(h, &ruling, now_us)
            continue
        if ruling.kind == ANSWER:
            ensemble_call_answer(h, lanes.completion, ruling.step, ruling.mask)
        else:
            _set_timer(lanes, h, ruling.until_us)
        break
    ensemble_call_unlock(h)


cdef bint deferred_calls_run(Lanes* lanes, u64 now_us) noexcept nogil:
    cdef EnsembleCall* h = ensemble_calls_queued(lanes.completion, False)
    cdef EnsembleCall* after
    while h != NULL:
        after = h.next_called           # once it is not called any more, it may be called again
        _decide(lanes, h, now_us)
        ensemble_call_release(h)
        h = after
    return True


cdef void deferred_calls_close(Lanes* lanes) noexcept nogil:
    cdef EnsembleCall* h = ensemble_calls_queued(lanes.completion, True)
    cdef EnsembleCall* after
    cdef u32 i
    while h != NULL:
        after = h.next_called
        ensemble_call_close(h)
        ensemble_call_release(h)
        h = after
    for i in range(<u32> lanes.timers.ensemble_calls.size()):
        h = lanes.timers.ensemble_calls[0][i]
        if h != NULL:
            lanes.timers.ensemble_calls[0][i] = NULL
            ensemble_call_close(h)
            ensemble_call_release(h)
