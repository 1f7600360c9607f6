# When an ensemble has an answer. A decider is a schedule of steps. decide() reads the predictions
# that have arrived for a query and returns one of: wait until a time, answer with some of them, or
# submit more tasks. Pure arithmetic: no queue, no clock, no memory of its own.
#
# Threads: any; a DeciderState is immutable, except its bucket of tokens, which has a lock. Rules:
# docs/design.md, "Deciders in the core".
from clipper_core.runtime.machine cimport atomic, u32, u64, u8
from clipper_core.wire.comparison cimport Field

cdef enum:
    STEPS_MAX = 16
    ENSEMBLE_TASKS_MAX = 64     # tasks of one query

cpdef enum Rule:
    ALL = 0                     # answer with all that arrived, when no task is outstanding any more
    FIRST = 1                   # the first to arrive
    QUORUM = 2                  # `need` equal votes, or more than half of the votes; once no other
                                # value can win
    WEIGHTED = 3                # the same, by weight
    BEST = 4                    # the best ranked (the lowest task) that arrives
    SUREST = 5                  # the one most confident
    CASCADE = 6                 # tasks are submitted one by one until one is confident enough
    HEDGED = 7                  # the first to arrive; the next is submitted when none came in
                                # time; extra tasks are bounded
    TIED = 8                    # the first to arrive; the task that is sent first cancels those
                                # that are still queued
    MEAN = 9                    # mean of numbers, when the outstanding ones cannot move it by more
                                # than `tolerance`
    MEDIAN = 10
    FLOOR = 11                  # one task's answer
    ROW = 12                    # the best ranked that has arrived: a row of a table of times

cpdef enum VoteState:
    UNSUBMITTED = 0
    OUTSTANDING = 1
    ARRIVED = 2
    FAILED = 3                  # it ended without a usable value, or will not be submitted

cdef enum RulingKind:
    WAIT = 0
    ANSWER = 1
    SUBMIT = 2

cdef struct VoteData:           # the state of one task
    u8 state                    # VoteState
    u8 order                    # of arrival
    bint numeric                # `number` is its value
    u32 klass                   # index of a task that arrived with an equal value, the same for all
                                # of them
    double number
    double confidence           # 0 to 1; negative: the model reported none
    double weight
    Field field
    u64 start_us                # time after receipt at which it is submitted, unless the query is
                                # decided before; NEVER_US: when a rule needs it

cdef struct StepState:
    u8 rule
    u8 which                    # FLOOR: the task
    u32 need                    # votes; QUORUM 0: more than half
    u64 until_us                # from receipt; 0: the deadline
    u64 accept                  # tasks that the rule considers, one bit each
    double confidence_min
    double tolerance            # MEAN, MEDIAN
    double low, high            # MEAN, MEDIAN: bounds of values that are outstanding

cdef struct RulingData:
    u8 kind                     # RulingKind
    u8 step
    bint extra                  # SUBMIT: an extra task, which needs a token
    # ANSWER: the task whose value is the answer; ENSEMBLE_TASKS_MAX: it is made of several values,
    # or of none
    u32 winner
    u64 mask                    # ANSWER: tasks whose values are used; SUBMIT: tasks to submit now
    u64 until_us                # WAIT: decide again at this time, even if nothing arrives

cdef cppclass DeciderState:
    atomic[u32] refs
    u32 count
    bint tied                   # some step is TIED
    StepState steps[16]
    atomic[u32] lock            # guards tokens
    double tokens               # extra tasks that may be submitted now
    double extra                # tokens a query
    bint bounded                # some step is HEDGED: each query adds to the tokens

cdef u64 NEVER_US               # no time

cdef RulingData decide(const DeciderState* d, const VoteData* votes, u32 n, u64 elapsed_us,
                       u64 slo_us) noexcept nogil
cdef DeciderState* decider_hold(DeciderState* d) noexcept nogil      # one more reference
cdef void decider_drop(DeciderState* d) noexcept nogil
# Count a query, which adds its share of a token.
cdef void decider_query(DeciderState* d) noexcept nogil
# Take a token. False: there is none.
cdef bint decider_may_extra(DeciderState* d) noexcept nogil

cdef class Decider:
    cdef DeciderState* state
    cdef readonly tuple steps
