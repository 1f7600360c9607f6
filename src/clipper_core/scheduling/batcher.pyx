"""Decides when to send a batch to one replica, and how large it is.

The replica is a line, L(n) = a + b n, that we see through noise, rare pauses, and steps (a
neighbour takes the core, the model is swapped). There are two estimates:

- *The limit*, how many rows a batch may hold. AIMD is the Clipper paper's, with TCP's slow start
  before it: growing by one row a batch takes thousands of batches where doubling takes eleven. As
  in TCP, slow start has a threshold to return to, here what the fit allows: after a recovery the
  limit doubles towards it instead of crawling. Such a jump needs `patience` clean batches, doubled
  whenever a jump ends in a miss, so that a model that is no line (a cliff at 512 rows) is not
  pushed over its cliff again and again. No step goes where the fit's mean is beyond the budget:
  every other batch would miss, and where the best size is 9 rows a row too many costs a tenth. A
  miss lowers the limit only if it is about the size: a batch of 3 that missed was paused, and must
  not shrink a limit of 800. The third miss in a row is no pause; from then on such misses halve the
  limit.
- *The fit*, kept in every mode because early drop needs it. Sums decay by 1/16 a batch. Three
  things make it hold:
  1. Outliers are clipped, not dropped: a lone 20 ms pause moves the line by 1/16 of its clip. Three
     in a row on one side are taken as a real change: the clips are taken back, the line is scaled
     by the median of their ratios (a slowdown scales both a and b) and relearns with a quarter of
     the old weight. Meanwhile n does not grow by leaps. Evidence that the replica is *fast* is used
     at once if the estimate is old: what ran in 1 ms can run in 1 ms, and an estimate that is too
     high would shed the very rows that could correct it.
  2. Under load every batch has the same n and the slope cannot be seen. A ridge holds it near its
     last value, so the line turns only when the data say so. Of budget that goes unused the held
     slope shrinks, by up to 1/32 a batch: optimism, so that larger batches are tried and the slope
     is seen again. Pessimism would never be corrected: nothing large would be sent.
  3. The P99 of the residual follows the pinball loss on the clipped residual. A pause that comes in
     2 % of batches of any size is not paid for by making all batches small.

QUANTILE descends the same loss for a whole line. n is divided by its mean and the step is a share
of the mean residual, so one rate fits models of 50 us and of 5 s. The line rides on the fit and
only its excess is descended to, within five mean residuals: at the 99th percentile descent moves
down by 1 % of a step, which alone would never come back from an error.

How much of the SLO: a row that arrives when a batch has just left waits for L(n), then takes L(n).
For both to fit, the P99's excess is reserved out of the SLO first and the rest is shared: a + b n
<= share (SLO - p99). Reserving all of it in each half would give some 3 % of goodput away. Where
the fixed cost nearly fills the share, that leaves next to no rows, and smaller batches do not help:
a batch gets at least 0.8 share of what one row alone leaves of the SLO. In simulation with a = 9
ms, b = 90 us, SLO 20 ms under overload that triples the goodput (batches of 48 rather than 11, 0.1
% of the answers late).

A second batch, behind one in flight, avoids that the container waits for the server, but its rows
did not wait for more rows. It goes when it is full, when its rows cost at most 2 % more than in a
full one, or when batches of its size keep up with what is offered, so that the queue would not fill
anyway. There is none while the size doubles, because it would have the old size.

Where rows differ in cost (model_state.pyx), the line is over the cost of the batch, and so is the
limit. Sizes in rows are for rows of mean cost.

A container that has run its model before it was ready reports how long batches of 1, 2, 4, ... rows
took. They are learned as if they had been answered (`batcher_seed`), so that the first burst finds
a limit and a forecast; the first SLO then reduces the limit to what fits it.

Given up: a second-order model (lines were straight in the paper's Figure 3), shrinking a batch to
save its oldest row (it collapses where big batches are the capacity; the head is shed instead), and
noise above 50 % of the mean, which is taken for steps.
"""
cimport cython
from libc.math cimport fabs
from libc.string cimport memcpy, memset

cdef enum:
    KNOWN = 3                # batches before an estimate is believed: the first ones warm the
                             # model's caches
    WARM = 8                 # while fewer, the slope is new, so surprises are wide
    SETTLED = 32             # batches before the P99 is followed by descent; till then it is thrice
                             # the mean residual
    RUN = 3                  # in a row: no accident
    PATIENCE = 4
    PATIENCE_MAX = 4096
    PROBE_US = 100000        # an estimate older than this lets one row through; a replica that was
                             # idle for as long as one row
    PROBE_US_MIN = 1000      # takes, does so sooner: half of its time is the most that a try may
                             # cost
    SLACK_US = 500           # a held batch leaves this much earlier than it must: the loop wakes
                             # late
    SECOND_ROWS_MIN = 64
    GROW_ROWS_MAX = 128
    BUCKETS = 24

cdef double DECAY = 15.0 / 16
cdef double RIDGE = 0.005    # of mean(n)^2: a spread of n below 7 % of its mean does not turn the
                             # line quickly
cdef double OPTIMISM = 1.0 / 32
cdef double CLIP = 0.5       # of the prediction: what lies further off is an outlier
cdef double ROOM = 1.1       # jump only if the fit allows this much more than the limit
cdef double SECOND = 1.02    # of what a row costs in a full batch: more is too much for a batch
                             # behind another
cdef double KEEPS_UP = 0.7     # of a replica's time; half of it at least must go into rows, not
                               # batches
cdef double TAU = 0.99
cdef double HUGE_US = 1e12
cdef double HUGE_COST = 4294967295.0
cdef double UNIT_DECAY = 1.0 / 32     # the mean cost of a row follows this share of each batch's
cdef double WIRE_US = 50        # a batch takes longer than its model: frames, wake-ups

cdef inline u32 _least(u32 x, u32 y) noexcept nogil:
    return x if x < y else y

cdef inline double _between(double low, double x, double high) noexcept nogil:
    return low if x < low else high if x > high else x

cdef inline double _rows(const Batcher* b, u32 n) noexcept nogil:
    """Return where on the line a batch of n rows lies: rows that the replica computes, or their
    cost."""
    if b.config.pad and b.config.mode == STATIC:
        return b.config.size_max
    return b.unit * (n if n else 1)

cdef inline bint _known(const Batcher* b) noexcept nogil:
    return b.batches >= KNOWN


cdef void batcher_init(Batcher* b, const BatcherConfig* config) noexcept nogil:
    memset(b, 0, sizeof(Batcher))
    b.config = config[0]
    b.config.size_max = config.size_max if config.size_max else 1
    b.config.step = config.step if config.step else 1
    b.config.backoff = config.backoff if 0 < config.backoff < 1 else 0.9
    b.config.budget_share = config.budget_share if 0 < config.budget_share <= 1 else 0.5
    b.unit = 1
    b.most = b.config.size_max
    if config.by_cost:
        b.most = config.cost_max if config.cost_max else HUGE_COST
    b.fits = b.most
    b.limit = b.most if b.config.mode == STATIC else 1
    b.slow_start = b.config.mode == AIMD
    b.patience = PATIENCE


# -- the size of the next batch

cdef u32 batcher_rows(const Batcher* b) noexcept nogil:
    if not b.config.by_cost:
        return <u32> b.limit
    return <u32> _between(1, b.limit / b.unit, b.config.size_max)


cdef u32 batcher_size(const Batcher* b, u32 queued) noexcept nogil:
    cdef u32 n = _least(queued, batcher_rows(b))
    return n if n else 1


cdef bint _growing(const Batcher* b) noexcept nogil:
    """The batch in flight, if it was full, will about double the limit. Above GROW_ROWS_MAX waiting
    gains little, and an array whose rows are all due together would lose its last and longest batch
    to a pause."""
    if b.limit >= min(b.most, GROW_ROWS_MAX * b.unit) or b.config.mode == STATIC:
        return False
    # near the budget a row would be promised the batch of now and sent in one twice as long
    if _known(b) and b.fit_a + 2 * b.fit_b * b.limit > 0.7 * _budget_us(b, b.slo_us):
        return False
    return b.slow_start if b.config.mode == AIMD else _room(b) >= 2 * b.limit


cdef bint batcher_second(const Batcher* b, u32 queued, double rate) noexcept nogil:
    """Return whether the batch would be full; or so large that a row costs nearly what it costs in
    a full one, or that such batches keep up with the rows offered."""
    if _growing(b):
        return False
    cdef u32 full = batcher_rows(b)
    if queued >= full:
        return True
    if not _known(b) or queued < SECOND_ROWS_MIN:
        return False
    cdef double slope = b.fit_b * b.unit, row_us = b.fit_a / queued + slope
    if row_us <= SECOND * (b.fit_a * b.unit / b.limit + slope):
        return True
    return slope * queued >= b.fit_a and row_us * rate <= KEEPS_UP


cdef double batcher_cost_predict_us(const Batcher* b, double cost) noexcept nogil:
    return b.fit_a + b.fit_b * cost if _known(b) else 0


cdef double batcher_cost_worst_us(const Batcher* b, double cost) noexcept nogil:
    if not _known(b):
        return 0
    if b.config.mode == QUANTILE:
        return b.q_a + b.q_b * cost
    return b.fit_a + b.fit_b * cost + b.residual_p99


cdef double batcher_predict_us(const Batcher* b, u32 n) noexcept nogil:
    return batcher_cost_predict_us(b, _rows(b, n))


cdef double batcher_worst_us(const Batcher* b, u32 n) noexcept nogil:
    return batcher_cost_worst_us(b, _rows(b, n))


cdef u32 batcher_within(const Batcher* b, double time_us) noexcept nogil:
    cdef u32 rows = batcher_rows(b)
    cdef double one = batcher_worst_us(b, 1), full = batcher_worst_us(b, rows)
    if full <= time_us:                 # unknown, too
        return rows
    return 1 if time_us <= one else 1 + <u32> ((rows - 1) * (time_us - one) / (full - one))


cdef bint batcher_must_shed(const Batcher* b, u64 now_us, u64 start_us, u32 n,
                            u64 deadline_us) noexcept nogil:
    return batcher_cost_must_shed(b, now_us, start_us, _rows(b, n), n <= 1, deadline_us)


cdef bint batcher_cost_must_shed(const Batcher* b, u64 now_us, u64 start_us, double cost,
                                 bint alone, u64 deadline_us) noexcept nogil:
    if deadline_us <= now_us:
        return True
    if deadline_us > start_us and batcher_cost_worst_us(b, cost) <= <double> (deadline_us
            - start_us):
        return False
    return not alone or now_us < b.learned_us + batcher_probe_us(b)


cdef u64 batcher_probe_us(const Batcher* b) noexcept nogil:
    return <u64> _between(PROBE_US_MIN, batcher_predict_us(b, 1), PROBE_US)


cdef u64 batcher_hold_until(const Batcher* b, u32 queued, u64 oldest_us,
                            u64 deadline_us) noexcept nogil:
    cdef u32 full = batcher_rows(b)
    if (b.config.delay_us == 0 or queued >= full or not _known(b)
        or deadline_us <= oldest_us):
        return 0
    # The batch may fill while it waits, so it is the full one that must still make it.
    cdef double spare = <double> (deadline_us - oldest_us) - batcher_worst_us(b, full) - SLACK_US
    if spare < 1:
        return 0
    return oldest_us + (b.config.delay_us if spare > b.config.delay_us else <u64> spare)


# -- the fit

cdef double _median3(const double* x) noexcept nogil:
    cdef double low = x[0] if x[0] < x[1] else x[1]
    cdef double high = x[1] if x[0] < x[1] else x[0]
    return _between(low, x[2], high)


cdef void _rescale(Batcher* b, double ratio) noexcept nogil:
    """The replica's speed has changed: so has the whole line, and what was seen before counts for a
    quarter."""
    cdef int i
    b.fit_a *= ratio
    b.fit_b *= ratio
    b.q_a *= ratio
    b.q_b *= ratio
    b.residual_p99 *= ratio
    b.deviation_us *= ratio
    b.sums[2] *= ratio
    b.sums[4] *= ratio
    for i in range(5):
        b.sums[i] *= 0.25
    if b.settled > WARM:
        b.settled = WARM
    b.speedups += ratio < 1
    b.outliers = 0
    b.side = 0


cdef void _remember(Batcher* b) noexcept nogil:
    memcpy(b.before, b.sums, sizeof(b.sums))
    b.before[5] = b.fit_a
    b.before[6] = b.fit_b
    b.before[7] = b.deviation_us


cdef void _take_back(Batcher* b) noexcept nogil:
    """Restore the state before the first outlier of this run: the clipped values were true, so the
    clips are no data."""
    memcpy(b.sums, b.before, sizeof(b.sums))
    b.q_a += b.before[5] - b.fit_a
    b.q_b += b.before[6] - b.fit_b
    b.fit_a = b.before[5]
    b.fit_b = b.before[6]
    b.deviation_us = b.before[7]


cdef double _clipped(const Batcher* b, double n, double y) noexcept nogil:
    cdef double line = b.fit_a + b.fit_b * n
    cdef double above = line * (2 if b.settled < WARM else CLIP)
    if above < 4 * b.deviation_us:
        above = 4 * b.deviation_us
    return _between(line * CLIP, y, line + above)


cdef double _believed(Batcher* b, double n, double y, bint stale) noexcept nogil:
    """The latency to learn from: y, or its clip where y is an outlier and not yet the third in a
    row."""
    cdef double line = b.fit_a + b.fit_b * n
    cdef double clipped = _clipped(b, n, y)
    cdef i32 side = 1 if y > clipped else -1 if y < clipped else 0
    if side != b.side:
        b.outliers = 0
        b.side = side
    if side == 0:
        return y
    b.ratios[b.outliers] = y / (line if line > 1 else 1)
    b.outliers += 1
    if b.outliers == 1:
        _remember(b)
    if side < 0 and (stale or b.batches <= KNOWN):
        _rescale(b, b.ratios[b.outliers - 1])
    elif b.outliers == RUN:
        _take_back(b)
        _rescale(b, _median3(b.ratios))
    return _clipped(b, n, y)


cdef void _learn_residual(Batcher* b, double residual) noexcept nogil:
    cdef double weight = 1.0 / (b.settled
                                + 2) if b.settled < 14 else 1 - DECAY, off = fabs(residual)
    if b.settled >= WARM and off > 4 * b.deviation_us:
        off = 4 * b.deviation_us
    b.deviation_us += weight * (off - b.deviation_us)
    if b.deviation_us < 1:
        b.deviation_us = 1
    if b.settled < SETTLED:
        b.residual_p99 = 3 * b.deviation_us
        b.settled += 1
        return
    b.residual_p99 += 0.5 * b.deviation_us * (TAU if residual > b.residual_p99 else TAU - 1)
    b.residual_p99 = _between(0, b.residual_p99, 5 * b.deviation_us)


cdef void _learn_sums(Batcher* b, double n, double y) noexcept nogil:
    cdef int i
    for i in range(5):
        b.sums[i] *= DECAY
    b.sums[0] += 1
    b.sums[1] += n
    b.sums[2] += y
    b.sums[3] += n * n
    b.sums[4] += n * y


cdef void _solve(Batcher* b) noexcept nogil:
    cdef double n = b.sums[1] / b.sums[0], y = b.sums[2] / b.sums[0]
    cdef double spread = b.sums[3] / b.sums[0] - n * n, ridge = RIDGE * n * n
    if spread < 0:
        spread = 0
    cdef double held = b.fit_b * (1 - OPTIMISM * _between(0, 1 - y / _budget_us(b, b.slo_us), 1))
    cdef double slope = (b.sums[4] / b.sums[0] - n * y + ridge * held) / (spread + ridge)
    b.fit_b = _between(0, slope, y / n)       # neither a nor b is ever negative, so neither is a
                                              # prediction
    b.fit_a = y - b.fit_b * n
    if b.fit_a < 0:
        b.fit_a = 0


cdef void _learn_fit(Batcher* b, double n, double y, bint stale) noexcept nogil:
    if b.batches == 1:                        # all of it fixed cost: optimistic, so that a second
                                              # row is tried
        b.fit_a = y
        b.deviation_us = 1 + y / 8
    y = _believed(b, n, y, stale)
    _learn_residual(b, y - b.fit_a - b.fit_b * n)
    _learn_sums(b, n, y)
    _learn_quantile(b, n, y)
    cdef double a = b.fit_a, slope = b.fit_b
    _solve(b)
    b.q_a += b.fit_a - a
    b.q_b += b.fit_b - slope


cdef void _learn_quantile(Batcher* b, double n, double y) noexcept nogil:
    if b.settled < SETTLED:
        b.q_a = b.fit_a + b.residual_p99
        b.q_b = b.fit_b
        return
    cdef double unit = b.sums[1] / b.sums[0]
    cdef double rate = 0.25 * b.deviation_us * (TAU if y > b.q_a + b.q_b * n else TAU - 1)
    cdef double excess = b.q_b - b.fit_b + rate * _between(0, n / unit, 2) / unit
    b.q_a = b.fit_a + _between(0, b.q_a - b.fit_a + rate, 5 * b.deviation_us)
    b.q_b = b.fit_b + _between(0, excess, 5 * b.deviation_us / unit)


# -- the limit

cdef double _budget_us(const Batcher* b, double slo_us) noexcept nogil:
    cdef double share = slo_us * b.config.budget_share, alone = b.fit_a + b.fit_b * b.unit
    if not _known(b):
        return share
    if alone >= slo_us:
        return slo_us
    cdef double rest = alone + 0.8 * b.config.budget_share * (slo_us - alone)
    return rest if rest > share else share


cdef double batcher_room(const Batcher* b) noexcept nogil:
    return _room(b) / b.unit


cdef double _room(const Batcher* b) noexcept nogil:
    """Return the largest batch, in rows or units, that is within the budget by the estimate."""
    if not _known(b):
        return b.most
    # QUANTILE's line has its own excess at each n; of it, too, a batch pays its share
    cdef double share = b.config.budget_share, left = _budget_us(b,
            b.slo_us) - b.fit_a, slope = b.fit_b
    if b.config.mode == QUANTILE:
        left -= share * (b.q_a - b.fit_a)
        slope += share * (b.q_b - b.fit_b)
    else:
        left -= share * b.residual_p99
    if left <= slope * b.unit:
        return b.unit
    return b.most if slope * b.most <= left else left / slope


cdef void _decrease(Batcher* b, double n) noexcept nogil:
    b.missed += 1
    b.clean = 0
    if 2.0 * n >= b.limit:
        b.limit *= b.config.backoff
    elif b.missed >= RUN:
        b.limit = b.limit / 2 if b.limit / 2 > n else n
    else:
        return
    b.slow_start = False
    if b.jumped:
        b.jumped = False
        b.patience = _least(b.patience * 2, PATIENCE_MAX)


cdef void _increase(Batcher* b, double n, bint full) noexcept nogil:
    b.missed = 0
    b.clean += 1
    if not full:
        return
    if b.jumped:
        b.jumped = False
        b.patience = b.patience / 2 if b.patience > 2 * PATIENCE else PATIENCE
    cdef double room = _room(b)
    if b.slow_start:
        b.limit = 2 * (n if b.config.by_cost and n > b.limit else b.limit)
    elif b.side == 0 and b.clean >= b.patience and room >= ROOM * b.limit:
        b.limit = _between(1, room, 2 * b.limit)
        b.jumped = True
    elif b.side or b.fit_a + b.fit_b * (b.limit
            + b.config.step * b.unit) <= _budget_us(b, b.slo_us):
        b.limit += b.config.step * b.unit   # not to a size that is predicted to miss every other
                                            # time


cdef void _follow(Batcher* b, double n) noexcept nogil:
    """Set the limit in the modes FIT and QUANTILE: down at once; up to twice the rows of this
    batch, as larger batches were not seen.

    Not up in a run of outliers: a new n on top of a new speed would hide the speed from the fit."""
    cdef double room = _room(b)
    if room < b.limit:
        b.limit = room
    elif b.side == 0 or b.settled < WARM:
        b.limit = max(b.limit, min(room, 2.0 * n))


# -- learning

cdef void _learn_profile(Batcher* b, u32 n, double y) noexcept nogil:
    cdef u32 bucket = 0
    while bucket < BUCKETS - 1 and n >> (bucket + 1):
        bucket += 1
    b.profile_n[bucket] += 1
    b.profile_us[bucket] += (y - b.profile_us[bucket]) / (b.profile_n[bucket]
                                                          if b.profile_n[bucket] < 16 else 16)


cdef void batcher_learn(Batcher* b, u32 n, double service_us, double slo_us,
                        u64 now_us) noexcept nogil:
    _learn(b, <u32> _rows(b, n), _rows(b, n), n if n else 1, n >= <u32> b.limit, service_us, slo_us,
           now_us)


cdef void batcher_cost_learn(Batcher* b, u32 n, double cost, bint full, double service_us,
                             double slo_us, u64 now_us) noexcept nogil:
    cdef double mean = cost / (n if n else 1)
    b.unit += (mean - b.unit) * (1 if b.batches == 0 else max(UNIT_DECAY, 1.0 / (b.batches + 1)))
    b.unit = max(b.unit, 1.0)
    _learn(b, n, cost, cost, full or cost >= b.limit, service_us, slo_us, now_us)


cdef void _learn(Batcher* b, u32 rows, double n, double held, bint full, double service_us,
                 double slo_us, u64 now_us) noexcept nogil:
    """A batch that lies at n on the line took service_us. rows: for the profile; held: what it
    held, without rows that fill it up."""
    if not service_us >= 0:                   # also refuses a NaN
        return
    cdef double y = _between(0, service_us, HUGE_US), slo = _between(1, slo_us, HUGE_US)
    b.batches += 1
    b.slo_us = slo if b.batches == 1 else _between(0, slo, b.slo_us * (1 + 1.0 / 64))
    _learn_profile(b, rows, y)
    _learn_fit(b, n, y, now_us > b.learned_us + PROBE_US)
    b.learned_us = now_us
    cdef bint missed = y > _budget_us(b, slo)
    b.misses += missed
    if b.config.mode == AIMD and missed:
        _decrease(b, held)
    elif b.config.mode == AIMD:
        _increase(b, held, full)
    elif b.config.mode != STATIC:
        _follow(b, held)
    b.fits = _between(0, b.fits * (1 + 1.0 / 64), b.most)
    b.limit = _between(1, b.limit, b.fits)


cdef void batcher_fits(Batcher* b, u32 rows) noexcept nogil:
    if b.config.mode == STATIC:
        return
    b.fits = max(1.0, b.unit * rows)
    b.slow_start = False
    b.limit = min(b.limit, b.fits)


cdef void batcher_seed(Batcher* b, const Timing* timing, u64 now_us) noexcept nogil:
    """Learn a timing of the warm-up as a batch in time, whatever the SLO will be: the limit grows
    as in a slow start."""
    cdef double time_us = timing.time_us + WIRE_US
    if not b.config.by_cost:
        batcher_learn(b, timing.rows, time_us, HUGE_US, now_us)
    elif timing.cost > 0:
        batcher_cost_learn(b, timing.rows, timing.cost, True, time_us, HUGE_US, now_us)
    else:
        return
    b.seeded = True


cdef void batcher_know_slo(Batcher* b, double slo_us) noexcept nogil:
    b.seeded = False
    b.slo_us = _between(1, slo_us, HUGE_US)
    if b.config.mode == STATIC:
        return
    cdef double room = _room(b)
    if room < b.limit:
        b.limit = _between(1, room, b.limit)
        b.slow_start = False


# -- the Python interface

_MODES = {"aimd": AIMD, "fit": FIT, "quantile": QUANTILE, "static": STATIC}


@cython.final
cdef class BatchSizer:
    """The batcher of one replica, for tests, simulations and latency profiles. Threads: one at a
    time.

    `mode` is "aimd", "fit", "quantile" or "static"; sizes are rows, times microseconds on one
    clock. by_cost: batches are measured in cost; `limit` is of cost then, `cost_max` at most (0: no
    bound). Raises ValueError for a setting out of its range. Source: Clipper (NSDI 2017) section
    4.3; see docs/design.md for early drop.
    """
    cdef Batcher state

    def __init__(self, str mode="aimd", *, unsigned int size_max=4096, unsigned int step=1,
                 double backoff=0.9,
                 unsigned int delay_us=0, double budget_share=0.5, bint pad=False,
                 bint by_cost=False, unsigned int cost_max=0):
        if mode not in _MODES:
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(_MODES)}")
        if size_max < 1 or step < 1:
            raise ValueError(f"size_max is {size_max} and step {step} rows; both must be at least "
                             f"1")
        if not 0 < backoff < 1:
            raise ValueError(f"backoff is {backoff}; it must lie between 0 and 1")
        if not 0 < budget_share <= 1:
            raise ValueError(f"budget_share is {budget_share}; it must lie above 0 and not above 1")
        cdef BatcherConfig config
        config.mode = _MODES[mode]
        config.size_max = size_max
        config.step = step
        config.backoff = backoff
        config.delay_us = delay_us
        config.budget_share = budget_share
        config.pad = pad
        config.by_cost = by_cost
        config.cost_max = cost_max
        batcher_init(&self.state, &config)

    def size(self, unsigned int queued):
        """Return the number of rows to take now, of `queued` waiting."""
        return batcher_size(&self.state, queued)

    def second(self, unsigned int queued, double rate):
        """Return whether `queued` rows are worth a batch of their own behind one in flight, `rate`
        rows a microsecond being offered."""
        return bool(batcher_second(&self.state, queued, rate))

    def predict(self, unsigned int n):
        """Return the expected service time of n rows, us; 0 while unknown."""
        return batcher_predict_us(&self.state, n)

    def worst(self, unsigned int n):
        """Return the P99 of the service time of n rows, us; 0 while unknown."""
        return batcher_worst_us(&self.state, n)

    def must_shed(self, u64 now_us, u64 start_us, unsigned int n, u64 deadline_us):
        """Return whether a row due at `deadline_us` cannot finish in a batch of n that starts at
        `start_us`."""
        return bool(batcher_must_shed(&self.state, now_us, start_us, n, deadline_us))

    def hold_until(self, unsigned int queued, u64 oldest_us, u64 deadline_us):
        """Return 0 to send now; else the time until which a batch that is not full should wait."""
        return batcher_hold_until(&self.state, queued, oldest_us, deadline_us)

    def learn(self, unsigned int n, double service_us, double slo_us, u64 now_us):
        """Learn that n rows took `service_us`, known at `now_us`. `slo_us` is the tightest SLO in
        the batch."""
        batcher_learn(&self.state, n, service_us, slo_us, now_us)

    def learn_cost(self, unsigned int n, double cost, bint full, double service_us, double slo_us,
                   u64 now_us):
        """Learn that n rows that together cost `cost` took `service_us`. full: a row was left out
        because of the limit. For a sizer with `by_cost`."""
        batcher_cost_learn(&self.state, n, cost, full, service_us, slo_us, now_us)

    def predict_cost(self, double cost):
        """Return the expected service time of a batch of that cost, us; 0 while unknown."""
        return batcher_cost_predict_us(&self.state, cost)

    def seed(self, unsigned int n, double model_us, u64 now_us, double cost=0):
        """Learn that the model took `model_us` for n rows, of that cost, in the container's
        warm-up; before the first batch, the smallest n first."""
        cdef Timing timing
        timing.rows = n
        timing.time_us = <float> model_us
        timing.cost = cost
        batcher_seed(&self.state, &timing, now_us)

    def fits(self, unsigned int rows):
        """Learn that the outputs of a batch did not fit into one reply, and that `rows` of its rows
        did."""
        batcher_fits(&self.state, rows)

    def know_slo(self, double slo_us):
        """Set the first SLO of queries after the warm-up."""
        batcher_know_slo(&self.state, slo_us)

    def profile(self):
        """The latency profile: (n, mean us, batches) for each power of two; n stands for [n, 2
        n)."""
        return [(1 << i, self.state.profile_us[i], self.state.profile_n[i]) for i in range(BUCKETS)
                if self.state.profile_n[i]]

    @property
    def limit(self):
        """Current maximum batch size, rows or cost; a real number, as steps may be fractions."""
        return self.state.limit

    @property
    def unit(self):
        """Mean cost of a row; 1 where rows are counted."""
        return self.state.unit

    @property
    def slow_start(self):
        """True if AIMD still doubles."""
        return bool(self.state.slow_start)

    @property
    def room(self):
        """The most rows that the estimate puts within the budget."""
        return batcher_room(&self.state)

    @property
    def batches(self):
        return self.state.batches

    @property
    def misses(self):
        return self.state.misses

    @property
    def outliers(self):
        """Outliers in a row so far; the third is believed and ends the run."""
        return self.state.outliers

    @property
    def fit(self):
        """(a, b, p99): L(n) = a + b n, us, and the P99 of its residual."""
        return self.state.fit_a, self.state.fit_b, self.state.residual_p99

    @property
    def quantile(self):
        """(a, b) of the P99 line, us."""
        return self.state.q_a, self.state.q_b
