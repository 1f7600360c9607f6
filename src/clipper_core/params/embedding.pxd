# An embedding table as Python sees it, with numpy arrays as arguments and results.
# embedding_rows.pxd describes it.
from clipper_core.params.embedding_rows cimport Rows
from clipper_core.params.optimizer cimport Initializer, Optimizer
from clipper_core.runtime.machine cimport atomic, u64

cdef class Table:
    cdef Rows* rows
    cdef atomic[u64] pushes
    cdef readonly str name
    cdef readonly u64 seed
    cdef readonly u64 rows_max
    cdef readonly Optimizer optimizer
    cdef readonly Initializer initializer
