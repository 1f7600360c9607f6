"""Infer requests of one row, read where they lie. Source: kserve.github.io, "Open Inference
Protocol", and Triton's extension `binary_tensor_data`; what each member means is
frontend/inference/codec.py, which has everything that is not read here."""
from libc.string cimport memcmp, memcpy, memset

from clipper_core.http.http_head cimport NO_LENGTH
from clipper_core.http.json_rows cimport Text, json_read_i64, json_read_row
from clipper_core.http.json_value cimport json_begin_bytes, json_is_plain, json_put
from clipper_core.runtime.dtype cimport (
    BOOL, F32, F64, I16, I32, I64, I8, STR, U16, U32, U64, U8, all_finite, itemsize,
)
from clipper_core.runtime.machine cimport i64, u32
from clipper_core.wire.prediction cimport TAG_BLOB, Blob, blob_data, record_type

cdef enum:
    DIMS_MAX = 5                # of a row, and one before it
    SIZE_MAX = 1 << 30
    ID_MAX = 128                # longer ones are no names of queries

cdef struct Tensor:
    u32 rank
    u64[5] dims
    u8 dtype
    bint named, shaped
    const u8* data              # of JSON; NULL: none
    const u8* data_end
    u64 size                    # binary_data_size; NO_LENGTH: none

cdef struct Request:
    Tensor tensor
    const u8* id
    u64 id_bytes
    u32 seen                    # members, one bit each
    bint all_binary
    int this_binary             # -1: not said


# -- JSON, as far as it is needed
# --------------------------------------------------------------------------------------

cdef void _skip_blanks(Text* text) noexcept nogil:
    while text.at < text.end and (text.at[0] == 32 or text.at[0] == 10 or text.at[0] == 13
                                  or text.at[0] == 9):
        text.at += 1


cdef bint _take(Text* text, u8 mark) noexcept nogil:
    _skip_blanks(text)
    if text.at == text.end or text.at[0] != mark:
        return False
    text.at += 1
    return True


cdef bint _string(Text* text, const u8** at, u64* n) noexcept nogil:
    """Of visible ASCII, without escapes."""
    if not _take(text, 34):
        return False
    at[0] = text.at
    while text.at < text.end and 32 <= text.at[0] < 127 and text.at[0] != 34 and text.at[0] != 92:
        text.at += 1
    n[0] = <u64> (text.at - at[0])
    return _take(text, 34)


cdef bint _bool(Text* text, bint* value) noexcept nogil:
    _skip_blanks(text)
    value[0] = text.end - text.at >= 4 and memcmp(text.at, "true", 4) == 0
    if value[0]:
        text.at += 4
        return True
    if text.end - text.at >= 5 and memcmp(text.at, "false", 5) == 0:
        text.at += 5
        return True
    return False


cdef bint _is(const u8* at, u64 n, const char* word, u64 m) noexcept nogil:
    return n == m and memcmp(at, word, m) == 0


cdef bint _key(Text* text, const u8** at, u64* n) noexcept nogil:
    return _string(text, at, n) and _take(text, 58)


cdef int _next(Text* text) noexcept nogil:
    """After a member: 1: another follows, 0: the object is over, -1: neither."""
    if _take(text, 44):
        return 1
    return 0 if _take(text, 125) else -1


cdef bint _once(u32* seen, u32 bit) noexcept nogil:
    if seen[0] & bit:
        return False
    seen[0] |= bit
    return True


# -- the request
# --------------------------------------------------------------------------------------------------

cdef u8 _dtype(const u8* at, u64 n) noexcept nogil:
    """0: of none that is read here."""
    if _is(at, n, "FP64", 4):
        return F64
    if _is(at, n, "FP32", 4):
        return F32
    if _is(at, n, "INT64", 5):
        return I64
    if _is(at, n, "INT32", 5):
        return I32
    if _is(at, n, "INT16", 5):
        return I16
    if _is(at, n, "INT8", 4):
        return I8
    if _is(at, n, "UINT64", 6):
        return U64
    if _is(at, n, "UINT32", 6):
        return U32
    if _is(at, n, "UINT16", 6):
        return U16
    return U8 if _is(at, n, "UINT8", 5) else 0


cdef bint _shape(Text* text, Tensor* t) noexcept nogil:
    cdef i64 n = 0
    if not _take(text, 91):
        return False
    while t.rank < DIMS_MAX:
        _skip_blanks(text)
        if not json_read_i64(text, &n) or not 0 < n < SIZE_MAX:
            return False
        t.dims[t.rank] = <u64> n
        t.rank += 1
        if _take(text, 93):
            return True
        if not _take(text, 44):
            return False
    return False


cdef bint _data(Text* text, Tensor* t) noexcept nogil:
    """Where it lies; it is read once the type is known."""
    if not _take(text, 91):
        return False
    t.data = text.at - 1
    while text.at < text.end and text.at[0] != 93:
        if text.at[0] == 91 or text.at[0] == 34 or text.at[0] == 123:
            return False
        text.at += 1
    t.data_end = text.at + 1
    return _take(text, 93)


cdef bint _tensor_parameters(Text* text, Tensor* t) noexcept nogil:
    """Only {"binary_data_size": n}."""
    cdef const u8* key
    cdef u64 n
    cdef i64 size = 0
    if not (_take(text, 123) and _key(text, &key, &n) and _is(key, n, "binary_data_size", 16)):
        return False
    _skip_blanks(text)
    if not json_read_i64(text, &size) or size < 0:
        return False
    t.size = <u64> size
    return _take(text, 125)


cdef bint _tensor_member(Text* text, Tensor* t, u32* seen) noexcept nogil:
    cdef const u8* key
    cdef const u8* word
    cdef u64 n, m
    if not _key(text, &key, &n):
        return False
    if _is(key, n, "name", 4):
        t.named = True
        return _once(seen, 1) and _string(text, &word, &m)
    if _is(key, n, "shape", 5):
        t.shaped = True
        return _once(seen, 2) and _shape(text, t)
    if _is(key, n, "datatype", 8):
        if not (_once(seen, 4) and _string(text, &word, &m)):
            return False
        t.dtype = _dtype(word, m)
        return t.dtype != 0
    if _is(key, n, "data", 4):
        return _once(seen, 8) and _data(text, t)
    return _is(key, n, "parameters", 10) and _once(seen, 16) and _tensor_parameters(text, t)


cdef bint _tensor(Text* text, Tensor* t) noexcept nogil:
    cdef u32 seen = 0
    cdef int more = 1
    if not _take(text, 123):
        return False
    while more == 1:
        if not _tensor_member(text, t, &seen):
            return False
        more = _next(text)
    return more == 0


cdef bint _output(Text* text, Request* r) noexcept nogil:
    """[{"name": "output", "parameters": {"binary_data": ...}}]"""
    cdef const u8* key
    cdef u64 n
    cdef bint binary = False
    if not (_take(text, 91) and _take(text, 123) and _key(text, &key, &n)
            and _is(key, n, "name", 4)):
        return False
    if not (_string(text, &key, &n) and _is(key, n, "output", 6)):
        return False
    if _take(text, 44):
        if not (_key(text, &key, &n) and _is(key, n, "parameters", 10) and _take(text, 123)
                and _key(text, &key, &n)):
            return False
        if not (_is(key, n, "binary_data", 11) and _bool(text, &binary) and _take(text, 125)):
            return False
        r.this_binary = binary
    return _take(text, 125) and _take(text, 93)


cdef bint _parameters(Text* text, Request* r) noexcept nogil:
    cdef const u8* key
    cdef u64 n
    if not _take(text, 123):
        return False
    if _take(text, 125):
        return True
    return (_key(text, &key, &n) and _is(key, n, "binary_data_output", 18)
            and _bool(text, &r.all_binary)
            and _take(text, 125))


cdef bint _member(Text* text, Request* r) noexcept nogil:
    cdef const u8* key
    cdef u64 n
    if not _key(text, &key, &n):
        return False
    if _is(key, n, "inputs", 6):
        return _once(&r.seen, 1) and _take(text, 91) and _tensor(text, &r.tensor) and _take(text,
                93)
    if _is(key, n, "id", 2):
        return _once(&r.seen, 2) and _string(text, &r.id, &r.id_bytes)
    if _is(key, n, "outputs", 7):
        return _once(&r.seen, 4) and _output(text, r)
    return _is(key, n, "parameters", 10) and _once(&r.seen, 8) and _parameters(text, r)


cdef bint _request(Text* text, Request* r) noexcept nogil:
    cdef int more = 1
    if not _take(text, 123):
        return False
    while more == 1:
        if not _member(text, r):
            return False
        more = _next(text)
    _skip_blanks(text)
    return (more == 0 and text.at == text.end and r.seen & 1 and r.tensor.named and r.tensor.shaped
            and r.tensor.dtype != 0)


cdef bint _is_one_row(const Wanted* wanted, const Tensor* t) noexcept nogil:
    """Of this shape, with a first dimension of 1 or without it."""
    cdef u32 i, ahead = t.rank - wanted.rank
    if t.dtype != wanted.dtype or t.rank < wanted.rank or ahead > 1 or (ahead == 1
                                                                        and t.dims[0] != 1):
        return False
    for i in range(wanted.rank):
        if t.dims[i + ahead] != wanted.dims[i]:
            return False
    return True


cdef bint _read_data(const Wanted* wanted, const Tensor* t, u64 elements,
                     Bytes* row) noexcept nogil:
    cdef Text text
    cdef Wanted flat
    cdef u8* to
    flat.dtype, flat.rank = wanted.dtype, 1
    flat.dims[0] = elements
    text.at, text.end = t.data, t.data_end
    if elements > <u64> (text.end - text.at):
        return False
    to = row.reserve(elements * itemsize(wanted.dtype) + 8)
    if to == NULL or not json_read_row(&text, &flat, to):
        return False
    row.end += elements * itemsize(wanted.dtype)
    return text.at == text.end


cdef bint infer_read(const Wanted* wanted, bint finite, const u8* body, u64 n, u64 json_bytes,
                     Bytes* row, Bytes* tag,
                     bint* binary) noexcept nogil:
    cdef Request r
    cdef Text text
    cdef u64 elements = 1, behind
    cdef u32 i
    if json_bytes != NO_LENGTH and json_bytes > n:
        return False
    behind = n - json_bytes if json_bytes != NO_LENGTH else 0
    memset(&r, 0, sizeof(Request))
    r.tensor.size = NO_LENGTH
    r.this_binary = -1
    text.at, text.end = body, body + (n - behind)
    if not _request(&text, &r) or r.id_bytes > ID_MAX or not _is_one_row(wanted, &r.tensor):
        return False
    for i in range(wanted.rank):
        elements *= wanted.dims[i]
    row.clear()
    if r.tensor.size == NO_LENGTH:
        if r.tensor.data == NULL or behind or not _read_data(wanted, &r.tensor, elements, row):
            return False
    else:
        if (r.tensor.data != NULL or r.tensor.size != behind
            or behind != elements * itemsize(wanted.dtype)):
            return False
        row.put(body + json_bytes, behind)
        if row.lost or (finite and not all_finite(wanted.dtype, row.at(), row.size())):
            return False
    tag.clear()
    tag.put_byte(34)
    tag.put(r.id, r.id_bytes)
    tag.put_byte(34)
    binary[0] = r.this_binary if r.this_binary >= 0 else r.all_binary
    return True


# -- the answer
# --------------------------------------------------------------------------------------------------

cdef const char* _datatype(u8 dtype) noexcept nogil:
    if dtype == F64:
        return "FP64"
    if dtype == F32:
        return "FP32"
    if dtype == I64:
        return "INT64"
    if dtype == I32:
        return "INT32"
    if dtype == I16:
        return "INT16"
    if dtype == I8:
        return "INT8"
    if dtype == U64:
        return "UINT64"
    if dtype == U32:
        return "UINT32"
    if dtype == U16:
        return "UINT16"
    if dtype == U8:
        return "UINT8"
    if dtype == BOOL:
        return "BOOL"
    return NULL


cdef u8 _widened(u8 dtype) noexcept nogil:
    """Of a scalar: on its way through Python it becomes what numpy makes of a float or an int."""
    if dtype == F32 or dtype == F64:
        return F64
    return BOOL if dtype == BOOL else 0 if dtype == U64 else I64 if U8 <= dtype <= I64 else 0


cdef bint _word(const Value* value, u8* dtype, u64* word) noexcept nogil:
    """A scalar as its widened type has it."""
    cdef Blob* blob
    cdef u8 own = value.tag
    cdef float single
    cdef double real
    cdef u64 raw = value.word
    if own == TAG_BLOB:
        blob = <Blob*> value.word
        own, raw = blob.dtype, 0
        if blob.nbytes > 8 or blob.nbytes != itemsize(own):
            return False
        memcpy(&raw, blob_data(blob), blob.nbytes)
    dtype[0] = _widened(own)
    word[0] = raw
    if own == F32:
        memcpy(&single, &raw, 4)
        real = single
        memcpy(word, &real, 8)
    elif own == I8:
        word[0] = <u64> <i64> <signed char> raw
    elif own == I16:
        word[0] = <u64> <i64> <short> raw
    elif own == I32:
        word[0] = <u64> <i64> <int> raw
    elif own == BOOL:
        word[0] = raw & 1
    return dtype[0] != 0


cdef bint infer_write(Bytes* out, const Value* value, bint binary, u64* json_bytes,
                      LargeBody* large) noexcept nogil:
    cdef Blob* blob = <Blob*> value.word if value.tag == TAG_BLOB else NULL
    cdef bint array = blob != NULL and blob.rank != 0
    cdef u8 dtype = 0
    cdef u64 word = 0, size
    cdef const void* data = &word
    cdef Bytes* after = out if large == NULL else &large.tail
    cdef u32 i
    if blob != NULL and (blob.qualifier_bytes or (blob.dtype == STR and binary)
                         or record_type(blob)):
        return False
    if array:
        dtype, data, size = blob.dtype, blob_data(blob), blob.nbytes
    elif blob == NULL or blob.dtype != STR:
        if not _word(value, &dtype, &word):
            return False
        size = itemsize(dtype)
    else:
        size = 0
    if (size or array) and (_datatype(dtype) == NULL
                            or not (json_is_plain(blob) if array
                                    else all_finite(dtype, data, size))):
        return False
    out.put_text("\"outputs\":[{\"name\":\"output\",\"datatype\":\"")
    if size or array:
        out.put_text(_datatype(dtype))
    else:
        out.put_text("BYTES")
    out.put_text("\",\"shape\":[1")
    if array:
        for i in range(blob.rank):
            out.put_byte(44)
            out.put_decimal(blob.dims[i])
    if not binary:
        out.put_text("],\"data\":[")
        if not json_put(out, value, True, large):
            return False
        after.put_text("]}]}")
        json_bytes[0] = 0
        return True
    out.put_text("],\"parameters\":{\"binary_data_size\":")
    out.put_decimal(size)
    out.put_text("}}]}")
    json_bytes[0] = out.size()
    if large == NULL:
        out.put(data, size)
    else:
        json_begin_bytes(&large.cursor, data, size)
    return True
