"""A Redis and an etcd of a measurement's own, on disk, as one would run them."""

import contextlib
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PATIENCE_S = 30.0
SYNCED = ("--appendfsync", "always")  # every write is on disk before it is answered
NO_ETCD = "not measured: no etcd. python tools/fetch.py etcd"


class Etcd:
    """An etcd on disk that can be stopped and started again, at the same ports.

    folder: where its data are. options: of the command.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        ours, theirs = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        self._port = int(ours.rpartition(":")[2])
        self.url = ours.replace("http", "etcd", 1)
        self._command = [
            "etcd",
            "--data-dir",
            str(folder / "etcd"),
            "--listen-client-urls",
            ours,
            "--advertise-client-urls",
            ours,
            "--listen-peer-urls",
            theirs,
            "--initial-advertise-peer-urls",
            theirs,
            "--log-level",
            "error",
            "--initial-cluster",
            f"default={theirs}",
            *options,
        ]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = _started(self._command, lambda: _is_open(self._port))

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it with this signal."""
        self.send_signal(number)
        self._process.wait(PATIENCE_S)


@contextlib.contextmanager
def etcd(*options: str) -> Iterator[str]:
    """Start etcd. Yields its URL. options: of the command."""
    with tempfile.TemporaryDirectory(prefix="etcd-") as folder:
        server = Etcd(Path(folder), *options)
        try:
            yield server.url
        finally:
            server.stop(signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        doors = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [door.getsockname()[1] for door in doors]


def free_range(count: int) -> int:
    """Return the first of so many successive ports of 127.0.0.1 that are free, below those that the
    system gives to connections: none of these takes one of them later."""
    while True:
        first = random.randrange(10_000, 32_768 - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


class Redis:
    """A Redis on disk that can be stopped and started again.

    folder: where its data and its socket are. options: of the command.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options = folder, options
        self._socket = f"{folder}/redis.sock"
        self.url = f"unix://{self._socket}"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = ["redis-server", "--port", "0", "--unixsocket", self._socket]
        command += ["--dir", str(self._folder), "--save", "", "--appendonly", "yes"]
        self._process = _started([*command, *self._options], self._answers)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(1)
            with contextlib.suppress(OSError):
                line.connect(self._socket)
                line.sendall(b"PING\r\n")
                return line.recv(64).startswith(b"+PONG")
        return False

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it with this signal."""
        self.send_signal(number)
        self._process.wait(PATIENCE_S)


@contextlib.contextmanager
def redis() -> Iterator[str]:
    """Start Redis, which answers a write when it is on disk. Yields its URL."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = Redis(Path(folder), *SYNCED)
        try:
            yield server.url
        finally:
            server.stop(signal.SIGKILL)


def _started(command: list[str], is_ready: Callable[[], bool]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + PATIENCE_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            process.wait()
            raise RuntimeError(f"{command[0]} did not come up")
        time.sleep(0.01)
    return process


def _is_open(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0
