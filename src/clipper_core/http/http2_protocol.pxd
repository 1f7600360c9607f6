# HTTP/2 without sockets: bytes of a client in, requests out; responses in, frames out. Requests and
# responses are messages of HTTP/1.1, whose rules are the same for both protocols
# (frontend/http/http2.py); so what a stream carries is served as a connection with one request.
#
# `http2_feed` reads frames and leaves events. `http2_answer` takes the bytes of a response.
# `http2_frames` makes frames of what may be sent now. Nothing here reads a clock: times are
# arguments. The states of the connection and of a stream are enums, and their transitions tables.
# All that a client can make grow has a limit below, or one that the owner gives.
#
# Calls of gRPC, where the owner serves them, are no messages of HTTP/1.1: an event has their head,
# as one of HTTP/1.1 all the same, others the bytes of their messages, and `http2_reply` takes
# messages and the fields that end a call.
#
# Threads: a Http2State belongs to one thread.
cimport cython
from libcpp.vector cimport vector
from clipper_core.http.hpack cimport HpackTable
from clipper_core.http.http2_answer cimport Answer
from clipper_core.http.http2_head cimport RequestHead
from clipper_core.runtime.byte_buffer cimport Bytes, Lookup
from clipper_core.runtime.machine cimport i64, u32, u64, u8

cdef enum:
    FRAME_BYTES_MAX = 16384     # SETTINGS_MAX_FRAME_SIZE, at its default: FRAME_SIZE_ERROR
    STREAM_WINDOW_BYTES = 262144        # of a request that was sent and not yet read
    CONNECTION_WINDOW_BYTES = 4194304   # of all its requests
    CONTINUATIONS_MAX = 8       # of one block of fields, and as many more as its bytes need:
                                # ENHANCE_YOUR_CALM
    SETTINGS_MAX = 32           # entries of one frame: ENHANCE_YOUR_CALM
    RESETS_MAX = 1000           # streams that end by a reset, more than were answered:
                                # ENHANCE_YOUR_CALM
    RESETS_S = 33               # so many more each second
    IDLE_FRAMES_MAX = 10000     # frames that bring no request on: ENHANCE_YOUR_CALM
    IDLE_FRAMES_S = 330         # so many more each second
    IDLE_FRAMES_EARNED = 4      # and with each frame of a response
    CONTROL_BYTES_MAX = 16384   # frames that wait to be sent; above, the client is not read
    STREAM_PIECE_BYTES = 16384  # of one stream's response before it is another one's turn
    REMEMBERED_RESETS = 64      # streams that we reset; what still comes for them is dropped
    PING_STRIKES_MAX = 2        # pings that come too soon after one another: ENHANCE_YOUR_CALM

cpdef enum Http2Error:          # codes of RFC 9113, section 7
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11

cdef enum ConnectionState:
    WAITS_PREFACE = 0           # for the 24 bytes that a client begins with
    WAITS_SETTINGS = 1          # for the first frame
    BETWEEN_FRAMES = 2
    IN_BLOCK = 3                # fields have begun and go on in the next frame
    SHUT = 4                    # after an error: nothing more is read

cdef enum StreamState:
    IDLE = 0                    # its number is above all that came
    OPEN = 1
    HALF_CLOSED = 2             # its request is complete
    CLOSED = 3
    RESET = 4                   # by us: what is still under way for it is no error

cpdef enum Http2EventKind:
    BEGAN = 0                   # the head of a request, and perhaps more of it
    WENT_ON = 1                 # bytes of its body
    TOO_LARGE = 2               # a request whose fields are more than the owner allows
    ENDED = 3                   # a stream: all is sent, or it was reset
    CALLED = 4                  # the head of a call
    CALL_ENDED = 5              # the client sends no more messages of it
    CALL_TOO_LARGE = 6          # as TOO_LARGE

cdef struct Http2Event:
    u32 kind
    u32 stream
    u64 at                      # of its bytes in the text of all events
    u64 bytes
    u64 credit                  # bytes of the client's windows, which the owner gives back
    void* call                  # of ENDED: the stream's
    bint is_call                # of ENDED: as of the stream

cdef cppclass Http2Stream:
    u32 id
    u8 state
    bint chunked                # its request has no length
    bint is_call                # of gRPC
    bint begun                  # the head of a call's answer was sent
    bint silent                 # its end is not told: it was answered here
    void* call                  # of who answers it here: a HotCall, or an Exchange; NULL: nobody
                                # does. `http2_protocol` only gives it back
    u32 called_at               # places of its events, from 1; 0: there is none
    u32 went_at
    Bytes trailers              # that end a call, once its messages are sent
    i64 window                  # bytes that may be sent
    i64 room                    # bytes that may come
    u64 credit                  # of those, that were read and not yet given back
    u64 length                  # of its request's body; NO_LENGTH: not told
    u64 received
    Answer answer               # its `body` is not yet sent

cdef cppclass Http2State:
    u8 state
    bint going                  # GOAWAY with the last stream was sent: no more are begun
    bint warned                 # the first GOAWAY of a drain was sent
    bint left                   # the client has sent GOAWAY
    u32 error
    const char* why             # it is shut; NULL: by the client, or not
    u32 streams_max
    bint calls                  # the owner serves gRPC
    u64 ping_us_min             # between two pings without an answer in between; 0: any
    u64 pinged_us               # the last one; 0: there was none
    u32 ping_strikes
    bint answered               # frames of an answer were made after it
    u64 list_bytes_max          # of the fields of one request
    u64 block_bytes_max         # of the same, compressed
    u64 now_us
    u64 refilled_us             # the budgets below
    i64 resets_left
    i64 idle_frames_left
    u32 highest                 # stream that the client has begun
    i64 window                  # bytes that may be sent
    i64 window_first            # of a new stream
    i64 room                    # bytes that may come
    u64 credit
    bint first_block            # none was sent yet
    u64 waits_since_us          # a frame, or a block, that is not complete; 0: there is none
    u32 block_stream
    u32 continuations
    bint block_ends             # END_STREAM came with it
    u32[64] resets              # a ring of streams that we have reset
    u32 resets_at
    u64 turn                    # whose turn it is to send
    HpackTable table
    vector[Http2Stream*] streams
    Lookup by_id                # Http2Stream*
    vector[Http2Event] events
    Bytes text                  # of the events
    Bytes input                 # an incomplete frame
    Bytes block                 # an incomplete block of fields
    RequestHead head
    Bytes out                   # frames that wait to be sent
    Bytes fields                # of a response

cdef cppclass Http2Settings:
    u32 streams_max             # requests at once; further ones are refused
    u64 list_bytes_max          # of the fields of a request
    bint calls                  # requests of gRPC come as calls
    u64 ping_us_min             # as of a Http2State

# Return whether a connection that begins with these bytes speaks HTTP/2: all of the preface is
# there.
cdef bint http2_begins(const u8* at, u64 n) noexcept nogil
# Begin a connection. NULL: there is no memory.
cdef Http2State* http2_open(const Http2Settings* settings, u64 now_us) noexcept nogil
cdef void http2_close(Http2State* h) noexcept nogil         # and free it
# Return when the incomplete preface, head or other frame began; 0: none is incomplete. A body may
# come slowly: it does not count.
cdef u64 http2_waits_since(const Http2State* h) noexcept nogil
cdef void http2_feed(Http2State* h, const u8* at, u64 n, u64 now_us) noexcept nogil
# The owner has read bytes of a request. Their streams may have ended.
cdef void http2_consumed(Http2State* h, u32 stream, u64 n) noexcept nogil
# Return False if the stream has ended, or the bytes are no response.
cdef bint http2_answer(Http2State* h, u32 stream, const u8* at, u64 n) noexcept nogil
# Send the head of a call's answer, if it was not sent. Then append a message (NULL: none) and, if
# the call ends, take the fields of `trailers`. Return False if the stream has ended.
cdef bint http2_reply(Http2State* h, u32 stream, const u8* message, u64 n,
                      Bytes* trailers) noexcept nogil
# The owner answers nothing more: end a response that has no other end, or reset the stream.
cdef void http2_finish(Http2State* h, u32 stream, u32 code) noexcept nogil
# Return how many bytes of responses wait, without those of the longest one: a response that its
# client leaves unread does not keep back the others.
cdef u64 http2_unsent(const Http2State* h) noexcept nogil
# Append frames of responses to `out` until it has about `room` bytes.
cdef void http2_frames(Http2State* h, u64 room) noexcept nogil
# Take no more streams. warn: let the client stop by itself first.
cdef void http2_go_away(Http2State* h, bint warn) noexcept nogil
# End the connection by an error.
cdef void http2_fail(Http2State* h, u32 code, const char* why) noexcept nogil
cdef void http2_ping(Http2State* h) noexcept nogil


@cython.final
cdef class Http2Protocol:
    cdef Http2State* state

# Return an object for a state, which it has from then on.
cdef Http2Protocol http2_protocol_of(Http2State* state)
# Take the state of an object, which is at its end then.
cdef Http2State* http2_protocol_release(Http2Protocol protocol) except NULL
