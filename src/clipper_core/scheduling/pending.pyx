"""The evaluations in flight, so that identical queries cost one.

Linear probing at half load at most; a removal shifts its followers back, so that there are no
tombstones to clean up.

The loop alone writes. Other threads may ask whether a key is there (`pending_has`): they read
without a lock, and a version that is odd while entries move tells them to read again. Entries are
written with release and read with acquire, so that neither passes the version.
"""
from libc.stdlib cimport calloc, free

from clipper_core.runtime.machine cimport CHECK, acquire, aligned_new, atomic, relaxed, release, u32
from clipper_core.runtime.status cimport FULL, OK, raise_for

cdef enum:
    PAGE_FLIGHTS = 128          # fewer than a page of 4 KiB has
    TOUCH_FLIGHTS = 65536       # 1.5 MiB
    READS_MAX = 16              # of a table that changes meanwhile; then the answer is yes

cdef cppclass Flight:
    atomic[u64] lo, hi          # the key
    atomic[u64] ticket          # 0: free

cdef struct PendingTable:
    Flight* flights
    atomic[u64] version         # odd: entries move
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


cdef u64 pending_touch(PendingTable* table, u64 start) noexcept nogil:
    cdef u64 i = start, size = table.mask + 1, ticket
    cdef u64 end = start + min(<u64> TOUCH_FLIGHTS, size - min(start, size))
    while i < end:
        ticket = table.flights[i].ticket.load(relaxed)
        # changes nothing
        table.flights[i].ticket.compare_exchange_strong(ticket, ticket, relaxed)
        i += PAGE_FLIGHTS
    return end if end < size else 0


cdef inline u64 _pending_slot(const PendingTable* table, const Key* key) noexcept nogil:
    """The key's slot, or the free one where it would go; half of the slots are free."""
    cdef u64 slot = key.lo & table.mask
    while (table.flights[slot].ticket.load(acquire)
           and not (table.flights[slot].lo.load(acquire) == key.lo
                    and table.flights[slot].hi.load(acquire) == key.hi)):
        slot = (slot + 1) & table.mask
    return slot


cdef u64 pending_find(const PendingTable* table, const Key* key) noexcept nogil:
    return table.flights[_pending_slot(table, key)].ticket.load(acquire)


cdef bint pending_has(const PendingTable* table, const Key* key) noexcept nogil:
    cdef u64 version, found
    cdef u32 _i
    for _i in range(READS_MAX):
        version = (<PendingTable*> table).version.load(acquire)
        found = pending_find(table, key)
        if version & 1 == 0 and (<PendingTable*> table).version.load(relaxed) == version:
            return found != 0
    return True


cdef Status pending_put(PendingTable* table, const Key* key, u64 ticket) noexcept nogil:
    cdef Flight* flight = &table.flights[_pending_slot(table, key)]
    CHECK(ticket != 0, "a pending evaluation has a ticket")
    if flight.ticket.load(relaxed) == 0:
        if table.count == table.entries_max:
            return FULL
        table.count += 1
        flight.lo.store(key.lo, relaxed)
        flight.hi.store(key.hi, relaxed)
    flight.ticket.store(ticket, release)
    return OK


cdef void pending_remove(PendingTable* table, const Key* key, u64 ticket) noexcept nogil:
    cdef u64 hole = _pending_slot(table, key), slot, home, version
    if ticket == 0 or table.flights[hole].ticket.load(relaxed) != ticket:
        return
    version = table.version.load(relaxed)
    table.version.store(version + 1, relaxed)
    slot = hole
    while True:
        slot = (slot + 1) & table.mask
        if table.flights[slot].ticket.load(relaxed) == 0:
            break
        home = table.flights[slot].lo.load(relaxed) & table.mask
        # its probe runs over the hole
        if ((slot - home) & table.mask) >= ((slot - hole) & table.mask):
            table.flights[hole].lo.store(table.flights[slot].lo.load(relaxed), release)
            table.flights[hole].hi.store(table.flights[slot].hi.load(relaxed), release)
            table.flights[hole].ticket.store(table.flights[slot].ticket.load(relaxed), release)
            hole = slot
    table.flights[hole].ticket.store(0, release)
    table.version.store(version + 2, release)
    table.count -= 1


cdef u64 pending_count(const PendingTable* table) noexcept nogil:
    return table.count


cdef class Pending:
    """Threads: one at a time, but for `has` and `touch`.

    Evaluations in flight: key (two 64-bit words) -> ticket; at most `entries_max` of them.
    """
    cdef PendingTable* table

    def __cinit__(self, u64 entries_max):
        self.table = pending_new(entries_max)
        if self.table == NULL:
            raise MemoryError(f"no memory for {entries_max} pending evaluations")

    def __dealloc__(self):
        pending_free(self.table)

    def touch(self, u64 start=0):
        """Have the system find memory for a stretch of the table that begins with slot `start`.

        What it holds stays as it is. -> the slot to go on with, 0 after the last stretch. Threads:
        any.
        """
        with nogil:
            start = pending_touch(self.table, start)
        return start

    def find(self, u64 lo, u64 hi):
        """The ticket, or 0."""
        cdef Key key = Key(lo, hi)
        return pending_find(self.table, &key)

    def put(self, u64 lo, u64 hi, u64 ticket):
        """Insert or replace. Raises the error of Status.FULL at the bound, ValueError for ticket
        0."""
        cdef Key key = Key(lo, hi)
        cdef Status status
        if ticket == 0:
            raise ValueError("ticket 0 means: nobody evaluates it")
        status = pending_put(self.table, &key, ticket)
        if status != OK:
            raise_for(status, f"{self.table.entries_max} evaluations are in flight")

    def has(self, u64 lo, u64 hi):
        """Whether somebody evaluates it now. Threads: any."""
        cdef Key key = Key(lo, hi)
        return bool(pending_has(self.table, &key))

    def remove(self, u64 lo, u64 hi, u64 ticket):
        """Only if the key still names this ticket."""
        cdef Key key = Key(lo, hi)
        pending_remove(self.table, &key, ticket)

    def __len__(self):
        return <Py_ssize_t> pending_count(self.table)
