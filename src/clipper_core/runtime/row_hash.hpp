// The hash of rows: 128 bits over model, salt and bytes, with a random seed per process.
//
// Two 64-bit multiply-and-fold hashes with independent secrets over the same loads. A fold keeps 64
// of a product's 128 bits, so one of them collides for a pair of rows with probability about 2^-63
// over its secret; both at once about 2^-126, of which the key keeps 120 bits. (One pass with a
// 128-bit result would cost half the multiplications and be no better than its 64-bit lanes.) Four
// lanes a half, 64 bytes a turn: eight multiplications in flight hide their latency. After Wang
// Yi's wyhash and Nicolas De Carli's rapidhash.
//
// Long rows, on machines with carry-less multiplication of whole lines: each kilobyte is first
// condensed to 32 bytes, and the result is hashed as above. Condensing xors the products of (word ^
// secret) pairs, sixteen bytes a product, so two different kilobytes collide with probability 2^-64
// over the secret (Lemire and Kaser, "Faster 64-bit universal hashing using carry-less
// multiplications", 2016); done twice, the second time with the secret moved on by a line, 2^-128
// (the Toeplitz construction of UMAC, Black et al. 1999). The last, partial kilobyte is padded with
// zeros; the key includes the length of the row, so this is unambiguous.
//
// Keys never leave the process, so byte order does not matter, and machines may compute different
// keys.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define CLIPPER_VECTORS 1
#include <immintrin.h>
#else
#define CLIPPER_VECTORS 0
#endif

namespace clipper {

using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

// The best variant for this machine. kAvx512 is used from Ice Lake and Zen 4 on; earlier processors
// lower their clock for 64-byte vectors.
enum Variant : uint8_t { kPlain, kAvx2, kAvx512 };

inline Variant variant_best() {
#if CLIPPER_VECTORS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("vpclmulqdq"))
        return kAvx512;
    if (__builtin_cpu_supports("avx2")) return kAvx2;
#endif
    return kPlain;
}

constexpr int kLanes = 4;
constexpr int kCondensed = 16;                // lines of 64 bytes that are condensed to 32 bytes
constexpr uint64_t kCondenseBytesMin = 256;   // shorter rows gain nothing

struct HashHalf {
    uint64_t mask[kLanes];    // xored into the first word of a block
    uint64_t start[kLanes];   // a lane's state before its first block
    uint64_t join[kLanes];    // xored into the lanes' ends
    uint64_t model, salt, end;
};
struct alignas(64) HashSecret {
    uint64_t line[kCondensed + 1][8];
    HashHalf half[2];
    Variant variant;
};
struct Key {
    uint64_t lo, hi;
};

inline void hash_secret(HashSecret* secret, uint64_t seed_lo, uint64_t seed_hi, Variant variant) {
    constexpr unsigned kWords = (sizeof(HashSecret::line) + sizeof(HashSecret::half)) / 8;
    uint64_t* words = reinterpret_cast<uint64_t*>(secret);
    secret->variant = variant;
    uint64_t z = 0;
    for (unsigned i = 0; i < kWords; ++i) {  // splitmix64's finaliser, fed by both halves in turn
        z = (z ^ (i & 1 ? seed_hi : seed_lo)) + 0x9e3779b97f4a7c15u * (i + 1);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        words[i] = z;
    }
    for (unsigned i = 0; i < kWords; ++i) {  // backwards: early words depend on the whole seed too
        uint64_t& w = words[kWords - 1 - i];
        z = (z ^ w) * 0xbf58476d1ce4e5b9u;
        w = z ^= z >> 29;
    }
}

inline uint64_t hash_load8(const uint8_t* p) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    return v;
}
inline uint64_t hash_load4(const uint8_t* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}
inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t hash_join(const HashHalf& h, const uint64_t* lane) {
    return fold(lane[0] ^ h.join[0], lane[1] ^ h.join[1]) ^
           fold(lane[2] ^ h.join[2], lane[3] ^ h.join[3]);
}

inline Key hash_long(const HashSecret& secret, const uint8_t* p, uint64_t n) {  // n > 16
    const HashHalf &x = secret.half[0], &y = secret.half[1];
    uint64_t u[kLanes], v[kLanes];
    auto block = [&](int lane, const uint8_t* at) {
        uint64_t first = hash_load8(at), second = hash_load8(at + 8);
        u[lane] = fold(first ^ x.mask[lane], second ^ u[lane]);
        v[lane] = fold(first ^ y.mask[lane], second ^ v[lane]);
    };
    for (int lane = 0; lane < kLanes; ++lane) u[lane] = x.start[lane], v[lane] = y.start[lane];
    for (; n > 64; p += 64, n -= 64) {
#pragma GCC unroll 4
        for (int lane = 0; lane < kLanes; ++lane) block(lane, p + 16 * lane);
    }
    if (n > 16) block(0, p);
    if (n > 32) block(1, p + 16);
    if (n > 48) block(2, p + 32);
    block(3, p + n - 16);  // the last 16 bytes, part of which may have been read before
    return {hash_join(x, u), hash_join(y, v)};
}

inline Key hash_short(const HashSecret& secret, const uint8_t* p, uint64_t n) {  // n <= 16
    const HashHalf &x = secret.half[0], &y = secret.half[1];
    uint64_t first = 0, second = 0;
    if (n >= 8) {
        first = hash_load8(p), second = hash_load8(p + n - 8);
    } else if (n >= 4) {
        first = hash_load4(p), second = hash_load4(p + n - 4);
    } else if (n > 0) {
        first = (uint64_t(p[0]) << 16) | (uint64_t(p[n >> 1]) << 8) | p[n - 1];
    }
    return {fold(first ^ x.mask[0], second ^ x.start[0]),
            fold(first ^ y.mask[0], second ^ y.start[0])};
}

#if CLIPPER_VECTORS
__attribute__((target("avx512f,avx512bw,vpclmulqdq"))) inline __m512i line_product(
    __m512i row, const uint64_t* secret) {
    __m512i masked = _mm512_xor_si512(row, _mm512_load_si512(secret));
    return _mm512_clmulepi64_epi128(masked, masked, 0x10);
}

template <int Half>
// masked, because GCC 12 warns about its own header otherwise
__attribute__((target("avx512f"))) inline __m256i half_line(__m512i line) {
    return _mm512_maskz_extracti64x4_epi64(255, line, Half);
}

// Condense a row of n bytes to 32 bytes a kilobyte. Return the number of bytes written. `out` has
// room for kDigestBytes.
constexpr uint64_t kDigestBytes = 4096;
__attribute__((target("avx512f,avx512bw,vpclmulqdq"))) inline uint64_t hash_condense(
    const HashSecret& secret, const uint8_t* p, uint64_t n, uint8_t* out) {
    uint64_t made = 0;
    while (n) {
        __m512i u = _mm512_setzero_si512(), v = u;
        int line = 0;
        for (; line < kCondensed && n >= 64; ++line, p += 64, n -= 64) {
            __m512i row = _mm512_loadu_si512(p);
            u = _mm512_xor_si512(u, line_product(row, secret.line[line]));
            v = _mm512_xor_si512(v, line_product(row, secret.line[line + 1]));
        }
        if (line < kCondensed && n) {
            __m512i row = _mm512_maskz_loadu_epi8((uint64_t(1) << n) - 1, p);
            u = _mm512_xor_si512(u, line_product(row, secret.line[line]));
            v = _mm512_xor_si512(v, line_product(row, secret.line[line + 1]));
            n = 0;
        }
        // lanes of 128 bits, xored together: the one left of u, and the one left of v
        __m256i u2 = _mm256_xor_si256(half_line<0>(u), half_line<1>(u));
        __m256i v2 = _mm256_xor_si256(half_line<0>(v), half_line<1>(v));
        __m256i low = _mm256_permute2x128_si256(u2, v2, 0x20),
                high = _mm256_permute2x128_si256(u2, v2, 0x31);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + made), _mm256_xor_si256(low, high));
        made += 32;
    }
    return made;
}

// As hash_long. Rows of more than 128 kB are hashed in parts; each part starts with the digest of
// the part before.
inline Key hash_condensed(const HashSecret& secret, const uint8_t* p, uint64_t n) {
    constexpr uint64_t kPart = (kDigestBytes - 32) * 2 * kCondensed;
    alignas(64) uint8_t digest[kDigestBytes];
    Key key = {0, 0};
    for (uint64_t lead = 0; n; lead = 16) {
        uint64_t part = n < kPart ? n : kPart;
        if (lead) std::memcpy(digest, &key, 16);
        key = hash_long(secret, digest, lead + hash_condense(secret, p, part, digest + lead));
        p += part;
        n -= part;
    }
    return key;
}
#endif

inline Key hash_bytes(const HashSecret& secret, const uint8_t* p, uint64_t n) {
    if (n <= 16) return hash_short(secret, p, n);
#if CLIPPER_VECTORS
    if (n >= kCondenseBytesMin && secret.variant == kAvx512) return hash_condensed(secret, p, n);
#endif
    return hash_long(secret, p, n);
}

// The hash of a row, the bytes of which hash_bytes() has hashed.
inline Key hash_hashed(const HashSecret& secret, uint64_t model, uint64_t salt, Key d, uint64_t n) {
    const HashHalf &x = secret.half[0], &y = secret.half[1];
    uint64_t mx = fold(model ^ x.model, salt ^ x.salt), my = fold(model ^ y.model, salt ^ y.salt);
    return {fold(mx ^ n, d.lo ^ x.end), fold(my ^ n, d.hi ^ y.end)};
}

}  // namespace clipper
