"""A fake mesh node for tests of a host: it listens on a control socket and sends requests.

No part of clipper is used here, so that the host is held to docs/hosts.md rather than to itself.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgpack

PATIENCE_S = 60.0


class Refused(Exception):
    """Raised to answer with an error. args: the fault, and its reason."""


class Node:
    """Start a host and send it requests. Threads: any may call request()."""

    printed: str  # all that the process printed; set by a test's fixture, like the folder
    folder: Path

    def __init__(
        self,
        folder: Path,
        *options: str,
        token: str = "secret",
        cwd: Path | None = None,
        **env: str,
    ) -> None:
        path = folder / f"control{len(list(folder.iterdir()))}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        words = [
            sys.executable,
            "-m",
            "clipper_container",
            "host",
            "--control",
            f"unix:{path}",
            *options,
        ]
        self.process = subprocess.Popen(
            words,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "CLIPPER_TOKEN": token, **env},
        )
        self._sock, _ = listener.accept()
        self._sock.settimeout(PATIENCE_S)
        listener.close()
        self.hello = self._receive()
        self._numbers = itertools.count(1)
        self._change = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self._over = False
        self._sock.settimeout(None)
        self._reader = threading.Thread(target=self._read, name="test-node")
        self._reader.start()

    def _exactly(self, n: int) -> bytes:
        got = b""
        while len(got) < n:
            chunk = self._sock.recv(n - len(got))
            if not chunk:
                raise EOFError
            got += chunk
        return got

    def _receive(self) -> dict[str, Any]:
        (size,) = struct.unpack("<I", self._exactly(4))
        message: dict[str, Any] = msgpack.unpackb(self._exactly(size))
        return message

    def _read(self) -> None:
        while True:
            try:
                message = self._receive()
            except (EOFError, OSError):
                break
            with self._change:
                if "n" in message:
                    self._answers[message["n"]] = message
                else:
                    self.events.append(message)
                self._change.notify_all()
        with self._change:
            self._over = True
            self._change.notify_all()

    def send(self, raw: bytes) -> None:
        self._sock.sendall(raw)

    def begin(self, verb: str, **fields: Any) -> int:
        n = next(self._numbers)
        body = msgpack.packb({"n": n, "verb": verb, **fields})
        with self._change:
            self._sock.sendall(struct.pack("<I", len(body)) + body)
        return n

    def end(self, n: int) -> dict[str, Any]:
        with self._change:
            assert self._change.wait_for(lambda: n in self._answers or self._over, PATIENCE_S), (
                "no answer"
            )
            assert n in self._answers, "the host is gone"
            answer = self._answers.pop(n)
        if not answer.pop("ok"):
            raise Refused(answer["fault"], answer["why"])
        assert answer.pop("n") == n
        return answer

    def request(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Send a request and return the fields of its answer. Errors: Refused."""
        return self.end(self.begin(verb, **fields))

    def event(self) -> dict[str, Any]:
        """Return the next event of the host; wait for it at most PATIENCE_S."""
        with self._change:
            assert self._change.wait_for(lambda: self.events, PATIENCE_S), "no event"
            return self.events.pop(0)

    def close(self) -> str:
        """Close the connection as a node does; return what the host wrote to stderr."""
        self._sock.shutdown(socket.SHUT_RDWR)
        _, printed = self.process.communicate(timeout=PATIENCE_S)
        self._reader.join()
        self._sock.close()
        return printed
