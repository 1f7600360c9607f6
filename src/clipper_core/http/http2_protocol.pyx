"""The rules of HTTP/2 (RFC 9113): frames, streams, flow control, and bounds for clients.

Two tables say what a frame does: `_connection_next`, by the state of the connection, and
`_stream_next`, by the state of a stream. Their entries are the next state, or what kind of error it
is. Only streams that live are kept; below the highest number that came, all others are closed. Of
the last REMEMBERED_RESETS streams that we have reset, frames may still be under way: they are
dropped, but their fields are decoded, since they change the table, and their bytes are given back.

The window of a request is given back when the owner has read it, so that the bytes that one client
makes us keep are bounded by the windows. A frame is never made before the owner has room for it:
responses wait as bytes of their stream, and streams take turns by STREAM_PIECE_BYTES.

A client that makes work without getting answers runs out of one of two budgets, which time and
answers refill: `resets_left` (CVE-2023-44487, and CVE-2025-8671 for the resets that it provokes),
and `idle_frames_left` (pings, settings, priorities, window updates, empty data, unknown frames).
"""
cimport cython
from libc.string cimport memcmp

from clipper_core.http.hpack cimport (
    HPACK_END, HPACK_FIELD, HPACK_NO_MEMORY, HPACK_NO_TABLE, HpackField, HpackReader, hpack_next,
    hpack_put, hpack_put_status, hpack_table_clear,
)
from clipper_core.http.http2_answer cimport (
    ANSWER_BEGAN, ANSWER_DONE, ANSWER_REST, ANSWER_WAITS, ANSWER_WRONG, answer_read,
)
from clipper_core.http.http2_head cimport (
    RequestHead, request_head_add, request_head_clear, request_head_write,
)
from clipper_core.http.http_head cimport NO_LENGTH
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.status cimport NO_MEMORY, raise_for

cdef enum Frame:
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9

cdef enum Flag:
    END_STREAM = 1
    ACK = 1
    END_HEADERS = 4
    PADDED = 8
    WITH_PRIORITY = 32

cdef enum Setting:
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6

cdef enum:
    FRAME_HEAD_BYTES = 9
    PREFACE_BYTES = 24
    FIRST_WINDOW_BYTES = 65535
    WINDOW_MAX = 0x7fffffff
    STREAM_MAX = 0x7fffffff
    FRAME_SIZE_LARGEST = 0xffffff
    LARGE_BLOCK_FRAMES = 2      # compressed fields have at most so many times the bytes of a list

cdef const char* CONTENT_TYPE = "content-type"
cdef const char* GRPC = "application/grpc"
cdef const char* PREFACE = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# -- transitions
# --------------------------------------------------------------------------------------------------

cdef enum Step:                 # of the connection
    GOT_PREFACE = 0
    GOT_SETTINGS = 1
    GOT_OPEN_BLOCK = 2          # HEADERS without END_HEADERS
    GOT_CONTINUATION = 3        # without END_HEADERS
    GOT_LAST_CONTINUATION = 4
    GOT_FRAME = 5               # any other
    STEPS = 6

cdef enum:
    WRONG = 255                 # PROTOCOL_ERROR

cdef u8[SHUT][STEPS] _connection_next = [
    # preface, settings, open block, continuation, the last one, another frame
    [WAITS_SETTINGS, WRONG, WRONG, WRONG, WRONG, WRONG],                # WAITS_PREFACE
    [WRONG, BETWEEN_FRAMES, WRONG, WRONG, WRONG, WRONG],                # WAITS_SETTINGS
    [WRONG, BETWEEN_FRAMES, IN_BLOCK, WRONG, WRONG, BETWEEN_FRAMES],    # BETWEEN_FRAMES
    [WRONG, WRONG, WRONG, IN_BLOCK, BETWEEN_FRAMES, WRONG],             # IN_BLOCK
]

cdef enum StreamStep:
    CAME_FIELDS = 0
    CAME_LAST_FIELDS = 1        # with END_STREAM: the next number
    CAME_DATA = 2
    CAME_LAST_DATA = 3
    CAME_WINDOW = 4
    CAME_RESET = 5
    ANSWERED = 6                # our END_STREAM was sent
    STREAM_STEPS = 7

cdef enum Fault:                # after the states
    OURS = 16                   # stream error PROTOCOL_ERROR
    LATE = 17                   # stream error STREAM_CLOSED
    NEVER = 18                  # connection error PROTOCOL_ERROR
    GONE = 19                   # connection error STREAM_CLOSED
    DROP = 20                   # nothing

cdef u8[RESET + 1][STREAM_STEPS] _stream_next = [
    # fields, last fields, data, last data, window, reset, answered
    [OPEN, HALF_CLOSED, NEVER, NEVER, NEVER, NEVER, NEVER],             # IDLE
    [OURS, HALF_CLOSED, OPEN, HALF_CLOSED, OPEN, CLOSED, RESET],        # OPEN
    [LATE, LATE, LATE, LATE, HALF_CLOSED, CLOSED, CLOSED],              # HALF_CLOSED
    [GONE, GONE, GONE, GONE, DROP, DROP, DROP],                         # CLOSED
    [DROP, DROP, DROP, DROP, DROP, DROP, DROP],                         # RESET
]


cdef inline u8 _after(u8 state, u8 step) noexcept nogil:
    """Return the entry of a stream in this state."""
    return _stream_next[state][step]


cdef inline u8 _last_if(u8 step, bint ends) noexcept nogil:
    """Return the step of fields, or of data, with END_STREAM or without."""
    return step + 1 if ends else step


# -- writing frames
# --------------------------------------------------------------------------------------------------

cdef void _put_u32(Bytes* out, u32 n) noexcept nogil:
    out.put_byte(<u8> (n >> 24))
    out.put_byte(<u8> (n >> 16 & 255))
    out.put_byte(<u8> (n >> 8 & 255))
    out.put_byte(<u8> (n & 255))


cdef void _put_head(Bytes* out, u64 n, u8 kind, u8 flags, u32 stream) noexcept nogil:
    out.put_byte(<u8> (n >> 16))
    out.put_byte(<u8> (n >> 8 & 255))
    out.put_byte(<u8> (n & 255))
    out.put_byte(kind)
    out.put_byte(flags)
    _put_u32(out, stream)


cdef void _put_setting(Bytes* out, u8 name, u32 value) noexcept nogil:
    out.put_byte(0)
    out.put_byte(name)
    _put_u32(out, value)


cdef void _put_reset(Http2State* h, u32 stream, u32 code) noexcept nogil:
    _put_head(&h.out, 4, RST_STREAM, 0, stream)
    _put_u32(&h.out, code)


cdef void _put_window(Http2State* h, u32 stream, u64 n) noexcept nogil:
    _put_head(&h.out, 4, WINDOW_UPDATE, 0, stream)
    _put_u32(&h.out, <u32> n)


cdef void _put_go_away(Http2State* h, u32 last, u32 code, const char* why) noexcept nogil:
    cdef u32 n = 0
    while why != NULL and why[n] != 0:
        n += 1
    _put_head(&h.out, 8 + n, GOAWAY, 0, 0)
    _put_u32(&h.out, last)
    _put_u32(&h.out, code)
    h.out.put(why, n)


cdef inline u32 _u32_at(const u8* at) noexcept nogil:
    return <u32> at[0] << 24 | <u32> at[1] << 16 | <u32> at[2] << 8 | at[3]


# -- streams
# --------------------------------------------------------------------------------------------------

cdef void _tell(Http2State* h, u32 kind, u32 stream, u64 n, u64 credit) noexcept nogil:
    """Leave an event, with the last n bytes of `text`. What goes on is joined with what came before
    it."""
    cdef Http2Event event
    cdef size_t count = h.events.size()
    if (kind == WENT_ON and count and h.events[count - 1].stream == stream
            and h.events[count - 1].kind != CALLED):
        h.events[count - 1].bytes += n
        h.events[count - 1].credit += credit
        return
    event.kind = kind
    event.stream = stream
    event.at = h.text.size() - n
    event.bytes = n
    event.credit = credit
    event.call = NULL
    event.is_call = False
    if not make_room(h.events, count + 1):
        h.text.lost = True
        return
    h.events.push_back(event)


cdef u8 _state_of(Http2State* h, u32 id, Http2Stream** stream) noexcept nogil:
    cdef u32 i
    stream[0] = <Http2Stream*> h.by_id.get(id)
    if stream[0] != NULL:
        return stream[0].state
    if id > h.highest:
        return IDLE
    for i in range(REMEMBERED_RESETS):
        if h.resets[i] == id:
            return RESET
    return CLOSED


cdef void _forget(Http2State* h, Http2Stream* stream) noexcept nogil:
    """Remove a stream, and tell the owner."""
    cdef size_t i
    if not stream.silent:
        _tell(h, ENDED, stream.id, 0, 0)
        if h.events.size() and h.events.back().kind == ENDED:
            h.events.back().call = stream.call
            h.events.back().is_call = stream.is_call
    h.by_id.take(stream.id)
    for i in range(h.streams.size()):
        if h.streams[i] == stream:
            h.streams[i] = h.streams.back()
            h.streams.pop_back()
            break
    del stream


cdef void _remember(Http2State* h, u32 id) noexcept nogil:
    h.resets[h.resets_at % REMEMBERED_RESETS] = id
    h.resets_at += 1


cdef void _spend_reset(Http2State* h) noexcept nogil:
    h.resets_left -= 1
    if h.resets_left < 0:
        http2_fail(h, ENHANCE_YOUR_CALM, "too many streams were reset")


cdef void _reset(Http2State* h, u32 id, u32 code) noexcept nogil:
    """End a stream by an error; it may be one that has not begun."""
    cdef Http2Stream* stream = <Http2Stream*> h.by_id.get(id)
    _put_reset(h, id, code)
    _remember(h, id)
    if stream != NULL:
        _forget(h, stream)
    if code != NO_ERROR:
        _spend_reset(h)


cdef bint _fault(Http2State* h, u32 id, u8 next) noexcept nogil:
    """Do what the entry of a transition asks for. Return True if it is a state."""
    if next == OURS:
        _reset(h, id, PROTOCOL_ERROR)
    elif next == LATE:
        _reset(h, id, STREAM_CLOSED)
    elif next == NEVER:
        http2_fail(h, PROTOCOL_ERROR, "a frame of a stream that has not begun")
    elif next == GONE:
        http2_fail(h, STREAM_CLOSED, "a frame of a stream that has ended")
    return next < OURS


cdef void _idle_frame(Http2State* h) noexcept nogil:
    h.idle_frames_left -= 1
    if h.idle_frames_left < 0:
        http2_fail(h, ENHANCE_YOUR_CALM, "too many frames that bring no request on")


cdef void _earn(Http2State* h) noexcept nogil:
    """A frame of a response was made: the client may send window updates, and a ping, for it."""
    h.idle_frames_left = min(<i64> IDLE_FRAMES_MAX, h.idle_frames_left + IDLE_FRAMES_EARNED)
    h.answered = True


cdef void _refill(Http2State* h, u64 now_us) noexcept nogil:
    """Refill the budgets by the whole seconds that have passed."""
    cdef i64 passed_s = <i64> ((now_us - h.refilled_us) // 1000000) if now_us > h.refilled_us else 0
    h.now_us = now_us
    if passed_s == 0:
        return
    h.refilled_us += <u64> passed_s * 1000000
    passed_s = min(passed_s, <i64> IDLE_FRAMES_MAX)
    h.resets_left = min(<i64> RESETS_MAX, h.resets_left + passed_s * RESETS_S)
    h.idle_frames_left = min(<i64> IDLE_FRAMES_MAX, h.idle_frames_left + passed_s * IDLE_FRAMES_S)


# -- windows of requests
# --------------------------------------------------------------------------------------------------

cdef void _give_back(Http2State* h, u64 n) noexcept nogil:
    """Give back bytes of the connection's window, half of it at a time."""
    h.credit += n
    if h.credit >= CONNECTION_WINDOW_BYTES // 2 and h.state != SHUT:
        _put_window(h, 0, h.credit)
        h.room += <i64> h.credit
        h.credit = 0


cdef void http2_consumed(Http2State* h, u32 id, u64 n) noexcept nogil:
    cdef Http2Stream* stream = <Http2Stream*> h.by_id.get(id)
    _give_back(h, n)
    if stream == NULL or stream.state != OPEN or h.state == SHUT:
        return
    stream.credit += n
    if stream.credit >= STREAM_WINDOW_BYTES // 2:
        _put_window(h, id, stream.credit)
        stream.room += <i64> stream.credit
        stream.credit = 0


# -- blocks of fields
# --------------------------------------------------------------------------------------------------

cdef bint _decode(Http2State* h, const u8* at, u64 n, bint trailers) noexcept nogil:
    """Decode a block into the head. Return False if the connection has ended by it."""
    cdef HpackReader reader
    cdef HpackField field
    cdef int came
    reader.at = at
    reader.end = at + n
    reader.updates = 0
    reader.begun = False
    request_head_clear(&h.head, trailers)
    came = hpack_next(&h.table, &reader, &field)
    while came == HPACK_FIELD:
        request_head_add(&h.head, &field, h.list_bytes_max)
        came = hpack_next(&h.table, &reader, &field)
    if came == HPACK_END:
        return True
    if came == HPACK_NO_MEMORY:
        http2_fail(h, INTERNAL_ERROR, "no memory for header fields")
    else:
        http2_fail(h, COMPRESSION_ERROR, "a block of header fields is malformed")
    return False


cdef Http2Stream* _begin(Http2State* h, u32 id) noexcept nogil:
    """Return a new stream; NULL: there are too many, or no memory."""
    cdef Http2Stream* stream
    if h.streams.size() >= h.streams_max or h.going:
        return NULL
    stream = make[Http2Stream]()
    if stream == NULL:
        return NULL
    stream.id = id
    stream.state = IDLE
    stream.window = h.window_first
    stream.room = STREAM_WINDOW_BYTES
    stream.length = NO_LENGTH
    if not make_room(h.streams, h.streams.size() + 1) or not h.by_id.put(id, stream):
        del stream
        return NULL
    h.streams.push_back(stream)
    return stream


cdef void _end_request(Http2State* h, Http2Stream* stream) noexcept nogil:
    """The request is complete: check its length, and end its chunks."""
    if stream.length != NO_LENGTH and stream.received != stream.length:
        _reset(h, stream.id, PROTOCOL_ERROR)
        return
    if stream.is_call:
        _tell(h, CALL_ENDED, stream.id, 0, 0)
    elif stream.chunked:
        h.text.put_text("0\r\n\r\n")
        _tell(h, WENT_ON, stream.id, 5, 0)


cdef bint _is_post(RequestHead* head) noexcept nogil:
    return head.method.size() == 4 and memcmp(head.method.at(), "POST", 4) == 0


cdef void _request(Http2State* h, u32 id, bint ends) noexcept nogil:
    """Begin the stream of the head that was read."""
    cdef Http2Stream* stream = _begin(h, id)
    cdef u64 before = h.text.size()
    if stream == NULL:
        _reset(h, id, REFUSED_STREAM)
        return
    stream.state = _after(IDLE, _last_if(CAME_FIELDS, ends))
    stream.is_call = h.calls and h.head.is_grpc and _is_post(&h.head)
    if h.head.large and not h.head.wrong:
        _tell(h, CALL_TOO_LARGE if stream.is_call else TOO_LARGE, id, 0, 0)
        return
    if not request_head_write(&h.head, ends, &h.text):
        h.by_id.take(id)
        h.streams.pop_back()
        del stream
        _reset(h, id, PROTOCOL_ERROR)
        return
    stream.length = h.head.length
    stream.chunked = not (ends or stream.is_call) and h.head.length == NO_LENGTH
    stream.answer.head_only = (h.head.method.size() == 4
                               and memcmp(h.head.method.at(), "HEAD", 4) == 0)
    _tell(h, CALLED if stream.is_call else BEGAN, id, h.text.size() - before, 0)
    if stream.is_call and ends:
        _tell(h, CALL_ENDED, id, 0, 0)


cdef void _fields(Http2State* h, u32 id, const u8* at, u64 n, bint ends) noexcept nogil:
    """A block of fields is complete."""
    cdef Http2Stream* stream
    cdef u8 state = _state_of(h, id, &stream)
    cdef u8 next = _after(state, _last_if(CAME_FIELDS, ends))
    if not _decode(h, at, n, state != IDLE):
        return
    if state == IDLE:
        h.highest = id
        _request(h, id, ends)
        return
    if not _fault(h, id, next):
        return
    if h.head.wrong:
        _reset(h, id, PROTOCOL_ERROR)
        return
    stream.state = next
    _end_request(h, stream)


# -- frames
# --------------------------------------------------------------------------------------------------

cdef bint _unpad(Http2State* h, u8 flags, const u8** at, u64* n) noexcept nogil:
    """Remove the padding of a frame. Return False if the connection has ended by it."""
    cdef u64 padding
    if not flags & PADDED:
        return True
    if n[0] == 0:
        http2_fail(h, FRAME_SIZE_ERROR, "a padded frame without its length of padding")
        return False
    padding = at[0][0]
    at[0] += 1
    n[0] -= 1
    if padding > n[0]:
        http2_fail(h, PROTOCOL_ERROR, "more padding than the frame has bytes")
        return False
    n[0] -= padding
    return True


cdef void _on_data(Http2State* h, u32 id, u8 flags, const u8* at, u64 n) noexcept nogil:
    cdef Http2Stream* stream
    cdef u64 whole = n, before
    cdef bint ends = flags & END_STREAM
    cdef u8 next = _after(_state_of(h, id, &stream), _last_if(CAME_DATA, ends))
    if <i64> whole > h.room:
        http2_fail(h, FLOW_CONTROL_ERROR, "more data than the connection's window")
        return
    h.room -= <i64> whole
    if not _unpad(h, flags, &at, &n):
        return
    if n == 0 and not ends:
        _idle_frame(h)
    if h.state == SHUT:
        return
    if not _fault(h, id, next):
        _give_back(h, whole)
        return
    stream.received += n
    if <i64> whole > stream.room:
        _reset(h, id, FLOW_CONTROL_ERROR)
        _give_back(h, whole)
        return
    stream.room -= <i64> whole
    if stream.length != NO_LENGTH and stream.received > stream.length:
        _reset(h, id, PROTOCOL_ERROR)
        _give_back(h, whole)
        return
    before = h.text.size()
    if n and stream.chunked:
        h.text.put_hex(n)
        h.text.put_text("\r\n")
        h.text.put(at, n)
        h.text.put_text("\r\n")
    elif n:
        h.text.put(at, n)
    stream.state = next
    if whole:
        _tell(h, WENT_ON, id, h.text.size() - before, whole)
    if ends:
        _end_request(h, stream)


cdef void _on_headers(Http2State* h, u32 id, u8 flags, const u8* at, u64 n) noexcept nogil:
    if not _unpad(h, flags, &at, &n):
        return
    if flags & WITH_PRIORITY:
        if n < 5:
            http2_fail(h, FRAME_SIZE_ERROR, "HEADERS with a priority that is cut off")
            return
        at += 5
        n -= 5
    if id & 1 == 0:
        http2_fail(h, PROTOCOL_ERROR, "a client begins streams with odd numbers")
    elif flags & END_HEADERS:
        _fields(h, id, at, n, flags & END_STREAM)
    else:
        h.block.clear()
        h.block.put(at, n)
        h.block_stream = id
        h.block_ends = flags & END_STREAM
        h.continuations = 0


cdef void _on_continuation(Http2State* h, u32 id, u8 flags, const u8* at, u64 n) noexcept nogil:
    if id != h.block_stream:
        http2_fail(h, PROTOCOL_ERROR, "CONTINUATION of another stream")
        return
    h.continuations += 1
    h.block.put(at, n)
    if (h.continuations > CONTINUATIONS_MAX + h.block_bytes_max // FRAME_BYTES_MAX
            or h.block.size() > h.block_bytes_max):
        http2_fail(h, ENHANCE_YOUR_CALM, "a block of header fields has too many bytes or frames")
    elif h.block.lost:
        http2_fail(h, INTERNAL_ERROR, "no memory for header fields")
    elif flags & END_HEADERS:
        _fields(h, id, h.block.at(), h.block.size(), h.block_ends)
        h.block.clear()


cdef void _set_first_window(Http2State* h, u32 value) noexcept nogil:
    """Change the windows of all streams by the difference."""
    cdef size_t i
    cdef i64 more = <i64> value - h.window_first
    if value > WINDOW_MAX:
        http2_fail(h, FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE above 2^31 - 1")
        return
    h.window_first = value
    for i in range(h.streams.size()):
        h.streams[i].window += more
        if h.streams[i].window > WINDOW_MAX:
            http2_fail(h, FLOW_CONTROL_ERROR, "a window above 2^31 - 1")
            return


cdef void _on_settings(Http2State* h, u32 id, u8 flags, const u8* at, u64 n) noexcept nogil:
    cdef u64 i
    cdef u32 name, value
    if id:
        http2_fail(h, PROTOCOL_ERROR, "SETTINGS of a stream")
        return
    if flags & ACK:
        if n:
            http2_fail(h, FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS with content")
        return
    if n % 6:
        http2_fail(h, FRAME_SIZE_ERROR, "SETTINGS that are cut off")
        return
    if n > 6 * SETTINGS_MAX:
        http2_fail(h, ENHANCE_YOUR_CALM, "too many entries of SETTINGS")
        return
    for i in range(n // 6):
        name = <u32> at[6 * i] << 8 | at[6 * i + 1]
        value = _u32_at(at + 6 * i + 2)
        if name == ENABLE_PUSH and value > 1:
            http2_fail(h, PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")
        elif name == INITIAL_WINDOW_SIZE:
            _set_first_window(h, value)
        elif (name == MAX_FRAME_SIZE
              and (value < FRAME_BYTES_MAX or value > FRAME_SIZE_LARGEST)):
            http2_fail(h, PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is not 2^14 to 2^24 - 1")
        if h.state == SHUT:
            return
    _put_head(&h.out, 0, SETTINGS, ACK, 0)
    _idle_frame(h)


cdef void _on_window(Http2State* h, u32 id, const u8* at, u64 n) noexcept nogil:
    cdef Http2Stream* stream
    cdef i64 more
    if n != 4:
        http2_fail(h, FRAME_SIZE_ERROR, "WINDOW_UPDATE has four bytes")
        return
    more = _u32_at(at) & WINDOW_MAX
    _idle_frame(h)
    if h.state == SHUT:
        return
    if id == 0:
        h.window += more
        if more == 0:
            http2_fail(h, PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        elif h.window > WINDOW_MAX:
            http2_fail(h, FLOW_CONTROL_ERROR, "a window above 2^31 - 1")
        return
    if not _fault(h, id, _after(_state_of(h, id, &stream), CAME_WINDOW)):
        return
    stream.window += more
    if more == 0:
        _reset(h, id, PROTOCOL_ERROR)
    elif stream.window > WINDOW_MAX:
        _reset(h, id, FLOW_CONTROL_ERROR)


cdef void _on_reset(Http2State* h, u32 id, u64 n) noexcept nogil:
    cdef Http2Stream* stream
    if id == 0:
        http2_fail(h, PROTOCOL_ERROR, "RST_STREAM without a stream")
    elif n != 4:
        http2_fail(h, FRAME_SIZE_ERROR, "RST_STREAM has four bytes")
    elif not _fault(h, id, _after(_state_of(h, id, &stream), CAME_RESET)):
        if h.state != SHUT:
            _idle_frame(h)
    else:
        _forget(h, stream)
        _spend_reset(h)


cdef void _note_ping(Http2State* h) noexcept nogil:
    """End the connection of a client that pings too often. Clients of gRPC know the text."""
    if h.ping_us_min == 0:
        return
    if h.answered or h.pinged_us == 0 or h.now_us >= h.pinged_us + h.ping_us_min:
        h.ping_strikes = 0
    else:
        h.ping_strikes += 1
        if h.ping_strikes > PING_STRIKES_MAX:
            http2_fail(h, ENHANCE_YOUR_CALM, "too_many_pings")
    h.answered = False
    h.pinged_us = max(h.now_us, <u64> 1)


cdef void _on_ping(Http2State* h, u32 id, u8 flags, const u8* at, u64 n) noexcept nogil:
    if id:
        http2_fail(h, PROTOCOL_ERROR, "PING of a stream")
    elif n != 8:
        http2_fail(h, FRAME_SIZE_ERROR, "PING has eight bytes")
    elif flags & ACK:
        if h.warned and not h.going:        # all streams that came before are known now
            http2_go_away(h, False)
    else:
        _put_head(&h.out, 8, PING, ACK, 0)
        h.out.put(at, 8)
        _idle_frame(h)
        _note_ping(h)


cdef void _on_priority(Http2State* h, u32 id, u64 n) noexcept nogil:
    if id == 0:
        http2_fail(h, PROTOCOL_ERROR, "PRIORITY without a stream")
    elif n != 5:
        http2_fail(h, FRAME_SIZE_ERROR, "PRIORITY has five bytes")
    else:
        _idle_frame(h)


cdef void _on_go_away(Http2State* h, u32 id, u64 n) noexcept nogil:
    if id:
        http2_fail(h, PROTOCOL_ERROR, "GOAWAY of a stream")
    elif n < 8:
        http2_fail(h, FRAME_SIZE_ERROR, "GOAWAY has at least eight bytes")
    else:
        h.left = True
        _idle_frame(h)


cdef void _on_frame(Http2State* h, u8 kind, u8 flags, u32 id, const u8* at, u64 n) noexcept nogil:
    """Handle a frame for which the connection is ready."""
    if kind == DATA:
        if id == 0:
            http2_fail(h, PROTOCOL_ERROR, "DATA without a stream")
        else:
            _on_data(h, id, flags, at, n)
    elif kind == HEADERS:
        if id == 0:
            http2_fail(h, PROTOCOL_ERROR, "HEADERS without a stream")
        else:
            _on_headers(h, id, flags, at, n)
    elif kind == CONTINUATION:
        _on_continuation(h, id, flags, at, n)
    elif kind == SETTINGS:
        _on_settings(h, id, flags, at, n)
    elif kind == WINDOW_UPDATE:
        _on_window(h, id, at, n)
    elif kind == RST_STREAM:
        _on_reset(h, id, n)
    elif kind == PING:
        _on_ping(h, id, flags, at, n)
    elif kind == PRIORITY:
        _on_priority(h, id, n)
    elif kind == GOAWAY:
        _on_go_away(h, id, n)
    elif kind == PUSH_PROMISE:
        http2_fail(h, PROTOCOL_ERROR, "a client cannot push")
    else:
        _idle_frame(h)


cdef u8 _step_of(u8 kind, u8 flags) noexcept nogil:
    if kind == SETTINGS:
        return GOT_FRAME if flags & ACK else GOT_SETTINGS
    if kind == HEADERS and not flags & END_HEADERS:
        return GOT_OPEN_BLOCK
    if kind == CONTINUATION:
        return GOT_LAST_CONTINUATION if flags & END_HEADERS else GOT_CONTINUATION
    return GOT_FRAME


cdef u64 _one(Http2State* h, const u8* at, u64 n) noexcept nogil:
    """Read the preface or one frame. Return its bytes; 0: it is not complete."""
    cdef u64 size, sent
    cdef u8 next
    cdef u8 step
    if h.state == WAITS_PREFACE:
        if memcmp(at, PREFACE, min(n, <u64> PREFACE_BYTES)) != 0:
            http2_fail(h, PROTOCOL_ERROR, "the connection does not begin as HTTP/2 does")
            return n
        if n < PREFACE_BYTES:
            return 0
        h.state = WAITS_SETTINGS
        return PREFACE_BYTES
    if n < FRAME_HEAD_BYTES:
        return 0
    size = <u64> at[0] << 16 | <u64> at[1] << 8 | at[2]
    step = _step_of(at[3], at[4])
    next = _connection_next[h.state][step]
    if next == WRONG:
        http2_fail(h, PROTOCOL_ERROR, "SETTINGS come first" if h.state == WAITS_SETTINGS
                   else "a frame that does not follow the one before it")
        return n
    if size > FRAME_BYTES_MAX:
        http2_fail(h, FRAME_SIZE_ERROR, "a frame has more than 16384 bytes")
        return n
    sent = FRAME_HEAD_BYTES + size
    if n < sent:
        return 0
    h.state = next
    _on_frame(h, at[3], at[4], _u32_at(at + 5) & STREAM_MAX, at + FRAME_HEAD_BYTES, size)
    return sent


cdef u64 _frames(Http2State* h, const u8* at, u64 n) noexcept nogil:
    """Read what is complete. Return how many bytes it had."""
    cdef u64 used = 0, size
    while used < n and h.state != SHUT:
        size = _one(h, at + used, n - used)
        if size == 0:
            break
        used += size
    return used


cdef void http2_feed(Http2State* h, const u8* at, u64 n, u64 now_us) noexcept nogil:
    cdef u64 used
    cdef u8 before = h.state
    _refill(h, now_us)
    if h.input.size() == 0:
        used = _frames(h, at, n)
        if h.state != SHUT:
            h.input.put(at + used, n - used)
    else:
        h.input.put(at, n)
        used = _frames(h, h.input.at(), h.input.size())
        h.input.drop(used)
    if h.state == BETWEEN_FRAMES and h.input.size() == 0:
        h.waits_since_us = 0
    elif h.waits_since_us == 0 or (before == BETWEEN_FRAMES and used):
        h.waits_since_us = max(now_us, <u64> 1)
    if h.state == SHUT:
        h.input.clear()
        h.block.clear()
    elif h.input.lost or h.text.lost or h.out.lost:
        http2_fail(h, INTERNAL_ERROR, "no memory for the connection")


# -- responses
# --------------------------------------------------------------------------------------------------

cdef void _put_fields(Http2State* h, u32 id, bint ends) noexcept nogil:
    """Write the block of fields as frames."""
    cdef const u8* at = h.fields.at()
    cdef u64 n = h.fields.size()
    cdef u64 size = min(n, <u64> FRAME_BYTES_MAX - 1)
    cdef u8 flags = (END_STREAM if ends else 0) | (END_HEADERS if size == n else 0)
    _put_head(&h.out, size + h.first_block, HEADERS, flags, id)
    if h.first_block:
        h.out.put_byte(HPACK_NO_TABLE)
        h.first_block = False
    h.out.put(at, size)
    while size < n:
        at += size
        n -= size
        size = min(n, <u64> FRAME_BYTES_MAX)
        _put_head(&h.out, size, CONTINUATION, END_HEADERS if size == n else 0, id)
        h.out.put(at, size)


cdef void _end_answer(Http2State* h, Http2Stream* stream) noexcept nogil:
    """Our END_STREAM was sent. If the request is not complete, no more of it is wanted."""
    cdef u32 id = stream.id
    stream.state = _after(stream.state, ANSWERED)
    h.resets_left = min(<i64> RESETS_MAX, h.resets_left + 1)
    _earn(h)
    if stream.state == RESET:
        _reset(h, id, NO_ERROR)
    else:
        _forget(h, stream)


cdef bint http2_answer(Http2State* h, u32 id, const u8* at, u64 n) noexcept nogil:
    cdef Http2Stream* stream = <Http2Stream*> h.by_id.get(id)
    cdef int came
    cdef bint ends
    if stream == NULL or h.state == SHUT:
        return False
    stream.answer.text.put(at, n)
    while True:
        came = answer_read(&stream.answer, &h.fields)
        if came == ANSWER_WAITS:
            break
        if came == ANSWER_WRONG:
            _reset(h, id, INTERNAL_ERROR)
            return False
        ends = came == ANSWER_BEGAN and stream.answer.state == ANSWER_DONE
        _put_fields(h, id, ends)
        if ends:
            _end_answer(h, stream)
            return True
    if stream.answer.text.lost or stream.answer.body.lost:
        _reset(h, id, INTERNAL_ERROR)
        return False
    return True


cdef void _put_call_head(Http2State* h) noexcept nogil:
    h.fields.clear()
    hpack_put_status(&h.fields, 200)
    hpack_put(&h.fields, <const u8*> CONTENT_TYPE, 12, <const u8*> GRPC, 16)


cdef bint http2_reply(Http2State* h, u32 id, const u8* message, u64 n,
                      Bytes* trailers) noexcept nogil:
    cdef Http2Stream* stream = <Http2Stream*> h.by_id.get(id)
    if (stream == NULL or h.state == SHUT or not stream.is_call
            or stream.answer.state == ANSWER_DONE):
        return False
    if not stream.begun:
        _put_call_head(h)
        if message == NULL and trailers != NULL:
            h.fields.put(trailers.at(), trailers.size())
            _put_fields(h, id, True)
            _end_answer(h, stream)
            return True
        _put_fields(h, id, False)
        stream.begun = True
    if message != NULL:
        stream.answer.body.put_byte(0)
        _put_u32(&stream.answer.body, <u32> n)
        stream.answer.body.put(message, n)
    if trailers != NULL:
        stream.trailers.put(trailers.at(), trailers.size())
        stream.answer.state = ANSWER_DONE
    if stream.answer.body.lost or stream.trailers.lost:
        _reset(h, id, INTERNAL_ERROR)
        return False
    return True


cdef void http2_finish(Http2State* h, u32 id, u32 code) noexcept nogil:
    cdef Http2Stream* stream = <Http2Stream*> h.by_id.get(id)
    if stream == NULL or h.state == SHUT:
        return
    if code == NO_ERROR and stream.answer.state == ANSWER_REST:
        stream.answer.state = ANSWER_DONE
    elif code != NO_ERROR or stream.answer.state != ANSWER_DONE:
        _reset(h, id, INTERNAL_ERROR if code == NO_ERROR else code)


cdef u64 _send_piece(Http2State* h, Http2Stream* stream) noexcept nogil:
    """Make a frame of the stream's response, if its windows allow it. Return its bytes."""
    cdef u64 n = stream.answer.body.size()
    cdef i64 most = min(min(stream.window, h.window), <i64> STREAM_PIECE_BYTES)
    cdef bint is_last
    if n and most <= 0:
        return 0
    n = min(n, <u64> most) if n else 0
    is_last = stream.answer.state == ANSWER_DONE and n == stream.answer.body.size()
    if n == 0 and not is_last:
        return 0
    if n or not stream.is_call:
        _put_head(&h.out, n, DATA, END_STREAM if is_last and not stream.is_call else 0, stream.id)
        h.out.put(stream.answer.body.at(), n)
    stream.answer.body.drop(n)
    stream.window -= <i64> n
    h.window -= <i64> n
    _earn(h)
    if is_last:
        if stream.is_call:
            h.fields.clear()
            h.fields.put(stream.trailers.at(), stream.trailers.size())
            _put_fields(h, stream.id, True)
        _end_answer(h, stream)
    return n + FRAME_HEAD_BYTES


cdef u64 http2_unsent(const Http2State* h) noexcept nogil:
    cdef size_t i
    cdef u64 n, total = 0, longest = 0
    for i in range(h.streams.size()):
        n = h.streams[i].answer.body.size()
        total += n
        longest = max(longest, n)
    return total - longest


cdef void http2_frames(Http2State* h, u64 room) noexcept nogil:
    cdef u64 passed = 0         # streams in a row that could not send
    while h.state != SHUT and passed < h.streams.size() and h.out.size() < room:
        h.turn = h.turn + 1 if h.turn + 1 < h.streams.size() else 0
        passed = 0 if _send_piece(h, h.streams[h.turn]) else passed + 1


# -- the connection
# --------------------------------------------------------------------------------------------------

cdef bint http2_begins(const u8* at, u64 n) noexcept nogil:
    return n >= PREFACE_BYTES and memcmp(at, PREFACE, PREFACE_BYTES) == 0


cdef Http2State* http2_open(const Http2Settings* settings, u64 now_us) noexcept nogil:
    cdef Http2State* h = make[Http2State]()
    if h == NULL:
        return NULL
    h.state = WAITS_PREFACE
    h.streams_max = settings.streams_max
    h.list_bytes_max = settings.list_bytes_max
    h.block_bytes_max = LARGE_BLOCK_FRAMES * settings.list_bytes_max
    h.calls = settings.calls
    h.head.strips = settings.calls
    h.ping_us_min = settings.ping_us_min
    h.now_us = now_us
    h.refilled_us = now_us
    h.resets_left = RESETS_MAX
    h.idle_frames_left = IDLE_FRAMES_MAX
    h.window = FIRST_WINDOW_BYTES
    h.window_first = FIRST_WINDOW_BYTES
    h.room = CONNECTION_WINDOW_BYTES
    h.first_block = True
    hpack_table_clear(&h.table)
    _put_head(&h.out, 18, SETTINGS, 0, 0)
    _put_setting(&h.out, MAX_CONCURRENT_STREAMS, settings.streams_max)
    _put_setting(&h.out, INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES)
    _put_setting(&h.out, MAX_HEADER_LIST_SIZE, <u32> settings.list_bytes_max)
    _put_window(h, 0, CONNECTION_WINDOW_BYTES - FIRST_WINDOW_BYTES)
    return h


cdef void http2_close(Http2State* h) noexcept nogil:
    cdef size_t i
    for i in range(h.streams.size()):
        del h.streams[i]
    del h


cdef u64 http2_waits_since(const Http2State* h) noexcept nogil:
    if h.state == SHUT or (h.state == BETWEEN_FRAMES and h.input.size() > 3
                           and h.input.at()[3] == DATA):
        return 0
    return h.waits_since_us


cdef void http2_go_away(Http2State* h, bint warn) noexcept nogil:
    if h.state == SHUT or h.going or (warn and h.warned):
        return
    if warn:
        h.warned = True
        _put_go_away(h, STREAM_MAX, NO_ERROR, NULL)
        http2_ping(h)
    else:
        h.going = True
        _put_go_away(h, h.highest, NO_ERROR, NULL)


cdef void http2_ping(Http2State* h) noexcept nogil:
    _put_head(&h.out, 8, PING, 0, 0)
    _put_u32(&h.out, 0)
    _put_u32(&h.out, 0)


cdef void http2_fail(Http2State* h, u32 code, const char* why) noexcept nogil:
    if h.state == SHUT:
        return
    h.state = SHUT
    h.error = code
    h.why = why
    _put_go_away(h, h.highest, code, why)


# -- for Python
# --------------------------------------------------------------------------------------------------

@cython.final
cdef class Http2Protocol:
    """The rules of one connection. Threads: one at a time.

    streams_max: requests at once; further ones are refused, and clients send them again.
    header_bytes_max: of the fields of a request, with 32 more for each. calls: requests of gRPC
    come as calls. ping_us_min: the shortest time between two pings of the client without an answer
    in between; 0: any.
    """
    def __cinit__(self, u32 streams_max, u64 header_bytes_max, u64 now_us=0, bint calls=False,
                  u64 ping_us_min=0):
        cdef Http2Settings settings
        settings.streams_max = streams_max
        settings.list_bytes_max = header_bytes_max
        settings.calls = calls
        settings.ping_us_min = ping_us_min
        self.state = http2_open(&settings, now_us)
        if self.state == NULL:
            raise_for(NO_MEMORY, "no memory for a connection of HTTP/2")

    def __dealloc__(self):
        if self.state != NULL:
            http2_close(self.state)

    @property
    def is_shut(self):
        """True after an error of the connection: nothing more is read."""
        return self.state.state == SHUT

    @property
    def error(self):
        """The code of that error, and what was wrong."""
        cdef Http2State* h = self.state
        return h.error, "" if h.why == NULL else (<bytes> h.why).decode("ascii")

    @property
    def waits_since_us(self):
        """The time at which the incomplete preface, head or other frame began, in microseconds of
        the caller's clock; 0: none is incomplete. A body may come slowly: it does not count."""
        return http2_waits_since(self.state)

    @property
    def has_left(self):
        """True if the client has said that it begins no more streams."""
        return bool(self.state.left)

    @property
    def is_going(self):
        """True if the client was told the last stream that is answered."""
        return bool(self.state.going)

    @property
    def streams(self):
        """The number of streams that live."""
        return self.state.streams.size()

    @property
    def is_crowded(self):
        """True if more frames wait to be sent than a client may make wait."""
        return self.state.out.size() > CONTROL_BYTES_MAX

    def feed(self, data, u64 now_us=0):
        """Read bytes of the client. `data` is bytes-like."""
        cdef const u8[::1] view = data
        if view.shape[0]:
            http2_feed(self.state, &view[0], <u64> view.shape[0], now_us)

    @property
    def has_events(self):
        """True if events() has something."""
        return self.state.events.size() != 0

    def events(self):
        """Return what came since the last call: tuples (kind, stream, bytes of a message of
        HTTP/1.1 or of the messages of a call, bytes to give back by `consumed`)."""
        cdef Http2State* h = self.state
        cdef list found = []
        cdef const char* at = <const char*> h.text.at()
        cdef size_t i
        cdef u64 n
        for i in range(h.events.size()):
            n = h.events[i].bytes
            found.append((h.events[i].kind, h.events[i].stream, at[:n] if n else b"",
                          h.events[i].credit))
            at += n
        h.events.clear()
        h.text.clear()
        return found

    def consumed(self, u32 stream, u64 n):
        """Give back bytes of a request that were read, also those of a stream that has ended."""
        http2_consumed(self.state, stream, n)

    def answer(self, u32 stream, data):
        """Take bytes of a response of HTTP/1.1. Return False if its stream has ended."""
        cdef const u8[::1] view = data
        if not view.shape[0]:
            return self.state.by_id.get(stream) != NULL
        return bool(http2_answer(self.state, stream, &view[0], <u64> view.shape[0]))

    def reply(self, u32 stream, message, trailers=None):
        """Take a message of the answer to a call, or None, and its end.

        trailers: pairs (name, value) of bytes that end the call, or their block; None: it goes on.
        Return False if its stream has ended.
        """
        cdef Bytes fields
        cdef bytes name, value
        cdef const u8[::1] view
        cdef const u8* at = NULL
        cdef u64 n = 0
        if message is not None:
            view = message
            n = <u64> view.shape[0]
            at = &view[0] if n else <const u8*> GRPC
        if trailers is None:
            return bool(http2_reply(self.state, stream, at, n, NULL))
        if isinstance(trailers, bytes):
            name = trailers
            fields.put(<const char*> name, <u64> len(name))
            trailers = ()
        for name, value in trailers:
            hpack_put(&fields, <const u8*> (<const char*> name), <u32> len(name),
                      <const u8*> (<const char*> value), <u32> len(value))
        if fields.lost:
            raise_for(NO_MEMORY, "no memory for trailers")
        return bool(http2_reply(self.state, stream, at, n, &fields))

    def finish(self, u32 stream, u32 code=NO_ERROR):
        """End a response that has no length, or with an error code reset its stream."""
        http2_finish(self.state, stream, code)

    def unsent(self, u32 stream):
        """Return how many bytes of the response wait; 0 if the stream has ended."""
        cdef Http2Stream* found = <Http2Stream*> self.state.by_id.get(stream)
        return 0 if found == NULL else found.answer.body.size()

    @property
    def unsent_bytes(self):
        """The bytes of the responses that wait, without those of the longest one: a response that
        its client leaves unread does not keep back the others."""
        return http2_unsent(self.state)

    def take(self, u64 room):
        """Return frames to send: all that do not wait for windows or room, and those of responses,
        up to about `room` bytes."""
        cdef Http2State* h = self.state
        cdef bytes data
        http2_frames(h, room)
        data = (<const char*> h.out.at())[:h.out.size()] if h.out.size() else b""
        if h.out.lost:
            raise_for(NO_MEMORY, "no memory for frames of HTTP/2")
        h.out.clear()
        return data

    def go_away(self, bint warn=False):
        """Take no more streams. warn: tell the client first, and go when it has answered."""
        http2_go_away(self.state, warn)

    def fail(self, u32 code):
        """End the connection by an error: take() returns what tells the client so."""
        http2_fail(self.state, code, NULL)

    def ping(self):
        """Send a PING, which a client that is gone answers by a reset of its connection."""
        http2_ping(self.state)


cdef Http2Protocol http2_protocol_of(Http2State* state):
    cdef Http2Protocol made = Http2Protocol.__new__(Http2Protocol, 0, 0)
    http2_close(made.state)
    made.state = state
    return made


cdef Http2State* http2_protocol_release(Http2Protocol protocol) except NULL:
    cdef Http2Protocol ended = Http2Protocol.__new__(Http2Protocol, 0, 0)
    cdef Http2State* state = protocol.state
    ended.state.state = SHUT
    protocol.state = ended.state
    ended.state = NULL
    return state
