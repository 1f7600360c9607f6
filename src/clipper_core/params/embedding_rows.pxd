# An embedding table: rows of floats by 64-bit id, made at their first update, trained and read by
# any number of threads at once.
#
# A row is its weights and, right behind them, the optimizer's state. Weights may be stored in less
# than f32 (stored_row.hpp); rows that are read or written whole are f32. No two ids share a row.
# Until its first update a row is a pure function of (key of the table, id), so reading one that is
# not there stores nothing and still always gives the same.
#
# Threads: any. A row is read and written under the lock of its id's bucket, or by a thread that is
# the only one inside the gate; which keeps everybody out while a part of the index moves. What
# takes long lets others in after every BATCH ids.
from clipper_core.params.initializer cimport Start
from clipper_core.params.optimizer cimport Rule, Stride
from clipper_core.params.row_arena cimport Arena
from clipper_core.params.row_index cimport Index
from clipper_core.params.row_lock cimport RowGate
from clipper_core.runtime.machine cimport atomic, i64, u16, u32, u64, u8

cdef enum:
    BATCH = 4096                # ids between two looks at the gate
    BLOCK = 64                  # ids whose buckets, then rows, are fetched together

cdef enum Pulled:           # what elements of a pulled row are
    PULL_F32 = 0
    PULL_F16 = 1
    PULL_BF16 = 2
    PULL_I8 = 3                 # and a scale of its own for each row

cdef struct Pushed:
    u64 applied                 # distinct ids whose rows changed
    u64 made                    # rows that this push made
    u64 unadmitted              # ids not seen often enough yet
    u64 refused                 # ids for which there was no room
    u64 evicted                 # rows that had to go for them
    i64* gone                   # their ids; NULL: nobody asks
    u64 gone_max                # at most so many go, if somebody does

cdef struct Rows:
    Rule rule
    Start start
    u64 key
    u32 dim
    u32 width                   # floats of a row with its state, as f32
    Pulled stored               # what its weights are in memory
    u32 weight_bytes            # of a row in memory; the state lies behind them
    bint evicts             # the oldest row goes when there is no room; else the new one is refused
    u32 admit_after             # an id has a row after so many pushes
    u64 seen_mask
    atomic[u8]* seen            # how often ids without a row were pushed: a sketch
    Index index
    Arena arena
    u64 moves                   # of parts of the index; changed by who is alone
    RowGate gate
    atomic[u64] hand            # where the search for the oldest goes on

cdef struct Distinct:       # the ids of a push, each once, in the order of their first gradients
    u64 n
    u32* first                  # [n]: place of an id's first gradient
    u32* last                   # [n]
    u32* next                   # [gradients]: the next one of the same id
    u32* slots                  # one piece of memory for all; free() it
    u64 mask

cdef inline u64 spare_floats(u64 dim) noexcept nogil:
    """Of a row, and of the same as it is stored."""
    return 2 * dim + 2

# its settings are in place.  seen: counters, 2^k or 0
cdef bint rows_init(Rows* rows, u64 rows_max, u64 seen) noexcept nogil
cdef void rows_free(Rows* rows) noexcept nogil

cdef u64 rows_pull(Rows* rows, const i64* ids, u64 n, Pulled kind, void* out, float* scales,
                   float* fresh,
                   u32 stamp) noexcept nogil
# ^ -> how many of them have no row: what they would begin as.  fresh: room for spare_floats.
# stamp: 0 leaves theirs as it is

cdef bint distinct_init(Distinct* distinct, const i64* ids, u64 n) noexcept nogil
cdef void rows_push(Rows* rows, const Stride* step, const i64* ids, const Distinct* distinct,
                    const float* gradients, float* sum, u64 number,
                    u32 stamp, Pushed* pushed) noexcept nogil
# ^ gradients[n, dim], all finite; those of one id are summed first.  sum: room for spare_floats.
# number: of the step, which rounding depends on

cdef void rows_write(Rows* rows, const i64* ids, u64 n, const float* values, u32 width,
                     const u32* stamps,
                     Pushed* pushed) noexcept nogil
# ^ width: dim, to keep the state there is, or that of rows with theirs
cdef u64 rows_read(Rows* rows, const i64* ids, u64 n, float* values, u32* stamps,
                   u8* found) noexcept nogil
cdef u64 rows_remove(Rows* rows, const i64* ids, u64 n) noexcept nogil
cdef u64 rows_walk(Rows* rows, u64* hash, bint* ended, u64 room, i64* ids, float* values,
                   u32* stamps) noexcept nogil
# ^ whole rows in the order of their hashes, from `hash` on; room: GATHER_MAX at least. Each row
# that is there all the time, once
# if it evicts, the oldest go at once
cdef void rows_bound(Rows* rows, u64 rows_max) noexcept nogil
cdef u64 rows_expire(Rows* rows, u32 before) noexcept nogil      # of a lesser stamp
cdef u64 rows_count(Rows* rows) noexcept nogil
cdef u64 rows_bytes(Rows* rows) noexcept nogil                   # of memory, with the index
