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
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".venv" / "peers"
_STARTS_WITHIN_S = 90.0


@dataclass(frozen=True)
class Peer:
    """requirements: of its environment.  answers: a path and a body, with the input for %s, for
    each of our models."""

    name: str
    requirements: tuple[str, ...]
    command: tuple[str, ...] = ("{python}", "{script}", "{port}")
    path: str = "/{model}"
    body: str = '{"input": %s}'

    @property
    def python(self) -> Path:
        return HOME / self.name / "bin" / "python"

    @property
    def installed(self) -> bool:
        return (HOME / self.name / ".installed").exists()

    def install(self) -> None:
        """Errors: CalledProcessError, with what pip said."""
        subprocess.run([sys.executable, "-m", "venv", str(HOME / self.name)], check=True)
        pip = [str(self.python), "-m", "pip", "install", "-q"]
        pip += ["--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, *self.requirements, "scikit-learn>=1.4", "numpy>=2"], check=True)
        (HOME / self.name / ".installed").touch()


PEERS = {
    peer.name: peer
    for peer in (
        Peer("mosec", ("mosec>=0.9",)),
        Peer("granian", ("granian>=2", "orjson>=3", "uvloop>=0.19")),
        Peer("fastapi", ("fastapi>=0.110", "uvicorn[standard]>=0.30")),
        Peer("litserve", ("litserve>=0.2",)),
        Peer("bentoml", ("bentoml>=1.4",), body='{"input": [%s]}'),
        Peer("ray", ("ray[serve]>=2.40",)),
        Peer(
            "mlserver",
            ("mlserver>=1.6",),
            path="/v2/models/{model}/infer",
            body='{"inputs": [{"name": "x", "shape": [1, {width}], "datatype": "FP64", "data": '
            "%s}]}",
        ),
    )
}


class Served:
    """A peer that serves. address: host:port.  cpu_s(): of all its processes so far, the model's
    too."""

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
        }
        self._log = open(folder / "log", "wb")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            words, cwd=folder, env=env, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self.peer, self.address = peer, f"127.0.0.1:{port}"
        self._wait(folder)

    def _wait(self, folder: Path) -> None:
        until = time.monotonic() + _STARTS_WITHIN_S
        while not self._answers():
            if time.monotonic() > until or self._process.poll() is not None:
                self.close()
                said = (folder / "log").read_text(errors="replace").strip().splitlines()[-20:]
                raise RuntimeError(f"{self.peer.name} did not start: " + "\n".join(said))
            time.sleep(0.2)

    def _answers(self) -> bool:
        path, body = self.asked("linear", 64)
        request = urllib.request.Request(
            f"http://{self.address}{path}",
            (body % ([0.5] * 64)).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def asked(self, model: str, width: int) -> tuple[str, str]:
        """The path, and a body with %s for the list of numbers."""
        return self.peer.path.format(model=model), self.peer.body.replace("{width}", str(width))

    def cpu_s(self) -> float:
        ticks = 0
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if entry.name.isdecimal() and os.getsid(int(entry.name)) == self._process.pid:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    ticks += sum(int(fields[i]) for i in (11, 12, 13, 14))
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self._log.close()


@contextlib.contextmanager
def serving(peer: Peer, linear: object) -> Iterator[Served]:
    """linear: a fitted scikit-learn model of 64 numbers, which the peer reads from a file."""
    with tempfile.TemporaryDirectory(prefix="clipper-peer-") as text:
        folder = Path(text)
        (folder / "linear.pickle").write_bytes(pickle.dumps(linear))
        served = Served(peer, folder)
        try:
            yield served
        finally:
            served.close()
