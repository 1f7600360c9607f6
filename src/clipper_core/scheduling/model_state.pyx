"""The state of a model, from its creation until its last row has ended.

Only the loop frees it, because tickets are in its wheel, in its batches and in lists of joined
rows, and only the loop knows when none of them is used any more. Dropped models are in a stack and
not sent as commands, because the queue of commands may be full, and the thread that drops the last
reference of a model can neither wait nor fail.
"""
from libc.stdlib cimport free
from libc.string cimport memset
from libcpp.algorithm cimport sort

from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.machine cimport acquire, aligned_new, relaxed, release
from clipper_core.runtime.ring cimport ring_free, spsc_free, spsc_new
from clipper_core.runtime.status cimport DEADLINE, DROPPED, FULL
from clipper_core.runtime.timer_wheel cimport NEVER
from clipper_core.scheduling.admission cimport (
    Forecast, gate_close, gate_finish_us, gate_publish, margin_forget, margin_init, margin_learn,
    margin_now,
)
from clipper_core.scheduling.bands cimport (
    BANDS, band_rank, band_turns_ahead, band_turns_charge, band_turns_choose, band_turns_divide,
    band_turns_new,
)
from clipper_core.scheduling.batcher cimport (
    batcher_cost_predict_us, batcher_cost_worst_us, batcher_must_shed, batcher_predict_us,
    batcher_probe_us, batcher_room, batcher_rows, batcher_second, batcher_size, batcher_within,
    batcher_worst_us,
)
from clipper_core.scheduling.lane cimport (
    SENT, WAITING, Span, Task, lane_avoids, lane_head, lane_take, span_end, task_due_us,
    task_needed, task_of, ticket_of,
)
from clipper_core.scheduling.replica cimport IN_FLIGHT_MAX, replica_has_place
from clipper_core.wire.prediction cimport TAG_NONE, Value

# -- The lanes of one model together: the row that is due first, the number of waiting rows, and the
# tightest SLO.

cdef enum:
    RECENT_US = 1000000         # a class of SLO used within this time still limits what a batch
                                # may take
    ALL_ROWS = 0xFFFF
    LONGER = 2                  # SLOs apart by more than this factor are short and long


cdef double SENT_LATELY = 1e-6  # rows per microsecond: a band that sends fewer overtakes none


cdef bint model_queue_init(ModelQueue* d) noexcept nogil:
    d.lanes = make[vector[LanePointer]]()
    d.gates = make[vector[GatePointer]]()
    return d.lanes != NULL and d.gates != NULL


cdef void model_queue_free(ModelQueue* d) noexcept nogil:
    del d.lanes
    del d.gates
    free(d.turns)


cdef bint model_queue_add(ModelQueue* d, Lane* lane, Gate* gate) noexcept nogil:
    if not (make_room(d.lanes[0], d.lanes.size() + 1)
            and make_room(d.gates[0], d.gates.size() + 1)):
        return False
    if lane.band and d.turns == NULL:
        d.turns = band_turns_new()
        if d.turns == NULL:
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
    return gate != NULL and gate.refused_us.load(relaxed) + RECENT_US >= now_us


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


cdef Lane* model_queue_next(ModelQueue* d, Lanes* lanes, u64* ticket) noexcept nogil:
    if d.turns == NULL:
        return model_queue_earliest(d, lanes, ticket)
    return _next_of_bands(d, lanes, ticket)


cdef Lane* _next_of_bands(ModelQueue* d, Lanes* lanes, u64* ticket) noexcept nogil:
    cdef Lane* first = NULL
    cdef Lane* lane
    cdef u64 due, head, first_due = NEVER, mask = 0
    cdef u32 band
    cdef size_t i
    for i in range(d.lanes.size()):
        lane = d.lanes[0][i]
        if lane.waiting and lane_head(lanes, lane, &head):
            mask |= <u64> 1 << lane.band
    if mask == 0:
        return NULL
    band = band_turns_choose(d.turns, mask, lanes.weights)
    for i in range(d.lanes.size()):
        lane = d.lanes[0][i]
        if lane.band != band or lane.waiting == 0 or not lane_head(lanes, lane, &head):
            continue
        due = task_due_us(task_of(lanes, head))
        if first == NULL or due < first_due:
            first = lane
            first_due = due
            ticket[0] = head
    return first


cdef u32 model_queue_at_once(const ModelQueue* d) noexcept nogil:
    return ALL_ROWS if d.turns == NULL else <u32> min(d.turns.at_once, <double> ALL_ROWS)


cdef void model_queue_charge(ModelQueue* d, Lanes* lanes, const Lane* lane,
                             double rows) noexcept nogil:
    if d.turns != NULL:
        band_turns_charge(d.turns, lane.band, rows, lanes.weights)


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


cdef u64 model_queue_ahead(ModelQueue* d, Lanes* lanes, const Lane* lane, double speed,
                           u64 now_us) noexcept nogil:
    cdef u64[BANDS] waiting
    cdef u64 own = _ahead_in_band(d, lanes, lane, now_us)
    if d.turns == NULL:
        return own
    _count_by_band(d, waiting)
    return band_turns_ahead(d.turns, lane.band, own, waiting, speed, lanes.weights)


cdef void _count_by_band(const ModelQueue* d, u64* waiting) noexcept nogil:
    """Count the rows that wait, by band."""
    cdef size_t i
    memset(waiting, 0, BANDS * sizeof(u64))
    for i in range(d.lanes.size()):
        waiting[d.lanes[0][i].band] += d.lanes[0][i].waiting


cdef bint model_queue_is_behind(const ModelQueue* d, const Lane* lane) noexcept nogil:
    cdef size_t i
    if d.turns == NULL:
        return False
    for i in range(d.lanes.size()):
        if band_rank(d.lanes[0][i].band) < band_rank(lane.band) and (
                d.lanes[0][i].waiting or d.turns.rate[d.lanes[0][i].band] > SENT_LATELY):
            return True
    return False


cdef u64 _ahead_in_band(ModelQueue* d, Lanes* lanes, const Lane* lane,
                        u64 now_us) noexcept nogil:
    """Return how many rows of the lane's band are due before one that is submitted now."""
    cdef size_t i
    cdef u64 total = lane.waiting, head, first, last, due = now_us + lane.slo_us
    cdef Lane* other
    for i in range(d.lanes.size() if d.lanes.size() > 1 else 0):
        other = d.lanes[0][i]
        last = now_us + other.slo_us
        if other == lane or other.band != lane.band or other.waiting == 0:
            continue
        if last <= due:
            total += other.waiting
        elif lane_head(lanes, other, &head):
            first = task_due_us(task_of(lanes, head))
            if first < due:
                total += <u64> (other.waiting
                                * (<double> (due - first) / max(<double> (last - first), 1.0)))
    return total


# -- Choice of the replica, and forecast.
#
# Rows are sent to the replica that is predicted to finish them first: its remaining busy time plus
# the time of its batch. Equal ones take turns. So replicas of unequal speed get work in proportion
# to their speed, because each gets the next batch when it is free. A row is not sent to an idle
# slow replica if a fast one will complete it sooner; this only concerns the last few rows, so it
# applies only while the fast one can take all that wait. An estimate that was not confirmed for a
# second counts as unknown, so that a replica that was slow once gets a row again.
#
# A replica whose model fails batch after batch is sooner done than any other, and must not be
# preferred for that. After `eject_after` failures in a row it gets no rows for a while, then a
# single row as a probe; each probe that fails doubles the time. Its rows are retried once on
# another replica. No replica is ejected while no other one accepts rows, so a model that fails all
# queries returns its errors and does not lose all its replicas.
#
# A second batch is sent behind one in flight when it is full, or large enough for its fixed cost
# (`batcher_second`): the container need not wait between batches, and pipelining does not make them
# small.
#
# Rows of long deadlines (an array's) would fill every batch, two in flight, and leave no room for a
# query whose SLO is shorter than two batches and its own. While such queries arrive (refused ones
# count), a batch of rows with long deadlines takes at most a third of the tightest SLO, and no
# second batch is sent behind it. So a new query waits for the rest of one batch, and then has its
# own. This is not done where it would cost more than half of the throughput, because queries that
# cannot be in time must not slow all others.
#
# The forecast simulates the queue, batch by batch, over the replicas as they become free. What it
# cannot know (pauses, later rows with earlier deadlines, how full the last batch will be) is in the
# margin. Not done: a forecast for each row instead of each batch, and a margin for each class of
# SLO.

cdef enum:
    UNTRIED_US = 1000000        # an estimate older than this counts as unknown
    RATE_US = 2000              # arrivals are counted over at least this long
    WALK_MAX = 32               # batches; what lies behind them is spread over all replicas

cdef double EQUAL = 0.2         # predictions that differ by less are equal: they take turns
cdef double RATE_DECAY_US = 20000
cdef double LONG_SHARE = 0.33   # of the tightest SLO: more a batch that rows of long ones fill does
                                # not take
cdef double WORTH = 0.5         # of a full batch's rows in the same time: room that costs more is
                                # not kept
cdef double BROKEN = 1.5        # a row on trial that was dropped counts as this much late


cdef bint replica_set_init(ReplicaSet* c) noexcept nogil:
    c.members = make[vector[ReplicaPointer]]()
    c.free_us = make[vector[double]]()
    replica_set_reset(c)
    return c.members != NULL and c.free_us != NULL


cdef void replica_set_reset(ReplicaSet* c) noexcept nogil:
    margin_init(&c.margin)
    c.margin_1000.store(1000, relaxed)


cdef bint replica_set_reserve(ReplicaSet* c) noexcept nogil:
    return make_room(c.members[0], c.members.size() + 1) and make_room(c.free_us[0],
                                                                       c.members.size() + 1)


cdef void replica_set_free(ReplicaSet* c) noexcept nogil:
    del c.members
    del c.free_us


# -- who

cdef bint replica_accepts(const Replica* r) noexcept nogil:
    return not (r.draining or r.suspect or r.connection.closing)


cdef inline bint _takes(const ReplicaSet* c, const Replica* r) noexcept nogil:
    """Return whether a replica may get rows, more than a probe."""
    return replica_accepts(r) and not (c.avoiding and r.ejected_until_us)


cdef void replica_set_update_ejections(ReplicaSet* c) noexcept nogil:
    cdef size_t i
    cdef bint ejected = False, others = False
    for i in range(c.members.size() if c.members.size() > 1 else 0):
        if c.members[0][i].ejected_until_us:
            ejected = True
        elif replica_accepts(c.members[0][i]):
            others = True
    c.avoiding = ejected and others


cdef bint replica_set_has_other(const ReplicaSet* c, const Replica* r) noexcept nogil:
    cdef size_t i
    for i in range(c.members.size()):
        if (c.members[0][i] != r and replica_accepts(c.members[0][i])
            and c.members[0][i].ejected_until_us == 0):
            return True
    return False


cdef bint replica_set_must_pass(const ReplicaSet* c, const Replica* r,
                                const Lane* lane) noexcept nogil:
    return lane_avoids(lane) == r.conn and replica_set_has_other(c, r)


cdef i32 _on_probation(const ReplicaSet* c, u64 now_us) noexcept nogil:
    """Return the index of an ejected replica whose time has passed and that has no batch in flight;
    -1: none."""
    cdef size_t i
    cdef const Replica* r
    for i in range(c.members.size() if c.avoiding else 0):
        r = c.members[0][i]
        if (r.ejected_until_us and r.ejected_until_us <= now_us and r.in_flight == 0
            and r.passed != c.round and replica_accepts(r)):
            return <i32> i
    return -1


cdef bint too_late(const Replica* r, u32 n, u64 due_us, u64 now_us) noexcept nogil:
    return batcher_must_shed(&r.batcher, now_us,
                             max(now_us, r.busy_until_us if r.in_flight else now_us), n, due_us)


cdef bint another_can_finish(ReplicaSet* c, const Replica* r, u64 waiting, u64 due_us,
                      u64 now_us) noexcept nogil:
    cdef size_t i
    cdef Replica* other
    for i in range(c.members.size()):
        other = c.members[0][i]
        if other != r and _takes(c, other):
            if not too_late(other, batcher_size(&other.batcher, <u32> waiting), due_us, now_us):
                return True
    return False


cdef bint _worth_a_second(const ReplicaSet* c, const Replica* r, u64 waiting) noexcept nogil:
    if (r.in_flight >= IN_FLIGHT_MAX or r.concurrency or r.exclusive or r.connection.protocol != 2
            or _beside_short(c, r)):
        return False
    return batcher_second(&r.batcher, <u32> min(waiting, <u64> 0xFFFFFFFF),
                          c.rate / c.members.size())


cdef double _takes_us(const Replica* r, u64 waiting, u64 now_us) noexcept nogil:
    """The predicted time of its next batch; 0 while unknown."""
    if now_us > r.batcher.learned_us + UNTRIED_US and r.in_flight == 0:
        return 0
    return batcher_predict_us(&r.batcher,
                              batcher_size(&r.batcher, <u32> min(waiting, <u64> 0xFFFFFFFF)))


cdef double _busy_us(const Replica* r, u64 now_us) noexcept nogil:
    return <double> (r.busy_until_us - now_us) if r.in_flight and r.busy_until_us > now_us else 0


cdef bint _sooner(ReplicaSet* c, double by_us, u64 waiting, u64 now_us,
                  u64* again_us) noexcept nogil:
    """Return whether a busy replica will have done all that waits well before `by_us` from now. A
    replica that is later with its batch than in 99 of 100 cases does not count."""
    cdef size_t i
    cdef Replica* r
    cdef double takes
    cdef u64 until
    for i in range(c.members.size()):
        r = c.members[0][i]
        takes = _takes_us(r, waiting, now_us)
        if r.in_flight == 0 or takes <= 0 or not _takes(c, r) or waiting > batcher_rows(&r.batcher):
            continue
        until = r.busy_until_us + <u64> (batcher_worst_us(&r.batcher, <u32> waiting) - takes)
        if now_us <= until and _busy_us(r, now_us) + takes < (1 - EQUAL) * by_us:
            again_us[0] = until + 1
            return True
    return False


cdef i32 replica_set_pick(ReplicaSet* c, u64 waiting, u64 now_us, u64* again_us) noexcept nogil:
    cdef u32 i, k, n = <u32> c.members.size()
    cdef i32 idle = -1, second = -1
    cdef double idle_us = 0, second_us = 0, takes
    cdef Replica* r
    again_us[0] = 0
    if c.avoiding and _on_probation(c, now_us) >= 0:
        return _on_probation(c, now_us)
    for i in range(n):
        k = (c.turn + i) % n
        r = c.members[0][k]
        if r.passed == c.round or not _takes(c, r):
            continue
        takes = _takes_us(r, waiting, now_us)
        if replica_has_place(r):
            if idle < 0 or takes < (1 - EQUAL) * idle_us:
                idle = <i32> k
                idle_us = takes
        elif _worth_a_second(c, r,
                             waiting) and (second < 0 or _busy_us(r, now_us) + takes < second_us):
            second = <i32> k
            second_us = _busy_us(r, now_us) + takes
    if second >= 0 and (idle < 0 or second_us < (1 - EQUAL) * idle_us):
        return -1 if n > 1 and _sooner(c, second_us, waiting, now_us, again_us) else second
    if idle < 0 or (n > 1 and _sooner(c, idle_us, waiting, now_us, again_us)):
        return -1
    c.turn = (<u32> idle + 1) % n
    return idle


cdef u32 _beside_short(const ReplicaSet* c, const Replica* r) noexcept nogil:
    """Return the rows of a batch that leaves room for the tightest SLO; 0 if no such room is kept,
    because it would cost too much."""
    cdef const Batcher* b = &r.batcher
    cdef double time_us = LONG_SHARE * c.tight_us, one_us = batcher_worst_us(b, 1)
    if one_us <= 0 or one_us > time_us:     # unknown, or no query has a short SLO, or no row of
                                            # theirs would be in time
        return 0
    cdef u32 full = batcher_rows(b), n = batcher_within(b, time_us)
    return 0 if n * batcher_predict_us(b, full) < WORTH * full * batcher_predict_us(b, n) else n


cdef u32 replica_set_batch_rows(const ReplicaSet* c, const Replica* r, u64 waiting,
                                u64 tight) noexcept nogil:
    if c.avoiding and r.ejected_until_us:
        return 1                            # a probe
    cdef u32 n = batcher_size(&r.batcher,
                              <u32> min(waiting, <u64> 0xFFFFFFFF)), beside = _beside_short(c, r)
    return min(n, max(beside, <u32> min(tight, <u64> 0xFFFFFFFF))) if beside else n


# -- what can be promised

cdef void replica_set_count_arrivals(ReplicaSet* c, u64 rows, u64 now_us) noexcept nogil:
    cdef double span = <double> (now_us - c.rated_us) if now_us > c.rated_us else 0
    c.arrived += rows
    if span < RATE_US:
        return
    c.rate += (c.arrived / span - c.rate) * span / (span + RATE_DECAY_US)
    c.arrived = 0
    c.rated_us = now_us


cdef i32 _next_free(ReplicaSet* c, double n) noexcept nogil:
    """Return who would begin a batch of n next: the one that is done with it first."""
    cdef size_t i
    cdef i32 best = -1
    cdef double at, best_at = 0
    cdef const Batcher* b
    for i in range(c.members.size()):
        if not _takes(c, c.members[0][i]):
            continue
        b = &c.members[0][i].batcher
        at = c.free_us[0][i] + batcher_predict_us(b, <u32> min(n, <double> batcher_rows(b)))
        if best < 0 or at < best_at:
            best = <i32> i
            best_at = at
    return best


cdef double replica_set_speed(const ReplicaSet* c) noexcept nogil:
    cdef size_t i
    cdef u64 size
    cdef double took_us, speed = 0
    for i in range(c.members.size()):
        if _takes(c, c.members[0][i]):
            size = replica_set_batch_rows(c, c.members[0][i], 0xFFFFFFFF, 0)
            took_us = batcher_predict_us(&c.members[0][i].batcher, <u32> size)
            if took_us <= 0:
                return 0
            speed += size * max(c.members[0][i].concurrency, <u32> 1) / max(1.0, took_us)
    return speed


cdef u64 _walk(ReplicaSet* c, u64 ahead, u64 now_us, i32* lead) noexcept nogil:
    """Assign `ahead` rows in full batches. Return how many are left for the batch that a further
    row would join. lead: set to the replica of that batch."""
    cdef size_t i
    cdef u32 _step
    cdef u64 size
    cdef double took, speed = 0
    cdef const Batcher* b
    c.free_us.resize(c.members.size())
    for i in range(c.members.size()):
        c.free_us[0][i] = _busy_us(c.members[0][i], now_us)
    for _step in range(WALK_MAX):
        lead[0] = _next_free(c, <double> ahead + 1)
        if lead[0] < 0:
            return ahead
        size = replica_set_batch_rows(c, c.members[0][lead[0]], 0xFFFFFFFF, 0)
        took = batcher_predict_us(&c.members[0][lead[0]].batcher, <u32> size)
        if ahead < size or took <= 0:
            return ahead % size
        c.free_us[0][lead[0]] += took
        ahead -= size
    for i in range(c.members.size()):
        b = &c.members[0][i].batcher
        if _takes(c, c.members[0][i]):
            size = replica_set_batch_rows(c, c.members[0][i], 0xFFFFFFFF, 0)
            speed += size / max(1.0, batcher_predict_us(b, <u32> size))
    if speed > 0:
        c.free_us[0][lead[0]] += ahead / speed
    return 0


cdef void _forecast_places(const ReplicaSet* c, u64 ahead, Forecast* f) noexcept nogil:
    """Forecast for containers with a concurrency: all their places together are like one batch, of
    which each row ends by itself. So a row that finds no place waits for its share of the time of
    those before it. `f` has the forecast without a concurrency."""
    cdef double places = 0, rows = ahead, took = 0
    cdef size_t i
    cdef const Replica* r
    for i in range(c.members.size()):
        r = c.members[0][i]
        if not _takes(c, r) or r.concurrency == 0:
            continue
        places += <double> f.size * r.concurrency
        rows += <double> f.size * r.in_flight
        took = max(took, batcher_predict_us(&r.batcher, f.size))
    f.begin_us = took * max(0.0, rows + 1 - places) / places
    f.ahead = <u64> rows if rows < places else 0
    f.own_us = f.full_us
    f.row_us = 0
    f.size = <u32> min(places, 1e9)


cdef void replica_set_forecast(ReplicaSet* c, Lanes* lanes, Lane* lane, Gate* gate, u64 ahead,
                               u64 behind,
                        bint shown, bint steady,
                        u64 now_us) noexcept nogil:
    cdef i32 lead = -1
    cdef Forecast f
    cdef double margin = margin_now(&c.margin, now_us), coming
    cdef const Replica* r
    f.ahead = _walk(c, ahead, now_us, &lead)
    if lead < 0:
        if gate != NULL:
            gate_close(gate, c.earliest_replica_us if c.members.size() == 0 else 0)
        c.delay_us.store(0, relaxed)
        return
    r = c.members[0][lead]
    f.begin_us = c.free_us[0][lead]
    f.size = replica_set_batch_rows(c, r, 0xFFFFFFFF, 0 if lane.slo_us > c.tight_us else 0xFFFFFFFF)
    f.full_us = batcher_worst_us(&r.batcher, f.size)
    coming = c.rate * f.begin_us + behind
    if c.tight_us:
        coming = max(c.rate * f.begin_us, min(coming, <double> replica_set_batch_rows(c, r, f.size,
                0)))
    coming = min(coming, <double> f.size, batcher_room(&r.batcher))
    f.row_us = (batcher_worst_us(&r.batcher, f.size) - batcher_worst_us(&r.batcher, 1)) / max(f.size
            - 1, <u32> 1)
    f.own_us = batcher_worst_us(&r.batcher, 1) + f.row_us * coming
    if r.concurrency:
        _forecast_places(c, ahead, &f)
    f.unit_us = r.batcher.fit_b
    f.unit = r.batcher.unit
    f.probe_us = max(r.batcher.learned_us, r.busy_until_us) + batcher_probe_us(&r.batcher)
    if gate != NULL:
        gate_publish(gate, &f, margin, lane.seen, now_us)
        if steady:
            _put_on_trial(c, lanes, lane, gate, margin, now_us)
    if shown:
        c.delay_us.store(<u64> (margin * f.begin_us), relaxed)
        c.slo_us.store(lane.slo_us, relaxed)
        c.margin_1000.store(<u64> (1000 * margin), relaxed)


cdef void _put_on_trial(ReplicaSet* c, Lanes* lanes, Lane* lane, Gate* gate, double margin,
                        u64 now_us) noexcept nogil:
    """Remember what was forecast for the youngest row, if that is more than half its SLO."""
    cdef Task* task
    cdef u64 finish
    if c.trial.ticket or lane.waiting == 0 or lane.seen == 0:
        return
    task = task_of(lanes, ticket_of(lane.id, lane.seen - 1))
    if task == NULL or task.phase != WAITING:
        return
    finish = gate_finish_us(gate, lane.seen - 1, now_us)
    if 4 * (finish - now_us) < 3 * lane.slo_us:
        return
    c.trial.ticket = ticket_of(lane.id, lane.seen - 1)
    c.trial.made_us = now_us
    c.trial.forecast_us = (finish - now_us) / margin
    c.trial.sent = False


cdef void _forget(ReplicaSet* c) noexcept nogil:
    """A margin that was learned in one bad second would refuse the rows after it."""
    cdef size_t i
    cdef u64 speedups = 0
    for i in range(c.members.size()):
        speedups += c.members[0][i].batcher.speedups
    if speedups > c.speedups:
        margin_forget(&c.margin)
    c.speedups = speedups


cdef void replica_set_learn(ReplicaSet* c, Lanes* lanes, Tally* tally, u64 now_us) noexcept nogil:
    cdef Task* task
    cdef u64 drops = (tally.ended[<u32> DROPPED].load(relaxed)
                      + tally.ended[<u32> DEADLINE].load(relaxed))
    cdef u64 refused = tally.refused[<u32> FULL].load(relaxed)
    _forget(c)
    replica_set_count_arrivals(c, refused - c.refused, now_us)
    c.refused = refused
    if c.trial.ticket == 0:
        c.trial.drops = drops
        return
    task = task_of(lanes, c.trial.ticket)
    if task != NULL:
        c.trial.sent = c.trial.sent or task.phase == SENT
        return
    if c.trial.sent:
        margin_learn(&c.margin, <double> (now_us - c.trial.made_us), c.trial.forecast_us, now_us)
    elif drops != c.trial.drops:
        margin_learn(&c.margin, BROKEN * margin_now(&c.margin, now_us) * c.trial.forecast_us,
                     c.trial.forecast_us, now_us)
    c.trial.ticket = 0
    c.trial.drops = drops


# -- Which rows make a batch, where rows differ in cost.
#
# The row that is due first is always in the batch: so no row starves, whatever is cheaper. Without
# padding the rows behind it follow in the order of their deadlines, except those that do not fit.
#
# With padding it pays to put rows of like cost together. For each cost that the dearest row may
# have, the best batch below it holds the row that is due first and the dearest others: each row
# that is added takes as long as the dearest, and does only the work of its own cost. So rows are
# added as long as they raise the useful cost per microsecond, `worth`, and of all dearest rows
# the one with the greatest worth is taken. The fixed time of a batch, as the batcher's line has
# it, decides how unlike the rows may be: with none of it, only equals go together.
#
# A row that would be late in a batch of its own after this one must go now (`must`), whatever its
# cost, if it is in time with it. There may be several such rounds: each makes the batch longer.

cdef enum:
    CANDIDATES_MAX = 1024       # rows that are considered for one batch
    STEPS_MAX = 8192            # cells that are read for them
    ROUNDS_MAX = 4

cdef double FIXED_ROWS = 4      # while the line is unknown, a batch's fixed time is that of so many
                                # rows


cdef CostBatch* cost_batch_new(u8 kind, bint padded, u32 item_bytes) noexcept nogil:
    cdef CostBatch* c = <CostBatch*> aligned_new(sizeof(CostBatch))
    if c == NULL:
        return NULL
    c.kind, c.padded, c.item_bytes = kind, padded, max(item_bytes, <u32> 1)
    c.rows = make[vector[Candidate]]()
    c.keys = make[vector[u64]]()
    c.sums = make[vector[double]]()
    if (c.rows == NULL or c.keys == NULL or c.sums == NULL
        or not (make_room(c.rows[0], CANDIDATES_MAX) and make_room(c.keys[0], CANDIDATES_MAX)
                and make_room(c.sums[0], CANDIDATES_MAX + 1))):
        cost_batch_free(c)
        return NULL
    return c


cdef void cost_batch_free(CostBatch* c) noexcept nogil:
    if c != NULL:
        del c.rows
        del c.keys
        del c.sums
        free(c)


cdef u32 row_cost(const CostBatch* c, u64 nbytes, u32 given) noexcept nogil:
    cdef u64 cost = given
    if c.kind == COST_BYTES:
        cost = nbytes
    elif c.kind == COST_LENGTH:
        cost = nbytes / c.item_bytes
    return <u32> min(max(cost, <u64> 1), <u64> 0xFFFFFFFF)


# -- candidates

cdef void _add(CostBatch* c, Lanes* lanes, u64 ticket, u32 avoid) noexcept nogil:
    cdef Task* task = task_of(lanes, ticket)
    cdef Candidate row
    if task == NULL or task.phase != WAITING or not task_needed(lanes, task):
        return
    if avoid and task.tries and task.left == avoid:
        return
    row.ticket = ticket
    row.due_us = task_due_us(task)
    row.cost = row_cost(c, task.bytes, task.rows)
    row.must = row.chosen = False
    c.rows.push_back(row)


cdef void _add_lane(CostBatch* c, Lanes* lanes, Lane* lane, size_t most, u32 avoid) noexcept nogil:
    cdef size_t i
    cdef u64 pos = lane.head, end = min(lane.seen, lane.head + STEPS_MAX)
    for i in range(lane.retry.size()):
        if c.rows.size() >= most:
            return
        if avoid == 0 or lane.retry[0][i].failed_on != avoid:
            _add(c, lanes, lane.retry[0][i].ticket, 0)
    while pos < end and c.rows.size() < most:
        _add(c, lanes, ticket_of(lane.id, pos), avoid)
        pos += 1


cdef void _add_bands(CostBatch* c, ModelQueue* queue, Lanes* lanes, u32 avoid,
                     u32 rows) noexcept nogil:
    """Collect of each band as many rows as are its turn, in twice the rows of a batch: else rows
    of one that sends much, which have waited longest, would fill the batch."""
    cdef u64[BANDS] waiting
    cdef u32[BANDS] given
    cdef size_t i, before
    cdef Lane* lane
    _count_by_band(queue, waiting)
    memset(given, 0, sizeof(given))
    band_turns_divide(queue.turns, waiting, min(2 * rows, <u32> CANDIDATES_MAX), given,
                      lanes.weights)
    for i in range(queue.lanes.size()):
        lane = queue.lanes[0][i]
        before = c.rows.size()
        if lane.waiting and given[lane.band]:
            _add_lane(c, lanes, lane, before + given[lane.band], avoid)
            given[lane.band] -= <u32> (c.rows.size() - before)


cdef bint cost_batch_collect(CostBatch* c, ModelQueue* queue, Lanes* lanes, u32 avoid, u32 rows,
                             u64 now_us) noexcept nogil:
    cdef size_t i, first = 0, used = 0
    cdef u64 next_ticket = 0
    c.rows.clear()
    if queue.turns != NULL:
        _add_bands(c, queue, lanes, avoid, rows)
        model_queue_next(queue, lanes, &next_ticket)
    for i in range(queue.lanes.size() if queue.turns == NULL else 0):
        used += queue.lanes[0][i].waiting > 0
    for i in range(queue.lanes.size() if queue.turns == NULL else 0):
        if queue.lanes[0][i].waiting:
            _add_lane(c, lanes, queue.lanes[0][i],
                      min(c.rows.size() + CANDIDATES_MAX / used, <size_t> CANDIDATES_MAX), avoid)
    if c.rows.empty():
        return False
    for i in range(c.rows.size()):
        if c.rows[0][i].ticket == next_ticket:
            first = i
            break
        if c.rows[0][i].due_us < c.rows[0][first].due_us:
            first = i
    c.rows[0][0], c.rows[0][first] = c.rows[0][first], c.rows[0][0]
    _keep_apart(c, lanes)
    return True


cdef void _keep_apart(CostBatch* c, Lanes* lanes) noexcept nogil:
    """Leave only the first candidate if its container died with it; else leave out all whose
    container died."""
    cdef size_t i, n = 1
    cdef bint alone = task_of(lanes, c.rows[0][0].ticket).together > 0
    for i in range(1, c.rows.size()):
        if not alone and task_of(lanes, c.rows[0][i].ticket).together == 0:
            c.rows[0][n] = c.rows[0][i]
            n += 1
    c.rows.resize(n)


# -- the choice

cdef void cost_batch_alone(CostBatch* c) noexcept nogil:
    cdef size_t i
    for i in range(c.rows.size()):
        c.rows[0][i].chosen = i == 0
    c.choice.n = 1
    c.choice.cost = c.choice.useful = c.rows[0][0].cost
    c.choice.full = False
    c.choice.worth = 0


cdef void cost_batch_choose(CostBatch* c, const Batcher* b, u32 rows_max, double limit,
                            u64 start_us) noexcept nogil:
    cdef size_t i
    cdef u32 rounds = 0
    for i in range(c.rows.size()):
        c.rows[0][i].chosen = c.rows[0][i].must = i == 0
    if not c.padded:
        _choose_by_deadline(c, b, rows_max, limit)
        return
    _choose_alike(c, b, rows_max, limit)
    while rounds < ROUNDS_MAX and _must_more(c, b, rows_max, limit, start_us):
        _choose_alike(c, b, rows_max, limit)
        rounds += 1


cdef void _choose_by_deadline(CostBatch* c, const Batcher* b, u32 rows_max,
                              double limit) noexcept nogil:
    cdef size_t i, k
    cdef Candidate* row
    cdef Choice* choice = &c.choice
    cost_batch_alone(c)
    c.keys.clear()
    for i in range(1, c.rows.size()):           # a slack of an hour and more is as good as any
        c.keys.push_back(min(c.rows[0][i].due_us - c.rows[0][0].due_us, <u64> 0xFFFFFFFF) << 32 | i)
    sort(c.keys.begin(), c.keys.end())
    for k in range(c.keys.size()):
        row = &c.rows[0][<u32> c.keys[0][k]]
        if choice.n >= rows_max:
            break
        if choice.cost + row.cost > limit:
            choice.full = True
            continue
        row.chosen = True
        choice.n += 1
        choice.cost += row.cost
    choice.useful = choice.cost
    choice.worth = choice.useful / max(batcher_cost_predict_us(b, choice.cost), 1.0)


cdef void _choose_alike(CostBatch* c, const Batcher* b, u32 rows_max, double limit) noexcept nogil:
    """The batch of the greatest worth that holds all rows that must go."""
    cdef double fixed_us = batcher_cost_predict_us(b, 0), unit_us = (batcher_cost_predict_us(b, 1)
                                                                    - fixed_us)
    cdef double top = 0, sum = 0
    cdef u32 musts = 0, others
    cdef size_t i, k, below = 0, best_below = 0
    cdef u32 best_count = 0
    cdef Choice best, found
    if unit_us <= 0:
        unit_us = 1
        fixed_us = max(fixed_us, FIXED_ROWS * b.unit)
    c.keys.clear()
    for i in range(c.rows.size()):
        if c.rows[0][i].must:
            musts += 1
            sum += c.rows[0][i].cost
            top = max(top, <double> c.rows[0][i].cost)
        else:
            c.keys.push_back(<u64> c.rows[0][i].cost << 32 | i)
    sort(c.keys.begin(), c.keys.end())
    c.sums.clear()
    c.sums.push_back(0)
    for k in range(c.keys.size()):
        c.sums.push_back(c.sums[0][k] + (c.keys[0][k] >> 32))
        below += (c.keys[0][k] >> 32) <= top
    best.n = 0
    for k in range(below, c.keys.size() + 1):   # the dearest is one that must go, or others[k - 1]
        if k > below:
            top = c.keys[0][k - 1] >> 32
            if (musts + 1) * top > limit or musts >= rows_max:
                break
        others = _others(c, k, musts, sum, top, fixed_us, unit_us, rows_max, limit, k > below,
                        &found)
        if best.n == 0 or found.worth > best.worth:
            best = found
            best_below, best_count = k, others
    for i in range(c.rows.size()):
        c.rows[0][i].chosen = c.rows[0][i].must
    for k in range(best_below - best_count, best_below):
        c.rows[0][<u32> c.keys[0][k]].chosen = True
    c.choice = best


cdef u32 _others(const CostBatch* c, size_t below, u32 musts, double sum, double top,
                 double fixed_us, double unit_us, u32 rows_max, double limit, bint one,
                 Choice* found) noexcept nogil:
    """Return how many of others[:below], the dearest first, go with those that must, where the
    dearest row costs `top`. one: at least one of them does.

    Each further one is worth less than the one before, so the last that raises the worth is found
    by halving."""
    cdef double room = min(limit / top, <double> rows_max) - musts
    cdef u32 fitting = <u32> min(max(room, 0.0), <double> below)
    cdef u32 low = 1 if one else 0, high = max(fitting, low), middle
    cdef double useful
    while low < high:
        middle = (low + high + 1) / 2
        useful = sum + c.sums[0][below] - c.sums[0][below - middle + 1]
        # is the middle-th worth more than those before it on average?
        if (c.keys[0][below - middle] >> 32) * (fixed_us + unit_us * (musts + middle - 1)
                                               * top) >= unit_us * top * useful:
            low = middle
        else:
            high = middle - 1
    found.n = musts + low
    found.useful = sum + c.sums[0][below] - c.sums[0][below - low]
    found.cost = found.n * top
    found.worth = found.useful / (fixed_us + unit_us * found.cost)
    found.full = low == fitting and low < below and found.n < rows_max
    return low


cdef bint _must_more(CostBatch* c, const Batcher* b, u32 rows_max, double limit,
                     u64 start_us) noexcept nogil:
    """Find the rows that cannot wait for the next batch, and can go in this one. True: some."""
    cdef size_t i
    cdef Candidate* row
    cdef double end_us = start_us + batcher_cost_worst_us(b, c.choice.cost)
    cdef double top = 0, longer_us
    cdef u32 musts = 0
    cdef bint more = False
    for i in range(c.rows.size()):
        if c.rows[0][i].must:
            musts += 1
            top = max(top, <double> c.rows[0][i].cost)
    for i in range(c.rows.size()):
        row = &c.rows[0][i]
        if row.chosen or row.must or row.due_us >= end_us + batcher_cost_worst_us(b, row.cost):
            continue
        longer_us = start_us + batcher_cost_worst_us(b, (musts + 1) * max(top, <double> row.cost))
        if (musts >= rows_max or (musts + 1) * max(top, <double> row.cost) > limit
                or longer_us > min(row.due_us, c.rows[0][0].due_us)):
            continue
        row.must = more = True
        musts += 1
        top = max(top, <double> row.cost)
    return more


# -- Models: their lanes, queues and replicas together.
ctypedef void* Pointer

cdef enum:
    UNUSED_MAX = 4096           # numbers of models that were given back, kept for others; beyond it
                                # such models stay a while


cdef bint model_state_init(ModelState* m) noexcept nogil:
    cdef bint has_queue = model_queue_init(&m.queue)
    cdef bint has_replica_set = replica_set_init(&m.replica_set)
    m.replicas = make[vector[u32]]()
    return has_queue and has_replica_set and m.replicas != NULL


cdef bint band_lanes_make(ModelState* m, u32 band) noexcept nogil:
    if band and m.bands[band] == NULL:
        m.bands[band] = <BandLanes*> aligned_new(sizeof(BandLanes))
    return band_lanes(m, band) != NULL


cdef void _free_bands(ModelState* m) noexcept nogil:
    cdef u32 band
    for band in range(1, BANDS):
        free(m.bands[band])


cdef void _release(ModelState* m) noexcept nogil:
    _free_bands(m)
    del m.replicas
    model_queue_free(&m.queue)
    replica_set_free(&m.replica_set)
    cost_batch_free(m.by_cost)
    free(m.refused)


cdef void model_state_clear(ModelState* m) noexcept nogil:
    """Clear a model. Its lists are empty and stay, so this needs no memory."""
    cdef u32 index = m.index
    cdef vector[u32]* replicas = m.replicas
    cdef vector[LanePointer]* lanes = m.queue.lanes
    cdef vector[GatePointer]* gates = m.queue.gates
    cdef vector[ReplicaPointer]* members = m.replica_set.members
    cdef vector[double]* free_us = m.replica_set.free_us
    cost_batch_free(m.by_cost)
    free(m.refused)
    free(m.queue.turns)
    _free_bands(m)
    memset(<void*> m, 0, sizeof(ModelState))
    m.index, m.replicas, m.queue.lanes, m.queue.gates = index, replicas, lanes, gates
    m.replica_set.members, m.replica_set.free_us = members, free_us
    replica_set_reset(&m.replica_set)


cdef void model_state_free(ModelState* m) noexcept nogil:
    _release(m)
    free(m)


cdef bint retired_models_init(RetiredModels* d) noexcept nogil:
    d.leaving = make[vector[Pointer]]()
    d.unused = spsc_new(UNUSED_MAX)
    return d.leaving != NULL and d.unused != NULL


cdef void retired_models_free(RetiredModels* d) noexcept nogil:
    del d.leaving
    spsc_free(d.unused)


cdef void model_drop(RetiredModels* d, ModelState* m) noexcept nogil:
    cdef u64 first = d.dropped.load(relaxed)
    m.next_dropped = first
    # what was submitted before is seen with it
    while not d.dropped.compare_exchange_strong(first, <u64> m, release):
        m.next_dropped = first


cdef bint _is_idle(Lane* lane) noexcept nogil:
    """Return whether no cell of the lane is in use, and the loop has read all rows."""
    return (lane == NULL or lane.dirty.load(acquire) == 0
            and lane.seen == lane.ring.cells.tail.load(relaxed)
            and lane.ring.cells.idle())


cdef void _free_lane(Lanes* lanes, Lane* lane) noexcept nogil:
    if lane == NULL:
        return
    # entries of the wheel that are left name nothing
    lanes.by_id[lane.id] = NULL
    lanes.unused.push(ticket_of(lane.id, lane.seen))        # there is space, as _give_back has
                                                            # checked
    lanes.live.fetch_sub(1, relaxed)
    del lane.retry
    ring_free(lane.ring)
    free(lane)


cdef bint _are_idle(const BandLanes* b, u32* count) noexcept nogil:
    """Return whether all lanes of a band are idle, and add how many there are."""
    cdef u32 i
    for i in range(LANE_CLASSES):
        if not (_is_idle(b.lanes[i]) and _is_idle(b.array_lanes[i])):
            return False
        count[0] += (b.lanes[i] != NULL) + (b.array_lanes[i] != NULL)
    return True


cdef void _free_lanes(Lanes* lanes, BandLanes* b) noexcept nogil:
    cdef u32 i
    for i in range(LANE_CLASSES):
        _free_lane(lanes, b.lanes[i])
        _free_lane(lanes, b.array_lanes[i])
        b.lanes[i] = b.array_lanes[i] = NULL


cdef bint _give_back(Lanes* lanes, ModelState* m) noexcept nogil:
    cdef u32 band, count = 0
    if not m.replicas.empty() or m.hot or m.waits:
        return False
    for band in range(BANDS):
        if band_lanes(m, band) != NULL and not _are_idle(band_lanes(m, band), &count):
            return False
    if lanes.unused.room() < count:
        return False
    m.queue.lanes.clear()
    m.queue.gates.clear()
    for band in range(BANDS):
        if band_lanes(m, band) != NULL:
            _free_lanes(lanes, band_lanes(m, band))
    return True


cdef void models_give_back(RetiredModels* d, Lanes* lanes) noexcept nogil:
    """Free dropped models. A new one waits for the next call: by then, commands from before it was
    dropped are applied."""
    cdef size_t i = 0
    cdef u64 at, following
    while i < d.leaving.size():
        if d.unused.room() and _give_back(lanes, <ModelState*> d.leaving[0][i]):
            d.unlisted.fetch_sub(1, relaxed)
            d.unused.push((<ModelState*> d.leaving[0][i]).index)
            d.leaving[0][i] = d.leaving.back()
            d.leaving.pop_back()
        else:
            i += 1
    at = d.dropped.exchange(0, acquire) if d.dropped.load(relaxed) else 0
    while at:
        following = (<ModelState*> at).next_dropped
        if make_room(d.leaving[0], d.leaving.size() + 1):
            d.leaving.push_back(<void*> at)
        else:
            model_drop(d, <ModelState*> at)             # found again at the next call
        at = following
