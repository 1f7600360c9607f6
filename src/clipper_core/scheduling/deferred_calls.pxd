# The models of an ensemble call that are called later, or only if its decider needs them, and the
# times at which the decider must run again.
#
# A thread that finds that a call needs one of these puts the call on the list of its home's loop,
# which handles the list once per step.
#
# Threads: deferred_calls_step and deferred_calls_close: the home's loop. The submitter fills the
# DeferredCall before any other thread has the ensemble call.
from clipper_core.results.completion cimport CompletionState
from clipper_core.results.ensemble_call cimport EnsembleCall
from clipper_core.runtime.machine cimport atomic, relaxed, u32, u64
from clipper_core.runtime.row_hash cimport Key
from clipper_core.scheduling.admission cimport Gate
from clipper_core.scheduling.lane cimport Lane, Lanes, Tally

cdef struct DeferredCall:       # how one task is submitted later
    Lanes* lanes                # of its engine
    Lane* lane
    Gate* gate
    Tally* tally
    atomic[u32]* refusing
    const void* row             # a copy, stored behind the array of DeferredCall
    u32 nbytes
    bint by_cost                # rows of its model differ in cost
    u32 cost
    bint keyed
    Key key
    u64 salt

cdef bint deferred_calls_run(Lanes* lanes, u64 now_us) noexcept nogil
# Submit the calls that are due. Return True if one was submitted.
cdef inline bint deferred_calls_step(Lanes* lanes, u64 now_us) noexcept nogil:
    return lanes.completion.calls.load(relaxed) != 0 and deferred_calls_run(lanes, now_us)

# Stop: the loop has ended, no more models are called and no timers fire.
cdef void deferred_calls_close(Lanes* lanes) noexcept nogil
