"""HPACK: header fields of HTTP/2 from bytes and to bytes. Source: RFC 7541.

A block is read field by field (`hpack_next`), so that the caller counts what a peer sends before
anything of it is stored. Integers have at most four further bytes, which is enough for 2**28, and a
length is compared with the rest of the block before a byte of its text is read. After HPACK_WRONG
the tables of both sides may differ, and the connection has to end.

The texts of the dynamic table are in one buffer of twice the size of the table, in the order of
their entries. New ones are appended; when the end of the buffer is reached, those that live move to
its beginning, after at least as many bytes as they have.
"""
from libc.string cimport memcmp, memcpy, memmove

from clipper_core.runtime.allocation cimport make
from clipper_core.runtime.status cimport NO_MEMORY, raise_for

cdef extern from "http/hpack_tables.hpp" namespace "clipper" nogil:
    ctypedef struct StaticField:
        u8 name_bytes
        u8 value_bytes
        const char* name
        const char* value
    ctypedef struct HuffmanStep:
        u8 next
        u8 symbol
        u8 flags
    const StaticField[1] static_fields
    HuffmanStep[1][16] huffman_steps
    bint[1] huffman_ends
    u8 HUFFMAN_EMITS
    u8 HUFFMAN_FAILS
    void huffman_fill() noexcept

huffman_fill()

cdef enum:
    STATIC_COUNT = 61
    STORE_BYTES = 2 * HPACK_TABLE_BYTES
    INTEGER_BYTES_MAX = 4       # after the first
    UPDATES_MAX = 2             # of the table's size, at the start of a block
    STATUS_INDEX = 8            # `:status 200`; six more follow


# -- the dynamic table
# --------------------------------------------------------------------------------------------------

cdef void hpack_table_clear(HpackTable* table) noexcept nogil:
    table.bytes_max = HPACK_TABLE_BYTES
    _shrink(table, 0)


cdef void _shrink(HpackTable* table, u32 bytes_max) noexcept nogil:
    """Remove the oldest entries until at most `bytes_max` bytes are left."""
    cdef HpackEntry* entry
    while table.bytes > bytes_max:
        entry = &table.entries[table.oldest]
        table.bytes -= entry.name_bytes + entry.value_bytes + HPACK_OVERHEAD
        table.start += entry.name_bytes + entry.value_bytes
        table.oldest = (table.oldest + 1) % HPACK_ENTRIES
        table.count -= 1
    if table.count == 0:
        table.start = 0
        table.end = 0


cdef void _insert(HpackTable* table, const HpackField* field) noexcept nogil:
    """Insert a field whose texts are not in the table. One that is larger than the table empties
    it."""
    cdef u32 texts = field.name_bytes + field.value_bytes
    cdef u32 moved
    cdef u32 i
    cdef HpackEntry* entry
    if texts + HPACK_OVERHEAD > table.bytes_max:
        _shrink(table, 0)
        return
    _shrink(table, table.bytes_max - texts - HPACK_OVERHEAD)
    if table.end + texts > STORE_BYTES:
        moved = table.start
        memmove(table.store, table.store + moved, table.end - moved)
        for i in range(table.count):
            table.entries[(table.oldest + i) % HPACK_ENTRIES].at -= moved
        table.end -= moved
        table.start = 0
    entry = &table.entries[(table.oldest + table.count) % HPACK_ENTRIES]
    entry.at = table.end
    entry.name_bytes = field.name_bytes
    entry.value_bytes = field.value_bytes
    if field.name_bytes:
        memcpy(table.store + table.end, field.name, field.name_bytes)
    if field.value_bytes:
        memcpy(table.store + table.end + field.name_bytes, field.value, field.value_bytes)
    table.end += texts
    table.bytes += texts + HPACK_OVERHEAD
    table.count += 1


cdef bint _field_at(HpackTable* table, u32 index, HpackField* field) noexcept nogil:
    """Return the field of an index: the static ones come first, then the newest one."""
    cdef const HpackEntry* entry
    cdef const StaticField* known
    if index == 0 or index > STATIC_COUNT + table.count:
        return False
    if index <= STATIC_COUNT:
        known = &static_fields[index - 1]
        field.name = <const u8*> known.name
        field.value = <const u8*> known.value
        field.name_bytes = known.name_bytes
        field.value_bytes = known.value_bytes
        return True
    entry = &table.entries[(table.oldest + table.count - (index - STATIC_COUNT)) % HPACK_ENTRIES]
    field.name = table.store + entry.at
    field.value = table.store + entry.at + entry.name_bytes
    field.name_bytes = entry.name_bytes
    field.value_bytes = entry.value_bytes
    return True


# -- reading
# --------------------------------------------------------------------------------------------------

cdef bint _integer(HpackReader* reader, u32 prefix_bits, u32* value) noexcept nogil:
    """Read an integer that begins in the lowest bits of the next byte, which is there."""
    cdef u32 mask = (<u32> 1 << prefix_bits) - 1
    cdef u32 n = reader.at[0] & mask
    cdef u32 i
    cdef u8 byte
    reader.at += 1
    value[0] = n
    if n < mask:
        return True
    for i in range(INTEGER_BYTES_MAX):
        if reader.at == reader.end:
            return False
        byte = reader.at[0]
        reader.at += 1
        n += <u32> (byte & 127) << (7 * i)
        if byte < 128:
            value[0] = n
            return True
    return False


cdef int _huffman(const u8* at, const u8* end, Bytes* out) noexcept nogil:
    cdef u8* to = out.reserve(2 * <u64> (end - at) + 1)
    cdef u8* first = to
    cdef const HuffmanStep* step
    cdef u8 node = 0
    cdef u8 flags = 0
    if to == NULL:
        return HPACK_NO_MEMORY
    while at < end:
        step = &huffman_steps[node][at[0] >> 4]
        to[0] = step.symbol
        to += step.flags & HUFFMAN_EMITS
        flags |= step.flags
        step = &huffman_steps[step.next][at[0] & 15]
        to[0] = step.symbol
        to += step.flags & HUFFMAN_EMITS
        flags |= step.flags
        node = step.next
        at += 1
    if flags & HUFFMAN_FAILS or not huffman_ends[node]:
        return HPACK_WRONG
    out.end += <u64> (to - first)
    return HPACK_FIELD


cdef int _text(HpackReader* reader, Bytes* out) noexcept nogil:
    """Read a text into `out`."""
    cdef u32 n
    cdef bint is_huffman
    cdef const u8* first
    out.clear()
    if reader.at == reader.end:
        return HPACK_WRONG
    is_huffman = reader.at[0] >= 128
    if not _integer(reader, 7, &n) or n > <u64> (reader.end - reader.at):
        return HPACK_WRONG
    first = reader.at
    reader.at += n
    if is_huffman:
        return _huffman(first, reader.at, out)
    out.put(first, n)
    return HPACK_NO_MEMORY if out.lost else HPACK_FIELD


cdef int _literal(HpackTable* table, HpackReader* reader, u32 prefix_bits,
                  HpackField* field) noexcept nogil:
    """Read a field with a value of its own."""
    cdef u32 index
    cdef int came
    if not _integer(reader, prefix_bits, &index):
        return HPACK_WRONG
    if index == 0:
        came = _text(reader, &table.name)
        if came != HPACK_FIELD:
            return came
    else:
        if not _field_at(table, index, field):
            return HPACK_WRONG
        table.name.clear()          # an insertion may move the entry that has the name
        table.name.put(field.name, field.name_bytes)
        if table.name.lost:
            return HPACK_NO_MEMORY
    came = _text(reader, &table.value)
    field.name = table.name.at()
    field.name_bytes = <u32> table.name.size()
    field.value = table.value.at()
    field.value_bytes = <u32> table.value.size()
    return came


cdef bint _resize(HpackTable* table, HpackReader* reader) noexcept nogil:
    cdef u32 bytes_max
    reader.updates += 1
    if (reader.begun or reader.updates > UPDATES_MAX or not _integer(reader, 5, &bytes_max)
            or bytes_max > HPACK_TABLE_BYTES):
        return False
    table.bytes_max = bytes_max
    _shrink(table, bytes_max)
    return True


cdef int hpack_next(HpackTable* table, HpackReader* reader, HpackField* field) noexcept nogil:
    cdef u8 byte
    cdef u32 index
    cdef int came
    while reader.at < reader.end and reader.at[0] & 0xe0 == 0x20:
        if not _resize(table, reader):
            return HPACK_WRONG
    if reader.at == reader.end:
        return HPACK_END
    reader.begun = True
    byte = reader.at[0]
    if byte & 0x80:
        if not _integer(reader, 7, &index) or not _field_at(table, index, field):
            return HPACK_WRONG
        return HPACK_FIELD
    if not byte & 0x40:
        return _literal(table, reader, 4, field)
    came = _literal(table, reader, 6, field)
    if came == HPACK_FIELD:
        _insert(table, field)
    return came


# -- writing
# --------------------------------------------------------------------------------------------------

cdef void _put_integer(Bytes* out, u8 first, u32 prefix_bits, u32 n) noexcept nogil:
    """Append an integer whose first byte has the bits `first` before it."""
    cdef u32 mask = (<u32> 1 << prefix_bits) - 1
    if n < mask:
        out.put_byte(<u8> (first | n))
        return
    out.put_byte(<u8> (first | mask))
    n -= mask
    while n >= 128:
        out.put_byte(<u8> (n & 127 | 128))
        n >>= 7
    out.put_byte(<u8> n)


cdef u32 _static_name(const u8* name, u32 n) noexcept nogil:
    """Return the index of the first static field with this name; 0: there is none."""
    cdef u32 i
    for i in range(STATIC_COUNT):
        if static_fields[i].name_bytes == n and memcmp(static_fields[i].name, name, n) == 0:
            return i + 1
    return 0


cdef void hpack_put(Bytes* out, const u8* name, u32 name_bytes, const u8* value,
                    u32 value_bytes) noexcept nogil:
    cdef u32 index = _static_name(name, name_bytes)
    _put_integer(out, 0, 4, index)
    if index == 0:
        _put_integer(out, 0, 7, name_bytes)
        out.put(name, name_bytes)
    _put_integer(out, 0, 7, value_bytes)
    out.put(value, value_bytes)


cdef void hpack_put_status(Bytes* out, u32 status) noexcept nogil:
    cdef u8[3] digits
    cdef u32 i
    digits[0] = <u8> (48 + status // 100 % 10)
    digits[1] = <u8> (48 + status // 10 % 10)
    digits[2] = <u8> (48 + status % 10)
    for i in range(STATUS_INDEX, STATUS_INDEX + 7):
        if memcmp(static_fields[i - 1].value, digits, 3) == 0:
            out.put_byte(<u8> (0x80 | i))
            return
    _put_integer(out, 0, 4, STATUS_INDEX)
    out.put_byte(3)
    out.put(digits, 3)


# -- for Python
# --------------------------------------------------------------------------------------------------

class HpackError(ValueError):
    """A block of fields breaks the rules of RFC 7541."""


cdef class HpackDecoder:
    """Decodes the blocks of one connection, in their order. Threads: one."""
    cdef HpackTable* table

    def __cinit__(self):
        self.table = make[HpackTable]()
        if self.table == NULL:
            raise_for(NO_MEMORY, "no memory for a table of HPACK")
        hpack_table_clear(self.table)

    def __dealloc__(self):
        del self.table

    @property
    def table_bytes(self):
        """Size of the dynamic table, as RFC 7541, section 4.1, counts it."""
        return self.table.bytes

    def decode(self, bytes block):
        """Return the fields of a block as pairs (name, value). Raises HpackError; after that the
        decoder cannot be used."""
        cdef HpackReader reader
        cdef HpackField field
        cdef list fields = []
        cdef int came
        reader.at = <const u8*> (<const char*> block)
        reader.end = reader.at + len(block)
        reader.updates = 0
        reader.begun = False
        while True:
            came = hpack_next(self.table, &reader, &field)
            if came == HPACK_END:
                return fields
            if came == HPACK_NO_MEMORY:
                raise_for(NO_MEMORY, "no memory for a header field")
            if came != HPACK_FIELD:
                raise HpackError("a block of header fields is malformed")
            fields.append(((<const char*> field.name)[:field.name_bytes],
                           (<const char*> field.value)[:field.value_bytes]))


def hpack_encode(fields):
    """Return a block of these pairs (name, value), without HPACK_NO_TABLE. Threads: any."""
    cdef Bytes out
    cdef bytes name, value
    for name, value in fields:
        if name == b":status":
            hpack_put_status(&out, int(value))
        else:
            hpack_put(&out, <const u8*> (<const char*> name), <u32> len(name),
                      <const u8*> (<const char*> value), <u32> len(value))
    if out.lost:
        raise_for(NO_MEMORY, "no memory for header fields")
    return (<const char*> out.at())[:out.size()]
