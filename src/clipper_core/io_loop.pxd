# The mover: one thread, one epoll. It brings bytes and time to the engine, takes bytes from it, and sleeps until the engine says
# or somebody wakes it. It decides nothing and never takes the GIL.
#
# Threads: run() is the loop thread's body; everything else any thread.
from libcpp.vector cimport vector
from clipper_core.engine cimport Engine
from clipper_core.machine cimport atomic, u32, u64

cdef enum:
    LISTENERS_MAX = 8

cdef cppclass LoopState:
    int epoll_fd
    int listeners[8]
    u32 listener_count
    bint paused[8]              # out of descriptors: not accepting until one is free
    int spare_fd                # given up for a moment when descriptors run out, to turn the caller away
    bint spins                  # more than one core: a moment of polling may replace a sleep
    int spin_score              # spells of polling that paid, less those that did not
    atomic[u32] stop
    atomic[u64] steps           # turns of the loop
    atomic[u64] late_us_max     # longest sleep beyond what the engine asked for

cdef class IoLoop:
    cdef readonly Engine engine
    cdef LoopState* state
