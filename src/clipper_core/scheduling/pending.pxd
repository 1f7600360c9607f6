# Evaluations in flight: key -> ticket of the task that evaluates it. Threads: the loop;
# pending_has, pending_touch: any.
from clipper_core.runtime.machine cimport u64
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.status cimport Status

cdef struct PendingTable      # pending.pyx

cdef PendingTable* pending_new(u64 entries_max) noexcept nogil
cdef void pending_free(PendingTable* table) noexcept nogil
cdef u64 pending_touch(PendingTable* table, u64 start) noexcept nogil
# ^ as cache_touch: memory for a stretch from slot `start` on. -> the slot to go on with; 0: the
# table ends
# 0: nobody evaluates it
cdef u64 pending_find(const PendingTable* table, const Key* key) noexcept nogil
# or replace; ticket != 0
cdef Status pending_put(PendingTable* table, const Key* key, u64 ticket) noexcept nogil
# if it still names this
cdef void pending_remove(PendingTable* table, const Key* key, u64 ticket) noexcept nogil
cdef bint pending_has(const PendingTable* table, const Key* key) noexcept nogil
# ^ Threads: any. Whether somebody evaluates it now. While the loop removes others, it may say yes
# where the answer is no
cdef u64 pending_count(const PendingTable* table) noexcept nogil
