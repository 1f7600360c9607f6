// Weights of a row as a table stores them: f32, or f16, bf16 or i8 to save memory.
//
// Stored values can be represented exactly in f32, so a row that is copied as f32 is stored with
// the same bits. The weights of an i8 row are multiples of one power of two, the least by which the
// largest is within 127: as long as this power does not change, a weight without a gradient does
// not change either.
//
// An update is rounded up or down at random, with the probability that makes the mean exact. With
// rounding to nearest, steps below half of the last bit would have no effect. The random numbers
// depend only on the row, the step and the index, so a repeated update has the same bits.
//
// Sources: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3, on
// stochastic rounding; the exponent for a row, block floating point, Wilkinson 1963.
#pragma once

#include <cstdint>
#include <cstring>

#include "params/embedding.hpp"
#include "params/initializer.hpp"

namespace clipper {

enum StoredAs : std::uint32_t { STORED_F32, STORED_F16, STORED_BF16, STORED_I8 };

// Size of n weights, which the state follows. For i8, their factor comes first.
inline std::uint32_t stored_bytes(std::uint32_t as, std::uint32_t n) {
    if (as == STORED_F32) return 4 * n;
    return as == STORED_I8 ? 4 + ((n + 3) & ~3u) : (2 * n + 3) & ~3u;
}

struct Rounding {
    bool nearest;
    std::uint32_t seed;  // of the random numbers
};

inline Rounding to_nearest() { return {true, 0}; }

inline Rounding at_random(std::uint64_t key, std::int64_t id, std::uint64_t step) {
    const std::uint64_t row = mix64(key ^ mix64(std::uint64_t(id) + 0x9e3779b97f4a7c15u));
    return {false, std::uint32_t(mix64(row + step * 0x9e3779b97f4a7c15u))};
}

#pragma GCC push_options
#pragma GCC optimize("O3,no-math-errno,no-trapping-math,fp-contract=off")
#define CLIPPER_INLINE inline __attribute__((always_inline))

CLIPPER_INLINE std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

CLIPPER_INLINE float float_of(std::uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

CLIPPER_INLINE std::uint32_t drawn_bits(const Rounding& by, std::uint32_t place) {
    return mix32(place * 0x9e3779b9u + by.seed);
}

// Return the whole number below or above x; |x| < 2^23. The random number has 24 bits.
CLIPPER_INLINE std::int32_t whole_near(float x, std::uint32_t draw) {
    const std::int32_t cut = std::int32_t(x), below = cut - (x < float(cut));
    return below + (float(std::int32_t(draw >> 8)) * 0x1p-24f < x - float(below));
}

// -- f16 and bf16: values that are too large become the largest number
// -------------------------------------------------------------------------------------------------

CLIPPER_INLINE std::uint16_t f16_near(float x, std::uint32_t draw) {
    const std::uint32_t bits = bits_of(x), mag = bits & 0x7fffffffu;
    const float size = float_of(mag);
    const std::uint32_t normal = (mag - 0x38000000u + (draw >> 19)) >> 13;
    const std::uint32_t tiny =
        std::uint32_t(whole_near((size < 0x1p-13f ? size : 0x1p-13f) * 0x1p24f, draw));
    const std::uint32_t near = mag < 0x38800000u ? tiny : normal;
    return std::uint16_t(((bits >> 16) & 0x8000u) | (near < 0x7bffu ? near : 0x7bffu));
}

CLIPPER_INLINE std::uint16_t bf16_near(float x, std::uint32_t draw) {
    const std::uint32_t bits = bits_of(x), near = ((bits & 0x7fffffffu) + (draw >> 16)) >> 16;
    return std::uint16_t(((bits >> 16) & 0x8000u) | (near < 0x7f7fu ? near : 0x7f7fu));
}

CLIPPER_INLINE std::uint16_t finite_half(std::uint16_t half, std::uint16_t largest) {
    const std::uint16_t mag = half & 0x7fffu;
    return std::uint16_t((half & 0x8000u) | (mag < largest ? mag : largest));
}

CLIPPER_INLINE float float_of_f16(std::uint16_t half) {
    const std::uint32_t mag = half & 0x7fffu;
    const std::uint32_t normal = (mag << 13) + 0x38000000u;
    const std::uint32_t tiny = bits_of(float(std::int32_t(mag)) * 0x1p-24f);
    return float_of((std::uint32_t(half & 0x8000u) << 16) | (mag < 0x400u ? tiny : normal));
}

inline void f16_put(const float* __restrict w, std::uint32_t n, std::uint16_t* __restrict to,
                    const Rounding by) {
    if (by.nearest)
        for (std::uint32_t i = 0; i < n; ++i) to[i] = finite_half(f16_of(w[i]), 0x7bffu);
    else
        for (std::uint32_t i = 0; i < n; ++i) to[i] = f16_near(w[i], drawn_bits(by, i));
}

inline void bf16_put(const float* __restrict w, std::uint32_t n, std::uint16_t* __restrict to,
                     const Rounding by) {
    if (by.nearest)
        for (std::uint32_t i = 0; i < n; ++i) to[i] = finite_half(bf16_of(w[i]), 0x7f7fu);
    else
        for (std::uint32_t i = 0; i < n; ++i) to[i] = bf16_near(w[i], drawn_bits(by, i));
}

// -- of i8
// -------------------------------------------------------------------------------------------------

// The exponent's bits of the least power of two that the largest of them is at most 127 of.
inline std::uint32_t i8_exponent(const float* w, std::uint32_t n) {
    std::uint32_t top = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
        const std::uint32_t mag = bits_of(w[i]) & 0x7fffffffu;
        top = mag > top ? mag : top;
    }
    const std::uint32_t power = (top + 0x1ffffu) >> 23;  // 127 is 1.984375 x 2^6
    return power <= 7 ? 1 : power - 6 > 248 ? 248 : power - 6;
}

CLIPPER_INLINE std::int8_t i8_near(float x, std::uint32_t draw) {
    return std::int8_t(whole_near(x < -127.0f ? -127.0f : x > 127.0f ? 127.0f : x, draw));
}

inline void i8_put(const float* __restrict w, std::uint32_t n, std::uint8_t* __restrict to,
                   const Rounding by) {
    const std::uint32_t power = i8_exponent(w, n);
    const float scale = float_of(power << 23), per = float_of((254 - power) << 23);
    std::int8_t* __restrict each = reinterpret_cast<std::int8_t*>(to + 4);
    std::memcpy(to, &scale, 4);
    if (by.nearest)
        for (std::uint32_t i = 0; i < n; ++i) each[i] = i8_near(w[i] * per, 0x7fffff00u);
    else
        for (std::uint32_t i = 0; i < n; ++i) each[i] = i8_near(w[i] * per, drawn_bits(by, i));
}

// -- of any
// -------------------------------------------------------------------------------------------------

inline void stored_put(std::uint32_t as, const float* w, std::uint32_t n, void* to,
                       const Rounding& by) {
    if (as == STORED_F16) f16_put(w, n, static_cast<std::uint16_t*>(to), by);
    else if (as == STORED_BF16) bf16_put(w, n, static_cast<std::uint16_t*>(to), by);
    else if (as == STORED_I8) i8_put(w, n, static_cast<std::uint8_t*>(to), by);
    else copy_row(static_cast<float*>(to), w, n);
}

inline void stored_get(std::uint32_t as, const void* from, std::uint32_t n, float* w) {
    const std::uint16_t* halves = static_cast<const std::uint16_t*>(from);
    const std::int8_t* each = static_cast<const std::int8_t*>(from) + 4;
    float scale;
    switch (as) {
        case STORED_F16:
            for (std::uint32_t i = 0; i < n; ++i) w[i] = float_of_f16(halves[i]);
            return;
        case STORED_BF16:
            for (std::uint32_t i = 0; i < n; ++i) w[i] = float_of(std::uint32_t(halves[i]) << 16);
            return;
        case STORED_I8:
            std::memcpy(&scale, from, 4);
            for (std::uint32_t i = 0; i < n; ++i) w[i] = scale * float(each[i]);
            return;
        default:
            copy_row(w, static_cast<const float*>(from), n);
    }
}

// Read the stored weights of i8. Return their factor.
inline float stored_i8(const void* from, std::uint32_t n, std::int8_t* out) {
    float scale;
    std::memcpy(&scale, from, 4);
    std::memcpy(out, static_cast<const std::uint8_t*>(from) + 4, n);
    return scale;
}

#undef CLIPPER_INLINE
#pragma GCC pop_options

}  // namespace clipper
