"""Chunks: claimed and published whole, sent by spans, freed when their last row neither waits nor
travels.

Who ends a row. The reply, the wheel, a shed or a caller's cancel, whichever is first: one
compare-and-swap on the slot's status byte decides. A slot that has ended is left alone, value and
all: only the loop and a caller who cancels end a slot that somebody may wait for, and who cancels
writes no value. The swap decides against a cancel only.

Who frees a chunk. `left` counts its rows that wait or are on their way; the loop alone changes it.
Until it is 0 the chunk holds a reference to its block for every row, so its slots may be looked at
whoever has ended them. What was cancelled is counted then: the rows of the chunk less those the
loop has ended.

What was given up: the rows of a chunk do not join equal rows in flight. They are looked up once, at
submit; equal rows of one array are evaluated each. A join would cost an array what it saves: an
entry in a table a row.
"""
from libc.string cimport memcpy

from clipper_core.cache.clock_cache cimport Key
from clipper_core.results.completion cimport (
    block_drop, slot_answer, slot_notify, slot_state, slot_try_end,
)
from clipper_core.runtime.histogram cimport histogram_note_many, note
from clipper_core.runtime.machine cimport relaxed
from clipper_core.runtime.ring cimport ring_side
from clipper_core.runtime.status cimport CANCELLED, OK, PENDING
from clipper_core.scheduling.task cimport IDLE, lane_of, pos_of, task_of, ticket_of
from clipper_core.wire.prediction cimport TAG_NONE, value_drop, value_hold


# -- ending many slots
# -------------------------------------------------------------------------------------------------

cdef inline bint _end(CompletionState* d, Block* block, u32 slot, Status status, const Value* value,
                      u32 latency_us) noexcept nogil:
    """False: somebody has ended it already."""
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
    """All alike, each with a reference of its own to the value; -> how many were open."""
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
    """OK, each with the next scalar of `size` bytes; -> how many were open."""
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
    task.answered = False
    return task


cdef void chunk_publish(Lane* lane, u64 pos) noexcept nogil:
    cdef Task* task = <Task*> ring_side(lane.ring, pos)
    task.left = task.rows
    task.slot = task.slots[0]
    task.due_us = task.deadline_us
    lane.ring.cells.publish(pos)


cdef u32 chunk_ended_from(Task* task, u32 first, u32 end) noexcept nogil:
    """How many rows from `first` on have ended already."""
    cdef u32 i = first
    while i < end and slot_state(task.block[0], task.slots[i]) != PENDING:
        i += 1
    return i - first


cdef void chunk_leave(Lanes* lanes, Lane* lane, u64 pos, u32 rows) noexcept nogil:
    """So many rows of a chunk neither wait nor are on their way any more; the last frees it."""
    cdef Task* task = <Task*> ring_side(lane.ring, pos)
    if rows == 0:
        return
    task.left -= rows
    if task.left:
        return
    if task.rows > task.counted:                # by whom the loop was not told
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
    """All rows of it end. Those that are on their way keep it, and so do those that were to be sent
    once more, until the lane comes to them."""
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


cdef void span_leave(Lanes* lanes, const Span* span) noexcept nogil:
    cdef Lane* lane = lane_of(lanes, span.ticket)
    if lane.chunk_rows:
        chunk_leave(lanes, lane, pos_of(span.ticket), span.rows)
