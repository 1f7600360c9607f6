# The replicas of one model: selects the one that gets the next rows, and forecasts how long a row
# that is submitted now will take.
#
# Threads: loop only. The atomics may be read by any thread.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport atomic, i32, u32, u64
from clipper_core.scheduling.admission cimport Gate, Margin
from clipper_core.scheduling.replica cimport Replica
from clipper_core.scheduling.task cimport Lane, Lanes, Tally

cdef struct Trial:              # the one row whose forecast is compared with its outcome
    u64 ticket                  # 0: none
    u64 made_us
    double forecast_us
    u64 drops                   # rows of the model dropped until then
    bint sent

ctypedef Replica* ReplicaPointer

cdef cppclass ReplicaSet:
    vector[Replica*]* members
    vector[double]* free_us     # scratch of the forecast: time from now until each replica is free
    u64 round                   # counts the rounds in which rows are handed out
    bint avoiding               # some replicas are ejected, others are not: the ejected ones get
                                # only probes
    u32 turn                    # index at which the search for a replica starts
    Margin margin
    Trial trial
    u64 speedups                # of the replicas until now
    u64 arrived                 # rows taken in or refused since `rated_us`
    u64 refused                 # rows refused at submission until now
    u64 rated_us
    double rate                 # recent rate of offered rows, per microsecond
    u64 tight_us                # the tightest recent SLO if rows of much longer SLOs wait, else 0
    u64 earliest_replica_us     # without a replica: none can connect before; 0: unknown
    # For snapshots: the forecast wait of a row of the tightest SLO, and that SLO.
    atomic[u64] delay_us
    atomic[u64] slo_us
    atomic[u64] margin_1000

# Allocate the lists of a zeroed object. False: no memory.
cdef bint replica_set_init(ReplicaSet* c) noexcept nogil
# Set all fields to zero but the (emptied) lists.
cdef void replica_set_reset(ReplicaSet* c) noexcept nogil
# Reserve memory for one more replica. False: no memory.
cdef bint replica_set_reserve(ReplicaSet* c) noexcept nogil
cdef void replica_set_free(ReplicaSet* c) noexcept nogil

# True: the replica may get rows at all.
cdef bint replica_accepts(const Replica* r) noexcept nogil
# Determine which replicas are ejected. Called before rows are handed out.
cdef void replica_set_update_ejections(ReplicaSet* c) noexcept nogil
# True: another replica may get the rows of `r`.
cdef bint replica_set_has_other(const ReplicaSet* c, const Replica* r) noexcept nogil
# True: the container of `r` has failed the rows at the head of the lane, and another may succeed.
cdef bint replica_set_must_pass(const ReplicaSet* c, const Replica* r,
                                const Lane* lane) noexcept nogil
# True: a row that is due then cannot finish in a batch of n on this replica.
cdef bint too_late(const Replica* r, u32 n, u64 due_us, u64 now_us) noexcept nogil
# True: another replica can finish it in time.
cdef bint another_can_finish(ReplicaSet* c, const Replica* r, u64 waiting, u64 due_us,
                             u64 now_us) noexcept nogil
# Return the index of the replica that is predicted to finish the next batch first. -1: none now;
# if *again_us is set, ask again at that time.
cdef i32 replica_set_pick(ReplicaSet* c, u64 waiting, u64 now_us, u64* again_us) noexcept nogil

# Return how many waiting rows the next batch of `r` takes; `tight` of them have the tightest SLO.
cdef u32 replica_set_batch_rows(const ReplicaSet* c, const Replica* r, u64 waiting,
                                u64 tight) noexcept nogil
cdef void replica_set_count_arrivals(ReplicaSet* c, u64 rows, u64 now_us) noexcept nogil
# Publish what a row submitted to this lane can expect. ahead: rows of all lanes that are due before
# it; behind: later rows that fill its batch. shown: publish in snapshots too; gate NULL: only
# there.
cdef void replica_set_forecast(ReplicaSet* c, Lanes* lanes, Lane* lane, Gate* gate, u64 ahead,
                               u64 behind, bint shown, u64 now_us) noexcept nogil
# Update the margin from the outcome of the row on trial, and the share of rows that was refused.
cdef void replica_set_learn(ReplicaSet* c, Lanes* lanes, Tally* tally, u64 now_us) noexcept nogil
