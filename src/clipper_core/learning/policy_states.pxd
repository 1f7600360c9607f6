# Learned states in memory. The numbers of a state are one immutable block, and the cell of a
# context has the newest block. Who learns makes a new block and publishes it; who reads takes the
# newest one, counted, and gives it back: readers never wait, and need no GIL. The numpy arrays of a
# state in Python are read-only views of its block.
#
# Threads: `Held`: the GIL; it is changed under the lock of the states. `cell_hold` and
# `cell_give_back`: any, without the GIL, for as long as somebody keeps the cell.
cimport numpy as cnp

from clipper_core.runtime.machine cimport atomic, i64, u32, u64

cdef struct StateNumbers:       # a block: this, then f64[rows, columns], then f64[bins, 2]
    atomic[u64] refs
    u64 labels                  # bit set of the labels seen
    double seen                 # weight of the observations
    u32 rows
    u32 columns
    u32 bins

cdef extern from "learning/policy_states.hpp" namespace "clipper" nogil:
    u64 ADDRESS "clipper::kAddress"
    # Return the newest block of a cell; 0: it has none, and nothing is to be given back.
    u64 cell_hold(atomic[u64]& word) noexcept
    # Give a block back. True: the caller frees it.
    bint cell_give_back(atomic[u64]& word, StateNumbers& block, u64 address) noexcept
    u64 cell_publish(atomic[u64]& word, StateNumbers& next, u64 address) noexcept
    u64 cell_empty(atomic[u64]& word) noexcept
    bint block_replaced(StateNumbers& block, u64 before) noexcept
    bint state_release(StateNumbers& block) noexcept

cdef inline double* state_rows(StateNumbers* block) noexcept nogil:
    return <double*> (block + 1)

cdef inline double* state_sure(StateNumbers* block) noexcept nogil:
    return state_rows(block) + <u64> block.rows * block.columns

cdef class StateBlock:          # an owner of a block
    cdef StateNumbers* numbers

# Return a block with copies of contiguous f64[rows, columns] and f64[bins, 2].
cdef StateBlock block_with(cnp.ndarray rows, cnp.ndarray sure, double seen, u64 labels)
# Return an owner of a block that is not freed meanwhile.
cdef StateBlock block_owned(StateNumbers* numbers)
# Return read-only arrays over a block, which they keep.
cdef cnp.ndarray block_rows(StateBlock block)
cdef cnp.ndarray block_sure(StateBlock block)

# Return a copy of a block, which has no owner yet: `Held.learned` publishes it. NULL: there is no
# memory. is_finite: set to whether all of its doubles are.
cdef StateNumbers* numbers_copied(const StateNumbers* block, bint* is_finite) noexcept
cdef void numbers_dropped(StateNumbers* numbers) noexcept   # a copy that is not published

cdef class StateParts:          # what a state has beside its numbers; contexts may share it
    cdef object make            # makes a state of (models, rows, seen, labels, sure, tracked,
                                # differences)
    cdef object models, tracked, differences
    cdef str node               # this server, whose observations the core learns

cdef class Held:                # the cell of a context, with what a server knows of its state
    cdef object known           # the newest state; None: it is made when it is read
    cdef StateParts parts       # of that state; None: Python has published it
    cdef dict numbers           # `applied`, in which `last` may be missing
    cdef u64 last               # of this server's observations; 0: `numbers` has it
    cdef public object base, prior, origin
    cdef public dict doubts
    cdef public i64 revision
    cdef public u64 since, own
    cdef public bint touched, is_late
    cdef public bint is_listed
    cdef atomic[u64] word       # of the newest block; empty for a policy whose states have none

    cpdef publish(self, object state)
    # Return the newest block, for who holds the lock of the states; NULL: there is none.
    cdef StateNumbers* newest(self) noexcept
    # Return what the newest state has beside its numbers, like an earlier one if it is the same.
    cdef StateParts beside(self, object make, str node, StateParts like)
    # Make a block of `numbers_copied` the newest one, after the observation of this number.
    cdef void learned(self, StateNumbers* numbers, StateParts parts, u64 number) noexcept
    # Return the number of the last of this server's observations that is in the state.
    cdef u64 applied_to(self, str node) except? 0xFFFFFFFFFFFFFFFF
    cdef object _made(self)
