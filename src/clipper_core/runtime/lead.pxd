# Who runs the turns of the loop: the loop thread, or a thread that waits alone for one prediction.
# lead.hpp tells why and how.
#
# Threads: as marked there; what the holder of the baton may do is what "loop only" means everywhere
# else.
from clipper_core.runtime.machine cimport atomic, u32

cdef extern from "runtime/lead.hpp" namespace "clipper" nogil:
    cdef cppclass Lead "clipper::Lead<>":
        atomic[u32] bell            # for futex_wait() on what was heard
        atomic[u32] taken
        bint by_waiter
        bint is_free() noexcept
        bint take() noexcept
        bint enter(bint waits) noexcept
        void gone() noexcept
        bint is_alone() noexcept
        bint rouse() noexcept
        void ring() noexcept
        bint hears(u32* heard) noexcept
        void doze() noexcept
        void rise() noexcept
        void leave() noexcept
        void close() noexcept
        void learn(bint alone) noexcept
        void was_wrong() noexcept
        bint expects_a_leader() noexcept
