# One shard of a parameter server as a process: connections, rows pulled and pushed without the GIL,
# and all else given to Python.
#
# One thread, so pushes have one order; a snapshot or a follower reads rows beside it, under their
# locks (embedding_rows).
#
# Threads: run() is the loop thread's body; the rest any.
from clipper_core.params.shard_state cimport Counts, Follower, ShardLoopState
from clipper_core.runtime.machine cimport u32

cdef class ShardLoop:
    cdef ShardLoopState* state
    cdef list tables            # kept alive
    cdef list variables         # as well
    cdef readonly Counts counts

    cdef Follower* _follower(self, u32 number) except NULL
