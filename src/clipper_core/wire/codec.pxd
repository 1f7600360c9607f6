# Conversion between wire frames and structs (docs/wire.md). No sockets, no Python objects, no
# allocation.
#
# Threads: any (pure functions). Every length is compared with the remaining bytes (by subtraction),
# and with a named limit, before anything is read or allocated.
from clipper_core.runtime.machine cimport atomic, u16, u32, u64, u8
from clipper_core.runtime.status cimport Status

# -- Version 1 batches, the design document's seven types byte for byte (docs/wire.md).
#
# Threads: any (pure functions). No Python object, no allocation.
cpdef enum:
    V1_HEAD_BYTES = 9

cpdef enum V1:
    V1_I32 = 1
    V1_F64 = 2
    V1_U8 = 3
    V1_VAR_I32 = 4
    V1_VAR_F64 = 5
    V1_VAR_U8 = 6
    V1_STR = 7

# Return how many bytes v1_encode needs at most.
cdef u64 v1_bound(int format, u32 n, u64 data_bytes) noexcept nogil
# Return the number of bytes written; 0 if it does not fit or the rows are not of the format.
# Strings are an LZ4 block of literals only.
cdef u64 v1_encode(int format, u32 n, const void** rows, const u32* row_bytes, u8* out,
                   u64 out_bytes) noexcept nogil
# Compress the strings of a message that v1_encode has written (lz4.pxd). Return the number of
# bytes, at most v1_bound.
cdef u64 v1_compress(const u8* message, u64 nbytes, u32 search, u8* out) noexcept nogil
# Return the format of a type; 0 when v1 has no such type.
cdef int v1_format(int dtype, bint variable) noexcept nogil

# -- CRC-32 of bytes, zlib's polynomial.
#
# Threads: any (a pure function).
# crc: 0, or the CRC of the preceding bytes.
cdef u32 crc32(u32 crc, const u8* bytes, u64 n) noexcept nogil

# -- Frames of version 2, described above.
cpdef enum:
    HEADER_BYTES = 64
    WIRE_VERSION = 2
    DIMS_MAX = 4
    REGION_BYTES = 24           # payload of REGION
    RUN_BYTES = 16              # of each run in the payload of a SHARED batch
    ACCURACY_BYTES = 24         # payload of ACCURACY; 8 less if the model reports no accuracy
    QUALIFIERS_MAX = 1024       # bytes beside one row
    EMPTY_LISTS_MAX = 4096      # of a row of a REPLY: product of the dimensions before the first 0
    ALLOWANCE_BYTES = 8         # payload of a PART of the server

cpdef enum Kind:
    HELLO = 1                   # container -> server: its model and abilities (msgpack map)
    WELCOME = 2                 # server -> container: accepted (msgpack map)
    REFUSE = 3         # server -> container: refused, with the reason (UTF-8 text); then closed
    PREDICT = 4                 # server -> container: a batch of rows
    REPLY = 5                   # container -> server: the batch's predictions
    FAILURE = 6        # container -> server: the whole batch failed (UTF-8 text: the user's
                       # traceback)
    HEARTBEAT = 7               # both ways, empty
    GOODBYE = 8                 # both ways, empty: no more batches; then closed
    REGION = 9         # server -> container, with a descriptor: memory whose rows SHARED batches
                       # will name
    FEEDBACK = 10      # server -> container: inputs and their right outputs
    ACCURACY = 11      # container -> server: rows that it has learned from, and the accuracy that
                       # it reports
    PART = 14          # container -> server: the next part of an answer, or, without rows, its end;
                       # server -> container, without rows: how many further parts may come
    CANCEL = 15        # server -> container, empty: an answer in parts or a batch is not wanted any
                       # more; container -> server: a call is not
    CALL = 16                   # container -> server: its model calls another one, or an
                                # application (msgpack map)
    ANSWER = 17                 # server -> container: the answer to a CALL (msgpack map)

cpdef enum Flag:
    VARIABLE = 1                # rows differ in length: u32 lengths (in elements) precede the data
    CONFIDENCE = 2              # f32 per row follows the data
    ROW_STATUS = 4     # u8 per row follows: 0 ok, 1 failed; then error text as UTF-8 to the end
    COMPRESSED = 8     # PREDICT of STR only: the data is one LZ4 block, preceded by its length as
                       # u64
    CHECKED = 16                # payload_crc holds the CRC-32 of the payload
    SHARED = 32        # PREDICT only: the payload is runs of rows in regions, 16 bytes each
    SESSIONS = 64               # PREDICT only: u64 per row follows the data: the session of its
                                # query
    QUALIFIERS = 128   # REPLY only: u32 lengths, then the qualifiers of each row (msgpack,
                       # opaque here)
    PARTIAL = 256      # REPLY only: it answers the first rows of its batch that are not answered
                       # yet; further replies to the batch follow
    PARTS = 512        # PREDICT of one row only: it is answered by PART frames

cdef struct Header:
    u8 kind
    u8 dtype                    # of the rows; see dtype.pxd
    u8 rank                     # dimensions of one row; 0 for a scalar
    u16 flags
    u64 id                      # batch id; the reply repeats it
    u32 rows
    u32 dims[4]                 # shape of one row; unused ones are 0
    u64 payload_bytes
    u64 time_us                 # PREDICT: budget left for the batch; REPLY: time the model took
    u32 payload_crc

cdef struct Limits:
    u64 payload_bytes_max       # also of COMPRESSED data once opened
    u32 rows_max
    u64 output_bytes_max        # of one row of a REPLY or PART

cdef struct Rows:             # an opened payload: pointers into it, which were checked to be inside
    u32 n
    u64 row_bytes               # fixed rows: bytes of one; variable rows: 0
    const u8* data              # of all rows; COMPRESSED: the LZ4 block of them
    u64 data_bytes
    const u32* lengths          # variable rows: elements of each, 4-byte aligned; else NULL
    u64 output_bytes_max        # of a REPLY with variable rows beyond this limit; else 0
    const u64* sessions         # or NULL
    const float* confidence     # or NULL
    const u32* qualifier_bytes  # of each row, at most QUALIFIERS_MAX; or NULL
    const u8* qualifiers        # of all rows, one after another
    const u8* status            # or NULL
    const u8* text              # or NULL
    u64 text_bytes

# -- frames (v2)
# Write a header of 64 bytes, header CRC included.
cdef void header_encode(const Header* header, u8* out) noexcept nogil
# Return OK; PENDING when n < 64; BAD_FRAME; or TOO_LARGE. `out` is written only when OK.
cdef Status header_decode(const u8* bytes, u64 n, const Limits* limits, Header* out) noexcept nogil
# Open the payload of a PREDICT, REPLY or PART, which has header.payload_bytes bytes, 8-byte
# aligned.
# Return OK, BAD_FRAME or TOO_LARGE; after TOO_LARGE `out` is complete if its output_bytes_max is
# set. The header is checked again, because it may come from another
# source; payload_crc is not, because the receiver of the bytes has checked it.
cdef Status rows_open(const Header* header, const u8* payload, const Limits* limits,
                      Rows* out) noexcept nogil
# Return the number of bytes of all rows; for COMPRESSED rows, after decompression.
cdef u64 rows_data_bytes(const Header* header, const Rows* rows) noexcept nogil

# -- variable rows: u32 lengths, then the data, each padded with zeros to 8
cdef u64 lengths_bytes(u32 n) noexcept nogil                    # u32 each, padded to 8
cdef u64 variable_payload_bytes(u32 n, u64 data_bytes) noexcept nogil
# Write variable_payload_bytes(n, sum of row_bytes) bytes. A row has fewer than 2**32 elements.
cdef void variable_encode(u32 n, const void** rows, const u64* row_bytes, u32 item_bytes,
                          u8* out) noexcept nogil
cdef u64 compressed_bound(u32 n, u64 data_bytes) noexcept nogil
# Write a payload of variable_encode with its data as an LZ4 block (lz4.pxd). Return the number of
# bytes written, at most compressed_bound.
cdef u64 compressed_encode(u32 n, const u8* payload, u64 data_bytes, u32 search,
                           u8* out) noexcept nogil

# -- FEEDBACK to a model that learns online, and its ACCURACY (docs/wire.md).
#
# Threads: any (pure functions); accuracy_read: loop only.
#
# The payload of a FEEDBACK is two complete frames: a PREDICT of the inputs, with SESSIONS, and a
# REPLY of as many labels. So feedback supports all types of inputs and outputs without a codec of
# its own.
cdef cppclass Progress:         # progress of a model that learns, as its container last reported
                                # it; any thread may read it
    atomic[u64] learned         # rows that correct() took
    atomic[u64] failed          # rows on which it raised, or that were dropped
    atomic[u64] accuracy        # 1 + billionths; 0: the model reports none

# Read an ACCURACY payload. Return BAD_FRAME if the accuracy is no number from 0 to 1.
cdef Status accuracy_read(const u8* payload, u64 n, Progress* progress) noexcept nogil
