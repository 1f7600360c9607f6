"""The design document's version 1 batches, byte for byte (docs/wire.md).

Version 1 has no magic, no checksum and no alignment, so all that protects a reader are its lengths:
each is compared with what is left, and with a named limit, before it is believed.

Strings are first written as one run of literals, a valid LZ4 block at the speed of memcpy;
`v1_compress` searches them for matches when they go to another host.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy, memset
from libcpp.vector cimport vector

import numpy as np

from clipper_core.runtime.dtype cimport BYTES, F64, I32, STR, U8
from clipper_core.runtime.status cimport BAD_FRAME, BAD_INPUT, OK, TOO_LARGE, raise_for
from clipper_core.wire.lz4 cimport (
    LITERALS, LZ4_BYTES_MAX, LZ4_GROWTH_MAX, Cursor, lz4_bound, lz4_encode, lz4_literals,
)

from clipper_core.wire.lz4 import decode_lz4

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef struct V1Batch:                  # a batch whose lengths are all checked
    int format
    u32 n
    u64 row_bytes                     # fixed formats
    u64 text_bytes                    # V1_STR: of all strings, uncompressed
    const u8* content
    u64 content_bytes


# -- batches
# --------------------------------------------------------------------------------------------------

cdef u8* _put(u8* out, const void* bytes, u64 n) noexcept nogil:
    if n:
        memcpy(out, bytes, n)
    return out + n


cdef u8* _put_u32(u8* out, u32 value) noexcept nogil:
    memcpy(out, &value, sizeof(u32))
    return out + sizeof(u32)


cdef int v1_format(int dtype, bint variable) noexcept nogil:
    if dtype == I32:
        return V1_VAR_I32 if variable else V1_I32
    if dtype == F64:
        return V1_VAR_F64 if variable else V1_F64
    if dtype == U8:
        return V1_VAR_U8 if variable else V1_U8
    if dtype == BYTES:
        return V1_VAR_U8
    return V1_STR if dtype == STR else 0


cdef u32 _v1_item(int format) noexcept nogil:
    """Bytes of one element; 0 for a number that is no format."""
    if format == V1_I32 or format == V1_VAR_I32:
        return 4
    if format == V1_F64 or format == V1_VAR_F64:
        return 8
    return 1 if V1_I32 <= format <= V1_STR else 0


cdef u64 v1_bound(int format, u32 n, u64 data_bytes) noexcept nogil:
    if format <= V1_U8:
        return V1_HEAD_BYTES + data_bytes
    return V1_HEAD_BYTES + <u64> n * sizeof(u32) + (lz4_bound(data_bytes) if format == V1_STR
                                                    else data_bytes)


cdef bint _are_v1_rows(int format, u32 n, const u32* row_bytes, u64* total) noexcept nogil:
    """True when rows of these sizes are of the format; their sum goes to `total`."""
    cdef u32 i, item = _v1_item(format)
    total[0] = 0
    if item == 0:
        return False
    for i in range(n):
        if row_bytes[i] & (item - 1) or (format <= V1_U8 and row_bytes[i] != row_bytes[0]):
            return False
        total[0] += row_bytes[i]
    return format != V1_STR or total[0] <= LZ4_BYTES_MAX


cdef u64 v1_encode(int format, u32 n, const void** rows, const u32* row_bytes, u8* out,
                   u64 out_bytes) noexcept nogil:
    cdef u8* start = out
    cdef u64 total, content
    cdef u32 i, item = _v1_item(format)
    if not _are_v1_rows(format, n, row_bytes, &total):
        return 0
    content = v1_bound(format, n, total) - V1_HEAD_BYTES
    if out_bytes < V1_HEAD_BYTES or content > out_bytes - V1_HEAD_BYTES or (format > V1_U8
                                                                            and content >> 32):
        return 0
    out[0] = <u8> format
    out = _put_u32(out + 1, n)
    if format <= V1_U8:
        out = _put_u32(out, row_bytes[0] // item if n else 0)
    else:
        out = _put_u32(out, <u32> content)
    if format == V1_STR:
        for i in range(n):
            out = _put_u32(out, row_bytes[i])
        out = lz4_literals(total, out)
    if V1_VAR_I32 <= format <= V1_VAR_U8:
        return _v1_variable(n, rows, row_bytes, item, out) - start
    for i in range(n):
        out = _put(out, rows[i], row_bytes[i])
    return out - start


cdef u8* _v1_variable(u32 n, const void** rows, const u32* row_bytes, u32 item,
                      u8* out) noexcept nogil:
    cdef u32 i
    for i in range(n):
        out = _put(_put_u32(out, row_bytes[i] // item), rows[i], row_bytes[i])
    return out


cdef u64 v1_compress(const u8* message, u64 nbytes, u32 search, u8* out) noexcept nogil:
    cdef u32 i, n = _u32_at(message + 1)
    cdef u64 fixed = V1_HEAD_BYTES + <u64> n * sizeof(u32), total = 0, block
    for i in range(n):
        total += _u32_at(message + V1_HEAD_BYTES + <u64> i * sizeof(u32))
    memcpy(out, message, fixed)
    block = lz4_encode(message + nbytes - total, total, search, out + fixed)
    _put_u32(out + V1_HEAD_BYTES - sizeof(u32), <u32> (fixed - V1_HEAD_BYTES + block))
    return fixed + block


cdef u32 _u32_at(const u8* bytes) noexcept nogil:
    cdef u32 value
    memcpy(&value, bytes, sizeof(u32))
    return value


cdef Status _v1_head(const u8* message, u32 rows_max, u64 bytes_max, V1Batch* out) noexcept nogil:
    """What the first 9 bytes announce."""
    cdef u64 length = _u32_at(message + 5), item = _v1_item(message[0])
    memset(out, 0, sizeof(V1Batch))
    out.format = message[0]
    out.n = _u32_at(message + 1)
    out.content = message + V1_HEAD_BYTES
    if item == 0 or out.n == 0:
        return BAD_FRAME
    if out.format <= V1_U8:
        out.row_bytes = length * item
    if out.n > rows_max or (out.row_bytes
                            and out.n > bytes_max // out.row_bytes) or length > bytes_max:
        return TOO_LARGE
    out.content_bytes = out.n * out.row_bytes if out.format <= V1_U8 else length
    return OK


cdef Status _v1_open(const u8* message, u64 nbytes, u32 rows_max, u64 bytes_max,
                     V1Batch* out) noexcept nogil:
    cdef Status status
    if nbytes < V1_HEAD_BYTES:
        return BAD_FRAME
    status = _v1_head(message, rows_max, bytes_max, out)
    if status != OK:
        return status
    if out.content_bytes != nbytes - V1_HEAD_BYTES:
        return BAD_FRAME
    if out.format == V1_STR:
        return _v1_open_text(bytes_max, out)
    return OK if out.format <= V1_U8 or _is_v1_variable(out) else BAD_FRAME


cdef bint _is_v1_variable(const V1Batch* batch) noexcept nogil:
    cdef Cursor cursor
    cdef u64 length
    cdef u32 _i
    cursor.at = batch.content
    cursor.left = batch.content_bytes
    for _i in range(batch.n):
        if cursor.left < sizeof(u32):
            return False
        length = <u64> _u32_at(cursor.at) * _v1_item(batch.format)
        if length > cursor.left - sizeof(u32):
            return False
        cursor.at += sizeof(u32) + length
        cursor.left -= sizeof(u32) + length
    return cursor.left == 0


cdef Status _v1_open_text(u64 bytes_max, V1Batch* out) noexcept nogil:
    cdef u32 i, length
    if out.n > out.content_bytes // sizeof(u32):
        return BAD_FRAME
    for i in range(out.n):
        length = _u32_at(out.content + <u64> i * sizeof(u32))
        if length >> 31:
            return BAD_FRAME
        out.text_bytes += length
    if out.text_bytes > bytes_max or out.text_bytes > LZ4_BYTES_MAX:
        return TOO_LARGE
    return (OK if out.text_bytes // LZ4_GROWTH_MAX <= out.content_bytes - <u64> out.n * sizeof(u32)
            else BAD_FRAME)


# -- the Python door
# --------------------------------------------------------------------------------------------------

cdef dict _dtypes = {V1_I32: np.dtype("<i4"), V1_F64: np.dtype("<f8"), V1_U8: np.dtype("u1"),
                     V1_VAR_I32: np.dtype("<i4"), V1_VAR_F64: np.dtype("<f8"),
                     V1_VAR_U8: np.dtype("u1")}


cdef object _row(int format, object row):
    """What the row's bytes are taken from: a str, or bytes."""
    if isinstance(row, str):
        if format != V1_STR:
            raise_for(BAD_INPUT, f"a str row in a version 1 batch of format {format}")
        return row
    if format == V1_STR:
        raise_for(BAD_INPUT, f"a version 1 batch of strings takes str, got {type(row).__name__}")
    if isinstance(row, bytes):
        return row
    return np.asarray(row, _dtypes[format]).tobytes()


def encode_v1(int format, rows, u32 search=LITERALS):
    """One version 1 batch. Threads: any.

    format: 1..7, see V1. rows: sequence of str (V1_STR), of bytes (the row's elements,
    little-endian), or of what numpy makes an array of the format's type of: i32, f64 or u8, one
    dimension. search: of strings, see lz4.Search. Raises BAD_INPUT: no such format; rows of another
    type; rows of a fixed format that differ in length.
    """
    if _v1_item(format) == 0:
        raise_for(BAD_INPUT, f"version 1 has the formats 1 to 7, not {format}")
    cdef list pieces = [_row(format, row) for row in rows]
    cdef u32 n = <u32> len(pieces)
    cdef vector[const void*] at
    cdef vector[u32] sizes
    cdef u64 total = 0, bound, written
    cdef Py_ssize_t size
    cdef bytes out, packed
    at.reserve(n)
    sizes.reserve(n)
    for piece in pieces:
        if format == V1_STR:
            at.push_back(PyUnicode_AsUTF8AndSize(piece, &size))
        else:
            at.push_back(PyBytes_AS_STRING(piece))
            size = PyBytes_GET_SIZE(piece)
        sizes.push_back(<u32> size)
        total += size
    bound = v1_bound(format, n, total)
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> bound)
    written = v1_encode(format, n, at.data(), sizes.data(), <u8*> PyBytes_AS_STRING(out), bound)
    if written == 0:
        raise_for(BAD_INPUT,
                  f"the rows do not fit format {format}: partial elements, or fixed rows of two "
                  f"lengths")
    if format != V1_STR or search == LITERALS:
        return out
    packed = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> bound)
    return packed[:v1_compress(<const u8*> PyBytes_AS_STRING(out), written, search,
                               <u8*> PyBytes_AS_STRING(packed))]


def message_bytes_v1(head, *, u64 bytes_max=64 << 20, u32 rows_max=1 << 20):
    """Bytes of the whole batch whose first 9 bytes are `head`, themselves included: what to read
    from a stream.

    Raises BAD_FRAME: fewer than 9 bytes, an unknown format, no rows; TOO_LARGE: more than bytes_max
    of content, or more than rows_max rows. Threads: any.
    """
    cdef bytes raw = bytes(head)
    cdef V1Batch batch
    cdef Status status = BAD_FRAME
    if len(raw) >= V1_HEAD_BYTES:
        status = _v1_head(<const u8*> PyBytes_AS_STRING(raw), rows_max, bytes_max, &batch)
    raise_for(status,
              f"not the head of a version 1 batch, or too large: {raw[:V1_HEAD_BYTES].hex(' ')}")
    return V1_HEAD_BYTES + batch.content_bytes


def decode_v1(message, *, u64 bytes_max=64 << 20, u32 rows_max=1 << 20):
    """The rows of one whole version 1 batch: a list of ndarray i32 or f64 (read-only), of bytes
    (u8), or of str.

    Raises BAD_FRAME: lengths that disagree with the bytes, a damaged LZ4 block, strings that are no
    UTF-8; TOO_LARGE: more than bytes_max of content or opened strings, or more than rows_max rows.
    Threads: any.
    """
    cdef bytes raw = bytes(message)
    cdef V1Batch batch
    cdef Status status
    cdef const u8* start = <const u8*> PyBytes_AS_STRING(raw)
    cdef u64 nbytes = PyBytes_GET_SIZE(raw)
    with nogil:
        status = _v1_open(start, nbytes, rows_max, bytes_max, &batch)
    raise_for(status,
              f"version 1 batch of {nbytes} bytes, "
              f"{'too large' if status == TOO_LARGE else 'damaged'}")
    if batch.format == V1_STR:
        return _texts(raw, &batch)
    return _numbers(raw, &batch)


cdef list _numbers(bytes raw, const V1Batch* batch):
    cdef list rows = []
    cdef u64 at = V1_HEAD_BYTES, nbytes = batch.row_bytes
    cdef u32 _i
    for _i in range(batch.n):
        if batch.format > V1_U8:
            nbytes = <u64> _u32_at(<const u8*> PyBytes_AS_STRING(raw) + at) * _v1_item(batch.format)
            at += sizeof(u32)
        piece = raw[at:at + nbytes]
        rows.append(piece if _v1_item(batch.format) == 1
                    else np.frombuffer(piece, _dtypes[batch.format]))
        at += nbytes
    return rows


cdef list _texts(bytes raw, const V1Batch* batch):
    cdef u64 lengths = <u64> batch.n * sizeof(u32), at = 0, nbytes
    cdef bytes text = decode_lz4(raw[V1_HEAD_BYTES + lengths:], batch.text_bytes)
    cdef list rows = []
    cdef u32 i
    for i in range(batch.n):
        nbytes = _u32_at(batch.content + <u64> i * sizeof(u32))
        try:
            rows.append(text[at:at + nbytes].decode())
        except UnicodeDecodeError:
            raise_for(BAD_FRAME, f"string {i} of a version 1 batch is no UTF-8")
        at += nbytes
    return rows
