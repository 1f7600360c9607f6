"""Lanes of one model, looked at together: who is due first, what waits, and for whom there must be
room."""
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.machine cimport relaxed
from clipper_core.runtime.status cimport Status
from clipper_core.runtime.timer_wheel cimport NEVER
from clipper_core.scheduling.lane cimport lane_head, lane_take, span_end, task_due_us
from clipper_core.scheduling.task cimport Span, task_of
from clipper_core.wire.prediction cimport TAG_NONE, Value

cdef enum:
    RECENT_US = 1000000         # a class of SLO asked for within this time still limits what a
                                # batch may take
    ALL_ROWS = 0xFFFF
    LONGER = 2                  # SLOs apart by more than this factor are short and long


cdef bint model_queue_init(ModelQueue* d) noexcept nogil:
    d.lanes = make[vector[LanePointer]]()
    d.gates = make[vector[GatePointer]]()
    return d.lanes != NULL and d.gates != NULL


cdef void model_queue_free(ModelQueue* d) noexcept nogil:
    del d.lanes
    del d.gates


cdef bint model_queue_add(ModelQueue* d, Lane* lane, Gate* gate) noexcept nogil:
    if not (make_room(d.lanes[0], d.lanes.size() + 1)
            and make_room(d.gates[0], d.gates.size() + 1)):
        return False
    d.lanes.push_back(lane)
    d.gates.push_back(gate)
    return True


cdef u64 model_queue_waiting(const ModelQueue* d) noexcept nogil:
    cdef size_t i
    cdef u64 total = 0
    for i in range(d.lanes.size()):
        total += d.lanes[0][i].waiting
    return total


cdef bint model_queue_is_active(const ModelQueue* d, size_t i, u64 now_us) noexcept nogil:
    cdef const Lane* lane = d.lanes[0][i]
    cdef Gate* gate = d.gates[0][i]
    if lane.waiting or lane.used_us + RECENT_US >= now_us:
        return True
    return gate != NULL and gate.asked_us.load(relaxed) + RECENT_US >= now_us


cdef u64 model_queue_slo_us(const ModelQueue* d, u64 now_us) noexcept nogil:
    cdef size_t i
    cdef u64 slo = <u64> 1 << 62
    for i in range(d.lanes.size()):
        if model_queue_is_active(d, i, now_us):
            slo = min(slo, d.lanes[0][i].slo_us)
    return slo


cdef u64 model_queue_tightest(const ModelQueue* d, u64 now_us, u64* slo_us) noexcept nogil:
    cdef size_t i
    cdef u64 tightest, rows = 0
    cdef const Lane* lane
    slo_us[0] = 0
    if d.lanes.size() < 2:
        return 0
    tightest = model_queue_slo_us(d, now_us)
    for i in range(d.lanes.size()):
        lane = d.lanes[0][i]
        if lane.slo_us <= LONGER * tightest:
            rows += lane.waiting
        elif lane.waiting:
            slo_us[0] = tightest
    return rows


cdef Lane* model_queue_earliest(ModelQueue* d, Lanes* lanes, u64* ticket) noexcept nogil:
    cdef Lane* first = NULL
    cdef Lane* lane
    cdef u64 due, head, first_due = NEVER
    cdef size_t i
    for i in range(d.lanes.size()):
        lane = d.lanes[0][i]
        if lane.waiting == 0 or not lane_head(lanes, lane, &head):
            continue
        due = task_due_us(task_of(lanes, head))
        if first == NULL or due < first_due:
            first = lane
            first_due = due
            ticket[0] = head
    return first


cdef void model_queue_end_before(ModelQueue* d, Lanes* lanes, u64 before_us, Status status,
                     u64 now_us) noexcept nogil:
    cdef u64 ticket
    cdef Span span
    cdef Value nothing
    cdef Lane* lane = model_queue_earliest(d, lanes, &ticket)
    nothing.word = 0
    nothing.tag = TAG_NONE
    while lane != NULL and task_of(lanes, ticket).due_us < before_us:
        lane_take(lanes, lane, ALL_ROWS, &span)
        span_end(lanes, &span, status, &nothing, now_us)
        lane = model_queue_earliest(d, lanes, &ticket)


cdef u64 model_queue_ahead(ModelQueue* d, Lanes* lanes, const Lane* lane,
                           u64 now_us) noexcept nogil:
    cdef size_t i
    cdef u64 total = lane.waiting, head, first, last, due = now_us + lane.slo_us
    cdef Lane* other
    for i in range(d.lanes.size() if d.lanes.size() > 1 else 0):
        other = d.lanes[0][i]
        last = now_us + other.slo_us
        if other == lane or other.waiting == 0:
            continue
        if last <= due:
            total += other.waiting
        elif lane_head(lanes, other, &head):
            first = task_due_us(task_of(lanes, head))
            if first < due:
                total += <u64> (other.waiting
                                * (<double> (due - first) / max(<double> (last - first), 1.0)))
    return total
