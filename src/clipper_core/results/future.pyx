"""Futures by ticket: polling, waiting, awaiting and cancelling.

completion.hpp explains why a waiter misses no event. This module keeps the required order: a
blocked thread counts itself, then reads `epoch`, then checks its slots, and only then sleeps or
takes the ownership of the loop.
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport free

import logging
import os
import threading
from concurrent.futures import (
    CancelledError, Future as StandardFuture, TimeoutError as FutureTimeout,
)

from numpy import full, uint8

from clipper_core.results.completion cimport (
    MAILBOXES_MAX, CompletionState, block_drop,
    completion_notify_outside, completion_try_own_loop, completion_wake_loop_thread, id_claim,
    mailbox_arm,
    mailbox_must_rescan, slot_boxes, slot_state, slot_try_cancel, slot_watch, slots_first_open,
    waiter_dead, waiter_enters, waiter_epoch, waiter_leaves,
)
from clipper_core.results.ensemble_call cimport (
    ensemble_call_answer_chosen, ensemble_call_cancel, ensemble_call_drop,
)
from clipper_core.runtime.dtype cimport F64
from clipper_core.runtime.machine cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, aligned_new, eventfd, eventfd_drain, futex_wait, monotonic_us,
    relaxed,
)
from clipper_core.runtime.ring cimport spsc_free, spsc_new
from clipper_core.runtime.status cimport (
    BAD_INPUT, CANCELLED, FORKED, FULL, NO_MEMORY, OK, PENDING, UNNEEDED, raise_for,
)
from clipper_core.wire.prediction cimport (
    TAG_BLOB, TAG_NONE, Blob, blob_drop, blob_of, column_confidences, column_first_failed,
    column_latencies_us, column_outputs, column_states, value_confidence, value_drop,
    value_object, value_prediction,
)

from clipper_core.runtime.status import Status as StatusName, error_for

cdef extern from *:
    """
    static PyAsyncMethods clipper_async_methods;    // one type's
    static void set_am_send(PyTypeObject* type, void* send) {
        if (type->tp_as_async != NULL) clipper_async_methods = *type->tp_as_async;
        clipper_async_methods.am_send = reinterpret_cast<sendfunc>(send);
        type->tp_as_async = &clipper_async_methods;
    }
    """
    unsigned long PyThread_get_thread_ident() noexcept
    int PYGEN_RETURN
    int PYGEN_NEXT
    void set_am_send(PyTypeObject* type, void* send) noexcept

cdef enum:
    WAIT_SLICE_US = 50000       # interval at which a blocked thread checks for signals

# by code: calling the enum costs 0.6 us
cdef tuple STATUSES = tuple([StatusName(code) for code in range(len(StatusName))])

cdef enum Settled:              # Future.settled
    OPEN = 0
    FINISHING = 1               # a thread runs `finish`
    SETTLED = 2                 # `outcome` holds the result

cdef object _settled = threading.Condition()    # notified when a `finish` has run, if `_settling`
cdef int _settling = 0          # threads that wait for one


def _settle_in_fork():
    """Replace what a thread that does not exist in this fork may hold."""
    global _settled, _settling
    _settled, _settling = threading.Condition(), 0


os.register_at_fork(after_in_child=_settle_in_fork)

cdef dict _states = {}      # by address of the future; not a field, because few futures have one


class StandardState:
    """The state of a future as the functions of concurrent.futures read it. It does not refer to
    its future.

    Threads: any, under `condition`.
    """

    def __init__(self):
        self.condition = threading.Condition()
        self.state = "PENDING"
        self.waiters = []

    def end(self, future):
        """Notify waiters that the future is done. Does nothing the second time."""
        with self.condition:
            if self.state != "PENDING":
                return
            self.state = "CANCELLED_AND_NOTIFIED" if future.cancelled() else "FINISHED"
            for waiter in self.waiters:
                if future.cancelled():
                    waiter.add_cancelled(future)
                elif future.exception() is None:
                    waiter.add_result(future)
                else:
                    waiter.add_exception(future)


cdef bint standard_begin(u64 address, made):
    return _states.setdefault(address, made) is made


cdef object standard_of(u64 address):
    return _states[address]


cdef void standard_forget(u64 address):
    _states.pop(address, None)


cdef object cancelled_error():
    error = error_for(CANCELLED, "")        # an instance of the bound class, if there is one
    return error if isinstance(error, CancelledError) else CancelledError()


cdef u64 NEVER_US = <u64> 1 << 62


# -- futures
# --------------------------------------------------------------------------------------------------

@cython.final
@cython.no_gc
@cython.freelist(512)
cdef class Future:
    """The result of one query, of an ensemble's tasks, or of a whole array; resolved by the
    deadline, always. Threads: any.

    Blocking: `result(timeout=None)`; in asyncio and uvloop: `await future`; also
    `add_done_callback`, `clipper.as_completed`. Source: docs/design.md, "Futures by ticket".
    """

    def __init__(self):
        raise TypeError("futures come from predict() and schedule_prediction()")

    def __dealloc__(self):
        cdef u32 i, refs = 0
        cdef u8 state
        cdef Blob* blob
        cdef Blob* last = NULL
        if self.is_watched:
            standard_forget(<size_t> <void*> self)
        if self.block == NULL:
            value_drop(&self.at_once)
            return
        if (self.ensemble_call != NULL and not self._leave_ensemble_call()) or self.view:
            return
        for i in range(self.first, self.first + self.count):
            state = slot_state(self.block[0], i)
            if (state == PENDING or state == CANCELLED or state == UNNEEDED
                or not self.block.tag[i] & TAG_BLOB):
                continue
            self.block.tag[i] = TAG_NONE
            blob = blob_of(self.block.word[i])
            if blob != last and refs:
                blob_drop(last, refs)
                refs = 0
            last = blob
            refs += 1
        if refs:
            blob_drop(last, refs)
        block_drop(self.completion.state, self.block, self.slots)

    cdef bint _leave_ensemble_call(self) noexcept:
        """Release the ensemble call. Return False in a fork, where locks may be held by threads
        that do not exist."""
        cdef void* models = self.ensemble_call.models
        if waiter_dead(self.completion.state[0]) == FORKED:
            return False
        ensemble_call_drop(self.ensemble_call)
        Py_DECREF(<object> models)
        return True

    cdef u8 _state_of(self, u32 i) noexcept nogil:
        if self.block == NULL:
            return self.status_at_once
        return slot_state(self.block[0], self.first + i)

    cdef Value _held(self, u32 i) noexcept nogil:
        """Return the value in slot i, borrowed."""
        cdef Value value
        if self.block == NULL:
            return self.at_once
        value.word = self.block.word[self.first + i]
        value.tag = self.block.tag[self.first + i]
        return value

    cdef u32 first_open(self) noexcept nogil:
        if self.block == NULL:
            return self.slots
        return slots_first_open(self.block[0], self.cursor, self.first, self.slots)

    cdef bint is_done(self) noexcept nogil:
        return self.block == NULL or self.first_open() == self.slots

    @cython.binding(False)
    def done(self):
        """True once every task of the query has ended, by a prediction, a failure or the
        deadline."""
        return bool(self.is_done())

    def running(self):
        """Always False: a query that has not ended can still be cancelled."""
        return False

    def cancelled(self):
        """True after a cancel() that returned True."""
        return bool(self.is_cancelled)

    def cancel(self):
        """Cancel the query, unless it is done. Return True if it is cancelled now; result() then
        raises CancelledError.

        Predictions that have arrived can still be read (`outputs`, `statuses`, ...), and later ones
        still fill the cache.
        """
        if not self.is_cancelled and not self.is_done():
            self.is_cancelled = self._end_now() and (self.ensemble_call == NULL
                                                     or self._state_of(self.count) == CANCELLED)
        return bool(self.is_cancelled)

    def end_now(self):
        """End the pending tasks without cancelling the query, so result() uses what has arrived.
        Return True if a task was pending."""
        return self._end_now()

    cdef bint _end_now(self):
        cdef CompletionState* d = self.completion.state
        cdef u32 i, ended = 0, boxes = 0
        if self.block == NULL or self.view:
            return False
        if self.ensemble_call != NULL:
            ended = ensemble_call_cancel(self.ensemble_call)
        for i in range(self.first, self.first + self.count):
            ended += slot_try_cancel(self.block[0], i, CANCELLED)
        if ended:
            d.answered.fetch_add(ended, relaxed)
            for i in range(self.first, self.first + self.slots):
                boxes |= slot_boxes(self.block[0], i)
            completion_notify_outside(d, boxes)
        return ended > 0

    cdef int _wait(self, u64 until_us) noexcept nogil:
        """Wait. Return 0 if done, 1 if the time is over, 2 to check for signals, 3 if the engine
        has ended."""
        cdef CompletionState* d = self.completion.state
        cdef u32 epoch
        cdef u64 now, slice_us
        cdef bint leads
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
            slice_us = min(until_us - now, <u64> WAIT_SLICE_US)
            if self.mixed:
                completion_wake_loop_thread(d)
            leads = not self.mixed and completion_try_own_loop(d)
            if self._lead(until_us, now + slice_us) if leads else futex_wait(&d.epoch, epoch,
                    slice_us) != 0:
                rc = 2
                break
        waiter_leaves(d[0])
        return rc

    cdef bint _lead(self, u64 until_us, u64 slice_us) noexcept nogil:
        """Run the loop until done. Return True to check for signals."""
        cdef CompletionState* d = self.completion.state
        cdef bint look = False
        cdef u32 epoch = waiter_epoch(d[0])
        while not self.is_done() and not look:
            look = d.run_turn(d.loop, slice_us,
                          epoch) or waiter_dead(d[0]) or monotonic_us() >= slice_us
            epoch = waiter_epoch(d[0])
        d.leave_loop(d.loop, not look or slice_us == until_us)
        return look

    def wait(self, timeout=None):
        """Block until done. Return False when `timeout` (seconds) is over first. Ctrl-C interrupts
        it. Releases the GIL."""
        cdef u64 until
        cdef int rc = 2
        if self.is_done():
            return True
        until = NEVER_US if timeout is None else monotonic_us() + <u64> min(max(0.0, timeout * 1e6),
                                                                            1e18)
        while rc == 2:
            with nogil:
                rc = self._wait(until)
            if rc == 2:
                PyErr_CheckSignals()
        if rc == 3 and not self.is_done():
            raise_for(waiter_dead(self.completion.state[0]),
                      "the query was in flight in an engine that is gone")
        return rc != 1

    @cython.binding(False)
    def result(self, timeout=None):
        """Return the result, after waiting at most `timeout` seconds. Raises the task's error, or
        TimeoutError."""
        if not self.is_done() and not self.wait(timeout):
            raise FutureTimeout(f"no result within {timeout} s; the query's own deadline has not "
                                f"passed yet")
        return self._outcome()

    cdef object _outcome(self):
        """Return what result() returns, for a future that is done."""
        if self.is_cancelled:
            raise cancelled_error()
        if self.settled == SETTLED:
            return self.outcome
        if self.finish is not None:
            return self._finish()
        if self.ensemble_call != NULL:
            return self._used_predictions()
        if self.count == 1:
            return self._single(0)
        return self._many()

    cdef object _finish(self):
        """Return what `finish` returned. It runs on the first thread that asks, and the others wait
        for it, because it counts the query and keeps its answer for feedback.

        Raises its error. Then it has counted nothing, and the next call runs it again."""
        global _settling
        while self.settled != OPEN:
            if self.settled == SETTLED:
                return self.outcome
            self._await_finish()
        self.settled = FINISHING
        self.finisher = PyThread_get_thread_ident()
        try:
            self.outcome = self.finish(self)
            self.settled = SETTLED
        finally:
            if self.settled != SETTLED:
                self.settled = OPEN
            if _settling:
                with _settled:
                    _settled.notify_all()
        return self.outcome

    cdef int _await_finish(self) except -1:
        """Wait while another thread runs `finish`."""
        global _settling
        if self.finisher == PyThread_get_thread_ident():
            raise RuntimeError(
                f"the result of {self!r} was asked for by the function that makes it"
            )
        _settling += 1
        try:
            with _settled:
                # in a fork that thread does not exist
                while self.settled == FINISHING:
                    if waiter_dead(self.completion.state[0]) == FORKED:
                        raise_for(FORKED, "the result was being made by another thread when this "
                                          "process was forked")
                    _settled.wait(WAIT_SLICE_US / 1e6)
        finally:
            _settling -= 1
        return 0

    cdef object _used_predictions(self):
        return [self._value(i) for i in range(self.count) if self.ensemble_call.used >> i & 1]

    def exception(self, timeout=None):
        """Return the error that `result()` would raise, or None. Raises CancelledError of a query
        that was cancelled."""
        if not self.wait(timeout):
            raise FutureTimeout(f"no result within {timeout} s")
        if self.is_cancelled:
            raise cancelled_error()
        try:
            self.result(0)
        except Exception as error:
            return error
        return None

    cdef object _single(self, u32 i):
        cdef u8 state = self._state_of(i)
        if state == OK:
            return self._value(i)
        raise self._error(i, state)

    cdef object _value(self, u32 i):
        cdef Value value = self._held(i)
        cdef object output = value_object(&value)
        return self._named(output) if type(output) is dict else output

    cdef object _named(self, object output):
        """Return the tensor that the query's context names (`output_name`), or all of them."""
        name = getattr(self.extra, "output_name", "")
        return output[name] if name and type(output) is dict else output

    cdef object _error(self, u32 i, u8 state):
        if state == CANCELLED:
            return cancelled_error()
        error = error_for(state, self.detail(i))
        if state == FULL and self._held(i).tag == F64:
            error.retry_after_s = self._value(i)
        return error

    cdef object _many(self):
        """Return all values in order: one ndarray when they are numbers of one shape, else a list.
        Raises on the first failed row."""
        cdef Column column = self._column(0, None)
        cdef u32 failed = column_first_failed(&column)
        if failed < self.count:
            raise self._error(failed, self._state_of(failed))
        return column_outputs(&column, None, "")

    cdef Column _column(self, u32 first, object n) except *:
        """Return the column of tasks [first, first + n), or of all from `first` on."""
        cdef Column column
        column.n = self.count - min(first, self.count) if n is None else <u32> n
        if first > self.count or column.n > self.count - first:
            raise IndexError(f"tasks {first} to {first + column.n} of a query with {self.count}")
        if self.block == NULL:
            column.word, column.tag = &self.at_once.word, &self.at_once.tag
            column.state = <atomic[u8]*> &self.status_at_once
            column.latency_us = NULL
            return column
        first += self.first
        column.word, column.tag = self.block.word + first, self.block.tag + first
        column.state, column.latency_us = self.block.state + first, self.block.latency_us + first
        return column

    # -- for functions that make the result

    def __len__(self):
        return self.count

    def status(self, u32 i=0):
        """Return the Status with which task `i` ended, PENDING while it has not."""
        self._check(i)
        return STATUSES[self._state_of(i)]

    def statuses(self):
        """Return the Status of each task, u8 (n,); 0 for those that have not ended."""
        cdef Column column
        if self.block == NULL and self.count > 1:
            return full(self.count, self.status_at_once, uint8)
        column = self._column(0, None)
        return column_states(&column)

    def progress(self):
        """Return (tasks that have ended, tasks)."""
        cdef u32 i, done = (self.count if self.block == NULL else 0 if self.ensemble_call != NULL
                            else self.first_open())
        for i in range(done, self.count):
            done += self._state_of(i) != PENDING
        return done, self.count

    def outputs(self, missing=None, u32 first=0, n=None):
        """Return the predictions of tasks [first, first + n) that have arrived, with `missing` in
        place of the others.

        An ndarray of shape (n, ...) when they are numbers of one type and shape, and `missing` fits
        among them (None: NaN among floats); else a list. Of named tensors of fixed sizes a dict of
        columns, of which the rows without a prediction are zeros.
        """
        cdef Column column = self._column(first, n)
        return column_outputs(&column, missing, getattr(self.extra, "output_name", ""))

    def confidences(self, u32 first=0, n=None):
        """Return the model's confidence in its predictions [first, first + n): f64 (n,), NaN where
        it gave none."""
        cdef Column column = self._column(first, n)
        return column_confidences(&column)

    def latencies_us(self):
        """Microseconds from submit to the end, u32, one per task; 0 for a hit, and for tasks that
        are pending or were cancelled."""
        cdef Column column = self._column(0, None)
        return column_latencies_us(&column)

    def output(self, u32 i=0):
        """Return the prediction of task `i`, or None if it has none."""
        self._check(i)
        return self._value(i) if self._state_of(i) == OK else None

    def confidence(self, u32 i=0):
        """Return the model's confidence in prediction `i`, or None."""
        cdef Value value
        self._check(i)
        if self._state_of(i) != OK:
            return None
        value = self._held(i)
        return value_confidence(&value)

    def prediction(self, u32 i=0):
        """Return the prediction of task `i`: (output, confidence), each None without one; with
        qualifiers, a third, bytes."""
        cdef Value value
        self._check(i)
        if self._state_of(i) != OK:
            return None, None
        value = self._held(i)
        found = value_prediction(&value)
        return (self._named(found[0]), *found[1:]) if type(found[0]) is dict else found

    def detail(self, u32 i=0):
        """Return the reason why task `i` failed (a model's traceback, for instance), or ''."""
        cdef Value value
        cdef u8 state
        self._check(i)
        state = self._state_of(i)
        if state == PENDING or state == OK or state == CANCELLED or state == UNNEEDED:
            return ""
        value = self._held(i)
        return value_object(&value) if value.tag & TAG_BLOB else ""

    def error(self, u32 i=0):
        """Return the exception with which task `i` ended, as a query to its model alone raises it;
        None if it has a prediction or is pending."""
        cdef u8 state
        self._check(i)
        state = self._state_of(i)
        return None if state == PENDING or state == OK else self._error(i, state)

    cdef int _check(self, u32 i) except -1:
        if i >= self.count:
            raise IndexError(f"task {i} of a query with {self.count}")
        return 0

    @property
    def id(self):
        """The query's id, unique in this engine: the same in answers, logs and feedback."""
        if self.block != NULL:
            return self.block.first_id + self.first
        if self.own_id == 0:
            self.own_id = id_claim(self.completion.state)
        return self.own_id

    @property
    def latency_us(self):
        """Microseconds from submit to the last task's end; 0 for a cache hit or while pending."""
        cdef u32 i, longest = 0
        if self.block == NULL or not self.is_done():
            return 0
        if self.ensemble_call != NULL:
            return self.block.latency_us[self.first + self.count]
        for i in range(self.first, self.first + self.count):
            # the loop may still write values, which are not read
            if slot_state(self.block[0], i) != CANCELLED:
                longest = max(longest, self.block.latency_us[i])
        return longest

    # -- for a future with a decider

    @property
    def verdict(self):
        """(step, used, arrived) once decided: the step of the schedule that decided, and bit sets
        of the tasks whose values are used and of those that had arrived. None while pending, when
        cancelled, and without a decider."""
        if self.ensemble_call == NULL or self._state_of(self.count) != OK:
            return None
        return self.ensemble_call.step, self.ensemble_call.used, self.ensemble_call.arrived

    def rule(self, u8 step, u64 used, u64 elapsed_us=0):
        """Decide the query: the answer is made of the tasks `used` (a bit set), `elapsed_us` after
        its submission, but not before the last arrival. Return False if it was too late. Raises
        ValueError if one has no prediction."""
        cdef int ruled
        if self.ensemble_call == NULL:
            raise_for(BAD_INPUT, "only a query with a decider can be ruled; see predict_ensemble")
        ruled = ensemble_call_answer_chosen(self.ensemble_call, step, used, elapsed_us)
        if ruled < 0:
            raise ValueError(f"the tasks {used:#b} have not all arrived")
        return bool(ruled)

    def on_vote(self, fn):
        """Call `fn(future)` from the callback thread after each arrival until the verdict, and now
        if some have arrived."""
        cdef Future view
        cdef u32 i

        def on_done(_):
            if not self.is_done():
                fn(self)
        for i in range(self.count):
            if self._state_of(i) == PENDING:
                view = future_new(self.completion, self.block, self.first + i, 1, None, self)
                view.view = view.mixed = True
                view.add_done_callback(on_done)
        if self.progress()[0]:
            on_done(self)

    # -- event loops and callbacks

    def __await__(self):
        cdef Awaiting awaiting = Awaiting.__new__(Awaiting)
        awaiting.future = self
        return awaiting

    def add_done_callback(self, fn):
        """Call `fn(future)` when the future is done: at once if it is, otherwise from the callback
        thread. Its exceptions are logged."""
        if self.is_done():
            try:
                fn(self)
            # As on the callback thread; which of the two threads runs it is not determined.
            except (Exception, SystemExit):
                logging.getLogger("clipper").exception("a done-callback of %r raised", self)
        elif self.completion.on_callback is None:
            raise RuntimeError("this engine has no callback thread; use clipper.start()")
        else:
            self.completion.on_callback(self, fn)

    # -- the interface for concurrent.futures.wait and as_completed, and asyncio.wrap_future

    @property
    def __class__(self):
        """Return `concurrent.futures.Future`, so that isinstance() accepts this object as one.
        type() returns the true class."""
        return StandardFuture

    cdef object _watch(self):
        cdef u64 address = <size_t> <void*> self
        if not self.is_watched:
            made = StandardState()
            if standard_begin(address, made):
                self.is_watched = True
                self.add_done_callback(made.end)
        watched = standard_of(address)
        if self.is_done():                  # checked here before the callback thread has handled it
            watched.end(self)
        return watched

    @property
    def _condition(self):
        return self._watch().condition

    @property
    def _state(self):
        return self._watch().state

    @property
    def _waiters(self):
        return self._watch().waiters

    def __repr__(self):
        if not self.is_done():
            return f"<Future {self.id} pending>"
        if self.count > 1:
            return f"<Future {self.id} done, {self.count} tasks>"
        return f"<Future {self.id} {self.status().name}>"


@cython.final
cdef class LateTask:
    """One task of a query that was decided without it. Threads: any.

    future: of the query.  task: the number of the task.
    """

    def __init__(self, Future future not None, u32 task):
        self.future, self.task = future, task

    def done(self):
        """Return whether the task has ended."""
        return self.future._state_of(self.task) != PENDING

    def status(self):
        """Return the Status with which the task ended."""
        return self.future.status(self.task)

    def prediction(self, _=0):
        """Return its output and its confidence, None without one, and qualifiers if there are."""
        return self.future.prediction(self.task)


# -- await
# --------------------------------------------------------------------------------------------------

@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Awaiting:
    """The iterator that `__await__` returns, for one `await` of a future. Threads: its event
    loop's.

    A finished future returns its result through the type's am_send slot, because raising
    StopIteration, as `__next__` has to, costs seven times as much. A pending one yields a future of
    the event loop, which a Task accepts without a call into Python; the mailbox resumes the task,
    once per batch. The interpreter keeps only the iterator alive, so the iterator holds the future;
    otherwise `await model.predict(x)` would lose it.
    """
    cdef Future future
    cdef bint waits

    def __init__(self):
        raise TypeError("it is made by `await future`")

    def __iter__(self):
        return self

    def __next__(self):
        cdef PyObject* given = NULL
        cdef int sent = _send(self, None, &given)
        cdef object value = <object> given
        Py_DECREF(value)
        if sent == PYGEN_RETURN:
            raise StopIteration(value)
        return value

    def send(self, value):
        """Resume; the value that the event loop sends is ignored."""
        return self.__next__()

    def throw(self, kind, value=None, traceback=None):
        """End the await with this exception, and cancel a query that is still pending."""
        self.close()
        error = value if isinstance(value,
                                    BaseException) else kind if value is None else kind(value)
        error = error if isinstance(error, BaseException) else error()
        raise error if traceback is None else error.with_traceback(traceback)

    def close(self):
        """Close the future, for which no caller waits any more. A query that is still pending is
        cancelled."""
        if self.waits and not self.future.is_done():
            self.future.cancel()


cdef int _send(Awaiting self, object value, PyObject** given) except -1:
    cdef object out
    cdef bint done = self.future.is_done()
    if done:
        out = self.future._outcome()
    elif self.future.completion.on_await is None:
        raise RuntimeError("this engine has no asyncio interface; use clipper.start(), or result()")
    else:
        out = self.future.completion.on_await(self.future)
        out._asyncio_future_blocking = True         # as `yield from` would
        self.waits = True
    Py_INCREF(out)
    given[0] = <PyObject*> out
    return PYGEN_RETURN if done else PYGEN_NEXT


set_am_send(<PyTypeObject*> Awaiting, <void*> &_send)


cdef Future future_at_once(Completion completion, u8 status, const Value* value, object finish,
                           object extra):
    cdef Future future = Future.__new__(Future)
    future.completion = completion
    future.at_once = value[0]
    future.status_at_once = status
    future.count = 1
    future.finish = finish
    future.extra = extra
    return future


cdef Future future_answered(Completion completion, u32 count, u64 id, object answer, object extra):
    cdef Future future = Future.__new__(Future)
    future.completion = completion
    future.at_once.tag = TAG_NONE
    future.status_at_once = OK
    future.count = count
    future.own_id = id
    future.outcome = answer
    future.settled = SETTLED
    future.extra = extra
    return future


cdef Future future_of_none(Completion completion, object finish, object extra):
    cdef Future future = Future.__new__(Future)
    future.completion = completion
    future.at_once.tag = TAG_NONE
    future.status_at_once = OK
    future.finish = finish
    future.extra = extra
    return future


cdef Future future_new(Completion completion, Block* block, u32 first, u32 count, object finish,
                       object extra):
    cdef Future future = Future.__new__(Future)
    future.completion = completion
    future.block = block
    future.first = first
    future.count = future.slots = count
    future.finish = finish
    future.extra = extra
    return future


cdef Future future_of_ensemble(Completion completion, EnsembleCall* ensemble_call, object models,
                               object finish,
                         object extra):
    cdef Future future = future_new(completion, ensemble_call.block, ensemble_call.first,
                                    ensemble_call.n, finish,
                                    extra)
    future.ensemble_call = ensemble_call
    ensemble_call.models = <void*> models
    Py_INCREF(models)
    future.slots += 1
    future.cursor.store(ensemble_call.n, relaxed)
    return future


# -- The reader's end of the mailbox with the ids of futures that have ended: for an event loop, or
# for the thread that runs callbacks.

cdef enum:
    MAILBOX_WORDS = 8192


cdef class MailboxReader:
    """Reads the ids of finished futures from a mailbox. Threads: one at a time (its event loop's,
    or the callback thread); the loop thread of the engine is the other side.

    `add(future, item)` waits for a future; when `fd` becomes readable, `drain()` returns the
    (future, item) pairs that are done. There is one eventfd write per batch of finished futures,
    and none while the reader is awake.
    """
    def __cinit__(self, Completion completion):
        cdef CompletionState* d = completion.state
        cdef u32 i
        self.completion = completion
        self.waiting = {}
        for i in range(MAILBOXES_MAX):
            if d.boxes[i] == NULL:
                d.boxes[i] = _mailbox_new()
                if d.boxes[i] == NULL:
                    raise_for(NO_MEMORY, "no memory for a mailbox")
            if not d.boxes[i].taken:
                d.boxes[i].taken = True
                self.box = d.boxes[i]
                self.bit = i
                return
        raise RuntimeError(f"{MAILBOXES_MAX} event loops already wait for this engine")

    def __dealloc__(self):
        if self.box != NULL:
            self.box.taken = False

    @property
    def fd(self):
        """An eventfd, readable when the mailbox has something."""
        return self.box.fd

    def __len__(self):
        return len(self.waiting)

    def add(self, Future future, item):
        """Wait for `future`. False if it is done already, and then nothing was registered."""
        return bool(self._register(future, item))

    cdef bint _register(self, Future future, item):
        cdef u32 slot
        cdef u32 open = future.first_open()
        cdef u64 slot_id
        while open < future.slots:
            slot = future.first + open
            slot_id = future.block.first_id + slot
            pairs = self.waiting.setdefault(slot_id, [])
            pairs.append((future, item))
            if slot_watch(future.block[0], slot, self.bit):
                completion_wake_loop_thread(self.completion.state)
                return True
            pairs.pop()
            if not pairs:
                del self.waiting[slot_id]
            open = future.first_open()
        return False

    def drain(self):
        """Return the (future, item) pairs that are done, in the order of their completion. Does not
        block."""
        cdef list done = []
        eventfd_drain(self.box.fd)
        while self._drain_once(done) or self._arm():
            pass
        return done

    cdef bint _arm(self):
        """Arm the mailbox, so that it wakes the reader. Return True if something arrived in the
        meantime."""
        return mailbox_arm(self.box[0], self.box.ids[0])

    cdef bint _drain_once(self, list done) except -1:
        cdef u64 slot_id
        cdef bint any = False
        while self.box.ids.pop(&slot_id):
            self._collect(slot_id, done)
            any = True
        if mailbox_must_rescan(self.box[0]):
            for key in list(self.waiting):
                self._collect(key, done)
            any = True
        return any

    cdef int _collect(self, object slot_id, list done) except -1:
        cdef Future future
        for future, item in self.waiting.pop(slot_id, ()):
            if not self._register(future, item):
                done.append((future, item))
        return 0


cdef Mailbox* _mailbox_new() noexcept nogil:
    cdef Mailbox* box = <Mailbox*> aligned_new(sizeof(Mailbox))
    if box == NULL:
        return NULL
    box.ids = spsc_new(MAILBOX_WORDS)
    box.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
    box.armed.store(1, relaxed)
    if box.ids == NULL or box.fd < 0:
        spsc_free(box.ids)
        free(box)
        return NULL
    return box
