# A response of HTTP/1.1, as this server writes it, taken apart for HTTP/2: fields of its head, and
# the bytes of its body without chunks.
#
# Threads: an Answer belongs to one thread.
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u32, u64, u8

cdef enum AnswerState:          # what comes next of a response
    ANSWER_HEAD = 0
    ANSWER_BODY = 1             # as many bytes as its length says
    ANSWER_REST = 2             # bytes until the owner ends it
    CHUNK_LINE = 3
    CHUNK_BYTES = 4
    CHUNK_END = 5
    LAST_LINE = 6               # after the last chunk
    ANSWER_DONE = 7

cdef enum AnswerOutcome:
    ANSWER_WAITS = 0            # for more bytes, or is complete
    ANSWER_INTERIM = 1          # the fields of an interim response were read
    ANSWER_BEGAN = 2            # the fields of the response
    ANSWER_WRONG = 3            # it is no response

cdef cppclass Answer:
    u8 state
    bint head_only              # its response has no body
    u64 left                    # of the body, or of a chunk
    Bytes text                  # of the response, not yet read
    Bytes body

# Read the bytes in `text` as far as they go, or to the end of a head. fields: gets the block of
# that head.
cdef int answer_read(Answer* answer, Bytes* fields) noexcept nogil
