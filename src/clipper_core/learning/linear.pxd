# Linear models of the selection policies: how good each model is for queries of given features
# (LinUCB, LinTS), and how to blend the numbers that several models predict (ridge regression).
# Pure: no clock, no memory, no chance but the caller's uniform.
#
# A contextual row is one model's: the Cholesky factor L of (ridge I + sum of x x'), lower triangle
# by rows, then the sum of reward x. A blend is one matrix of k + 1 rows, the k models and the
# label: mean, count, then the sums of products of what lies around the means. Both hold sufficient
# statistics only: what two servers learned apart is added up.
#
# Threads: any; the rows belong to the caller.
cimport numpy as cnp

from clipper_core.runtime.machine cimport u32, u64

cdef enum:
    FEATURES_MAX = 33           # 32 of the query's, and the constant 1
    BLENDED_MAX = 64            # models
    TRIANGLE_MAX = 2080         # of so many

cdef struct ContextRule:
    double width                # of the confidence bound, or of the draw, in standard deviations
    double discount             # of what was known, an observation
    double ridge
    bint sampled                # LinTS: a draw instead of the upper bound

cdef u32 context_columns(u32 d) noexcept nogil
cdef u32 context_size(cnp.npy_intp columns) noexcept nogil
# ^ d of rows with so many columns; 0 if there is none
cdef cnp.ndarray context_widened(cnp.ndarray rows, u32 d, double ridge)
# ^ rows that have the constant only, with features that nothing is known of
cdef u32 context_choose(const ContextRule* rule, const double* rows, u32 k, u32 d, const double* x,
                        double uniform) noexcept nogil
# ^ the model to query
cdef void context_learn(const ContextRule* rule, double* row, u32 d, const double* x, double reward,
                        double weight,
                        u64 turn) noexcept nogil
# ^ one model's row; reward NaN: only time passes.  turn: the number of the observation

cdef void blend_learn(double* rows, u32 k, double ridge, double discount, double* z, u64 n,
                      double weight) noexcept nogil
# ^ z[n, k + 1]: outputs and the label, by element; NaN, where no prediction arrived, is filled in
cdef double blend_weights(const double* rows, u32 k, double ridge, double* w) noexcept nogil
# ^ w[k + 1], the last one the constant; -> standard deviation of what they leave unexplained
cdef void blend_fill(const double* rows, u32 k, double ridge, double* z, u64 n) noexcept nogil
# ^ replaces NaN by the outputs that are expected, given those that arrived
