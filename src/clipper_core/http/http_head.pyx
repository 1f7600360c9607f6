"""One pass over the head of a request, byte by byte.

What makes two readers of one message disagree is refused elsewhere and not even looked at here:
every line ends in CR LF; no line begins with a blank; between name and colon there is nothing; no
byte but visible ASCII and the space is in a value; Host and Content-Length come once each, the
length in decimal digits and nothing else; no Transfer-Encoding, no Expect, no Upgrade. A head that
differs from this by one byte is somebody else's, with the connection, so that there is always one
reader of what follows. Source: RFC 9112, sections 2.2, 5.1, 6.3 and 11.2.
"""
from libc.string cimport memcmp, memset

from typing import NamedTuple

cdef u64 NO_LENGTH = <u64> -1

cdef enum:
    NAME_MAX = 31               # longer names mean nothing here
    KNOWN_COUNT = 25
    LENGTH_DIGITS_MAX = 10
    ID_MAX = 128

cdef enum Meaning:
    NOTHING = 0
    HOST = 1
    LENGTH = 2
    REQUEST_ID = 3
    CONNECTION = 4
    ACCEPT = 5
    JSON_LENGTH = 6
    FOREIGN = 7                 # whoever sends it wants something that is not known here

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
    Known(7, "upgrade", FOREIGN), Known(11, "traceparent", FOREIGN), Known(10, "tracestate",
                                                                           FOREIGN),
    Known(19, "clipper-deadline-ms", FOREIGN), Known(2, "te", FOREIGN), Known(7, "trailer",
            FOREIGN),
    Known(14, "http2-settings", FOREIGN), Known(13, "last-event-id", FOREIGN), Known(16,
            "proxy-connection", FOREIGN),
    Known(13, "if-none-match", FOREIGN), Known(6, "origin", FOREIGN), Known(11, "mm-model-id",
                                                                            FOREIGN),
    Known(12, "mm-vmodel-id", FOREIGN), Known(12, "content-type", NOTHING),
    Known(13, "authorization", NOTHING), Known(11, "mm-required", NOTHING)]
# ^ and `clipper-actor`, a word of management

cdef u8[256] _token             # 0: no character of a name; else its lower case


def _fill(bytes marks):
    cdef int c
    for c in range(128):
        if 97 <= c <= 122 or 48 <= c <= 57 or c in marks:
            _token[c] = <u8> c
        elif 65 <= c <= 90:
            _token[c] = <u8> (c + 32)


_fill(b"!#$%&'*+-.^_`|~")


cdef inline Meaning _meaning(const u8* name, u32 n) noexcept nogil:
    cdef u32 i
    for i in range(KNOWN_COUNT):
        if _known[i].n == n and memcmp(_known[i].name, name, n) == 0:
            return _known[i].meaning
    return NOTHING


cdef bint _length(const u8* at, const u8* end, u64* value) noexcept nogil:
    cdef u64 n = 0
    if at == end or end - at > LENGTH_DIGITS_MAX or value[0] != NO_LENGTH:
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


cdef bint _accepts_json(const u8* at, const u8* end) noexcept nogil:
    """Return whether the value accepts JSON, as the defaults of clients do; an event stream does
    not."""
    cdef u64 n = <u64> (end - at)
    return ((n == 3 and memcmp(at, "*/*", 3) == 0)
            or (n == 16 and memcmp(at, "application/json", 16) == 0)
            or (n == 33 and memcmp(at, "application/json, text/plain, */*", 33) == 0))


cdef bint _is_plain(Meaning meaning, const u8* at, const u8* end, u32* hosts,
                    Head* head) noexcept nogil:
    """Return whether the header's value is supported, and given once."""
    cdef const u8* p = at
    if meaning == NOTHING:
        return True
    if meaning == HOST:
        hosts[0] += 1
        return hosts[0] == 1 and at < end
    if meaning == LENGTH:
        return _length(at, end, &head.body_bytes)
    if meaning == JSON_LENGTH:
        return _length(at, end, &head.json_bytes)
    if meaning == CONNECTION:
        return _is_word(at, end, "keep-alive", 10)
    if meaning == ACCEPT:
        return _accepts_json(at, end)
    if meaning != REQUEST_ID or head.id != NULL or at == end or end - at > ID_MAX:
        return False
    while p < end:
        if p[0] == 32:
            return False
        p += 1
    head.id = at
    head.id_bytes = <u32> (end - at)
    return True


cdef int _header(const u8** place, const u8* end, u32* hosts, Head* head) noexcept nogil:
    """Read a line `Name: value`; -> HEAD_PLAIN, or the reason why it is not plain."""
    cdef u8[NAME_MAX + 1] name
    cdef u32 n = 0
    cdef const u8* p = place[0]
    cdef const u8* value
    cdef const u8* last
    while p < end and _token[p[0]]:
        if n < NAME_MAX:
            name[n] = _token[p[0]]
        n += 1
        p += 1
    if p == end:
        return HEAD_UNFINISHED
    if p[0] != 58 or n == 0:
        return HEAD_OTHER
    p += 1
    while p < end and p[0] == 32:
        p += 1
    value = p
    while p < end and <u8> (p[0] - 32) < 95:
        p += 1
    if p == end or (p[0] == 13 and p + 1 == end):
        return HEAD_UNFINISHED
    if p[0] != 13 or p[1] != 10:
        return HEAD_OTHER
    place[0] = p + 2
    last = p
    while last > value and (last - 1)[0] == 32:
        last -= 1
    if n > NAME_MAX:
        return HEAD_PLAIN
    return HEAD_PLAIN if _is_plain(_meaning(name, n), value, last, hosts, head) else HEAD_OTHER


cdef int _starts(const u8* text, u64 n, const char* with_, u64 m) noexcept nogil:
    """Return whether it begins with these bytes; HEAD_UNFINISHED: as far as it goes."""
    if memcmp(text, with_, min(n, m)) != 0:
        return HEAD_OTHER
    return HEAD_PLAIN if n >= m else HEAD_UNFINISHED


cdef int head_read(const u8* text, u64 n, Head* head) noexcept nogil:
    cdef const u8* p = text
    cdef const u8* end = text + n
    cdef u32 hosts = 0
    cdef int found
    memset(head, 0, sizeof(Head))
    head.body_bytes = head.json_bytes = NO_LENGTH
    found = _starts(p, n, "POST /", 6)
    if found != HEAD_PLAIN:
        return found
    p += 5
    head.path = p
    while p < end and <u8> (p[0] - 33) < 94:
        p += 1
    if p == end:
        return HEAD_UNFINISHED
    head.path_bytes = <u32> (p - head.path)
    found = _starts(p, <u64> (end - p), " HTTP/1.1\r\n", 11)
    if found != HEAD_PLAIN:
        return found
    p += 11
    while True:
        if end - p < 2:
            return HEAD_UNFINISHED
        if p[0] == 13:
            break
        found = _header(&p, end, &hosts, head)
        if found != HEAD_PLAIN:
            return found
    if p[1] != 10 or hosts != 1 or head.body_bytes == NO_LENGTH:
        return HEAD_OTHER
    head.bytes = <u64> (p + 2 - text)
    return HEAD_PLAIN


KNOWN = frozenset([bytes(_known[_i].name) for _i in range(KNOWN_COUNT)]) | {b"clipper-actor"}


class Plain(NamedTuple):
    """A plain head. bytes: of the head.  json_bytes: Inference-Header-Content-Length, or None."""

    path: bytes
    id: bytes
    bytes: int
    body_bytes: int
    json_bytes: int | None


def read_head(bytes text):
    """The head at the beginning of `text`; True: it is not finished; False: it is not plain.
    Threads: any."""
    cdef Head head
    cdef const u8* at = <const u8*> (<const char*> text)
    cdef int found = head_read(at, <u64> len(text), &head)
    if found != HEAD_PLAIN:
        return found == HEAD_UNFINISHED
    id = b"" if head.id == NULL else text[head.id - at:head.id - at + head.id_bytes]
    return Plain(text[head.path - at:head.path - at + head.path_bytes], id, head.bytes,
                 head.body_bytes,
                 None if head.json_bytes == NO_LENGTH else head.json_bytes)
