"""Heads of HTTP/1.1 messages, read in one pass, byte by byte.

`head_read` reads plain requests for the threads of the core; `read_request`, `read_response` and
`ChunkedBody` read all others, and responses, for Python. All use the same scan of a line.

Messages that two parsers might read differently are refused by the others, and are never plain:
every line ends in CR LF; no line begins with a blank; between name and colon there is nothing; no
byte but visible ASCII and the space is in a value; each header that is known here comes once, the
length in decimal digits and nothing else; no Transfer-Encoding, no Expect, no Upgrade. A head that
differs from this by one byte is passed on, together with the connection, so that the bytes after it
always have one reader. Source: RFC 9112, sections 2.2, 5.1, 6.3 and 11.2.
"""
cimport cython
from libc.string cimport memcmp, memcpy, memset

from typing import NamedTuple

cdef u64 NO_LENGTH = <u64> -1

cdef enum:
    NAME_MAX = 31               # longer names are ignored
    KNOWN_COUNT = 26
    LENGTH_DIGITS_MAX = 10
    ID_MAX = 128
    LENGTH_DIGITS_LONGEST = 18  # digits of a Content-Length, so that it fits into 64 bits
    CHUNK_DIGITS_MAX = 15
    STATUS_LINE_BYTES = 12      # HTTP/1.1 200

cdef enum Meaning:
    NOTHING = 0
    HOST = 1
    LENGTH = 2
    REQUEST_ID = 3
    CONNECTION = 4
    JSON_LENGTH = 5
    AUTHORIZATION = 6
    TRACE = 7
    DEADLINE = 8
    ACCEPT = 9
    FOREIGN = 10                # a header that requests something that is not supported here

cdef struct Known:
    u32 n
    const char* name
    Meaning meaning

cdef Known[KNOWN_COUNT] _known = [
    Known(4, "host", HOST), Known(14, "content-length", LENGTH), Known(12, "x-request-id",
                                                                       REQUEST_ID),
    Known(10, "connection", CONNECTION), Known(6, "accept", ACCEPT),
    Known(31, "inference-header-content-length", JSON_LENGTH),
    Known(17, "transfer-encoding", FOREIGN), Known(16, "content-encoding", FOREIGN), Known(6,
            "expect", FOREIGN),
    Known(7, "upgrade", FOREIGN), Known(11, "traceparent", TRACE), Known(10, "tracestate",
                                                                           FOREIGN),
    Known(19, "clipper-deadline-ms", DEADLINE), Known(2, "te", FOREIGN), Known(7, "trailer",
            FOREIGN),
    Known(14, "http2-settings", FOREIGN), Known(13, "last-event-id", FOREIGN), Known(16,
            "proxy-connection", FOREIGN),
    Known(13, "if-none-match", FOREIGN), Known(6, "origin", FOREIGN), Known(11, "mm-model-id",
                                                                            FOREIGN),
    Known(12, "mm-vmodel-id", FOREIGN), Known(12, "content-type", NOTHING),
    Known(13, "authorization", AUTHORIZATION), Known(11, "mm-required", NOTHING),
    Known(13, "clipper-actor", NOTHING)]

cdef struct HeaderLine:
    const u8* value
    const u8* end               # of the value, without blanks
    u32 name_bytes
    bint is_odd                 # a TAB or a byte that is not ASCII is in the value
    u8[NAME_MAX + 1] name       # in lower case; of a longer name, its beginning

cdef u8[256] _token             # 0: no character of a name; else its lower case


def _fill(bytes marks):
    cdef int c
    for c in range(128):
        if 97 <= c <= 122 or 48 <= c <= 57 or c in marks:
            _token[c] = <u8> c
        elif 65 <= c <= 90:
            _token[c] = <u8> (c + 32)


_fill(b"!#$%&'*+-.^_`|~")


cdef inline u32 _index(const u8* name, u32 n) noexcept nogil:
    """Return the index of a header in `_known`; KNOWN_COUNT if it is not there."""
    cdef u32 i
    for i in range(KNOWN_COUNT):
        if _known[i].n == n and memcmp(_known[i].name, name, n) == 0:
            return i
    return KNOWN_COUNT


cdef inline Meaning _meaning(const u8* name, u32 n) noexcept nogil:
    cdef u32 i = _index(name, n)
    return NOTHING if i == KNOWN_COUNT else _known[i].meaning


cdef bint _length(const u8* at, const u8* end, u64* value) noexcept nogil:
    cdef u64 n = 0
    if at == end or end - at > LENGTH_DIGITS_MAX:
        return False
    while at < end:
        if <u8> (at[0] - 48) > 9:
            return False
        n = 10 * n + (at[0] - 48)
        at += 1
    value[0] = n
    return True


cdef bint _is_word(const u8* at, const u8* end, const char* word, u64 n) noexcept nogil:
    """Return whether it is `word`, in any case."""
    cdef u64 i
    if <u64> (end - at) != n:
        return False
    for i in range(n):
        if _token[at[i]] != <u8> word[i]:
            return False
    return True


cdef bint _is_plain(Meaning meaning, const u8* at, const u8* end, Head* head) noexcept nogil:
    """Return whether the header's value is supported."""
    cdef const u8* p = at
    if meaning == NOTHING:
        return True
    if meaning == ACCEPT:
        # text/e... may ask for an answer in parts
        return end - at <= 5 or (at[0] | 32) != 116 or (at[5] | 32) != 101
    if meaning == HOST:
        head.hosts = 1
        return at < end
    if meaning == LENGTH:
        return _length(at, end, &head.body_bytes)
    if meaning == JSON_LENGTH:
        return _length(at, end, &head.json_bytes)
    if meaning == CONNECTION:
        return _is_word(at, end, "keep-alive", 10)
    if meaning == AUTHORIZATION:
        head.authorization = at
        head.authorization_bytes = <u32> (end - at)
        return True
    if meaning == TRACE:
        head.trace = at
        head.trace_bytes = <u32> (end - at)
        return True
    if meaning == DEADLINE:
        head.deadline = at
        head.deadline_bytes = <u32> (end - at)
        return True
    if meaning != REQUEST_ID or at == end or end - at > ID_MAX:
        return False
    while p < end:
        if p[0] == 32:
            return False
        p += 1
    head.id = at
    head.id_bytes = <u32> (end - at)
    return True


cdef int _line(const u8** place, const u8* end, HeaderLine* line) noexcept nogil:
    """Scan a line `Name: value`. Return HEAD_PLAIN, HEAD_UNFINISHED, or HEAD_OTHER for a malformed
    line."""
    cdef const u8* p = place[0]
    cdef const u8* last
    line.name_bytes, line.is_odd = 0, False
    while p < end and _token[p[0]]:
        if line.name_bytes < NAME_MAX:
            line.name[line.name_bytes] = _token[p[0]]
        line.name_bytes += 1
        p += 1
    if p == end:
        return HEAD_UNFINISHED
    if p[0] != 58 or line.name_bytes == 0:
        return HEAD_OTHER
    p += 1
    while p < end and (p[0] == 32 or p[0] == 9):
        line.is_odd |= p[0] == 9
        p += 1
    line.value = p
    while True:
        while p < end and <u8> (p[0] - 32) < 95:
            p += 1
        if p == end or not (p[0] == 9 or p[0] >= 128):
            break
        line.is_odd = True
        p += 1
    if p == end or (p[0] == 13 and p + 1 == end):
        return HEAD_UNFINISHED
    if p[0] != 13 or p[1] != 10:
        return HEAD_OTHER
    place[0] = p + 2
    last = p
    while last > line.value and ((last - 1)[0] == 32 or (last - 1)[0] == 9):
        last -= 1
    line.end = last
    return HEAD_PLAIN


cdef int _header(const u8** place, const u8* end, u32* seen, Head* head) noexcept nogil:
    """Read a header. Return HEAD_PLAIN, or the reason why it is not plain.

    seen: bits of the known headers that came before. None of them comes twice in a plain head.
    """
    cdef HeaderLine line
    cdef int found = _line(place, end, &line)
    cdef u32 i
    if found != HEAD_PLAIN or line.is_odd:
        return found if found != HEAD_PLAIN else HEAD_OTHER
    if line.name_bytes > NAME_MAX:
        return HEAD_PLAIN
    i = _index(line.name, line.name_bytes)
    if i == KNOWN_COUNT:
        return HEAD_PLAIN
    if seen[0] & (<u32> 1 << i):
        return HEAD_OTHER
    seen[0] |= <u32> 1 << i
    return (HEAD_PLAIN if _is_plain(_known[i].meaning, line.value, line.end, head)
            else HEAD_OTHER)


cdef int _starts(const u8* text, u64 n, const char* with_, u64 m) noexcept nogil:
    """Return whether the text begins with these bytes; HEAD_UNFINISHED if it is shorter and agrees
    so far."""
    if memcmp(text, with_, min(n, m)) != 0:
        return HEAD_OTHER
    return HEAD_PLAIN if n >= m else HEAD_UNFINISHED


cdef int _target(const u8** place, const u8* end, u32* size, u8* minor) noexcept nogil:
    """Scan `TARGET HTTP/1.N` and the end of the line."""
    cdef const u8* p = place[0]
    cdef int found
    while p < end and <u8> (p[0] - 33) < 94:
        p += 1
    if p == end:
        return HEAD_UNFINISHED
    size[0] = <u32> (p - place[0])
    found = _starts(p, <u64> (end - p), " HTTP/1.", 8)
    if found != HEAD_PLAIN:
        return found
    p += 8
    if p == end:
        return HEAD_UNFINISHED
    minor[0] = <u8> (p[0] - 48)
    found = _starts(p + 1, <u64> (end - p - 1), "\r\n", 2)
    if found != HEAD_PLAIN or minor[0] > 1 or size[0] == 0:
        return found if found != HEAD_PLAIN else HEAD_OTHER
    place[0] = p + 3
    return HEAD_PLAIN


cdef int head_read(const u8* text, u64 n, Head* head) noexcept nogil:
    cdef const u8* p = text
    cdef const u8* end = text + n
    cdef u32 seen = 0
    cdef u8 minor = 0
    cdef int found
    memset(head, 0, sizeof(Head))
    head.body_bytes = head.json_bytes = NO_LENGTH
    found = _starts(p, n, "POST /", 6)
    if found != HEAD_PLAIN:
        return found
    p += 5
    head.path = p
    found = _target(&p, end, &head.path_bytes, &minor)
    if found != HEAD_PLAIN or minor != 1:
        return found if found != HEAD_PLAIN else HEAD_OTHER
    while True:
        if end - p < 2:
            return HEAD_UNFINISHED
        if p[0] == 13:
            break
        found = _header(&p, end, &seen, head)
        if found != HEAD_PLAIN:
            return found
    if p[1] != 10 or head.hosts != 1 or head.body_bytes == NO_LENGTH:
        return HEAD_OTHER
    head.bytes = <u64> (p + 2 - text)
    return HEAD_PLAIN


KNOWN = frozenset([bytes(_known[_i].name) for _i in range(KNOWN_COUNT)])


class Plain(NamedTuple):
    """A plain head. bytes: of the head.  json_bytes: Inference-Header-Content-Length, or None."""

    path: bytes
    id: bytes
    bytes: int
    body_bytes: int
    json_bytes: int | None


def read_head(bytes text):
    """Return the head at the beginning of `text`; True if it is incomplete; False if it is not
    plain. Threads: any."""
    cdef Head head
    cdef const u8* at = <const u8*> (<const char*> text)
    cdef int found = head_read(at, <u64> len(text), &head)
    if found != HEAD_PLAIN:
        return found == HEAD_UNFINISHED
    id = b"" if head.id == NULL else text[head.id - at:head.id - at + head.id_bytes]
    return Plain(text[head.path - at:head.path - at + head.path_bytes], id, head.bytes,
                 head.body_bytes,
                 None if head.json_bytes == NO_LENGTH else head.json_bytes)


# -- all of HTTP/1.1: heads of requests and of responses, and chunks

METHODS = {name.encode(): name for name in
           ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT")}


class HttpSyntaxError(ValueError):
    """Raised for bytes that are no message of HTTP/1.1, or that two parsers could read differently.
    """


@cython.final
cdef class MessageHead:
    """The head of a request or a response. Threads: any.

    method, target: of a request. status: of a response. minor: the version is 1.minor. headers: the
    requested ones, by lower-case name. hosts: how many Host headers there are. length: of the body,
    -1 if it is not given. keep_alive: the connection stays open after the message. end: where the
    head ends in the text.
    """
    cdef readonly str method
    cdef readonly bytes target
    cdef readonly int status
    cdef readonly int minor
    cdef readonly dict headers
    cdef readonly int hosts
    cdef readonly object length
    cdef readonly bint keep_alive
    cdef readonly Py_ssize_t end


cdef bint _has_word(const u8* at, const u8* end, const char* word, u64 n) noexcept nogil:
    """Return whether a list, with commas, contains `word`, in any case."""
    cdef const u8* first
    cdef const u8* last
    while at < end:
        while at < end and (at[0] == 32 or at[0] == 9 or at[0] == 44):
            at += 1
        first = at
        while at < end and at[0] != 44:
            at += 1
        last = at
        while last > first and ((last - 1)[0] == 32 or (last - 1)[0] == 9):
            last -= 1
        if _is_word(first, last, word, n):
            return True
    return False


cdef bint _read_headers(const u8** place, const u8* end, known, repeated,
                        MessageHead head) except -1:
    """Read headers up to the empty line. Return True if that line is there."""
    cdef HeaderLine line
    cdef Meaning meaning
    cdef int found
    cdef bytes name, value
    head.headers, head.length, head.keep_alive = {}, -1, head.minor == 1
    while True:
        if end - place[0] < 2:
            return False
        if place[0][0] == 13:
            if place[0][1] != 10:
                raise HttpSyntaxError("the head does not end with an empty line")
            place[0] += 2
            return True
        found = _line(place, end, &line)
        if found == HEAD_UNFINISHED:
            return False
        if found != HEAD_PLAIN:
            raise HttpSyntaxError("a header is malformed")
        if line.name_bytes > NAME_MAX:
            continue
        meaning = _meaning(line.name, line.name_bytes)
        if meaning == HOST:
            head.hosts += 1
        elif meaning == CONNECTION:
            if _has_word(line.value, line.end, "close", 5):
                head.keep_alive = False
            elif head.minor == 0 and _has_word(line.value, line.end, "keep-alive", 10):
                head.keep_alive = True
        elif meaning == LENGTH:
            value = line.value[:line.end - line.value]
            if head.length != -1 or not value.isdigit() or len(value) > LENGTH_DIGITS_LONGEST:
                raise HttpSyntaxError("Content-Length is not one number")
            head.length = int(value)
        name = line.name[:line.name_bytes]
        if name in known:
            value = line.value[:line.end - line.value]
            if name in head.headers and repeated is not None:
                if name not in repeated:
                    raise HttpSyntaxError(f"the header {name.decode()} comes twice")
                value = head.headers[name] + b"," + value
            head.headers[name] = value


cdef MessageHead _read_request(const u8* text, u64 n, known, repeated):
    cdef MessageHead head = MessageHead.__new__(MessageHead)
    cdef const u8* p = text
    cdef const u8* end = text + n
    cdef const u8* start
    cdef u32 size = 0
    cdef u8 minor = 0
    cdef int found
    while end - p >= 2 and p[0] == 13 and p[1] == 10:     # empty lines before a request
        p += 2
    start = p
    while p < end and _token[p[0]] and p - start <= NAME_MAX:
        p += 1
    if p == end or (p[0] == 13 and p == start and p + 1 == end):
        return None
    if p[0] != 32 or p == start:
        raise HttpSyntaxError("it does not start with a method")
    method = start[:p - start]
    head.method = METHODS.get(method) or method.decode()    # any token: RFC 9110, section 9.1
    p += 1
    start = p
    found = _target(&p, end, &size, &minor)
    if found == HEAD_OTHER:
        raise HttpSyntaxError("the request line has no version that is spoken here: HTTP/1.0 or"
                              " HTTP/1.1")
    if found == HEAD_UNFINISHED:
        return None
    head.target, head.minor = start[:size], minor
    if not (start[0] == 47 or head.target == b"*" or b"://" in head.target
            or head.method == "CONNECT"):
        raise HttpSyntaxError("the target is neither a path nor a URL")
    if not _read_headers(&p, end, known, repeated, head):
        return None
    head.end = p - text
    return head


cdef MessageHead _read_response(const u8* text, u64 n, known):
    cdef MessageHead head = MessageHead.__new__(MessageHead)
    cdef const u8* p = text + STATUS_LINE_BYTES
    cdef const u8* end = text + n
    if _starts(text, n, "HTTP/1.", 7) == HEAD_OTHER:
        raise HttpSyntaxError("it does not start with a version")
    while p < end and (<u8> (p[0] - 32) < 95 or p[0] == 9 or p[0] >= 128):      # the reason
        p += 1
    if end - p < 2:
        return None
    status = text[9:STATUS_LINE_BYTES]
    if text[8] != 32 or not status.isdigit() or p[0] != 13 or p[1] != 10:
        raise HttpSyntaxError("the status line is malformed")
    head.minor, head.status = text[7] - 48, int(status)
    p += 2
    if not _read_headers(&p, end, known, None, head):
        return None
    head.end = p - text
    return head


def read_request(bytes text, Py_ssize_t at, known, repeated):
    """Return the MessageHead of the request at `at`; None: it is not complete.

    known: names of the headers that are kept, in lower case. Those of `repeated` are joined with
    commas; of the others each comes once, because two parsers could take different ones. Raises
    HttpSyntaxError; ValueError for an `at` outside of `text`. Threads: any.
    """
    if not 0 <= at <= len(text):
        raise ValueError("at")
    cdef MessageHead head = _read_request(<const u8*> (<const char*> text) + at,
                                          <u64> (len(text) - at), known, repeated)
    if head is not None:
        head.end += at
    return head


def read_response(bytes text, known=()):
    """Return the MessageHead of the response that `text` starts with; None: it is not complete.

    Raises HttpSyntaxError. Threads: any.
    """
    return _read_response(<const u8*> (<const char*> text), <u64> len(text), known)


cdef enum ChunkState:
    CHUNK_SIZE = 0
    CHUNK_DATA = 1
    CHUNK_END = 2               # the end of line after a chunk's data
    TRAILERS = 3
    CHUNKS_DONE = 4


@cython.final
cdef class ChunkedBody:
    """Reads a body in chunks. Threads: one.

    done: the last chunk and the trailers have been read. Trailers are ignored, except that
    Content-Length and Transfer-Encoding among them are an error. overhead: bytes since the last
    byte of the body that are not of the body; the caller limits them.
    """
    cdef ChunkState _state
    cdef u64 _left
    cdef bytes _rest            # an incomplete line
    cdef readonly u64 overhead

    def __cinit__(self):
        self._rest = b""

    @property
    def done(self):
        return self._state == CHUNKS_DONE

    def feed(self, bytes data, Py_ssize_t at):
        """Read from `at`; return (bytes of the body, where it stopped). Raises HttpSyntaxError."""
        cdef Py_ssize_t before = len(self._rest)
        cdef bytes text = self._rest + data[at:] if before or at else data
        cdef const u8* start = <const u8*> (<const char*> text)
        cdef const u8* end = start + len(text)
        cdef const u8* p = start
        cdef bytearray body = bytearray(len(text))
        cdef u8* to = <u8*> (<char*> body)
        cdef u64 n, taken = 0
        cdef int found = HEAD_PLAIN
        self.overhead -= before
        with nogil:
            while self._state != CHUNKS_DONE and found == HEAD_PLAIN:
                if self._state == CHUNK_DATA:
                    n = min(self._left, <u64> (end - p))
                    if n:
                        memcpy(to + taken, p, n)
                        taken += n
                        p += n
                        self._left -= n
                        self.overhead = 0
                    if self._left:
                        break
                    self._state = CHUNK_END
                else:
                    found = self._step(&p, end)
        if found == HEAD_OTHER:
            raise HttpSyntaxError("a chunk or a trailer is malformed")
        del body[taken:]
        self._rest = b"" if self._state == CHUNKS_DONE else text[p - start:]
        self.overhead += len(self._rest)
        return bytes(body), (at - before + (p - start) if self._state == CHUNKS_DONE
                             else len(data))

    cdef int _step(self, const u8** place, const u8* end) noexcept nogil:
        """Read one line. Return HEAD_PLAIN, HEAD_UNFINISHED or HEAD_OTHER, as _line() does."""
        cdef HeaderLine line
        cdef const u8* p = place[0]
        cdef int found = HEAD_PLAIN
        if self._state == CHUNK_SIZE:
            found = _chunk_size(&p, end, &self._left)
            if found == HEAD_PLAIN:
                self._state = CHUNK_DATA if self._left else TRAILERS
        elif self._state == CHUNK_END or (p < end and p[0] == 13):
            found = _starts(p, <u64> (end - p), "\r\n", 2)
            if found == HEAD_PLAIN:
                p += 2
                self._state = CHUNK_SIZE if self._state == CHUNK_END else CHUNKS_DONE
        else:
            found = _line(&p, end, &line)
            if found == HEAD_PLAIN and _frames(&line):
                found = HEAD_OTHER
        if found == HEAD_PLAIN:
            self.overhead += <u64> (p - place[0])
            place[0] = p
        return found


cdef bint _frames(const HeaderLine* line) noexcept nogil:
    """Return whether the field determines where a body ends. In a trailer that is an error, because
    a reader that uses it would read other messages (RFC 9112, section 7.1.2)."""
    return ((line.name_bytes == 17 and memcmp(line.name, "transfer-encoding", 17) == 0)
            or (line.name_bytes == 14 and memcmp(line.name, "content-length", 14) == 0))


cdef int _chunk_size(const u8** place, const u8* end, u64* size) noexcept nogil:
    """Read `SIZE;extensions` and the end of the line."""
    cdef const u8* p = place[0]
    cdef u64 n = 0
    cdef u8 digit
    while p < end and p - place[0] < CHUNK_DIGITS_MAX:
        digit = _token[p[0]]
        if <u8> (digit - 48) <= 9:
            digit -= 48
        elif <u8> (digit - 97) < 6:
            digit -= 87
        else:
            break
        n = 16 * n + digit
        p += 1
    if p == end:
        return HEAD_UNFINISHED
    if p == place[0] or (p[0] != 59 and p[0] != 13):
        return HEAD_OTHER
    while p < end and (_token[p[0]] or p[0] == 59 or p[0] == 61):     # extensions, not quoted
        p += 1
    if _starts(p, <u64> (end - p), "\r\n", 2) != HEAD_PLAIN:
        return _starts(p, <u64> (end - p), "\r\n", 2)
    size[0] = n
    place[0] = p + 2
    return HEAD_PLAIN
