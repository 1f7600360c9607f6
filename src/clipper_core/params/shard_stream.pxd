# Changes, sent to followers as they come; and pushes, sent before they are applied, so that each
# follower applies them itself.
#
# Threads: the loop's.
from clipper_core.params.shard_state cimport ShardConnection, ShardHead, ShardLoopState
from clipper_core.runtime.machine cimport u32, u64, u8

cdef enum:
    UNSENT_MAX = 4194304        # bytes; then the follower is waited for

# from now on the connection is sent the changes that follower `stream`, from 1, does not have
cdef void stream_begin(ShardLoopState* s, ShardConnection* c, u32 stream,
                       bint replays) noexcept nogil
# put what has changed into the connection of follower `number`. NULL: nothing was put
cdef ShardConnection* stream_changes(ShardLoopState* s, u32 number) noexcept nogil
# the follower has all up to a position
cdef void stream_received(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil
# the connection is closed
cdef void stream_closed(ShardLoopState* s, ShardConnection* c) noexcept nogil

# whether the push in `works` changes a copy as it changes the shard: nothing depends on what a copy
# does not have. nbytes: of its ids and gradients
cdef bint replay_is_exact(ShardLoopState* s, u64 nbytes) noexcept nogil
# send it to followers that have all changes up to `begin`; they have those up to the log's end then
# version: of the model, with it. parts: of the push, from `data` to `end`
cdef void replay_send(ShardLoopState* s, const ShardHead* h, u64 begin, u64 version,
                      const u8* data, const u8* end) noexcept nogil
