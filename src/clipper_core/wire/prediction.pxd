# One prediction as the core passes it: 16 bytes by value. A scalar without confidence is the word
# itself; anything else (vector, string, bytes, any output with a confidence or qualifiers, or the
# text of an error) is a blob that the word points to. Outputs of one shape for many rows of an
# array share one blob; the word has its address and, above ROW_SHIFT bits, the row.
from libc.stdlib cimport free, malloc
from clipper_core.runtime.machine cimport acq_rel, atomic, relaxed, u16, u32, u64, u8
from clipper_core.wire.record cimport RecordLayout

cdef enum:
    TAG_NONE = 0                # no value
    TAG_BLOB = 0x80             # word is a Blob*; any other tag is the DType of the scalar in word
                        # (little-endian, zero-extended)
    TAG_ROW = 0x81              # word is a row of a Blob*; see row_word
    RANK_MAX = 4
    ROW_SHIFT = 48              # bits of an address of a process
    BLOB_ROWS_MAX = 65535

cdef struct Value:
    u64 word
    u8 tag

cdef cppclass Blob:
    atomic[u32] refs
    u8 dtype
    u8 rank                     # dimensions of the output; 0 for a scalar with confidence
    u8 has_confidence
    u32 dims[4]                 # of a record (docs/wire.md), dims[3] is the number of its type,
                                # from 1
    float confidence
    u16 qualifier_bytes
    u16 rows                    # number of rows of an array; 0: it is one output
    u64 nbytes                  # of the output, or of each row
    # The data follows the header, then the qualifiers; for rows, their confidences.

# A blob is shared by the result slots and the cache; releasing the last reference frees it.
# Threads: any.
cdef Blob* blob_new(const void* data, u64 nbytes) noexcept nogil
# The same, whose data the caller fills in.
cdef Blob* blob_room(u64 nbytes) noexcept nogil
cdef Blob* blob_qualified(const void* data, u64 nbytes, const void* qualifiers,
                          u16 n) noexcept nogil
# n outputs of nbytes each, with as many references; confidences: f32 each, or NULL
cdef Blob* blob_of_rows(const void* data, u64 nbytes, u32 n,
                        const float* confidences) noexcept nogil
cdef inline u64 row_word(Blob* blob, u32 i) noexcept nogil:
    return <u64> blob | <u64> i << ROW_SHIFT
cdef inline Blob* blob_of(u64 word) noexcept nogil:       # word: with TAG_BLOB or TAG_ROW
    return <Blob*> (word & ((<u64> 1 << ROW_SHIFT) - 1))
cdef void* blob_data(Blob* blob) noexcept nogil
# Where the output of a word begins, with TAG_BLOB or TAG_ROW; its confidence, if the blob has one.
cdef const u8* word_data(u64 word) noexcept nogil
cdef float word_confidence(u64 word) noexcept nogil
cdef void blob_drop(Blob* blob, u32 refs=*) noexcept nogil
cdef void value_hold(Value* value) noexcept nogil     # one more reference, if it is a blob
cdef void value_drop(Value* value) noexcept nogil
# Return an int, float, bool, str, bytes or ndarray. Needs the GIL.
cdef object value_object(Value* value)
# Return a float or None.
cdef object value_confidence(Value* value)
# Return the number of the type of a record; 0 if the blob is no record.
cdef u32 record_type(const Blob* blob) noexcept nogil
# Return columns by name. rows: u8 (n, bytes); or u8 (bytes,) with offsets i64 (n + 1,), where each
# record begins.
cdef object record_columns(u32 number, object rows, object offsets)
cdef RecordLayout record_layout(u32 number)     # of a registered type; never freed
cdef Value record_value(u32 number, bytes record) except *
# Return (output, confidence), or (output, confidence, qualifiers as bytes).
cdef object value_prediction(Value* value)
cdef Value object_value(object output) except *       # a new reference; raises TypeError for an
                                                      # object that cannot be a prediction

# -- Many predictions as numpy arrays, without a Python object per row. Threads: any, with the GIL;
# slots may end meanwhile.
cdef struct Column:             # n consecutive slots of a block
    const u64* word
    const u8* tag
    atomic[u8]* state           # Status; the other fields of a slot are read after it
    const u32* latency_us       # NULL: all 0
    u32 n

cdef u32 column_first_failed(const Column* column) noexcept nogil   # the first that is not OK, or n
cdef object column_states(const Column* column)          # u8 (n,)
# Return u32 (n,); 0 for slots that are pending or were cancelled.
cdef object column_latencies_us(const Column* column)
# Return an ndarray of shape (n, ...) when all that arrived are numbers of one dtype and shape, and
# `missing` fits among them; else a list. name: of records only this tensor; "": all of them.
cdef object column_outputs(const Column* column, object missing, object name)
# Return f64 (n,): NaN where the model gave none, 0 where it gave NaN.
cdef object column_confidences(const Column* column)
