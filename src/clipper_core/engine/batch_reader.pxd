# The reader of batch_log.pxd's queue: it remembers the last words, and finds the batches of given
# tasks among them.
from clipper_core.engine.engine cimport Engine
from clipper_core.runtime.machine cimport u64
from clipper_core.scheduling.task cimport Lanes

cdef class BatchLog:
    cdef Engine engine              # kept alive
    cdef Lanes* lanes
    cdef u64* kept                  # what was read: a ring of words
    cdef u64 kept_size
    cdef u64 kept_head
    cdef u64 kept_tail
    cdef void _read(self) noexcept nogil
