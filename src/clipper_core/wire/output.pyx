"""Rows of a REPLY -> values."""
from libc.string cimport memcpy

from clipper_core.runtime.dtype cimport BYTES, STR, itemsize
from clipper_core.runtime.machine cimport u16
from clipper_core.wire.codec cimport CONFIDENCE, QUALIFIERS, VARIABLE
from clipper_core.wire.prediction cimport (
    TAG_BLOB, TAG_NONE, Blob, blob_new, blob_qualified,
)


cdef bint output_value(const Header* header, const Rows* rows, u32 i, u64 at, u64 nbytes,
                       const u8* beside,
                       Value* value) noexcept nogil:
    cdef Blob* blob
    value.word = 0
    if header.rank == 0 and not header.flags & (VARIABLE | CONFIDENCE | QUALIFIERS):
        memcpy(&value.word, rows.data + at, nbytes)
        value.tag = header.dtype
        return True
    blob = blob_qualified(rows.data + at, nbytes, beside,
                          <u16> rows.qualifier_bytes[i] if rows.qualifier_bytes != NULL else 0)
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
