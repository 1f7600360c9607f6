"""Records are packed and opened in one pass over a layout that is compiled once.

Values of exactly the declared types are packed and opened here: arrays, numbers, strings. For
anything else (lists, arrays of other types, arrays of strings, invalid values) the functions return
None, and the caller uses clipper_container.schema, which converts the value or raises an error. So
there is one definition of what is accepted, and one set of error messages.
"""
cimport cython
cimport numpy as cnp
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_CheckExact, PyUnicode_DecodeUTF8
from libc.float cimport FLT_MAX
from libc.math cimport fabs, isfinite
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from libcpp.vector cimport vector

import numpy as np

from clipper_core.runtime.dtype cimport (
    BOOL, BYTES, F32, F64, I16, I32, I64, I8, STR, U16, U32, U64, U8, all_finite, are_bools,
)
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

from clipper_core.runtime.dtype import NAMES

cnp.import_array()

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    PyObject* PyDict_GetItemWithError(object mapping, object key) except? NULL

cdef extern from "numpy/arrayobject.h":
    object PyArray_Scalar(void* data, cnp.dtype type, object base)

cdef enum:
    TENSORS_MAX = 64            # of a schema

cdef u64 RECORD_BYTES_MAX = <u64> 1 << 30
cdef u64 PART_BYTES_MAX = <u64> 1 << 40     # a product of sizes beyond it is damage


cdef inline u64 _padded(u64 size) noexcept nogil:
    return (size + 7) & ~<u64> 7


# -- where the tensors of a record are

cdef struct Walk:               # over the tensors of a record, in order
    const u8* record
    u64 nbytes
    u64 head                    # the next size
    u64 at                      # the next tensor


cdef bint _begin(Walk* walk, const RecordShape* shape, const u8* record,
                 u64 nbytes) noexcept nogil:
    walk.record, walk.nbytes = record, nbytes
    walk.head, walk.at = 0, shape.head_bytes
    return nbytes & 7 == 0 and nbytes >= shape.head_bytes


cdef u32 _size(Walk* walk) noexcept nogil:
    cdef u32 size
    memcpy(&size, walk.record + walk.head, 4)
    walk.head += 4
    return size


cdef bint _next(Walk* walk, const RecordPart* part, RecordPlace* place) noexcept nogil:
    cdef u64 most = part.item_bytes     # as if no size were 0, because numpy refuses arrays that
                                        # are too large
    cdef u32 k
    place.items = 1
    for k in range(part.rank):
        place.dims[k] = part.dims[k] if part.dims[k] >= 0 else <i64> _size(walk)
        if place.dims[k] and most > PART_BYTES_MAX // <u64> place.dims[k]:
            return False
        most *= <u64> max(place.dims[k], <i64> 1)
        place.items *= <u64> place.dims[k]
    place.nbytes = <u64> _size(walk) if part.typenum < 0 else place.items * part.item_bytes
    place.at = walk.at
    if place.nbytes > walk.nbytes - walk.at:
        return False
    walk.at = _padded(walk.at + place.nbytes)
    return True


cdef bint record_place(const RecordShape* shape, const u8* record, u64 nbytes, u32 index,
                       RecordPlace* place) noexcept nogil:
    cdef Walk walk
    cdef u32 k
    if not _begin(&walk, shape, record, nbytes):
        return False
    for k in range(index + 1):
        if not _next(&walk, &shape.parts[k], place):
            return False
    return True


# -- values

cdef bint _whole(u8 dtype, i64 number, u64* word) noexcept nogil:
    """Set the bytes of a whole number; False if the type does not hold it."""
    cdef double wide = <double> number
    cdef float single = <float> number
    word[0] = <u64> number
    if dtype == F64:
        memcpy(word, &wide, 8)
    elif dtype == F32:
        memcpy(word, &single, 4)
    elif dtype == I8:
        return -0x80 <= number <= 0x7F
    elif dtype == I16:
        return -0x8000 <= number <= 0x7FFF
    elif dtype == I32:
        return -<i64> 0x80000000 <= number <= <i64> 0x7FFFFFFF
    elif dtype == U8:
        return 0 <= number <= 0xFF
    elif dtype == U16:
        return 0 <= number <= 0xFFFF
    elif dtype == U32:
        return 0 <= number <= <i64> 0xFFFFFFFF
    elif dtype == U64:
        return number >= 0
    else:
        return dtype == I64
    return True


cdef bint _number(u8 dtype, object exact, object value, u64* word) except -1:
    """Set the bytes of a number that is no array; False: the general way takes it, or refuses."""
    cdef double wide
    cdef float single
    cdef i64 whole
    cdef int overflow = 0
    if type(value) is exact:
        cnp.PyArray_ScalarAsCtype(value, word)
        return True
    if PyFloat_CheckExact(value):
        wide = PyFloat_AS_DOUBLE(value)
        single = <float> wide
        if dtype == F64:
            memcpy(word, &wide, 8)
        elif dtype == F32 and not (isfinite(wide) and fabs(wide) > FLT_MAX):
            memcpy(word, &single, 4)
        else:
            return False
        return True
    if PyLong_CheckExact(value):
        whole = PyLong_AsLongLongAndOverflow(value, &overflow)
        return overflow == 0 and _whole(dtype, whole, word)
    word[0] = value is True
    return dtype == BOOL and (value is True or value is False)


cdef bint _text(u8 dtype, object value, Taken* taken) except -1:
    """Set the bytes of a string; False: the general way takes it, or refuses."""
    cdef Py_ssize_t size
    if dtype == BYTES and PyBytes_CheckExact(value):
        taken.data, taken.nbytes = PyBytes_AS_STRING(value), <u64> PyBytes_GET_SIZE(value)
        return True
    if dtype != STR or not PyUnicode_CheckExact(value):
        return False
    try:
        taken.data = PyUnicode_AsUTF8AndSize(value, &size)
    except UnicodeEncodeError:
        return False
    taken.nbytes = <u64> size
    return True


cdef bint _array(const RecordPart* part, cnp.ndarray array, Taken* taken) noexcept:
    """Set the bytes of an array; False: the general way takes it, or refuses."""
    cdef u32 k
    if (cnp.PyArray_TYPE(array) != part.typenum or cnp.PyArray_NDIM(array) != part.rank
            or not cnp.PyArray_ISCARRAY_RO(array)):
        return False
    if part.dtype == BOOL and not are_bools(<const u8*> cnp.PyArray_DATA(array),
                                            <u64> cnp.PyArray_NBYTES(array)):
        return False
    for k in range(part.rank):
        taken.dims[k] = cnp.PyArray_DIM(array, k)
        if taken.dims[k] != part.dims[k] and (part.dims[k] >= 0 or taken.dims[k] > 0xFFFFFFFF):
            return False
    taken.data, taken.nbytes = cnp.PyArray_DATA(array), <u64> cnp.PyArray_NBYTES(array)
    return True


@cython.final
cdef class RecordLayout:
    """The layout of the records of named tensors. Threads: any.

    specs: clipper_container.schema.TensorSpec of each tensor, in order. finite: NaN and infinities
    are left to the general way, which refuses them.
    """

    def __init__(self, specs, bint finite=False):
        cdef RecordPart* part
        cdef u32 words = 0
        cdef Py_ssize_t k, j
        if not 0 < len(specs) <= TENSORS_MAX or any([len(each.shape) > DIMS_MAX for each in specs]):
            raise_for(BAD_INPUT, f"a record of {len(specs)} tensors; 1 to {TENSORS_MAX} are "
                                 f"possible, of at most {DIMS_MAX} dimensions")
        self.names = tuple([spec.name for spec in specs])
        self.types = tuple([None if spec.dtype in ("str", "bytes") else spec.numpy
                            for spec in specs])
        self.finite, self.simple = finite, True
        self.shape.parts = <RecordPart*> calloc(len(specs), sizeof(RecordPart))
        if self.shape.parts == NULL:
            raise MemoryError("no memory for the layout of a record")
        self.shape.count = <u32> len(specs)
        for k, spec in enumerate(specs):
            part = &self.shape.parts[k]
            part.dtype, part.rank = <u8> int(NAMES[spec.dtype]), <u8> len(spec.shape)
            part.typenum = -1 if self.types[k] is None else (<cnp.dtype> self.types[k]).num
            part.item_bytes = 1 if part.typenum < 0 else <u32> self.types[k].itemsize
            for j, size in enumerate(spec.shape):
                part.dims[j] = size
                words += size < 0
            words += part.typenum < 0
            self.simple &= part.typenum >= 0 or part.rank == 0
        self.shape.head_bytes = _padded(4 * words)

    def __dealloc__(self):
        free(self.shape.parts)

    def pack(self, values):
        """Return the record of one row; None if `values` is not a dict of exactly the declared
        tensors, of which each is an array without gaps of its type and shape, a number or a string.
        """
        cdef Taken[TENSORS_MAX] taken
        cdef u64 total = self.shape.head_bytes
        cdef const RecordPart* part
        cdef PyObject* value
        cdef u32 k
        if not self.simple or type(values) is not dict or len(values) != self.shape.count:
            return None
        for k in range(self.shape.count):
            part = &self.shape.parts[k]
            value = PyDict_GetItemWithError(values, self.names[k])
            if value == NULL:
                return None
            if part.typenum < 0:
                if not _text(part.dtype, <object> value, &taken[k]):
                    return None
            elif cnp.PyArray_CheckExact(<object> value):
                if not _array(part, <object> value, &taken[k]):
                    return None
            elif part.rank or not _number(part.dtype, self.types[k].type, <object> value,
                                          &taken[k].word):
                return None
            else:
                taken[k].data, taken[k].nbytes = &taken[k].word, part.item_bytes
            if self.finite and not all_finite(part.dtype, taken[k].data, taken[k].nbytes):
                return None
            total += _padded(taken[k].nbytes)
            if total > RECORD_BYTES_MAX:
                return None
        cdef bytes record = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> total)
        self._write(taken, <u8*> PyBytes_AS_STRING(record))
        return record

    cdef void _write(self, const Taken* taken, u8* to) noexcept:
        cdef const RecordPart* part
        cdef u32* sizes = <u32*> to
        cdef u32 k, j
        if self.shape.head_bytes:
            (<u64*> (to + self.shape.head_bytes - 8))[0] = 0
        to += self.shape.head_bytes
        for k in range(self.shape.count):
            part = &self.shape.parts[k]
            for j in range(part.rank):
                if part.dims[j] < 0:
                    sizes[0] = <u32> taken[k].dims[j]
                    sizes += 1
            if part.typenum < 0:
                sizes[0] = <u32> taken[k].nbytes
                sizes += 1
            if taken[k].nbytes:
                (<u64*> (to + _padded(taken[k].nbytes) - 8))[0] = 0
                memcpy(to, taken[k].data, taken[k].nbytes)
                to += _padded(taken[k].nbytes)

    def unpack(self, bytes record not None):
        """Return the tensors of a record by name: arrays that are views of it, numpy scalars, str
        and bytes. None for a record that is damaged, or holds arrays of strings."""
        return self.open(record, <const u8*> PyBytes_AS_STRING(record),
                         <u64> PyBytes_GET_SIZE(record))

    cdef object open(self, object base, const u8* record, u64 nbytes):
        cdef Walk walk
        cdef RecordPlace place
        cdef dict opened = {}
        cdef u32 k
        if not self.simple or not _begin(&walk, &self.shape, record, nbytes):
            return None
        for k in range(self.shape.count):
            if not _next(&walk, &self.shape.parts[k], &place):
                return None
            value = self._opened(k, base, record + place.at, &place)
            if value is None:
                return None
            opened[self.names[k]] = value
        return opened if walk.at == nbytes else None

    cdef object _opened(self, u32 k, object base, const u8* data, const RecordPlace* place):
        cdef const RecordPart* part = &self.shape.parts[k]
        cdef cnp.npy_intp[DIMS_MAX] dims
        cdef cnp.ndarray array
        cdef u32 i
        if part.dtype == BYTES:
            return PyBytes_FromStringAndSize(<const char*> data, <Py_ssize_t> place.nbytes)
        if part.dtype == STR:
            try:
                return PyUnicode_DecodeUTF8(<const char*> data, <Py_ssize_t> place.nbytes, NULL)
            except UnicodeDecodeError:
                return None
        if part.dtype == BOOL and not are_bools(data, place.nbytes):
            return None
        if part.rank == 0:
            return PyArray_Scalar(<void*> data, self.types[k], None)
        for i in range(part.rank):
            dims[i] = place.dims[i]
        array = cnp.PyArray_SimpleNewFromData(part.rank, dims, part.typenum, <void*> data)
        cnp.PyArray_CLEARFLAGS(array, cnp.NPY_ARRAY_WRITEABLE)
        cnp.set_array_base(array, base)
        return array


def pack_vectors(list columns, list dtypes):
    """Return the records of rows of numbers of free lengths (docs/wire.md), u8 (bytes,), and where
    each begins, i64 (n + 1,): one pass for the sizes, one for the bytes, and no Python object per
    row.

    columns: a list of arrays for each tensor; dtypes: their types. Returns None if one is not a
    list of contiguous 1-d arrays of its type; then clipper_container.schema packs them, or raises
    an error.
    """
    cdef Py_ssize_t i, n = len(columns[0])
    cdef u32 k, tensors = <u32> len(columns)
    cdef i64 at = 0, size, head = (4 * tensors + 7) & ~<i64> 7
    cdef cnp.ndarray array
    cdef cnp.ndarray offsets = np.empty(n + 1, np.int64)
    cdef i64* begins = <i64*> cnp.PyArray_DATA(offsets)
    cdef u8* to
    cdef vector[int] types
    for dtype in dtypes:
        types.push_back((<cnp.dtype> dtype).num)
    if not all([type(column) is list for column in columns]):
        return None
    begins[0] = 0
    for i in range(n):
        at += head
        for k in range(tensors):
            given = (<list> columns[k])[i]
            if type(given) is not np.ndarray:
                return None
            array = given
            if (cnp.PyArray_TYPE(array) != types[k] or cnp.PyArray_NDIM(array) != 1
                    or not cnp.PyArray_ISCARRAY_RO(array)
                    or cnp.PyArray_DIM(array, 0) > 0xFFFFFFFF):
                return None
            if types[k] == cnp.NPY_BOOL and not are_bools(<const u8*> cnp.PyArray_DATA(array),
                                                          <u64> cnp.PyArray_NBYTES(array)):
                return None
            at += (cnp.PyArray_NBYTES(array) + 7) & ~<i64> 7
        begins[i + 1] = at
    cdef cnp.ndarray data = np.empty(at, np.uint8)
    for i in range(n):
        to = <u8*> cnp.PyArray_DATA(data) + begins[i]
        (<u64*> (to + head - 8))[0] = 0
        for k in range(tensors):
            (<u32*> to)[k] = <u32> cnp.PyArray_DIM(<cnp.ndarray> (<list> columns[k])[i], 0)
        to += head
        for k in range(tensors):
            array = (<list> columns[k])[i]
            size = (cnp.PyArray_NBYTES(array) + 7) & ~<i64> 7
            if size:
                (<u64*> (to + size - 8))[0] = 0
            memcpy(to, cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array))
            to += size
    return data, offsets
