# What is asked of one model: its lanes that have had rows, each a class of SLO, of single queries
# or of arrays.
#
# Threads: loop only.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport u64
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.admission cimport Gate
from clipper_core.scheduling.task cimport Lane, Lanes

ctypedef Lane* LanePointer
ctypedef Gate* GatePointer

cdef cppclass Demand:
    vector[Lane*]* lanes
    vector[Gate*]* gates        # alike; NULL: of arrays, which have none

cdef bint demand_init(Demand* d) noexcept nogil                 # all zeros; False: no memory
cdef void demand_free(Demand* d) noexcept nogil
cdef bint demand_add(Demand* d, Lane* lane, Gate* gate) noexcept nogil  # False: no memory

cdef u64 demand_waiting(const Demand* d) noexcept nogil                   # rows
cdef bint demand_asks(const Demand* d, size_t i, u64 now_us) noexcept nogil
# ^ whether lane i was asked for of late: rows came or wait, or were turned away
cdef u64 demand_slo_us(const Demand* d, u64 now_us) noexcept nogil
# ^ the tightest SLO among these: one batch must not make those wait
cdef u64 demand_tight(const Demand* d, u64 now_us, u64* slo_us) noexcept nogil
# ^ rows that wait of the tightest SLO; slo_us: that SLO if rows of much longer ones wait as well,
# else 0
# NULL: none waits
cdef Lane* demand_due_first(Demand* d, Lanes* lanes, u64* ticket) noexcept nogil
cdef void demand_end(Demand* d, Lanes* lanes, u64 before_us, Status status,
                     u64 now_us) noexcept nogil
# ^ rows that wait and are due before then end; one behind a later one of its lane goes on waiting
cdef u64 demand_ahead(Demand* d, Lanes* lanes, const Lane* lane, u64 now_us) noexcept nogil
# ^ rows of all lanes that are due before one submitted to this lane now. A lane's rows are taken to
# have come evenly
