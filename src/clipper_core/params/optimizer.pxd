# The arithmetic of the optimizers: how a gradient changes a row of weights and the optimizer's
# state that follows it.
#
# Threads: any; the memory belongs to the caller.
from clipper_core.runtime.machine cimport i64, u32, u64

cdef extern from "params/optimizer.hpp" namespace "clipper" nogil:
    cdef cppclass Rule:
        u32 kind
        u32 slots               # floats of state per weight
        u32 row_slots           # floats of state per row, after these
        float rate
        float momentum
        float beta1
        float beta2
        float eps
        float decay
        float l1
        float l2
        float beta
        float start             # initial value of the first slot
        float clip_value
        float clip_norm

    cdef cppclass Stride:       # factors of one step
        float rate
        float first
        float second
        float gradient

    u64 state_floats(const Rule& rule, u64 n) noexcept      # of n weights
    bint all_finite(const float* values, u64 n) noexcept
    void add_row(float* sum, const float* gradient, u64 n) noexcept
    # Take one step for w[n] and its slots, each of which lies `apart` floats after the one before.
    void optimizer_step(const Rule& rule, const Stride& step, float* w, float* slots, u64 apart,
                        const float* gradient,
                        u64 n) noexcept

# Return the factors of step t, from 1, with the rate times `scale`.
cdef Stride stride_of(const Rule* rule, u64 t, double scale) noexcept nogil
# Set the initial state of n weights, slots[state_floats(rule, n)].
cdef void start_slots(const Rule* rule, float* slots, u64 n) noexcept nogil

cdef class Optimizer:
    cdef Rule rule
    cdef readonly str name
    cdef readonly dict settings     # all of them, defaults too

    cdef tuple _shape(self, long n)

# -- initializers: the first value of a row, a pure function of the table's key, the id, and the
# place in the row. Threads: any.
cdef extern from "params/initializer.hpp" namespace "clipper" nogil:
    cdef enum StartKind "clipper::StartKind":
        CONSTANT "clipper::CONSTANT"
        UNIFORM "clipper::UNIFORM"
        NORMAL "clipper::NORMAL"
        TRUNCATED "clipper::TRUNCATED"

    cdef cppclass Start:
        u32 kind
        float middle            # of a uniform: its centre; of a normal: its mean
        float width             # of a uniform: half its width; of a normal: its standard deviation

    u64 mix64(u64 x) noexcept
    void start_row(const Start& start, u64 key, i64 id, float* row, u32 n) noexcept

cdef class Initializer:
    cdef Start start
    cdef readonly str name
    cdef readonly dict settings     # all of them, defaults too

    cdef Start of_rows(self, u32 dim) noexcept   # glorot needs the width of a row
