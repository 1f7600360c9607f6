"""Connections of HTTP/2 under many threads: clients that cut their frames, reset calls and
disconnect; connections that go to Python and back while their calls and requests wait, in the core
or for an answer by their ticket; tables that change. Every one has its own answer, or an error of
the stand-in for Python, which answers those that it gets in parts so, and nothing is left open."""

import json
import os
import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.frontend.protocols import message
from clipper_core.http.hot_calls import HotCalls
from clipper_core.http.hpack import hpack_encode
from clipper_core.http.http2_protocol import Http2EventKind, Http2Protocol
from clipper_core.http.http_route import HotRoute, HotTable
from clipper_core.http.http_server import Ending, Gone, Handed, HttpServer, Late, Read
from clipper_core.runtime.histogram import Counter, LatencyHistogram
from tests.stress.node import Node, together
from tests.stress.test_http_server_threads import LIMITS, as_json
from tests.threads import join

CLIENTS = 4
ROUNDS = 150
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
DATA, HEADERS, RST_STREAM = 0, 1, 3
INFER, OTHER = b"/inference.GRPCInferenceService/ModelInfer", b"/other.Service/Method"
UNKNOWN, LATE = b"12", b"4"  # statuses of the stand-in for Python
FAILED = b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"  # its response


def of_call(id: str, tag: bytes, user: str) -> str:
    return id


def of_request(id: str, tag: bytes, user: str) -> str:
    return id


class Adopted:
    """A connection that the stand-in for Python has."""

    def __init__(self, handed: Handed, protocol: Http2Protocol) -> None:
        self.handed, self.protocol = handed, protocol
        self.moved = dict(handed.queries)  # streams of queries that are not answered, by ticket
        self.line = socket.socket(fileno=handed.fd)
        self.line.setblocking(True)


class Place:
    """An HTTP server of the core, its threads, and the thread that stands for Python."""

    def __init__(self, node: Node, workers: int) -> None:
        self.node = node
        self.rng = random.Random(workers)
        self.cancelled = Counter()
        self.calls = HotCalls(
            [node.engine],
            calls_max=1000,
            message_bytes_max=1 << 16,
            way_back_us=1000,
            slo_us_max=20_000_000,
            finish=lambda future: future,
            cancelled=self.cancelled,
        )
        self.core_server = HttpServer(
            [node.engine],
            workers,
            b"made",
            finish=lambda future: future,
            encode=as_json,
            **LIMITS,
        )
        self.core_server.serve_calls(self.calls, 0)
        self.counts = [Counter() for _ in range(5)]
        self.took, self.ok, self.requests = LatencyHistogram(), Counter(), LatencyHistogram()
        self.adopted: dict[int, Adopted] = {}
        self.asked: dict[int, Read] = {}  # by ticket: not answered yet
        self.moved: dict[int, Adopted] = {}  # by ticket
        self.handed = 0
        self.returned = 0
        self.late = 0
        self.went_along = 0
        self.ended = threading.Event()
        self.change()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.core_server.listen(listener.detach())
        self.threads = [
            threading.Thread(target=self.core_server.run, args=(i,)) for i in range(workers)
        ]
        self.threads.append(threading.Thread(target=self.serve))
        for thread in self.threads:
            thread.start()

    def change(self) -> None:
        routes = {
            name: HotRoute(
                self.node.models[model],
                form,
                "node",
                b"",
                slo_us,
                0.0,
                self.counts,
                self.took,
                self.ok,
                self.requests,
                of_call if form == "call" else of_request,
                takes_users=True,
                rows_max=4 if form == "call" else 1,
                read_only=name == b"read",
            )
            for name, form, model, slo_us in (
                (b"plain", "call", b"plain", 10_000_000),
                (b"cached", "call", b"cached", 10_000_000),
                (b"late", "call", b"plain", 1),
                (b"read", "call", b"plain", 10_000_000),
                (b"/plain", "predict", b"plain", 10_000_000),
                (b"/cached", "predict", b"cached", 10_000_000),
                (b"/late", "predict", b"plain", 1),
            )
        }
        table = HotTable(routes)
        self.calls.set_table(table)
        self.core_server.set_calls_table(table)
        self.core_server.set_table(table)

    # -- what stands for Python; clipper/frontend/http/http2.py does the same

    def serve(self) -> None:
        while not self.ended.is_set():
            fds = [self.core_server.fd, *self.calls.fds, *self.adopted]
            ready, _, _ = select.select(fds, [], [], 0.01)
            self.take()
            for fd in ready:
                if fd in self.adopted:
                    self.read(self.adopted[fd])
            self.tell_news()
            for ticket in [one for one in self.asked if self.rng.random() < 0.5]:
                read = self.asked.pop(ticket)
                data = (2 * np.asarray(read.rows)).tobytes()
                self.reply(read, data, [(b"grpc-status", b"0")])
            self.calls.sweep()
            self.core_server.sweep()

    def take(self) -> None:
        for item in self.core_server.take():
            if isinstance(item, Handed):
                self.adopt(item)
            elif isinstance(item, Read):
                self.asked[item.ticket] = item
            elif isinstance(item, Gone):
                self.asked.pop(item.ticket, None)
            elif isinstance(item, Late):
                if item.ticket in self.moved:
                    self.reply_late(item)
            else:
                assert isinstance(item, Ending), item
                self.end(item)

    def end(self, ending: Ending) -> None:
        """Answer a query by an error; it may be under way."""
        for future in ending.futures:
            future.cancel()
        if ending.route.subject is of_call:
            self.reply(ending, None, [(b"grpc-status", LATE)])
        else:
            self.core_server.answer(ending.worker, ending.ticket, FAILED, False)

    def reply(self, call: Any, data: bytes | None, trailers: Any) -> None:
        self.core_server.reply(call.worker, call.ticket, data, trailers)

    def reply_late(self, late: Late) -> None:
        self.late += 1
        one = self.moved.pop(late.ticket)
        stream = one.moved.pop(late.ticket)
        if late.trailers is None:
            one.protocol.answer(stream, late.message or b"")
        else:
            one.protocol.reply(stream, late.message, late.trailers)
        self.send(one)

    def adopt(self, item: Handed) -> None:
        if item.http2 is None:  # it has closed before it said what it speaks
            os.close(item.fd)
            return
        self.handed += 1
        one = self.adopted[item.fd] = Adopted(item, item.http2)
        self.went_along += len(one.moved)
        self.moved.update(dict.fromkeys(one.moved, one))
        self.calls.adopt(one.protocol, one)
        self.answer(one)

    def read(self, one: Adopted) -> None:
        try:
            data = one.line.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.calls.lose(one.protocol)
            del self.adopted[one.handed.fd]
            for ticket in one.moved:
                del self.moved[ticket]
                self.asked.pop(ticket, None)
            one.line.close()
            return
        one.protocol.feed(data)
        self.answer(one)
        if self.rng.random() < 0.5:
            self.give_back(one)

    def answer(self, one: Adopted) -> None:
        self.calls.take(one.protocol, one)
        for kind, id, _, credit in one.protocol.events():
            one.protocol.consumed(id, credit)
            if kind == Http2EventKind.BEGAN:
                one.protocol.answer(id, FAILED)
            elif kind == Http2EventKind.CALL_ENDED:
                one.protocol.reply(id, None, [(b"grpc-status", UNKNOWN)])
        self.send(one)

    def send(self, one: Adopted) -> None:
        try:
            one.line.sendall(one.protocol.take(1 << 24))
        except OSError:
            return

    def tell_news(self) -> None:
        owners, left = self.calls.news()
        for call in left:
            call.owner.protocol.reply(call.stream, None, [(b"grpc-status", LATE)])
        for one in owners:
            self.send(one)

    def give_back(self, one: Adopted) -> None:
        self.tell_news()
        if one.moved or one.protocol.has_events or one.protocol.is_shut:
            return
        self.calls.give(one.protocol)
        one.line.setblocking(False)
        del self.adopted[one.handed.fd]
        fd = one.line.detach()
        self.returned += 1
        assert self.core_server.adopt(fd, one.handed.returns + 1, one.protocol)
        assert one.protocol.is_shut

    def close(self) -> None:
        self.core_server.stop()
        for thread in self.threads[:-1]:
            join(thread)
        self.ended.set()
        join(self.threads[-1])
        self.take()
        for one in self.adopted.values():
            self.calls.lose(one.protocol)
            one.line.close()


@pytest.fixture(params=[1, 3])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    node = Node(tmp_path)
    for name in (b"plain", b"cached"):
        node.connect(name)
    made = Place(node, request.param)
    yield made
    made.close()
    node.close()
    assert made.core_server.connections == 0
    assert made.core_server.handing == 0
    assert made.calls.open == 0


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload


def call(stream: int, path: bytes, data: bytes) -> bytes:
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path)]
    head = hpack_encode([*fields, (b"content-type", b"application/grpc")])
    body = struct.pack(">BI", 0, len(data)) + data
    return frame(HEADERS, 4, stream, head) + frame(DATA, 1, stream, body)


def asked(stream: int, path: str, row: list[float]) -> bytes:
    """Return a request of HTTP."""
    data = json.dumps({"input": row}).encode()
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode())]
    fields += [(b":authority", b"x"), (b"content-length", b"%d" % len(data))]
    return frame(HEADERS, 4, stream, hpack_encode(fields)) + frame(DATA, 1, stream, data)


def infer(name: str, row: list[float]) -> bytes:
    request: Any = message("inference.ModelInferRequest")(model_name=name)
    request.inputs.add(name="input", datatype="FP64", shape=[1, 2])
    request.raw_input_contents.append(np.array(row).tobytes())
    return bytes(request.SerializeToString())


NAMES = ["plain", "cached", "cached", "late", "other", "read", "read"]
NAMES += ["/plain", "/cached", "/cached", "/late"]


def wanted_of(name: str, row: list[float]) -> bytes:
    """Return what an answer has; empty for a query that has none."""
    if name in ("other", "late", "/late"):
        return b""
    if name[0] == "/":
        return b"[%.1f,%.1f]" % (2 * row[0], 2 * row[1])
    return struct.pack("<2d", 2 * row[0], 2 * row[1])


class Client:
    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.rng = place, random.Random(seed)
        self.answered = 0

    def __call__(self) -> None:
        self.connect()
        try:
            for _ in range(ROUNDS):
                self.one_round()
        finally:
            self.line.close()

    def connect(self) -> None:
        self.line = socket.create_connection(self.place.address, timeout=60)
        self.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.line.sendall(PREFACE)
        self.stream = 1
        self.rest = b""

    def one_round(self) -> None:
        wanted: dict[int, bytes] = {}
        text = b""
        resets = set()
        for _ in range(self.rng.randrange(1, 7)):
            name = self.rng.choice(NAMES)
            row = [float(self.rng.randrange(40)), float(self.rng.randrange(1000))]
            wanted[self.stream] = wanted_of(name, row)
            path = OTHER if name == "other" and self.rng.random() < 0.3 else INFER
            if name[0] == "/":
                text += asked(self.stream, name, row)
            else:
                text += call(self.stream, path, infer(name, row))
            if self.rng.random() < 0.05:
                text += frame(RST_STREAM, 0, self.stream, struct.pack(">I", 8))
                resets.add(self.stream)
            self.stream += 2
        cut = self.rng.randrange(len(text))
        self.line.sendall(text[:cut])
        self.line.sendall(text[cut:])
        if self.rng.random() < 0.1:  # leaves with all it asked
            self.line.close()
            self.connect()
            return
        self.read({stream for stream in wanted if stream not in resets}, wanted)

    def read(self, open: set[int], wanted: dict[int, bytes]) -> None:
        bodies = dict.fromkeys(wanted, b"")
        while open:
            piece = self.line.recv(1 << 16)
            assert piece, open
            self.rest += piece
            while len(self.rest) >= 9:
                size, kind, flags = int.from_bytes(self.rest[:3], "big"), *self.rest[3:5]
                if len(self.rest) < 9 + size:
                    break
                stream = int.from_bytes(self.rest[5:9], "big")
                payload, self.rest = self.rest[9 : 9 + size], self.rest[9 + size :]
                if kind == DATA and stream in bodies:
                    bodies[stream] += payload
                if flags & 1 and stream in open:
                    open.discard(stream)
                    assert not bodies[stream] or wanted[stream] in bodies[stream]
                    self.answered += bool(bodies[stream])


def test_every_call_has_its_answer(place: Place) -> None:
    clients = [Client(place, seed) for seed in range(CLIENTS)]
    over = threading.Event()

    def changes() -> None:
        while not over.wait(0.002):
            place.change()

    changing = threading.Thread(target=changes)
    changing.start()
    try:
        together(*clients)
    finally:
        over.set()
        join(changing)
    assert place.handed > 0
    assert place.returned > 0
    assert place.went_along > 0
    assert place.late > 0
    assert all(one.answered for one in clients)
