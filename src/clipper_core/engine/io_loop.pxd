# The mover: one epoll, and one thread at a time. It brings bytes and time to the engine, takes
# bytes from it, and sleeps until the time that the engine sets, or a wake-up. It decides nothing
# and never takes the GIL.
#
# Threads: run() is the loop thread's body; a thread that leads (loop_owner.hpp) runs turns in its
# place, while that one is parked. Everything else any thread.
from clipper_core.engine.engine cimport Engine
from clipper_core.runtime.machine cimport atomic, u32, u64
from clipper_core.scheduling.scheduler cimport EngineState

cdef enum:
    LISTENERS_MAX = 8

cdef cppclass LoopState:
    EngineState* engine
    int epoll_fd
    int listeners[8]
    u32 listener_count
    bint paused[8]              # out of descriptors: not accepting until one is free
    int spare_fd                # given up for a moment when descriptors run out, to turn the caller
                                # away
    bint spins                  # more than one core: a moment of polling may replace a sleep
    int spin_score              # spins of polling that paid, less those that did not
    u64 until_us                # when the engine needs its next step
    u32 quiet                   # ticks in a row, parked, without a leader
    u64 batches_seen
    atomic[u32] stop
    atomic[u64] steps           # turns of the loop
    atomic[u64] late_us_max     # longest oversleep

cdef class IoLoop:
    cdef readonly Engine engine
    cdef LoopState* state
