# A query that is answered in parts, from its submission to its reader. The loop appends the parts
# that arrive and the end; the reader takes them in order, and waits for the next one by a result
# slot, as for any other prediction. All parts are kept until the last reference is gone, so that
# the whole can be made of them.
#
# A thread that changes what the loop must know (a new query, more parts allowed, a cancel) puts the
# stream on the inbox of its engine and wakes the loop. That needs no memory, so it cannot fail.
#
# Threads: the reader: any, one at a time; the loop is the other side. They share the fields below
# `lock`, under it.
from libcpp.vector cimport vector
from clipper_core.results.completion cimport Block, Completion, CompletionState
from clipper_core.results.future cimport Future
from clipper_core.runtime.machine cimport atomic, u32, u64, u8
from clipper_core.runtime.status cimport Status
from clipper_core.wire.prediction cimport Value

cdef enum:
    ALL_PARTS = 0x10000000000   # more than an answer has

cdef enum StreamPlace:          # PartStream.place; loop only
    STREAM_NEW = 0              # the loop has not seen it
    STREAM_WAITING = 1          # for a container
    STREAM_OPEN = 2             # a container makes its parts
    STREAM_CLOSING = 3          # it has ended here, and its container has not confirmed that
    STREAM_GONE = 4

cdef struct ArrivedPart:
    Value value
    u32 latency_us              # from the submission

cdef cppclass PartStreamInbox:  # of an engine
    atomic[u64] newest          # PartStream*: the list of those that the loop must look at

cdef cppclass PartStream:
    atomic[u32] refs
    CompletionState* home
    PartStreamInbox* inbox
    void* model                 # ModelState*
    # the query; unchanged once it is submitted
    u8* row
    u64 row_bytes
    u64 session
    u64 begun_us
    u64 first_us                # time until the first part, between two parts, and until the end
    u64 part_us
    u64 total_us
    u64 ahead                   # parts that may have arrived and are not read
    # written by the reader
    atomic[u32] cancelled
    atomic[u64] taken           # parts that were read
    # written by the loop
    atomic[u64] allowed         # parts that the container may send in all
    atomic[u64] due_us          # when the next part is due
    # the inbox
    atomic[u32] listed
    PartStream* next_listed
    # shared
    atomic[u32] lock
    vector[ArrivedPart]* parts
    atomic[u8] status           # PENDING until the end; OK: all parts arrived
    u32 latency_us              # of the end
    Value why                   # text: why it ended otherwise
    Block* block                # of the slot that waits for the next part; NULL: nobody waits
    u32 slot
    u64 wanted                  # the part that the slot waits for
    # loop only
    u8 place
    u8 tries
    u32 conn
    u64 id                      # on its connection
    u64 bytes                   # of all parts

# Return a stream with one reference, and a copy of the row. NULL: no memory. Threads: any.
cdef PartStream* part_stream_new(CompletionState* home, PartStreamInbox* inbox, void* model,
                                 const void* row, u64 row_bytes) noexcept nogil
cdef void part_stream_release(PartStream* s) noexcept nogil
# Let the loop look at the stream. Threads: any but the loop.
cdef void part_stream_announce(PartStream* s) noexcept nogil
# Take the list of announced streams, each with a reference, oldest last. Threads: loop only.
cdef PartStream* part_streams_take(PartStreamInbox* inbox) noexcept nogil
# Append a part; takes over its reference. False: no memory. Threads: loop only.
cdef bint part_stream_add(PartStream* s, Value* part, u64 now_us) noexcept nogil
# End the stream, once. text: why, if status is not OK. Threads: loop only.
cdef void part_stream_end(PartStream* s, Status status, const char* text, u64 n,
                          u64 now_us) noexcept nogil
cdef bint part_stream_is_ended(PartStream* s) noexcept nogil

# -- What Python holds.
cdef class AnswerPart:
    cdef readonly object output, confidence, reason, id, request_id, models, missing
    cdef readonly u64 index, latency_us
    cdef readonly bint is_last, complete, is_default

cdef class PartsFuture:
    cdef Completion completion
    cdef PartStream* stream     # NULL: `plain` has the whole
    cdef object model           # keeps the model and its engine
    cdef Future plain
    cdef object finish
    cdef AnswerPart whole
    cdef object whole_error
    cdef u64 at                 # of the iteration
    cdef bint is_over           # the iteration has given the whole
    cdef bint is_cancelled

    cdef Future _next(self, u64 i)
    cdef u64 _arrived(self)
    cdef u8 _status(self)
    cdef object _part(self, u64 i)
    cdef object _why(self)
    cdef object _made(self)
    cdef bint _must_wait(self)
    cdef int _took(self, u64 n) except -1

cdef PartsFuture parts_future_new(Completion completion, PartStream* stream, object model,
                                  Future plain, object finish)
