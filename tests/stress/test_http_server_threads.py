"""The core's HTTP server under many threads: clients that pipeline, cut their requests and
disconnect; tables and keys that change; connections that are passed to Python and back. Every
request has its own answer, in order, none without a valid key, and nothing is left open."""

import contextlib
import hashlib
import json
import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clipper.selection import Plan, Prediction
from clipper.types import Answer, VersionedModel
from clipper_core.http.http_route import HotRoute, HotTable
from clipper_core.http.http_server import Gone, Handed, HttpServer, Late, Read
from clipper_core.http.key_table import KeyTable
from clipper_core.learning.answer_window import AnswerWindow
from clipper_core.runtime.histogram import Counter, LatencyHistogram
from tests.stress.node import Node, together
from tests.threads import join

CLIENTS = 4
ROUNDS = 150
MODELS = (VersionedModel("m", 1),)
LIMITS: Any = {
    "header_s": 5.0,
    "idle_s": 60.0,
    "connections_max": 1000,
    "header_bytes_max": 4096,
    "body_bytes_max": 1 << 20,
    "pipeline_max": 8,
    "unsent_bytes_max": 1 << 16,
}
ENDED = b"HTTP/1.1 504 Gateway Timeout\r\ncontent-length: 0\r\n\r\n"
REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s"
KEY, WRONG = b"the-key", b"another-key"
AWAY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def as_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Place:
    """An HTTP server of the core, its threads, and the thread that stands for Python."""

    def __init__(self, node: Node, workers: int) -> None:
        self.node = node
        self.core_server = HttpServer(
            [node.engine],
            workers,
            b"made",
            finish=lambda future: future,
            encode=as_json,
            **LIMITS,
        )
        self.counts = [Counter() for _ in range(5)]
        self.took, self.ok, self.requests = LatencyHistogram(), Counter(), LatencyHistogram()
        self.endings = self.handed = self.gone = self.read = 0
        self.window = AnswerWindow(64, 60.0, 1 << 20, Answer, Prediction, Plan, None, "node")
        self.owner = self.window.pinned_owner("a learner", MODELS)
        self.ended = threading.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.change()
        self.core_server.listen(listener.detach())
        self.threads = [
            threading.Thread(target=self.core_server.run, args=(i,)) for i in range(workers)
        ]
        self.threads.append(threading.Thread(target=self.take))
        for thread in self.threads:
            thread.start()

    def change(self, slo_us: int = 10_000_000) -> None:
        routes = {}
        for path, model in ((b"/plain", b"plain"), (b"/cached", b"cached"), (b"/read", b"plain")):
            for slow in (b"", b"/late"):
                routes[path + slow] = HotRoute(
                    self.node.models[model],
                    "predict",
                    "node",
                    b'["m:1"]',
                    1 if slow else slo_us,
                    0.0,
                    self.counts,
                    self.took,
                    self.ok,
                    self.requests,
                    lambda id, tag, user: id,
                    self.window,
                    self.owner,
                    read_only=path == b"/read",
                )
        self.core_server.set_table(HotTable(routes, self.keys()))

    def keys(self) -> KeyTable:
        """Return a new table, of the key and of some others that nobody has."""
        others = [os.urandom(32) for _ in range(ord(os.urandom(1)))]
        return KeyTable([*others, hashlib.sha256(KEY).digest()])

    def take(self) -> None:
        """Answer each connection once, and give it back or close it.

        frontend/http/fast_path.py does the same, with HTTP.
        """
        while not self.ended.is_set():
            select.select([self.core_server.fd], [], [], 0.01)
            self.take_all()

    def take_all(self) -> None:
        for item in self.core_server.take():
            if isinstance(item, Gone):
                self.gone += 1
                continue
            # its client had left before the answer
            if isinstance(item, Late):
                continue
            if isinstance(item, Read):
                self.read += 1
                text = b'{"output":%s}' % as_json((2 * item.rows[0]).tolist())
                self.core_server.answer(item.worker, item.ticket, REPLY % (len(text), text), False)
                continue
            if not isinstance(item, Handed):
                self.endings += 1
                assert all(future.done() for future in item.futures)
                self.core_server.answer(item.worker, item.ticket, ENDED, False)
                continue
            self.handed += 1
            os.set_blocking(item.fd, True)
            with contextlib.suppress(OSError):
                os.write(item.fd, AWAY)
            os.set_blocking(item.fd, False)
            is_whole = item.data.count(b"\r\n\r\n") == 1 and item.data.endswith(b"\r\n\r\n")
            if not (is_whole and self.core_server.adopt(item.fd, item.returns + 1)):
                os.close(item.fd)

    def close(self) -> None:
        self.core_server.drain()
        self.core_server.stop()
        for thread in self.threads[:-1]:
            join(thread)
        self.ended.set()
        join(self.threads[-1])
        self.take_all()


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
    assert made.core_server.sweep() == 0


def request_bytes(path: str, row: list[float]) -> bytes:
    body = json.dumps({"input": row})
    lines = f"Host: a\r\nAuthorization: Bearer {KEY.decode()}\r\nContent-Length: {len(body)}"
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n\r\n{body}".encode()


def read(line: socket.socket, count: int) -> list[bytes]:
    rest, found = b"", []
    while len(found) < count:
        head, end, body = rest.partition(b"\r\n\r\n")
        size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]) if end else 0
        if end and len(body) >= size:
            found.append(head + end + body[:size])
            rest = body[size:]
            continue
        piece = line.recv(1 << 16)
        assert piece, (len(found), count)
        rest += piece
    assert not rest
    return found


OTHERS = [  # requests that are Python's
    b"GET /elsewhere HTTP/1.1\r\nHost: a\r\n\r\n",
    *(
        b"POST /cached HTTP/1.1\r\nHost: a\r\n%sContent-Length: 0\r\n\r\n" % line
        for line in (b"", b"Authorization: Bearer " + WRONG + b"\r\n")
    ),
]


class Client:
    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.rng = place, random.Random(seed)
        self.answered = 0

    def __call__(self) -> None:
        line = self.connect()
        for _ in range(ROUNDS):
            rows = [
                [float(self.rng.randrange(40)), self.rng.random()]
                for _ in range(self.rng.randrange(1, 12))
            ]
            paths = [
                self.rng.choice(["/plain", "/cached", "/cached", "/plain/late", "/read"])
                for _ in rows
            ]
            text = b"".join(request_bytes(path, row) for path, row in zip(paths, rows, strict=True))
            cut = self.rng.randrange(len(text))
            line.sendall(text[:cut])
            line.sendall(text[cut:])
            if self.rng.random() < 0.15:  # leaves with all it asked
                line.close()
                line = self.connect()
                continue
            for path, row, reply in zip(paths, rows, read(line, len(rows)), strict=True):
                late = path.endswith("late") and reply.startswith(b"HTTP/1.1 504")
                assert late or f'"output":[{2 * row[0]!r},{2 * row[1]!r}]'.encode() in reply, (
                    path,
                    row,
                    reply,
                )
                self.answered += 1
            if self.rng.random() < 0.1:
                line.sendall(self.rng.choice(OTHERS))
                assert read(line, 1) == [AWAY]
        line.close()

    def connect(self) -> socket.socket:
        line = socket.create_connection(self.place.address, timeout=30)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return line


def test_everybody_has_an_answer_in_order(place: Place) -> None:
    clients = [Client(place, seed) for seed in range(CLIENTS)]
    over = threading.Event()

    def changes() -> None:
        while not over.wait(0.002):
            place.change()
            place.core_server.sweep()

    claimed: set[str] = set()

    def feedback() -> None:
        """Claim the answers that are there, each once, while others come and go."""
        number = 1 << 40
        while not over.is_set():
            for id, joined in place.window.items():
                assert len(joined.arrived) == 1
                assert joined.claim() == (id not in claimed)
                claimed.add(id)
            number += 1
            arrived = {MODELS[0]: Prediction("an object")}
            place.window.add(number, "a learner", "u", Plan(MODELS), arrived, "an object")

    beside = [threading.Thread(target=each) for each in (changes, feedback)]
    for thread in beside:
        thread.start()
    try:
        together(*clients)
    finally:
        over.set()
        for thread in beside:
            join(thread)
    assert 64 <= len(place.window) <= 128
    assert len(claimed) > 64
    issued, answered, decided, used, wins = (count.value for count in place.counts)
    assert answered == decided == used == wins == place.ok.value == place.took.snapshot().count
    assert issued >= answered + place.endings
    assert answered + place.endings + place.read >= sum(client.answered for client in clients) > 0
    assert place.handed > 0
