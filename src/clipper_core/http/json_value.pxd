# Predictions as JSON, byte by byte as msgspec writes them; what is not plain is left to it. A large
# one is written in pieces, so that nobody waits for the whole of it.
#
# Threads: any (pure functions); a cursor is one thread's.
from libc.stdint cimport int64_t as i64
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.wire.prediction cimport Blob, Value

# -- Numbers in JSON, read straight into a row: no Python object for each, no list in between.
#
# Threads: any (pure functions). It reads what is exactly what it expects, and stops at everything
# else: JSON that is wrong is explained by a slower parser.
cdef enum:
    JSON_RANK_MAX = 4

cdef struct Text:                  # the part that is not yet read
    const u8* at
    const u8* end

cdef struct Wanted:                # what is read
    u8 dtype                    # of clipper_core.runtime.dtype: F64, F32, or an integer type
    u32 rank
    u64 dims[4]

# a number; False: not one that a double holds
cdef bint json_read_f64(Text* text, double* value) noexcept nogil
# a whole number of at most 18 digits
cdef bint json_read_i64(Text* text, i64* value) noexcept nogil
# arrays in arrays, of exactly that shape
cdef bint json_read_row(Text* text, const Wanted* wanted, u8* row) noexcept nogil
# elements of a flat array, if it is one
cdef u64 json_count(const Text* text) noexcept nogil

cdef class RowReader:
    cdef Wanted wanted
    cdef bint variable
    cdef object dtype
    cdef tuple shape

    cdef u64 _least(self, const Wanted* wanted)

# -- Values and large bodies.
cdef enum:
    JSON_DIMS_MAX = 8           # of an array
    LARGE_VALUE_BYTES = 16384   # of an output from which on it is written in pieces

cdef struct JsonCursor:         # in an output whose owner keeps it meanwhile
    const u8* data
    u64 count, done             # elements
    u8 dtype                    # BYTES: they are written as they are
    u32 item                    # bytes of an element
    u32 rank
    bint flat                   # the elements alone, without brackets
    bint ended
    u64[8] dims
    u64[8] index                # of the last element that was written

cdef cppclass LargeBody:        # the rest of a response's body: an output, and what follows it
    Value value                 # held
    JsonCursor cursor
    Bytes tail
    u64 bytes                   # of the output
    bint chunked                # its length is not known

cdef void json_f64(Bytes* out, double value) noexcept nogil               # finite
# False: it is not plain, and nothing was put. flat: without brackets
cdef bint json_value(Bytes* out, const Value* value, bint flat) noexcept nogil
# Whether JSON can hold an array or a text
cdef bint json_is_plain(Blob* blob) noexcept nogil
# False: it is not plain, or no array and no text
cdef bint json_begin(JsonCursor* c, const Value* value, bint flat) noexcept nogil
cdef void json_begin_bytes(JsonCursor* c, const void* data, u64 n) noexcept nogil
# Write on, an element more than `bytes_max` bytes at most; True: that was the end, or there is no
# memory, as `out` says
cdef bint json_go_on(JsonCursor* c, Bytes* out, u64 bytes_max) noexcept nogil
# False: it is not plain. large: takes the output, instead of `out`; may be NULL
cdef bint json_put(Bytes* out, const Value* value, bint flat, LargeBody* large) noexcept nogil
# NULL: the output is small, or there is no memory; dropped by large_body_drop
cdef LargeBody* large_body(const Value* value) noexcept nogil
cdef void large_body_drop(LargeBody* large) noexcept nogil
cdef void large_body_chunk(const Bytes* data, Bytes* out) noexcept nogil  # as HTTP frames it
# Write on; True: that was the end. room: to work in
cdef bint large_body_go_on(LargeBody* large, Bytes* out, u64 bytes_max,
                           Bytes* room) noexcept nogil
# its confidence, brought into 0 to 1; 1: it gives none
cdef double value_belief(const Value* value) noexcept nogil
