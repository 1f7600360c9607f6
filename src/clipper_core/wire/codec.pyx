"""Wire frames <-> bytes (docs/wire.md): headers, and the payloads of PREDICT and REPLY.

A frame is hostile until it is opened. Three rules keep reading it safe, and every function below
follows them:

- What is left is compared with what is wanted (`want > left`), never a sum with an end: a sum of
  two lengths can wrap.
- A length is compared with a named limit before anything is reserved for it, so a header of 64
  bytes cannot ask for 64 GB, and an LZ4 block, which can grow 255-fold, is opened only into room
  that was announced and allowed.
- Nothing that the page does not define is let through: unknown bits, padding that is not zero,
  bytes too many. What is tolerated today cannot be given a meaning tomorrow.

The header has its own CRC-32 (crc.pxd), because a damaged length costs more than a damaged row: it
desynchronises the stream. The payload's is optional (CHECKED): on one host the kernel's sockets do
not damage bytes.
"""
from collections import namedtuple
from struct import iter_unpack

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy, memset
from libcpp.vector cimport vector

import numpy as np

from clipper_core.runtime.dtype cimport (
    BOOL, BYTES, F16, F32, F64, I16, I32, I64, I8, STR, U16, U32, U64, U8, itemsize,
)
from clipper_core.runtime.status cimport BAD_FRAME, BAD_INPUT, OK, PENDING, TOO_LARGE, raise_for
from clipper_core.wire.lz4 cimport (
    LITERALS, LZ4_BYTES_MAX, LZ4_GROWTH_MAX, Cursor, lz4_bound, lz4_encode,
)

from clipper_core.wire.lz4 import decode_lz4

cdef extern from *:
    """
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
                  "the wire is little-endian and is read in place");
    """

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef packed struct Wire:              # the header as it travels
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
             | QUALIFIERS)


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
    """OK when the page allows such a header and the limits do."""
    cdef bint fits
    if header.kind < HELLO or header.kind > ACCURACY or header.flags & ~FLAGS:
        return BAD_FRAME
    if header.payload_crc and not header.flags & CHECKED:
        return BAD_FRAME
    if header.kind == PREDICT or header.kind == REPLY:
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
    return header.payload_bytes == 0 or (header.kind != HEARTBEAT and header.kind != GOODBYE)


cdef bint _is_batch(const Header* header) noexcept nogil:
    if (header.rows == 0 or itemsize(header.dtype) == 0 or header.rank > DIMS_MAX
        or _dims_used(header, header.rank)):
        return False
    if header.flags & COMPRESSED and (header.kind != PREDICT or header.dtype != STR):
        return False
    if header.flags & SHARED and (header.kind != PREDICT or header.flags & ~(SHARED | CHECKED)
                                  or header.payload_bytes == 0 or header.payload_bytes % RUN_BYTES):
        return False
    if (header.flags & SESSIONS and header.kind != PREDICT) or (header.flags & QUALIFIERS
                                                                and header.kind != REPLY):
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
    """False when the bytes of all rows go beyond 63 bits. A dimension of 0 makes rows of 0 bytes
    but excuses no other one: array libraries multiply the rest, and fail on what they get."""
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
    """How many empty lists a row without elements is as JSON, 0 for other rows: the dimensions
    before the first 0, multiplied.

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


cdef bint _are_flags(const u8* bytes, u64 n) noexcept nogil:
    """True when every byte is 0 or 1."""
    cdef u8 seen = 0
    cdef u64 i
    for i in range(n):
        seen |= bytes[i]
    return seen <= 1


cdef Status _open_fixed(const Header* header, const Limits* limits, Cursor* cursor,
                        Rows* out) noexcept nogil:
    if not _row_bytes(header, &out.row_bytes):
        return BAD_FRAME
    if header.kind == REPLY and (out.row_bytes > limits.output_bytes_max
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
    if header.kind == REPLY and <u64> longest * item > limits.output_bytes_max:
        return TOO_LARGE
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
    if status != OK:
        return status
    # whose rows are elsewhere
    if (header.kind != PREDICT and header.kind != REPLY) or header.flags & SHARED:
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
    if header.dtype == BOOL and not _are_flags(out.data, out.data_bytes):
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
        if not _take(&cursor, out.n, &out.status) or not _are_flags(out.status, out.n):
            return BAD_FRAME
        out.text = cursor.at
        out.text_bytes = cursor.left
        cursor.left = 0
    return OK if cursor.left == 0 else BAD_FRAME


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


# -- the Python door
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
    """CRC-32 of `data`, zlib's polynomial; go on from an earlier one with `crc`. Threads: any."""
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

    checked: adds CHECKED. It writes what it is told, so that a test can write frames that must be
    refused; `encode_rows` makes a payload from rows. Raises BAD_INPUT: more than 4 dimensions;
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
    """-> FrameHeader from the first 64 bytes of `data`; None while there are fewer. Threads: any.

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
    """-> OpenRows of a PREDICT or REPLY whose header is `header` (FrameHeader). Threads: any.

    Arrays are views of `payload` when it is bytes (else of a copy), except COMPRESSED data. Raises
    BAD_FRAME: the payload is not what the header says; TOO_LARGE: beyond a limit (output_bytes_max:
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
    """-> [(region, first row, rows), ...] of a SHARED batch whose header is `header`. Threads: any.

    Raises BAD_FRAME. Whether a region has these rows is for whoever has mapped it to say.
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
    """rows: all str, or all bytes. search: of strings, None for no LZ4 block."""
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
    """-> (dtype, payload) of str, bytes, or 1-d arrays of one dtype."""
    if all([isinstance(row, str) for row in rows]):
        return STR, _variable(rows, 1, search)
    if all([isinstance(row, bytes) for row in rows]):
        return BYTES, _variable(rows, 1, None)
    arrays = [np.asarray(row) for row in rows]
    number = _numbers.get(arrays[0].dtype)
    if number is None or any([row.dtype != arrays[0].dtype or row.ndim != 1 for row in arrays]):
        raise_for(BAD_INPUT, "rows are all str, all bytes, or 1-d arrays of one numeric dtype")
    return number, _variable([row.tobytes() for row in arrays], itemsize(number), None)


def encode_rows(int kind, rows, *, confidence=None, status=None, str text="", id=0, time_us=0,
                checked=False,
                compressed=False, search=LITERALS, sessions=None, qualifiers=None):
    """A whole PREDICT or REPLY frame of `rows`. Threads: any.

    rows: ndarray (n, *shape) of a numeric dtype, at most 4 dimensions a row; or a list of str, of
    bytes, or of 1-d arrays that differ in length. sessions: n u64. confidence: n floats.
    qualifiers: n bytes, opaque. status: n of 0 (fine) or 1 (failed), `text` says why. compressed:
    str rows travel as an LZ4 block, made by `search` (lz4.Search). Raises BAD_INPUT.
    """
    cdef int flags = 0
    if isinstance(rows, np.ndarray):
        dtype, shape, payload = _numbers.get(rows.dtype), rows.shape[1:], _padded(rows.tobytes())
        if dtype is None or rows.ndim == 0:
            raise_for(BAD_INPUT,
                      f"no rows of the wire: an array of {rows.dtype}, shape {rows.shape}")
    else:
        rows = list(rows)
        (dtype, payload), shape = _list_payload(rows, search if compressed else None), (0,)
        flags = VARIABLE | (COMPRESSED if compressed else 0)
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
