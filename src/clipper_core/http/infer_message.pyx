"""ModelInferRequest and ModelInferResponse. Source: `inference.proto`, and protobuf.dev,
"Encoding".

As protobuf has it, unknown fields and fields of another kind are skipped, repeated numbers may be
packed or not, of a field that comes twice the last value counts, parts of `contents` are joined,
and text is UTF-8. A reader keeps no more of what a request repeats than its limits: it counts the
rest.
"""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memcpy

from clipper_core.http.protobuf cimport (
    PROTO_FIELD, PROTO_FIXED32, PROTO_FIXED64, PROTO_TEXT, PROTO_VARINT, PROTO_WRONG,
    ProtoField, ProtoReader, proto_next, proto_put_fixed64, proto_put_head, proto_put_number,
    proto_put_text, proto_put_varint, proto_varint,
)
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport i64, u32, u64, u8
from clipper_core.runtime.status cimport NO_MEMORY, raise_for

cdef enum Number:               # how the numbers of a field of InferTensorContents are written
    AS_BOOL = 0
    AS_32 = 1                   # a varint of which 32 bits count
    AS_64 = 2
    FIXED_4 = 3
    FIXED_8 = 4

cdef enum:
    CONTENTS = 8                # fields of InferTensorContents
    BYTES_CONTENTS = 8          # the number of its field that has no numbers

cdef u8[CONTENTS] _numbers = [AS_BOOL, AS_32, AS_64, AS_32, AS_64, FIXED_4, FIXED_8, 0]
cdef tuple _names = ("bool_contents", "int_contents", "int64_contents", "uint_contents",
                     "uint64_contents", "fp32_contents", "fp64_contents", "bytes_contents")
cdef dict _no_parameters = {}


class MalformedMessage(ValueError):
    """The bytes are no message of protobuf, or its text is no UTF-8."""


cdef cppclass Contents:         # the numbers of a tensor, by the field's number less one
    Bytes[CONTENTS] fields


cdef bint _next(ProtoReader* reader, ProtoField* field) except -1:
    """Read a field. Return False at the end of the message."""
    cdef int came = proto_next(reader, field)
    if came == PROTO_WRONG:
        raise MalformedMessage("the bytes are no message of protobuf")
    return came == PROTO_FIELD


cdef ProtoReader _inside(const ProtoField* field) noexcept nogil:
    cdef ProtoReader reader
    reader.at = field.at
    reader.end = field.at + field.bytes
    return reader


cdef str _text(const ProtoField* field):
    try:
        return PyUnicode_DecodeUTF8(<const char*> field.at, <Py_ssize_t> field.bytes, NULL)
    except UnicodeDecodeError:
        raise MalformedMessage("a text is no UTF-8") from None


cdef inline double _double(u64 bits) noexcept nogil:
    cdef double value
    memcpy(&value, &bits, 8)
    return value


cdef object _value(ProtoField* at, object found):
    """Read an InferParameter, or a part of one. found: the value so far; None: there is none."""
    cdef ProtoReader reader = _inside(at)
    cdef ProtoField field
    while _next(&reader, &field):
        if field.kind == PROTO_VARINT and field.number == 1:
            found = field.value != 0
        elif field.kind == PROTO_VARINT and field.number == 2:
            found = <i64> field.value
        elif field.kind == PROTO_TEXT and field.number == 3:
            found = _text(&field)
        elif field.kind == PROTO_FIXED64 and field.number == 4:
            found = _double(field.value)
        elif field.kind == PROTO_VARINT and field.number == 5:
            found = field.value
    return found


cdef int _parameter(ProtoField* at, dict into, Py_ssize_t most) except -1:
    """Read an entry of a map of parameters. One more than `most` are kept. An entry with an unknown
    field is itself unknown, as for the package protobuf."""
    cdef ProtoReader reader = _inside(at)
    cdef ProtoField field
    cdef str key = ""
    cdef object value = None
    cdef bint is_known = True
    while _next(&reader, &field):
        if field.kind == PROTO_TEXT and field.number == 1:
            key = _text(&field)
        elif field.kind == PROTO_TEXT and field.number == 2:
            value = _value(&field, value)
        else:
            is_known = False
    if is_known and (len(into) <= most or key in into):
        into[key] = value
    return 0


cdef void _put_number(Bytes* out, u8 kind, u64 value) noexcept nogil:
    cdef u32 half = <u32> value
    if kind == AS_BOOL:
        out.put_byte(value != 0)
    elif kind == AS_32 or kind == FIXED_4:
        out.put(&half, 4)
    else:
        out.put(&value, 8)


cdef bint _read_numbers(const ProtoField* field, u8 kind, Bytes* out) noexcept nogil:
    """Append the numbers of a field, packed or one. Return False if they are cut off."""
    cdef ProtoReader reader = _inside(field)
    cdef u32 size = 4 if kind == FIXED_4 else 8
    cdef u64 value = 0
    if field.kind == PROTO_TEXT and kind >= FIXED_4:
        out.put(field.at, field.bytes)
        return field.bytes % size == 0
    if field.kind == PROTO_TEXT:
        while reader.at < reader.end:
            if not proto_varint(&reader, &value):
                return False
            _put_number(out, kind, value)
        return True
    if field.kind == (PROTO_VARINT if kind < FIXED_4 else
                      PROTO_FIXED32 if kind == FIXED_4 else PROTO_FIXED64):
        _put_number(out, kind, field.value)
    return True


cdef int _contents(ProtoField* at, Contents* into, list texts) except -1:
    cdef ProtoReader reader = _inside(at)
    cdef ProtoField field
    while _next(&reader, &field):
        if field.number == BYTES_CONTENTS and field.kind == PROTO_TEXT:
            texts.append(PyBytes_FromStringAndSize(<const char*> field.at,
                                                   <Py_ssize_t> field.bytes))
        elif field.number < BYTES_CONTENTS:
            if not _read_numbers(&field, _numbers[field.number - 1],
                                 &into.fields[field.number - 1]):
                raise MalformedMessage("numbers of a tensor are cut off")
    return 0


cdef dict _filled(Contents* contents, list texts):
    """Return the fields that have elements, by name."""
    cdef dict found = {}
    cdef Bytes* one
    cdef int i
    for i in range(CONTENTS - 1):
        one = &contents.fields[i]
        if one.lost:
            raise_for(NO_MEMORY, "no memory for a tensor")
        if one.size():
            found[_names[i]] = PyBytes_FromStringAndSize(<const char*> one.at(),
                                                         <Py_ssize_t> one.size())
    if texts:
        found[_names[CONTENTS - 1]] = texts
    return found


@cython.final
cdef class InferTensor:
    """An input tensor.

    shape: at most `dims_max` dimensions and one more. contents: None, or the fields of
    InferTensorContents that have elements, by name: numbers as packed bytes of the machine's order
    (bool 1, int, uint and fp32 4, others 8 bytes each), and bytes_contents as a list. parameters:
    None stands for one without a value.
    """
    cdef readonly str name
    cdef readonly str datatype
    cdef readonly tuple shape
    cdef readonly dict parameters
    cdef readonly dict contents


@cython.final
cdef class InferOutput:
    """An output that a request names."""
    cdef readonly str name
    cdef readonly dict parameters


cdef int _dims(const ProtoField* field, list into, Py_ssize_t most) except -1:
    cdef ProtoReader reader = _inside(field)
    cdef u64 value = 0
    if field.kind == PROTO_VARINT:
        if len(into) <= most:
            into.append(<i64> field.value)
        return 0
    while reader.at < reader.end:
        if not proto_varint(&reader, &value):
            raise MalformedMessage("a shape is cut off")
        if len(into) <= most:
            into.append(<i64> value)
    return 0


cdef InferTensor _tensor(ProtoField* at, Py_ssize_t parameters_max, Py_ssize_t dims_max):
    cdef ProtoReader reader = _inside(at)
    cdef ProtoField field
    cdef InferTensor found = InferTensor.__new__(InferTensor)
    cdef Contents contents
    cdef list shape = []
    cdef list texts = []
    cdef bint has_contents = False
    found.name = ""
    found.datatype = ""
    found.parameters = _no_parameters
    while _next(&reader, &field):
        if field.number == 3 and (field.kind == PROTO_VARINT or field.kind == PROTO_TEXT):
            _dims(&field, shape, dims_max)
        elif field.kind != PROTO_TEXT:
            continue
        elif field.number == 1:
            found.name = _text(&field)
        elif field.number == 2:
            found.datatype = _text(&field)
        elif field.number == 4:
            if found.parameters is _no_parameters:
                found.parameters = {}
            _parameter(&field, found.parameters, parameters_max)
        elif field.number == 5:
            has_contents = True
            _contents(&field, &contents, texts)
    found.shape = tuple(shape)
    found.contents = _filled(&contents, texts) if has_contents else None
    return found


cdef InferOutput _output(ProtoField* at, Py_ssize_t parameters_max):
    cdef ProtoReader reader = _inside(at)
    cdef ProtoField field
    cdef InferOutput found = InferOutput.__new__(InferOutput)
    found.name = ""
    found.parameters = {}
    while _next(&reader, &field):
        if field.kind == PROTO_TEXT and field.number == 1:
            found.name = _text(&field)
        elif field.kind == PROTO_TEXT and field.number == 2:
            _parameter(&field, found.parameters, parameters_max)
    return found


@cython.final
cdef class InferMessage:
    """A ModelInferRequest. Raises MalformedMessage.

    tensors_max, parameters_max, dims_max: of lists and maps, up to one more is kept. inputs,
    outputs, raw_input_contents: with input_count, output_count and raw_count, which count all of
    them. raw_input_contents: views of `data`.
    """
    cdef readonly str model_name
    cdef readonly str model_version
    cdef readonly str id
    cdef readonly dict parameters
    cdef readonly list inputs
    cdef readonly list outputs
    cdef readonly list raw_input_contents
    cdef readonly u32 input_count
    cdef readonly u32 output_count
    cdef readonly u32 raw_count

    def __init__(self, bytes data, Py_ssize_t tensors_max, Py_ssize_t parameters_max,
                 Py_ssize_t dims_max):
        cdef const u8* start = <const u8*> (<const char*> data)
        cdef ProtoReader reader
        cdef ProtoField field
        reader.at = start
        reader.end = start + len(data)
        self.model_name = ""
        self.model_version = ""
        self.id = ""
        self.parameters = {}
        self.inputs = []
        self.outputs = []
        self.raw_input_contents = []
        while _next(&reader, &field):
            if field.kind != PROTO_TEXT:
                continue
            if field.number == 1:
                self.model_name = _text(&field)
            elif field.number == 2:
                self.model_version = _text(&field)
            elif field.number == 3:
                self.id = _text(&field)
            elif field.number == 4:
                _parameter(&field, self.parameters, parameters_max)
            elif field.number == 5:
                tensor = _tensor(&field, parameters_max, dims_max)
                if self.input_count < tensors_max:
                    self.inputs.append(tensor)
                self.input_count += 1
            elif field.number == 6:
                output = _output(&field, parameters_max)
                if self.output_count < tensors_max:
                    self.outputs.append(output)
                self.output_count += 1
            elif field.number == 7:
                if self.raw_count < tensors_max:
                    at = field.at - start
                    self.raw_input_contents.append(
                        memoryview(data)[at:at + <Py_ssize_t> field.bytes])
                self.raw_count += 1


# -- responses

cdef int _put_str(Bytes* out, u32 number, str text) except -1:
    cdef bytes data
    if text:
        data = text.encode()
        proto_put_text(out, number, <const char*> data, <u64> len(data))
    return 0


cdef int _put_value(Bytes* out, object value) except -1:
    """Write an InferParameter."""
    cdef double number
    cdef u64 bits
    if isinstance(value, bool):
        proto_put_number(out, 1, 1 if value else 0)
    elif isinstance(value, int):
        if value < 1 << 63:
            proto_put_number(out, 2, <u64> <i64> value)
        else:
            proto_put_number(out, 5, value)
    elif isinstance(value, str):
        data = value.encode()
        proto_put_text(out, 3, <const char*> data, <u64> len(data))
    else:
        number = value
        memcpy(&bits, &number, 8)
        proto_put_fixed64(out, 4, bits)
    return 0


cdef int _put_parameters(Bytes* out, u32 number, object parameters) except -1:
    cdef Bytes entry
    cdef Bytes content
    for key, value in parameters.items():
        entry.clear()
        content.clear()
        _put_str(&entry, 1, key)
        _put_value(&content, value)
        proto_put_text(&entry, 2, content.at(), content.size())
        proto_put_text(out, number, entry.at(), entry.size())
        if entry.lost or content.lost:
            out.lost = True
    return 0


cdef int _put_output(Bytes* out, str name, str datatype, object shape, object parameters) except -1:
    cdef Bytes entry
    cdef Bytes dims
    _put_str(&entry, 1, name)
    _put_str(&entry, 2, datatype)
    for n in shape:
        proto_put_varint(&dims, <u64> <i64> n)
    if dims.size():
        proto_put_text(&entry, 3, dims.at(), dims.size())
    if parameters:
        _put_parameters(&entry, 4, parameters)
    proto_put_text(out, 5, entry.at(), entry.size())
    if entry.lost or dims.lost:
        out.lost = True
    return 0


def infer_response(str model, str version, str id, outputs, parameters):
    """Return a ModelInferResponse as bytes.

    outputs: (name, datatype, shape, bytes of the tensor, parameters) of each. parameters: values by
    name: bool, int, float or str. Raises OutOfMemory; OverflowError for a whole number of more than
    64 bits.
    """
    cdef Bytes out
    cdef bytes data
    _put_str(&out, 1, model)
    _put_str(&out, 2, version)
    _put_str(&out, 3, id)
    if parameters:
        _put_parameters(&out, 4, parameters)
    for name, datatype, shape, _, own in outputs:
        _put_output(&out, name, datatype, shape, own)
    for _, _, _, data, _ in outputs:
        proto_put_head(&out, 6, <u64> len(data))
        out.put(<const char*> data, <u64> len(data))
    if out.lost:
        raise_for(NO_MEMORY, "no memory for a response")
    return PyBytes_FromStringAndSize(<const char*> out.at(), <Py_ssize_t> out.size())


def stream_infer_response(str error, bytes response):
    """Return a ModelStreamInferResponse as bytes. error: empty for none; response: those of a
    ModelInferResponse. Raises OutOfMemory."""
    cdef Bytes out
    _put_str(&out, 1, error)
    proto_put_text(&out, 2, <const char*> response, <u64> len(response))
    if out.lost:
        raise_for(NO_MEMORY, "no memory for a response")
    return PyBytes_FromStringAndSize(<const char*> out.at(), <Py_ssize_t> out.size())
