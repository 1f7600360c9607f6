# The lock of the states in memory, which Python and the core take: reentrant, for threads with the
# GIL. Who takes it while it is free changes two numbers, since the GIL keeps all others away; only
# who has to wait makes system calls.
#
# Threads: any, with the GIL.
from clipper_core.runtime.machine cimport atomic, u32

cdef class StateLock:
    cdef unsigned long owner    # the thread that holds it
    cdef u32 depth              # how often that thread took it; 0: it is free
    cdef u32 waiting            # threads that wait
    cdef atomic[u32] turn       # changes when somebody may take it

    cdef int take(self) except -1
    cdef int give(self) except -1
    cdef int _wait(self) except -1
