# One query on several models: the predictions that have arrived, and the verdict of its decider.
#
# A future of an ensemble call has one slot more than tasks, the verdict slot, and is done when that
# has ended. The verdict is a snapshot: which tasks had arrived, and which of them are used. One bit
# of a slot's `boxes` marks that it belongs to an ensemble call; until the slot ends, it holds the
# pointer to the call in the place of its value. Slots of other futures pay nothing.
#
# Threads: any, under a spin lock that is held for one decision. The thread that ends a task's slot
# (the home's loop, a peer's loop or the submitter) records it and, if that decides the call, ends
# the verdict slot. Only the home's loop sets timers and calls more models (deferred_calls.pxd);
# other threads put the call on its list.
#
# Reference-counted: by its future, each task in flight, its submitter, a timer and the home's list.
# The last release frees it.
from libcpp.vector cimport vector
from clipper_core.results.completion cimport Block, CompletionState
from clipper_core.results.decider cimport DeciderState, RulingData, VoteData
from clipper_core.runtime.machine cimport atomic, u32, u64, u8
from clipper_core.runtime.status cimport Status

cdef cppclass EnsembleCall:
    atomic[u32] lock            # guards everything below that changes
    atomic[u32] refs
    atomic[u32] submitting      # the home's loop is submitting one of its tasks
    CompletionState* home
    Block* block
    u32 first                   # slot of task 0; the verdict slot is first + n
    u32 n
    DeciderState* decider
    u64 received_us
    u64 slo_us
    u64 elapsed_us              # from receipt to the last event
    u64 timer_us                # time of its timer; 0: none
    u64 sent                    # TIED: tasks whose rows were sent, one bit each
    bint learn                  # tasks in flight continue after the verdict
    bint over                   # the verdict was reached, or the future was released
    bint called                 # is on the home's list
    u8 arrivals
    u8 step                     # verdict: step of the schedule
    u64 used                    # verdict: tasks that are used, one bit each
    u64 arrived                 # verdict: tasks that had arrived, one bit each
    EnsembleCall* next_called
    VoteData* votes
    atomic[u64]** unneeded      # counters of tasks that were never submitted, one per task
    void* deferred              # DeferredCall[n] (deferred_calls.pxd)
    void* models                # a tuple of the future that keeps the models alive

cdef u64 NO_TICKET

cdef cppclass Timers:           # ensemble calls that wait for a time. Threads: the home's loop only
    vector[EnsembleCall*]* ensemble_calls   # by index; NULL: free
    vector[u32]* uses           # how often each index was used: a ticket of an earlier use is stale
    vector[u32]* unused

cdef inline u64 task_bit(u32 i) noexcept nogil:
    return <u64> 1 << i

# -- Creating a call. Threads: the submitter, until it submits a task.
# NULL: no memory. more_bytes: memory for `deferred` and rows.
cdef EnsembleCall* ensemble_call_new(CompletionState* home, Block* block, u32 first, u32 n,
                                     DeciderState* decider, u64 now_us, u64 slo_us,
                                     bint learn, u64 more_bytes) noexcept nogil
# Call the next three functions with the lock, or before other threads have the call.
# Record that a task has ended.
cdef void ensemble_call_record(EnsembleCall* h, u32 i, Status status) noexcept nogil
cdef RulingData ensemble_call_decide(EnsembleCall* h) noexcept nogil
# End the verdict slot. by: the completion of the loop that decides; NULL if the caller is no loop.
cdef void ensemble_call_answer(EnsembleCall* h, CompletionState* by, u32 step,
                               u64 used) noexcept nogil
# Note that task i is in flight, before its row is published.
cdef void ensemble_call_submitting(EnsembleCall* h, u32 i) noexcept nogil
# Undo ensemble_call_submitting: the row was not published. Call it with the lock.
cdef void ensemble_call_refused(EnsembleCall* h, u32 i, Status status) noexcept nogil
cdef void ensemble_call_lock(EnsembleCall* h) noexcept nogil
cdef void ensemble_call_unlock(EnsembleCall* h) noexcept nogil
cdef void ensemble_call_release(EnsembleCall* h) noexcept nogil
# Note that all tasks that start at once were submitted. Releases the submitter's reference.
cdef void ensemble_call_submitted(EnsembleCall* h) noexcept nogil

# -- Events of a call. Threads: any.
cdef void ensemble_call_task_ended(CompletionState* d, void* ensemble_call, u32 slot, bint first,
                                   u8 status, u32 latency_us) noexcept nogil
# Note that the row of a task is being sent.
cdef void ensemble_call_sent(EnsembleCall* h, u32 slot) noexcept nogil
# Return how many slots were ended.
cdef u32 ensemble_call_cancel(EnsembleCall* h) noexcept nogil
# Release the reference of the future, which does not need the verdict any more.
cdef void ensemble_call_drop(EnsembleCall* h) noexcept nogil
# Set the verdict from Python. 1: done; 0: too late; -1: a task in `used` has not arrived.
cdef int ensemble_call_answer_chosen(EnsembleCall* h, u32 step, u64 used,
                                     u64 elapsed_us) noexcept nogil
# Put the call on the list of the home's loop.
cdef void ensemble_call_enqueue(EnsembleCall* h, bint submitter) noexcept nogil
# Answer with what has arrived, because nothing more will arrive.
cdef void ensemble_call_close(EnsembleCall* h) noexcept nogil

# -- Threads: the home's loop.
# Take the list of calls. for_good: none is added afterwards.
cdef EnsembleCall* ensemble_calls_queued(CompletionState* d, bint for_good) noexcept nogil
cdef Timers* timers_new() noexcept nogil
cdef void timers_free(Timers* t) noexcept nogil
# Return its ticket, below 2^48. NO_TICKET: no memory.
cdef u64 timers_add(Timers* t, EnsembleCall* h) noexcept nogil
# Return False if the ticket is stale.
cdef bint timers_has(Timers* t, u64 ticket) noexcept nogil
# Return the call of a ticket and remove its timer. NULL: the ticket is stale.
cdef EnsembleCall* timers_take(Timers* t, u64 ticket) noexcept nogil
