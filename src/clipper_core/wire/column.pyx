"""Slots to numpy: scalars by a copy of their words, arrays by a copy of their bytes, the rest one
by one.

Scalars widen as numpy would make an array of Python's numbers: whole numbers to i64 (u64 where they
need it), floats to f64.
"""
cimport numpy as cnp
from libc.string cimport memcpy

import numpy as np

from clipper_core.runtime.dtype cimport BYTES, STR
from clipper_core.runtime.machine cimport acquire, i64
from clipper_core.runtime.status cimport CANCELLED, OK, PENDING, UNNEEDED
from clipper_core.wire.prediction cimport (
    TAG_BLOB, Blob, Value, blob_data, record_columns, record_type, value_object,
)

cnp.import_array()

cdef dict _names = {1: "?", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<u4", 7: "<i4", 8: "<u8",
                    9: "<i8", 10: "<f2", 11: "<f4",
                    12: "<f8"}


cdef struct Seen:               # the column, and what its states were when it was looked at
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
        # the loop may still write what nobody will read
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
    """Are all that arrived of the first one's kind? And how many did not arrive."""
    cdef u32 i
    cdef u8 tag = c.of.tag[first]
    absent[0] = first
    for i in range(first, c.n):
        if c.state[i] != OK:
            absent[0] += 1
        elif c.of.tag[i] != tag or (tag == TAG_BLOB
                                    and not _same_shape(<Blob*> c.of.word[i],
                                                        <Blob*> c.of.word[first])):
            return False
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
    cdef u32 i
    for i in range(c.n):
        if c.state[i] == OK:
            memcpy(to + i * nbytes, blob_data(<Blob*> c.of.word[i]), nbytes)


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


cdef object _arrays(const Seen* c, const Blob* like):
    cdef u64 nbytes = like.nbytes
    cdef tuple dims = tuple([like.dims[i] for i in range(like.rank)])
    cdef cnp.ndarray rows = np.empty((c.n, *dims), np.dtype(_names[like.dtype]))
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
    """`missing` in the rows that did not arrive; None when it does not fit among the others."""
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
    """Of records of fixed sizes: a dict of columns, or one of them."""
    cdef object rows = _arrays(c, like)
    if absent:
        rows[states != <int> OK] = 0
    columns = record_columns(record_type(like), rows, None)
    if not name:
        return columns
    rows = columns[name]
    return _with_missing(rows, states, missing) if absent else rows


cdef object _records(const Seen* c):
    """Of records that differ in length, if all arrived: columns by name; else None."""
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
        if column.tag[first] != TAG_BLOB:
            rows = _scalars(&seen, column.tag[first])
        elif (<Blob*> column.word[first]).dtype not in (STR, BYTES):
            if record_type(<Blob*> column.word[first]):
                return _columns(&seen, <Blob*> column.word[first], states, absent, missing, name)
            rows = _arrays(&seen, <Blob*> column.word[first])
        if rows is not None and absent:
            rows = _with_missing(rows, states, missing)
    if rows is None:
        columns = _records(&seen)
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
    """Numbers of several kinds: as numpy would have them."""
    try:
        return np.array(rows)
    except ValueError:
        return rows


cdef object column_confidences(const Column* column):
    cdef cnp.ndarray confidences = np.full(column.n, np.nan)
    cdef double* to = <double*> cnp.PyArray_DATA(confidences)
    cdef u32 i
    for i in range(column.n):
        if (column.state[i].load(acquire) == OK and column.tag[i] == TAG_BLOB
            and (<Blob*> column.word[i]).has_confidence):
            to[i] = (<Blob*> column.word[i]).confidence
            if to[i] != to[i]:
                to[i] = 0
    return confidences
