# LZ4 blocks, which carry strings between hosts (docs/wire.md). Any LZ4 library can read these
# blocks, and these functions read any block.
#
# Threads: any (pure functions). No Python object, no allocation.
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.runtime.status cimport Status

cpdef enum:
    LZ4_BYTES_MAX = 0x7E000000  # what LZ4 itself accepts in one block
    LZ4_GROWTH_MAX = 255        # decompressed bytes per byte of a block, at most

cpdef enum Search:                    # step of the search for matches at first; it grows while
                                      # nothing is found
    LITERALS = 0                # no search: a length and a copy
    THOROUGH = 1                # every position, as LZ4 does by default
    QUICK = 8

cdef struct Cursor:                   # the bytes that are not read yet
    const u8* at
    u64 left

# Return the largest number of bytes of a block of n bytes.
cdef u64 lz4_bound(u64 n) noexcept nogil
# Write a block and return its number of bytes, at most lz4_bound(n). n <= LZ4_BYTES_MAX; data and
# out do not overlap.
cdef u64 lz4_encode(const u8* data, u64 n, u32 search, u8* out) noexcept nogil
# Write the start of a block of n literals. Return where the literals follow.
cdef u8* lz4_literals(u64 n, u8* out) noexcept nogil
# Decode a block, which must fill out_bytes exactly.
cdef Status lz4_decode(const u8* block, u64 n, u8* out, u64 out_bytes) noexcept nogil
