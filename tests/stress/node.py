"""A real loop thread, a real socket, a container on a thread of this process: what stress tests of
the engine run on."""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from clipper.serving.query.dispatch import Dispatch
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.wire.codec import Kind, decode_header, encode_frame, encode_rows, open_rows


class SocketContainer:
    """A container on its own thread that doubles each row and closes its connection on request. It
    answers while `awake`."""

    def __init__(self, path: str, name: bytes) -> None:
        self.awake = threading.Event()
        self.awake.set()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.sendall(encode_frame(Kind.HELLO, name))
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        held = b""
        with contextlib.suppress(OSError):
            while piece := self.socket.recv(1 << 16):
                held = self.answer(held + piece)

    def answer(self, held: bytes) -> bytes:
        while (header := decode_header(held)) is not None and len(
            held
        ) >= 64 + header.payload_bytes:
            self.awake.wait()
            if header.kind == Kind.PREDICT:
                rows = open_rows(header, held[64 : 64 + header.payload_bytes]).data
                self.socket.sendall(encode_rows(Kind.REPLY, 2 * rows, id=header.id))
            held = held[64 + header.payload_bytes :]
        return held

    def drop(self) -> None:
        self.awake.set()
        with contextlib.suppress(OSError):  # the engine may have closed it first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.socket.close()


class Node:
    """An engine with its threads; containers that connect are attached to the model that they
    name."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "socket")
        self.engine = Engine(cache_bytes_max=1 << 22, tasks_max=1 << 16, heartbeat_ms=10_000)
        self.dispatch = Dispatch(self.engine)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(16)
        self.dispatch.loop.listen(listener.detach())
        self.models = {
            name: Model(
                self.engine,
                name.decode(),
                i + 1,
                "f64",
                (2,),
                cached=name == b"cached",
                slo_us=20_000_000,
            )
            for i, name in enumerate([b"plain", b"cached", b"vector"])
        }
        self.containers: list[SocketContainer] = []
        self.dispatch.start()

    def connect(self, name: bytes) -> None:
        self.containers.append(SocketContainer(self.path, name))
        while not self.attach():
            threading.Event().wait(0.001)

    def attach(self) -> bool:
        attached = False
        for kind, conn, _, _, data in self.engine.events():
            if kind.name == "HELLO_RECEIVED":
                self.engine.attach(conn, self.models[data].index, b"", size_max=256)
                attached = True
        return attached

    def close(self) -> None:
        self.dispatch.stop()
        for container in self.containers:
            container.drop()
        completion = self.engine.completion
        assert completion.issued == completion.answered


def together(*runs: Callable[[], object]) -> None:
    start = threading.Barrier(len(runs))
    failed: list[BaseException] = []

    def one(run: Callable[[], object]) -> None:
        start.wait()
        try:
            run()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
