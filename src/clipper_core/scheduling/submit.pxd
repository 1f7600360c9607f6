# The last step of submitting a query: puts the bytes of a row into its lane. Needs no Python.
#
# Threads: any; lane_prepare under the GIL, so that a lane is made only once.
from libcpp.vector cimport vector
from clipper_core.cache.clock_cache cimport CacheState, Projection
from clipper_core.results.completion cimport Block
from clipper_core.runtime.machine cimport atomic, i64, u32, u64, u8
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.admission cimport Gate
from clipper_core.scheduling.lane cimport Lane, Lanes, Tally
from clipper_core.scheduling.model_state cimport ModelState
from clipper_core.scheduling.scheduler cimport EngineState
from clipper_core.wire.prediction cimport Value

# -- Submitting an array: every row is hashed and looked up, hits end at once, misses are packed
# into chunks of the model's lane for arrays. It makes no Python object and takes no lock per row,
# and needs no GIL.
#
# intake_run ends when the lane has no space for the next row (intake.at). Its caller then either
# waits and calls it again, or ends the remaining rows. A claimed cell is always published, so rows
# behind it in the lane never wait for it.
#
# Threads: an intake belongs to one thread; several intakes may use one lane at a time.
cdef struct TensorColumn:       # a named tensor of the rows of an array, which is at `offset` in a
                                # record
    const u8* data
    i64 stride                  # distance between rows of the array, in bytes
    u64 bytes, padding, offset  # of a row; padding is zeros

cdef struct Intake:
    Lanes* lanes
    Lane* lane
    Tally* tally
    CacheState* cache           # NULL: this model's predictions are not cached
    atomic[u32]* refusing       # not 0: the engine accepts nothing any more
    u64 uid, salt
    const Projection* near      # near rows share cache entries, under a uid of their own; NULL:
                                # only equal rows do
    u64 near_uid
    const u64* marks            # mark of each row's key; NULL: keys without marks
    const u8* rows
    const TensorColumn* columns  # the columns that rows are made of; NULL: the rows are in `rows`
    u32 column_count
    u8* scratch                 # space for look_rows_of() rows made of columns, where they are
                                # hashed
    u64 row_bytes
    Block* block
    u32 slot                    # of row 0
    u32 n
    u32 at                      # index of the next row: those before it are hits, in a chunk, or
                                # ended
    u64 now_us, deadline_us
    bint patient                # it waits for space; False with a test's clock, where no thread
                                # would make space meanwhile

cdef u32 chunk_rows_of(u64 row_bytes) noexcept nogil                # rows of one cell
cdef u32 look_rows_of(u64 row_bytes) noexcept nogil                 # rows made of columns at a time
# cells of a lane that has at most bytes_max bytes
cdef u64 chunk_cells_of(u64 row_bytes, u64 bytes_max) noexcept nogil
# Submit rows until all are submitted, the lane is full, or rows_max rows were handled.
cdef void intake_run(Intake* intake, u32 rows_max) noexcept nogil
# End the remaining rows with a status; those in the cache still end as hits.
cdef void intake_end(Intake* intake, Status status) noexcept nogil

# -- Functions that are called with the GIL, and release it for large arrays and while they wait. If
# Ctrl-C raises, the remaining rows end as CANCELLED.
# Submit several arrays in turn, until all rows are submitted or refused.
cdef int intakes_feed(vector[Intake]& intakes, u64 until_us) except -1
cdef int intakes_end(vector[Intake]& intakes, Status status) noexcept
cdef int wait_for_room(Lanes* lanes, Lane* lane, atomic[u32]* refusing, u64 until_us) except -1

# Return the smallest number of bytes that is too large for a row.
cdef u64 row_bytes_end(const EngineState* e) noexcept nogil
# Prepare the lane of that SLO's class, of a band.
cdef void lane_prepare(EngineState* e, ModelState* m, u64 slo_us, u32 band) noexcept nogil
# The same for arrays. lane_bytes_max: of the lane. Return NULL if there is no memory.
cdef Lane* array_lane_prepare(EngineState* e, ModelState* m, u64 slo_us, u32 band,
                              u64 lane_bytes_max) noexcept nogil
# Return the lane and the gate of that SLO's class; NULL: the lane was not prepared. Threads: any.
cdef Lane* lane_at(ModelState* m, u64 slo_us, u32 band) noexcept nogil
cdef Gate* gate_at(ModelState* m, u64 slo_us, u32 band) noexcept nogil
cdef u32 lane_class(u64 slo_us) noexcept nogil
# Return the classes of SLO that have a lane of a band, one bit each. Threads: any, with the GIL.
cdef u64 lanes_there(ModelState* m, u32 band) noexcept
# Submit a row. Return OK, or why it was not submitted; FULL without a lane. key NULL: neither
# joined nor cached.  cost: as the caller gives it, where the model needs one.
cdef Status row_submit(EngineState* e, ModelState* m, const void* row, u64 nbytes, const Key* key,
                       u64 salt, u64 slo_us, u32 band,
                       u64 now_us, Block* block, u32 slot, u32 cost) noexcept nogil
# Count a row that was refused. For FULL, `value` is the number of seconds after which another try
# may succeed.
cdef void row_refused(ModelState* m, Status status, u64 slo_us, u32 band, u64 now_us,
                      Value* value) noexcept nogil
