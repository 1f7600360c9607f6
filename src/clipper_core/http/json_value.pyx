"""Numbers, arrays of them and plain ASCII text as JSON. A double is written with the fewest digits
that bring it back, laid out as msgspec does: from 1e-5 to 1e16 without an exponent. Not plain, and
left to msgspec: bytes, other text, halves, what is not finite, and what a model says beside its
output.
"""
from libc.math cimport isfinite
from libc.string cimport memcpy

from clipper_core.runtime.dtype cimport (
    BOOL, F16, F32, F64, I16, I32, I64, I8, STR, U16, U32, U64, U8, itemsize,
)
from clipper_core.runtime.machine cimport i32, i64, u32, u64, u8
from clipper_core.wire.prediction cimport (
    TAG_BLOB, TAG_NONE, Blob, blob_data, object_value, value_drop,
)

cdef extern from *:
    """
    #include <charconv>
    // The shortest digits, and where the point stands: 0.d1d2d3... * 10^*point. -> how many digits.
    static inline int clipper_digits(double value, char* digits, int* point) {
        char text[40];
        auto end = std::to_chars(text, text + sizeof text, value,
                                 std::chars_format::scientific).ptr;
        int n = 0;
        const char* p = text;
        for (; p != end && *p != 'e'; ++p) if (*p != '.') digits[n++] = *p;
        int exponent = 0;
        bool down = p[1] == '-';
        for (p += 2; p != end; ++p) exponent = 10 * exponent + (*p - '0');
        *point = 1 + (down ? -exponent : exponent);
        return n;
    }
    """
    int digits_of "clipper_digits"(double value, char* digits, int* point) noexcept nogil

cdef enum:
    POINT_MAX = 16
    POINT_MIN = -4
    NUMBER_BYTES_MAX = 32


cdef void json_f64(Bytes* out, double value) noexcept nogil:
    cdef char[40] digits
    cdef int point = 0, n, _i
    if value < 0 or (value == 0 and 1 / value < 0):
        out.put_byte(45)
        value = -value
    if value == 0:
        out.put_text("0.0")
        return
    n = digits_of(value, digits, &point)
    if POINT_MIN <= point <= 0:                 # 0.00123
        out.put_text("0.")
        for _i in range(-point):
            out.put_byte(48)
        out.put(digits, n)
    elif 0 < point <= POINT_MAX:                # 12.3, 1230.0
        out.put(digits, min(n, point))
        for _i in range(point - n):
            out.put_byte(48)
        out.put_byte(46)
        if n > point:
            out.put(digits + point, n - point)
        else:
            out.put_byte(48)
    else:                                       # 1.23e30
        out.put_byte(digits[0])
        if n > 1:
            out.put_byte(46)
            out.put(digits + 1, n - 1)
        out.put_byte(101)
        if point < 1:
            out.put_byte(45)
        out.put_decimal(<u64> (point - 1 if point >= 1 else 1 - point))


cdef inline void _i64(Bytes* out, i64 value) noexcept nogil:
    if value < 0:
        out.put_byte(45)
    out.put_decimal(-<u64> value if value < 0 else <u64> value)


cdef bint _one(Bytes* out, u8 dtype, const u8* at) noexcept nogil:
    """A number of that type; False: it is not finite, or a half."""
    cdef double real
    cdef float single
    if dtype == F64:
        memcpy(&real, at, 8)
    elif dtype == F32:
        memcpy(&single, at, 4)
        real = single
    elif dtype == BOOL:
        out.put_text("true" if at[0] & 1 else "false")
        return True
    else:
        return _whole(out, dtype, at)
    if not isfinite(real):
        return False
    json_f64(out, real)
    return True


cdef bint _whole(Bytes* out, u8 dtype, const u8* at) noexcept nogil:
    cdef u64 word = 0
    if dtype == F16 or dtype < U8 or dtype > I64:
        return False
    memcpy(&word, at, itemsize(dtype))
    if dtype == U8 or dtype == U16 or dtype == U32 or dtype == U64:
        out.put_decimal(word)
    elif dtype == I8:
        _i64(out, <signed char> word)
    elif dtype == I16:
        _i64(out, <short> word)
    elif dtype == I32:
        _i64(out, <i32> word)
    else:
        _i64(out, <i64> word)
    return True


cdef bint _text(Bytes* out, const u8* at, u64 n) noexcept nogil:
    cdef u64 i
    for i in range(n):
        if at[i] < 32 or at[i] > 126 or at[i] == 34 or at[i] == 92:
            return False
    out.put_byte(34)
    out.put(at, n)
    out.put_byte(34)
    return True


cdef const u8* _level(Bytes* out, const Blob* blob, u32 level, const u8* at) noexcept nogil:
    """The array from `at` on, by its dimensions from `level` on; -> what follows, NULL when an
    element is not plain."""
    cdef u32 i
    out.put_byte(91)
    for i in range(blob.dims[level]):
        if i:
            out.put_byte(44)
        if level + 1 < blob.rank:
            at = _level(out, blob, level + 1, at)
            if at == NULL:
                return NULL
        else:
            if not _one(out, blob.dtype, at):
                return NULL
            at += itemsize(blob.dtype)
    out.put_byte(93)
    return at


cdef bint json_value(Bytes* out, const Value* value) noexcept nogil:
    cdef u64 before = out.size()
    cdef Blob* blob
    cdef const u8* data
    if value.tag == TAG_NONE:
        return False
    if value.tag != TAG_BLOB:
        return _one(out, value.tag, <const u8*> &value.word)
    blob = <Blob*> value.word
    data = <const u8*> blob_data(blob)
    if blob.qualifier_bytes:
        return False
    if blob.dtype == STR:
        return _text(out, data, blob.nbytes)
    if blob.rank == 0:
        return blob.nbytes == itemsize(blob.dtype) and _one(out, blob.dtype, data)
    if _level(out, blob, 0, data) != NULL:
        return True
    out.end -= out.size() - before
    return False


cdef bint json_elements(Bytes* out, const Value* value) noexcept nogil:
    cdef Blob* blob = <Blob*> value.word if value.tag == TAG_BLOB else NULL
    cdef const u8* at
    cdef u64 i, n
    if blob == NULL or blob.dtype == STR or blob.rank == 0:
        return json_value(out, value)
    at = <const u8*> blob_data(blob)
    n = blob.nbytes // itemsize(blob.dtype) if itemsize(blob.dtype) else 0
    for i in range(n):
        if i:
            out.put_byte(44)
        if not _one(out, blob.dtype, at):
            return False
        at += itemsize(blob.dtype)
    return True


cdef double value_belief(const Value* value) noexcept nogil:
    cdef double said
    if value.tag != TAG_BLOB or not (<Blob*> value.word).has_confidence:
        return 1.0
    said = (<Blob*> value.word).confidence
    return 0.0 if said != said else min(max(said, 0.0), 1.0)


def json_of(output):
    """Threads: any. A prediction as JSON; None when it is not plain."""
    cdef Bytes out
    cdef Value value = object_value(output)
    cdef bint plain = json_value(&out, &value)
    value_drop(&value)
    return (<const char*> out.at())[:out.size()] if plain else None
