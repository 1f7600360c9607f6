# Quotas: how many rows a table, and how many rows and bytes all tables of a shard may have.
#
# Threads: whoever holds `still`.
from clipper_core.params.shard_state cimport PartWork, ShardLoopState
from clipper_core.runtime.machine cimport i64, u64

cdef enum:
    QUOTA_ROW_BYTES = 24        # of a row beside its floats: its stamp, and its place in the index

# whether the rows that parts of a push would make exceed a quota. about: the number of the table;
# -1: the quota of the shard
cdef bint quotas_exceeded(ShardLoopState* s, const PartWork* works, u64 n,
                          i64* about) noexcept nogil
