"""Element types of rows and predictions. Names here are the names of the public notation:
`f32[784]`, `str`, `i64[*]`."""
from clipper_core.runtime.machine cimport u16

NAMES = {"bool": BOOL, "u8": U8, "i8": I8, "u16": U16, "i16": I16, "u32": U32, "i32": I32,
         "u64": U64, "i64": I64,
         "f16": F16, "f32": F32, "f64": F64, "str": STR, "bytes": BYTES}
_KINDS = {"b": "bool", "u": "u", "i": "i", "f": "f"}

cdef extern from *:
    """
    static inline int clipper_finite64(double x) { return __builtin_isfinite(x); }
    static inline int clipper_finite32(float x) { return __builtin_isfinite(x); }
    """
    bint finite64 "clipper_finite64"(double x) noexcept nogil
    bint finite32 "clipper_finite32"(float x) noexcept nogil


cdef bint all_finite(int dtype, const void* row, u64 nbytes) noexcept nogil:
    cdef u64 i
    if dtype == F64:
        for i in range(nbytes // 8):
            if not finite64((<const double*> row)[i]):
                return False
    elif dtype == F32:
        for i in range(nbytes // 4):
            if not finite32((<const float*> row)[i]):
                return False
    elif dtype == F16:
        for i in range(nbytes // 2):
            if (<const u16*> row)[i] & 0x7C00 == 0x7C00:
                return False
    return True


def given_type(array):
    """Return the type of an array of numpy in the public notation, for texts of errors:
    `f64[2,3]`. Types of numpy that rows cannot have keep numpy's name. Threads: any."""
    numpy = array.dtype
    name = str(numpy)
    if numpy.kind in _KINDS:
        name = _KINDS[numpy.kind]
        if name != "bool":
            name += str(8 * numpy.itemsize)
    return f"{name}[{','.join(map(str, array.shape))}]" if array.ndim else name


def item_bytes(int dtype):
    """Return the bytes of one element of `dtype`; 1 for STR and BYTES. Threads: any."""
    return itemsize(dtype)
