# A row through the gate of its lane, or past it to be joined to an equal row.
#
# Threads: any.
from clipper_core.admission cimport Gate
from clipper_core.delivery cimport Block
from clipper_core.machine cimport u32, u64
from clipper_core.row_hash cimport Key
from clipper_core.status cimport Status
from clipper_core.task cimport Lane, Lanes

cdef Status lane_offer(Lanes* lanes, Lane* lane, Gate* gate, const void* row, u32 nbytes, const Key* key, u64 salt,
                       u64 deadline_us, u64 now_us, Block* block, u32 slot) noexcept nogil
# ^ OK, FULL or NO_REPLICA. key NULL: neither joined nor cached
cdef u64 lane_wait_us(Lane* lane, Gate* gate, u64 deadline_us, u64 now_us) noexcept nogil
# ^ after how long another try may succeed, 1 ms at least
