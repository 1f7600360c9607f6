// Random projections of a float row, quantized: near rows have equal cells with a probability that
// falls with distance.
//
// Cell i of row x is floor((a_i . x) / width + b_i), a_i drawn from the normal distribution and b_i
// uniformly from [0, 1): the p-stable hash of Datar, Immorlica, Indyk and Mirrokni (SoCG 2004). Two
// rows at Euclidean distance r << width share one cell with probability about 1 - 0.8 r / width,
// and all of k cells with that to the power of k.
//
// Eight projections are summed side by side, one element of the row at a time: the sums of equal
// rows are then equal to the last bit, however the compiler vectorizes the loop. Two sets of sums
// hide the latency of an addition.
#pragma once

#include <cmath>

#include "runtime/machine.hpp"

namespace clipper {

constexpr unsigned kSide = 8;                 // projections summed side by side
constexpr unsigned kCellsMax = 32;
constexpr float kCellEnd = 4194304.0f;        // 2^22: above that, a float cannot represent the
                                              // position within a cell

struct Projection {
    float* planes;                            // [count / 8][n + 1][8]: a_i / width; last b_i
    std::uint64_t n;                          // elements of a row
    std::uint32_t count;                      // cells; a multiple of 8
    bool wide;                                // elements are f64, not f32
};

inline double unit_draw(std::uint64_t* state) {  // splitmix64 -> (0, 1]
    std::uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return double((z >> 11) + 1) * (1.0 / 9007199254740992.0);
}
inline double normal_draw(std::uint64_t* state) {  // Box and Muller
    double radius = std::sqrt(-2.0 * std::log(unit_draw(state)));
    return radius * std::cos(6.283185307179586 * unit_draw(state));
}

inline bool projection_draw(Projection* p, double width, std::uint64_t seed) {
    std::uint64_t floats = p->count * (p->n + 1);
    p->planes = static_cast<float*>(std::malloc(floats * sizeof(float)));
    if (!p->planes) return false;
    for (std::uint64_t i = 0; i < floats; ++i) {
        bool offset = i / kSide % (p->n + 1) == p->n;
        p->planes[i] = float(offset ? 1.0 - unit_draw(&seed) : normal_draw(&seed) / width);
    }
    return true;
}

template <class T>
inline void project(const Projection& p, const T* row, float* sums) {
    typedef float Side __attribute__((vector_size(kSide * sizeof(float)), aligned(4)));
    const float* plane = p.planes;
    for (unsigned at = 0; at < p.count; at += kSide, plane += kSide * (p.n + 1)) {
        Side even = *reinterpret_cast<const Side*>(plane + kSide * p.n), odd = {};
        std::uint64_t i = 0;
        for (; i + 1 < p.n; i += 2) {
            even += float(row[i]) * *reinterpret_cast<const Side*>(plane + kSide * i);
            odd += float(row[i + 1]) * *reinterpret_cast<const Side*>(plane + kSide * i + kSide);
        }
        if (i < p.n) even += float(row[i]) * *reinterpret_cast<const Side*>(plane + kSide * i);
        *reinterpret_cast<Side*>(sums + at) = even + odd;
    }
}

// False: the row has NaN or infinities, or is too large for the width; it has no cells.
inline bool projection_cells(const Projection& p, const void* row, std::int32_t* cells) {
    float sums[kCellsMax];
    if (p.wide) project(p, static_cast<const double*>(row), sums);
    else project(p, static_cast<const float*>(row), sums);
    for (unsigned i = 0; i < p.count; ++i) {
        if (!(std::fabs(sums[i]) < kCellEnd)) return false;
        cells[i] = std::int32_t(std::floor(sums[i]));
    }
    return true;
}

}  // namespace clipper
