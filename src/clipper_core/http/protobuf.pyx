"""The wire format of protobuf. Source: protobuf.dev, "Encoding".

What is malformed here is so for the package protobuf: numbers of more than ten bytes, tags and
lengths of more than five, field number 0, groups that do not end or nest too deeply, kinds 6 and 7,
and whatever is cut off.
"""
from libc.string cimport memcpy

cdef enum:
    SHORT_BYTES = 5             # of a tag or a length


cdef bint _number(ProtoReader* reader, u64* value, u32 bytes_max) noexcept nogil:
    cdef u64 n = 0
    cdef u32 i = 0
    cdef u8 byte
    while i < bytes_max and reader.at < reader.end:
        byte = reader.at[0]
        reader.at += 1
        n |= <u64> (byte & 127) << 7 * i
        i += 1
        if byte < 128:
            value[0] = n
            return True
    return False


cdef bint proto_varint(ProtoReader* reader, u64* value) noexcept nogil:
    return _number(reader, value, 10)


cdef bint _tag(ProtoReader* reader, ProtoField* field) noexcept nogil:
    cdef u64 tag = 0
    if not _number(reader, &tag, SHORT_BYTES) or tag >> 32:
        return False
    field.number = <u32> (tag >> 3)
    field.kind = tag & 7
    return field.number != 0


cdef bint _content(ProtoReader* reader, ProtoField* field) noexcept nogil:
    """Read the content of a field that is no group."""
    cdef u64 left, size
    cdef u32 half
    if field.kind == PROTO_VARINT:
        return proto_varint(reader, &field.value)
    if field.kind == PROTO_TEXT:
        if not _number(reader, &field.bytes, SHORT_BYTES) or field.bytes > PROTO_BYTES_MAX:
            return False
        size = field.bytes
        field.at = reader.at
    elif field.kind == PROTO_FIXED64:
        size = 8
    elif field.kind == PROTO_FIXED32:
        size = 4
    else:
        return False
    left = <u64> (reader.end - reader.at)
    if size > left:
        return False
    if field.kind == PROTO_FIXED64:
        memcpy(&field.value, reader.at, 8)
    elif field.kind == PROTO_FIXED32:
        memcpy(&half, reader.at, 4)
        field.value = half
    reader.at += size
    return True


cdef bint _skip_group(ProtoReader* reader, u32 number) noexcept nogil:
    """Read to the end of the group that has begun."""
    cdef u32[PROTO_DEPTH_MAX] open
    cdef u32 depth = 1
    cdef ProtoField field
    open[0] = number
    while depth:
        if not _tag(reader, &field):
            return False
        if field.kind == PROTO_GROUP:
            if depth == PROTO_DEPTH_MAX:
                return False
            open[depth] = field.number
            depth += 1
        elif field.kind == PROTO_GROUP_END:
            depth -= 1
            if open[depth] != field.number:
                return False
        elif not _content(reader, &field):
            return False
    return True


cdef int proto_next(ProtoReader* reader, ProtoField* field) noexcept nogil:
    if reader.at >= reader.end:
        return PROTO_END
    if not _tag(reader, field):
        return PROTO_WRONG
    if field.kind != PROTO_GROUP:
        return PROTO_FIELD if _content(reader, field) else PROTO_WRONG
    field.at = reader.at
    field.bytes = 0
    return PROTO_FIELD if _skip_group(reader, field.number) else PROTO_WRONG


# -- writing

cdef void proto_put_varint(Bytes* out, u64 value) noexcept nogil:
    while value > 127:
        out.put_byte(<u8> (value & 127) | 128)
        value >>= 7
    out.put_byte(<u8> value)


cdef void proto_put_number(Bytes* out, u32 number, u64 value) noexcept nogil:
    proto_put_varint(out, number << 3 | PROTO_VARINT)
    proto_put_varint(out, value)


cdef void proto_put_fixed64(Bytes* out, u32 number, u64 value) noexcept nogil:
    proto_put_varint(out, number << 3 | PROTO_FIXED64)
    out.put(&value, 8)


cdef void proto_put_head(Bytes* out, u32 number, u64 n) noexcept nogil:
    proto_put_varint(out, number << 3 | PROTO_TEXT)
    proto_put_varint(out, n)


cdef void proto_put_text(Bytes* out, u32 number, const void* data, u64 n) noexcept nogil:
    proto_put_head(out, number, n)
    out.put(data, n)
