"""Hearings: arrivals in, one verdict out, under one lock.

Why a lock and no lock-free steps: an arrival must be noted, weighed against the others, decided on
and perhaps answered, by up to 64 loops at once, and all of it takes less than a microsecond;
threads meet here only when two models of one query answer within that time. The one thing that
others may watch without it is the verdict slot, which is a slot like any other.

What is never done under the lock: asking a model (its lane may have this thread run the loop of a
peer, which may hear the same hearing), and waiting.

Who frees. A hearing holds the block by the reference that a task of the verdict slot would have; a
task that is never asked gives its own back when that is certain. A ticket of a timer is an index
and its use, so that one left behind in the wheel names nothing, and the hearing need not live until
its time has passed.
"""
from libc.math cimport isfinite, ldexp
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy

from clipper_core.results.decider cimport (
    ANSWER, ARRIVED, ASK, FAILED, OUTSTANDING, UNASKED, decide, decider_drop, decider_hold,
)
from clipper_core.results.delivery cimport (
    HEARD, block_drop, claims_lock, claims_unlock, delivery_call, delivery_news, delivery_tell,
    delivery_tell_outside, slot_boxes, slot_state, slot_try_cancel,
)
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.dtype cimport BOOL, F16, F32, F64, I64, U64, all_finite, itemsize
from clipper_core.runtime.histogram cimport count
from clipper_core.runtime.machine cimport (
    acq_rel, acquire, aligned_new, i64, pause, relaxed, seq_cst,
)
from clipper_core.runtime.status cimport CANCELLED, OK, UNNEEDED
from clipper_core.wire.prediction cimport TAG_BLOB, Blob, blob_data

ctypedef Hearing* HearingPointer

cdef u64 NO_TICKET = ~<u64> 0

cdef enum:
    INDEX_BITS = 24             # of a timer's ticket; the uses of an index are above, and it is
                                # below 2^48

cdef struct Face:               # a value, as votes compare it
    u8 kind                     # 1 bool, 2 whole number, 3 one above 2^63, 4 float, 5 anything else
    u64 bits                    # of a scalar
    double number
    const Blob* blob            # of anything else


# -- values
# --------------------------------------------------------------------------------------------------

cdef double _half(u64 word) noexcept nogil:
    cdef int exponent = <int> (word >> 10 & 31)
    cdef double size = <double> (word & 1023)
    cdef double value = ldexp(size, -24) if exponent == 0 else ldexp(size + 1024, exponent - 25)
    if exponent == 31:
        value = ldexp(1.0, 2000)            # infinite, or no number: neither is a vote
    return -value if word >> 15 & 1 else value


cdef double _float_of(u8 dtype, u64 word) noexcept nogil:
    cdef float single
    cdef double value
    if dtype == F64:
        memcpy(&value, &word, 8)
        return value
    if dtype == F32:
        memcpy(&single, &word, 4)
        return single
    return _half(word)


cdef Face _scalar_face(u8 dtype, u64 word) noexcept nogil:
    cdef Face face
    cdef u32 unused = 64 - 8 * itemsize(dtype)
    face.blob = NULL
    face.kind, face.bits = 2, word
    if dtype == F16 or dtype == F32 or dtype == F64:
        face.kind = 4
        face.number = _float_of(dtype, word) + 0.0          # -0.0 is 0.0
        memcpy(&face.bits, &face.number, 8)
        return face
    if dtype == BOOL:
        face.kind, face.bits = 1, word & 1
    elif dtype % 2 == 1 and dtype <= I64:                   # signed: I8, I16, I32, I64
        face.bits = <u64> (<i64> (word << unused) >> unused)
    elif dtype == U64 and word >> 63:
        face.kind = 3
        face.number = <double> word
        return face
    face.number = <double> <i64> face.bits
    return face


cdef Face _face(u64 word, u8 tag) noexcept nogil:
    cdef Face face
    cdef Blob* blob
    cdef u64 scalar = 0
    if tag != TAG_BLOB:
        return _scalar_face(tag, word)
    blob = <Blob*> word
    if blob.rank == 0 and blob.dtype <= F64:
        memcpy(&scalar, blob_data(blob), min(blob.nbytes, <u64> 8))
        return _scalar_face(blob.dtype, scalar)
    face.kind, face.bits, face.number, face.blob = 5, 0, 0, blob
    return face


cdef bint _is_usable(const Face* face) noexcept nogil:
    if face.blob == NULL:
        return face.kind != 4 or isfinite(face.number)
    return all_finite(face.blob.dtype, blob_data(<Blob*> face.blob), face.blob.nbytes)


cdef bint _are_equal(const Face* a, const Face* b) noexcept nogil:
    if a.kind != b.kind or a.blob == NULL:
        return a.kind == b.kind and a.bits == b.bits
    return (a.blob.dtype == b.blob.dtype and a.blob.rank == b.blob.rank
            and a.blob.nbytes == b.blob.nbytes
            and memcmp(a.blob.dims, b.blob.dims, 4 * a.blob.rank) == 0
            and memcmp(blob_data(<Blob*> a.blob), blob_data(<Blob*> b.blob), a.blob.nbytes) == 0)


cdef void _weigh(Hearing* h, u32 i) noexcept nogil:
    """Task i ended OK; what is its vote?"""
    cdef Face other, face = _face(h.block.word[h.first + i], h.block.tag[h.first + i])
    cdef VoteData* vote = &h.votes[i]
    cdef Blob* blob
    cdef u32 k
    vote.state = FAILED
    if not _is_usable(&face):
        return
    vote.confidence = -1
    if h.block.tag[h.first + i] == TAG_BLOB:
        blob = <Blob*> h.block.word[h.first + i]
        if blob.has_confidence:
            vote.confidence = min(max(<double> blob.confidence, 0.0),
                                  1.0) if blob.confidence == blob.confidence else 0
    vote.numeric = face.blob == NULL
    vote.number = face.number
    vote.order = h.arrivals
    h.arrivals += 1
    vote.klass = i
    for k in range(h.n):
        if h.votes[k].state == ARRIVED and h.votes[k].klass == k:
            other = _face(h.block.word[h.first + k], h.block.tag[h.first + k])
            if _are_equal(&face, &other):
                vote.klass = k
                break
    vote.state = ARRIVED


# -- its life
# --------------------------------------------------------------------------------------------------

cdef Hearing* hearing_new(DeliveryState* home, Block* block, u32 first, u32 n,
                          DeciderState* decider, u64 now_us, u64 slo_us,
                          bint learn, u64 more_bytes) noexcept nogil:
    cdef u64 head = (sizeof(Hearing) + 63) & ~<u64> 63
    cdef char* memory = <char*> aligned_new(head + n * (sizeof(VoteData) + sizeof(void*))
                                            + more_bytes)
    cdef Hearing* h = <Hearing*> memory
    if h == NULL:
        return NULL
    h.refs.store(2, relaxed)                    # its future's and its submitter's
    h.home, h.block, h.first, h.n = home, block, first, n
    h.decider = decider_hold(decider)
    h.received_us, h.slo_us, h.learn = now_us, slo_us, learn
    h.votes = <VoteData*> (memory + head)
    h.unneeded = <atomic[u64]**> (memory + head + n * sizeof(VoteData))
    h.asks = memory + head + n * (sizeof(VoteData) + sizeof(void*)) if more_bytes else NULL
    home.hearings.fetch_add(1, relaxed)
    return h


cdef void hearing_let_go(Hearing* h) noexcept nogil:
    if h.refs.fetch_sub(1, acq_rel) == 1:
        decider_drop(h.decider)
        h.home.hearings_freed.fetch_add(1, relaxed)
        block_drop(h.home, h.block, 1)
        free(h)


cdef void hearing_lock(Hearing* h) noexcept nogil:
    claims_lock(h.lock)


cdef void hearing_unlock(Hearing* h) noexcept nogil:
    claims_unlock(h.lock)


cdef u32 _end_open(Hearing* h, bint outstanding) noexcept nogil:
    """End the slots of tasks that were never asked, and of those on their way too; -> how many."""
    cdef u32 i, ended = 0
    for i in range(h.n):
        if h.votes[i].state == UNASKED:
            ended += slot_try_cancel(h.block[0], h.first + i, UNNEEDED)
            h.votes[i].state = FAILED
            count(h.unneeded[i], 1)
            block_drop(h.home, h.block, 1)
        elif outstanding and h.votes[i].state == OUTSTANDING:
            ended += slot_try_cancel(h.block[0], h.first + i, UNNEEDED)
    return ended


cdef void hearing_rule(Hearing* h, DeliveryState* by, u32 step, u64 used) noexcept nogil:
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
        delivery_tell(by, h.home, h.block.first_id + verdict, boxes)
    else:
        delivery_tell_outside(h.home, boxes)


cdef u32 _stop(Hearing* h) noexcept nogil:
    """Nobody wants a verdict any more; with the lock. -> slots that it ended."""
    cdef u32 ended
    if h.over:
        return 0
    h.over = True
    ended = slot_try_cancel(h.block[0], h.first + h.n, CANCELLED)
    return ended + _end_open(h, False)


cdef u32 hearing_cancel(Hearing* h) noexcept nogil:
    cdef u32 ended
    hearing_lock(h)
    ended = _stop(h)
    hearing_unlock(h)
    return ended


cdef void hearing_drop(Hearing* h) noexcept nogil:
    cdef u32 ended = hearing_cancel(h)
    if ended:
        h.home.answered.fetch_add(ended, relaxed)
    while h.asking.load(acquire):               # a model of the future's is in use
        pause()
    hearing_let_go(h)


cdef int hearing_ruled(Hearing* h, u32 step, u64 used, u64 elapsed_us) noexcept nogil:
    cdef u32 i
    cdef int ruled = 0
    hearing_lock(h)
    for i in range(64):
        if used >> i & 1 and (i >= h.n or slot_state(h.block[0], h.first + i) != OK):
            ruled = -1
    if ruled == 0 and not h.over:
        h.elapsed_us = max(h.elapsed_us, elapsed_us)
        hearing_rule(h, NULL, step, used)
        ruled = 1
    hearing_unlock(h)
    return ruled


# -- deciding
# --------------------------------------------------------------------------------------------------

cdef void hearing_note(Hearing* h, u32 i, Status status) noexcept nogil:
    if status == OK:
        _weigh(h, i)
    else:
        h.votes[i].state = FAILED


cdef RulingData hearing_decide(Hearing* h) noexcept nogil:
    return decide(h.decider, h.votes, h.n, h.elapsed_us, h.slo_us)


cdef bint _consider(Hearing* h, DeliveryState* by) noexcept nogil:
    """With the lock. True: the home's loop is to be called."""
    cdef RulingData ruling
    if h.over:
        return False
    ruling = hearing_decide(h)
    if ruling.kind == ANSWER:
        hearing_rule(h, by, ruling.step, ruling.mask)
        return False
    if ruling.kind == ASK:
        return True
    return ruling.until_us < h.slo_us and h.timer_us == 0


cdef void hearing_heard(DeliveryState* d, void* hearing, u32 slot, bint first, u8 status,
                        u32 latency_us) noexcept nogil:
    """A task's slot has ended, by this call or (first: False) before, and its task is over."""
    cdef Hearing* h = <Hearing*> hearing
    cdef u32 i = slot - h.first
    cdef bint calls = False
    if first:
        hearing_lock(h)
        if not h.over:
            h.elapsed_us = max(h.elapsed_us, h.votes[i].start_us + latency_us)
            hearing_note(h, i, <Status> status)
            calls = _consider(h, d)
        hearing_unlock(h)
        if calls:
            hearing_call(h, False)
    hearing_let_go(h)


cdef void hearing_sent(Hearing* h, u32 slot) noexcept nogil:
    """TIED: the first whose row leaves gives up those that still wait."""
    cdef u32 k, ended = 0, i = slot - h.first
    if not h.decider.tied:
        return
    hearing_lock(h)
    if not h.over and h.sent == 0:
        for k in range(h.n):
            if k != i and h.votes[k].state == OUTSTANDING and slot_try_cancel(h.block[0],
                    h.first + k, UNNEEDED):
                h.votes[k].state = FAILED
                ended += 1
    h.sent |= task_bit(i)
    hearing_unlock(h)
    if ended:
        h.home.answered.fetch_add(ended, relaxed)


# -- its submitter
# --------------------------------------------------------------------------------------------------

cdef void hearing_submits(Hearing* h, u32 i) noexcept nogil:
    h.refs.fetch_add(1, relaxed)
    h.block.word[h.first + i] = <u64> h
    h.block.boxes[h.first + i].fetch_or(HEARD, relaxed)


cdef void hearing_refused(Hearing* h, u32 i, Status status) noexcept nogil:
    if h.votes[i].state == OUTSTANDING:
        h.votes[i].state = FAILED
    if slot_try_cancel(h.block[0], h.first + i, status):
        h.home.answered.fetch_add(1, relaxed)
        if slot_boxes(h.block[0], h.first + i) != HEARD:
            delivery_tell_outside(h.home, slot_boxes(h.block[0], h.first + i))
    block_drop(h.home, h.block, 1)
    h.refs.fetch_sub(1, relaxed)                # never the last: the caller has one


cdef void hearing_submitted(Hearing* h) noexcept nogil:
    cdef bint calls
    hearing_lock(h)
    calls = _consider(h, NULL)
    hearing_unlock(h)
    if calls:
        hearing_call(h, True)
    hearing_let_go(h)


# -- the home's loop
# --------------------------------------------------------------------------------------------------

cdef void hearing_call(Hearing* h, bint submitter) noexcept nogil:
    cdef bint closed = False
    hearing_lock(h)
    if h.called or h.over:
        hearing_unlock(h)
        return
    claims_lock(h.home.lock)
    closed = h.home.calls_end
    if not closed:
        h.called = True
        h.refs.fetch_add(1, relaxed)
        h.next_called = <Hearing*> h.home.calls.load(relaxed)
        h.home.calls.store(<u64> h, seq_cst)
    claims_unlock(h.home.lock)
    hearing_unlock(h)
    if closed:
        hearing_close(h)
    elif submitter:
        delivery_news(h.home)
    else:
        delivery_call(h.home)


cdef void hearing_close(Hearing* h) noexcept nogil:
    cdef RulingData ruling
    hearing_lock(h)
    if not h.over:
        ruling = decide(h.decider, h.votes, h.n, h.elapsed_us, h.elapsed_us)
        hearing_rule(h, NULL, ruling.step, ruling.mask)
    hearing_unlock(h)


cdef Hearing* hearings_called(DeliveryState* d, bint for_good) noexcept nogil:
    cdef Hearing* h
    claims_lock(d.lock)
    h = <Hearing*> d.calls.load(relaxed)
    d.calls.store(0, relaxed)
    d.calls_end = for_good
    claims_unlock(d.lock)
    return h


cdef Timers* timers_new() noexcept nogil:
    cdef Timers* t = <Timers*> aligned_new(sizeof(Timers))
    if t != NULL:
        t.hearings = make[vector[HearingPointer]]()
        t.uses = make[vector[u32]]()
        t.unused = make[vector[u32]]()
        if t.hearings == NULL or t.uses == NULL or t.unused == NULL:
            timers_free(t)
            return NULL
    return t


cdef void timers_free(Timers* t) noexcept nogil:
    if t != NULL:
        del t.hearings
        del t.uses
        del t.unused
        free(t)


cdef u64 timers_add(Timers* t, Hearing* h) noexcept nogil:
    cdef u32 i
    cdef size_t n = t.hearings.size() + 1
    if t.unused.empty():
        if not (make_room(t.hearings[0], n) and make_room(t.uses[0], n)
                and make_room(t.unused[0], n)):
            return NO_TICKET
        i = <u32> t.hearings.size()
        t.hearings.push_back(h)
        t.uses.push_back(1)
    else:
        i = t.unused.back()
        t.unused.pop_back()
        t.hearings[0][i] = h
    h.refs.fetch_add(1, relaxed)
    return <u64> t.uses[0][i] << INDEX_BITS | i


cdef Hearing* timers_take(Timers* t, u64 ticket) noexcept nogil:
    cdef u32 i = <u32> (ticket & ((1 << INDEX_BITS) - 1))
    cdef Hearing* h
    if i >= t.hearings.size() or t.hearings[0][i] == NULL or t.uses[0][i] != <u32> (ticket >> INDEX_BITS):
        return NULL
    h = t.hearings[0][i]
    t.hearings[0][i] = NULL
    t.uses[0][i] = (t.uses[0][i] + 1) & ((1 << INDEX_BITS) - 1)
    t.unused.push_back(i)
    return h


cdef bint timers_has(Timers* t, u64 ticket) noexcept nogil:
    """The hearing of a ticket that is not needed any more is let go here."""
    cdef u32 i = <u32> (ticket & ((1 << INDEX_BITS) - 1))
    cdef Hearing* h
    cdef bint over
    if i >= t.hearings.size() or t.hearings[0][i] == NULL or t.uses[0][i] != <u32> (ticket >> INDEX_BITS):
        return False
    h = t.hearings[0][i]
    hearing_lock(h)
    over = h.over
    hearing_unlock(h)
    if over:
        hearing_let_go(timers_take(t, ticket))
    return not over
