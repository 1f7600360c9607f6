"""Predictions by value, and the blobs behind those that do not fit a word."""
cimport numpy as cnp
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memcpy, memset

import numpy as np

from clipper_core.runtime.dtype cimport (
    BOOL, BYTES, F16, F32, F64, I16, I32, I64, I8, STR, U16, U32, U64, U8,
)
from clipper_core.runtime.machine cimport CHECK, acquire, i64
from clipper_core.runtime.status cimport CANCELLED, OK, PENDING, UNNEEDED
from clipper_core.wire.record cimport RecordLayout

cnp.import_array()

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


cdef list _records = []                 # (layout, opens one, opens many) by type of record, from 1
cdef dict _record_numbers = {}


def register_record(str key, RecordLayout layout, open_one, open_many):
    """Return the number of a type of records, by which its outputs are turned into Python's values.

    key: equal for equal types. layout: opens one; open_one: returns the value of bytes that the
    layout cannot open. open_many: returns the columns of rows and offsets: u8 (n, bytes) and None;
    or u8 (bytes,) and i64 (n + 1,), where each record begins. Types are never forgotten. Threads:
    any.
    """
    found = _record_numbers.get(key)
    if found is None:
        _records.append((layout, open_one, open_many))
        found = _record_numbers.setdefault(key, len(_records))
    return found


cdef u32 record_type(const Blob* blob) noexcept nogil:
    if blob.dtype == BYTES or (blob.dtype == U8 and blob.rank == 1):
        return blob.dims[RANK_MAX - 1]
    return 0


cdef object record_columns(u32 number, object rows, object offsets):
    return _records[number - 1][2](rows, offsets)


cdef RecordLayout record_layout(u32 number):
    return _records[number - 1][0]


cdef Value record_value(u32 number, bytes record) except *:
    cdef Value value = _blob_value(BYTES, record, ())
    (<Blob*> value.word).dims[RANK_MAX - 1] = number
    return value


cdef Blob* blob_new(const void* data, u64 nbytes) noexcept nogil:
    return blob_qualified(data, nbytes, NULL, 0)


cdef Blob* blob_qualified(const void* data, u64 nbytes, const void* qualifiers,
                          u16 n) noexcept nogil:
    cdef Blob* blob = _blob(nbytes, n)
    if blob == NULL:
        return NULL
    if nbytes:
        memcpy(blob_data(blob), data, nbytes)
    if n:
        memcpy(<char*> blob_data(blob) + nbytes, qualifiers, n)
    return blob


cdef Blob* blob_room(u64 nbytes) noexcept nogil:
    return _blob(nbytes, 0)


cdef Blob* _blob(u64 nbytes, u16 qualifier_bytes) noexcept nogil:
    cdef Blob* blob = <Blob*> malloc(sizeof(Blob) + nbytes + qualifier_bytes)
    if blob == NULL:
        return NULL
    blob.refs.store(1, relaxed)
    blob.dtype = 0
    blob.rank = 0
    blob.has_confidence = 0
    memset(blob.dims, 0, sizeof(blob.dims))
    blob.confidence = 0
    blob.nbytes = nbytes
    blob.qualifier_bytes = qualifier_bytes
    blob.rows = 0
    return blob


cdef Blob* blob_of_rows(const void* data, u64 nbytes, u32 n,
                        const float* confidences) noexcept nogil:
    cdef u64 beside = <u64> n * 4 if confidences != NULL else 0
    cdef Blob* blob = <Blob*> malloc(sizeof(Blob) + n * nbytes + beside)
    CHECK(n <= BLOB_ROWS_MAX and <u64> blob >> ROW_SHIFT == 0, "a blob of rows beyond its bounds")
    if blob == NULL:
        return NULL
    memset(<void*> blob, 0, sizeof(Blob))
    blob.refs.store(n, relaxed)
    blob.rows = <u16> n
    blob.nbytes = nbytes
    blob.has_confidence = confidences != NULL
    memcpy(blob_data(blob), data, n * nbytes)
    if beside:
        memcpy(<char*> blob_data(blob) + n * nbytes, confidences, beside)
    return blob


cdef void* blob_data(Blob* blob) noexcept nogil:
    return <char*> blob + sizeof(Blob)


cdef const u8* word_data(u64 word) noexcept nogil:
    return <u8*> blob_data(blob_of(word)) + (word >> ROW_SHIFT) * blob_of(word).nbytes


cdef float word_confidence(u64 word) noexcept nogil:
    cdef Blob* blob = blob_of(word)
    cdef float confidence = blob.confidence
    if blob.rows:
        memcpy(&confidence, <u8*> blob_data(blob) + blob.rows * blob.nbytes
               + (word >> ROW_SHIFT) * 4, 4)
    return confidence


cdef void blob_drop(Blob* blob, u32 refs=1) noexcept nogil:
    if blob.refs.fetch_sub(refs, acq_rel) == refs:
        free(blob)


cdef void value_hold(Value* value) noexcept nogil:
    if value.tag == TAG_BLOB:
        (<Blob*> value.word).refs.fetch_add(1, relaxed)


cdef void value_drop(Value* value) noexcept nogil:
    if value.tag & TAG_BLOB:
        blob_drop(blob_of(value.word))
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
    cache, however many clients get it."""
    cdef Blob* blob

    def __dealloc__(self):
        if self.blob != NULL:
            blob_drop(self.blob)

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, blob_data(self.blob), <Py_ssize_t> self.blob.nbytes, 1, flags)


cdef object _opened(u32 number, object raw, const u8* data, u64 nbytes):
    """Return the tensors of a record by name; None if it is damaged."""
    cdef tuple known = _records[number - 1]
    opened = (<RecordLayout> known[0]).open(raw, data, nbytes)
    return known[1](raw) if opened is None else opened


cdef object _array(u64 word):
    cdef object raw
    cdef _SharedBytes shared
    cdef Blob* blob = blob_of(word)
    cdef const u8* data = word_data(word)
    if blob.rows or blob.nbytes < SHARED_FROM:
        raw = PyBytes_FromStringAndSize(<const char*> data, <Py_ssize_t> blob.nbytes)
        data = <const u8*> PyBytes_AS_STRING(raw)
    else:
        shared = _SharedBytes.__new__(_SharedBytes)
        blob.refs.fetch_add(1, relaxed)
        shared.blob = blob
        raw = shared
    if record_type(blob):
        return _opened(record_type(blob), raw, data, blob.nbytes)
    flat = np.frombuffer(raw, _dtypes[blob.dtype])
    return flat.reshape([blob.dims[i] for i in range(blob.rank)])


cdef object value_object(Value* value):
    cdef u64 word = 0
    if value.tag == TAG_NONE:
        return None
    if not value.tag & TAG_BLOB:
        return _scalar(value.tag, value.word)
    cdef Blob* blob = blob_of(value.word)
    if blob.dtype == STR:
        return PyUnicode_DecodeUTF8(<char*> blob_data(blob), <Py_ssize_t> blob.nbytes, "replace")
    if blob.dtype == BYTES and blob.dims[RANK_MAX - 1] == 0:
        return PyBytes_FromStringAndSize(<char*> blob_data(blob), <Py_ssize_t> blob.nbytes)
    if blob.dtype == BYTES:
        return _array(value.word)
    if blob.rank == 0:
        memcpy(&word, word_data(value.word), blob.nbytes if blob.nbytes < 8 else 8)
        return _scalar(blob.dtype, word)
    return _array(value.word)


cdef object value_confidence(Value* value):
    if not value.tag & TAG_BLOB or not blob_of(value.word).has_confidence:
        return None
    return word_confidence(value.word)


cdef object value_prediction(Value* value):
    cdef Blob* blob = blob_of(value.word)
    cdef object output = value_object(value)
    cdef object confidence = value_confidence(value)
    if not value.tag & TAG_BLOB:
        return output, None
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


# -- Slots to numpy: scalars by a copy of their words, arrays by a copy of their bytes, the rest one
# by one.
#
# Scalars widen as numpy would make an array of Python's numbers: whole numbers to i64 (u64 where
# they need it), floats to f64.

cdef dict _names = {1: "?", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<u4", 7: "<i4", 8: "<u8",
                    9: "<i8", 10: "<f2", 11: "<f4",
                    12: "<f8"}


cdef struct Seen:               # the column, with its states at the time of the call
    const Column* of
    const u8* state
    u32 n


cdef u32 column_first_failed(const Column* column) noexcept nogil:
    cdef u32 i = 0
    while i < column.n and column.state[i].load(acquire) == OK:
        i += 1
    return i


cdef object column_states(const Column* column):
    cdef cnp.ndarray states = np.empty(column.n, np.uint8)
    cdef u8* to = <u8*> cnp.PyArray_DATA(states)
    cdef u32 i
    for i in range(column.n):
        to[i] = column.state[i].load(acquire)
    return states


cdef object column_latencies_us(const Column* column):
    cdef cnp.ndarray latencies = np.zeros(column.n, np.uint32)
    cdef u32* to = <u32*> cnp.PyArray_DATA(latencies)
    cdef u8 state
    cdef u32 i
    for i in range(column.n if column.latency_us != NULL else 0):
        state = column.state[i].load(acquire)
        # the loop may still write values, which are not read
        if state != PENDING and state != CANCELLED and state != UNNEEDED:
            to[i] = column.latency_us[i]
    return latencies


cdef u32 _first(const Seen* c) noexcept nogil:
    """The first slot with a prediction, or n."""
    cdef u32 i = 0
    while i < c.n and c.state[i] != OK:
        i += 1
    return i


cdef bint _alike(const Seen* c, u32 first, u32* absent) noexcept nogil:
    """Return whether all that arrived are of the first one's kind. absent: set to how many did not
    arrive."""
    cdef u32 i
    cdef u8 tag = c.of.tag[first]
    cdef Blob* like = blob_of(c.of.word[first])
    absent[0] = first
    for i in range(first, c.n):
        if c.state[i] != OK:
            absent[0] += 1
        elif not tag & TAG_BLOB:
            if c.of.tag[i] != tag:
                return False
        elif not c.of.tag[i] & TAG_BLOB:
            return False
        elif blob_of(c.of.word[i]) != like:
            if not _same_shape(blob_of(c.of.word[i]), like):
                return False
            like = blob_of(c.of.word[i])
    return True


cdef bint _same_shape(const Blob* a, const Blob* b) noexcept nogil:
    cdef u32 i
    if a.dtype != b.dtype or a.rank != b.rank or a.dtype == STR or a.dtype == BYTES:
        return False
    for i in range(a.rank):
        if a.dims[i] != b.dims[i]:
            return False
    return True


cdef void _copy_blobs(const Seen* c, u8* to, u64 nbytes) noexcept nogil:
    """Copy the outputs; rows that lie one after another in a blob, together."""
    cdef u32 i = 0, n
    while i < c.n:
        n = 1
        if c.state[i] == OK:
            while (i + n < c.n and c.state[i + n] == OK
                   and c.of.word[i + n] == c.of.word[i] + (<u64> n << ROW_SHIFT)):
                n += 1
            memcpy(to + i * nbytes, word_data(c.of.word[i]), n * nbytes)
        i += n


cdef object _widened(object array):
    if array.dtype.kind == "f":
        return array.astype(np.float64, copy=False)
    if array.dtype.kind == "b" or (array.dtype == np.uint64 and array.size and array.max() >> 63):
        return array
    return array.astype(np.int64, copy=False)


cdef object _scalars(const Seen* c, u8 dtype):
    cdef cnp.ndarray words = np.empty(c.n, np.uint64)
    cdef u64* to = <u64*> cnp.PyArray_DATA(words)
    cdef u32 i
    for i in range(c.n):
        to[i] = c.of.word[i] if c.state[i] == OK else 0
    name = np.dtype(_names[dtype])
    return _widened(words.view(name)[::8 // name.itemsize])


cdef object _arrays(const Seen* c, const Blob* like, bint is_complete):
    cdef u64 nbytes = like.nbytes
    cdef tuple dims = tuple([like.dims[i] for i in range(like.rank)])
    make = np.empty if is_complete else np.zeros
    cdef cnp.ndarray rows = make((c.n, *dims), np.dtype(_names[like.dtype]))
    _copy_blobs(c, <u8*> cnp.PyArray_DATA(rows), nbytes)
    return _widened(rows) if like.rank == 0 else rows


cdef object _one_by_one(const Seen* c, object missing):
    cdef u32 i
    cdef Value value
    cdef list found = []
    for i in range(c.n):
        value.word = c.of.word[i]
        value.tag = c.of.tag[i]
        found.append(value_object(&value) if c.state[i] == OK else missing)
    return found


cdef object _with_missing(object rows, object states, object missing):
    """Put `missing` into the rows that did not arrive. Return None when it does not fit among the
    others."""
    if missing is None and rows.dtype.kind == "f":
        missing = np.nan
    try:
        filler = np.asarray(missing)
    except ValueError:
        return None
    if filler.dtype.kind not in "biuf" or filler.shape not in ((),
                                                               rows.shape[1:]) or (filler.dtype.kind
                                                                       == "b") != (
            rows.dtype.kind == "b"):
        return None
    if filler.dtype.kind == "f" and rows.dtype.kind != "f":
        rows = rows.astype(np.float64)
    rows[states != <int> OK] = filler
    return rows


cdef object _columns(const Seen* c, const Blob* like, object states, u32 absent, object missing,
                     object name):
    """Return the columns of records of fixed sizes: a dict, or one of them."""
    cdef object rows = _arrays(c, like, absent == 0)
    columns = record_columns(record_type(like), rows, None)
    if not name:
        return columns
    rows = columns[name]
    return _with_missing(rows, states, missing) if absent else rows


cdef object _record_outputs(const Seen* c):
    """Return the columns by name of records that differ in length, if all arrived; else None."""
    cdef u32 i, number = 0
    cdef Blob* blob
    cdef cnp.ndarray offsets = np.zeros(c.n + 1, np.int64)
    cdef i64* at = <i64*> cnp.PyArray_DATA(offsets)
    for i in range(c.n):
        if c.state[i] != OK or c.of.tag[i] != TAG_BLOB:
            return None
        blob = <Blob*> c.of.word[i]
        if blob.dtype != BYTES or (i > 0 and record_type(blob) != number):
            return None
        number = record_type(blob)
        at[i + 1] = at[i] + <i64> blob.nbytes
    if number == 0:
        return None
    cdef cnp.ndarray rows = np.empty(at[c.n], np.uint8)
    cdef u8* to = <u8*> cnp.PyArray_DATA(rows)
    for i in range(c.n):
        blob = <Blob*> c.of.word[i]
        memcpy(to + at[i], blob_data(blob), blob.nbytes)
    return record_columns(number, rows, offsets)


cdef object column_outputs(const Column* column, object missing, object name):
    cdef cnp.ndarray states = column_states(column)
    cdef Seen seen
    cdef u32 first, absent = 0
    cdef object rows = None
    seen.of, seen.state, seen.n = column, <const u8*> cnp.PyArray_DATA(states), column.n
    first = _first(&seen)
    if first < seen.n and _alike(&seen, first, &absent):
        if not column.tag[first] & TAG_BLOB:
            rows = _scalars(&seen, column.tag[first])
        elif blob_of(column.word[first]).dtype not in (STR, BYTES):
            if record_type(blob_of(column.word[first])):
                return _columns(&seen, blob_of(column.word[first]), states, absent, missing, name)
            rows = _arrays(&seen, blob_of(column.word[first]), absent == 0)
        if rows is not None and absent:
            rows = _with_missing(rows, states, missing)
    if rows is None:
        columns = _record_outputs(&seen)
        if columns is not None:
            return columns[name] if name else columns
    if rows is not None:
        return rows
    rows = _one_by_one(&seen, missing)
    if name:
        rows = [row[name] if type(row) is dict and state == OK else row
                for row, state in zip(rows, states.tolist())]
    if first == 0 and absent == 0 and seen.n and isinstance(rows[0], (int, float, np.ndarray)):
        return _mixed(rows)
    return rows


cdef object _mixed(list rows):
    """Return numbers of several kinds as an array of the dtype that numpy chooses."""
    try:
        return np.array(rows)
    except ValueError:
        return rows


cdef object column_confidences(const Column* column):
    cdef cnp.ndarray confidences = np.full(column.n, np.nan)
    cdef double* to = <double*> cnp.PyArray_DATA(confidences)
    cdef u32 i
    for i in range(column.n):
        if (column.state[i].load(acquire) == OK and column.tag[i] & TAG_BLOB
            and blob_of(column.word[i]).has_confidence):
            to[i] = word_confidence(column.word[i])
            if to[i] != to[i]:
                to[i] = 0
    return confidences
