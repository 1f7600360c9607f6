# What a model takes: the type of its rows, and how an input becomes one. Below the door for
# callers, which is made of it.
#
# Threads: any.
cimport numpy as cnp
from clipper_core.cache.projection cimport Similarity
from clipper_core.engine.engine cimport Engine
from clipper_core.runtime.machine cimport u64
from clipper_core.scheduling.model_state cimport ModelState

cdef class InputSchema:
    cdef readonly Engine engine
    cdef ModelState* state
    cdef readonly str name             # as messages show it: "svm:1"
    cdef readonly object dtype         # numpy's, None for str and bytes
    cdef readonly tuple shape          # of one row; (-1,) when rows differ in length
    cdef int typenum
    cdef u64 lane_bytes_max
    cdef readonly Similarity similar   # near rows share cache entries; None: only equal ones do
    cdef bint near                     # `similar` is there, and knows the rows
    # (input) -> (dtype, shape), or (dtype, shape, tensors), for a model of type any
    cdef public object on_untyped
    # packs named tensors into records, which its rows then are; None: it takes one tensor
    cdef readonly object tensors

    cdef int _set_rows(self, str dtype, tuple shape, object tensors) except -1
    cdef int _settle_by(self, object x) except -1
    cdef object _row(self, object x, const void** row, u64* nbytes)
    # a record that is packed
    cdef object _packed(self, object record, const void** row, u64* nbytes)
    cdef int _check_bytes(self, u64 nbytes) except -1       # of a row: TOO_LARGE beyond the limit
    cdef object _rows(self, object rows)         # all of them checked
    cdef cnp.ndarray _array(self, object x)
    cdef cnp.ndarray _array_of(self, object x)
    cdef bint _fits(self, cnp.ndarray array)
    cdef object _refuse(self, object x, object cause)

cdef int check_type(str name, str dtype, tuple shape) except -1
cdef int check_similar(str name, str dtype, tuple shape) except -1

cdef inline u64 near_uid(u64 uid) noexcept nogil:
    """What a model's keys of cells are made with, beside those of rows."""
    return uid | (<u64> 1 << 63)
