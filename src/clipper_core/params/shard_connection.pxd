# The connections of a shard: accepted, watched, closed, the bounds of those that are not admitted
# yet (strangers), and their messages: rows are pulled and pushed here, all else is given to Python.
#
# Threads: the loop's.
from clipper_core.params.shard_state cimport ShardConnection, ShardHead, ShardLoopState
from clipper_core.runtime.machine cimport i64, u32, u64, u8

# -- Pulls and pushes of rows: of one table, or of several in one message, with dense variables.
#
# Threads: the loop's.
cdef void pull_rows(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil
cdef void pull_tables(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      const u8* payload) noexcept nogil
cdef void push_rows(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil
cdef void push_step(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil
cdef void pull_dense(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil

cdef void connection_accept(ShardLoopState* s, u32 listener, u64 now_us) noexcept nogil
cdef void connection_close(ShardLoopState* s, ShardConnection* c) noexcept nogil
# False: the number is in use
cdef bint connection_admit(ShardLoopState* s, ShardConnection* c, u64 worker,
                           u64 incarnation) noexcept nogil
# close those that were not admitted in time
cdef void strangers_expire(ShardLoopState* s, u64 now_us) noexcept nogil

# Take the frames that have come whole, until `left`, the bytes of this turn, is used up.
# False: what came is no frame.
cdef bint take_frames(ShardLoopState* s, ShardConnection* c, i64* left) noexcept nogil
# it must read, or Python answer, before more is taken from it
cdef bint is_busy(ShardConnection* c) noexcept nogil
