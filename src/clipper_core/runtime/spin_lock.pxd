# A lock for a few instructions. A thread that holds it calls nothing that may wait or run Python.
#
# Threads: any, without the GIL.
from clipper_core.runtime.machine cimport atomic, u32

cdef extern from "runtime/spin_lock.hpp" namespace "clipper" nogil:
    void spin_lock(atomic[u32]& lock) noexcept
    void spin_unlock(atomic[u32]& lock) noexcept
