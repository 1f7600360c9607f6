# Changes, sent to followers as they come.
#
# Threads: the loop's.
from clipper_core.params.shard_state cimport ShardConnection, ShardHead, ShardLoopState
from clipper_core.runtime.machine cimport u32

cdef enum:
    UNSENT_MAX = 4194304        # bytes; then the follower is waited for

# from now on the connection is sent what follower `stream`, from 1, has not been told
cdef void stream_begin(ShardLoopState* s, ShardConnection* c, u32 stream,
                       bint replays) noexcept nogil
# put what has changed into the connection of follower `number`. NULL: nothing was put
cdef ShardConnection* stream_changes(ShardLoopState* s, u32 number) noexcept nogil
# the follower has all up to a position
cdef void stream_received(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil
# the connection is closed
cdef void stream_closed(ShardLoopState* s, ShardConnection* c) noexcept nogil
