"""Runs a shard some of whose core's allocations fail, by the allocator of failing.cpp, which is
preloaded.

Clients push one gradient of 1 after the other, and repeat a push until it is answered. Prints, as
JSON: how often a push was refused and how often its connection was closed, how many allocations
failed, how many descriptors were left over, and how many pushes each client's row has.
"""

import collections
import contextlib
import ctypes
import json
import os
import select
import socket
import struct
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from clipper_core.params.embedding import Table
from clipper_core.params.optimizer import Optimizer
from clipper_core.params.shard_loop import ShardLoop
from clipper_core.runtime.status import StatusError

HEAD = struct.Struct("<4s4B2I5QfI")
PUSH, CALL, ANSWER, REFUSED = 2, 3, 4, 5
CLIENTS, PUSHES, DIM = 4, 150, 4


class Shard:
    """A shard with one table: its core, its loop, a thread that admits every client, and a follower
    that each push waits for."""

    def __init__(self, path: Path) -> None:
        self.table = Table("users", DIM, optimizer=Optimizer("sgd", rate=1.0))
        self.core = ShardLoop()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(64)
        self.listener.setblocking(False)
        self.core.listen(self.listener.fileno())
        self.core.add_table(self.table)
        self.core.follow(0, waited=True)
        self.core.ready = True
        self.over = threading.Event()
        self.threads = [
            threading.Thread(target=run) for run in (self.core.run, self._admit, self._follow)
        ]
        for thread in self.threads:
            thread.start()

    def _admit(self) -> None:
        while not self.over.is_set():
            select.select([self.core.calls_fd], [], [], 0.1)
            for caller, _, body in self.core.calls():
                self.core.answer(caller, body, admit=True)

    def _follow(self) -> None:
        while not self.over.is_set():
            select.select([self.core.log_fd], [], [], 0.01)
            try:
                changed = self.core.changed(0)
            except (MemoryError, StatusError):
                continue
            if changed is None:
                self.core.follow(0, waited=True)
                self.core.acknowledge(0, self.core.position)
            else:
                self.core.acknowledge(0, changed[0])

    def close(self) -> None:
        self.over.set()
        self.core.stop()
        for thread in self.threads:
            thread.join()
        self.listener.close()


class Client:
    """A thread of worker `number`, which pushes to a row of its own."""

    def __init__(self, path: Path, number: int, ended: collections.Counter[str]) -> None:
        self.path, self.number, self.ended = path, number, ended
        self.socket: socket.socket | None = None
        self.ids = np.array([number, *range(1000 * number, 1000 * number + 30)], np.int64)

    def run(self) -> None:
        for sequence in range(1, PUSHES + 1):
            while (how := self._push(sequence)) != "answered":
                self.ended[how] += 1
        assert self.socket is not None
        self.socket.close()

    def _push(self, sequence: int) -> str:
        gradients = np.ones((len(self.ids), DIM), np.float32)
        self.ids[1:] += 30  # rows of their own for each push: the table and the log grow
        try:
            if self.socket is None:
                self.socket = socket.socket(socket.AF_UNIX)
                self.socket.settimeout(20)
                self.socket.connect(str(self.path))
                if self._ask(CALL, b"let me in", 0, 0)[2] == REFUSED:
                    raise ConnectionRefusedError
            head = self._ask(
                PUSH, self.ids.tobytes() + gradients.tobytes(), len(self.ids), sequence
            )
        except OSError as error:
            assert self.socket is not None
            self.socket.close()
            self.socket = None
            return "silent" if isinstance(error, TimeoutError) else "closed"
        return "answered" if head[2] == ANSWER else f"refused {head[6]}"

    def _ask(self, kind: int, payload: bytes, rows: int, sequence: int) -> tuple[int, ...]:
        assert self.socket is not None
        payload += bytes(-len(payload) % 8)
        head = HEAD.pack(
            b"CLPT",
            1,
            kind,
            0,
            0,
            0,
            rows,
            sequence,
            0,
            self.number,
            sequence,
            0,
            1.0,
            len(payload),
        )
        self.socket.sendall(head + payload)
        answer = HEAD.unpack(self._exactly(HEAD.size))
        self._exactly(answer[-1])
        return answer

    def _exactly(self, n: int) -> bytes:
        got = b""
        while len(got) < n:
            assert self.socket is not None
            more = self.socket.recv(n - len(got))
            if not more:
                raise ConnectionResetError
            got += more
        return got


def main(seed: int, one_in: int) -> None:
    allocator = ctypes.CDLL(None)
    allocator.failing_on.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
    allocator.failing_off.restype = ctypes.c_uint64
    ended: collections.Counter[str] = collections.Counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Shard(Path(folder) / "shard")) as shard,
    ):
        numbers = np.arange(1, CLIENTS + 1)
        shard.table.push(numbers, np.zeros((CLIENTS, DIM), np.float32))
        start, before = shard.table.pull(numbers).copy(), len(os.listdir("/proc/self/fd"))
        threads = [
            threading.Thread(target=Client(Path(folder) / "shard", int(i), ended).run)
            for i in numbers
        ]
        allocator.failing_on(seed, one_in)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = allocator.failing_off()
        applied = np.rint(start - shard.table.pull(numbers))[:, 0]
        while shard.core.stats()["connections"]:
            pass
        left = len(os.listdir("/proc/self/fd")) - before
    print(
        json.dumps(
            {
                "ended": ended,
                "failed": failed,
                "left": left,
                "applied": applied.tolist(),
                "pushes": PUSHES,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
