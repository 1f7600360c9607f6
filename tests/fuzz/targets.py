"""Fuzz targets: each takes bytes that anybody could send, and raises if the code that reads them
misbehaves.

A target has `seeds()`, sound inputs to begin with, and `run(data)`. It may raise only for a fault:
errors that the reader documents for bad bytes are caught here. Where there is a second reader of
the same format, both must agree.
"""

import contextlib
import json
import math
import os
import re
import select
import socket
import struct
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clipper.errors import ClipperError
from clipper_core.runtime.status import StatusError

PATIENCE_S = 20.0


class Target(NamedTuple):
    """One reader to fuzz. seeds: returns valid inputs by name. run: reads one input; an exception
    that it raises is a fault."""

    seeds: Callable[[], dict[str, bytes]]
    run: Callable[[bytes], object]


# -- container frames: the compiled reader beside that of the container SDK


def _frame_seeds() -> dict[str, bytes]:
    from clipper_core.wire.codec import Kind, encode_frame, encode_rows

    numbers, texts = np.arange(6.0).reshape(3, 2), ["a", "", "long " * 9]
    return {
        "hello": encode_frame(Kind.HELLO, b"\x80", id=1),
        "reply": encode_rows(Kind.REPLY, numbers, id=7, checked=True),
        "reply-confidence": encode_rows(
            Kind.REPLY, numbers, confidence=[0.5, 1, 0], status=[0, 1, 0], text="why"
        ),
        "reply-strings": encode_rows(Kind.REPLY, texts, id=9),
        "reply-compressed": encode_rows(Kind.REPLY, texts, compressed=True),
        "reply-qualifiers": encode_rows(
            Kind.REPLY, numbers, qualifiers=[b"\x81\xa1a\x01", b"", b"x"]
        ),
        "predict-sessions": encode_rows(Kind.PREDICT, numbers, sessions=[1, 2, 3]),
        "failure": encode_frame(Kind.FAILURE, b"no luck", id=3),
    }


def _run_frame(data: bytes) -> None:
    from clipper_container.wire import frames as wire
    from clipper_core.wire.codec import HEADER_BYTES, decode_header, open_rows

    limits = {"payload_bytes_max": 1 << 16, "rows_max": 256}
    ours = theirs = None
    with contextlib.suppress(StatusError, ClipperError):
        ours = decode_header(data[:HEADER_BYTES], **limits)
    if len(data) >= HEADER_BYTES:
        with contextlib.suppress(wire.BadFrame):
            theirs = wire.decode_header(data[:HEADER_BYTES], **limits)
    assert (ours is None) == (theirs is None), (
        f"one reader takes this head, the other does not: {ours} {theirs}"
    )
    if ours is None or theirs is None:
        return
    payload = data[HEADER_BYTES : HEADER_BYTES + ours.payload_bytes]
    assert ours.payload_bytes <= limits["payload_bytes_max"]
    with contextlib.suppress(StatusError, ClipperError):
        rows = open_rows(ours, payload, output_bytes_max=1 << 16, **limits)
        assert rows.n <= limits["rows_max"]
        assert rows.data.nbytes <= 1 << 17
    if theirs.kind in (wire.Kind.PREDICT, wire.Kind.REPLY):
        with contextlib.suppress(wire.BadFrame):
            wire.open_rows(theirs, np.frombuffer(payload, np.uint8), 1 << 16)


# -- records of named tensors


def _record_seeds() -> dict[str, bytes]:
    vectors = json.loads((Path(__file__).parents[1] / "vectors" / "records.json").read_text())
    return {
        vector["name"]: json.dumps(vector["schema"]).encode()
        + b"\0"
        + bytes.fromhex(vector["records"][0])
        for vector in vectors
    }


def _run_record(data: bytes) -> None:
    from clipper.schema import InvalidTensor, Tensors

    text, _, record = data.partition(b"\0")
    with contextlib.suppress(InvalidTensor):
        tensors = Tensors.parse(text.decode("utf-8", "replace"))
        again = tensors.pack(tensors.unpack(record))
        assert len(bytes(again)) == len(record)
        tensors.unpack_many(np.stack([again]) if tensors.is_fixed else [again])


# -- replies to batches in flight


def _reply_seeds() -> dict[str, bytes]:
    from clipper_core.wire.codec import Kind, encode_frame, encode_rows

    number = _batch_in_flight()[2]
    outputs = np.array([1.0, 2.0, 3.0])
    return {
        "reply": encode_rows(Kind.REPLY, outputs, id=number),
        "reply-twice": encode_rows(Kind.REPLY, outputs, id=number) * 2,
        "reply-confidence": encode_rows(
            Kind.REPLY, outputs, confidence=[1, 0.5, 0], status=[0, 1, 0], text="why", id=number
        ),
        "reply-strings": encode_rows(Kind.REPLY, ["a", "b", "c"], id=number),
        "reply-compressed": encode_rows(
            Kind.REPLY, ["a" * 50, "b", "c"], id=number, compressed=True
        ),
        "reply-rows": encode_rows(
            Kind.REPLY, np.ones((3, 2, 2), np.float32), id=number, checked=True
        ),
        "failure": encode_frame(Kind.FAILURE, b"no luck", id=number),
        "heartbeat": encode_frame(Kind.HEARTBEAT) + encode_frame(Kind.GOODBYE),
    }


def _batch_in_flight() -> tuple[Any, list[Any], int]:
    """Return a world on its own clock in which three queries were sent to one container, and the id
    of their batch."""
    from tests.core.conftest import World

    world = World()
    model = world.model(cached=False)
    container = world.container(model, checked=False)
    futures = [model.predict(float(i), slo_ms=50) for i in range(3)]
    world.step(100)
    ((number, _),) = container.read()
    return world, futures, number


def _run_reply(data: bytes) -> None:
    world, futures, _ = _batch_in_flight()
    (container,) = world.containers
    cut = len(data) // 2
    sound = container.send(data[:cut]) and container.send(data[cut:])
    world.step(10)
    if sound:
        container.read()
    else:
        container.lose()
    world.pass_deadline(100_000)
    for future in futures:
        assert future.done(), "a query was left without an answer"
        with contextlib.suppress(Exception):
            future.result(0)
    world.close()


# -- HTTP: heads and bodies, beside h11


def _http_seeds() -> dict[str, bytes]:
    post = b"POST /api/a/predict HTTP/1.1\r\nHost: a\r\n"
    return {
        "post": post + b'Content-Length: 12\r\n\r\n{"input": 1}',
        "pipelined": (post + b"Content-Length: 2\r\nX-Request-Id: q-1\r\n\r\n{}") * 2,
        "chunked": (
            post + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer:"
            b" x\r\n\r\n"
        ),
        "get": (
            b"GET /metrics?a=b HTTP/1.1\r\nHost: a\r\nAccept: */*\r\nConnection: keep-alive\r\n\r\n"
        ),
        "close": b"GET / HTTP/1.0\r\nConnection: close\r\n\r\n",
        "binary": (
            post + b"Inference-Header-Content-Length: 2\r\nContent-Length: 6\r\n\r\n{}\0\0\0\0"
        ),
        "expect": post + b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\nx",
        "upgrade": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        "keyed": (
            post + b"Authorization: Bearer ck_a\r\nClipper-Deadline-Ms: 20\r\nContent-Length: 2\r\n"
            b"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n\r\n{}"
        ),
    }


def _h11_requests(data: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """Return the method, target and body of the requests that h11 reads, up to the first invalid
    one."""
    import h11

    found, connection = [], h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        while isinstance(request := connection.next_event(), h11.Request):
            body = b""
            while isinstance(event := connection.next_event(), h11.Data):
                body += bytes(event.data)
            if not isinstance(event, h11.EndOfMessage):
                break
            found.append((request.method, request.target, body))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        pass
    return found


def _run_http(data: bytes) -> None:
    from clipper.frontend.http.messages import HttpResponse
    from clipper_core.http.http_head import read_head
    from tests.frontend.conftest import InMemoryConnection

    seen: list[tuple[bytes, bytes, bytes]] = []

    def handle(request: Any) -> HttpResponse:
        seen.append((request.method.encode(), request.path, bytes(request.body)))
        return HttpResponse(200, b"")

    InMemoryConnection(handle).feed(data[: len(data) // 2]).feed(data[len(data) // 2 :])
    theirs = _h11_requests(data)
    assert len(seen) <= len(theirs) or _is_looser(data), f"read as {seen}, by h11 as {theirs}"
    for mine, other in zip(seen, theirs, strict=False):
        if mine[0] != b"HEAD":
            assert (mine[0], mine[2]) == (other[0], other[2]), f"read as {mine}, by h11 as {other}"
    plain = read_head(data[: data.find(b"\r\n\r\n") + 4]) if b"\r\n\r\n" in data else False
    if not isinstance(plain, bool) and len(data) >= plain.bytes + plain.body_bytes:
        body = data[plain.bytes : plain.bytes + plain.body_bytes]
        assert theirs[:1] == [(b"POST", plain.path, body)], (
            f"the compiled reader: {plain}, h11: {theirs[:1]}"
        )


def _is_looser(data: bytes) -> bool:
    """Return whether h11 may read less: it refuses long heads, more blanks and empty lines, and
    stops at an offer to upgrade, at CONNECT and at a close."""
    lines = re.search(rb"[!-9;-~]+ +\S+ {2,}HTTP|[!-9;-~]+ {2,}|[\r\n][!-9;-~]+ ", data)
    return (
        len(data) > 1 << 15
        or lines is not None
        or re.search(rb"(?i)upgrade|connect|http/1\.0|close", data) is not None
    )


# -- HTTP/2: frames and fields, beside the library hpack


def _http2_seeds() -> dict[str, bytes]:
    from clipper_core.http.hpack import hpack_encode

    def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        head = struct.pack(">IBBI", len(payload), kind, flags, stream)[1:]
        return head + payload

    get = hpack_encode(
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a")]
    )
    post = hpack_encode(
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b"accept", b"*/*")]
    )
    stored = b"\x82\x86\x84\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff"
    return {
        "get": frame(1, 5, 1, get) + frame(1, 5, 3, stored) + frame(1, 5, 5, b"\x82\x86\x84\xbe"),
        "post": frame(1, 4, 1, post) + frame(0, 0, 1, b"abc") + frame(0, 9, 1, b"\x02de\0\0"),
        "split": frame(1, 1, 1, get[:9]) + frame(9, 0, 1) + frame(9, 4, 1, get[9:]),
        "control": (
            frame(6, 0, 0, bytes(8))
            + frame(4, 0, 0, struct.pack(">HI", 4, 10))
            + frame(8, 0, 0, b"\0\0\0\7")
            + frame(2, 0, 1, bytes(5))
            + frame(7, 0, 0, bytes(8))
        ),
        "reset": frame(1, 4, 1, post) + frame(3, 0, 1, bytes(4)) + frame(0, 0, 1, b"late"),
        "trailers": frame(1, 4, 1, post) + frame(1, 5, 1, hpack_encode([(b"a", b"b")])),
    }


def _run_http2(data: bytes) -> None:
    """Read frames after a preface, whole and cut in two, and answer what they ask."""
    from clipper_core.http.http2_protocol import Http2EventKind, Http2Protocol

    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
    found = []
    for pieces in ([data], [data[: len(data) // 2], data[len(data) // 2 :]]):
        protocol = Http2Protocol(4, 4096)
        protocol.feed(start)
        texts: dict[int, bytes] = {}
        for piece in pieces:
            protocol.feed(piece)
            for _, stream, text, credit in protocol.events():
                texts[stream] = texts.get(stream, b"") + text
                protocol.consumed(stream, credit)
        found.append((texts, protocol.error, protocol.streams))
        for stream in texts:
            protocol.answer(stream, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        protocol.take(1 << 20)
        ended = [stream for kind, stream, *_ in protocol.events() if kind == Http2EventKind.ENDED]
        assert len(set(ended)) == len(ended)
    assert found[0] == found[1], "what comes depends on where the bytes are cut"
    for text in found[0][0].values():
        head = text.partition(b"\r\n\r\n")[0]
        assert b"\0" not in head
        assert not re.search(rb"\r(?!\n)|(?<!\r)\n|\n(connection|upgrade|te):", head), head
    _decode_beside_hpack(data)


def _decode_beside_hpack(block: bytes) -> None:
    import hpack

    from clipper_core.http.hpack import HpackDecoder, HpackError

    with contextlib.suppress(HpackError):
        ours = HpackDecoder().decode(block)
        theirs = hpack.Decoder(max_header_list_size=1 << 30).decode(block, raw=True)
        assert ours == [(bytes(name), bytes(value)) for name, value in theirs]


# -- calls of gRPC on frames of HTTP/2


def _call_seeds() -> dict[str, bytes]:
    from clipper_core.http.hpack import hpack_encode

    def frame(kind: int, flags: int, payload: bytes = b"", stream: int = 1) -> bytes:
        return struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload

    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a.B/C")]
    call = hpack_encode([*fields, (b"content-type", b"application/grpc"), (b"grpc-timeout", b"1S")])
    message = b"\0\0\0\0\3abc"
    return {
        "unary": frame(1, 4, call) + frame(0, 1, message),
        "stream": frame(1, 4, call) + frame(0, 0, message[:4]) + frame(0, 1, message[4:] + message),
        "compressed": frame(1, 4, call) + frame(0, 0, b"\1" + message[1:]) + frame(3, 0, bytes(4)),
        "large": frame(1, 4, call) + frame(0, 9, b"\0\0\1\0\0\0"),
        "two": frame(1, 5, call) + frame(1, 5, call, 3) + frame(6, 0, bytes(8), 0),
        "empty": frame(1, 5, call),
    }


def _run_calls(data: bytes) -> None:
    """Read the messages of calls, whole and cut in two, and answer each by one and by trailers."""
    from clipper_core.http.grpc_message import GrpcReader
    from clipper_core.http.http2_protocol import Http2EventKind, Http2Protocol

    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
    found = []
    for pieces in ([data], [data[: len(data) // 2], data[len(data) // 2 :]]):
        protocol = Http2Protocol(4, 4096, 0, True, 1000)
        protocol.feed(start)
        readers: dict[int, GrpcReader] = {}
        messages: list[Any] = []
        for piece in pieces:
            protocol.feed(piece)
            for kind, stream, text, credit in protocol.events():
                if kind == Http2EventKind.CALLED:
                    readers[stream] = GrpcReader(1000)
                    assert text.startswith(b"POST ")
                    assert text.endswith(b"\r\n\r\n")
                elif stream in readers and text:
                    messages += [(stream, *each) for each in readers[stream].feed(text)]
                protocol.consumed(stream, credit)
        found.append((sorted(messages), protocol.error, protocol.streams))
        for stream, reader in readers.items():
            assert reader.held <= 1005
            protocol.reply(stream, b"message")
            protocol.reply(stream, None, [(b"grpc-status", b"0")])
        protocol.take(1 << 20)
        ended = [stream for kind, stream, *_ in protocol.events() if kind == Http2EventKind.ENDED]
        assert len(set(ended)) == len(ended)
    assert found[0] == found[1], "what comes depends on where the bytes are cut"


# -- calls of ModelInfer that the core takes


class _Plain:
    """The core's calls, with a model that has no container: queries wait, or are refused."""

    _one: "_Plain | None" = None

    def __init__(self) -> None:
        from clipper_core.engine.engine import Engine
        from clipper_core.engine.model import Model
        from clipper_core.http.hot_calls import HotCalls
        from clipper_core.http.http_route import HotRoute, HotTable
        from clipper_core.runtime.histogram import Counter, LatencyHistogram

        engine = Engine(manual_clock=True)
        took = LatencyHistogram()
        route = HotRoute(
            Model(engine, "svm:1", 1, "f64", (2,)),
            "call",
            "node",
            b"",
            999_000,  # as the calls have it: the model has a lane for that
            0.0,
            [Counter() for _ in range(5)],
            took,
            Counter(),
            took,
            lambda id, tag, user: (id, user),
            slo_ms_max=1000.0,
            takes_users=True,
            rows_max=4,
        )
        self.calls = HotCalls(
            [engine],
            calls_max=100,
            message_bytes_max=4096,
            way_back_us=1000,
            slo_us_max=1_000_000,
            finish=None,
            cancelled=Counter(),
        )
        self.calls.set_table(HotTable({b"svm": route, b"svm/1": route}))

    @classmethod
    def get(cls) -> "_Plain":
        cls._one = cls._one or cls()
        return cls._one


def _plain_head() -> bytes:
    from clipper_core.http.hpack import hpack_encode

    path = b"/inference.GRPCInferenceService/ModelInfer"
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path)]
    fields += [(b"content-type", b"application/grpc"), (b"grpc-timeout", b"1S")]
    return hpack_encode(fields)


def _frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    return struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload


def _plain_seeds() -> dict[str, bytes]:
    messages = _grpc_seeds()
    framed = _frame(0, 1, struct.pack(">BI", 0, len(messages["infer"])) + messages["infer"])
    frames = _frame(1, 4, _plain_head()) + framed
    return messages | {"frames": frames, "two": frames + frames.replace(b"\0\0\0\1", b"\0\0\0\3")}


def _run_plain(data: bytes) -> None:
    """Have the core take a message, and take these bytes as frames. What it takes, Python takes
    too; the connection goes from thread to thread between two reads, and nothing stays open."""
    from clipper.frontend.inference import codec, protobuf_codec
    from clipper.types import InputType
    from clipper_core.http.http2_protocol import Http2Protocol

    calls = _Plain.get().calls
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
    body = struct.pack(">BI", 0, len(data)) + data
    owner = object()
    for sent in (data, _frame(1, 4, _plain_head()) + _frame(0, 1, body)):
        protocol = Http2Protocol(4, 4096, 0, True, 1000)
        is_taken = False
        for part in (start + sent[: len(sent) // 2], sent[len(sent) // 2 :]):
            protocol.feed(part)
            is_taken = calls.take(protocol, owner) or is_taken
            calls.give(protocol)
            calls.adopt(protocol, owner)
        owners, left = calls.news()
        assert owners <= {owner}
        if is_taken and sent is not data:
            request = protobuf_codec.decode(protobuf_codec.read(data))
            rows = codec.rows_of(request, InputType.parse("f64[2]"))
            assert 1 <= len(rows) <= 4
            assert all(len(one.futures) == len(rows) for one in left)
        if len(data) % 2:
            calls.lose(protocol)
        else:
            calls.give(protocol)
            calls.drop(protocol)
        protocol.take(1 << 20)
    assert calls.open == 0


# -- connections of HTTP/2 that the core owns, and gives away


class _Owned:
    """A server of the core with calls and requests, to models that have no container, and a thread
    that stands for Python: it takes the connections that come, and gives some back. One for all
    inputs."""

    _one: "_Owned | None" = None

    def __init__(self) -> None:
        from clipper_core.engine.engine import Engine
        from clipper_core.engine.model import Model
        from clipper_core.http.hot_calls import HotCalls
        from clipper_core.http.http_route import HotRoute, HotTable
        from clipper_core.http.http_server import HttpServer
        from clipper_core.runtime.histogram import Counter, LatencyHistogram

        engine = Engine(manual_clock=True)
        model, took = Model(engine, "svm:1", 1, "f64", (2,)), LatencyHistogram()
        counts = [Counter() for _ in range(5)]
        routes = {
            path: HotRoute(
                model,
                form,
                "node",
                b"",
                999_000,
                0.0,
                counts,
                took,
                Counter(),
                took,
                lambda id, tag, user: id,
                slo_ms_max=1000.0,
                rows_max=4 if form in ("call", "infer") else 1,
                read_only=path in (b"read", b"/read"),
            )
            for path, form in (
                (b"svm", "call"),
                (b"read", "call"),
                (b"/svm", "predict"),
                (b"/read", "predict"),
                (b"/infer", "infer"),
                (b"/feedback", "feedback"),
            )
        }
        self._calls = HotCalls(
            [engine],
            calls_max=100,
            message_bytes_max=4096,
            way_back_us=1000,
            slo_us_max=1_000_000,
            finish=None,
            cancelled=Counter(),
        )
        self.core = HttpServer(
            [engine],
            1,
            b"made",
            header_s=5,
            idle_s=5,
            connections_max=100,
            header_bytes_max=4096,
            body_bytes_max=4096,
            pipeline_max=4,
            unsent_bytes_max=4096,
            finish=None,
            encode=lambda value: json.dumps(value).encode(),
        )
        self.core.serve_calls(self._calls, 0)
        table = HotTable(routes)
        self._calls.set_table(table)
        self.core.set_calls_table(table)
        self.core.set_table(table)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.core.listen(listener.detach())
        self._held: dict[int, tuple[socket.socket, Any, int]] = {}
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self.core.run, args=(0,)),
            threading.Thread(target=self._serve),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def get(cls) -> "_Owned":
        cls._one = cls._one or cls()
        return cls._one

    @classmethod
    def close(cls) -> None:
        one, cls._one = cls._one, None
        if one is not None:
            one._ended.set()
            one._threads[1].join()
            one.core.stop()
            one._threads[0].join()
            one._take()

    def _serve(self) -> None:
        while not self._ended.is_set():
            ready, _, _ = select.select([self.core.fd, *self._held], [], [], 0.01)
            self._take()
            for fd in ready:
                if fd in self._held:
                    self._read(fd)
            self._calls.news()

    def _take(self) -> None:
        from clipper_core.http.http_server import Ending, Feedback, Handed, Read

        for item in self.core.take():
            if isinstance(item, Handed):
                self._adopt(item)
            elif isinstance(item, Ending | Read):
                for future in item.futures:
                    if future is not None:
                        future.cancel()
                if item.ticket % 2:  # as of a call, or of a request: the other is nobody's
                    self.core.reply(item.worker, item.ticket, None, [(b"grpc-status", b"4")])
                self.core.answer(item.worker, item.ticket, _NO, False)
            elif isinstance(item, Feedback):
                self.core.respond_feedback(item, True)

    def _adopt(self, item: Any) -> None:
        line = socket.socket(fileno=item.fd)
        if item.http2 is None:
            line.close()
            return
        self._held[item.fd] = line, item.http2, item.returns
        self._calls.adopt(item.http2, line)
        self._answer(item.fd)

    def _read(self, fd: int) -> None:
        line, protocol, returns = self._held[fd]
        data = b""
        with contextlib.suppress(OSError):
            data = line.recv(1 << 16)
        protocol.feed(data)
        self._answer(fd)
        is_over = not data or protocol.is_shut
        if is_over or not protocol.streams:
            del self._held[fd]
            self._calls.news()
            self._calls.give(protocol)
            if is_over or not self.core.adopt(os.dup(fd), returns + 1, protocol):
                self._calls.drop(protocol)
            line.close()

    def _answer(self, fd: int) -> None:
        from clipper_core.http.http2_protocol import Http2EventKind

        line, protocol, _ = self._held[fd]
        self._calls.take(protocol, line)
        for kind, id, _, credit in protocol.events():
            protocol.consumed(id, credit)
            if kind == Http2EventKind.BEGAN:
                protocol.answer(id, _NO)
            elif kind == Http2EventKind.CALL_ENDED:
                protocol.reply(id, None, [(b"grpc-status", b"12")])
        self._calls.news()
        with contextlib.suppress(OSError):
            line.send(protocol.take(1 << 16))


_NO = b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"


def _owned_seeds() -> dict[str, bytes]:
    from clipper_core.http.hpack import hpack_encode

    def request(stream: int, path: bytes, body: bytes) -> bytes:
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path)]
        fields += [(b":authority", b"a"), (b"content-length", b"%d" % len(body))]
        return _frame(1, 4, hpack_encode(fields), stream) + _frame(0, 1, body, stream)

    row = b'{"input": [1, 2]}'
    tensor = b'{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP64","data":[1,2,3,4]}]}'
    told = b'{"id": "node-1", "label": 1}'
    seeds = {
        "predict": request(1, b"/svm", row) + request(3, b"/read", row),
        "infer": request(1, b"/infer", tensor) + _frame(3, 0, bytes(4), 1),
        "feedback": request(1, b"/feedback", told) + request(3, b"/other", row),
        "apart": request(1, b"/svm", row)[:-30] + request(3, b"/svm", row),
    }
    return {name: data for name, data in _plain_seeds().items() if "frames" in name} | seeds


def _run_owned(data: bytes) -> None:
    """Send these bytes as frames in two pieces, and end: whatever they are, the server ends the
    connection."""
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
    owned = _Owned.get()
    line = socket.create_connection(owned.address, timeout=PATIENCE_S)
    with line, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        line.sendall(start + data[: len(data) // 2])
        line.sendall(data[len(data) // 2 :])
        line.shutdown(socket.SHUT_WR)
        while line.recv(1 << 16):  # one that hangs is a fault
            pass
    assert owned.core.connections < 90


# -- numbers in JSON, beside float()


NUMBER = re.compile(rb"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def _number_seeds() -> dict[str, bytes]:
    texts = [
        "0",
        "-0.0",
        "1e308",
        "4.9e-324",
        "9007199254740993",
        "1e18446744073709551616",
        "123456789.987654321e-5",
        "-1e22",
    ]
    return {f"number-{i}": text.encode() for i, text in enumerate(texts)} | {
        "row": b"[1, 2.5, -3e-7]"
    }


def _run_number(data: bytes) -> None:
    from clipper_core.http.json_value import RowReader

    for dtype in ("f64", "f32", "i64"):
        found = RowReader(dtype, ()).read(data)
        if found is None:
            continue
        value, end = found
        text = data[:end].strip(b" \t\r\n")
        assert NUMBER.fullmatch(text), f"{text!r} is no number, and was read as {value}"
        _compare(text, value, dtype)
    row = RowReader("f64", (3,)).read(data)
    if row is not None:
        expected = json.loads(data[: row[1]])
        assert [float(one) for one in np.asarray(row[0]).tolist()] == [
            float(one) for one in expected
        ]


def _compare(text: bytes, value: Any, dtype: str) -> None:
    if dtype == "i64":
        assert int(value) == int(text), f"{text!r} was read as {value}"
        return
    expected = float(text)
    if dtype == "f32":
        with np.errstate(over="ignore"):
            expected = float(np.float32(expected))
        assert math.isclose(float(value), expected, rel_tol=2e-7, abs_tol=1e-44), (
            f"{text!r} was read as {value}"
        )
        return
    assert struct.pack("<d", float(value)) == struct.pack("<d", expected), (
        f"{text!r} was read as {value}, not {expected}"
    )


# -- messages to a shard


class _Shard:
    """A shard's loop on a socket, and a thread that answers its calls; one for all inputs."""

    _one: "_Shard | None" = None

    def __init__(self) -> None:
        from clipper_core.params.embedding import Table
        from clipper_core.params.optimizer import Optimizer
        from clipper_core.params.shard_loop import ShardLoop

        self._folder = tempfile.TemporaryDirectory(prefix="clipper-fuzz-")
        self._table = Table("users", 5, optimizer=Optimizer("adagrad"))
        self._core = ShardLoop(frame_bytes_max=1 << 20, connections_max=16)
        self._listener = socket.socket(socket.AF_UNIX)
        self.path = f"{self._folder.name}/shard.sock"
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._core.listen(self._listener.fileno())
        self._core.add_table(self._table)
        self._core.ready = True
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._core.run),
            threading.Thread(target=self._answer),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def get(cls) -> "_Shard":
        cls._one = cls._one or cls()
        return cls._one

    @classmethod
    def close(cls) -> None:
        one, cls._one = cls._one, None
        if one is not None:
            one._stopping.set()
            one._core.stop()
            for thread in one._threads:
                thread.join()
            one._listener.close()
            one._folder.cleanup()

    def _answer(self) -> None:
        from clipper_container.params.frames import unpacked

        while not self._stopping.wait(0.0005):
            for caller, _, body in self._core.calls():
                with contextlib.suppress(ClipperError):
                    unpacked(body)
                self._core.answer(caller, b"answered", admit=True)


def _hello() -> bytes:
    from clipper_container.params.frames import Head, MessageKind, packed

    call = packed({"call": "hello", "worker": 3, "ids": np.arange(3)})
    return Head(MessageKind.CALL, id=1, payload_bytes=len(call)).packed() + call


def _shard_seeds() -> dict[str, bytes]:
    from clipper_container.params.frames import Head, MessageKind

    ids = np.arange(3, dtype="<i8").tobytes()
    rows = np.ones((3, 5), "<f4").tobytes() + bytes(4)
    size = len(ids + rows)
    pull = Head(MessageKind.PULL, rows=3, id=2, payload_bytes=len(ids)).packed() + ids
    push = (
        Head(MessageKind.PUSH, rows=3, id=3, worker=7, sequence=1, payload_bytes=size).packed()
        + ids
        + rows
    )
    late = (
        Head(
            MessageKind.PUSH, rows=3, id=3, worker=7, sequence=(1 << 64) - 1, payload_bytes=size
        ).packed()
        + ids
        + rows
    )
    share = Head(MessageKind.SHARE, id=4).packed()
    return {
        "call": _hello(),
        "pull": pull,
        "push": push,
        "late": late,
        "pull-push": pull + push,
        "share": share,
    }


def _run_shard(data: bytes) -> None:
    from clipper_container.params.frames import HEAD_BYTES, read_head, unpacked

    if len(data) >= HEAD_BYTES:
        with contextlib.suppress(ClipperError):
            read_head(data[:HEAD_BYTES])
        with contextlib.suppress(ClipperError):
            unpacked(data[HEAD_BYTES:])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(_Shard.get().path)
        connection.sendall(_hello())  # what is not admitted is not read any further
        connection.recv(1 << 16)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):  # until it is closed: a shard that hangs is a fault
                pass


# -- messages of our gRPC services


def _grpc_seeds() -> dict[str, bytes]:
    from clipper.frontend.protocols import message

    infer = message("inference.ModelInferRequest")(model_name="svm", id="q-1")
    tensor = infer.inputs.add(name="x", datatype="FP64", shape=[2, 2])
    tensor.contents.fp64_contents.extend([1, 2, 3, 4])
    raw = message("inference.ModelInferRequest")(model_name="svm", raw_input_contents=[bytes(16)])
    raw.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    strings = message("inference.ModelInferRequest")(raw_input_contents=[b"\x03\0\0\0abc\0\0\0\0"])
    strings.inputs.add(name="x", datatype="BYTES", shape=[2])
    seeds = {"infer": infer, "infer-raw": raw, "infer-strings": strings}
    return {name: each.SerializeToString() for name, each in seeds.items()} | {"empty": b""}


def _run_grpc(data: bytes) -> None:
    from google.protobuf.message import DecodeError

    from clipper.frontend.inference import codec, protobuf_codec
    from clipper.frontend.protocols import message
    from clipper.mesh.splice import extract, inject
    from clipper.types import InputType
    from tests.frontend.infer_twin import differ

    assert not (found := differ(data)), found
    with contextlib.suppress(ClipperError):
        request = protobuf_codec.decode(protobuf_codec.read(data))
        for type_ in ("f64[2]", "f32[4]", "str", "any"):
            with contextlib.suppress(ClipperError):
                codec.rows_of(request, InputType.parse(type_))
    parsed = None
    with contextlib.suppress(DecodeError):
        parsed = message("inference.ModelInferRequest").FromString(data)
    with contextlib.suppress(ClipperError):
        found = extract(data, (1,))  # the model's name, which is read without the schema
        if parsed is not None:
            assert (found or "") == parsed.model_name, (
                f"the name is {parsed.model_name!r}, read as {found!r}"
            )
        changed = inject(data, (1,), "another")
        assert extract(changed, (1,)) == "another"
        if parsed is not None:
            parsed.model_name = "another"
            again = message("inference.ModelInferRequest").FromString(changed)
            assert again.SerializeToString(deterministic=True) == parsed.SerializeToString(
                deterministic=True
            )


# -- files: the journal and snapshots


def _journal_seeds() -> dict[str, bytes]:
    from clipper.store.journal import Journal

    with tempfile.TemporaryDirectory(prefix="clipper-fuzz-") as place:
        journal = Journal(Path(place), "os")
        journal.append_many([b"first", b"", b"x" * 100, bytes(range(64))])
        journal.close()
        (path,) = Path(place).glob("*")
        data = path.read_bytes().rstrip(b"\0")
    return {"four-records": data, "zeros": data + bytes(64), "torn": data[:-9], "empty": b""}


def _run_journal(data: bytes) -> None:
    from clipper.store.journal import Journal

    with tempfile.TemporaryDirectory(prefix="clipper-fuzz-") as place:
        folder = Path(place)
        written = Journal(folder, "os")
        written.append(b"named as a journal names it")
        written.close()
        (path,) = folder.glob("*")
        path.write_bytes(data)
        with contextlib.suppress(ClipperError):
            journal = Journal(folder, "os")
            first = list(journal.replay())
            journal.append(b"and on")
            journal.close()
            journal = Journal(folder, "os")
            second = list(journal.replay())
            journal.close()
            assert second[:-1] == first, "records changed when the journal was opened again"
            assert second[-1][1] == b"and on"
            numbers = [number for number, _ in second]
            assert numbers == sorted(set(numbers)), "a number was given out twice"


def _snapshot_seeds() -> dict[str, bytes]:
    from clipper.params.shard.durability.snapshots import FILE, MANIFEST, PartWriter

    with tempfile.TemporaryDirectory(prefix="clipper-fuzz-") as place:
        writer = PartWriter(Path(place), 1, 0, 1)
        ids = np.arange(3)
        writer.add({"tables": [{"name": "users", "dim": 2}]})
        writer.add({"rows": [{"table": 0, "ids": ids, "values": np.ones((3, 2), np.float32)}]})
        part = writer.finish(base=0, epoch=1, version=2)
        blocks, manifest = (part.folder / FILE).read_bytes(), (part.folder / MANIFEST).read_bytes()
    return {"blocks": b"B" + blocks, "manifest": b"M" + manifest, "no-blocks": b"B"}


def _run_snapshot(data: bytes) -> None:
    """Read one file of a part of a snapshot. The first byte of the input says which of the two
    files it is."""
    from clipper.errors import FrameError, StoreError
    from clipper.params.shard.durability import snapshots

    content = data[1:]
    with tempfile.TemporaryDirectory(prefix="clipper-fuzz-") as place:
        folder = Path(place) / f"version-{1:012d}" / "shard-0-of-1"
        folder.mkdir(parents=True)
        if data[:1] == b"M":
            (folder / snapshots.FILE).write_bytes(b"")
            (folder / snapshots.MANIFEST).write_bytes(content)
            snapshots.part_of(folder)
            snapshots.sets_in(Path(place))
            return
        (folder / snapshots.FILE).write_bytes(content)
        manifest: dict[str, Any] = {
            "format": snapshots.FORMAT,
            "number": 1,
            "shard": 0,
            "shards": 1,
            "base": 0,
            "epoch": 1,
            "version": 2,
            "rows": 3,
            "nbytes": len(content),
            "crc": 0,
            "created_us": 1,
        }
        text = json.dumps({**manifest, "checksum": snapshots._checksum(manifest)})
        (folder / snapshots.MANIFEST).write_text(text)
        part = snapshots.part_of(folder)
        assert part is not None
        with contextlib.suppress(StoreError, FrameError):
            for piece in snapshots.pieces_of(part):
                assert isinstance(piece, dict)


# -- string blocks: LZ4 beside the reference, and the columns of strings of version 1


def _string_seeds() -> dict[str, bytes]:
    from clipper_core.wire.codec import V1, encode_v1
    from clipper_core.wire.lz4 import Search, encode_lz4

    texts = [b"", b"abc", b"a" * 300, b"abcd" * 40 + b"xyz", bytes(range(200))]
    blocks = {
        f"block-{i}-{search.name.lower()}": (
            b"L" + struct.pack("<I", len(text)) + encode_lz4(text, search)
        )
        for i, text in enumerate(texts)
        for search in (Search.LITERALS, Search.QUICK)
    }
    strings = encode_v1(V1.V1_STR, ["a", "", "long " * 20])
    numbers = encode_v1(V1.V1_VAR_F64, [np.arange(3.0), np.arange(0.0)])
    return blocks | {"v1-strings": b"V" + strings, "v1-numbers": b"V" + numbers}


def _run_strings(data: bytes) -> None:
    """Read strings. The first byte of the input says whether the rest is a block with its size, or
    a message of version 1."""
    from clipper_container.wire import frames as wire
    from clipper_core.wire.codec import V1_HEAD_BYTES, decode_v1, message_bytes_v1
    from clipper_core.wire.lz4 import Search, decode_lz4, encode_lz4

    if data[:1] == b"V":
        with contextlib.suppress(StatusError, ClipperError):
            size = message_bytes_v1(data[1 : 1 + V1_HEAD_BYTES], bytes_max=1 << 16, rows_max=256)
            assert size <= (1 << 16) + V1_HEAD_BYTES
            assert len(decode_v1(data[1 : 1 + size], bytes_max=1 << 16, rows_max=256)) <= 256
        return
    if len(data) < 5:
        return
    size, block = struct.unpack_from("<I", data, 1)[0] & 0xFFFF, data[5:]
    ours = theirs = None
    with contextlib.suppress(StatusError, ClipperError):
        ours = decode_lz4(block, size)
        assert len(ours) == size
    with contextlib.suppress(wire.BadFrame):
        theirs = wire.lz4_decode(np.frombuffer(block, np.uint8), size)
    assert ours is None or theirs is None or ours == theirs, "the two readers of LZ4 differ"
    for search in Search:
        assert decode_lz4(encode_lz4(block, search), len(block)) == block


TARGETS = {
    "records": Target(_record_seeds, _run_record),
    "frames": Target(_frame_seeds, _run_frame),
    "replies": Target(_reply_seeds, _run_reply),
    "http": Target(_http_seeds, _run_http),
    "http2": Target(_http2_seeds, _run_http2),
    "calls": Target(_call_seeds, _run_calls),
    "plain-calls": Target(_plain_seeds, _run_plain),
    "owned": Target(_owned_seeds, _run_owned),
    "numbers": Target(_number_seeds, _run_number),
    "shard": Target(_shard_seeds, _run_shard),
    "grpc": Target(_grpc_seeds, _run_grpc),
    "journal": Target(_journal_seeds, _run_journal),
    "snapshot": Target(_snapshot_seeds, _run_snapshot),
    "strings": Target(_string_seeds, _run_strings),
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Yield what targets share and end it afterwards; warnings of numpy about odd numbers are no
    faults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            yield
        finally:
            _Shard.close()
            _Owned.close()
