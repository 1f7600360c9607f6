# The side of a follower that receives the changes of a shard.
#
# Threads: one at a time; only acknowledging may be done by any thread.
from clipper_core.params.shard_state cimport ShardHead, mutex
from clipper_core.params.shard_loop cimport ShardLoop
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u64, u8
from clipper_core.runtime.spin cimport Spin

cdef class ChangeReceiver:
    cdef int fd
    cdef Bytes input
    cdef ShardHead head
    cdef ShardLoop copy
    cdef u64 frame_bytes_max
    cdef Spin spin
    cdef mutex guard            # guards sending

    cdef bint send_position(self, u64 position, u8 flags) noexcept nogil
    cdef int comes(self, int wait_ms) noexcept nogil
