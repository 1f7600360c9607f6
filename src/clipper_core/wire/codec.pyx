"""Wire frames <-> bytes (docs/wire.md): headers, and the payloads of PREDICT and REPLY.

A frame may have been made by an attacker. All functions below follow three rules:

- The remaining bytes are compared with the required ones (`want > left`), never a sum with an end,
  because a sum of two lengths can overflow.
- A length is compared with a named limit before memory is allocated for it, so a header of 64 bytes
  cannot require 64 GB, and an LZ4 block, which can grow 255-fold, is decompressed only into a size
  that was announced and allowed.
- Everything that docs/wire.md does not define is rejected: unknown bits, padding that is not zero,
  additional bytes. Otherwise it could not be given a meaning later.

The header has its own CRC-32, because a damaged length costs more than a damaged row: it
desynchronises the stream. The payload's is optional (CHECKED): on one host the kernel's sockets do
not damage bytes.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy, memset
from libcpp.vector cimport vector

import struct
from collections import namedtuple
from struct import iter_unpack

import numpy as np

from clipper_core.runtime.dtype cimport (
    BOOL, BYTES, F16, F32, F64, I16, I32, I64, I8, STR, U16, U32, U64, U8, are_bools,
    itemsize,
)
from clipper_core.runtime.machine cimport relaxed
from clipper_core.runtime.status cimport BAD_FRAME, BAD_INPUT, OK, PENDING, TOO_LARGE, raise_for
from clipper_core.wire.lz4 cimport (
    LITERALS, LZ4_BYTES_MAX, LZ4_GROWTH_MAX, Cursor, lz4_bound, lz4_encode, lz4_literals,
)

from clipper_core.wire.lz4 import decode_lz4

# -- The design document's version 1 batches, byte for byte (docs/wire.md).
#
# Version 1 has no magic, no checksum and no alignment, so a reader is protected by its lengths
# only: each is compared with the remaining bytes, and with a named limit, before it is used.
#
# Strings are first written as one run of literals, a valid LZ4 block at the speed of memcpy;
# `v1_compress` searches them for matches when they are sent to another host.

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef struct V1Batch:                  # a batch whose lengths were all checked
    int format
    u32 n
    u64 row_bytes                     # fixed formats
    u64 text_bytes                    # V1_STR: of all strings, uncompressed
    const u8* content
    u64 content_bytes


# -- batches
# --------------------------------------------------------------------------------------------------

cdef u8* _v1_put(u8* out, const void* bytes, u64 n) noexcept nogil:
    if n:
        memcpy(out, bytes, n)
    return out + n


cdef u8* _v1_put_u32(u8* out, u32 value) noexcept nogil:
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
    """Return the bytes of one element; 0 for a number that is no format."""
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
    """Return whether rows of these sizes are of the format. total: set to their sum."""
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
    out = _v1_put_u32(out + 1, n)
    if format <= V1_U8:
        out = _v1_put_u32(out, row_bytes[0] // item if n else 0)
    else:
        out = _v1_put_u32(out, <u32> content)
    if format == V1_STR:
        for i in range(n):
            out = _v1_put_u32(out, row_bytes[i])
        out = lz4_literals(total, out)
    if V1_VAR_I32 <= format <= V1_VAR_U8:
        return _v1_variable(n, rows, row_bytes, item, out) - start
    for i in range(n):
        out = _v1_put(out, rows[i], row_bytes[i])
    return out - start


cdef u8* _v1_variable(u32 n, const void** rows, const u32* row_bytes, u32 item,
                      u8* out) noexcept nogil:
    cdef u32 i
    for i in range(n):
        out = _v1_put(_v1_put_u32(out, row_bytes[i] // item), rows[i], row_bytes[i])
    return out


cdef u64 v1_compress(const u8* message, u64 nbytes, u32 search, u8* out) noexcept nogil:
    cdef u32 i, n = _u32_at(message + 1)
    cdef u64 fixed = V1_HEAD_BYTES + <u64> n * sizeof(u32), total = 0, block
    for i in range(n):
        total += _u32_at(message + V1_HEAD_BYTES + <u64> i * sizeof(u32))
    memcpy(out, message, fixed)
    block = lz4_encode(message + nbytes - total, total, search, out + fixed)
    _v1_put_u32(out + V1_HEAD_BYTES - sizeof(u32), <u32> (fixed - V1_HEAD_BYTES + block))
    return fixed + block


cdef u32 _u32_at(const u8* bytes) noexcept nogil:
    cdef u32 value
    memcpy(&value, bytes, sizeof(u32))
    return value


cdef Status _v1_head(const u8* message, u32 rows_max, u64 bytes_max, V1Batch* out) noexcept nogil:
    """Read the first 9 bytes."""
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


# -- the Python interface
# --------------------------------------------------------------------------------------------------

cdef dict _v1_dtypes = {V1_I32: np.dtype("<i4"), V1_F64: np.dtype("<f8"), V1_U8: np.dtype("u1"),
                     V1_VAR_I32: np.dtype("<i4"), V1_VAR_F64: np.dtype("<f8"),
                     V1_VAR_U8: np.dtype("u1")}


cdef object _row(int format, object row):
    """Return the row as an object that holds its bytes: a str, or bytes."""
    if isinstance(row, str):
        if format != V1_STR:
            raise_for(BAD_INPUT, f"a str row in a version 1 batch of format {format}")
        return row
    if format == V1_STR:
        raise_for(BAD_INPUT, f"a version 1 batch of strings takes str, got {type(row).__name__}")
    if isinstance(row, bytes):
        return row
    return np.asarray(row, _v1_dtypes[format]).tobytes()


def encode_v1(int format, rows, u32 search=LITERALS):
    """Return a batch of version 1. Threads: any.

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
    """Return the number of bytes of the batch that begins with the 9 bytes `head`, including these:
    the number of bytes to read from a stream.

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
    return _v1_numbers(raw, &batch)


cdef list _v1_numbers(bytes raw, const V1Batch* batch):
    cdef list rows = []
    cdef u64 at = V1_HEAD_BYTES, nbytes = batch.row_bytes
    cdef u32 _i
    for _i in range(batch.n):
        if batch.format > V1_U8:
            nbytes = <u64> _u32_at(<const u8*> PyBytes_AS_STRING(raw) + at) * _v1_item(batch.format)
            at += sizeof(u32)
        piece = raw[at:at + nbytes]
        rows.append(piece if _v1_item(batch.format) == 1
                    else np.frombuffer(piece, _v1_dtypes[batch.format]))
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


# -- CRC-32, as zlib computes it.
#
# The polynomial is zlib's and not Castagnoli's, which processors have an instruction for: zlib's
# is in the standard library of every language that an SDK may be written in. Slicing-by-16
# (Kounavis and Berry 2005; Stephan Brumme's tables) makes up for most of it.

cdef extern from *:
    """
    struct ClipperCrcTables {  // t[k][b]: the CRC of byte b followed by k zero bytes
        alignas(64) unsigned t[16][256];
        constexpr ClipperCrcTables() : t() {
            for (unsigned b = 0; b < 256; b++) {
                unsigned c = b;
                for (int bit = 0; bit < 8; bit++) c = (c & 1) ? (c >> 1) ^ 0xEDB88320u : c >> 1;
                t[0][b] = c;
            }
            for (unsigned k = 1; k < 16; k++)
                for (unsigned b = 0; b < 256; b++) t[k][b] = (t[k - 1][b] >> 8)
                    ^ t[0][t[k - 1][b] & 255];
        }
    };
    static constexpr ClipperCrcTables clipper_crc_tables;
    static constexpr auto& clipper_crc = clipper_crc_tables.t;
    """
    const u32 CRC "clipper_crc"[16][256]


cdef u32 crc32(u32 crc, const u8* bytes, u64 n) noexcept nogil:
    cdef u32 w[4]
    crc = ~crc
    while n >= 16:
        memcpy(w, bytes, 16)
        w[0] ^= crc
        crc = (CRC[15][w[0] & 255] ^ CRC[14][(w[0] >> 8) & 255]
               ^ CRC[13][(w[0] >> 16) & 255] ^ CRC[12][w[0] >> 24]
               ^ CRC[11][w[1] & 255] ^ CRC[10][(w[1] >> 8) & 255]
               ^ CRC[9][(w[1] >> 16) & 255] ^ CRC[8][w[1] >> 24]
               ^ CRC[7][w[2] & 255] ^ CRC[6][(w[2] >> 8) & 255]
               ^ CRC[5][(w[2] >> 16) & 255] ^ CRC[4][w[2] >> 24]
               ^ CRC[3][w[3] & 255] ^ CRC[2][(w[3] >> 8) & 255]
               ^ CRC[1][(w[3] >> 16) & 255] ^ CRC[0][w[3] >> 24])
        bytes += 16
        n -= 16
    if n >= 8:
        memcpy(w, bytes, 8)
        w[0] ^= crc
        crc = (CRC[7][w[0] & 255] ^ CRC[6][(w[0] >> 8) & 255]
               ^ CRC[5][(w[0] >> 16) & 255] ^ CRC[4][w[0] >> 24]
               ^ CRC[3][w[1] & 255] ^ CRC[2][(w[1] >> 8) & 255]
               ^ CRC[1][(w[1] >> 16) & 255] ^ CRC[0][w[1] >> 24])
        bytes += 8
        n -= 8
    while n:
        crc = (crc >> 8) ^ CRC[0][(crc ^ bytes[0]) & 255]
        bytes += 1
        n -= 1
    return ~crc


# -- Frames of version 2, described above.
cdef extern from *:
    """
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
                  "the wire is little-endian and is read in place");
    """

cdef packed struct Wire:              # the header as it is sent
    u32 magic
    u8 version
    u8 kind
    u8 dtype
    u8 rank
    u16 flags
    u16 reserved
    u32 rows
    u64 id
    u32 dims[4]
    u64 payload_bytes
    u64 time_us
    u32 payload_crc
    u32 header_crc

cdef enum:
    MAGIC = 0x52504C43                # "CLPR"
    CRC_AT = 60
    FLAGS = (VARIABLE | CONFIDENCE | ROW_STATUS | COMPRESSED | CHECKED | SHARED | SESSIONS
             | QUALIFIERS | PARTIAL | PARTS)


# -- headers
# --------------------------------------------------------------------------------------------------

cdef void header_encode(const Header* header, u8* out) noexcept nogil:
    cdef Wire wire
    wire.magic = MAGIC
    wire.version = WIRE_VERSION
    wire.kind = header.kind
    wire.dtype = header.dtype
    wire.rank = header.rank
    wire.flags = header.flags
    wire.reserved = 0
    wire.rows = header.rows
    wire.id = header.id
    memcpy(wire.dims, header.dims, sizeof(wire.dims))
    wire.payload_bytes = header.payload_bytes
    wire.time_us = header.time_us
    wire.payload_crc = header.payload_crc
    wire.header_crc = crc32(0, <const u8*> &wire, CRC_AT)
    memcpy(out, &wire, HEADER_BYTES)


cdef Status header_decode(const u8* bytes, u64 n, const Limits* limits, Header* out) noexcept nogil:
    cdef Wire wire
    cdef Header header
    cdef Status status
    if n < HEADER_BYTES:
        return PENDING
    memcpy(&wire, bytes, HEADER_BYTES)
    if wire.magic != MAGIC or wire.version != WIRE_VERSION or wire.reserved:
        return BAD_FRAME
    if wire.header_crc != crc32(0, bytes, CRC_AT):
        return BAD_FRAME
    header.kind = wire.kind
    header.dtype = wire.dtype
    header.rank = wire.rank
    header.flags = wire.flags
    header.id = wire.id
    header.rows = wire.rows
    memcpy(header.dims, wire.dims, sizeof(wire.dims))
    header.payload_bytes = wire.payload_bytes
    header.time_us = wire.time_us
    header.payload_crc = wire.payload_crc
    status = _judge(&header, limits)
    if status == OK:
        out[0] = header
    return status


cdef Status _judge(const Header* header, const Limits* limits) noexcept nogil:
    """Return OK when docs/wire.md and the limits allow such a header."""
    cdef bint fits
    if header.flags & ~FLAGS or header.kind < HELLO or header.kind > ANSWER:
        return BAD_FRAME
    if ACCURACY < header.kind < PART:
        return BAD_FRAME
    if header.payload_crc and not header.flags & CHECKED:
        return BAD_FRAME
    if header.kind == PREDICT or header.kind == REPLY or (header.kind == PART and header.rows):
        fits = _is_batch(header)
    else:
        fits = _is_control(header)
    if not fits:
        return BAD_FRAME
    if header.payload_bytes > limits.payload_bytes_max or header.rows > limits.rows_max:
        return TOO_LARGE
    return OK


cdef bint _is_control(const Header* header) noexcept nogil:
    if header.dtype or header.rank or header.rows or header.flags & ~CHECKED or _dims_used(header,
            0):
        return False
    if header.kind == REGION:
        return header.payload_bytes == REGION_BYTES
    if header.kind == ACCURACY:
        return header.payload_bytes == ACCURACY_BYTES or header.payload_bytes == ACCURACY_BYTES - 8
    return header.payload_bytes == 0 or (header.kind != HEARTBEAT and header.kind != GOODBYE
                                         and header.kind != CANCEL)


cdef bint _is_batch(const Header* header) noexcept nogil:
    if (header.rows == 0 or itemsize(header.dtype) == 0 or header.rank > DIMS_MAX
        or _dims_used(header, header.rank)):
        return False
    if header.flags & COMPRESSED and (header.kind != PREDICT or header.dtype != STR):
        return False
    if header.flags & SHARED and (header.kind != PREDICT or header.flags & ~(SHARED | CHECKED)
                                  or header.payload_bytes == 0 or header.payload_bytes % RUN_BYTES):
        return False
    if header.flags & SESSIONS and header.kind != PREDICT:
        return False
    if header.flags & QUALIFIERS and header.kind == PREDICT:
        return False
    if header.flags & PARTIAL and header.kind != REPLY:
        return False
    if header.flags & PARTS and (header.kind != PREDICT or header.rows != 1
                                 or header.flags & (SHARED | COMPRESSED)):
        return False
    if header.kind == PART and (header.rows != 1 or header.flags & ROW_STATUS):
        return False
    if header.flags & VARIABLE:
        return header.rank == 1 and header.dims[0] == 0
    return header.dtype != STR and header.dtype != BYTES


cdef bint _dims_used(const Header* header, u32 first) noexcept nogil:
    cdef u32 i
    for i in range(first, DIMS_MAX):
        if header.dims[i]:
            return True
    return False


cdef bint _row_bytes(const Header* header, u64* out) noexcept nogil:
    """Return False when the bytes of all rows go beyond 63 bits. A dimension of 0 makes rows of 0
    bytes, but the others are checked all the same: array libraries multiply them, and fail on too
    large a product."""
    cdef u64 rows = max(header.rows, <u32> 1), total = itemsize(header.dtype) * rows
    cdef bint empty = False
    cdef u32 i
    for i in range(header.rank):
        if header.dims[i] == 0:
            empty = True
        elif total > (~<u64> 0 >> 1) // header.dims[i]:
            return False
        else:
            total *= header.dims[i]
    out[0] = 0 if empty else total // rows
    return True


cdef u64 _empty_lists(const Header* header) noexcept nogil:
    """Return how many empty lists a row without elements is as JSON, 0 for other rows: the
    dimensions before the first 0, multiplied.

    `_row_bytes` has returned True for the header, so the product does not overflow."""
    cdef u64 lists = 1
    cdef u32 i
    for i in range(header.rank):
        if header.dims[i] == 0:
            return lists
        lists *= header.dims[i]
    return 0


# -- payloads
# --------------------------------------------------------------------------------------------------

cdef u64 _padding(u64 n) noexcept nogil:
    return (0 - n) & 7


cdef bint _take(Cursor* cursor, u64 n, const u8** part) noexcept nogil:
    """The next n bytes and the zeros that pad them. False when they are not there."""
    cdef u64 i, padding = _padding(n)
    if n > cursor.left or padding > cursor.left - n:
        return False
    part[0] = cursor.at
    for i in range(n, n + padding):
        if cursor.at[i]:
            return False
    cursor.at += n + padding
    cursor.left -= n + padding
    return True


cdef Status _open_fixed(const Header* header, const Limits* limits, Cursor* cursor,
                        Rows* out) noexcept nogil:
    if not _row_bytes(header, &out.row_bytes):
        return BAD_FRAME
    if header.kind != PREDICT and (out.row_bytes > limits.output_bytes_max
                                   or _empty_lists(header) > EMPTY_LISTS_MAX):
        return TOO_LARGE
    out.data_bytes = out.row_bytes * out.n      # below 2**63: _row_bytes has seen to it
    return OK if _take(cursor, out.data_bytes, &out.data) else BAD_FRAME


cdef Status _open_variable(const Header* header, const Limits* limits, Cursor* cursor,
                           Rows* out) noexcept nogil:
    cdef const u8* lengths = NULL
    cdef u32 i, longest = 0, item = itemsize(header.dtype)
    cdef u64 total = 0                # at most 2**32 lengths of 32 bits: no overflow
    if not _take(cursor, <u64> out.n * sizeof(u32), &lengths):
        return BAD_FRAME
    out.lengths = <const u32*> lengths
    for i in range(out.n):
        total += out.lengths[i]
        longest = max(longest, out.lengths[i])
    if header.kind != PREDICT and <u64> longest * item > limits.output_bytes_max:
        out.output_bytes_max = limits.output_bytes_max
    if header.flags & COMPRESSED:
        return _open_compressed(limits, cursor, total, out)
    if total > cursor.left // item:
        return BAD_FRAME
    out.data_bytes = total * item
    return OK if _take(cursor, out.data_bytes, &out.data) else BAD_FRAME


cdef Status _open_compressed(const Limits* limits, Cursor* cursor, u64 total,
                             Rows* out) noexcept nogil:
    if total > limits.payload_bytes_max or total > LZ4_BYTES_MAX:
        return TOO_LARGE
    if cursor.left < sizeof(u64):
        return BAD_FRAME
    memcpy(&out.data_bytes, cursor.at, sizeof(u64))
    cursor.at += sizeof(u64)
    cursor.left -= sizeof(u64)
    if not _take(cursor, out.data_bytes, &out.data) or total // LZ4_GROWTH_MAX > out.data_bytes:
        return BAD_FRAME
    return OK


cdef Status _open_qualifiers(Cursor* cursor, Rows* out) noexcept nogil:
    cdef const u8* lengths = NULL
    cdef u64 total = 0
    cdef u32 i
    if not _take(cursor, <u64> out.n * sizeof(u32), &lengths):
        return BAD_FRAME
    out.qualifier_bytes = <const u32*> lengths
    for i in range(out.n):
        if out.qualifier_bytes[i] > QUALIFIERS_MAX:
            return TOO_LARGE
        total += out.qualifier_bytes[i]
    return OK if _take(cursor, total, &out.qualifiers) else BAD_FRAME


cdef Status rows_open(const Header* header, const u8* payload, const Limits* limits,
                      Rows* out) noexcept nogil:
    cdef Cursor cursor
    cdef const u8* part = NULL
    cdef Status status = _judge(header, limits)
    out.output_bytes_max = 0
    if status != OK:
        return status
    # a batch whose rows are in shared memory
    if not header.rows or header.flags & SHARED:
        return BAD_FRAME
    cursor.at = payload
    cursor.left = header.payload_bytes
    memset(out, 0, sizeof(Rows))
    out.n = header.rows
    if header.flags & VARIABLE:
        status = _open_variable(header, limits, &cursor, out)
    else:
        status = _open_fixed(header, limits, &cursor, out)
    if status != OK:
        return status
    if header.dtype == BOOL and not are_bools(out.data, out.data_bytes):
        return BAD_FRAME
    if header.flags & SESSIONS:
        if not _take(&cursor, <u64> out.n * sizeof(u64), &part):
            return BAD_FRAME
        out.sessions = <const u64*> part
    if header.flags & CONFIDENCE:
        if not _take(&cursor, <u64> out.n * sizeof(float), &part):
            return BAD_FRAME
        out.confidence = <const float*> part
    if header.flags & QUALIFIERS:
        status = _open_qualifiers(&cursor, out)
        if status != OK:
            return status
    if header.flags & ROW_STATUS:
        if not _take(&cursor, out.n, &out.status) or not are_bools(out.status, out.n):
            return BAD_FRAME
        out.text = cursor.at
        out.text_bytes = cursor.left
        cursor.left = 0
    if cursor.left:
        return BAD_FRAME
    return TOO_LARGE if out.output_bytes_max else OK


cdef u64 rows_data_bytes(const Header* header, const Rows* rows) noexcept nogil:
    cdef u64 total = 0
    cdef u32 i
    if not header.flags & COMPRESSED:
        return rows.data_bytes
    for i in range(rows.n):
        total += rows.lengths[i]
    return total


cdef u64 lengths_bytes(u32 n) noexcept nogil:
    return (<u64> n * sizeof(u32) + 7) & ~<u64> 7


cdef u64 variable_payload_bytes(u32 n, u64 data_bytes) noexcept nogil:
    return lengths_bytes(n) + data_bytes + _padding(data_bytes)


cdef u8* _put(u8* out, const void* bytes, u64 n) noexcept nogil:
    if n:
        memcpy(out, bytes, n)
    return out + n


cdef u8* _put_u32(u8* out, u32 value) noexcept nogil:
    memcpy(out, &value, sizeof(u32))
    return out + sizeof(u32)


cdef void variable_encode(u32 n, const void** rows, const u64* row_bytes, u32 item_bytes,
                          u8* out) noexcept nogil:
    cdef u64 total = 0
    cdef u32 i, shift = 0             # an element has 1, 2, 4 or 8 bytes; a division a row is a
                                      # fifth of the whole
    while item_bytes >> (shift + 1):
        shift += 1
    for i in range(n):
        out = _put_u32(out, <u32> (row_bytes[i] >> shift))
        total += row_bytes[i]
    if n & 1:
        out = _put_u32(out, 0)
    for i in range(n):
        out = _put(out, rows[i], row_bytes[i])
    memset(out, 0, _padding(total))


cdef u64 compressed_bound(u32 n, u64 data_bytes) noexcept nogil:
    return lengths_bytes(n) + sizeof(u64) + lz4_bound(data_bytes) + 7


cdef u64 compressed_encode(u32 n, const u8* payload, u64 data_bytes, u32 search,
                           u8* out) noexcept nogil:
    cdef u64 lengths = lengths_bytes(n)
    cdef u64 block = lz4_encode(payload + lengths, data_bytes, search, out + lengths + sizeof(u64))
    memcpy(out, payload, lengths)
    memcpy(out + lengths, &block, sizeof(u64))
    memset(out + lengths + sizeof(u64) + block, 0, _padding(block))
    return lengths + sizeof(u64) + block + _padding(block)


# -- the Python interface
# --------------------------------------------------------------------------------------------------

FrameHeader = namedtuple("FrameHeader",
                         "kind dtype flags rows id shape payload_bytes time_us payload_crc")
FrameHeader.__doc__ = ("A header, decoded. Threads: any. shape: of one row; (0,) when rows differ "
                       "in length.")

OpenRows = namedtuple("OpenRows", "dtype n data lengths confidence status text sessions qualifiers")
OpenRows.__doc__ = """The rows of a PREDICT or REPLY: read-only views into the payload.

data: ndarray (n, *shape), or 1-d ndarray of all rows one after another when they differ in length;
u8 for STR and BYTES. lengths: u32 (n,), in elements, or None. confidence: f32 (n,) or None.
status: u8 (n,), 1 for a row that failed, or None; text: bytes, why it did. sessions: u64 (n,) or
None. qualifiers: bytes of each row (msgpack), or None. Threads: any.
"""

cdef dict _dtypes = {
    BOOL: np.dtype("?"), U8: np.dtype("u1"), I8: np.dtype("i1"), U16: np.dtype("<u2"),
    I16: np.dtype("<i2"), U32: np.dtype("<u4"), I32: np.dtype("<i4"), U64: np.dtype("<u8"),
    I64: np.dtype("<i8"), F16: np.dtype("<f2"), F32: np.dtype("<f4"), F64: np.dtype("<f8"),
    STR: np.dtype("u1"), BYTES: np.dtype("u1"),
}
cdef dict _numbers = {dtype: number for number, dtype in _dtypes.items() if number < STR}


cdef Header _header_of(object fields) except *:
    cdef Header header
    cdef tuple shape = tuple(fields.shape)
    memset(&header, 0, sizeof(Header))
    if len(shape) > DIMS_MAX:
        raise_for(BAD_INPUT, f"a row has at most {DIMS_MAX} dimensions, not {len(shape)}")
    header.kind = fields.kind
    header.dtype = fields.dtype
    header.rank = <u8> len(shape)
    header.flags = fields.flags
    header.id = fields.id
    header.rows = fields.rows
    for i, size in enumerate(shape):
        header.dims[i] = size
    header.payload_bytes = fields.payload_bytes
    header.time_us = fields.time_us
    header.payload_crc = fields.payload_crc
    return header


def checksum(data, u32 crc=0):
    """Return the CRC-32 of `data`, zlib's polynomial; go on from an earlier one with `crc`.
    Threads: any."""
    cdef bytes raw = bytes(data)
    cdef const u8* start = <const u8*> PyBytes_AS_STRING(raw)
    cdef u64 n = PyBytes_GET_SIZE(raw)
    with nogil:
        crc = crc32(crc, start, n)
    return crc


def encode_frame(int kind, payload=b"", *, int dtype=0, shape=(), int flags=0, rows=0, id=0,
                 time_us=0, checked=False):
    """A frame of these header fields and this payload, both CRCs right, and nothing judged.
    Threads: any.

    checked: adds CHECKED. It checks nothing, so that a test can write frames that must be refused;
    `encode_rows` makes a payload from rows. Raises BAD_INPUT: more than 4 dimensions;
    OverflowError: a field out of its range.
    """
    cdef bytes raw = bytes(payload)
    cdef u32 crc = checksum(raw) if checked or flags & CHECKED else 0
    cdef Header header = _header_of(FrameHeader(kind, dtype, flags | (CHECKED if checked else 0),
                                                rows, id, shape,
                                                len(raw), time_us, crc))
    cdef u8 out[HEADER_BYTES]
    header_encode(&header, out)
    return out[:HEADER_BYTES] + raw


def decode_header(data, *, u64 payload_bytes_max=64 << 20, u32 rows_max=1 << 20):
    """Return the FrameHeader in the first 64 bytes of `data`; None while there are fewer. Threads:
    any.

    Raises BAD_FRAME: no header of this version, damaged, or not one that docs/wire.md allows;
    TOO_LARGE: beyond a limit.
    """
    cdef bytes raw = bytes(data[:HEADER_BYTES])
    cdef Limits limits = Limits(payload_bytes_max, rows_max, 0)
    cdef Header header
    cdef Status status = header_decode(<const u8*> PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw),
                                       &limits, &header)
    if status == PENDING:
        return None
    raise_for(status,
              f"frame header {'too large' if status == TOO_LARGE else 'damaged or unknown'}: "
              f"{raw.hex(' ', 4)}")
    return FrameHeader(Kind(header.kind), header.dtype, Flag(header.flags), header.rows, header.id,
                       tuple([header.dims[i] for i in range(header.rank)]), header.payload_bytes,
                       header.time_us,
                       header.payload_crc)


def open_rows(header, payload, *, u64 payload_bytes_max=64 << 20, u32 rows_max=1 << 20,
              u64 output_bytes_max=16 << 20):
    """Return the OpenRows of a PREDICT or REPLY whose header is `header` (FrameHeader). Threads:
    any.

    Arrays are views of `payload` when it is bytes (else of a copy), except COMPRESSED data. Raises
    BAD_FRAME: the payload does not match the header; TOO_LARGE: beyond a limit (output_bytes_max:
    of one row of a REPLY).
    """
    cdef bytes raw = bytes(payload)
    cdef Header fields = _header_of(header)
    cdef Limits limits = Limits(payload_bytes_max, rows_max, output_bytes_max)
    cdef Rows rows
    cdef Status status = BAD_FRAME
    cdef const u8* start = <const u8*> PyBytes_AS_STRING(raw)
    if fields.payload_bytes != <u64> PyBytes_GET_SIZE(raw):
        raise_for(BAD_FRAME, f"payload of {len(raw)} bytes, its header says {header.payload_bytes}")
    with nogil:
        if not fields.flags & CHECKED or crc32(0, start,
                                               fields.payload_bytes) == fields.payload_crc:
            status = rows_open(&fields, start, &limits, &rows)
    raise_for(status,
              f"payload of {len(raw)} bytes, {'too large' if status == TOO_LARGE else 'damaged'}: "
              f"{header}")
    return _open(raw, &fields, &rows, header.shape)


def open_runs(header, payload):
    """Return [(region, first row, rows), ...] of a SHARED batch whose header is `header`. Threads:
    any.

    Raises BAD_FRAME. The caller, which has mapped the region, must check that it has these rows.
    """
    cdef bytes raw = bytes(payload)
    cdef list runs = []
    if len(raw) % RUN_BYTES == 0:
        runs = [(run[0], run[2], run[1]) for run in iter_unpack("<IIQ", raw)]
    if (not header.flags & SHARED or not runs or 0 in [run[2] for run in runs]
            or sum([run[2] for run in runs]) != header.rows
            or (header.flags & CHECKED and checksum(raw) != header.payload_crc)):
        raise_for(BAD_FRAME, f"no runs of {header.rows} rows: {raw.hex(' ', 4)}")
    return runs


cdef object _view(bytes raw, const void* at, u64 n, object dtype):
    if at == NULL:
        return None
    return np.frombuffer(raw, "u1", n, <const char*> at - PyBytes_AS_STRING(raw)).view(dtype)


cdef object _open(bytes raw, const Header* header, const Rows* rows, object shape):
    cdef object data = _view(raw, rows.data, rows.data_bytes, "u1")
    if header.flags & COMPRESSED:
        data = np.frombuffer(decode_lz4(data, rows_data_bytes(header, rows)), "u1")
    data = data.view(_dtypes[header.dtype])
    if not header.flags & VARIABLE:
        data = data.reshape((rows.n, *shape))
    return OpenRows(header.dtype, rows.n, data, _view(raw, rows.lengths, <u64> rows.n * 4, "<u4"),
                    _view(raw, rows.confidence, <u64> rows.n * 4, "<f4"), _view(raw, rows.status,
                            rows.n, "u1"),
                    b"" if rows.text == NULL else rows.text[:rows.text_bytes], _view(raw,
                            rows.sessions, <u64> rows.n * 8, "<u8"),
                    _qualifiers(rows))


cdef list _qualifiers(const Rows* rows):
    cdef const u8* at = rows.qualifiers
    cdef list found = []
    if rows.qualifier_bytes == NULL:
        return None
    for i in range(rows.n):
        found.append(at[:rows.qualifier_bytes[i]])
        at += rows.qualifier_bytes[i]
    return found


cdef bytes _padded(object part):
    cdef bytes raw = bytes(part)
    return raw + bytes(_padding(len(raw)))


cdef bytes _variable(list rows, u32 item, object search):
    """Return the payload of rows of variable length. rows: all str, or all bytes.  search: of
    strings, None for no LZ4 block."""
    cdef vector[const void*] at
    cdef vector[u64] sizes
    cdef u32 n = <u32> len(rows)
    cdef u64 total = 0
    cdef Py_ssize_t size
    cdef bytes out, packed
    at.reserve(n)
    sizes.reserve(n)
    for row in rows:
        if isinstance(row, str):
            at.push_back(PyUnicode_AsUTF8AndSize(row, &size))
        else:
            at.push_back(PyBytes_AS_STRING(row))
            size = PyBytes_GET_SIZE(row)
        sizes.push_back(size)
        total += size
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> variable_payload_bytes(n, total))
    variable_encode(n, at.data(), sizes.data(), item, <u8*> PyBytes_AS_STRING(out))
    if search is None:
        return out
    packed = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> compressed_bound(n, total))
    return packed[:compressed_encode(n, <const u8*> PyBytes_AS_STRING(out), total, search,
                                     <u8*> PyBytes_AS_STRING(packed))]


cdef object _list_payload(list rows, object search):
    """Return (dtype, payload) of str, bytes, or 1-d arrays of one dtype."""
    if all([isinstance(row, str) for row in rows]):
        return STR, _variable(rows, 1, search)
    if all([isinstance(row, bytes) for row in rows]):
        return BYTES, _variable(rows, 1, None)
    arrays = [np.asarray(row) for row in rows]
    number = _numbers.get(arrays[0].dtype)
    if number is None or any([row.dtype != arrays[0].dtype or row.ndim != 1 for row in arrays]):
        raise_for(BAD_INPUT, "rows are all str, all bytes, or 1-d arrays of one numeric dtype")
    return number, _variable([_bytes_of(row) for row in arrays], itemsize(number), None)


cdef bytes _bytes_of(object rows):
    """Return the bytes of an array; bools as 0 and 1, whatever numpy holds."""
    return (rows.view(np.uint8) != 0).tobytes() if rows.dtype == np.bool_ else rows.tobytes()


def encode_rows(int kind, rows, *, confidence=None, status=None, str text="", id=0, time_us=0,
                checked=False,
                compressed=False, search=LITERALS, sessions=None, qualifiers=None, partial=False,
                parts=False):
    """A whole PREDICT, REPLY or PART frame of `rows`. Threads: any.

    rows: ndarray (n, *shape) of a numeric dtype, at most 4 dimensions a row; or a list of str, of
    bytes, or of 1-d arrays that differ in length. sessions: n u64. confidence: n floats.
    qualifiers: n bytes, opaque. status: n of 0 (fine) or 1 (failed), `text` is the reason.
    compressed: str rows travel as an LZ4 block, made by `search` (lz4.Search). partial: further
    replies to the batch follow. parts: it is answered in parts. Raises BAD_INPUT.
    """
    cdef int flags = (PARTIAL if partial else 0) | (PARTS if parts else 0)
    if isinstance(rows, np.ndarray):
        dtype = _numbers.get(rows.dtype)
        shape = rows.shape[1:]
        payload = _padded(_bytes_of(rows))
        if dtype is None or rows.ndim == 0:
            raise_for(BAD_INPUT,
                      f"no rows of the wire: an array of {rows.dtype}, shape {rows.shape}")
    else:
        rows = list(rows)
        (dtype, payload), shape = _list_payload(rows, search if compressed else None), (0,)
        flags |= VARIABLE | (COMPRESSED if compressed else 0)
    if sessions is not None:
        flags |= SESSIONS
        payload += np.asarray(sessions, "<u8").tobytes()
    if confidence is not None:
        flags |= CONFIDENCE
        payload += _padded(np.asarray(confidence, "<f4").tobytes())
    if qualifiers is not None:
        flags |= QUALIFIERS
        payload += _padded(np.array([len(each) for each in qualifiers],
                                    "<u4").tobytes()) + _padded(b"".join(qualifiers))
    if status is not None:
        flags |= ROW_STATUS
        payload += _padded(np.asarray(status, "u1").tobytes()) + text.encode()
    return encode_frame(kind, payload, dtype=dtype, shape=shape, flags=flags, rows=len(rows), id=id,
                        time_us=time_us,
                        checked=checked)


# -- FEEDBACK and ACCURACY: frames of models that learn.

cdef Status accuracy_read(const u8* payload, u64 n, Progress* progress) noexcept nogil:
    cdef u64[2] counts
    cdef double value = 0
    memcpy(counts, payload, sizeof(counts))
    if n == ACCURACY_BYTES:
        memcpy(&value, payload + sizeof(counts), sizeof(double))
    if not 0 <= value <= 1:                 # nor is NaN
        return BAD_FRAME
    progress.learned.store(counts[0], relaxed)
    progress.failed.store(counts[1], relaxed)
    progress.accuracy.store(1 + <u64> (value * 1e9 + 0.5) if n == ACCURACY_BYTES else 0, relaxed)
    return OK


def encode_feedback(inputs, labels, sessions):
    """The payload of a FEEDBACK frame: n inputs, the n outputs that would have been right, n
    sessions (u64). Threads: any.

    inputs, labels: as codec.encode_rows takes rows. Raises BAD_INPUT.
    """
    if not len(inputs) == len(labels) == len(sessions):
        raise_for(BAD_INPUT,
                  f"{len(inputs)} inputs, {len(labels)} labels and {len(sessions)} sessions")
    return encode_rows(PREDICT, inputs, sessions=sessions) + encode_rows(REPLY, labels)


def decode_feedback(payload, **limits):
    """Return (inputs, labels) of a FEEDBACK's payload, OpenRows each; the sessions are with the
    inputs. Threads: any.

    limits: as codec.open_rows has them. Raises BAD_FRAME, TOO_LARGE.
    """
    cdef list found = []
    cdef bytes rest = bytes(payload)
    for kind in (PREDICT, REPLY):
        header = decode_header(rest)
        if header is None or header.kind != kind or header.payload_bytes > len(rest) - HEADER_BYTES:
            raise_for(BAD_FRAME, "feedback is a PREDICT and a REPLY frame")
        found.append(open_rows(header, rest[HEADER_BYTES:HEADER_BYTES + header.payload_bytes],
                               **limits))
        rest = rest[HEADER_BYTES + header.payload_bytes:]
    if rest or found[0].n != found[1].n or found[0].sessions is None:
        raise_for(BAD_FRAME, "feedback has as many labels and sessions as inputs, and nothing else")
    return tuple(found)


def feedback_frame(bytes payload, **fields):
    """A FEEDBACK frame; fields: as codec.encode_frame takes them. Threads: any."""
    return encode_frame(FEEDBACK, payload, **fields)


def decode_accuracy(payload):
    """Return (rows learned, rows failed, accuracy or None) of an ACCURACY's payload. Threads: any.
    Raises BAD_FRAME."""
    cdef bytes raw = bytes(payload)
    cdef Progress progress
    cdef Status status = BAD_FRAME
    if len(raw) in (ACCURACY_BYTES - 8, ACCURACY_BYTES):
        status = accuracy_read(<const u8*> (<const char*> raw), len(raw), &progress)
    raise_for(status, f"no accuracy: {raw.hex(' ', 8)}")
    billionths = progress.accuracy.load(relaxed)
    return (progress.learned.load(relaxed), progress.failed.load(relaxed),
            (billionths - 1) / 1e9 if billionths else None)


def accuracy_frame(u64 learned, u64 failed, accuracy=None, **fields):
    """An ACCURACY frame, and nothing judged: a test can write one that must be refused. Threads:
    any."""
    cdef bytes payload = struct.pack("<QQ", learned, failed)
    return encode_frame(ACCURACY,
                        payload if accuracy is None else payload + struct.pack("<d", accuracy),
                        **fields)
