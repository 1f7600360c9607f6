"""The evaluations in flight, so that identical queries cost one.

Linear probing at half load at most; a removal shifts its followers back, so that there are no tombstones to clean up.
"""
from libc.stdlib cimport calloc, free

from clipper_core.machine cimport CHECK, aligned_new
from clipper_core.status cimport FULL, OK, raise_for

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
