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
from clipper_core.params.optimizer cimport Rule, Start, Stride
from clipper_core.runtime.machine cimport atomic, i64, relaxed, u16, u32, u64, u8

# -- The word of a bucket of rows: a lock, and what only its holder changes: how many ids are in the
# bucket, and whether one had to go on to the next. And the gate of the whole table.
#
# Threads: any.
cdef extern from "params/row_lock.hpp" namespace "clipper" nogil:
    cdef cppclass RowLock "clipper::RowLock<>":
        bint take() noexcept            # False: somebody else has it
        void give() noexcept
        u32 count() noexcept            # these under the lock
        bint overflowed() noexcept
        void overflow() noexcept
        void more(u32 ids) noexcept

    cdef cppclass RowGate "clipper::RowGate<>":     # of a table: who is inside
        bint enter_sole() noexcept      # True: nobody else is inside, nor will be before share():
                                        # no locks are needed
        bint others() noexcept          # somebody waits for that
        void share() noexcept
        void leave(bint sole) noexcept
        bint enter() noexcept           # then wait until it is shared().  False: wait while it is
                                        # closed(), and come again
        bint shared() noexcept
        bint closed() noexcept
        bint close() noexcept           # from outside, so as to be alone() soon.  False: somebody
                                        # else did
        bint alone() noexcept
        void open() noexcept

# -- The index of an embedding table: which row an id has, and whose turn it is with that row.
#
# Ids are hashed into buckets of one cache line, in the order of their hashes. A part is an array of
# buckets, for the hashes that begin alike; it grows, and then splits, by itself. An id that finds
# its bucket full goes on to the next one.
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
        u64 n                   # of them; spare ones for what the last had no room for come after
        atomic[u64] used        # ids
        u32 depth               # leading bits that their hashes share

    cdef cppclass Index:
        Part** directory        # by the leading `depth` bits of a hash
        u32 depth

    cdef cppclass Held "clipper::HeldRow":     # an id whose bucket is locked, until
                                               # bucket_unlock(home)
        Bucket* home
        u32 row                 # NO_ROW: it has none

    u64 index_hash(i64 id) noexcept
    Part* index_part(const Index* index, u64 hash) noexcept
    Bucket* part_home(const Part* part, u64 hash) noexcept
    Bucket* index_bucket(const Index* index, u64 hash) noexcept
    Held index_hold(const Index* index, u64 hash, i64 id) noexcept

    cdef cppclass Seen:         # where an id seems to lie, by a look without the lock; good until a
                                # part moves
        Bucket* home
        u32 row                 # NO_ROW: it seems to have none

    void fetch_to_write(const void* at) noexcept
    void index_look(Seen* seen, i64 id) noexcept        # its home is set
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
# Collect all ids whose home is this locked bucket, and their rows: at most GATHER_MAX. Return how
# many.  hash: any that leads to this bucket.
cdef u32 index_gather(const Index* index, u64 hash, Bucket* home, i64* ids,
                      u32* rows) noexcept nogil
cdef bint index_full(const Index* index, u64 hash) noexcept nogil    # its part should grow
# Return the size of the part of this hash, which changes when the part grows.
cdef u64 index_size(const Index* index, u64 hash) noexcept nogil
# Grow the part of this hash. Return False when there is no memory.
cdef bint index_grow(Index* index, u64 hash) noexcept nogil
cdef u64 index_used(const Index* index) noexcept nogil
cdef u64 index_bytes(const Index* index) noexcept nogil

# -- Where the rows of an embedding table lie: chunks of up to 32 MiB that never move, so that a row
# number is an address.
#
# Threads: any. Only taking a row and giving one back take the lock; whose row it is, is the index's
# to say.
cdef struct Arena:
    atomic[u8*]* chunks     # of all rows that there is room for; NULL where nothing was made yet
    u32 shift                   # a chunk has 1 << shift rows, and behind them a stamp for each
    u64 row_bytes
    u64 rows_max                # at most `room`
    u64 room                    # rows that there are chunks for: some more, for a table that is not
                            # bounded for a while
    atomic[u32] lock            # of the rest
    u64 next                    # rows handed out so far
    u32 free                    # the first of a list through the rows given back, or NO_ROW
    u64 free_count
    u64 chunk_count

cdef inline u8* arena_chunk(const Arena* arena, u32 row) noexcept nogil:
    """Return the chunk of a row. The load is relaxed: a thread that may touch the row took its
    bucket's lock after the thread that made the chunk released it; a thread that only fetches the
    row ahead may come while the chunk is made."""
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
# so many can be taken without a page fault
cdef bint arena_reserve(Arena* arena, u64 rows) noexcept nogil
cdef u64 arena_limit(Arena* arena) noexcept nogil       # of rows, as arena_bound last set it
cdef u64 arena_used(Arena* arena) noexcept nogil
cdef u64 arena_bytes(Arena* arena) noexcept nogil

# -- Rows of a table, pulled and pushed from any number of threads.
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
    i64* gone                   # their ids; NULL: not wanted
    u64 gone_max                # at most so many go, if `gone` is set

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
    """Return how many floats a row needs, and the same row as it is stored."""
    return 2 * dim + 2

# its settings are in place.  seen: counters, 2^k or 0
cdef bint rows_init(Rows* rows, u64 rows_max, u64 seen) noexcept nogil
cdef void rows_free(Rows* rows) noexcept nogil

# Pull rows. Return how many of the ids have no row; for these, `out` has their initial values.
# fresh: room for spare_floats.  stamp: 0 leaves the stamps as they are.
cdef u64 rows_pull(Rows* rows, const i64* ids, u64 n, Pulled kind, void* out, float* scales,
                   float* fresh,
                   u32 stamp) noexcept nogil

cdef bint distinct_init(Distinct* distinct, const i64* ids, u64 n) noexcept nogil
# Take one step of the optimizer. gradients[n, dim]: all finite; those of one id are summed first.
# sum: room for spare_floats.  number: of the step; rounding depends on it.
cdef void rows_push(Rows* rows, const Stride* step, const i64* ids, const Distinct* distinct,
                    const float* gradients, float* sum, u64 number,
                    u32 stamp, Pushed* pushed) noexcept nogil

# Write rows. width: dim, to keep the present state, or that of rows with state.
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
cdef u64 rows_expire(Rows* rows, u32 before) noexcept nogil      # of a lesser stamp
cdef u64 rows_count(Rows* rows) noexcept nogil
cdef u64 rows_bytes(Rows* rows) noexcept nogil                   # of memory, with the index
