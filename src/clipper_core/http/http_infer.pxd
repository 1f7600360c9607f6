# The Open Inference Protocol's infer, of one row: its request, as JSON or with the row as bytes
# behind it, and its answer.
#
# Threads: any (pure functions). As with heads, what is not plain is not read: tensors of many rows,
# nested data, other members.
from clipper_core.http.json_rows cimport Wanted
from clipper_core.http.json_value cimport LargeBody
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u64, u8
from clipper_core.wire.prediction cimport Value

cdef bint infer_read(const Wanted* wanted, bint finite, const u8* body, u64 n, u64 json_bytes,
                     Bytes* row, Bytes* tag,
                     bint* binary) noexcept nogil
# ^ the row to `row`, the request's own id as JSON to `tag`. json_bytes: of the JSON, if the row
# follows it; else NO_LENGTH
cdef bint infer_write(Bytes* out, const Value* value, bint binary, u64* json_bytes,
                      LargeBody* large) noexcept nogil
# ^ the output tensor and the end of the response: `"outputs":[...]}`, and the bytes behind it.
# False: it is not plain. large: takes the elements, or the bytes, and what follows them; NULL: all
# goes to `out`
