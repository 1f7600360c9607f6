"""Parsing of a traceparent, and the traceparent of an answer."""

import pytest

from clipper.frontend.tracing.context import trace_of

ID, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("flags", "sampled"), [(b"00", False), (b"01", True), (b"02", False), (b"ff", True)]
)
def test_it_is_read(flags: bytes, sampled: bool) -> None:
    trace = trace_of(b"-".join((b"00", ID, SPAN, flags)))
    assert trace is not None
    assert (trace.trace_id, trace.parent_id, trace.sampled) == (ID.decode(), SPAN.decode(), sampled)


def test_the_answer_names_the_trace_and_a_span_of_its_own() -> None:
    header = b"00-%s-%s-01" % (ID, SPAN)
    one, other = trace_of(header), trace_of(header)
    assert one is not None
    assert other is not None
    assert one.header == f"00-{ID.decode()}-{one.span_id}-01".encode()
    assert len({one.span_id, other.span_id, SPAN.decode()}) == 3
    again = trace_of(one.header)
    assert again is not None
    assert again.parent_id == one.span_id


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"00",
        b"00-%s-%s" % (ID, SPAN),
        b"00-%s-%s-01-more" % (ID, SPAN),
        b"ff-%s-%s-01" % (ID, SPAN),
        b"00-%s-%s-01" % (ID.upper(), SPAN),
        b"00-%s-%s-01" % (b"0" * 32, SPAN),
        b"00-%s-%s-01" % (ID, b"0" * 16),
        b"00-%s-%s-1" % (ID, SPAN),
        b" 00-%s-%s-01" % (ID, SPAN),
        b"01-%s-%s-01x" % (ID, SPAN),
        b"\xff" * 55,
    ],
)
def test_what_is_none_counts_as_absent(header: bytes) -> None:
    assert trace_of(header) is None


def test_a_later_version_may_append_fields() -> None:
    trace = trace_of(b"01-%s-%s-01-what-comes" % (ID, SPAN))
    assert trace is not None
    assert trace.header.startswith(b"00-")
