# The calls of ModelInfer that are answered without Python objects, among all that come over the
# connections of HTTP/2 of one thread: the event loop's, or a worker's of the server of HTTP.
#
# `take` looks through the events that a Http2State has left: a call whose events are all there and
# that `infer_call` reads is taken out and answered, or waits for its query here. Everything else
# stays for Python, in its order. A query that ends in anything but a plain prediction is left for
# Python too, as futures; so is one of an application with several models, whose rows are read here.
# On a worker's connection such a call waits here, by a ticket, for the answer that Python makes.
#
# A connection that goes from one thread to another takes its calls along: `hot_calls_give` on the
# one, `hot_calls_adopt` on the other.
#
# Threads: a HotCallState belongs to one thread, that of a HotCalls to the event loop's; `shared` is
# any's; set_table may be called by any, under the GIL.
from libcpp.vector cimport vector
from clipper_core.http.http2_protocol cimport Http2Event, Http2State
from clipper_core.http.http_route cimport HotTable, Query, TableState
from clipper_core.http.infer_call cimport CallLimits
from clipper_core.http.query_waits cimport QueryWaits
from clipper_core.runtime.byte_buffer cimport Bytes, Lookup
from clipper_core.runtime.histogram cimport Counter
from clipper_core.runtime.machine cimport atomic, u32, u64, u8

cdef enum:
    TAKEN = 255                 # the kind of an event that is nobody's any more
    SEVERAL = 0xffffffff        # place of a message that came in parts

cdef cppclass HotCall:
    Query query                 # first: `query_waits` gives it back
    Http2State* connection
    void* owner                 # of the connection; it lives as long as it
    u32 stream
    u64 ticket                  # by which Python answers it, which has its query; 0: it has not
    bint is_read                # Python schedules it: its rows are in `rows`
    bint is_left                # Python answers it; it waits for nothing
    Bytes rows
    HotCall* next

cdef cppclass HotCallsShared:   # of all threads
    CallLimits limits
    atomic[u64] open            # calls that wait for their queries, or for Python
    atomic[u64] outside         # calls that Python answers
    u64 calls_max               # of both; more are Python's, which refuses them
    atomic[u64]* cancelled      # counts calls that their clients have given up

cdef cppclass HotCallState:
    HotCallsShared* shared
    QueryWaits* waits
    HotCall* spare
    u64 open                    # calls that wait for their queries, or for Python
    bint awake                  # one has begun to wait since the mailboxes were armed
    bint is_full                # no further call is taken
    vector[HotCall*] left       # for Python
    Lookup tickets              # by ticket: HotCall* that Python answers
    vector[u64] gone            # tickets of calls for whose answers nobody waits any more
    vector[void*] touched       # owners whose connections have something to send
    Bytes rows
    Bytes body
    Bytes fields
    u64 draws                   # of `span_new`

cdef void hot_calls_close(HotCallState* c) noexcept nogil
# Take the events of plain calls, and answer them, or wait. Return whether there were any.
cdef bint hot_calls_take(HotCallState* c, Http2State* h, const TableState* table,
                         void* owner) noexcept nogil
# Return whether an event is the head of a call that may be plain.
cdef bint hot_call_may_be_plain(const Http2State* h, const Http2Event* called) noexcept nogil
# Answer a call, or wait for its next row: the slot that it waited for has ended, and it waits for
# none any more. Return whether it is answered, or left for Python.
cdef bint hot_call_slot_ended(HotCallState* c, HotCall* x) noexcept nogil
# Let a call wait by a ticket that was left for Python, which has its query. False: there is no
# memory, and nothing has changed.
cdef bint hot_call_ask(HotCallState* c, HotCall* x, u64 ticket) noexcept nogil
# Answer such a call: by a message (NULL: there is none) and the fields that end it. Without fields
# it fails. Return the owner of its connection; NULL: there is no call with this ticket.
cdef void* hot_call_answer(HotCallState* c, u64 ticket, const u8* message, u64 n,
                           Bytes* fields) noexcept nogil
# End a call by an error, whose query is over.
cdef void hot_call_fail(HotCallState* c, HotCall* x) noexcept nogil
# Cancel the calls of a connection that is gone.
cdef void hot_calls_lose(HotCallState* c, Http2State* h) noexcept nogil
# Let the calls of a connection go with it, those that are left for Python too. tickets: gets the
# ticket and the stream of each that waits by a ticket, and waits here no more; it has room for all
# streams. NULL: there are none.
cdef void hot_calls_give(HotCallState* c, Http2State* h, vector[u64]* tickets) noexcept nogil
# Cancel the calls of a connection that was given, and is gone before it was adopted.
cdef void hot_calls_drop(HotCallState* c, Http2State* h) noexcept nogil
# Take the calls that have come with a connection.
cdef void hot_calls_adopt(HotCallState* c, Http2State* h, void* owner) noexcept nogil

cdef class HotCalls:
    cdef HotCallState* state
    cdef HotCallsShared* shared
    cdef QueryWaits* waits
    cdef list mailboxes         # MailboxReader: they keep their places in the engines
    cdef HotTable table
    cdef list retired           # tables before it whose routes somebody still needs
    cdef object guard
    cdef object finish
    cdef Counter counter        # of `cancelled`

    cdef list _endings(self, set owners)
