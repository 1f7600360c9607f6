"""Numbers, arrays of them and plain ASCII text as JSON. A double is written with the fewest digits
from which it can be read back exactly, in the form of msgspec: from 1e-5 to 1e16 without an
exponent. Not plain, and left to Python: bytes, other text, f16, numbers that are not finite, and
qualifiers of an output.
"""
cimport numpy as cnp
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport INFINITY, NAN, isfinite, ldexp
from libc.string cimport memcpy, memset

import numpy as np

from clipper_core.runtime.allocation cimport make
from clipper_core.runtime.dtype cimport (
    BOOL, BYTES, F16, F32, F64, I16, I32, I64, I8, STR, U16, U32, U64, U8, all_finite, itemsize,
)
from clipper_core.runtime.machine cimport i32, i64
from clipper_core.runtime.status cimport BAD_INPUT, raise_for
from clipper_core.wire.prediction cimport (
    TAG_BLOB, TAG_NONE, blob_data, object_value, record_type, value_drop, value_hold,
)

from clipper_core.runtime.dtype import NAMES, NAMES as _NAMES

cnp.import_array()

# -- Reading numbers in JSON directly into a row.
#
# A row of 784 numbers costs a general parser 784 Python floats, a list, and numpy a walk over
# both. Here a number is read into a 64-bit mantissa and a power of ten. A mantissa below 2**53
# and a power of at most 22 are doubles without error, and IEEE division rounds once, so the
# result is right (Clinger 1990). Mantissas of up to 19 digits, such as those of
# `float32.tolist()`, are multiplied with 128 bits of the power (decimal.hpp). All other numbers
# go to the standard library's from_chars. Source: W. Clinger, "How to read floating point numbers
# accurately", PLDI 1990.

cdef extern from *:
    """
    #include <charconv>
    static inline bool clipper_from_chars(const unsigned char* first, const unsigned char* last,
                                          double* value) {
        auto found = std::from_chars((const char*) first, (const char*) last, *value);
        return (const unsigned char*) found.ptr == last && found.ec == std::errc();
    }
    """
    bint from_chars "clipper_from_chars"(const u8* first, const u8* last,
                                         double* value) noexcept nogil

cdef extern from "http/decimal.hpp" namespace "clipper" nogil:
    ctypedef struct PowerOfFive:
        u64 high, low
    PowerOfFive[1] powers_of_five
    i64 POWER_MIN, POWER_MAX
    u32 append_digits(const u8* p, u64* mantissa)
    bint scale(u64 mantissa, i64 power, double* value)

cdef enum:
    DIGITS_MAX = 18                # of an integer
    MANTISSA_DIGITS_MAX = 19       # any number of so many digits fits into 64 bits
    EXPONENT_MAX = 9999

cdef u64 EXACT = <u64> 1 << 53

cdef double[23] TENS = [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13,
                        1e14, 1e15, 1e16, 1e17, 1e18,
                        1e19, 1e20, 1e21, 1e22]


def _fill_powers_of_five():
    """Compute the table of decimal.hpp exactly, as the script of Lemire's fast_float does."""
    cdef i64 q
    for q in range(POWER_MIN, POWER_MAX + 1):
        power = 5 ** abs(q)
        if q < 0:
            digits = (power - 1).bit_length()
            power = (1 << (digits + 127 if q >= -27 else 2 * digits + 128)) // power + 1
        power = power << 128 >> power.bit_length()
        powers_of_five[q - POWER_MIN].high = power >> 64
        powers_of_five[q - POWER_MIN].low = power & 0xFFFFFFFFFFFFFFFF


_fill_powers_of_five()


cdef inline bint _is_digit(u8 c) noexcept nogil:
    return <u8> (c - 48) <= 9


cdef inline void _skip_blanks(Text* text) noexcept nogil:
    while text.at < text.end and (text.at[0] == 32 or text.at[0] == 10 or text.at[0] == 13
                                  or text.at[0] == 9):
        text.at += 1


cdef inline bint _take(Text* text, u8 c) noexcept nogil:
    _skip_blanks(text)
    if text.at == text.end or text.at[0] != c:
        return False
    text.at += 1
    return True


cdef inline u32 _digits(const u8** at, const u8* end, u64* mantissa) noexcept nogil:
    """Append the few digits at `at` to a mantissa, modulo 2**64; return their number."""
    cdef const u8* p = at[0]
    cdef u64 m = mantissa[0]
    while p < end and _is_digit(p[0]):
        m = 10 * m + (p[0] - 48)
        p += 1
    cdef u32 n = <u32> (p - at[0])
    at[0] = p
    mantissa[0] = m
    return n


cdef inline u32 _many_digits(const u8** at, const u8* end, u64* mantissa) noexcept nogil:
    """Append the digits at `at` to a mantissa as `_digits` does, eight at a time."""
    cdef const u8* p = at[0]
    cdef u32 found
    while end - p >= 8:
        found = append_digits(p, mantissa)
        p += found
        if found < 8:
            break
    else:
        _digits(&p, end, mantissa)
    cdef u32 n = <u32> (p - at[0])
    at[0] = p
    return n


cdef inline bint _exponent(const u8** at, const u8* end, i64* exponent) noexcept nogil:
    """Read the digits of an exponent; counting stops above EXPONENT_MAX. False: there is no digit,
    or it is too large."""
    cdef const u8* p = at[0]
    cdef i64 n = 0
    while p < end and _is_digit(p[0]):
        n = min(10 * n + (p[0] - 48), <i64> EXPONENT_MAX + 1)
        p += 1
    if p == at[0] or n > EXPONENT_MAX:
        return False
    at[0] = p
    exponent[0] = n
    return True


cdef inline u32 _leading_zeros(const u8* p, const u8* end) noexcept nogil:
    """Return the number of zeros before the first other digit of a number."""
    cdef u32 n = 0
    while p < end and (p[0] == 48 or p[0] == 46):
        n += p[0] == 48
        p += 1
    return n


cdef bint json_read_f64(Text* text, double* value) noexcept nogil:
    cdef const u8* p = text.at
    cdef const u8* end = text.end
    cdef bint negative = p < end and p[0] == 45
    cdef bint down
    cdef u64 mantissa = 0
    cdef u32 whole, fraction = 0
    cdef i64 power, exponent = 0
    cdef const u8* first = p
    p += negative
    cdef const u8* digits = p
    whole = _digits(&p, end, &mantissa)
    if whole == 0 or (whole > 1 and digits[0] == 48):
        return False
    if p < end and p[0] == 46:
        p += 1
        fraction = _many_digits(&p, end, &mantissa)
        if fraction == 0:
            return False
    power = -<i64> fraction
    if p < end and (p[0] | 32) == 101:
        p += 1
        down = p < end and p[0] == 45
        p += p < end and (p[0] == 45 or p[0] == 43)
        if not _exponent(&p, end, &exponent):
            return False
        power += -exponent if down else exponent
    text.at = p
    if (whole + fraction > MANTISSA_DIGITS_MAX
        and whole + fraction - _leading_zeros(digits, end) > MANTISSA_DIGITS_MAX):
        return from_chars(first, p, value)
    if mantissa < EXACT and -22 <= power <= 22:
        value[0] = (<double> mantissa / TENS[-power] if power < 0
                    else <double> mantissa * TENS[power])
    elif not scale(mantissa, power, value):
        return from_chars(first, p, value)
    if negative:
        value[0] = -value[0]
    return True


cdef bint json_read_i64(Text* text, i64* value) noexcept nogil:
    cdef const u8* p = text.at
    cdef const u8* end = text.end
    cdef bint negative = p < end and p[0] == 45
    cdef u64 mantissa = 0
    p += negative
    cdef const u8* digits = p
    cdef u32 n = _digits(&p, end, &mantissa)
    if n == 0 or n > DIGITS_MAX or (n > 1 and digits[0] == 48) or (p < end
                                                                   and (p[0] == 46 or (p[0] | 32)
                                                                        == 101)):
        return False
    text.at = p
    value[0] = -<i64> mantissa if negative else <i64> mantissa
    return True


cdef inline bint _fits(u8 dtype, i64 value) noexcept nogil:
    cdef int bits = 8 * itemsize(dtype)
    if dtype == U8 or dtype == U16 or dtype == U32 or dtype == U64:
        return value >= 0 and (bits == 64 or value >> bits == 0)
    return bits == 64 or -(<i64> 1 << (bits - 1)) <= value < (<i64> 1 << (bits - 1))


cdef bint _read_one(Text* text, u8 dtype, u8* cell) noexcept nogil:
    cdef double real
    cdef i64 whole
    if dtype == F64:
        return json_read_f64(text, <double*> cell)
    if dtype == F32:
        if not json_read_f64(text,
                             &real) or (real > 3.4028234663852886e38
                                        or real < -3.4028234663852886e38):
            return False
        (<float*> cell)[0] = <float> real
        return True
    if not json_read_i64(text, &whole) or not _fits(dtype, whole):
        return False
    if dtype == U8 or dtype == I8:
        cell[0] = <u8> whole
    elif dtype == U16 or dtype == I16:
        (<short*> cell)[0] = <short> whole
    elif dtype == U32 or dtype == I32:
        (<int*> cell)[0] = <int> whole
    else:
        (<i64*> cell)[0] = whole
    return True


cdef u8* _read_level(Text* text, const Wanted* wanted, u32 level, u8* cell) noexcept nogil:
    """Fill cells from `cell` on with the array at the position of `text`. Return the cell after the
    last; NULL if the array is not of the expected form."""
    cdef u64 i
    cdef u32 step = itemsize(wanted.dtype)
    if level == wanted.rank:
        _skip_blanks(text)
        return cell + step if _read_one(text, wanted.dtype, cell) else NULL
    if not _take(text, 91):
        return NULL
    for i in range(wanted.dims[level]):
        if i and not _take(text, 44):
            return NULL
        if level + 1 < wanted.rank:
            cell = _read_level(text, wanted, level + 1, cell)
            if cell == NULL:
                return NULL
        else:
            _skip_blanks(text)
            if not _read_one(text, wanted.dtype, cell):
                return NULL
            cell += step
    return cell if _take(text, 93) else NULL


cdef bint json_read_row(Text* text, const Wanted* wanted, u8* row) noexcept nogil:
    return _read_level(text, wanted, 0, row) != NULL


cdef u64 json_count(const Text* text) noexcept nogil:
    cdef const u8* p = text.at
    cdef u64 commas = 0
    cdef bint any = False
    while p < text.end and p[0] != 93:
        commas += p[0] == 44
        any = any or _is_digit(p[0])
        p += 1
    return commas + 1 if any else 0


cdef class RowReader:
    """Reads rows of one type, `RowReader("f64", (28, 28))`; `(-1,)`: flat, of any length. Threads:
    any; it never changes.

    dtype: f32, f64 or an integer type of clipper_core.runtime.dtype.
    """

    def __init__(self, str dtype, tuple shape):
        cdef u32 i
        number = int(NAMES.get(dtype, 0))
        if not (U8 <= number <= I64 or number == F32
                or number == F64) or len(shape) > JSON_RANK_MAX:
            raise_for(BAD_INPUT,
                      f"no rows of {dtype} with {len(shape)} dimensions are read from JSON here")
        self.variable = shape == (-1,)
        self.wanted.dtype = <u8> number
        self.wanted.rank = len(shape)
        for i in range(self.wanted.rank):
            self.wanted.dims[i] = 0 if self.variable else shape[i]
        self.dtype = np.dtype(f"{dtype[0]}{int(dtype[1:]) // 8}")
        self.shape = shape

    def read(self, text, Py_ssize_t at=0):
        """Read the row that begins at byte `at` of `text`. Return (the array, the offset after it),
        or None when it is anything else."""
        cdef Py_buffer view
        cdef Text rest
        cdef Wanted wanted = self.wanted
        cdef cnp.ndarray row
        cdef bint is_read
        PyObject_GetBuffer(text, &view, PyBUF_SIMPLE)
        try:
            rest.at, rest.end = <const u8*> view.buf + min(max(at, 0),
                    view.len), <const u8*> view.buf + view.len
            if self.variable:
                wanted.dims[0] = json_count(&rest)
            # before memory is allocated
            elif self._least(&wanted) > <u64> (rest.end - rest.at):
                return None
            row = np.empty((wanted.dims[0],) if self.variable else self.shape, self.dtype)
            is_read = json_read_row(&rest, &wanted, <u8*> cnp.PyArray_DATA(row))
            return (row, rest.at - <const u8*> view.buf) if is_read else None
        finally:
            PyBuffer_Release(&view)

    cdef u64 _least(self, const Wanted* wanted):
        """Return the bytes of the shortest text of such a row: a digit and a comma for each
        number."""
        cdef u64 count = 1
        cdef u32 i
        for i in range(wanted.rank):
            count *= wanted.dims[i]
        return 2 * count - 1


# -- Values and large bodies.
cdef extern from *:
    """
    #include <charconv>
    // Write the shortest digits and the decimal exponent, 0.d1d2d3... * 10^*point. Return the
    // number of digits.
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


cdef inline u8* _put(u8* to, const char* from_, int n) noexcept nogil:
    memcpy(to, from_, n)
    return to + n


cdef u8* _write_decimal(u8* to, u64 n) noexcept nogil:
    cdef char[20] digits
    cdef int i = 20
    while True:
        i -= 1
        digits[i] = <char> (48 + n % 10)
        n //= 10
        if n == 0:
            break
    return _put(to, digits + i, 20 - i)


cdef u8* _write_zeros(u8* to, int n) noexcept nogil:
    cdef int _i
    for _i in range(n):
        to[0] = 48
        to += 1
    return to


cdef u8* _write_f64(u8* to, double value) noexcept nogil:
    """Write a finite number of at most NUMBER_BYTES_MAX bytes; return its end."""
    cdef char[40] digits
    cdef int point = 0, n
    if value < 0 or (value == 0 and 1 / value < 0):
        to = _put(to, "-", 1)
        value = -value
    if value == 0:
        return _put(to, "0.0", 3)
    n = digits_of(value, digits, &point)
    if POINT_MIN <= point <= 0:                 # 0.00123
        to = _write_zeros(_put(to, "0.", 2), -point)
        return _put(to, digits, n)
    if 0 < point <= POINT_MAX:                  # 12.3, 1230.0
        to = _write_zeros(_put(to, digits, min(n, point)), point - n)
        to = _put(to, ".", 1)
        return _put(to, digits + point, n - point) if n > point else _put(to, "0", 1)
    to = _put(to, digits, 1)                    # 1.23e30
    if n > 1:
        to = _put(_put(to, ".", 1), digits + 1, n - 1)
    to = _put(to, "e-", 2) if point < 1 else _put(to, "e", 1)
    return _write_decimal(to, <u64> (point - 1 if point >= 1 else 1 - point))


cdef void json_f64(Bytes* out, double value) noexcept nogil:
    cdef u8* to = out.reserve(NUMBER_BYTES_MAX)
    if to != NULL:
        out.end += <u64> (_write_f64(to, value) - to)


cdef inline u8* _write_i64(u8* to, i64 value) noexcept nogil:
    if value < 0:
        to = _put(to, "-", 1)
    return _write_decimal(to, -<u64> value if value < 0 else <u64> value)


cdef double _half(const u8* at) noexcept nogil:
    """Return the number that a half is: 1 bit of sign, 5 of exponent, 10 of fraction."""
    cdef u32 bits = at[0] | <u32> at[1] << 8
    cdef int exponent = <int> (bits >> 10 & 31)
    cdef double fraction = bits & 1023, value
    if exponent == 31:
        value = NAN if fraction else INFINITY
    elif exponent:
        value = ldexp(1024 + fraction, exponent - 25)
    else:
        value = ldexp(fraction, -24)
    return -value if bits >> 15 else value


cdef u8* _write_one(u8* to, u8 dtype, const u8* at) noexcept nogil:
    """Write an element of that type, at most NUMBER_BYTES_MAX bytes; return its end."""
    cdef double real
    cdef float single
    cdef u64 word = 0
    if dtype == F64:
        memcpy(&real, at, 8)
    elif dtype == F32:
        memcpy(&single, at, 4)
        real = single
    elif dtype == F16:
        real = _half(at)
    elif dtype == BOOL:
        return _put(to, "true", 4) if at[0] & 1 else _put(to, "false", 5)
    else:
        memcpy(&word, at, itemsize(dtype))
        if dtype == I8:
            return _write_i64(to, <signed char> word)
        if dtype == I16:
            return _write_i64(to, <short> word)
        if dtype == I32:
            return _write_i64(to, <i32> word)
        return _write_i64(to, <i64> word) if dtype == I64 else _write_decimal(to, word)
    return _write_f64(to, real) if isfinite(real) else _put(to, "null", 4)


cdef inline bint _is_number(u8 dtype) noexcept nogil:
    return BOOL <= dtype <= F64 and dtype != F16


cdef bint _one(Bytes* out, u8 dtype, const u8* at) noexcept nogil:
    """Write a number of that type. False: it is not finite, or no number."""
    cdef u8* to
    if not _is_number(dtype) or not all_finite(dtype, at, itemsize(dtype)):
        return False
    to = out.reserve(NUMBER_BYTES_MAX)
    if to != NULL:
        out.end += <u64> (_write_one(to, dtype, at) - to)
    return True


cdef bint _is_plain_text(const u8* at, u64 n) noexcept nogil:
    """Return whether text is ASCII that JSON need not escape."""
    cdef u64 i
    cdef u8 strange = 0
    for i in range(n):                          # without a branch, so that it is vectorized
        strange |= (at[i] < 32) | (at[i] > 126) | (at[i] == 34) | (at[i] == 92)
    return strange == 0


cdef bint json_is_plain(Blob* blob) noexcept nogil:
    if blob.dtype == STR:
        return _is_plain_text(<const u8*> blob_data(blob), blob.nbytes)
    return all_finite(blob.dtype, blob_data(blob), blob.nbytes)


cdef bint json_begin(JsonCursor* c, const Value* value, bint flat) noexcept nogil:
    cdef Blob* blob = <Blob*> value.word if value.tag == TAG_BLOB else NULL
    cdef u32 i
    if (blob == NULL or blob.qualifier_bytes or record_type(blob)
            or (blob.dtype != STR and (blob.rank == 0 or not _is_number(blob.dtype)))
            or not json_is_plain(blob)):
        return False
    memset(c, 0, sizeof(JsonCursor))
    c.data, c.dtype, c.item = <const u8*> blob_data(blob), blob.dtype, itemsize(blob.dtype)
    c.count, c.flat, c.rank = blob.nbytes // c.item, flat, blob.rank
    for i in range(c.rank):
        c.dims[i] = blob.dims[i]
    return True


cdef void json_begin_bytes(JsonCursor* c, const void* data, u64 n) noexcept nogil:
    memset(c, 0, sizeof(JsonCursor))
    c.data, c.dtype, c.item, c.count = <const u8*> data, BYTES, 1, n


cdef void _put_empty(Bytes* out, const JsonCursor* c, u32 level) noexcept nogil:
    """Write the brackets of an array without elements, from a dimension on."""
    cdef u64 i
    out.put_byte(91)
    if level + 1 < c.rank:
        for i in range(c.dims[level]):
            if i:
                out.put_byte(44)
            _put_empty(out, c, level + 1)
    out.put_byte(93)


cdef u8* _write_brackets(JsonCursor* c, u8* to) noexcept nogil:
    """Write what stands between the last element and the next one: a comma, and the end and the
    beginning of each array that ends there."""
    cdef u32 level = 0 if c.flat else c.rank, ended = 0
    while level and c.index[level - 1] + 1 == c.dims[level - 1]:
        level -= 1
        c.index[level] = 0
        to = _put(to, "]", 1)
        ended += 1
    if level:
        c.index[level - 1] += 1
    to = _put(to, ",", 1)
    while ended:
        to = _put(to, "[", 1)
        ended -= 1
    return to


cdef bint _put_bytes(JsonCursor* c, Bytes* out, u64 bytes_max) noexcept nogil:
    """Continue with text, in quotes, or with bytes unchanged."""
    cdef u64 n = min(bytes_max, c.count - c.done)
    if c.dtype == STR and c.done == 0:
        out.put_byte(34)
    out.put(c.data + c.done, n)
    c.done += n
    if c.done < c.count:
        return False
    if c.dtype == STR:
        out.put_byte(34)
    return True


cdef bint json_go_on(JsonCursor* c, Bytes* out, u64 bytes_max) noexcept nogil:
    cdef u64 end = out.size() + bytes_max
    cdef u32 depth = 0 if c.flat else c.rank
    cdef u8* to
    cdef u8* first
    if c.dtype == STR or c.dtype == BYTES:
        return _put_bytes(c, out, bytes_max)
    if c.count == 0:
        if depth:
            _put_empty(out, c, 0)
        return True
    while c.done < c.count and out.size() < end:
        first = to = out.reserve(NUMBER_BYTES_MAX + 2 * JSON_DIMS_MAX + 1)
        if to == NULL:
            return True                         # `out.lost` is set
        if c.done:
            to = _write_brackets(c, to)
        else:
            for _ in range(depth):
                to = _put(to, "[", 1)
        to = _write_one(to, c.dtype, c.data + c.done * c.item)
        out.end += <u64> (to - first)
        c.done += 1
    if c.done < c.count:
        return False
    for _ in range(depth):
        out.put_byte(93)
    return True


cdef bint json_value(Bytes* out, const Value* value, bint flat) noexcept nogil:
    cdef JsonCursor cursor
    cdef Blob* blob
    if value.tag == TAG_NONE:
        return False
    if value.tag != TAG_BLOB:
        return _one(out, value.tag, <const u8*> &value.word)
    blob = <Blob*> value.word
    if blob.dtype != STR and blob.rank == 0:
        return (blob.qualifier_bytes == 0 and blob.nbytes == itemsize(blob.dtype)
                and _one(out, blob.dtype, <const u8*> blob_data(blob)))
    return json_begin(&cursor, value, flat) and json_go_on(&cursor, out, <u64> 1 << 62)


cdef bint json_put(Bytes* out, const Value* value, bint flat, LargeBody* large) noexcept nogil:
    if large == NULL:
        return json_value(out, value, flat)
    return json_begin(&large.cursor, value, flat)


cdef LargeBody* large_body(const Value* value) noexcept nogil:
    cdef LargeBody* large
    if value.tag != TAG_BLOB or (<Blob*> value.word).nbytes < LARGE_VALUE_BYTES:
        return NULL
    large = make[LargeBody]()
    if large != NULL:
        large.value, large.bytes = value[0], (<Blob*> value.word).nbytes
        value_hold(&large.value)
    return large


cdef void large_body_drop(LargeBody* large) noexcept nogil:
    if large != NULL:
        value_drop(&large.value)
        del large


cdef void large_body_chunk(const Bytes* data, Bytes* out) noexcept nogil:
    out.put_hex(data.size())
    out.put_text("\r\n")
    out.put(data.at(), data.size())
    out.put_text("\r\n")
    out.lost = out.lost or data.lost


cdef bint large_body_go_on(LargeBody* large, Bytes* out, u64 bytes_max,
                           Bytes* room) noexcept nogil:
    cdef bint ended
    if not large.chunked:
        return json_go_on(&large.cursor, out, bytes_max)
    room.clear()
    ended = json_go_on(&large.cursor, room, bytes_max)
    if ended:
        room.put(large.tail.at(), large.tail.size())
    large_body_chunk(room, out)
    if ended:
        out.put_text("0\r\n\r\n")
    return ended


cdef double value_belief(const Value* value) noexcept nogil:
    cdef double confidence
    if value.tag != TAG_BLOB or not (<Blob*> value.word).has_confidence:
        return 1.0
    confidence = (<Blob*> value.word).confidence
    return 0.0 if confidence != confidence else min(max(confidence, 0.0), 1.0)


def json_of(output):
    """Return a prediction as JSON; None if it is not plain. Threads: any."""
    cdef Bytes out
    cdef Value value = object_value(output)
    cdef bint plain = json_value(&out, &value, False)
    value_drop(&value)
    return (<const char*> out.at())[:out.size()] if plain else None


cdef class JsonArray:
    """The JSON text of an array, in pieces; the GIL is not held while one is written. Threads: one
    at a time. TypeError for elements that are no numbers, and beyond JSON_DIMS_MAX dimensions.

    flat: of the elements alone, without brackets and in row-major order.
    """
    cdef JsonCursor cursor
    cdef Py_buffer view
    cdef bint is_open

    def __init__(self, array, bint flat=False):
        cdef u32 i
        kind = "bool" if array.dtype.kind == "b" else f"{array.dtype.kind}{8 * array.itemsize}"
        dtype = int(_NAMES.get(kind, 0))
        if not (BOOL <= dtype <= F64 and array.dtype.isnative) or array.ndim > JSON_DIMS_MAX:
            raise TypeError(f"an array of {array.dtype} with {array.ndim} dimensions is not "
                            "written as JSON here")
        PyObject_GetBuffer(np.ascontiguousarray(array), &self.view, PyBUF_SIMPLE)
        self.is_open = True
        json_begin_bytes(&self.cursor, self.view.buf, array.size)
        self.cursor.dtype, self.cursor.item = <u8> dtype, <u32> array.itemsize
        self.cursor.flat, self.cursor.rank = flat, <u32> array.ndim
        for i in range(self.cursor.rank):
            self.cursor.dims[i] = array.shape[i]

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.view)

    def take(self, u64 bytes_max):
        """Return the next piece, at least one element and about `bytes_max` bytes; empty after
        the last one. MemoryError."""
        cdef Bytes out
        if self.cursor.ended:
            return b""
        with nogil:
            self.cursor.ended = json_go_on(&self.cursor, &out, max(bytes_max, <u64> 1))
        if out.lost:
            raise MemoryError("no memory for the JSON of an array")
        return (<const char*> out.at())[:out.size()]
