// Passes over pairs of doubles: a weight, and the sum of its squared gradients. Both are 0 until the
// weight has learned. Two pairs at a time.
#pragma once

#include <cstdint>

namespace clipper {

typedef double TwoPairs __attribute__((vector_size(32), aligned(8), may_alias));
typedef std::int64_t PairBits __attribute__((vector_size(32)));

// Return the sum of the weights. n: of pairs, a multiple of 4. learned: set to how many weights have
// learned.
inline double weights_sum(const double* pair, unsigned n, unsigned* learned) {
    TwoPairs one = {}, other = {};
    PairBits in_one = {}, in_other = {};
    for (unsigned i = 0; i < 2 * n; i += 8) {
        const TwoPairs* two = reinterpret_cast<const TwoPairs*>(pair + i);
        const TwoPairs a = two[0], b = two[1];
        one += a;
        other += b;
        in_one -= a > 0.0;
        in_other -= b > 0.0;
    }
    in_one += in_other;
    *learned = static_cast<unsigned>(in_one[1] + in_one[3]);
    one += other;
    return one[0] + one[2];
}

// Multiply the sums of squared gradients by `share`.
inline void sums_scaled(double* pair, unsigned n, double share) {
    const TwoPairs factor = {1.0, share, 1.0, share};
    unsigned i = 0;
    for (; i + 4 <= 2 * n; i += 4) *reinterpret_cast<TwoPairs*>(pair + i) *= factor;
    if (i < 2 * n) pair[i + 1] *= share;
}

}  // namespace clipper
