# What the roles of an application's models make of a query: whether a challenger answers it alone,
# by which number the policy chooses, and which observers see it. The reference is
# python/clipper/serving/rollout/roles.py. Pure: no clock, and no randomness except the query's
# number.
#
# Threads: any; a Roles never changes.
from clipper_core.runtime.machine cimport u32, u64

cdef enum:
    WATCHED_MAX = 64            # models of an application that may observe a query

cdef struct Drawn:              # what the random number of a query decides
    double rest                 # the number in [0, 1) that the policy chooses by
    double share                # of the challenger, if there is one
    u32 challenger              # its place in the selection; NOBODY: the policy's models answer
    u64 watching                # bit set of the observers

cdef enum:
    NOBODY = 0xFFFFFFFF

cdef class Roles:
    cdef readonly tuple observers       # models, of which each has its share of the queries
    cdef readonly double left           # share of the queries that no challenger takes
    cdef readonly double shadow         # share of them that the policy's other models observe
    cdef double[WATCHED_MAX] shares     # of the observers
    cdef double[WATCHED_MAX] ends       # the numbers below which a challenger takes a query
    cdef double[WATCHED_MAX] taken      # the shares of the challengers
    cdef u32[WATCHED_MAX] places        # of the challengers
    cdef u32 n, challengers

    cdef void draw(self, double uniform, Drawn* drawn) noexcept nogil
    # Return whether the models that the policy did not choose observe a query. rest: its number.
    cdef bint is_shadowed(self, double rest) noexcept nogil
    # Return the observers of a bit set, behind those of the policy.
    cdef tuple watched(self, u64 watching, tuple others)
