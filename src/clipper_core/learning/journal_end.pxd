# The end of the journal's last segment: the file's pages in memory, to which records are copied
# without a system call, and the number of the next record. A record is u32 length, u32 CRC-32 (of
# the length and the bytes), and the bytes (python/clipper/store/journal.py, which opens segments,
# makes room and reads).
#
# Threads: any, with the GIL, which no append releases: so appends need no lock. Who changes the
# file otherwise sets `room` to 0 first; then no append succeeds until there is room again.
from clipper_core.runtime.machine cimport u64, u8

cdef enum:
    HEAD_BYTES = 8              # of a record, before its bytes

cdef class JournalEnd:
    cdef u8* base               # the pages; NULL: none
    cdef readonly u64 mapped    # bytes of them
    cdef public u64 at          # where the next record goes
    cdef public u64 room        # an append ends at this offset at most
    cdef public u64 next        # number of the next record
    cdef bint keeps             # False: records are numbered only

    cdef u64 put(self, const u8* framed, u64 nbytes, u64 count) noexcept
    # ^ so many records with their heads: the number of the last; 0 when there is no room

cdef void head_of(u8* at, const u8* record, u64 nbytes) noexcept nogil     # writes HEAD_BYTES
