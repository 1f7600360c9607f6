# Decides how many rows to send to one replica, and when. Pure arithmetic: no queue, no clock, no
# socket.
#
# A batch is measured in rows, or where the model has a cost (model_state.pxd) in units of it: then
# `limit`, the fit and everything inside is in units; a number of rows counts each as
# `unit`, the mean cost of a row.
#
# Threads: loop only. One Batcher per replica; the engine gets a size, sends, and reports how long
# the batch took. Sources: Clipper paper section 4.3 (AIMD, quantile regression, delayed batching);
# docs/design.md for slow start and early drop. Why the estimates are as they are: the essay in
# batcher.pyx.
from clipper_core.runtime.machine cimport i32, u32, u64

cpdef enum BatchingMode:
    AIMD = 0          # slow start (x2) until the first miss, then + step per full batch, x backoff
                      # on a miss
    FIT = 1           # exponentially weighted fit L(n) = a + b n, P99 of its residual; largest n
                      # within the budget
    QUANTILE = 2      # P99 quantile regression of latency on n (pinball loss); largest n within the
                      # budget
    STATIC = 3        # always size_max (rows are padded to it by the sender when `pad` is set)

cdef struct BatcherConfig:   # a zero in step, backoff, budget_share or size_max means its default
                             # (1, 0.9, 0.5, 1)
    u32 mode
    u32 size_max                # never more rows than this in one batch
    u32 step                    # AIMD additive step, rows
    double backoff              # AIMD multiplicative factor on a miss, 0.9
    u32 delay_us                # hold a batch that is not full up to this long, 0-2000
    double budget_share         # share of the SLO that one batch may take, 0.5
    bint pad
    bint by_cost                # batches are measured in units of cost
    u32 cost_max                # of a batch; 0: no bound

cdef enum:
    TIMINGS_MAX = 32

cdef struct Timing:          # of a batch that the container ran before it was ready
    u32 rows
    float time_us
    double cost                 # of its rows; 0: unknown

cdef struct Batcher:
    BatcherConfig config
    double limit                # current maximum batch size, in rows or units; a real number,
                                # because steps may be fractions
    double most                 # the limit never exceeds this
    double fits                 # nor this: rows (or units) whose outputs fit into one reply, by
                                # the last batch of which they did not; rises by at most 1/64 per
                                # batch
    double unit                 # mean cost of recent rows; 1 where rows are counted
    bint slow_start
    bint seeded                 # the estimates are those of the warm-up; no SLO is known yet
    u64 batches, misses
    u64 learned_us              # when the last batch was learned: an old estimate is probed before
                                # it is used
    double slo_us               # tightest recent SLO; rises by at most 1/64 per batch
    # AIMD
    u32 clean, missed           # batches in a row within the budget; beyond it
    u32 patience                # clean batches before the limit may jump to what the fit allows
    bint jumped              # the last growth was such a jump, and no full batch has confirmed it
    # the fit
    double fit_a, fit_b         # L(n) = a + b n, us, exponentially weighted
    double residual_p99         # us above the fit that 1 batch in 100 exceeds
    double deviation_us         # mean |residual|
    double sums[5]              # the fit's weighted sums: 1, n, y, n n, n y
    u32 settled                 # batches since the fit began or was rescaled
    u32 speedups                # times that the fit was rescaled to a faster replica
    u32 outliers                # outliers in a row on the same side
    i32 side                    # of the last one: +1 slow, -1 fast, 0 none
    double ratios[3]            # their latency / prediction
    double before[8]            # sums, a, b and deviation before the first of them
    double q_a, q_b             # P99 quantile regression
    double profile_us[24]       # weighted mean service time by log2(n): the latency profile
    u64 profile_n[24]           # batches seen by log2(n)

cdef void batcher_init(Batcher* b, const BatcherConfig* config) noexcept nogil
# Return the number of rows to take now, of `queued` waiting; at least 1.
cdef u32 batcher_size(const Batcher* b, u32 queued) noexcept nogil
# Return whether to send `queued` rows as a second batch behind one in flight. rate: offered rows
# per microsecond.
cdef bint batcher_second(const Batcher* b, u32 queued, double rate) noexcept nogil
# Return the most rows whose batch is within the budget by the estimate, whatever the limit.
cdef double batcher_room(const Batcher* b) noexcept nogil
# Return the most rows whose batch takes no longer than `time_us` in 99 of 100 cases, at least 1;
# the limit while that is unknown.
cdef u32 batcher_within(const Batcher* b, double time_us) noexcept nogil
# Return the expected service time of n rows; 0 while it is unknown, which is for three batches.
cdef double batcher_predict_us(const Batcher* b, u32 n) noexcept nogil
# Return the P99 of the service time of n rows; 0 while it is unknown.
cdef double batcher_worst_us(const Batcher* b, u32 n) noexcept nogil
# Return whether a row due at deadline_us cannot finish in a batch of n that starts at start_us,
# which is not before now_us. A batch of one row is not shed while nothing was learned for
# batcher_probe_us before now_us, so that a wrong estimate does not shed everything forever.
cdef bint batcher_must_shed(const Batcher* b, u64 now_us, u64 start_us, u32 n,
                            u64 deadline_us) noexcept nogil
# Return the time of one row in microseconds, at least 1 ms and at most 100 ms.
cdef u64 batcher_probe_us(const Batcher* b) noexcept nogil
# Return 0 to send now; else the time until which a batch that is not full should wait for more
# rows. That time may have passed.
cdef u64 batcher_hold_until(const Batcher* b, u32 queued, u64 oldest_us,
                            u64 deadline_us) noexcept nogil
# Learn, before the first batch, what the container measured in its warm-up. Smallest n first. A
# batch of unknown cost is ignored where costs are counted.
cdef void batcher_seed(Batcher* b, const Timing* timing, u64 now_us) noexcept nogil
# Learn that the outputs of a batch did not fit into one reply, and that `rows` of its rows did. So
# the limit falls, and what a container must hold at once is bounded; not of STATIC.
cdef void batcher_fits(Batcher* b, u32 rows) noexcept nogil
# Set the first SLO after batcher_seed: it determines what is within the budget.
cdef void batcher_know_slo(Batcher* b, double slo_us) noexcept nogil
# Learn that n rows took service_us, known at now_us. slo_us is the tightest SLO in the batch. A
# miss is service_us > slo_us * budget_share (a longer budget where one row alone takes more than a
# third of that share).
cdef void batcher_learn(Batcher* b, u32 n, double service_us, double slo_us,
                        u64 now_us) noexcept nogil

# Return the rows of a full batch: the limit; with costs, for rows of mean cost.
cdef u32 batcher_rows(const Batcher* b) noexcept nogil
# As batcher_predict_us and batcher_worst_us, for a batch of that cost.
cdef double batcher_cost_predict_us(const Batcher* b, double cost) noexcept nogil
cdef double batcher_cost_worst_us(const Batcher* b, double cost) noexcept nogil
# As batcher_must_shed, for a batch of that cost. alone: it has one row.
cdef bint batcher_cost_must_shed(const Batcher* b, u64 now_us, u64 start_us, double cost,
                                 bint alone, u64 deadline_us) noexcept nogil
# As batcher_learn, for n rows of that cost. full: a row was left out because of the limit.
cdef void batcher_cost_learn(Batcher* b, u32 n, double cost, bint full, double service_us,
                             double slo_us, u64 now_us) noexcept nogil
