"""Exports for KubeRay: pods by the schemas of Kubernetes, other fields by the types of the
operator, the entry point by the command that it starts."""

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from clipper.cli.servers.up import up
from clipper.deploy.kubernetes.images import APP
from clipper.deploy.kubernetes.named_files import named_in
from tests.images.exports import check_objects, export, objects_of

DECLARED = """\
[models.sums]
target = "ours_for_ray:total"
input = "f64[3]"
[apps.total]
models = ["sums"]
default = -1
"""
# The fields of ray.io/v1 that are written, with their types there; a template is checked as a pod.
GROUP: dict[str, Any] = {"rayStartParams": dict, "template": dict}
JOB: dict[str, Any] = {
    "entrypoint": str,
    "submissionMode": str,
    "shutdownAfterJobFinishes": bool,
    "backoffLimit": int,
    "rayClusterSpec": {
        "rayVersion": str,
        "headGroupSpec": GROUP,
        "workerGroupSpecs": [
            {
                "groupName": str,
                **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), int),
                **GROUP,
            }
        ],
    },
}


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    (tmp_path / "ours_for_ray.py").write_text("def total(rows):\n    return rows.sum(axis=1)\n")
    for name in ("id_rsa", "up.log", "up.out", "passwords.txt", "unused.py"):
        (tmp_path / name).write_text("not for an image")
    (tmp_path / "clipper.toml").write_text(DECLARED)
    return tmp_path / "clipper.toml"


def check(value: Any, wanted: Any, at: str) -> None:
    """Compare a value with the types of its fields; none may be missing, or unknown."""
    if isinstance(wanted, dict):
        assert value.keys() == wanted.keys(), at
        for key, one in wanted.items():
            check(value[key], one, f"{at}.{key}")
    elif isinstance(wanted, list):
        for one in value:
            check(one, wanted[0], at)
    else:
        assert type(value) is wanted, at


def templates(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert all(type(value) is str for value in group["rayStartParams"].values())
    return [group["template"] for group in groups]


def test_kubernetes_and_kuberay_take_each_object(declared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = export(
        "ray", out, "--from", declared, "--servers", 2, "--servers-max", 5, "--cpus", 1.5
    )
    assert result.exit_code == 0, result.output
    found = objects_of(out)
    job = found.pop(("RayJob", "clipper-ray"))
    assert job["apiVersion"] == "ray.io/v1"
    check(job["spec"], JOB, "spec")
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **one, "metadata": {"name": "a", **one["metadata"]}}
        for one in templates(job["spec"]["rayClusterSpec"])
    ]
    check_objects([*found.values(), *pods])
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["rayStartParams"]) == (5, {"num-cpus": "2"})
    head = pods[0]
    # the labels of the operator's own
    labels = {**head["metadata"]["labels"], "ray.io/node-type": "head", "ray.io/is-ray-node": "yes"}
    ports = {one["name"]: one["containerPort"] for one in head["spec"]["containers"][0]["ports"]}
    for name in ("clipper-ray", "clipper-ray-admin"):
        one = found["Service", name]["spec"]
        assert one["selector"].items() <= labels.items()
        assert {port["targetPort"]: port["port"] for port in one["ports"]}.items() <= ports.items()
    network = found["NetworkPolicy", "clipper-ray"]["spec"]
    assert network["podSelector"]["matchLabels"].items() <= labels.items()
    secrets = {
        one["valueFrom"]["secretKeyRef"]["name"]
        for one in head["spec"]["containers"][0]["env"]
        if "valueFrom" in one
    }
    assert secrets == {name for kind, name in found if kind == "Secret"}


def test_the_entry_point_is_a_command_line_of_what_is_in_the_image(
    declared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for _ in range(2):  # the second time without what the first has written
        assert export("ray", out, "--from", declared, "--servers-max", 4).exit_code == 0
    command = objects_of(out)["RayJob", "clipper-ray"]["spec"]["entrypoint"]
    words = shlex.split(command.removeprefix("until ").removesuffix("; do sleep 2; done"))
    assert words[:3] == ["clipper", "up", f"{APP}/clipper.toml"]
    with up.make_context("up", words[2:]) as context:
        assert (context.params["engine"], context.params["servers_max"]) == ("ray", 4)
    app = out / "image" / "app"
    assert sorted(path.name for path in app.rglob("*")) == ["clipper.toml", "ours_for_ray.py"]
    assert tomllib.loads((app / "clipper.toml").read_text()) == tomllib.loads(DECLARED)
    assert "numpy==" in (out / "image" / "requirements.txt").read_text()


def test_a_file_with_a_secret_goes_into_no_image(declared: Path, tmp_path: Path) -> None:
    declared.write_text('[server]\ntoken = "not-for-images"\n' + DECLARED)
    refused = export("ray", tmp_path / "out", "--from", declared)
    assert refused.exit_code == 1
    assert "CLIPPER_SERVER__TOKEN" in refused.output
    assert "not-for-images" not in refused.output
    assert not (tmp_path / "out").exists()
    declared.write_text('[server]\nstate = "redis://user:password@here"\n' + DECLARED)
    assert export("ray", tmp_path / "out", "--from", declared).exit_code == 1


def test_what_a_file_names_is_in_the_image(tmp_path: Path) -> None:
    for name, text in {
        "ours_for_ray.py": "import near\ndef total(rows): return rows.sum(axis=1)\n",
        "near.py": "",
        "rules__init.py": "",
        "mine.py": "class Best: ...\n",
        "needs.txt": "numpy\n",
        "lib/extra.py": "",
        "other.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    file = tmp_path / "clipper.toml"
    more = 'requirements = ["-r needs.txt"]\ncode = ["lib"]\n[apps.total]\npolicy = "mine:Best"\n'
    file.write_text(DECLARED.replace("[apps.total]\n", more))
    found = named_in(file)
    assert [*found] == [
        "clipper.toml",
        "lib/extra.py",
        "mine.py",
        "near.py",
        "needs.txt",
        "ours_for_ray.py",
    ]


def test_a_store_is_in_a_secret_and_its_name_is_checked(declared: Path, tmp_path: Path) -> None:
    out, store = tmp_path / "out", "redis://:password@redis.default:6379/0"
    assert export("ray", out, "--from", declared, "--state", store, "--name", "shop").exit_code == 0
    found = objects_of(out)
    assert ("Deployment", "shop-ray-redis") not in found
    assert found.pop(("Secret", "shop-ray-store"))["stringData"]["url"] == store
    assert "password" not in json.dumps([*found.values()])
    refused = export("ray", out, "--from", declared, "--state", "sqlite:here")
    assert (refused.exit_code, "not a store that several pods share" in refused.output) == (1, True)
