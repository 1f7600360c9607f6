# Linear models of the selection policies: how good each model is for queries of given features
# (LinUCB, LinTS), and how to blend the numbers that several models predict (ridge regression).
# Pure: no clock, no allocation, no randomness except the caller's uniform number.
#
# A contextual row belongs to one model: the Cholesky factor L of (ridge I + sum of x x'), lower
# triangle by rows, then the sum of reward x. A blend is one matrix of k + 1 rows, the k models and
# the label: mean, count, then the sums of products of deviations from the means. Both have only
# sufficient statistics, so what two servers have learned separately can be added.
#
# Threads: any; the rows belong to the caller.
cimport numpy as cnp

from clipper_core.runtime.machine cimport u32, u64

cdef enum:
    FEATURES_MAX = 33           # 32 of the query's, and the constant 1
    BLENDED_MAX = 64            # models
    TRIANGLE_MAX = 2080         # of so many

cdef struct ContextRule:
    double width                # of the confidence bound, or of the sample, in standard deviations
    double discount             # factor of what was learned, per observation
    double ridge
    bint sampled                # LinTS: a sample instead of the upper bound

cdef u32 context_columns(u32 d) noexcept nogil
# Return d for rows with this number of columns; 0 if no d fits.
cdef u32 context_size(cnp.npy_intp columns) noexcept nogil
# Return a copy of rows that have the constant only, with d features added, of which nothing is
# learned.
cdef cnp.ndarray context_widened(cnp.ndarray rows, u32 d, double ridge)
# Return the index of the model to query, of k models. places: of their rows; NULL: the first k.
cdef u32 context_choose(const ContextRule* rule, const double* rows, const u32* places, u32 k,
                        u32 d, const double* x, double uniform) noexcept nogil
# Learn a reward: update one model's row. reward: NaN only applies the discount. turn: the number of
# the observation.
cdef void context_learn(const ContextRule* rule, double* row, u32 d, const double* x, double reward,
                        double weight,
                        u64 turn) noexcept nogil

# Learn one observation. z[n, k + 1]: outputs and the label, by element; NaN, where no prediction
# arrived, is replaced.
cdef void blend_learn(double* rows, u32 k, double ridge, double discount, double* z, u64 n,
                      double weight) noexcept nogil
# Compute the weights w[k + 1]; the last one is the constant. Return the standard deviation of the
# remaining errors.
cdef double blend_weights(const double* rows, u32 k, double ridge, double* w) noexcept nogil
# Blend z[n, k + 1], with NaN for a model without an output, into answers[n]. Return the standard
# deviation of the errors that the weights leave. scatter: set to that of the outputs around their
# mean, averaged over elements.
cdef double blend(const double* rows, u32 k, double ridge, double* z, u64 n, double* answers,
                  double* scatter) noexcept nogil
# Replace NaN by the outputs that are expected, given those that arrived.
cdef void blend_fill(const double* rows, u32 k, double ridge, double* z, u64 n) noexcept nogil

# -- LinUCB or LinTS with its parameters.
cdef class Context:
    cdef ContextRule state

    cdef cnp.ndarray _checked(self, cnp.ndarray rows, u32 d)
    cdef cnp.ndarray _features(self, object x)
