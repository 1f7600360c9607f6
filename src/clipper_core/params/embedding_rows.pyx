"""One shard of an embedding table.

A pull of random ids from a table larger than the caches is bound by the latency of memory: two
dependent misses an id, its bucket and its row. So ids are taken BLOCK at a time, in three passes:
fetch the buckets, look into them and fetch the rows, copy. The misses of a pass overlap. Handling
one id after the other would take twice as long, and longer blocks exceed the number of misses that
a core can have outstanding.

An update is the same, except that each step of the optimizer, which waits for roots and divisions,
fetches a row of the next block; and it first sums the gradients of a push for one id: duplicate ids
are the rule in a minibatch, and the optimizers are not linear, so that an id's gradients must be
added before its one step. They are added in their order, chained through the push: nothing is
sorted or copied.

A lock for each row costs next to nothing, because it is in the cache line that must be read anyway.
So no update is lost, and no reader sees half of one, unlike in ElasticDL and TFRA.

A thread that is alone in the table, as the thread of a shard usually is, takes no locks, because a
locked instruction waits for all stores before it, that is, for the copy of the previous row. A
thread that enters meanwhile waits for the end of a block, some microseconds.
"""
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from clipper_core.params.optimizer cimport add_row, optimizer_step, start_row, start_slots
from clipper_core.runtime.machine cimport acquire, pause, release

# -- The index of an embedding table.
#
# A part that is .78 full grows by 1.2, so that it is hardly ever less than .65 full: 16 to 20 bytes
# an id. Because a bucket is chosen by the high half of a product, and not by low bits of the hash,
# any number of buckets will do, they are in the order of the hashes, and a part that grows walks
# its old and its new array once, both in order. One that has reached PART_BYTES_MAX splits in two
# instead, by the next bit of the hash: so a thread that waits while a part moves waits for a few
# milliseconds, however large the table is. Source of the directory: Fagin et al. 1979, extendible
# hashing.

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
    """Put an id into a part that no other thread sees yet. Return False if there is no room."""
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
    """Move all ids of a part into one part, or by the next bit of their hashes into two. Return
    False if there is no room."""
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
    """Return how many entries of the directory refer to a part."""
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
    """Collect the entries of a home bucket, which is locked: they lie in it, and where it
    overflowed to."""
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


# -- Rows of an embedding table in memory.
#
# A fresh byte costs 3 to 4 ns to fault in and zero, several times the cost of reading it. So if
# rows will be needed, arena_reserve is called before, on a thread for which no other waits.

cdef enum:
    CHUNK_BYTES = 32 << 20
    MORE_ROWS = 1 << 16


cdef inline u64 _rows_bytes(const Arena* arena) noexcept nogil:
    return arena.row_bytes << arena.shift


cdef inline u64 _chunk_bytes(const Arena* arena) noexcept nogil:
    return _rows_bytes(arena) + (sizeof(u32) << arena.shift)


cdef bint arena_init(Arena* arena, u64 row_bytes, u64 rows_max) noexcept nogil:
    arena.shift = 0
    while row_bytes << (arena.shift + 1) <= CHUNK_BYTES and <u64> 1 << arena.shift < rows_max:
        arena.shift += 1
    arena.row_bytes = row_bytes
    arena.rows_max = rows_max
    arena.room = min(4 * rows_max + MORE_ROWS, <u64> NO_ROW)
    arena.free = NO_ROW
    arena.next = arena.free_count = arena.chunk_count = 0
    arena.chunks = <atomic[u8*]*> calloc((arena.room >> arena.shift) + 1, sizeof(atomic[u8*]))
    return arena.chunks != NULL


cdef void arena_free(Arena* arena) noexcept nogil:
    cdef u64 i
    for i in range(arena.chunk_count):
        row_pages_free(arena.chunks[i].load(relaxed), _chunk_bytes(arena))
    free(arena.chunks)
    arena.chunks = NULL
    arena.chunk_count = 0


cdef inline void _lock(Arena* arena) noexcept nogil:
    while arena.lock.exchange(1, acquire):
        pause()


cdef inline void _unlock(Arena* arena) noexcept nogil:
    arena.lock.store(0, release)


cdef bint _chunks(Arena* arena, u64 n) noexcept nogil:
    """Make chunks until there are n. The caller holds the lock."""
    cdef u8* chunk
    while arena.chunk_count < n:
        chunk = <u8*> row_pages_new(_chunk_bytes(arena))
        if chunk == NULL:
            return False
        arena.chunks[arena.chunk_count].store(chunk, relaxed)
        arena.chunk_count += 1
    return True


cdef void arena_bound(Arena* arena, u64 rows_max) noexcept nogil:
    _lock(arena)
    arena.rows_max = min(rows_max, arena.room)
    _unlock(arena)


cdef u64 arena_limit(Arena* arena) noexcept nogil:
    cdef u64 rows_max
    _lock(arena)
    rows_max = arena.rows_max
    _unlock(arena)
    return rows_max


cdef u32 arena_take(Arena* arena) noexcept nogil:
    cdef u32 row = NO_ROW
    _lock(arena)
    if arena.next - arena.free_count >= arena.rows_max:
        row = NO_ROW
    elif arena.free != NO_ROW:
        row = arena.free
        memcpy(&arena.free, arena_row(arena, row), sizeof(u32))
        arena.free_count -= 1
    elif arena.next < arena.room and _chunks(arena, (arena.next >> arena.shift) + 1):
        row = <u32> arena.next
        arena.next += 1
    _unlock(arena)
    return row


cdef void arena_give(Arena* arena, u32 row) noexcept nogil:
    _lock(arena)
    memcpy(arena_row(arena, row), &arena.free, sizeof(u32))
    arena.free = row
    arena.free_count += 1
    _unlock(arena)


cdef bint arena_reserve(Arena* arena, u64 rows) noexcept nogil:
    cdef u64 first, last, i, mask = (<u64> 1 << arena.shift) - 1
    cdef bint made
    _lock(arena)
    first = arena.next
    last = min(first + (rows - min(rows, arena.free_count)), arena.rows_max)
    made = first == last or _chunks(arena, ((last - 1) >> arena.shift) + 1)
    _unlock(arena)
    i = first
    while made and i < last:    # chunks never move, and are not given back while the arena lives
        first = min(last - i, mask + 1 - (i & mask))
        row_pages_touch(<u8*> (<size_t> arena_row(arena, <u32> i) & ~<size_t> 4095),
                    first * arena.row_bytes)
        i = (i | mask) + 1
    return made


cdef u64 arena_used(Arena* arena) noexcept nogil:
    cdef u64 used
    _lock(arena)
    used = arena.next - arena.free_count
    _unlock(arena)
    return used


cdef u64 arena_bytes(Arena* arena) noexcept nogil:
    cdef u64 bytes
    _lock(arena)
    bytes = arena.next * (arena.row_bytes + sizeof(u32))
    _unlock(arena)
    return bytes


# -- Rows of a table, pulled and pushed from any number of threads.
cdef extern from "<sched.h>" nogil:
    int sched_yield() noexcept

cdef extern from "params/embedding.hpp" namespace "clipper" nogil:
    void copy_row(float* to, const float* row, u32 n) noexcept
    void fetch_row(const float* row, size_t bytes, bint to_write) noexcept
    void row_to_f16(const float* row, u32 n, u16* out) noexcept
    void row_to_bf16(const float* row, u32 n, u16* out) noexcept
    float row_to_i8(const float* row, u32 n, signed char* out) noexcept

cdef extern from "params/stored_row.hpp" namespace "clipper" nogil:
    cdef cppclass Rounding:
        pass
    Rounding to_nearest() noexcept
    Rounding at_random(u64 key, i64 id, u64 step) noexcept
    u32 stored_bytes(u32 stored, u32 n) noexcept
    void stored_put(u32 stored, const float* weights, u32 n, void* to,
                    const Rounding& by) noexcept
    void stored_get(u32 stored, const void* row, u32 n, float* weights) noexcept
    float stored_i8(const void* row, u32 n, signed char* out) noexcept

cdef enum:
    LOOKED_AT = 8           # buckets with rows, when one must go: the oldest of some twenty
    SEEN_MAX = 255
    SOLE_WIDTH = 1024       # floats

cdef u32 NONE = 0xFFFFFFFFu


cdef bint rows_init(Rows* rows, u64 rows_max, u64 seen) noexcept nogil:
    rows.seen_mask = seen - 1 if seen else 0
    rows.seen = <atomic[u8]*> calloc(seen, 1) if seen else NULL
    rows.weight_bytes = stored_bytes(rows.stored, rows.dim)
    return ((rows.seen != NULL or not seen) and index_init(&rows.index)
            and arena_init(&rows.arena, rows.weight_bytes
                           + (rows.width - rows.dim) * sizeof(float), rows_max))


cdef void rows_free(Rows* rows) noexcept nogil:
    free(<void*> rows.seen)
    index_free(&rows.index)
    arena_free(&rows.arena)


# -- the gate
# --------------------------------------------------------------------------------------------------

cdef void _enter(Rows* rows) noexcept nogil:
    cdef u32 spins = 0
    while not rows.gate.enter():
        while rows.gate.closed():
            sched_yield()
    while not rows.gate.shared():
        spins += 1
        if spins < 64:
            pause()
        else:
            sched_yield()


cdef inline bint _enter_for(Rows* rows, u64 ids) noexcept nogil:
    """Enter for a batch of this many ids, and return whether as the sole caller: not if a block of
    them takes long, or if there are so few that the next caller would wait for their end."""
    if ids >= BLOCK and rows.width <= SOLE_WIDTH and rows.gate.enter_sole():
        return True
    _enter(rows)
    return False


cdef inline bint _still_sole(Rows* rows, bint sole) noexcept nogil:
    if sole and rows.gate.others():
        rows.gate.share()
        return False
    return sole


cdef bint _grow(Rows* rows, u64 hash, u64 size) noexcept nogil:
    """Enlarge a part, from outside the gate; size: the size that was too small. True: it has
    another size now, also by another thread."""
    cdef bint grown = True
    if not rows.gate.close():
        while rows.gate.closed():
            sched_yield()
        return True
    while not rows.gate.alone():
        pause()
    if index_size(&rows.index, hash) == size:
        rows.moves += 1
        grown = index_grow(&rows.index, hash)
    rows.gate.open()
    return grown


# -- pull
# --------------------------------------------------------------------------------------------------

cdef inline void _fetch(Rows* rows, const Seen* seen, u64 nbytes, bint to_write,
                        bint stamps) noexcept nogil:
    if seen.row != NO_ROW:
        fetch_row(arena_row(&rows.arena, seen.row), nbytes, to_write)
        if stamps:
            fetch_to_write(arena_stamp(&rows.arena, seen.row))


cdef inline void _look(Rows* rows, const i64* ids, u64 n, Seen* seen, u64 nbytes, bint to_write,
                       bint stamps) noexcept nogil:
    """Return where they seem to lie; and their buckets, and as many bytes of their rows, on the
    way."""
    cdef u64 i
    for i in range(n):
        seen[i].home = index_bucket(&rows.index, index_hash(ids[i]))
        fetch_to_write(seen[i].home)
    for i in range(n):
        index_look(&seen[i], ids[i])
        if nbytes:
            _fetch(rows, &seen[i], nbytes, to_write, stamps)


cdef inline void _give_out(const float* row, u32 dim, Pulled kind, void* out, u64 i,
                           float* scales) noexcept nogil:
    if kind == PULL_F32:
        copy_row(<float*> out + i * dim, row, dim)
    elif kind == PULL_F16:
        row_to_f16(row, dim, <u16*> out + i * dim)
    elif kind == PULL_BF16:
        row_to_bf16(row, dim, <u16*> out + i * dim)
    else:
        scales[i] = row_to_i8(row, dim, <signed char*> out + i * dim)


cdef void _give_stored(Rows* rows, const void* row, Pulled kind, void* out, u64 i, float* scales,
                       float* spare) noexcept nogil:
    """Write a row of a table that does not store f32; in the stored type if that is requested."""
    cdef u32 dim = rows.dim
    if kind == PULL_F32:
        stored_get(rows.stored, row, dim, <float*> out + i * dim)
    elif kind != rows.stored:
        stored_get(rows.stored, row, dim, spare)
        _give_out(spare, dim, kind, out, i, scales)
    elif kind == PULL_I8:
        scales[i] = stored_i8(row, dim, <signed char*> out + i * dim)
    else:
        memcpy(<u16*> out + i * dim, row, dim * sizeof(u16))


cdef void _give_start(Rows* rows, i64 id, Pulled kind, void* out, u64 i, float* scales,
                      float* spare) noexcept nogil:
    """Write the initial row of an id."""
    start_row(rows.start, rows.key, id, spare, rows.dim)
    if rows.stored != PULL_F32:
        stored_put(rows.stored, spare, rows.dim, spare + rows.dim, to_nearest())
        _give_stored(rows, spare + rows.dim, kind, out, i, scales, spare)
    else:
        _give_out(spare, rows.dim, kind, out, i, scales)


cdef u64 rows_pull(Rows* rows, const i64* ids, u64 n, Pulled kind, void* out, float* scales,
                   float* fresh,
                   u32 stamp) noexcept nogil:
    cdef Seen[BLOCK] seen
    cdef u64 at = 0, block, i, unknown = 0
    cdef u32 row
    cdef bint sole = False, plain = rows.stored == PULL_F32
    while at < n:
        sole = _enter_for(rows, n - at) if at % BATCH == 0 else _still_sole(rows, sole)
        block = min(n - at, <u64> BLOCK)
        _look(rows, ids + at, block, seen, rows.weight_bytes, False, stamp != 0)
        for i in range(block):
            row = seen[i].row if sole else hold_seen(&seen[i], ids[at + i])
            if row != NO_ROW:
                if plain:
                    _give_out(arena_row(&rows.arena, row), rows.dim, kind, out, at + i, scales)
                else:
                    _give_stored(rows, arena_row(&rows.arena, row), kind, out, at + i, scales,
                                 fresh)
                if stamp:
                    arena_stamp(&rows.arena, row)[0] = stamp
            if not sole:
                bucket_unlock(seen[i].home)
            if row == NO_ROW:
                unknown += 1
                _give_start(rows, ids[at + i], kind, out, at + i, scales, fresh)
        at += block
        if at % BATCH == 0 or at == n:
            rows.gate.leave(sole)
    return unknown


# -- rows that come and go
# ---------------------------------------------------------------------------------------------

cdef bint _oldest(Rows* rows, i64* oldest, u32* stamp_of) noexcept nogil:
    """Find the oldest row of the next few buckets, and its stamp; False: there are none."""
    cdef i64[GATHER_MAX] ids
    cdef u32[GATHER_MAX] at
    cdef u64 hash = rows.hand.load(relaxed), looked = 0, passed = 0
    cdef u32 n, i, stamp, least = 0
    cdef bint found = False
    cdef Bucket* home
    while looked < LOOKED_AT and passed < 100_000:
        home = index_bucket(&rows.index, hash)
        bucket_lock(home)
        n = index_gather(&rows.index, hash, home, ids, at)
        for i in range(n):
            stamp = arena_stamp(&rows.arena, at[i])[0]
            if not found or stamp < least:
                found = True
                least = stamp
                oldest[0] = ids[i]
        bucket_unlock(home)
        looked += n != 0
        passed += 1
        hash = index_after(&rows.index, hash)
    rows.hand.store(hash, relaxed)
    stamp_of[0] = least
    return found


cdef bint _remove(Rows* rows, i64 id, u64 before) noexcept nogil:
    """Remove a row, unless its stamp has changed to `before` or later."""
    cdef Held held = index_hold(&rows.index, index_hash(id), id)
    cdef bint goes = held.row != NO_ROW and arena_stamp(&rows.arena, held.row)[0] < before
    if goes:
        index_remove(&rows.index, &held, id)
    bucket_unlock(held.home)
    if goes:
        arena_give(&rows.arena, held.row)
    return goes


cdef u64 rows_remove(Rows* rows, const i64* ids, u64 n) noexcept nogil:
    cdef u64 i, gone = 0
    for i in range(n):
        if i % BATCH == 0:
            _enter(rows)
        gone += _remove(rows, ids[i], <u64> 1 << 32)
        if (i + 1) % BATCH == 0 or i + 1 == n:
            rows.gate.leave(False)
    return gone


cdef u32 _row_for_one_more(Rows* rows, Pushed* pushed) noexcept nogil:
    """Return a free row, evicting one if needed. No bucket may be locked. NO_ROW: there is no
    room."""
    cdef u32 row = arena_take(&rows.arena)
    cdef i64 oldest
    cdef u32 stamp
    while row == NO_ROW and rows.evicts and (pushed.gone == NULL
                                             or pushed.evicted < pushed.gone_max):
        if not _oldest(rows, &oldest, &stamp):
            break
        if _remove(rows, oldest, <u64> stamp + 1):
            if pushed.gone != NULL:
                pushed.gone[pushed.evicted] = oldest
            pushed.evicted += 1
        row = arena_take(&rows.arena)
    return row


cdef void rows_bound(Rows* rows, u64 rows_max) noexcept nogil:
    cdef i64 oldest
    cdef u32 stamp
    arena_bound(&rows.arena, rows_max)
    while rows.evicts and arena_used(&rows.arena) > rows_max:
        _enter(rows)
        if _oldest(rows, &oldest, &stamp):
            _remove(rows, oldest, <u64> stamp + 1)
        rows.gate.leave(False)


cdef bint _admitted(Rows* rows, u64 hash) noexcept nogil:
    """Count an id that has no row, and return whether it is admitted. It has two counters of a
    sketch, of which the lower one counts. They may have counted other ids too: an id may be
    admitted early, never late."""
    cdef u64 one = hash & rows.seen_mask, other = (hash >> 32) & rows.seen_mask
    cdef u32 first, second, least
    if rows.admit_after <= 1:
        return True
    first, second = rows.seen[one].load(relaxed), rows.seen[other].load(relaxed)
    least = min(min(first, second) + 1, SEEN_MAX)
    if first < least:
        rows.seen[one].store(<u8> least, relaxed)
    if second < least:
        rows.seen[other].store(<u8> least, relaxed)
    return least >= rows.admit_after


cdef inline float* _state(Rows* rows, u32 row) noexcept nogil:
    return <float*> (<u8*> arena_row(&rows.arena, row) + rows.weight_bytes)


cdef void _start(Rows* rows, i64 id, u32 row, float* spare) noexcept nogil:
    if spare != NULL:
        start_row(rows.start, rows.key, id, spare, rows.dim)
        stored_put(rows.stored, spare, rows.dim, arena_row(&rows.arena, row), to_nearest())
    start_slots(&rows.rule, _state(rows, row), rows.dim)


cdef bint _make(Rows* rows, u64 hash, i64 id, Held* held, float* spare,
                Pushed* pushed) noexcept nogil:
    """A row for an id that had none, and its bucket held again. False: there is no room, and
    nothing is held. spare: room for a row; NULL: the caller writes the weights."""
    cdef u32 row = _row_for_one_more(rows, pushed)
    cdef u64 size
    if row == NO_ROW:
        return False
    while True:
        held[0] = index_hold(&rows.index, hash, id)
        if held.row != NO_ROW:      # another thread made it meanwhile
            arena_give(&rows.arena, row)
            return True
        size = index_size(&rows.index, hash)
        if not index_full(&rows.index, hash) and index_add(&rows.index, hash, held, id, row):
            held.row = row
            _start(rows, id, row, spare)
            pushed.made += 1
            return True
        bucket_unlock(held.home)
        rows.gate.leave(False)
        if not _grow(rows, hash, size):
            _enter(rows)
            arena_give(&rows.arena, row)
            return False
        _enter(rows)


# -- push
# --------------------------------------------------------------------------------------------------

cdef bint distinct_init(Distinct* d, const i64* ids, u64 n) noexcept nogil:
    cdef u64 i, slot
    cdef u32 u
    d.mask = 1
    while d.mask < 2 * n:
        d.mask *= 2
    d.slots = <u32*> malloc((d.mask + 3 * n + 1) * sizeof(u32))
    if d.slots == NULL:
        return False
    memset(d.slots, 0xFF, d.mask * sizeof(u32))
    d.first, d.last, d.next = d.slots + d.mask, d.slots + d.mask + n, d.slots + d.mask + 2 * n
    d.mask -= 1
    d.n = 0
    for i in range(n):
        slot = index_hash(ids[i]) & d.mask
        while d.slots[slot] != NONE and ids[d.first[d.slots[slot]]] != ids[i]:
            slot = (slot + 1) & d.mask
        d.next[i] = NONE
        u = d.slots[slot]
        if u == NONE:
            d.slots[slot] = <u32> d.n
            d.first[d.n] = d.last[d.n] = <u32> i
            d.n += 1
        else:
            d.next[d.last[u]] = <u32> i
            d.last[u] = <u32> i
    return True


cdef inline const float* _summed(const Distinct* d, u64 u, const float* gradients, u32 dim,
                                 float* sum) noexcept nogil:
    cdef u32 i = d.first[u]
    if d.next[i] == NONE:
        return gradients + <u64> i * dim
    memcpy(sum, gradients + <u64> i * dim, dim * sizeof(float))
    while d.next[i] != NONE:
        i = d.next[i]
        add_row(sum, gradients + <u64> i * dim, dim)
    return sum


cdef void _apply_stored(Rows* rows, const Stride* step, u32 at, const float* gradient,
                        float* weights, const Rounding& by) noexcept nogil:
    cdef float* row = arena_row(&rows.arena, at)
    stored_get(rows.stored, row, rows.dim, weights)
    optimizer_step(rows.rule, step[0], weights, _state(rows, at), rows.dim, gradient, rows.dim)
    stored_put(rows.stored, weights, rows.dim, row, by)


cdef inline void _apply(Rows* rows, const Stride* step, u32 at, i64 id, const float* gradient,
                        float* spare, u64 number, u32 stamp) noexcept nogil:
    cdef float* row = arena_row(&rows.arena, at)
    if rows.stored == PULL_F32:
        optimizer_step(rows.rule, step[0], row, row + rows.dim, rows.dim, gradient, rows.dim)
    else:
        _apply_stored(rows, step, at, gradient, spare, at_random(rows.key, id, number))
    if stamp:
        arena_stamp(&rows.arena, at)[0] = stamp


cdef void rows_push(Rows* rows, const Stride* step, const i64* ids, const Distinct* d,
                    const float* gradients, float* sum, u64 number,
                    u32 stamp, Pushed* pushed) noexcept nogil:
    cdef float* spare = sum + rows.dim
    cdef Seen[BLOCK] seen, following        # of this block; rows to fetch, of the next one
    cdef i64[BLOCK] block_ids, following_ids
    cdef u64 at = 0, block, i, moves, ahead = 0
    cdef Held held
    cdef bint sole = False
    while at < d.n:
        sole = _enter_for(rows, d.n - at) if at % BATCH == 0 else _still_sole(rows, sole)
        block = min(d.n - at, <u64> BLOCK)
        for i in range(block):
            block_ids[i] = ids[d.first[at + i]]
        _look(rows, block_ids, block, seen, 0 if ahead else rows.arena.row_bytes, True, stamp != 0)
        ahead = min(d.n - at - block, <u64> BLOCK) if (at + block) % BATCH else 0
        for i in range(ahead):
            following_ids[i] = ids[d.first[at + block + i]]
        _look(rows, following_ids, ahead, following, 0, True, False)
        moves = rows.moves
        for i in range(block):
            if i < ahead:
                _fetch(rows, &following[i], rows.arena.row_bytes, True, stamp != 0)
            if rows.moves != moves:     # one of those before had no row, and then no room in its
                                        # part
                _look(rows, block_ids + i, block - i, seen + i, rows.arena.row_bytes, True,
                      stamp != 0)
                moves = rows.moves
            held.home = seen[i].home
            held.row = seen[i].row if sole else hold_seen(&seen[i], block_ids[i])
            if held.row == NO_ROW:
                if sole:            # to make a row is for those who take locks
                    rows.gate.share()
                    sole = False
                else:
                    bucket_unlock(held.home)
                if not _admitted(rows, index_hash(block_ids[i])):
                    pushed.unadmitted += 1
                    continue
                if not _make(rows, index_hash(block_ids[i]), block_ids[i], &held, spare,
                             pushed):
                    pushed.refused += 1
                    continue
            _apply(rows, step, held.row, block_ids[i],
                   _summed(d, at + i, gradients, rows.dim, sum), spare, number, stamp)
            if not sole:
                bucket_unlock(held.home)
            pushed.applied += 1
        at += block
        if at % BATCH == 0 or at == d.n:
            rows.gate.leave(sole)


# -- whole rows
# --------------------------------------------------------------------------------------------------

cdef void rows_write(Rows* rows, const i64* ids, u64 n, const float* values, u32 width,
                     const u32* stamps,
                     Pushed* pushed) noexcept nogil:
    """Write rows. width: dim, to keep the state, or that of rows with state."""
    cdef u64 i, hash
    cdef Held held
    for i in range(n):
        if i % BATCH == 0:
            _enter(rows)
        hash = index_hash(ids[i])
        held = index_hold(&rows.index, hash, ids[i])
        if held.row == NO_ROW:
            bucket_unlock(held.home)
        if held.row != NO_ROW or _make(rows, hash, ids[i], &held, NULL, pushed):
            stored_put(rows.stored, values + i * width, rows.dim,
                       arena_row(&rows.arena, held.row), to_nearest())
            memcpy(_state(rows, held.row), values + i * width + rows.dim,
                   (width - rows.dim) * sizeof(float))
            arena_stamp(&rows.arena, held.row)[0] = stamps[i] if stamps != NULL else 0
            bucket_unlock(held.home)
            pushed.applied += 1
        else:
            pushed.refused += 1
        if (i + 1) % BATCH == 0 or i + 1 == n:
            rows.gate.leave(False)


cdef inline void _copy_whole(Rows* rows, u32 row, float* values) noexcept nogil:
    if rows.stored == PULL_F32:
        memcpy(values, arena_row(&rows.arena, row), rows.width * sizeof(float))
    else:
        stored_get(rows.stored, arena_row(&rows.arena, row), rows.dim, values)
        memcpy(values + rows.dim, _state(rows, row),
               (rows.width - rows.dim) * sizeof(float))


cdef u64 rows_read(Rows* rows, const i64* ids, u64 n, float* values, u32* stamps,
                   u8* found) noexcept nogil:
    cdef u64 i, count = 0
    cdef Held held
    for i in range(n):
        if i % BATCH == 0:
            _enter(rows)
        held = index_hold(&rows.index, index_hash(ids[i]), ids[i])
        found[i] = held.row != NO_ROW
        if found[i]:
            _copy_whole(rows, held.row, values + i * rows.width)
            stamps[i] = arena_stamp(&rows.arena, held.row)[0]
            count += 1
        bucket_unlock(held.home)
        if (i + 1) % BATCH == 0 or i + 1 == n:
            rows.gate.leave(False)
    return count


cdef u64 rows_walk(Rows* rows, u64* hash, bint* ended, u64 room, i64* ids, float* values,
                   u32* stamps) noexcept nogil:
    """Copy rows in the order of their hashes while there is room for one more bucket's."""
    cdef u32[GATHER_MAX] at
    cdef u64 n = 0, buckets = 0
    cdef u32 here, i
    cdef Bucket* home
    ended[0] = False
    _enter(rows)
    while not ended[0] and n + GATHER_MAX <= room and buckets < BATCH:
        if buckets % BLOCK == BLOCK - 1:        # a thread that waits to be alone waits for these at
                                                # most
            rows.gate.leave(False)
            _enter(rows)
        home = index_bucket(&rows.index, hash[0])
        bucket_lock(home)
        here = index_gather(&rows.index, hash[0], home, ids + n, at)
        for i in range(here):
            _copy_whole(rows, at[i], values + (n + i) * rows.width)
            stamps[n + i] = arena_stamp(&rows.arena, at[i])[0]
        bucket_unlock(home)
        n += here
        buckets += 1
        hash[0] = index_after(&rows.index, hash[0])
        ended[0] = hash[0] == 0
    rows.gate.leave(False)
    return n


cdef u64 rows_expire(Rows* rows, u32 before) noexcept nogil:
    cdef i64[GATHER_MAX] ids
    cdef u32[GATHER_MAX] at
    cdef u64 hash = 0, gone = 0, buckets = 0
    cdef u32 n, i, left
    cdef Bucket* home
    while buckets == 0 or hash != 0:
        if buckets % BATCH == 0:
            _enter(rows)
        home = index_bucket(&rows.index, hash)
        bucket_lock(home)
        n = index_gather(&rows.index, hash, home, ids, at)
        left = 0
        for i in range(n):
            if arena_stamp(&rows.arena, at[i])[0] < before:
                ids[left] = ids[i]
                left += 1
        bucket_unlock(home)
        for i in range(left):
            gone += _remove(rows, ids[i], before)
        hash = index_after(&rows.index, hash)
        buckets += 1
        if buckets % BATCH == 0 or hash == 0:
            rows.gate.leave(False)
    return gone


cdef u64 rows_count(Rows* rows) noexcept nogil:
    cdef u64 used
    _enter(rows)                # a part that moves is freed
    used = index_used(&rows.index)
    rows.gate.leave(False)
    return used


cdef u64 rows_bytes(Rows* rows) noexcept nogil:
    cdef u64 index
    _enter(rows)
    index = index_bytes(&rows.index)
    rows.gate.leave(False)
    return index + arena_bytes(&rows.arena)
