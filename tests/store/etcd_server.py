"""A real etcd for tests: one process on ports of its own that can be killed, frozen and started
again on the same folder."""

import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.signals import freeze


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [socket_held.getsockname()[1] for socket_held in held]
    for socket_held in held:
        socket_held.close()
    return ports


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal. After SIGSTOP all threads of the server stand still when this returns."""
    if number == signal.SIGSTOP:
        freeze(process.pid)
    else:
        process.send_signal(number)


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
        elections = ["--heartbeat-interval", f"{beat_ms}", "--election-timeout", f"{10 * beat_ms}"]
        command = [
            "etcd",
            "--name",
            self._name,
            "--data-dir",
            str(self._folder / self._name),
            *elections,
            "--log-level",
            "error",
            "--listen-client-urls",
            ours,
            "--advertise-client-urls",
            ours,
            "--initial-cluster",
            self.members,
            "--listen-peer-urls",
            theirs,
            "--initial-advertise-peer-urls",
            theirs,
            *self._options,
        ]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def start(self) -> None:
        self.begin()
        self.wait()

    def wait(self) -> None:
        until = time.monotonic() + 30
        while b"is there" not in self._health():
            assert self.process.poll() is None, (
                f"etcd ended at once: {(self._folder / 'log').read_text()[-2000:]}"
            )
            assert time.monotonic() < until, "etcd did not come up within 30 s"
            time.sleep(0.02)

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

    def signal(self, number: signal.Signals) -> None:
        send(self.process, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


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
