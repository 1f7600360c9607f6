"""Every line of what `clipper export` writes for Compose, and every value that it writes for the
chart; what Helm makes of these is in tests/images/test_chart.py."""

import json
import zipfile
from pathlib import Path

from clipper.config import load
from clipper.deploy.docker.image import Image
from clipper.deploy.kubernetes.compose import compose
from clipper.deploy.kubernetes.helm import chart_files, server_values, shard_values, write_chart
from clipper.deploy.kubernetes.images import EXTRAS, build_contexts, server_dockerfile
from clipper.deploy.kubernetes.shipment import Shipment
from clipper.deploy.packages import sdk
from clipper.settings.params import ParamsSettings
from clipper.types import (
    Application,
    Batching,
    InputType,
    Model,
    Similar,
    UserValue,
    VersionedModel,
)
from clipper.version import VERSION
from clipper.yaml_text import to_yaml
from tests.expected import check_expected

F64 = InputType.parse("f64[3]")


def shipment(*, redis: bool = False) -> Shipment:
    rest = Model(
        "rest",
        3,
        F64,
        batching=Batching(mode="static", size_max=7),
        similar=Similar(0.5),
        finite=True,
        row_by_row=True,
        reads={"users": (0, 1)},
        tolerance=0.1,
    )
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
            env={"MODE": "fast"},
        ),
        Model("big.model", 4, F64, replicas=0, gpus="2", cache=False, retry_singly=True),
        Model("every", 2, InputType.parse("any"), gpus="0, GPU-1", replicas_max=4),
        Model("program", 1, F64, command=("./svm",), cpus=2.0, env={"MODE": "slow"}),
        Model("pulled", 1, F64, target="s3://bucket/svm.onnx#sha256=" + "0" * 64),
        Model("claimed", 1, F64, target="pvc://artifacts/homes/model.ubj"),
        rest,
    ]
    links = VersionedModel("sums"), VersionedModel("big.model", 4)
    app = Application("to.tal", links, default=-1, roles={"big.model": "shadow"}, coverage=0.9)
    images = {model.name: (model, Image(f"clipper/{model.name}:1-0a", {})) for model in models}
    return Shipment(images, (app, Application("words", (), input=F64)), redis)


def lines(value: UserValue) -> str:
    return json.dumps(value, indent=1) + "\n"


def test_what_is_exported() -> None:
    shards = shard_values(ParamsSettings(shards=3, replicas=1, grpc="127.0.0.1:7400"), 2048)
    shards["settings"] = {name: shards["settings"][name] for name in ("replicas", "recover_s")}
    values = server_values(shipment())
    values["servers"] = {}
    parts = {
        "settings": shipment().settings(),
        "values of servers": lines(values),
        "values of shards": lines(shards),
        "compose, in a volume": to_yaml(compose(shipment())),
        "compose, in a Redis": to_yaml(compose(shipment(redis=True))),
        "Dockerfile": server_dockerfile(("etcd", "onnx")),
        "Dockerfile without extras": server_dockerfile(()),
    }
    text = "".join(f"==== {name}\n{part}\n" for name, part in parts.items())
    check_expected("exports.txt", text.replace(VERSION, "VERSION"))


def test_a_server_reads_all_that_a_model_was_declared_with(tmp_path: Path) -> None:
    (tmp_path / "clipper.toml").write_text(shipment().settings())
    found = load(tmp_path / "clipper.toml", {}).models["rest"]
    assert found.batching == Batching(mode="static", size_max=7)
    assert found.similar == Similar(0.5)
    assert (found.finite, found.row_by_row) == (True, True)
    # exported servers have no tables
    assert not found.reads


def test_a_chart_and_its_images_are_written(tmp_path: Path) -> None:
    sent = shipment()
    model, _ = sent.models["sums"]
    images = build_contexts({"sums": (model, Image("clipper/sums:1-0a", {"a/b.py": b"1"}))}, "im/")
    values = server_values(sent)
    written = write_chart(values, images, tmp_path)
    assert written == sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert (tmp_path / "im/models/sums/a/b.py").read_bytes() == b"1"
    assert json.loads((tmp_path / "values.json").read_text()) == values
    assert {"Chart.yaml", "values.schema.json", "files/alerts.yml"} <= chart_files().keys()
    assert zipfile.is_zipfile(tmp_path / "im/server/wheels" / sdk.WHEEL)
    assert (tmp_path / "im/server/Dockerfile").read_text() == server_dockerfile(EXTRAS)
