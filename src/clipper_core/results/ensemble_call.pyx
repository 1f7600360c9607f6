"""Ensemble calls: they record arrivals and reach one verdict, under one lock.

Why a lock and not a lock-free version: up to 64 loops at once may record an arrival, run the
decider and perhaps answer. All of this takes less than a microsecond, and threads contend only when
two models of one query answer within that time. Only the verdict slot may be watched without the
lock; it is a slot like any other.

Never done under the lock: submitting a task (its lane may make this thread run the loop of a peer,
which may complete a task of the same ensemble call), and waiting.

Memory. An ensemble call holds the block by the reference that a task of the verdict slot would
have; a task that will never be submitted releases its reference when that is certain. A ticket of a
timer is an index and the number of its use, so a ticket that is left in the wheel is stale, and the
ensemble call can be freed before its time has passed.
"""
from libc.stdlib cimport free

from clipper_core.results.completion cimport (
    IN_ENSEMBLE, block_drop, completion_notify, completion_notify_loop,
    completion_notify_outside, completion_wake_loop, slot_boxes, slot_state, slot_try_cancel,
)
from clipper_core.results.decider cimport (
    ANSWER, ARRIVED, FAILED, OUTSTANDING, SUBMIT, UNSUBMITTED, decide, decider_drop,
    decider_hold,
)
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.histogram cimport count
from clipper_core.runtime.machine cimport acq_rel, acquire, aligned_new, pause, relaxed, seq_cst
from clipper_core.runtime.spin_lock cimport spin_lock, spin_unlock
from clipper_core.runtime.status cimport CANCELLED, OK, UNNEEDED
from clipper_core.wire.comparison cimport (
    ValueKey, key_is_usable, key_number, keys_are_equal, value_key,
)
from clipper_core.wire.prediction cimport TAG_BLOB, blob_of, word_confidence

ctypedef EnsembleCall* EnsembleCallPointer

cdef u64 NO_TICKET = ~<u64> 0

cdef enum:
    INDEX_BITS = 24             # bits of the index in a timer's ticket; the count of its uses is
                                # above, and a ticket is below 2^48


# -- votes
# --------------------------------------------------------------------------------------------------

cdef ValueKey _key_of(EnsembleCall* h, u32 i) noexcept nogil:
    """Return the key of the output of task i, which ended OK."""
    return value_key(h.block.word[h.first + i], h.block.tag[h.first + i], &h.votes[i].field)


cdef void _weigh(EnsembleCall* h, u32 i) noexcept nogil:
    """Determine the vote of task i, which ended OK."""
    cdef ValueKey other, key = _key_of(h, i)
    cdef VoteData* vote = &h.votes[i]
    cdef u64 word = h.block.word[h.first + i]
    cdef float confidence
    cdef u32 k
    vote.state = FAILED
    if not key_is_usable(&key):
        return
    vote.confidence = -1
    if h.block.tag[h.first + i] & TAG_BLOB and blob_of(word).has_confidence:
        confidence = word_confidence(word)
        vote.confidence = (min(max(<double> confidence, 0.0), 1.0) if confidence == confidence
                           else 0)
    vote.numeric = key.data == NULL
    vote.number = key_number(&key)
    vote.order = h.arrivals
    h.arrivals += 1
    vote.klass = i
    for k in range(h.n):
        if h.votes[k].state == ARRIVED and h.votes[k].klass == k:
            other = _key_of(h, k)
            if keys_are_equal(&key, &other):
                vote.klass = k
                break
    vote.state = ARRIVED


# -- creating and freeing
# --------------------------------------------------------------------------------------------------

cdef EnsembleCall* ensemble_call_new(CompletionState* home, Block* block, u32 first, u32 n,
                          DeciderState* decider, u64 now_us, u64 slo_us,
                          bint learn, u64 more_bytes) noexcept nogil:
    cdef u64 head = (sizeof(EnsembleCall) + 63) & ~<u64> 63
    cdef char* memory = <char*> aligned_new(head + n * (sizeof(VoteData) + sizeof(void*))
                                            + more_bytes)
    cdef EnsembleCall* h = <EnsembleCall*> memory
    if h == NULL:
        return NULL
    h.refs.store(2, relaxed)                    # references of its future and its submitter
    h.home, h.block, h.first, h.n = home, block, first, n
    h.decider = decider_hold(decider)
    h.received_us, h.slo_us, h.learn = now_us, slo_us, learn
    h.votes = <VoteData*> (memory + head)
    h.unneeded = <atomic[u64]**> (memory + head + n * sizeof(VoteData))
    h.deferred = memory + head + n * (sizeof(VoteData) + sizeof(void*)) if more_bytes else NULL
    home.ensemble_calls.fetch_add(1, relaxed)
    return h


cdef void ensemble_call_release(EnsembleCall* h) noexcept nogil:
    if h.refs.fetch_sub(1, acq_rel) == 1:
        decider_drop(h.decider)
        h.home.ensemble_calls_freed.fetch_add(1, relaxed)
        block_drop(h.home, h.block, 1)
        free(h)


cdef void ensemble_call_lock(EnsembleCall* h) noexcept nogil:
    spin_lock(h.lock)


cdef void ensemble_call_unlock(EnsembleCall* h) noexcept nogil:
    spin_unlock(h.lock)


cdef u32 _end_open(EnsembleCall* h, bint outstanding) noexcept nogil:
    """End the slots of tasks that were never submitted. Return how many slots ended. outstanding:
    also end those of submitted tasks."""
    cdef u32 i, ended = 0
    for i in range(h.n):
        if h.votes[i].state == UNSUBMITTED:
            ended += slot_try_cancel(h.block[0], h.first + i, UNNEEDED)
            h.votes[i].state = FAILED
            count(h.unneeded[i], 1)
            block_drop(h.home, h.block, 1)
        elif outstanding and h.votes[i].state == OUTSTANDING:
            ended += slot_try_cancel(h.block[0], h.first + i, UNNEEDED)
    return ended


cdef void ensemble_call_answer(EnsembleCall* h, CompletionState* by, u32 step,
                               u64 used) noexcept nogil:
    cdef u32 i, ended, boxes, verdict = h.first + h.n
    h.over = True
    h.step, h.used, h.arrived = <u8> step, used, used
    for i in range(h.n):
        if h.votes[i].state == ARRIVED:
            h.arrived |= task_bit(i)
    h.block.latency_us[verdict] = <u32> min(h.elapsed_us, <u64> 0xFFFFFFFF)
    ended = slot_try_cancel(h.block[0], verdict, OK)
    boxes = slot_boxes(h.block[0], verdict)
    ended += _end_open(h, not h.learn)
    h.home.answered.fetch_add(ended, relaxed)
    if by != NULL:
        completion_notify(by, h.home, h.block.first_id + verdict, boxes)
    else:
        completion_notify_outside(h.home, boxes)


cdef u32 _stop(EnsembleCall* h) noexcept nogil:
    """Stop the call, whose verdict is no longer needed. Return how many slots ended. The caller
    holds the lock."""
    cdef u32 ended
    if h.over:
        return 0
    h.over = True
    ended = slot_try_cancel(h.block[0], h.first + h.n, CANCELLED)
    return ended + _end_open(h, False)


cdef u32 ensemble_call_cancel(EnsembleCall* h) noexcept nogil:
    cdef u32 ended
    ensemble_call_lock(h)
    ended = _stop(h)
    ensemble_call_unlock(h)
    return ended


cdef void ensemble_call_drop(EnsembleCall* h) noexcept nogil:
    cdef u32 ended = ensemble_call_cancel(h)
    if ended:
        h.home.answered.fetch_add(ended, relaxed)
    while h.submitting.load(acquire):           # the future keeps its models alive
        pause()
    ensemble_call_release(h)


cdef int ensemble_call_answer_chosen(EnsembleCall* h, u32 step, u64 used,
                                     u64 elapsed_us) noexcept nogil:
    cdef u32 i
    cdef int ruled = 0
    ensemble_call_lock(h)
    for i in range(64):
        if used >> i & 1 and (i >= h.n or slot_state(h.block[0], h.first + i) != OK):
            ruled = -1
    if ruled == 0 and not h.over:
        h.elapsed_us = max(h.elapsed_us, elapsed_us)
        ensemble_call_answer(h, NULL, step, used)
        ruled = 1
    ensemble_call_unlock(h)
    return ruled


# -- deciding
# --------------------------------------------------------------------------------------------------

cdef void ensemble_call_record(EnsembleCall* h, u32 i, Status status) noexcept nogil:
    if status == OK:
        _weigh(h, i)
    else:
        h.votes[i].state = FAILED


cdef RulingData ensemble_call_decide(EnsembleCall* h) noexcept nogil:
    return decide(h.decider, h.votes, h.n, h.elapsed_us, h.slo_us)


cdef bint _consider(EnsembleCall* h, CompletionState* by) noexcept nogil:
    """Run the decider, under the lock. Return True if the home's loop has to handle the call."""
    cdef RulingData ruling
    if h.over:
        return False
    ruling = ensemble_call_decide(h)
    if ruling.kind == ANSWER:
        ensemble_call_answer(h, by, ruling.step, ruling.mask)
        return False
    if ruling.kind == SUBMIT:
        return True
    return ruling.until_us < h.slo_us and h.timer_us == 0


cdef void ensemble_call_task_ended(CompletionState* d, void* ensemble_call, u32 slot, bint first,
                                   u8 status,
                        u32 latency_us) noexcept nogil:
    """Record that a task has ended. first: False if its slot had ended before."""
    cdef EnsembleCall* h = <EnsembleCall*> ensemble_call
    cdef u32 i = slot - h.first
    cdef bint calls = False
    if first:
        ensemble_call_lock(h)
        if not h.over:
            h.elapsed_us = max(h.elapsed_us, h.votes[i].start_us + latency_us)
            ensemble_call_record(h, i, <Status> status)
            calls = _consider(h, d)
        ensemble_call_unlock(h)
        if calls:
            ensemble_call_enqueue(h, False)
    ensemble_call_release(h)


cdef void ensemble_call_sent(EnsembleCall* h, u32 slot) noexcept nogil:
    """Note that a row was sent. TIED: the first task whose row is sent cancels those that still
    wait."""
    cdef u32 k, ended = 0, i = slot - h.first
    if not h.decider.tied:
        return
    ensemble_call_lock(h)
    if not h.over and h.sent == 0:
        for k in range(h.n):
            if k != i and h.votes[k].state == OUTSTANDING and slot_try_cancel(h.block[0],
                    h.first + k, UNNEEDED):
                h.votes[k].state = FAILED
                ended += 1
    h.sent |= task_bit(i)
    ensemble_call_unlock(h)
    if ended:
        h.home.answered.fetch_add(ended, relaxed)


# -- for the submitter
# --------------------------------------------------------------------------------------------------

cdef void ensemble_call_submitting(EnsembleCall* h, u32 i) noexcept nogil:
    h.refs.fetch_add(1, relaxed)
    h.block.word[h.first + i] = <u64> h
    h.block.boxes[h.first + i].fetch_or(IN_ENSEMBLE, relaxed)


cdef void ensemble_call_refused(EnsembleCall* h, u32 i, Status status) noexcept nogil:
    if h.votes[i].state == OUTSTANDING:
        h.votes[i].state = FAILED
    if slot_try_cancel(h.block[0], h.first + i, status):
        h.home.answered.fetch_add(1, relaxed)
        if slot_boxes(h.block[0], h.first + i) != IN_ENSEMBLE:
            completion_notify_outside(h.home, slot_boxes(h.block[0], h.first + i))
    block_drop(h.home, h.block, 1)
    h.refs.fetch_sub(1, relaxed)                # not the last reference: the caller has one


cdef void ensemble_call_submitted(EnsembleCall* h) noexcept nogil:
    cdef bint calls
    ensemble_call_lock(h)
    calls = _consider(h, NULL)
    ensemble_call_unlock(h)
    if calls:
        ensemble_call_enqueue(h, True)
    ensemble_call_release(h)


# -- the home's loop
# --------------------------------------------------------------------------------------------------

cdef void ensemble_call_enqueue(EnsembleCall* h, bint submitter) noexcept nogil:
    cdef bint closed = False
    ensemble_call_lock(h)
    if h.called or h.over:
        ensemble_call_unlock(h)
        return
    spin_lock(h.home.lock)
    closed = h.home.calls_end
    if not closed:
        h.called = True
        h.refs.fetch_add(1, relaxed)
        h.next_called = <EnsembleCall*> h.home.calls.load(relaxed)
        h.home.calls.store(<u64> h, seq_cst)
    spin_unlock(h.home.lock)
    ensemble_call_unlock(h)
    if closed:
        ensemble_call_close(h)
    elif submitter:
        completion_notify_loop(h.home)
    else:
        completion_wake_loop(h.home)


cdef void ensemble_call_close(EnsembleCall* h) noexcept nogil:
    cdef RulingData ruling
    ensemble_call_lock(h)
    if not h.over:
        ruling = decide(h.decider, h.votes, h.n, h.elapsed_us, h.elapsed_us)
        ensemble_call_answer(h, NULL, ruling.step, ruling.mask)
    ensemble_call_unlock(h)


cdef EnsembleCall* ensemble_calls_queued(CompletionState* d, bint for_good) noexcept nogil:
    cdef EnsembleCall* h
    spin_lock(d.lock)
    h = <EnsembleCall*> d.calls.load(relaxed)
    d.calls.store(0, relaxed)
    d.calls_end = for_good
    spin_unlock(d.lock)
    return h


cdef Timers* timers_new() noexcept nogil:
    cdef Timers* t = <Timers*> aligned_new(sizeof(Timers))
    if t != NULL:
        t.ensemble_calls = make[vector[EnsembleCallPointer]]()
        t.uses = make[vector[u32]]()
        t.unused = make[vector[u32]]()
        if t.ensemble_calls == NULL or t.uses == NULL or t.unused == NULL:
            timers_free(t)
            return NULL
    return t


cdef void timers_free(Timers* t) noexcept nogil:
    if t != NULL:
        del t.ensemble_calls
        del t.uses
        del t.unused
        free(t)


cdef u64 timers_add(Timers* t, EnsembleCall* h) noexcept nogil:
    cdef u32 i
    cdef size_t n = t.ensemble_calls.size() + 1
    if t.unused.empty():
        if not (make_room(t.ensemble_calls[0], n) and make_room(t.uses[0], n)
                and make_room(t.unused[0], n)):
            return NO_TICKET
        i = <u32> t.ensemble_calls.size()
        t.ensemble_calls.push_back(h)
        t.uses.push_back(1)
    else:
        i = t.unused.back()
        t.unused.pop_back()
        t.ensemble_calls[0][i] = h
    h.refs.fetch_add(1, relaxed)
    return <u64> t.uses[0][i] << INDEX_BITS | i


cdef EnsembleCall* timers_take(Timers* t, u64 ticket) noexcept nogil:
    cdef u32 i = <u32> (ticket & ((1 << INDEX_BITS) - 1))
    cdef EnsembleCall* h
    if (i >= t.ensemble_calls.size() or t.ensemble_calls[0][i] == NULL
        or t.uses[0][i] != <u32> (ticket >> INDEX_BITS)):
        return NULL
    h = t.ensemble_calls[0][i]
    t.ensemble_calls[0][i] = NULL
    t.uses[0][i] = (t.uses[0][i] + 1) & ((1 << INDEX_BITS) - 1)
    t.unused.push_back(i)
    return h


cdef bint timers_has(Timers* t, u64 ticket) noexcept nogil:
    """Release the ensemble call of a ticket that is no longer needed."""
    cdef u32 i = <u32> (ticket & ((1 << INDEX_BITS) - 1))
    cdef EnsembleCall* h
    cdef bint over
    if (i >= t.ensemble_calls.size() or t.ensemble_calls[0][i] == NULL
        or t.uses[0][i] != <u32> (ticket >> INDEX_BITS)):
        return False
    h = t.ensemble_calls[0][i]
    ensemble_call_lock(h)
    over = h.over
    ensemble_call_unlock(h)
    if over:
        ensemble_call_release(timers_take(t, ticket))
    return not over
