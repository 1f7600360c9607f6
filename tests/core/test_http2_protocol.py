"""HTTP/2 by bytes alone: random conversations with the client of the library `h2`, what each frame
does in each state, and every bound that a client may reach."""

import random
import struct
from collections.abc import Iterator
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from clipper_core.http.hpack import hpack_encode
from clipper_core.http.http2_protocol import Http2Error, Http2EventKind, Http2Protocol

SEEDS = range(6)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM = 1
ACK = 1
END_HEADERS = 4
PADDED = 8
WITH_PRIORITY = 32
GET = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/a"), (b":authority", b"here")]
POST = [(b":method", b"POST"), *GET[1:]]
LIST_BYTES = 16384
STREAMS = 16


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def headers(stream: int, fields: Any = tuple(GET), flags: int = END_STREAM) -> bytes:
    return frame(HEADERS, flags | END_HEADERS, stream, hpack_encode(fields))


def frames_of(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    while data:
        size = int.from_bytes(data[:3], "big")
        yield data[3], data[4], int.from_bytes(data[5:9], "big") & (1 << 31) - 1, data[9 : 9 + size]
        data = data[9 + size :]


class Peer:
    """A connection after its preface, and what it has told and sent."""

    def __init__(self, streams_max: int = STREAMS, settings: bytes = b"") -> None:
        self.protocol = Http2Protocol(streams_max, LIST_BYTES)
        self.events: list[tuple[int, int, bytes, int]] = []
        self.frames: list[tuple[int, int, int, bytes]] = []
        self.feed(PREFACE + frame(SETTINGS, payload=settings))
        assert [sent[0] for sent in self.frames] == [SETTINGS, WINDOW, SETTINGS]
        self.frames.clear()

    def feed(self, *data: bytes, now_us: int = 0) -> "Peer":
        self.protocol.feed(b"".join(data), now_us)
        return self.take()

    def take(self, room: int = 1 << 20) -> "Peer":
        self.frames += frames_of(self.protocol.take(room))
        self.events += self.protocol.events()
        return self

    def answer(self, stream: int, text: bytes) -> "Peer":
        self.protocol.answer(stream, text)
        return self.take()

    @property
    def resets(self) -> list[tuple[int, int]]:
        return [
            (stream, int.from_bytes(payload, "big"))
            for kind, _, stream, payload in self.frames
            if kind == RST_STREAM
        ]

    @property
    def error(self) -> int | None:
        if not self.protocol.is_shut:
            return None
        kind, _, _, payload = self.frames[-1]
        assert kind == GOAWAY
        assert payload[8:].decode() == self.protocol.error[1]
        assert self.protocol.error[1]
        return int.from_bytes(payload[4:8], "big")


# -- random conversations


class World:
    """A client of `h2` and this server's side; bytes go to and fro in random pieces."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.server = Http2Protocol(STREAMS, LIST_BYTES)
        self.client = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding=None)
        )
        self.client.initiate_connection()
        self.client.update_settings(
            {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: self.rng.choice((2000, 65535, 1 << 20))}
        )
        self.sent: dict[int, bytes] = {}  # the message that the server should read
        self.body: dict[int, bytes] = {}  # the rest of a request's body
        self.got: dict[int, bytes] = {}
        self.left: dict[int, bytes] = {}  # the rest of a response
        self.wanted: dict[int, tuple[bytes, bytes]] = {}
        self.answered: dict[int, tuple[bytes, bytes]] = {}
        self.status: dict[int, bytes] = {}
        self.reset: set[int] = set()
        self.whole: set[int] = set()
        self.ended: set[int] = set()

    def ask(self) -> None:
        rng = self.rng
        if self.client.open_outbound_streams >= STREAMS:
            return
        stream = self.client.get_next_available_stream_id()
        method = rng.choice((b"GET", b"POST", b"PUT", b"HEAD"))
        body = rng.randbytes(rng.choice((0, 0, 1, 500, 70_000)))
        named = rng.random() < 0.5
        fields = [
            (b":method", method),
            (b":scheme", b"http"),
            (b":path", b"/%d?x=%d" % (stream, rng.randrange(9))),
            (b":authority", b"here:80"),
            (b"x-key", b"k" * rng.randrange(300)),
        ]
        if named:
            fields.append((b"content-length", b"%d" % len(body)))
        no_data = not body and rng.random() < 0.5
        self.client.send_headers(stream, fields, end_stream=no_data)
        framing = b"content-length: %d\r\n" % len(body) if named else b""
        if not named and not no_data:
            framing = b"transfer-encoding: chunked\r\n"
        self.sent[stream] = b"%s %s HTTP/1.1\r\nhost: here:80\r\nx-key: %s\r\n%s\r\n" % (
            method,
            fields[2][1],
            fields[4][1],
            framing,
        )
        self.got[stream] = b""
        self.body[stream] = body
        if no_data:
            self.whole.add(stream)
            del self.body[stream]

    def send_more(self) -> None:
        if not self.body:
            return
        stream = self.rng.choice(list(self.body))
        n = min(self.client.local_flow_control_window(stream), 16343, len(self.body[stream]))
        n = self.rng.randrange(n + 1)
        piece, self.body[stream] = self.body[stream][:n], self.body[stream][n:]
        padding = self.rng.choice((None, None, 0, 40))
        ends = not self.body[stream]
        if n + 41 > self.client.local_flow_control_window(stream):
            padding = None
        self.client.send_data(stream, piece, end_stream=ends, pad_length=padding)
        self.sent[stream] += piece if b"chunked" not in self.sent[stream] else b""
        if b"chunked" in self.sent[stream]:
            self.sent.setdefault(-stream, b"")
            self.sent[-stream] += piece
        if ends:
            self.whole.add(stream)
            del self.body[stream]

    def give_up(self) -> None:
        live = [stream for stream in self.got if stream in self.body]
        if live:
            stream = self.rng.choice(live)
            self.client.reset_stream(stream)
            self.reset.add(stream)
            del self.body[stream]

    def reply(self, stream: int, head_only: bool) -> None:
        rng = self.rng
        body = rng.randbytes(rng.choice((0, 1, 3000, 90_000)))
        status = rng.choice((b"200", b"404", b"503"))
        self.wanted[stream] = (status, b"" if head_only else body)
        head = b"HTTP/1.1 %s Some reason\r\nDate: now\r\nX-Key: a: b\r\n" % status
        if rng.random() < 0.5:
            text = head + b"content-length: %d\r\n\r\n" % len(body)
            self.left[stream] = text + (b"" if head_only else body)
            return
        text = head + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        while body and not head_only:
            piece = body[: rng.randrange(1, 40_000)]
            body = body[len(piece) :]
            text += b"%x\r\n%s\r\n" % (len(piece), piece)
        self.left[stream] = text + (b"" if head_only else b"0\r\n\r\n")

    def serve(self) -> None:
        for kind, stream, text, credit in self.server.events():
            assert kind in (Http2EventKind.BEGAN, Http2EventKind.WENT_ON, Http2EventKind.ENDED)
            self.server.consumed(stream, credit)
            if kind == Http2EventKind.ENDED:
                self.left.pop(stream, None)
                self.ended.add(stream)
                continue
            self.got[stream] += text
            if kind == Http2EventKind.BEGAN and self.rng.random() < 0.2:  # before its end
                self.reply(stream, text.startswith(b"HEAD"))
        for stream in self.whole - self.ended - self.wanted.keys():
            if self.is_whole(stream):
                self.reply(stream, self.got[stream].startswith(b"HEAD"))
        for stream in list(self.left):
            n = self.rng.choice((1, 100, 50_000))
            piece, self.left[stream] = self.left[stream][:n], self.left[stream][n:]
            self.server.answer(stream, piece)
            if not self.left.get(stream, b"x"):
                self.left.pop(stream, None)

    def is_whole(self, stream: int) -> bool:
        return stream in self.whole and self.got[stream] == self.expected(stream)

    def expected(self, stream: int) -> bytes:
        text = self.sent[stream]
        if b"chunked" in text:
            return self.got[stream] if self.got[stream].endswith(b"0\r\n\r\n") else b"?"
        return text

    def exchange(self) -> None:
        data = self.client.data_to_send()
        while data:
            n = self.rng.choice((1, 9, 700, len(data)))
            self.server.feed(data[:n])
            data = data[n:]
            if self.rng.random() < 0.1:
                self.serve()
        self.serve()
        data = self.server.take(self.rng.choice((0, 1000, 100_000)))
        assert not self.server.is_shut, self.server.error
        while data:
            n = self.rng.choice((9, 700, len(data)))
            self.heed(self.client.receive_data(data[:n]))
            data = data[n:]

    def heed(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, h2.events.ResponseReceived):
                fields = dict(event.headers)
                assert fields[b"x-key"] == b"a: b"
                assert b"connection" not in fields
                assert b"transfer-encoding" not in fields
                self.status[event.stream_id] = fields[b":status"]
                self.answered[event.stream_id] = (fields[b":status"], b"")
            elif isinstance(event, h2.events.DataReceived):
                status, body = self.answered[event.stream_id]
                self.answered[event.stream_id] = (status, body + event.data)
                self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                assert event.error_code == Http2Error.NO_ERROR
                assert event.stream_id in self.answered
                self.body.pop(event.stream_id, None)

    def check(self) -> None:
        for stream, text in self.got.items():
            head, _, body = text.partition(b"\r\n\r\n")
            if stream in self.whole:
                assert self.sent[stream].startswith(head)
                if stream not in self.wanted or b"chunked" not in head:
                    continue
                piece, at = b"", 0
                while body[at:] and not body[at:].startswith(b"0\r\n"):
                    line = body.index(b"\r\n", at)
                    size = int(body[at:line], 16)
                    piece += body[line + 2 : line + 2 + size]
                    at = line + 4 + size
                assert self.sent.get(-stream, b"").startswith(piece)
        for stream in self.wanted:
            if stream not in self.reset:
                assert self.answered[stream] == self.wanted[stream]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_conversations_with_another_client(seed: int) -> None:
    world = World(seed)
    for _ in range(200):
        step = world.rng.random()
        if step < 0.2:
            world.ask()
        elif step < 0.6:
            world.send_more()
        elif step < 0.63:
            world.give_up()
        elif step < 0.65:
            world.client.ping(b"12345678")
        if world.rng.random() < 0.5:
            world.exchange()
    for _ in range(3000):
        if not (world.body or world.left or world.server.streams):
            break
        world.send_more()
        world.exchange()
    world.exchange()
    assert not world.body
    assert not world.left
    assert not world.server.streams
    assert len(world.wanted) > 10
    world.check()


def test_events_do_not_depend_on_where_bytes_are_cut() -> None:
    fields = [*POST, (b"content-length", b"5"), (b"x-y", b"z" * 40)]
    block = hpack_encode(fields)
    data = (
        PREFACE
        + frame(SETTINGS, payload=struct.pack(">HI", 4, 100))
        + frame(HEADERS, 0, 1, block[:20])
        + frame(CONTINUATION, END_HEADERS, 1, block[20:])
        + frame(DATA, PADDED, 1, b"\x03abc\0\0\0")
        + headers(3)
        + frame(DATA, END_STREAM, 1, b"de")
        + frame(PING, 0, 0, b"12345678")
        + frame(RST_STREAM, 0, 3, bytes(4))
    )

    def outcome(pieces: list[bytes]) -> tuple[dict[int, bytes], list[int], bytes]:
        protocol = Http2Protocol(STREAMS, LIST_BYTES)
        texts, ended = dict[int, bytes](), list[int]()
        for piece in pieces:
            protocol.feed(piece)
            for kind, stream, text, _ in protocol.events():
                texts[stream] = texts.get(stream, b"") + text
                ended += [stream] * (kind == Http2EventKind.ENDED)
        return texts, ended, protocol.take(0)

    whole = outcome([data])
    assert whole[0][1].endswith(b"\r\n\r\nabcde")
    assert whole[1] == [3]
    for cut in range(len(data)):
        assert outcome([data[:cut], data[cut:]]) == whole
    assert outcome([data[i : i + 1] for i in range(len(data))]) == whole


# -- what a request becomes


def test_a_request_is_a_message_of_http_1() -> None:
    peer = Peer().feed(headers(1, [*GET, (b"accept", b"*/*"), (b"te", b"trailers")]))
    text = b"GET /a HTTP/1.1\r\nhost: here\r\naccept: */*\r\n\r\n"
    assert peer.events == [(Http2EventKind.BEGAN, 1, text, 0)]
    peer = Peer().feed(
        headers(1, POST, 0), frame(DATA, 0, 1, b"abc"), frame(DATA, END_STREAM, 1, b"de")
    )
    text = (
        b"POST /a HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    assert peer.events == [(Http2EventKind.BEGAN, 1, text, 5)]
    peer = Peer().feed(
        headers(1, [*POST, (b"content-length", b"3")], 0), frame(DATA, 0, 1, b"abc"),
        headers(1, [(b"x-trailer", b"y")]),
    )  # fmt: skip
    text = b"POST /a HTTP/1.1\r\nhost: here\r\ncontent-length: 3\r\n\r\nabc"
    assert peer.events == [(Http2EventKind.BEGAN, 1, text, 3)]
    connect = [(b":method", b"CONNECT"), (b":authority", b"there:1")]
    assert Peer().feed(headers(1, connect)).events[0][2].startswith(b"CONNECT there:1 HTTP/1.1\r\n")


MALFORMED = {
    "no method": GET[1:],
    "no scheme": [GET[0], *GET[2:]],
    "no path": [*GET[:2], GET[3]],
    "an empty path": [*GET[:2], (b":path", b""), GET[3]],
    "a path without a slash": [*GET[:2], (b":path", b"a"), GET[3]],
    "a path with a blank": [*GET[:2], (b":path", b"/a HTTP/1.1"), GET[3]],
    "a star with GET": [*GET[:2], (b":path", b"*"), GET[3]],
    "a method with a blank": [(b":method", b"GET /x HTTP/1.1"), *GET[1:]],
    "an authority with a blank": [*GET[:3], (b":authority", b"a b")],
    "a method that comes twice": [GET[0], *GET],
    "a path that comes twice": [*GET, GET[2]],
    "a scheme that comes twice": [*GET, GET[1]],
    "an unknown field with a colon": [*GET, (b":colour", b"red")],
    "a status": [*GET, (b":status", b"200")],
    "a field before them": [(b"a", b"b"), *GET],
    "a capital letter": [*GET, (b"Accept", b"x")],
    "an empty name": [*GET, (b"", b"x")],
    "a blank in a name": [*GET, (b"a b", b"x")],
    "a colon in a name": [*GET, (b"a:b", b"x")],
    "a line break in a name": [*GET, (b"a\r\nb", b"x")],
    "a byte above ASCII in a name": [*GET, (b"\xe9", b"x")],
    "a line break": [*GET, (b"a", b"x\ny")],
    "a carriage return": [*GET, (b"a", b"x\ry")],
    "NUL": [*GET, (b"a", b"x\0y")],
    "a blank before a value": [*GET, (b"a", b" x")],
    "a blank after a value": [*GET, (b"a", b"x\t")],
    "connection": [*GET, (b"connection", b"close")],
    "keep-alive": [*GET, (b"keep-alive", b"1")],
    "proxy-connection": [*GET, (b"proxy-connection", b"close")],
    "transfer-encoding": [*GET, (b"transfer-encoding", b"chunked")],
    "upgrade": [*GET, (b"upgrade", b"h2c")],
    "te": [*GET, (b"te", b"gzip")],
    "another host": [*GET, (b"host", b"there")],
    "two hosts": [*GET[:3], (b"host", b"here"), (b"host", b"here")],
    "two lengths": [*GET, (b"content-length", b"0"), (b"content-length", b"0")],
    "a length that is no number": [*GET, (b"content-length", b"+0")],
    "no length": [*GET, (b"content-length", b"")],
    "a body that is missing": [*POST, (b"content-length", b"1")],
    "CONNECT with a path": [(b":method", b"CONNECT"), *GET[1:]],
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_requests_end_their_stream_only(what: str) -> None:
    peer = Peer().feed(headers(1, MALFORMED[what]))
    assert peer.resets == [(1, Http2Error.PROTOCOL_ERROR)]
    assert not [event for event in peer.events if event[0] == Http2EventKind.BEGAN]
    peer.feed(headers(3))
    assert peer.events[-1][:2] == (Http2EventKind.BEGAN, 3)


def test_malformed_bodies_and_trailers_end_their_stream_only() -> None:
    told = [*POST, (b"content-length", b"3")]
    for rest in (
        frame(DATA, END_STREAM, 1, b"ab"),
        frame(DATA, 0, 1, b"abcd"),
        frame(DATA, 0, 1, b"abc") + headers(1, [(b"a", b"b")], 0),
        frame(DATA, 0, 1, b"abc") + headers(1, [(b":path", b"/")]),
        frame(DATA, 0, 1, b"ab") + headers(1, [(b"a", b"b")]),
    ):
        peer = Peer().feed(headers(1, told, 0), rest)
        assert peer.resets == [(1, Http2Error.PROTOCOL_ERROR)]
        assert peer.events[-1][:2] == (Http2EventKind.ENDED, 1)
        assert peer.feed(headers(3)).events[-1][:2] == (Http2EventKind.BEGAN, 3)


def test_fields_above_the_limit_are_told_and_change_the_table() -> None:
    peer = Peer()
    large = b"".join(b"\x40\x03x-%c\x7f\x81\x0f" % c + b"y" * 2048 for c in b"abcdefghi")
    block = hpack_encode(GET) + large
    peer.feed(
        frame(HEADERS, END_STREAM, 1, block[:16000]),
        frame(CONTINUATION, END_HEADERS, 1, block[16000:]),
    )
    assert peer.events == [(Http2EventKind.TOO_LARGE, 1, b"", 0)]
    peer.events.clear()
    peer.feed(frame(HEADERS, END_STREAM | END_HEADERS, 3, hpack_encode(GET) + b"\xbe"))
    assert peer.events[0][2].endswith(b"x-i: " + b"y" * 2048 + b"\r\n\r\n")
    many = [*GET, *[(b"a", b"")] * 125]
    assert Peer().feed(headers(1, many)).events[0][0] == Http2EventKind.TOO_LARGE
    assert Peer().feed(headers(1, many[:-1])).events[0][0] == Http2EventKind.BEGAN


# -- frames and states

ERROR = Http2Error
SHUTS = {
    "DATA without a stream": (frame(DATA), ERROR.PROTOCOL_ERROR),
    "DATA of an idle stream": (frame(DATA, 0, 1, b"a"), ERROR.PROTOCOL_ERROR),
    "DATA padded without a length": (
        headers(1, POST, 0) + frame(DATA, PADDED, 1), ERROR.FRAME_SIZE_ERROR),
    "DATA with too much padding": (
        headers(1, POST, 0) + frame(DATA, PADDED, 1, b"\x02a"), ERROR.PROTOCOL_ERROR),
    "HEADERS without a stream": (headers(0), ERROR.PROTOCOL_ERROR),
    "HEADERS of an even stream": (headers(2), ERROR.PROTOCOL_ERROR),
    "HEADERS of a smaller stream": (headers(5) + headers(3), ERROR.STREAM_CLOSED),
    "HEADERS with too much padding": (
        frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09\x82"), ERROR.PROTOCOL_ERROR),
    "HEADERS with half a priority": (
        frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, b"abc"), ERROR.FRAME_SIZE_ERROR),
    "HEADERS that are malformed": (
        frame(HEADERS, END_HEADERS, 1, b"\x80"), ERROR.COMPRESSION_ERROR),
    "PRIORITY without a stream": (frame(PRIORITY, 0, 0, bytes(5)), ERROR.PROTOCOL_ERROR),
    "PRIORITY of four bytes": (frame(PRIORITY, 0, 1, bytes(4)), ERROR.FRAME_SIZE_ERROR),
    "RST_STREAM without a stream": (frame(RST_STREAM, 0, 0, bytes(4)), ERROR.PROTOCOL_ERROR),
    "RST_STREAM of an idle stream": (frame(RST_STREAM, 0, 1, bytes(4)), ERROR.PROTOCOL_ERROR),
    "RST_STREAM of five bytes": (
        headers(1) + frame(RST_STREAM, 0, 1, bytes(5)), ERROR.FRAME_SIZE_ERROR),
    "SETTINGS of a stream": (frame(SETTINGS, 0, 1), ERROR.PROTOCOL_ERROR),
    "SETTINGS cut off": (frame(SETTINGS, 0, 0, bytes(5)), ERROR.FRAME_SIZE_ERROR),
    "an acknowledgement with content": (
        frame(SETTINGS, ACK, 0, bytes(6)), ERROR.FRAME_SIZE_ERROR),
    "push of 2": (frame(SETTINGS, 0, 0, struct.pack(">HI", 2, 2)), ERROR.PROTOCOL_ERROR),
    "a window of 2^31": (
        frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)), ERROR.FLOW_CONTROL_ERROR),
    "frames of 16383": (
        frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 16383)), ERROR.PROTOCOL_ERROR),
    "frames of 2^24": (
        frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1 << 24)), ERROR.PROTOCOL_ERROR),
    "33 entries": (frame(SETTINGS, 0, 0, bytes(6 * 33)), ERROR.ENHANCE_YOUR_CALM),
    "a window that grows above 2^31": (
        headers(1) + frame(WINDOW, 0, 1, struct.pack(">I", (1 << 31) - 1 - 65535))
        + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65536)), ERROR.FLOW_CONTROL_ERROR),
    "PUSH_PROMISE": (frame(PUSH, END_HEADERS, 1, bytes(4)), ERROR.PROTOCOL_ERROR),
    "PING of a stream": (frame(PING, 0, 1, bytes(8)), ERROR.PROTOCOL_ERROR),
    "PING of seven bytes": (frame(PING, 0, 0, bytes(7)), ERROR.FRAME_SIZE_ERROR),
    "GOAWAY of a stream": (frame(GOAWAY, 0, 1, bytes(8)), ERROR.PROTOCOL_ERROR),
    "GOAWAY of seven bytes": (frame(GOAWAY, 0, 0, bytes(7)), ERROR.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE by 0": (frame(WINDOW, 0, 0, bytes(4)), ERROR.PROTOCOL_ERROR),
    "WINDOW_UPDATE of three bytes": (frame(WINDOW, 0, 0, bytes(3)), ERROR.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of an idle stream": (
        frame(WINDOW, 0, 1, b"\0\0\0\1"), ERROR.PROTOCOL_ERROR),
    "WINDOW_UPDATE above 2^31": (
        frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff"), ERROR.FLOW_CONTROL_ERROR),
    "CONTINUATION alone": (frame(CONTINUATION, END_HEADERS, 1), ERROR.PROTOCOL_ERROR),
    "CONTINUATION after the end": (
        headers(1) + frame(CONTINUATION, END_HEADERS, 1), ERROR.PROTOCOL_ERROR),
    "CONTINUATION of another stream": (
        frame(HEADERS, 0, 1, b"\x82") + frame(CONTINUATION, 0, 3), ERROR.PROTOCOL_ERROR),
    "another frame in a block": (
        frame(HEADERS, 0, 1, b"\x82") + frame(PING, 0, 0, bytes(8)), ERROR.PROTOCOL_ERROR),
    "an unknown frame in a block": (
        frame(HEADERS, 0, 1, b"\x82") + frame(77, 0, 1), ERROR.PROTOCOL_ERROR),
    "a frame of 16385 bytes": (
        headers(1, POST, 0) + frame(DATA, 0, 1, bytes(16385))[:9], ERROR.FRAME_SIZE_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("what", SHUTS)
def test_frames_that_end_the_connection(what: str) -> None:
    data, code = SHUTS[what]
    peer = Peer().feed(data)
    assert peer.error == code
    before = list(peer.frames)
    peer.feed(headers(99))
    assert peer.frames == before
    assert not [event for event in peer.events if event[1] == 99]


HARMLESS = {
    "PRIORITY of an idle stream": frame(PRIORITY, 0, 7, bytes(5)),
    "an unknown frame": frame(0x10, 255, 3, b"abc"),
    "an unknown setting": frame(SETTINGS, 0, 0, struct.pack(">HI", 77, 5)),
    "an acknowledgement": frame(SETTINGS, ACK),
    "a PING that answers": frame(PING, ACK, 0, bytes(8)),
    "RST_STREAM of a stream that has ended": headers(1) + frame(RST_STREAM, 0, 1, bytes(4)) * 2,
    "WINDOW_UPDATE of a stream that has ended": (
        headers(1) + frame(RST_STREAM, 0, 1, bytes(4)) + frame(WINDOW, 0, 1, b"\0\0\0\1")
    ),
    "a reserved bit": frame(WINDOW, 0, 1 << 31, b"\x80\0\0\1"),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_frames_that_are_ignored(what: str) -> None:
    peer = Peer().feed(HARMLESS[what], headers(9))
    assert peer.error is None
    assert not peer.resets
    assert peer.events[-1][:2] == (Http2EventKind.BEGAN, 9)


LATE = {
    "DATA after the end": (frame(DATA, 0, 1, b"a"), Http2Error.STREAM_CLOSED),
    "HEADERS after the end": (headers(1), Http2Error.STREAM_CLOSED),
    "WINDOW_UPDATE by 0": (frame(WINDOW, 0, 1, bytes(4)), Http2Error.PROTOCOL_ERROR),
    "WINDOW_UPDATE above 2^31": (
        frame(WINDOW, 0, 1, b"\x7f\xff\xff\xff"), Http2Error.FLOW_CONTROL_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("what", LATE)
def test_frames_that_end_their_stream(what: str) -> None:
    data, code = LATE[what]
    peer = Peer().feed(headers(1), data, headers(3), headers(1), frame(DATA, 0, 1, b"a"))
    assert peer.resets == [(1, code)]
    assert peer.events[1:] == [
        (Http2EventKind.ENDED, 1, b"", 0),
        (Http2EventKind.BEGAN, 3, peer.events[0][2], 0),
    ]


def test_frames_of_streams_that_ended_well_end_the_connection() -> None:
    for late in (headers(1), frame(DATA, 0, 1, b"a")):
        peer = Peer().feed(headers(1)).answer(1, b"HTTP/1.1 204 No\r\n\r\n").feed(late)
        assert peer.error == Http2Error.STREAM_CLOSED


def test_the_preface_and_settings_come_first() -> None:
    for data in (b"GET / HTTP/1.1\r\n", PREFACE[:-1] + b"x", PREFACE + frame(PING, 0, 0, bytes(8)),
                 PREFACE + frame(SETTINGS, ACK)):  # fmt: skip
        protocol = Http2Protocol(STREAMS, LIST_BYTES)
        protocol.feed(data)
        assert protocol.error[0] == Http2Error.PROTOCOL_ERROR
    protocol = Http2Protocol(STREAMS, LIST_BYTES)
    assert protocol.take(0)[3] == SETTINGS
    for byte in PREFACE:
        assert protocol.waits_since_us or byte == PREFACE[0]
        protocol.feed(bytes([byte]), 7)
    assert protocol.waits_since_us == 7
    protocol.feed(frame(SETTINGS), 8)
    assert not protocol.waits_since_us


def test_what_waits_is_known() -> None:
    protocol = Peer().protocol
    protocol.feed(headers(1, POST, 0)[:6], 10)
    protocol.feed(headers(1, POST, 0)[6:9], 20)
    assert protocol.waits_since_us == 10
    protocol.feed(headers(1, POST, 0)[9:], 30)
    assert not protocol.waits_since_us
    protocol.feed(frame(DATA, 0, 1, b"abc")[:10], 40)
    assert not protocol.waits_since_us  # a body has its own limit
    protocol.feed(frame(DATA, 0, 1, b"abc")[10:] + frame(HEADERS, 0, 3, b"\x82"), 50)
    protocol.feed(frame(CONTINUATION, 0, 3, b"\x86"), 60)
    assert protocol.waits_since_us == 50


# -- responses


def test_responses_lose_what_is_of_http_1() -> None:
    text = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nDate: x\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    )
    for cut in range(len(text)):
        peer = Peer().feed(headers(1)).answer(1, text[:cut]).answer(1, text[cut:])
        blocks = [sent[3] for sent in peer.frames if sent[0] == HEADERS]
        assert blocks[0] == b"\x20" + hpack_encode([(b":status", b"100")])
        assert blocks[1] == hpack_encode([(b":status", b"200"), (b"date", b"x")])
        assert b"".join(sent[3] for sent in peer.frames if sent[0] == DATA) == b"abc"
        assert peer.frames[-1][:3] == (DATA, END_STREAM, 1)
        assert peer.events[-1][:2] == (Http2EventKind.ENDED, 1)


def test_a_response_before_the_end_of_its_request_stops_it() -> None:
    peer = Peer().feed(headers(1, POST, 0), frame(DATA, 0, 1, b"abc"))
    peer.answer(1, b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno")
    assert peer.resets == [(1, Http2Error.NO_ERROR)]
    assert peer.frames[-1][0] == RST_STREAM
    assert peer.feed(frame(DATA, END_STREAM, 1, b"def")).error is None


def test_a_response_that_ends_with_its_connection() -> None:
    peer = Peer().feed(headers(1)).answer(1, b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert peer.frames[-1][:2] == (DATA, 0)
    peer.protocol.finish(1)
    assert peer.take().frames[-1] == (DATA, END_STREAM, 1, b"")
    peer = Peer().feed(headers(1)).answer(1, b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc")
    peer.protocol.finish(1)
    assert peer.take().resets == [(1, Http2Error.INTERNAL_ERROR)]


def test_large_heads_go_on_in_further_frames() -> None:
    value = b"v" * 40_000
    peer = Peer().feed(headers(1)).answer(1, b"HTTP/1.1 204 No\r\nx: %s\r\n\r\n" % value)
    kinds = [sent[:2] for sent in peer.frames]
    assert kinds == [(HEADERS, END_STREAM), (CONTINUATION, 0), (CONTINUATION, END_HEADERS)]
    assert all(len(sent[3]) <= 16384 for sent in peer.frames)
    block = b"".join(sent[3] for sent in peer.frames)
    assert block == b"\x20" + hpack_encode([(b":status", b"204"), (b"x", value)])


def body_of(peer: Peer, stream: int) -> int:
    return sum(len(sent[3]) for sent in peer.frames if sent[0] == DATA and sent[2] == stream)


def ok(n: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % n + bytes(n)


def test_windows_of_the_client_are_kept() -> None:
    peer = Peer(settings=struct.pack(">HI", 4, 1000))
    peer.feed(headers(1), headers(3)).answer(1, ok(5000)).answer(3, ok(70_000))
    assert (body_of(peer, 1), body_of(peer, 3)) == (1000, 1000)
    peer.feed(frame(SETTINGS, payload=struct.pack(">HI", 4, 500)))  # 500 below zero
    peer.feed(frame(WINDOW, 0, 1, struct.pack(">I", 500)))
    assert body_of(peer, 1) == 1000
    peer.feed(frame(WINDOW, 0, 1, struct.pack(">I", 1)))
    assert body_of(peer, 1) == 1001
    peer.feed(frame(WINDOW, 0, 3, struct.pack(">I", 1 << 20)))
    assert body_of(peer, 1) + body_of(peer, 3) == 65535
    peer.feed(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 20)))
    assert body_of(peer, 3) == 70_000
    peer.feed(frame(WINDOW, 0, 1, struct.pack(">I", 1 << 20)))
    assert body_of(peer, 1) == 5000
    assert peer.protocol.streams == 0


def test_streams_take_turns() -> None:
    peer = Peer(settings=struct.pack(">HI", 4, 1 << 20))
    peer.feed(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 24)), *map(headers, (1, 3, 5)))
    for stream in (1, 3, 5):
        peer.protocol.answer(stream, ok(200_000))
    while peer.protocol.streams:
        peer.take(1)  # one frame
        sent = [body_of(peer, stream) for stream in (1, 3, 5)]
        assert max(sent) - min(sent) <= 16384


def test_windows_of_requests_are_given_back_as_they_are_read() -> None:
    peer = Peer().feed(headers(1, POST, 0))
    total = 0
    for _ in range(400):
        peer.feed(frame(DATA, PADDED, 1, b"\x09" + bytes(16000) + bytes(9)))
        total += 16010
        peer.protocol.consumed(1, sum(event[3] for event in peer.events))
        peer.events.clear()
    peer.take()
    assert peer.error is None
    for stream in (0, 1):
        given = sum(
            int.from_bytes(payload, "big")
            for kind, _, id, payload in peer.frames
            if (kind, id) == (WINDOW, stream)
        )
        assert total - (2 << 20) < given <= total


def test_windows_of_requests_that_are_dropped_are_given_back() -> None:
    peer = Peer().feed(headers(1, POST, 0), frame(RST_STREAM, 0, 1, bytes(4)), headers(3, POST, 0))
    peer.protocol.finish(3, Http2Error.INTERNAL_ERROR)
    for _ in range(400):
        peer.feed(frame(DATA, 0, 3, bytes(16000)))
    assert peer.error is None


def test_more_than_a_window_is_an_error() -> None:
    peer = Peer().feed(headers(1, POST, 0))
    for _ in range(16):
        peer.feed(frame(DATA, 0, 1, bytes(16384)))
    assert not peer.resets
    assert peer.feed(frame(DATA, 0, 1, b"a")).resets == [(1, Http2Error.FLOW_CONTROL_ERROR)]
    peer = Peer(streams_max=100)
    for stream in range(1, 200, 2):
        peer.feed(headers(stream, POST, 0), *[frame(DATA, 0, stream, bytes(16384))] * 16)
        if peer.protocol.is_shut:
            break
    assert peer.error == Http2Error.FLOW_CONTROL_ERROR
    assert sum(event[3] for event in peer.events) == 4 << 20


# -- bounds


def test_streams_at_once_have_a_bound() -> None:
    peer = Peer(streams_max=2).feed(headers(1), headers(3), headers(5), headers(7, POST, 0))
    assert peer.resets == [(5, Http2Error.REFUSED_STREAM), (7, Http2Error.REFUSED_STREAM)]
    peer.feed(frame(DATA, END_STREAM, 7, b"abc")).answer(1, ok(0)).feed(headers(9))
    assert peer.error is None
    assert peer.events[-1][:2] == (Http2EventKind.BEGAN, 9)


def test_resets_have_a_bound_that_answers_refill() -> None:
    """CVE-2023-44487."""
    peer, stream = Peer(), 1
    while not peer.protocol.is_shut:
        peer.feed(headers(stream), frame(RST_STREAM, 0, stream, bytes(4)))
        stream += 2
        assert stream < 3000
    assert peer.error == Http2Error.ENHANCE_YOUR_CALM
    assert stream > 2000
    peer, stream = Peer(), 1
    for _ in range(3000):
        peer.feed(headers(stream), frame(RST_STREAM, 0, stream, bytes(4)), headers(stream + 2))
        peer.answer(stream + 2, ok(0))
        stream += 4
    assert peer.error is None


def test_resets_that_a_client_provokes_have_the_same_bound() -> None:
    """CVE-2025-8671."""
    for late in (frame(WINDOW, 0, 0, bytes(4)), frame(DATA, 0, 0, b"a"), headers(0)):
        peer, stream = Peer(), 1
        while not peer.protocol.is_shut and stream < 3000:
            end = late[:5] + struct.pack(">I", stream) + late[9:]
            peer.feed(headers(stream), end)
            stream += 2
        assert peer.error == Http2Error.ENHANCE_YOUR_CALM
        assert stream > 2000


FLOODS = {
    "pings": frame(PING, 0, 0, bytes(8)),
    "settings": frame(SETTINGS),
    "priorities": frame(PRIORITY, 0, 1, bytes(5)),
    "windows": frame(WINDOW, 0, 0, b"\0\0\0\1"),
    "unknown frames": frame(99),
    "empty data": frame(DATA, 0, 1),
    "window updates of closed streams": frame(WINDOW, 0, 3, b"\0\0\0\1"),
    "resets of closed streams": frame(RST_STREAM, 0, 3, bytes(4)),
}


@pytest.mark.parametrize("what", FLOODS)
def test_frames_that_bring_no_request_on_have_a_bound(what: str) -> None:
    start = headers(1, POST, 0) + headers(3) + frame(RST_STREAM, 0, 3, bytes(4))
    peer = Peer().feed(start, FLOODS[what] * 9000)
    assert peer.error is None
    assert peer.feed(FLOODS[what] * 1100).error == Http2Error.ENHANCE_YOUR_CALM
    peer = Peer().feed(start)
    for second in range(1, 40):
        peer.feed(FLOODS[what] * 300, now_us=second * 1_000_000)
    assert peer.error is None


def test_blocks_have_a_bound() -> None:
    """CVE-2024-27316: frames, not only bytes, are counted."""
    peer = Peer().feed(frame(HEADERS, 0, 1, b"\x82"), frame(CONTINUATION, 0, 1) * 11)
    assert peer.error == Http2Error.ENHANCE_YOUR_CALM
    peer = Peer().feed(frame(HEADERS, 0, 1, bytes(16384)), frame(CONTINUATION, 0, 1, bytes(16384)))
    assert peer.error is None
    assert peer.feed(frame(CONTINUATION, 0, 1, b"\x82")).error == Http2Error.ENHANCE_YOUR_CALM


def test_a_bomb_of_references_is_not_kept() -> None:
    """CVE-2016-6581."""
    block = hpack_encode(GET) + b"\x40\x01x\x7f\x81\x1e" + b"y" * 3968 + b"\xbe" * 10_000
    peer = Peer().feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, block))
    assert peer.events == [(Http2EventKind.TOO_LARGE, 1, b"", 0)]


def test_answers_to_control_frames_crowd() -> None:
    protocol = Peer().protocol
    protocol.feed(frame(PING, 0, 0, bytes(8)) * 900)
    assert not protocol.is_crowded
    protocol.feed(frame(PING, 0, 0, bytes(8)) * 100)
    assert protocol.is_crowded
    assert len(protocol.take(0)) == 17_000
    assert not protocol.is_crowded


# -- the end


def test_a_drain_answers_what_was_under_way() -> None:
    peer = Peer().feed(headers(1))
    peer.protocol.go_away(warn=True)
    peer.take()
    assert [sent[0] for sent in peer.frames] == [GOAWAY, PING]
    assert peer.frames[0][3][:8] == struct.pack(">II", (1 << 31) - 1, 0)
    peer.feed(headers(3))
    assert peer.events[-1][:2] == (Http2EventKind.BEGAN, 3)
    assert not peer.protocol.is_going
    peer.feed(frame(PING, ACK, 0, bytes(8)))
    assert peer.protocol.is_going
    assert peer.frames[-1][3][:8] == struct.pack(">II", 3, 0)
    assert peer.feed(headers(5)).resets == [(5, Http2Error.REFUSED_STREAM)]
    peer.answer(1, ok(2)).answer(3, ok(2))
    assert (body_of(peer, 1), body_of(peer, 3), peer.protocol.streams) == (2, 2, 0)


def test_a_client_that_goes_is_answered() -> None:
    peer = Peer().feed(headers(1), frame(GOAWAY, 0, 0, bytes(8)))
    assert peer.protocol.has_left
    assert body_of(peer.answer(1, ok(7)), 1) == 7


@pytest.mark.parametrize("seed", SEEDS)
def test_random_frames_leave_it_sound(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        peer = Peer(streams_max=4)
        for _ in range(60):
            stream = rng.choice((0, 1, 1, 3, 3, 5, 7, 8, 1 << 30))
            payload = rng.choice((b"", bytes(4), bytes(8), hpack_encode(GET), rng.randbytes(9)))
            kind = rng.choice((0, 1, 1, 1, 2, 3, 4, 6, 7, 8, 9, 9, 44))
            peer.feed(frame(kind, rng.choice((0, 1, 4, 5, 5, 8, 41)), stream, payload))
            for live in {event[1] for event in peer.events}:
                if rng.random() < 0.1:
                    peer.answer(live, ok(rng.randrange(3)))
        begins = (Http2EventKind.BEGAN, Http2EventKind.TOO_LARGE)
        began = [stream for kind, stream, *_ in peer.events if kind in begins]
        ended = [stream for kind, stream, *_ in peer.events if kind == Http2EventKind.ENDED]
        assert len(set(began)) == len(began)
        assert len(set(ended)) == len(ended)
        assert set(ended) <= set(began)
        assert peer.protocol.streams == len(began) - len(ended) <= 4
        assert peer.protocol.is_shut == (peer.error is not None)
