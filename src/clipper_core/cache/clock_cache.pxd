# Prediction cache: a set-associative CLOCK over 128-byte buckets, read without locks (a sequence
# lock per bucket).
#
# A bucket holds 5 ways of (120-bit key, 8-bit tag, 64-bit word). Capacity in bytes = buckets x 128
# + one bit per entry (whether it holds a blob) + bytes of blobs, with 64 for the header of each.
# Hit: read the sequence, compare keys, read the word, recheck the sequence, set the reference bit
# if clear. Source: Clipper paper section 4.2 (CLOCK); Corbato 1968; docs/design.md (why
# set-associative, why 120 bits and a random seed).
from libcpp cimport bool

from clipper_core.runtime.machine cimport atomic, i32, u32, u64, u8
from clipper_core.runtime.row_hash cimport Key, Variant
from clipper_core.wire.prediction cimport Value

cdef struct CacheState        # clock_cache.pyx

cdef enum Policy:             # which entry of a full bucket is evicted
    CLOCK = 0
    SIEVE = 1

cdef Policy policy_of(str name) except *    # "clock" or "sieve"; ValueError for another

# -- Hashing. Threads: any. The seed is random per process, so that a client cannot choose rows that
# fall into one bucket.
cdef Key key_of(const CacheState* cache, u64 model, u64 salt, const void* row,
                u64 nbytes) noexcept nogil
# The two steps of key_of, for a row that several models have.
cdef Key row_hashed(const CacheState* cache, const void* row, u64 nbytes) noexcept nogil
cdef Key key_of_hashed(const CacheState* cache, u64 model, u64 salt, Key hashed,
                       u64 nbytes) noexcept nogil
# Return a key that differs for every mark, in the same bucket; for mark 0 the same key.
cdef Key key_marked(Key key, u64 mark) noexcept nogil

# -- the cache. Threads: any.
cdef CacheState* cache_new(u64 bytes_max, u64 seed_lo, u64 seed_hi, Variant variant,
                           Policy policy) noexcept nogil
# NULL when memory is out
cdef void cache_free(CacheState* cache) noexcept nogil
# Look up a key. A blob in `out` has a new reference.
cdef bint cache_lookup(CacheState* cache, const Key* key, Value* out) noexcept nogil
# Look up n keys and return how many were found. values[i] and found[i] (1 or 0) are set for each
# key as by cache_lookup. Buckets are prefetched.
cdef u64 cache_lookup_many(CacheState* cache, const Key* keys, u64 n, Value* values,
                           u8* found) noexcept nogil
# Prefetch the bucket of a key, before lookups in bulk.
cdef void cache_prefetch(const CacheState* cache, const Key* key) noexcept nogil
# Fill the entry of a key. The cache takes its own reference.
cdef void cache_fill(CacheState* cache, const Key* key, const Value* value) noexcept nogil
# Remove the entry of a key. Return False if there was none. An evaluation in progress may still
# fill it: to remove an entry for good, use another key from then on.
cdef bint cache_forget(CacheState* cache, const Key* key) noexcept nogil
# Have the system allocate the pages of a part of the table that begins with bucket `start`, so that
# no fill waits for a page fault. No entry changes. Return the bucket to continue with; 0 at the end
# of the table. It may take milliseconds, so the loop must not call it.
cdef u64 cache_touch(CacheState* cache, u64 start) noexcept nogil
cdef u64 cache_bytes(const CacheState* cache) noexcept nogil
cdef u64 cache_entries(const CacheState* cache) noexcept nogil
cdef u64 cache_evictions(const CacheState* cache) noexcept nogil

# -- similar rows: near float rows share a cache entry. Off unless a model turns it on, and its
# error is measured while it serves: every Nth hit is also evaluated, and the two outputs are
# compared. Threads: any.
cdef extern from "cache/projection.hpp" namespace "clipper" nogil:
    enum:
        CELLS_MAX "clipper::kCellsMax"
    cdef cppclass Projection:
        float* planes
        u64 n
        u32 count
        bool wide
    bool projection_draw(Projection* projection, double width, u64 seed) noexcept
    # Compute the cells of a row. Return False if the row has none.
    bool projection_cells(const Projection& projection, const void* row, i32* cells) noexcept

cdef class Similarity:
    cdef Projection state
    cdef bint drawn             # the type of the rows is known, and `state` is initialized
    cdef readonly double width
    cdef readonly u32 projections
    cdef readonly double check_share
    cdef readonly double tolerance
    cdef atomic[u64] hits
    cdef object waiting         # deque of (future of the evaluation, the cached output)
    cdef object counting        # a lock for the following fields
    cdef u64 checked
    cdef u64 disagreed
    cdef double worst

    cdef int draw(self, bint wide, u64 n, u64 seed) except -1
    cdef bint check_is_due(self) noexcept
    cdef int remember(self, object future, object cached) except -1
