"""An etcd for benchmarks, in a process and a folder of its own."""

import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_ETCD = "not measured: no etcd on this machine. apt-get install etcd-server"


@contextmanager
def etcd(folder: Path) -> Iterator[str | None]:
    """Its URL as a store; None where there is no etcd."""
    if shutil.which("etcd") is None:
        yield None
        return
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    command = ["etcd", "--data-dir", str(folder / "etcd"), "--log-level", "error", "--listen-client-urls", client,
               "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
               "--initial-cluster", f"default={peer}"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(f"{client}/health")
        yield f"etcd://{client.removeprefix('http://')}"
    finally:
        process.kill()
        process.wait()


def _await(url: str, patience_s: float = 20.0) -> None:
    until = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if b'"true"' in answer.read():
                    return
        except OSError:
            pass
        if time.monotonic() > until:
            raise TimeoutError(f"{url} does not answer")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [door.getsockname()[1] for door in held]
    for door in held:
        door.close()
    return ports
