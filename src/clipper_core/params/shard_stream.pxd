# Sends changes to followers as they are made, or pushes before they are applied, so that each
# follower applies them itself.
#
# Threads: the loop's.
from clipper_core.params.shard_state cimport ShardConnection, ShardHead, ShardLoopState
from clipper_core.runtime.machine cimport u32, u64, u8

cdef enum:
    UNSENT_MAX = 4194304        # bytes sent to a follower and not acknowledged; above that, pushes
                                # wait for it

# Start to send the changes that follower `stream` (from 1) does not have over this connection.
cdef void stream_begin(ShardLoopState* s, ShardConnection* c, u32 stream,
                       bint replays) noexcept nogil
# Append the changes to the output of follower `number`. Return its connection; NULL if nothing was
# appended.
cdef ShardConnection* stream_changes(ShardLoopState* s, u32 number) noexcept nogil
# Handle RECEIVED: the follower has all changes up to a position.
cdef void stream_received(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil
# Note that the connection is closed.
cdef void stream_closed(ShardLoopState* s, ShardConnection* c) noexcept nogil

# Return whether a follower that applies the push in `works` gets the same rows as the shard,
# because the result depends only on what the copy has. nbytes: of its ids and gradients
cdef bint replay_is_exact(ShardLoopState* s, u64 nbytes) noexcept nogil
# Send the push to followers that have all changes up to `begin`; afterwards they have those up to
# the log's end. version: of the model, with the push. Its parts are from `data` to `end`.
cdef void replay_send(ShardLoopState* s, const ShardHead* h, u64 begin, u64 version,
                      const u8* data, const u8* end) noexcept nogil
