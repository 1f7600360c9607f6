# Writes predictions as JSON, with the same bytes as msgspec, which writes those that are not plain.
# A large one is written in pieces, so that other connections do not wait for the whole of it.
#
# Threads: any (pure functions); a cursor belongs to one thread.
from libc.stdint cimport int64_t as i64
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.wire.prediction cimport Blob, Value

# -- Reads numbers in JSON directly into a row, without Python objects.
#
# Threads: any (pure functions). It reads only what has exactly the expected form, and stops
# otherwise; a slower parser then reads it, or reports what is wrong.
cdef enum:
    JSON_RANK_MAX = 4

cdef struct Text:                  # the text that is not read yet
    const u8* at
    const u8* end

cdef struct Wanted:                # the expected type and shape
    u8 dtype                    # of clipper_core.runtime.dtype: F64, F32, or an integer type
    u32 rank
    u64 dims[4]

# Read a number. False: it is not a number that a double can hold.
cdef bint json_read_f64(Text* text, double* value) noexcept nogil
# Read a whole number of at most 18 digits.
cdef bint json_read_i64(Text* text, i64* value) noexcept nogil
# Read nested arrays of exactly the expected shape.
cdef bint json_read_row(Text* text, const Wanted* wanted, u8* row) noexcept nogil
# Return the number of elements of the text, if it is a flat array.
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
    LARGE_VALUE_BYTES = 16384   # an output of at least this size is written in pieces

cdef struct JsonCursor:         # position in an output, whose owner keeps it alive
    const u8* data
    u64 count, done             # elements
    u8 dtype                    # BYTES: the bytes are written unchanged
    u32 item                    # bytes of an element
    u32 rank
    bint flat                   # only the elements, without brackets
    bint ended
    u64[8] dims
    u64[8] index                # index of the last element that was written

cdef cppclass LargeBody:        # the rest of a response's body: an output, and the text after it
    Value value                 # holds a reference
    JsonCursor cursor
    Bytes tail
    u64 bytes                   # of the output
    bint chunked                # its length is unknown

cdef void json_f64(Bytes* out, double value) noexcept nogil               # finite
# Append a value. False: it is not plain, and nothing was written. flat: without brackets
cdef bint json_value(Bytes* out, const Value* value, bint flat) noexcept nogil
# Return whether an array or text can be written as JSON.
cdef bint json_is_plain(Blob* blob) noexcept nogil
# Start to write an array or text. False: it is not plain, or neither of these.
cdef bint json_begin(JsonCursor* c, const Value* value, bint flat) noexcept nogil
cdef void json_begin_bytes(JsonCursor* c, const void* data, u64 n) noexcept nogil
# Continue, with at most one element more than `bytes_max` bytes. Return True at the end, or if
# there is no memory (`out.lost`).
cdef bint json_go_on(JsonCursor* c, Bytes* out, u64 bytes_max) noexcept nogil
# Append a value. False: it is not plain. large: gets a large output, instead of `out`; may be NULL
cdef bint json_put(Bytes* out, const Value* value, bint flat, LargeBody* large) noexcept nogil
# Return the body of a large output; NULL if the output is small, or there is no memory. Free it by
# large_body_drop.
cdef LargeBody* large_body(const Value* value) noexcept nogil
cdef void large_body_drop(LargeBody* large) noexcept nogil
cdef void large_body_chunk(const Bytes* data, Bytes* out) noexcept nogil  # append a chunk of HTTP's
                                                                          # chunked encoding
# Continue. Return True at the end. room: scratch space
cdef bint large_body_go_on(LargeBody* large, Bytes* out, u64 bytes_max,
                           Bytes* room) noexcept nogil
# Return the confidence, limited to 0 to 1; 1 if there is none.
cdef double value_belief(const Value* value) noexcept nogil
