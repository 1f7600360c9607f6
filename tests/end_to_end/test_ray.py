"""`clipper up`, `clipper cluster` and `clipper params up`, all `--on ray`: actors of a real Ray,
killed and started again."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from bench.system.several_servers import on_ray
from clipper.params import Client, TableSpec
from clipper.params.local.address_file import running_shards
from clipper.params.local.live_reshard import home_in
from tests.end_to_end.commands import running
from tests.memory_container import wait_until
from tests.params.conftest import until
from tests.params.test_resharding import IDS, loaded
from tests.processes import Program

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0  # Ray takes ten seconds to start on a machine that has nothing else to do
PAUSE_S = 0.02  # between two pushes: this file moves machines, test_resharding meets each step
SETTINGS = (
    '[server]\ndrain_s = 1.0\n[http]\nadmin = "127.0.0.1:0"\n[mesh]\npublish_s = 0.05\ncapacity_mib'
    " = 256\n"
)


def with_ray() -> str:
    """Return PYTHONPATH with Ray on it."""
    if importlib.util.find_spec("ray") is not None:
        return os.environ.get("PYTHONPATH", "")
    found = sorted((ROOT / ".venv" / "peers" / "ray").glob("lib/python3*/site-packages"))
    if not found:
        pytest.skip(
            'Ray is not installed: pip install "clipper-serving[ray]", or make peers NAME=ray'
        )
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH", "")]), str(found[0])])


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("CLIPPER_", "RAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", with_ray())
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.chdir(tmp_path)
    # a command without an address finds the Ray that is named there: no other process's
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as own:
        monkeypatch.setenv("RAY_TMPDIR", own)
        yield


@pytest.fixture
def cluster(tmp_path: Path, there: None) -> Iterator[Program]:
    (tmp_path / "node.toml").write_text(SETTINGS)
    (tmp_path / "mine.py").write_text("def double(rows):\n    return rows * 2\n")
    words = (
        "--on",
        "ray",
        "--address",
        "local",
        "--nodes",
        "2",
        "--cpus",
        "0.5",
        "--label",
        "here",
        "--insecure",
    )
    with running(
        "cluster",
        "up",
        "node.toml",
        *words,
        "--store",
        f"sqlite:{tmp_path}/mesh.db",
        "--wait",
        str(PATIENCE_S),
    ) as up:
        up.until("mesh-1  ready", "mesh-2  ready", limit_s=PATIENCE_S)
        yield up


def listed() -> dict[str, dict[str, Any]]:
    words = [sys.executable, "-m", "clipper", "cluster", "ps", "--on", "ray", "--json"]
    output = subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout
    return {one["name"]: one for one in json.loads(output[output.index("[") :])}


def test_nodes_on_ray_are_one_mesh_and_come_back_when_they_are_killed(
    cluster: Program, tmp_path: Path
) -> None:
    before = listed()
    assert sorted(before) == ["mesh-1", "mesh-2"]
    with clipper.connect(before["mesh-1"]["admin"]) as client:
        assert [(one.id, one.labels) for one in client.mesh.instances()] == [
            ("mesh-1", ("here",)),
            ("mesh-2", ("here",)),
        ]
        client.mesh.register(
            "m1", "mine.py:double", key=str(tmp_path), input="f64[3]", load_now=True, sync=True
        )
        assert client.mesh.status("m1").status == "LOADED"
    os.kill(before["mesh-2"]["pid"], signal.SIGKILL)
    give_up = time.monotonic() + PATIENCE_S
    while (found := listed()["mesh-2"])["state"] != "ready" or found["pid"] == before["mesh-2"][
        "pid"
    ]:
        assert time.monotonic() < give_up, found
    assert found["starts"] == 2
    with clipper.connect(found["admin"]) as client:
        client.mesh.ensure_loaded("m1", sync=True)  # its copy may have been the killed node's
        assert client.mesh.status("m1").status == "LOADED"
    assert cluster.stop(limit_s=PATIENCE_S) == 0
    assert "2 nodes ended" in cluster.output
    assert "mesh-1  ended  left:" in cluster.output


@pytest.mark.slow
def test_no_query_fails_while_servers_are_replaced_and_their_actor_or_node_is_killed(
    there: None,
) -> None:
    """Two servers on three Ray nodes of this machine, behind one address."""
    pytest.importorskip("ray", reason="python tools/fetch.py ray")
    grpc = pytest.importorskip("grpc")
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server: python tools/fetch.py redis")
    steps: on_ray.Story = (
        ("a rolling upgrade", on_ray.upgrade),
        ("kill -9 of an actor", on_ray.kill_actor),
        ("a killed node", on_ray.kill_node),
    )
    with on_ray.serving() as servers:
        before = servers.server_pids()
        for part in steps:
            nodes = {on_ray.parent_of(on_ray.parent_of(pid)) for pid in servers.server_pids()}
            assert len(nodes) == 2, f"before {part[0]}"
            ((name, sent, failed, _, _),) = on_ray.through(servers, 100, (part,))
            assert sent >= 100, name
            assert not failed, name
        assert not {*before} & {*servers.server_pids()}
        with clipper.connect(f"http://127.0.0.1:{servers.admin}", token=on_ray.TOKEN) as client:
            assert [one["name"] for one in client.models()] == ["m"]
        with grpc.insecure_channel(f"127.0.0.1:{servers.grpc}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
            assert call(b"", timeout=PATIENCE_S) == b"\x08\x01", "ready: true"
    assert servers.program.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_shards_on_ray_have_what_was_acknowledged_when_they_their_actors_or_nodes_are_killed(
    tmp_path: Path, there: None
) -> None:
    """Shards that have copies of each other, on three Ray nodes of this machine, one of which is
    killed in the end: no two shards are on one."""
    pytest.importorskip("ray", reason="python tools/fetch.py ray")
    with contextlib.closing(on_ray.RayMachines(3)) as machines:
        kill_shards_actors_and_nodes(tmp_path, machines)


def kill_shards_actors_and_nodes(tmp_path: Path, machines: on_ray.RayMachines) -> None:
    words = (
        "--on",
        "ray",
        "--ray-address",
        machines.address,
        "--shards",
        "2",
        "--replicas",
        "1",
        "--cpus",
        "0.3",
    )
    with running("params", "up", *words, "--folder", "set", "--wait", str(PATIENCE_S)) as up:
        up.until("params-0  ready", "params-1  ready", "2 shards serve", limit_s=PATIENCE_S)
        with Client("set", patience_s=PATIENCE_S) as client:
            client.create(
                TableSpec(
                    "t", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
                )
            )
            kills: tuple[Callable[[int], None], ...] = (
                lambda pid: os.kill(pid, signal.SIGKILL),
                lambda pid: os.kill(on_ray.parent_of(pid), signal.SIGKILL),
                lambda pid: machines.kill_node_of(on_ray.parent_of(pid)),
            )
            for count, kill in enumerate(kills, 1):
                client.push("t", range(10), -np.ones((10, 2)))
                until(
                    lambda: all(
                        one["whole"]
                        for _, stats in client.call_all("stats")
                        for one in stats["followers"]
                    )
                )
                before = client.call(1, "stats")["pid"]
                kill(before)
                wait_until(
                    lambda: client.call(1, "stats")["pid"] != before,  # noqa: B023
                    f"shard 1 is there again after kill {count}",
                    PATIENCE_S,
                )
                assert (client.pull("t", range(10)) == count).all()
        words = (
            "params",
            "down",
            "--on",
            "ray",
            "--ray-address",
            machines.address,
            "--folder",
            "set",
        )
        with running(*words) as down:
            down.until("ended 2 shards on Ray", limit_s=PATIENCE_S)
            down.wait(PATIENCE_S)
    assert running_shards(tmp_path / "set") == []
    with open(tmp_path / "set" / "shards.json") as file:
        assert json.load(file)["engine"] == "ray"


def test_shards_move_to_another_machine_while_they_are_trained(
    tmp_path: Path, there: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="python tools/fetch.py ray")
    monkeypatch.setenv("CLIPPER_PARAMS__RESHARD_KEEP_S", "0.5")
    with contextlib.closing(on_ray.RayMachines(1)) as machines:
        move_shards(tmp_path / "set", machines)
    assert running_shards(tmp_path / "set") == []


def move_shards(folder: Path, machines: on_ray.RayMachines) -> None:
    """Move two shards to three on a new machine, and kill the old one; then to two, and end."""
    on = ("--on", "ray", "--ray-address", machines.address)
    words = (*on, "--cpus", "0.3", "--folder", str(folder))
    with running("params", "up", *words, "--shards", "2", "--wait", str(PATIENCE_S)) as up:
        up.until("2 shards serve", limit_s=PATIENCE_S)
    machines.add_node("new")
    with loaded(folder, PAUSE_S) as client:
        for shards in (3, 2):
            again = (*words, "--shards", str(shards), "--resource", "new")
            with running("params", "reshard", *again) as moved:
                moved.until(f"{shards} shards serve", limit_s=PATIENCE_S)
                moved.wait(PATIENCE_S)
            assert len(client.pull("counts", IDS)) == IDS.size
            assert len(client) == shards
            if shards == 3:
                machines.kill_first_node()
        pid = client.call(1, "stats")["pid"]
    assert running_shards(home_in(folder)) == [0, 1]
    assert Path(f"/proc/{pid}").exists()
    with running("params", "up", *words, "--shards", "2", "--wait", str(PATIENCE_S)) as up:
        up.until("2 shards serve", limit_s=PATIENCE_S)  # they are the ones that run
    with Client(folder) as client:
        assert client.call(1, "stats")["pid"] == pid
    with running("params", "down", *on, "--folder", str(folder)) as down:
        down.until("ended 2 shards on Ray", limit_s=PATIENCE_S)
        down.wait(PATIENCE_S)
