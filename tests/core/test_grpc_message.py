"""Calls of gRPC by bytes alone: their messages, and what HTTP/2 makes of their answers."""

import random
import struct
from typing import Any

import pytest

from clipper_core.http.grpc_message import GrpcReader
from clipper_core.http.hpack import HpackDecoder
from clipper_core.http.http2_protocol import Http2Error, Http2EventKind, Http2Protocol
from tests.core.test_http2_protocol import (
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    frame,
    frames_of,
    headers,
)

CALL = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"here"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
OK = [(b"grpc-status", b"0")]


def prefixed(data: bytes, is_compressed: int = 0) -> bytes:
    return struct.pack(">BI", is_compressed, len(data)) + data


@pytest.mark.parametrize("seed", range(6))
def test_messages_do_not_depend_on_where_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sent = [(rng.random() < 0.3, rng.randbytes(rng.choice((0, 1, 5, 700)))) for _ in range(20)]
    data = b"".join(prefixed(each, is_compressed) for is_compressed, each in sent)
    reader, found = GrpcReader(1000), []
    while data:
        size = rng.choice((1, 3, 9, 2000))
        found += reader.feed(data[:size])
        data = data[size:]
    assert found == sent
    assert (reader.held, reader.is_wrong, reader.is_too_large) == (0, False, False)


def test_a_message_that_is_too_large_is_refused_by_its_length() -> None:
    reader = GrpcReader(3)
    assert reader.feed(prefixed(b"abc") + struct.pack(">BI", 0, 4)) == [(False, b"abc")]
    assert reader.is_too_large
    assert reader.feed(b"more" * 1000) == []
    assert reader.held == 0, "nothing of it is kept"


def test_a_message_begins_with_0_or_1() -> None:
    reader = GrpcReader(9)
    assert reader.feed(prefixed(b"a", 2) + prefixed(b"b")) == []
    assert reader.is_wrong


class Called:
    """A connection that serves calls, after its preface."""

    def __init__(self, settings: bytes = b"", ping_us_min: int = 0) -> None:
        self.protocol = Http2Protocol(9, 4096, 0, True, ping_us_min)
        self.hpack = HpackDecoder()
        self.sent: list[Any] = []
        self.feed(PREFACE + frame(SETTINGS, payload=settings))
        self.sent.clear()

    def feed(self, *data: bytes, now_us: int = 0) -> list[Any]:
        self.protocol.feed(b"".join(data), now_us)
        self.take()
        return self.protocol.events()

    def take(self) -> None:
        for kind, flags, stream, payload in frames_of(self.protocol.take(1 << 20)):
            shown: Any = self.hpack.decode(payload) if kind == HEADERS else payload
            self.sent.append((kind, flags, stream, shown))

    def reply(self, *words: Any) -> bool:
        found = self.protocol.reply(*words)
        self.take()
        return found


HEAD = [(b":status", b"200"), (b"content-type", b"application/grpc")]


def test_a_call_has_a_head_messages_and_an_end() -> None:
    called = Called()
    (head,) = called.feed(headers(1, CALL, 0))
    assert head[:2] == (Http2EventKind.CALLED, 1)
    assert head[2].startswith(b"POST /a.B/C HTTP/1.1\r\nhost: here\r\ncontent-type: application/gr")
    came = called.feed(frame(DATA, 0, 1, b"ab"), frame(DATA, END_STREAM, 1, b"c"))
    assert [(kind, text) for kind, _, text, _ in came] == [
        (Http2EventKind.WENT_ON, b"abc"),
        (Http2EventKind.CALL_ENDED, b""),
    ]
    assert called.reply(1, b"xyz", [*OK, (b"a", b"b")])
    assert called.sent == [
        (HEADERS, 4, 1, HEAD),
        (DATA, 0, 1, prefixed(b"xyz")),
        (HEADERS, 5, 1, [*OK, (b"a", b"b")]),
    ]
    assert called.protocol.events() == [(Http2EventKind.ENDED, 1, b"", 0)]
    assert not called.reply(1, b"more"), "the call has ended"


def test_a_call_without_data_ends_at_once() -> None:
    called = Called()
    kinds = [kind for kind, *_ in called.feed(headers(1, CALL))]
    assert kinds == [Http2EventKind.CALLED, Http2EventKind.CALL_ENDED]
    assert called.reply(1, None, OK)
    assert called.sent == [(HEADERS, 5, 1, [*HEAD, *OK])], "one block of fields is enough"


def test_an_answer_before_the_end_of_its_request_stops_it() -> None:
    called = Called()
    called.feed(headers(1, CALL, 0))
    called.reply(1, None, OK)
    assert called.sent[-1] == (RST_STREAM, 0, 1, bytes(4))
    assert called.feed(frame(DATA, 0, 1, b"late"))[0][0] == Http2EventKind.ENDED
    assert not called.protocol.is_shut


def test_messages_and_trailers_wait_for_windows() -> None:
    called = Called(struct.pack(">HI", 4, 4))
    called.feed(headers(1, CALL))
    called.reply(1, b"ab")
    called.reply(1, b"", None)
    called.reply(1, None, OK)
    assert [(kind, shown) for kind, _, _, shown in called.sent[1:]] == [(DATA, prefixed(b"ab")[:4])]
    assert called.protocol.unsent(1) == 8
    called.feed(frame(WINDOW, 0, 1, struct.pack(">I", 100)))
    rest = prefixed(b"ab")[4:] + prefixed(b"")
    assert called.sent[2:] == [(DATA, 0, 1, rest), (HEADERS, 5, 1, OK)]


@pytest.mark.parametrize(
    "fields",
    [
        [*CALL[:4], (b"content-type", b"text/plain")],
        [*CALL[:4], (b"content-type", b"application/grpc-web")],
        [(b":method", b"GET"), *CALL[1:]],
        CALL[:4],
    ],
)
def test_what_is_no_call_is_a_request(fields: Any) -> None:
    (kind, *_), *_ = Called().feed(headers(1, fields))
    assert kind == Http2EventKind.BEGAN
    protocol = Http2Protocol(9, 4096)
    protocol.feed(PREFACE + frame(SETTINGS) + headers(1, CALL))
    assert [kind for kind, *_ in protocol.events()] == [Http2EventKind.BEGAN], "calls are not asked"


def test_blanks_at_the_ends_of_metadata_are_dropped() -> None:
    given = [*CALL, (b"a", b" \tb c \t"), (b"authorization", b"Bearer ")]
    (head, *_) = Called().feed(headers(1, given))
    assert head[2].endswith(b"\r\na: b c\r\nauthorization: Bearer\r\n\r\n")


@pytest.mark.parametrize("value", [b"application/grpc+proto", b"application/grpc;charset=utf-8"])
def test_forms_of_the_type_of_calls(value: bytes) -> None:
    (kind, *_), *_ = Called().feed(headers(1, [*CALL[:4], (b"content-type", value)]))
    assert kind == Http2EventKind.CALLED


@pytest.mark.parametrize("first", [True, False])
def test_a_call_with_too_much_metadata_is_told(first: bool) -> None:
    large = [(b"a", b"x" * 5000)]
    fields = [*CALL[:4], *large, *CALL[4:]] if first else [*CALL, *large]
    assert Called().feed(headers(1, fields)) == [(Http2EventKind.CALL_TOO_LARGE, 1, b"", 0)]


def test_pings_without_answers_in_between_have_a_pause() -> None:
    called = Called(ping_us_min=1000)
    for i in range(6):
        called.feed(frame(PING, payload=bytes(8)), now_us=1 + 1000 * i)
    for i in range(5):
        called.feed(headers(2 * i + 1, CALL), now_us=6001)
        called.reply(2 * i + 1, None, OK)
        called.feed(frame(PING, payload=bytes(8)), now_us=6001)
    assert not called.protocol.is_shut
    for _ in range(3):
        called.feed(frame(PING, payload=bytes(8)), now_us=6002)
    assert called.protocol.error == (Http2Error.ENHANCE_YOUR_CALM, "too_many_pings")
    assert called.sent[-1][0] == GOAWAY
