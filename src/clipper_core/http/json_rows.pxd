# Numbers in JSON, read straight into a row: no Python object for each, no list in between.
#
# Threads: any (pure functions). It reads what is exactly what it expects, and stops at everything
# else: JSON that is wrong is explained by a parser that is slower and says why.
from libc.stdint cimport int64_t as i64

from clipper_core.runtime.machine cimport u32, u64, u8

cdef enum:
    JSON_RANK_MAX = 4

cdef struct Text:                  # the part that is not yet read
    const u8* at
    const u8* end

cdef struct Wanted:                # what is read
    u8 dtype                    # of clipper_core.runtime.dtype: F64, F32, or an integer type
    u32 rank
    u64 dims[4]

# a number; False: not one that a double holds
cdef bint json_read_f64(Text* text, double* value) noexcept nogil
# a whole number of at most 18 digits
cdef bint json_read_i64(Text* text, i64* value) noexcept nogil
# arrays in arrays, of exactly that shape
cdef bint json_read_row(Text* text, const Wanted* wanted, u8* row) noexcept nogil
# elements of a flat array, if it is one
cdef u64 json_count(const Text* text) noexcept nogil

cdef class RowReader:
    cdef Wanted wanted
    cdef bint variable
    cdef object dtype
    cdef tuple shape

    cdef u64 _least(self, const Wanted* wanted)
