"""Models deployed from a URL: by Python, the management client, a file, and the mesh."""

import hashlib
import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import clipper
from clipper.errors import ClipperError, PullFailed
from clipper_container.loading.targets import load_target
from tests.artifacts.conftest import SECRET, S3Server
from tests.onnx_models import graph
from tests.processes import Program

ROW = np.ones(3, np.float32)


def linear(factor: float) -> bytes:
    """Return the bytes of a model that returns `factor` times the sum of a row of three."""
    onnx = pytest.importorskip("onnx", reason="pip install onnx")
    floats = onnx.TensorProto.FLOAT
    weights = np.full((3, 1), factor, np.float32)
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    return graph([node], {"x": (floats, ["n", 3])}, {"y": (floats, ["n", 1])}, {"w": weights})


def test_a_server_pulls_and_remembers(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = linear(factor=2.0)
    s3.put("deployed/model.onnx", content)
    url, sha256 = "s3://models/deployed/model.onnx", hashlib.sha256(content).hexdigest()
    state = tmp_path / "state"
    with caplog.at_level(logging.DEBUG), clipper.start(state=str(state)) as server:
        model = server.deploy("svm", url, sha256=sha256)
        assert model.predict(ROW, slo_ms=60_000).result(60) == pytest.approx(6.0)
        (record,) = server.catalog.view.versions["svm"]
        assert record.source is not None
        assert (record.source.url, record.source.sha256) == (url, sha256)
        with pytest.raises(PullFailed, match="no such file or folder"):
            server.deploy("none", "s3://models/none.onnx")
        assert not server.manage.stages("none")
        with pytest.raises(PullFailed, match="has the SHA-256"):
            server.deploy("svm", url, sha256="0" * 64)
        with pytest.raises(PullFailed, match="it has a password"):
            server.deploy("svm", "https://me:secret@127.0.0.1/model.onnx")
        found = server.manage.deploy("twice", f"{url}#sha256={sha256}")
        assert found.message == "deployed twice:1"
        history = json.dumps([repr(entry) for entry in server.manage.history()])
    with clipper.start(state=str(state)) as server:  # from the folder of the state
        server.wait_ready(60)
        assert server.model("svm").predict(ROW, slo_ms=60_000).result(60) == pytest.approx(6.0)
    written = (
        b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())
        + "".join([history, caplog.text]).encode()
    )
    assert b"deployed/model.onnx" in written
    for secret in (SECRET, "me:secret"):
        assert secret.encode() not in written


def test_a_url_is_served_by_one_command(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("served/Svm.onnx", linear(factor=2.0))
    monkeypatch.chdir(tmp_path)
    free = [word for door in ("http", "grpc", "admin") for word in (f"--{door}", "127.0.0.1:0")]
    words = [sys.executable, "-m", "clipper", "serve", "s3://models/served/Svm.onnx", *free]
    with Program(*words, until="state: memory") as server:
        curl = re.search(r"^  (curl .*/api/svm/predict .*)$", server.output, re.M)
        assert curl is not None, server.output
        done = subprocess.run(["sh", "-c", curl[1]], capture_output=True, text=True, timeout=60)
        answer = json.loads(done.stdout)
        assert answer["models"] == ["svm:1"]
        assert not answer["default"]
        assert SECRET not in server.output
        assert server.stop() == 0
    with Program(*words[:-7], "s3://models/none.onnx", *free) as server:
        assert server.wait() == 1
        assert "no such file or folder" in server.output
        assert SECRET not in server.output


def test_a_server_that_shares_the_store_pulls_too(s3: S3Server, tmp_path: Path) -> None:
    s3.put("shared/model.onnx", linear(factor=2.0))
    store = f"sqlite:{tmp_path}/shared.db"

    def server(name: str) -> "clipper.ClipperServer":
        return clipper.start(state=store, server={"folder": str(tmp_path / name)})

    with server("a") as one:
        one.deploy("svm", "s3://models/shared/model.onnx")
    shutil.rmtree(tmp_path / "a")  # as if it were another host
    with server("b") as two:
        two.wait_ready(60)
        assert two.model("svm").predict(ROW, slo_ms=60_000).result(60) == pytest.approx(6.0)
    shutil.rmtree(tmp_path / "b")
    s3.put("shared/model.onnx", linear(factor=3.0))
    with server("c") as three:
        with pytest.raises(ClipperError, match="has the SHA-256"):
            three.wait_ready(60)
        stage = three.manage.stages("svm")[-1]
        assert stage["stage"] == "failed"


def test_the_mesh_pulls_where_it_loads(s3: S3Server, tmp_path: Path) -> None:
    s3.put("mesh/model.onnx", linear(factor=2.0))
    state, passed = tmp_path / "state", {"env_pass": ["AWS_*"]}
    with clipper.start(mesh=True, state=str(state), server=passed) as server:
        url = "s3://models/mesh/model.onnx"
        found = server.register_model("m1", url, load_now=True, sync=True)
        assert found.status == "LOADED", found.errors
        assert server.model("m1").predict(ROW, slo_ms=60_000).result(60) == pytest.approx(6.0)
        missing = server.register_model("m2", "s3://models/none.onnx", load_now=True, sync=True)
        assert missing.status == "LOADING_FAILED"
        assert "no such file or folder" in missing.errors[0]
    # a node that has not got it in its cache takes no other content than the first pull found
    shutil.rmtree(state / "artifacts")
    s3.put("mesh/model.onnx", linear(factor=3.0))
    with clipper.start(mesh=True, state=str(state), server=passed) as server:
        changed = server.mesh.ensure_loaded("m1", sync=True)
        assert changed.status == "LOADING_FAILED"
        assert "has the SHA-256" in changed.errors[0]


def test_pods_pull_or_mount(s3: S3Server, tmp_path: Path) -> None:
    exports = pytest.importorskip("tests.images.exports", reason="python tools/fetch.py clients")
    content = linear(factor=2.0)
    s3.put("pods/model.onnx", content)
    (tmp_path / "clipper.toml").write_text(
        '[models.svm]\ntarget = "s3://models/pods/model.onnx"\n'
        '[models.homes]\ntarget = "pvc://artifacts/homes/model.onnx"\n'
        '[apps.a]\nmodels = ["svm"]\n'
    )
    out = tmp_path / "out"
    result = exports.export("k8s", out, "--from", tmp_path / "clipper.toml")
    assert result.exit_code == 0, result.output
    found = exports.objects_of(out)
    svm, homes = (
        found["Deployment", f"clipper-model-{name}"]["spec"]["template"]
        for name in ("svm", "homes")
    )
    pinned = f"s3://models/pods/model.onnx#sha256={hashlib.sha256(content).hexdigest()}"
    dockerfile = (out / "models/svm/Dockerfile").read_text()
    assert f'"serve", "{pinned}"' in dockerfile
    assert not list((out / "models/svm").glob("model/*"))
    assert "obstore==" in (out / "models/svm/requirements.txt").read_text()
    (container,) = svm["spec"]["containers"]
    secret = {"name": "clipper-artifacts", "optional": True}
    assert container["envFrom"] == [{"secretRef": secret}]
    claim = {"claimName": "artifacts", "readOnly": True}
    assert {"name": "artifact", "persistentVolumeClaim": claim} in homes["spec"]["volumes"]
    mounts = homes["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "artifact", "mountPath": "/mnt/pvc/artifacts", "readOnly": True} in mounts
    for path in out.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()
    # what the entry point of the image runs
    assert np.allclose(load_target(pinned).predict_batch(ROW[None]), [[6.0]])
