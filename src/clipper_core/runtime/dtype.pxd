# Element types of rows and predictions; the numbers are the wire's (docs/wire.md).
from clipper_core.runtime.machine cimport u32, u64, u8

cpdef enum DType:
    ANY = 0
    BOOL = 1
    U8 = 2
    I8 = 3
    U16 = 4
    I16 = 5
    U32 = 6
    I32 = 7
    U64 = 8
    I64 = 9
    F16 = 10
    F32 = 11
    F64 = 12
    STR = 13                    # UTF-8, always of variable length
    BYTES = 14                  # always of variable length

cdef inline u32 itemsize(int dtype) noexcept nogil:
    """Return the bytes of one element; 1 for STR and BYTES; 0 for a number that is no type."""
    if dtype == BOOL or dtype == U8 or dtype == I8 or dtype == STR or dtype == BYTES:
        return 1
    if dtype == U16 or dtype == I16 or dtype == F16:
        return 2
    if dtype == U32 or dtype == I32 or dtype == F32:
        return 4
    if dtype == U64 or dtype == I64 or dtype == F64:
        return 8
    return 0

cdef inline bint are_bools(const u8* bytes, u64 n) noexcept nogil:
    """Return whether every byte is 0 or 1, as bools are sent. Arrays of numpy may have others."""
    cdef u8 seen = 0
    cdef u64 i
    for i in range(n):
        seen |= bytes[i]
    return seen <= 1

# Return whether a row has no NaN and no infinity. True for other types than floats.
cdef bint all_finite(int dtype, const void* row, u64 nbytes) noexcept nogil
