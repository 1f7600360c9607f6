# The mover: one epoll, and one thread at a time. It brings bytes and time to the engine, takes
# bytes from it, and sleeps until the time that the engine sets, or a wake-up. It decides nothing
# and never takes the GIL.
#
# Threads: run() is the loop thread's body; a thread that leads (loop_owner.hpp) runs turns in its
# place, while that one is parked. Everything else any thread.
from clipper_core.engine.engine cimport Engine
from clipper_core.runtime.machine cimport atomic, u32, u64
from clipper_core.runtime.reactor cimport Reactor
from clipper_core.runtime.spin cimport Spin
from clipper_core.scheduling.scheduler cimport EngineState

cdef cppclass LoopState:
    EngineState* engine
    Reactor reactor
    Spin spin
    u64 until_us                # when the engine needs its next step
    u32 quiet                   # ticks in a row, parked, without a leader
    u64 batches_seen
    atomic[u32] stop
    atomic[u64] steps           # turns of the loop
    atomic[u64] late_us_max     # longest oversleep

cdef class IoLoop:
    cdef readonly Engine engine
    cdef LoopState* state
