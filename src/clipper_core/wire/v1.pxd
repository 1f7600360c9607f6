# Version 1 batches, the design document's seven types byte for byte (docs/wire.md). Bytes in, rows
# out.
#
# Threads: any (pure functions). No Python object, no allocation.
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.runtime.status cimport Status

cpdef enum:
    V1_HEAD_BYTES = 9

cpdef enum V1:
    V1_I32 = 1
    V1_F64 = 2
    V1_U8 = 3
    V1_VAR_I32 = 4
    V1_VAR_F64 = 5
    V1_VAR_U8 = 6
    V1_STR = 7

# bytes that v1_encode may need at most
cdef u64 v1_bound(int format, u32 n, u64 data_bytes) noexcept nogil
cdef u64 v1_encode(int format, u32 n, const void** rows, const u32* row_bytes, u8* out,
                   u64 out_bytes) noexcept nogil
# ^ bytes written, 0 if it does not fit or the rows are not of the format. Strings: literal-only LZ4
# block
cdef u64 v1_compress(const u8* message, u64 nbytes, u32 search, u8* out) noexcept nogil
# ^ a message of strings of v1_encode's with its block written anew (lz4.pxd); at most v1_bound
# bytes
# 0 when v1 has no such type
cdef int v1_format(int dtype, bint variable) noexcept nogil
