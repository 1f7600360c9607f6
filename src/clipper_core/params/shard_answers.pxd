# How a shard answers: at once, when followers have a push, or with a refusal.
#
# Threads: the loop's.
from clipper_core.params.shard_state cimport ShardConnection, ShardHead, ShardLoopState
from clipper_core.runtime.machine cimport i64, u32, u64, u8

cdef void put_answer(ShardLoopState* s, ShardConnection* c, const ShardHead* to,
                     u8 flags) noexcept nogil
# `rows` says why; the payload is the id, the lag or the limit that it is about
cdef void shard_refuse(ShardLoopState* s, ShardConnection* c, const ShardHead* to, u32 why,
                       i64 about) noexcept nogil
# where the rows of an answer go, of which the head is put already. NULL: nowhere, and so it was
# said, or it is lost
cdef u8* answer_room(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                     u64 whole) noexcept nogil
# whether a push is to be applied; else it is answered. scale: of the rate, by its age
cdef bint push_is_new(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      double* scale) noexcept nogil
# there is memory for its worker, so that this push will be told from its repetition
cdef bint push_is_known(ShardLoopState* s, const ShardHead* h) noexcept nogil
# it is applied and noted: answer now, or when followers have it. Under the log's guard
cdef void answer_push(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      const u32* counted) noexcept nogil
