// The arithmetic of the optimizers, one row (or one dense variable) at a time.
//
// In memory, a row is w[n], then its slots, n floats each, so an update reads and writes
// consecutive cache lines. Each kernel is a plain loop that the compiler turns into vectors; -O2 of
// GCC 12 would not, hence the pragma; nor a root that may set errno, hence -fno-math-errno in
// setup.py, which no pragma can say; std::sqrt, compiled without the pragma, would be a call for
// each element, hence builtins. No fast-math: gradients are checked for NaN before a row is
// changed, and the result must not depend on how the compiler splits the loop, nor on the machine.
// A value that overflows stays at the largest float: an infinite weight or state would become NaN
// at the next step, and could be neither replicated nor restored.
//
// Sources: momentum and Nesterov as Sutskever et al. 2013 in the form of PyTorch; Adagrad, Duchi et
// al. 2011; Adam, Kingma and Ba 2015; AMSGrad, Reddi et al. 2018; FTRL-Proximal, McMahan et al.
// 2013, Algorithm 1; AdamW, Loshchilov and Hutter 2019, Algorithm 2; RMSprop, Tieleman and Hinton
// 2012 in the form of PyTorch; Lion, Chen et al. 2023, Algorithm 2; row-wise Adagrad, Mudigere et
// al. 2022, section 4.1.4, with the mean of a row's squares in place of each.
#pragma once

#include <cmath>
#include <cstdint>

namespace clipper {

enum OptimizerKind : std::uint32_t {
    SGD,
    MOMENTUM,
    NESTEROV,
    ADAGRAD,
    ADAM,
    AMSGRAD,
    FTRL,
    ADAMW,
    RMSPROP,
    LION,
    ROWWISE_ADAGRAD,
    OPTIMIZERS
};

struct Rule {
    std::uint32_t kind;
    std::uint32_t slots;          // floats of state per weight
    std::uint32_t row_slots;      // floats of state per row, after these
    float rate;
    float momentum;               // momentum, nesterov
    float beta1, beta2;           // adam, amsgrad, adamw, lion; beta2 is alpha of rmsprop
    float eps;                    // adagrad, adam, amsgrad, adamw, rmsprop
    float decay;                  // adamw, lion: of the weights, times the rate
    float l1, l2, beta;           // ftrl; l2 is weight decay of the others
    float start;                  // initial value of the first slot: adagrad, ftrl
    float clip_value, clip_norm;  // of a gradient's elements, and of the gradient of a row;
                                  // infinite for none
};

// of n weights
inline std::uint64_t state_floats(const Rule& r, std::uint64_t n) {
    return r.slots * n + r.row_slots;
}

struct Stride {  // factors of one step of a rule
    float rate;
    float first, second;  // adam: 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
    float gradient;       // clipping by norm
};

#pragma GCC push_options
#pragma GCC optimize("O3,no-trapping-math,fp-contract=off")

// Not templates: GCC 12 ignores the pragma where it instantiates them. Each is unrolled into the
// two calls of step_by, so that each bool is tested once.
#define CLIPPER_KERNEL inline __attribute__((always_inline))

using Floats = float* __restrict;
using Gradient = const float* __restrict;

// -- preparing a gradient
// ---------------------------------------------------------------------------

inline bool all_finite(const float* values, std::uint64_t n) {
    std::uint32_t bad = 0;
    for (std::uint64_t i = 0; i < n; ++i) {
        std::uint32_t bits;
        __builtin_memcpy(&bits, values + i, sizeof bits);
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return !bad;
}

inline void add_row(Floats sum, Gradient g, std::uint64_t n) {
    for (std::uint64_t i = 0; i < n; ++i) sum[i] += g[i];
}

CLIPPER_KERNEL float within(float g, float bound) {
    g = g < -bound ? -bound : g;
    return g > bound ? bound : g;
}

// As within(x, FLT_MAX), by comparing bits. If numbers are compared, GCC 12 turns each bound into
// branches, and these into four comparisons and three blends.
CLIPPER_KERNEL float finite(float x) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    bits -= (bits & 0x7fffffffu) == 0x7f800000u;
    __builtin_memcpy(&x, &bits, sizeof bits);
    return x;
}

// of the elements once they are clipped
inline float norm_within(Gradient g, float bound, std::uint64_t n) {
    float lanes[8] = {}, sum = 0.0f;
    std::uint64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; ++j) lanes[j] += within(g[i + j], bound) * within(g[i + j], bound);
    for (; i < n; ++i) sum += within(g[i], bound) * within(g[i], bound);
    for (float lane : lanes) sum += lane;
    return __builtin_sqrtf(sum);
}

// -- the rules
// -------------------------------------------------------------------------------------------------

// The gradient after clipping, scaling and L2.
CLIPPER_KERNEL float scaled_gradient(bool clips, const Rule& r, const Stride& s, float g, float w) {
    if (clips) g = finite(within(g, r.clip_value)) * s.gradient;
    return finite(g + r.l2 * w);
}

CLIPPER_KERNEL void sgd(bool clips, const Rule& r, const Stride& s, Floats w, Gradient g,
                        std::uint64_t n) {
    for (std::uint64_t i = 0; i < n; ++i)
        w[i] = finite(w[i] - s.rate * scaled_gradient(clips, r, s, g[i], w[i]));
}

CLIPPER_KERNEL void momentum(bool clips, bool nesterov, const Rule& r, const Stride& s, Floats w,
                             Floats v, Gradient g, std::uint64_t n) {
    for (std::uint64_t i = 0; i < n; ++i) {
        const float gi = scaled_gradient(clips, r, s, g[i], w[i]);
        const float vi = finite(r.momentum * v[i] + gi);
        v[i] = vi;
        w[i] = finite(w[i] - s.rate * (nesterov ? gi + r.momentum * vi : vi));
    }
}

CLIPPER_KERNEL void adagrad(bool clips, const Rule& r, const Stride& s, Floats w, Floats a,
                            Gradient g, std::uint64_t n) {
    for (std::uint64_t i = 0; i < n; ++i) {
        const float gi = scaled_gradient(clips, r, s, g[i], w[i]);
        const float ai = finite(a[i] + gi * gi);
        a[i] = ai;
        w[i] = finite(w[i] - s.rate * gi / (__builtin_sqrtf(ai) + r.eps));
    }
}

CLIPPER_KERNEL void adam(bool clips, bool keeps_top, bool decays, const Rule& r, const Stride& s,
                         Floats w, Floats m, Floats v, Floats top, Gradient g, std::uint64_t n) {
    const float rate = finite(s.rate * s.first), decay = finite(s.rate * r.decay);
    for (std::uint64_t i = 0; i < n; ++i) {
        const float gi = scaled_gradient(clips, r, s, g[i], w[i]);
        if (decays) w[i] = finite(w[i] - decay * w[i]);
        const float mi = finite(m[i] + (1.0f - r.beta1) * (gi - m[i]));
        const float vi = finite(r.beta2 * v[i] + (1.0f - r.beta2) * gi * gi);
        m[i] = mi;
        v[i] = vi;
        float under = vi;
        if (keeps_top) top[i] = under = top[i] > vi ? top[i] : vi;
        w[i] = finite(w[i] - rate * mi / (__builtin_sqrtf(under) * s.second + r.eps));
    }
}

CLIPPER_KERNEL void rmsprop(bool clips, const Rule& r, const Stride& s, Floats w, Floats v,
                            Gradient g, std::uint64_t n) {
    for (std::uint64_t i = 0; i < n; ++i) {
        const float gi = scaled_gradient(clips, r, s, g[i], w[i]);
        const float vi = finite(r.beta2 * v[i] + (1.0f - r.beta2) * gi * gi);
        v[i] = vi;
        w[i] = finite(w[i] - s.rate * gi / (__builtin_sqrtf(vi) + r.eps));
    }
}

CLIPPER_KERNEL void lion(bool clips, const Rule& r, const Stride& s, Floats w, Floats m, Gradient g,
                         std::uint64_t n) {
    const float decay = finite(s.rate * r.decay);
    for (std::uint64_t i = 0; i < n; ++i) {
        const float gi = scaled_gradient(clips, r, s, g[i], w[i]);
        const float mixed = r.beta1 * m[i] + (1.0f - r.beta1) * gi;
        const float sign = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : 0.0f;
        w[i] = finite(finite(w[i] - decay * w[i]) - s.rate * sign);
        m[i] = finite(r.beta2 * m[i] + (1.0f - r.beta2) * gi);
    }
}

CLIPPER_KERNEL void rowwise_adagrad(bool clips, const Rule& r, const Stride& s, Floats w, Floats a,
                                    Gradient g, std::uint64_t n) {
    float sum = 0.0f;
    for (std::uint64_t i = 0; i < n; ++i) {
        const float gi = scaled_gradient(clips, r, s, g[i], w[i]);
        sum += gi * gi;
    }
    a[0] = finite(a[0] + finite(sum / float(n)));
    const float under = __builtin_sqrtf(a[0]) + r.eps;
    for (std::uint64_t i = 0; i < n; ++i)
        w[i] = finite(w[i] - s.rate * scaled_gradient(clips, r, s, g[i], w[i]) / under);
}

CLIPPER_KERNEL void ftrl(bool clips, const Rule& r, const Stride& s, Floats w, Floats n2, Floats z,
                         Gradient g, std::uint64_t n) {
    const float per_rate = 1.0f / s.rate;
    Rule plain = r;
    plain.l2 = 0.0f;  // it is in the closed form below
    for (std::uint64_t i = 0; i < n; ++i) {
        const float gi = scaled_gradient(clips, plain, s, g[i], w[i]);
        const float before = __builtin_sqrtf(n2[i]);
        const float ni = finite(n2[i] + gi * gi), after = __builtin_sqrtf(ni);
        const float zi =
            finite(finite(z[i] + gi) - finite(finite((after - before) * per_rate) * w[i]));
        n2[i] = ni;
        z[i] = zi;
        const float beyond = __builtin_fabsf(zi) - r.l1;
        const float pulled =
            -__builtin_copysignf(beyond, zi) / ((r.beta + after) * per_rate + r.l2);
        w[i] = beyond > 0.0f ? finite(pulled) : 0.0f;
    }
}

CLIPPER_KERNEL void step_by(bool clips, const Rule& r, const Stride& s, float* w, float* slots,
                            std::uint64_t apart, const float* g, std::uint64_t n) {
    switch (r.kind) {
        case SGD: return sgd(clips, r, s, w, g, n);
        case MOMENTUM: return momentum(clips, false, r, s, w, slots, g, n);
        case NESTEROV: return momentum(clips, true, r, s, w, slots, g, n);
        case ADAGRAD: return adagrad(clips, r, s, w, slots, g, n);
        case ADAM: return adam(clips, false, false, r, s, w, slots, slots + apart, nullptr, g, n);
        case ADAMW: return adam(clips, false, true, r, s, w, slots, slots + apart, nullptr, g, n);
        case RMSPROP: return rmsprop(clips, r, s, w, slots, g, n);
        case LION: return lion(clips, r, s, w, slots, g, n);
        case ROWWISE_ADAGRAD: return rowwise_adagrad(clips, r, s, w, slots, g, n);
        case AMSGRAD:
            return adam(clips, true, false, r, s, w, slots, slots + apart, slots + 2 * apart, g,
                        n);
        default: return ftrl(clips, r, s, w, slots, slots + apart, g, n);
    }
}

// Update w[n] and its slots, each `apart` floats after the one before, by the gradient g[n].
inline void optimizer_step(const Rule& r, const Stride& step, float* w, float* slots,
                           std::uint64_t apart, const float* g, std::uint64_t n) {
    if (!(r.clip_value < INFINITY) && !(r.clip_norm < INFINITY))
        return step_by(false, r, step, w, slots, apart, g, n);
    Stride clipped = step;
    const float norm = r.clip_norm < INFINITY ? norm_within(g, r.clip_value, n) : 0.0f;
    clipped.gradient = norm > r.clip_norm ? r.clip_norm / norm : 1.0f;
    step_by(true, r, clipped, w, slots, apart, g, n);
}

#undef CLIPPER_KERNEL
#pragma GCC pop_options

}  // namespace clipper
