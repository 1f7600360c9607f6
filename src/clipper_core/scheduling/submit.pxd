# A row into its lane, by whoever has its bytes: the last step of submitting, without Python.
#
# Threads: any; lane_prepare under the GIL, which is what makes a lane once.
from clipper_core.results.completion cimport Block
from clipper_core.runtime.machine cimport u32, u64
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.model_state cimport ModelState
from clipper_core.scheduling.scheduler cimport EngineState
from clipper_core.wire.prediction cimport Value

# the first number of bytes that no row may have
cdef u64 row_bytes_end(const EngineState* e) noexcept nogil
# the lane of that SLO's class
cdef void lane_prepare(EngineState* e, ModelState* m, u64 slo_us) noexcept nogil
cdef Status row_submit(EngineState* e, ModelState* m, const void* row, u64 nbytes, const Key* key,
                       u64 salt, u64 slo_us,
                       u64 now_us, Block* block, u32 slot, u32 cost) noexcept nogil
# ^ OK, or why not; FULL without a lane. key NULL: neither joined nor cached. cost: as the caller
# gives it, where the model asks for that
cdef void row_refused(ModelState* m, Status status, u64 slo_us, u64 now_us,
                      Value* value) noexcept nogil
# ^ counts it; for FULL `value` says after how many seconds another try may succeed
