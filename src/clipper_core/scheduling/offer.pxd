# A row through the gate of its lane, or past it to be joined to an equal row.
#
# Threads: any.
from clipper_core.results.completion cimport Block
from clipper_core.runtime.machine cimport relaxed, u32, u64
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.admission cimport Gate, gate_finish_us, gate_probe
from clipper_core.scheduling.lane cimport lane_submit
from clipper_core.scheduling.task cimport Lane, Lanes

cdef Status lane_offer_refused(Lanes* lanes, Lane* lane, Gate* gate, const void* row, u32 nbytes,
                               const Key* key, u64 salt,
                               u64 deadline_us, u64 now_us, Block* block, u32 slot) noexcept nogil
# ^ of a row that admission refuses: OK if an equal row may answer it, else FULL or NO_REPLICA
cdef Status lane_offer_cost(Lanes* lanes, Lane* lane, Gate* gate, const void* row, u32 nbytes,
                            const Key* key, u64 salt, u64 deadline_us, u64 now_us, Block* block,
                            u32 slot, u32 cost) noexcept nogil
# ^ as lane_offer, of a row that differs in cost from others
cdef u64 lane_wait_us(Lane* lane, Gate* gate, u64 deadline_us, u64 now_us) noexcept nogil
# ^ after how long another try may succeed, 1 ms at least


cdef inline Status lane_offer(Lanes* lanes, Lane* lane, Gate* gate, const void* row, u32 nbytes,
                              const Key* key, u64 salt,
                              u64 deadline_us, u64 now_us, Block* block, u32 slot) noexcept nogil:
    """Submit a row to its lane; -> OK, FULL or NO_REPLICA. key NULL: neither joined nor cached."""
    if gate_finish_us(gate, lane.ring.cells.tail.load(relaxed),
                      now_us) > deadline_us and not gate_probe(gate, now_us):
        return lane_offer_refused(lanes, lane, gate, row, nbytes, key, salt, deadline_us, now_us,
                                  block, slot)
    return lane_submit(lanes, lane, row, nbytes, key, block, slot, deadline_us, now_us, salt, 0, 0)
