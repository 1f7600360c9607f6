"""CRC-32, as zlib computes it.

The polynomial is zlib's and not Castagnoli's, which processors have an instruction for: zlib's is
in the standard library of every language that an SDK may be written in. Slicing-by-16 (Kounavis and
Berry 2005; Stephan Brumme's tables) makes up for most of it.
"""
from libc.string cimport memcpy

cdef extern from *:
    """
    struct ClipperCrcTables {  // t[k][b]: the CRC of byte b followed by k zero bytes
        alignas(64) unsigned t[16][256];
        constexpr ClipperCrcTables() : t() {
            for (unsigned b = 0; b < 256; b++) {
                unsigned c = b;
                for (int bit = 0; bit < 8; bit++) c = (c & 1) ? (c >> 1) ^ 0xEDB88320u : c >> 1;
                t[0][b] = c;
            }
            for (unsigned k = 1; k < 16; k++)
                for (unsigned b = 0; b < 256; b++) t[k][b] = (t[k - 1][b] >> 8)
                    ^ t[0][t[k - 1][b] & 255];
        }
    };
    static constexpr ClipperCrcTables clipper_crc_tables;
    static constexpr auto& clipper_crc = clipper_crc_tables.t;
    """
    const u32 CRC "clipper_crc"[16][256]


cdef u32 crc32(u32 crc, const u8* bytes, u64 n) noexcept nogil:
    cdef u32 w[4]
    crc = ~crc
    while n >= 16:
        memcpy(w, bytes, 16)
        w[0] ^= crc
        crc = (CRC[15][w[0] & 255] ^ CRC[14][(w[0] >> 8) & 255]
               ^ CRC[13][(w[0] >> 16) & 255] ^ CRC[12][w[0] >> 24]
               ^ CRC[11][w[1] & 255] ^ CRC[10][(w[1] >> 8) & 255]
               ^ CRC[9][(w[1] >> 16) & 255] ^ CRC[8][w[1] >> 24]
               ^ CRC[7][w[2] & 255] ^ CRC[6][(w[2] >> 8) & 255]
               ^ CRC[5][(w[2] >> 16) & 255] ^ CRC[4][w[2] >> 24]
               ^ CRC[3][w[3] & 255] ^ CRC[2][(w[3] >> 8) & 255]
               ^ CRC[1][(w[3] >> 16) & 255] ^ CRC[0][w[3] >> 24])
        bytes += 16
        n -= 16
    if n >= 8:
        memcpy(w, bytes, 8)
        w[0] ^= crc
        crc = (CRC[7][w[0] & 255] ^ CRC[6][(w[0] >> 8) & 255]
               ^ CRC[5][(w[0] >> 16) & 255] ^ CRC[4][w[0] >> 24]
               ^ CRC[3][w[1] & 255] ^ CRC[2][(w[1] >> 8) & 255]
               ^ CRC[1][(w[1] >> 16) & 255] ^ CRC[0][w[1] >> 24])
        bytes += 8
        n -= 8
    while n:
        crc = (crc >> 8) ^ CRC[0][(crc ^ bytes[0]) & 255]
        bytes += 1
        n -= 1
    return ~crc
