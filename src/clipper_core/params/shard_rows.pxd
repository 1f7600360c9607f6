# Pulls and pushes of rows: of one table, or of several in one message, with dense variables.
#
# Threads: the loop's.
from clipper_core.params.shard_state cimport ShardConnection, ShardHead, ShardLoopState
from clipper_core.runtime.machine cimport u8

cdef void pull_rows(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil
cdef void pull_tables(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      const u8* payload) noexcept nogil
cdef void push_rows(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil
cdef void push_step(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil
cdef void pull_dense(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil
