# The arithmetic of the selection policies that learn: which model to query, and the update by a
# loss. Each model has a row of doubles, whose columns depend on the rule; time is the number of
# observations so far. Pure: no clock, no allocation, no randomness except the uniform number that
# the caller passes.
#
# Threads: any; the rows belong to the caller.
cimport numpy as cnp

from clipper_core.runtime.machine cimport u32, u64

cdef enum:
    MODELS_MAX = 256

cpdef enum RuleKind:
    EXP3 = 1            # log-weight                 one model a query, loss over its probability
    HEDGE = 2           # log-weight                 all models, each by its own loss, with a fixed
                        # share
    GREEDY = 3          # mean loss, count           the best but for a share epsilon of chance
    SQUARECB = 4                # mean loss, count, memory   inverse gap weighting
    THOMPSON = 5                # right, wrong               a draw from each Beta, discounted
    KL_UCB = 6                  # sum of losses, count       the best that the data still allow
    TSALLIS = 7                 # estimated loss             Tsallis-INF with reduced variance
    LOGODDS = 8                 # right, count               votes by the log odds of being right
    STACKING = 9        # weight                     logistic regression on the votes, online
    MIXTURE = 10        # see learning/mixture; its rows are not for the functions below
    MEMORIES = 11       # right, wrong, by memory; weight of each memory     inverse gap weighting
    LINEAR = 12         # see learning/linear; its rows are not for the functions below

cdef enum:
    MEMORY_LENGTHS = 4
    MEMORIES_COLUMNS = 12

cdef struct RuleState:
    u32 kind
    u32 columns
    double eta                  # step, discount rate or width, depending on the rule
    double share                # fixed share, or share of random choices
    double floor                # least probability of a model
    double discount             # factor of what was learned, per observation

# Return a number in (0, 1), from a stream that the query's uniform number starts.
cdef double _random(u64* state) noexcept nogil
# Return the expected loss of a model, by its row of MEMORIES.
cdef double memory_mean(const double* row) noexcept nogil
# Return the model to query. p[k] is set to the probability of each model; only to that of the
# chosen one where the others are unknown.
cdef u32 rule_choose(const RuleState* rule, const double* rows, u32 k, double seen, double uniform,
                     double* p) noexcept nogil
# Learn the losses of one observation. losses[k]: NaN where unknown. chosen: the only model that was
# queried, k if all were. p: its probability at that time.
cdef void rule_learn(const RuleState* rule, double* rows, u32 k, double seen, const double* losses,
                     u32 chosen, double p,
                     double weight) noexcept nogil
# Compute the weights of the models' votes; their sum is 1.
cdef void rule_weights(const RuleState* rule, const double* rows, u32 k, double classes,
                       double* weights) noexcept nogil
# Learn one label by stacking. votes[k]: codes of labels, 0 where no prediction arrived.  right: how
# right the label is, 0 to 1; below 1 it is known to be wrong in part, and the right one unknown.
cdef void stack_learn(const RuleState* rule, double* rows, u32 k, const u32* votes, u32 label,
                      double classes, double right, double weight) noexcept nogil

# Learn one label by stacking, from class probabilities. evidence[labels, k]: how much each model is
# for each label.  label: the one that is right, or as right as that, from 1.  p[labels]: scratch
# space.
cdef void stack_learn_evidence(const RuleState* rule, double* rows, u32 k, const double* evidence,
                               u32 labels, u32 label, double classes, double right, double weight,
                               double* p) noexcept nogil

# Limit the evidence of each of n rows: the largest value of these columns, above `least`, becomes
# at most `counts`. They are scaled towards `least` together.
cdef void rows_limited(double* rows, u32 n, u32 width, const u32* columns, u32 columns_n,
                       double least, double counts) noexcept nogil

# Return a copy of a contiguous array of doubles: a few times as fast as numpy's own.
cdef cnp.ndarray doubles_copied(cnp.ndarray array)

cdef class Rule:
    cdef RuleState state
    cdef cnp.ndarray checked(self, cnp.ndarray rows)
    cdef cnp.ndarray copied(self, cnp.ndarray rows)     # as `checked`, but always a copy
