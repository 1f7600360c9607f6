# A batch on its way to its container: its rows as they lie in their cells, gathered, compressed, or
# only where they are shared.
#
# Threads: loop only.
from clipper_core.runtime.machine cimport u64
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.replica cimport Batch, Replica, RowSpec
from clipper_core.scheduling.task cimport Lanes

cdef Status replica_send(Replica* r, Lanes* lanes, const RowSpec* spec, Batch* batch,
                         u64 now_us) noexcept nogil
# ^ takes the batch over; NO_MEMORY or TOO_LARGE: nothing was queued and the caller still has it
