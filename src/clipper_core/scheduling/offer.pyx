"""Offering a row to its lane.

A row that admission refuses goes to the loop all the same if an equal row waits or is in flight:
joined to it, it costs no evaluation. The loop decides, as only it knows what waits; a row that
finds no equal one there ends as FULL.
"""
from clipper_core.cache.clock_cache cimport cache_lookup
from clipper_core.runtime.machine cimport relaxed
from clipper_core.runtime.status cimport FULL, NO_REPLICA
from clipper_core.scheduling.admission cimport gate_extra_us, gate_finish_us, gate_probe
from clipper_core.scheduling.lane cimport lane_all_taken_in, lane_submit
from clipper_core.scheduling.pending cimport pending_has
from clipper_core.wire.prediction cimport Value, value_drop


cdef Status lane_offer_refused(Lanes* lanes, Lane* lane, Gate* gate, const void* row, u32 nbytes,
                               const Key* key, u64 salt,
                               u64 deadline_us, u64 now_us, Block* block, u32 slot) noexcept nogil:
    if key == NULL or not _may_have(lanes, lane, key):
        return FULL if gate.size.load(relaxed) else NO_REPLICA
    return lane_submit(lanes, lane, row, nbytes, key, block, slot, deadline_us, now_us, salt,
                       lane_wait_us(lane, gate, deadline_us, now_us), 0)


cdef Status lane_offer_cost(Lanes* lanes, Lane* lane, Gate* gate, const void* row, u32 nbytes,
                            const Key* key, u64 salt, u64 deadline_us, u64 now_us, Block* block,
                            u32 slot, u32 cost) noexcept nogil:
    cdef u64 finish_us = gate_finish_us(gate, lane.ring.cells.tail.load(relaxed), now_us)
    cdef u64 wait_us = 0
    if finish_us + gate_extra_us(gate, cost) > deadline_us and not gate_probe(gate, now_us):
        if key == NULL or not _may_have(lanes, lane, key):
            return FULL if gate.size.load(relaxed) else NO_REPLICA
        wait_us = lane_wait_us(lane, gate, deadline_us, now_us)
    return lane_submit(lanes, lane, row, nbytes, key, block, slot, deadline_us, now_us, salt,
                       wait_us, cost)


cdef u64 lane_wait_us(Lane* lane, Gate* gate, u64 deadline_us, u64 now_us) noexcept nogil:
    return max(gate_finish_us(gate, lane.ring.cells.tail.load(relaxed), now_us),
               deadline_us + 1000) - deadline_us


cdef bint _may_have(Lanes* lanes, Lane* lane, const Key* key) noexcept nogil:
    """Whether an equal row may wait or be in flight: one is in some lane, or this lane has rows not
    taken in yet."""
    cdef Value value
    if not lane_all_taken_in(lane[0],
                             lane.ring.cells.tail.load(relaxed)) or pending_has(lanes.pending, key):
        return True
    if not cache_lookup(lanes.cache, key, &value):      # it may have been answered since the caller
                                                        # looked
        return False
    value_drop(&value)
    return True
