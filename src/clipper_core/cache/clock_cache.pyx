"""The prediction cache.

Why set-associative. A CLOCK over the whole table has one hand, and therefore one lock or a scheme
to avoid it. Here each bucket of five ways has a hand, so a fill accesses two cache lines only, and
a lookup reads the same two and stores at most a reference bit. The cost: up to 1.5 points of hit
ratio; and a full bucket evicts while others have space, so a capacity of buckets x ways does not
guarantee that as many keys fit. Given up: shards with a map each (64 ns a hit on two threads,
against 17); 64-bit keys (with 10^6 entries one query in 2 x 10^13 gets the answer of another row:
at a million queries a second, once or twice a year). clock_cache.hpp has the operations that run
concurrently, and explains why they are correct.

Eviction. CLOCK, or SIEVE where configured: 1 to 9 points more hits on a static skew, up to 5 fewer
when popularity drifts. They differ only in whether the hand moves on after an eviction.

Memory. A power of two of buckets within three quarters of bytes_max, the rest for blobs. A blob's
bytes are reserved before it enters and given back after it has left, so the bound holds at every
moment. When there is no space for a blob, a second hand moves over the buckets that hold blobs (a
bit map names them) and evicts those not referenced since its last turn. Its work for one fill is
bounded; a blob for which there is still no space is not cached.

Pages of the table that were never written are not allocated yet, and the first write to one waits
for the system: 10 us, or some ms for a huge page. So a server writes to all of them
(`cache_touch`), on a thread of its own, as soon as it has a model whose predictions are cached.

A lookup never waits: if it finds one writer after another, it returns a miss. A blob is returned
under its bucket's lock, because between reading the pointer and counting the reference an eviction
could free it.

Source: Clipper (NSDI 2017) section 4.2; Corbato, "A paging experiment with the Multics system",
1968 (CLOCK).
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.math cimport NAN
from libc.stdlib cimport free
from libc.string cimport memcpy
from libcpp cimport bool

import math
import os
import threading
from collections import deque

import numpy as np

from clipper_core.runtime.dtype cimport BOOL, BYTES, F64, I64, STR
from clipper_core.runtime.machine cimport (
    acq_rel, aligned_new, atomic, i32, i64, relaxed, u32, u64, u8,
)
from clipper_core.runtime.row_hash cimport (
    AVX2, AVX512, PLAIN, HashSecret, Variant, hash_bytes, hash_hashed, hash_secret, variant_best,
)
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, OK, raise_for
from clipper_core.wire.prediction cimport (
    TAG_BLOB, TAG_NONE, Blob, Value, blob_data, blob_drop, blob_new, value_drop, value_hold,
    value_object,
)

cdef extern from "cache/clock_cache.hpp" namespace "clipper" nogil:
    enum:
        WAYS "clipper::kWays"
    cdef enum HandPolicy "clipper::Policy":
        pass
    u64 KEY_HI "clipper::kKeyHi"
    cdef struct Found:
        u64 word
        u8 tag
    cdef cppclass Bucket "clipper::Bucket<clipper::StdAtomics>":
        pass
    cdef cppclass CacheMeters:
        atomic[u64] blob_bytes
        atomic[u64] entries
        atomic[u64] evictions
        atomic[u64] blob_hand
    Found bucket_find(Bucket& bucket, u64 lo, u64 hi, Variant variant) noexcept
    Found bucket_find_held(Bucket& bucket, u64 lo, u64 hi,
                           void (*hold)(Found) noexcept nogil) noexcept
    u32 bucket_lock(Bucket& bucket) noexcept
    void bucket_unlock(Bucket& bucket, u32 sequence) noexcept
    void bucket_unlock_unchanged(Bucket& bucket, u32 sequence) noexcept
    Found bucket_peek(const Bucket& bucket, int way) noexcept
    int bucket_way(const Bucket& bucket, u64 lo, u64 hi) noexcept
    Found bucket_fill(Bucket& bucket, u64 lo, u64 hi, Found value, bool* evicted,
                      HandPolicy policy) noexcept
    Found bucket_take(Bucket& bucket, int way) noexcept
    u32 bucket_sweep(Bucket& bucket, u8 tag) noexcept
    bint bucket_holds(const Bucket& bucket, u8 tag) noexcept
    int first_bit(u64 word) noexcept
    void map_write(atomic[u64]* words, u64 index, bint set) noexcept
    void bucket_touch(Bucket& bucket) noexcept
    void fetch_lines(const void* bucket) noexcept
    void* pages_new(size_t nbytes) noexcept
    void pages_free(void* pages, size_t nbytes) noexcept

cdef enum:
    BUCKET_BYTES = 128
    PAGE_BUCKETS = 32       # in the smallest page that a machine has, 4 KiB
    TOUCH_BUCKETS = 16384   # 2 MiB: a call takes 0.1 to 10 ms where none of it was touched before
    BLOB_OVERHEAD = 64      # header and allocator, counted with a blob's bytes
    SWEEP_VISITS = 64       # buckets that one fill may search for blobs to evict,
    SWEEP_WORDS = 256       # and words of 64 buckets each that it may skip on the way
    PREFETCH = 32           # buckets that a bulk lookup has on their way from memory: a core's line
                            # fill buffers and a few
    HASHED = 256            # rows of a bulk lookup that are hashed before the first is looked up

cdef struct CacheState:
    HashSecret secret
    Bucket* table
    atomic[u64]* blob_map   # a bit a bucket: it holds a blob. Written under the bucket's lock.
    u64 mask                # buckets - 1
    Variant variant
    HandPolicy policy
    u64 pages_bytes         # buckets and map
    u64 blob_bytes_max
    CacheMeters meters


cdef Key key_of(const CacheState* cache, u64 model, u64 salt, const void* row,
                u64 nbytes) noexcept nogil:
    cdef Key key = hash_hashed(cache.secret, model, salt,
                               hash_bytes(cache.secret, <const u8*> row, nbytes), nbytes)
    key.lo += key.lo == 0                   # an empty way has lo 0
    key.hi &= KEY_HI
    return key


cdef Key row_hashed(const CacheState* cache, const void* row, u64 nbytes) noexcept nogil:
    return hash_bytes(cache.secret, <const u8*> row, nbytes)


cdef Key key_of_hashed(const CacheState* cache, u64 model, u64 salt, Key hashed,
                       u64 nbytes) noexcept nogil:
    cdef Key key = hash_hashed(cache.secret, model, salt, hashed, nbytes)
    key.lo += key.lo == 0
    key.hi &= KEY_HI
    return key


cdef Key key_marked(Key key, u64 mark) noexcept nogil:
    key.lo ^= mark
    key.lo += key.lo == 0
    return key


# -- making and ending
# ------------------------------------------------------------------------------------------------

cdef CacheState* cache_new(u64 bytes_max, u64 seed_lo, u64 seed_hi, Variant variant,
                           Policy policy) noexcept nogil:
    cdef u64 buckets = 1, table_bytes_max = bytes_max - bytes_max // 4 - (bytes_max % 4 != 0)
    cdef CacheState* cache = <CacheState*> aligned_new(sizeof(CacheState))
    if cache == NULL:
        return NULL
    while buckets < (<u64> 1 << 48) and buckets * 2 * BUCKET_BYTES <= table_bytes_max:
        buckets *= 2
    cache.pages_bytes = buckets * BUCKET_BYTES + (buckets + 63) // 64 * 8
    cache.table = <Bucket*> pages_new(cache.pages_bytes)
    if cache.table == NULL:
        free(cache)
        return NULL
    cache.blob_map = <atomic[u64]*> (cache.table + buckets)
    cache.mask = buckets - 1
    cache.blob_bytes_max = bytes_max - cache.pages_bytes if bytes_max > cache.pages_bytes else 0
    cache.variant = variant
    cache.policy = <HandPolicy> <int> policy
    hash_secret(&cache.secret, seed_lo, seed_hi, variant)
    return cache


cdef void cache_free(CacheState* cache) noexcept nogil:
    """Free the cache. No thread may use it any more."""
    cdef u64 index
    cdef int way
    cdef Found held
    if cache == NULL:
        return
    for index in range(cache.mask + 1):
        if cache.blob_map[index >> 6].load(relaxed) >> (index & 63) & 1:
            for way in range(WAYS):
                held = bucket_peek(cache.table[index], way)
                if held.tag == TAG_BLOB:
                    blob_drop(<Blob*> held.word)
    pages_free(cache.table, cache.pages_bytes)
    free(cache)


cdef u64 cache_touch(CacheState* cache, u64 start) noexcept nogil:
    cdef u64 i = start, buckets = cache.mask + 1
    cdef u64 end = start + min(<u64> TOUCH_BUCKETS, buckets - min(start, buckets))
    while i < end:
        bucket_touch(cache.table[i])
        i += PAGE_BUCKETS
    return end if end < buckets else 0


# -- lookup
# --------------------------------------------------------------------------------------------------

cdef void cache_prefetch(const CacheState* cache, const Key* key) noexcept nogil:
    fetch_lines(cache.table + (key.hi & cache.mask))


cdef void _hold(Found found) noexcept nogil:
    if found.tag == TAG_BLOB:
        (<Blob*> found.word).refs.fetch_add(1, relaxed)


cdef bint cache_lookup(CacheState* cache, const Key* key, Value* out) noexcept nogil:
    cdef Bucket* bucket = cache.table + (key.hi & cache.mask)
    cdef Found found = bucket_find(bucket[0], key.lo, key.hi, cache.variant)
    if found.tag == TAG_BLOB:
        found = bucket_find_held(bucket[0], key.lo, key.hi, _hold)
    out.word = found.word
    out.tag = found.tag
    return found.tag != TAG_NONE


cdef u64 cache_lookup_many(CacheState* cache, const Key* keys, u64 n, Value* values,
                           u8* found) noexcept nogil:
    cdef u64 i, hits = 0
    for i in range(min(n, <u64> PREFETCH)):
        cache_prefetch(cache, &keys[i])
    for i in range(n):
        if i + PREFETCH < n:
            cache_prefetch(cache, &keys[i + PREFETCH])
        found[i] = cache_lookup(cache, &keys[i], &values[i])
        hits += found[i]
    return hits


# -- filling
# --------------------------------------------------------------------------------------------------

cdef inline u64 _blob_cost(const Blob* blob) noexcept nogil:
    return BLOB_OVERHEAD + blob.nbytes + blob.qualifier_bytes


cdef inline void _map_blobs(CacheState* cache, Bucket* bucket) noexcept nogil:
    map_write(cache.blob_map, <u64> (bucket - cache.table), bucket_holds(bucket[0], TAG_BLOB))


cdef void _left(CacheState* cache, Found gone) noexcept nogil:
    """Free an entry that has left its bucket: its bytes and the cache's reference. Not under the
    lock: free() is slow."""
    if gone.tag == TAG_BLOB:
        cache.meters.blob_bytes.fetch_sub(_blob_cost(<Blob*> gone.word), acq_rel)
        blob_drop(<Blob*> gone.word)


cdef void _evict(CacheState* cache, Bucket* bucket, u32 sequence, u32 ways) noexcept nogil:
    """Empty these ways (a bit each) of the bucket, whose lock the caller holds, and unlock it."""
    cdef Found gone[5]
    cdef int count = 0, way
    for way in range(WAYS):
        if ways >> way & 1:
            gone[count] = bucket_take(bucket[0], way)
            count += 1
    _map_blobs(cache, bucket)
    bucket_unlock(bucket[0], sequence)
    cache.meters.entries.fetch_sub(<u64> count, relaxed)
    cache.meters.evictions.fetch_add(<u64> count, relaxed)
    for i in range(count):
        _left(cache, gone[i])


cdef void _forget(CacheState* cache, const Key* key) noexcept nogil:
    """A value that cannot be cached must not leave its predecessor behind."""
    cdef Bucket* bucket = cache.table + (key.hi & cache.mask)
    cdef u32 sequence = bucket_lock(bucket[0])
    cdef int way = bucket_way(bucket[0], key.lo, key.hi)
    _evict(cache, bucket, sequence, <u32> 1 << way if way >= 0 else 0)


cdef bint _reserve(CacheState* cache, u64 cost) noexcept nogil:
    """Make space for a blob. Return False if there is none. Two threads may move the hand at once:
    both see fewer blobs, which does no harm."""
    cdef u64 used = cache.meters.blob_bytes.load(relaxed)
    cdef u64 position, bits
    cdef int visits = 0, words = 0
    cdef u32 sequence
    cdef Bucket* bucket
    if cost > cache.blob_bytes_max // 8:
        return False
    while True:
        if used + cost <= cache.blob_bytes_max:
            if cache.meters.blob_bytes.compare_exchange_strong(used, used + cost, acq_rel):
                return True
            continue                                    # `used` now holds what another thread left
        if visits == SWEEP_VISITS or words == SWEEP_WORDS:
            return False
        position = cache.meters.blob_hand.load(relaxed)
        bits = cache.blob_map[position >> 6].load(relaxed) >> (position & 63)
        if bits == 0:
            words += 1
            cache.meters.blob_hand.store(((position | 63) + 1) & cache.mask, relaxed)
            continue
        visits += 1
        position += <u64> first_bit(bits)
        cache.meters.blob_hand.store((position + 1) & cache.mask, relaxed)
        bucket = cache.table + position
        sequence = bucket_lock(bucket[0])
        _evict(cache, bucket, sequence, bucket_sweep(bucket[0], TAG_BLOB))
        used = cache.meters.blob_bytes.load(relaxed)


cdef void cache_fill(CacheState* cache, const Key* key, const Value* value) noexcept nogil:
    cdef Bucket* bucket = cache.table + (key.hi & cache.mask)
    cdef Found held = Found(value.word, value.tag), gone
    cdef bool evicted = False
    cdef u32 sequence
    if held.tag == TAG_NONE:
        return
    if held.tag == TAG_BLOB and not _reserve(cache, _blob_cost(<Blob*> held.word)):
        _forget(cache, key)
        return
    _hold(held)
    sequence = bucket_lock(bucket[0])
    gone = bucket_fill(bucket[0], key.lo, key.hi, held, &evicted, cache.policy)
    if gone.tag == TAG_BLOB or held.tag == TAG_BLOB:
        _map_blobs(cache, bucket)
    bucket_unlock(bucket[0], sequence)
    if gone.tag == TAG_NONE:
        cache.meters.entries.fetch_add(1, relaxed)
    elif evicted:
        cache.meters.evictions.fetch_add(1, relaxed)
    _left(cache, gone)


cdef bint cache_forget(CacheState* cache, const Key* key) noexcept nogil:
    cdef Bucket* bucket = cache.table + (key.hi & cache.mask)
    cdef u32 sequence = bucket_lock(bucket[0])
    cdef int way = bucket_way(bucket[0], key.lo, key.hi)
    cdef Found gone
    if way < 0:
        bucket_unlock_unchanged(bucket[0], sequence)
        return False
    gone = bucket_take(bucket[0], way)
    if gone.tag == TAG_BLOB:
        _map_blobs(cache, bucket)
    bucket_unlock(bucket[0], sequence)
    cache.meters.entries.fetch_sub(1, relaxed)
    _left(cache, gone)
    return True


cdef u64 cache_bytes(const CacheState* cache) noexcept nogil:
    return cache.pages_bytes + (<CacheState*> cache).meters.blob_bytes.load(relaxed)


cdef u64 cache_entries(const CacheState* cache) noexcept nogil:
    return (<CacheState*> cache).meters.entries.load(relaxed)


cdef u64 cache_evictions(const CacheState* cache) noexcept nogil:
    return (<CacheState*> cache).meters.evictions.load(relaxed)


# -- the Python interface
# --------------------------------------------------------------------------------------------------

cdef dict _VARIANTS = {"avx512": AVX512, "avx2": AVX2, "plain": PLAIN}

# of this machine, best first
VARIANTS = tuple([name for name, variant in _VARIANTS.items() if variant <= variant_best()])


POLICIES = ("clock", "sieve")       # by their number in Policy


cdef Policy policy_of(str name) except *:
    if name not in POLICIES:
        raise ValueError(f"no cache policy {name!r}; there are {' and '.join(POLICIES)}")
    return <Policy> <int> POLICIES.index(name)


cdef class SharedBlob:
    """Bytes or text that a cache holds by reference; `refs` counts the holders, this object too.
    Threads: any."""
    cdef Blob* blob

    def __cinit__(self, data):
        cdef bytes content = data.encode() if isinstance(data, str) else data
        self.blob = blob_new(PyBytes_AS_STRING(content), <u64> len(content))
        if self.blob == NULL:
            raise MemoryError("no memory for a blob")
        self.blob.dtype = STR if isinstance(data, str) else BYTES

    def __dealloc__(self):
        if self.blob != NULL:
            blob_drop(self.blob)

    @property
    def refs(self):
        return self.blob.refs.load(relaxed)


cdef Value _value_of(object output) except *:
    """Return a Value; a blob has a reference of its own."""
    cdef Value value
    cdef double number
    if isinstance(output, (bytes, str)):
        return _value_of(SharedBlob(output))
    if isinstance(output, SharedBlob):
        value.word = <u64> (<SharedBlob> output).blob
        value.tag = TAG_BLOB
        value_hold(&value)
    elif isinstance(output, float):
        number = output
        memcpy(&value.word, &number, 8)
        value.tag = F64
    elif isinstance(output, int):
        value.tag = BOOL if type(output) is type(True) else I64
        value.word = <u64> <i64> output
    else:
        raise TypeError(f"the cache takes float, int, bool, bytes and str, not "
                        f"{type(output).__name__}")
    return value


cdef class _Rows:
    """A borrowed buffer seen as `n` rows of `row_bytes` bytes."""
    cdef Py_buffer view
    cdef u64 n, row_bytes

    def __cinit__(self, rows, u64 row_bytes):
        PyObject_GetBuffer(rows, &self.view, PyBUF_SIMPLE)
        if row_bytes == 0 or <u64> self.view.len % row_bytes:
            raise ValueError(f"{self.view.len} bytes are not a whole number of rows of {row_bytes} "
                             f"bytes")
        self.n = <u64> self.view.len // row_bytes
        self.row_bytes = row_bytes

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    cdef const char* row(self, u64 i) noexcept nogil:
        return <const char*> self.view.buf + i * self.row_bytes


cdef void _lookup_rows(CacheState* cache, u64 model, u64 salt, _Rows rows, u64 start, u64 n,
                       double* out) noexcept nogil:
    """Look up at most HASHED rows."""
    cdef Key keys[256]
    cdef Value values[256]
    cdef u8 found[256]
    cdef u64 i
    for i in range(n):
        keys[i] = key_of(cache, model, salt, rows.row(start + i), rows.row_bytes)
    cache_lookup_many(cache, keys, n, values, found)
    for i in range(n):
        out[i] = NAN
        if found[i] and values[i].tag == F64:
            memcpy(&out[i], &values[i].word, 8)
        value_drop(&values[i])


cdef bint _has_name(const Value* value, u64 name) noexcept nogil:
    if value.tag != TAG_BLOB:
        return value.tag == I64 and value.word == name * <u64> 0x9e3779b97f4a7c15
    return (<Blob*> value.word).nbytes == 8 and (<u64*> blob_data(<Blob*> value.word))[0] == name


cdef u64 _race(CacheState* cache, u64 seed, u64 ops, u64 key_max, Blob** shared,
               u64* hits) noexcept nogil:
    cdef Key key
    cdef Value value
    cdef u64 _op, name, wrong = 0, state = seed * 2 + 1
    for _op in range(ops):
        state = state * <u64> 6364136223846793005 + <u64> 1442695040888963407
        name = (state >> 33) % key_max
        key = key_of(cache, 1, 0, &name, 8)
        if (state >> 20) & 7 and cache_lookup(cache, &key, &value):
            hits[0] += 1
            wrong += not _has_name(&value, name)
            value_drop(&value)
            continue
        if (state >> 40) & 15 == 0:
            cache_forget(cache, &key)
            continue
        value.tag = I64 if (state >> 25) & 1 else TAG_BLOB
        value.word = name * <u64> 0x9e3779b97f4a7c15
        if value.tag == TAG_BLOB:
            value.word = <u64> (shared[name] if shared != NULL else blob_new(&name, 8))
        cache_fill(cache, &key, &value)
        if shared == NULL:
            value_drop(&value)
    return wrong


cdef class ClockCache:
    """A cache of predictions by (model, row bytes, salt), at most `bytes_max` bytes. Threads: any.

    `row` is any C-contiguous buffer. `seed` (128 bits, for tests) defaults to a random one. Raises
    MemoryError. `policy` chooses who leaves a full bucket: "clock", or "sieve" (better on a static
    skew, worse under drift). `variant` (for tests) is one of VARIANTS: the instructions that
    compare and hash; the best by default. A table has at least one bucket (136 bytes), however
    small `bytes_max`. Source: see the module.
    """
    cdef CacheState* state

    def __cinit__(self, u64 bytes_max, seed=None, *, str policy="clock", str variant=VARIANTS[0]):
        cdef object bits = int.from_bytes(os.urandom(16), "little") if seed is None else int(seed)
        if variant not in VARIANTS:
            raise ValueError(f"no variant {variant!r} on this machine; "
                             f"it has {', '.join(VARIANTS)}")
        self.state = cache_new(bytes_max, bits & 0xffffffffffffffff,
                               (bits >> 64) & 0xffffffffffffffff,
                               <Variant> <int> _VARIANTS[variant], policy_of(policy))
        if self.state == NULL:
            raise MemoryError(f"no memory for a cache of {bytes_max} bytes")

    def __dealloc__(self):
        cache_free(self.state)

    cdef Key _key(self, u64 model, object row, u64 salt) except *:
        cdef Py_buffer view
        cdef Key key
        PyObject_GetBuffer(row, &view, PyBUF_SIMPLE)
        key = key_of(self.state, model, salt, view.buf, <u64> view.len)
        PyBuffer_Release(&view)
        return key

    def key(self, u64 model, row, u64 salt=0):
        """The 120-bit key as (64 low bits, 56 high bits); the bucket is `high & (buckets - 1)`."""
        cdef Key key = self._key(model, row, salt)
        return key.lo, key.hi

    def keys(self, u64 model, rows, u64 row_bytes, u64 salt=0):
        """The keys of rows of `row_bytes` bytes each, as bytes: u64[n, 2]. Raises ValueError for a
        part of a row."""
        cdef _Rows given = _Rows(rows, row_bytes)
        cdef object out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (given.n * sizeof(Key)))
        cdef Key* keys = <Key*> PyBytes_AS_STRING(out)
        cdef u64 i
        with nogil:
            for i in range(given.n):
                keys[i] = key_of(self.state, model, salt, given.row(i), row_bytes)
        return out

    def lookup(self, u64 model, row, u64 salt=0):
        """The prediction of this row, or None."""
        cdef Key key = self._key(model, row, salt)
        cdef Value value
        if not cache_lookup(self.state, &key, &value):
            return None
        try:
            return value_object(&value)
        finally:
            value_drop(&value)

    def lookup_many(self, u64 model, rows, u64 row_bytes, u64 salt=0):
        """The f64 predictions of all rows, NaN where there is none, as bytes: f64[n]. Errors as in
        `keys`."""
        cdef _Rows given = _Rows(rows, row_bytes)
        cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (given.n * 8))
        cdef double* values = <double*> PyBytes_AS_STRING(out)
        cdef u64 done = 0, n
        with nogil:
            while done < given.n:
                n = min(given.n - done, <u64> HASHED)
                _lookup_rows(self.state, model, salt, given, done, n, values + done)
                done += n
        return out

    def fill(self, u64 model, row, value, u64 salt=0):
        """Insert or replace. A blob larger than an eighth of the room for blobs is not kept. Raises
        TypeError."""
        cdef Key key = self._key(model, row, salt)
        cdef Value held = _value_of(value)
        cache_fill(self.state, &key, &held)
        value_drop(&held)

    def forget(self, u64 model, row, u64 salt=0):
        """Remove the entry of this row. Return True if it was there."""
        cdef Key key = self._key(model, row, salt)
        return cache_forget(self.state, &key)

    def race(self, u64 seed, u64 ops, u64 key_max, tuple shared=()):
        """Run random lookups, fills and a few removals without the GIL. Return (hits, wrong
        answers). For tests: run it from many threads.

        Half of the fills are scalars, half blobs: fresh ones, or those of `shared`, where blob i
        holds i in 8 bytes.
        """
        cdef Blob* blobs[256]
        cdef u64 hits = 0, wrong
        cdef Blob** given = NULL
        if not 0 < key_max or len(shared) > 256 or (shared and <u64> len(shared) != key_max):
            raise ValueError("key_max is at least 1, and shared has as many blobs, at most 256")
        for i in range(len(shared)):
            given = blobs
            blobs[i] = (<SharedBlob?> shared[i]).blob
        with nogil:
            wrong = _race(self.state, seed, ops, key_max, given, &hits)
        return hits, wrong

    @property
    def buckets(self):
        return self.state.mask + 1

    @property
    def bytes(self):
        return cache_bytes(self.state)

    @property
    def entries(self):
        return cache_entries(self.state)

    @property
    def evictions(self):
        return cache_evictions(self.state)

    def touch(self, u64 start=0):
        """Have the system find memory for a stretch of the table that begins with bucket `start`.

        No entry changes. Return the bucket to go on with, 0 after the last stretch.
        """
        with nogil:
            start = cache_touch(self.state, start)
        return start


# -- similar rows
# --------------------------------------------------------------------------------------------------
#
# Random projections map a row to cells, and these to the key of a cache entry that near rows share.
#
# Why a key and not a search. The cells go through the same 120-bit hash as a row does, so that the
# table, its policies, the joining of equal queries and the bulk lookups know nothing of similarity.
# The price: two near rows on either side of a boundary miss each other, so the width must be
# several times the distance that is meant to be near.
#
# The checks evaluate behind the answer, not before it: a hit is as fast as ever, and an overloaded
# model skips its checks (at most WAITING_MAX are in flight) rather than its queries.
#
# Source: Datar, Immorlica, Indyk, Mirrokni, "Locality-sensitive hashing scheme based on p-stable
# distributions", SoCG 2004.
cdef enum:
    WAITING_MAX = 8


def difference(cached, fresh):
    """Return how far apart two outputs are: the largest |a - b| of numbers or arrays of one shape;
    of others 0.0 or, unequal, inf."""
    a, b = np.asarray(cached), np.asarray(fresh)
    if a.dtype.kind not in "biuf" or b.dtype.kind not in "biuf" or a.shape != b.shape:
        return 0.0 if type(cached) is type(fresh) and np.array_equal(a, b) else math.inf
    if a.size == 0 or np.array_equal(a, b, equal_nan=True):
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.where(a == b, 0.0, np.abs(a.astype("f8") - b.astype("f8")))
    return math.inf if np.isnan(apart).any() else float(apart.max())


cdef class Similarity:
    """Rows that fall into the same `projections` cells of `width` are one to the cache; for one
    model. Threads: any.

    `width` is in the units of Euclidean distance between rows: two rows r apart share an entry with
    probability about (1 - 0.8 r / width) ** projections while r is much less than width.
    `projections`: 8, 16, 24 or 32. `check_share` of the hits of single queries (0 to 1) are
    evaluated too; outputs further apart than `tolerance` have disagreed. Raises the error of
    Status.BAD_INPUT.

    >>> near = Similarity(width=0.5, projections=8)
    >>> near.bind("f32", 2, seed=1)
    >>> near.cells(np.array([1.0, 2.0], "f4")) == near.cells(np.array([1.0, 2.0], "f4"))
    True
    """

    def __cinit__(self, double width, u32 projections=16, double check_share=0.01,
                  double tolerance=0.0):
        if not 0 < width < math.inf:
            raise_for(BAD_INPUT,
                      f"width {width} of a similarity: a positive number, in units of distance "
                      f"between rows")
        if projections not in (8, 16, 24, 32):
            raise_for(BAD_INPUT, f"{projections} projections of a similarity: 8, 16, 24 or 32")
        if not 0 <= check_share <= 1 or not 0 <= tolerance < math.inf:
            raise_for(BAD_INPUT,
                      f"check_share {check_share}, tolerance {tolerance}: a share from 0 to 1, and "
                      f"a number from 0")
        self.width, self.projections, self.check_share, self.tolerance = (width, projections,
                check_share, tolerance)
        self.waiting = deque()
        self.counting = threading.Lock()

    def __dealloc__(self):
        free(self.state.planes)

    cdef int draw(self, bint wide, u64 n, u64 seed) except -1:
        if self.drawn:
            raise_for(BAD_INPUT, "a similarity belongs to one model; make another")
        self.state.n, self.state.count, self.state.wide = n, self.projections, wide
        if n >> 32 or not projection_draw(&self.state, self.width, seed):
            raise_for(NO_MEMORY,
                      f"no memory for {self.projections} projections of rows of {n} numbers")
        self.drawn = True
        return 0

    def bind(self, str dtype, u64 n, u64 seed):
        """Draw the projections for rows of n elements, f32 or f64. A model does this itself."""
        if dtype not in ("f32", "f64"):
            raise_for(BAD_INPUT, f"similar rows are f32 or f64 of one shape, not {dtype}")
        self.draw(dtype == "f64", n, seed)

    def cells(self, row):
        """The cells of a C-contiguous row as a tuple of ints; None for one with NaN, infinities, or
        too far out."""
        cdef i32 found[32]
        cdef const unsigned char[::1] data = memoryview(row).cast("B")
        if not self.drawn or <u64> data.shape[0] != self.state.n * (8 if self.state.wide else 4):
            raise_for(BAD_INPUT,
                      f"a row of {self.state.n} elements was expected, got {data.shape[0]} bytes")
        if not projection_cells(self.state, &data[0], found):
            return None
        return tuple([found[i] for i in range(self.projections)])

    # -- what it costs in truth

    cdef bint check_is_due(self) noexcept:
        """Return whether this hit is one of the share to check. These are spread evenly: hit h is
        one where h x share passes a whole number."""
        cdef u64 h = self.hits.fetch_add(1, relaxed)
        return (<u64> ((h + 1) * self.check_share) != <u64> (h * self.check_share)
                and len(self.waiting) < WAITING_MAX)

    cdef int remember(self, object future, object cached) except -1:
        self.waiting.append((future, cached))
        self.compare()
        return 0

    def compare(self):
        """Compare what has been evaluated by now. An evaluation that ended without an output counts
        for nothing."""
        with self.counting:
            for _ in range(len(self.waiting)):
                future, cached = self.waiting.popleft()
                if not future.done():
                    self.waiting.append((future, cached))
                elif future.status(0) == OK:
                    apart = difference(cached, future.output(0))
                    self.checked += 1
                    self.disagreed += apart > self.tolerance
                    self.worst = max(self.worst, apart)

    def stats(self):
        """Return the counts: `hits` of single queries, those of them that were `checked`, those
        that `disagreed`, and the `worst` difference seen."""
        self.compare()
        return {"hits": self.hits.load(relaxed), "checked": self.checked,
                "disagreed": self.disagreed, "worst": self.worst}
