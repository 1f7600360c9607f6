# Which thread runs the turns of the engine's loop: the loop thread, or a thread that waits alone
# for one prediction. See loop_owner.hpp.
#
# Threads: as marked there. "Loop only" in other pages means: only the owner of the loop.
from clipper_core.runtime.machine cimport atomic, u32

cdef extern from "runtime/loop_owner.hpp" namespace "clipper" nogil:
    cdef cppclass LoopOwner "clipper::LoopOwner<>":
        atomic[u32] wakeups            # futex of the parked loop thread
        atomic[u32] taken
        bint by_waiter
        bint is_free() noexcept
        bint take() noexcept
        bint enter(bint waits) noexcept
        void gone() noexcept
        bint is_alone() noexcept
        bint wake_owner() noexcept
        void wake_loop_thread() noexcept
        bint was_woken(u32* seen) noexcept
        void mark_asleep() noexcept
        void mark_awake() noexcept
        void leave() noexcept
        void close() noexcept
        void learn(bint alone) noexcept
        void was_wrong() noexcept
        bint expects_an_owner() noexcept
