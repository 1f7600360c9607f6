# A call of ModelInfer as a query: its head and its ModelInferRequest in, a ModelInferResponse out.
# The response has the bytes that frontend/inference/protobuf_codec.py makes of the same answer.
#
# Only plain calls are read: one tensor of numbers, raw or in the field of `contents` for its
# datatype; ids and users of visible ASCII; no metadata that means something else to a query. Every
# other call is Python's, which reports what is wrong with it.
#
# Threads: any (pure functions but for the query, which belongs to one thread).
from clipper_core.http.http_route cimport Fields, Query, QueryOutcome, RouteState, TableState
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u64, u8

cdef struct CallLimits:
    u64 message_bytes_max       # of a message
    u64 way_back_us             # that a reply takes: a query must end so long before its deadline
    u64 slo_us_max              # of a query without a timeout of its own

cdef struct CallHead:
    u64 timeout_us              # until the deadline; NO_TIMEOUT: there is none
    const u8* authorization     # NULL: there is none; so with the others
    u64 authorization_bytes
    const u8* id                # x-request-id
    u64 id_bytes
    const u8* trace             # traceparent
    u64 trace_bytes

# Read the head of a call, as http2_head writes it. Return False if it is another method's, or not
# plain.
cdef bint call_head_read(const u8* at, u64 n, CallHead* head) noexcept nogil
# Submit the query of a call, whose began_us is set; its route is found here. at: what came of its
# messages. Return OTHER if that is not one plain message, or the call has no valid key; then the
# route may be NULL. rows: takes what was read. draws: of `span_new`
cdef QueryOutcome call_submit(Query* q, const TableState* table, const CallLimits* limits,
                              const CallHead* head, const u8* at, u64 n, Bytes* rows,
                              u64* draws) noexcept nogil
# Write the response to a query of which no row is pending, and count it. Return False if Python
# must write it; then nothing was counted.
cdef bint call_answer(Query* q, Bytes* body) noexcept nogil
# Append the fields that end such a call. fields: of the query
cdef void call_trailers(const Fields* said, Bytes* fields) noexcept nogil
# Write the response to a query that was only read, from the answers to its rows, and the fields
# that end its call. False: Python must write them. answers: None if one is not plain. request_id:
# the id in the request. trace: its traceparent; empty: it names none. draws: of `span_new`. Raises
# NO_MEMORY.
cdef bint call_reply(const RouteState* r, list answers, bytes request_id, bytes trace, u64* draws,
                     Bytes* body, Bytes* fields) except -1
