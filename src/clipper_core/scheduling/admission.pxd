# Admission decides whether a query that is submitted now can finish by its deadline. The loop
# publishes a forecast; submitters read it with a few relaxed loads and no locked instruction. A
# query that cannot finish is refused at once, so that its caller can use the time otherwise.
#
# Threads: gate_finish_us, gate_probe: any; gate_publish and everything about Margin: the loop.
# Source: docs/design.md, "Admission"; Clockwork (OSDI 2020) section 4, which refuses requests early
# that cannot meet their deadline.
from clipper_core.results.completion cimport Block
from clipper_core.runtime.machine cimport atomic, relaxed, u32, u64
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.lane cimport Lane, Lanes, lane_submit

cdef enum:
    PROBE_US = 100000           # after a row was admitted as a probe, no other one is for this
                                # long, unless there is a new forecast

cdef cppclass Gate:         # the published forecast of one SLO class. Its fields are read one by
                            # one; a mix of old and new values only makes the forecast less accurate
    atomic[u64] begin_us        # when the batch that the next row would join starts
    atomic[u64] base            # position in the lane of that batch's first row
    atomic[u64] probe_us        # from this time on one row may be admitted as a probe instead of
                                # refused
    atomic[u32] own_us          # duration of that batch, with the rows that will have joined it by
                                # then
    atomic[u32] row_1024        # additional time for each row from `base` on, in 1024ths of a
                                # microsecond
    atomic[u32] full_us         # upper limit: duration of a full batch
    atomic[u32] size            # rows of a full batch; 0: no replica is connected, nor will be
                                # before begin_us
    atomic[u64] refused_us      # when a row was last refused: refused rows count as traffic too
    atomic[u32] unit_2_20       # additional time for each unit of cost above the mean, in 2^-20 us
    atomic[u32] unit            # the mean cost of a row
    u64 pad                 # to 64 bytes, so that gates of other classes rarely share its cache
                            # line

cdef struct Forecast:
    double begin_us             # relative to now
    double own_us, row_us, full_us
    u64 ahead                   # rows of that batch that are queued already
    u32 size
    double unit_us, unit        # where rows differ in cost: time per unit, and mean cost of a row
    u64 probe_us                # an absolute time

cdef struct Margin:         # how much longer rows take than forecast: the 98th percentile of actual
                            # / forecast time
    double ratio
    u64 learned_us

cdef inline u64 gate_finish_us(Gate* g, u64 tail, u64 now_us) noexcept nogil:
    """Return when the row that gets position `tail` would have its prediction."""
    cdef u64 begin = g.begin_us.load(relaxed), rows = tail - g.base.load(relaxed)
    cdef u64 size = g.size.load(relaxed), full = g.full_us.load(relaxed), own
    if begin < now_us:
        begin = now_us
    if size == 0:
        return begin
    if rows >= size:            # a whole batch was queued since the last forecast, or `tail` is
                                # older than `base`
        if rows >> 63:
            rows = 0
        begin += rows // size * full
        rows %= size
    own = g.own_us.load(relaxed) + (rows * g.row_1024.load(relaxed) >> 10)
    return begin + (own if own < full else full)

cdef inline u64 gate_extra_us(Gate* g, u32 cost) noexcept nogil:
    """Return how much longer a batch takes for a row of this cost than for one of mean cost."""
    cdef u64 mean = g.unit.load(relaxed)
    return (cost - mean) * g.unit_2_20.load(relaxed) >> 20 if cost > mean else 0

# Publish a forecast to submitters. seen: position in the lane up to which the forecast's queue was
# counted.
cdef void gate_publish(Gate* g, const Forecast* f, double margin, u64 seen,
                       u64 now_us) noexcept nogil
# Publish that no replica is connected, nor will be before `until_us`; 0: unknown.
cdef void gate_close(Gate* g, u64 until_us) noexcept nogil
cdef bint gate_probe(Gate* g, u64 now_us) noexcept nogil         # True: admit this row as a probe
cdef void margin_init(Margin* m) noexcept nogil
cdef void margin_learn(Margin* m, double actual_us, double forecast_us, u64 now_us) noexcept nogil
# Reduce the margin: a replica has become faster, so what was learned while it was slow is obsolete.
cdef void margin_forget(Margin* m) noexcept nogil
# Return the margin, which tends to 1 while nothing is learned.
cdef double margin_now(Margin* m, u64 now_us) noexcept nogil

# -- Submit a row if its gate admits it, or if it may join an equal row.
#
# Threads: any.
#
# Submit a row that admission refuses. Return OK if an equal row may answer it, else FULL or
# NO_REPLICA.
cdef Status lane_offer_refused(Lanes* lanes, Lane* lane, Gate* gate, const void* row, u32 nbytes,
                               const Key* key, u64 salt,
                               u64 deadline_us, u64 now_us, Block* block, u32 slot) noexcept nogil
# As lane_offer, for rows that differ in cost.
cdef Status lane_offer_cost(Lanes* lanes, Lane* lane, Gate* gate, const void* row, u32 nbytes,
                            const Key* key, u64 salt, u64 deadline_us, u64 now_us, Block* block,
                            u32 slot, u32 cost) noexcept nogil
# Return after how many microseconds another try may succeed, 1 ms at least.
cdef u64 lane_wait_us(Lane* lane, Gate* gate, u64 deadline_us, u64 now_us) noexcept nogil


cdef inline Status lane_offer(Lanes* lanes, Lane* lane, Gate* gate, const void* row, u32 nbytes,
                              const Key* key, u64 salt,
                              u64 deadline_us, u64 now_us, Block* block, u32 slot) noexcept nogil:
    """Submit a row to its lane. Return OK, FULL or NO_REPLICA. key NULL: neither joined nor
    cached."""
    if gate_finish_us(gate, lane.ring.cells.tail.load(relaxed),
                      now_us) > deadline_us and not gate_probe(gate, now_us):
        return lane_offer_refused(lanes, lane, gate, row, nbytes, key, salt, deadline_us, now_us,
                                  block, slot)
    return lane_submit(lanes, lane, row, nbytes, key, block, slot, deadline_us, now_us, salt, 0, 0)
