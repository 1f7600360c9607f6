"""Rows of a REPLY -> values."""
from libc.string cimport memcpy

from clipper_core.codec cimport VARIABLE
from clipper_core.dtype cimport BYTES, STR, itemsize
from clipper_core.prediction cimport TAG_BLOB, TAG_NONE, Blob, blob_new, value_drop, value_object


cdef bint output_value(const Header* header, const Rows* rows, u32 i, u64 at, u64 nbytes, Value* value) noexcept nogil:
    cdef Blob* blob
    value.word = 0
    if header.rank == 0 and not header.flags & VARIABLE and rows.confidence == NULL:
        memcpy(&value.word, rows.data + at, nbytes)
        value.tag = header.dtype
        return True
    blob = blob_new(rows.data + at, nbytes)
    if blob == NULL:
        return False
    blob.dtype = header.dtype
    blob.rank = header.rank
    memcpy(blob.dims, header.dims, sizeof(header.dims))
    if header.flags & VARIABLE:
        blob.rank = 0 if header.dtype == STR or header.dtype == BYTES else 1
        blob.dims[0] = <u32> (nbytes / itemsize(header.dtype))
    if rows.confidence != NULL:
        blob.has_confidence = 1
        blob.confidence = rows.confidence[i]
    value.word = <u64> blob
    value.tag = TAG_BLOB
    return True


cdef void output_text(const char* text, u64 n, Value* value) noexcept nogil:
    cdef Blob* blob = blob_new(text, n)
    value.word = 0
    value.tag = TAG_NONE
    if blob != NULL:
        blob.dtype = STR
        value.word = <u64> blob
        value.tag = TAG_BLOB


def output_text_object(bytes text):
    """The text as whoever asks for a task's detail gets it. Threads: any."""
    cdef Value value
    output_text(text, len(text), &value)
    found = value_object(&value)
    value_drop(&value)
    return found
