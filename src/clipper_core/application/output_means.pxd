# Running means of what each model predicts, which take the place of numbers that are missing at a
# deadline.
#
# Threads: any, with the GIL.
from clipper_core.runtime.machine cimport u32

cdef class OutputMean:          # of one model
    cdef u32 n                  # predictions, at most MEMORY
    cdef double number
    cdef object array           # instead of the number; None: it is one

    cdef void add_number(self, double output) noexcept

cdef class OutputMeans:
    cdef dict by_model

    cdef OutputMean mean_of(self, object model)
