"""The last step of submitting, for callers with Python (model) and without (http_query)."""
from libc.string cimport memcpy

from clipper_core.runtime.dtype cimport F64
from clipper_core.runtime.histogram cimport count
from clipper_core.runtime.machine cimport relaxed
from clipper_core.runtime.status cimport FULL, PENDING, TOO_LARGE
from clipper_core.scheduling.cost_batch cimport row_cost
from clipper_core.scheduling.lane cimport lane_new
from clipper_core.scheduling.offer cimport lane_offer, lane_offer_cost, lane_wait_us
from clipper_core.scheduling.task cimport Lane

cdef extern from *:
    """
    static inline int clipper_log2(unsigned long long n) { return 63 - __builtin_clzll(n | 1); }
    """
    int log2_of "clipper_log2"(u64 n) noexcept nogil


cdef Status _shut(EngineState* e) noexcept nogil:
    """Why nothing new is taken in, or PENDING."""
    return <Status> (e.completion.dead.load(relaxed) or e.refusing.load(relaxed))


cdef u64 row_bytes_end(const EngineState* e) noexcept nogil:
    return min(min(e.limits.payload_bytes_max, e.row_bytes_max) + 1, <u64> 1 << 32)


cdef void lane_prepare(EngineState* e, ModelState* m, u64 slo_us) noexcept nogil:
    cdef int klass = log2_of(slo_us)
    if m.lanes[klass] == NULL and _shut(e) == PENDING:
        m.lanes[klass] = lane_new(e.lanes, m.index, <u64> 2 << klass,
                                  <u64> 1 << log2_of(m.lane_rows | 2),
                                  m.spec.row_bytes, 0, &m.tally, m.shares.load(relaxed) != 0)


cdef Status row_submit(EngineState* e, ModelState* m, const void* row, u64 nbytes, const Key* key,
                       u64 salt, u64 slo_us,
                       u64 now_us, Block* block, u32 slot, u32 cost) noexcept nogil:
    cdef int klass = log2_of(slo_us)
    cdef Lane* lane = m.lanes[klass]
    cdef Status status = _shut(e)
    if status != PENDING:
        return status
    if nbytes >= m.row_bytes_end:
        return _submit_cost(e, m, row, nbytes, key, salt, slo_us, now_us, block, slot, cost)
    if lane == NULL:
        return FULL
    return lane_offer(e.lanes, lane, &m.gates[klass], row, <u32> nbytes, key if m.cached else NULL,
                      salt, now_us + slo_us, now_us,
                      block, slot)


cdef Status _submit_cost(EngineState* e, ModelState* m, const void* row, u64 nbytes, const Key* key,
                         u64 salt, u64 slo_us, u64 now_us, Block* block, u32 slot,
                         u32 cost) noexcept nogil:
    """A row that differs in cost from others, or is larger than any may be."""
    cdef int klass = log2_of(slo_us)
    if nbytes >= row_bytes_end(e):
        return TOO_LARGE        # whatever waits
    if m.lanes[klass] == NULL:
        return FULL
    return lane_offer_cost(e.lanes, m.lanes[klass], &m.gates[klass], row, <u32> nbytes,
                           key if m.cached else NULL, salt, now_us + slo_us, now_us, block, slot,
                           row_cost(m.by_cost, nbytes, cost))


cdef void row_refused(ModelState* m, Status status, u64 slo_us, u64 now_us,
                      Value* value) noexcept nogil:
    cdef u32 klass = log2_of(slo_us)
    cdef double wait_s
    count(&m.tally.refused[<u32> status], 1)
    m.gates[klass].asked_us.store(now_us, relaxed)
    if status != FULL or m.gates[klass].size.load(relaxed) == 0:
        return
    wait_s = lane_wait_us(m.lanes[klass], &m.gates[klass], now_us + slo_us, now_us) / 1e6
    memcpy(&value.word, &wait_s, 8)
    value.tag = F64
