# What a shard does with the messages of a connection: rows pulled and pushed here, all else given
# to Python.
#
# Threads: the loop's.
from clipper_core.params.shard_state cimport ShardConnection, ShardLoopState

# all that have come whole. False: what came is no frame
cdef bint take_frames(ShardLoopState* s, ShardConnection* c) noexcept nogil
# it must read, or Python answer, before more is taken from it
cdef bint is_busy(ShardConnection* c) noexcept nogil
