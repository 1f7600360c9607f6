# An embedding table: rows of floats by 64-bit id, created by their first update, trained and read
# by any number of threads at once.
#
# A row is its weights, followed by the optimizer's state. Weights may be stored in less than f32
# (stored_row.hpp); rows that are read or written whole are f32. No two ids share a row. Until its
# first update a row is a pure function of (key of the table, id), so reading a missing row stores
# nothing and always returns the same values.
#
# Threads: any. A row is read and written under the lock of its id's bucket, or by a thread that is
# the only one inside the gate. The gate keeps all threads out while a part of the index moves. Long
# operations admit other threads after every BATCH ids.
from clipper_core.params.optimizer cimport Rule, Start, Stride
from clipper_core.runtime.machine cimport atomic, i64, relaxed, u16, u32, u64, u8

# -- The lock of a bucket of rows, and the gate of the table. The word of a bucket is a lock, the
# number of ids in the bucket, and whether an id had to be stored in the next bucket; only the
# holder of the lock changes the last two.
#
# Threads: any.
cdef extern from "params/row_lock.hpp" namespace "clipper" nogil:
    cdef cppclass RowLock "clipper::RowLock<>":
        bint take() noexcept            # False: another thread has it
        void give() noexcept
        u32 count() noexcept            # this and the following under the lock
        bint overflowed() noexcept
        void overflow() noexcept
        void more(u32 ids) noexcept

    cdef cppclass RowGate "clipper::RowGate<>":     # the gate of a table: the threads inside
        bint enter_sole() noexcept      # True: no other thread is inside, nor will be before
                                        # share(), so no locks are needed
        bint others() noexcept          # whether a thread waits for share()
        void share() noexcept
        void leave(bint sole) noexcept
        bint enter() noexcept           # True: wait until it is shared(). False: wait while it is
                                        # closed(), and call it again
        bint shared() noexcept
        bint closed() noexcept
        bint close() noexcept           # called from outside, to become alone(). False: another
                                        # thread has closed it
        bint alone() noexcept
        void open() noexcept

# -- The index of an embedding table: the row of each id, and the lock of that row.
#
# Ids are hashed into buckets of one cache line, in the order of their hashes. A part is an array of
# buckets, for the hashes with the same leading bits; it grows, and then splits, independently of
# other parts. An id whose bucket is full is stored in the next one.
#
# Threads: any, but whoever calls index_grow does so alone: it moves a part.
# Whoever holds an id's bucket may read and write its row; nobody holds two but in rising order, and
# only while looking.
cdef extern from "params/row_index.hpp" namespace "clipper" nogil:
    u32 NO_ROW "clipper::kNoRow"

    cdef cppclass Bucket:
        i64[5] ids
        u32[5] rows
        RowLock lock

    u32 bucket_count(const Bucket* bucket) noexcept
    void bucket_lock(Bucket* bucket) noexcept
    void bucket_unlock(Bucket* bucket) noexcept

    cdef cppclass Part:
        Bucket* buckets
        u64 n                   # number of them; spare ones follow, for ids that do not fit into
                                # the last
        atomic[u64] used        # ids
        u32 depth               # number of leading bits that their hashes share

    cdef cppclass Index:
        Part** directory        # by the leading `depth` bits of a hash
        u32 depth

    cdef cppclass Held "clipper::HeldRow":     # an id whose bucket is locked until
                                               # bucket_unlock(home)
        Bucket* home
        u32 row                 # NO_ROW: it has none

    u64 index_hash(i64 id) noexcept
    Part* index_part(const Index* index, u64 hash) noexcept
    Bucket* part_home(const Part* part, u64 hash) noexcept
    Bucket* index_bucket(const Index* index, u64 hash) noexcept
    Held index_hold(const Index* index, u64 hash, i64 id) noexcept

    cdef cppclass Seen:         # where an id was found without the lock; valid until a part moves
        Bucket* home
        u32 row                 # NO_ROW: none was found

    void fetch_to_write(const void* at) noexcept
    void index_look(Seen* seen, i64 id) noexcept        # home: set before
    u32 hold_seen(const Seen* seen, i64 id) noexcept    # as index_hold; returns the row
    void* row_pages_new(size_t bytes) noexcept
    void row_pages_free(void* at, size_t bytes) noexcept
    void row_pages_touch(void* at, size_t bytes) noexcept

cdef enum:
    GATHER_MAX = 128            # ids of one home: 125 at most

cdef bint index_init(Index* index) noexcept nogil
cdef void index_free(Index* index) noexcept nogil
# Return the least hash of the next bucket; 0 for the last bucket.
cdef u64 index_after(const Index* index, u64 hash) noexcept nogil
# Add an id. Return False if the part must grow first.
cdef bint index_add(Index* index, u64 hash, const Held* held, i64 id, u32 row) noexcept nogil
cdef void index_remove(Index* index, const Held* held, i64 id) noexcept nogil
# Collect all ids whose home is this locked bucket, and their rows. Return how many, at most
# GATHER_MAX. hash: any hash of this bucket.
cdef u32 index_gather(const Index* index, u64 hash, Bucket* home, i64* ids,
                      u32* rows) noexcept nogil
cdef bint index_full(const Index* index, u64 hash) noexcept nogil    # whether its part should grow
# Return the size of the part of this hash, which changes when the part grows.
cdef u64 index_size(const Index* index, u64 hash) noexcept nogil
# Grow the part of this hash. Return False when there is no memory.
cdef bint index_grow(Index* index, u64 hash) noexcept nogil
cdef u64 index_used(const Index* index) noexcept nogil
cdef u64 index_bytes(const Index* index) noexcept nogil

# -- Memory of the rows of an embedding table: chunks of up to 32 MiB that never move, so the
# address of a row never changes.
#
# Threads: any. Only taking a row and returning it take the lock. The index says which id owns a
# row.
cdef struct Arena:
    atomic[u8*]* chunks     # for all rows that the table may have; NULL where no chunk was
                            # allocated yet
    u32 shift                   # a chunk has 1 << shift rows, followed by a stamp for each
    u64 row_bytes
    u64 rows_max                # at most `room`
    u64 room                    # rows for which `chunks` has entries, some more than the bound
    atomic[u32] lock            # guards the following fields
    u64 next                    # rows taken so far
    u32 free                    # first row of the list of returned rows, or NO_ROW
    u64 free_count
    u64 chunk_count

cdef inline u8* arena_chunk(const Arena* arena, u32 row) noexcept nogil:
    """Return the chunk of a row. The load is relaxed: a thread that may access the row took its
    bucket's lock after the thread that allocated the chunk released it; a thread that only
    prefetches the row may run while the chunk is allocated."""
    return arena.chunks[row >> arena.shift].load(relaxed)

cdef inline float* arena_row(const Arena* arena, u32 row) noexcept nogil:
    return <float*> (arena_chunk(arena, row) + (row & ((<u64> 1 << arena.shift) - 1))
                     * arena.row_bytes)

cdef inline u32* arena_stamp(const Arena* arena, u32 row) noexcept nogil:
    return <u32*> (arena_chunk(arena, row)
                   + (arena.row_bytes << arena.shift)) + (row & ((<u64> 1 << arena.shift) - 1))

cdef bint arena_init(Arena* arena, u64 row_bytes, u64 rows_max) noexcept nogil
cdef void arena_free(Arena* arena) noexcept nogil
cdef void arena_bound(Arena* arena, u64 rows_max) noexcept nogil
cdef u32 arena_take(Arena* arena) noexcept nogil        # NO_ROW: rows_max, or no memory
cdef void arena_give(Arena* arena, u32 row) noexcept nogil
# Prepare memory, so that `rows` more rows can be taken without a page fault.
cdef bint arena_reserve(Arena* arena, u64 rows) noexcept nogil
cdef u64 arena_limit(Arena* arena) noexcept nogil       # largest number of rows, as set by
                                                        # arena_bound
cdef u64 arena_used(Arena* arena) noexcept nogil
cdef u64 arena_bytes(Arena* arena) noexcept nogil

# -- Rows of a table, pulled and pushed from any number of threads.
cdef enum:
    BATCH = 4096                # ids between two checks of the gate
    BLOCK = 64                  # ids whose buckets, then rows, are prefetched together

cdef enum Pulled:           # type of the elements of a pulled row
    PULL_F32 = 0
    PULL_F16 = 1
    PULL_BF16 = 2
    PULL_I8 = 3                 # with a scale for each row

cdef struct Pushed:
    u64 applied                 # distinct ids whose rows changed
    u64 made                    # rows that this push created
    u64 unadmitted              # ids that were not pushed often enough yet
    u64 refused                 # ids for which the table had no room
    u64 evicted                 # rows that were evicted for new ones
    i64* gone                   # ids of the evicted rows; NULL: not needed
    u64 gone_max                # most rows that may be evicted, if `gone` is set

cdef struct Rows:
    Rule rule
    Start start
    u64 key
    u32 dim
    u32 width                   # number of floats of a row with its state, as f32
    Pulled stored               # type of the weights in memory
    u32 weight_bytes            # bytes of a row's weights in memory; the state follows them
    bint evicts             # if the table is full, the oldest row is evicted; else the new one is
                            # refused
    u32 admit_after             # number of pushes after which an id gets a row
    u64 seen_mask
    atomic[u8]* seen            # how often ids without a row were pushed, as a sketch (approximate
                                # counts)
    Index index
    Arena arena
    u64 moves                   # number of moves of parts of the index; changed by the thread that
                                # is alone
    RowGate gate
    atomic[u64] hand            # where the search for the oldest row continues

cdef struct Distinct:       # the distinct ids of a push, in the order of their first gradients
    u64 n
    u32* first                  # [n]: place of an id's first gradient
    u32* last                   # [n]
    u32* next                   # [gradients]: the next gradient of the same id
    u32* slots                  # the memory of all four arrays; release it by free()
    u64 mask

cdef inline u64 spare_floats(u64 dim) noexcept nogil:
    """Return the number of floats of a scratch buffer for one row and its stored form."""
    return 2 * dim + 2

# Initialize the rest of a table whose settings are set. seen: number of counters of the sketch, 2^k
# or 0.
cdef bint rows_init(Rows* rows, u64 rows_max, u64 seen) noexcept nogil
cdef void rows_free(Rows* rows) noexcept nogil

# Pull rows. Return how many of the ids have no row; for these, `out` has their initial values.
# fresh: scratch space of spare_floats. stamp: 0 does not change the stamps.
cdef u64 rows_pull(Rows* rows, const i64* ids, u64 n, Pulled kind, void* out, float* scales,
                   float* fresh,
                   u32 stamp) noexcept nogil

cdef bint distinct_init(Distinct* distinct, const i64* ids, u64 n) noexcept nogil
# Take one step of the optimizer. gradients[n, dim]: all finite; those of one id are summed first.
# sum: scratch space of spare_floats. number: of the step, on which rounding depends.
cdef void rows_push(Rows* rows, const Stride* step, const i64* ids, const Distinct* distinct,
                    const float* gradients, float* sum, u64 number,
                    u32 stamp, Pushed* pushed) noexcept nogil

# Write rows. width: dim, to keep the current state, or the width of rows with state.
cdef void rows_write(Rows* rows, const i64* ids, u64 n, const float* values, u32 width,
                     const u32* stamps,
                     Pushed* pushed) noexcept nogil
cdef u64 rows_read(Rows* rows, const i64* ids, u64 n, float* values, u32* stamps,
                   u8* found) noexcept nogil
cdef u64 rows_remove(Rows* rows, const i64* ids, u64 n) noexcept nogil
# Read whole rows in the order of their hashes, from `hash` on. Each row that exists during the
# whole walk is read once. room: GATHER_MAX at least.
cdef u64 rows_walk(Rows* rows, u64* hash, bint* ended, u64 room, i64* ids, float* values,
                   u32* stamps) noexcept nogil
# Set the bound of rows. If the table evicts, the oldest rows beyond it are removed at once.
cdef void rows_bound(Rows* rows, u64 rows_max) noexcept nogil
cdef u64 rows_expire(Rows* rows, u32 before) noexcept nogil      # remove rows with a stamp below
                                                                 # `before`
cdef u64 rows_count(Rows* rows) noexcept nogil
cdef u64 rows_bytes(Rows* rows) noexcept nogil                   # bytes of memory, with the index
