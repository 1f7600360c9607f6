# The state of users without an observation. All of them read one, which begins from the shared
# state and is made once for each version of that, from its block, when somebody reads it.
#
# Threads: any, with the GIL.
from clipper_core.learning.bandit cimport Rule
from clipper_core.learning.policy_states cimport Held, StateBlock, StateNumbers, StateParts
from clipper_core.runtime.machine cimport u32

cdef class FirstState:
    cdef StateBlock block       # None: `made` has arrays that are no block
    cdef StateParts parts       # of the block's state
    cdef readonly tuple models
    cdef object made            # the state; None: it is made when it is read

    # Return the numbers; NULL: only the state has them.
    cdef StateNumbers* numbers(self) noexcept
    cdef object made_state(self)

cdef class FirstStates:
    cdef tuple models
    cdef object init, make
    cdef Rule rule
    cdef u32[16] columns        # that count observations
    cdef u32 counts             # of these
    cdef double least           # of such a count
    cdef FirstState last
    cdef StateBlock source      # the shared state that `last` begins from: its block,
    cdef StateParts parts       # what it has beside that,
    cdef object state           # or itself, if it has no block

    # Return the state that begins from the shared one as it is now.
    cdef FirstState newest(self, Held shared)
    cdef FirstState _by_policy(self, object shared)
    cdef FirstState _of_block(self, Held shared, StateBlock source, StateParts parts)
    cdef bint _fits(self, const StateNumbers* numbers) noexcept
    cdef void _begin(self, StateNumbers* numbers, double counts) noexcept
