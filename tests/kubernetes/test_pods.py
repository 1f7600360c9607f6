"""Exported objects are run: upgrades, scaling and the loss of a machine under load, with the very
commands, files, environment and probes of the objects."""

import contextlib
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.system.several_servers.on_redis import Client
from tests.images.exports import export
from tests.kubernetes import pods
from tests.kubernetes.pods import Cluster
from tests.languages.compiled import CPP, cpp
from tests.memory_container import wait_until
from tests.sizes import sized
from tests.threads import join

yaml = pytest.importorskip("yaml", reason="python tools/fetch.py clients")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(pods.missing()), reason=pods.missing()),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="python tools/fetch.py kubectl"),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="python tools/fetch.py redis"),
]
in_full = pytest.mark.skipif(sized(True, False), reason="in `make test-full` only")
DECLARED = """\
[models.m]
target = "ours_in_pods:total"
input = "f64[2]"
[apps.a]
models = ["m"]
slo_ms = 10000
default = -1
"""


def exported(folder: Path, declared: str) -> Path:
    """Export a base for Kustomize of two servers, one model and a Redis; a preStop of a second."""
    (folder / "clipper.toml").write_text(declared)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        words = ["--redis", "--set", "servers.awaySeconds=1"]
        result = export("k8s", folder / "out", "--from", folder / "clipper.toml", *words)
        assert result.exit_code == 0, result.output
    return folder / "out"


@contextlib.contextmanager
def running(base: Path, folder: Path) -> Iterator[Cluster]:
    text = subprocess.run(
        ["kubectl", "kustomize", str(base)], capture_output=True, text=True, check=True
    ).stdout
    made = Cluster(folder, base / "models")
    try:
        made.apply([*yaml.safe_load_all(text)])
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("pods")
    (folder / "ours_in_pods.py").write_text("def total(rows):\n    return rows.sum(axis=1)\n")
    with running(exported(folder, DECLARED), tmp_path_factory.mktemp("cluster")) as made:
        yield made


def failed_through(cluster: Cluster, act: Callable[[], None]) -> tuple[int, list[str]]:
    """Query all the time; return how many were sent, and why some failed."""

    def places() -> list[tuple[str, int]]:
        return [(address, 8000) for address in cluster.addresses("clipper")]

    stop = threading.Event()
    clients = [Client(places, 50.0, stop, timeout_s=3.0) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        act()
        time.sleep(0.5)
    finally:
        stop.set()
        for client in clients:
            join(client)
    return sum(client.sent for client in clients), [w for one in clients for w in one.failed]


def test_a_rolling_upgrade_of_the_servers_fails_no_query(cluster: Cluster) -> None:
    before = cluster.of("clipper-server")
    sent, failed = failed_through(cluster, lambda: cluster.restart("clipper-server"))
    assert sent > 100
    assert not failed
    assert not set(before) & set(cluster.of("clipper-server"))
    assert [pod.returned for pod in before] == [0, 0], "each ends by itself within its grace period"


@in_full
def test_a_rolling_upgrade_of_a_model_fails_no_query(cluster: Cluster) -> None:
    sent, failed = failed_through(cluster, lambda: cluster.restart("clipper-model-m"))
    assert sent > 50
    assert not failed


@in_full
def test_scaling_up_and_down_fails_no_query(cluster: Cluster) -> None:
    def act() -> None:
        cluster.scale("clipper-server", 3)
        cluster.scale("clipper-server", 2)

    assert not failed_through(cluster, act)[1]


def test_the_token_of_management_is_needed_and_enough(cluster: Cluster) -> None:
    (address, *_) = cluster.addresses("clipper-admin")
    command = ["clipper", "models", "--url", f"http://{address}:8002", "-o", "json"]
    (pod, *_) = [one for one in cluster.of("clipper-server") if one.address == address]
    token = cluster.secret(_secret_of(pod))["admin_token"].decode()
    words = [str(pods.BIN / command[0]), *command[1:]]
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    completed = subprocess.run(
        [*words, "--token", token], capture_output=True, text=True, check=True
    )
    assert json.loads(completed.stdout)[0]["name"] == "m"


def _secret_of(pod: pods.Pod) -> str:
    (name,) = (
        one["valueFrom"]["secretKeyRef"]["name"]
        for one in pod.container["env"]
        if one["name"] == "CLIPPER_HTTP__TOKEN"
    )
    return str(name)


def test_the_loss_of_a_machine_loses_a_server_and_no_query(cluster: Cluster) -> None:
    """The model is on another machine: a batch that is lost with its container is a default."""
    model = ("clipper-model-m", "clipper-redis")
    node = cluster.of("clipper-server")[0].node
    sent, failed = failed_through(cluster, lambda: cluster.lose(node, but=model))
    assert sent > 50
    assert not failed
    assert len(cluster.of("clipper-server")) == len(cluster.addresses("clipper")) == 2


def test_a_program_serves_servers_that_are_upgraded_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in C++: its image, its environment and its probes."""
    program = tmp_path / "total"
    program.symlink_to(cpp(CPP / "tests" / "total.cpp"))
    monkeypatch.chdir(tmp_path)
    declared = DECLARED.replace('target = "ours_in_pods:total"', 'command = ["./total"]')
    (tmp_path / "cluster").mkdir()
    with running(exported(tmp_path, declared), tmp_path / "cluster") as cluster:

        def act() -> None:
            cluster.restart("clipper-server")
            for one in cluster.of("clipper-server"):
                began = one.restarts
                one.kill()
                wait_until(lambda one=one, began=began: one.restarts > began, "it is seen dead")
                cluster.wait_ready()
            cluster.restart("clipper-model-m")

        sent, failed = failed_through(cluster, act)
        assert sent > 100
        assert not failed
