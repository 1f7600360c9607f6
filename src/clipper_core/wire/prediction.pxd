# One prediction as the core moves it: 16 bytes by value. A scalar without confidence is the word
# itself; anything else (vector, string, bytes, any output with a confidence or qualifiers, or the
# text of an error) is a blob that the word points to.
from libc.stdlib cimport malloc, free
from clipper_core.runtime.machine cimport acq_rel, atomic, relaxed, u16, u32, u64, u8

cdef enum:
    TAG_NONE = 0                # no value
    TAG_BLOB = 0x80             # word is a Blob*; any other tag is the DType of the scalar in word
                        # (little-endian, zero-extended)
    RANK_MAX = 4

cdef struct Value:
    u64 word
    u8 tag

cdef cppclass Blob:
    atomic[u32] refs
    u8 dtype
    u8 rank                     # dimensions of the output; 0 for a scalar with confidence
    u8 has_confidence
    u32 dims[4]                 # of a record (docs/wire.md) the last is its type, from 1
    float confidence
    u16 qualifier_bytes
    u64 nbytes
    # data follows the header, then what the model says beside it

# A blob is shared by the result slots and the cache; whoever drops the last reference frees it.
# Threads: any.
cdef Blob* blob_new(const void* data, u64 nbytes) noexcept nogil
cdef Blob* blob_qualified(const void* data, u64 nbytes, const void* qualifiers,
                          u16 n) noexcept nogil
cdef void* blob_data(Blob* blob) noexcept nogil
cdef void blob_drop(Blob* blob) noexcept nogil
cdef void value_hold(Value* value) noexcept nogil     # one more reference, if it is a blob
cdef void value_drop(Value* value) noexcept nogil
cdef object value_object(Value* value)                # -> int | float | bool | str | bytes |
                                                      # ndarray; needs the GIL
cdef object value_confidence(Value* value)            # -> float | None
# The type of the record that a blob is; 0 for one that is none
cdef u32 record_type(const Blob* blob) noexcept nogil
# u8 (n, bytes), or u8 (bytes,) and i64 (n + 1,) where each record begins -> columns by name
cdef object record_columns(u32 number, object rows, object offsets)
cdef Value record_value(u32 number, bytes record) except *
cdef object value_heard(Value* value)                 # -> (output, confidence) or (output,
                                                      # confidence, qualifiers as bytes)
cdef Value object_value(object output) except *       # a new reference; TypeError for what no
                                                      # prediction can be
