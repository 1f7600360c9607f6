# Writes a batch to its container's connection: rows are sent from their cells, gathered,
# compressed, or, where the container maps them, only referred to.
#
# Threads: loop only.
from clipper_core.runtime.machine cimport u64
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.replica cimport Batch, Replica, RowSpec
from clipper_core.scheduling.task cimport Lanes

# Queue the frame of a batch and take the batch over. NO_MEMORY, TOO_LARGE: nothing was queued, and
# the caller keeps it.
cdef Status replica_send(Replica* r, Lanes* lanes, const RowSpec* spec, Batch* batch,
                         u64 now_us) noexcept nogil
