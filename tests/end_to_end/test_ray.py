"""`clipper cluster --on ray`: nodes as actors of a real Ray, killed and started again."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clipper
from tests.end_to_end.test_shell import Process, running

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0  # Ray takes ten seconds to start on a machine that has nothing else to do
SETTINGS = '[server]\ndrain_s = 1.0\n[http]\nadmin = "127.0.0.1:0"\n[mesh]\npublish_s = 0.05\ncapacity_mib = 256\n'


def with_ray() -> str:
    """PYTHONPATH with Ray on it."""
    if importlib.util.find_spec("ray") is not None:
        return os.environ.get("PYTHONPATH", "")
    found = sorted((ROOT / ".venv" / "peers" / "ray").glob("lib/python3*/site-packages"))
    if not found:
        pytest.skip('Ray is not installed: pip install "clipper-serving[ray]", or make peers NAME=ray')
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH", "")]), str(found[0])])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    for name in [name for name in os.environ if name.startswith(("CLIPPER_", "RAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", with_ray())
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node.toml").write_text(SETTINGS)
    (tmp_path / "mine.py").write_text("def double(rows):\n    return rows * 2\n")
    words = ("--on", "ray", "--address", "local", "--nodes", "2", "--cpus", "0.5", "--label", "here", "--insecure")
    with running("cluster", "up", "node.toml", *words, "--store", f"sqlite:{tmp_path}/mesh.db", "--wait", str(PATIENCE_S)) as up:
        up.until("mesh-1  ready", "mesh-2  ready")
        yield up


def listed() -> dict[str, dict[str, Any]]:
    words = [sys.executable, "-m", "clipper", "cluster", "ps", "--on", "ray", "--json"]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    return {one["name"]: one for one in json.loads(told[told.index("[") :])}


def test_nodes_on_ray_are_one_mesh_and_come_back_when_they_are_killed(cluster: Process, tmp_path: Path) -> None:
    before = listed()
    assert sorted(before) == ["mesh-1", "mesh-2"]
    with clipper.connect(before["mesh-1"]["admin"]) as client:
        assert [(one.id, one.labels) for one in client.mesh.instances()] == [("mesh-1", ("here",)), ("mesh-2", ("here",))]
        client.mesh.register("m1", "mine.py:double", key=str(tmp_path), input="f64[3]", load_now=True, sync=True)
        assert client.mesh.status("m1").status == "LOADED"
    os.kill(before["mesh-2"]["pid"], signal.SIGKILL)
    give_up = time.monotonic() + PATIENCE_S
    while (found := listed()["mesh-2"])["state"] != "ready" or found["pid"] == before["mesh-2"]["pid"]:
        assert time.monotonic() < give_up, found
    assert found["starts"] == 2
    with clipper.connect(found["admin"]) as client:
        assert client.mesh.status("m1").status == "LOADED"
    assert cluster.end() == 0
    assert "2 nodes ended" in cluster.seen
    assert "mesh-1  ended  left:" in cluster.seen
