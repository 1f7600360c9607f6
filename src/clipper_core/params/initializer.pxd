# What a row of an embedding table is before anybody trained it: a pure function of the table's key,
# the id, and the place.
#
# Threads: any.
from clipper_core.runtime.machine cimport i64, u32, u64

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
