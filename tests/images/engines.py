"""Engines of the tests' own: a dockerd without networks, and podman where it is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.images.base_image import SETTINGS, base_tar
from tests.processes import Program

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
    its shell command. daemon: its process."""

    kind: str
    settings: dict[str, Any]
    words: tuple[str, ...]
    environment: dict[str, str]
    daemon: Daemon

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


class NoEngine(Exception):
    """Says why an engine cannot run here."""


class Daemon:
    """The process of an engine. words: of its shell command, which must answer once it has started.
    folder: where it keeps all.

    Raises: NoEngine if it does not.
    """

    def __init__(
        self, start: list[str], words: list[str], environment: dict[str, str], folder: Path
    ) -> None:
        self._folder = folder
        self._start = start
        self._words = words
        self._environment = environment
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._program = Program(*self._start, environment=self._environment)
        try:
            self._program.until(self._answers, limit_s=PATIENCE_S)
        except AssertionError as error:
            last = self._program.lines[-1:]
            self._program.kill()
            raise NoEngine(f"the engine does not run here: {' '.join(last)}") from error

    def _answers(self) -> bool:
        asked = [*self._words, "version"]
        return not subprocess.run(asked, env=self._environment, capture_output=True).returncode

    def kill(self) -> None:
        """End it by SIGKILL. Containers run on."""
        self._program.kill()
        # The next one would wait for the containerd of this one as long as it is a zombie.
        (self._folder / "exec/containerd/containerd.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """Ask it to end, and wait. Idempotent."""
        self._program.stop()


@contextlib.contextmanager
def running(kind: str) -> Iterator[Engine]:
    """Run an engine with a base image of this machine, in a folder that is removed at the end.

    Raises: NoEngine.
    """
    if os.getuid() != 0:
        raise NoEngine("only root can run an engine of its own")
    with contextlib.ExitStack() as opened:
        # A short path: that of a socket below it has a limit.
        folder = Path(tempfile.mkdtemp(prefix="engine-"))
        opened.callback(shutil.rmtree, folder)
        opened.callback(unmount, folder)
        environment = reach()
        start, words = commands(kind, folder, environment)
        if not start[0] or not words[0]:
            raise NoEngine(f"no {kind}: python tools/fetch.py docker")
        daemon = Daemon(start, words, environment, folder)
        opened.callback(daemon.stop)
        opened.callback(clear, words, environment)
        (folder / "base.tar").write_bytes(base_tar(PACKAGES))
        changes = [word for line in SETTINGS for word in ("--change", line)]
        bring = [*words, "import", *changes, str(folder / "base.tar"), BASE]
        subprocess.run(bring, env=environment, check=True, capture_output=True)
        settings = {"socket": f"unix://{folder}/engine.sock", "base": BASE, "build_network": "none"}
        yield Engine(kind, settings, tuple(words), environment, daemon)


def clear(words: list[str], environment: dict[str, str]) -> None:
    """Remove the containers that a failed test has left running."""
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
