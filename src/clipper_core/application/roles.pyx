"""The roles of an application's models: which of them a query goes to, and which observe it."""
cimport cython
from libc.math cimport fmod, nextafter

from clipper_core.runtime.status cimport BAD_INPUT, raise_for

# Bits of a query's number below those that anybody else looks at, and how far apart the observers
# look at them: of several with a share of one half, each sees other queries.
cdef double WATCHING_BITS = 134217728.0
cdef double SHADOW_BITS = 1048576.0
cdef double APART = 0.6180339887


@cython.final
cdef class Roles:
    """The roles of an application's models, for queries whose answers the core makes. Threads: any.

    observers: (model, share) of each, at most 64.  challengers: (place, end, share) of each: it
    takes the queries whose number is below `end`, and not below the end before.  shadow: the share
    of the policy's queries that the models which it did not choose observe. Raises BAD_INPUT.
    """

    def __init__(self, observers, challengers, double shadow):
        cdef u32 i
        if len(observers) > WATCHED_MAX or len(challengers) > WATCHED_MAX:
            raise_for(BAD_INPUT, f"{len(observers)} observers and {len(challengers)} challengers: "
                                 f"at most {WATCHED_MAX}")
        self.observers = tuple([model for model, _ in observers])
        self.n = <u32> len(observers)
        for i in range(self.n):
            self.shares[i] = observers[i][1]
        self.challengers = <u32> len(challengers)
        self.left = 1.0
        for i in range(self.challengers):
            self.places[i] = challengers[i][0]
            self.ends[i] = challengers[i][1]
            self.taken[i] = challengers[i][2]
            self.left = 1.0 - self.ends[i]
        self.shadow = shadow

    cdef void draw(self, double uniform, Drawn* drawn) noexcept nogil:
        cdef double low = fmod(uniform * WATCHING_BITS, 1.0), below
        cdef u32 i
        drawn.challenger = NOBODY
        drawn.share = 1.0
        drawn.rest = uniform
        drawn.watching = 0
        for i in range(self.n):
            if self.shares[i] >= 1.0 or fmod(low + i * APART, 1.0) < self.shares[i]:
                drawn.watching |= <u64> 1 << i
        for i in range(self.challengers):
            if uniform < self.ends[i]:
                drawn.challenger = self.places[i]
                drawn.share = self.taken[i]
                return
        if self.challengers:
            below = 1.0 - self.left
            drawn.rest = min((uniform - below) / self.left, nextafter(1.0, 0.0))

    cdef bint is_shadowed(self, double rest) noexcept nogil:
        return self.shadow > 0.0 and fmod(rest * SHADOW_BITS, 1.0) < self.shadow

    cdef tuple watched(self, u64 watching, tuple others):
        cdef u32 i
        cdef list found = list(others)
        for i in range(self.n):
            if watching >> i & 1 and self.observers[i] not in found:
                found.append(self.observers[i])
        return tuple(found)
