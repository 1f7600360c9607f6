"""The prediction cache, and the table of evaluations in flight.

Why set-associative. A CLOCK over the whole table keeps one hand, one list and therefore one lock or a scheme to do without;
here a hand turns within a bucket of five ways, so a fill touches two cache lines and knows nothing of the rest, and
a lookup reads the same two lines with no store beyond a reference bit. The price: up to 1.5 points of hit ratio, and a full
bucket evicts while others have room, so capacity is buckets x ways and no promise to a key.
Given up: per-thread shards with a map each (64 -> 88 ns a hit on two threads, against 17 -> 22), SIEVE (better on a static
skew, worse by up to 6 points when popularity drifts), and 64-bit keys (with 10^6 entries one query in 10^13 would get a
stranger's answer, at a million queries a second a few times a year). The lock-free steps and why they are right: clock_cache.hpp.

Memory. A power of two of buckets within three quarters of bytes_max, the rest for blobs. A blob's bytes are reserved before
it enters and given back after it has left, so the sum never exceeds the bound, not for a moment. When a blob finds no room, a
second hand turns over the buckets that hold blobs (a bit map names them) and takes those not referenced since its last turn;
its work for one fill is bounded, and a blob that still finds no room is simply not cached.

A lookup never waits: when it meets one writer after another it answers "miss". A blob is handed out under its bucket's lock,
because between reading the pointer and counting the reference an eviction could free it.

Source: Clipper (NSDI 2017) section 4.2; Corbato, "A paging experiment with the Multics system", 1968 (CLOCK).
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import os

from clipper_core.dtype cimport BOOL, BYTES, F64, I64, STR
from clipper_core.machine cimport CHECK, acq_rel, aligned_new, atomic, i64, pause, relaxed, u8, u32, u64
from clipper_core.prediction cimport (TAG_BLOB, TAG_NONE, Blob, Value, blob_data, blob_drop, blob_new, value_drop, value_hold,
                                      value_object)
from clipper_core.status cimport FULL, OK, Status, raise_for

cdef extern from "clock_cache.hpp" namespace "clipper" nogil:
    enum:
        WAYS "clipper::kWays"
        LOOKUP_TRIES "clipper::kLookupTries"
    u64 KEY_HI "clipper::kKeyHi"
    cdef cppclass HashSecret:
        pass
    cdef struct HashedRow:
        u64 lo
        u64 hi
    cdef struct Found:
        u64 word
        u8 tag
    cdef cppclass Bucket "clipper::Bucket<clipper::StdAtomics>":
        atomic[u64] lo[5]
        atomic[u64] hi[5]
    cdef cppclass CacheMeters:
        atomic[u64] blob_bytes
        atomic[u64] entries
        atomic[u64] evictions
        atomic[u64] blob_hand
    void hash_secret(HashSecret* secret, u64 seed_lo, u64 seed_hi) noexcept
    HashedRow hash_row(const HashSecret& secret, u64 model, u64 salt, const void* row, u64 nbytes) noexcept
    Found bucket_find(Bucket& bucket, u64 lo, u64 hi) noexcept
    bint bucket_try_lock(Bucket& bucket, u32* sequence) noexcept
    u32 bucket_lock(Bucket& bucket) noexcept
    void bucket_unlock(Bucket& bucket, u32 sequence) noexcept
    void bucket_unlock_unchanged(Bucket& bucket, u32 sequence) noexcept
    void bucket_touch(Bucket& bucket, int way) noexcept
    Found bucket_peek(const Bucket& bucket, int way) noexcept
    int bucket_way(const Bucket& bucket, u64 lo, u64 hi) noexcept
    int bucket_choose(Bucket& bucket, u64 lo) noexcept
    void bucket_write(Bucket& bucket, int way, u64 lo, u64 hi, u8 tag, u64 word) noexcept
    bint bucket_spend(Bucket& bucket, int way) noexcept
    bint bucket_holds(const Bucket& bucket, u8 tag) noexcept
    void* pages_new(size_t nbytes) noexcept
    void pages_free(void* pages, size_t nbytes) noexcept

cdef extern from *:
    """
    static inline int first_bit(unsigned long long word) { return __builtin_ctzll(word); }
    static inline void fetch_line(const void* p) { __builtin_prefetch(p); }
    static inline void bit_set(std::atomic<std::uint64_t>& w, unsigned long long bit) {
        w.fetch_or(bit, std::memory_order_relaxed);
    }
    static inline void bit_clear(std::atomic<std::uint64_t>& w, unsigned long long bit) {
        w.fetch_and(~bit, std::memory_order_relaxed);
    }
    """
    int first_bit(u64 word) noexcept nogil
    void fetch_line(const void* p) noexcept nogil
    void bit_set(atomic[u64]& word, u64 bit) noexcept nogil
    void bit_clear(atomic[u64]& word, u64 bit) noexcept nogil

cdef enum:
    BUCKET_BYTES = 128
    BLOB_OVERHEAD = 64      # header and allocator, counted with a blob's bytes
    SWEEP_VISITS = 64       # buckets that one fill may search for blobs to evict,
    SWEEP_WORDS = 256       # and words of 64 buckets each that it may skip on the way
    PREFETCH = 32           # rows of a bulk lookup whose buckets are fetched ahead

cdef struct CacheState:
    HashSecret secret
    Bucket* table
    atomic[u64]* blob_map   # a bit a bucket: it holds a blob. Written under the bucket's lock.
    u64 mask                # buckets - 1
    u64 pages_bytes         # buckets and map
    u64 blob_bytes_max
    CacheMeters meters


cdef Key key_of(const CacheState* cache, u64 model, u64 salt, const void* row, u64 nbytes) noexcept nogil:
    cdef Key key
    cdef HashedRow hashed = hash_row(cache.secret, model, salt, row, nbytes)
    key.lo = hashed.lo + (hashed.lo == 0)   # an empty way has lo 0
    key.hi = hashed.hi & KEY_HI
    return key


# -- making and ending -------------------------------------------------------------------------------------------------

cdef u64 _buckets_for(u64 bytes_max) noexcept nogil:
    cdef u64 buckets = 1
    while buckets < (<u64> 1 << 48) and buckets * 2 * BUCKET_BYTES <= bytes_max - bytes_max // 4:
        buckets *= 2
    return buckets


cdef CacheState* cache_new(u64 bytes_max, u64 seed_lo, u64 seed_hi) noexcept nogil:
    cdef u64 buckets = _buckets_for(bytes_max)
    cdef CacheState* cache = <CacheState*> aligned_new(sizeof(CacheState))
    if cache == NULL:
        return NULL
    cache.pages_bytes = buckets * BUCKET_BYTES + (buckets + 63) // 64 * 8
    cache.table = <Bucket*> pages_new(cache.pages_bytes)
    if cache.table == NULL:
        free(cache)
        return NULL
    cache.blob_map = <atomic[u64]*> (cache.table + buckets)
    cache.mask = buckets - 1
    cache.blob_bytes_max = bytes_max - cache.pages_bytes if bytes_max > cache.pages_bytes else 0
    hash_secret(&cache.secret, seed_lo, seed_hi)
    return cache


cdef void _drop_blobs(Bucket* bucket) noexcept nogil:
    cdef Found held
    for way in range(WAYS):
        held = bucket_peek(bucket[0], way)
        if held.tag == TAG_BLOB:
            blob_drop(<Blob*> held.word)


cdef void cache_free(CacheState* cache) noexcept nogil:
    """Nobody may use the cache any more."""
    cdef u64 word, bits
    if cache == NULL:
        return
    for word in range((cache.mask + 64) // 64):
        bits = cache.blob_map[word].load(relaxed)
        while bits:
            _drop_blobs(cache.table + word * 64 + first_bit(bits))
            bits &= bits - 1
    pages_free(cache.table, cache.pages_bytes)
    free(cache)


# -- looking up --------------------------------------------------------------------------------------------------------

cdef void cache_prefetch(const CacheState* cache, const Key* key) noexcept nogil:
    cdef const char* bucket = <const char*> (cache.table + (key.hi & cache.mask))
    fetch_line(bucket)
    fetch_line(bucket + 64)


cdef bint _lookup_blob(Bucket* bucket, const Key* key, Value* out) noexcept nogil:
    cdef Found held
    cdef u32 sequence = 0
    cdef int tries = 0, way
    while not bucket_try_lock(bucket[0], &sequence):
        tries += 1
        if tries == LOOKUP_TRIES:
            return False
        pause()
    way = bucket_way(bucket[0], key.lo, key.hi)
    if way >= 0:
        held = bucket_peek(bucket[0], way)
        out.word = held.word
        out.tag = held.tag
        value_hold(out)
        bucket_touch(bucket[0], way)
    bucket_unlock_unchanged(bucket[0], sequence)
    return way >= 0


cdef bint cache_lookup(CacheState* cache, const Key* key, Value* out) noexcept nogil:
    cdef Bucket* bucket = cache.table + (key.hi & cache.mask)
    cdef Found found = bucket_find(bucket[0], key.lo, key.hi)
    if found.tag == TAG_BLOB:
        return _lookup_blob(bucket, key, out)
    out.word = found.word
    out.tag = found.tag
    return found.tag != TAG_NONE


# -- filling -----------------------------------------------------------------------------------------------------------

cdef inline u64 _blob_cost(const Blob* blob) noexcept nogil:
    return BLOB_OVERHEAD + blob.nbytes


cdef void _map_blobs(CacheState* cache, Bucket* bucket) noexcept nogil:
    """Bring the bucket's bit of the blob map up to date. Under the bucket's lock."""
    cdef u64 index = <u64> (bucket - cache.table)
    cdef atomic[u64]* word = cache.blob_map + (index >> 6)
    cdef u64 bit = <u64> 1 << (index & 63)
    cdef bint holds = bucket_holds(bucket[0], TAG_BLOB)
    if holds and not (word.load(relaxed) & bit):
        bit_set(word[0], bit)
    elif not holds and (word.load(relaxed) & bit):
        bit_clear(word[0], bit)


cdef void _left(CacheState* cache, Found gone) noexcept nogil:
    """What has left its bucket: give back its bytes and the cache's reference. Without the lock: freeing may take long."""
    if gone.tag == TAG_BLOB:
        cache.meters.blob_bytes.fetch_sub(_blob_cost(<Blob*> gone.word), acq_rel)
        blob_drop(<Blob*> gone.word)


cdef void _evict_blobs(CacheState* cache, Bucket* bucket) noexcept nogil:
    cdef Found gone[5]
    cdef int count = 0, way
    cdef u32 sequence = bucket_lock(bucket[0])
    for way in range(WAYS):
        gone[count] = bucket_peek(bucket[0], way)
        if gone[count].tag == TAG_BLOB and not bucket_spend(bucket[0], way):
            bucket_write(bucket[0], way, 0, 0, TAG_NONE, 0)
            count += 1
    _map_blobs(cache, bucket)
    bucket_unlock(bucket[0], sequence)
    cache.meters.entries.fetch_sub(<u64> count, relaxed)
    cache.meters.evictions.fetch_add(<u64> count, relaxed)
    for i in range(count):
        _left(cache, gone[i])


cdef bint _reserve(CacheState* cache, u64 cost) noexcept nogil:
    """Room for a blob, or False. Two threads may share the hand's turn; both then see fewer blobs, and no harm is done."""
    cdef u64 used = cache.meters.blob_bytes.load(relaxed)
    cdef u64 position, bits
    cdef int visits = 0, words = 0
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
        _evict_blobs(cache, cache.table + position)
        used = cache.meters.blob_bytes.load(relaxed)


cdef void _forget(CacheState* cache, const Key* key) noexcept nogil:
    """A value that cannot be cached must not leave its predecessor behind."""
    cdef Bucket* bucket = cache.table + (key.hi & cache.mask)
    cdef Found gone
    cdef u32 sequence = bucket_lock(bucket[0])
    cdef int way = bucket_way(bucket[0], key.lo, key.hi)
    if way < 0:
        bucket_unlock_unchanged(bucket[0], sequence)
        return
    gone = bucket_peek(bucket[0], way)
    bucket_write(bucket[0], way, 0, 0, TAG_NONE, 0)
    bucket_spend(bucket[0], way)
    if gone.tag == TAG_BLOB:
        _map_blobs(cache, bucket)
    bucket_unlock(bucket[0], sequence)
    cache.meters.entries.fetch_sub(1, relaxed)
    cache.meters.evictions.fetch_add(1, relaxed)
    _left(cache, gone)


cdef void cache_fill(CacheState* cache, const Key* key, const Value* value) noexcept nogil:
    cdef Bucket* bucket = cache.table + (key.hi & cache.mask)
    cdef Value held = value[0]
    cdef Found gone
    cdef u32 sequence
    cdef int way
    cdef bint replaced
    if held.tag == TAG_NONE:
        return
    if held.tag == TAG_BLOB and not _reserve(cache, _blob_cost(<Blob*> held.word)):
        _forget(cache, key)
        return
    value_hold(&held)
    sequence = bucket_lock(bucket[0])
    replaced = bucket_way(bucket[0], key.lo, key.hi) >= 0
    way = bucket_choose(bucket[0], key.lo)
    gone = bucket_peek(bucket[0], way)
    bucket_write(bucket[0], way, key.lo, key.hi, held.tag, held.word)
    if gone.tag == TAG_BLOB or held.tag == TAG_BLOB:
        _map_blobs(cache, bucket)
    bucket_unlock(bucket[0], sequence)
    if gone.tag == TAG_NONE:
        cache.meters.entries.fetch_add(1, relaxed)
    elif not replaced:
        cache.meters.evictions.fetch_add(1, relaxed)
    _left(cache, gone)


cdef u64 cache_bytes(const CacheState* cache) noexcept nogil:
    return cache.pages_bytes + (<CacheState*> cache).meters.blob_bytes.load(relaxed)


cdef u64 cache_entries(const CacheState* cache) noexcept nogil:
    return (<CacheState*> cache).meters.entries.load(relaxed)


cdef u64 cache_evictions(const CacheState* cache) noexcept nogil:
    return (<CacheState*> cache).meters.evictions.load(relaxed)


# -- evaluations in flight ---------------------------------------------------------------------------------------------
# Linear probing at half load at most; a removal shifts its followers back, so that there are no tombstones to clean up.

cdef struct Flight:
    Key key
    u64 ticket      # 0: free

cdef struct PendingTable:
    Flight* flights
    u64 mask
    u64 count
    u64 entries_max


cdef PendingTable* pending_new(u64 entries_max) noexcept nogil:
    cdef PendingTable* table
    cdef u64 size = 2
    if entries_max > (<u64> 1 << 40):
        return NULL
    while size < 2 * entries_max:
        size *= 2
    table = <PendingTable*> aligned_new(sizeof(PendingTable))
    if table == NULL:
        return NULL
    table.flights = <Flight*> calloc(size, sizeof(Flight))
    if table.flights == NULL:
        free(table)
        return NULL
    table.mask = size - 1
    table.entries_max = entries_max
    return table


cdef void pending_free(PendingTable* table) noexcept nogil:
    if table != NULL:
        free(table.flights)
        free(table)


cdef inline u64 _pending_slot(const PendingTable* table, const Key* key) noexcept nogil:
    """The key's slot, or the free one where it would go; half of the slots are free."""
    cdef u64 slot = key.lo & table.mask
    while table.flights[slot].ticket and not (table.flights[slot].key.lo == key.lo and
                                              table.flights[slot].key.hi == key.hi):
        slot = (slot + 1) & table.mask
    return slot


cdef u64 pending_find(const PendingTable* table, const Key* key) noexcept nogil:
    return table.flights[_pending_slot(table, key)].ticket


cdef Status pending_put(PendingTable* table, const Key* key, u64 ticket) noexcept nogil:
    cdef Flight* flight = &table.flights[_pending_slot(table, key)]
    CHECK(ticket != 0, "a pending evaluation has a ticket")
    if flight.ticket == 0:
        if table.count == table.entries_max:
            return FULL
        table.count += 1
        flight.key = key[0]
    flight.ticket = ticket
    return OK


cdef void pending_remove(PendingTable* table, const Key* key, u64 ticket) noexcept nogil:
    cdef u64 hole = _pending_slot(table, key), slot, home
    if ticket == 0 or table.flights[hole].ticket != ticket:
        return
    slot = hole
    while True:
        slot = (slot + 1) & table.mask
        if table.flights[slot].ticket == 0:
            break
        home = table.flights[slot].key.lo & table.mask
        if ((slot - home) & table.mask) >= ((slot - hole) & table.mask):     # its probe runs over the hole
            table.flights[hole] = table.flights[slot]
            hole = slot
    table.flights[hole].ticket = 0
    table.count -= 1


cdef u64 pending_count(const PendingTable* table) noexcept nogil:
    return table.count


# -- the Python door ---------------------------------------------------------------------------------------------------

cdef class SharedBlob:
    """Threads: any. Bytes that a cache can hold by reference; `refs` counts the holders, this object being one of them."""
    cdef Blob* blob

    def __cinit__(self, bytes data not None):
        self.blob = blob_new(PyBytes_AS_STRING(data), <u64> len(data))
        if self.blob == NULL:
            raise MemoryError("no memory for a blob")
        self.blob.dtype = BYTES

    def __dealloc__(self):
        if self.blob != NULL:
            blob_drop(self.blob)

    @property
    def refs(self):
        return self.blob.refs.load(relaxed)


cdef Value _blob_value(bytes data, int dtype) except *:
    cdef Value value
    cdef Blob* blob = blob_new(PyBytes_AS_STRING(data), <u64> len(data))
    if blob == NULL:
        raise MemoryError("no memory for a blob")
    blob.dtype = <u8> dtype
    value.word = <u64> blob
    value.tag = TAG_BLOB
    return value


cdef Value _value_of(object output) except *:
    """With a reference of its own, if it is a blob."""
    cdef Value value
    cdef double number
    if isinstance(output, float):
        number = output
        memcpy(&value.word, &number, 8)
        value.tag = F64
    elif isinstance(output, bool):
        value.word = 1 if output else 0
        value.tag = BOOL
    elif isinstance(output, int):
        value.word = <u64> <i64> output
        value.tag = I64
    elif isinstance(output, bytes):
        value = _blob_value(output, BYTES)
    elif isinstance(output, str):
        value = _blob_value(output.encode(), STR)
    elif isinstance(output, SharedBlob):
        value.word = <u64> (<SharedBlob> output).blob
        value.tag = TAG_BLOB
        value_hold(&value)
    else:
        raise TypeError(f"the cache takes float, int, bool, bytes and str, not {type(output).__name__}")
    return value


cdef u64 _row_count(Py_ssize_t nbytes, Py_ssize_t row_bytes) except? 0:
    if row_bytes < 1 or nbytes % row_bytes:
        raise ValueError(f"{nbytes} bytes are not a whole number of rows of {row_bytes} bytes")
    return <u64> (nbytes // row_bytes)


cdef u64 _lookup_rows(CacheState* cache, u64 model, u64 salt, const char* rows, u64 row_bytes, u64 n,
                      double* out) noexcept nogil:
    cdef Key keys[32]
    cdef Value value
    cdef u64 start, i, m, hits = 0
    for start in range(0, n, PREFETCH):
        m = min(<u64> PREFETCH, n - start)
        for i in range(m):
            keys[i] = key_of(cache, model, salt, rows + (start + i) * row_bytes, row_bytes)
            cache_prefetch(cache, &keys[i])
        for i in range(m):
            if cache_lookup(cache, &keys[i], &value):
                hits += 1
                if value.tag == F64:
                    memcpy(&out[start + i], &value.word, 8)
                value_drop(&value)
    return hits


cdef u64 _race(CacheState* cache, u64 seed, u64 ops, u64 key_max, Blob** shared, u64 shared_count, u64* hits) noexcept nogil:
    """Lookups and fills of random keys whose values tell their key; answers how many hits told another one."""
    cdef Key key
    cdef Value value
    cdef u64 op, name, wrong = 0, state = seed * 2 + 1, told[16]
    for op in range(ops):
        state = state * <u64> 6364136223846793005 + <u64> 1442695040888963407
        name = (state >> 33) % key_max
        key = key_of(cache, 1, 0, &name, 8)
        if (state >> 20) & 7 and cache_lookup(cache, &key, &value):
            hits[0] += 1
            if value.tag == TAG_BLOB and shared_count == 0:
                memcpy(told, blob_data(<Blob*> value.word), 128)
                wrong += (told[0] != name) | (told[15] != name) | ((<Blob*> value.word).nbytes != 128)
            elif value.tag == TAG_BLOB:
                wrong += value.word != <u64> shared[name % shared_count]
            else:
                wrong += value.word != name * <u64> 0x9e3779b97f4a7c15 or value.tag != I64
            value_drop(&value)
            continue
        if (state >> 25) & 1:
            value.tag = I64
            value.word = name * <u64> 0x9e3779b97f4a7c15
            cache_fill(cache, &key, &value)
            continue
        for i in range(16):
            told[i] = name
        value.tag = TAG_BLOB
        value.word = <u64> (shared[name % shared_count] if shared_count else blob_new(told, 128))
        if shared_count:
            value_hold(&value)
        cache_fill(cache, &key, &value)
        value_drop(&value)
    return wrong


cdef class ClockCache:
    """Threads: any. A cache of predictions by (model, row bytes, salt), CLOCK eviction, at most `bytes_max` bytes.

    `row` is any C-contiguous buffer. `seed` (128 bits, for tests) defaults to a random one. Raises MemoryError.
    A table has at least one bucket (136 bytes), however small `bytes_max`. Source: see the module.
    """
    cdef CacheState* state

    def __cinit__(self, u64 bytes_max, seed=None):
        cdef object bits = int.from_bytes(os.urandom(16), "little") if seed is None else int(seed)
        self.state = cache_new(bytes_max, bits & 0xffffffffffffffff, (bits >> 64) & 0xffffffffffffffff)
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

    def keys(self, u64 model, rows, Py_ssize_t row_bytes, u64 salt=0):
        """The keys of all rows of `row_bytes` bytes each, as bytes: u64[n, 2]. Raises ValueError for a part of a row."""
        cdef Py_buffer view
        cdef object out
        cdef Key* keys
        cdef u64 n, i
        PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE)
        try:
            n = _row_count(view.len, row_bytes)
            out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> (n * sizeof(Key)))
            keys = <Key*> PyBytes_AS_STRING(out)
            with nogil:
                for i in range(n):
                    keys[i] = key_of(self.state, model, salt, <char*> view.buf + i * <u64> row_bytes, <u64> row_bytes)
        finally:
            PyBuffer_Release(&view)
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

    def lookup_many(self, u64 model, rows, Py_ssize_t row_bytes, out, u64 salt=0):
        """How many rows are resident; their f64 predictions go to `out` (f64[n], writable), which else stays as it is."""
        cdef Py_buffer view, result
        cdef u64 n, hits
        PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE)
        try:
            n = _row_count(view.len, row_bytes)
            PyObject_GetBuffer(out, &result, PyBUF_WRITABLE)
            try:
                if <u64> result.len != n * 8:
                    raise ValueError(f"out has {result.len} bytes; {n} rows need {n * 8}")
                with nogil:
                    hits = _lookup_rows(self.state, model, salt, <char*> view.buf, <u64> row_bytes, n, <double*> result.buf)
            finally:
                PyBuffer_Release(&result)
        finally:
            PyBuffer_Release(&view)
        return hits

    def fill(self, u64 model, row, value, u64 salt=0):
        """Insert or replace. Text and bytes larger than an eighth of the room for blobs are not kept. Raises TypeError."""
        cdef Key key = self._key(model, row, salt)
        cdef Value held = _value_of(value)
        cache_fill(self.state, &key, &held)
        value_drop(&held)

    def fill_many(self, u64 model, rows, Py_ssize_t row_bytes, double[::1] values not None, u64 salt=0):
        """Insert or replace one f64 prediction a row."""
        cdef Py_buffer view
        cdef Key key
        cdef Value value
        cdef u64 n, i
        PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE)
        try:
            n = _row_count(view.len, row_bytes)
            if n != <u64> values.shape[0]:
                raise ValueError(f"{n} rows, {values.shape[0]} values")
            with nogil:
                for i in range(n):
                    key = key_of(self.state, model, salt, <char*> view.buf + i * <u64> row_bytes, <u64> row_bytes)
                    memcpy(&value.word, &values[i], 8)
                    value.tag = F64
                    cache_fill(self.state, &key, &value)
        finally:
            PyBuffer_Release(&view)

    def race(self, u64 seed, u64 ops, u64 key_max, shared=()):
        """Random lookups and fills without the GIL; -> (hits, wrong answers). For tests: run it from many threads at once.

        Half of the fills are scalars, half blobs: fresh ones of 128 bytes, or those of `shared` (SharedBlob).
        """
        cdef list blobs = list(shared)
        cdef Blob** pointers = <Blob**> calloc(len(blobs) + 1, sizeof(Blob*))
        cdef u64 hits = 0, wrong, count = <u64> len(blobs)
        if pointers == NULL or key_max == 0:
            free(pointers)
            raise ValueError("key_max must be at least 1")
        for i in range(len(blobs)):
            pointers[i] = (<SharedBlob?> blobs[i]).blob
        with nogil:
            wrong = _race(self.state, seed, ops, key_max, pointers, count, &hits)
        free(pointers)
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


cdef class Pending:
    """Threads: loop only. Evaluations in flight: key (two 64-bit words) -> ticket; at most `entries_max` of them."""
    cdef PendingTable* table

    def __cinit__(self, u64 entries_max):
        self.table = pending_new(entries_max)
        if self.table == NULL:
            raise MemoryError(f"no memory for {entries_max} pending evaluations")

    def __dealloc__(self):
        pending_free(self.table)

    def find(self, u64 lo, u64 hi):
        """The ticket, or 0."""
        cdef Key key = Key(lo, hi)
        return pending_find(self.table, &key)

    def put(self, u64 lo, u64 hi, u64 ticket):
        """Insert or replace. Raises the error of Status.FULL at the bound, ValueError for ticket 0."""
        cdef Key key = Key(lo, hi)
        cdef Status status
        if ticket == 0:
            raise ValueError("ticket 0 means: nobody evaluates it")
        status = pending_put(self.table, &key, ticket)
        if status != OK:
            raise_for(status, f"{self.table.entries_max} evaluations are in flight")

    def remove(self, u64 lo, u64 hi, u64 ticket):
        """Only if the key still names this ticket."""
        cdef Key key = Key(lo, hi)
        pending_remove(self.table, &key, ticket)

    def __len__(self):
        return <Py_ssize_t> pending_count(self.table)
