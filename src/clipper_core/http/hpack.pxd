# HPACK, the compression of header fields of HTTP/2 (RFC 7541): a decoder with its dynamic table,
# and an encoder that uses only static names.
#
# The encoder inserts nothing into the peer's table, so that an answer does not depend on those
# before it. The first block that it makes for a connection has to begin with HPACK_NO_TABLE, which
# sets the size of that table to 0.
#
# Threads: a HpackTable belongs to one thread; the functions any.
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u32, u64, u8

cdef enum:
    HPACK_TABLE_BYTES = 4096    # SETTINGS_HEADER_TABLE_SIZE, at its default
    HPACK_ENTRIES = 128         # an entry counts as 32 bytes more than its texts
    HPACK_OVERHEAD = 32
    HPACK_NO_TABLE = 0x20       # first byte of the first block

cdef enum HpackOutcome:
    HPACK_FIELD = 0             # a field was read
    HPACK_END = 1               # the block is at its end
    HPACK_WRONG = 2             # COMPRESSION_ERROR: the table cannot be used any more
    HPACK_NO_MEMORY = 3

cdef struct HpackField:         # its pointers are valid until the next call with the same table
    const u8* name
    const u8* value
    u32 name_bytes
    u32 value_bytes

cdef struct HpackEntry:
    u32 at                      # in `store`
    u32 name_bytes
    u32 value_bytes

cdef cppclass HpackTable:
    u32 bytes                   # of its entries, as RFC 7541, section 4.1, counts them
    u32 bytes_max               # as the peer has set it
    u32 count                   # entries
    u32 oldest                  # its place in `entries`
    u32 start                   # of the oldest text in `store`
    u32 end                     # of the newest text
    HpackEntry[128] entries     # a ring
    u8[8192] store              # texts in the order of their entries, without gaps
    Bytes name                  # of the field that is being read
    Bytes value

cdef struct HpackReader:        # of one block
    const u8* at
    const u8* end
    u32 updates                 # of the table's size
    bint begun                  # a field was read

# Make the table empty, with the size that both sides begin with.
cdef void hpack_table_clear(HpackTable* table) noexcept nogil
cdef int hpack_next(HpackTable* table, HpackReader* reader, HpackField* field) noexcept nogil
# Append a field to a block.
cdef void hpack_put(Bytes* out, const u8* name, u32 name_bytes, const u8* value,
                    u32 value_bytes) noexcept nogil
cdef void hpack_put_status(Bytes* out, u32 status) noexcept nogil
