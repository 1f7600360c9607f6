# The index of an embedding table: which row an id has, and whose turn it is with that row.
#
# Ids are hashed into buckets of one cache line, in the order of their hashes. A part is an array of
# buckets, for the hashes that begin alike; it grows, and then splits, by itself. An id that finds
# its bucket full goes on to the next one.
#
# Threads: any, but whoever calls index_grow does so alone: it moves a part.
# Whoever holds an id's bucket may read and write its row; nobody holds two but in rising order, and
# only while looking.
from clipper_core.params.row_lock cimport RowLock
from clipper_core.runtime.machine cimport atomic, i64, u32, u64

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
    u32 hold_seen(const Seen* seen, i64 id) noexcept    # as index_hold -> the row
    void* row_pages_new(size_t bytes) noexcept
    void row_pages_free(void* at, size_t bytes) noexcept
    void row_pages_touch(void* at, size_t bytes) noexcept

cdef enum:
    GATHER_MAX = 128            # ids of one home: 125 at most

cdef bint index_init(Index* index) noexcept nogil
cdef void index_free(Index* index) noexcept nogil
cdef u64 index_after(const Index* index, u64 hash) noexcept nogil
# ^ the least hash of the next bucket; 0: this is the last one
cdef bint index_add(Index* index, u64 hash, const Held* held, i64 id, u32 row) noexcept nogil
# ^ False: the part must grow first
cdef void index_remove(Index* index, const Held* held, i64 id) noexcept nogil
cdef u32 index_gather(const Index* index, u64 hash, Bucket* home, i64* ids,
                      u32* rows) noexcept nogil
# ^ all ids whose home this locked bucket is, and their rows: at most GATHER_MAX.  hash: any that
# leads here
cdef bint index_full(const Index* index, u64 hash) noexcept nogil    # its part wants to grow
# of its part; another one once it has grown
cdef u64 index_size(const Index* index, u64 hash) noexcept nogil
cdef bint index_grow(Index* index, u64 hash) noexcept nogil
# ^ the part of this hash. False: no memory
cdef u64 index_used(const Index* index) noexcept nogil
cdef u64 index_bytes(const Index* index) noexcept nogil
