"""A Redis and an etcd of a measurement's own, on disk, as one would run them."""

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

PATIENCE_S = 20.0
NO_ETCD = "not measured: no etcd. python tools/fetch.py etcd"


@contextlib.contextmanager
def etcd(*options: str) -> Iterator[str]:
    """Its URL. options: of the command."""
    ours, theirs = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    with tempfile.TemporaryDirectory(prefix="etcd-") as folder:
        command = [
            "etcd",
            "--data-dir",
            folder,
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
        with _running(command, ("127.0.0.1", int(ours.rpartition(":")[2]))):
            yield ours.replace("http", "etcd", 1)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        doors = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [door.getsockname()[1] for door in doors]


@contextlib.contextmanager
def redis() -> Iterator[str]:
    """Its URL; every write is on disk before it is answered."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        door = f"{folder}/s"
        command = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            door,
            "--dir",
            folder,
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
        ]
        with _running(command, door):
            yield f"unix://{door}"


@contextlib.contextmanager
def _running(command: list[str], door: "str | tuple[str, int]") -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + PATIENCE_S
        while not _is_open(door):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} did not come up")
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def _is_open(door: "str | tuple[str, int]") -> bool:
    with socket.socket(socket.AF_UNIX if isinstance(door, str) else socket.AF_INET) as line:
        return line.connect_ex(door) == 0
