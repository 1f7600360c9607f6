# Pushes, sent to followers before they are applied, so that each follower applies them itself.
#
# Threads: the loop's.
from clipper_core.params.shard_state cimport ShardHead, ShardLoopState
from clipper_core.runtime.machine cimport u64, u8

# whether the push in `works` changes a copy as it changes the shard: nothing depends on what a copy
# does not have. nbytes: of its ids and gradients
cdef bint replay_is_exact(ShardLoopState* s, u64 nbytes) noexcept nogil
# send it to followers that have all changes up to `begin`; they have those up to the log's end then
# version: of the model, with it. parts: of the push, from `data` to `end`
cdef void replay_send(ShardLoopState* s, const ShardHead* h, u64 begin, u64 version,
                      const u8* data, const u8* end) noexcept nogil
