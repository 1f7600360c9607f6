"""The lock of the states in memory, which Python and the core take."""
cimport cython

from clipper_core.runtime.machine cimport futex_wait, futex_wake_all, relaxed, u64

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() noexcept
    int PyErr_CheckSignals() except -1

cdef u64 SIGNALS_US = 100_000       # who waits looks so often for signals


@cython.final
cdef class StateLock:
    """A reentrant lock for `with`. Threads: any, with the GIL.

    Compared with `threading.RLock` the core takes it without a call of Python. Raises RuntimeError
    if a thread gives it back that does not hold it; waiting is ended by what a signal raises.
    """

    def __enter__(self):
        self.take()
        return self

    def __exit__(self, kind, error, trace):
        self.give()

    cdef int take(self) except -1:
        cdef unsigned long me = PyThread_get_thread_ident()
        if self.depth and self.owner != me:
            self._wait()
        self.owner = me
        self.depth += 1
        return 0

    cdef int give(self) except -1:
        if not self.depth or self.owner != PyThread_get_thread_ident():
            raise RuntimeError("the lock is not held by this thread")
        self.depth -= 1
        if not self.depth and self.waiting:
            self.turn.fetch_add(1, relaxed)
            futex_wake_all(&self.turn)
        return 0

    cdef int _wait(self) except -1:
        """Wait until it is free. The GIL is held when it is, so that nobody takes it first."""
        cdef u32 turn
        self.waiting += 1
        try:
            while self.depth:
                turn = self.turn.load(relaxed)      # read with the GIL: no give() is missed
                with nogil:
                    futex_wait(&self.turn, turn, SIGNALS_US)
                PyErr_CheckSignals()
        finally:
            self.waiting -= 1
        return 0
