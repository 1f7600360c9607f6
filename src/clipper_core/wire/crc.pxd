# CRC-32 of bytes, zlib's polynomial.
#
# Threads: any (a pure function).
from clipper_core.runtime.machine cimport u32, u64, u8

# start with 0, or go on from an earlier one
cdef u32 crc32(u32 crc, const u8* bytes, u64 n) noexcept nogil
