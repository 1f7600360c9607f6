"""Calls of ModelInfer without Python. What a request means is defined by frontend/grpc/inference.py
and frontend/inference: what is read here means the same there.
"""
from libc.string cimport memcmp, memcpy, memset

from clipper_core.http.hpack cimport hpack_put
from clipper_core.http.http_route cimport (
    OTHER, REQUEST_ID_MAX, Fields, InferParameters, Query, QueryOutcome, RouteState, TableState,
    is_text, outputs_of, query_answer_or_submit, query_begin, query_count, query_is_answered,
    query_read_trace, query_row, query_set_parameters, query_stack, route_at, scalar_word,
    tensor_datatype, tensor_dtype, tensor_rows,
)
from clipper_core.http.json_value cimport Wanted, value_belief
from clipper_core.http.key_table cimport (
    ADMITTED, NO_KEY, Admission, KeyState, key_admit_name, key_find, key_standing, key_take_back,
)
from clipper_core.http.protobuf cimport (
    PROTO_END, PROTO_FIELD, PROTO_TEXT, PROTO_VARINT, ProtoField, ProtoReader, proto_next,
    proto_put_fixed64, proto_put_head, proto_put_text, proto_put_varint, proto_varint,
)
from clipper_core.http.trace_parent cimport TRACE_PARENT_BYTES, span_new, trace_parent_put
from clipper_core.results.answer cimport Answer
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.dtype cimport (
    F32, I16, I32, I64, I8, U16, U32, U64, U8, all_finite, itemsize,
)
from clipper_core.runtime.machine cimport i64, monotonic_us, u32, u64, u8
from clipper_core.runtime.status cimport NO_MEMORY, raise_for
from clipper_core.wire.prediction cimport (
    TAG_BLOB, Blob, Value, blob_data, record_type, value_drop,
)

cdef extern from "<cstring>" nogil:
    const void* memchr(const void* at, int byte, size_t n) noexcept

cdef enum:
    DIMS_MAX = 5                # of a row, and one before it
    DIMENSION_MAX = 1 << 30
    ELEMENTS_MAX = 1 << 31      # of a tensor
    PREFIX_BYTES = 5            # of a message
    ROUTE_BYTES_MAX = 256       # longer names of models have no route
    AUTHORIZATION_MAX = 1024    # bytes; Python hashes longer ones
    TIMEOUT_DIGITS = 8

cdef u64 NO_TIMEOUT = <u64> -1
cdef const char* FIRST_LINE = "POST /inference.GRPCInferenceService/ModelInfer HTTP/1.1\r\n"

# -- the head of a call
# --------------------------------------------------------------------------------------------------

cdef inline bint _is(const u8* at, u64 n, const char* word, u64 m) noexcept nogil:
    return n == m and memcmp(at, word, m) == 0


cdef inline bint _begins(const u8* at, u64 n, const char* word, u64 m) noexcept nogil:
    return n >= m and memcmp(at, word, m) == 0


cdef bint _is_visible(const u8* at, u64 n) noexcept nogil:
    cdef u64 i
    for i in range(n):
        if not 32 <= at[i] < 127:
            return False
    return True


cdef u64 _unit_ns(u8 unit) noexcept nogil:
    """Return the nanoseconds of a unit of grpc-timeout; 0: there is no such unit."""
    if unit == 72:
        return 3600000000000
    if unit == 77:
        return 60000000000
    if unit == 83:
        return 1000000000
    if unit == 109:
        return 1000000
    if unit == 117:
        return 1000
    return 1 if unit == 110 else 0


cdef bint _read_timeout(const u8* at, u64 n, CallHead* head) noexcept nogil:
    cdef u64 number = 0, i
    if not 2 <= n <= TIMEOUT_DIGITS + 1 or head.timeout_us != NO_TIMEOUT:
        return False
    for i in range(n - 1):
        if not 48 <= at[i] <= 57:
            return False
        number = 10 * number + (at[i] - 48)
    head.timeout_us = number * _unit_ns(at[n - 1]) // 1000
    return _unit_ns(at[n - 1]) != 0


cdef bint _take_once(const u8** field, u64* bytes, const u8* value, u64 n) noexcept nogil:
    """Keep the value of a field that comes once."""
    if field[0] != NULL:
        return False
    field[0] = value
    bytes[0] = n
    return True


cdef bint _take_field(const u8* name, u64 n, const u8* value, u64 m,
                      CallHead* head) noexcept nogil:
    """Take a field. Return False if it may mean something that is Python's."""
    if _is(name, n, "grpc-timeout", 12):
        return _read_timeout(value, m, head)
    if _is(name, n, "authorization", 13):
        return _take_once(&head.authorization, &head.authorization_bytes, value, m)
    if _is(name, n, "x-request-id", 12):
        return (_take_once(&head.id, &head.id_bytes, value, m) and m <= REQUEST_ID_MAX
                and _is_visible(value, m))
    if _is(name, n, "traceparent", 11):
        return _take_once(&head.trace, &head.trace_bytes, value, m)
    if n > 4 and memcmp(name + n - 4, "-bin", 4) == 0:
        return False
    return not (_begins(name, n, "mm-", 3) or _begins(name, n, "clipper-", 8)
                or _is(name, n, "tracestate", 10))


cdef bint call_head_read(const u8* at, u64 n, CallHead* head) noexcept nogil:
    cdef const u8* end = at + n
    cdef const u8* line
    cdef const u8* colon
    cdef u64 left
    memset(head, 0, sizeof(CallHead))
    head.timeout_us = NO_TIMEOUT
    if not _begins(at, n, FIRST_LINE, 58):
        return False
    at += 58
    while at < end and at[0] != 13:
        left = <u64> (end - at)
        line = <const u8*> memchr(at, 13, left)
        if line == NULL:
            return False
        colon = <const u8*> memchr(at, 58, <u64> (line - at))
        if colon == NULL or line - colon < 2:
            return False
        if not _take_field(at, <u64> (colon - at), colon + 2, <u64> (line - colon - 2), head):
            return False
        at = line + 2
    return True


# -- the request
# --------------------------------------------------------------------------------------------------

cdef struct InferCall:          # a ModelInferRequest with one tensor
    const u8* model
    u64 model_bytes
    const u8* version
    u64 version_bytes
    const u8* id
    u64 id_bytes
    InferParameters parameters
    u8 dtype                    # of the tensor
    u32 rank
    u64[5] dims
    u32 contents                # number of the field with its elements; 0: they are raw
    const u8* data
    u64 data_bytes


cdef inline bint _once(u32* seen, u32 number) noexcept nogil:
    if number > 31 or seen[0] >> number & 1:
        return False
    seen[0] |= 1 << number
    return True


cdef inline void _open(ProtoReader* reader, const ProtoField* field) noexcept nogil:
    """Read the message in a field."""
    reader.at = field.at
    reader.end = field.at + field.bytes


cdef bint _put_dim(InferCall* call, u64 n) noexcept nogil:
    if call.rank == DIMS_MAX or not 0 < n < DIMENSION_MAX:
        return False
    call.dims[call.rank] = n
    call.rank += 1
    return True


cdef bint _read_shape(InferCall* call, const ProtoField* field) noexcept nogil:
    cdef ProtoReader reader
    cdef u64 n = 0
    if field.kind == PROTO_VARINT:
        return _put_dim(call, field.value)
    if field.kind != PROTO_TEXT:
        return False
    _open(&reader, field)
    while reader.at < reader.end:
        if not (proto_varint(&reader, &n) and _put_dim(call, n)):
            return False
    return True


cdef bint _read_contents(InferCall* call, const ProtoField* at) noexcept nogil:
    """Read the only field of `contents`, which is packed."""
    cdef ProtoReader reader
    cdef ProtoField field
    if at.kind != PROTO_TEXT or call.data != NULL:
        return False
    _open(&reader, at)
    if proto_next(&reader, &field) != PROTO_FIELD or field.kind != PROTO_TEXT:
        return False
    call.contents = field.number
    call.data = field.at
    call.data_bytes = field.bytes
    return reader.at == reader.end


cdef bint _read_tensor(InferCall* call, const ProtoField* at) noexcept nogil:
    cdef ProtoReader reader
    cdef ProtoField field
    cdef u32 seen = 0
    cdef int came
    _open(&reader, at)
    while True:
        came = proto_next(&reader, &field)
        if came != PROTO_FIELD:
            return came == PROTO_END and call.dtype != 0
        if field.number == 3:
            if not _read_shape(call, &field):
                return False
        elif field.kind != PROTO_TEXT or not _once(&seen, field.number):
            return False
        elif field.number == 1:
            if not _is_visible(field.at, field.bytes):
                return False
        elif field.number == 2:
            call.dtype = tensor_dtype(field.at, field.bytes)
        elif field.number != 5 or not _read_contents(call, &field):
            return False


cdef bint _read_value(const ProtoField* at, ProtoField* value) noexcept nogil:
    """Read the only field of an InferParameter."""
    cdef ProtoReader reader
    _open(&reader, at)
    return proto_next(&reader, value) == PROTO_FIELD and reader.at == reader.end


cdef bint _set_parameter(InferParameters* said, const ProtoField* key, const ProtoField* value,
                         u32* seen) noexcept nogil:
    if value.kind == PROTO_VARINT and value.number == 2 and <i64> value.value >= 0:
        if _is(key.at, key.bytes, "timeout", 7):
            said.timeout_us = value.value
            return _once(seen, 0)
        if _is(key.at, key.bytes, "salt", 4):
            said.salt = value.value
            return _once(seen, 1)
        if _is(key.at, key.bytes, "priority", 8):
            said.priority = value.value
            return _once(seen, 3)
    if value.kind == PROTO_TEXT and value.number == 3 and _is(key.at, key.bytes, "user", 4):
        said.user = value.at
        said.user_bytes = value.bytes
        return _once(seen, 2) and value.bytes != 0 and _is_visible(value.at, value.bytes)
    return False


cdef bint _read_parameter(InferParameters* said, const ProtoField* at, u32* seen) noexcept nogil:
    cdef ProtoReader reader
    cdef ProtoField key, field, value
    _open(&reader, at)
    return (proto_next(&reader, &key) == PROTO_FIELD and key.number == 1 and key.kind == PROTO_TEXT
            and proto_next(&reader, &field) == PROTO_FIELD and field.number == 2
            and field.kind == PROTO_TEXT and reader.at == reader.end
            and _read_value(&field, &value) and _set_parameter(said, &key, &value, seen))


cdef bint _is_output(const ProtoField* at) noexcept nogil:
    """Return whether a request names the only output that there is, without parameters."""
    cdef ProtoReader reader
    cdef ProtoField field
    _open(&reader, at)
    return (proto_next(&reader, &field) == PROTO_FIELD and field.number == 1
            and field.kind == PROTO_TEXT and _is(field.at, field.bytes, "output", 6)
            and reader.at == reader.end)


cdef bint _read_part(InferCall* call, const ProtoField* field, u32* said) noexcept nogil:
    """Read a field of a request that comes once, or a parameter. said: the parameters that came."""
    if field.number == 1:
        call.model = field.at
        call.model_bytes = field.bytes
    elif field.number == 2:
        call.version = field.at
        call.version_bytes = field.bytes
    elif field.number == 3:
        call.id = field.at
        call.id_bytes = field.bytes
        return field.bytes <= REQUEST_ID_MAX and _is_visible(field.at, field.bytes)
    elif field.number == 4:
        return _read_parameter(&call.parameters, field, said)
    elif field.number == 5:
        return _read_tensor(call, field)
    elif field.number == 6:
        return _is_output(field)
    elif field.number == 7 and call.contents == 0:
        call.data = field.at
        call.data_bytes = field.bytes
    else:
        return False
    return True


cdef bint _read(const u8* at, u64 n, InferCall* call) noexcept nogil:
    cdef ProtoReader reader
    cdef ProtoField field
    cdef u32 seen = 0, said = 0
    cdef int came
    memset(call, 0, sizeof(InferCall))
    reader.at = at
    reader.end = at + n
    while True:
        came = proto_next(&reader, &field)
        if came != PROTO_FIELD:
            return came == PROTO_END and seen & (1 << 5) and call.data != NULL
        if field.kind != PROTO_TEXT or not (field.number == 4 or _once(&seen, field.number)):
            return False
        if not _read_part(call, &field, &said):
            return False


# -- its elements

cdef u32 _field_of(u8 dtype) noexcept nogil:
    """Return the number of the field of `contents` for a dtype."""
    if dtype == I8 or dtype == I16 or dtype == I32:
        return 2
    if dtype == I64:
        return 3
    if dtype == U8 or dtype == U16 or dtype == U32:
        return 4
    if dtype == U64:
        return 5
    return 6 if dtype == F32 else 7


cdef bint _put_whole(u8 dtype, u64 value, Bytes* row) noexcept nogil:
    """Append a whole number. Return False if it is out of the bounds of its type."""
    cdef i64 half = <i64> <int> <u32> value
    cdef u32 size = <u32> itemsize(dtype)
    if dtype == I8 and not -128 <= half < 128:
        return False
    if dtype == I16 and not -32768 <= half < 32768:
        return False
    if dtype == U8 and <u32> value > 255:
        return False
    if dtype == U16 and <u32> value > 65535:
        return False
    row.put(&value, size)
    return True


cdef bint _read_elements(const InferCall* call, u64 elements, Bytes* rows) noexcept nogil:
    cdef ProtoReader reader
    cdef u64 value = 0, count = 0
    if call.contents == 0 or call.contents >= 6:
        rows.put(call.data, call.data_bytes)
        return call.data_bytes == elements * itemsize(call.dtype)
    reader.at = call.data
    reader.end = call.data + call.data_bytes
    while reader.at < reader.end and count < elements:
        if not (proto_varint(&reader, &value) and _put_whole(call.dtype, value, rows)):
            return False
        count += 1
    return count == elements and reader.at == reader.end


cdef u32 _read_rows(const InferCall* call, const Wanted* wanted, bint finite, u32 rows_max,
                    Bytes* rows) noexcept nogil:
    """Read the rows. Return how many there are; 0: the tensor is not plain."""
    cdef u64 n = tensor_rows(wanted, call.dtype, call.rank, call.dims)
    cdef u64 elements = n
    cdef u32 i
    if not 0 < n <= rows_max or (call.contents and call.contents != _field_of(call.dtype)):
        return 0
    for i in range(wanted.rank):
        elements *= wanted.dims[i]
    rows.clear()
    if elements > ELEMENTS_MAX or not _read_elements(call, elements, rows) or rows.lost:
        return 0
    if finite and not all_finite(call.dtype, rows.at(), rows.size()):
        return 0
    return <u32> n


# -- submitting
# --------------------------------------------------------------------------------------------------

cdef RouteState* _route_of(const TableState* table, const InferCall* call) noexcept nogil:
    """Return the route of a request: of a model, or of a version of one."""
    cdef u8[ROUTE_BYTES_MAX] path
    if call.model_bytes == 0 or call.model_bytes + call.version_bytes >= ROUTE_BYTES_MAX:
        return NULL
    if call.version_bytes == 0:
        return route_at(table, call.model, call.model_bytes)
    memcpy(path, call.model, call.model_bytes)
    path[call.model_bytes] = 47
    memcpy(path + call.model_bytes + 1, call.version, call.version_bytes)
    return route_at(table, path, call.model_bytes + 1 + call.version_bytes)


cdef bint _set_deadline(Query* q, const CallLimits* limits, const CallHead* head,
                        bint timed) noexcept nogil:
    """Let the query end before the call's deadline. timed: it has a timeout of its own. Return
    False if nothing is left: Python says so."""
    cdef u64 left
    if head.timeout_us == NO_TIMEOUT:
        return True
    if head.timeout_us <= limits.way_back_us:
        return False
    left = head.timeout_us - limits.way_back_us
    q.fields.slo_us = min(left, q.fields.slo_us if timed else limits.slo_us_max)
    return True


cdef bint _is_allowed(const TableState* table, const CallHead* head, i64* number) noexcept nogil:
    """Return whether a call has the key that it needs, if it needs one, and which."""
    if table.keys == NULL:
        return True
    if head.authorization == NULL or head.authorization_bytes > AUTHORIZATION_MAX:
        return False
    number[0] = key_find(table.keys, head.authorization, head.authorization_bytes)
    return number[0] != NO_KEY


cdef QueryOutcome _submit_by_key(Query* q, const KeyState* keys, i64 number, const InferCall* call,
                                 Bytes* rows) noexcept nogil:
    """Submit the query of a call if its key allows it. Python refuses the others, and counts them
    and what is not plain."""
    cdef Admission admission = key_admit_name(keys, number, call.model, call.model_bytes,
                                              monotonic_us() * 1000)
    cdef QueryOutcome came = OTHER
    if admission.outcome == ADMITTED:
        came = query_answer_or_submit(q, rows)
    if came == OTHER:
        key_take_back(keys, &admission)
    return came


cdef bint _is_message(const u8* at, u64 n, u64 bytes_max) noexcept nogil:
    """Return whether the bytes are one message that is not compressed."""
    cdef u64 size
    if n < PREFIX_BYTES or at[0] != 0:
        return False
    size = <u64> at[1] << 24 | <u64> at[2] << 16 | <u64> at[3] << 8 | at[4]
    return size == n - PREFIX_BYTES and size <= bytes_max


cdef void _put_id(Query* q, const CallHead* head, const InferCall* call) noexcept nogil:
    """Keep the id of the request, and that of its query."""
    q.tag.clear()
    q.tag.put(call.id, call.id_bytes)
    q.fields.id_bytes = <u32> head.id_bytes
    if head.id_bytes:
        memcpy(q.fields.id, head.id, head.id_bytes)
    elif call.id_bytes:
        q.fields.id_bytes = <u32> call.id_bytes
        memcpy(q.fields.id, call.id, call.id_bytes)


cdef QueryOutcome call_submit(Query* q, const TableState* table, const CallLimits* limits,
                              const CallHead* head, const u8* at, u64 n, Bytes* rows,
                              u64* draws) noexcept nogil:
    cdef InferCall call
    cdef RouteState* r
    cdef i64 number = NO_KEY
    q.route = NULL
    if (not _is_allowed(table, head, &number) or not _is_message(at, n, limits.message_bytes_max)
            or not _read(at + PREFIX_BYTES, n - PREFIX_BYTES, &call)):
        return OTHER
    r = _route_of(table, &call)
    if r == NULL:
        return OTHER
    q.route = r
    q.standing = key_standing(table.keys, number)
    query_begin(q)
    if head.trace != NULL and not query_read_trace(q, table, head.trace, head.trace_bytes, draws):
        return OTHER
    q.rows = _read_rows(&call, &r.wanted, r.model.finite, r.rows_max, rows)
    if (q.rows == 0 or not query_set_parameters(q, &call.parameters)
            or not _set_deadline(q, limits, head, call.parameters.timeout_us != 0)):
        return OTHER
    _put_id(q, head, &call)
    if table.keys != NULL:
        return _submit_by_key(q, table.keys, number, &call, rows)
    return query_answer_or_submit(q, rows)


# -- answering
# --------------------------------------------------------------------------------------------------

cdef u64 _varint_bytes(u64 value) noexcept nogil:
    cdef u64 n = 1
    while value > 127:
        value >>= 7
        n += 1
    return n


cdef void _put_text_parameter(Bytes* body, const char* key, u64 key_bytes, const u8* first,
                              u64 first_bytes, const u8* then, u64 then_bytes) noexcept nogil:
    """Append an entry of the parameters whose value is a text of two parts."""
    cdef u64 text = first_bytes + then_bytes
    cdef u64 value = 1 + _varint_bytes(text) + text
    proto_put_head(body, 4, 2 + key_bytes + 1 + _varint_bytes(value) + value)
    proto_put_text(body, 1, key, key_bytes)
    proto_put_head(body, 2, value)
    proto_put_head(body, 3, text)
    body.put(first, first_bytes)
    body.put(then, then_bytes)


cdef void _put_confidence(Bytes* body, double belief) noexcept nogil:
    cdef u64 bits
    memcpy(&bits, &belief, 8)
    proto_put_head(body, 4, 2 + 10 + 2 + 9)
    proto_put_text(body, 1, "confidence", 10)
    proto_put_head(body, 2, 9)
    proto_put_fixed64(body, 4, bits)


cdef int _put_named(Bytes* body, const char* key, u64 key_bytes, object text) except -1:
    """Append an entry of the parameters whose value is a text."""
    cdef bytes data = text.encode()
    _put_text_parameter(body, key, key_bytes, <const u8*> <const char*> data, <u64> len(data),
                        NULL, 0)
    return 0


cdef void _put_parameters(Query* q, double belief, Bytes* body) noexcept nogil:
    """Append the parameters of the answer to one row."""
    cdef Bytes number
    number.put_hex(q.number)
    _put_text_parameter(body, "prediction_id", 13, q.route.node.at(), q.route.node.size(),
                        number.at(), number.size())
    _put_confidence(body, belief)
    if q.fields.id_bytes:
        _put_text_parameter(body, "request_id", 10, q.fields.id, q.fields.id_bytes, NULL, 0)


cdef void _put_tensor(const char* datatype, const u64* dims, u32 rank, Bytes* body) noexcept nogil:
    """Append the head of the output tensor."""
    cdef u64 shape = 0, name = 0
    cdef u32 i
    while datatype[name] != 0:
        name += 1
    for i in range(rank):
        shape += _varint_bytes(dims[i])
    proto_put_head(body, 5, 8 + 2 + name + 1 + _varint_bytes(shape) + shape)
    proto_put_text(body, 1, "output", 6)
    proto_put_text(body, 2, datatype, name)
    proto_put_head(body, 3, shape)
    for i in range(rank):
        proto_put_varint(body, dims[i])


cdef bint _put_output(const Value* value, bint stacked, Bytes* body) noexcept nogil:
    """Append an output, or the stacked outputs of several rows. Return False if it is not plain."""
    cdef Blob* blob = <Blob*> value.word if value.tag == TAG_BLOB else NULL
    cdef u64[16] dims
    cdef u32 rank = 1, i
    cdef u8 dtype = 0
    cdef u64 word = 0
    if blob != NULL and (blob.qualifier_bytes or record_type(blob)):
        return False
    dims[0] = 1
    if blob == NULL or blob.rank == 0:
        if not scalar_word(value, &dtype, &word):
            return False
        _put_tensor(tensor_datatype(dtype), dims, 1, body)
        proto_put_text(body, 6, &word, itemsize(dtype))
        return True
    if tensor_datatype(blob.dtype) == NULL:
        return False
    if stacked:
        rank = 0
    for i in range(blob.rank):
        dims[rank] = blob.dims[i]
        rank += 1
    _put_tensor(tensor_datatype(blob.dtype), dims, rank, body)
    proto_put_text(body, 6, blob_data(blob), blob.nbytes)
    return True


cdef bint _put_texts(const Query* q, Bytes* body) noexcept nogil:
    """Append outputs that are texts. Return False if one is not plain."""
    cdef Value value
    cdef Blob* blob
    cdef u64 total = 0
    cdef u64[1] dims
    cdef u32 i, size
    for i in range(q.rows):
        if not query_is_answered(q, i):
            return False
        query_row(q, i, &value)
        if not is_text(&value) or value_belief(&value) < q.route.confidence_min:
            return False
        total += 4 + (<Blob*> value.word).nbytes
    dims[0] = q.rows
    _put_tensor("BYTES", dims, 1, body)
    proto_put_head(body, 6, total)
    for i in range(q.rows):
        query_row(q, i, &value)
        blob = <Blob*> value.word
        size = <u32> blob.nbytes
        body.put(&size, 4)
        body.put(blob_data(blob), blob.nbytes)
    return True


cdef bint _put_outputs(Query* q, Bytes* body) noexcept nogil:
    cdef Value value
    cdef bint made
    if not query_is_answered(q, 0):
        return False
    query_row(q, 0, &value)
    if value_belief(&value) < q.route.confidence_min:
        return False
    if q.rows == 1:
        _put_parameters(q, value_belief(&value), body)
    if is_text(&value):
        return _put_texts(q, body)
    if q.rows == 1:
        return _put_output(&value, False, body)
    if not query_stack(q, &value):
        return False
    made = _put_output(&value, True, body)
    value_drop(&value)
    return made


cdef bint call_answer(Query* q, Bytes* body) noexcept nogil:
    body.clear()
    body.put(q.route.head.at(), q.route.head.size())
    if q.tag.size():
        proto_put_text(body, 3, q.tag.at(), q.tag.size())
    if not _put_outputs(q, body) or body.lost or q.tag.lost:
        return False
    query_count(q, monotonic_us())
    return True


cdef void call_trailers(const Fields* said, Bytes* fields) noexcept nogil:
    cdef Bytes trace
    hpack_put(fields, <const u8*> <const char*> "grpc-status", 11, <const u8*> <const char*> "0", 1)
    if said.traced:
        trace_parent_put(&trace, said.trace, said.span)
        hpack_put(fields, <const u8*> <const char*> "traceparent", 11, trace.at(),
                  <u32> trace.size())


cdef bint call_reply(const RouteState* r, list answers, bytes request_id, bytes trace, u64* draws,
                     Bytes* body, Bytes* fields) except -1:
    cdef Fields said
    if answers is None or not _answer_read(r, answers, request_id, body):
        return False
    said.traced = len(trace) == TRACE_PARENT_BYTES
    if said.traced:
        memcpy(said.trace, <const char*> trace, TRACE_PARENT_BYTES)
        said.span = span_new(draws)
    call_trailers(&said, fields)
    if body.lost or fields.lost:
        raise_for(NO_MEMORY, "no memory for a reply")
    return True


cdef bint _answer_read(const RouteState* r, list answers, bytes request_id,
                       Bytes* body) except -1:
    """Write the response to a query that was only read. False: one of its outputs is not plain."""
    cdef Answer answer = answers[0]
    cdef Value value
    cdef bint made
    if not outputs_of(answers, &value):
        return False
    body.put(r.head.at(), r.head.size())
    if request_id:
        proto_put_text(body, 3, <const char*> request_id, <u64> len(request_id))
    if len(answers) != 1:
        made = _put_output(&value, True, body)
        value_drop(&value)
        return made
    _put_named(body, "prediction_id", 13, answer.id)
    _put_confidence(body, answer.confidence)
    if answer.request_id:
        _put_named(body, "request_id", 10, answer.request_id)
    if answer.decided_by not in ("", "all"):
        _put_named(body, "decided_by", 10, answer.decided_by)
    return _put_output(&value, False, body)
