# Prediction cache: a set-associative CLOCK over 128-byte buckets, read without locks (a sequence lock per bucket), and
# beside it the table of evaluations in flight, so that identical queries cost one evaluation.
#
# A bucket holds 5 ways of (120-bit key, 8-bit tag, 64-bit word). Capacity in bytes = buckets x 128 + a bit
# each (it holds a blob) + bytes of blobs with 64 each for their headers.
# Hit: read the sequence, compare keys, read the word, recheck the sequence, set the reference bit if clear.
# Source: Clipper paper section 4.2 (CLOCK); Corbato 1968; docs/design.md (why set-associative, why 120 bits and a
# random seed).
from clipper_core.machine cimport u8, u32, u64
from clipper_core.prediction cimport Value
from clipper_core.status cimport Status

cdef struct Key:
    u64 lo
    u64 hi                    # low 56 bits; the top byte is 0 (the bucket keeps the value's tag there)

cdef struct CacheState        # clock_cache.pyx
cdef struct PendingTable      # clock_cache.pyx

# -- hashing. Threads: any. Seeded at random per process, so that nobody can aim at a bucket.
cdef Key key_of(const CacheState* cache, u64 model, u64 salt, const void* row, u64 nbytes) noexcept nogil

# -- the cache. Threads: any.
cdef CacheState* cache_new(u64 bytes_max, u64 seed_lo, u64 seed_hi) noexcept nogil    # NULL when memory is out
cdef void cache_free(CacheState* cache) noexcept nogil
cdef bint cache_lookup(CacheState* cache, const Key* key, Value* out) noexcept nogil  # a blob comes with a reference
cdef void cache_prefetch(const CacheState* cache, const Key* key) noexcept nogil      # ahead of lookups in bulk
cdef void cache_fill(CacheState* cache, const Key* key, const Value* value) noexcept nogil  # takes its own reference
cdef u64 cache_bytes(const CacheState* cache) noexcept nogil
cdef u64 cache_entries(const CacheState* cache) noexcept nogil
cdef u64 cache_evictions(const CacheState* cache) noexcept nogil

# -- evaluations in flight: key -> ticket of the task that evaluates it. Threads: loop only.
cdef PendingTable* pending_new(u64 entries_max) noexcept nogil
cdef void pending_free(PendingTable* table) noexcept nogil
cdef u64 pending_find(const PendingTable* table, const Key* key) noexcept nogil       # 0: nobody evaluates it
cdef Status pending_put(PendingTable* table, const Key* key, u64 ticket) noexcept nogil   # or replace; ticket != 0
cdef void pending_remove(PendingTable* table, const Key* key, u64 ticket) noexcept nogil  # if it still names this
cdef u64 pending_count(const PendingTable* table) noexcept nogil
