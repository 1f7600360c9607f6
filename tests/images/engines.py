"""Engines of the tests' own: a dockerd without networks, and podman where it is installed."""

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BASE = "localhost/clipper-test-base:1"
PACKAGES = ("numpy", "lz4", "msgpack", "cloudpickle")
QUICK = {
    "heartbeat_ms": 100,
    "warmup": False,
    "restart_ms_min": 20,
    "restart_ms_max": 100,
    "drain_s": 1.0,
}
PATIENCE_S = 30.0
PODMAN = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


@dataclass(frozen=True)
class Engine:
    """A container engine. kind: "docker" or "podman". settings: of a server that uses it. words: of
    its shell command."""

    kind: str
    settings: dict[str, Any]
    words: tuple[str, ...]
    environment: dict[str, str]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [*self.words, *words], env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def containers(self, model: str = "") -> list[str]:
        return self.run(
            "ps",
            "-aq",
            "--no-trunc",
            "--filter",
            f"label=clipper.model{'=' + model if model else ''}",
        ).split()


def reach() -> dict[str, str]:
    """Return an environment in which a daemon is found that only root has on PATH."""
    return {**os.environ, "PATH": os.pathsep.join([os.environ["PATH"], "/usr/sbin"])}


def commands(kind: str, folder: Path, environment: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return what starts the engine, and its shell command."""
    socket, storage = f"unix://{folder}/engine.sock", folder / "storage"
    if kind == "docker":
        quiet = [
            "--iptables=false",
            "--ip6tables=false",
            "--bridge=none",
            "--log-level=warn",
            f"--pidfile={folder}/pid",
        ]
        places = [f"--data-root={storage}", f"--exec-root={folder}/exec", f"--host={socket}"]
        daemon = shutil.which("dockerd", path=environment["PATH"])
        client = shutil.which("docker", path=environment["PATH"])
        return [daemon or "", *places, *quiet], [client or "", "--host", socket]
    (folder / "containers.conf").write_text(PODMAN)
    environment["CONTAINERS_CONF"] = str(folder / "containers.conf")
    podman = [
        "podman",
        "--root",
        str(storage),
        "--runroot",
        str(folder / "run"),
        "--storage-driver=overlay",
    ]
    return [*podman, "system", "service", "--time=0", socket], podman


def wait_for(
    process: subprocess.Popen[bytes], words: list[str], environment: dict[str, str], log: Path
) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while subprocess.run(words, env=environment, capture_output=True).returncode:
        if process.poll() is not None or time.monotonic() > give_up:
            pytest.skip(
                f"the engine does not run here: {' '.join(log.read_text().splitlines()[-1:])}"
            )
        time.sleep(0.05)


def clear(words: list[str], environment: dict[str, str]) -> None:
    """Remove what a failed test has left running."""
    left = subprocess.run(
        [*words, "ps", "-aq"], env=environment, capture_output=True, text=True
    ).stdout.split()
    if left:
        subprocess.run([*words, "rm", "-f", *left], env=environment, capture_output=True)


def unmount(folder: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted(
        (place for place in mounted if place.startswith(f"{folder}/")), reverse=True
    ):
        subprocess.run(["umount", "-l", place], capture_output=True)
