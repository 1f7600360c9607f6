// Functions to prefetch a row, and to convert its floats to the requested type.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "params/row_index.hpp"

namespace clipper {

// Each step is a few moves; a memcpy of so few bytes would be a call.
inline void copy_row(float* __restrict to, const float* __restrict from, std::uint32_t n) {
    for (; n >= 16; n -= 16, to += 16, from += 16) __builtin_memcpy(to, from, 64);
    for (; n >= 4; n -= 4, to += 4, from += 4) __builtin_memcpy(to, from, 16);
    for (; n; --n) *to++ = *from++;
}

// Prefetch the first cache lines of a row; for longer rows, the processor's own prefetcher
// continues.
inline void fetch_row(const float* row, std::size_t bytes, bool to_write) {
    const char* at = reinterpret_cast<const char*>(row);
    const char* end = at + (bytes < 1024 ? bytes : 1024);
    for (; at < end; at += 64) {
        if (to_write) fetch_to_write(at);
        else __builtin_prefetch(at);
    }
    if (!to_write) __builtin_prefetch(end - 1);
}

inline std::uint16_t f16_of(float x) {  // to nearest, ties to even; too large is infinite
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const std::uint32_t sign = (bits >> 16) & 0x8000u, mag = bits & 0x7fffffffu;
    if (mag >= 0x7f800000u)
        return std::uint16_t(sign | 0x7c00u | (mag > 0x7f800000u ? 0x200u : 0u));
    if (mag >= 0x477ff000u) return std::uint16_t(sign | 0x7c00u);
    if (mag < 0x38800000u) {  // below the least normal one: let the float unit round, at the place
                              // where its last bit is ours
        float tiny;
        std::memcpy(&tiny, &mag, sizeof tiny);
        tiny += 0.5f;
        std::memcpy(&bits, &tiny, sizeof bits);
        return std::uint16_t(sign | (bits - 0x3f000000u));
    }
    return std::uint16_t(sign | ((mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13));
}

inline std::uint16_t bf16_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return std::uint16_t((bits >> 16) | 0x40u);
    return std::uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#pragma GCC push_options
#pragma GCC optimize("O3,no-math-errno,no-trapping-math")

inline void row_to_f16(const float* row, std::uint32_t n, std::uint16_t* out) {
    for (std::uint32_t i = 0; i < n; ++i) out[i] = f16_of(row[i]);
}

inline void row_to_bf16(const float* row, std::uint32_t n, std::uint16_t* out) {
    for (std::uint32_t i = 0; i < n; ++i) out[i] = bf16_of(row[i]);
}

// Quantize a row of n floats. Return the factor to multiply the integers by.
inline float row_to_i8(const float* row, std::uint32_t n, std::int8_t* out) {
    float top = 0.0f;
    for (std::uint32_t i = 0; i < n; ++i) top = std::fabs(row[i]) > top ? std::fabs(row[i]) : top;
    const float per = top > 0.0f ? 127.0f / top : 0.0f;
    for (std::uint32_t i = 0; i < n; ++i)
        out[i] = std::int8_t(row[i] * per + (row[i] < 0.0f ? -0.5f : 0.5f));
    return top / 127.0f;
}

#pragma GCC pop_options

}  // namespace clipper
