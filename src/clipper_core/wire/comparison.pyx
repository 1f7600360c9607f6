"""The comparison of outputs: keys, hashes of labels, and distances of numbers."""
cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.math cimport INFINITY, NAN, fabs, floor, isfinite, ldexp, sqrt
from libc.string cimport memcmp, memcpy

import numpy as np

from clipper_core.runtime.dtype cimport (
    ANY, BOOL, F16, F32, F64, I16, I32, I64, I8, STR, U16, U32, U64, U8, all_finite, itemsize,
)
from clipper_core.runtime.machine cimport i64
from clipper_core.wire.codec cimport crc32
from clipper_core.wire.prediction cimport (
    RANK_MAX, TAG_BLOB, Blob, Value, blob_of, object_value, record_type, value_drop, word_data,
)
from clipper_core.wire.record cimport RecordPlace, record_place

cnp.import_array()

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    object PyUnicode_DecodeUTF8(const char* text, Py_ssize_t size, const char* errors)
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1


cdef double _half(u64 word) noexcept nogil:
    """Return the value of an f16."""
    cdef int exponent = <int> (word >> 10 & 31)
    cdef u64 rest = word & 1023
    cdef double value
    if exponent == 31:
        value = NAN if rest else INFINITY
    elif exponent == 0:
        value = ldexp(<double> rest, -24)
    else:
        value = ldexp(<double> rest + 1024, exponent - 25)
    return -value if word >> 15 & 1 else value


cdef double _float(u8 dtype, u64 word) noexcept nogil:
    """Return the value of a float of this width."""
    cdef float single
    cdef double value
    if dtype == F64:
        memcpy(&value, &word, 8)
        return value
    if dtype == F32:
        memcpy(&single, &word, 4)
        return single
    return _half(word)


cdef ValueKey number_key(double number) noexcept nogil:
    cdef ValueKey key = whole_key(0)
    number += 0.0                                   # -0.0 is 0.0
    memcpy(&key.bits, &number, 8)
    key.kind = FLOAT_KEY
    return key


cdef inline bint _is_float(u8 dtype) noexcept nogil:
    return dtype == F16 or dtype == F32 or dtype == F64


cdef ValueKey _scalar_key(u8 dtype, u64 word) noexcept nogil:
    cdef ValueKey key = whole_key(word)
    cdef u32 unused = 64 - 8 * itemsize(dtype)
    if _is_float(dtype):
        return number_key(_float(dtype, word))
    if dtype == BOOL:
        key.bits = word & 1
        key.kind = BOOL_KEY
    elif dtype % 2 == 1 and dtype <= I64:           # signed: I8, I16, I32, I64
        key.bits = <u64> (<i64> (word << unused) >> unused)
    elif dtype == U64 and word >> 63:
        key.kind = LARGE_KEY
    return key


cdef ValueKey value_key(u64 word, u8 tag, const Field* field) noexcept nogil:
    cdef ValueKey key
    cdef RecordPlace place
    cdef Blob* blob
    cdef u64 scalar = 0
    cdef u32 k, record
    if not tag & TAG_BLOB:
        return _scalar_key(tag, word)
    blob = blob_of(word)
    key = text_key(ARRAY_KEY, <const char*> word_data(word), blob.nbytes)
    key.dtype = blob.dtype
    key.rank = blob.rank
    memcpy(key.dims, blob.dims, sizeof(key.dims))
    record = record_type(blob)
    if record:
        key.kind = RECORD_KEY
    if (field != NULL and record and field.record == record
            and record_place(field.shape, key.data, key.bits, field.index, &place)):
        key.kind = ARRAY_KEY
        key.data += place.at
        key.bits = place.nbytes
        key.dtype = field.shape.parts[field.index].dtype
        key.rank = field.shape.parts[field.index].rank
        for k in range(key.rank):
            key.dims[k] = <u32> place.dims[k]
    if key.kind == RECORD_KEY or key.rank:
        return key
    if key.dtype <= F64:
        memcpy(&scalar, key.data, min(key.bits, <u64> 8))
        return _scalar_key(key.dtype, scalar)
    key.kind = STR_KEY if key.dtype == STR else BYTES_KEY
    return key


cdef double key_number(const ValueKey* key) noexcept nogil:
    cdef double number
    if key.data != NULL:
        return 0.0
    if key.kind == FLOAT_KEY:
        memcpy(&number, &key.bits, 8)
        return number
    return <double> key.bits if key.kind == LARGE_KEY else <double> <i64> key.bits


cdef bint key_is_usable(const ValueKey* key) noexcept nogil:
    if key.data == NULL:
        return key.kind != FLOAT_KEY or isfinite(key_number(key))
    return key.kind != ARRAY_KEY or all_finite(key.dtype, key.data, key.bits)


cdef bint same_contents(const ValueKey* a, const ValueKey* b) noexcept nogil:
    if a.kind == FLOAT_KEY:
        # NaN is not NaN
        return key_number(a) == key_number(b)
    if a.kind == RECORD_KEY and a.dims[RANK_MAX - 1] != b.dims[RANK_MAX - 1]:
        return False
    if a.kind != ARRAY_KEY:
        return a.data == b.data or memcmp(a.data, b.data, a.bits) == 0
    if a.dtype != b.dtype or a.rank != b.rank or memcmp(a.dims, b.dims, 4 * a.rank) != 0:
        return False
    if _is_float(a.dtype):
        return _are_equal_floats(a, b)
    return memcmp(a.data, b.data, a.bits) == 0


cdef bint _are_equal_floats(const ValueKey* a, const ValueKey* b) noexcept nogil:
    """Compare arrays of floats of one type by their numbers: -0.0 is 0.0, and NaN is not NaN."""
    cdef u64 i, one, other
    cdef u32 size = itemsize(a.dtype)
    for i in range(a.bits // size):
        one = 0
        other = 0
        memcpy(&one, a.data + i * size, size)
        memcpy(&other, b.data + i * size, size)
        if _float(a.dtype, one) != _float(b.dtype, other):
            return False
    return True


cdef u32 key_hash(const ValueKey* key) noexcept nogil:
    if key.kind == FLOAT_KEY or key.kind == ARRAY_KEY:
        return 0
    return <u32> (LABEL_HASHES - 1 & (key.bits if key.data == NULL
                                      else crc32(0, key.data, key.bits)))


# -- numbers

cdef inline bint _is_number(const ValueKey* key) noexcept nogil:
    """Return whether an output is averaged, and not voted on."""
    return key.kind == FLOAT_KEY or (key.kind == ARRAY_KEY and key.dtype <= F64)


cdef inline u64 _items(const ValueKey* key) noexcept nogil:
    return 1 if key.data == NULL else key.bits // itemsize(key.dtype)


cdef ValueKey _item(const ValueKey* key, u64 i) noexcept nogil:
    """Return the key of an element of an array; of a number, its own."""
    cdef u32 size
    cdef u64 word = 0
    cdef ValueKey one
    if key.data == NULL:
        return key[0]
    size = itemsize(key.dtype)
    memcpy(&word, key.data + i * size, size)
    one = _scalar_key(key.dtype, word)
    if one.kind == BOOL_KEY:
        one.kind = WHOLE_KEY
    return one


cdef bint _have_one_shape(const ValueKey* a, const ValueKey* b) noexcept nogil:
    cdef u32 i
    if a.kind != ARRAY_KEY or b.kind != ARRAY_KEY:
        return a.data == NULL and b.data == NULL
    if a.rank != b.rank:
        return False
    for i in range(a.rank):
        if a.dims[i] != b.dims[i]:
            return False
    return True


cdef bint _is_same_number(const ValueKey* whole, const ValueKey* number) noexcept nogil:
    """Return whether a whole number is equal to a float, exactly."""
    cdef double value = key_number(number)
    if value != floor(value):           # also NaN
        return False
    if whole.kind == LARGE_KEY:
        return ldexp(1.0, 63) <= value < ldexp(1.0, 64) and <u64> value == whole.bits
    return -ldexp(1.0, 63) <= value < ldexp(1.0, 63) and <i64> value == <i64> whole.bits


cdef bint keys_agree(const ValueKey* a, const ValueKey* b) noexcept nogil:
    cdef ValueKey one, other
    cdef u64 i
    if a.kind == ARRAY_KEY and b.kind == ARRAY_KEY and a.dtype <= F64 and b.dtype <= F64:
        if not _have_one_shape(a, b):
            return False
        for i in range(_items(a)):
            one = _item(a, i)
            other = _item(b, i)
            if one.kind == FLOAT_KEY or other.kind == FLOAT_KEY:
                if key_number(&one) != key_number(&other):
                    return False
            elif one.kind != other.kind or one.bits != other.bits:
                return False
        return True
    if a.kind == FLOAT_KEY and (b.kind == WHOLE_KEY or b.kind == LARGE_KEY):
        return _is_same_number(b, a)
    if b.kind == FLOAT_KEY and (a.kind == WHOLE_KEY or a.kind == LARGE_KEY):
        return _is_same_number(a, b)
    return keys_are_equal(a, b)


cdef double key_loss(const ValueKey* output, const ValueKey* label) noexcept nogil:
    cdef double unit = 0.0
    cdef double away = 0.0
    cdef double size = 0.0
    cdef double found, right
    cdef ValueKey one, other
    cdef u64 i
    if not (_is_number(output) and _is_number(label)):
        return 0.0 if keys_agree(output, label) else 1.0
    if not _have_one_shape(output, label):
        return 1.0
    if output.data == NULL:
        # a quarter of each, so that the difference cannot overflow
        away = fabs(key_number(output) / 4 - key_number(label) / 4)
        size = fabs(key_number(label) / 4)
        return 0.0 if away == 0.0 else away / (away + size)
    for i in range(_items(output)):
        one = _item(output, i)
        other = _item(label, i)
        unit = _larger(_larger(unit, fabs(key_number(&one))), fabs(key_number(&other)))
    unit = unit if unit != 0.0 else 1.0
    for i in range(_items(output)):
        one = _item(output, i)
        other = _item(label, i)
        found = key_number(&one) / unit
        right = key_number(&other) / unit
        away += (found - right) * (found - right)
        size += right * right
    away = sqrt(away)
    return 0.0 if away == 0.0 else away / (away + sqrt(size))


cdef inline double _larger(double a, double b) noexcept nogil:
    """Return the larger number; NaN if one of them is NaN."""
    return a if a > b or a != a else b


cdef double key_closeness(const ValueKey* a, const ValueKey* b) noexcept nogil:
    cdef double size = 0.0
    cdef double other_size = 0.0
    cdef double away = 0.0
    cdef double one, other
    cdef ValueKey key
    cdef u64 i
    if not (key_is_usable(a) and key_is_usable(b)):
        return 0.0
    if not (_is_number(a) or _is_number(b)):
        return 1.0 if keys_agree(a, b) else 0.0
    if a.kind == FLOAT_KEY and b.kind == FLOAT_KEY:
        one = key_number(a)
        other = key_number(b)
        return _near(fabs(one) / 2 + fabs(other) / 2, fabs(one - other))
    if not _have_one_shape(a, b) or (a.data != NULL and (a.dtype > F64 or b.dtype > F64)):
        return 0.0
    for i in range(_items(a)):
        key = _item(a, i)
        one = key_number(&key)
        key = _item(b, i)
        other = key_number(&key)
        size += one * one
        other_size += other * other
        away += (one - other) * (one - other)
    return _near(sqrt(size) / 2 + sqrt(other_size) / 2, sqrt(away))


cdef double _near(double size, double away) noexcept nogil:
    """Return the closeness of numbers of this mean size and distance. Nothing is near to what is
    too large to be measured."""
    if away == 0.0:
        return 1.0
    return size / (size + away) if isfinite(size) else 0.0


# -- outputs as objects

cdef u8 _dtype_of(cnp.ndarray array):
    """Return the element type of an array of numbers in the machine's order; ANY for another."""
    cdef int kind = cnp.PyArray_TYPE(array)
    cdef int size = <int> cnp.PyArray_ITEMSIZE(array)
    if not cnp.PyArray_ISNOTSWAPPED(array):
        return ANY
    if kind == cnp.NPY_BOOL:
        return BOOL
    if cnp.PyArray_ISSIGNED(array):
        return I8 if size == 1 else I16 if size == 2 else I32 if size == 4 else I64
    if cnp.PyArray_ISUNSIGNED(array):
        return U8 if size == 1 else U16 if size == 2 else U32 if size == 4 else U64
    if cnp.PyArray_ISFLOAT(array) and size <= 8:
        return F16 if size == 2 else F32 if size == 4 else F64
    return ANY


cdef bint key_of_output(object output, ValueKey* key) except -1:
    cdef object kind = type(output)
    cdef cnp.ndarray array
    cdef double number
    cdef int i
    if kind is float:
        number = output
        number += 0.0               # -0.0 is 0.0
        key[0] = whole_key(0)
        key.kind = FLOAT_KEY
        memcpy(&key.bits, &number, 8)
        return True
    if kind is str:
        try:
            return key_of_label(output, kind, key)
        except UnicodeEncodeError:
            return False
    if kind is int or kind is bool or kind is bytes:
        return key_of_label(output, kind, key)
    if kind is not np.ndarray:
        return False
    array = output
    key[0] = text_key(ARRAY_KEY, <const char*> cnp.PyArray_DATA(array), <u64> array.nbytes)
    key.dtype = _dtype_of(array)
    key.rank = <u8> min(array.ndim, 255)
    if key.dtype == ANY or not 0 < array.ndim <= RANK_MAX or not cnp.PyArray_IS_C_CONTIGUOUS(array):
        return False
    for i in range(array.ndim):
        if array.shape[i] >> 32:
            return False
        key.dims[i] = <u32> array.shape[i]
    return True


cdef bint key_of_label(object label, object kind, ValueKey* key) except -1:
    cdef int overflow = 0
    cdef Py_ssize_t n = 0
    cdef const char* text
    if kind is str:
        text = PyUnicode_AsUTF8AndSize(label, &n)
        key[0] = text_key(STR_KEY, text, <u64> n)
    elif kind is bytes:
        key[0] = text_key(BYTES_KEY, PyBytes_AS_STRING(label), <u64> PyBytes_GET_SIZE(label))
    else:
        key[0] = whole_key(<u64> PyLong_AsLongLongAndOverflow(label, &overflow))
        if kind is bool:
            key.kind = BOOL_KEY
    return overflow == 0


cpdef u32 label_hash(object label, object kind) except? 64:
    cdef ValueKey key
    if kind is int or kind is bool:
        return <u32> (label & LABEL_HASHES - 1)
    key_of_label(label, kind, &key)
    return key_hash(&key)


cdef object label_of_key(const ValueKey* key, object kind):
    if kind is bool:
        return key.bits != 0
    if kind is int:
        return <i64> key.bits
    if kind is bytes:
        return PyBytes_FromStringAndSize(<const char*> key.data, <Py_ssize_t> key.bits)
    return PyUnicode_DecodeUTF8(<const char*> key.data, <Py_ssize_t> key.bits, NULL)


# -- for Python

@cython.final
cdef class OutputKey:
    """The key of an output: an int of at most 64 bits, float, bool, str, bytes or array. Keys of
    equal outputs are equal, and have equal hashes. Threads: any.

    Raises TypeError for an output that cannot be a prediction.
    """
    cdef Value value
    cdef ValueKey key

    def __cinit__(self, output):
        if type(output) is int and output >> 63:
            self.value = object_value(np.array(output, np.uint64 if output > 0 else np.int64))
        else:
            self.value = object_value(output)
        self.key = value_key(self.value.word, self.value.tag, NULL)

    def __dealloc__(self):
        value_drop(&self.value)

    def __eq__(self, other):
        return (isinstance(other, OutputKey)
                and keys_are_equal(&self.key, &(<OutputKey> other).key))

    def __hash__(self):
        return key_hash(&self.key)

    @property
    def number(self):
        """The value of a number as a float; 0 for anything else."""
        return key_number(&self.key)

    @property
    def is_usable(self):
        """True if the output can be an answer: it has no NaN and no infinity."""
        return key_is_usable(&self.key)

    def agrees(self, OutputKey other not None):
        """Return whether another output is the same answer: 1 and 1.0 are."""
        return keys_agree(&self.key, &other.key)

    def loss(self, OutputKey label not None):
        """Return the loss if the right output is `label`: 0 to 1."""
        return key_loss(&self.key, &label.key)

    def closeness(self, OutputKey other not None):
        """Return how near another output is: 0 to 1."""
        return key_closeness(&self.key, &other.key)


def closeness(one, other):
    """Return how near two outputs are, 0 to 1; None if Python has to compare them."""
    cdef ValueKey first, second
    if not (key_of_output(one, &first) and key_of_output(other, &second)):
        return None
    return key_closeness(&first, &second)
