"""Answers prediction requests: reads the body of the request, and writes the response.

The body may only be `{"input": ROW}`, or `{"input": ROW, "user": NAME}`. The counters are the same
words of memory that serving/tally and metrics/http_counts use, so they include all requests,
whether the core or Python answered.
"""
cimport numpy as cnp
from libc.math cimport rint
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

import json

import numpy as np

from clipper_core.cache.clock_cache cimport cache_lookup, key_of
from clipper_core.http.http_head cimport NO_LENGTH
from clipper_core.http.json_value cimport (
    LARGE_VALUE_BYTES, Text, json_begin_bytes, json_count, json_f64, json_is_plain, json_put,
    json_read_f64, json_read_i64, json_read_row, large_body, large_body_chunk, large_body_drop,
    value_belief,
)
from clipper_core.http.key_table cimport (
    NO_KEY, TOO_MANY, Admission, KeyTable, key_find, key_refusal,
)
from clipper_core.http.trace_parent cimport (
    TRACE_PARENT_BYTES, span_new, trace_parent_is_sampled, trace_parent_is_valid,
    trace_parent_put,
)
from clipper_core.learning.answer_window cimport (
    RING_USER_MAX, AnswerOwner, AnswerWindow, ring_add,
)
from clipper_core.results.completion cimport (
    block_drop, completion_notify_outside, slot_boxes, slot_fill, slot_state, slot_try_cancel,
    slots_claim,
)
from clipper_core.results.future cimport Future, future_at_once, future_new
from clipper_core.runtime.dtype cimport (
    ANY, BOOL, BYTES, F16, F32, F64, I16, I32, I64, I8, STR, U16, U32, U64, U8, all_finite,
    itemsize,
)
from clipper_core.runtime.histogram cimport count, histogram_record
from clipper_core.runtime.machine cimport (
    acquire, aligned_new, i64, monotonic_us, relaxed, release,
)
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.spin_lock cimport spin_lock, spin_unlock
from clipper_core.runtime.status cimport (
    CANCELLED, CLOSED, NO_MEMORY, OK, PENDING, Status, raise_for,
)
from clipper_core.scheduling.bands cimport BANDS, PRIORITIES, PRIORITY_USUAL, band_of
from clipper_core.scheduling.lane cimport submitter_enter, submitter_leave
from clipper_core.scheduling.submit cimport (
    lane_class, lane_prepare, lanes_there, row_bytes_end, row_refused, row_submit,
)
from clipper_core.wire.prediction cimport (
    RANK_MAX, TAG_BLOB, TAG_NONE, Blob, blob_data, blob_drop, blob_room, record_type, value_drop,
)

# -- Infer requests, read without a copy. Source: kserve.github.io, "Open Inference
# Protocol", and Triton's extension `binary_tensor_data`; frontend/inference/codec.py handles every
# request that is not read here.

cdef enum:
    DIMS_MAX = 5                # of a row, and one before it
    DIMENSION_MAX = 1 << 30
    ID_MAX = 128                # longer request ids are not plain

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
    int this_binary             # -1: not given
    InferParameters parameters


# -- the JSON that is needed here
# --------------------------------------------------------------------------------------

cdef inline void _skip_blanks(Text* text) noexcept nogil:
    while text.at < text.end and (text.at[0] == 32 or text.at[0] == 10 or text.at[0] == 13
                                  or text.at[0] == 9):
        text.at += 1


cdef bint _accept(Text* text, u8 mark) noexcept nogil:
    _skip_blanks(text)
    if text.at == text.end or text.at[0] != mark:
        return False
    text.at += 1
    return True


cdef bint _string(Text* text, const u8** at, u64* n) noexcept nogil:
    """Read a string of visible ASCII without escapes."""
    if not _accept(text, 34):
        return False
    at[0] = text.at
    while text.at < text.end and 32 <= text.at[0] < 127 and text.at[0] != 34 and text.at[0] != 92:
        text.at += 1
    n[0] = <u64> (text.at - at[0])
    if text.at == text.end or text.at[0] != 34:
        return False
    text.at += 1
    return True


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
    return _string(text, at, n) and _accept(text, 58)


cdef int _next(Text* text) noexcept nogil:
    """Read what follows a member: 1 for another member, 0 for the end of the object, -1 for
    neither."""
    if _accept(text, 44):
        return 1
    return 0 if _accept(text, 125) else -1


cdef bint _once(u32* seen, u32 bit) noexcept nogil:
    if seen[0] & bit:
        return False
    seen[0] |= bit
    return True


# -- the request
# --------------------------------------------------------------------------------------------------

cdef u8 tensor_dtype(const u8* at, u64 n) noexcept nogil:
    """Return the dtype of a name; 0 if it is not supported here."""
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
    if not _accept(text, 91):
        return False
    while t.rank < DIMS_MAX:
        _skip_blanks(text)
        if not json_read_i64(text, &n) or not 0 < n < DIMENSION_MAX:
            return False
        t.dims[t.rank] = <u64> n
        t.rank += 1
        if _accept(text, 93):
            return True
        if not _accept(text, 44):
            return False
    return False


cdef bint _data(Text* text, Tensor* t) noexcept nogil:
    """Return where the value is; it is read once the type is known."""
    if not _accept(text, 91):
        return False
    t.data = text.at - 1
    while text.at < text.end and text.at[0] != 93:
        if text.at[0] == 91 or text.at[0] == 34 or text.at[0] == 123:
            return False
        text.at += 1
    t.data_end = text.at + 1
    return _accept(text, 93)


cdef bint _tensor_parameters(Text* text, Tensor* t) noexcept nogil:
    """Read the parameters of a tensor: only {"binary_data_size": n}."""
    cdef const u8* key
    cdef u64 n
    cdef i64 size = 0
    if not (_accept(text, 123) and _key(text, &key, &n) and _is(key, n, "binary_data_size", 16)):
        return False
    _skip_blanks(text)
    if not json_read_i64(text, &size) or size < 0:
        return False
    t.size = <u64> size
    return _accept(text, 125)


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
        t.dtype = tensor_dtype(word, m)
        return t.dtype != 0
    if _is(key, n, "data", 4):
        return _once(seen, 8) and _data(text, t)
    return _is(key, n, "parameters", 10) and _once(seen, 16) and _tensor_parameters(text, t)


cdef bint _tensor(Text* text, Tensor* t) noexcept nogil:
    cdef u32 seen = 0
    cdef int more = 1
    if not _accept(text, 123):
        return False
    while more == 1:
        if not _tensor_member(text, t, &seen):
            return False
        more = _next(text)
    return more == 0


cdef bint _output(Text* text, Request* r) noexcept nogil:
    """Read the outputs: [{"name": "output", "parameters": {"binary_data": ...}}]."""
    cdef const u8* key
    cdef u64 n
    cdef bint binary = False
    if not (_accept(text, 91) and _accept(text, 123) and _key(text, &key, &n)
            and _is(key, n, "name", 4)):
        return False
    if not (_string(text, &key, &n) and _is(key, n, "output", 6)):
        return False
    if _accept(text, 44):
        if not (_key(text, &key, &n) and _is(key, n, "parameters", 10) and _accept(text, 123)
                and _key(text, &key, &n)):
            return False
        if not (_is(key, n, "binary_data", 11) and _bool(text, &binary) and _accept(text, 125)):
            return False
        r.this_binary = binary
    return _accept(text, 125) and _accept(text, 93)


cdef bint _parameters(Text* text, Request* r) noexcept nogil:
    cdef const u8* key
    cdef u64 n
    cdef u32 seen = 0
    cdef int more = 1
    if not _accept(text, 123):
        return False
    if _accept(text, 125):
        return True
    while more == 1:
        if not (_key(text, &key, &n) and _parameter(text, key, n, &seen, r)):
            return False
        more = _next(text)
    return more == 0


cdef bint _parameter(Text* text, const u8* key, u64 n, u32* seen, Request* r) noexcept nogil:
    """Read the value of a parameter. Each comes once."""
    cdef InferParameters* said = &r.parameters
    if _is(key, n, "binary_data_output", 18):
        return _once(seen, 1) and _bool(text, &r.all_binary)
    if _is(key, n, "timeout", 7):
        return _once(seen, 2) and _whole(text, &said.timeout_us)
    if _is(key, n, "salt", 4):
        return _once(seen, 4) and _whole(text, &said.salt)
    if _is(key, n, "priority", 8):
        return _once(seen, 16) and _whole(text, &said.priority)
    return (_is(key, n, "user", 4) and _once(seen, 8)
            and _string(text, &said.user, &said.user_bytes))


cdef bint _whole(Text* text, u64* value) noexcept nogil:
    """Read a whole number from 0."""
    cdef i64 found = 0
    _skip_blanks(text)
    if not json_read_i64(text, &found) or found < 0:
        return False
    value[0] = <u64> found
    return True


cdef bint _member(Text* text, Request* r) noexcept nogil:
    cdef const u8* key
    cdef u64 n
    if not _key(text, &key, &n):
        return False
    if _is(key, n, "inputs", 6):
        return (_once(&r.seen, 1) and _accept(text, 91) and _tensor(text, &r.tensor)
                and _accept(text, 93))
    if _is(key, n, "id", 2):
        return _once(&r.seen, 2) and _string(text, &r.id, &r.id_bytes)
    if _is(key, n, "outputs", 7):
        return _once(&r.seen, 4) and _output(text, r)
    return _is(key, n, "parameters", 10) and _once(&r.seen, 8) and _parameters(text, r)


cdef bint _request(Text* text, Request* r) noexcept nogil:
    cdef int more = 1
    if not _accept(text, 123):
        return False
    while more == 1:
        if not _member(text, r):
            return False
        more = _next(text)
    _skip_blanks(text)
    return (more == 0 and text.at == text.end and r.seen & 1 and r.tensor.named and r.tensor.shaped
            and r.tensor.dtype != 0)


cdef u64 tensor_rows(const Wanted* wanted, u8 dtype, u32 rank, const u64* dims) noexcept nogil:
    cdef u32 i, ahead = rank - wanted.rank
    if dtype != wanted.dtype or rank < wanted.rank or ahead > 1:
        return 0
    for i in range(wanted.rank):
        if dims[i + ahead] != wanted.dims[i]:
            return 0
    return dims[0] if ahead == 1 else 1


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


cdef u32 infer_read(const Wanted* wanted, bint finite, const u8* body, u64 n, u64 json_bytes,
                    u32 rows_max, Bytes* rows, Bytes* tag, bint* binary,
                    InferParameters* parameters) noexcept nogil:
    cdef Request r
    cdef Text text
    cdef u64 elements, behind, n_rows
    cdef u32 i
    if json_bytes != NO_LENGTH and json_bytes > n:
        return 0
    behind = n - json_bytes if json_bytes != NO_LENGTH else 0
    memset(&r, 0, sizeof(Request))
    r.tensor.size = NO_LENGTH
    r.this_binary = -1
    text.at, text.end = body, body + (n - behind)
    if not _request(&text, &r) or r.id_bytes > ID_MAX:
        return 0
    n_rows = tensor_rows(wanted, r.tensor.dtype, r.tensor.rank, r.tensor.dims)
    if not 0 < n_rows <= rows_max:
        return 0
    elements = n_rows
    for i in range(wanted.rank):
        elements *= wanted.dims[i]
    rows.clear()
    if r.tensor.size == NO_LENGTH:
        if r.tensor.data == NULL or behind or not _read_data(wanted, &r.tensor, elements, rows):
            return 0
    else:
        if (r.tensor.data != NULL or r.tensor.size != behind
            or behind != elements * itemsize(wanted.dtype)):
            return 0
        rows.put(body + json_bytes, behind)
        if rows.lost or (finite and not all_finite(wanted.dtype, rows.at(), rows.size())):
            return 0
    tag.clear()
    tag.put_byte(34)
    tag.put(r.id, r.id_bytes)
    tag.put_byte(34)
    binary[0] = r.this_binary if r.this_binary >= 0 else r.all_binary
    parameters[0] = r.parameters
    return <u32> n_rows


# -- the answer
# --------------------------------------------------------------------------------------------------

cdef const char* tensor_datatype(u8 dtype) noexcept nogil:
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
    """Return the type of a scalar in an answer: the type that NumPy gives a float or an int."""
    if dtype == F32 or dtype == F64:
        return F64
    return BOOL if dtype == BOOL else 0 if dtype == U64 else I64 if U8 <= dtype <= I64 else 0


cdef bint scalar_word(const Value* value, u8* dtype, u64* word) noexcept nogil:
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


cdef bint infer_write(Bytes* out, const Value* value, bint stacked, bint binary, u64* json_bytes,
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
        if not scalar_word(value, &dtype, &word):
            return False
        size = itemsize(dtype)
    else:
        size = 0
    if (size or array) and (tensor_datatype(dtype) == NULL
                            or not (json_is_plain(blob) if array
                                    else all_finite(dtype, data, size))):
        return False
    out.put_text("\"outputs\":[{\"name\":\"output\",\"datatype\":\"")
    if size or array:
        out.put_text(tensor_datatype(dtype))
    else:
        out.put_text("BYTES")
    out.put_text("\",\"shape\":[")
    if not stacked:
        out.put_byte(49)
    if array:
        for i in range(blob.rank):
            if i or not stacked:
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


cdef Blob* _room_for(const Value* first, u32 n, u64* item) noexcept nogil:
    """Return an empty array for n outputs like the first one, which has `item` bytes. NULL: they
    cannot be one array, or there is no memory."""
    cdef Blob* one = <Blob*> first.word if first.tag == TAG_BLOB else NULL
    cdef Blob* found
    cdef u8 dtype = 0
    cdef u64 word = 0
    cdef u32 rank = 0, i
    if one != NULL and one.rank:
        dtype = one.dtype
        rank = one.rank
        item[0] = one.nbytes
    elif (one == NULL or one.dtype != STR) and scalar_word(first, &dtype, &word):
        item[0] = itemsize(dtype)
    if dtype == 0 or rank == RANK_MAX:
        return NULL
    found = blob_room(n * item[0])
    if found == NULL:
        return NULL
    found.dtype = dtype
    found.rank = <u8> (rank + 1)
    found.dims[0] = n
    for i in range(rank):
        found.dims[i + 1] = one.dims[i]
    return found


cdef bint _put_row(Blob* into, u32 row, u64 item, const Value* value) noexcept nogil:
    """Copy an output to its row of the array. False: it is of another type or shape."""
    cdef Blob* one = <Blob*> value.word if value.tag == TAG_BLOB else NULL
    cdef u8 dtype = 0
    cdef u64 word = 0
    cdef u32 i
    cdef u8* to = <u8*> blob_data(into) + row * item
    if one != NULL and (one.qualifier_bytes or record_type(one)):
        return False
    if one == NULL or one.rank == 0:
        if into.rank != 1 or (one != NULL and one.dtype == STR):
            return False
        if not scalar_word(value, &dtype, &word) or dtype != into.dtype:
            return False
        memcpy(to, &word, item)
        return True
    if one.rank + 1 != into.rank or one.dtype != into.dtype or one.nbytes != item:
        return False
    for i in range(one.rank):
        if one.dims[i] != into.dims[i + 1]:
            return False
    memcpy(to, blob_data(one), item)
    return True


# -- Routes, and the state of a query.
cdef object I64_END = 1 << 63

cdef enum:
    ROW_BYTES_MAX = 16777216    # longer rows are Python's
    USER_BYTES_MAX = 512        # longer names are Python's
    NAMES_MAX = 1024            # sets of models of which the JSON is kept
    AUTHORIZATION_MAX = 1024    # bytes; Python hashes longer ones


# -- reading
# --------------------------------------------------------------------------------------------------

cdef inline bint _take(Text* text, const char* word, u64 n) noexcept nogil:
    """Read a token, with blanks before it."""
    _skip_blanks(text)
    if <u64> (text.end - text.at) < n or memcmp(text.at, word, n) != 0:
        return False
    text.at += n
    return True


cdef bint _read_row(RouteState* r, Text* text, Bytes* row) noexcept nogil:
    """Read a row from JSON to the beginning of `row`."""
    cdef Wanted wanted = r.wanted
    cdef u64 elements = 1
    cdef u32 i
    cdef u8* to
    _skip_blanks(text)
    if r.variable:
        wanted.dims[0] = json_count(text)
    for i in range(wanted.rank):
        elements *= wanted.dims[i]
    if elements > <u64> (text.end - text.at) or elements * itemsize(wanted.dtype) > ROW_BYTES_MAX:
        return False            # before memory is allocated: every number takes a digit
    row.clear()
    to = row.reserve(elements * itemsize(wanted.dtype) + 8)
    if to == NULL or not json_read_row(text, &wanted, to):
        return False
    row.end += elements * itemsize(wanted.dtype)
    return True


cdef bint query_set_slo(Query* q, double slo_ms) noexcept nogil:
    if not 0.0 < slo_ms <= q.route.slo_ms_max:
        return False
    q.fields.slo_us = max(<u64> rint(slo_ms * 1000.0), <u64> 1)
    return True


cdef bint _read_slo(Query* q, Text* text) noexcept nogil:
    cdef double slo_ms = 0.0
    _skip_blanks(text)
    return json_read_f64(text, &slo_ms) and query_set_slo(q, slo_ms)


cdef bint _read_user(Query* q, Text* text) noexcept nogil:
    cdef const u8* name = NULL
    cdef u64 n = 0
    if not _string(text, &name, &n) or n > USER_BYTES_MAX or (n == 0 and q.route.read_only):
        return False
    q.user.put(name, n)
    return not q.user.lost


cdef inline bint _predict_member(Query* q, Text* text, u32* seen, Bytes* row) noexcept nogil:
    """Read a member of a predict request. Each comes once."""
    if _take(text, "\"input\"", 7):
        return _once(seen, 1) and _take(text, ":", 1) and _read_row(q.route, text, row)
    if q.route.form != PREDICT:
        return False
    if _take(text, "\"user\"", 6):
        return _once(seen, 2) and _accept(text, 58) and _read_user(q, text)
    if _take(text, "\"slo_ms\"", 8):
        return _once(seen, 4) and _accept(text, 58) and _read_slo(q, text)
    if _take(text, "\"priority\"", 10):
        return (_once(seen, 16) and _accept(text, 58) and _whole(text, &q.fields.priority)
                and q.fields.priority != 0)
    return (_take(text, "\"salt\"", 6) and _once(seen, 8) and _accept(text, 58)
            and _whole(text, &q.fields.salt))


cdef bint _read_predict(Query* q, const u8* body, u64 n, Bytes* row) noexcept nogil:
    cdef Text text
    cdef u32 seen = 0
    text.at, text.end = body, body + n
    if not _take(&text, "{", 1):
        return False
    while True:
        if not _predict_member(q, &text, &seen, row):
            return False
        if _take(&text, "}", 1):
            break
        if not _take(&text, ",", 1):
            return False
    _skip_blanks(&text)
    return seen & 1 and text.at == text.end


cdef bint _label_number(Text* text) noexcept nogil:
    """Read a number: a whole one of at most 18 digits, or one with a point or an exponent."""
    cdef const u8* at = text.at
    cdef bint negative = at < text.end and at[0] == 45
    cdef bint is_real = False
    cdef double real = 0.0
    cdef i64 whole = 0
    if json_read_i64(text, &whole):
        return whole != 0 or not negative
    if not json_read_f64(text, &real):
        return False
    while at < text.at:
        is_real = is_real or at[0] == 46 or (at[0] | 32) == 101
        at += 1
    return is_real


cdef bint _read_label(Text* text, Bytes* label) noexcept nogil:
    """Read a label: a text, a number or a truth value. Its JSON is kept."""
    cdef const u8* start
    cdef const u8* word = NULL
    cdef u64 n = 0
    cdef bint truth = False, is_read
    _skip_blanks(text)
    start = text.at
    if start < text.end and start[0] == 34:
        is_read = _string(text, &word, &n)
    else:
        is_read = _bool(text, &truth) or _label_number(text)
    label.clear()
    label.put(start, <u64> (text.at - start))
    return is_read and not label.lost


cdef bint _feedback_member(Query* q, Text* text, u32* seen, Bytes* label) noexcept nogil:
    cdef const u8* id = NULL
    cdef u64 n = 0
    if _take(text, "\"label\"", 7):
        return _once(seen, 1) and _accept(text, 58) and _read_label(text, label)
    if not (_take(text, "\"id\"", 4) and _once(seen, 2) and _accept(text, 58)
            and _string(text, &id, &n)) or n > ID_MAX:
        return False
    q.tag.put(id, n)
    return not q.tag.lost


cdef bint _read_feedback(Query* q, const u8* body, u64 n, Bytes* label) noexcept nogil:
    """Read `{"id": ID, "label": LABEL}`."""
    cdef Text text
    cdef u32 seen = 0
    cdef int more = 1
    text.at, text.end = body, body + n
    q.tag.clear()
    if not _accept(&text, 123):
        return False
    while more == 1:
        if not _feedback_member(q, &text, &seen, label):
            return False
        more = _next(&text)
    _skip_blanks(&text)
    return more == 0 and seen == 3 and text.at == text.end


cdef bint _read_deadline(Query* q, const Head* head) noexcept nogil:
    """Read Clipper-Deadline-Ms, which is of infer requests without a timeout."""
    cdef Text text
    cdef double slo_ms = 0.0
    if head.deadline_bytes == 0:
        return True
    text.at, text.end = head.deadline, head.deadline + head.deadline_bytes
    return json_read_f64(&text, &slo_ms) and text.at == text.end and query_set_slo(q, slo_ms)


cdef bint query_read_trace(Query* q, const TableState* table, const u8* trace, u64 n,
                           u64* draws) noexcept nogil:
    q.fields.traced = trace_parent_is_valid(trace, n)
    if not q.fields.traced:
        return True
    memcpy(q.fields.trace, trace, TRACE_PARENT_BYTES)
    q.fields.span = span_new(draws)
    return not (table.logs and trace_parent_is_sampled(trace))


# -- submitting
# --------------------------------------------------------------------------------------------------

cdef u64 _number(CompletionState* d) noexcept nogil:
    """Return the number of an answer without a slot."""
    cdef u64 number
    spin_lock(d.lock)
    number = d.next_id
    d.next_id += 1
    spin_unlock(d.lock)
    return number


cdef bint _submit(Query* q, const u8* row, u64 nbytes, const Key* key, u32 slot) noexcept nogil:
    """Submit a row. Return False if it was refused: its slot says why."""
    cdef EngineState* e = q.route.engine
    cdef Status status = CLOSED
    cdef Value value
    if submitter_enter(e.lanes[0], e.refusing):
        status = row_submit(e, q.route.model, row, nbytes, key, q.fields.salt,
                            q.fields.slo_us, q.fields.band, q.began_us, q.block, slot, 0)
        submitter_leave(e.lanes[0])
    if status == OK:
        return True
    value.word = 0
    value.tag = TAG_NONE
    row_refused(q.route.model, status, q.fields.slo_us, q.fields.band, q.began_us, &value)
    _fill(q, slot, status, &value)
    return False


cdef void _fill(Query* q, u32 slot, Status status, Value* value) noexcept nogil:
    """End a slot whose row was not submitted."""
    slot_fill(q.route.engine.completion, q.block, slot, status, value)
    block_drop(q.route.engine.completion, q.block, 1)


cdef bint _is_cached(Query* q, const u8* row, u64 nbytes, Key* key, Value* value) noexcept nogil:
    """Return whether the cache has a row's output, of which `value` gets a reference."""
    cdef RouteState* r = q.route
    if not r.model.cached:
        return False
    key[0] = key_of(r.engine.cache, r.model.spec.uid, q.fields.salt, row, nbytes)
    if not cache_lookup(r.engine.cache, key, value):
        return False
    count(&r.model.tally.hits, 1)
    return True


cdef QueryOutcome _answer_or_submit(Query* q, const Bytes* row) noexcept nogil:
    cdef RouteState* r = q.route
    cdef Key key
    if row.size() >= row_bytes_end(r.engine):
        return OTHER            # too large: Python reports it
    if _is_cached(q, row.at(), row.size(), &key, &q.value):
        count(r.queries, 1)
        q.number = _number(r.engine.completion)
        return VALUE
    if not _claim(q):
        return OTHER
    return OPEN if _submit(q, row.at(), row.size(), &key, q.slot) else ENDED


cdef bint _claim(Query* q) noexcept nogil:
    """Claim a slot for each row. False: Python makes the lane of the SLO, or reports that there is
    no memory."""
    cdef RouteState* r = q.route
    if not r.lanes[q.fields.band].load(acquire) >> lane_class(q.fields.slo_us) & 1:
        return False
    if not slots_claim(r.engine.completion, q.rows, &q.block, &q.slot):
        return False
    count(r.queries, q.rows)
    q.number = q.block.first_id + q.slot
    return True


cdef QueryOutcome _answer_or_submit_rows(Query* q, const Bytes* rows) noexcept nogil:
    """Answer each row from the cache, or submit it."""
    cdef Key key
    cdef Value value
    cdef const u8* row = rows.at()
    cdef u64 nbytes = rows.size() // q.rows
    cdef u32 i
    cdef bint is_open = False
    if nbytes >= row_bytes_end(q.route.engine) or not _claim(q):
        return OTHER
    for i in range(q.rows):
        if _is_cached(q, row, nbytes, &key, &value):
            _fill(q, q.slot + i, OK, &value)
        elif _submit(q, row, nbytes, &key, q.slot + i):
            is_open = True
        row += nbytes
    return OPEN if is_open else ENDED


cdef bint _is_quotable(const Head* head) noexcept nogil:
    cdef u32 i
    for i in range(head.id_bytes):
        if head.id[i] == 34 or head.id[i] == 92:
            return False
    return True


cdef QueryOutcome _only_read(Query* q, const Bytes* rows) noexcept nogil:
    """Keep what the event loop's thread needs to schedule the query."""
    if rows.size() // q.rows >= row_bytes_end(q.route.engine):
        return OTHER            # too large: Python reports it
    return OTHER if q.fields.salt else READ


cdef inline bint _is_read_only(Query* q) noexcept nogil:
    """Return whether the event loop's thread schedules the query."""
    cdef RouteState* r = q.route
    return r.read_only or q.user.size() > (RING_USER_MAX if r.takes_users else 0)


cdef bint query_set_parameters(Query* q, const InferParameters* said) noexcept nogil:
    if said.user_bytes > (RING_USER_MAX if q.route.takes_users else 0):
        return False
    q.fields.salt = said.salt
    q.fields.priority = said.priority
    q.user.put(said.user, said.user_bytes)
    return _set_band(q) and (said.timeout_us == 0
                             or query_set_slo(q, <double> said.timeout_us / 1000.0))


cdef bint _set_band(Query* q) noexcept nogil:
    """Set the band of the rows, by the key, the request and the application. False: Python refuses
    the priority that the request asks for."""
    cdef u32 usual = q.standing.priority if q.standing.priority else q.route.priority
    cdef u64 priority = q.fields.priority if q.fields.priority else usual
    if priority > PRIORITIES or (priority < usual and not q.standing.is_free):
        return False
    q.fields.band = band_of(q.standing.share, <u32> priority)
    return True


cdef bint _read_infer(Query* q, const Head* head, const u8* body, Bytes* rows) noexcept nogil:
    cdef RouteState* r = q.route
    cdef InferParameters said
    cdef bint binary = False
    if not _is_quotable(head):
        return False
    q.rows = infer_read(&r.wanted, r.model.finite, body, head.body_bytes, head.json_bytes,
                        r.rows_max, rows, &q.tag, &binary, &said)
    if q.rows == 0:
        return False
    q.binary = binary
    if not query_set_parameters(q, &said):
        return False
    return said.timeout_us or _read_deadline(q, head)


cdef void query_begin(Query* q) noexcept nogil:
    q.fields.slo_us = q.route.slo_us
    q.fields.salt = q.fields.priority = 0
    q.fields.band = 0
    q.fields.traced = False
    q.user.clear()
    q.rows = 1
    q.block = NULL
    q.value.word = 0
    q.value.tag = TAG_NONE


cdef QueryOutcome query_answer_or_submit(Query* q, const Bytes* rows) noexcept nogil:
    if _is_read_only(q):
        return _only_read(q, rows)
    if q.rows != 1:
        return _answer_or_submit_rows(q, rows)
    return _answer_or_submit(q, rows)


cdef QueryOutcome query_submit(Query* q, const TableState* table, const Head* head,
                               const u8* body, Bytes* rows, u64* draws) noexcept nogil:
    cdef RouteState* r = q.route
    query_begin(q)
    if head.trace != NULL and not query_read_trace(q, table, head.trace, head.trace_bytes, draws):
        return OTHER
    if r.form == INFER:
        if not _read_infer(q, head, body, rows):
            return OTHER
    elif head.json_bytes != NO_LENGTH:
        return OTHER
    elif r.form == FEEDBACK:
        if not _read_feedback(q, body, head.body_bytes, rows):
            return OTHER
    elif not (_read_predict(q, body, head.body_bytes, rows) and _set_band(q)):
        return OTHER
    q.fields.id_bytes = head.id_bytes
    if head.id_bytes:
        memcpy(q.fields.id, head.id, head.id_bytes)
    if r.form == FEEDBACK:
        return READ
    return query_answer_or_submit(q, rows)


cdef CompletionState* query_home(const Query* q) noexcept nogil:
    return q.route.engine.completion


cdef u32 query_first_open(const Query* q, u32 at) noexcept nogil:
    while at < q.slot + q.rows and slot_state(q.block[0], at) != PENDING:
        at += 1
    return at


cdef void query_cancel(Query* q) noexcept nogil:
    cdef CompletionState* d = q.route.engine.completion
    cdef u32 slot
    for slot in range(q.slot, q.slot + q.rows):
        if slot_try_cancel(q.block[0], slot, CANCELLED):
            d.answered.fetch_add(1, relaxed)
            completion_notify_outside(d, slot_boxes(q.block[0], slot))


cdef void query_drop(Query* q) noexcept nogil:
    """Drop a query, like a future that is released."""
    cdef CompletionState* d = q.route.engine.completion
    cdef u32 slot
    cdef u8 state
    cdef Value value
    value_drop(&q.value)
    if q.block == NULL:
        return
    for slot in range(q.slot, q.slot + q.rows):
        state = q.block.state[slot].load(relaxed)
        if state != PENDING and state != CANCELLED and q.block.tag[slot] == TAG_BLOB:
            value.word = q.block.word[slot]
            value.tag = TAG_BLOB
            value_drop(&value)
            q.block.tag[slot] = TAG_NONE
    block_drop(d, q.block, q.rows)
    q.block = NULL


# -- answering
# --------------------------------------------------------------------------------------------------

cdef u32 query_row(const Query* q, u32 row, Value* value) noexcept nogil:
    cdef u32 slot = q.slot + row
    if q.block == NULL:
        value[0] = q.value
        return 0
    value.word = q.block.word[slot]
    value.tag = q.block.tag[slot]
    return q.block.latency_us[slot]


cdef bint query_is_answered(const Query* q, u32 row) noexcept nogil:
    return q.block == NULL or slot_state(q.block[0], q.slot + row) == OK


cdef bint query_stack(const Query* q, Value* stacked) noexcept nogil:
    cdef Value value
    cdef Blob* found
    cdef u64 item = 0
    cdef u32 i
    for i in range(q.rows):
        if not query_is_answered(q, i):
            return False
        query_row(q, i, &value)
        if value_belief(&value) < q.route.confidence_min:
            return False
    query_row(q, 0, &value)
    found = _room_for(&value, q.rows, &item)
    if found == NULL:
        return False
    stacked.word = <u64> found
    stacked.tag = TAG_BLOB
    for i in range(q.rows):
        query_row(q, i, &value)
        if not _put_row(found, i, item, &value):
            value_drop(stacked)
            return False
    return True


cdef bint _predicted(Query* q, const Value* value, double belief, u32 latency_us,
                     Bytes* body, LargeBody* large) noexcept nogil:
    cdef Bytes* after = body if large == NULL else &large.tail
    body.put_text("{\"id\":\"")
    body.put(q.route.node.at(), q.route.node.size())
    body.put_hex(q.number)
    body.put_text("\",\"output\":")
    if not json_put(body, value, False, large):
        return False
    after.put_text(",\"confidence\":")
    json_f64(after, belief)
    after.put_text(",\"default\":false,\"reason\":\"\",\"models\":")
    after.put(q.route.models.at(), q.route.models.size())
    after.put_text(",\"missing\":[],\"agreement\":1.0,\"latency_us\":")
    after.put_decimal(latency_us)
    after.put_byte(125)
    return True


cdef bint _old(Query* q, const Value* value, Bytes* body, LargeBody* large) noexcept nogil:
    body.put_text("{\"query_id\":")
    body.put_decimal(q.number)
    body.put_text(",\"output\":")
    if not json_put(body, value, False, large):
        return False
    (body if large == NULL else &large.tail).put_text(",\"default\":false}")
    return True


cdef void _put_own(Query* q, Bytes* body) noexcept nogil:
    """Write the caller's id of the query, as JSON."""
    if q.fields.id_bytes == 0:
        body.put(q.tag.at(), q.tag.size())
        return
    body.put_byte(34)
    body.put(q.fields.id, q.fields.id_bytes)
    body.put_byte(34)


cdef bint _inferred(Query* q, const Value* value, double belief, u64* json_bytes,
                    Bytes* body, LargeBody* large) noexcept nogil:
    body.put(q.route.head.at(), q.route.head.size())
    body.put(q.tag.at(), q.tag.size())
    body.put_text(",\"parameters\":{\"prediction_id\":\"")
    body.put(q.route.node.at(), q.route.node.size())
    body.put_hex(q.number)
    body.put_text("\",\"confidence\":")
    json_f64(body, belief)
    if q.fields.id_bytes or q.tag.size() > 2:
        body.put_text(",\"request_id\":")
        _put_own(q, body)
    body.put_text("},")
    return infer_write(body, value, False, q.binary, json_bytes, large)


cdef bint _inferred_rows(Query* q, const Value* stacked, u64* json_bytes,
                         Bytes* body, LargeBody* large) noexcept nogil:
    body.put(q.route.head.at(), q.route.head.size())
    body.put(q.tag.at(), q.tag.size())
    body.put_byte(44)
    return infer_write(body, stacked, True, q.binary, json_bytes, large)


cdef void _put_id(Query* q, const Bytes* made, Bytes* out) noexcept nogil:
    if q.fields.id_bytes:
        out.put(q.fields.id, q.fields.id_bytes)
    elif q.route.form == PREDICT:
        out.put(q.route.node.at(), q.route.node.size())
        out.put_hex(q.number)
    else:
        out.put(made.at(), made.size())


cdef inline void _count_row(Query* q, u32 row, u64 now_us) noexcept nogil:
    """Record how long a row took, and keep its answer for feedback."""
    cdef RouteState* r = q.route
    cdef Value value
    histogram_record(r.took, query_row(q, row, &value))
    if r.window != NULL:
        ring_add(r.window, q.number + row, r.owner, q.user.at(), <u32> q.user.size(), &value,
                 now_us)


cdef void query_count(Query* q, u64 now_us) noexcept nogil:
    cdef RouteState* r = q.route
    cdef u32 i
    count(r.answered, q.rows)
    count(r.decided, q.rows)
    count(r.used, q.rows)
    count(r.wins, q.rows)
    count(r.ok, 1)
    histogram_record(r.requests, now_us - q.began_us)
    for i in range(q.rows):
        _count_row(q, i, now_us)


cdef inline bint _write_body(Query* q, const Value* value, double belief, u32 latency_us,
                             u64* json_bytes, Bytes* body, LargeBody* large) noexcept nogil:
    """Write the body of one row, or the part of it before a large output. False: it is not
    plain."""
    if q.route.form == PREDICT:
        return _predicted(q, value, belief, latency_us, body, large)
    if q.route.form == INFER:
        return _inferred(q, value, belief, json_bytes, body, large)
    return _old(q, value, body, large)


cdef bint is_text(const Value* value) noexcept nogil:
    cdef Blob* blob = <Blob*> value.word if value.tag == TAG_BLOB else NULL
    return (blob != NULL and blob.dtype == STR and blob.rank == 0 and not blob.qualifier_bytes
            and not record_type(blob))


cdef bint _put_texts(Query* q, Bytes* body) noexcept nogil:
    """Write the response of the Open Inference Protocol to several rows whose outputs are texts.
    False: it is not plain, or large."""
    cdef Value value
    cdef u64 nbytes = 0
    cdef u32 i
    body.put(q.route.head.at(), q.route.head.size())
    body.put(q.tag.at(), q.tag.size())
    body.put_text(",\"outputs\":[{\"name\":\"output\",\"datatype\":\"BYTES\",\"shape\":[")
    body.put_decimal(q.rows)
    body.put_text("],\"data\":[")
    for i in range(q.rows):
        if not query_is_answered(q, i):
            return False
        query_row(q, i, &value)
        if not is_text(&value) or value_belief(&value) < q.route.confidence_min:
            return False
        nbytes += (<Blob*> value.word).nbytes
        if i:
            body.put_byte(44)
        if nbytes >= LARGE_VALUE_BYTES or not json_put(body, &value, True, NULL):
            return False
    body.put_text("]}]}")
    return True


cdef bint _make_body_of_rows(Query* q, u64* json_bytes, Bytes* body,
                             LargeBody** rest) noexcept nogil:
    """Write the body of several rows as `_make_body` does."""
    cdef Value stacked
    cdef bint made
    query_row(q, 0, &stacked)
    if query_is_answered(q, 0) and is_text(&stacked):
        return not q.binary and _put_texts(q, body)
    if not query_stack(q, &stacked):
        return False
    rest[0] = large_body(&stacked)
    made = _inferred_rows(q, &stacked, json_bytes, body, rest[0])
    value_drop(&stacked)
    return made


cdef inline bint _make_body(Query* q, u64* json_bytes, Bytes* body,
                            LargeBody** rest) noexcept nogil:
    """Write the body to `body`; the part after that of a large output is left to `rest`. False: it
    is not plain."""
    cdef Value value
    cdef double belief
    cdef u32 latency_us
    body.clear()
    if q.rows != 1:
        return _make_body_of_rows(q, json_bytes, body, rest)
    if not query_is_answered(q, 0):
        return False
    latency_us = query_row(q, 0, &value)
    belief = value_belief(&value)
    if belief < q.route.confidence_min:
        return False
    rest[0] = large_body(&value)
    return _write_body(q, &value, belief, latency_us, json_bytes, body, rest[0])


cdef bint query_answer(Query* q, const char* date, const Bytes* made, bint close,
                       Bytes* body, Bytes* out, LargeBody** rest) noexcept nogil:
    cdef u64 json_bytes = 0
    cdef LargeBody* large = NULL
    if (not _make_body(q, &json_bytes, body, &large) or body.lost
            or (large != NULL and large.tail.lost)):
        large_body_drop(large)
        return False
    out.put_text("HTTP/1.1 200 OK\r\ndate: ")
    out.put(date, 29)
    if json_bytes:
        out.put_text("\r\ncontent-type: application/octet-stream")
    else:
        out.put_text("\r\ncontent-type: application/json")
    if large != NULL and not json_bytes:
        large.chunked = True
        out.put_text("\r\ntransfer-encoding: chunked")
    else:
        out.put_text("\r\ncontent-length: ")
        out.put_decimal(body.size() + (large.bytes if large != NULL else 0))
    if json_bytes:
        out.put_text("\r\ninference-header-content-length: ")
        out.put_decimal(json_bytes)
    out.put_text("\r\nx-request-id: ")
    _put_id(q, made, out)
    if q.fields.traced:
        out.put_text("\r\ntraceparent: ")
        trace_parent_put(out, q.fields.trace, q.fields.span)
    if close:
        out.put_text("\r\nconnection: close")
    out.put_text("\r\n\r\n")
    if large != NULL and large.chunked:
        large_body_chunk(body, out)
    else:
        out.put(body.at(), body.size())
    query_count(q, monotonic_us())
    rest[0] = large
    return True


# -- routes and tables
# -------------------------------------------------------------------------------------------------

cdef u64 _hash(const u8* path, u64 n) noexcept nogil:
    """Hash a path by FNV-1a. Paths are our own, so no client can make them collide."""
    cdef u64 h = 14695981039346656037u, i
    for i in range(n):
        h = (h ^ path[i]) * 1099511628211u
    return h ^ h >> 32


cdef RouteState* route_at(const TableState* table, const u8* path, u64 n) noexcept nogil:
    cdef u64 h = _hash(path, n)
    cdef u64 i = h & table.mask
    while table.places[i].route != NULL:
        if (table.places[i].hash == h and table.places[i].path_bytes == n
            and memcmp(table.places[i].path, path, n) == 0):
            return table.places[i].route
        i = (i + 1) & table.mask
    return NULL


cdef i64 key_in(const TableState* table, const Head* head) noexcept nogil:
    if head.authorization == NULL or head.authorization_bytes > AUTHORIZATION_MAX:
        return NO_KEY
    return key_find(table.keys, head.authorization, head.authorization_bytes)


cdef void route_refuse(RouteState* route, const TableState* table, const Head* head,
                       const Admission* admission, const char* date, const Bytes* made, bint close,
                       Bytes* out) noexcept nogil:
    cdef const u8* id = made.at()
    cdef u64 id_bytes = made.size()
    if head.id_bytes and _is_quotable(head):
        id = head.id
        id_bytes = head.id_bytes
    key_refusal(table.keys, admission, head.path, head.path_bytes, date, id, id_bytes, close, out)
    count(route.limited if admission.outcome == TOO_MANY else route.forbidden, 1)


cdef bint _number_of(object output, Value* value) except -1:
    """Make a value of a number. False: it is none, or too large."""
    cdef double number
    if type(output) is float:
        number = output
        value.tag = F64
        memcpy(&value.word, &number, 8)
        return True
    if type(output) is int and -I64_END <= output < I64_END:
        value.tag = I64
        value.word = <u64> <i64> output
        return True
    return False


cdef int _put(Bytes* to, bytes text) except -1:
    to.put(<const char*> text, len(text))
    return 0


cdef list query_futures(Query* q, object finish, object extra):
    cdef HotRoute route = <HotRoute> q.route.object
    cdef list futures = []
    cdef Future future
    cdef u32 i
    if q.block == NULL:
        future = future_at_once(route.model.engine.completion, OK, &q.value, finish, extra)
        future.own_id = q.number
        futures.append(future)
    else:
        for i in range(q.rows):
            futures.append(future_new(route.model.engine.completion, q.block, q.slot + i, 1,
                                      finish, extra))
    q.block = NULL
    q.value.tag = TAG_NONE
    return futures


cdef tuple query_schedule(Query* q, const Bytes* rows, str name, str own):
    cdef HotRoute route = <HotRoute> q.route.object
    cdef Future future
    cdef list futures = []
    cdef list inputs = []
    cdef object failed = None
    cdef const u8* row = rows.at()
    cdef u64 nbytes = rows.size() // q.rows
    try:
        for _ in range(q.rows):
            future = None
            if route.application is not None:
                future = route.application.schedule_row(row, nbytes, name, q.fields.slo_us, own,
                                                        q.fields.band)
            futures.append(future)
            inputs.append(route._row(row, nbytes) if future is None else None)
            row += nbytes
    except Exception as error:
        failed = error
    return futures, inputs, failed


cdef list plain_answers(list futures):
    cdef Future future
    cdef Answer answer
    cdef list answers = []
    for future in futures:
        if future is None or not future.is_done() or future.is_cancelled:
            return None
    try:
        for future in futures:
            found = future._outcome()
            if type(found) is not Answer:
                return None
            answer = found
            if answer.is_default or len(answer.missing) or len(answer.set) or answer.beside:
                return None
            answers.append(answer)
    except Exception:
        # it raises again where Python makes the response
        return None
    return answers


cdef bint outputs_of(list answers, Value* value) except -1:
    cdef Answer answer = answers[0]
    cdef Value one
    cdef Blob* stacked
    cdef u64 item = 0
    cdef u32 i, n = <u32> len(answers)
    if not _number_of(answer.output, value):
        return False
    if n == 1:
        return True
    stacked = _room_for(value, n, &item)
    if stacked == NULL:
        return False
    value.word = <u64> stacked
    value.tag = TAG_BLOB
    for i in range(n):
        answer = answers[i]
        if not (_number_of(answer.output, &one) and _put_row(stacked, i, item, &one)):
            blob_drop(stacked)
            return False
    return True


cdef class HotRoute:
    """The route of one application, or one model, with one form of request. Threads: any; it never
    changes.

    form: `predict`, `old_predict`, `infer`, `feedback`, `call`. node: the part of an answer's id
    before the number. models: their names in an answer, in JSON; for `infer` and `call`, what is
    before the request's id. counts: counters of the application's stats: queries, answered,
    decided, used, wins. took: its durations, microseconds. ok, requests: of HTTP: responses with
    200, and their durations. forbidden, limited: of HTTP: requests that their key did not allow.
    subject: returned with a query that Python answers. window: keeps the answers for feedback, as
    those of `owner`, which it has; None: they are not kept. application: schedules queries that
    were read; None: Python does. read_only: all queries are only read here, not submitted.
    slo_ms_max: of queries with an SLO of their own; 0: Python has those.
    takes_users: a query may name its user, who changes nothing of its answer. rows_max: of a
    request whose rows are queries of their own. priority: of queries that name none, and whose key
    has none. Raises ValueError for a model whose rows cannot be
    read without Python.
    """

    def __init__(self, Model model, str form, str node, bytes models, u64 slo_us,
                 double confidence_min, counts,
                 LatencyHistogram took, Counter ok, LatencyHistogram requests, subject,
                 AnswerWindow window=None, AnswerOwner owner=None, Application application=None,
                 bint read_only=False, double slo_ms_max=0.0, bint takes_users=False,
                 u32 rows_max=1, forbidden=None, limited=None, u32 priority=PRIORITY_USUAL):
        cdef RouteState* r = new RouteState()
        self.state = r
        self.application = application
        self.names = {}
        r.read_only = read_only
        r.rows_max = rows_max
        queries, answered, decided, used, wins = counts
        self.model, self.subject = model, subject
        self.counters = (queries, answered, decided, used, wins, took, ok, requests, window, owner)
        r.form = <u8> ("predict", "old_predict", "infer", "feedback", "call").index(form)
        if r.form != FEEDBACK:
            self._set_rows()
        r.engine, r.model, r.slo_us, r.confidence_min = (model.engine.state, model.state, slo_us,
                confidence_min)
        _put(&r.node, f"{node}-".encode())
        _put(&r.models if r.form == PREDICT else &r.head, models)
        r.queries, r.answered, r.decided = (&(<Counter> queries).n, &(<Counter> answered).n,
                                          &(<Counter> decided).n)
        r.used, r.wins, r.ok = &(<Counter> used).n, &(<Counter> wins).n, &ok.n
        r.took, r.requests = took.h, requests.h
        self.refused = (forbidden or Counter(), limited or Counter())
        r.forbidden = &(<Counter> self.refused[0]).n
        r.limited = &(<Counter> self.refused[1]).n
        if window is not None and owner is not None:
            r.window, r.owner = &window.rings[1], <void*> owner
        r.object = <void*> self
        r.slo_ms_max = slo_ms_max
        r.takes_users = takes_users
        r.priority = priority
        if r.form != FEEDBACK:
            lane_prepare(r.engine, r.model, slo_us, band_of(0, priority))
        self.look_at_lanes()

    cpdef void look_at_lanes(self):
        """Note which classes of SLO have lanes by now: Python makes one for the first query of its
        class."""
        cdef u32 band
        for band in range(BANDS):
            self.state.lanes[band].store(lanes_there(self.model.state, band), release)

    cdef int _set_rows(self) except -1:
        cdef ModelState* m = self.model.state
        cdef u32 i
        cdef u8 dtype = m.spec.dtype
        if dtype in (ANY, BOOL, F16, STR, BYTES) or self.model.similar is not None:
            raise ValueError(f"rows of {self.model.name} are not read here: "
                             f"{self.model.describe_input()}")
        self.state.wanted.dtype = dtype
        name = self.model.describe_input().partition("[")[0]
        self.dtype = np.dtype(f"{name[0]}{int(name[1:]) // 8}")
        self.state.variable = self.model.shape == (-1,)
        if self.state.variable and self.state.form in (INFER, CALL):
            raise ValueError(f"rows of {self.model.name} differ in length: infer is not read here")
        self.state.wanted.rank = <u32> len(self.model.shape)
        for i in range(self.state.wanted.rank):
            self.state.wanted.dims[i] = 0 if self.state.variable else self.model.shape[i]
        return 0

    cdef object _row(self, const u8* data, u64 nbytes):
        cdef cnp.ndarray row = np.empty(nbytes, np.uint8)
        memcpy(cnp.PyArray_DATA(row), data, nbytes)
        return row.view(self.dtype).reshape(self.model.shape)

    cdef bint _answer_body(self, list answers, bytes id, bytes tag, bint binary, object encode,
                           u64* json_bytes, Bytes* body) except -1:
        json_bytes[0] = 0
        if self.state.form == INFER:
            return self._infer_body(answers, id, tag, binary, encode, json_bytes, body)
        return self._predict_body(answers[0], encode, body)

    cdef bint _predict_body(self, Answer answer, object encode, Bytes* body) except -1:
        """Write the response to a query for a prediction."""
        if type(answer.output) not in (int, float, str, bool):
            return False
        body.put_text("{\"id\":\"")
        _put(body, answer.id.encode("ascii"))
        body.put_text("\",\"output\":")
        _put(body, encode(answer.output))
        body.put_text(",\"confidence\":")
        json_f64(body, answer.confidence)
        body.put_text(",\"default\":false,\"reason\":\"\",\"models\":")
        _put(body, self._names_of(answer.models))
        body.put_text(",\"missing\":[],\"agreement\":")
        json_f64(body, answer.agreement)
        body.put_text(",\"latency_us\":")
        body.put_decimal(answer.latency_us)
        if answer.decided_by not in ("", "all"):
            body.put_text(",\"decided_by\":")
            _put(body, encode(answer.decided_by))
        body.put_byte(125)
        return True

    cdef bint _infer_body(self, list answers, bytes id, bytes tag, bint binary, object encode,
                          u64* json_bytes, Bytes* body) except -1:
        """Write the response of the Open Inference Protocol."""
        cdef Answer answer = answers[0]
        cdef Value value
        cdef bint written
        if not outputs_of(answers, &value):
            return False
        body.put(self.state.head.at(), self.state.head.size())
        _put(body, tag)
        if len(answers) != 1:
            body.put_byte(44)
            written = infer_write(body, &value, True, binary, json_bytes, NULL)
            value_drop(&value)
            return written
        body.put_text(",\"parameters\":{\"prediction_id\":\"")
        _put(body, answer.id.encode("ascii"))
        body.put_text("\",\"confidence\":")
        json_f64(body, answer.confidence)
        if answer.request_id:
            body.put_text(",\"request_id\":")
            _put(body, encode(answer.request_id))
        if answer.decided_by not in ("", "all"):
            body.put_text(",\"decided_by\":")
            _put(body, encode(answer.decided_by))
        body.put_text("},")
        return infer_write(body, &value, False, binary, json_bytes, NULL)

    cdef int _answer_head(self, bytes id, const char* date, u64 json_bytes, u64 body_bytes,
                          Bytes* out) except -1:
        out.put_text("HTTP/1.1 200 OK\r\ndate: ")
        out.put(date, 29)
        if json_bytes:
            out.put_text("\r\ncontent-type: application/octet-stream\r\ncontent-length: ")
        else:
            out.put_text("\r\ncontent-type: application/json\r\ncontent-length: ")
        out.put_decimal(body_bytes)
        if json_bytes:
            out.put_text("\r\ninference-header-content-length: ")
            out.put_decimal(json_bytes)
        out.put_text("\r\nx-request-id: ")
        _put(out, id)
        return 0

    cdef int _count_answer(self, u64 began_us) except -1:
        count(&(<Counter> self.counters[6]).n, 1)
        histogram_record((<LatencyHistogram> self.counters[7]).h, monotonic_us() - began_us)
        return 0

    cdef bytes _names_of(self, tuple models):
        """Return the names of models as JSON."""
        cdef bytes found = self.names.get(models)
        if found is None:
            if len(self.names) >= NAMES_MAX:
                self.names = {}
            names = [str(model) for model in models]
            found = json.dumps(names, separators=(",", ":"), ensure_ascii=False).encode()
            self.names[models] = found
        return found

    def __dealloc__(self):
        del self.state

    @property
    def users(self):
        """Queries that are open."""
        return self.state.users.load(acquire)


cdef class HotTable:
    """Routes by their exact path, and the keys that their requests need. Threads: any; it is
    immutable.

    keys: None: no key is needed. Python has the requests without a key; it refuses them. logs:
    requests that their callers record are logged; Python has them.
    """

    def __init__(self, dict routes, KeyTable keys=None, bint logs=False):
        cdef u64 size = 4, i
        cdef bytes path
        cdef HotRoute route
        self.routes = dict(routes)
        self.keys = keys
        while size < 2 * <u64> len(routes) + 2:
            size *= 2
        self.state = <TableState*> aligned_new(sizeof(TableState))
        if self.state != NULL:
            self.state.places = <Place*> calloc(size, sizeof(Place))
        if self.state == NULL or self.state.places == NULL:
            raise_for(NO_MEMORY, f"no memory for {len(routes)} routes")
        self.state.mask = size - 1
        if keys is not None:
            self.state.keys = keys.state
        self.state.logs = logs
        for path, route in self.routes.items():
            i = _hash(<const u8*> (<const char*> path), len(path))
            self._place(i, path, route)

    def _place(self, u64 h, bytes path, HotRoute route):
        cdef u64 i = h & self.state.mask
        while self.state.places[i].route != NULL:
            i = (i + 1) & self.state.mask
        self.state.places[i] = Place(h, <const u8*> (<const char*> path), len(path), route.state)

    def __dealloc__(self):
        if self.state != NULL:
            free(self.state.places)
            free(self.state)

    def look_at_lanes(self):
        """Have the routes note which classes of SLO have lanes by now."""
        cdef HotRoute route
        for route in self.routes.values():
            route.look_at_lanes()

    def __len__(self):
        return len(self.routes)

    def __contains__(self, bytes path):
        return route_at(self.state, <const u8*> (<const char*> path), len(path)) != NULL

    @property
    def users(self):
        """Number of workers that use the table, and of open queries of its routes."""
        cdef HotRoute route
        cdef u64 n = self.state.users.load(acquire)
        for route in self.routes.values():
            n += route.state.users.load(acquire)
        return n
