# Predictions by ticket. A Future is (block, first, count): one slot for a task, a few for an
# ensemble, thousands for an array. done() is one load per slot. A query that is answered at submit
# (a cache hit, a refusal) needs no slot: its Future holds the value itself.
from clipper_core.results.completion cimport Block, Completion, Mailbox
from clipper_core.results.ensemble_call cimport EnsembleCall
from clipper_core.runtime.machine cimport atomic, u32, u64, u8
from clipper_core.wire.prediction cimport Column, Value

cdef class Future:
    cdef Completion completion
    cdef Block* block                  # NULL: answered at submit, `value` and `status` are here
    cdef Value at_once
    cdef u8 status_at_once
    cdef u8 view                       # of one task of `extra`, a future that owns the slots
    cdef u8 settled                    # of `outcome`, see Settled in future.pyx
    cdef u8 is_cancelled               # cancel() ended it
    cdef u8 is_watched                 # concurrent.futures.wait or a similar function waits for it:
                                       # it has a StandardState
    cdef u64 own_id                    # id of a future without a block, assigned when needed
    cdef u32 first
    cdef u32 count
    # count, and one more for the verdict of one with an ensemble call
    cdef u32 slots
    cdef atomic[u32] cursor            # slots before it are done; with an ensemble call, only the
                                       # verdict's slot counts
    cdef EnsembleCall* ensemble_call              # NULL: it is done when all its tasks are
    cdef object finish                 # makes the result of a Future; None: the prediction itself
    cdef readonly object extra         # what finish needs to know
    cdef u64 finisher                  # the thread that runs `finish`
    cdef object outcome                # what finish returned; it runs once
    cdef bint mixed                    # its tasks are in several engines, so a thread that waits
                                       # for it owns no loop

    cdef u32 first_open(self) noexcept nogil     # index of the first pending slot; `slots` if there
                                                 # is none
    cdef bint is_done(self) noexcept nogil
    cdef bint _end_now(self)
    cdef object _watch(self)
    cdef u8 _state_of(self, u32 i) noexcept nogil
    cdef Value _held(self, u32 i) noexcept nogil
    cdef int _wait(self, u64 until_us) noexcept nogil
    cdef bint _lead(self, u64 until_us, u64 slice_us) noexcept nogil
    cdef object _outcome(self)
    cdef object _finish(self)
    cdef int _await_finish(self) except -1
    cdef object _used_predictions(self)
    cdef bint _leave_ensemble_call(self) noexcept
    cdef object _single(self, u32 i)
    cdef object _value(self, u32 i)
    cdef object _named(self, object output)
    cdef object _error(self, u32 i, u8 state)
    cdef object _many(self)
    cdef Column _column(self, u32 first, object n) except *
    cdef int _check(self, u32 i) except -1

# -- One task of a query that was decided without it.
cdef class LateTask:
    cdef Future future
    cdef u32 task

# Takes over the value's reference.
cdef Future future_at_once(Completion completion, u8 status, const Value* value, object finish,
                           object extra)
# A query of `count` tasks that was answered at submit: its result is there, and no task has a value
# of its own.
cdef Future future_answered(Completion completion, u32 count, u64 id, object answer, object extra)
# A query of no rows: done, without a task.
cdef Future future_of_none(Completion completion, object finish, object extra)
# Takes over the ensemble call.
cdef Future future_of_ensemble(Completion completion, EnsembleCall* ensemble_call, object models,
                               object finish,
                         object extra)
cdef Future future_new(Completion completion, Block* block, u32 first, u32 count, object finish,
                       object extra)

# -- The reader of a Mailbox (completion.pxd). It knows which items wait for which future, and
# returns those whose future is done.
#
# Threads: one at a time (its event loop's, or the callback thread); the engine's loop thread is the
# other side.
cdef class MailboxReader:
    cdef Completion completion
    cdef Mailbox* box
    cdef u32 bit
    cdef dict waiting           # slot id -> list of (future, item)

    cdef bint _register(self, Future future, item)
    cdef bint _arm(self)
    cdef bint _drain_once(self, list done) except -1
    cdef int _collect(self, object slot_id, list done) except -1
