# What every answer of an application counts: its duration, the models that it used, and how far
# models agree. Models are places in arrays here; their names come in when somebody reads.
#
# Threads: any, with the GIL, which no function releases between reading a number and writing it.
from clipper_core.runtime.histogram cimport Counter, LatencyHistogram
from clipper_core.runtime.machine cimport u32, u64
from clipper_core.wire.comparison cimport ValueKey

cdef enum:
    COMPARED_MAX = 16           # models that are compared with each other
    STATUSES_MAX = 32           # codes of statuses

cdef class Bucket:
    cdef readonly double rate, burst
    cdef double tokens, at_s

    cdef bint take_tokens(self, double now_s, double tokens) noexcept

# -- How many tasks ended with each status.
cdef class StatusCounts:
    cdef u64[STATUSES_MAX] counts

# -- How many answers were the default, by reason.
cdef class DefaultCounts:
    cdef readonly Counter unsure, not_finite, policy_failed
    cdef readonly StatusCounts ended        # no prediction came: how the first task ended

cdef class AnswerCounts:
    cdef readonly tuple models  # sorted
    cdef list missing           # StatusCounts, by place
    cdef DefaultCounts defaults
    # by the place of the model: Counter, and Mean
    cdef list used, unused, wins, agreement
    cdef list pairs             # the Mean of places i < j at i * k + j; None for too many models
    cdef Counter answered
    cdef LatencyHistogram duration
    cdef Bucket comparing
    cdef object clock

    cdef Py_ssize_t place(self, object model) except -1
    cdef double now_s(self) except? -1
    cdef bint compare(self, dict arrived, object answer) except -1
    cdef void compare_keys(self, u32 n, const u32* places, const ValueKey* keys,
                           const ValueKey* right) noexcept
    # Count an answer, or a default. n: predictions that arrived.  now_s: by the monotonic clock.
    # places: of their models, ascending.  used: bit set of those that are in the answer.  keys: of
    # their outputs.  right: the key of the answer.  Return 1 if Python has
    # to compare the outputs, for which the budget has been taken: `models` are too many.
    cdef int add_answer(self, double now_s, u64 took_us, u32 n, const u32* places, u64 used,
                        bint is_default, const ValueKey* keys, const ValueKey* right) except -1
    cdef int _compare_within_budget(self, double now_s, u32 n, const u32* places,
                                    const ValueKey* keys, const ValueKey* right) except -1

# -- The answers of one side of a rollout.
cdef class SideCounts:
    cdef readonly Counter answers, defaults
    cdef readonly LatencyHistogram duration
    cdef readonly dict slower   # by limit in microseconds: Counter of the answers that took longer
    cdef list limits, beyond    # its keys, and its values

    cdef void add_answer(self, u64 took_us, bint is_default) noexcept
