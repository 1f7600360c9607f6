# The handle of one version of one model: it takes rows and returns a Future. A hit is answered
# here, on the caller's thread. A miss is copied into a lane, and the loop is woken if it sleeps.
#
# Threads: any.
cimport numpy as cnp
from libcpp.vector cimport vector
from clipper_core.cache.clock_cache cimport Key, Similarity
from clipper_core.engine.engine cimport Engine
from clipper_core.results.completion cimport Block
from clipper_core.results.decider cimport Decider, RulingData
from clipper_core.results.ensemble_call cimport EnsembleCall
from clipper_core.results.future cimport Future
from clipper_core.runtime.machine cimport i64, u32, u64, u8
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.model_state cimport ModelState
from clipper_core.scheduling.submit cimport Intake
from clipper_core.wire.prediction cimport Value
from clipper_core.wire.record cimport RecordLayout

cdef int check_type(str name, str dtype, tuple shape) except -1
cdef int check_similar(str name, str dtype, tuple shape) except -1

cdef inline u64 near_uid(u64 uid) noexcept nogil:
    """Return the number with which keys of similar rows are made, so that they differ from keys of
    rows."""
    return uid | (<u64> 1 << 63)

cdef struct RowsOfArray:        # rows of an array, one after another
    const u8* data              # NULL: the rows are Python objects
    const i64* offsets          # where each row begins; NULL: all have row_bytes
    u64 row_bytes

cdef class Model:
    # -- Input: the type of rows, and the conversion of an input to a row.
    cdef readonly Engine engine
    cdef ModelState* state
    cdef readonly str name             # as messages show it: "svm:1"
    cdef readonly object dtype         # numpy's, None for str and bytes
    cdef readonly tuple shape          # of one row; (-1,) when rows differ in length
    cdef int typenum
    cdef u64 lane_bytes_max
    cdef readonly Similarity similar   # near rows share cache entries; None: only equal ones do
    cdef bint near                     # `similar` is set, and knows the type of the rows
    # (input) -> (dtype, shape), or (dtype, shape, tensors), for a model of type any
    cdef public object on_untyped
    cdef bint guessed                  # its type is that of its first input
    # packs named tensors into records, which are its rows; None: it takes one tensor
    cdef readonly object tensors
    cdef RecordLayout layout           # of these records

    cdef int _set_rows(self, str dtype, tuple shape, object tensors) except -1
    cdef int _settle_by(self, object x) except -1
    cdef object _row(self, object x, const void** row, u64* nbytes)
    # Return a record that is packed already as a row.
    cdef object _packed(self, object record, const void** row, u64* nbytes)
    cdef int _check_bytes(self, u64 nbytes) except -1       # raises the error of TOO_LARGE for a
                                                            # row that is too large
    cdef list _sequence(self, object rows)       # of an iterable
    cdef object _rows(self, object rows)         # all of them checked
    cdef cnp.ndarray _array(self, object x)
    cdef cnp.ndarray _array_of(self, object x)
    cdef object _from_sequence(self, object x)
    cdef object _without_mask(self, object x)
    cdef object _converted(self, object x, object array)
    cdef bint _fits(self, cnp.ndarray array)
    cdef bint _is_batch(self, object x)
    cdef object _refuse(self, object x, object cause)

    # queries and results
    cdef readonly u64 slo_us           # SLO of a predict() that names none
    # function (row) -> cost, or the text length:TENSOR. None: the core computes the cost from the
    # row's bytes
    cdef readonly object cost
    cdef bint cost_takes_rows          # `cost` takes many rows and returns as many costs
    cdef str cost_tensor               # tensor whose length is the cost; None: no tensor
    cdef public object watch           # function (row, lo, hi) -> number, which is mixed into the
                                       # row's key
    cdef readonly object outputs       # packs the dict of named tensors of an output; None: an
                                       # output is one tensor

    cdef int _declare_output(self, str dtype, object shape) except -1
    cdef int _give_up(self, Block* block, u32 first, u32 end) except -1
    cdef Key _key(self, const void* row, u64 nbytes, u64 salt, u64 mark) noexcept nogil
    cdef u64 _mark(self, object x, const void* row, u64 nbytes, u64 salt) except? 0
    cdef object _marks(self, cnp.ndarray rows, u64 salt)
    cdef bint _look_up(self, const void* row, u64 nbytes, u64 salt, u64 mark, Key* key,
                       Value* value) noexcept nogil
    # The same for a row of which the hash is known, of a model without marks and near rows.
    cdef bint _look_up_hashed(self, Key hashed, u64 nbytes, u64 salt, Key* key,
                              Value* value) noexcept nogil
    cdef bint _found(self, const Key* key, Value* value) noexcept nogil
    cdef u64 _now_us(self) noexcept nogil
    cdef Status _queue(self, const void* row, u64 nbytes, const Key* key, u64 salt, u64 slo_us,
                       u32 band, u64 now, Block* block,
                       u32 slot, u32 cost) noexcept nogil
    cdef u32 _cost(self, object x, const void* row, u64 nbytes) except? 0
    cdef u32 _length(self, const void* row, u64 nbytes) except? 0
    cdef object _called(self, object given)
    cdef u32 _counted(self, double cost) except? 0
    cdef void _refused(self, Status status, u64 slo_us, u32 band, Value* value) noexcept nogil
    cdef Status _submit(self, const void* row, u64 nbytes, u64 salt, u64 mark, u64 slo_us, u32 band,
                        u64 now, Block* block, u32 slot, u32 cost) noexcept nogil
    cdef Status _submit_missed(self, const void* row, u64 nbytes, const Key* key, u64 salt,
                               u64 slo_us, u32 band, u64 now, Block* block, u32 slot,
                               u32 cost) noexcept nogil
    cdef Future _evaluate(self, const void* row, u64 nbytes, const Key* key, u64 salt, u64 slo_us,
                          u32 band, u32 cost, object finish, object extra)
    cdef Future _predict(self, object x, u64 slo_us, u64 salt, u32 band, object finish,
                         object extra)
    cdef int _wait_for_room(self, u64 slo_us, u32 band, u64 until) except -1
    cdef int _set_cost(self, object cost, bint padded) except -1
    cdef object _unpacked(self, const void* row, u64 nbytes)
    cdef cnp.ndarray _costs_of_rows(self, object rows)
    cdef object _costs(self, object rows)
    cdef RowsOfArray _block(self, object rows) except *
    cdef object _row_at(self, object rows, RowsOfArray* lying, u32 i, const void** row,
                        u64* nbytes)
    cdef int _one_by_one(self, object rows, object costs, u64 slo, u64 salt, u32 band, u64 now,
                         u64 until, Block* block, u32 slot) except -1
    cdef object _set_intake_rows(self, Intake* intake, object rows)
    cdef object _begin_intake(self, Intake* intake, object rows, u64 slo, u64 salt, u32 band,
                              u64 now, Block* block, u32 slot)

cdef bint is_elsewhere(Model model, Model first) except -1        # whether `model` is in another
                                                                  # engine than `first`
cdef void mix(Future future, tuple models)                       # marks a future over models of
                                                                 # several engines
# Return the future of a query to models as predict_ensemble does, of the input `x`, or of a row of
# all models: then x is the object that owns it.
cdef Future ensemble_future(tuple models, Decider decider, object x, const void* given, u64 nbytes,
                            u64 slo_us, u64 salt, u32 band, object finish, object extra,
                            object weights, object starts_us, bint learn, str field)
cdef object true_bools(object array)
cpdef u64 slo_of_ms(object slo_ms, u64 otherwise) except? 0
cdef u64 slo_of(object slo_us, u64 otherwise) except? 0
cdef u64 salt_of(object salt) except? 1
cdef int band_of_row(u32 band) except -1        # checks the number of a band

# -- Querying several models at once and answering as soon as a decider can: the entry to ensemble
# calls (ensemble_call.pxd).
#
# Threads: any.
cdef struct Row:                # of one task
    const void* data
    u64 nbytes
    u64 mark                    # of its key
    u32 cost                    # as the cost function returned it; 0: there is none
    Key key

cdef class EnsembleRequest:
    cdef tuple models
    cdef EnsembleCall* ensemble_call
    cdef vector[Row] rows
    cdef list kept                  # objects that own the memory of the rows
    cdef u64 salt, slo_us, now_us
    cdef u32 band

    cdef u64 read(self, object x, const void* given, u64 nbytes) except? 0
    cdef int set_votes(self, object weights, object starts_us) except -1
    cdef int set_field(self, str name) except -1
    cdef int set_deferred(self, u32 i, u8* to) except -1
    cdef int look_up(self, u64 now) except -1
    cdef RulingData use_cache_hits(self) except *
    cdef int answer_at_once(self, const RulingData* ruling, u64 queued) except -1
    cdef int submit(self, u64 queued) except -1
    cdef int submit_one(self, u32 i) except -1
