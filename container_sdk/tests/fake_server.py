"""A fake server of the wire protocol for tests: it listens on a unix socket and sends frames.

No part of clipper is used here, so that the SDK is held to docs/wire.md rather than to itself.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

HEADER = struct.Struct("<4sBBBBHHIQ4IQQI")
HELLO, WELCOME, REFUSE, PREDICT, REPLY, FAILURE, HEARTBEAT, GOODBYE = range(1, 9)
VARIABLE, CONFIDENCE, ROW_STATUS, COMPRESSED, CHECKED = 1, 2, 4, 8, 16
QUALIFIERS = 128
NUMBERS = {
    "?": 1,
    "u1": 2,
    "i1": 3,
    "u2": 4,
    "i2": 5,
    "u4": 6,
    "i4": 7,
    "u8": 8,
    "i8": 9,
    "f2": 10,
    "f4": 11,
    "f8": 12,
}
TYPES = {number: np.dtype(name) for name, number in NUMBERS.items()}
STR, BYTES = 13, 14
PATIENCE_S = 60.0  # until a test has failed; a busy machine starts a process in 10 s and more


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread. AssertionError if it hangs."""
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), thread.name


@dataclass
class Frame:
    kind: int
    dtype: int
    dims: tuple[int, ...]
    flags: int
    rows: int
    id: int
    time_us: int
    payload: bytes

    def parts(self) -> dict[str, Any]:
        """Return the parts of a REPLY by name: rows, confidence, qualifiers, status, text."""
        at, parts = 0, {}

        def take(size: int) -> bytes:
            nonlocal at
            chunk, at = self.payload[at : at + size], at + (size + 7) // 8 * 8
            assert len(chunk) == size
            return chunk

        kind = TYPES.get(self.dtype, np.dtype("u1"))
        if self.flags & VARIABLE:
            lengths = np.frombuffer(take(4 * self.rows), "<u4")
            parts["rows"] = []
            data = take(int(lengths.sum()) * kind.itemsize)
            start = 0
            for length in lengths:
                chunk = data[start : start + int(length) * kind.itemsize]
                start += len(chunk)
                parts["rows"].append(
                    chunk.decode()
                    if self.dtype == STR
                    else chunk
                    if self.dtype == BYTES
                    else np.frombuffer(chunk, kind)
                )
        else:
            size = int(np.prod(self.dims)) * self.rows * kind.itemsize
            parts["rows"] = np.frombuffer(take(size), kind).reshape(self.rows, *self.dims)
        if self.flags & CONFIDENCE:
            parts["confidence"] = np.frombuffer(take(4 * self.rows), "<f4")
        if self.flags & QUALIFIERS:
            sizes = np.frombuffer(take(4 * self.rows), "<u4").tolist()
            beside = take(sum(sizes))
            parts["qualifiers"] = [
                beside[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(self.rows)
            ]
        if self.flags & ROW_STATUS:
            parts["status"] = list(take(self.rows))
            parts["text"] = self.payload[at:].decode()
            at = len(self.payload)
        assert at == len(self.payload)
        return parts


def frame(
    kind: int, payload: bytes = b"", *, dtype=0, dims=(), flags=0, rows=0, id=0, rank=None
) -> bytes:
    crc = zlib.crc32(payload) if flags & CHECKED else 0
    four = (*dims, 0, 0, 0, 0)[:4]
    rank = len(dims) if rank is None else rank
    front = HEADER.pack(
        b"CLPR", 2, kind, dtype, rank, flags, 0, rows, id, *four, len(payload), 0, crc
    )
    return front + struct.pack("<I", zlib.crc32(front)) + payload


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def fixed(array: np.ndarray, id: int = 1, flags: int = 0) -> bytes:
    dtype = NUMBERS[array.dtype.str.lstrip("<|").replace("b1", "?")]
    return frame(
        PREDICT,
        padded(array.tobytes()),
        dtype=dtype,
        dims=array.shape[1:],
        rows=len(array),
        id=id,
        flags=flags,
    )


def variable(rows: list[Any], dtype: int, id: int = 1) -> bytes:
    encoded = [row.encode() if isinstance(row, str) else bytes(row) for row in rows]
    size = TYPES[dtype].itemsize if dtype in TYPES else 1
    lengths = np.array([len(chunk) // size for chunk in encoded], "<u4").tobytes()
    payload = padded(lengths) + padded(b"".join(encoded))
    return frame(PREDICT, payload, dtype=dtype, dims=(0,), flags=VARIABLE, rows=len(rows), id=id)


class Peer:
    """The end of one connection at the server."""

    greeting: dict[str, Any]  # the HELLO; set by a test's fixture, like those below
    server: Server
    process: subprocess.Popen[str]

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(PATIENCE_S)
        self.heartbeats = 0

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.sock.recv(size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    def frame(self, heartbeats: bool = False) -> Frame:
        """Return the next frame. Heartbeats are counted, and skipped unless wanted."""
        while True:
            head = self.read(64)
            (
                magic,
                version,
                kind,
                dtype,
                rank,
                flags,
                reserved,
                rows,
                id,
                *dims,
                size,
                time_us,
                crc,
            ) = HEADER.unpack(head[:60])
            assert (magic, version, reserved) == (b"CLPR", 2, 0)
            assert struct.unpack("<I", head[60:])[0] == zlib.crc32(head[:60])
            payload = self.read(size)
            assert crc == (zlib.crc32(payload) if flags & CHECKED else 0)
            got = Frame(kind, dtype, tuple(dims[:rank]), flags, rows, id, time_us, payload)
            if kind != HEARTBEAT or heartbeats:
                return got
            self.heartbeats += 1

    def hello(self) -> dict[str, Any]:
        got = self.frame()
        assert got.kind == HELLO
        return msgpack.unpackb(got.payload)

    def welcome(self, **fields: Any) -> dict[str, Any]:
        hello = self.hello()
        answer = {
            "conn": 1,
            "heartbeat_ms": 10_000,
            "payload_bytes_max": 1 << 24,
            "crc": False,
            **fields,
        }
        self.sock.sendall(frame(WELCOME, msgpack.packb(answer)))
        return hello

    def request(self, data: bytes) -> Frame:
        self.sock.sendall(data)
        return self.frame()

    def close(self) -> None:
        self.sock.close()


class Server:
    """A fake server that listens on a unix socket or on a TCP port."""

    def __init__(self, directory: Path, tcp: bool = False) -> None:
        self.path = None if tcp else str(directory / "s")
        self.sock = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
        self.sock.bind(("127.0.0.1", 0) if tcp else self.path)
        self.address = f"tcp:127.0.0.1:{self.sock.getsockname()[1]}" if tcp else f"unix:{self.path}"
        self.sock.listen()
        self.sock.settimeout(PATIENCE_S)

    def accept(self) -> Peer:
        return Peer(self.sock.accept()[0])

    def close(self) -> None:
        self.sock.close()
        if self.path:
            os.unlink(self.path)


def start(
    target: str, address: str, *options: str, cwd: Path | None = None, **env: str
) -> subprocess.Popen[str]:
    """Start a container process."""
    words = [
        sys.executable,
        "-m",
        "clipper_container",
        "serve",
        target,
        "--connect",
        address,
        "--name",
        "svm",
        *options,
    ]
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
    )
