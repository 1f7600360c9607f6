"""Queries that are answered in parts: what the loop appends, and what a reader takes."""
cimport cython
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

import time

import numpy as np

from clipper_core.results.completion cimport (
    block_drop, completion_notify_loop, id_claim, slot_end, slot_fill, slot_state, slots_claim,
    waiter_dead,
)
from clipper_core.results.future cimport future_at_once, future_new
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.dtype cimport STR
from clipper_core.runtime.machine cimport (
    acq_rel, acquire, aligned_new, relaxed, release, seq_cst,
)
from clipper_core.runtime.spin_lock cimport spin_lock, spin_unlock
from clipper_core.runtime.status cimport (
    FORKED, NO_MEMORY, OK, PENDING, raise_for,
)
from clipper_core.wire.prediction cimport (
    TAG_BLOB, TAG_NONE, Blob, blob_new, value_confidence, value_drop, value_object,
)

from clipper_core.runtime.status import error_for


cdef PartStream* part_stream_new(CompletionState* home, PartStreamInbox* inbox, void* model,
                                 const void* row, u64 row_bytes) noexcept nogil:
    cdef PartStream* s = <PartStream*> aligned_new(sizeof(PartStream))
    if s == NULL:
        return NULL
    s.refs.store(1, relaxed)
    s.home = home
    s.inbox = inbox
    s.model = model
    s.why.tag = TAG_NONE
    s.row = <u8*> malloc(row_bytes + 1)
    s.parts = make[vector[ArrivedPart]]()
    if s.row == NULL or s.parts == NULL:
        part_stream_release(s)
        return NULL
    memcpy(s.row, row, row_bytes)
    s.row_bytes = row_bytes
    return s


cdef void part_stream_release(PartStream* s) noexcept nogil:
    cdef size_t i
    if s.refs.fetch_sub(1, acq_rel) != 1:
        return
    for i in range(s.parts.size() if s.parts != NULL else 0):
        value_drop(&s.parts[0][i].value)
    value_drop(&s.why)
    if s.block != NULL:
        block_drop(s.home, s.block, 1)
    del s.parts
    free(s.row)
    free(s)


cdef void part_stream_announce(PartStream* s) noexcept nogil:
    cdef u64 newest
    if s.listed.exchange(1, seq_cst):
        return                      # the loop will see what was written before
    s.refs.fetch_add(1, relaxed)
    newest = s.inbox.newest.load(relaxed)
    s.next_listed = <PartStream*> newest
    while not s.inbox.newest.compare_exchange_strong(newest, <u64> s, seq_cst):
        s.next_listed = <PartStream*> newest
    completion_notify_loop(s.home)


cdef PartStream* part_streams_take(PartStreamInbox* inbox) noexcept nogil:
    if inbox.newest.load(relaxed) == 0:
        return NULL
    return <PartStream*> inbox.newest.exchange(0, seq_cst)


cdef u32 _took_us(const PartStream* s, u64 now_us) noexcept nogil:
    return <u32> min(now_us - min(now_us, s.begun_us), <u64> 0xFFFFFFFF)


cdef void _wake(PartStream* s, Block* block, u32 slot, u64 now_us) noexcept nogil:
    """End the slot of a reader that waits, if there is one."""
    cdef Value nothing
    nothing.word = 0
    nothing.tag = TAG_NONE
    if block != NULL:
        slot_end(s.home, block, slot, OK, &nothing, _took_us(s, now_us))


cdef bint part_stream_add(PartStream* s, Value* part, u64 now_us) noexcept nogil:
    cdef Block* block = NULL
    cdef ArrivedPart arrived
    cdef u32 slot = 0
    arrived.value = part[0]
    arrived.latency_us = _took_us(s, now_us)
    spin_lock(s.lock)
    if not make_room(s.parts[0], s.parts.size() + 1):
        spin_unlock(s.lock)
        value_drop(part)
        return False
    s.parts.push_back(arrived)
    if s.parts.size() > s.wanted:
        block, slot = s.block, s.slot
        s.block = NULL
    spin_unlock(s.lock)
    _wake(s, block, slot, now_us)
    return True


cdef void part_stream_end(PartStream* s, Status status, const char* text, u64 n,
                          u64 now_us) noexcept nogil:
    cdef Block* block
    cdef Blob* why = blob_new(text, n) if n else NULL
    cdef u32 slot
    spin_lock(s.lock)
    s.latency_us = _took_us(s, now_us)
    if why != NULL:
        why.dtype = STR
        s.why.word, s.why.tag = <u64> why, TAG_BLOB
    s.status.store(<u8> status, release)
    block, slot = s.block, s.slot
    s.block = NULL
    spin_unlock(s.lock)
    _wake(s, block, slot, now_us)


cdef bint part_stream_is_ended(PartStream* s) noexcept nogil:
    return s.status.load(acquire) != PENDING


# -- Python
# --------------------------------------------------------------------------------------------------

@cython.final
cdef class AnswerPart:
    """A part of an answer, or, as the last one, the whole. Nothing changes after it is made.
    Threads: any.

    output: of the part; of the whole its parts together: text joined, numbers as an array. index:
    the number of the part, from 0; of the whole how many parts there were. confidence: as the model
    gave it with the part, or None. is_last: it is the whole. complete: the model has given all
    parts; False: the parts until then, and `reason` says why there are no more. is_default: no part
    arrived, and the output is the application's default. latency_us: from the query to this part;
    of the whole to the end. id: of the query to an application, for feedback; None for a model's.
    request_id: the caller's own id of the query. models, missing: of an application's whole: the
    model that gave the parts, and the one that gave none.
    """

    def __init__(self, output, u64 index, *, confidence=None, bint is_last=False,
                 bint complete=True, bint is_default=False, reason=None, u64 latency_us=0,
                 id=None, str request_id="", tuple models=(), tuple missing=()):
        self.output = output
        self.index = index
        self.confidence = confidence
        self.is_last = is_last
        self.complete = complete
        self.is_default = is_default
        self.reason = reason
        self.latency_us = latency_us
        self.id = id
        self.request_id = request_id
        self.models = models
        self.missing = missing

    def __repr__(self):
        name = "whole" if self.is_last else f"part {self.index}"
        return f"<AnswerPart {name}: {self.output!r:.60}{'' if self.complete else ', incomplete'}>"


def joined_parts(list outputs):
    """Return the whole of the outputs of some parts: str and bytes joined, numbers as an array with
    one more dimension, and any others as a list. Threads: any."""
    if outputs and all([isinstance(each, str) for each in outputs]):
        return "".join(outputs)
    if outputs and all([isinstance(each, bytes) for each in outputs]):
        return b"".join(outputs)
    if any([isinstance(each, (str, bytes, dict)) for each in outputs]):
        return outputs
    if len({np.shape(each) for each in outputs}) > 1:
        return outputs
    return np.array(outputs)


@cython.no_gc_clear                  # __dealloc__ needs `completion` and `model`
@cython.final
cdef class PartsFuture:
    """The answer of one query in parts, as they arrive. Iterating it (`for`, `async for`) gives
    each part and, as the last one, the whole; `result()` and `await` give the whole.

    A model that is not read is stopped at a number of parts (limits.parts_ahead_max). Closing or
    cancelling it stops the model; so does dropping it. Threads: any, one at a time.
    """

    def __init__(self):
        raise TypeError("such a future comes from predict(..., stream=True)")

    def __dealloc__(self):
        if self.stream == NULL:
            return
        if waiter_dead(self.completion.state[0]) != FORKED:
            if not part_stream_is_ended(self.stream):
                self.stream.cancelled.store(1, seq_cst)
                part_stream_announce(self.stream)
            part_stream_release(self.stream)

    cdef u64 _arrived(self):
        cdef u64 n
        if self.stream == NULL:
            return 1 if self.plain.is_done() and self.plain._state_of(0) == OK else 0
        spin_lock(self.stream.lock)
        n = self.stream.parts.size()
        spin_unlock(self.stream.lock)
        return n

    cdef u8 _status(self):
        """Return the status with which the parts ended; PENDING while more may come."""
        if self.stream == NULL:
            return self.plain._state_of(0)
        return self.stream.status.load(acquire)

    cdef object _why(self):
        cdef object text = ""
        if self.stream == NULL:
            return self.plain.detail(0)
        spin_lock(self.stream.lock)
        cdef Value why = self.stream.why
        spin_unlock(self.stream.lock)
        if why.tag != TAG_NONE:
            text = value_object(&why)
        return text

    cdef object _part(self, u64 i):
        """Return part i, which has arrived."""
        cdef ArrivedPart arrived
        if self.stream == NULL:
            return AnswerPart(self.plain.output(0), i, confidence=self.plain.confidence(0),
                              latency_us=self.plain.latency_us)
        spin_lock(self.stream.lock)
        arrived = self.stream.parts[0][i]
        spin_unlock(self.stream.lock)
        return AnswerPart(value_object(&arrived.value), i,
                          confidence=value_confidence(&arrived.value),
                          latency_us=arrived.latency_us)

    cdef Future _next(self, u64 i):
        """Return a future that is done when part i, or the end, has arrived. Raises RuntimeError if
        another thread waits for it."""
        cdef PartStream* s = self.stream
        cdef Block* block = NULL
        cdef Block* stale = NULL
        cdef u32 slot = 0
        cdef Value nothing
        cdef bint is_there, is_waited_for = False
        nothing.word = 0
        nothing.tag = TAG_NONE
        if s == NULL:
            return self.plain
        self._took(i)
        spin_lock(s.lock)
        is_there = i < s.parts.size() or s.status.load(acquire) != PENDING
        spin_unlock(s.lock)
        if is_there:
            return future_at_once(self.completion, OK, &nothing, None, None)
        if not slots_claim(self.completion.state, 1, &block, &slot):
            raise_for(NO_MEMORY, "no memory for the next part")
        spin_lock(s.lock)
        is_there = i < s.parts.size() or s.status.load(acquire) != PENDING
        if not is_there:
            is_waited_for = s.block != NULL and slot_state(s.block[0], s.slot) == PENDING
            if not is_waited_for:
                stale = s.block
                s.block, s.slot = block, slot
                s.wanted = i
        spin_unlock(s.lock)
        if stale != NULL:
            block_drop(self.completion.state, stale, 1)
        if is_there or is_waited_for:
            slot_fill(self.completion.state, block, slot, OK, &nothing)
            block_drop(self.completion.state, block, 1)
        future = future_new(self.completion, block, slot, 1, None, None)
        if is_waited_for:
            raise RuntimeError("another thread or task waits for the next part of this query")
        return future

    cdef int _took(self, u64 n) except -1:
        """Note that the first n parts were read, so that the container may send more."""
        cdef PartStream* s = self.stream
        if s == NULL or n <= s.taken.load(relaxed):
            return 0
        s.taken.store(n, seq_cst)
        if n + s.ahead // 2 >= s.allowed.load(acquire):
            part_stream_announce(s)
        return 0

    def pending(self):
        """Return the Future that is done once the next iteration has something to give, a part or
        the whole; None if it has that now. Only one may wait at a time. Threads: any."""
        return self._next(self.at) if self._must_wait() else None

    def ending(self):
        """Let the model give all its parts, and return the Future that is done once no more come;
        None if that is so now. Only one may wait at a time. Threads: any."""
        return self._next(ALL_PARTS) if self._status() == PENDING else None

    def error(self):
        """Return the error that the parts ended with; None if there is none, or they have not
        ended. Threads: any."""
        cdef u8 status = self._status()
        return None if status == PENDING or status == OK else error_for(status, self._why())

    def done(self):
        """Return whether all parts have arrived, or no more will. Threads: any."""
        return self._status() != PENDING

    def cancelled(self):
        """Return whether cancel() ended it. Threads: any."""
        return bool(self.is_cancelled)

    def cancel(self):
        """Stop the model. Return whether it had not ended: then its result is what has arrived,
        incomplete, and the iteration ends with that. Threads: any."""
        if self._status() != PENDING:
            return False
        self.is_cancelled = True
        if self.stream == NULL:
            return self.plain.cancel()
        self.stream.cancelled.store(1, seq_cst)
        part_stream_announce(self.stream)
        return True

    def close(self):
        """Stop the model, if it has not ended."""
        self.cancel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cancel()

    def __iter__(self):
        return self

    def __next__(self):
        cdef u64 at = self.at
        if self.is_over:
            raise StopIteration
        while self._must_wait():
            self._next(at).wait()
        return self._given(at)

    cdef bint _must_wait(self):
        """Return whether neither the next part nor the end has arrived."""
        return self._status() == PENDING and self.at >= self._arrived()

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.is_over:
            raise StopAsyncIteration
        at = self.at
        while self._must_wait():
            await self._next(at)
        return self._given(at)

    def _given(self, u64 at):
        """Return part `at`, which has arrived, or the whole; the next iteration gives the next one.
        """
        if at < self._arrived():
            self.at = at + 1
            self._took(at + 1)
            return self._part(at)
        self.is_over = True
        return self._made()

    def result(self, timeout=None):
        """Return the whole, after waiting at most `timeout` seconds. It reads all parts. Raises the
        error of the query if no part has arrived, and TimeoutError."""
        cdef u64 i = self.at
        until = None if timeout is None else time.monotonic() + timeout
        while self._status() == PENDING:
            i = max(i, self._arrived())
            left = None if until is None else max(0.0, until - time.monotonic())
            if not self._next(i).wait(left):
                raise TimeoutError(f"the answer is not whole within {timeout} s")
        return self._made()

    async def _whole(self):
        while self._status() == PENDING:
            await self._next(max(self.at, self._arrived()))
        return self._made()

    def __await__(self):
        return self._whole().__await__()

    cdef object _made(self):
        """Return the whole, made once. Raises the error of the query if nothing has arrived."""
        cdef u64 n
        cdef u8 status = self._status()
        if self.whole_error is not None:
            raise self.whole_error
        if self.whole is not None:
            return self.whole
        n = self._arrived()
        outputs = [self._part(i) for i in range(n)]
        reason = None
        if status != OK:
            reason = str(error_for(status, self._why()))
        if self.stream == NULL:
            whole = outputs[0].output if n else None
        else:
            whole = joined_parts([part.output for part in outputs]) if n or status == OK else None
        made = AnswerPart(whole, n, is_last=True, complete=status == OK, reason=reason,
                          confidence=outputs[n - 1].confidence if n else None,
                          latency_us=(self.plain.latency_us if self.stream == NULL
                                      else self.stream.latency_us))
        if self.finish is not None:
            made = self.finish(made, status, id_claim(self.completion.state))
        elif n == 0 and status != OK:
            self.whole_error = error_for(status, self._why())
            raise self.whole_error
        self.whole = made
        return made

    def __repr__(self):
        state = "pending" if self._status() == PENDING else "done"
        return f"<PartsFuture {state}, {self._arrived()} parts>"


cdef PartsFuture parts_future_new(Completion completion, PartStream* stream, object model,
                                  Future plain, object finish):
    cdef PartsFuture future = PartsFuture.__new__(PartsFuture)
    future.completion = completion
    future.stream = stream
    future.model = model
    future.plain = plain
    future.finish = finish
    return future
