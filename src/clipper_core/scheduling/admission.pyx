"""Admission to a lane. docs/design.md, "Admission", explains why it cannot refuse rows forever.

The forecast is linear, like the batcher's: the batch that the next row joins starts at some time,
and takes a fixed time plus some time for each row. So the loop publishes it once, and each
submitter evaluates it for the position that it is about to claim, including rows that were
submitted since. Its numbers are recent estimates; `Margin` corrects their common error, and the
check when a batch is formed (early drop) corrects the rest.

Three things end a refusal: the forecast time passes; each reply makes a new forecast; and when the
replica has been idle for the time of one row (1 to 100 ms), one row is admitted as a probe.
"""
cimport cython
from libc.math cimport exp

from clipper_core.cache.clock_cache cimport cache_lookup
from clipper_core.runtime.status cimport FULL, NO_REPLICA
from clipper_core.scheduling.lane cimport lane_all_taken_in, pending_has
from clipper_core.wire.prediction cimport Value, value_drop

cdef double RATIO_MIN = 0.8, RATIO_MAX = 2.0
cdef double TAU = 0.98
cdef double STEP = 0.05
cdef double KEPT = 0.25
cdef double REST_US = 1e6           # without samples the margin's excess falls to 1/e in this time
cdef u64 GAP_US = 100000            # shorter pauses between samples are no rest
cdef double MOST = 4e9              # what fits into 32 bits, in us


cdef inline u32 _u32(double x) noexcept nogil:
    return <u32> (MOST if x > MOST else x if x > 0 else 0)


cdef void gate_publish(Gate* g, const Forecast* f, double margin, u64 seen,
                       u64 now_us) noexcept nogil:
    g.begin_us.store(now_us + <u64> (margin * f.begin_us), relaxed)
    g.base.store(seen - f.ahead, relaxed)
    g.probe_us.store(f.probe_us, relaxed)
    g.own_us.store(_u32(margin * f.own_us), relaxed)
    g.row_1024.store(_u32(margin * f.row_us * 1024), relaxed)
    g.full_us.store(_u32(margin * f.full_us), relaxed)
    g.unit_2_20.store(_u32(margin * f.unit_us * 1048576), relaxed)
    g.unit.store(_u32(f.unit), relaxed)
    g.size.store(f.size if f.size else 1, relaxed)


cdef void gate_close(Gate* g, u64 until_us) noexcept nogil:
    g.size.store(0, relaxed)
    g.begin_us.store(until_us, relaxed)
    g.probe_us.store(~(<u64> 0), relaxed)


cdef bint gate_probe(Gate* g, u64 now_us) noexcept nogil:
    cdef u64 due = g.probe_us.load(relaxed)
    return now_us >= due and g.probe_us.compare_exchange_strong(due, now_us + PROBE_US, relaxed)


cdef void margin_init(Margin* m) noexcept nogil:
    m.ratio = 1
    m.learned_us = 0


cdef void margin_forget(Margin* m) noexcept nogil:
    if m.ratio > 1:
        m.ratio = 1 + KEPT * (m.ratio - 1)


cdef double margin_now(Margin* m, u64 now_us) noexcept nogil:
    if now_us <= m.learned_us + GAP_US:
        return m.ratio
    return 1 + (m.ratio - 1) * exp(-<double> (now_us - m.learned_us - GAP_US) / REST_US)


cdef void margin_learn(Margin* m, double actual_us, double forecast_us, u64 now_us) noexcept nogil:
    if not (forecast_us > 0 and actual_us >= 0):
        return
    cdef double ratio = margin_now(m, now_us)
    ratio += STEP * (TAU if actual_us > ratio * forecast_us else TAU - 1)
    m.ratio = RATIO_MIN if ratio < RATIO_MIN else RATIO_MAX if ratio > RATIO_MAX else ratio
    m.learned_us = now_us


@cython.final
cdef class AdmissionGate:
    """The gate of one lane and its margin, for tests and simulations. Threads: one at a time. Times
    in microseconds on one clock.

    `publish`: the batch that the next row joins begins `begin_us` from now, holds `ahead` rows
    already, takes `own_us` and `row_us` for each row from its first on, `full_us` at most, and is
    full at `size` rows. Positions count rows since ever.
    """
    cdef Gate gate
    cdef Margin state

    def __cinit__(self):
        margin_init(&self.state)

    def publish(self, u64 now_us, u64 seen, *, double begin_us, double own_us, double row_us,
                double full_us,
                unsigned int size, u64 ahead=0, u64 probe_us=0xFFFFFFFFFFFFFFFF):
        """Write a forecast down, with the margin; `seen` positions were counted in it."""
        cdef Forecast f
        f.unit_us = f.unit = 0
        f.begin_us, f.own_us, f.row_us, f.full_us = begin_us, own_us, row_us, full_us
        f.size, f.ahead, f.probe_us = size, ahead, probe_us
        gate_publish(&self.gate, &f, margin_now(&self.state, now_us), seen, now_us)

    def close(self, u64 until_us=0):
        """Close the gate: there is no replica, and none before `until_us`."""
        gate_close(&self.gate, until_us)

    def finish(self, u64 tail, u64 now_us):
        """Return when a row that gets position `tail` now would be answered."""
        return gate_finish_us(&self.gate, tail, now_us)

    def probe(self, u64 now_us):
        """Return whether a row that would be refused is let through, to see."""
        return bool(gate_probe(&self.gate, now_us))

    def learn(self, double actual_us, double forecast_us, u64 now_us):
        """Learn that a forecast (without the margin) of `forecast_us` took `actual_us`."""
        margin_learn(&self.state, actual_us, forecast_us, now_us)

    def margin(self, u64 now_us):
        """Forecasts are multiplied by this."""
        return margin_now(&self.state, now_us)


# -- Submitting a row to its lane.
#
# A row that admission refuses is passed to the loop all the same if an equal row may wait or be in
# flight, because a joined row costs no evaluation. Only the loop knows which rows wait; if it finds
# no equal row, the row ends as FULL.

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
    """Return whether an equal row may wait or be in flight: one is in some lane, or the loop has
    not read all rows of this lane."""
    cdef Value value
    if not lane_all_taken_in(lane[0],
                             lane.ring.cells.tail.load(relaxed)) or pending_has(lanes.pending, key):
        return True
    if not cache_lookup(lanes.cache, key, &value):      # it may have been answered since the caller
                                                        # checked
        return False
    value_drop(&value)
    return True
