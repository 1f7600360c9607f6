# Version 1 batches, the design document's seven types byte for byte, and LZ4 blocks (docs/wire.md). Bytes in, rows out.
#
# Threads: any (pure functions). No Python object, no allocation.
from clipper_core.machine cimport u8, u32, u64
from clipper_core.status cimport Status

cpdef enum:
    V1_HEAD_BYTES = 9
    LZ4_BYTES_MAX = 0x7E000000        # what LZ4 itself accepts in one block
    LZ4_GROWTH_MAX = 255              # bytes that one byte of a block can stand for

cdef struct Cursor:                   # the part of some bytes that is not yet read
    const u8* at
    u64 left

cpdef enum V1:
    V1_I32 = 1
    V1_F64 = 2
    V1_U8 = 3
    V1_VAR_I32 = 4
    V1_VAR_F64 = 5
    V1_VAR_U8 = 6
    V1_STR = 7

cdef u64 v1_bound(int format, u32 n, u64 data_bytes) noexcept nogil     # bytes that v1_encode may need at most
cdef u64 v1_encode(int format, u32 n, const void** rows, const u32* row_bytes, u8* out, u64 out_bytes) noexcept nogil
# ^ bytes written, 0 if it does not fit or the rows are not of the format. Strings: literal-only LZ4 block
cdef int v1_format(int dtype, bint variable) noexcept nogil              # 0 when v1 has no such type

# -- LZ4 blocks
cdef u64 lz4_bound(u64 n) noexcept nogil
cdef u64 lz4_store(const u8* data, u64 n, u8* out) noexcept nogil        # a literal-only block: valid LZ4, no search
cdef Status lz4_decode(const u8* block, u64 n, u8* out, u64 out_bytes) noexcept nogil   # must fill out_bytes exactly
