# Changes of a shard, as a follower receives them.
#
# Threads: one at a time, but to acknowledge: any.
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
    cdef mutex guard            # of what is sent

    cdef bint send_position(self, u64 position, u8 flags) noexcept nogil
    cdef int comes(self, int wait_ms) noexcept nogil
