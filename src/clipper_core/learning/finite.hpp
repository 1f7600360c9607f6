// Looks for NaN and infinities in an array of doubles, 16 at a time.
#pragma once

#include <cstddef>

namespace clipper {

typedef double FourDoubles __attribute__((vector_size(32), aligned(8), may_alias));

// NaN and infinities times 0 are NaN, and stay so in a sum. Several sums, so that an addition does
// not wait for the one before.
inline bool doubles_are_finite(const double* at, std::size_t n) {
    FourDoubles sums[4] = {};
    std::size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const FourDoubles* four = reinterpret_cast<const FourDoubles*>(at + i);
        for (unsigned j = 0; j < 4; j++) sums[j] += four[j] * 0.0;
    }
    double rest = 0.0;
    for (; i < n; i++) rest += at[i] * 0.0;
    const FourDoubles all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return (all[0] + all[1]) + (all[2] + all[3]) + rest == 0.0;
}

}  // namespace clipper
