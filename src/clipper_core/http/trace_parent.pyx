"""Trace contexts, `00-TRACE-SPAN-FLAGS`: what a request says, and what its response says."""
cdef enum:
    VERSION_END = 2
    TRACE = 3
    TRACE_END = 35
    SPAN = 36
    SPAN_END = 52
    FLAGS = 53
    SPAN_DIGITS = 16

cdef u64 GOLDEN = 0x9E3779B97F4A7C15
cdef const char* DIGITS = "0123456789abcdef"


cdef bint _is_hex(const u8* value, u64 begin, u64 end) noexcept nogil:
    cdef u64 i
    for i in range(begin, end):
        if not (48 <= value[i] <= 57 or 97 <= value[i] <= 102):
            return False
    return True


cdef bint _is_zero(const u8* value, u64 begin, u64 end) noexcept nogil:
    cdef u64 i
    for i in range(begin, end):
        if value[i] != 48:
            return False
    return True


cdef bint trace_parent_is_valid(const u8* value, u64 n) noexcept nogil:
    if n < TRACE_PARENT_BYTES:
        return False
    if not (value[VERSION_END] == 45 and value[TRACE_END] == 45 and value[SPAN_END] == 45):
        return False
    if not (_is_hex(value, 0, VERSION_END) and _is_hex(value, TRACE, TRACE_END)
            and _is_hex(value, SPAN, SPAN_END) and _is_hex(value, FLAGS, TRACE_PARENT_BYTES)):
        return False
    if value[0] == 102 and value[1] == 102:
        return False
    if n > TRACE_PARENT_BYTES and (value[TRACE_PARENT_BYTES] != 45
                                   or _is_zero(value, 0, VERSION_END)):
        return False            # only later versions have more fields
    return not (_is_zero(value, TRACE, TRACE_END) or _is_zero(value, SPAN, SPAN_END))


cdef bint trace_parent_is_sampled(const u8* value) noexcept nogil:
    cdef u8 digit = value[TRACE_PARENT_BYTES - 1]
    return (digit - 48 if digit <= 57 else digit - 87) & 1


cdef void trace_parent_put(Bytes* out, const u8* value, u64 span) noexcept nogil:
    cdef u8[SPAN_DIGITS] digits
    cdef int i
    for i in range(SPAN_DIGITS):
        digits[SPAN_DIGITS - 1 - i] = <u8> DIGITS[span >> (4 * i) & 15]
    out.put_text("00-")
    out.put(value + TRACE, TRACE_END - TRACE)
    out.put_byte(45)
    out.put(digits, SPAN_DIGITS)
    out.put_text("-01" if trace_parent_is_sampled(value) else "-00")


cdef u64 span_new(u64* draws) noexcept nogil:
    cdef u64 z
    draws[0] += GOLDEN
    z = draws[0]
    z = (z ^ z >> 30) * <u64> 0xBF58476D1CE4E5B9
    z = (z ^ z >> 27) * <u64> 0x94D049BB133111EB
    z ^= z >> 31
    return z if z else 1


def answered(bytes value not None, u64 span):
    """Return the header of the response to a request with this `traceparent`; None if that names no
    trace. span: of this server. Threads: any."""
    cdef const u8* at = <const u8*> (<const char*> value)
    cdef Bytes out
    if not trace_parent_is_valid(at, <u64> len(value)):
        return None
    trace_parent_put(&out, at, span)
    if out.lost:
        raise MemoryError()
    return (<const char*> out.at())[:out.size()]
