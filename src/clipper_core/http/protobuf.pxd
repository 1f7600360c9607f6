# Protobuf's wire format: the fields of a message one by one, and their writing. `infer_message` has
# the messages.
#
# Threads: any (pure functions); a reader belongs to one thread.
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u32, u64, u8

cdef enum:
    PROTO_DEPTH_MAX = 100       # groups in groups, which are skipped
    PROTO_BYTES_MAX = 2147483647        # of one field

cdef enum ProtoOutcome:
    PROTO_FIELD = 0             # a field was read
    PROTO_END = 1               # the message is at its end
    PROTO_WRONG = 2             # these bytes are no message

cdef enum ProtoKind:            # how a field is written
    PROTO_VARINT = 0
    PROTO_FIXED64 = 1
    PROTO_TEXT = 2              # a length and so many bytes: text, a message, packed numbers
    PROTO_GROUP = 3
    PROTO_GROUP_END = 4
    PROTO_FIXED32 = 5

cdef struct ProtoReader:        # what is not read yet
    const u8* at
    const u8* end

cdef struct ProtoField:
    u32 number
    u8 kind
    u64 value                   # of VARINT, FIXED64 and FIXED32
    const u8* at                # of TEXT
    u64 bytes

# Read the next field. Of a group, which no message of ours has, the content is skipped.
cdef int proto_next(ProtoReader* reader, ProtoField* field) noexcept nogil
# Read a number of 1 to 10 bytes, of which 64 bits count. Return False: it is cut off or longer.
cdef bint proto_varint(ProtoReader* reader, u64* value) noexcept nogil

cdef void proto_put_varint(Bytes* out, u64 value) noexcept nogil
cdef void proto_put_number(Bytes* out, u32 number, u64 value) noexcept nogil
cdef void proto_put_fixed64(Bytes* out, u32 number, u64 value) noexcept nogil
cdef void proto_put_text(Bytes* out, u32 number, const void* data, u64 n) noexcept nogil
# Write what precedes the `n` bytes of a text.
cdef void proto_put_head(Bytes* out, u32 number, u64 n) noexcept nogil
