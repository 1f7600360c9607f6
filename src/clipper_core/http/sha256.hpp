// SHA-256 of a text that is in memory as a whole. The time depends on its length alone: no branch
// and no address depends on a byte of it, so it may be a secret.
//
// Source: FIPS 180-4, sections 4.1.2, 4.2.2, 5.1.1, 5.3.3 and 6.2.2.
//
// Threads: any (a pure function).
#pragma once

#include <cstdint>
#include <cstring>

namespace clipper {

constexpr unsigned SHA256_BYTES = 32;
constexpr unsigned SHA256_BLOCK_BYTES = 64;

inline uint32_t sha256_rotated(uint32_t x, unsigned bits) {
    return (x >> bits) | (x << (32 - bits));
}

inline uint32_t sha256_load(const unsigned char* p) {
    return uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | p[3];
}

inline void sha256_store(uint32_t x, unsigned char* p) {
    p[0] = (unsigned char) (x >> 24);
    p[1] = (unsigned char) (x >> 16);
    p[2] = (unsigned char) (x >> 8);
    p[3] = (unsigned char) x;
}

// Add a block of 64 bytes to the state.
inline void sha256_add(uint32_t* state, const unsigned char* block) {
    static constexpr uint32_t constants[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
        0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
        0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
        0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
        0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
        0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
        0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
        0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
        0xc67178f2};
    uint32_t words[64];
    for (unsigned i = 0; i < 16; ++i) {
        words[i] = sha256_load(block + 4 * i);
    }
    for (unsigned i = 16; i < 64; ++i) {
        const uint32_t a = words[i - 15], b = words[i - 2];
        words[i] = words[i - 16] + words[i - 7] +
                   (sha256_rotated(a, 7) ^ sha256_rotated(a, 18) ^ (a >> 3)) +
                   (sha256_rotated(b, 17) ^ sha256_rotated(b, 19) ^ (b >> 10));
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (unsigned i = 0; i < 64; ++i) {
        const uint32_t one =
            h + constants[i] + words[i] + ((e & f) ^ (~e & g)) +
            (sha256_rotated(e, 6) ^ sha256_rotated(e, 11) ^ sha256_rotated(e, 25));
        const uint32_t two =
            ((a & b) ^ (a & c) ^ (b & c)) +
            (sha256_rotated(a, 2) ^ sha256_rotated(a, 13) ^ sha256_rotated(a, 22));
        h = g;
        g = f;
        f = e;
        e = d + one;
        d = c;
        c = b;
        b = a;
        a = one + two;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
}

// Write the digest of n bytes, 32 bytes, to `digest`.
inline void sha256(const unsigned char* text, uint64_t n, unsigned char* digest) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    const uint64_t bits = 8 * n;
    for (; n >= SHA256_BLOCK_BYTES; n -= SHA256_BLOCK_BYTES, text += SHA256_BLOCK_BYTES) {
        sha256_add(state, text);
    }
    unsigned char tail[2 * SHA256_BLOCK_BYTES] = {};
    if (n) {
        std::memcpy(tail, text, n);
    }
    tail[n] = 0x80;
    const unsigned size = n < SHA256_BLOCK_BYTES - 8 ? SHA256_BLOCK_BYTES : 2 * SHA256_BLOCK_BYTES;
    sha256_store(uint32_t(bits >> 32), tail + size - 8);
    sha256_store(uint32_t(bits), tail + size - 4);
    for (unsigned at = 0; at < size; at += SHA256_BLOCK_BYTES) {
        sha256_add(state, tail + at);
    }
    for (unsigned i = 0; i < 8; ++i) {
        sha256_store(state[i], digest + 4 * i);
    }
}

// Return whether n bytes are equal, in a time that depends on n alone.
inline bool equal_in_constant_time(const unsigned char* a, const unsigned char* b, uint64_t n) {
    unsigned char differing = 0;
    for (uint64_t i = 0; i < n; ++i) {
        differing = (unsigned char) (differing | (a[i] ^ b[i]));
    }
    return differing == 0;
}

}  // namespace clipper
