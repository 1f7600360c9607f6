# The reading end of a Mailbox (future.pxd): who waits for which future, and which of them are done.
#
# Threads: one at a time (its event loop's, or the callback thread); the engine's loop thread is the
# other side.
from clipper_core.results.completion cimport Completion, Mailbox
from clipper_core.results.future cimport Future
from clipper_core.runtime.machine cimport u32

cdef class MailboxReader:
    cdef Completion completion
    cdef Mailbox* box
    cdef u32 bit
    cdef dict waiting           # slot id -> list of (future, item)

    cdef bint _register(self, Future future, item)
    cdef bint _arm(self)
    cdef bint _drain_once(self, list done) except -1
    cdef int _collect(self, object slot_id, list done) except -1
