// The initial value of a row: a pure function of a key (of the table), the row's id, and the index
// in the row.
//
// So a row need not be stored before its first update, and is the same on any shard, in any order
// of arrival, and after any restart. An element is generated from a counter, not from a stream: two
// rounds of a 32-bit finalizer over its place, with half of the row's key before each, in lanes
// that the compiler makes vectors of (64 floats in some 20 ns).
//
// Sources: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", on drawing by
// counter; the finalizer, Wellons' `lowbias32`; the inverse of the normal distribution, Giles 2010,
// "Approximating the erfinv function", single precision; Glorot and Bengio 2010.
#pragma once

#include <cmath>
#include <cstdint>

namespace clipper {

enum StartKind : std::uint32_t { CONSTANT, UNIFORM, NORMAL, TRUNCATED, STARTS };

struct Start {
    std::uint32_t kind;
    float middle, width;  // of a uniform: its centre and half its width; of a normal: mean and
                          // standard deviation
};

inline std::uint64_t mix64(std::uint64_t x) {  // the finalizer of SplitMix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

#pragma GCC push_options
#pragma GCC optimize("O3,no-math-errno,no-trapping-math,fp-contract=off")

inline std::uint32_t mix32(std::uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// In (-1, 1), symmetric, never 0 nor an end: 2^24 values.
inline float drawn(std::uint32_t low, std::uint32_t high, std::uint32_t place) {
    const std::uint32_t bits = mix32(mix32(place * 0x9e3779b9u + low) ^ high) >> 8;
    return float(std::int32_t(bits) * 2 - 0xffffff) * 0x1p-24f;
}

// ln x of a normal x > 0, to some 1e-7 relative: its own, since two libraries may differ in the
// last bit.
inline float ln(float x) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    // x = m 2^power, m in [sqrt(1/2), sqrt(2))
    const std::int32_t power = std::int32_t(bits - 0x3f3504f3u) >> 23;
    bits -= std::uint32_t(power) << 23;
    float m;
    __builtin_memcpy(&m, &bits, sizeof m);
    const float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    return float(power) * 0.69314718f +
           2.0f * s * (1.0f + z * (0.33333333f + z * (0.2f + z * (0.14285714f + z * 0.11111111f))));
}

// x standard deviations from the mean, for a place in (-1, 1) of the distribution.
inline float normal_at(float place) {
    const float central[9] = {2.81022636e-08f,  3.43273939e-07f, -3.5233877e-06f,
                              -4.39150654e-06f, 0.00021858087f,  -0.00125372503f,
                              -0.00417768164f,  0.246640727f,    1.50140941f};
    const float tail[9] = {-0.000200214257f, 0.000100950558f, 0.00134934322f,
                           -0.00367342844f,  0.00573950773f,  -0.0076224613f,
                           0.00943887047f,   1.00167406f,     2.83297682f};
    const float w = -ln((1.0f - place) * (1.0f + place));
    const bool near = w < 5.0f;
    const float at = near ? w - 2.5f : std::sqrt(w) - 3.0f;
    float p = near ? central[0] : tail[0];
    for (int i = 1; i < 9; ++i) p = (near ? central[i] : tail[i]) + p * at;
    return 1.41421356f * p * place;
}

inline void start_row(const Start& start, std::uint64_t key, std::int64_t id, float* __restrict row,
                      std::uint32_t n) {
    const std::uint64_t own = mix64(key ^ mix64(std::uint64_t(id) + 0x9e3779b97f4a7c15u));
    const std::uint32_t low = std::uint32_t(own), high = std::uint32_t(own >> 32);
    const float middle = start.middle, width = start.width;
    constexpr float kTwoSigma = 0.95449974f;  // of a normal distribution lies within two standard
                                              // deviations
    switch (start.kind) {
        case UNIFORM:
            for (std::uint32_t i = 0; i < n; ++i) row[i] = middle + width * drawn(low, high, i);
            return;
        case NORMAL:
            for (std::uint32_t i = 0; i < n; ++i)
                row[i] = middle + width * normal_at(drawn(low, high, i));
            return;
        case TRUNCATED:
            for (std::uint32_t i = 0; i < n; ++i)
                row[i] = middle + width * normal_at(kTwoSigma * drawn(low, high, i));
            return;
        default:
            for (std::uint32_t i = 0; i < n; ++i) row[i] = middle;
    }
}

#pragma GCC pop_options

}  // namespace clipper
