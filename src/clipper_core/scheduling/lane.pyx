"""Queues of tasks: reading new rows, joining equal rows, ending at the deadline, taking rows for a
batch, releasing cells.

Why joining happens here and not at lookup: the table of rows in flight then has one writer, the
loop, and needs no lock; and the loop looks up the cache again when it reads a task, so a prediction
that arrived between a caller's lookup and its submit is never evaluated twice. The cost: a joined
row was copied into the ring without need.

A cell is freed by exactly one of: the join that finds it answered, the deadline (a JOINED task, or
a WAITING one that nobody joined), the skip at the head, `row_end`. A cell in phase SENT is freed
only by `row_end`, because the kernel may still be reading its row. A chunk of an array counts its
rows that wait or are in flight, and is freed with the last of them. Until then it holds a reference
to the block of its slots, so the slots may be read, whichever thread has ended them.
"""
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from clipper_core.cache.clock_cache cimport cache_lookup
from clipper_core.results.completion cimport (
    block_drop, completion_notify_loop, slot_answer, slot_end, slot_notify, slot_state,
    slot_try_end,
)
from clipper_core.results.ensemble_call cimport (
    EnsembleCall, ensemble_call_enqueue, ensemble_call_lock, ensemble_call_release,
    ensemble_call_sent, ensemble_call_task_ended, ensemble_call_unlock, timers_free, timers_has,
    timers_new, timers_take,
)
from clipper_core.runtime.allocation cimport make, try_push
from clipper_core.runtime.dtype cimport F64
from clipper_core.runtime.histogram cimport histogram_note, histogram_note_many, note
from clipper_core.runtime.machine cimport (
    CHECK, EFD_CLOEXEC, EFD_NONBLOCK, acquire, aligned_new, eventfd, relaxed, release,
)
from clipper_core.runtime.ring cimport ring_free, ring_new, spsc_free, spsc_new
from clipper_core.runtime.status cimport (
    CANCELLED, DEADLINE, DROPPED, FULL, NO_REPLICA, OK, PENDING, raise_for,
)
from clipper_core.runtime.timer_wheel cimport wheel_advance, wheel_free, wheel_insert, wheel_new
from clipper_core.scheduling.bands cimport WEIGHT_USUAL, band_rank
from clipper_core.wire.prediction cimport (
    TAG_NONE, TAG_ROW, blob_drop, row_word, value_drop, value_hold,
)

# -- The table of evaluations in flight, so that identical queries cost one evaluation.
#
# Linear probing at half load at most; a removal shifts its followers back, so that there are no
# tombstones to clean up.
#
# Only the loop writes. Other threads may look up a key (`pending_has`): they read without a lock,
# and read again if the version is odd, which it is while entries move. Entries are written with
# release and read with acquire, so that neither is reordered with the version.

cdef enum:
    PAGE_FLIGHTS = 128          # fewer than a page of 4 KiB has
    TOUCH_FLIGHTS = 65536       # 1.5 MiB
    READS_MAX = 16              # of a table that changes meanwhile; then the answer is yes

cdef cppclass Flight:
    atomic[u64] lo, hi          # the key
    atomic[u64] ticket          # 0: free

cdef struct PendingTable:
    Flight* flights
    atomic[u64] version         # odd: entries move
    u64 mask
    u64 count
    u64 entries_max


cdef PendingTable* pending_new(u64 entries_max) noexcept nogil:
    cdef PendingTable* table
    cdef u64 size = 2
    if entries_max > (<u64> 1 << 40):
        return NULL
    while size < 2 * entries_max:
        size *= 2
    table = <PendingTable*> aligned_new(sizeof(PendingTable))
    if table == NULL:
        return NULL
    table.flights = <Flight*> calloc(size, sizeof(Flight))
    if table.flights == NULL:
        free(table)
        return NULL
    table.mask = size - 1
    table.entries_max = entries_max
    return table


cdef void pending_free(PendingTable* table) noexcept nogil:
    if table != NULL:
        free(table.flights)
        free(table)


cdef u64 pending_touch(PendingTable* table, u64 start) noexcept nogil:
    cdef u64 i = start, size = table.mask + 1, ticket
    cdef u64 end = start + min(<u64> TOUCH_FLIGHTS, size - min(start, size))
    while i < end:
        ticket = table.flights[i].ticket.load(relaxed)
        # changes nothing
        table.flights[i].ticket.compare_exchange_strong(ticket, ticket, relaxed)
        i += PAGE_FLIGHTS
    return end if end < size else 0


cdef inline u64 _pending_slot(const PendingTable* table, const Key* key) noexcept nogil:
    """The key's slot, or the free one where it would go; half of the slots are free."""
    cdef u64 slot = key.lo & table.mask
    while (table.flights[slot].ticket.load(acquire)
           and not (table.flights[slot].lo.load(acquire) == key.lo
                    and table.flights[slot].hi.load(acquire) == key.hi)):
        slot = (slot + 1) & table.mask
    return slot


cdef u64 pending_find(const PendingTable* table, const Key* key) noexcept nogil:
    return table.flights[_pending_slot(table, key)].ticket.load(acquire)


cdef bint pending_has(const PendingTable* table, const Key* key) noexcept nogil:
    cdef u64 version, found
    cdef u32 _i
    for _i in range(READS_MAX):
        version = (<PendingTable*> table).version.load(acquire)
        found = pending_find(table, key)
        if version & 1 == 0 and (<PendingTable*> table).version.load(relaxed) == version:
            return found != 0
    return True


cdef Status pending_put(PendingTable* table, const Key* key, u64 ticket) noexcept nogil:
    cdef Flight* flight = &table.flights[_pending_slot(table, key)]
    CHECK(ticket != 0, "a pending evaluation has a ticket")
    if flight.ticket.load(relaxed) == 0:
        if table.count == table.entries_max:
            return FULL
        table.count += 1
        flight.lo.store(key.lo, relaxed)
        flight.hi.store(key.hi, relaxed)
    flight.ticket.store(ticket, release)
    return OK


cdef void pending_remove(PendingTable* table, const Key* key, u64 ticket) noexcept nogil:
    cdef u64 hole = _pending_slot(table, key), slot, home, version
    if ticket == 0 or table.flights[hole].ticket.load(relaxed) != ticket:
        return
    version = table.version.load(relaxed)
    table.version.store(version + 1, relaxed)
    slot = hole
    while True:
        slot = (slot + 1) & table.mask
        if table.flights[slot].ticket.load(relaxed) == 0:
            break
        home = table.flights[slot].lo.load(relaxed) & table.mask
        # its probe runs over the hole
        if ((slot - home) & table.mask) >= ((slot - hole) & table.mask):
            table.flights[hole].lo.store(table.flights[slot].lo.load(relaxed), release)
            table.flights[hole].hi.store(table.flights[slot].hi.load(relaxed), release)
            table.flights[hole].ticket.store(table.flights[slot].ticket.load(relaxed), release)
            hole = slot
    table.flights[hole].ticket.store(0, release)
    table.version.store(version + 2, release)
    table.count -= 1


cdef u64 pending_count(const PendingTable* table) noexcept nogil:
    return table.count


cdef class Pending:
    """The table of evaluations in flight. Threads: one at a time, but for `has` and `touch`.

    Maps the key of an evaluation in flight (two 64-bit words) to its ticket; it has at most
    `entries_max` entries.
    """
    cdef PendingTable* table

    def __cinit__(self, u64 entries_max):
        self.table = pending_new(entries_max)
        if self.table == NULL:
            raise MemoryError(f"no memory for {entries_max} pending evaluations")

    def __dealloc__(self):
        pending_free(self.table)

    def touch(self, u64 start=0):
        """Have the system find memory for a stretch of the table that begins with slot `start`.

        No entry changes. Returns the slot to go on with, 0 after the last stretch. Threads: any.
        """
        with nogil:
            start = pending_touch(self.table, start)
        return start

    def find(self, u64 lo, u64 hi):
        """The ticket, or 0."""
        cdef Key key = Key(lo, hi)
        return pending_find(self.table, &key)

    def put(self, u64 lo, u64 hi, u64 ticket):
        """Insert or replace. Raises the error of Status.FULL at the bound, ValueError for ticket
        0."""
        cdef Key key = Key(lo, hi)
        cdef Status status
        if ticket == 0:
            raise ValueError("ticket 0 means: nobody evaluates it")
        status = pending_put(self.table, &key, ticket)
        if status != OK:
            raise_for(status, f"{self.table.entries_max} evaluations are in flight")

    def has(self, u64 lo, u64 hi):
        """Return whether the row is being evaluated. Threads: any."""
        cdef Key key = Key(lo, hi)
        return bool(pending_has(self.table, &key))

    def remove(self, u64 lo, u64 hi, u64 ticket):
        """Remove the key, only if it still has this ticket."""
        cdef Key key = Key(lo, hi)
        pending_remove(self.table, &key, ticket)

    def __len__(self):
        return <Py_ssize_t> pending_count(self.table)


# -- Chunks: claimed and published as a whole, sent in spans, and freed when no row waits or is in
# flight.
#
# A row is ended by the reply, the wheel, early drop or a caller's cancel, whichever is first: one
# compare-and-swap of the slot's status byte decides. A slot that has ended is not changed any more.
# Only the loop and a caller that cancels end a slot for which a thread may wait, and a cancel
# writes no value, so the compare-and-swap can only fail because of a cancel.
#
# A chunk is freed when `left`, the number of its rows that wait or are in flight, is 0; only the
# loop changes it. Until then the chunk holds a reference to its block for every row, so its slots
# may be read, whichever thread has ended them. Cancelled rows are counted then: the rows of the
# chunk minus those that the loop has ended.
#
# Not done: rows of a chunk do not join equal rows in flight. They are looked up once, at submit,
# and equal rows of one array are each evaluated. Joining would cost an array, with an entry in the
# table for each row, as much as it saves.

# -- ending many slots
# -------------------------------------------------------------------------------------------------

cdef inline bint _end(CompletionState* d, Block* block, u32 slot, Status status, const Value* value,
                      u32 latency_us) noexcept nogil:
    """End a slot. Return False if it has ended already."""
    cdef u32 boxes = 0
    if slot_state(block[0], slot) != PENDING or not slot_try_end(block[0], slot, <u8> status,
                                                                 value[0], latency_us, &boxes):
        return False
    if boxes:
        slot_notify(d, block.first_id + slot, boxes)
    return True


cdef inline void _note_ended(CompletionState* d, u32 ended) noexcept nogil:
    if ended:
        d.touched = True
        d.ended.store(d.ended.load(relaxed) + ended, relaxed)


cdef u32 _end_slots(CompletionState* d, Block* block, const u32* slots, u32 n, Status status,
                    Value* value,
                    u32 latency_us) noexcept nogil:
    """End slots alike, each with a reference of its own to the value. Return how many were open."""
    cdef u32 i, ended = 0
    cdef Value mine
    for i in range(n):
        mine = value[0]
        value_hold(&mine)
        if _end(d, block, slots[i], status, &mine, latency_us):
            ended += 1
        else:
            value_drop(&mine)
    _note_ended(d, ended)
    return ended


cdef u32 _end_words(CompletionState* d, Block* block, const u32* slots, u32 n, const u8* data,
                    u32 size, u8 tag,
                    u32 latency_us) noexcept nogil:
    """End slots as OK, each with the next scalar of `size` bytes. Return how many were open."""
    cdef u32 i, ended = 0
    cdef Value value
    value.word = 0
    value.tag = tag
    for i in range(n):
        if size == 8:
            memcpy(&value.word, data + <u64> i * 8, 8)
        else:
            memcpy(&value.word, data + <u64> i * size, size)
        ended += _end(d, block, slots[i], OK, &value, latency_us)
    _note_ended(d, ended)
    return ended


cdef u32 _end_rows(CompletionState* d, Block* block, const u32* slots, Blob* blob,
                   u32 latency_us) noexcept nogil:
    """End slots as OK, each with the next row of the blob. Return how many were open."""
    cdef u32 i, n = blob.rows, ended = 0
    cdef Value value
    value.tag = TAG_ROW
    for i in range(n):
        value.word = row_word(blob, i)
        ended += _end(d, block, slots[i], OK, &value, latency_us)
    _note_ended(d, ended)
    if ended < n:
        blob_drop(blob, n - ended)
    return ended


cdef void slots_fill(CompletionState* d, Block* block, u32 first, u32 n, const Value* values,
                     const u8* chosen,
                     Status status) noexcept nogil:
    cdef u32 i, filled = 0
    for i in range(n):
        if chosen[i]:
            slot_answer(block[0], first + i, <u8> status, values[i])
            filled += 1
    d.answered.fetch_add(filled, relaxed)


# -- chunks
# --------------------------------------------------------------------------------------------------

cdef Task* chunk_claim(Lane* lane, u64* pos) noexcept nogil:
    cdef Task* task
    if not lane.ring.cells.claim(pos):
        return NULL
    task = <Task*> ring_side(lane.ring, pos[0])
    task.slots = <u32*> (<u8*> task + lines_of(sizeof(Task)))
    task.keys = <Key*> (<u8*> task.slots + lines_of(4 * lane.chunk_rows))
    task.rows = task.next_row = task.counted = 0
    task.next = task.prev = 0
    task.heap = NULL
    task.phase = IDLE
    task.tries = 0
    task.together = 0
    task.answered = False
    return task


cdef void chunk_publish(Lane* lane, u64 pos) noexcept nogil:
    cdef Task* task = <Task*> ring_side(lane.ring, pos)
    task.left = task.rows
    task.slot = task.slots[0]
    task.due_us = task.deadline_us
    lane.ring.cells.publish(pos)


cdef u32 chunk_ended_from(Task* task, u32 first, u32 end) noexcept nogil:
    """Return how many rows from `first` on have ended already."""
    cdef u32 i = first
    while i < end and slot_state(task.block[0], task.slots[i]) != PENDING:
        i += 1
    return i - first


cdef void chunk_leave(Lanes* lanes, Lane* lane, u64 pos, u32 rows) noexcept nogil:
    """Count off rows of a chunk that neither wait nor are in flight any more. The last one frees
    it."""
    cdef Task* task = <Task*> ring_side(lane.ring, pos)
    if rows == 0:
        return
    task.left -= rows
    if task.left:
        return
    if task.rows > task.counted:                # those that the loop does not know of
        note(&lane.tally.ended[<u32> CANCELLED], task.rows - task.counted)
    task.phase = IDLE
    block_drop(lanes.completion, task.block, task.rows)
    lane.ring.cells.release(pos)


cdef u32 _latency(Task* task, u64 now_us) noexcept nogil:
    return <u32> min(now_us - task.submit_us if now_us > task.submit_us else 0, <u64> 0xFFFFFFFF)


cdef void _count_ended(Lane* lane, Task* task, Status status, u32 ended,
                       u32 latency_us) noexcept nogil:
    task.counted += ended
    note(&lane.tally.ended[<u32> status], ended)
    if status == OK and ended:
        histogram_note_many(&lane.tally.latency, latency_us, ended)


cdef void chunk_end_rows(Lanes* lanes, Lane* lane, Task* task, u32 first, u32 n, Status status,
                         Value* value,
                         u64 now_us) noexcept nogil:
    cdef u32 latency = _latency(task, now_us)
    _count_ended(lane, task, status,
                 _end_slots(lanes.completion, task.block, task.slots + first, n, status, value,
                            latency),
                 latency)


cdef void chunk_close(Lanes* lanes, Lane* lane, u64 pos, Status status, u64 now_us) noexcept nogil:
    """End all rows of a chunk. The chunk is kept while rows of it are in flight or are to be
    retried, until the lane reaches them."""
    cdef Task* task = <Task*> ring_side(lane.ring, pos)
    cdef u32 waited = task.rows - task.next_row
    cdef Value nothing
    nothing.word = 0
    nothing.tag = TAG_NONE
    task.answered = True
    task.next_row = task.rows
    lane.waiting -= waited
    chunk_end_rows(lanes, lane, task, 0, task.rows, status, &nothing, now_us)
    chunk_leave(lanes, lane, pos, waited)


cdef bint chunk_waits(Lanes* lanes, Lane* lane, u64 pos) noexcept nogil:
    cdef Task* task = task_of(lanes, ticket_of(lane.id, pos))
    cdef u32 gone
    cdef bint waits
    if task == NULL:
        return False
    gone = chunk_ended_from(task, task.next_row, task.rows)
    task.next_row += gone
    lane.waiting -= gone
    waits = task.next_row < task.rows
    chunk_leave(lanes, lane, pos, gone)
    return waits


cdef bint chunk_end_words(Lanes* lanes, const Span* span, const u8* data, u32 size, u8 tag,
                          u64 now_us) noexcept nogil:
    cdef Task* task = task_of(lanes, span.ticket)
    cdef u32 latency
    if task.slots == NULL:
        return False
    latency = _latency(task, now_us)
    _count_ended(lane_of(lanes, span.ticket), task, OK,
                 _end_words(lanes.completion, task.block, task.slots + span.first, span.rows, data,
                            size, tag, latency), latency)
    return True


cdef void chunk_end_blob(Lanes* lanes, const Span* span, Blob* blob, u64 now_us) noexcept nogil:
    cdef Task* task = task_of(lanes, span.ticket)
    cdef u32 latency = _latency(task, now_us)
    _count_ended(lane_of(lanes, span.ticket), task, OK,
                 _end_rows(lanes.completion, task.block, task.slots + span.first, blob, latency),
                 latency)


cdef void span_leave(Lanes* lanes, const Span* span) noexcept nogil:
    cdef Lane* lane = lane_of(lanes, span.ticket)
    if lane.chunk_rows:
        chunk_leave(lanes, lane, pos_of(span.ticket), span.rows)


# -- Lanes: rows go in on any thread and come out on the loop's.
cdef extern from "<unistd.h>" nogil:
    int close(int fd) noexcept

cdef enum:
    TICK_US = 64
    DUE_AT_ONCE = 256
    SWEEPS_MAX = 65536
    READY_SIZE = 131072         # a lane is in it once at most, and LANES_MAX of them exist
    UNUSED_MAX = 4096           # ids of freed lanes, for new ones; when it is full, lanes are freed
                                # later


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
    lanes.weights[0].store(WEIGHT_USUAL, relaxed)
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
                    Tally* tally, u32 band,
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
    lane.band = band
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
    task.together = 0
    task.answered = False
    task.in_ensemble = block.boxes[slot].load(relaxed) != 0
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
    # without a lane: an ensemble call's, or of a freed lane
    if lane_of(lanes, ticket) == NULL:
        return ticket >> 48 == 0 and timers_has(lanes.timers, ticket)
    cdef Task* task = task_of(lanes, ticket)
    return task != NULL and (not task.answered if task.slots != NULL else _open(task))


cdef void _answer(Lane* lane, Lanes* lanes, Task* task, Status status, Value* value,
                  u64 now_us) noexcept nogil:
    """End the task's slot, once, and release the task's reference to the block."""
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
    """Free the cell of a task that was answered or cancelled."""
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
    """Refuse a row, as admission would have at once: no equal row can answer it."""
    cdef Task* task = <Task*> ring_side(lane.ring, pos)
    cdef double wait_s = task.refused_us / 1e6
    cdef Value value
    memcpy(&value.word, &wait_s, 8)
    value.tag = F64
    _answer(lane, lanes, task, FULL, &value, now_us)
    _release(lanes, lane, pos)


cdef bint _join(Lanes* lanes, Lane* lane, Task* task, u64 ticket) noexcept nogil:
    """Return True if the task now waits for an equal row; False if it is to be evaluated itself (it
    may have taken over others)."""
    cdef u64 other = pending_find(lanes.pending, &task.key)
    cdef Task* owner
    cdef bint takes_over
    if other == 0:
        pending_put(lanes.pending, &task.key, ticket)
        return False
    owner = task_of(lanes, other)
    if owner.phase == WAITING and task.refused_us == 0 and lane_of(lanes, other) != lane:
        if lane_of(lanes, other).band != lane.band:
            if band_rank(lane.band) == band_rank(lane_of(lanes, other).band):
                # which of two shares is served first is not known: both are evaluated
                pending_put(lanes.pending, &task.key, ticket)
                return False
            takes_over = band_rank(lane.band) < band_rank(lane_of(lanes, other).band)
        else:
            takes_over = task.deadline_us < owner.deadline_us
        if takes_over:
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
    """An equal row waits in a lane of longer SLOs, or of a lower priority: this one is sent, and
    the other joins it. (If the other is in the same lane, it is ahead already, and changing places
    gains nothing.)"""
    cdef Lane* other = lane_of(lanes, owner_ticket)
    task.due_us = max(task.due_us, owner.due_us)
    task.together = owner.together
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
    """Queue an ensemble call whose timer has fired, to be handled with the other queued ones."""
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
    """Return whether the row at this position is to be sent. One that no task needs any more is
    freed here."""
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
        span.together = 0
        span.rows = 1
        if lane.chunk_rows:
            span.first = task.next_row
            span.rows = <u16> min(rows_max, task.rows - task.next_row)
            task.next_row += span.rows          # lane_head continues with the next one when all
                                                # rows of it are taken
        else:
            lane.head += 1
    span.tries += 1
    lane.waiting -= span.rows
    if lane.chunk_rows == 0:
        span.together = task.together
        task.phase = SENT
        task.tries += 1
        if task.in_ensemble and not task.answered:        # its slot holds its ensemble call still
            ensemble_call_sent(<EnsembleCall*> task.block.word[task.slot], task.slot)


cdef void lane_take_row(Lanes* lanes, Lane* lane, u64 ticket, Span* span) noexcept nogil:
    """Take the row. lane_head skips it later, because it does not wait any more."""
    cdef Task* task = task_of(lanes, ticket)
    cdef size_t i
    span.ticket = ticket
    span.first = span.failed_on = 0
    span.rows = 1
    span.tries = task.tries + 1
    span.together = task.together
    for i in range(lane.retry.size()):
        if lane.retry[0][i].ticket == ticket:
            lane.retry.erase(lane.retry.begin() + i)
            break
    lane.waiting -= 1
    task.phase = SENT
    task.tries += 1
    if task.in_ensemble and not task.answered:
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
    lane_head(lanes, lane, &ticket)             # rows that were to be retried release their chunks
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
    return _put_back(lanes, span, failed_on, span.together)


cdef bint span_again(Lanes* lanes, const Span* span, u16 together, bint counts,
                     u64 now_us) noexcept nogil:
    cdef Task* task = task_of(lanes, span.ticket)
    cdef Span back = span[0]
    if task.due_us <= now_us or span.tries >= TRIES_MAX:
        return False
    if task.answered if task.slots != NULL else not task_needed(lanes, task):
        return False
    if not counts:
        back.tries -= 1
        task.tries -= task.slots == NULL
    return _put_back(lanes, &back, 0, together)


cdef bint _put_back(Lanes* lanes, const Span* span, u32 failed_on, u16 together) noexcept nogil:
    """Let the rows of a span that was sent wait again, at the front of their lane."""
    cdef Lane* lane = lane_of(lanes, span.ticket)
    cdef Task* task = task_of(lanes, span.ticket)
    if lane.chunk_rows == 0:
        task.together = together
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
    lane.retry.back().together = together
    lane.waiting += span.rows
    note(&lane.tally.retried, span.rows)
    return True
