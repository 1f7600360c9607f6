"""Blocks of result slots, and how threads, event loops and the callback thread are notified of
slots that have ended, without the GIL.

completion.hpp and loop_owner.hpp have the operations that run concurrently, and explain why no
event is missed. This module keeps the required order: the loop ends slots and fills mailboxes, then
ends the epoch, then wakes waiters.
"""
from libc.stdlib cimport free
from libc.string cimport memset

from clipper_core.runtime.machine cimport aligned_new, eventfd_signal, futex_wake_all, relaxed
from clipper_core.runtime.ring cimport spsc_free
from clipper_core.runtime.spin_lock cimport spin_lock, spin_unlock
from clipper_core.runtime.status cimport NO_MEMORY, raise_for
from clipper_core.wire.prediction cimport TAG_BLOB, value_drop

cdef extern from "<unistd.h>" nogil:
    int close(int fd) noexcept


# -- blocks
# --------------------------------------------------------------------------------------------------

cdef Block* _block_new(u32 count) noexcept nogil:
    cdef u64 head = (sizeof(Block) + 63) & ~<u64> 63
    cdef u64 n = (<u64> count + 63) & ~<u64> 63
    cdef char* memory = <char*> aligned_new(head + n * (8 + 4 + 4 + 1 + 1))
    if memory == NULL:
        return NULL
    cdef Block* block = <Block*> memory
    block.count = count
    block.word = <u64*> (memory + head)
    block.latency_us = <u32*> (memory + head + n * 8)
    block.boxes = <atomic[u32]*> (memory + head + n * 12)
    block.state = <atomic[u8]*> (memory + head + n * 16)
    block.tag = <u8*> (memory + head + n * 17)
    return block


cdef u64 id_claim(CompletionState* d) noexcept nogil:
    cdef u64 id
    spin_lock(d.lock)
    id = d.next_id
    d.next_id += 1
    spin_unlock(d.lock)
    return id


cdef void _block_reset(Block* block) noexcept nogil:
    cdef u32 n = (block.count + 63) & ~<u32> 63
    block.used = 0
    memset(<void*> block.word, 0, <u64> n * 18)


cdef Block* _block_take(CompletionState* d, u32 count) noexcept nogil:
    """Return a new block with two references per slot and one of the allocator. Call it under the
    lock."""
    cdef Block* block = NULL
    if count == BLOCK_SLOTS and d.free != NULL:
        block = d.free
        d.free = block.next
        _block_reset(block)
    else:
        block = _block_new(count)
    if block == NULL:
        return NULL
    block_hold(block[0], 1 + 2 * count)
    block.home = d.number
    block.first_id = d.next_id
    d.next_id += count
    return block


cdef void _block_retire(CompletionState* d, Block* block) noexcept nogil:
    cdef u32 i
    cdef Value value
    for i in range(block.used):
        if block.tag[i] & TAG_BLOB:
            value.word = block.word[i]
            value.tag = block.tag[i]
            value_drop(&value)
    if block.count != BLOCK_SLOTS:
        free(block)
        return
    spin_lock(d.lock)
    block.next = d.free
    d.free = block
    spin_unlock(d.lock)


cdef void block_drop(CompletionState* d, Block* block, u32 refs) noexcept nogil:
    if block_release(block[0], refs):
        _block_retire(d, block)


cdef bint _claim_own(CompletionState* d, u32 count, Block** block, u32* first) noexcept nogil:
    """Return a block for a single future. Its memory may be megabytes, so it is cleared before the
    lock is taken."""
    cdef Block* b = _block_new(count)
    if b == NULL:
        return False
    block_hold(b[0], 2 * count)
    b.used = count
    b.home = d.number
    spin_lock(d.lock)
    b.first_id = d.next_id
    d.next_id += count
    d.issued.store(d.issued.load(relaxed) + count, relaxed)
    spin_unlock(d.lock)
    first[0] = 0
    block[0] = b
    return True


cdef bint slots_claim(CompletionState* d, u32 count, Block** block, u32* first) noexcept nogil:
    """Claim `count` consecutive slots; each has the references of its future and of its task."""
    cdef Block* b
    cdef Block* full = NULL
    if count > BLOCK_SLOTS:
        return _claim_own(d, count, block, first)
    spin_lock(d.lock)
    b = d.current
    if count > BLOCK_SLOTS / 4:
        b = _block_take(d, count)
        if b != NULL:
            block_hold(b[0], 2 * count)                 # it is never `current`, so the allocator
                                                        # has no reference
    elif b == NULL or b.used + count > BLOCK_SLOTS:
        full = b
        b = _block_take(d, BLOCK_SLOTS)
        if b != NULL:
            d.current = b
    if b == NULL:
        spin_unlock(d.lock)
        return False
    first[0] = b.used
    block[0] = b
    b.used += count
    d.issued.store(d.issued.load(relaxed) + count, relaxed)
    spin_unlock(d.lock)
    if full != NULL:
        block_drop(d, full, 1 + 2 * (BLOCK_SLOTS - full.used))
    return True


# -- ending
# --------------------------------------------------------------------------------------------------

cdef Status slot_end(CompletionState* d, Block* block, u32 slot, Status status, Value* value,
                     u32 latency_us) noexcept nogil:
    cdef u32 boxes
    cdef u64 ensemble_call = block.word[slot]         # if the slot is in one
    cdef Value mine = value[0]
    cdef CompletionState* home = home_of(d, block)
    cdef bint first = slot_try_end(block[0], slot, <u8> status, mine, latency_us, &boxes)
    if home != d:
        d.tasks_of_peers.fetch_sub(1, relaxed)
    if first and home != d:
        home.answered.fetch_add(1, relaxed)
        if boxes != IN_ENSEMBLE:
            completion_notify(d, home, block.first_id + slot, boxes)
    elif first:
        d.ended.store(d.ended.load(relaxed) + 1, relaxed)
        if boxes == 0:
            d.touched = True
        elif boxes != IN_ENSEMBLE:
            completion_notify(d, home, block.first_id + slot, boxes)
    else:
        value_drop(&mine)           # drop the reference; the caller's Value is used for other rows
        status = <Status> slot_state(block[0], slot)
        boxes = slot_boxes(block[0], slot)
    if boxes & IN_ENSEMBLE:
        d.task_ended(d, <void*> ensemble_call, slot, first, <u8> status, latency_us)
    block_drop(home, block, 1)
    return status


cdef void slot_notify(CompletionState* d, u64 slot_id, u32 boxes) noexcept nogil:
    d.dirty |= _notify(d, slot_id, boxes)


cdef void completion_notify(CompletionState* d, CompletionState* home, u64 slot_id,
                        u32 boxes) noexcept nogil:
    if home != d:
        d.away |= <u64> 1 << home.number
        d.peers_dirty[home.number] |= _notify(home, slot_id, boxes)
    else:
        d.touched = True
        if boxes:
            slot_notify(d, slot_id, boxes)


cdef u32 _notify(CompletionState* home, u64 slot_id, u32 boxes) noexcept nogil:
    """Put the slot into the mailboxes that watch it. Return their mask."""
    cdef u32 i, mask = 0
    for i in range(MAILBOXES_MAX):
        if boxes & (<u32> 1 << i) and home.boxes[i] != NULL:
            if home.has_peers:
                mailbox_put_beside(home.boxes[i][0], home.boxes[i].ids[0], slot_id)
            else:
                mailbox_put(home.boxes[i][0], home.boxes[i].ids[0], slot_id)
            mask |= <u32> 1 << i
    return mask


cdef void _flush_peers(CompletionState* d) noexcept nogil:
    """Wake the waiters of futures of peers whose slots have ended. A thread that waits for one owns
    no loop."""
    cdef u32 n, i
    cdef CompletionState* home
    for n in range(ENGINES_MAX):
        if d.away >> n & 1 == 0:
            continue
        home = d.peers[n]
        if epoch_ends(home[0]):
            futex_wake_all(&home.epoch)
        for i in range(MAILBOXES_MAX):
            if d.peers_dirty[n] >> i & 1 and mailbox_to_wake(home.boxes[i][0]):
                eventfd_signal(home.boxes[i].fd)
        d.peers_dirty[n] = 0
    d.away = 0


cdef void completion_flush(CompletionState* d) noexcept nogil:
    cdef u32 i, waiters
    if d.away:
        _flush_peers(d)
    if not d.touched:
        return
    d.touched = False
    d.batches.store(d.batches.load(relaxed) + 1, relaxed)
    waiters = epoch_ends(d[0])
    if waiters > <u32> d.loop_owner.by_waiter:        # the owner is awake
        futex_wake_all(&d.epoch)
        d.futex_wakes.store(d.futex_wakes.load(relaxed) + 1, relaxed)
    if not d.loop_owner.by_waiter:
        d.loop_owner.learn(waiters == 1 and d.dirty == 0 and completion_open_tasks(d) == 0)
    if d.dirty == 0:
        return
    for i in range(MAILBOXES_MAX):
        if d.dirty & (<u32> 1 << i) and mailbox_to_wake(d.boxes[i][0]):
            eventfd_signal(d.boxes[i].fd)
            d.mailbox_writes.store(d.mailbox_writes.load(relaxed) + 1, relaxed)
    d.dirty = 0


cdef u64 completion_open_tasks(CompletionState* d) noexcept nogil:
    # read this first: it may be too large, but not too small
    cdef u64 done = d.answered.load(relaxed) + d.ended.load(relaxed)
    return d.issued.load(relaxed) - done + d.tasks_of_peers.load(relaxed)


cdef void completion_close(CompletionState* d, int status) noexcept nogil:
    completion_mark_dead(d[0], <u32> status)
    futex_wake_all(&d.epoch)
    completion_wake_owner(d)


# -- waking the loop
# ----------------------------------------------------------------------------------------------

cdef void completion_wake_owner(CompletionState* d) noexcept nogil:
    if d.loop_owner.wake_owner():
        eventfd_signal(d.wake_fd)


cdef void completion_wake_loop_thread(CompletionState* d) noexcept nogil:
    if d.loop_owner.is_free():
        d.loop_owner.wake_loop_thread()
        futex_wake_all(&d.loop_owner.wakeups)


cdef void completion_notify_loop(CompletionState* d) noexcept nogil:
    if d.loop_owner.wake_owner():
        eventfd_signal(d.wake_fd)
    elif d.loop_owner.is_free():
        if completion_open_tasks(d) <= LED_TASKS_MAX and d.loop_owner.enter(False):
            d.step_and_leave(d.loop)
        else:
            completion_wake_loop_thread(d)


cdef void completion_wake_loop(CompletionState* d) noexcept nogil:
    if d.loop_owner.wake_owner():
        eventfd_signal(d.wake_fd)
    else:
        completion_wake_loop_thread(d)


cdef void completion_notify_outside(CompletionState* d, u32 boxes) noexcept nogil:
    cdef u32 i
    if epoch_ends(d[0]):
        futex_wake_all(&d.epoch)
        completion_wake_owner(d)
    for i in range(MAILBOXES_MAX):
        if boxes & (<u32> 1 << i) and d.boxes[i] != NULL:
            mailbox_overflow(d.boxes[i][0])     # the ring of ids has one producer, the loop, so
                                                # another thread sets the overflow flag
            eventfd_signal(d.boxes[i].fd)


cdef bint completion_try_own_loop(CompletionState* d) noexcept nogil:
    """Take the ownership of the loop if it is free, for a thread that is counted in `waiters`."""
    if not d.loop_owner.is_free():
        return False
    if (waiters_now(d[0]) == 1 and completion_open_tasks(d) <= LED_TASKS_MAX
        and d.loop_owner.enter(True)):
        return True
    completion_wake_loop_thread(d)
    return False


cdef void slot_fill(CompletionState* d, Block* block, u32 slot, Status status,
                    Value* value) noexcept nogil:
    slot_answer(block[0], slot, <u8> status, value[0])
    d.answered.fetch_add(1, relaxed)


cdef class Completion:
    """Owns the result blocks and mailboxes of one engine; every Future keeps it alive. Threads:
    any."""

    def __cinit__(self, u32 number=0):
        self.state = <CompletionState*> aligned_new(sizeof(CompletionState))
        if self.state == NULL:
            raise_for(NO_MEMORY, "no memory for the result blocks")
        self.state.number = number
        self.state.next_id = (<u64> number << ENGINE_ID_BITS) + 1

    def __dealloc__(self):
        cdef CompletionState* d = self.state
        cdef Block* block
        cdef u32 i
        if d == NULL:
            return
        if d.current != NULL:
            block_drop(d, d.current, 1 + 2 * (BLOCK_SLOTS - d.current.used))
        while d.free != NULL:
            block = d.free
            d.free = block.next
            free(block)
        for i in range(MAILBOXES_MAX):
            if d.boxes[i] != NULL:
                close(d.boxes[i].fd)
                spsc_free(d.boxes[i].ids)
                free(d.boxes[i])
        free(d)

    @property
    def issued(self):
        """Number of tasks since the start; equals `answered` when nothing is in flight."""
        return self.state.issued.load(relaxed)

    @property
    def answered(self):
        return self.state.answered.load(relaxed) + self.state.ended.load(relaxed)

    @property
    def ensemble_calls(self):
        """Number of queries with a decider since the start. The verdict of each counts in `issued`
        and `answered`, besides its tasks."""
        return self.state.ensemble_calls.load(relaxed)

    @property
    def ensemble_calls_held(self):
        """Number of ensemble calls that are still referenced: by a future, a task in flight or a
        timer."""
        return (self.state.ensemble_calls.load(relaxed)
                - self.state.ensemble_calls_freed.load(relaxed))

    def kill(self, int status):
        """Wake all waiters with `status`, because no task completes any more (after a fork, or
        after the engine closed)."""
        completion_close(self.state, status)
