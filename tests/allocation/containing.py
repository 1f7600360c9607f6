"""Runs an engine some of whose allocations fail, with containers that connect and disconnect;
failing.cpp is preloaded.

Prints, as JSON: how queries ended, how many were answered wrongly or not at all, how many
containers were attached and how many of those are known to have gone, how many allocations failed,
how many descriptors were left over, and how a query ends once there is memory again.
"""

import collections
import contextlib
import ctypes
import json
import os
import select
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from clipper.serving.query.dispatch import Dispatch
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.wire.codec import Kind, decode_header, encode_frame, encode_rows, open_rows

CONTAINERS, CLIENTS, QUERIES, BATCHES = 3, 3, 150, 10
ANY_ERROR = Exception  # what the core raises is not bound to the classes of the package here


class Server:
    """An engine with its loop, and a thread that attaches each container that sends a HELLO."""

    def __init__(self, path: Path) -> None:
        self.engine = Engine(
            cache_bytes_max=1 << 22, tasks_max=1 << 14, heartbeat_ms=500, hello_ms=300
        )
        self.dispatch = Dispatch(self.engine)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(16)
            self.dispatch.loop.listen(listener.detach())
        self.model = Model(self.engine, "double", 1, "f64", (2,), cached=False, slo_us=500_000)
        self.attached: set[int] = set()
        self.gone: set[int] = set()
        self.over = threading.Event()
        self.dispatch.start()
        self.thread = threading.Thread(target=self._attach)
        self.thread.start()

    def _attach(self) -> None:
        while not self.over.is_set():
            select.select([self.engine.events_fd], [], [], 0.05)
            for kind, conn, _, _, _ in self.engine.events():
                if kind.name == "HELLO_RECEIVED":
                    # no memory: it is closed, because nobody lets it in
                    with contextlib.suppress(ANY_ERROR):
                        self.engine.attach(conn, self.model.index, b"", size_max=16)
                elif kind.name == "ATTACHED":
                    self.attached.add(conn)
                elif kind.name == "DISCONNECTED" and conn in self.attached:
                    self.gone.add(conn)

    def ask(self, x: float) -> str:
        """Send a query; return how it ended."""
        try:
            future = self.model.predict(np.array([x, 1.0]))
        except ANY_ERROR:
            return "refused"
        if not future.wait(20):
            return "pending"
        status = future.status().name
        return status if status != "OK" or future.output()[0] == 2 * x else "wrong"

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        self.dispatch.stop()


class Container:
    """A container that doubles rows. It connects again after some batches, and whenever its
    connection is closed or it gets no batch."""

    def __init__(self, path: Path) -> None:
        self.path, self.over = path, threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.over.is_set():
            with contextlib.suppress(ANY_ERROR), socket.socket(socket.AF_UNIX) as line:
                line.settimeout(0.2)
                line.connect(str(self.path))
                line.sendall(encode_frame(Kind.HELLO, b"double"))
                self._serve(line)

    def _serve(self, line: socket.socket) -> None:
        received, batches = b"", 0
        while batches < BATCHES and not self.over.is_set():
            try:
                piece = line.recv(1 << 16)
            except TimeoutError:
                line.sendall(encode_frame(Kind.HEARTBEAT, b""))
                continue
            if not piece:
                return
            received += piece
            while (header := decode_header(received)) is not None and len(
                received
            ) >= 64 + header.payload_bytes:
                if header.kind == Kind.PREDICT:
                    rows = open_rows(header, received[64 : 64 + header.payload_bytes]).data
                    line.sendall(encode_rows(Kind.REPLY, 2 * rows, id=header.id))
                    batches += 1
                received = received[64 + header.payload_bytes :]

    def close(self) -> None:
        self.over.set()
        self.thread.join()


def main(seed: int, one_in: int) -> None:
    allocator = ctypes.CDLL(None)
    allocator.failing_on.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
    allocator.failing_off.restype = ctypes.c_uint64
    ended: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "engine")
        before = len(os.listdir("/proc/self/fd"))
        containers = [Container(Path(folder) / "engine") for _ in range(CONTAINERS)]

        def client(number: int) -> None:
            ended.update([server.ask(float(number * QUERIES + i)) for i in range(QUERIES)])

        while server.ask(1.0) != "OK":
            time.sleep(0.01)
        threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
        allocator.failing_on(seed, one_in)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed, until = allocator.failing_off(), time.monotonic() + 20
        while (how := server.ask(1.0)) != "OK" and time.monotonic() < until:
            time.sleep(0.05)
        for container in containers:
            container.close()
        while server.attached != server.gone and time.monotonic() < until:
            time.sleep(0.05)
        left = len(os.listdir("/proc/self/fd")) - before
        server.close()
    counts = {
        "ended": ended,
        "failed": failed,
        "left": left,
        "attached": len(server.attached),
        "gone": len(server.gone),
    }
    print(
        json.dumps({**counts, "pending": ended["pending"], "wrong": ended["wrong"], "at_last": how})
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
