# The built-in selection policies as data: which model a query goes to, and how the outputs of its
# models combine. Pure: no clock, no allocation, no randomness except the caller's uniform number.
#
# A policy that is not here, or outputs of mixed kinds, are combined in Python
# (python/clipper/selection), which is also the reference for this module.
#
# Threads: any; the state belongs to the caller.
cimport numpy as cnp
from libc.math cimport NAN
from libc.string cimport memcpy

from clipper_core.learning.bandit cimport Rule
from clipper_core.learning.class_evidence cimport LABELS_READ, ClassEvidence
from clipper_core.learning.feedback_update cimport Learner, Observation
from clipper_core.learning.linear cimport Context
from clipper_core.learning.mixture cimport RowShape
from clipper_core.runtime.machine cimport i64, u32, u64, u8
from clipper_core.wire.comparison cimport ValueKey, number_key
from clipper_core.wire.prediction cimport Value

cdef enum:
    TASKS_MAX = 64              # models of a query that are combined here
    NO_WINNER = 0xFFFFFFFF      # the answer is a mean, and no model's output

cpdef enum Combining:           # how the outputs become the answer
    EQUAL_VOTES = 1             # a vote, or a mean, of all models with equal weights
    FIXED_VOTES = 2             # the same with weights that a person has set
    LEARNED_VOTES = 3           # the same with the weights of a rule
    BLEND = 4                   # a linear regression on numbers; labels have equal votes
    DRAWN_MODEL = 5             # that of a model that is drawn by shares that a person has set
    CHOSEN_MODEL = 6            # that of the model that a rule chooses; calibrated

cdef enum OutputKind:           # what outputs are
    OTHER = 0                   # they are combined in Python
    VOTED = 1                   # labels
    NUMBERS = 2                 # with a float among them

cdef struct StateView:          # a learned state
    const double* rows
    const double* sure          # [bins, 2]
    u32 count                   # of rows
    u32 columns
    u32 bins
    RowShape shape              # of a mixture
    u64 labels
    double seen
    u32 known                   # features that the state has learned with
    const double* context       # [features]: of the query, as far as the policy reads them
    u32 features
    # of the models' votes, for policies whose votes have learned ones; the last, see view_copy
    double[TASKS_MAX] weights

# Copy a view of k models.
cdef inline void view_copy(StateView* to, const StateView* of, u32 k) noexcept nogil:
    memcpy(to, of, sizeof(StateView) - (TASKS_MAX - k) * sizeof(double))

cdef inline u64 first_bits(u32 n) noexcept nogil:      # the bit set of the first n, at most 64
    return ~<u64> 0 >> (64 - n) if n else 0

cdef struct Outputs:            # of the models that a query called, as far as they have answered
    u32 n
    u32 queried                 # how many it called
    u32[TASKS_MAX] place        # of the model in the selection, ascending
    Value[TASKS_MAX] value      # borrowed
    ValueKey[TASKS_MAX] key
    double[TASKS_MAX] confidence    # as reported
    u8[TASKS_MAX] is_sure       # whether one was reported
    const ClassEvidence* named  # by the models' places; NULL: no class probabilities are read

cdef struct Combination:
    double confidence
    double agreement
    double mean                 # the answer, if there is no winner
    u32 winner                  # the index of the output that is the answer
    u32 label                   # the number in `named` of a label without a vote; 0: it is none
    u64 used                    # bit set of the outputs that are in the answer; 0: there is none

cdef struct LabelOdds:          # probabilities of labels
    u32 n
    u32[LABELS_READ + 1] voter  # the index of an output that is the label
    double[LABELS_READ + 1] p   # where there are class probabilities, by the labels they name
    double other                # of each other label

cdef struct Poll:               # outputs as votes, in the form that feedback_update reads
    i64[TASKS_MAX] values
    u8[TASKS_MAX] arrived
    u8[TASKS_MAX] cells
    double[TASKS_MAX] confidence
    Learner learner
    Observation observation

cdef class Selection:
    cdef readonly tuple models  # sorted
    cdef readonly tuple primaries   # those that the policy calls, or chooses one of
    cdef object alike           # the last tuple of a state that is equal to it
    cdef Combining how
    cdef readonly bint calls_one
    cdef readonly bint learns
    cdef readonly bint reads_context    # whether queries' features count
    cdef readonly bint reads_classes    # whether class probabilities count
    cdef readonly bint makes_sets       # whether answers have prediction sets
    cdef Rule rule
    cdef Context linear         # of a choice by features
    cdef double doubt           # observations above which they outweigh what is known without them
    cdef double ridge
    cdef double[TASKS_MAX] weights
    cdef u32 k
    cdef u32 n                  # of the primaries
    cdef u32[TASKS_MAX] called  # their places, ascending
    cdef u8[TASKS_MAX] is_called    # whether it is one, by place

    # Set the view of a state of these models; False if it is of others, or of another shape.
    cdef bint view(self, object state, StateView* found) except -1
    cdef bint _are_own(self, object models) except -1
    cdef bint _fill(self, StateView* found) noexcept nogil
    # Have a view be for a query with these features, which the caller keeps. None: 0.
    cdef void in_context(self, StateView* view, const double* context, u32 features) noexcept nogil
    # Return whether a choice can be made by a state: it has learned with as many features.
    cdef bint can_choose(self, const StateView* state) noexcept nogil
    # Return the place of the model to call, and the probability of that choice, NaN if it is not
    # known. For policies that call one.
    cdef u32 choose(self, const StateView* state, double uniform,
                    double* probability) noexcept nogil
    # Combine the outputs that may be answered with. False: they are to be combined in Python.
    cdef bint combine(self, const StateView* state, const Outputs* outputs,
                      Combination* found) noexcept nogil
    # Compute the probabilities of labels, of which one was the answer, for its set.
    cdef void label_odds(self, const StateView* state, const Outputs* outputs,
                         const Combination* found, LabelOdds* odds) noexcept nogil
    cdef bint _some_combined(self, const StateView* state, const Outputs* outputs, u64 usable,
                             Combination* found) noexcept nogil
    cdef u32 _by_features(self, const StateView* state, double uniform) noexcept nogil
    cdef u32 _drawn(self, double uniform, double* probability) noexcept nogil
    cdef double _weights(self, const StateView* state, const Outputs* outputs,
                         double* weights) noexcept nogil
    cdef void _learner(self, const StateView* state, Learner* learner) noexcept nogil
    cdef bint _rate_chosen(self, const StateView* state, const Outputs* outputs,
                           Combination* found) noexcept nogil
    cdef void _poll(self, const StateView* state, const Outputs* outputs, Poll* poll) noexcept nogil
    cdef bint _learned_vote(self, const StateView* state, const Outputs* outputs,
                            Combination* found) noexcept nogil
    cdef bint _blended(self, const StateView* state, const Outputs* outputs,
                       Combination* found) noexcept nogil

# Read keys and confidences of the values, and no class probabilities. False: one of them has
# qualifiers.
cdef bint outputs_read(Outputs* outputs) noexcept nogil
# The same for one of them.
cdef bint output_read(Outputs* outputs, u32 i) noexcept nogil
# Copy those of a bit set.
cdef void outputs_pick(const Outputs* outputs, u64 bits, Outputs* picked) noexcept nogil
# Make the combination of a query without any output that may be answered with.
cdef void nothing_found(Combination* found) noexcept nogil
# Make the winner and the bit set of a combination of some outputs those of all. bits: the set of
# those that were combined.
cdef void found_among(Combination* found, u64 bits) noexcept nogil
# Return the key of the output that is the answer; that of NaN if there is none.
cdef inline ValueKey key_of_answer(const Outputs* outputs,
                                   const Combination* found) noexcept nogil:
    if found.winner != NO_WINNER:
        return outputs.key[found.winner]
    if found.label:
        return outputs.named.label[found.label - 1]
    return number_key(found.mean if found.used else NAN)
cdef OutputKind kind_of(const Outputs* outputs) noexcept nogil
# Return the confidence that a model reported, 0 for NaN; NaN if it reported none.
cdef double own_confidence(const Outputs* outputs, u32 i) noexcept nogil
# Find the label with the largest weight. selected: the weight of all models that were queried.
cdef void vote_of(const Outputs* outputs, const double* weights, double selected,
                  Combination* found) noexcept nogil
# Average numbers.
cdef bint mean_of(const Outputs* outputs, const double* weights, double selected,
                  Combination* found) noexcept nogil
