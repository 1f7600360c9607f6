# One attached container as the engine sees it: its batcher, its batches in flight, and its
# connection.
#
# Two batches are in flight at most, the second one behind the first. A container with a
# `concurrency` works at so many batches at the same time, and answers each when it is done with it.
#
# A batch's rows stay in their ring cells until its reply arrives, or until no caller waits for them
# any more; then only their keys are kept, so that a late reply still fills the cache. If the
# container maps the rows, new rows may then be written to these cells while its model still reads
# them: a late reply for a cell that was claimed again is dropped.
#
# Threads: loop only, except the Gauge, which any thread may read.
from libcpp.vector cimport vector
from clipper_core.cache.clock_cache cimport Key
from clipper_core.runtime.machine cimport atomic, u32, u64, u8
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.batcher cimport Batcher, BatcherConfig, Timing
from clipper_core.scheduling.container_connection cimport ContainerConnection
from clipper_core.scheduling.lane cimport Lane, Lanes, Span, Tally
from clipper_core.scheduling.refused_rows cimport RefusedRows
from clipper_core.wire.codec cimport Header, Limits, Progress, Rows
from clipper_core.wire.prediction cimport Value

# -- Log of batches, with their rows and times, for traces of queries: a bounded queue of words from
# the loop to one reader. It is off until a reader turns it on; then it has a few words per batch
# and one per row. A batch for which the queue has no space is only counted; the loop never waits.
#
# A record: number of the words that follow; replica << 32 | rows; sent, begun, ended (us,
# monotonic); the id of the slot of each task, with those that joined a row (for a task of an array,
# of its first slot).
cdef enum:
    LOGGED_TASKS_MAX = 4096     # of one batch
    RECORD_HEAD = 4             # words before the ids, the count excluded

# Turn the log on. words: a power of two. Return False if there is no memory. Threads: one at a
# time.
cdef bint batch_log_open(Lanes* lanes, u64 words) noexcept nogil
# Log a batch, before its tasks end. Threads: loop only.
cdef void batch_log_put(Lanes* lanes, const Span* spans, u32 span_count, u32 rows, u32 replica,
                        u64 sent_us, u64 begun_us,
                        u64 now_us) noexcept nogil

cdef enum:
    IN_FLIGHT_MAX = 2           # of a container that answers its batches in order
    CONCURRENCY_MAX = 8192      # batches that a container works at
    UNHEARD_US = 1000000        # after this time a batch that it was told to cancel has hung it
    EJECT_US_MIN = 100000       # time for which a replica that keeps failing gets no rows, at
                                # first;
    EJECT_US_MAX = 30000000     # doubled after each probe that fails, up to this
    PROFILE_BUCKETS = 24

cdef struct RowSpec:            # the type of a model's rows and, if known, of its outputs
    u64 uid                     # of the registered version; part of the cache key
    u8 dtype
    bint variable
    u8 rank
    u32 dims[4]
    u64 row_bytes               # fixed rows
    u8 output_dtype             # ANY when not declared
    bint output_shaped          # output_rank and output_dims are declared too
    u8 output_rank
    u32 output_dims[4]
    u32 output_record           # number of the type of record that an output is; 0: it is none

cdef packed struct Run:         # consecutive rows of a region, as in the payload of a SHARED batch
                                # (docs/wire.md)
    u32 region                  # id of the lane
    u32 count
    u64 first

cdef struct Batch:
    u8 header[64]               # sent from here, so unchanged until the frame is sent
    u64 id
    u32 n                       # rows
    u32 answered                # rows that PARTIAL replies have ended; `spans` has the others
    u32 span_count
    Span* spans
    Key* keys                   # set when the batch is overdue and its rows are released; zero for
                                # a row that is not cached
    bint shared                 # the container maps the rows and may read them at any time
    u64 sent_us
    u64 cancelled_us            # when the container was told that nobody wants it; 0: it was not
    u64 end_bytes               # position in the bytes of the connection where this frame ends
    u64 due_us                  # the latest deadline of its rows
    u64 first_due_us            # the first one
    u64 slo_us                  # the tightest SLO
    double cost                 # where rows differ in it
    bint full                   # rows were left out because of the limit

cdef packed struct Blame:       # what a container had when its connection ended
    u32 rows                    # in flight
    u32 model                   # its number
    u32 blamed                  # 1: `key` is the key of a row that was alone there twice
    Key key

cdef cppclass Gauge:            # for snapshots
    atomic[u64] limit           # rows, at mean cost where they differ in it
    atomic[u64] limit_cost      # where rows differ in cost; else 0
    atomic[u64] unit            # the mean cost of a row, 1 where rows do not differ
    atomic[u64] batches
    atomic[u64] misses
    atomic[u64] in_flight
    atomic[u64] suspect
    atomic[u64] failures        # batches that its model failed, since the start
    atomic[u64] ejected         # 1 while it is ejected or gets a probe
    atomic[u64] ejections       # how often it was ejected
    Progress progress           # of a model that learns
    atomic[u64] taught          # feedback: rows being sent to the container
    atomic[u64] untaught        # feedback: rows dropped because too many waited
    atomic[u64] fit_a_ns
    atomic[u64] fit_b_ns
    atomic[u64] profile_us[24]  # mean service time by log2(batch size)
    atomic[u64] profile_n[24]

cdef cppclass Replica:
    ContainerConnection* connection
    Tally* tally
    Batcher batcher
    Gauge gauge
    Batch** flight              # oldest first
    u32 in_flight
    u32 concurrency             # batches that it works at, and answers in any order; 0: one
    bint cancels                # its container takes CANCEL of batches
    u32 number
    u64 next_id
    u64 idle_since_us           # when the last reply came
    u64 busy_until_us           # predicted end of what is in flight; with a concurrency, of the
                                # first batch to end, if no further one may be sent before
    bint draining
    bint exclusive              # rows whose container died are in flight: no others join them
    bint suspect                # overdue or silent: gets no new rows
    u32 conn
    u32 eject_after             # batches failed in a row; 0: it is never ejected
    u32 failed                  # batches failed in a row
    u32 ejections               # consecutive ejections without a success between: each is twice as
                                # long as the one before
    u64 ejected_until_us        # 0: it is not ejected. After this time, a batch of one row is sent
                                # to it as a probe
    u64 passed                  # the round in which another replica was preferred
    u8 v1_format
    bint shared                 # it maps rows
    bint sessions               # it gets the session of each row
    bint parts                  # its container answers queries in parts
    u32 streams                 # queries that it answers in parts now
    u32 calls_max               # calls of its model that may be open; 0: it may not call
    u32 calls_open
    vector[Run]* runs           # scratch for a batch of shared rows
    vector[u32]* regions        # regions that were announced to the container
    vector[const void*]* rows   # scratch for rows that must be gathered
    vector[u64]* row_bytes
    vector[u32]* row_bytes32

# Return the predicted time of a batch; 0 while it is unknown.
cdef double batch_predict_us(const Replica* r, const Batch* batch) noexcept nogil
# Make a replica that works at `concurrency` batches at a time; 0: at one. NULL: no memory.
cdef Replica* replica_new(ContainerConnection* connection, Tally* tally, u32 number,
                          u32 concurrency) noexcept nogil
cdef void replica_free(Replica* r) noexcept nogil
cdef Batch* batch_new(u32 n) noexcept nogil
cdef void batch_free(Batch* batch) noexcept nogil
# End and free a batch that cannot be framed (a row is larger than a frame may be).
cdef void batch_drop(Lanes* lanes, Batch* batch, Status status, u64 now_us) noexcept nogil

# Set, before its first batch, how the replica batches, and what its container measured before it
# was ready.
cdef void replica_begin(Replica* r, const BatcherConfig* config, const Timing* timings, u32 n,
                        u64 now_us) noexcept nogil
# Send a FEEDBACK payload of so many rows when nothing else is to be sent. It is dropped, and
# counted, when too much feedback waits.
cdef void replica_send_feedback(Replica* r, const void* feedback, u64 nbytes, u32 rows,
                        u64 now_us) noexcept nogil
# Take in a frame: a REPLY or FAILURE, which ends the batch's rows, or an ACCURACY. Return BAD_FRAME
# if the connection must be closed. elsewhere: rows that the model failed may be retried on another
# replica.
cdef Status replica_frame(Replica* r, Lanes* lanes, const RowSpec* spec, Header* header,
                          const u8* payload,
                          u64 slo_us, bint elsewhere, u64 now_us) noexcept nogil
# Take in a reply of protocol 1, n x f64. Return OK, or PENDING while it is incomplete.
cdef Status replica_bare(Replica* r, Lanes* lanes, const RowSpec* spec, u64 slo_us,
                         u64 now_us) noexcept nogil
# Release the rows of overdue batches. Equal rows that joined them later are sent to another
# replica, once. If the container takes it, send CANCEL for these batches, and for those of which
# nobody wants a row any more. Return True if the connection must be closed, because its rows have
# not even been sent.
cdef bint replica_overdue(Replica* r, Lanes* lanes, u64 now_us) noexcept nogil
# Return whether its oldest batch is overdue; with a concurrency, whether it does not end one that
# it was told to cancel.
cdef bint replica_late(const Replica* r) noexcept nogil
# Return whether it may get a batch as if it were idle.
cdef inline bint replica_has_place(const Replica* r) noexcept nogil:
    return r.in_flight == 0 or r.in_flight < r.concurrency
# Handle the end of the container: put its rows that have time left back to the front of their
# lanes. Nobody knows yet which of them ended it, so those that it may have been at work on are sent
# again with no others: each alone, or as few at once as their deadlines allow. A row that was alone
# in a container that died before ends, and is blamed.
cdef void replica_lost(Replica* r, Lanes* lanes, const RowSpec* spec, Blame* blame,
                       u64 now_us) noexcept nogil
# End the waiting rows of a lane that are refused, at positions from `first` on. Return how many.
cdef u64 lane_refuse(Lanes* lanes, Lane* lane, const RowSpec* spec, RefusedRows* refused, u64 first,
                     u64 now_us) noexcept nogil
# The same for all waiting rows of a lane.
cdef void lane_refuse_all(Lanes* lanes, Lane* lane, const RowSpec* spec, RefusedRows* refused,
                          u64 now_us) noexcept nogil
# Leave the rows of a batch out that are refused, or were refused while they waited in a chunk.
# Return whether any others are left.
cdef bint batch_leave_out(Batch* batch, Lanes* lanes, const RowSpec* spec, RefusedRows* refused,
                          u64 now_us) noexcept nogil

# Make the value of the only row of a REPLY or PART. False: no memory.
cdef bint reply_value(const Header* header, const Rows* rows, Value* value) noexcept nogil

# -- Writing a batch to its container's connection: rows are sent from their cells, gathered,
# compressed, or, if the container maps them, only referred to.
#
# Threads: loop only.
# Queue the frame of a batch and take the batch over. NO_MEMORY, TOO_LARGE: nothing was queued, and
# the caller keeps it.
cdef Status replica_send(Replica* r, Lanes* lanes, const RowSpec* spec, Batch* batch,
                         u64 now_us) noexcept nogil
