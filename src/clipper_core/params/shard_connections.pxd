# The connections of a shard: accepted, watched, closed; and the bounds of those that are not
# admitted yet (strangers).
#
# Threads: the loop's.
from clipper_core.params.shard_line cimport Caller, DoorState
from clipper_core.runtime.machine cimport u64

cdef void connection_accept(DoorState* s, int listener, u64 now_us) noexcept nogil
cdef void connection_watch(DoorState* s, Caller* c, int op) noexcept nogil      # op: of epoll_ctl
cdef void connection_close(DoorState* s, Caller* c) noexcept nogil
# False: the number is in use
cdef bint connection_admit(DoorState* s, Caller* c, u64 worker, u64 incarnation) noexcept nogil
# close those that were not admitted in time
cdef void strangers_expire(DoorState* s, u64 now_us) noexcept nogil
