# A table of routes, by exact path, of requests that are answered without Python. The body is read
# into a row, the row is submitted, and the prediction is written as the same response that
# serving/processor and frontend/http/applications make.
#
# A route is an application, or a model, as it is now. Queries to one model are submitted here. If
# such a query has another result than a plain prediction (a refusal, a default, an output that is
# not plain), Python handles its future and writes the response. Queries that need more than one
# model, or what was learned, are read here and scheduled by the thread of the event loop.
#
# Threads: a Query belongs to one thread. Tables and routes are immutable; HotTable and HotRoute are
# created and freed under the GIL, and `users` counts the users that still need their memory.
from clipper_core.application.application cimport Application
from clipper_core.engine.engine cimport Engine
from clipper_core.engine.model cimport Model
from clipper_core.http.http_head cimport Head
from clipper_core.http.json_value cimport LargeBody, Wanted
from clipper_core.http.key_table cimport Admission, KeyState, KeyTable, Standing
from clipper_core.http.trace_parent cimport TRACE_PARENT_BYTES
from clipper_core.learning.answer_window cimport Ring
from clipper_core.results.answer cimport Answer
from clipper_core.results.completion cimport Block, CompletionState
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.histogram cimport Counter, Histogram, LatencyHistogram
from clipper_core.runtime.machine cimport atomic, i64, u32, u64, u8
from clipper_core.scheduling.model_state cimport ModelState
from clipper_core.scheduling.scheduler cimport EngineState
from clipper_core.wire.prediction cimport Value

# -- Infer requests of the Open Inference Protocol: the request, as JSON or as JSON followed by the
# bytes of the rows, and the response.
#
# Threads: any (pure functions). Requests that are not plain are not read: several tensors, nested
# data, other members.
#
cdef struct InferParameters:
    u64 timeout_us              # 0: none
    u64 salt
    u64 priority                # 0: none
    const u8* user              # in the body
    u64 user_bytes              # 0: nobody's

# Read a request: write its rows to `rows`, and the request's own id, as JSON, to `tag`. Return how
# many rows it has, up to rows_max; 0 if it is not plain. json_bytes: length of the JSON, if the
# rows follow it; else NO_LENGTH.
cdef u32 infer_read(const Wanted* wanted, bint finite, const u8* body, u64 n, u64 json_bytes,
                    u32 rows_max, Bytes* rows, Bytes* tag, bint* binary,
                    InferParameters* parameters) noexcept nogil
# Write the output tensor and the end of the response: `"outputs":[...]}`, and the bytes that follow
# it. Return False if it is not plain. stacked: the value is an array of the outputs of several
# rows; False: it is the output of one row. large: takes the elements, or the bytes, and what
# follows them; NULL: everything is written to `out`.
cdef bint infer_write(Bytes* out, const Value* value, bint stacked, bint binary, u64* json_bytes,
                      LargeBody* large) noexcept nogil

# Return the dtype of a name in the protocol; 0 if rows of it are not read here.
cdef u8 tensor_dtype(const u8* at, u64 n) noexcept nogil
# Return the protocol's name of a dtype; NULL if outputs of it are not written here.
cdef const char* tensor_datatype(u8 dtype) noexcept nogil
# Return how many rows of this shape a tensor has: its first dimension, which one row may omit. 0:
# they have another shape or type.
cdef u64 tensor_rows(const Wanted* wanted, u8 dtype, u32 rank, const u64* dims) noexcept nogil
# Return whether a value is a scalar, and write it in its widened type.
cdef bint scalar_word(const Value* value, u8* dtype, u64* word) noexcept nogil
cdef bint is_text(const Value* value) noexcept nogil

# -- Routes, and the state of a query.
cdef enum Form:                 # of a request and its answer
    PREDICT = 0                 # POST /api/APP/predict
    OLD_PREDICT = 1             # POST /APP/predict
    INFER = 2                   # POST /v2/models/NAME/infer
    FEEDBACK = 3                # POST /api/APP/feedback, of a label of one answer
    CALL = 4                    # ModelInfer of gRPC; `infer_call` reads and writes it

cdef enum QueryOutcome:         # of query_submit
    OTHER = 0                   # the body is not plain: nothing was submitted
    VALUE = 1                   # answered at once, by a cache hit; `value` holds a reference
    ENDED = 2                   # each row was refused or answered: the statuses are in its slots
    OPEN = 3                    # a slot is pending
    READ = 4                    # its rows were read: the event loop's thread schedules them. Of
                                # feedback: the text of the label

cdef cppclass RouteState:
    atomic[u32] users           # queries that are open
    u8 form
    bint read_only              # its queries are only read here
    bint variable
    u32 rows_max                # of a request whose rows are queries of their own
    Wanted wanted
    EngineState* engine
    ModelState* model
    u64 slo_us
    double slo_ms_max           # of a query with an SLO of its own
    bint takes_users            # a query's user changes nothing of its answer
    u32 priority                # of the application
    atomic[u64] lanes[48]       # of the model, by band, and by class of SLO, one bit each: those
                                # that are there
    double confidence_min
    Bytes node                  # prefix of an id, before the number: `4bde13fa-`
    Bytes models                # as JSON: `["svm:1"]`
    Bytes head                  # start of a V2 response, up to the id: `{"model_name":"svm","id":`;
                                # of a call, as protobuf
    atomic[u64]* queries        # counters of the application: queries
    atomic[u64]* answered
    atomic[u64]* decided
    atomic[u64]* used
    atomic[u64]* wins
    Histogram* took
    atomic[u64]* ok             # of HTTP
    atomic[u64]* forbidden      # of HTTP: requests that their key does not allow
    atomic[u64]* limited
    Histogram* requests
    Ring* window                # where answers are kept for feedback; NULL: they are not
    void* owner                 # of its answers there
    void* object                # the HotRoute

cdef enum:
    REQUEST_ID_MAX = 128        # bytes

cdef struct Fields:             # of a request, beside its rows
    u64 slo_us
    u64 salt
    u64 priority                # as given; 0: none
    u32 band
    u64 span                    # of this server, in the trace
    bint traced                 # it names a trace
    u32 id_bytes                # X-Request-Id as given; 0: none
    u8[REQUEST_ID_MAX] id
    u8[TRACE_PARENT_BYTES] trace        # traceparent as given

cdef cppclass Query:            # of one row, or of several, which are queries of their own
    u64 waits_for               # the id of a slot, as `query_waits` has it
    RouteState* route
    u32 rows
    Block* block                # NULL: one row that was answered at once
    u32 slot                    # of the first row; those of the others follow it
    bint binary                 # V2: the output is returned as bytes
    Value value                 # if it was answered at once
    u64 number                  # the id of the first row; those of the others follow it
    u64 began_us
    Standing standing           # by its key
    Fields fields
    Bytes tag                   # V2: the request's own id, as JSON; of feedback that of the answer
    Bytes user                  # its name; empty: nobody's

cdef struct Place:
    u64 hash
    const u8* path
    u64 path_bytes
    RouteState* route           # NULL: free

cdef cppclass TableState:
    atomic[u32] users           # workers that read it
    u64 mask
    Place* places
    const KeyState* keys        # of which every request needs one; NULL: none does
    bint logs                   # requests whose caller records them are logged: Python has them

# Return the route of a path (of calls, of a name); NULL if there is none.
cdef RouteState* route_at(const TableState* table, const u8* path, u64 n) noexcept nogil
# Return the number of the key of a request; NO_KEY if it has none of the table, which needs one.
cdef i64 key_in(const TableState* table, const Head* head) noexcept nogil
# Append the response to a request that its key does not allow, and count it. made: as of
# query_answer
cdef void route_refuse(RouteState* route, const TableState* table, const Head* head,
                       const Admission* admission, const char* date, const Bytes* made, bint close,
                       Bytes* out) noexcept nogil
# Submit a query whose route, standing and began_us are set. rows: takes what was read. draws: of
# `span_new`
cdef QueryOutcome query_submit(Query* q, const TableState* table, const Head* head,
                               const u8* body, Bytes* rows, u64* draws) noexcept nogil
# The parts of query_submit, for a request of another form. First set what its parameters do not
# set, then those; False of query_set_parameters and query_set_slo: they are not plain, out of
# range, or a priority that its key does not allow; of query_read_trace: the request is to be
# logged.
cdef void query_begin(Query* q) noexcept nogil
cdef bint query_set_parameters(Query* q, const InferParameters* said) noexcept nogil
cdef bint query_set_slo(Query* q, double slo_ms) noexcept nogil
cdef bint query_read_trace(Query* q, const TableState* table, const u8* trace, u64 n,
                           u64* draws) noexcept nogil
cdef QueryOutcome query_answer_or_submit(Query* q, const Bytes* rows) noexcept nogil
# Return the first slot from `at` on that is pending; else the slot after those of the query, which
# has slots.
cdef u32 query_first_open(const Query* q, u32 at) noexcept nogil
# Append the response to a query of which no row is pending to `out`, and count it. Return False if
# Python must write it; then nothing was written or counted. made: an id for X-Request-Id, if
# neither the request nor the answer has one. body: scratch space. rest: set to the unwritten rest
# of a large response; else unchanged.
cdef bint query_answer(Query* q, const char* date, const Bytes* made, bint close,
                       Bytes* body, Bytes* out, LargeBody** rest) noexcept nogil
# The parts of query_answer, for another form. Return whether a row has an output.
cdef bint query_is_answered(const Query* q, u32 row) noexcept nogil
# Return how long a row took, microseconds. value: its output, which the query holds.
cdef u32 query_row(const Query* q, u32 row, Value* value) noexcept nogil
# Make an array of the outputs of all rows, which is the caller's. False: one of them has none, or
# is not sure enough; they are no array; or there is no memory.
cdef bint query_stack(const Query* q, Value* stacked) noexcept nogil
# Count the answers.
cdef void query_count(Query* q, u64 now_us) noexcept nogil
# End the rows that are pending: nobody waits for them.
cdef void query_cancel(Query* q) noexcept nogil
cdef void query_drop(Query* q) noexcept nogil          # release the results that it holds
# Make a future of each row, which has what the query held. finish, extra: of the futures
cdef list query_futures(Query* q, object finish, object extra)
# Schedule the rows of a query that was only read. Return a tuple: a future of each, or None for one
# that Python schedules; the input of that row, else None; what went wrong, else None. name: of the
# user. own: the id of the query.
cdef tuple query_schedule(Query* q, const Bytes* rows, str name, str own)
cdef CompletionState* query_home(const Query* q) noexcept nogil

# Return the answers of futures that are done; None if Python must write a response to one of them.
cdef list plain_answers(list futures)
# Make a value of the outputs of the answers: a number, or an array for several, which is the
# caller's. False: they are not plain.
cdef bint outputs_of(list answers, Value* value) except -1

cdef class HotRoute:
    cdef RouteState* state
    cdef Model model
    cdef Application application           # schedules queries that were read; None: Python does
    cdef tuple counters
    cdef tuple refused
    cdef object dtype                      # NumPy's, of a row
    cdef dict names                        # of models, as JSON, by tuple of models
    cdef readonly object subject           # the application or model, for responses that Python
                                           # writes

    cdef int _set_rows(self) except -1
    cpdef void look_at_lanes(self)
    # Return an array of the row that `data` has.
    cdef object _row(self, const u8* data, u64 nbytes)
    # Write the body of the response to a query that was read, from the answers to its rows. False:
    # Python must make the response. id, tag, binary: as of a Query.  encode: makes JSON of a text.
    # json_bytes: set to the length of the JSON that other bytes follow; 0: none do.
    cdef bint _answer_body(self, list answers, bytes id, bytes tag, bint binary, object encode,
                           u64* json_bytes, Bytes* body) except -1
    cdef bint _predict_body(self, Answer answer, object encode, Bytes* body) except -1
    cdef bint _infer_body(self, list answers, bytes id, bytes tag, bint binary, object encode,
                          u64* json_bytes, Bytes* body) except -1
    # Append the head of that response, up to the last header. id: X-Request-Id
    cdef int _answer_head(self, bytes id, const char* date, u64 json_bytes, u64 body_bytes,
                          Bytes* out) except -1
    # Count that response.
    cdef int _count_answer(self, u64 began_us) except -1
    cdef bytes _names_of(self, tuple models)

cdef class HotTable:
    cdef TableState* state
    cdef dict routes                       # by path
    cdef readonly KeyTable keys            # None: none is needed
