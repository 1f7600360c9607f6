# The models of a query that are asked later, or only when its decider says so; and times at which
# it is to be looked at again.
#
# Whoever finds that a hearing needs either calls the home's loop, which looks at those called once
# a step.
#
# Threads: asking_step and asking_close: the home's loop; ask_set: the submitter, before anybody
# else has the hearing.
from clipper_core.results.delivery cimport DeliveryState
from clipper_core.results.hearing cimport Hearing
from clipper_core.runtime.machine cimport atomic, relaxed, u32, u64
from clipper_core.runtime.row_hash cimport Key
from clipper_core.scheduling.admission cimport Gate
from clipper_core.scheduling.task cimport Lane, Lanes, Tally

cdef struct Ask:                # how one task is asked later
    Lanes* lanes                # of its engine
    Lane* lane
    Gate* gate
    Tally* tally
    atomic[u32]* refusing
    const void* row             # a copy; behind the asks
    u32 nbytes
    bint keyed
    Key key
    u64 salt

cdef bint asking_look(Lanes* lanes, u64 now_us) noexcept nogil
cdef inline bint asking_step(Lanes* lanes, u64 now_us) noexcept nogil:     # True: some were called
    return lanes.delivery.calls.load(relaxed) != 0 and asking_look(lanes, now_us)

cdef void asking_close(Lanes* lanes) noexcept nogil     # the loop is gone: no model is asked, no
                                                        # time comes any more
