"""Numbers in JSON, read straight into a row.

A row of 784 numbers costs a general parser 784 Python floats, a list, and numpy a walk over both.
Here a number is read into a 64-bit mantissa and a power of ten. A mantissa below 2**53 and a power
of at most 22 are doubles without error, and IEEE division rounds once, so the result is right
(Clinger 1990). Mantissas of up to 19 digits, such as those of `float32.tolist()`, are multiplied
with 128 bits of the power (decimal.hpp). All other numbers go to the standard library's from_chars.
Source: W. Clinger, "How to read floating point numbers accurately", PLDI 1990.
"""
cimport numpy as cnp
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer

import numpy as np

from clipper_core.runtime.dtype cimport F32, F64, I16, I32, I64, I8, U16, U32, U64, U8, itemsize
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

from clipper_core.runtime.dtype import NAMES

cnp.import_array()

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
    """Fill cells from `cell` on with the array at hand; -> the cell after the last, NULL if it is
    not what is wanted."""
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
    """Threads: any; it never changes. Reads rows of one type, `RowReader("f64", (28, 28))`;
    `(-1,)`: flat, of any length.

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
        """The row that begins at byte `at` of `text`: -> (the array, the byte after it), or None
        when it is anything else."""
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
            # before memory is asked for
            elif self._least(&wanted) > <u64> (rest.end - rest.at):
                return None
            row = np.empty((wanted.dims[0],) if self.variable else self.shape, self.dtype)
            is_read = json_read_row(&rest, &wanted, <u8*> cnp.PyArray_DATA(row))
            return (row, rest.at - <const u8*> view.buf) if is_read else None
        finally:
            PyBuffer_Release(&view)

    cdef u64 _least(self, const Wanted* wanted):
        """Bytes of the shortest text of such a row: a digit and a comma for each number."""
        cdef u64 count = 1
        cdef u32 i
        for i in range(wanted.rank):
            count *= wanted.dims[i]
        return 2 * count - 1
