# The rows of a model that are refused for a while: each has ended the process of two containers in
# which it was the only row. One that arrives, or waits, ends at once.
#
# Threads: loop only.
from clipper_core.runtime.machine cimport u32, u64
from clipper_core.runtime.row_hash cimport Key

cdef enum:
    REFUSED_ROWS_MAX = 256      # the one that would be sent again first makes way for another

cdef struct RefusedRow:
    Key key
    u64 until_us

cdef cppclass RefusedRows:
    RefusedRow rows[256]
    u32 count                   # of rows in use

# Refuse a row until a time.
cdef void refused_rows_add(RefusedRows* refused, const Key* key, u64 until_us,
                           u64 now_us) noexcept nogil
# Return whether a row is refused now. Forgets rows whose time is over.
cdef bint refused_rows_has(RefusedRows* refused, const Key* key, u64 now_us) noexcept nogil
