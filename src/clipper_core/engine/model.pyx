"""Submits rows: a row becomes a cache hit or a task, and the caller gets a Future at once."""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.number cimport PyNumber_Index
from libc.math cimport ceil
from libc.string cimport memcpy

import math
from threading import current_thread, main_thread

import numpy as np

from clipper_core.cache.clock_cache cimport (
    cache_fill, cache_forget, cache_lookup, key_marked, key_of, key_of_hashed,
    projection_cells,
)
from clipper_core.results.completion cimport (
    CompletionState, block_drop, completion_wake_loop_thread, home_of, slot_fill, slots_claim,
)
from clipper_core.results.decider cimport (
    ANSWER, ENSEMBLE_TASKS_MAX, NEVER_US, OUTSTANDING, SUBMIT, UNSUBMITTED, Decider,
    decider_may_extra, decider_query,
)
from clipper_core.results.ensemble_call cimport (
    ensemble_call_answer, ensemble_call_decide, ensemble_call_lock, ensemble_call_new,
    ensemble_call_record, ensemble_call_refused, ensemble_call_submitted, ensemble_call_submitting,
    ensemble_call_unlock, task_bit,
)
from clipper_core.results.future cimport (
    future_at_once, future_new, future_of_ensemble, future_of_none,
)
from clipper_core.results.part_stream cimport (
    PartStream, part_stream_announce, part_stream_new, parts_future_new,
)
from clipper_core.runtime.dtype cimport ANY, STR, all_finite, itemsize
from clipper_core.runtime.histogram cimport count
from clipper_core.runtime.machine cimport i32, i64, monotonic_us, relaxed
from clipper_core.runtime.status cimport (
    BAD_INPUT, CANCELLED, CLOSED, NO_MEMORY, OK, TOO_LARGE, UNNEEDED, raise_for,
)
from clipper_core.scheduling.bands cimport BANDS
from clipper_core.scheduling.deferred_calls cimport DeferredCall
from clipper_core.scheduling.lane cimport Lane, submitter_enter, submitter_leave
from clipper_core.scheduling.model_state cimport (
    COST_BYTES, COST_GIVEN, COST_LENGTH, LANE_CLASSES, cost_batch_new, model_drop, row_cost,
)
from clipper_core.scheduling.scheduler cimport EngineState
from clipper_core.scheduling.submit cimport (
    TensorColumn, array_lane_prepare, gate_at, intakes_end, intakes_feed, lane_at, lane_prepare,
    look_rows_of, row_bytes_end, row_refused, row_submit, wait_for_room,
)
from clipper_core.wire.comparison cimport Field
from clipper_core.wire.prediction cimport (
    RANK_MAX, TAG_NONE, object_value, record_layout, record_value, value_drop, value_object,
)
from clipper_core.wire.record cimport RecordLayout, RecordPart, RecordPlace, record_place

from clipper_core.runtime.dtype import NAMES, given_type
from clipper_core.wire.record import pack_vectors

cnp.import_array()

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef u64 ROW_BYTES_MAX = <u64> 1 << 32

cdef dict _typenums = {"bool": np.dtype("?"), "u8": np.dtype("u1"), "i8": np.dtype("i1"),
                       "u16": np.dtype("<u2"),
                       "i16": np.dtype("<i2"), "u32": np.dtype("<u4"), "i32": np.dtype("<i4"),
                       "u64": np.dtype("<u8"),
                       "i64": np.dtype("<i8"), "f16": np.dtype("<f2"), "f32": np.dtype("<f4"),
                       "f64": np.dtype("<f8")}


cdef int check_similar(str name, str dtype, tuple shape) except -1:
    if dtype not in ("f32", "f64", "any") or shape == (-1,):
        raise_for(BAD_INPUT,
                  f"{name}: similar rows are f32 or f64 of one shape, not {dtype}{list(shape)}")
    return 0


cdef str _counted(object values):
    """Return how many values a list holds, and of what: `64 values of type str`."""
    kinds = {type(one).__name__ for one in values}
    if len(kinds) != 1:
        return f"{len(values)} values"
    return f"{len(values)} values of type {kinds.pop()}"


cdef int check_type(str name, str dtype, tuple shape) except -1:
    if (dtype not in NAMES and dtype != "any") or len(shape) > RANK_MAX:
        raise_for(BAD_INPUT, f"{name}: no type of rows is {dtype} with {len(shape)} dimensions")
    if (shape != (-1,) and any([not 0 < n <= 0xFFFFFFFF for n in shape])
        or 8 * math.prod(shape) > ROW_BYTES_MAX):
        raise_for(BAD_INPUT, f"{name}: a row cannot have the shape {shape}")
    return 0


cdef extern from *:
    """
    static inline int clipper_log2(unsigned long long n) { return 63 - __builtin_clzll(n | 1); }
    """
    int log2_of "clipper_log2"(u64 n) noexcept nogil

cdef u64 SLO_MAX_US = <u64> 1 << (LANE_CLASSES - 1)

cdef u64 ARRAY_SLO_US = 60000000        # of an array for which no SLO is given

cdef enum:
    CHUNKS_FROM = 32            # rows; fewer are submitted one by one
    TASKS_MAX = 1073741824      # of one future

cdef double COST_MAX = 4000000.0        # largest cost of a row that a function may return
cdef double COST_PARTS = 1000.0         # a function's costs are counted in thousandths
cdef u64 SPREAD = <u64> 0x9e3779b97f4a7c15  # of small numbers over a word


cdef object true_bools(object array):
    """Return an array of bools, each of whose bytes is 0 or 1. One that was made of other bytes,
    such as a mask of 0 and 255, is copied."""
    data = array.view(np.uint8)
    return array if data.max(initial=0) <= 1 else data != 0


cdef u64 slo_of(object slo_us, u64 otherwise) except? 0:
    """Return an SLO in microseconds, at least 1."""
    if slo_us is None:
        return otherwise
    slo_us = int(slo_us)
    if not 1 <= slo_us < SLO_MAX_US:
        raise_for(BAD_INPUT,
                  f"an SLO must lie between 1 microsecond and 100 days, not {slo_us} microseconds")
    return slo_us


cpdef u64 slo_of_ms(object slo_ms, u64 otherwise) except? 0:
    """Return an SLO that was given in milliseconds in microseconds, at least 1; None: otherwise.
    Raises BAD_INPUT. Threads: any."""
    cdef double slo_us = 0
    if slo_ms is None:
        return otherwise
    try:
        slo_us = 0 if isinstance(slo_ms, (str, bytes, bool)) else float(slo_ms) * 1000
    except (TypeError, ValueError, OverflowError):
        pass                    # below
    if not 0 < slo_us < <double> SLO_MAX_US:
        raise_for(BAD_INPUT, f"slo_ms={slo_ms!r:.100}: it must lie above 0 and below "
                             f"{SLO_MAX_US / 1000:g} ms")
    return max(<u64> 1, <u64> slo_us)


cdef int band_of_row(u32 band) except -1:
    """Check the number of a band. Raises BAD_INPUT."""
    if band >= BANDS:
        raise_for(BAD_INPUT, f"band {band}: bands have the numbers 0 to {BANDS - 1}")
    return <int> band


cdef object NO_SALT = 0         # the default: it is not converted


cdef u64 salt_of(object salt) except? 1:
    """Return the salt of a query. Raises BAD_INPUT. Threads: any."""
    if salt is NO_SALT:
        return 0
    try:
        return PyNumber_Index(salt)
    except (OverflowError, TypeError):
        raise_for(BAD_INPUT, f"salt={salt!r:.40}: it is a whole number from 0 to 2**64 - 1")


@cython.no_gc_clear                  # __dealloc__ needs `engine`
@cython.final
cdef class Model:
    """A version of a model in an engine. Threads: any.

    `uid` names the registered version and is never used twice (it keys the cache). `dtype` is a
    name of clipper_core.runtime.dtype (`f32`, `str`, ...); `shape` the shape of one row, `(-1,)`
    for numeric rows that differ in length. `lane_rows` bounds how many tasks of like SLO may wait
    or be in flight. `finite` refuses NaN and infinities. `similar` lets near rows of floats share
    cache entries. `unlisted`: Engine.snapshot() leaves it out; Engine.model_counts() counts it, and
    its lanes and its number are freed once no reference to it exists, its queries are answered and
    its replicas have disconnected. `tensors` packs inputs, dicts of named tensors, into records; a
    row is one. `output_record`: an output is a record of this type, see
    clipper_core.wire.prediction.register_record; `outputs` packs one. `cost`: the cost of a row,
    where rows differ: "bytes", "length" (of its elements; of str and bytes their bytes),
    "length:TENSOR" of one of `tensors`, or a function of the row, or of its named tensors, that
    returns a number from 0 on, counted in thousandths; "": all cost the same. A function with
    `takes_rows` set takes the rows of an array at once, or one as such, and returns their costs.
    `padded`: the model fills the rows of a batch up to the longest.
    """

    # -- Input: it is converted to the bytes of a row, or refused with a message that names the
    # expected and the actual type.

    cdef int _set_rows(self, str dtype, tuple shape, object tensors) except -1:
        cdef ModelState* m = self.state
        cdef u32 i
        if self.similar is not None and dtype != "any":
            self.similar.draw(dtype == "f64", math.prod(shape),
                              key_of(self.engine.state.cache, near_uid(m.spec.uid), 0, NULL, 0).lo)
        m.spec.dtype = <u8> int(NAMES.get(dtype, ANY))
        if m.by_cost != NULL and m.spec.dtype != ANY:
            m.by_cost.item_bytes = itemsize(m.spec.dtype)
        m.spec.variable = dtype in ("str", "bytes") or shape == (-1,)
        self.dtype = _typenums.get(dtype)
        self.typenum = -1 if self.dtype is None else (<cnp.dtype> self.dtype).num
        self.shape = shape
        if tensors is not None:
            self.tensors, self.dtype, self.typenum = tensors, None, -1
            self.layout = RecordLayout(tensors.specs, tensors.finite)
        if m.spec.variable or m.spec.dtype == ANY:
            return 0
        m.spec.rank = <u8> len(shape)
        m.spec.row_bytes = itemsize(m.spec.dtype)
        for i in range(len(shape)):
            m.spec.dims[i] = shape[i]
            m.spec.row_bytes *= <u64> shape[i]
        self.near = self.similar is not None
        m.lane_rows = min(m.lane_rows, max(<u64> 16, self.lane_bytes_max // m.spec.row_bytes))
        return 0

    def settle(self, str dtype, tuple shape=(), tensors=None):
        """Set the type of the rows of a model of type `any`, before its first row."""
        if self.state.spec.dtype != ANY:
            raise_for(BAD_INPUT, f"{self.name} takes {self.describe_input()} already")
        check_type(self.name, dtype, shape)
        if self.similar is not None:
            check_similar(self.name, dtype, shape)
        self._set_rows(dtype, shape, tensors)

    cdef int _settle_by(self, object x) except -1:
        """Set the type of the rows of a model of type `any` by its first input. If several threads
        call it, the first one sets the type."""
        cdef object settled
        if self.on_untyped is None:
            raise self._refuse(x, "its input type is not known yet")
        settled = self.on_untyped(x)
        if self.state.spec.dtype == ANY:
            self.settle(*settled)
            self.guessed = True
        return 0

    cdef object _row(self, object x, const void** row, u64* nbytes):
        """Set `row` to the bytes of an input. Return the object that must stay alive while they are
        used."""
        cdef Py_ssize_t size = 0
        cdef cnp.ndarray array
        if self.state.spec.dtype == ANY:
            self._settle_by(x)
        if self.typenum >= 0:
            array = self._array(x)
            row[0] = cnp.PyArray_DATA(array)
            nbytes[0] = cnp.PyArray_NBYTES(array)
            return array
        if self.state.spec.dtype == STR:
            if not isinstance(x, str):
                raise self._refuse(x, None)
            try:
                row[0] = PyUnicode_AsUTF8AndSize(x, &size)
            except UnicodeEncodeError as error:
                raise self._refuse(x, error) from None
            nbytes[0] = size
            return x
        if self.tensors is not None:
            record = self.layout.pack(x)
            return self._packed(self.tensors.pack(x) if record is None else record, row, nbytes)
        if not isinstance(x, bytes):
            if not isinstance(x, (bytearray, memoryview)):
                raise self._refuse(x, None)
            x = bytes(x)
        row[0] = PyBytes_AS_STRING(x)
        nbytes[0] = PyBytes_GET_SIZE(x)
        return x

    cdef object _packed(self, object record, const void** row, u64* nbytes):
        if isinstance(record, bytes):
            row[0] = PyBytes_AS_STRING(record)
            nbytes[0] = PyBytes_GET_SIZE(record)
        else:
            row[0] = cnp.PyArray_DATA(record)
            nbytes[0] = cnp.PyArray_NBYTES(record)
        return record

    @cython.final
    cdef cnp.ndarray _array(self, object x):
        cdef cnp.ndarray array
        if cnp.PyArray_Check(x):
            array = x if cnp.PyArray_CheckExact(x) else self._without_mask(x)
            if (cnp.PyArray_TYPE(array) != self.typenum or not cnp.PyArray_ISCARRAY_RO(array)):
                if not np.can_cast(array.dtype, self.dtype, "same_kind"):
                    raise self._refuse(x, None)
                array = self._converted(x, array)
        else:
            array = self._array_of(x)
        if self.typenum == cnp.NPY_BOOL:
            array = true_bools(array)
        if not self._fits(array):
            raise self._refuse(x, None)
        if self.state.finite and not all_finite(self.state.spec.dtype, cnp.PyArray_DATA(array),
                                                cnp.PyArray_NBYTES(array)):
            raise self._refuse(x,
                               "it holds NaN or an infinity, and this model was deployed with "
                               "finite=True")
        return array

    @cython.final
    cdef cnp.ndarray _array_of(self, object x):
        """Convert an input that is no array to an array. Whole numbers fit every integer type that
        can hold their values."""
        array = self._from_sequence(x)
        if (array.size and not np.can_cast(array.dtype, self.dtype, "same_kind")
                and not (array.dtype.kind in "iu" and self.dtype.kind in "iu")):
            raise self._refuse(x, None)
        return self._converted(x, array)

    cdef object _from_sequence(self, object x):
        """Return what is no array as an array of the type that numpy gives it; whole numbers that
        no i64 holds as u64."""
        if isinstance(x, list) and x and isinstance(x[0], np.ndarray) and hasattr(x[0], "mask"):
            x = [self._without_mask(each) for each in x]
        try:
            array = np.asarray(x)
            if self.dtype.kind == "u" and array.dtype.kind == "f" and array.size:
                # numpy makes floats of a list in which some numbers fit i64 and others only u64
                plain = np.asarray(x, object)
                if all([isinstance(each, (int, np.integer)) for each in plain.ravel().tolist()]):
                    array = plain.astype(np.uint64)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._refuse(x, error) from None
        return array if cnp.PyArray_CheckExact(array) else self._without_mask(array)

    cdef object _without_mask(self, object x):
        """Return a subclass of ndarray as an ndarray: of a masked array with NaN where it hides
        floats. Other hidden values are refused, because they are not meant to be used."""
        mask = getattr(x, "mask", None)
        if mask is None or not np.any(mask):
            return np.asarray(x)
        if x.dtype.kind != "f":
            raise self._refuse(x, "it is a masked array that hides values; only floats may do "
                                  "so")
        return np.asarray(x.filled(np.nan))

    cdef object _converted(self, object x, object array):
        """Return an array as one of this type. Refuse numbers that the type cannot hold: of whole
        numbers numpy would keep the last bits, of floats make an infinity."""
        cdef cnp.ndarray converted
        if (array.dtype.kind in "iu" and self.dtype.kind in "iu" and array.dtype != self.dtype
                and array.size):
            bounds = np.iinfo(self.dtype)
            if array.min() < bounds.min or array.max() > bounds.max:
                raise self._refuse(x, f"a value lies beyond {bounds.min} to {bounds.max}")
        if self.dtype.kind != "f" or array.dtype == self.dtype:
            return np.array(array, self.dtype, order="C")
        with np.errstate(over="ignore"):
            converted = np.array(array, self.dtype, order="C")
        if (not all_finite(self.state.spec.dtype, cnp.PyArray_DATA(converted),
                           cnp.PyArray_NBYTES(converted))
                and (np.isinf(converted) & np.isfinite(array)).any()):
            most = np.finfo(self.dtype).max
            raise self._refuse(x, f"a value lies beyond {-most:g} to {most:g}")
        return converted

    @cython.final
    cdef bint _fits(self, cnp.ndarray array):
        cdef int i
        if self.state.spec.variable:
            return cnp.PyArray_NDIM(array) == 1
        if cnp.PyArray_NDIM(array) != self.state.spec.rank:
            return False
        for i in range(self.state.spec.rank):
            if cnp.PyArray_DIM(array, i) != self.state.spec.dims[i]:
                return False
        return True

    @cython.final
    cdef bint _is_batch(self, object x):
        """Return whether an array holds rows of this model's shape."""
        cdef int i
        cdef int rank = self.state.spec.rank
        if self.state.spec.variable or not isinstance(x, np.ndarray) or x.ndim != rank + 1:
            return False
        for i in range(rank):
            if x.shape[i + 1] != self.state.spec.dims[i]:
                return False
        return True

    @cython.final
    cdef object _refuse(self, object x, object cause):
        wanted = self.describe_input()
        if isinstance(x, np.ndarray):
            got = given_type(x)
        elif isinstance(x, (list, tuple)):
            got = f"a {type(x).__name__} of {_counted(x)}"
        else:
            got = f"{type(x).__name__}"
        text = f"input for {self.name}: expected {wanted}, got {got}"
        if cause is not None:
            text += f": {cause}"
        elif self._is_batch(x):
            text += ". For a batch of rows: predict_many"
        if self.guessed and self.state.tally.evaluated.load(relaxed) == 0:
            text += (f". {wanted} is what its first query had, and no query has been answered yet: "
                     "if that one was wrong, deploy the model again with input=")
        try:
            raise_for(BAD_INPUT, text)
        except Exception as error:
            return error

    def describe_input(self):
        """The input type in text form: `f64[64]`, `i32[*]`, `str`, or the types of named tensors as
        JSON."""
        if self.tensors is not None:
            return str(self.tensors)
        name = next((key for key, value in NAMES.items() if int(value) == self.state.spec.dtype),
                    "any")
        if self.typenum < 0 or not self.shape:
            return name
        return f"{name}[{','.join('*' if n < 0 else str(n) for n in self.shape)}]"

    cdef int _check_bytes(self, u64 nbytes) except -1:
        cdef u64 end = row_bytes_end(self.engine.state)
        if nbytes >= end:
            raise_for(TOO_LARGE,
                      f"an input for {self.name} has {nbytes} bytes; the limit is {end - 1}. See "
                      f"limits.input_bytes_max and limits.frame_bytes_max")
        return 0

    cdef list _sequence(self, object rows):
        """Return the rows of an iterable as a list. Raises BAD_INPUT for anything else."""
        try:
            each = iter(rows)
        except TypeError:
            raise self._refuse(rows, "predict_many takes an array of rows, or a sequence of "
                                     "them") from None
        return list(each)

    cdef object _rows(self, object rows):
        """Check all rows before the first is submitted, and return them. Rows of named tensors of
        fixed sizes are not packed yet."""
        cdef const void* row = NULL
        cdef u64 nbytes = 0
        cdef object _keep
        if self.tensors is not None:
            rows = self.tensors.by_tensor(rows, pack_vectors)
            if len(rows):
                self._check_bytes(self.state.spec.row_bytes or int(rows.sizes.max()))
            return rows
        if not isinstance(rows, np.ndarray):
            rows = self._sequence(rows)
        if self.state.spec.dtype == ANY and len(rows):
            _keep = self._row(rows[0], &row, &nbytes)
        if self.typenum >= 0 and not self.state.spec.variable:
            array = (rows if cnp.PyArray_CheckExact(rows) else self._without_mask(rows)
                     if cnp.PyArray_Check(rows) else self._from_sequence(rows))
            if array.ndim != len(self.shape) + 1 or not (
                    np.can_cast(array.dtype, self.dtype, "same_kind")
                    or array is not rows and array.dtype.kind in "iu" and self.dtype.kind in "iu"):
                raise self._refuse(rows,
                                   f"predict_many takes an array of shape "
                                   f"(n, {', '.join(map(str, self.shape))})")
            array = (np.ascontiguousarray(array) if array.dtype == self.dtype
                     else self._converted(rows, array))
            if self.typenum == cnp.NPY_BOOL:
                array = true_bools(array)
            self._check_bytes(self.state.spec.row_bytes)
            for item in array[:1]:
                self._array(item)
            if self.state.finite and not np.isfinite(array).all():
                raise self._refuse(rows,
                                   "it holds NaN or an infinity, and this model was deployed with "
                                   "finite=True")
            return array
        checked = []
        for item in rows:
            checked.append(self._row(item, &row, &nbytes))
            self._check_bytes(nbytes)
        return checked

    # -- the model

    def __init__(self, Engine engine, str name, u64 uid, str dtype, tuple shape=(), *,
                 u64 slo_us=1000000,
                 bint cached=True, bint finite=False, u64 lane_rows=16384,
                 u64 lane_bytes_max=1 << 28,
                 str output="", tuple output_shape=None, Similarity similar=None,
                 bint unlisted=False, object tensors=None, u32 output_record=0, object outputs=None,
                 object cost="", bint padded=False):
        cdef ModelState* m
        check_type(name, dtype, shape)
        check_type(name, output or "any", output_shape or ())
        slo_of(slo_us, 0)
        if similar is not None:
            check_similar(name, dtype, shape)
        if not (callable(cost) or cost in ("", "bytes", "length") or cost.startswith("length:")):
            raise_for(BAD_INPUT, f"the cost of {name} is bytes, length, length:TENSOR or a "
                                 f"function, not {cost!r}")
        m = engine.new_model()
        self.state = m
        m.spec.uid = uid
        m.cached = cached
        m.finite = finite
        m.lane_rows = lane_rows
        m.unlisted = unlisted
        if unlisted:
            engine.state.retired.unlisted.fetch_add(1, relaxed)
        self.lane_bytes_max = lane_bytes_max
        self.engine = engine
        self.name = name
        self.slo_us = slo_us
        if cost:
            self._set_cost(cost, padded)
        self._declare_output(output, output_shape)
        self.similar = similar
        self.outputs = outputs
        m.spec.output_record = output_record
        self._set_rows(dtype, shape, tensors)

    cdef int _set_cost(self, object cost, bint padded) except -1:
        cdef u8 kind = COST_GIVEN
        if callable(cost):
            self.cost = cost
            self.cost_takes_rows = getattr(cost, "takes_rows", False)
        elif cost.startswith("length:"):
            self.cost, self.cost_tensor = cost, cost.removeprefix("length:")
        else:
            kind = COST_BYTES if cost == "bytes" else COST_LENGTH
        self.state.by_cost = cost_batch_new(kind, padded, 1)
        if self.state.by_cost == NULL:
            raise_for(NO_MEMORY, "no memory for a model with a cost")
        self.state.row_bytes_end = 0
        return 0

    def __dealloc__(self):
        if self.state != NULL and self.state.unlisted:
            model_drop(&self.engine.state.retired, self.state)

    def settle_output(self, str dtype, shape, outputs, u32 output_record):
        """Declare the named outputs of a model whose output is unknown, before a replica is
        attached. The arguments are those of the constructor."""
        cdef ModelState* m = self.state
        check_type(self.name, dtype, shape or ())
        self.outputs = outputs
        m.spec.output_record = output_record
        self._declare_output(dtype, shape)

    cdef int _declare_output(self, str dtype, object shape) except -1:
        cdef ModelState* m = self.state
        cdef u32 i
        m.spec.output_dtype = ANY if not dtype else <u8> int(NAMES[dtype])
        if shape is not None:
            m.spec.output_shaped = True
            m.spec.output_rank = <u8> len(shape)
            for i in range(len(shape)):
                m.spec.output_dims[i] = shape[i]
        return 0

    @property
    def waiting(self):
        """Number of rows in its lanes that were not sent to a replica, as last counted by the loop.
        """
        return self.state.tally.queued.load(relaxed)

    @property
    def index(self):
        """The model's number in its engine."""
        return self.state.index

    # -- submitting

    cdef Key _key(self, const void* row, u64 nbytes, u64 salt, u64 mark) noexcept nogil:
        cdef i32 cells[32]
        if self.near and projection_cells(self.similar.state, row, cells):
            return key_of(self.engine.state.cache, near_uid(self.state.spec.uid), salt, cells,
                          4 * self.similar.state.count)
        cdef Key key = key_of(self.engine.state.cache, self.state.spec.uid, salt, row, nbytes)
        return key_marked(key, mark) if mark else key

    cdef u64 _mark(self, object x, const void* row, u64 nbytes, u64 salt) except? 0:
        """Return the watcher's mark of the row's key; 0 without a watcher. Called before anything
        is submitted, since it may raise."""
        cdef Key key
        if self.watch is None:
            return 0
        key = self._key(row, nbytes, salt, 0)
        return <u64> self.watch(x, key.lo, key.hi) * SPREAD

    cdef object _marks(self, cnp.ndarray rows, u64 salt):
        """Return the mark of each row of an array, u64[n]."""
        cdef u64 i, row_bytes = self.state.spec.row_bytes
        cdef const u8* row = <const u8*> cnp.PyArray_DATA(rows)
        cdef cnp.ndarray marks = np.empty(len(rows), np.uint64)
        cdef u64* to = <u64*> cnp.PyArray_DATA(marks)
        for i in range(<u64> len(rows)):
            to[i] = self._mark(rows[i] if self.shape else rows[i, ...], row + i * row_bytes,
                               row_bytes, salt)
        return marks

    def forget(self, u64 lo, u64 hi, u64 generation):
        """Remove from the cache the prediction of a row, under the key that `watch` returned for
        it. Return True if it was there."""
        cdef Key key = key_marked(Key(lo, hi), generation * SPREAD)
        return cache_forget(self.engine.state.cache, &key)

    cdef bint _look_up(self, const void* row, u64 nbytes, u64 salt, u64 mark, Key* key,
                       Value* value) noexcept nogil:
        """Look up a row in the cache. Return True if it is there. key: set in any case, as a miss
        needs it too."""
        value.word = 0
        value.tag = TAG_NONE
        if not self.state.cached:
            return False
        key[0] = self._key(row, nbytes, salt, mark)
        return self._found(key, value)

    cdef bint _look_up_hashed(self, Key hashed, u64 nbytes, u64 salt, Key* key,
                              Value* value) noexcept nogil:
        value.word = 0
        value.tag = TAG_NONE
        if not self.state.cached:
            return False
        key[0] = key_of_hashed(self.engine.state.cache, self.state.spec.uid, salt, hashed, nbytes)
        return self._found(key, value)

    cdef bint _found(self, const Key* key, Value* value) noexcept nogil:
        """Look up a key in the cache. Return whether it is there, and count that. An engine that
        accepts nothing any more does not answer from its cache either."""
        if not cache_lookup(self.engine.state.cache, key, value):
            return False
        if self.engine.state.refusing.load(relaxed):
            value_drop(value)
            value.word = 0
            value.tag = TAG_NONE
            return False
        count(&self.state.tally.hits, 1)
        return True

    cdef u64 _now_us(self) noexcept nogil:
        cdef EngineState* e = self.engine.state
        return e.now_us.load(relaxed) if e.manual else monotonic_us()

    cdef Status _queue(self, const void* row, u64 nbytes, const Key* key, u64 salt, u64 slo_us,
                       u32 band, u64 now, Block* block,
                       u32 slot, u32 cost) noexcept nogil:
        """Submit a task to the lane of its band and its SLO's class. Return OK, or the reason why
        it was not submitted."""
        if lane_at(self.state, slo_us, band) == NULL:
            lane_prepare(self.engine.state, self.state, slo_us, band)
        return row_submit(self.engine.state, self.state, row, nbytes, key, salt, slo_us, band, now,
                          block, slot, cost)

    cdef u32 _cost(self, object x, const void* row, u64 nbytes) except? 0:
        """Return the cost of a row: by the model's function in thousandths, or the length of a
        tensor; 1 at least. 0 if the model has no such cost. x: the row as an object. Called before
        anything is submitted, because it may raise."""
        if self.cost_tensor is not None:
            return self._length(row, nbytes)
        if self.cost is None:
            return 0
        if not self.cost_takes_rows:
            return self._counted(self._called(x if self.tensors is None
                                              else self._unpacked(row, nbytes)))
        if self.tensors is not None:
            x = [PyBytes_FromStringAndSize(<const char*> row, <Py_ssize_t> nbytes)]
            if self.state.spec.row_bytes:
                x = np.frombuffer(x[0], np.uint8)[None]
        else:
            x = x[None] if self.state.spec.row_bytes else [x]
        return (<u32*> cnp.PyArray_DATA(self._costs_of_rows(x)))[0]

    cdef object _unpacked(self, const void* row, u64 nbytes):
        """Return the named tensors of a record."""
        cdef bytes record = PyBytes_FromStringAndSize(<const char*> row, <Py_ssize_t> nbytes)
        opened = self.layout.unpack(record)
        return self.tensors.unpack(record) if opened is None else opened

    cdef object _called(self, object given):
        """Return the result of the cost function: a number, or one for each row."""
        try:
            found = self.cost(given)
            return found if self.cost_takes_rows else float(found)
        except BaseException as error:      # also of sys.exit()
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                raise                       # a Ctrl-C
            raise_for(BAD_INPUT, f"the cost function of {self.name} raised "
                                 f"{type(error).__name__}: {error}; call it with this input")

    cdef u32 _counted(self, double cost) except? 0:
        """Convert the result of the cost function to the core's units."""
        if not 0 <= cost <= COST_MAX:
            raise_for(BAD_INPUT, f"the cost function of {self.name} returned {cost}; it returns a "
                                 f"number from 0 to {COST_MAX:.0f}")
        return max(<u32> ceil(cost * COST_PARTS), <u32> 1)

    cdef cnp.ndarray _costs_of_rows(self, object rows):
        """Return the costs of rows by a function that takes them all, u32 (n,)."""
        cdef u64 i, n = len(rows)
        cdef cnp.ndarray costs = np.empty(n, np.uint32)
        cdef u32* to = <u32*> cnp.PyArray_DATA(costs)
        cdef const double* given
        cdef cnp.ndarray found = None
        returned = self._called(rows if self.tensors is None else self.tensors.unpack_many(rows))
        try:
            found = np.ascontiguousarray(returned, np.float64)
        except (TypeError, ValueError, OverflowError):
            pass
        if found is None or cnp.PyArray_NDIM(found) != 1 or <u64> len(found) != n:
            shape = "" if found is None else f" of shape {np.shape(returned)}"
            raise_for(BAD_INPUT, f"the cost function of {self.name} takes {n} rows, and returned a "
                                 f"{type(returned).__name__}{shape}; it returns a number for each "
                                 f"row")
        given = <const double*> cnp.PyArray_DATA(found)
        for i in range(n):
            to[i] = self._counted(given[i])
        return costs

    cdef u32 _length(self, const void* row, u64 nbytes) except? 0:
        """Return the length of a tensor of a record: numbers; of a str or bytes its bytes."""
        cdef RecordPlace place
        cdef const RecordPart* part
        cdef u64 length
        if (self.layout is None or self.cost_tensor not in self.layout.names
                or not record_place(&self.layout.shape, <const u8*> row, nbytes,
                                    <u32> self.layout.names.index(self.cost_tensor), &place)):
            raise_for(BAD_INPUT, f"the cost of {self.name} is the length of tensor "
                                 f"{self.cost_tensor!r}, which its input does not have: "
                                 f"{self.describe_input()}")
        part = &self.layout.shape.parts[<u32> self.layout.names.index(self.cost_tensor)]
        length = place.nbytes if part.typenum < 0 and part.rank == 0 else place.items
        return <u32> min(max(length, <u64> 1), <u64> 0xFFFFFFFF)

    cdef void _refused(self, Status status, u64 slo_us, u32 band, Value* value) noexcept nogil:
        row_refused(self.state, status, slo_us, band, self._now_us(), value)

    cdef Status _submit(self, const void* row, u64 nbytes, u64 salt, u64 mark, u64 slo_us, u32 band,
                        u64 now, Block* block, u32 slot, u32 cost) noexcept nogil:
        """Submit a task for slot `slot` of several. If it is a hit or refused, the slot ends here.
        """
        cdef Key key
        cdef Value value
        cdef CompletionState* home
        if not self._look_up(row, nbytes, salt, mark, &key, &value):
            return self._submit_missed(row, nbytes, &key, salt, slo_us, band, now, block, slot,
                                       cost)
        home = home_of(self.engine.state.completion, block)
        slot_fill(home, block, slot, OK, &value)
        block_drop(home, block, 1)
        return OK

    cdef Status _submit_missed(self, const void* row, u64 nbytes, const Key* key, u64 salt,
                               u64 slo_us, u32 band, u64 now, Block* block, u32 slot,
                               u32 cost) noexcept nogil:
        """Submit a task, which is not in the cache, for slot `slot` of several. If it is refused,
        the slot ends here."""
        cdef Value nothing
        cdef Status status
        cdef CompletionState* d = self.engine.state.completion
        cdef CompletionState* home = home_of(d, block)
        if home != d:
            d.tasks_of_peers.fetch_add(1, relaxed)
        status = self._queue(row, nbytes, key, salt, slo_us, band,
                             self._now_us() if now == 0 else now, block, slot, cost)
        if status == OK:
            return OK
        if home != d:
            d.tasks_of_peers.fetch_sub(1, relaxed)
        count(&self.state.tally.refused[<u32> status], 1)
        nothing.word = 0
        nothing.tag = TAG_NONE
        slot_fill(home, block, slot, status, &nothing)
        block_drop(home, block, 1)
        return status

    cdef Future _evaluate(self, const void* row, u64 nbytes, const Key* key, u64 salt, u64 slo_us,
                          u32 band, u32 cost, object finish, object extra):
        """Return a future with one task. key NULL: neither joined nor cached."""
        cdef Value nothing
        cdef Block* block = NULL
        cdef u32 slot = 0
        cdef Status status
        nothing.word = 0
        nothing.tag = TAG_NONE
        if not slots_claim(self.engine.state.completion, 1, &block, &slot):
            return future_at_once(self.engine.completion, NO_MEMORY, &nothing, finish, extra)
        status = self._queue(row, nbytes, key, salt, slo_us, band, self._now_us(), block, slot,
                             cost)
        if status != OK:
            self._refused(status, slo_us, band, &nothing)
            slot_fill(self.engine.state.completion, block, slot, status, &nothing)
            block_drop(self.engine.state.completion, block, 1)
            if status == TOO_LARGE:
                block_drop(self.engine.state.completion, block, 1)
                self._check_bytes(nbytes)
        return future_new(self.engine.completion, block, slot, 1, finish, extra)

    cdef Future _predict(self, object x, u64 slo_us, u64 salt, u32 band, object finish,
                         object extra):
        cdef const void* row = NULL
        cdef u64 nbytes = 0
        cdef object _keep = self._row(x, &row, &nbytes)
        cdef u64 mark = 0 if self.watch is None else self._mark(_keep, row, nbytes, salt)
        cdef Key key
        cdef Value value
        if not self._look_up(row, nbytes, salt, mark, &key, &value):
            return self._evaluate(row, nbytes, &key, salt, slo_us, band,
                                  0 if self.cost is None else self._cost(_keep, row, nbytes),
                                  finish, extra)
        if self.near and self.similar.check_is_due():       # evaluated again, for the comparison of
                                                            # similar rows
            try:
                self.similar.remember(self._evaluate(row, nbytes, NULL, salt, self.slo_us, band,
                                                     self._cost(_keep, row, nbytes), None, None),
                                      value_object(&value))
            except BaseException:           # of the cost function
                value_drop(&value)
                raise
        return future_at_once(self.engine.completion, OK, &value, finish, extra)

    @cython.binding(False)
    def predict(self, x, slo_ms=None, salt=0, bint stream=False, part_slo_ms=None,
                slo_total_ms=None, u32 band=0):
        """Schedule one prediction and return its Future at once. Raises only for an input of the
        wrong type or shape.

        `slo_ms`: this query's own latency objective, milliseconds; `salt` separates cache entries
        of equal inputs; a session. `stream`: return a PartsFuture, which gives the parts as they
        arrive, of a model that answers in parts, and one part of any other; then `slo_ms` is the
        time until the first part, `part_slo_ms` the time between two parts (by default only
        limited by the next one), and `slo_total_ms` the time until the end, a minute if not given.
        band: of the row (`band_number`); parts take no place in the queue, so they have none.
        """
        if stream or part_slo_ms is not None or slo_total_ms is not None:
            return self.predict_parts(x, slo_ms, salt, stream, part_slo_ms, slo_total_ms, None)
        return self._predict(x, self.slo_us if slo_ms is None else slo_of_ms(slo_ms, 0),
                             salt_of(salt), band_of_row(band), None, None)

    @property
    def gives_parts(self):
        """True if a container whose model answers in parts is connected. Threads: any."""
        return self.state.parts.load(relaxed) != 0

    def predict_parts(self, x, slo_ms, salt, bint stream, part_slo_ms, slo_total_ms, finish):
        """Schedule one prediction in parts, with these arguments of `predict`. finish: makes the
        whole, once, of what the parts are, the Status of the end, and the query's number; None:
        the parts joined."""
        cdef EngineState* e = self.engine.state
        cdef u64 first_us = slo_of_ms(slo_ms, self.slo_us)
        cdef u64 total_us = slo_of_ms(slo_total_ms, max(first_us, ARRAY_SLO_US))
        cdef u64 part_us = slo_of_ms(part_slo_ms, total_us)
        cdef u64 session = salt_of(salt)
        cdef const void* row = NULL
        cdef u64 nbytes = 0
        cdef PartStream* s
        cdef object _keep
        if not stream:
            raise_for(BAD_INPUT, "part_slo_ms and slo_total_ms are for queries with stream=True")
        if self.state.parts.load(relaxed) == 0 and self.state.tally.replicas.load(relaxed):
            return parts_future_new(self.engine.completion, NULL, self,
                                    self._predict(x, first_us, session, 0, None, None), finish)
        _keep = self._row(x, &row, &nbytes)
        self._check_bytes(nbytes)
        s = part_stream_new(e.completion, &e.streams.inbox, self.state, row, nbytes)
        if s == NULL:
            raise_for(NO_MEMORY, "no memory for a query")
        s.session = session
        s.begun_us = self._now_us()
        s.first_us, s.total_us = first_us, total_us
        s.part_us = part_us
        s.ahead = e.streams.ahead
        future = parts_future_new(self.engine.completion, s, self, None, finish)
        if not submitter_enter(e.lanes[0], e.refusing):
            raise_for(CLOSED, "")
        part_stream_announce(s)
        submitter_leave(e.lanes[0])
        return future

    def put(self, x, output, salt=0):
        """Insert a prediction into the cache: `output` is a number, str, bytes or ndarray."""
        cdef const void* row = NULL
        cdef u64 nbytes = 0, number = salt_of(salt)
        cdef object _keep = self._row(x, &row, &nbytes)
        cdef Key key = self._key(row, nbytes, number, self._mark(_keep, row, nbytes, number))
        cdef Value value
        if self.outputs is None:
            value = object_value(output)
        else:
            value = record_value(self.state.spec.output_record, bytes(self.outputs.pack(output)))
        cache_fill(self.engine.state.cache, &key, &value)
        value_drop(&value)

    def cached(self, x, salt=0):
        """Return (True, output) if the cache holds this input's prediction, else (False, None)."""
        cdef const void* row = NULL
        cdef u64 nbytes = 0, number = salt_of(salt)
        cdef object _keep = self._row(x, &row, &nbytes)
        cdef Value value
        cdef Key key = self._key(row, nbytes, number, self._mark(_keep, row, nbytes, number))
        if not cache_lookup(self.engine.state.cache, &key, &value):
            return False, None
        output = value_object(&value)
        value_drop(&value)
        return True, output

    def cached_rows(self, rows, salt=0):
        """Return whether the cache holds the predictions of all rows, as predict_many takes
        them."""
        cdef object checked = _packed(self._rows(rows))
        cdef RowsOfArray lying = self._block(checked)
        cdef const void* row = NULL
        cdef u64 nbytes = 0, number = salt_of(salt)
        cdef u32 i
        cdef object x
        cdef Key key
        cdef Value value
        for i in range(<u32> len(checked)):
            x = self._row_at(checked, &lying, i, &row, &nbytes)
            key = self._key(row, nbytes, number, self._mark(x, row, nbytes, number))
            if not cache_lookup(self.engine.state.cache, &key, &value):
                return False
            value_drop(&value)
        return True

    def predict_many(self, rows, slo_ms=None, salt=0, u32 band=0):
        """Return one future for many rows: an array of shape (n, *shape), or a sequence of inputs.
        Its result is in order, and empty for no rows. Raises for an input of the wrong type or
        shape.

        All rows have the same deadline, `slo_ms` milliseconds from now, a minute if not given. If
        there are more rows than the model's queue for arrays holds, the call adds them as space
        becomes available, and returns after the last one (Ctrl-C interrupts it). Rows for which
        there is no space by the deadline end as FULL.
        """
        return predict_rows((self,), rows, slo_of_ms(slo_ms, ARRAY_SLO_US), salt, None, None, band)

    cdef int _give_up(self, Block* block, u32 first, u32 end) except -1:
        """End slots that will have no task."""
        cdef CompletionState* home = home_of(self.engine.state.completion, block)
        cdef Value nothing
        cdef u32 i
        nothing.word = 0
        nothing.tag = TAG_NONE
        for i in range(first, end):
            count(&self.state.tally.refused[<u32> CANCELLED], 1)
            slot_fill(home, block, i, CANCELLED, &nothing)
            block_drop(home, block, 1)
        return 0

    cdef int _wait_for_room(self, u64 slo_us, u32 band, u64 until) except -1:
        cdef EngineState* e = self.engine.state
        cdef Lane* lane = lane_at(self.state, slo_us, band)
        if lane != NULL and not e.manual:
            wait_for_room(e.lanes, lane, &e.refusing, until)
        return 0

    cdef int _one_by_one(self, object rows, object costs, u64 slo, u64 salt, u32 band, u64 now,
                         u64 until, Block* block, u32 slot) except -1:
        """Submit one task per row: for rows that differ in length, and for so few rows that joining
        equal ones in flight is worth it. costs: u32 of each row; None: computed here."""
        cdef RowsOfArray lying = self._block(rows)
        cdef const u32* cost = NULL
        cdef const void* row = NULL
        cdef u64 nbytes = 0
        cdef u32 i = 0, n = <u32> len(rows)
        cdef object x = None
        if costs is not None:
            cost = <const u32*> cnp.PyArray_DATA(costs)
        try:
            for i in range(n):
                x = self._row_at(rows, &lying, i, &row, &nbytes)
                self._wait_for_room(slo, band, until)
                self._submit(row, nbytes, salt, self._mark(x, row, nbytes, salt), slo, band, now,
                             block, slot + i, 0 if cost == NULL else cost[i])
        except BaseException:           # an exception of a signal handler, or of an input that
                                        # changed after it was checked
            self._give_up(block, slot + i, slot + n)
            raise
        return 0

    cdef object _row_at(self, object rows, RowsOfArray* lying, u32 i, const void** row,
                        u64* nbytes):
        """Set `row` to the bytes of row i of the result of `_rows`. Return the object of the row,
        for `_mark`, which must stay alive while its bytes are used."""
        if lying.data == NULL:
            return self._row(rows[i], row, nbytes)
        _row_of(lying, i, row, nbytes)
        return None if self.watch is None else rows[i] if self.shape else rows[i, ...]

    cdef object _costs(self, object rows):
        """Return the cost of each row of an array, u32 (n,); None where `_cost` gives none. Called
        before anything is submitted."""
        cdef RowsOfArray lying
        cdef const void* row = NULL
        cdef u64 i, nbytes = 0, n = len(rows)
        if self.cost is None:
            return None
        if self.cost_takes_rows:
            return self._costs_of_rows(rows)
        lying = self._block(rows)
        cdef cnp.ndarray costs = np.empty(n, np.uint32)
        cdef u32* to = <u32*> cnp.PyArray_DATA(costs)
        for i in range(n):
            _row_of(&lying, i, &row, &nbytes)
            to[i] = self._cost(rows[i] if self.tensors is None else None, row, nbytes)
        return costs

    cdef RowsOfArray _block(self, object rows) except *:
        """Return where the rows are that `_rows` returned."""
        cdef RowsOfArray lying
        lying.row_bytes = self.state.spec.row_bytes
        lying.data = NULL
        lying.offsets = NULL
        if isinstance(rows, np.ndarray):
            lying.data = <const u8*> cnp.PyArray_DATA(rows)
        elif self.tensors is not None:
            lying.data = <const u8*> cnp.PyArray_DATA(rows.data)
            lying.offsets = <const i64*> cnp.PyArray_DATA(rows.offsets)
        return lying

    cdef object _set_intake_rows(self, Intake* intake, object rows):
        """Set the rows or columns of an intake. Return the objects that must stay alive while they
        are used."""
        cdef u64 row_bytes = self.state.spec.row_bytes
        cdef cnp.ndarray array, columns
        cdef TensorColumn* column
        intake.rows = intake.scratch = NULL
        intake.columns = NULL
        intake.row_bytes = row_bytes
        intake.n = <u32> len(rows)
        if isinstance(rows, np.ndarray):
            intake.rows = <const u8*> cnp.PyArray_DATA(rows)
            return rows
        intake.column_count = <u32> len(rows.items)
        columns = np.empty(intake.column_count * sizeof(TensorColumn), np.uint8)
        column = <TensorColumn*> cnp.PyArray_DATA(columns)
        intake.columns = column
        for array, offset in zip(rows.items, rows.offsets):
            column.data = <const u8*> cnp.PyArray_DATA(array)
            column.stride = cnp.PyArray_STRIDE(array, 0)
            column.bytes = cnp.PyArray_ITEMSIZE(array)
            column.padding = (0 - column.bytes) & 7
            column.offset = offset
            column += 1
        if not self.state.cached:
            return rows, columns
        scratch = np.empty(look_rows_of(row_bytes) * row_bytes, np.uint8)
        intake.scratch = <u8*> cnp.PyArray_DATA(scratch)
        return rows, columns, scratch

    cdef object _begin_intake(self, Intake* intake, object rows, u64 slo, u64 salt, u32 band,
                              u64 now, Block* block, u32 slot):
        """Begin an intake. Return the objects that must stay alive until its rows are submitted."""
        cdef ModelState* m = self.state
        cdef EngineState* e = self.engine.state
        intake.lanes = e.lanes
        intake.lane = array_lane_prepare(e, m, slo, band, self.lane_bytes_max)
        intake.tally = &m.tally
        intake.cache = e.cache if m.cached and e.refusing.load(relaxed) == 0 else NULL
        intake.refusing = &e.refusing
        intake.patient = not e.manual
        intake.uid = m.spec.uid
        intake.salt = salt
        intake.near = &self.similar.state if self.near else NULL
        intake.near_uid = near_uid(m.spec.uid)
        intake.marks = NULL
        intake.block = block
        intake.slot = slot
        intake.at = 0
        intake.now_us = now
        intake.deadline_us = now + slo
        return self._set_intake_rows(intake, rows)

    def __repr__(self):
        return f"<Model {self.name} {self.describe_input()}>"


cdef inline void _row_of(const RowsOfArray* rows, u64 i, const void** row,
                         u64* nbytes) noexcept nogil:
    """Set where row i is. Does nothing if the rows are Python objects."""
    if rows.data == NULL:
        return
    if rows.offsets == NULL:
        row[0] = rows.data + i * rows.row_bytes
        nbytes[0] = rows.row_bytes
    else:
        row[0] = rows.data + rows.offsets[i]
        nbytes[0] = <u64> (rows.offsets[i + 1] - rows.offsets[i])


def predict_all(tuple models, x, slo_us=None, salt=0, finish=None, extra=None, u32 band=0):
    """Return one future over the same input on several models, of one engine or of connected
    engines: task i is models[i]'s. band: of the rows. Threads: any."""
    if not models:
        raise_for(BAD_INPUT, "predict_all was given no models")
    cdef Model model = models[0]
    cdef u32 i, slot, n = <u32> len(models)
    cdef u64 slo = slo_of(slo_us, model.slo_us), number = salt_of(salt)
    cdef const void* row = NULL
    cdef u64 nbytes = 0
    cdef Block* block
    cdef Future future
    cdef vector[const void*] rows
    cdef vector[u64] sizes, marks
    cdef vector[u32] costs
    cdef list _keep = []
    cdef bint mixed = False
    if n == 1:
        return model._predict(x, slo, number, band_of_row(band), finish, extra)
    band_of_row(band)
    for i in range(n):                          # every row is checked before the first is submitted
        mixed |= is_elsewhere(models[i], model)
        _keep.append((<Model> models[i])._row(x, &row, &nbytes))
        (<Model> models[i])._check_bytes(nbytes)
        rows.push_back(row)
        sizes.push_back(nbytes)
        marks.push_back((<Model> models[i])._mark(_keep[i], row, nbytes, number))
        costs.push_back((<Model> models[i])._cost(_keep[i], row, nbytes))
    if not slots_claim(model.engine.state.completion, n, &block, &slot):
        raise_for(NO_MEMORY, "no memory for a future")
    future = future_new(model.engine.completion, block, slot, n, finish, extra)
    for i in range(n):
        (<Model> models[i])._submit(rows[i], sizes[i], number, marks[i], slo, band, 0, block,
                                    slot + i, costs[i])
    if mixed:
        mix(future, models)
    return future


def _array_of_one(Future future):
    return future._many()


def predict_rows(tuple models, rows, slo_us=None, salt=0, finish=None, extra=None, u32 band=0):
    """Return one future over the same rows on several models, of one engine or of connected
    engines: task j * n + i is row i on models[j]. Threads: any.

    `rows`: an array of shape (n, *shape), or a sequence of inputs. band: of all of them. See
    Model.predict_many.
    """
    if not models:
        raise_for(BAD_INPUT, "predict_rows was given no models")
    cdef Model model = models[0]
    cdef bint mixed = any([is_elsewhere(each, model) for each in models])
    cdef bint empty = isinstance(rows, (list, tuple, np.ndarray)) and len(rows) == 0
    cdef list checked = [() if empty else (<Model> each)._rows(rows) for each in models]
    cdef u64 slo = slo_of(slo_us, model.slo_us), number = salt_of(salt)
    cdef u64 n = len(checked[0]), now = model._now_us(), until = monotonic_us() + slo
    cdef u32 slot, j
    cdef Block* block
    cdef Future future
    cdef vector[Intake] intakes
    cdef Intake intake
    cdef list kept = []
    band_of_row(band)
    if n == 0:
        return future_of_none(model.engine.completion, finish, extra)
    if n * len(models) > TASKS_MAX:
        raise_for(BAD_INPUT,
                  f"predict_many for {model.name} was given {n} rows for {len(models)} models; at "
                  f"most {TASKS_MAX} tasks make a future")
    cdef list chunks = [goes_in_chunks(each, n, mixed) for each in models]
    for j, each in enumerate(models):
        if not chunks[j] or (<Model> each).watch is not None:
            checked[j] = _packed(checked[j])
    cdef list marks = [(<Model> each)._marks(checked[j], number) if chunks[j]
                       and (<Model> each).watch is not None else None
                       for j, each in enumerate(models)]
    cdef list costs = [(<Model> each)._costs(checked[j]) for j, each in enumerate(models)]
    if not slots_claim(model.engine.state.completion, <u32> (n * len(models)), &block, &slot):
        raise_for(NO_MEMORY, f"no memory for {n * len(models)} predictions")
    if n * len(models) == 1 and finish is None:
        finish = _array_of_one
    future = future_new(model.engine.completion, block, slot, <u32> (n * len(models)), finish,
                        extra)
    for j in range(len(models)):
        model = models[j]
        if chunks[j]:
            kept.append(model._begin_intake(&intake, checked[j], slo, number, band, now, block,
                                            slot + j * <u32> n))
            intake.marks = <const u64*> cnp.PyArray_DATA(marks[j]) if marks[j] is not None else NULL
            intakes.push_back(intake)
            continue
        try:
            model._one_by_one(checked[j], costs[j], slo, number, band, now, until, block,
                              slot + j * <u32> n)
        except BaseException:
            model._give_up(block, slot + (j + 1) * <u32> n, slot + <u32> (n * len(models)))
            intakes_end(intakes, CANCELLED)
            raise
    intakes_feed(intakes, until)
    if mixed:
        mix(future, models)
    return future


cdef object _packed(object rows):
    """Return rows as an array; records of one size that are still columns are packed."""
    return rows.packed() if hasattr(rows, "packed") else rows


cdef bint goes_in_chunks(Model model, u64 n, bint mixed) noexcept:
    """Return whether its rows do, of an array: a chunk ends in slots of its own engine, and its
    rows cost the same."""
    return (n >= CHUNKS_FROM and model.state.spec.row_bytes != 0 and not mixed
            and model.state.by_cost == NULL)


cdef bint is_elsewhere(Model model, Model first) except -1:
    """Return whether it is in another engine than the first."""
    cdef CompletionState* home = first.engine.state.completion
    cdef CompletionState* d = model.engine.state.completion
    if d != home and d.peers[home.number] != home:
        raise_for(BAD_INPUT,
                  f"{model.name} and {first.name} are in engines that know nothing of each other")
    return d != home


cdef void mix(Future future, tuple models):
    """Mark a future over several engines. No waiting thread owns a loop for it; the loop threads of
    its engines are woken."""
    future.mixed = True
    for model in models:
        completion_wake_loop_thread((<Model> model).engine.state.completion)


# -- Query several models at once, and answer as soon as that is decided.
#
# Cache hits are evaluated before anything is queued: if they decide, nothing is. The rest is
# submitted, and from then on the ensemble call belongs to the thread that brings the next arrival.
# Rows of later calls are copied, and their lanes made, here, because a lane is made under the GIL.

@cython.final
cdef class EnsembleRequest:
    """A query on its way to its models; predict_ensemble makes it. Threads: one."""

    def __init__(self):
        raise TypeError("it is made by predict_ensemble()")

    cdef u64 read(self, object x, const void* given, u64 nbytes) except? 0:
        """Check every row before the first is submitted. Return the number of bytes of all
        rows."""
        cdef Row row
        cdef u64 total = 0
        self.kept = []
        for model in self.models:
            is_elsewhere(model, self.models[0])
            row.data, row.nbytes = given, nbytes
            owner = x if given != NULL else (<Model> model)._row(x, &row.data, &row.nbytes)
            self.kept.append(owner)
            (<Model> model)._check_bytes(row.nbytes)
            row.mark = (<Model> model)._mark(owner, row.data, row.nbytes, self.salt)
            row.cost = (<Model> model)._cost(owner, row.data, row.nbytes)
            self.rows.push_back(row)
            total += (row.nbytes + 7) & ~<u64> 7
        return total

    cdef int set_field(self, str name) except -1:
        """Set which tensor is compared of the records that hold one of this name."""
        cdef Field* field
        cdef RecordLayout layout
        cdef u32 i, record
        for i in range(self.ensemble_call.n if name else 0):
            record = (<Model> self.models[i]).state.spec.output_record
            layout = record_layout(record) if record else None
            if layout is None or name not in layout.names:
                continue
            field = &self.ensemble_call.votes[i].field
            field.index = <u32> layout.names.index(name)
            if layout.shape.parts[field.index].rank <= RANK_MAX:
                field.shape, field.record = &layout.shape, record
        return 0

    cdef int set_votes(self, object weights, object starts_us) except -1:
        """Set the votes, and the deferred calls of tasks that do not start at once."""
        cdef EnsembleCall* h = self.ensemble_call
        cdef u8* to = <u8*> h.deferred + h.n * sizeof(DeferredCall) if h.deferred != NULL else NULL
        cdef u32 i
        for i in range(h.n):
            h.unneeded[i] = &(<Model> self.models[i]).state.tally.refused[<u32> UNNEEDED]
            h.votes[i].state = UNSUBMITTED
            h.votes[i].weight = 1.0 if weights is None else weights[i]
            h.votes[i].start_us = (0 if starts_us is None else NEVER_US if starts_us[i] < 0
                                   else starts_us[i])
            if h.votes[i].start_us:
                self.set_deferred(i, to)
                to += (self.rows[i].nbytes + 7) & ~<u64> 7
        return 0

    cdef int set_deferred(self, u32 i, u8* to) except -1:
        cdef EnsembleCall* h = self.ensemble_call
        cdef DeferredCall* call = &(<DeferredCall*> h.deferred)[i]
        cdef Model model = self.models[i]
        cdef ModelState* m = model.state
        cdef u64 start_us = h.votes[i].start_us
        cdef u64 slo_us = h.slo_us - start_us if start_us < h.slo_us else h.slo_us
        call.lanes, call.tally, call.refusing = (model.engine.state.lanes, &m.tally,
                                              &model.engine.state.refusing)
        call.lane = _lane(model, slo_us, self.band)
        call.gate = gate_at(m, slo_us, self.band)
        call.by_cost = m.by_cost != NULL
        if call.by_cost:
            call.cost = row_cost(m.by_cost, self.rows[i].nbytes, self.rows[i].cost)
        call.keyed = m.cached
        call.salt = self.salt
        call.row, call.nbytes = to, <u32> self.rows[i].nbytes
        memcpy(to, self.rows[i].data, self.rows[i].nbytes)
        if m.cached:
            call.key = model._key(to, self.rows[i].nbytes, self.salt, self.rows[i].mark)
        return 0

    cdef int look_up(self, u64 now) except -1:
        """Look the tasks of `now` up in the cache: a hit has arrived, the others are
        outstanding."""
        cdef EnsembleCall* h = self.ensemble_call
        cdef Value value
        cdef u32 i
        for i in range(h.n):
            if now >> i & 1 == 0:
                continue
            h.votes[i].start_us = 0
            h.votes[i].state = OUTSTANDING
            if (<Model> self.models[i])._look_up(self.rows[i].data, self.rows[i].nbytes, self.salt,
                                                 self.rows[i].mark,
                                                 &self.rows[i].key, &value):
                slot_fill(h.home, h.block, h.first + i, OK, &value)
                block_drop(h.home, h.block, 1)
                ensemble_call_record(h, i, OK)
        return 0

    cdef RulingData use_cache_hits(self) except *:
        """Run the decider on the cache hits, and look up further tasks while it submits some."""
        cdef EnsembleCall* h = self.ensemble_call
        cdef RulingData ruling
        cdef u32 i
        cdef u64 now = 0
        for i in range(h.n):
            now |= task_bit(i) if h.votes[i].start_us == 0 else 0
        self.look_up(now)
        ruling = ensemble_call_decide(h)
        while ruling.kind == SUBMIT:
            if ruling.extra and not decider_may_extra(h.decider):
                for i in range(h.n):
                    if ruling.mask >> i & 1:
                        h.votes[i].start_us = NEVER_US
            else:
                self.look_up(ruling.mask)
            ruling = ensemble_call_decide(h)
        return ruling

    cdef int answer_at_once(self, const RulingData* ruling, u64 queued) except -1:
        """Answer before anything is queued. The other tasks are queued only if policies learn from
        them."""
        cdef EnsembleCall* h = self.ensemble_call
        cdef u32 i
        for i in range(h.n):
            if queued >> i & 1 and not h.learn:
                h.votes[i].state = UNSUBMITTED
        ensemble_call_answer(h, NULL, ruling.step, ruling.mask)
        return 0

    cdef int submit(self, u64 queued) except -1:
        cdef EnsembleCall* h = self.ensemble_call
        cdef u32 i
        for i in range(h.n):
            if queued >> i & 1:
                self.submit_one(i)
        return 0

    cdef int submit_one(self, u32 i) except -1:
        cdef EnsembleCall* h = self.ensemble_call
        cdef Model model = self.models[i]
        cdef CompletionState* d = model.engine.state.completion
        cdef Status status
        ensemble_call_submitting(h, i)
        if d != h.home:
            d.tasks_of_peers.fetch_add(1, relaxed)
        status = model._queue(self.rows[i].data, self.rows[i].nbytes, &self.rows[i].key, self.salt,
                              self.slo_us, self.band, self.now_us, h.block, h.first + i,
                              self.rows[i].cost)
        if status == OK:
            return 0
        if d != h.home:
            d.tasks_of_peers.fetch_sub(1, relaxed)
        count(&model.state.tally.refused[<u32> status], 1)
        ensemble_call_lock(h)
        ensemble_call_refused(h, i, status)
        ensemble_call_unlock(h)
        return 0


cdef Lane* _lane(Model model, u64 slo_us, u32 band) except NULL:
    """Return the lane of a band and a class of SLO; it is made at first use, under the GIL."""
    cdef Lane* lane
    lane_prepare(model.engine.state, model.state, slo_us, band)
    lane = lane_at(model.state, slo_us, band)
    if lane == NULL:
        raise_for(NO_MEMORY, f"no memory for a queue of {model.name}")
    return lane


cdef int _check(tuple models, Decider decider, object weights, object starts_us) except -1:
    if not 1 <= len(models) <= ENSEMBLE_TASKS_MAX:
        raise_for(BAD_INPUT,
                  f"predict_ensemble takes 1 to {ENSEMBLE_TASKS_MAX} models, not {len(models)}")
    for name, values in (("weights", weights), ("starts_us", starts_us)):
        if values is not None and len(values) != len(models):
            raise_for(BAD_INPUT,
                      f"predict_ensemble was given {len(values)} {name} for {len(models)} models")
    if weights is not None and not all([0 <= weight < float("inf") for weight in weights]):
        raise_for(BAD_INPUT, f"weights are numbers from 0 on, not {weights}")
    if starts_us is not None and not all([-1 <= start < 1 << 62 for start in starts_us]):
        raise_for(BAD_INPUT,
                  f"starts_us are microseconds from 0 on, or -1: when the decider submits it; not "
                  f"{starts_us}")
    if decider is None:
        raise_for(BAD_INPUT, "predict_ensemble was given no decider")
    return 0


cdef bint _starts_later(object starts_us) except -1:
    return starts_us is not None and any([start != 0 for start in starts_us])


def predict_ensemble(tuple models, Decider decider, x, slo_us=None, salt=0, finish=None,
                  extra=None, weights=None,
                  starts_us=None, bint learn=False, str field="", u32 band=0):
    """Return one future over the same input on several models, done as soon as `decider` has an
    answer. Threads: any.

    Task i is for models[i]; models are ranked, the best first. `starts_us[i]`: when it is
    submitted, microseconds after now; 0: at once; -1: when the decider submits it. `weights`: of
    votes and means. With `learn` the tasks that are outstanding at the answer go on; without, they
    end as UNNEEDED, like those never submitted. `future.verdict` names the tasks of the answer,
    `finish(future)` makes it; without `finish` the result is the list of the used predictions, in
    rank order. field: the tensor that is compared of records that have one of this name, of at most
    4 dimensions; other outputs are compared as a whole. band: of the rows, also of later ones.
    Raises BAD_INPUT (nothing was submitted), NO_MEMORY.
    """
    cdef Model model
    _check(models, decider, weights, starts_us)
    model = models[0]
    return ensemble_future(models, decider, x, NULL, 0, slo_of(slo_us, model.slo_us),
                           salt_of(salt), band_of_row(band), finish, extra, weights, starts_us,
                           learn, field)


cdef Future ensemble_future(tuple models, Decider decider, object x, const void* given, u64 nbytes,
                            u64 slo_us, u64 salt, u32 band, object finish, object extra,
                            object weights, object starts_us, bint learn, str field):
    cdef Model model = models[0]
    cdef EnsembleRequest request = EnsembleRequest.__new__(EnsembleRequest)
    cdef CompletionState* home = model.engine.state.completion
    cdef Block* block = NULL
    cdef u32 first = 0, i, n = <u32> len(models)
    cdef u64 row_bytes, queued = 0
    cdef RulingData ruling
    cdef Future future
    request.models = models
    request.salt = salt
    request.band = band
    request.slo_us = slo_us
    row_bytes = request.read(x, given, nbytes)
    if not slots_claim(home, n + 1, &block, &first):
        raise_for(NO_MEMORY, "no memory for a future")
    request.now_us = model._now_us()
    request.ensemble_call = ensemble_call_new(home, block, first, n, decider.state, request.now_us,
                                              request.slo_us,
                                learn,
                                n * sizeof(DeferredCall) + row_bytes if _starts_later(starts_us)
                                else 0)
    if request.ensemble_call == NULL:
        _give_back(home, block, first, n + 1)
        raise_for(NO_MEMORY, "no memory for an ensemble call")
    request.set_votes(weights, starts_us)
    request.set_field(field)
    decider_query(decider.state)
    future = future_of_ensemble(model.engine.completion, request.ensemble_call, models, finish,
                                extra)
    ruling = request.use_cache_hits()
    for i in range(n):
        queued |= task_bit(i) if request.ensemble_call.votes[i].state == OUTSTANDING else 0
    if ruling.kind == ANSWER:
        request.answer_at_once(&ruling, queued)
    if ruling.kind != ANSWER or learn:
        request.submit(queued)
    ensemble_call_submitted(request.ensemble_call)
    if any([is_elsewhere(each, model) for each in models]):
        mix(future, models)
    return future


cdef void _give_back(CompletionState* home, Block* block, u32 first, u32 n) noexcept:
    cdef Value nothing
    cdef u32 i
    nothing.word = 0
    nothing.tag = TAG_NONE
    for i in range(n):
        slot_fill(home, block, first + i, NO_MEMORY, &nothing)
    block_drop(home, block, 2 * n)
