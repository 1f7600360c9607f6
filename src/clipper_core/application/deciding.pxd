# What the decider of an application makes of predictions: which of them it needs, and the answer by
# the rule that decides. The reference is python/clipper/selection/deciders.
#
# Threads: any; a Deciding never changes.
from clipper_core.application.selection cimport (
    TASKS_MAX, Combination, Outputs, Selection, StateView,
)
from clipper_core.results.decider cimport STEPS_MAX, Decider, VoteData
from clipper_core.runtime.machine cimport u32, u64, u8

cpdef enum Answering:           # how the rule of a step answers
    BY_POLICY = 0               # as the policy combines all predictions
    BY_VOTES = 1                # by a vote, or a mean, of equal weights
    BY_WEIGHTS = 2              # the same with the policy's weights
    BY_MEAN = 3                 # by the mean of numbers with the policy's weights
    BY_MEDIAN = 4
    BY_ONE = 5                  # with the output of one model

# -- The order in which models are queried and the decider, for one state of the policy.
cdef class Deciding:
    cdef readonly tuple models              # best first
    cdef readonly Decider decider
    cdef readonly object order              # what Python calls it
    cdef readonly object starts, votes      # starts_us and weights as they were given
    cdef readonly bint measures             # starts_us are for measured times
    cdef readonly tuple names               # of the steps, as answers show them
    cdef list counters                      # Counter of the answers by each step
    cdef u32 n
    cdef u32[TASKS_MAX] places              # of a model in the selection, by rank
    cdef u32[TASKS_MAX] ranks               # of a model, by its place in the selection
    cdef u32[TASKS_MAX] sorted_ranks        # of the models in the order of their places
    cdef u64[TASKS_MAX] starts_us           # as VoteData.start_us, by rank
    cdef double[TASKS_MAX] weights          # of votes, by place
    cdef u8[STEPS_MAX] answering            # by step
    cdef u64 until_us                       # of the last step; 0: the deadline
    cdef u64 margin_us                      # before the deadline

    # Return the time of the decision for a query with this deadline.
    cdef u64 time_us(self, u64 slo_us) noexcept nogil
    # Set the vote of a task whose output has been read; `votes` has those before it. False: it
    # cannot be compared here.
    cdef bint weigh(self, const Outputs* outputs, u32 rank, u8 order,
                    VoteData* votes) noexcept nogil
    # Return the bit set of the outputs of these tasks. mask: by rank.  one: set to the index of the
    # output of the best ranked of them.
    cdef u64 used_of(self, const Outputs* outputs, u64 mask, u32* one) noexcept nogil
    # Make the answer of a step. outputs: what had arrived, by ascending places of the models.
    # used: bit set of those that the step uses.  one: the index among them of the model that a rule
    # BY_ONE answers with.  False: Python has to.
    cdef bint combine(self, Selection selection, const StateView* state, const Outputs* outputs,
                      u32 step, u64 used, u32 one, Combination* found) noexcept nogil
    cdef bint _by_votes(self, Selection selection, const StateView* state, const Outputs* outputs,
                        u8 how, Combination* found) noexcept nogil
    cdef bint _bounded(self, Selection selection, const StateView* state, const Outputs* outputs,
                       bint is_one, Combination* found) noexcept nogil
