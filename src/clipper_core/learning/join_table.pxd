# Answers that feedback may still come for, by id, oldest first.
#
# Threads: any, with the GIL. No step gives it up between a check and the change that follows from
# it, so the table needs no lock, and an answer is claimed once.
from clipper_core.runtime.machine cimport i64

cdef class Joined:
    cdef readonly object learner, plan, arrived, answer
    cdef readonly str user
    cdef readonly tuple late            # (model, future) of observers
    cdef readonly double until_s
    cdef public bint has_feedback
    cdef public bint is_written         # to the store, or about to be
    cdef public bint is_claimed         # there, by this server
    cdef readonly i64 nbytes

cdef class JoinTable:
    cdef dict known                     # by id
    cdef object order, clock
    cdef object answer_type
    cdef i64 size_max, bytes_max
    cdef double window_s
    cdef readonly i64 nbytes

    cdef Joined find(self, object id)   # None if it is not here
    cdef double now_s(self) except -1
