# The calls of ModelInfer that are answered without Python objects, among all that come over the
# connections of HTTP/2 of one event loop.
#
# `take` looks through the events that a Http2State has left: a call whose events are all there and
# that `infer_call` reads is taken out and answered, or waits for its query here. Everything else
# stays for Python, in its order. A query that ends in anything but a plain prediction is left for
# Python too, as futures; so is one of an application with several models, whose rows are read here.
#
# Threads: the event loop's; set_table may be called by any, under the GIL.
from libcpp.vector cimport vector
from clipper_core.http.http2_protocol cimport Http2State
from clipper_core.http.http_route cimport HotTable, Query
from clipper_core.http.infer_call cimport CallLimits
from clipper_core.http.query_waits cimport QueryWaits
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.histogram cimport Counter
from clipper_core.runtime.machine cimport atomic, u32, u64

cdef cppclass HotCall:
    Query query                 # first: `query_waits` gives it back
    Http2State* connection
    void* owner                 # of the connection, a Python object that lives as long as it
    u32 stream
    bint is_read                # Python schedules it: its rows are in `rows`
    Bytes rows
    HotCall* next

cdef cppclass HotCallState:
    QueryWaits waits
    CallLimits limits
    HotCall* spare
    u64 open                    # calls that wait for their queries
    bint awake                  # one has begun to wait since the mailboxes were armed
    vector[HotCall*] left       # for Python
    vector[void*] touched       # owners whose connections have something to send
    Bytes rows
    Bytes body
    Bytes fields
    u64 draws                   # of `span_new`
    atomic[u64]* cancelled      # counts calls that their clients have given up

cdef class HotCalls:
    cdef HotCallState* state
    cdef list mailboxes         # MailboxReader: they keep their places in the engines
    cdef HotTable table
    cdef list retired           # tables before it whose routes somebody still needs
    cdef object guard
    cdef object finish
    cdef Counter counter        # of `cancelled`

    cdef list _endings(self, set owners)
