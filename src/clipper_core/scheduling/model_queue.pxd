# The rows that wait for one model: its lanes that have had rows. Each lane is a class of SLO, of
# single queries or of arrays.
#
# Threads: loop only.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport u64
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.admission cimport Gate
from clipper_core.scheduling.task cimport Lane, Lanes

ctypedef Lane* LanePointer
ctypedef Gate* GatePointer

cdef cppclass ModelQueue:
    vector[Lane*]* lanes
    vector[Gate*]* gates        # in the order of the lanes; NULL: lanes of arrays have none

# Allocate the lists of a zeroed object. False: no memory.
cdef bint model_queue_init(ModelQueue* d) noexcept nogil
cdef void model_queue_free(ModelQueue* d) noexcept nogil
# False: no memory.
cdef bint model_queue_add(ModelQueue* d, Lane* lane, Gate* gate) noexcept nogil

# Return the number of rows that wait.
cdef u64 model_queue_waiting(const ModelQueue* d) noexcept nogil
# True: lane i was used recently: rows came, wait, or were refused.
cdef bint model_queue_is_active(const ModelQueue* d, size_t i, u64 now_us) noexcept nogil
# Return the tightest SLO of the active lanes; no batch may make their rows late.
cdef u64 model_queue_slo_us(const ModelQueue* d, u64 now_us) noexcept nogil
# Return how many rows of the tightest SLO wait. *slo_us: that SLO if rows of much longer SLOs wait
# too, else 0.
cdef u64 model_queue_tightest(const ModelQueue* d, u64 now_us, u64* slo_us) noexcept nogil
# Return the lane whose first row is due first, and the row's ticket. NULL: no row waits.
cdef Lane* model_queue_earliest(ModelQueue* d, Lanes* lanes, u64* ticket) noexcept nogil
# End the waiting rows that are due before `before_us`. A row behind a later one of its lane stays.
cdef void model_queue_end_before(ModelQueue* d, Lanes* lanes, u64 before_us, Status status,
                                 u64 now_us) noexcept nogil
# Return how many rows of all lanes are due before one that is submitted to this lane now, assuming
# that the rows of a lane came at an even rate.
cdef u64 model_queue_ahead(ModelQueue* d, Lanes* lanes, const Lane* lane, u64 now_us) noexcept nogil
