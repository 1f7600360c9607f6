"""Which replica, and what can be promised.

Rows go to the replica that is predicted to finish them first: the time it is busy yet plus its
batch's time. Equals take turns. Three things follow. Replicas of unequal speed get work by their
speed, as each is asked again when it is free. A row is not given to an idle slow replica when a
fast one will be free, and done, sooner; that is a matter of the last few rows only, so it holds
just while the fast one can take all that wait. And an estimate that nobody has tried for a second
counts as unknown, so that one which was slow once gets a row to show that it is not.

A replica whose model fails batch after batch is done sooner than any other, and must not be asked
first for that: after `eject_after` failures in a row it is left alone for a while, then gets a
single row as a probe; each probe that fails doubles the time. Its rows are tried once on another
replica. While nobody else takes rows, all this is forgotten: a model that fails all queries alike
says so, and does not become one that nobody serves.

A second batch goes behind one in flight when it is full, or large enough to be worth its fixed cost
(`batcher_second`): the container need not wait between batches, and pipelining does not make them
small.

Rows of long deadlines (an array's) would fill every batch, two in flight, and leave no room for a
query whose SLO is shorter than two batches and its own. While such queries are asked, refused ones
too, a batch that long rows fill takes a third of the tightest SLO, and none is sent behind another:
what comes waits for the rest of one, and has its own. Room that would cost more than half of the
rows is not kept: who asks for the impossible must not slow all others.

The forecast walks the queue batch by batch over the replicas as they come free. It is exact in what
it knows; what it does not know (pauses, rows that come meanwhile with earlier deadlines, how full
the last batch will be) is in the margin. Given up: a forecast by row (each is its batch's), and a
margin by class of SLO.
"""
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.machine cimport relaxed
from clipper_core.runtime.status cimport DEADLINE, DROPPED, FULL
from clipper_core.scheduling.admission cimport (
    Forecast, gate_close, gate_finish_us, gate_publish, margin_forget, margin_init, margin_learn,
    margin_now,
)
from clipper_core.scheduling.batcher cimport (
    Batcher, batcher_must_shed, batcher_predict_us, batcher_probe_us, batcher_room, batcher_rows,
    batcher_second, batcher_size, batcher_within, batcher_worst_us,
)
from clipper_core.scheduling.replica cimport IN_FLIGHT_MAX
from clipper_core.scheduling.task cimport SENT, WAITING, Task, lane_avoids, task_of, ticket_of

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
    """It may be given rows, more than a probe."""
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
    """An ejected replica whose time has passed, and which has no batch in hand; -1: none."""
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
    if r.in_flight >= IN_FLIGHT_MAX or r.connection.protocol != 2 or _beside_short(c, r):
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
    """Will a busy replica have done all that waits well before `by_us` from now? Not one that is
    later with what it has than its batches are in 99 of 100 cases."""
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
        if r.in_flight == 0:
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
    """Rows of a batch that leaves room for the tightest SLO; 0: no such room is kept, it would cost
    too much."""
    cdef const Batcher* b = &r.batcher
    cdef double time_us = LONG_SHARE * c.tight_us, one_us = batcher_worst_us(b, 1)
    if one_us <= 0 or one_us > time_us:     # unknown, or nobody of a short SLO asks, or no row of
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
    """Who would begin a batch of n next: the one that is done with it first."""
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


cdef u64 _walk(ReplicaSet* c, u64 ahead, u64 now_us, i32* lead) noexcept nogil:
    """Hand out `ahead` rows in full batches; -> what is left for the batch that a further row would
    join, which `lead` gets."""
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


cdef void replica_set_forecast(ReplicaSet* c, Lanes* lanes, Lane* lane, Gate* gate, u64 ahead,
                               u64 behind,
                        bint shown,
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
    f.unit_us = r.batcher.fit_b
    f.unit = r.batcher.unit
    f.probe_us = max(r.batcher.learned_us, r.busy_until_us) + batcher_probe_us(&r.batcher)
    if gate != NULL:
        gate_publish(gate, &f, margin, lane.seen, now_us)
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
    """A margin that a bad second taught shuts the door on those who come after it."""
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
