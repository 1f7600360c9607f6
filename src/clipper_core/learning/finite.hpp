// Looks for NaN and infinities in an array of doubles, 16 at a time, and copies it on the way.
#pragma once

#include <cstddef>

namespace clipper {

typedef double FourDoubles __attribute__((vector_size(32), aligned(8), may_alias));

// NaN and infinities times 0 are NaN, and stay so in a sum. Several sums, so that an addition does
// not wait for the one before; each has a name of its own, which keeps it in a register.
template <bool kCopies>
inline bool finite_pass(double* to, const double* from, std::size_t n) {
    FourDoubles first = {}, second = {}, third = {}, fourth = {};
    double rest = 0.0;
    std::size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const FourDoubles* four = reinterpret_cast<const FourDoubles*>(from + i);
        const FourDoubles a = four[0], b = four[1], c = four[2], d = four[3];
        if (kCopies) {
            FourDoubles* copy = reinterpret_cast<FourDoubles*>(to + i);
            copy[0] = a;
            copy[1] = b;
            copy[2] = c;
            copy[3] = d;
        }
        first += a * 0.0;
        second += b * 0.0;
        third += c * 0.0;
        fourth += d * 0.0;
    }
    for (; i < n; i++) {
        if (kCopies) to[i] = from[i];
        rest += from[i] * 0.0;
    }
    const FourDoubles all = (first + second) + (third + fourth);
    return (all[0] + all[1]) + (all[2] + all[3]) + rest == 0.0;
}

inline bool doubles_are_finite(const double* at, std::size_t n) {
    return finite_pass<false>(nullptr, at, n);
}

// Copy an array. Return whether its numbers are finite.
inline bool doubles_are_copied_finite(double* to, const double* from, std::size_t n) {
    return finite_pass<true>(to, from, n);
}

}  // namespace clipper
