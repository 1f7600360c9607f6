"""InputSchema: an input becomes the bytes of a row, or is refused with a message that says what was
expected and what came."""
cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

import math

import numpy as np

from clipper_core.cache.clock_cache cimport key_of
from clipper_core.runtime.dtype cimport ANY, STR, all_finite, itemsize
from clipper_core.runtime.machine cimport u32, u8
from clipper_core.runtime.status cimport BAD_INPUT, TOO_LARGE, raise_for
from clipper_core.scheduling.submit cimport row_bytes_end
from clipper_core.wire.prediction cimport RANK_MAX

from clipper_core.runtime.dtype import NAMES

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


cdef int check_type(str name, str dtype, tuple shape) except -1:
    if (dtype not in NAMES and dtype != "any") or len(shape) > RANK_MAX:
        raise_for(BAD_INPUT, f"{name}: no type of rows is {dtype} with {len(shape)} dimensions")
    if (shape != (-1,) and any([not 0 < n <= 0xFFFFFFFF for n in shape])
        or 8 * math.prod(shape) > ROW_BYTES_MAX):
        raise_for(BAD_INPUT, f"{name}: a row cannot have the shape {shape}")
    return 0


@cython.no_gc_clear                  # the model's end needs `engine`
cdef class InputSchema:
    """Threads: any. What a model takes; clipper_core.engine.model.Model is made of it, and makes
    it."""

    def __init__(self):
        raise TypeError("only a Model takes inputs: make one of those")

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
        """Give a model of type `any` the type of its rows; only before its first row."""
        if self.state.spec.dtype != ANY:
            raise_for(BAD_INPUT, f"{self.name} takes {self.describe_input()} already")
        check_type(self.name, dtype, shape)
        if self.similar is not None:
            check_similar(self.name, dtype, shape)
        self._set_rows(dtype, shape, tensors)

    cdef int _settle_by(self, object x) except -1:
        """The first input of a model of type `any` says what its rows are. The answer of the thread
        that comes first holds."""
        cdef object settled
        if self.on_untyped is None:
            raise self._refuse(x, "its input type is not known yet")
        settled = self.on_untyped(x)
        if self.state.spec.dtype == ANY:
            self.settle(*settled)
        return 0

    cdef object _row(self, object x, const void** row, u64* nbytes):
        """Point at the row's bytes; -> the object that must stay alive meanwhile."""
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
            return self._packed(self.tensors.pack(x), row, nbytes)
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
        if isinstance(x, np.ndarray):
            array = x
            if (cnp.PyArray_TYPE(array) != self.typenum or not cnp.PyArray_ISCARRAY_RO(array)):
                if not np.can_cast(array.dtype, self.dtype, "same_kind"):
                    raise self._refuse(x, None)
                array = np.array(array, self.dtype, order="C")
        else:
            array = self._array_of(x)
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
        """From what is no array yet. Whole numbers fit any integer type that holds their values."""
        try:
            array = np.asarray(x)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._refuse(x, error) from None
        if array.dtype.kind in "iu" and self.dtype.kind in "iu" and array.size:
            bounds = np.iinfo(self.dtype)
            if array.min() < bounds.min or array.max() > bounds.max:
                raise self._refuse(x, f"a value lies beyond {bounds.min} to {bounds.max}")
        elif array.size and not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise self._refuse(x, None)
        return np.array(array, self.dtype, order="C")

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
    cdef object _refuse(self, object x, object cause):
        wanted = self.describe_input()
        if isinstance(x, np.ndarray):
            got = f"{x.dtype}{list(x.shape)}"
        elif isinstance(x, (list, tuple)):
            got = f"a {type(x).__name__} of {len(x)}"
        else:
            got = f"{type(x).__name__}"
        text = f"input for {self.name}: expected {wanted}, got {got}"
        if cause is not None:
            text += f": {cause}"
        try:
            raise_for(BAD_INPUT, text)
        except Exception as error:
            return error

    def describe_input(self):
        """The input type as the notation has it: `f64[64]`, `i32[*]`, `str`, or the types of named
        tensors as JSON."""
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

    cdef object _rows(self, object rows):
        """All rows checked before the first is submitted. Of named tensors of fixed sizes they are
        not packed yet."""
        cdef const void* row = NULL
        cdef u64 nbytes = 0
        cdef object _keep
        if self.tensors is not None:
            rows = self.tensors.by_tensor(rows)
            if len(rows):
                self._check_bytes(self.state.spec.row_bytes or int(rows.sizes.max()))
            return rows
        if not isinstance(rows, np.ndarray):
            rows = list(rows)
        if self.state.spec.dtype == ANY and len(rows):
            _keep = self._row(rows[0], &row, &nbytes)
        if self.typenum >= 0 and not self.state.spec.variable:
            try:
                array = np.asarray(rows)
            except ValueError as error:
                raise self._refuse(rows, error) from None
            if array.ndim != len(self.shape) + 1 or not np.can_cast(array.dtype, self.dtype,
                                                                    "same_kind"):
                raise self._refuse(rows,
                                   f"predict_many takes an array of shape "
                                   f"(n, {', '.join(map(str, self.shape))})")
            array = np.ascontiguousarray(array, self.dtype)
            self._check_bytes(self.state.spec.row_bytes)
            for item in array[:1]:
                self._array(item)
            if self.state.finite and not np.isfinite(array).all():
                raise self._refuse(rows,
                                   "it holds NaN or an infinity, and this model was deployed with "
                                   "finite=True")
            return array
        rows = list(rows)
        for item in rows:
            self._row(item, &row, &nbytes)
            self._check_bytes(nbytes)
        return rows
