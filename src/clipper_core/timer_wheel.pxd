# Hierarchical timer wheel over ticks: insert, advance(now), next. It holds no clock; time is an argument.
#
# Threads: loop only. Single writer, no locks.
# Source: Varghese & Lauck, "Hashed and Hierarchical Timing Wheels" (1987); append-only buckets instead of linked lists.
#
# Cancelling is lazy: the owner of a ticket forgets it, and the wheel asks `is_live` when it moves an entry to a finer level,
# when it expires one, and when it must make room. A ticket is any 64-bit number that its owner never uses twice.
from clipper_core.machine cimport u32, u64
from clipper_core.status cimport Status

ctypedef bint (*IsLive)(void* owner, u64 ticket) noexcept nogil

cdef struct Wheel                                   # 4 levels x 256 buckets of chunked arrays (timer_wheel.pyx)

cdef u64 NEVER                                      # what wheel_next_us answers when nothing is due, ever

cdef Wheel* wheel_new(u64 now_us, u32 tick_us, u64 entries_max, IsLive is_live, void* owner) noexcept nogil
cdef void wheel_free(Wheel* wheel) noexcept nogil
cdef Status wheel_insert(Wheel* wheel, u64 deadline_us, u64 ticket) noexcept nogil   # OK; FULL only after a sweep of the dead
cdef u32 wheel_advance(Wheel* wheel, u64 now_us, u64* due, u32 due_max) noexcept nogil
# -> count of live tickets written to `due`, whose tick has passed; equal to due_max: call again, there may be more
cdef u64 wheel_next_us(Wheel* wheel) noexcept nogil # no ticket is due before this time (a bound, never late); NEVER if empty
cdef u64 wheel_count(Wheel* wheel) noexcept nogil   # entries held, dead ones included
