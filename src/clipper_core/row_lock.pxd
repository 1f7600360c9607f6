# The word of a bucket of rows: a lock, and what only its holder changes: how many ids are in the bucket, and whether one had to
# go on to the next.
#
# Threads: any.
from clipper_core.machine cimport u32

cdef extern from "row_lock.hpp" namespace "clipper" nogil:
    cdef cppclass RowLock "clipper::RowLock<>":
        bint take() noexcept            # False: somebody else has it
        void give() noexcept
        u32 count() noexcept            # these under the lock
        bint overflowed() noexcept
        void overflow() noexcept
        void more(u32 ids) noexcept
