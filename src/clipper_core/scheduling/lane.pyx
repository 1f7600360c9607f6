"""Queues of tasks: taking in, joining equal rows, ending at the deadline, taking rows for a batch,
giving them back.

Why joining happens here and not at lookup: the table of rows in flight then has one writer, the
loop, and needs no lock; and the loop looks into the cache once more when it takes a task in, so a
prediction that arrived between a caller's lookup and its submit is never evaluated twice. The price
is that a joined row was copied into the ring for nothing.

Who frees a cell. Exactly one of: the join that finds it answered, the deadline (a JOINED task, or a
WAITING one that nobody joined), the skip at the head, `row_end`. A cell in phase SENT is freed only
by `row_end`, because the kernel may still be reading its row. A chunk of an array counts its rows
that wait or are on their way, and is freed with the last of them; until then it holds its slots'
block, so that whoever has ended them, its slots may be looked at.
"""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from libcpp.deque cimport deque

from clipper_core.cache.clock_cache cimport cache_lookup
from clipper_core.results.completion cimport completion_notify_loop, slot_end, slot_state
from clipper_core.results.ensemble_call cimport (
    EnsembleCall, ensemble_call_enqueue, ensemble_call_lock, ensemble_call_release,
    ensemble_call_sent, ensemble_call_task_ended, ensemble_call_unlock, timers_free, timers_has,
    timers_new, timers_take,
)
from clipper_core.runtime.allocation cimport make, try_push
from clipper_core.runtime.dtype cimport F64
from clipper_core.runtime.histogram cimport histogram_note, note
from clipper_core.runtime.machine cimport (
    CHECK, EFD_CLOEXEC, EFD_NONBLOCK, aligned_new, eventfd, relaxed, u16,
)
from clipper_core.runtime.ring cimport ring_free, ring_new, ring_row, ring_side, spsc_free, spsc_new
from clipper_core.runtime.status cimport CANCELLED, DEADLINE, DROPPED, FULL, NO_REPLICA, OK, PENDING
from clipper_core.runtime.timer_wheel cimport wheel_advance, wheel_free, wheel_insert, wheel_new
from clipper_core.scheduling.array_chunk cimport (
    chunk_close, chunk_end_rows, chunk_ended_from, chunk_leave, chunk_waits, lines_of,
)
from clipper_core.scheduling.pending cimport (
    pending_find, pending_free, pending_new, pending_put, pending_remove,
)
from clipper_core.scheduling.task cimport (
    IDLE, JOINED, LANES_MAX, SENT, WAITING, lane_of, pos_of, task_of, ticket_of,
)
from clipper_core.wire.prediction cimport TAG_NONE, value_drop, value_hold

cdef extern from "<unistd.h>" nogil:
    int close(int fd) noexcept

cdef enum:
    TICK_US = 64
    DUE_AT_ONCE = 256
    SWEEPS_MAX = 65536
    READY_SIZE = 131072         # a lane is in it once at most, and LANES_MAX of them exist
    UNUSED_MAX = 4096           # ids of lanes that are gone, kept for others; beyond it such lanes
                                # stay a while


# -- owners
# --------------------------------------------------------------------------------------------------

cdef Lanes* lanes_new(CompletionState* completion, CacheState* cache, u64 now_us, u64 tasks_max,
                      u64 heap_bytes_max) noexcept nogil:
    cdef Lanes* lanes = <Lanes*> aligned_new(sizeof(Lanes))
    if lanes == NULL:
        return NULL
    lanes.completion = completion
    lanes.cache = cache
    lanes.heap_bytes_max = heap_bytes_max
    completion.task_ended = ensemble_call_task_ended
    lanes.by_id = <Lane**> aligned_new((LANES_MAX + 1) * sizeof(void*))
    lanes.wheel = wheel_new(now_us, TICK_US, tasks_max * 2, &_is_live, lanes)
    lanes.pending = pending_new(tasks_max)
    lanes.timers = timers_new()
    lanes.ready = ring_new(READY_SIZE, 8, 0)
    lanes.unused = spsc_new(UNUSED_MAX)
    lanes.wake_fd = completion.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    if (lanes.by_id == NULL or lanes.wheel == NULL or lanes.pending == NULL or lanes.ready == NULL
        or lanes.timers == NULL
            or lanes.unused == NULL or lanes.wake_fd < 0):
        lanes_free(lanes)
        return NULL
    return lanes


cdef void lanes_free(Lanes* lanes) noexcept nogil:
    cdef u32 i
    if lanes == NULL:
        return
    for i in range(1, lanes.count + 1):
        if lanes.by_id[i] == NULL:
            continue
        del lanes.by_id[i].retry
        ring_free(lanes.by_id[i].ring)
        free(lanes.by_id[i])
    if lanes.wheel != NULL:
        wheel_free(lanes.wheel)
    if lanes.pending != NULL:
        pending_free(lanes.pending)
    ring_free(lanes.ready)
    timers_free(lanes.timers)
    spsc_free(lanes.unused)
    if lanes.log != NULL:
        spsc_free(lanes.log)
    if lanes.wake_fd > 0:
        close(lanes.wake_fd)
    lanes.completion.wake_fd = -1         # futures may outlive us
    free(lanes.by_id)
    free(lanes)


cdef Lane* lane_new(Lanes* lanes, u32 model, u64 slo_us, u64 cells, u64 row_bytes, u32 chunk_rows,
                    Tally* tally,
                    bint shared=False) noexcept nogil:
    cdef Lane* lane
    cdef u64 first = ticket_of(lanes.count + 1, 0)
    if not lanes.unused.tail_moved() and lanes.count >= LANES_MAX:
        return NULL
    lane = <Lane*> aligned_new(sizeof(Lane))
    if lane == NULL:
        return NULL
    lanes.unused.pop(&first)
    lane.ring = ring_new(cells, row_bytes * max(chunk_rows, <u32> 1),
                         lines_of(sizeof(Task)) + lines_of(4 * chunk_rows) + lines_of(sizeof(Key)
                                 * chunk_rows),
                         shared and row_bytes >= SHARED_ROW_BYTES_MIN, pos_of(first))
    lane.retry = make[deque[Span]]()
    if lane.ring == NULL or lane.retry == NULL:
        ring_free(lane.ring)
        del lane.retry
        free(lane)                              # with the id, if it was an old one
        return NULL
    lane.id = <u32> (first >> 48)
    lane.seen = lane.head = pos_of(first)
    lane.taken.store(lane.seen, relaxed)
    lane.model = model
    lane.slo_us = slo_us
    lane.tally = tally
    lane.chunk_rows = chunk_rows
    lanes.by_id[lane.id] = lane
    lanes.count = max(lanes.count, lane.id)
    lanes.live.fetch_add(1, relaxed)
    return lane


# -- submitting (any thread)
# -------------------------------------------------------------------------------------------

cdef void lanes_wake(Lanes* lanes) noexcept nogil:
    completion_notify_loop(lanes.completion)


cdef void lane_has_news(Lanes* lanes, Lane* lane) noexcept nogil:
    if lane_announce(lane[0], lanes.ready.cells[0], <u64*> lanes.ready.rows, lane.id):
        lanes_wake(lanes)


cdef Status lane_submit(Lanes* lanes, Lane* lane, const void* row, u32 nbytes, const Key* key,
                        Block* block, u32 slot,
                        u64 deadline_us, u64 now_us, u64 salt, u64 refused_us,
                        u32 cost) noexcept nogil:
    cdef u64 pos
    cdef Task* task
    cdef void* heap = NULL
    if lane.ring.row_bytes == 0:
        if lanes.heap_bytes.fetch_add(nbytes, relaxed) + nbytes > lanes.heap_bytes_max:
            lanes.heap_bytes.fetch_sub(nbytes, relaxed)
            return FULL
        heap = malloc(nbytes if nbytes else 1)
        if heap == NULL:
            lanes.heap_bytes.fetch_sub(nbytes, relaxed)
            return FULL
    if not lane.ring.cells.claim(&pos):
        if heap != NULL:
            lanes.heap_bytes.fetch_sub(nbytes, relaxed)
            free(heap)
        return FULL
    memcpy(heap if heap != NULL else <void*> ring_row(lane.ring, pos), row, nbytes)
    task = <Task*> ring_side(lane.ring, pos)
    task.heap = heap
    task.bytes = nbytes
    task.block = block
    task.slot = slot
    task.deadline_us = task.due_us = deadline_us
    task.submit_us = now_us
    task.salt = salt
    task.refused_us = refused_us
    task.next = task.prev = 0
    task.phase = IDLE
    task.tries = 0
    task.answered = False
    task.heard = block.boxes[slot].load(relaxed) != 0
    task.slots = NULL
    task.rows = cost
    task.keyed = key != NULL
    if key != NULL:
        task.key = key[0]
    lane.ring.cells.publish(pos)
    lane_has_news(lanes, lane)
    return OK


# -- tasks
# --------------------------------------------------------------------------------------------------

cdef bint _open(Task* task) noexcept nogil:
    return not task.answered and slot_state(task.block[0], task.slot) == PENDING


cdef bint task_needed(Lanes* lanes, Task* task) noexcept nogil:
    while not _open(task):              # a joined task that was cancelled stays in the list until
                                        # its row ends
        if task.next == 0:
            return False
        task = task_of(lanes, task.next)
    return True


cdef u64 task_due_us(Task* task) noexcept nogil:
    return task.deadline_us if _open(task) else task.due_us


cdef bint _is_live(void* owner, u64 ticket) noexcept nogil:
    cdef Lanes* lanes = <Lanes*> owner
    # without a lane: an ensemble call's, or of a lane that is gone
    if lane_of(lanes, ticket) == NULL:
        return ticket >> 48 == 0 and timers_has(lanes.timers, ticket)
    cdef Task* task = task_of(lanes, ticket)
    return task != NULL and (not task.answered if task.slots != NULL else _open(task))


cdef void _answer(Lane* lane, Lanes* lanes, Task* task, Status status, Value* value,
                  u64 now_us) noexcept nogil:
    """End the task's slot, once; the task gives up its reference to the block."""
    cdef u64 latency = now_us - task.submit_us if now_us > task.submit_us else 0
    cdef Status ended
    if task.answered:
        return
    task.answered = True
    value_hold(value)
    ended = slot_end(lanes.completion, task.block, task.slot, status, value,
                     <u32> min(latency, <u64> 0xFFFFFFFF))
    note(&lane.tally.ended[<u32> ended], 1)
    if ended == OK:
        histogram_note(&lane.tally.latency, latency)


cdef void _answer_empty(Lane* lane, Lanes* lanes, Task* task, Status status,
                        u64 now_us) noexcept nogil:
    cdef Value nothing
    nothing.word = 0
    nothing.tag = TAG_NONE
    _answer(lane, lanes, task, status, &nothing, now_us)


cdef void _release(Lanes* lanes, Lane* lane, u64 pos) noexcept nogil:
    """Free the cell of an answered task (or of one whose caller gave up)."""
    cdef Task* task = <Task*> ring_side(lane.ring, pos)
    _answer_empty(lane, lanes, task, CANCELLED, task.submit_us)
    if task.heap != NULL:
        lanes.heap_bytes.fetch_sub(task.bytes, relaxed)
        free(task.heap)
        task.heap = NULL
    task.phase = IDLE
    lane.ring.cells.release(pos)


cdef void _unlink(Lanes* lanes, Task* task) noexcept nogil:
    if task.prev:
        task_of(lanes, task.prev).next = task.next
    if task.next:
        task_of(lanes, task.next).prev = task.prev
    task.next = task.prev = 0


cdef void _forget(Lanes* lanes, Task* task, u64 ticket) noexcept nogil:
    if task.keyed:
        pending_remove(lanes.pending, &task.key, ticket)


cdef void row_end(Lanes* lanes, u64 ticket, Status status, Value* value, u64 now_us) noexcept nogil:
    cdef Lane* lane = lane_of(lanes, ticket)
    cdef Task* owner = task_of(lanes, ticket)
    cdef Task* task
    cdef u64 joined, after
    CHECK(owner != NULL, "a row ends once")
    _forget(lanes, owner, ticket)
    joined = owner.next
    while joined:
        task = task_of(lanes, joined)
        after = task.next
        note(&lane_of(lanes, joined).tally.joined, 1)
        _answer(lane_of(lanes, joined), lanes, task, status, value, now_us)
        _release(lanes, lane_of(lanes, joined), pos_of(joined))
        joined = after
    _answer(lane, lanes, owner, status, value, now_us)
    _release(lanes, lane, pos_of(ticket))


cdef void row_found(Lanes* lanes, const Key* key, Value* value, u64 now_us) noexcept nogil:
    cdef u64 ticket = pending_find(lanes.pending, key)
    if ticket == 0 or task_of(lanes, ticket).phase != WAITING:
        return
    lane_of(lanes, ticket).waiting -= 1
    row_end(lanes, ticket, OK, value, now_us)


# -- taking in
# --------------------------------------------------------------------------------------------------

cdef Lane* lanes_next_ready(Lanes* lanes) noexcept nogil:
    cdef u64 lane_id
    if not lane_next(lanes.ready.cells[0], <u64*> lanes.ready.rows, &lanes.ready_head, &lane_id):
        return NULL
    lane_clear_dirty(lanes.by_id[lane_id][0])
    return lanes.by_id[lane_id]


cdef u64 lane_take_in(Lanes* lanes, Lane* lane, u64 now_us) noexcept nogil:
    cdef u64 rows = 0, own = 0
    while lane.ring.cells.published(lane.seen):
        if lane.chunk_rows:
            rows += (<Task*> ring_side(lane.ring, lane.seen)).rows
            _admit_chunk(lanes, lane, lane.seen, now_us)
        else:
            rows += 1
            own += _admit(lanes, lane, lane.seen, now_us)
        lane.seen += 1
    lane_took_in(lane[0], lane.seen)
    note(&lane.tally.arrived, rows)
    lane.used_us = max(now_us, <u64> 1)        # 0: never
    return own


cdef bint lanes_set_timer(Lanes* lanes, u64 deadline_us, u64 ticket) noexcept nogil:
    """The wheel holds twice as many entries as tasks may live, so a full one has dead to sweep: it
    does a stretch a try."""
    cdef u32 _i
    cdef Status status = FULL
    for _i in range(SWEEPS_MAX):
        status = wheel_insert(lanes.wheel, deadline_us, ticket)
        if status != FULL:
            break
    return status == OK


cdef void _learn_slo(Lane* lane, u64 slo_us) noexcept nogil:
    """The class spans a factor of two: batches sized for its upper bound would be late for most of
    it."""
    if slo_us < lane.slo_us:
        lane.slo_us = slo_us
    else:
        lane.slo_us += (slo_us - lane.slo_us) >> 6


# True: it is to be evaluated itself
cdef bint _admit(Lanes* lanes, Lane* lane, u64 pos, u64 now_us) noexcept nogil:
    cdef Task* task = <Task*> ring_side(lane.ring, pos)
    cdef u64 ticket = ticket_of(lane.id, pos)
    cdef Value value
    if not _open(task):
        _release(lanes, lane, pos)
        return False
    _learn_slo(lane, task.deadline_us - task.submit_us)
    if task.keyed and cache_lookup(lanes.cache, &task.key, &value):
        note(&lane.tally.joined, 1)
        _answer(lane, lanes, task, OK, &value, now_us)
        value_drop(&value)
        _release(lanes, lane, pos)
        return False
    if task.refused_us and pending_find(lanes.pending, &task.key) == 0:
        _refuse(lanes, lane, pos, now_us)
        return True
    if not lanes_set_timer(lanes, task.deadline_us, ticket):
        _answer_empty(lane, lanes, task, FULL, now_us)
        _release(lanes, lane, pos)
        return True
    if task.keyed and _join(lanes, lane, task, ticket):
        return False
    task.phase = WAITING
    lane.waiting += 1
    return True


cdef void _refuse(Lanes* lanes, Lane* lane, u64 pos, u64 now_us) noexcept nogil:
    """As admission would have at once: no equal row can answer it."""
    cdef Task* task = <Task*> ring_side(lane.ring, pos)
    cdef double wait_s = task.refused_us / 1e6
    cdef Value value
    memcpy(&value.word, &wait_s, 8)
    value.tag = F64
    _answer(lane, lanes, task, FULL, &value, now_us)
    _release(lanes, lane, pos)


cdef bint _join(Lanes* lanes, Lane* lane, Task* task, u64 ticket) noexcept nogil:
    """True if the task now waits for an equal row; False if it is to be evaluated itself (it may
    have taken over others)."""
    cdef u64 other = pending_find(lanes.pending, &task.key)
    cdef Task* owner
    if other == 0:
        pending_put(lanes.pending, &task.key, ticket)
        return False
    owner = task_of(lanes, other)
    if owner.phase == WAITING and task.deadline_us < owner.deadline_us and lane_of(lanes,
            other) != lane and task.refused_us == 0:
        _take_over(lanes, task, ticket, owner, other)
        return False
    task.phase = JOINED
    _link_after(lanes, owner, other, task, ticket)
    owner.due_us = max(owner.due_us, task.deadline_us)
    return True


cdef void _link_after(Lanes* lanes, Task* owner, u64 owner_ticket, Task* task,
                      u64 ticket) noexcept nogil:
    task.next = owner.next
    task.prev = owner_ticket
    if owner.next:
        task_of(lanes, owner.next).prev = ticket
    owner.next = ticket


cdef void _take_over(Lanes* lanes, Task* task, u64 ticket, Task* owner,
                     u64 owner_ticket) noexcept nogil:
    """An equal row waits in a lane of longer SLOs: this one goes first, and the other joins it. (In
    its own lane the other is ahead already: there nothing is gained by changing places.)"""
    cdef Lane* other = lane_of(lanes, owner_ticket)
    task.due_us = max(task.due_us, owner.due_us)
    task.tries = owner.tries                    # a row that took a container down with it does so
                                                # under any name
    task.next = owner_ticket
    owner.prev = ticket
    owner.phase = JOINED
    other.waiting -= 1
    pending_put(lanes.pending, &task.key, ticket)
    if not _open(owner):
        _unlink(lanes, owner)
        _release(lanes, other, pos_of(owner_ticket))


# -- deadlines
# --------------------------------------------------------------------------------------------------

cdef void lanes_expire(Lanes* lanes, u64 now_us) noexcept nogil:
    cdef u64[DUE_AT_ONCE] due
    cdef u32 n = DUE_AT_ONCE
    cdef u32 i
    while n == DUE_AT_ONCE:
        n = wheel_advance(lanes.wheel, now_us, due, DUE_AT_ONCE)
        for i in range(n):
            _expire(lanes, due[i], now_us)


cdef void _enqueue_ensemble_call(Lanes* lanes, u64 ticket) noexcept nogil:
    """Its time has come; who looks at ensemble calls that were called does the rest."""
    cdef EnsembleCall* h = timers_take(lanes.timers, ticket)
    if h != NULL:
        ensemble_call_lock(h)
        h.timer_us = 0
        ensemble_call_unlock(h)
        ensemble_call_enqueue(h, False)
        ensemble_call_release(h)


cdef void _expire(Lanes* lanes, u64 ticket, u64 now_us) noexcept nogil:
    cdef Lane* lane = lane_of(lanes, ticket)
    if lane == NULL:
        _enqueue_ensemble_call(lanes, ticket)
        return
    cdef Task* task = task_of(lanes, ticket)
    cdef Status status = DEADLINE if lane.tally.replicas.load(relaxed) else NO_REPLICA
    if task == NULL or task.answered:
        return
    if task.slots != NULL:
        chunk_close(lanes, lane, pos_of(ticket), status, now_us)
        return
    _answer_empty(lane, lanes, task, status, now_us)
    if task.phase == JOINED:
        _unlink(lanes, task)
        _release(lanes, lane, pos_of(ticket))
    elif task.phase == WAITING and task.next == 0:
        lane.waiting -= 1
        _forget(lanes, task, ticket)
        _release(lanes, lane, pos_of(ticket))


# -- rows for a batch
# --------------------------------------------------------------------------------------------------

cdef bint _head_waits(Lanes* lanes, Lane* lane, u64 pos) noexcept nogil:
    """Is the row at this position to be sent? One that nobody needs any more is freed here."""
    cdef u64 ticket = ticket_of(lane.id, pos)
    cdef Task* task = task_of(lanes, ticket)
    cdef Value nothing
    if task == NULL or task.phase != WAITING:
        return False
    if task_needed(lanes, task):
        return True
    nothing.word = 0
    nothing.tag = TAG_NONE
    lane.waiting -= 1
    row_end(lanes, ticket, CANCELLED, &nothing, 0)
    return False


cdef bint _retry_waits(Lanes* lanes, Lane* lane) noexcept nogil:
    cdef Span* span = &lane.retry.front()
    cdef u32 gone
    if lane.chunk_rows == 0:
        return _head_waits(lanes, lane, pos_of(span.ticket))
    gone = chunk_ended_from(task_of(lanes, span.ticket), span.first, span.first + span.rows)
    span.first += gone
    span.rows -= gone
    lane.waiting -= gone
    chunk_leave(lanes, lane, pos_of(span.ticket), gone)
    return span.rows > 0


cdef bint lane_head(Lanes* lanes, Lane* lane, u64* ticket) noexcept nogil:
    while not lane.retry.empty():
        ticket[0] = lane.retry.front().ticket
        if _retry_waits(lanes, lane):
            return True
        lane.retry.pop_front()
    while lane.head < lane.seen:
        if chunk_waits(lanes, lane, lane.head) if lane.chunk_rows else _head_waits(lanes, lane,
                lane.head):
            ticket[0] = ticket_of(lane.id, lane.head)
            return True
        lane.head += 1
    return False


cdef void _take_again(Lane* lane, u32 rows_max, Span* span) noexcept nogil:
    cdef Span* front = &lane.retry.front()
    span[0] = front[0]
    if span.rows > rows_max:
        span.rows = <u16> rows_max
        front.first += rows_max
        front.rows -= rows_max
    else:
        lane.retry.pop_front()


cdef void lane_take(Lanes* lanes, Lane* lane, u32 rows_max, Span* span) noexcept nogil:
    cdef Task* task
    if not lane.retry.empty():
        _take_again(lane, rows_max, span)
        task = task_of(lanes, span.ticket)
    else:
        task = <Task*> ring_side(lane.ring, lane.head)
        span.ticket = ticket_of(lane.id, lane.head)
        span.first = span.tries = 0
        span.failed_on = 0
        span.rows = 1
        if lane.chunk_rows:
            span.first = task.next_row
            span.rows = <u16> min(rows_max, task.rows - task.next_row)
            task.next_row += span.rows          # lane_head goes on to the next once all of it is
                                                # taken
        else:
            lane.head += 1
    span.tries += 1
    lane.waiting -= span.rows
    if lane.chunk_rows == 0:
        task.phase = SENT
        task.tries += 1
        if task.heard and not task.answered:        # its slot holds its ensemble call still
            ensemble_call_sent(<EnsembleCall*> task.block.word[task.slot], task.slot)


cdef void lane_take_row(Lanes* lanes, Lane* lane, u64 ticket, Span* span) noexcept nogil:
    """lane_head passes over it later, as it does not wait any more."""
    cdef Task* task = task_of(lanes, ticket)
    cdef size_t i
    span.ticket = ticket
    span.first = span.failed_on = 0
    span.rows = 1
    span.tries = task.tries + 1
    for i in range(lane.retry.size()):
        if lane.retry[0][i].ticket == ticket:
            lane.retry.erase(lane.retry.begin() + i)
            break
    lane.waiting -= 1
    task.phase = SENT
    task.tries += 1
    if task.heard and not task.answered:
        ensemble_call_sent(<EnsembleCall*> task.block.word[task.slot], task.slot)


cdef void lane_shed(Lanes* lanes, Lane* lane, u32 rows_max, u64 now_us) noexcept nogil:
    cdef Span span
    cdef Value nothing
    nothing.word = 0
    nothing.tag = TAG_NONE
    lane_take(lanes, lane, rows_max, &span)
    span_end(lanes, &span, DROPPED, &nothing, now_us)


cdef void lane_close(Lanes* lanes, Lane* lane, Status status, u64 now_us) noexcept nogil:
    cdef u64 i, pos, ticket
    cdef Task* task
    cdef Value nothing
    nothing.word = 0
    nothing.tag = TAG_NONE
    lane_take_in(lanes, lane, now_us)
    for i in range(lane.ring.cells.size):
        if lane.seen < i + 1:
            break
        pos = lane.seen - 1 - i
        task = task_of(lanes, ticket_of(lane.id, pos))
        if task != NULL and task.slots != NULL:
            chunk_close(lanes, lane, pos, status, now_us)
        elif task != NULL and task.prev == 0:
            row_end(lanes, ticket_of(lane.id, pos), status, &nothing, now_us)
    lane_head(lanes, lane, &ticket)             # rows that were to be sent once more let go of
                                                # their chunks
    lane.waiting = 0


# -- what becomes of a span
# --------------------------------------------------------------------------------------------

cdef void _admit_chunk(Lanes* lanes, Lane* lane, u64 pos, u64 now_us) noexcept nogil:
    cdef Task* task = <Task*> ring_side(lane.ring, pos)
    _learn_slo(lane, task.deadline_us - task.submit_us)
    task.phase = WAITING
    lane.waiting += task.rows
    if not lanes_set_timer(lanes, task.deadline_us, ticket_of(lane.id, pos)):
        chunk_close(lanes, lane, pos, FULL, now_us)


cdef const Key* span_key(Lanes* lanes, const Span* span, u32 k) noexcept nogil:
    cdef Task* task = task_of(lanes, span.ticket)
    if not task.keyed:
        return NULL
    return &task.key if task.slots == NULL else &task.keys[span.first + k]


cdef void span_row_end(Lanes* lanes, const Span* span, u32 k, Status status, Value* value,
                       u64 now_us) noexcept nogil:
    cdef Task* task = task_of(lanes, span.ticket)
    if task.slots == NULL:
        row_end(lanes, span.ticket, status, value, now_us)
    else:
        chunk_end_rows(lanes, lane_of(lanes, span.ticket), task, span.first + k, 1, status, value,
                       now_us)


cdef void span_end(Lanes* lanes, const Span* span, Status status, Value* value,
                   u64 now_us) noexcept nogil:
    cdef Lane* lane = lane_of(lanes, span.ticket)
    if lane.chunk_rows == 0:
        row_end(lanes, span.ticket, status, value, now_us)
        return
    chunk_end_rows(lanes, lane, task_of(lanes, span.ticket), span.first, span.rows, status, value,
                   now_us)
    chunk_leave(lanes, lane, pos_of(span.ticket), span.rows)


cdef bint span_retry(Lanes* lanes, const Span* span, u32 failed_on, u64 now_us) noexcept nogil:
    cdef Lane* lane = lane_of(lanes, span.ticket)
    cdef Task* task = task_of(lanes, span.ticket)
    if lane.chunk_rows == 0:
        if task.tries > 1 or task.due_us <= now_us or not task_needed(lanes, task):
            return False
    elif span.tries > 1 or task.answered or task.due_us <= now_us:
        return False
    if lane.chunk_rows == 0 and pos_of(span.ticket) >= lane.head:
        task.phase = WAITING            # it was taken from the middle, and waits there again
        task.left = failed_on
        lane.waiting += 1
        note(&lane.tally.retried, 1)
        return True
    if not try_push(lane.retry[0], span[0]):
        return False
    if lane.chunk_rows == 0:
        task.phase = WAITING
    lane.retry.back().failed_on = failed_on
    lane.waiting += span.rows
    note(&lane.tally.retried, span.rows)
    return True
