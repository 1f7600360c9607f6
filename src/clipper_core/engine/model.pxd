# The door for callers: one version of one model, rows in, a Future out. A hit is answered here, on
# the caller's thread; a miss is copied into a lane and the loop is woken if it sleeps.
#
# Threads: any.
cimport numpy as cnp
from clipper_core.cache.clock_cache cimport Key
from clipper_core.engine.input_schema cimport InputSchema
from clipper_core.results.completion cimport Block
from clipper_core.results.future cimport Future
from clipper_core.runtime.machine cimport u32, u64
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.bulk cimport Intake
from clipper_core.wire.prediction cimport Value

cdef class Model(InputSchema):
    cdef readonly u64 slo_us           # when predict() is not told
    cdef readonly object cost          # (row) -> its cost; None: not a function's
    cdef public object watch           # (row, lo, hi) -> a number, mixed into the row's key:
                                       # another number, another prediction
    cdef readonly object outputs       # packs a dict of named tensors, which an output is; None: it
                                       # is one tensor

    cdef int _declare_output(self, str dtype, object shape) except -1
    cdef int _give_up(self, Block* block, u32 first, u32 end) except -1
    cdef Key _key(self, const void* row, u64 nbytes, u64 salt, u64 mark) noexcept nogil
    cdef u64 _mark(self, object x, const void* row, u64 nbytes, u64 salt) except? 0
    cdef object _marks(self, cnp.ndarray rows, u64 salt)
    cdef bint _look_up(self, const void* row, u64 nbytes, u64 salt, u64 mark, Key* key,
                       Value* value) noexcept nogil
    cdef u64 _now_us(self) noexcept nogil
    cdef Status _queue(self, const void* row, u64 nbytes, const Key* key, u64 salt, u64 slo_us,
                       u64 now, Block* block,
                       u32 slot, u32 cost) noexcept nogil
    cdef u32 _cost(self, object row) except? 0
    cdef void _refused(self, Status status, u64 slo_us, Value* value) noexcept nogil
    cdef Status _submit(self, const void* row, u64 nbytes, u64 salt, u64 mark, u64 slo_us, u64 now,
                        Block* block,
                        u32 slot, u32 cost) noexcept nogil
    cdef Future _evaluate(self, const void* row, u64 nbytes, const Key* key, u64 salt, u64 slo_us,
                          u32 cost, object finish, object extra)
    cdef Future _predict(self, object x, u64 slo_us, u64 salt, object finish, object extra)
    cdef int _wait_for_room(self, int klass, u64 until) except -1
    cdef int _set_cost(self, object cost, bint padded) except -1
    cdef list _costs(self, object rows)
    cdef int _one_by_one(self, object rows, list costs, u64 slo, u64 salt, u64 now, u64 until,
                         Block* block, u32 slot) except -1
    cdef object _set_intake_rows(self, Intake* intake, object rows)
    cdef object _begin_intake(self, Intake* intake, object rows, u64 slo, u64 salt, u64 now,
                              Block* block, u32 slot)

cdef bint is_elsewhere(Model model, Model first) except -1        # in another engine
cdef void mix(Future future, tuple models)                       # models of several engines
cdef u64 slo_of(object slo_us, u64 otherwise) except? 0
