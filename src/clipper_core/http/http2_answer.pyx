"""Responses of HTTP/1.1 as fields and bytes. Source: RFC 9112, and RFC 9113, section 8.2.2, for the
fields that do not pass on.

The responses are this server's own, so only the forms that it writes are read: lines that end in
CR LF, one Content-Length or chunks without extensions and trailers, or a body that ends with the
connection.
"""
from libc.string cimport memchr, memcmp

from clipper_core.http.hpack cimport hpack_put, hpack_put_status

cdef enum:
    STATUS_BYTES = 12           # HTTP/1.1 200
    NAME_MAX = 128
    DIGITS_MAX = 15


cdef const u8* _line_end(const u8* at, const u8* end) noexcept nogil:
    """Return the CR of the line's end; NULL: it has not come."""
    cdef const u8* found = <const u8*> memchr(at, 10, <size_t> (end - at)) if at < end else NULL
    return found - 1 if found != NULL and found > at else NULL


cdef bint _is(const u8* name, u32 n, const char* word, u32 m) noexcept nogil:
    return n == m and memcmp(name, word, m) == 0


cdef u64 _number(const u8* at, const u8* end, u32 base) noexcept nogil:
    cdef u64 n = 0
    cdef u32 digit
    while at < end and end - at <= DIGITS_MAX:
        digit = at[0] - 48 if at[0] < 58 else (at[0] | 32) - 87
        if digit >= base:
            break
        n = base * n + digit
        at += 1
    return n


cdef bint _field(Answer* answer, const u8* at, const u8* end, Bytes* fields) noexcept nogil:
    """Read the line of a field; it sets the state that follows the head."""
    cdef u8[NAME_MAX] name
    cdef u32 n = 0
    cdef const u8* value
    while at + n < end and at[n] != 58 and n < NAME_MAX:
        name[n] = at[n] | 32 if 65 <= at[n] <= 90 else at[n]
        n += 1
    if n == 0 or n == NAME_MAX or at + n == end:
        return False
    value = at + n + 1
    while value < end and value[0] == 32:
        value += 1
    if _is(name, n, "transfer-encoding", 17):
        answer.state = CHUNK_LINE
        return True
    if _is(name, n, "connection", 10) or _is(name, n, "keep-alive", 10):
        return True
    if _is(name, n, "content-length", 14):
        answer.state = ANSWER_BODY
        answer.left = _number(value, end, 10)
    hpack_put(fields, name, n, value, <u32> (end - value))
    return True


cdef int _head(Answer* answer, Bytes* fields) noexcept nogil:
    cdef const u8* at = answer.text.at()
    cdef const u8* end = at + answer.text.size()
    cdef const u8* p = at
    cdef const u8* line
    cdef u32 status
    line = _line_end(p, end)
    while line != NULL and line != p:       # to the empty line
        p = line + 2
        line = _line_end(p, end)
    if line == NULL:
        return ANSWER_WAITS
    end = line
    line = _line_end(at, end + 2)
    if line - at < STATUS_BYTES:
        return ANSWER_WRONG
    status = <u32> _number(at + 9, at + STATUS_BYTES, 10)
    fields.clear()
    hpack_put_status(fields, status)
    answer.state = ANSWER_REST
    p = line + 2
    while p < end:
        line = _line_end(p, end + 2)
        if line == NULL or not _field(answer, p, line, fields):
            return ANSWER_WRONG
        p = line + 2
    answer.text.drop(<u64> (end + 2 - at))
    if status < 200:
        answer.state = ANSWER_HEAD
        return ANSWER_INTERIM
    if (answer.head_only or status == 204 or status == 304
            or (answer.state == ANSWER_BODY and answer.left == 0)):
        answer.state = ANSWER_DONE
    return ANSWER_BEGAN


cdef bint _line(Answer* answer) noexcept nogil:
    """Read the line of a chunk, or after one. Return False if it has not come."""
    cdef const u8* at = answer.text.at()
    cdef const u8* end = _line_end(at, at + answer.text.size())
    if end == NULL:
        return False
    if answer.state == CHUNK_LINE:
        answer.left = _number(at, end, 16)
        answer.state = CHUNK_BYTES if answer.left else LAST_LINE
    elif answer.state == CHUNK_END:
        answer.state = CHUNK_LINE
    else:
        answer.state = ANSWER_DONE
    answer.text.drop(<u64> (end + 2 - at))
    return True


cdef void _pass_on(Answer* answer) noexcept nogil:
    """Pass on bytes of the body."""
    cdef u64 n = answer.text.size()
    if answer.state != ANSWER_REST:
        n = min(n, answer.left)
        answer.left -= n
    answer.body.put(answer.text.at(), n)
    answer.text.drop(n)
    if answer.left == 0 and answer.state == ANSWER_BODY:
        answer.state = ANSWER_DONE
    elif answer.left == 0 and answer.state == CHUNK_BYTES:
        answer.state = CHUNK_END


cdef int answer_read(Answer* answer, Bytes* fields) noexcept nogil:
    while answer.text.size() and answer.state != ANSWER_DONE:
        if answer.state == ANSWER_HEAD:
            return _head(answer, fields)
        if (answer.state == ANSWER_BODY or answer.state == ANSWER_REST
                or answer.state == CHUNK_BYTES):
            _pass_on(answer)
        elif not _line(answer):
            break
    if answer.state == ANSWER_DONE and answer.text.size():
        answer.text.clear()
    return ANSWER_WAITS
