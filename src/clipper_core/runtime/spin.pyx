"""See spin.pxd; and a reader of sockets that does so."""
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, errno

from clipper_core.runtime.machine cimport monotonic_us, pause, u64, u8

import os

cdef extern from "<sys/socket.h>" nogil:
    int MSG_DONTWAIT
    int MSG_WAITALL
    ssize_t recv(int fd, void* to, size_t n, int flags) noexcept

cdef extern from "<poll.h>" nogil:
    short POLLIN
    ctypedef struct pollfd:
        int fd
        short events
    int poll(pollfd* fds, unsigned long n, int timeout_ms) noexcept


cdef void spin_init(Spin* s, u64 us) except *:
    s.us = us if len(os.sched_getaffinity(0)) > 1 else 0
    s.trials, s.score = 0, 0


cdef ssize_t _receive(int fd, u8* to, u64 n, int flags) noexcept nogil:
    """Receive as recv does, and return what it returns; -errno after an error."""
    cdef ssize_t got = recv(fd, to, n, flags)
    return got if got >= 0 else -errno


cdef class SpinPolicy:
    """The spin policy alone: call begin(), then on() after each poll that found nothing, or paid().
    Threads: one.

    spin_us: a spin, at most.  now_us: monotonic.  score: spins that paid, less those that did
    not; below 0 few are tried.
    """
    cdef Spin spin

    def __cinit__(self, u64 spin_us):
        self.spin.us = spin_us

    @property
    def score(self):
        return self.spin.score

    def begin(self, u64 now_us):
        return spin_begin(&self.spin, now_us)

    def on(self, u64 now_us):
        return spin_on(&self.spin, now_us)

    def paid(self):
        spin_paid(&self.spin)


cdef class Receiver:
    """Reads what is about to come over a socket that blocks, and polls for a moment before it
    sleeps. Threads: one at a time.

    spin_us: such a moment, at most; 0: none, as where this thread may run on a single core.
    spins: begun so far.
    """
    cdef Spin spin
    cdef readonly u64 spins

    def __cinit__(self, *, u64 spin_us=0):
        spin_init(&self.spin, spin_us)

    def fill(self, int fd, into not None):
        """Fill all memory of `into`. Return False if the other side closed the connection. Errors:
        OSError; BlockingIOError when the socket's SO_RCVTIMEO is over."""
        cdef Py_buffer view
        cdef ssize_t got = -EINTR
        cdef u64 at = 0
        PyObject_GetBuffer(into, &view, PyBUF_WRITABLE)
        try:
            while got == -EINTR:
                PyErr_CheckSignals()
                with nogil:
                    got = self.whole(fd, <u8*> view.buf, view.len, &at)
        finally:
            PyBuffer_Release(&view)
        if got < 0:
            raise OSError(-got, os.strerror(-got))
        return got != 0

    cdef ssize_t whole(self, int fd, u8* to, u64 n, u64* at) noexcept nogil:
        """Receive the bytes from `at` on, and advance `at`. Return a number above 0 when all have
        arrived; 0 if the connection is closed; -errno after an error."""
        cdef ssize_t got = 1
        while at[0] < n and got > 0:
            got = self.some(fd, to + at[0], n - at[0])
            if got > 0:
                at[0] += <u64> got
        return got

    cdef ssize_t some(self, int fd, u8* to, u64 n) noexcept nogil:
        """Read what has arrived or arrives within a spin; else sleep until all has arrived. Return
        the number of bytes; 0 if the connection is closed; -errno after an error."""
        cdef ssize_t got = -EAGAIN
        if self.spin.us:
            got = _receive(fd, to, n, MSG_DONTWAIT)
            if got == -EAGAIN and self.comes(fd):
                got = _receive(fd, to, n, MSG_DONTWAIT)
        return got if got != -EAGAIN else _receive(fd, to, n, MSG_WAITALL)

    cdef bint comes(self, int fd) noexcept nogil:
        cdef pollfd one
        if not spin_begin(&self.spin, monotonic_us()):
            return False
        self.spins += 1
        one.fd, one.events = fd, POLLIN
        while poll(&one, 1, 0) == 0:
            pause()
            if not spin_on(&self.spin, monotonic_us()):
                return False
        spin_paid(&self.spin)
        return True
