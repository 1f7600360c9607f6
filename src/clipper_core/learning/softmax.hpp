// Computes the softmax of several components at once; each has its own scores for the same labels.
#pragma once

#include <cstdint>

namespace clipper {

constexpr unsigned kLanes = 8;  // components; those that are not used have scores of 0
constexpr unsigned kHalf = kLanes / 2;
typedef double Lanes __attribute__((vector_size(kHalf * sizeof(double)), aligned(8), may_alias));
typedef std::int64_t LaneBits __attribute__((vector_size(kHalf * sizeof(double)), aligned(8)));

// exp(x) in place, for x of at most 0, within 2 units in the last place; below -708, that of -708.
//
// With x = n ln 2 + r it is 2^n (c + r) / (c - r), where c = r coth(r / 2), whose series has even
// powers only. exp(0) is 1.
inline void exp_lanes(Lanes& x) {
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: added, it leaves a whole number
    const Lanes low = Lanes{} - 708.0;
    x = x < low ? low : x;
    const Lanes shifted = x * 1.4426950408889634 + kRound;
    const Lanes n = shifted - kRound;
    const Lanes r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    const Lanes y = r * r;
    Lanes c = 1.0 / 604800 - y * (1.0 / 23950080 - y * (691.0 / 653837184000.0));
    c = 2.0 + y * (1.0 / 6 - y * (1.0 / 360 - y * (1.0 / 15120 - y * c)));
    const LaneBits power = (reinterpret_cast<LaneBits>(shifted) << 52) + (std::int64_t{1023} << 52);
    x = (1.0 + 2.0 * r / (c - r)) * reinterpret_cast<Lanes>(power);
}

// Replace the scores p[labels][kLanes], by component, by probabilities. rest[kLanes]: set to the
// probability of each of the `others` other labels, whose scores are 0.
inline void softmax_lanes(double* p, unsigned labels, double others, double* rest) {
    for (unsigned half = 0; half < kLanes; half += kHalf) {
        Lanes* row = reinterpret_cast<Lanes*>(p + half);
        Lanes high = {};
        for (unsigned i = 0; i < 2 * labels; i += 2) high = row[i] > high ? row[i] : high;
        Lanes other = -high;
        exp_lanes(other);
        Lanes total = others * other;
        for (unsigned i = 0; i < 2 * labels; i += 2) {
            Lanes x = row[i] - high;
            exp_lanes(x);
            row[i] = x;
            total += x;
        }
        for (unsigned i = 0; i < 2 * labels; i += 2) row[i] /= total;
        *reinterpret_cast<Lanes*>(rest + half) = other / total;
    }
}

}  // namespace clipper
