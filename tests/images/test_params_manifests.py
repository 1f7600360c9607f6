"""Shards for Kubernetes: held to its schemas, and run as processes with the arguments and the
probes that pods are given."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.params import Client, TableSpec
from tests.images.exports import check_objects, export, objects_of, yaml
from tests.params.conftest import until
from tests.processes import Program, free_ports

PERIOD_S = 0.5
PATIENCE_S = 60.0


def objects_in(out: Path) -> dict[str, Any]:
    """Return the objects of the manifests by kind."""
    objects = objects_of(out)
    check_objects(objects.values())
    found = {kind: one for (kind, _), one in objects.items() if kind != "Secret"}
    assert {name for kind, name in objects if kind == "Secret"} == {
        "clipper-params",
        "clipper-params-token",
    }
    assert len(found) == len(objects) - 2
    return found


def shards_file(out: Path) -> Any:
    return json.loads(objects_of(out)["Secret", "clipper-params"]["stringData"]["shards.json"])


@pytest.mark.parametrize(
    "more",
    [["--replicas", 1], ["--replicas", 1, "--together"], []],
    ids=["apart", "together", "alone"],
)
def test_kubernetes_takes_each_object(tmp_path: Path, more: list[object]) -> None:
    result = export("k8s", tmp_path / "out", "--shards", 3, "--memory-mib", 2048, *more)
    assert result.exit_code == 0, result.output
    kinds = objects_in(tmp_path / "out")
    assert {*kinds} == {
        "StatefulSet",
        "Service",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "PriorityClass",
    }
    spec = kinds["StatefulSet"]["spec"]
    pod, (claim,) = spec["template"]["spec"], spec["volumeClaimTemplates"]
    # to recover, they need each other
    assert (spec["replicas"], spec["podManagementPolicy"]) == (3, "Parallel")
    name = kinds["Service"]["metadata"]["name"]
    assert spec["serviceName"] == name
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    assert kinds["Service"]["spec"]["publishNotReadyAddresses"]
    assert shards_file(tmp_path / "out")["addresses"] == [
        f"tcp:clipper-params-{i}.{name}:7300" for i in range(3)
    ]
    affinity = [*pod["affinity"]["podAntiAffinity"]]
    assert affinity == [
        f"{'required' if more == ['--replicas', 1] else 'preferred'}DuringSchedulingIgnoredDuringExecution"  # noqa: E501
    ]
    assert pod["priorityClassName"] == kinds["PriorityClass"]["metadata"]["name"]
    (container,) = pod["containers"]
    assert (
        container["resources"]["requests"]["memory"]
        == container["resources"]["limits"]["memory"]
        == "2048Mi"
    )
    # three snapshots, one more, and a new one
    assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"
    assert pod["terminationGracePeriodSeconds"] >= 60
    notes = spec["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] in {str(one["containerPort"]) for one in container["ports"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {claim["metadata"]["name"], *(one["name"] for one in pod["volumes"])}
    for kind in ("PodDisruptionBudget", "NetworkPolicy", "Service"):
        chosen = kinds[kind]["spec"].get("selector") or kinds[kind]["spec"].get("podSelector")
        assert (
            chosen.get("matchLabels", chosen).items()
            <= spec["template"]["metadata"]["labels"].items()
        )


def test_the_token_stays_and_what_is_set_is_new(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "mine.toml").write_text(
        '[params]\nmode = "sync"\ngrads_to_wait = 4\nrecover_s = 90\n'
    )
    assert export("k8s", out, "--shards", 2).exit_code == 0
    before = shards_file(out)
    assert export("k8s", out, "--shards", 3, "--from", tmp_path / "mine.toml").exit_code == 0
    after = shards_file(out)
    assert after["token"] == before["token"]
    assert before["settings"]["recover_s"] == 30  # names of pods are not known at once
    settings = after["settings"]
    assert (
        settings["mode"],
        settings["grads_to_wait"],
        settings["shards"],
        settings["recover_s"],
    ) == ("sync", 4, 3, 90)
    others = [path for path in out.rglob("*") if path.is_file() and path.parent != out / "secrets"]
    assert not [path for path in others if after["token"].encode() in path.read_bytes()]
    assert (out / ".gitignore").read_text() == "secrets/\n"


def test_shards_that_also_serve_grpc(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "mine.toml").write_text('[params]\ngrpc = "127.0.0.1:7400"\n')
    assert export("k8s", out, "--shards", 3, "--from", tmp_path / "mine.toml").exit_code == 0
    settings = shards_file(out)
    assert settings["settings"]["grpc"] == "0.0.0.0:7400"
    assert settings["grpc"] == [f"clipper-params-{i}.clipper-params:{7400 + i}" for i in range(3)]
    assert re.search(r"clipper-serving\[[a-z,]*grpc", (out / "server" / "Dockerfile").read_text())
    rule = objects_in(out)["NetworkPolicy"]["spec"]["ingress"][0]
    assert [(one["port"], one.get("endPort")) for one in rule["ports"]] == [
        (7300, None),
        (7400, 7402),
    ]


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl: python tools/fetch.py kubectl"
)
def test_kustomize_names_the_secret_as_workers_do(tmp_path: Path) -> None:
    assert export("k8s", tmp_path / "out", "--shards", 2).exit_code == 0
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "out")], capture_output=True, text=True, check=True
    ).stdout
    found = {one["kind"]: one for one in yaml.safe_load_all(rendered) if one["kind"] != "Secret"}
    assert shards_file(tmp_path / "out")["token"]
    (volume,) = [
        one
        for one in found["StatefulSet"]["spec"]["template"]["spec"]["volumes"]
        if "secret" in one
    ]
    assert volume["secret"]["secretName"] == "clipper-params"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--shards", "2", "--replicas", "2"], "they are in other shards"),
        (["--shards", "2", "--redis"], "--shards cannot be combined with"),
        (["--shards", "2", "--mesh", "etcd://h:1/x"], "--shards cannot be combined with --mesh"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], why: str) -> None:
    result = export("k8s", tmp_path / "out", *words)
    assert result.exit_code == (2 if "cannot be combined" in why else 1)
    assert why in result.output
    assert not (tmp_path / "out").exists()


class Pod:
    """A shard as its pod would run it: other ports, and folders of its own in place of what is
    mounted."""

    def __init__(
        self, number: int, container: dict[str, Any], root: Path, ports: list[int]
    ) -> None:
        self.root, self._container = root / f"clipper-params-{number}", container
        self.root.mkdir()
        self._places = {
            "$(POD_NAME)": self.root.name,
            "/etc/clipper-params": str(root),
            "/state": str(self.root),
            "0.0.0.0:7300": f"127.0.0.1:{ports[number]}",
            "0.0.0.0:7301": f"127.0.0.1:{ports[number + 2]}",
            "/tmp/": f"{self.root}/",
        }
        self.program = self.start()

    def here(self, words: list[str]) -> list[str]:
        return [self._here(word) for word in words]

    def _here(self, word: str) -> str:
        found = next((place for place in self._places if word.startswith(place)), "")
        return self._places[found] + word.removeprefix(found) if found else word

    def start(self) -> Program:
        words = [sys.executable, "-m", "clipper", *self.here(self._container["args"])]
        self.program = Program(*words)
        return self.program

    def passes(self, probe: str) -> bool:
        command = self.here(self._container[probe]["exec"]["command"])
        assert command[0] == "python"
        done = subprocess.run([sys.executable, *command[1:]], capture_output=True, check=False)
        if done.returncode:
            time.sleep(PERIOD_S)  # a probe is a process, and costs half a second of CPU
        return done.returncode == 0

    def end(self) -> int:
        return self.program.stop()


@pytest.mark.slow
def test_pods_serve_by_their_arguments_and_are_ready_by_their_probes(tmp_path: Path) -> None:
    out, ports = tmp_path / "out", free_ports(4)
    assert export("k8s", out, "--shards", 2, "--replicas", 1).exit_code == 0
    settings = shards_file(out)
    settings["addresses"] = [f"tcp:127.0.0.1:{port}" for port in ports[:2]]
    (tmp_path / "shards.json").write_text(json.dumps(settings))
    (container,) = objects_in(out)["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    pods = [Pod(0, container, tmp_path, ports)]
    try:
        until(lambda: pods[0].passes("livenessProbe"))
        # its replica's place is not there: to end it loses what it has
        assert not pods[0].passes("readinessProbe")
        pods.append(Pod(1, container, tmp_path, ports))
        for pod in pods:
            until(lambda pod=pod: pod.passes("readinessProbe"))  # type: ignore[misc]
        with Client(tmp_path, patience_s=PATIENCE_S) as client:
            client.create(
                TableSpec(
                    "t", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
                )
            )
            client.push("t", range(10), -np.ones((10, 2)))
            with urllib.request.urlopen(
                f"http://127.0.0.1:{ports[3]}/metrics", timeout=PATIENCE_S
            ) as scraped:
                assert b'clipper_params_rows{table="t",shard="1"} 5' in scraped.read()
            pods[1].program.kill()
            shutil.rmtree(pods[1].root / "shard-1")  # its machine is gone, and its volume
            pods[1].start()
            assert (client.pull("t", range(10)) == 1).all()
            for pod in pods:
                until(lambda pod=pod: pod.passes("readinessProbe"))  # type: ignore[misc]
        assert [pod.end() for pod in pods] == [0, 0]
        parts = sorted(
            path.name for path in tmp_path.glob("clipper-params-*/snapshots/version-*/*")
        )
        assert parts == ["shard-0-of-2", "shard-1-of-2"]
        assert not list(tmp_path.glob("clipper-params-*/shard.alive*"))
    finally:
        for pod in pods:
            pod.program.kill()
