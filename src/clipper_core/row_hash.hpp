// The hash of rows: 128 bits over model, salt and bytes, seeded at random per process.
//
// Two 64-bit multiply-and-fold hashes with independent secrets over the same loads. A fold keeps 64 of a product's
// 128 bits, so one of them collides for a pair of rows with probability about 2^-63 over its secret; both at once
// about 2^-126, of which the key keeps 120 bits. (One pass with a 128-bit result would cost half the multiplications
// and be no better than its 64-bit lanes.) Four lanes a half, 64 bytes a turn: eight multiplications in flight hide
// their latency. After Wang Yi's wyhash and Nicolas De Carli's rapidhash. Keys never leave the process, so byte order
// does not matter.
#pragma once

#include <cstdint>
#include <cstring>

namespace clipper {

using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr int kLanes = 4;

struct HashHalf {
    uint64_t mask[kLanes];    // xored into the first word of a block
    uint64_t start[kLanes];   // a lane's state before its first block
    uint64_t join[kLanes];    // xored into the lanes' ends
    uint64_t model, salt, end;
};
struct HashSecret {
    HashHalf half[2];
};
struct Key {
    uint64_t lo, hi;
};

inline void hash_secret(HashSecret* secret, uint64_t seed_lo, uint64_t seed_hi) {
    uint64_t* words = reinterpret_cast<uint64_t*>(secret);
    uint64_t z = 0;
    for (unsigned i = 0; i < sizeof(HashSecret) / 8; ++i) {  // splitmix64's finaliser, fed by both halves in turn
        z = (z ^ (i & 1 ? seed_hi : seed_lo)) + 0x9e3779b97f4a7c15u * (i + 1);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        words[i] = z;
    }
    for (unsigned i = 0; i < sizeof(HashSecret) / 8; ++i) {  // backwards: early words depend on the whole seed too
        uint64_t& w = words[sizeof(HashSecret) / 8 - 1 - i];
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
    return fold(lane[0] ^ h.join[0], lane[1] ^ h.join[1]) ^ fold(lane[2] ^ h.join[2], lane[3] ^ h.join[3]);
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
    return {fold(first ^ x.mask[0], second ^ x.start[0]), fold(first ^ y.mask[0], second ^ y.start[0])};
}

inline Key hash_row(const HashSecret& secret, uint64_t model, uint64_t salt, const void* row, uint64_t n) {
    const HashHalf &x = secret.half[0], &y = secret.half[1];
    const uint8_t* p = static_cast<const uint8_t*>(row);
    Key d = n <= 16 ? hash_short(secret, p, n) : hash_long(secret, p, n);
    uint64_t mx = fold(model ^ x.model, salt ^ x.salt), my = fold(model ^ y.model, salt ^ y.salt);
    return {fold(mx ^ n, d.lo ^ x.end), fold(my ^ n, d.hi ^ y.end)};
}

}  // namespace clipper
