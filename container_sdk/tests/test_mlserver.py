"""Models of a real MLServer as models of a host: checks what the fake of test_oip assumes."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper_container.adapters.oip import Oip, ServerFailed
from clipper_container.runtime import Artifact, ArtifactError

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
IMPLEMENTATION = """\
import asyncio, json, os
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse, MetadataTensor
from mlserver.utils import get_model_uri

class Times(MLModel):
    async def load(self):
        with open(await get_model_uri(self.settings)) as file:
            about = json.load(file)
        self.factor, self.slow_s, self.held = about["factor"], about.get("slow_s", 0), np.ones(about.get("numbers", 0))
        self.inputs = [MetadataTensor(name="x", datatype="FP64", shape=[-1, 3])]
        self.outputs = [MetadataTensor(name="y", datatype="FP64", shape=[-1, 3])]
        await asyncio.sleep(about.get("loads_s", 0))
        return True

    async def predict(self, payload):
        await asyncio.sleep(self.slow_s)
        rows = NumpyCodec.decode_input(payload.inputs[0])
        if (rows < 0).any():
            raise ValueError("a number below 0")
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", rows * self.factor)])
"""  # noqa: E501
ROWS = np.arange(6.0).reshape(2, 3)


def command() -> str:
    """Return the path of MLServer's program, which has an environment of its own."""
    program = os.environ.get("CLIPPER_MLSERVER") or str(
        ROOT / ".venv" / "peers" / "mlserver" / "bin" / "mlserver"
    )
    if shutil.which(program) is None:
        pytest.skip("MLServer is not installed: make peers NAME=mlserver")
    return program


class MlServer:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "repository").mkdir()
        (folder / "ours_times.py").write_text(IMPLEMENTATION)
        settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "http_port": self.port,
            "grpc_port": free_port(),
            "parallel_workers": 0,
        }
        settings |= {"metrics_endpoint": None, "load_models_at_startup": False, "debug": False}
        (folder / "repository" / "settings.json").write_text(json.dumps(settings))
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }
        words = [command(), "start", str(self.folder / "repository")]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(words, env=env, cwd=self.folder, stdout=log, stderr=log)
        until_s = time.monotonic() + PATIENCE_S
        while not self.is_ready():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until_s
            time.sleep(0.05)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def post(self, path: str) -> None:
        urllib.request.urlopen(
            urllib.request.Request(f"{self.url}{path}", b"{}"), timeout=PATIENCE_S
        ).close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)


def free_port() -> int:
    """Return a port that is free, below those that the system gives to connections: none of these
    takes it while the server starts."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.fixture(scope="module")
def mlserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlServer]:
    command()
    started = MlServer(tmp_path_factory.mktemp("mlserver"))
    yield started
    started.kill()


@pytest.fixture
def runtime(mlserver: MlServer) -> Iterator[Oip]:
    started = Oip(
        "mlserver", mlserver.url, str(mlserver.folder / "repository"), load_s=20, answer_s=20
    )
    started.start()
    yield started
    started.server.close()


def artifact_of(folder: Path, model: str, key: str = "ours_times.Times", **about: Any) -> Artifact:
    path = folder / f"{model}.json"
    path.write_text(json.dumps({"factor": 2, **about}))
    return Artifact(model, "mlserver", str(path), key)


def test_a_model_is_loaded_queried_and_unloaded(
    runtime: Oip, mlserver: MlServer, tmp_path: Path
) -> None:
    artifact = artifact_of(tmp_path, "m1", numbers=5_000_000)
    loaded = runtime.load(artifact)
    assert (loaded.model.input, loaded.model.output) == ("f64[3]", "f64[3]")
    assert 30e6 < loaded.size_bytes < 90e6  # measured: 40 MB of numbers, of a file of 40 bytes
    np.testing.assert_array_equal(loaded.model.predict_batch(ROWS), ROWS * 2)
    with pytest.raises(ServerFailed, match="mlserver answers 500"):
        loaded.model.predict_batch(-ROWS)
    runtime.unload(artifact, loaded)
    runtime.unload(artifact, loaded)
    assert runtime.server.request("GET", "/v2/models/m1/ready").status == 404


def test_faults_of_the_model_and_of_the_server_are_distinguished(
    runtime: Oip, tmp_path: Path
) -> None:
    missing = artifact_of(tmp_path, "corrupt")
    Path(missing.path).write_text("no JSON")
    others = [
        artifact_of(tmp_path, "unknown", "ours_times.Nothing"),
        artifact_of(tmp_path, "odd", "no.module.X"),
    ]
    for artifact in (missing, *others):
        with pytest.raises(ArtifactError, match=f"does not load '{artifact.model}'"):
            runtime.load(artifact)
        assert not (Path(runtime.places.of(artifact.model))).exists()
    np.testing.assert_array_equal(
        runtime.load(artifact_of(tmp_path, "good")).model.predict_batch(ROWS), ROWS * 2
    )


def test_a_model_that_was_unloaded_by_another_client_is_loaded_again(
    runtime: Oip, mlserver: MlServer, tmp_path: Path
) -> None:
    model = runtime.load(artifact_of(tmp_path, "m2", factor=3)).model
    mlserver.post("/v2/repository/models/m2/unload")
    np.testing.assert_array_equal(model.predict_batch(ROWS), ROWS * 3)


def test_time_is_bounded(runtime: Oip, tmp_path: Path) -> None:
    slow = runtime.load(artifact_of(tmp_path, "slow", slow_s=5)).model
    runtime.answer_s = 0.2
    with pytest.raises(ServerFailed, match="timed out"):
        slow.predict_batch(ROWS)
    runtime.load_s = 0.2
    with pytest.raises(Exception, match=r"timed out|within 0\.2 s"):
        runtime.load(artifact_of(tmp_path, "late", loads_s=1))
    assert not runtime.places.of("late").exists()


def test_a_server_that_was_killed_has_its_models_again_when_it_is_back(
    runtime: Oip, mlserver: MlServer, tmp_path: Path
) -> None:
    models = [
        runtime.load(artifact_of(tmp_path, f"k{factor}", factor=factor)).model for factor in (2, 3)
    ]
    mlserver.kill()
    with pytest.raises(ServerFailed, match="does not answer"):
        models[0].predict_batch(ROWS)
    with pytest.raises(Exception, match="does not answer"):
        runtime.load(artifact_of(tmp_path, "k4"))
    mlserver.start()
    for factor, model in zip((2, 3), models, strict=True):
        np.testing.assert_array_equal(model.predict_batch(ROWS), ROWS * factor)


def test_its_models_are_models_of_a_mesh(
    mlserver: MlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clipper = pytest.importorskip("clipper", reason="the server is not installed")
    about = {
        "TYPE": "mlserver",
        "URL": mlserver.url,
        "FOLDER": str(mlserver.folder / "repository"),
        "CAPACITY_MIB": "512",
    }
    for name, value in about.items():
        monkeypatch.setenv(f"CLIPPER_OIP_{name}", value)
    runtimes = {
        "enabled": True,
        "runtimes": ["clipper_container.adapters.oip:Oip"],
        "publish_s": 0.05,
    }
    with clipper.start(mesh=runtimes, drain_s=1.0) as server:
        for factor in (2, 3):
            program = artifact_of(tmp_path, f"times{factor}", factor=factor)
            server.register_model(program.model, program.path, "mlserver", program.key)
        for factor in (2, 3):
            answer = server.predict(f"times{factor}", ROWS[1], slo_ms=20_000).result(PATIENCE_S)
            assert not answer.is_default, answer.reason
            assert answer.output.tolist() == (ROWS[1] * factor).tolist()
        assert server.mesh.status("times2").info.input == "f64[3]"
        server.mesh.unregister("times2")
        until_s = time.monotonic() + PATIENCE_S
        while mlserver_has(mlserver, "times2"):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        assert mlserver_has(mlserver, "times3")


def mlserver_has(mlserver: MlServer, model: str) -> bool:
    try:
        with urllib.request.urlopen(
            f"{mlserver.url}/v2/models/{model}/ready", timeout=PATIENCE_S
        ) as reply:
            return bool(reply.status == 200)
    except urllib.error.HTTPError:
        return False
