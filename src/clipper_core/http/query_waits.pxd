# Waiting for the queries of many clients: a query waits for one of its slots after another, and
# those that have ended come out one by one.
#
# Threads: a QueryWaits belongs to one thread, whose mailboxes it has; the engines' loops are the
# other side.
from libcpp.vector cimport vector
from clipper_core.http.http_route cimport Query
from clipper_core.results.completion cimport CompletionState, Mailbox
from clipper_core.results.future cimport MailboxReader
from clipper_core.runtime.byte_buffer cimport Lookup
from clipper_core.runtime.machine cimport u32, u64

cdef struct Inbox:              # of an engine
    CompletionState* completion
    Mailbox* box
    u32 bit

cdef cppclass QueryWaits:
    vector[Inbox] inboxes       # mailboxes, one an engine
    Lookup waiting              # by slot id: Query*
    vector[u64] over            # ids of slots that had ended before they were waited for

# Take a mailbox, which has to outlive the waits.
cdef int waits_add(QueryWaits* w, MailboxReader reader) except -1
# Wait for a slot of the query. The query must stay where it is. False: there is no memory.
cdef bint query_wait(QueryWaits* w, Query* q, u32 slot) noexcept nogil
cdef void query_wait_no_more(QueryWaits* w, Query* q) noexcept nogil
# Return the first slot from the one that it waited for that is pending; else the slot after those
# of the query.
cdef u32 query_next_open(const Query* q) noexcept nogil
# Return the next query whose slot has ended; it waits for none any more. NULL: there is none, and
# the mailboxes are armed: their descriptors become readable when there is one.
cdef Query* query_next_ended(QueryWaits* w) noexcept nogil
