"""Futures by ticket, and the delivery of what has ended to threads, event loops and callbacks, without the GIL.

How a waiter and the loop thread cannot miss each other: future.hpp, which holds every step that they race on. What is asked of
this module is their order: a blocked thread counts itself, then reads `epoch`, then looks at its slots; the loop ends slots and
puts notices, then ends the epoch, then wakes.
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport free
from libc.string cimport memset

import logging
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout

from clipper_core.dtype cimport F64
from clipper_core.machine cimport aligned_new, eventfd_signal, futex_wait, futex_wake_all, monotonic_us, relaxed
from clipper_core.prediction cimport TAG_BLOB, TAG_NONE, value_confidence, value_drop, value_object
from clipper_core.ring cimport spsc_free
from clipper_core.status cimport CANCELLED, FULL, NO_MEMORY, OK, PENDING, raise_for

from clipper_core.status import Status as StatusName
from clipper_core.status import error_for

import numpy as np

cdef extern from "<unistd.h>" nogil:
    int close(int fd) noexcept

cdef enum:
    WAIT_SLICE_US = 50000       # a blocked thread looks for signals this often

cdef u64 NEVER_US = <u64> 1 << 62


# -- blocks ------------------------------------------------------------------------------------------------------------

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


cdef void _block_reset(Block* block) noexcept nogil:
    cdef u32 n = (block.count + 63) & ~<u32> 63
    block.used = 0
    memset(<void*> block.word, 0, <u64> n * 18)


cdef Block* _block_take(DeliveryState* d, u32 count) noexcept nogil:
    """A fresh block with two references a slot and one of the allocator's. Under the lock."""
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
    block.first_id = d.next_id
    d.next_id += count
    return block


cdef void _block_retire(DeliveryState* d, Block* block) noexcept nogil:
    cdef u32 i
    cdef Value value
    for i in range(block.used):
        if block.tag[i] == TAG_BLOB:
            value.word = block.word[i]
            value.tag = TAG_BLOB
            value_drop(&value)
    if block.count != BLOCK_SLOTS:
        free(block)
        return
    claims_lock(d.lock)
    block.next = d.free
    d.free = block
    claims_unlock(d.lock)


cdef void block_drop(DeliveryState* d, Block* block, u32 refs) noexcept nogil:
    if block_let_go(block[0], refs):
        _block_retire(d, block)


cdef bint slots_claim(DeliveryState* d, u32 count, Block** block, u32* first) noexcept nogil:
    """`count` consecutive slots; each comes with its future's reference and its task's."""
    cdef Block* b
    cdef Block* full = NULL
    claims_lock(d.lock)
    b = d.current
    if count > BLOCK_SLOTS / 4:
        b = _block_take(d, count)
        if b != NULL:
            block_hold(b[0], 2 * count)                 # it is never current: no reference of the allocator's
    elif b == NULL or b.used + count > BLOCK_SLOTS:
        full = b
        b = _block_take(d, BLOCK_SLOTS)
        if b != NULL:
            d.current = b
    if b == NULL:
        claims_unlock(d.lock)
        return False
    first[0] = b.used
    block[0] = b
    b.used += count
    d.issued.store(d.issued.load(relaxed) + count, relaxed)
    claims_unlock(d.lock)
    if full != NULL:
        block_drop(d, full, 1 + 2 * (BLOCK_SLOTS - full.used))
    return True


# -- ending ------------------------------------------------------------------------------------------------------------

cdef bint slot_end(DeliveryState* d, Block* block, u32 slot, Status status, Value* value, u32 latency_us) noexcept nogil:
    cdef u32 boxes
    cdef Value mine = value[0]
    cdef bint first = slot_try_end(block[0], slot, <u8> status, mine, latency_us, &boxes)
    if first:
        d.touched = True
        d.ended.store(d.ended.load(relaxed) + 1, relaxed)
        if boxes:
            _notify(d, block.first_id + slot, boxes)
    else:
        value_drop(&mine)           # the reference, not the caller's Value: other rows are ended with it
    block_drop(d, block, 1)
    return first


cdef void _notify(DeliveryState* d, u64 slot_id, u32 boxes) noexcept nogil:
    cdef u32 i
    for i in range(MAILBOXES_MAX):
        if boxes & (<u32> 1 << i) and d.boxes[i] != NULL:
            mailbox_put(d.boxes[i][0], d.boxes[i].ids[0], slot_id)
            d.dirty |= <u32> 1 << i


cdef void delivery_flush(DeliveryState* d) noexcept nogil:
    cdef u32 i
    if not d.touched:
        return
    d.touched = False
    if epoch_ends(d[0]):
        futex_wake_all(&d.epoch)
    if d.dirty == 0:
        return
    for i in range(MAILBOXES_MAX):
        if d.dirty & (<u32> 1 << i) and mailbox_to_wake(d.boxes[i][0]):
            eventfd_signal(d.boxes[i].fd)
    d.dirty = 0


cdef void delivery_kill(DeliveryState* d, int status) noexcept nogil:
    delivery_dies(d[0], <u32> status)
    futex_wake_all(&d.epoch)


cdef void slot_fill(DeliveryState* d, Block* block, u32 slot, Status status, Value* value) noexcept nogil:
    slot_answer(block[0], slot, <u8> status, value[0])
    d.answered.fetch_add(1, relaxed)


cdef class Delivery:
    """Threads: any. Owns the result blocks and mailboxes of one engine; every Future keeps it alive."""

    def __cinit__(self):
        self.state = <DeliveryState*> aligned_new(sizeof(DeliveryState))
        if self.state == NULL:
            raise_for(NO_MEMORY, "no memory for the result blocks")
        self.state.next_id = 1

    def __dealloc__(self):
        cdef DeliveryState* d = self.state
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
        """Tasks handed out since the start; equals `answered` when nothing is in flight."""
        return self.state.issued.load(relaxed)

    @property
    def answered(self):
        return self.state.answered.load(relaxed) + self.state.ended.load(relaxed)

    def kill(self, int status):
        """Nothing will complete any more (after a fork, or after the engine closed): waiting ends with `status`."""
        delivery_kill(self.state, status)


# -- futures -----------------------------------------------------------------------------------------------------------

@cython.final
@cython.no_gc
@cython.freelist(512)
cdef class Future:
    """Threads: any. The result of one query, of an ensemble's tasks, or of a whole array; resolved by the deadline, always.

    Blocking: `result(timeout=None)`; in asyncio and uvloop: `await future`; also `add_done_callback`, `clipper.as_completed`.
    Source: docs/design.md, "Futures by ticket".
    """

    def __init__(self):
        raise TypeError("futures come from predict() and schedule_prediction()")

    def __dealloc__(self):
        cdef u32 i
        cdef u8 state
        cdef Value value
        if self.block == NULL:
            value_drop(&self.at_once)
            return
        for i in range(self.first, self.first + self.count):
            state = slot_state(self.block[0], i)
            if state != PENDING and state != CANCELLED and self.block.tag[i] == TAG_BLOB:
                value.word = self.block.word[i]
                value.tag = TAG_BLOB
                value_drop(&value)
                self.block.tag[i] = TAG_NONE
        block_drop(self.delivery.state, self.block, self.count)

    cdef u8 _state(self, u32 i) noexcept nogil:
        if self.block == NULL:
            return self.status_at_once
        return slot_state(self.block[0], self.first + i)

    cdef Value _held(self, u32 i) noexcept nogil:
        """The value in slot i, borrowed."""
        cdef Value value
        if self.block == NULL:
            return self.at_once
        value.word = self.block.word[self.first + i]
        value.tag = self.block.tag[self.first + i]
        return value

    cdef u32 first_open(self) noexcept nogil:
        if self.block == NULL:
            return self.count
        return slots_first_open(self.block[0], self.cursor, self.first, self.count)

    cdef bint is_done(self) noexcept nogil:
        return self.block == NULL or self.first_open() == self.count

    @cython.binding(False)
    def done(self):
        """True once every task of the query has ended, by a prediction, a failure or the deadline."""
        return bool(self.is_done())

    def running(self):
        return not self.is_done()

    def cancelled(self):
        return self._state(0) == CANCELLED

    def cancel(self):
        """Give the query up. True if a task was still pending; a prediction on its way still fills the cache."""
        cdef DeliveryState* d = self.delivery.state
        cdef u32 i, ended = 0
        if self.block == NULL:
            return False
        for i in range(self.first, self.first + self.count):
            ended += slot_try_cancel(self.block[0], i, CANCELLED)
        if ended:
            d.answered.fetch_add(ended, relaxed)
            if epoch_ends(d[0]):
                futex_wake_all(&d.epoch)
            self._tell_mailboxes()
        return ended > 0

    def _tell_mailboxes(self):
        cdef DeliveryState* d = self.delivery.state
        cdef u32 i, boxes = 0
        for i in range(self.first, self.first + self.count):
            boxes |= slot_boxes(self.block[0], i)
        for i in range(MAILBOXES_MAX):
            if boxes & (<u32> 1 << i) and d.boxes[i] != NULL:
                mailbox_overflow(d.boxes[i][0])     # the ids ring has one producer, the loop; this is the other way in
                eventfd_signal(d.boxes[i].fd)

    cdef int _wait(self, u64 until_us) noexcept nogil:
        """0 done, 1 the time is over, 2 look for signals, 3 the engine is dead."""
        cdef DeliveryState* d = self.delivery.state
        cdef u32 epoch
        cdef u64 now
        cdef int rc = 0
        waiter_enters(d[0])
        while True:
            epoch = waiter_epoch(d[0])
            if self.is_done():
                rc = 0
                break
            if waiter_dead(d[0]):
                rc = 3
                break
            now = monotonic_us()
            if now >= until_us:
                rc = 1
                break
            if futex_wait(&d.epoch, epoch, min(until_us - now, <u64> WAIT_SLICE_US)) != 0:
                rc = 2
                break
        waiter_leaves(d[0])
        return rc

    def wait(self, timeout=None):
        """Block until done; False when `timeout` (seconds) is over first. Ctrl-C is heard. Releases the GIL."""
        cdef u64 until
        cdef int rc = 2
        if self.is_done():
            return True
        until = NEVER_US if timeout is None else monotonic_us() + <u64> min(max(0.0, timeout * 1e6), 1e18)
        while rc == 2:
            with nogil:
                rc = self._wait(until)
            if rc == 2:
                PyErr_CheckSignals()
        if rc == 3 and not self.is_done():
            raise_for(waiter_dead(self.delivery.state[0]), "the query was in flight in an engine that is gone")
        return rc == 0

    @cython.binding(False)
    def result(self, timeout=None):
        """The result, waiting for it at most `timeout` seconds. Raises the task's typed error, or TimeoutError."""
        if not self.is_done() and not self.wait(timeout):
            raise FutureTimeout(f"no result within {timeout} s; the query's own deadline has not passed yet")
        if self.finish is not None:
            if not self.settled:
                self.outcome = self.finish(self)
                self.settled = True
            return self.outcome
        if self.count == 1:
            return self._single(0)
        return self._many()

    def exception(self, timeout=None):
        """The error that `result()` would raise, or None."""
        if not self.wait(timeout):
            raise FutureTimeout(f"no result within {timeout} s")
        try:
            self.result(0)
        except Exception as error:
            return error
        return None

    cdef object _single(self, u32 i):
        cdef u8 state = self._state(i)
        if state == OK:
            return self._value(i)
        raise self._error(i, state)

    cdef object _value(self, u32 i):
        cdef Value value = self._held(i)
        return value_object(&value)

    cdef object _error(self, u32 i, u8 state):
        if state == CANCELLED:
            return CancelledError()
        error = error_for(state, self.detail(i))
        if state == FULL and self._held(i).tag == F64:
            error.retry_after_s = self._value(i)
        return error

    cdef object _many(self):
        """All values in order: one ndarray when they are numbers of one shape, else a list. Raises on the first failed row."""
        cdef u32 i
        cdef u8 state
        for i in range(self.count):
            state = self._state(i)
            if state != OK:
                raise self._error(i, state)
        values = [self._value(i) for i in range(self.count)]
        if isinstance(values[0], (int, float, np.ndarray)):
            try:
                return np.array(values)
            except ValueError:
                return values
        return values

    # -- what a finisher reads

    def __len__(self):
        return self.count

    def status(self, u32 i=0):
        """How task `i` ended (Status), PENDING while it has not."""
        self._check(i)
        return StatusName(self._state(i))

    def statuses(self):
        """One u8 per task, shape (n,): how each ended."""
        return np.array([self._state(i) for i in range(self.count)], dtype=np.uint8)

    def output(self, u32 i=0):
        """The prediction of task `i`, or None if it has none."""
        self._check(i)
        return self._value(i) if self._state(i) == OK else None

    def confidence(self, u32 i=0):
        """The confidence the model gave to prediction `i`, or None."""
        cdef Value value
        self._check(i)
        if self._state(i) != OK:
            return None
        value = self._held(i)
        return value_confidence(&value)

    def detail(self, u32 i=0):
        """Why task `i` failed (a model's traceback, for instance), or ''."""
        cdef Value value
        cdef u8 state
        self._check(i)
        state = self._state(i)
        if state == PENDING or state == OK or state == CANCELLED:
            return ""
        value = self._held(i)
        return value_object(&value) if value.tag == TAG_BLOB else ""

    cdef int _check(self, u32 i) except -1:
        if i >= self.count:
            raise IndexError(f"task {i} of a query with {self.count}")
        return 0

    @property
    def id(self):
        """The query's id, unique in this engine: the same in answers, logs and feedback."""
        cdef DeliveryState* d = self.delivery.state
        if self.block != NULL:
            return self.block.first_id + self.first
        if self.own_id == 0:
            claims_lock(d.lock)
            self.own_id = d.next_id
            d.next_id += 1
            claims_unlock(d.lock)
        return self.own_id

    @property
    def latency_us(self):
        """Microseconds from submit to the last task's end; 0 for a cache hit or while pending."""
        cdef u32 i, longest = 0
        if self.block == NULL or not self.is_done():
            return 0
        for i in range(self.first, self.first + self.count):
            if slot_state(self.block[0], i) != CANCELLED:      # the loop may still write what nobody will read
                longest = max(longest, self.block.latency_us[i])
        return longest

    # -- event loops and callbacks

    def __await__(self):
        if not self.is_done():
            if self.delivery.on_await is None:
                raise RuntimeError("this engine has no asyncio face; use clipper.start(), or result()")
            waiter = self.delivery.on_await(self)
            try:
                yield from waiter
            except BaseException:
                if not self.is_done():
                    self.cancel()
                raise
        return self.result(0)

    def add_done_callback(self, fn):
        """Call `fn(future)` once done: at once if it is, else from the callback thread. What it raises is logged."""
        if self.is_done():
            try:
                fn(self)
            except Exception:       # as it would be on the callback thread: which of the two it is, is chance
                logging.getLogger("clipper").exception("a done-callback of %r raised", self)
        elif self.delivery.on_callback is None:
            raise RuntimeError("this engine has no callback thread; use clipper.start()")
        else:
            self.delivery.on_callback(self, fn)

    def __repr__(self):
        if not self.is_done():
            return f"<Future {self.id} pending>"
        if self.count > 1:
            return f"<Future {self.id} done, {self.count} tasks>"
        return f"<Future {self.id} {self.status().name}>"


cdef Future future_at_once(Delivery delivery, u8 status, const Value* value, object finish, object extra):
    cdef Future future = Future.__new__(Future)
    future.delivery = delivery
    future.at_once = value[0]
    future.status_at_once = status
    future.count = 1
    future.finish = finish
    future.extra = extra
    return future


cdef Future future_new(Delivery delivery, Block* block, u32 first, u32 count, object finish, object extra):
    cdef Future future = Future.__new__(Future)
    future.delivery = delivery
    future.block = block
    future.first = first
    future.count = count
    future.finish = finish
    future.extra = extra
    return future
