# The word of a bucket of rows: a lock, and what only its holder changes: how many ids are in the
# bucket, and whether one had to go on to the next. And the gate of the whole table.
#
# Threads: any.
from clipper_core.runtime.machine cimport u32

cdef extern from "params/row_lock.hpp" namespace "clipper" nogil:
    cdef cppclass RowLock "clipper::RowLock<>":
        bint take() noexcept            # False: somebody else has it
        void give() noexcept
        u32 count() noexcept            # these under the lock
        bint overflowed() noexcept
        void overflow() noexcept
        void more(u32 ids) noexcept

    cdef cppclass RowGate "clipper::RowGate<>":     # of a table: who is inside
        bint enter_sole() noexcept      # True: nobody else is inside, nor will be before share():
                                        # no locks are needed
        bint others() noexcept          # somebody waits for that
        void share() noexcept
        void leave(bint sole) noexcept
        bint enter() noexcept           # then wait until it is shared().  False: wait while it is
                                        # closed(), and come again
        bint shared() noexcept
        bint closed() noexcept
        bint close() noexcept           # from outside, so as to be alone() soon.  False: somebody
                                        # else did
        bint alone() noexcept
        void open() noexcept
