"""Fields of a request of HTTP/2 as a head of HTTP/1.1. Source: RFC 9113, sections 8.2 and 8.3.

Malformed are: a name that is empty or has a capital letter, a colon, a blank, or a byte that is not
ASCII; a value with NUL, CR or LF, or with blanks at its ends; fields of the connection, and `te`
other than trailers; a field with a colon that is unknown, comes twice, after another field or among
trailers; a request without method, scheme or path; a path that does not begin with a slash; a Host
that differs from the authority. What HTTP/1.1 forbids beyond that is left to its parser.
"""
from libc.string cimport memchr, memcmp

from clipper_core.http.http_head cimport NO_LENGTH

cdef enum:
    LENGTH_DIGITS = 18          # so that it fits into 64 bits
    OVERHEAD = 32               # of a field

cdef enum Once:                 # fields that come once, as bits
    METHOD = 1
    SCHEME = 2
    PATH = 4
    AUTHORITY = 8
    HOST = 16
    LENGTH = 32

cdef u8[256] _name              # 1: a byte of a name


def _fill():
    cdef int c
    for c in range(33, 127):
        _name[c] = not 65 <= c <= 90 and c != 58


_fill()


cdef inline bint _is(const u8* at, u32 n, const char* word, u32 m) noexcept nogil:
    return n == m and (n == 0 or memcmp(at, word, m) == 0)


cdef void request_head_clear(RequestHead* head, bint trailers) noexcept nogil:
    head.count = 0
    head.list_bytes = 0
    head.length = NO_LENGTH
    head.seen = 0
    head.regular = False
    head.trailers = trailers
    head.wrong = False
    head.large = False
    head.is_grpc = False
    head.method.clear()
    head.path.clear()
    head.authority.clear()
    head.host.clear()
    head.lines.clear()


cdef bint _is_value(const u8* at, u32 n) noexcept nogil:
    cdef u8 last
    if n == 0:
        return True
    last = at[n - 1]
    if at[0] == 32 or at[0] == 9 or last == 32 or last == 9:
        return False
    return memchr(at, 0, n) == NULL and memchr(at, 13, n) == NULL and memchr(at, 10, n) == NULL


cdef bint _is_visible(Bytes* text) noexcept nogil:
    """Return whether all bytes are visible ASCII."""
    cdef const u8* p = text.at()
    cdef const u8* end = p + text.size()
    while p < end:
        if p[0] < 33 or p[0] > 126:
            return False
        p += 1
    return True


cdef void _keep(RequestHead* head, u32 once, const HpackField* field, Bytes* into) noexcept nogil:
    """Keep the value of a field that comes once."""
    if head.seen & once:
        head.wrong = True
        return
    head.seen |= once
    into.put(field.value, field.value_bytes)


cdef void _add_pseudo(RequestHead* head, const HpackField* field) noexcept nogil:
    cdef const u8* name = field.name
    cdef u32 n = field.name_bytes
    if head.regular or head.trailers:
        head.wrong = True
    elif _is(name, n, ":method", 7):
        _keep(head, METHOD, field, &head.method)
    elif _is(name, n, ":path", 5):
        _keep(head, PATH, field, &head.path)
    elif _is(name, n, ":authority", 10):
        _keep(head, AUTHORITY, field, &head.authority)
    elif _is(name, n, ":scheme", 7):
        head.wrong = head.wrong or head.seen & SCHEME
        head.seen |= SCHEME
    else:
        head.wrong = True


cdef bint _is_of_connection(const u8* name, u32 n) noexcept nogil:
    """Return whether the field belongs to a connection of HTTP/1.1."""
    return (_is(name, n, "connection", 10) or _is(name, n, "keep-alive", 10)
            or _is(name, n, "proxy-connection", 16) or _is(name, n, "transfer-encoding", 17)
            or _is(name, n, "upgrade", 7))


cdef void _add_length(RequestHead* head, const HpackField* field) noexcept nogil:
    cdef u64 n = 0
    cdef u32 i
    if head.seen & LENGTH or field.value_bytes == 0 or field.value_bytes > LENGTH_DIGITS:
        head.wrong = True
        return
    head.seen |= LENGTH
    for i in range(field.value_bytes):
        if <u8> (field.value[i] - 48) > 9:
            head.wrong = True
            return
        n = 10 * n + (field.value[i] - 48)
    head.length = n


cdef bint _is_grpc(const HpackField* field) noexcept nogil:
    """Return whether the field says that the content is of gRPC."""
    cdef u32 n = field.value_bytes
    if not _is(field.name, field.name_bytes, "content-type", 12):
        return False
    if n < 16 or memcmp(field.value, "application/grpc", 16) != 0:
        return False
    return n == 16 or field.value[16] == 43 or field.value[16] == 59    # + ;


cdef inline bint _is_blank(u8 byte) noexcept nogil:
    return byte == 32 or byte == 9


cdef void _strip(HpackField* field) noexcept nogil:
    """Drop blanks at the ends of the value."""
    while field.value_bytes and _is_blank(field.value[0]):
        field.value += 1
        field.value_bytes -= 1
    while field.value_bytes and _is_blank(field.value[field.value_bytes - 1]):
        field.value_bytes -= 1


cdef void request_head_add(RequestHead* head, HpackField* field,
                           u64 list_bytes_max) noexcept nogil:
    cdef const u8* name = field.name
    cdef u32 n = field.name_bytes
    cdef u32 i
    head.count += 1
    head.list_bytes += n + field.value_bytes + OVERHEAD
    head.large = head.large or head.list_bytes > list_bytes_max or head.count > FIELDS_MAX
    head.is_grpc = head.is_grpc or _is_grpc(field)
    if head.strips:
        _strip(field)
    if n == 0 or not _is_value(field.value, field.value_bytes):
        head.wrong = True
    if head.wrong or head.large:
        return
    if name[0] == 58:
        _add_pseudo(head, field)
        return
    head.regular = True
    for i in range(n):
        if not _name[name[i]]:
            head.wrong = True
            return
    if _is_of_connection(name, n):
        head.wrong = True
    elif _is(name, n, "te", 2):
        head.wrong = not _is(field.value, field.value_bytes, "trailers", 8)
    elif head.trailers:
        return
    elif _is(name, n, "host", 4):
        _keep(head, HOST, field, &head.host)
    elif _is(name, n, "content-length", 14):
        _add_length(head, field)
    else:
        head.lines.put(name, n)
        head.lines.put_text(": ")
        head.lines.put(field.value, field.value_bytes)
        head.lines.put_text("\r\n")


cdef bint _is_target(RequestHead* head) noexcept nogil:
    """Return whether method, scheme, path and authority make a request."""
    cdef bint is_connect = _is(head.method.at(), <u32> head.method.size(), "CONNECT", 7)
    cdef bint is_options = _is(head.method.at(), <u32> head.method.size(), "OPTIONS", 7)
    if head.method.size() == 0 or not (_is_visible(&head.method) and _is_visible(&head.path)
                                       and _is_visible(&head.authority)
                                       and _is_visible(&head.host)):
        return False
    if (head.seen & AUTHORITY and head.seen & HOST
            and not _is(head.authority.at(), <u32> head.authority.size(),
                        <const char*> head.host.at(), <u32> head.host.size())):
        return False
    if is_connect:
        return head.authority.size() != 0 and not head.seen & (SCHEME | PATH)
    if not head.seen & SCHEME or head.path.size() == 0:
        return False
    return head.path.at()[0] == 47 or (is_options and head.path.size() == 1
                                       and head.path.at()[0] == 42)


cdef bint request_head_write(RequestHead* head, bint ended, Bytes* out) noexcept nogil:
    cdef Bytes* target = &head.path if head.seen & PATH else &head.authority
    cdef Bytes* host = &head.authority if head.seen & AUTHORITY else &head.host
    if head.wrong or not _is_target(head):
        return False
    if ended and head.length != NO_LENGTH and head.length != 0:
        return False
    out.put(head.method.at(), head.method.size())
    out.put_byte(32)
    out.put(target.at(), target.size())
    out.put_text(" HTTP/1.1\r\n")
    if head.seen & (AUTHORITY | HOST):
        out.put_text("host: ")
        out.put(host.at(), host.size())
        out.put_text("\r\n")
    out.put(head.lines.at(), head.lines.size())
    if head.length != NO_LENGTH:
        out.put_text("content-length: ")
        out.put_decimal(head.length)
        out.put_text("\r\n")
    elif not ended:
        out.put_text("transfer-encoding: chunked\r\n")
    out.put_text("\r\n")
    if (head.method.lost or head.path.lost or head.authority.lost or head.host.lost
            or head.lines.lost):
        out.lost = True
    return True
