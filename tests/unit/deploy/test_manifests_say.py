"""Every line of the manifests that `clipper export` writes."""

import difflib
import json
import re
import zipfile
from pathlib import Path

import pytest

from clipper.deploy.docker.image import Image
from clipper.deploy.kubernetes.chart import ChartContents, chart, semantic, write_chart
from clipper.deploy.kubernetes.manifests import (
    EXTRAS,
    Shipment,
    compose,
    kubernetes,
    server_dockerfile,
    server_toml,
)
from clipper.deploy.kubernetes.mesh import MeshShipment, mesh, node_toml
from clipper.deploy.kubernetes.params import ParamsShipment, params, shards_json
from clipper.deploy.kubernetes.yaml import Document, to_yaml
from clipper.deploy.packages import sdk
from clipper.errors import InvalidInput
from clipper.settings.params import ParamsSettings
from clipper.types import Application, InputType, Model, VersionedModel
from clipper.version import VERSION
from tests.expected import check_expected

F64 = InputType.parse("f64[3]")
STORE = "etcd://clipper:secret@etcd.default:2379/clipper"
VARIABLES = {"MODE": "fast"}


def shipment(**more: object) -> Shipment:
    models = [
        Model(
            "sums",
            1,
            F64,
            replicas=2,
            memory_mib=512,
            cpus=2.5,
            output="f64",
            gpus="all",
            env=VARIABLES,
        ),
        Model("Big.model", 4, F64, replicas=0, gpus="2", cache=False, retry_singly=True),
        Model("every", 2, InputType.parse("any"), gpus="0, GPU-1"),
    ]
    links = VersionedModel("sums"), VersionedModel("Big.model", 4)
    app = Application("to.tal", links, default=-1, roles={"Big.model": "shadow"}, coverage=0.9)
    images = {model.name: (model, Image(f"clipper/{model.name}:1-0a", {})) for model in models}
    return Shipment(images, (app, Application("words", (), input=F64)), **more)


def charts() -> dict[str, dict[str, str]]:
    """Return charts without the monitor's part, which is the same in all and compared elsewhere."""
    nodes, shards = (
        MeshShipment(STORE, gpus=2),
        ParamsShipment(ParamsSettings(shards=3, replicas=1)),
    )
    scaled = MeshShipment(STORE, 2, 10, 1000, 5, 600, ("gpu", "big"), 1, "other")
    found = {
        "servers": chart(ChartContents(shipment(servers=3))),
        "nodes": chart(ChartContents(shipment(), nodes)),
        "all": chart(ChartContents(shipment(redis=True, name="x"), scaled, shards)),
    }
    for made in found.values():
        assert len(made.pop("files/alerts.yml")) > 1000
        assert '"panels"' in made.pop("files/dashboard.json")
        for name in made.keys() & {"templates/shards-secret.yaml"}:  # all settings are in it
            made[name] = re.sub(r"settings.*", "...", made[name])
    return found


def files(found: dict[str, list[Document]]) -> dict[str, str]:
    return {name: to_yaml(*documents) for name, documents in found.items()}


def exported() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for redis in (False, True):
        one = shipment(redis=redis)
        texts = {"docker-compose.yml": to_yaml(compose(one))}
        texts |= {"clipper.toml": server_toml(one, "redis")}
        found[f"compose {redis=}"] = texts
    found["compose"] = {"some": server_dockerfile(("etcd", "onnx")), "none": server_dockerfile(())}
    for more in ({}, {"redis": True, "name": "other"}, {"store": STORE, "servers": 3}):
        one = shipment(**more)
        texts = {"clipper.toml": server_toml(one, "redis", "0.0.0.0:1")}
        found[f"k8s {more}"] = {**files(kubernetes(one)), **texts}
    scaled = MeshShipment(STORE, 2, 10, 1000, 5, 600, ("gpu", "big"), 1, "other")
    for nodes in (MeshShipment(STORE), MeshShipment("redis://r:6379/0", 1, gpus=2), scaled):
        found[str(nodes)] = {**files(mesh(nodes)), "node.toml": node_toml(nodes)}
    for shards, replicas, together, memory_mib, storage_gib in (
        (1, 0, False, 4096, 0),
        (3, 1, False, 2048, 7),
        (3, 2, True, 128, 0),
    ):
        settings = ParamsSettings(shards=shards, replicas=replicas)
        set_ = ParamsShipment(settings, memory_mib, storage_gib, together)
        listed = json.loads(shards_json(set_, "TOKEN"))
        listed["settings"] = {name: listed["settings"][name] for name in ("folder", "recover_s")}
        found[f"shards {shards} {replicas} {together}"] = {
            **files(params(set_)),
            "shards.json": json.dumps(listed, indent=1),
        }
    return found


def test_what_is_exported() -> None:
    check_files("manifests.txt", exported())


@pytest.mark.parametrize(
    ("version", "semantic_version"),
    [
        ("0.2.0", "0.2.0"),
        ("0.10.12rc1", "0.10.12-rc.1"),
        ("0.2.0.dev0", "0.2.0-dev.0"),
        ("1.0.0a2", "1.0.0-a.2"),
    ],
)
def test_the_version_of_a_chart_is_semantic(version: str, semantic_version: str) -> None:
    assert semantic(version) == semantic_version


def test_charts() -> None:
    check_files("charts-of-helm.txt", charts())


def test_a_chart_and_its_images_are_written(tmp_path: Path) -> None:
    contents = ChartContents(shipment())
    model, _ = contents.servers.models["sums"]
    contents.servers.models["sums"] = model, Image("clipper/sums:1-0a", {"a/b.py": b"1"})
    written = write_chart(contents, tmp_path)
    assert written == sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert (tmp_path / "images/models/sums/a/b.py").read_bytes() == b"1"
    assert (tmp_path / "values.yaml").read_text() == chart(contents)["values.yaml"]
    wheel = tmp_path / "images/server/wheels" / sdk.WHEEL
    assert zipfile.is_zipfile(wheel)
    assert (tmp_path / "images/server/Dockerfile").read_text() == server_dockerfile(EXTRAS)


def test_a_chart_makes_the_token_of_its_shards() -> None:
    settings = ParamsSettings(shards=1, token="mine")
    with pytest.raises(InvalidInput, match=r"params\.token is set"):
        chart(ChartContents(shipment(), shards=ParamsShipment(settings)))


def check_files(expected: str, cases: dict[str, dict[str, str]]) -> None:
    """Compare the first file of a name whole, the others as what is different."""
    shown, first = [], dict[str, list[str]]()
    for case, texts in cases.items():
        shown += ["", f"==== {case}"]
        for name, text in texts.items():
            lines = text.splitlines()
            before = first.setdefault(name, [])
            shown += [f"-- {name}", *(lines if not before else difference(before, lines))]
            first[name] = before or lines
    text = "".join(f"{line.rstrip()}\n" for line in shown)
    text = text.replace(f'\nversion: "{semantic(VERSION)}"', '\nversion: "CHART_VERSION"')
    check_expected(expected, text.replace(VERSION, "VERSION"))


def difference(before: list[str], after: list[str]) -> list[str]:
    return [*difflib.unified_diff(before, after, lineterm="", n=0)][2:]
