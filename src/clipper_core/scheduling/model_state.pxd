# One model as the engine sees it: the type of its rows, its lanes, counters and replicas; and how
# they are freed once no query can use them any more.
#
# The loop checks dropped models from time to time. When one has no replica, and all cells of its
# lanes are free, its lanes are freed, and their ids and its own number may be used again. A lane
# that gets an id of an old one continues its positions, so a ticket never identifies two tasks. The
# state itself is freed with the engine only, so a late update of a counter does no harm.
#
# Threads: model_drop: any; models_give_back: the loop; all else: under the GIL.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport atomic, i32, u32, u64, u8
from clipper_core.runtime.ring cimport Spsc
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.admission cimport Gate, Margin
from clipper_core.scheduling.bands cimport BandTurns
from clipper_core.scheduling.batcher cimport Batcher
from clipper_core.scheduling.lane cimport Lane, Lanes, Tally
from clipper_core.scheduling.refused_rows cimport RefusedRows
from clipper_core.scheduling.replica cimport Replica, RowSpec

# -- The rows that wait for one model: its lanes that have had rows. Each lane is a class of SLO of
# one band, of single queries or of arrays.
#
# Threads: loop only.
ctypedef Lane* LanePointer
ctypedef Gate* GatePointer

cdef cppclass ModelQueue:
    vector[Lane*]* lanes
    vector[Gate*]* gates        # in the order of the lanes; NULL: NULL for lanes of arrays
    BandTurns* turns            # NULL: all lanes are of band 0

# Allocate the lists of a zeroed object. False: no memory.
cdef bint model_queue_init(ModelQueue* d) noexcept nogil
cdef void model_queue_free(ModelQueue* d) noexcept nogil
# False: no memory.
cdef bint model_queue_add(ModelQueue* d, Lane* lane, Gate* gate) noexcept nogil

# Return the number of rows that wait.
cdef u64 model_queue_waiting(const ModelQueue* d) noexcept nogil
# Return whether lane i was used recently: rows arrived, wait, or were refused.
cdef bint model_queue_is_active(const ModelQueue* d, size_t i, u64 now_us) noexcept nogil
# Return the tightest SLO of the active lanes; no batch may make their rows late.
cdef u64 model_queue_slo_us(const ModelQueue* d, u64 now_us) noexcept nogil
# Return how many rows of the tightest SLO wait. *slo_us: that SLO if rows of much longer SLOs wait
# too, else 0.
cdef u64 model_queue_tightest(const ModelQueue* d, u64 now_us, u64* slo_us) noexcept nogil
# Return the lane whose first row is due first, and the row's ticket. NULL: no row waits.
cdef Lane* model_queue_earliest(ModelQueue* d, Lanes* lanes, u64* ticket) noexcept nogil
# Return the lane whose first row goes next, and the row's ticket: of the band whose turn it is, the
# one that is due first. NULL: no row waits.
cdef Lane* model_queue_next(ModelQueue* d, Lanes* lanes, u64* ticket) noexcept nogil
# Return how many rows of the lane that model_queue_next returned go before another band's.
cdef u32 model_queue_at_once(const ModelQueue* d) noexcept nogil
# Count rows of that lane as sent. rows: as of band_turns_charge
cdef void model_queue_charge(ModelQueue* d, Lanes* lanes, const Lane* lane,
                             double rows) noexcept nogil
# End the waiting rows that are due before `before_us`. A row behind a later one of its lane stays.
cdef void model_queue_end_before(ModelQueue* d, Lanes* lanes, u64 before_us, Status status,
                                 u64 now_us) noexcept nogil
# Return how many rows of all lanes go before one that is submitted to this lane now, assuming that
# the rows of a lane came at an even rate. speed: rows per microsecond that the replicas can do.
cdef u64 model_queue_ahead(ModelQueue* d, Lanes* lanes, const Lane* lane, double speed,
                           u64 now_us) noexcept nogil
# Return whether rows of a higher priority than this lane's were sent lately, or wait.
cdef bint model_queue_is_behind(const ModelQueue* d, const Lane* lane) noexcept nogil

# -- The replicas of one model: which one gets the next rows, and how long a row that is submitted
# now will take.
#
# Threads: loop only. The atomics may be read by any thread.
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
    u64 round                   # counts the rounds in which rows are distributed
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
    u64 earliest_replica_us     # while no replica is connected: time before which none can connect;
                                # 0: unknown
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
# Determine which replicas are ejected. Called before rows are distributed.
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
# Return the index of the replica that is predicted to finish the next batch first; -1 if none can
# take it now. If *again_us is set, call again at that time.
cdef i32 replica_set_pick(ReplicaSet* c, u64 waiting, u64 now_us, u64* again_us) noexcept nogil

# Return how many waiting rows the next batch of `r` takes; `tight` of them have the tightest SLO.
cdef u32 replica_set_batch_rows(const ReplicaSet* c, const Replica* r, u64 waiting,
                                u64 tight) noexcept nogil
# Return how many rows per microsecond all replicas can do in full batches; 0: unknown.
cdef double replica_set_speed(const ReplicaSet* c) noexcept nogil
cdef void replica_set_count_arrivals(ReplicaSet* c, u64 rows, u64 now_us) noexcept nogil
# Publish the forecast for a row that is submitted to this lane. ahead: rows of all lanes that are
# due before it; behind: later rows that fill its batch. shown: publish in snapshots too; gate NULL:
# only there. steady: nothing overtakes its rows, so one of them may be on trial.
cdef void replica_set_forecast(ReplicaSet* c, Lanes* lanes, Lane* lane, Gate* gate, u64 ahead,
                               u64 behind, bint shown, bint steady, u64 now_us) noexcept nogil
# Update the margin from the outcome of the row on trial, and the share of rows that was refused.
cdef void replica_set_learn(ReplicaSet* c, Lanes* lanes, Tally* tally, u64 now_us) noexcept nogil

# -- Batches of rows that differ in cost: the cost of a row, and the choice of the waiting rows for
# the next batch.
#
# The cost of a row is its bytes, its length, or what the caller gave, in whole units, 1 at least. A
# batch costs the sum of its rows; with `padded`, the number of its rows times the highest cost,
# because the model pads all rows to the longest.
#
# Threads: row_cost: any; everything else: the loop.
cdef enum CostKind:
    COST_BYTES = 1              # bytes of the row as it is sent
    COST_LENGTH = 2             # its number of elements; for str and bytes, of bytes
    COST_GIVEN = 3              # given by the caller with each row

cdef struct Candidate:          # a row that may go into the batch
    u64 ticket
    u64 due_us
    u32 cost
    bint must                   # it is due before the batch after this one could finish
    bint chosen

cdef struct Choice:             # the rows of the batch: the candidates that are `chosen`
    u32 n
    double cost                 # of the batch, with padding
    double useful               # the sum of its rows' costs
    bint full                   # rows were left out because of the limit
    double worth                # useful cost per microsecond

cdef cppclass CostBatch:        # of one model
    u8 kind
    bint padded
    u32 item_bytes
    Choice choice
    vector[Candidate]* rows     # candidates, the one due first at the front
    vector[u64]* keys           # scratch: sort keys, with the index of the candidate
    vector[double]* sums        # scratch: running sums of the costs of the others

# NULL: no memory.
cdef CostBatch* cost_batch_new(u8 kind, bint padded, u32 item_bytes) noexcept nogil
cdef void cost_batch_free(CostBatch* c) noexcept nogil
cdef u32 row_cost(const CostBatch* c, u64 nbytes, u32 given) noexcept nogil
# Collect the first waiting rows, except those that the container of `avoid` has failed. rows: of
# the batch, about: where there are bands, those that would be sent in twice as many are collected.
# Return False if there are none.
cdef bint cost_batch_collect(CostBatch* c, ModelQueue* queue, Lanes* lanes, u32 avoid, u32 rows,
                             u64 now_us) noexcept nogil
# Choose a batch of at most rows_max rows and cost `limit`, with the row that is due first; if that
# row alone costs more, it is the batch. start_us: when the replica is free.
cdef void cost_batch_choose(CostBatch* c, const Batcher* b, u32 rows_max, double limit,
                            u64 start_us) noexcept nogil
# Choose only the row that is due first.
cdef void cost_batch_alone(CostBatch* c) noexcept nogil

# -- Models: their lanes, queues and replicas together.
cdef enum:
    LANE_CLASSES = 44           # SLOs from 1 us to 2^43 us (100 days), one class per power of two

cdef cppclass BandLanes:    # of a model, for the rows of one band
    Lane* lanes[44]             # by class of SLO; made at first use, by the submitter
    Lane* array_lanes[44]       # the same, for arrays
    Gate gates[44]              # by class of SLO: forecast for a row submitted now

cdef cppclass ModelState:
    u32 index
    RowSpec spec
    bint cached
    bint finite                 # refuse NaN and infinities
    u64 row_bytes_end           # rows with fewer bytes are accepted without further checks; 0 where
                                # each has a cost
    u64 lane_rows               # capacity of each lane
    BandLanes own               # of band 0
    BandLanes* bands[48]        # of the others; made at first use, by the submitter. [0]: NULL
    Tally tally
    atomic[u32] shares          # a replica that maps rows has connected: the rows of new lanes are
                                # in shared memory
    atomic[u32] parts           # a replica that answers in parts has connected
    vector[u32]* replicas       # loop: conns
    ReplicaSet replica_set      # loop: those replicas themselves, in the same order
    ModelQueue queue            # loop: its lanes that have had rows
    CostBatch* by_cost          # NULL: all rows cost the same
    RefusedRows* refused        # loop: NULL: none of its rows has been refused
    u64 hold_until_us           # loop: rows wait until this time for more rows, or for a faster
                                # replica; 0: none wait
    bint hot                    # loop: on the list of models to handle in this step
    bint waits                  # loop: on the list of models with rows that wait
    bint unlisted               # not in snapshots of all models; freed when it is dropped
    u64 next_dropped            # ModelState*: next in the list of dropped models that the loop has
                                # not read

cdef cppclass RetiredModels:         # of an engine: models without queries
    atomic[u64] dropped         # ModelState*: list of dropped models that the loop has not read
    vector[void*]* leaving      # loop: dropped models that it has read, until they are freed
    Spsc* unused                # model numbers that are free again: from the loop to new models
    atomic[u32] unlisted        # models that will be freed when they are dropped, and have not been
                                # freed

# Return the lanes of a band; NULL if they were not made. Threads: any.
cdef inline BandLanes* band_lanes(ModelState* m, u32 band) noexcept nogil:
    return m.bands[band] if band else &m.own

# Make the lanes of a band if they are not there. False: no memory. Threads: under the GIL.
cdef bint band_lanes_make(ModelState* m, u32 band) noexcept nogil
# Initialize a model that is all zeros. False: no memory; call model_state_free then too.
cdef bint model_state_init(ModelState* m) noexcept nogil
cdef void model_state_clear(ModelState* m) noexcept nogil        # reset to a new model with the
                                                                 # same number
cdef void model_state_free(ModelState* m) noexcept nogil
# Initialize an object that is all zeros. False: no memory.
cdef bint retired_models_init(RetiredModels* d) noexcept nogil
cdef void retired_models_free(RetiredModels* d) noexcept nogil
# Drop a model. No thread may submit to it afterwards.
cdef void model_drop(RetiredModels* d, ModelState* m) noexcept nogil
cdef void models_give_back(RetiredModels* d, Lanes* lanes) noexcept nogil
