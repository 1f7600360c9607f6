# A row into its lane, by whoever has its bytes: the last step of submitting, without Python.
#
# Threads: any; lane_prepare under the GIL, which is what makes a lane once.
from libcpp.vector cimport vector
from clipper_core.cache.clock_cache cimport CacheState, Projection
from clipper_core.results.completion cimport Block
from clipper_core.runtime.machine cimport atomic, i64, u32, u64, u8
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.lane cimport Lane, Lanes, Tally
from clipper_core.scheduling.model_state cimport ModelState
from clipper_core.scheduling.scheduler cimport EngineState
from clipper_core.wire.prediction cimport Value

# -- An array on its way in: every row is hashed and looked up, hits end at once, misses are packed
# into chunks of the model's lane for arrays. No Python object a row, no lock a row; it needs no
# GIL.
#
# Bounded: a run ends when the lane has no room for the next row (intake.at), and its caller
# decides then: wait and run on, or give the rest up. Nothing claimed is ever left unpublished, so
# nobody behind it in the lane waits.
#
# Threads: an intake is one thread's; any number of them may feed one lane.
cdef struct TensorColumn:       # a named tensor of an array's rows, which have it at `offset`
    const u8* data
    i64 stride                  # bytes from row to row of the array
    u64 bytes, padding, offset  # of a row; padding is zeros

cdef struct Intake:
    Lanes* lanes
    Lane* lane
    Tally* tally
    CacheState* cache           # NULL: this model's predictions are not cached
    atomic[u32]* refusing       # the engine takes nothing in any more
    u64 uid, salt
    const Projection* near      # near rows share entries, under a uid of their own; NULL: only
                                # equal ones do
    u64 near_uid
    const u64* marks            # of each row's key; NULL: they are as they are
    const u8* rows
    const TensorColumn* columns  # that rows are made of; NULL: they are `rows`
    u32 column_count
    u8* scratch                 # room for look_rows_of() such rows, where they are hashed
    u64 row_bytes
    Block* block
    u32 slot                    # of row 0
    u32 n
    u32 at                      # rows before it are hits, or in a chunk, or ended
    u64 now_us, deadline_us
    bint patient                # it waits for room; on a clock of a test's nobody would make any
                                # meanwhile

cdef u32 chunk_rows_of(u64 row_bytes) noexcept nogil                # rows of one cell
cdef u32 look_rows_of(u64 row_bytes) noexcept nogil                 # rows made of columns at a time
# cells of a lane of at most so many bytes
cdef u64 chunk_cells_of(u64 row_bytes, u64 bytes_max) noexcept nogil
# until all are in, the lane is full, or rows_max rows
cdef void intake_run(Intake* intake, u32 rows_max) noexcept nogil
# the rest: what the cache has is a hit still
cdef void intake_end(Intake* intake, Status status) noexcept nogil

# -- with the GIL, which they give away for large arrays and while they wait. What Ctrl-C raises
# ends the rest as CANCELLED.
# in turn, until all is in or refused
cdef int intakes_feed(vector[Intake]& intakes, u64 until_us) except -1
cdef int intakes_end(vector[Intake]& intakes, Status status) noexcept
cdef int wait_for_room(Lanes* lanes, Lane* lane, atomic[u32]* refusing, u64 until_us) except -1

# Return the first number of bytes that no row may have.
cdef u64 row_bytes_end(const EngineState* e) noexcept nogil
# Prepare the lane of that SLO's class.
cdef void lane_prepare(EngineState* e, ModelState* m, u64 slo_us) noexcept nogil
# Submit a row. Return OK, or why it was not submitted; FULL without a lane. key NULL: neither
# joined nor cached.  cost: as the caller gives it, where the model needs one.
cdef Status row_submit(EngineState* e, ModelState* m, const void* row, u64 nbytes, const Key* key,
                       u64 salt, u64 slo_us,
                       u64 now_us, Block* block, u32 slot, u32 cost) noexcept nogil
# Count a row that was refused. For FULL, `value` is the number of seconds after which another try
# may succeed.
cdef void row_refused(ModelState* m, Status status, u64 slo_us, u64 now_us,
                      Value* value) noexcept nogil
