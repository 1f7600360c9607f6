# An embedding table as Python has it: arrays in, arrays out. What it does is embedding_rows.pxd's
# to tell.
from clipper_core.embedding_rows cimport Rows
from clipper_core.machine cimport atomic, u64
from clipper_core.initializer cimport Initializer
from clipper_core.optimizer cimport Optimizer

cdef class Table:
    cdef Rows* rows
    cdef atomic[u64] pushes
    cdef readonly str name
    cdef readonly u64 seed
    cdef readonly u64 rows_max
    cdef readonly Optimizer optimizer
    cdef readonly Initializer initializer
