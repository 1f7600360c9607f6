"""Timers for the deadlines of queries: a hierarchical wheel whose buckets are appended to, never
searched.

Nearly every timer of a serving system is cancelled: its query is answered in time. So inserting and
cancelling are cheap, and everything else reads memory sequentially.

Time is cut into ticks, the greatest power of two microseconds not above `tick_us`. A ticket belongs
to the first tick that starts at or after its deadline and fires when that tick starts: never early,
less than a tick late. A deadline that the wheel has already passed fires on the next advance.

A bucket is a stack of chunks of 31 entries. Inserting writes 16 bytes at its top; expiring and
moving read downwards. The stack, where the textbook has a doubly linked list, needs no memory per
entry beyond the entry, and only its topmost chunk is ever partly filled, whatever happens to the
bucket. The cost: entries of one tick fire in no defined order, and an entry cannot be found again.
Cancelling is therefore lazy: the owner of the ticket forgets it, and the wheel calls `is_live` when
it reaches the entry.

Level L has buckets of 256**L ticks. The textbook gives it 256 of them and empties a whole bucket of
level L+1 into them when time enters it: with a million timers some seconds ahead, that stops the
loop for many milliseconds. Here a level has 512 buckets, those of the block of 256 that time is in
and those of the next. So the bucket that time will enter next can be emptied ahead of need, some
chunks on each advance; and an entry that is at most one block ahead goes to its finer level at
once. What was not moved ahead (the wheel was not advanced for a while) is moved on entering. One
call reads WORK_MAX entries at most. While entries are left, `wheel_next_us` returns the current
time, so a loop that sleeps until then calls again after it has served its sockets.

Eight levels cover every microsecond below 2**62, so no deadline is too far ahead; the upper four
cost 32 KB of memory that is never written. A bitmap of 512 bits a level finds the next bucket in a
few instructions: a gap of minutes is one step.

Memory: chunks come from slabs that are added as entries are, and are kept until the wheel is freed.
n entries in B buckets need at most n/31 + B chunks however they lie; insert adds a slab before that
bound is reached, so moving entries never allocates, and insert is the only call that can fail.

At `entries_max` a hand moves over the slabs and removes dead entries, SWEEP entries on each insert.
A sweep of everything at once would free more, but takes 5-30 ms with a million entries. The cost:
if the dead entries are together behind many live ones, some inserts are refused until the hand
reaches them.

Source: Varghese & Lauck, "Hashed and Hierarchical Timing Wheels" (SOSP 1987).
"""
from libc.stdlib cimport free
from libcpp.unordered_set cimport unordered_set

from clipper_core.runtime.machine cimport CHECK, aligned_new
from clipper_core.runtime.status cimport FULL, NO_MEMORY, OK, raise_for

cdef extern from *:
    int lowest_bit "__builtin_ctzll"(u64 word) noexcept nogil

cdef enum:
    LEVELS = 8
    SPAN = 512                   # buckets of a level: the block of 256 that time is in, and the
                                 # next one
    CHUNK = 31                   # entries of a chunk: 512 bytes
    SLAB = 128                   # chunks of a slab: 64 KB
    FREE = LEVELS * SPAN         # the home of a chunk that no bucket holds
    WORK_MAX = 16384             # entries that one advance reads: 0.1 ms, or 0.5 ms if every
                                 # is_live misses the cache
    AHEAD = 1024                 # entries moved ahead of need for each tick that passed
    AHEAD_TICKS = 16
    SWEEP = 512                  # chunks and entries that one sweep reads

cdef u64 TIME_MAX = <u64> 1 << 62
NEVER = ~<u64> 0

cdef struct Entry:
    u64 ticket
    u64 tick

cdef struct Chunk:
    Chunk* next
    u64 home
    Entry entries[CHUNK]

cdef struct Slab:
    Slab* next
    u64 spare[7]                 # chunks start on a cache line
    Chunk chunks[SLAB]

cdef struct Bucket:
    Chunk* head                  # the only chunk that may be partly filled
    u64 fill                     # entries in it; CHUNK when there is none, so that one test finds
                                 # both

cdef struct Wheel:
    u64 cursor                   # every tick before it is empty; its own bucket is due
    u64 now_us                   # of the last advance
    u64 count
    u64 room                     # insert needs no slow path below this count
    u32 shift                    # log2 of the tick
    IsLive is_live
    void* owner
    u64 entries_max
    u64 looked                   # the cursor when entries were last moved ahead
    Chunk* free
    u64 chunks
    Slab* slabs
    Slab* hand                   # of the sweep: the next chunk to read
    u64 hand_chunk
    u64 summary[LEVELS]          # bit w: word w of the level's bitmap is not zero
    u64 bits[LEVELS * SPAN / 64]
    Bucket buckets[LEVELS * SPAN]


# --- buckets
# --------------------------------------------------------------------------------------------------

cdef void bucket_grow(Wheel* wheel, u64 home) noexcept nogil:
    cdef Bucket* bucket = &wheel.buckets[home]
    cdef Chunk* chunk = wheel.free
    CHECK(chunk != NULL, "timer wheel: a chunk was reserved for every entry")
    wheel.free = chunk.next
    chunk.next = bucket.head
    chunk.home = home
    bucket.head = chunk
    bucket.fill = 0
    wheel.bits[home >> 6] |= <u64> 1 << (home & 63)
    wheel.summary[home >> 9] |= <u64> 1 << ((home >> 6) & 7)


cdef inline void put(Wheel* wheel, u64 home, u64 ticket, u64 tick) noexcept nogil:
    cdef Bucket* bucket = &wheel.buckets[home]
    cdef Entry* entry
    if bucket.fill == CHUNK:
        bucket_grow(wheel, home)
    entry = &bucket.head.entries[bucket.fill]
    entry.ticket = ticket
    entry.tick = tick
    bucket.fill += 1


cdef void bucket_shrink(Wheel* wheel, u64 home) noexcept nogil:
    cdef Bucket* bucket = &wheel.buckets[home]
    cdef Chunk* chunk = bucket.head
    bucket.head = chunk.next
    bucket.fill = CHUNK
    chunk.next = wheel.free
    chunk.home = FREE
    wheel.free = chunk
    if bucket.head == NULL:
        wheel.bits[home >> 6] &= ~(<u64> 1 << (home & 63))
        if wheel.bits[home >> 6] == 0:
            wheel.summary[home >> 9] &= ~(<u64> 1 << ((home >> 6) & 7))


cdef inline Entry pop(Wheel* wheel, u64 home) noexcept nogil:
    cdef Bucket* bucket = &wheel.buckets[home]
    cdef Entry entry
    bucket.fill -= 1
    entry = bucket.head.entries[bucket.fill]
    if bucket.fill == 0:
        bucket_shrink(wheel, home)
    return entry


cdef inline u64 home_at(u32 level, u64 position) noexcept nogil:
    return (level << 9) + (position & (SPAN - 1))


cdef inline u64 home_of(Wheel* wheel, u64 tick) noexcept nogil:
    # The finest level on which `tick` is in the cursor's block of 256 or in the next one.
    cdef u32 level = 0
    cdef u32 shift = 8
    while level < LEVELS - 1 and (tick >> shift) - (wheel.cursor >> shift) > 1:
        level += 1
        shift += 8
    return home_at(level, tick >> (shift - 8))


cdef inline u64 steps_to_next(Wheel* wheel, u32 level, u64 position) noexcept nogil:
    # From `position` to the next occupied bucket of its level, itself excluded; 0 if there is none.
    cdef u64 start = (position + 1) & (SPAN - 1)
    cdef u64 word = start >> 6
    cdef u64* bits = &wheel.bits[level << 3]
    cdef u64 found = bits[word] >> (start & 63)
    if found:
        return 1 + lowest_bit(found)
    found = wheel.summary[level]
    found = ((found | found << 8) >> (word + 1)) & 0xFF
    if found == 0:
        return 0
    word = (word + 1 + lowest_bit(found)) & 7
    return ((word << 6) + lowest_bit(bits[word]) - position) & (SPAN - 1)


# --- room
# --------------------------------------------------------------------------------------------------

cdef Status add_slab(Wheel* wheel) noexcept nogil:
    cdef Slab* slab = <Slab*> aligned_new(sizeof(Slab))
    cdef u32 i
    if slab == NULL:
        return NO_MEMORY
    for i in range(SLAB):
        slab.chunks[i].home = FREE
        slab.chunks[i].next = wheel.free
        wheel.free = &slab.chunks[i]
    slab.next = wheel.slabs
    wheel.slabs = slab
    wheel.chunks += SLAB
    wheel.room = max(wheel.chunks, (wheel.chunks - FREE) * CHUNK if wheel.chunks > FREE else 0)
    wheel.room = min(wheel.room, wheel.entries_max)
    return OK


cdef u64 sift(Wheel* wheel, Chunk* chunk) noexcept nogil:
    # Replace the dead entries of a chunk by entries from the top of its bucket. Return how many
    # entries were read.
    cdef u64 home = chunk.home
    cdef Bucket* bucket = &wheel.buckets[home]
    cdef u64 i = 0
    cdef u64 looks = 0
    while chunk.home == home and i < (bucket.fill if bucket.head == chunk else CHUNK):
        looks += 1
        if wheel.is_live(wheel.owner, chunk.entries[i].ticket):
            i += 1
        else:
            chunk.entries[i] = pop(wheel, home)
            wheel.count -= 1
    return looks


cdef void sweep(Wheel* wheel) noexcept nogil:
    cdef Chunk* chunk
    cdef u64 seen = 0
    cdef u64 looks = 0
    while looks < SWEEP and seen < wheel.chunks:
        if wheel.hand == NULL:
            wheel.hand = wheel.slabs
        chunk = &wheel.hand.chunks[wheel.hand_chunk]
        wheel.hand_chunk += 1
        if wheel.hand_chunk == SLAB:
            wheel.hand_chunk = 0
            wheel.hand = wheel.hand.next
        seen += 1
        looks += 1
        if chunk.home != FREE:
            looks += sift(wheel, chunk)


cdef Status make_room(Wheel* wheel) noexcept nogil:
    if wheel.count < wheel.entries_max:
        return add_slab(wheel)
    if wheel.slabs != NULL:
        sweep(wheel)
    return OK if wheel.count < wheel.entries_max else FULL


# --- time
# --------------------------------------------------------------------------------------------------

cdef u64 move_down(Wheel* wheel, u64 home, u64 work) noexcept nogil:
    # Empties a bucket into finer ones, as far as `work` entries go; returns the work left.
    cdef Bucket* bucket = &wheel.buckets[home]
    cdef Entry entry
    while bucket.head != NULL and work != 0:
        entry = pop(wheel, home)
        work -= 1
        if wheel.is_live(wheel.owner, entry.ticket):
            put(wheel, home_of(wheel, entry.tick), entry.ticket, entry.tick)
        else:
            wheel.count -= 1
    return work


cdef inline u32 level_entered(Wheel* wheel) noexcept nogil:
    # The coarsest level whose bucket at the cursor still holds entries; 0 if none. Only whole
    # blocks can begin one.
    cdef u32 level
    if wheel.cursor & 255:
        return 0
    for level in range(LEVELS - 1, 0, -1):
        if wheel.buckets[home_at(level, wheel.cursor >> (8 * level))].head != NULL:
            return level
    return 0


cdef u64 enter(Wheel* wheel, u64 work) noexcept nogil:
    cdef u32 level = level_entered(wheel)
    while level and work:
        work = move_down(wheel, home_at(level, wheel.cursor >> (8 * level)), work)
        level = level_entered(wheel)
    return work


cdef void move_ahead(Wheel* wheel, u64 work) noexcept nogil:
    cdef u64 ticks = wheel.cursor - wheel.looked
    cdef u32 level
    wheel.looked = wheel.cursor
    work = min(work, AHEAD * min(ticks, <u64> AHEAD_TICKS))
    for level in range(1, LEVELS):
        if wheel.summary[level]:
            work = move_down(wheel, home_at(level, (wheel.cursor >> (8 * level)) + 1), work)


cdef u64 next_stop(Wheel* wheel, u64 target) noexcept nogil:
    # The first tick after the cursor at which a bucket of any level begins, or target if that comes
    # first.
    cdef u32 level
    cdef u64 position, steps
    for level in range(LEVELS):
        if wheel.summary[level]:
            position = wheel.cursor >> (8 * level)
            steps = steps_to_next(wheel, level, position)
            if steps:
                target = min(target, (position + steps) << (8 * level))
    return target


# --- the page's functions
# --------------------------------------------------------------------------------------------

cdef Wheel* wheel_new(u64 now_us, u32 tick_us, u64 entries_max, IsLive is_live,
                      void* owner) noexcept nogil:
    cdef Wheel* wheel = <Wheel*> aligned_new(sizeof(Wheel))
    cdef u32 i
    if wheel == NULL:
        return NULL
    while wheel.shift < 31 and (<u64> 2 << wheel.shift) <= tick_us:
        wheel.shift += 1
    wheel.now_us = min(now_us, TIME_MAX)
    wheel.cursor = wheel.now_us >> wheel.shift
    wheel.looked = wheel.cursor
    wheel.entries_max = entries_max
    wheel.is_live = is_live
    wheel.owner = owner
    for i in range(LEVELS * SPAN):
        wheel.buckets[i].fill = CHUNK
    return wheel


cdef void wheel_free(Wheel* wheel) noexcept nogil:
    cdef Slab* slab
    if wheel == NULL:
        return
    while wheel.slabs != NULL:
        slab = wheel.slabs
        wheel.slabs = slab.next
        free(slab)
    free(wheel)


cdef Status wheel_insert(Wheel* wheel, u64 deadline_us, u64 ticket) noexcept nogil:
    cdef u64 tick
    cdef Status status
    if wheel.count >= wheel.room:
        status = make_room(wheel)
        if status != OK:
            return status
    if deadline_us <= wheel.now_us:
        tick = wheel.cursor
    else:
        deadline_us = min(deadline_us, TIME_MAX)
        tick = (deadline_us + (<u64> 1 << wheel.shift) - 1) >> wheel.shift
    put(wheel, home_of(wheel, tick), ticket, tick)
    wheel.count += 1
    return OK


cdef u32 wheel_advance(Wheel* wheel, u64 now_us, u64* due, u32 due_max) noexcept nogil:
    cdef u64 work = WORK_MAX
    cdef u32 n = 0
    cdef u64 target, home
    cdef Entry entry
    wheel.now_us = max(wheel.now_us, min(now_us, TIME_MAX))
    target = wheel.now_us >> wheel.shift
    while True:
        work = enter(wheel, work)
        home = home_at(0, wheel.cursor)
        while wheel.buckets[home].head != NULL and n < due_max and work != 0:
            entry = pop(wheel, home)
            work -= 1
            wheel.count -= 1
            if wheel.is_live(wheel.owner, entry.ticket):
                due[n] = entry.ticket
                n += 1
        if n == due_max or work == 0:
            return n
        if wheel.cursor == target:
            break
        wheel.cursor = next_stop(wheel, target)
    if wheel.cursor != wheel.looked:
        move_ahead(wheel, work)
    return n


cdef u64 wheel_next_us(Wheel* wheel) noexcept nogil:
    # A bucket that time will enter next needs the very next tick, and a later one for the tick
    # at which it becomes that one: so a sleeping loop wakes to move entries ahead before they are
    # urgent.
    cdef u64 bound = NEVER
    cdef u64 position, steps
    cdef u32 level
    if wheel.count == 0:
        return NEVER
    if wheel.buckets[home_at(0, wheel.cursor)].head != NULL or level_entered(wheel):
        return wheel.cursor << wheel.shift
    for level in range(LEVELS):
        if wheel.summary[level]:
            position = wheel.cursor >> (8 * level)
            steps = steps_to_next(wheel, level, position)
            if level == 0 or steps == 1:
                bound = min(bound, wheel.cursor + steps)
            else:
                bound = min(bound, (position + steps - 1) << (8 * level))
    return bound << wheel.shift


cdef u64 wheel_count(Wheel* wheel) noexcept nogil:
    return wheel.count


# --- the Python interface
# -------------------------------------------------------------------------------------------------

cdef bint _held(void* owner, u64 ticket) noexcept nogil:
    return (<unordered_set[u64]*> owner).count(ticket) != 0


cdef class TimerWheel:
    """Deadlines by ticket; it holds no clock, times are arguments in microseconds. Threads: one at
    a time.

    now_us: the time at which it starts.
    tick_us: 1 to 2**31; the greatest power of two not above it is the tick, and no ticket fires
    later than that.
    entries_max: largest number of entries, including cancelled ones that the wheel has not reached.

    Times above 2**62 count as 2**62. Raises ValueError for bad arguments, MemoryError when memory
    is out.
    """
    cdef Wheel* wheel
    cdef unordered_set[u64] held

    def __cinit__(self, u64 now_us, u32 tick_us=64, u64 entries_max=1 << 20):
        if not 1 <= tick_us <= 1 << 31:
            raise ValueError(f"tick_us must be from 1 to 2**31, not {tick_us}")
        self.wheel = wheel_new(now_us, tick_us, entries_max, _held, &self.held)
        if self.wheel == NULL:
            raise MemoryError("no memory for a timer wheel")

    def __dealloc__(self):
        wheel_free(self.wheel)

    def __len__(self):
        """Tickets that are neither fired nor cancelled."""
        return self.held.size()

    @property
    def entries(self):
        """Number of entries, including cancelled ones that the wheel has not reached."""
        return wheel_count(self.wheel)

    def insert(self, u64 deadline_us, u64 ticket):
        """Hold `ticket`, a number never used before, until `deadline_us`; raises what is bound to
        FULL or NO_MEMORY."""
        cdef Status status
        if self.held.count(ticket):
            raise ValueError(f"ticket {ticket} is held already")
        with nogil:
            status = wheel_insert(self.wheel, deadline_us, ticket)
            if status == OK:
                self.held.insert(ticket)
        raise_for(status, "timer wheel: entries_max reached" if status == FULL
                  else "timer wheel: no memory")

    def cancel(self, u64 ticket):
        """Forget `ticket`; False if it is not held (fired, cancelled, never inserted)."""
        return self.held.erase(ticket) != 0

    def advance(self, u64 now_us):
        """Return the tickets whose tick has started by `now_us`: those with a deadline at or before
        it, in no defined order, except that a deadline in the last, unfinished tick waits for its
        end. The time never goes back."""
        cdef list fired = []
        while True:
            fired += self.step(now_us, 1024)
            if self.next_us() > now_us:
                return fired

    def step(self, u64 now_us, u32 due_max):
        """Advance the wheel by one bounded call, of at most `due_max` tickets. Call it again while
        `next_us() <= now_us`."""
        cdef u64[1024] due
        cdef u32 n, i
        if not 1 <= due_max <= 1024:
            raise ValueError(f"due_max must be from 1 to 1024, not {due_max}")
        with nogil:
            n = wheel_advance(self.wheel, now_us, due, due_max)
            for i in range(n):
                self.held.erase(due[i])
        return [due[i] for i in range(n)]

    def next_us(self):
        """Return a time before which no ticket fires; 2**64 - 1 if nothing is held."""
        return wheel_next_us(self.wheel)


# --- what a query costs
# ----------------------------------------------------------------------------------------------

cdef struct Slots:                   # as in the owner of real tickets: a slot is reused, its ticket
                                     # is not
    u64 mask
    u64* tickets


cdef bint _slot_live(void* owner, u64 ticket) noexcept nogil:
    cdef Slots* slots = <Slots*> owner
    return slots.tickets[ticket & slots.mask] == ticket


cdef u64 _churn(Wheel* wheel, Slots* slots, u64 count, u64 per_second, u64 slo_us,
                u64 answer_us) noexcept nogil:
    cdef u64 due[256]
    cdef u64 ticket, now_us, fired = 0
    cdef u64 answered = 0
    cdef u64 behind = answer_us * per_second // 1000000
    cdef u64 next_us = 0
    for ticket in range(1, count + 1):
        now_us = ticket * 1000000 // per_second
        slots.tickets[ticket & slots.mask] = ticket
        wheel_insert(wheel, now_us + slo_us, ticket)
        if ticket > behind:
            answered += 1
            slots.tickets[answered & slots.mask] = 0
        if now_us >= next_us:
            fired += wheel_advance(wheel, now_us, due, 256)
            next_us = wheel_next_us(wheel)
    return fired


def churn(u64 count, u64 per_second=1000000, u64 slo_us=20000, u64 answer_us=5000):
    """A steady stream of `count` queries in simulated time, each answered `answer_us` after it
    came. Threads: any.

    Returns how many deadlines fired: 0 if answer_us < slo_us. It measures the cost of a query: to
    insert, to cancel, and to remove the dead entry.
    """
    cdef Slots slots
    cdef u64 fired
    cdef Wheel* wheel
    slots.mask = (1 << (2 * (slo_us + answer_us) * per_second // 1000000 + 1).bit_length()) - 1
    slots.tickets = <u64*> aligned_new((slots.mask + 1) * sizeof(u64))
    wheel = wheel_new(0, 64, 1 << 24, _slot_live, &slots)
    try:
        if slots.tickets == NULL or wheel == NULL:
            raise MemoryError("no memory for a timer wheel")
        with nogil:
            fired = _churn(wheel, &slots, count, per_second, slo_us, answer_us)
        return fired
    finally:
        wheel_free(wheel)
        free(slots.tickets)
