# Requests that are answered without Python, by their exact path: a table of routes. The body is
# read into a row, the row is submitted, and its prediction is written as the same answer that
# serving/processor and frontend/http/applications give.
#
# A route is one application (or model) as it is now: one model, whose answer nobody else looks at.
# Whatever else a query may come to (a refusal, a default, an output that is not plain) is no
# business of this: its future is Python's.
#
# Threads: a Query is one thread's. Tables and routes never change; HotTable and HotRoute are made
# and dropped under the GIL, and `users` counts those that still need their memory.
from clipper_core.engine.engine cimport Engine
from clipper_core.engine.model cimport Model
from clipper_core.http.http_head cimport Head
from clipper_core.http.json_value cimport LargeBody, Wanted
from clipper_core.results.completion cimport Block, CompletionState
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.histogram cimport Counter, Histogram, LatencyHistogram
from clipper_core.runtime.machine cimport atomic, u32, u64, u8
from clipper_core.scheduling.model_state cimport ModelState
from clipper_core.scheduling.scheduler cimport EngineState
from clipper_core.wire.prediction cimport Value

# -- The Open Inference Protocol's infer, of one row: its request, as JSON or with the row as bytes
# behind it, and its answer.
#
# Threads: any (pure functions). As with heads, what is not plain is not read: tensors of many rows,
# nested data, other members.
#
# Read a request: the row to `row`, the request's own id as JSON to `tag`. Return False if it is not
# plain. json_bytes: of the JSON, if the row follows it; else NO_LENGTH.
cdef bint infer_read(const Wanted* wanted, bint finite, const u8* body, u64 n, u64 json_bytes,
                     Bytes* row, Bytes* tag,
                     bint* binary) noexcept nogil
# Write the output tensor and the end of the response: `"outputs":[...]}`, and the bytes behind it.
# Return False if it is not plain. large: takes the elements, or the bytes, and what follows them;
# NULL: everything is written to `out`.
cdef bint infer_write(Bytes* out, const Value* value, bint binary, u64* json_bytes,
                      LargeBody* large) noexcept nogil

# -- The answers that were written without Python (http_route), kept for a while so that feedback
# can name them by their id.
#
# A table of one entry per id, addressed by the low bits of the id: an answer replaces the one that
# was given a full table ago. Outputs that are blobs are shared with the cache and counted; beyond
# `bytes_max` the oldest go first.
#
# Threads: any. A spin lock guards the table; it is held for a few dozen instructions.
cdef struct Entry:
    u64 number                  # of the answer; 0: free
    u64 given_us                # when it was given, monotonic
    Value value                 # holds a reference
    u32 owner                   # who may send feedback: a number that the caller chose

cdef cppclass RecentState:
    atomic[u32] lock
    u64 mask
    u64 bytes                   # of blobs that are held
    u64 bytes_max
    u64 count
    Entry* entries

cdef void recent_add(RecentState* r, u64 number, u32 owner, const Value* value,
                     u64 now_us) noexcept nogil

cdef class RecentAnswers:
    cdef RecentState* state

# -- Routes, and the state of a query.
cdef enum Form:                 # of a request and its answer
    PREDICT = 0                 # POST /api/APP/predict
    OLD_PREDICT = 1             # POST /APP/predict
    INFER = 2                   # POST /v2/models/NAME/infer

cdef enum QueryOutcome:         # of query_submit
    OTHER = 0                   # the body is not plain: nothing was submitted
    VALUE = 1                   # an answer, at once: a cache hit; `value` is held
    ENDED = 2                   # refused, or ended already: its slot says how
    OPEN = 3                    # its slot is pending

cdef cppclass RouteState:
    atomic[u32] users           # queries that are open
    u8 form
    bint variable
    Wanted wanted
    EngineState* engine
    ModelState* model
    u64 slo_us
    double confidence_min
    Bytes node                  # before the number in an id: `4bde13fa-`
    Bytes models                # as JSON: `["svm:1"]`
    Bytes head                  # of a V2 answer, as JSON up to the id: `{"model_name":"svm","id":`
    atomic[u64]* queries        # the application's tally
    atomic[u64]* answered
    atomic[u64]* decided
    atomic[u64]* used
    atomic[u64]* wins
    Histogram* took
    atomic[u64]* ok             # of HTTP
    Histogram* requests
    RecentState* recent         # where answers are kept for feedback; NULL: nowhere
    u32 owner                   # there
    void* object                # the HotRoute

cdef cppclass Query:
    RouteState* route
    Block* block                # NULL: it was answered at once
    u32 slot
    bint binary                 # V2: the output goes back as bytes
    Value value
    u64 number                  # its id
    u64 began_us
    u32 id_bytes                # X-Request-Id as given; 0: none
    u8[128] id
    Bytes tag                   # V2: the request's own id, as JSON

cdef struct Place:
    u64 hash
    const u8* path
    u64 path_bytes
    RouteState* route           # NULL: free

cdef cppclass TableState:
    atomic[u32] users           # workers that look at it
    u64 mask
    Place* places

# NULL: none
cdef RouteState* route_at(const TableState* table, const u8* path, u64 n) noexcept nogil
# its route and began_us are set
cdef QueryOutcome query_submit(Query* q, const Head* head, const u8* body,
                               Bytes* row) noexcept nogil
# Append the response to `out` and count it. Return False if Python must write it; then nothing was
# written or counted. made: an id for X-Request-Id, where neither the request nor the answer has
# one.  body: scratch space.  rest: what is left to be written of a large response; else unchanged.
cdef bint query_answer(Query* q, const Value* value, u32 latency_us, const char* date,
                       const Bytes* made, bint close,
                       Bytes* body, Bytes* out, LargeBody** rest) noexcept nogil
cdef void query_drop(Query* q) noexcept nogil          # what it holds of results
cdef CompletionState* query_home(const Query* q) noexcept nogil

cdef class HotRoute:
    cdef RouteState* state
    cdef Model model
    cdef tuple counters
    cdef readonly object subject           # whose question it is: for what Python answers

    cdef int _set_rows(self) except -1

cdef class HotTable:
    cdef TableState* state
    cdef dict routes                       # by path
