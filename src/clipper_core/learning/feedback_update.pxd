# The update of a state by an observation: the loss of each model whose prediction arrived, the
# calibration (the confidence that the answer would have had, and whether it would have been right),
# and one step of the rule. An array of observations is learned one by one in the same way, so the
# resulting states are equal, bit for bit.
#
# It learns votes on labels, and losses of numbers. Other observations are learned in Python
# (python/clipper/selection/learning/learning_policy.py), which tests also compare with this module.
#
# Threads: any; the state belongs to the caller.
cimport numpy as cnp
from cpython.object cimport PyObject

from clipper_core.learning.bandit cimport MODELS_MAX, Rule, RuleState
from clipper_core.learning.class_evidence cimport ClassEvidence
from clipper_core.learning.mixture cimport RowShape
from clipper_core.learning.policy_states cimport StateBlock, StateNumbers
from clipper_core.runtime.machine cimport i64, u32, u64, u8
from clipper_core.wire.comparison cimport ValueKey

cdef struct Learner:              # a state while it learns
    const RuleState* rule
    double* rows                # [k, columns]
    double* sure                # [bins, 2]: right and all answers, by confidence
    u32 k
    u32 columns                 # of a model's row
    RowShape shape              # of a mixture
    u32 bins
    double fade                 # factor of a bin's counts, per observation in it
    double seen                 # weight of the observations
    u64 labels                  # one bit per label seen
    double coverage             # coverage of the prediction sets; 0: there are none
    double threshold            # of their labels
    double step                 # of the threshold
    double doubt                # number of observations in a bin above which they outweigh the raw
                                # confidence
    bint moved                  # whether the last observation changed the threshold
    bint calibrated             # whether the calibration has the next observation already

cdef struct Observation:               # an observation
    const i64* values           # [k]: the models' labels, as numbers that are equal if the labels
                                # are
    const u8* cells             # [k]: hashes of the labels, 0 to 63; only a mixture's are read
    const u8* arrived           # [k]
    const double* confidence    # [k]: the models' own, NaN where they gave none
    i64 label                   # the right one
    u64 bit                     # bit of this label in `labels`
    u32 chosen                  # the only model that was queried; k if all were
    const u8* queried           # [k]: if several were, whether each was; NULL: `chosen` says it
    double p                    # its probability then
    double weight
    const double* context       # [features]: of the query; of linear models and a mixture
    u32 features
    bint known                  # whether sets may contain the right label
    const ClassEvidence* named  # the labels, if models report class probabilities and the rule
                                # reads them; else NULL
    u32 right                   # number of the right label among these, from 1; 0 if it is not
                                # among them

# Learn an observation. Return False, and change nothing, if no prediction arrived.
cdef bint feedback_update_learn(Learner* learner, const Observation* observation) noexcept nogil
# Learn only the calibration, with the current rows. feedback_update_learn() then does the rest.
cdef void feedback_update_calibrate(Learner* learner, const Observation* observation) noexcept nogil
# Return the confidence before calibration; -1 if no prediction arrived. winner: set to a model that
# gave the answer, or to k plus the index of a label that is only named.
cdef double feedback_update_raw(const Learner* learner, const Observation* observation,
                                u32* winner) noexcept nogil
cdef double feedback_update_classes(u64 labels) noexcept nogil     # number of labels seen
# Compute the probabilities p[n] of labels by a rule that combines votes; return that of each other
# label. voters: for each label a model that gave it; k and above: none did.  Where there are class
# probabilities the labels are those that they name, in their order.
cdef double feedback_update_odds(const Learner* learner, Observation* observation, u32 n,
                                 const u32* voters, double* p) noexcept nogil

cdef enum:
    CONTEXT_MAX = 32            # features of a context

# Return whether a rule of this kind reads class probabilities.
cdef bint reads_classes(u32 kind) noexcept nogil

cdef inline bint is_label(object kind) noexcept:    # whether outputs of this type are voted on
    return kind is int or kind is str or kind is bool or kind is bytes

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object value)

cdef inline PyObject* kept(object value, list computed) except NULL:
    # Return a borrowed reference to an attribute that was just read. If the attribute was computed,
    # the list keeps it alive.
    if Py_REFCNT(value) == 1:
        computed.append(value)
    return <PyObject*> value

cdef struct Reported:           # what models reported for one query, and what was answered
    u32 n                       # of models whose predictions arrived
    u32 chosen                  # the only model that was queried; k if all were
    u32[MODELS_MAX] place       # of these models among the learner's
    ValueKey[MODELS_MAX] key    # of their outputs
    u8[MODELS_MAX] right        # whether that is the label
    u8[MODELS_MAX] sure         # whether there is a confidence
    double[MODELS_MAX] confidence
    bint qualified              # whether any has qualifiers
    PyObject* output[MODELS_MAX]        # borrowed; only if `qualified`
    PyObject* qualifiers[MODELS_MAX]
    bint by_chance              # whether `chosen` was chosen by chance
    double p                    # its probability then, else 1
    u32 features
    double[CONTEXT_MAX] context     # [features]
    ValueKey user
    ValueKey answer             # kind 0: there is none; the bits of a float are its own

cdef struct Votes:              # the predictions of one query, with the label, as numbers
    i64[MODELS_MAX] values
    u8[MODELS_MAX] arrived
    u8[MODELS_MAX] cells
    double[MODELS_MAX] confidence
    u32 cell                    # the highest hash of a label
    bint anyone                 # whether any prediction arrived
    PyObject* label             # borrowed
    Observation observation     # of these arrays
    ClassEvidence named

cdef class FeedbackUpdate:
    cdef Rule rule
    cdef double fade
    cdef object make, sets, make_thresholds
    cdef double coverage, step, doubt

    # Read the predictions of k models, whose outputs are labels of the label's type. Return False
    # if `policy.observe` must learn the observation. right: the key of the label.
    cdef bint read(self, Votes* votes, u32 k, const Reported* reported, const ValueKey* right,
                   object label, double weight) except -1
    # Have a learner learn in a finite block of k models, which nobody else reads. Return False if
    # these are no rows of this rule, or rows that these votes would have to change, and where there
    # are sets: then an OpenState has to learn.
    cdef bint begin(self, Learner* learner, StateNumbers* numbers, u32 k,
                    const Votes* votes) noexcept
    # Open a state. Return None if it is of other models or not finite.
    cdef OpenState open(self, object state, tuple models)
    cdef cnp.ndarray _bins(self, cnp.ndarray sure)
    cdef Learner _pupil(self, cnp.ndarray rows, cnp.ndarray sure, double seen, u64 labels) except *
    cdef bint _fits(self, const Learner* learner, const Votes* votes) noexcept
    cdef bint _read_classes(self, Votes* votes, u32 k, const Reported* reported,
                            object kind) except -1
    cdef int follow(self, Learner* learner, double threshold) except -1     # for sets
    cdef cnp.ndarray _rows(self, cnp.ndarray rows, u32 cell)
    cdef cnp.ndarray _checked(self, cnp.ndarray rows)
    cdef cnp.ndarray _with_features(self, cnp.ndarray rows, u32 features)

cdef class OpenState:           # a state while it learns several observations, with arrays of its
                                # own
    cdef FeedbackUpdate update
    cdef object state, thresholds   # of the prediction sets
    cdef tuple known
    cdef StateBlock block           # which no one else reads yet
    cdef cnp.ndarray rows, sure     # views of it; once it does not fit, other rows
    cdef Learner learner            # of these arrays
    cdef bint changed, fits, is_made

    cdef int start(self, FeedbackUpdate update, cnp.ndarray rows, cnp.ndarray sure, double seen,
                   u64 labels, object thresholds) except -1     # returns 0 if the arrays are not
                                                                # finite
    cdef int use(self, cnp.ndarray rows) except -1  # replace the rows by rows of another shape
    cdef int learn(self, Votes* votes) except -1
    cdef object made(self, tuple models, object differences=*)  # make a state of these arrays
    cdef object closed(self)                        # return the current state
