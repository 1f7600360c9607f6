# Locality-sensitive keys: near float rows share a cache entry. Off unless a model turns it on, and
# its error is measured while it serves: every Nth hit is also evaluated, and the two outputs are
# compared.
#
# Threads: any.
from libcpp cimport bool
from clipper_core.runtime.machine cimport atomic, i32, u32, u64

cdef extern from "cache/projection.hpp" namespace "clipper" nogil:
    enum:
        CELLS_MAX "clipper::kCellsMax"
    cdef cppclass Projection:
        float* planes
        u64 n
        u32 count
        bool wide
    bool projection_draw(Projection* projection, double width, u64 seed) noexcept
    # False: it has none
    bool projection_cells(const Projection& projection, const void* row, i32* cells) noexcept

cdef class Similarity:
    cdef Projection state
    cdef bint drawn             # the rows' type is known, and `state` is ready
    cdef readonly double width
    cdef readonly u32 projections
    cdef readonly double check_share
    cdef readonly double tolerance
    cdef atomic[u64] hits
    cdef object waiting         # deque of (future of the evaluation, the cached output)
    cdef object counting        # a lock over what follows
    cdef u64 checked
    cdef u64 disagreed
    cdef double worst

    cdef int draw(self, bint wide, u64 n, u64 seed) except -1
    cdef bint check_is_due(self) noexcept
    cdef int remember(self, object future, object cached) except -1
