"""Encoder of OTLP/HTTP: `ExportTraceServiceRequest` of opentelemetry-proto, in protobuf.

It needs eight messages with about twenty fields, and the base installation has no protobuf. Tests
decode the result with opentelemetry-proto's classes. Source: opentelemetry-proto,
trace/v1/trace.proto.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from clipper.mesh.splice import varint

INTERNAL, SERVER = 1, 2
_ERROR: Final = 2
_NUMBER, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Attribute = str | int | float | bool | Sequence[str]


class SpanLink(NamedTuple):
    """A link to another span, by hexadecimal ids."""

    trace_id: str
    span_id: str


class Span(NamedTuple):
    """A span. start_ns, end_ns: nanoseconds since the epoch. error: a short reason, or empty."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    kind: int = INTERNAL
    attributes: Mapping[str, Attribute] = {}
    links: Sequence[SpanLink] = ()
    error: str = ""
    state: str = ""


def encode(spans: Iterable[Span], resource: Mapping[str, str], version: str) -> bytes:
    """Encode a request with all spans in one resource and one scope."""
    scope = _text(1, "clipper") + _text(2, version)
    scoped = _message(1, scope) + b"".join([_message(2, _span(span)) for span in spans])
    whole = _message(1, _attributes(1, resource)) + _message(2, scoped)
    return _message(1, whole)


def _span(span: Span) -> bytes:
    parts = [
        _bytes(1, bytes.fromhex(span.trace_id)),
        _bytes(2, bytes.fromhex(span.span_id)),
        _text(3, span.state),
    ]
    parts += [_bytes(4, bytes.fromhex(span.parent_id)), _text(5, span.name), _whole(6, span.kind)]
    parts += [_fixed64(7, span.start_ns), _fixed64(8, span.end_ns), _attributes(9, span.attributes)]
    for link in span.links:
        parts.append(
            _message(
                13, _bytes(1, bytes.fromhex(link.trace_id)) + _bytes(2, bytes.fromhex(link.span_id))
            )
        )
    if span.error:
        parts.append(_message(15, _text(2, span.error) + _whole(3, _ERROR)))
    parts.append(_tag(16, _FIXED32) + struct.pack("<I", 1))  # sampled
    return b"".join(parts)


def _attributes(field: int, attributes: Mapping[str, Attribute]) -> bytes:
    return b"".join(
        [
            _message(field, _text(1, key) + _message(2, _value(value)))
            for key, value in attributes.items()
        ]
    )


def _value(value: Attribute) -> bytes:
    if isinstance(value, bool):
        return _tag(2, _NUMBER) + bytes((value,))
    if isinstance(value, int):
        return _tag(3, _NUMBER) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if isinstance(value, float):
        return _tag(4, _FIXED64) + struct.pack("<d", value)
    if isinstance(value, str):
        return _tag(1, _BYTES) + _sized(value.encode("utf-8", "replace"))
    return _message(5, b"".join([_message(1, _value(item)) for item in value]))


# -- the wire format of protobuf


def _tag(field: int, kind: int) -> bytes:
    return varint(field << 3 | kind)


def _sized(data: bytes) -> bytes:
    return varint(len(data)) + data


def _message(field: int, data: bytes) -> bytes:
    return _tag(field, _BYTES) + _sized(data)


def _bytes(field: int, data: bytes) -> bytes:
    return _message(field, data) if data else b""


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode("utf-8", "replace"))


def _whole(field: int, number: int) -> bytes:
    return _tag(field, _NUMBER) + varint(number) if number else b""


def _fixed64(field: int, number: int) -> bytes:
    return _tag(field, _FIXED64) + struct.pack("<Q", number)
