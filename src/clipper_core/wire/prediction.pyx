"""Predictions by value, and the blobs behind those that do not fit a word."""
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memcpy, memset

import numpy as np

from clipper_core.runtime.dtype cimport (
    BOOL, BYTES, F16, F32, F64, I16, I32, I64, I8, STR, U16, U32, U64, U8,
)
from clipper_core.runtime.machine cimport i64

cdef extern from *:
    """
    static inline double word_f64(unsigned long long w) { double d; memcpy(&d, &w, 8); return d; }
    static inline float word_f32(unsigned long long w) { float f; memcpy(&f, &w, 4); return f; }
    """
    double word_f64(u64) noexcept nogil
    float word_f32(u64) noexcept nogil

cdef enum:
    SHARED_FROM = 4096          # bytes of an array that is not copied for each who reads it

cdef dict _dtypes = {BOOL: np.dtype("?"), U8: np.dtype("u1"), I8: np.dtype("i1"),
                     U16: np.dtype("<u2"),
                     I16: np.dtype("<i2"), U32: np.dtype("<u4"), I32: np.dtype("<i4"),
                     U64: np.dtype("<u8"),
                     I64: np.dtype("<i8"), F16: np.dtype("<f2"), F32: np.dtype("<f4"),
                     F64: np.dtype("<f8")}


cdef list _records = []                 # (opens one, opens many) by type of record, from 1
cdef dict _record_numbers = {}


def register_record(str key, open_one, open_many):
    """The number of a type of records, by which outputs of it become Python's values.

    key: equal for equal types. open_one: (bytes) -> value. open_many: (rows, offsets) -> columns:
    u8 (n, bytes) and None; or u8 (bytes,) and i64 (n + 1,), where each record begins.
    Types are never forgotten. Threads: any.
    """
    found = _record_numbers.get(key)
    if found is None:
        _records.append((open_one, open_many))
        found = _record_numbers.setdefault(key, len(_records))
    return found


cdef u32 record_type(const Blob* blob) noexcept nogil:
    if blob.dtype == BYTES or (blob.dtype == U8 and blob.rank == 1):
        return blob.dims[RANK_MAX - 1]
    return 0


cdef object record_columns(u32 number, object rows, object offsets):
    return _records[number - 1][1](rows, offsets)


cdef Value record_value(u32 number, bytes record) except *:
    cdef Value value = _blob_value(BYTES, record, ())
    (<Blob*> value.word).dims[RANK_MAX - 1] = number
    return value


cdef Blob* blob_new(const void* data, u64 nbytes) noexcept nogil:
    return blob_qualified(data, nbytes, NULL, 0)


cdef Blob* blob_qualified(const void* data, u64 nbytes, const void* qualifiers,
                          u16 n) noexcept nogil:
    cdef Blob* blob = <Blob*> malloc(sizeof(Blob) + nbytes + n)
    if blob == NULL:
        return NULL
    blob.refs.store(1, relaxed)
    blob.dtype = 0
    blob.rank = 0
    blob.has_confidence = 0
    memset(blob.dims, 0, sizeof(blob.dims))
    blob.confidence = 0
    blob.nbytes = nbytes
    blob.qualifier_bytes = n
    if nbytes:
        memcpy(blob_data(blob), data, nbytes)
    if n:
        memcpy(<char*> blob_data(blob) + nbytes, qualifiers, n)
    return blob


cdef void* blob_data(Blob* blob) noexcept nogil:
    return <char*> blob + sizeof(Blob)


cdef void blob_drop(Blob* blob) noexcept nogil:
    if blob.refs.fetch_sub(1, acq_rel) == 1:
        free(blob)


cdef void value_hold(Value* value) noexcept nogil:
    if value.tag == TAG_BLOB:
        (<Blob*> value.word).refs.fetch_add(1, relaxed)


cdef void value_drop(Value* value) noexcept nogil:
    if value.tag == TAG_BLOB:
        blob_drop(<Blob*> value.word)
    value.tag = TAG_NONE


cdef object _scalar(int dtype, u64 word):
    if dtype == F64:
        return word_f64(word)
    if dtype == F32:
        return word_f32(word)
    if dtype == BOOL:
        return bool(word & 1)
    if dtype == U8 or dtype == U16 or dtype == U32 or dtype == U64:
        return word
    if dtype == I64:
        return <i64> word
    return np.frombuffer(word.to_bytes(8, "little"), _dtypes[dtype], 1)[0].item()


cdef class _SharedBytes:
    """The bytes of a blob, read-only and without a copy: arrays of one answer share them with the
    cache, however many clients ask for it."""
    cdef Blob* blob

    def __dealloc__(self):
        if self.blob != NULL:
            blob_drop(self.blob)

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, blob_data(self.blob), <Py_ssize_t> self.blob.nbytes, 1, flags)


cdef object _array(Blob* blob):
    cdef object raw
    cdef _SharedBytes shared
    if record_type(blob) or blob.nbytes < SHARED_FROM:
        raw = PyBytes_FromStringAndSize(<char*> blob_data(blob), <Py_ssize_t> blob.nbytes)
        if record_type(blob):
            return _records[record_type(blob) - 1][0](raw)
    else:
        shared = _SharedBytes.__new__(_SharedBytes)
        blob.refs.fetch_add(1, relaxed)
        shared.blob = blob
        raw = shared
    flat = np.frombuffer(raw, _dtypes[blob.dtype])
    return flat.reshape([blob.dims[i] for i in range(blob.rank)])


cdef object value_object(Value* value):
    cdef u64 word = 0
    if value.tag == TAG_NONE:
        return None
    if value.tag != TAG_BLOB:
        return _scalar(value.tag, value.word)
    cdef Blob* blob = <Blob*> value.word
    if blob.dtype == STR:
        return PyUnicode_DecodeUTF8(<char*> blob_data(blob), <Py_ssize_t> blob.nbytes, "replace")
    if blob.dtype == BYTES and blob.dims[RANK_MAX - 1] == 0:
        return PyBytes_FromStringAndSize(<char*> blob_data(blob), <Py_ssize_t> blob.nbytes)
    if blob.dtype == BYTES:
        return _array(blob)
    if blob.rank == 0:
        memcpy(&word, blob_data(blob), blob.nbytes if blob.nbytes < 8 else 8)
        return _scalar(blob.dtype, word)
    return _array(blob)


cdef object value_confidence(Value* value):
    if value.tag != TAG_BLOB or not (<Blob*> value.word).has_confidence:
        return None
    return (<Blob*> value.word).confidence


cdef object value_heard(Value* value):
    cdef Blob* blob = <Blob*> value.word
    cdef object output = value_object(value)
    if value.tag != TAG_BLOB:
        return output, None
    confidence = blob.confidence if blob.has_confidence else None
    if blob.qualifier_bytes == 0:
        return output, confidence
    return output, confidence, PyBytes_FromStringAndSize(<char*> blob_data(blob) + blob.nbytes,
                                                         blob.qualifier_bytes)


cdef extern from *:
    """
    static inline unsigned long long f64_word(double d) { unsigned long long w; memcpy(&w, &d, 8);
            return w; }
    """
    u64 f64_word(double) noexcept nogil


cdef Value object_value(object output) except *:
    cdef Value value
    value.tag = TAG_NONE
    value.word = 0
    if isinstance(output, bool):
        value.word, value.tag = <u64> (1 if output else 0), BOOL
    elif isinstance(output, int):
        value.word, value.tag = <u64> <i64> output, I64
    elif isinstance(output, float):
        value.word, value.tag = f64_word(output), F64
    elif isinstance(output, str):
        value = _blob_value(STR, output.encode(), ())
    elif isinstance(output, (bytes, bytearray)):
        value = _blob_value(BYTES, bytes(output), ())
    elif isinstance(output, np.generic):
        value = object_value(output.item())
    elif isinstance(output, np.ndarray):
        value = _array_value(output)
    else:
        raise TypeError(f"a prediction is a number, str, bytes or ndarray, not "
                        f"{type(output).__name__}")
    return value


cdef Value _array_value(object array) except *:
    for dtype, numpy_dtype in _dtypes.items():
        if array.dtype == numpy_dtype and array.ndim <= RANK_MAX:
            return _blob_value(dtype, array.tobytes(), array.shape)
    raise TypeError(f"no prediction has dtype {array.dtype} and {array.ndim} dimensions")


cdef Value _blob_value(int dtype, bytes data, tuple shape) except *:
    cdef Value value
    cdef Blob* blob = blob_new(<const char*> data, <u64> len(data))
    cdef u32 i
    if blob == NULL:
        raise MemoryError("no memory for a prediction")
    blob.dtype = <u8> dtype
    blob.rank = <u8> len(shape)
    for i in range(len(shape)):
        blob.dims[i] = shape[i]
    value.word = <u64> blob
    value.tag = TAG_BLOB
    return value
