"""The home's loop looks at hearings: it asks models and sets times.

Why here alone. A wheel has one writer, its loop; and to publish a row may mean to run a turn of the
loop of a peer, which is not done under the lock of a hearing. So whoever decides that a model is to
be asked, or a time to be waited for, puts the hearing on the home's list and wakes its loop; an
arrival that came by the home's loop itself is looked at in the same step.

A row that may be asked later is copied once, at submit, beside the hearing. It goes into the lane
of the time that it will have, as far as that is known at submit: lanes are made there. Its deadline
is the query's.
"""
from clipper_core.results.decider cimport (
    ANSWER, ASK, NEVER_US, OUTSTANDING, UNASKED, RulingData, decider_may_extra,
)
from clipper_core.results.hearing cimport (
    NO_TICKET, hearing_close, hearing_decide, hearing_let_go, hearing_lock, hearing_refused,
    hearing_rule, hearing_submits, hearing_unlock, hearings_called, timers_add, timers_take,
)
from clipper_core.runtime.histogram cimport count
from clipper_core.runtime.machine cimport relaxed, release
from clipper_core.runtime.status cimport CLOSED, OK, Status
from clipper_core.scheduling.lane cimport lanes_set_timer, taker_enters, taker_leaves
from clipper_core.scheduling.offer cimport lane_offer


cdef Status _queue(Ask* ask, Hearing* h, u32 i, u64 now_us) noexcept nogil:
    return lane_offer(ask.lanes, ask.lane, ask.gate, ask.row, ask.nbytes,
                      &ask.key if ask.keyed else NULL, ask.salt,
                      h.received_us + h.slo_us, now_us, h.block, h.first + i)


cdef Status _submit(Ask* ask, Hearing* h, u32 i, u64 now_us) noexcept nogil:
    """Without the lock."""
    cdef Status status = CLOSED
    cdef bint guest = ask.lanes.delivery != h.home
    if not taker_enters(ask.lanes[0], ask.refusing[0]):
        return status
    if guest:
        ask.lanes.delivery.guests.fetch_add(1, relaxed)
    status = _queue(ask, h, i, now_us)
    if status != OK and guest:
        ask.lanes.delivery.guests.fetch_sub(1, relaxed)
    taker_leaves(ask.lanes[0])
    return status


cdef void _ask(Hearing* h, u32 i, u64 now_us) noexcept nogil:
    """With the lock, which is given away meanwhile."""
    cdef Ask* ask = &(<Ask*> h.asks)[i]
    cdef Status status
    h.votes[i].state = OUTSTANDING
    h.votes[i].start_us = h.elapsed_us
    hearing_submits(h, i)
    h.asking.store(1, relaxed)
    hearing_unlock(h)
    status = _submit(ask, h, i, now_us)
    hearing_lock(h)
    if status != OK:
        count(&ask.tally.refused[<u32> status], 1)
        hearing_refused(h, i, status)
    h.asking.store(0, release)


cdef void _ask_all(Hearing* h, const RulingData* ruling, u64 now_us) noexcept nogil:
    cdef u32 i
    for i in range(h.n):
        if ruling.mask >> i & 1 and not h.over and h.votes[i].state == UNASKED:
            if ruling.extra and not decider_may_extra(h.decider):
                h.votes[i].start_us = NEVER_US          # only if all others fail
            else:
                _ask(h, i, now_us)


cdef void _set_timer(Lanes* lanes, Hearing* h, u64 until_us) noexcept nogil:
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
        hearing_let_go(timers_take(lanes.timers, ticket))


cdef void _look(Lanes* lanes, Hearing* h, u64 now_us) noexcept nogil:
    cdef RulingData ruling
    hearing_lock(h)
    h.called = False
    h.elapsed_us = max(h.elapsed_us, now_us - h.received_us if now_us > h.received_us else 0)
    while not h.over:
        ruling = hearing_decide(h)
        if ruling.kind == ASK:
            _ask_all(h, &ruling, now_us)
            continue
        if ruling.kind == ANSWER:
            hearing_rule(h, lanes.delivery, ruling.step, ruling.mask)
        else:
            _set_timer(lanes, h, ruling.until_us)
        break
    hearing_unlock(h)


cdef bint asking_look(Lanes* lanes, u64 now_us) noexcept nogil:
    cdef Hearing* h = hearings_called(lanes.delivery, False)
    cdef Hearing* after
    while h != NULL:
        after = h.next_called           # once it is not called any more, it may be called again
        _look(lanes, h, now_us)
        hearing_let_go(h)
        h = after
    return True


cdef void asking_close(Lanes* lanes) noexcept nogil:
    cdef Hearing* h = hearings_called(lanes.delivery, True)
    cdef Hearing* after
    cdef u32 i
    while h != NULL:
        after = h.next_called
        hearing_close(h)
        hearing_let_go(h)
        h = after
    for i in range(<u32> lanes.timers.hearings.size()):
        h = lanes.timers.hearings[0][i]
        if h != NULL:
            lanes.timers.hearings[0][i] = NULL
            hearing_close(h)
            hearing_let_go(h)
