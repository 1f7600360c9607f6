"""The index of an embedding table.

A part that is .78 full grows by 1.2, so that it is hardly ever less than .65 full: 16 to 20 bytes
an id. Because a bucket is chosen by the high half of a product, and not by low bits of the hash,
any number of buckets will do, they are in the order of the hashes, and a part that grows walks its
old and its new array once, both in order. One that has reached PART_BYTES_MAX splits in two
instead, by the next bit of the hash: so whoever waits while a part moves waits for a few
milliseconds, however large the table. Source of the directory: Fagin et al. 1979, extendible
hashing.
"""
from libc.stdlib cimport calloc, free

from clipper_core.runtime.machine cimport i64, relaxed, u32, u64

cdef extern from "params/row_index.hpp" namespace "clipper" nogil:
    u64 SPARE "clipper::kSpare"     # buckets after the last one, and at most so many after its own
                                    # does an id lie
    u64 high_product(u64 a, u64 b) noexcept
    u64 least_with(u64 product, u64 n) noexcept
    bint bucket_overflowed(const Bucket* bucket) noexcept
    void bucket_overflow(Bucket* bucket) noexcept
    int bucket_find(const Bucket* bucket, i64 id) noexcept
    void bucket_add(Bucket* bucket, i64 id, u32 row) noexcept
    void bucket_remove(Bucket* bucket, int slot) noexcept

cdef enum:
    SLOTS = 5
    BUCKETS_MIN = 8
    PART_BYTES_MAX = 4 << 20
    DEPTH_MAX = 20

cdef double FULL_AT = 0.78
cdef double GROWTH = 1.2


# -- parts
# --------------------------------------------------------------------------------------------------

cdef inline size_t _bytes(u64 n) noexcept nogil:
    return (n + SPARE) * sizeof(Bucket)


cdef Part* _part_new(u64 n, u32 depth) noexcept nogil:
    cdef Part* part = <Part*> calloc(1, sizeof(Part))
    if part == NULL:
        return NULL
    part.buckets = <Bucket*> row_pages_new(_bytes(n))
    part.n = n
    part.depth = depth
    if part.buckets == NULL:
        free(part)
        return NULL
    return part


cdef void _part_free(Part* part) noexcept nogil:
    if part != NULL:
        row_pages_free(part.buckets, _bytes(part.n))
        free(part)


cdef bint _put(Part* part, u64 hash, i64 id, u32 row) noexcept nogil:
    """Into a part that nobody else sees yet."""
    cdef Bucket* bucket = part_home(part, hash)
    cdef Bucket* end = bucket + SPARE + 1
    while bucket_count(bucket) == SLOTS:
        bucket_overflow(bucket)
        bucket += 1
        if bucket == end:
            return False
    bucket_add(bucket, id, row)
    part.used.fetch_add(1, relaxed)
    return True


cdef bint _move(const Part* part, Part* low, Part* high) noexcept nogil:
    """All of a part into one, or by the next bit of their hashes into two."""
    cdef const Bucket* bucket = part.buckets
    cdef const Bucket* end = part.buckets + part.n + SPARE
    cdef u64 hash
    cdef u32 slot
    while bucket < end:
        for slot in range(bucket_count(bucket)):
            hash = index_hash(bucket.ids[slot])
            if not _put(high if high != NULL and (hash << part.depth) >> 63 else low, hash,
                        bucket.ids[slot], bucket.rows[slot]):
                return False
        bucket += 1
    return True


# -- the whole
# --------------------------------------------------------------------------------------------------

cdef bint index_init(Index* index) noexcept nogil:
    index.depth = 0
    index.directory = <Part**> calloc(1, sizeof(void*))
    if index.directory == NULL:
        return False
    index.directory[0] = _part_new(BUCKETS_MIN, 0)
    return index.directory[0] != NULL


cdef inline u64 _repeats(const Index* index, const Part* part) noexcept nogil:
    """Entries of the directory that lead to a part."""
    return <u64> 1 << (index.depth - part.depth)


cdef void index_free(Index* index) noexcept nogil:
    cdef u64 i = 0, step
    while index.directory != NULL and i < (<u64> 1 << index.depth) and index.directory[i] != NULL:
        step = _repeats(index, index.directory[i])
        _part_free(index.directory[i])
        i += step
    free(index.directory)
    index.directory = NULL


cdef u64 index_after(const Index* index, u64 hash) noexcept nogil:
    cdef const Part* part = index_part(index, hash)
    cdef u64 next = high_product(hash << part.depth,
                                 part.n) + 1, begin = 0, unit = (<u64> 1 << part.depth) - 1
    if part.depth:
        begin = hash >> (64 - part.depth) << (64 - part.depth)
    if next == part.n:
        # of the next part; wraps to 0 after the last
        return begin + (<u64> 1 << (64 - part.depth)) if part.depth else 0
    next = least_with(next, part.n)
    return begin + (next >> part.depth) + (1 if next & unit else 0)


cdef bint index_add(Index* index, u64 hash, const Held* held, i64 id, u32 row) noexcept nogil:
    cdef Part* part = index_part(index, hash)
    cdef Bucket* bucket = held.home
    cdef Bucket* end = bucket + SPARE + 1
    cdef bint full = bucket_count(bucket) == SLOTS
    if full:
        bucket_overflow(bucket)
    else:
        bucket_add(bucket, id, row)
    while full:
        bucket += 1
        if bucket == end:
            return False
        bucket_lock(bucket)
        full = bucket_count(bucket) == SLOTS
        if full:
            bucket_overflow(bucket)
        else:
            bucket_add(bucket, id, row)
        bucket_unlock(bucket)
    part.used.fetch_add(1, relaxed)
    return True


cdef void index_remove(Index* index, const Held* held, i64 id) noexcept nogil:
    cdef Bucket* bucket = held.home
    cdef int slot = bucket_find(bucket, id)
    if slot >= 0:
        bucket_remove(bucket, slot)
    while slot < 0:
        bucket += 1
        bucket_lock(bucket)
        slot = bucket_find(bucket, id)
        if slot >= 0:
            bucket_remove(bucket, slot)
        bucket_unlock(bucket)
    index_part(index, index_hash(id)).used.fetch_sub(1, relaxed)


cdef u32 index_gather(const Index* index, u64 hash, Bucket* home, i64* ids,
                      u32* rows) noexcept nogil:
    """Those whose home it is, which is locked: they lie in it, and where it overflowed to."""
    cdef Part* part = index_part(index, hash)
    cdef Bucket* bucket = home
    cdef u32 slot, n = 0
    cdef bint on = True
    while on:
        if bucket != home:
            bucket_lock(bucket)
        for slot in range(bucket_count(bucket)):
            if part_home(part, index_hash(bucket.ids[slot])) == home:
                ids[n] = bucket.ids[slot]
                rows[n] = bucket.rows[slot]
                n += 1
        on = bucket_overflowed(bucket) and bucket < home + SPARE
        if bucket != home:
            bucket_unlock(bucket)
        bucket += 1
    return n


cdef u64 index_size(const Index* index, u64 hash) noexcept nogil:
    return index_part(index, hash).n << 8 | index_part(index, hash).depth


cdef bint index_full(const Index* index, u64 hash) noexcept nogil:
    cdef Part* part = index_part(index, hash)
    return part.used.load(relaxed) >= <u64> (FULL_AT * SLOTS * part.n)


# -- growing
# --------------------------------------------------------------------------------------------------

cdef bint _deepen(Index* index) noexcept nogil:
    cdef u64 i, n = <u64> 1 << index.depth
    cdef Part** twice = <Part**> calloc(2 * n, sizeof(void*))
    if twice == NULL or index.depth == DEPTH_MAX:
        free(twice)
        return False
    for i in range(n):
        twice[2 * i] = twice[2 * i + 1] = index.directory[i]
    free(index.directory)
    index.directory = twice
    index.depth += 1
    return True


cdef void _lead_to(Index* index, u64 first, u64 n, Part* part) noexcept nogil:
    cdef u64 i
    for i in range(n):
        index.directory[first + i] = part


cdef bint _replace(Index* index, u64 hash, u64 n, bint split) noexcept nogil:
    cdef Part* part = index_part(index, hash)
    cdef Part* low = _part_new(n, part.depth + split)
    cdef Part* high = _part_new(n, part.depth + 1) if split else NULL
    cdef u64 repeats = _repeats(index, part), first
    if low == NULL or (split and high == NULL) or not _move(part, low, high):
        _part_free(low)
        _part_free(high)
        return False
    first = (hash >> (64 - index.depth) if index.depth else 0) // repeats * repeats
    _lead_to(index, first, repeats, low)
    if split:
        _lead_to(index, first + repeats // 2, repeats // 2, high)
    _part_free(part)
    return True


cdef bint index_grow(Index* index, u64 hash) noexcept nogil:
    cdef Part* part = index_part(index, hash)
    cdef u64 n = <u64> (part.n * GROWTH) + 1
    cdef bint split = _bytes(n) > PART_BYTES_MAX
    cdef u32 _tries
    if split:
        if part.depth == index.depth and not _deepen(index):
            return False
        n = n // 2 + 1
    for _tries in range(8):      # ids that crowd around one bucket may find no room: once in very
                                 # many times
        if _replace(index, hash, n, split):
            return True
        n += n // 8 + 1
    return False


cdef u64 index_used(const Index* index) noexcept nogil:
    cdef u64 i = 0, used = 0
    while i < (<u64> 1 << index.depth):
        used += index.directory[i].used.load(relaxed)
        i += _repeats(index, index.directory[i])
    return used


cdef u64 index_bytes(const Index* index) noexcept nogil:
    cdef u64 i = 0, bytes = (<u64> 1 << index.depth) * sizeof(void*)
    while i < (<u64> 1 << index.depth):
        bytes += _bytes(index.directory[i].n) + sizeof(Part)
        i += _repeats(index, index.directory[i])
    return bytes
