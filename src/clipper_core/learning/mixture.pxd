# A mixture of eight ways to weigh the votes of several models, learned online.
#
# State: f64[k + 1, FIXED + 6 * buckets + 2 * features], one row for each of the k models, and one
# row that they share. The columns are in mixture.pyx. `buckets` is a power of two from 8 to 64; the
# low bits of a label's hash are its bucket. `features` is the length of the queries' context, 0
# until the first feedback with one. From the first feedback with class probabilities on, rows have
# 2 + 2 * buckets more columns.
#
# Threads: any; the rows belong to the caller.
cimport numpy as cnp

from clipper_core.runtime.machine cimport u8, u32, u64

cdef enum:
    VOTERS_MAX = 256
    BUCKETS_MIN = 8
    BUCKETS_MAX = 64
    FEATURES_MAX = 32
    FIXED = 16
    COMPONENTS = 7
    BY_CLASS = 3                # components with weights by label
    EQUAL_WEIGHT = 7            # columns of the last row: the weight of the equal vote, and its sum
    EQUAL_SUM = 8
    FEATURES = 9                # column of the last row
    POOLED_SHARE = 10           # column of the last row: weight of the component that reads class
                                # probabilities; 0 until the first feedback with them

cdef struct RowShape:
    u32 buckets
    u32 features
    bint pooled                 # whether there are weights of class probabilities

cdef struct Ballot:
    const u32* votes            # [k]: codes of labels from 1; 0 if the model did not answer
    const u8* cells             # [k]: hash of that label, 0 to 63
    const double* confidence    # [k]: as the model reports it; NaN if it does not
    u32 k
    double classes              # number of different labels
    const double* context       # [features]: of the query; it counts if the rows have as many
    u32 features
    const double* evidence      # [labels, k]: how much each model is for each label, 0 to 1, by the
                                # label's code minus 1; NULL: 1 for the label that it votes for
    const u8* label_cells       # [labels]: hashes of the labels
    u32 labels                  # at most VOTERS_MAX
    u32 right                   # code of the label that comes first among those without a vote

cdef struct Tally:
    u32 labels                  # different labels that were voted for
    u32 named                   # the same, with the labels after them that have evidence only
    u32[VOTERS_MAX] of          # by model, the index of its label
    u32[VOTERS_MAX] first       # by label with a vote, its first voter
    u32[VOTERS_MAX] code        # by label
    double[VOTERS_MAX] p        # by label, its probability
    double other                # probability of each label that is not named

# Return the shape of the rows of a mixture. Raises BadInput for other rows.
cdef RowShape mixture_shape(cnp.ndarray rows) except *
# Read the shape of f64[n, columns]. Return False if rows of a mixture have none such.
cdef bint mixture_has_shape(const double* rows, u64 n, u64 columns, RowShape* shape) noexcept nogil
# Return a copy of the rows, with enough buckets for the cell.
cdef cnp.ndarray rows_with(cnp.ndarray rows, u32 cell)
# Return the rows with weights for so many features of a context, if they had none; else the rows
# themselves.
cdef cnp.ndarray rows_with_features(cnp.ndarray rows, u32 features)
# Return the rows with weights of class probabilities, if they had none; else the rows themselves.
cdef cnp.ndarray rows_with_pool(cnp.ndarray rows)
# Return whether the rows have learned nothing: then the vote is equal.
cdef bint mixture_is_untouched(const double* rows, RowShape shape, u32 k) noexcept nogil
cdef void mixture_tally(const double* rows, RowShape shape, const Ballot* ballot,
                        Tally* tally) noexcept nogil
# Learn one feedback. label, cell: the label that the feedback is about.  right: 1 if it is the
# right one, 0 if not.  tally: the result of mixture_tally() for the rows before.
cdef void mixture_learn(double* rows, RowShape shape, const Ballot* ballot, u32 label, u8 cell,
                        double right, double weight, Tally* tally) noexcept nogil
# Have each model's sums of squared gradients stand for at most so many uncertain observations, so
# that its next steps are as large as after these.
cdef void mixture_limited(double* rows, u32 k, u32 columns, double counts) noexcept nogil
# Make rows that all users share those of a user: component 7 has an even weight, and each model the
# same probability in it.
cdef void mixture_for_user(double* rows, u32 k, u32 columns) noexcept nogil
# Compute the weights of the models' votes; their sum is 1. context: f64[shape.features], for the
# weights of votes about a query with these features; NULL: about one without any.
cdef void mixture_weights(const double* rows, RowShape shape, u32 k, const double* context,
                          double* weights) noexcept nogil
