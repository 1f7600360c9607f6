# Hierarchical timer wheel over ticks: insert, advance(now), next. It holds no clock; time is an
# argument.
#
# Threads: loop only. Single writer, no locks.
# Source: Varghese & Lauck, "Hashed and Hierarchical Timing Wheels" (1987); append-only buckets
# instead of linked lists.
#
# Cancelling is lazy: the owner of a ticket forgets it, and the wheel calls `is_live` when it moves
# an entry to a finer level, when it expires one, and when it must make room. A ticket is any 64-bit
# number that its owner never uses twice. An entry that is not live is dropped at once, so its owner
# is not called again; `is_live` must not call the wheel.
#
# A ticket fires at the first tick that starts at or after its deadline: never early, less than a
# tick late; one whose deadline the wheel has passed fires on the next advance. The tick is the
# greatest power of two not above tick_us. Times above 2**62 us count as 2**62.
from clipper_core.runtime.machine cimport u32, u64
from clipper_core.runtime.status cimport Status

ctypedef bint (*IsLive)(void* owner, u64 ticket) noexcept nogil

cdef struct Wheel                                   # 8 levels x 512 buckets of chunked arrays
                                                    # (timer_wheel.pyx)

cdef u64 NEVER                                      # returned by wheel_next_us for an empty wheel

cdef Wheel* wheel_new(u64 now_us, u32 tick_us, u64 entries_max, IsLive is_live,
                      void* owner) noexcept nogil
cdef void wheel_free(Wheel* wheel) noexcept nogil

# Return OK; NO_MEMORY; or FULL if entries_max is reached and a bounded sweep found no dead entry.
# The next sweep continues from there.
cdef Status wheel_insert(Wheel* wheel, u64 deadline_us, u64 ticket) noexcept nogil

# Write the live tickets whose tick has been reached to `due`, and return their number. One call
# reads 16,384 entries at most, so more may be left: call again, now or after other work, while the
# number equals due_max or wheel_next_us(wheel) <= now_us.
cdef u32 wheel_advance(Wheel* wheel, u64 now_us, u64* due, u32 due_max) noexcept nogil

# Return a time before which no ticket is due (a lower bound); NEVER if the wheel is empty. An
# advance at that time yields tickets, or drops or moves entries, or increases the bound, so a loop
# that sleeps until then makes progress.
cdef u64 wheel_next_us(Wheel* wheel) noexcept nogil

cdef u64 wheel_count(Wheel* wheel) noexcept nogil   # entries held, dead ones included
