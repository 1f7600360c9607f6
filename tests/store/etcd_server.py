"""A real etcd for tests: one process on ports of its own that can be killed, frozen and started
again on the same folder."""

import json
import shutil
import signal
import socket
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Program, free_ports


class EtcdServer:
    """An etcd process with quick elections, so that it starts within a quarter of a second and
    grants leases of 1 s. options: of its command line."""

    def __init__(
        self, folder: Path, *options: str, scheme: str = "http", name: str = "default"
    ) -> None:
        self._folder, self._options, self._scheme, self._name = folder, options, scheme, name
        self.port, self._peers = free_ports(2)
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"etcd://{self.address}"
        self.member = f"{name}=http://127.0.0.1:{self._peers}"
        self.members = self.member

    def begin(self) -> None:
        ours, theirs = f"{self._scheme}://{self.address}", self.member.partition("=")[2]
        beat_ms = 10 if self.members == self.member else 50
        words = ["etcd", "--name", self._name, "--data-dir", str(self._folder / self._name)]
        words += ["--heartbeat-interval", f"{beat_ms}", "--election-timeout", f"{10 * beat_ms}"]
        words += ["--listen-client-urls", ours, "--advertise-client-urls", ours]
        words += ["--listen-peer-urls", theirs, "--initial-advertise-peer-urls", theirs]
        words += ["--initial-cluster", self.members, "--log-level", "error"]
        self.program = Program(*words, *self._options)

    def wait(self) -> None:
        self.program.until(self.is_up)

    def start(self, *options: str) -> None:
        self.begin()
        self.wait()

    def is_up(self) -> bool:
        return b"is there" in self._health()

    def _health(self) -> bytes:
        try:
            if self._scheme == "https":
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return b"is there"
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=1) as answer:
                return b"is there" if json.load(answer)["health"] == "true" else b""
        except OSError:
            return b""

    def ask(self, path: str, **request: Any) -> Any:
        """Send a request to the JSON gateway, for what the store does not need; bytes are base64
        there."""
        body = json.dumps(request).encode()
        with urllib.request.urlopen(f"http://{self.address}/v3/{path}", body, timeout=20) as answer:
            return json.load(answer)

    def compact(self, revision: int) -> None:
        self.ask("kv/compaction", revision=str(revision), physical=True)

    def empty(self) -> None:
        """Delete the data of the server."""
        shutil.rmtree(self._folder / self._name)

    def send(self, number: signal.Signals) -> None:
        self.program.send(number)

    def kill(self) -> None:
        self.program.stop(signal.SIGKILL)


def started(*options: str, scheme: str = "http", count: int = 1) -> Iterator[list[EtcdServer]]:
    """Start so many members of one cluster."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd: python tools/fetch.py etcd")
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="etcd-", dir=memory if memory.is_dir() else None))
    servers = [
        EtcdServer(folder, *options, scheme=scheme, name=f"m{number}") for number in range(count)
    ]
    for server in servers:
        server.members = ",".join(one.member for one in servers)
        server.begin()
    for server in servers:
        server.wait()
    yield servers
    for server in servers:
        server.kill()
    shutil.rmtree(folder)
