"""The Helm chart, rendered by Helm's own engine: what Kubernetes gets of it, with the values that
are exported and with others."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import clipper.deploy.kubernetes
from clipper.config import load
from clipper.version import VERSION
from tests.expected import check_expected
from tests.images.exports import by_kind_and_name, check_objects, export, yaml

helm = pytest.importorskip("helm_python", reason="python tools/fetch.py clients")
merged = pytest.importorskip("clipper.deploy.kubernetes.helm_template").merged
# kinds that are no part of Kubernetes
OF_OTHERS = ("monitoring.coreos.com", "keda.sh", "ray.io")
OURS = Path(clipper.deploy.kubernetes.__file__).parent / "chart"
Objects = dict[tuple[str, str], Any]

DECLARED = """\
[models.sums]
target = "ours_for_chart:total"
input = "f64[3]"
replicas = 2
[models."big.model"]
target = "ours_for_chart:total"
input = "f64[3]"
replicas_max = 4
gpus = "1"
[apps.total]
models = ["sums", "big.model"]
default = "{{ not a template }}"
"""


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("declared")
    (folder / "ours_for_chart.py").write_text("def total(rows):\n    return rows.sum(axis=1)\n")
    (folder / "clipper.toml").write_text(DECLARED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder / "clipper.toml"


@pytest.fixture(scope="module")
def chart(declared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chart") / "shop"
    result = export("chart", folder, "--from", declared, "--nodes", 2, "--shards", 2)
    assert result.exit_code == 0, result.output
    return folder


@contextmanager
def rendered(chart: Path, name: str = "shop", **values: Any) -> Iterator[Objects]:
    exported = chart / "values.json"
    given = json.loads(exported.read_text()) if exported.exists() else {}
    yield objects(chart, merged(given, values), name)


def objects(chart: Path, values: dict[str, Any], name: str = "shop") -> Objects:
    """Return what Helm makes of a chart, by kind and name."""
    with helm.Chart.load(str(chart)) as loaded:
        texts = loaded.render(values, name=name, namespace="prod")
    return by_kind_and_name(
        one for text in texts.values() for one in yaml.safe_load_all(text) if one
    )


EVERYTHING: dict[str, Any] = {
    "state": {"url": "etcd://etcd.default:2379/clipper"},
    "autoscaling": {"kind": "keda"},
    "monitoring": {
        "labels": {"release": "prometheus"},
        **{one: {"enabled": True} for one in ("serviceMonitor", "prometheusRule", "dashboard")},
    },
}


ADAPTER: dict[str, Any] = {"autoscaling": {"kind": "adapter"}}
PARTS: dict[str, Any] = {
    "nodes": {"enabled": True, "maxReplicas": 9, "gpus": 1, "labels": ["big"]},
    "shards": {"enabled": True, "count": 3, "grpcPort": 7400, "settings": {"replicas": 1}},
    "ray": {"enabled": True, "cpus": 1.5},
}


@pytest.mark.parametrize(
    "values", [{}, ADAPTER, EVERYTHING], ids=["defaults", "adapter", "everything"]
)
def test_kubernetes_takes_each_object(chart: Path, values: dict[str, Any]) -> None:
    with rendered(chart, **values) as found:
        check_objects(one for one in found.values() if not one["apiVersion"].startswith(OF_OTHERS))
        kinds = {kind for kind, _ in found}
        everything = values is EVERYTHING
        assert ("ScaledObject" in kinds) == ("ServiceMonitor" in kinds) == everything
        assert ("HorizontalPodAutoscaler" in kinds) == (not everything)
        assert (("Deployment", "shop-redis") in found) == (not everything)
        assert "replicas" not in found["Deployment", "shop-model-big-model"]["spec"]
        assert found["Deployment", "shop-model-sums"]["spec"]["replicas"] == 2


@pytest.mark.parametrize("values", [{}, ADAPTER, EVERYTHING, PARTS])
def test_helm_lint_finds_nothing(chart: Path, values: dict[str, Any]) -> None:
    for folder in (OURS, chart):
        found = helm.lint(str(folder), values, strict=True)
        assert not found["errors"]
        assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


def test_the_chart_as_it_is_in_the_package_is_complete(tmp_path: Path) -> None:
    """Without an export: servers without models, and each other part."""
    found = objects(OURS, {})
    assert ("Deployment", "shop-server") in found
    every = objects(OURS, PARTS)
    check_objects(one for one in every.values() if not one["apiVersion"].startswith(OF_OTHERS))
    kinds = {kind for kind, _ in every}
    assert {"StatefulSet", "RayJob", "PriorityClass", "HorizontalPodAutoscaler"} <= kinds


def test_every_line_of_what_helm_makes_of_the_chart() -> None:
    models = {
        "sums": {"image": "sums:1", "version": 1, "replicas": 2, "memoryMib": 512, "cpus": 2.5},
        "big.model": {"image": "big:4", "version": 4, "maxReplicas": 4, "gpus": 2},
        "a_program": {"image": "p:1", "version": 1, "program": True, "environment": {"A": "1"}},
        "pulled": {"image": "u:1", "version": 1, "pulls": True, "environment": {"B": "2"}},
        "claimed": {"image": "c:1", "version": 1, "claim": "artifacts"},
    }
    values = {**EVERYTHING, **PARTS, "models": models, "tokens": {"models": "m", "admin": "a"}}
    cases = {
        "everything": objects(OURS, values),
        "redis": objects(OURS, {"tokens": values["tokens"]}),
        "volume": objects(OURS, {"state": {"kind": "volume"}, "tokens": values["tokens"]}),
    }
    before: Objects = {}
    shown = []
    for case, found in cases.items():
        # of Helm's engine, with what differs from the case before
        parts = {key: one for key, one in found.items() if before.get(key) != one}
        shown += [f"==== {case}\n", *map(yaml.safe_dump, dict(sorted(parts.items())).values())]
        before |= found
    text = re.sub("clipper/settings: .*", "clipper/settings: DIGEST", "".join(shown))
    check_expected("manifests.txt", text.replace(VERSION, "VERSION"))


def test_the_chart_and_its_image_have_the_version_of_the_package() -> None:
    about = yaml.safe_load((OURS / "Chart.yaml").read_text())
    assert about["appVersion"] == VERSION
    # as Helm needs it
    assert about["version"] == re.sub(r"(?<=\d)\.?(a|b|rc|dev)(\d+)$", r"-\1.\2", VERSION)
    container = objects(OURS, {})["Deployment", "shop-server"]["spec"]["template"]["spec"]
    assert container["containers"][0]["image"] == f"clipper/server:{VERSION}"


def test_the_schema_knows_each_value_and_its_type() -> None:
    schema = json.loads((OURS / "values.schema.json").read_text())
    values = yaml.safe_load((OURS / "values.yaml").read_text())
    assert values.keys() == schema["properties"].keys() - {"global"}
    for name, one in values.items():
        known = schema["properties"][name]
        if known.get("additionalProperties") is False:
            assert one.keys() == known["properties"].keys(), name


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"autoscaling": {"kind": "kedo"}}, "kind"),
        ({"server": {"replicas": 2}}, "server"),
        ({"models": {"svm": {"image": "svm:1"}}}, "version"),
        ({"models": {"svm": {"image": "svm:1", "version": 1, "replicas": "2"}}}, "replicas"),
        ({"state": {"url": "sqlite:here"}}, "pattern"),
        ({"state": {"kind": "external"}}, "of the Redis or etcd that pods reach"),
        ({"state": {"kind": "volume"}, "nodes": {"enabled": True}}, "which nodes cannot share"),
        ({"nodes": {"enabled": True, "maxReplicas": 2}}, "nodes.replicas are 3 already"),
        ({"shards": {"enabled": True, "settings": {"replicas": 2}}}, "they are in other shards"),
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(helm.HelmError, match=why):
        objects(OURS, values)


def test_two_releases_have_nothing_in_common(chart: Path) -> None:
    with rendered(chart) as one, rendered(chart, "second-of-a-very-long-name") as other:
        assert not set(one) & set(other)
        assert not any("shop" in json.dumps(each) for each in other.values())
        assert all(len(name) <= 63 for _, name in other)
        # of the cluster, and not of a namespace
        shards = one["StatefulSet", "shop-params"]["spec"]["template"]["spec"]
        assert ("PriorityClass", shards["priorityClassName"]) in one
        assert shards["priorityClassName"] == "prod-shop-params"


def test_the_settings_are_those_that_were_declared(chart: Path, tmp_path: Path) -> None:
    with rendered(chart) as found:
        (tmp_path / "clipper.toml").write_text(
            found["ConfigMap", "shop-settings"]["data"]["clipper.toml"]
        )
        secrets = found["Secret", "shop-token"]["stringData"]
        (tmp_path / "token").write_text(secrets["clipper_token"])
        pod = found["Deployment", "shop-server"]["spec"]["template"]["spec"]
        environment = {
            **{one["name"]: one["value"] for one in pod["containers"][0]["env"] if "value" in one},
            "CLIPPER_HTTP__TOKEN": secrets["admin_token"],
            "CLIPPER_SERVER__TOKEN_FILE": str(tmp_path / "token"),
        }
        config = load(tmp_path / "clipper.toml", environment)
        assert config.server.state == "redis://shop-redis:6379/0"
        assert (config.server.folder, config.http.admin) == ("/state", "0.0.0.0:8002")
        assert config.apps["total"].default == "{{ not a template }}"
        assert min(map(len, (config.server.token, config.http.token))) == 32
        shards = json.loads(found["Secret", "shop-params"]["stringData"]["shards.json"])
        assert shards["addresses"][1] == "tcp:shop-params-1.shop-params:7300"
        assert shards["token"] == found["Secret", "shop-params-token"]["stringData"]["token"]
    with rendered(chart, state={"url": "redis://mine:1/0"}, tokens={"admin": "a"}) as found:
        assert found["Secret", "shop-store"]["stringData"]["url"] == "redis://mine:1/0"
        assert found["Secret", "shop-token"]["stringData"]["admin_token"] == "a"


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl: python tools/fetch.py kubectl"
)
@pytest.mark.parametrize("more", [[], ["--redis"], ["--state", "redis://mine:1/0"]])
def test_the_base_for_kustomize_is_what_helm_makes_of_the_chart(
    chart: Path, declared: Path, tmp_path: Path, more: list[str]
) -> None:
    base = tmp_path / "base"
    assert export("k8s", base, "--from", declared, *more, "--name", "shop").exit_code == 0
    words = ["kubectl", "kustomize", str(base)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    state = {"url": more[1]} if more[1:] else {"kind": "redis" if more else "volume"}
    tokens = {
        key: (base / "secrets" / file).read_text()
        for key, file in (("models", "clipper_token"), ("admin", "admin_token"))
    }
    exported = json.loads((chart / "values.json").read_text())
    values = {
        "models": exported["models"],
        "servers": exported["servers"],
        "state": state,
        "tokens": tokens,
    }
    assert by_kind_and_name(yaml.safe_load_all(text)) == objects(chart, values)


def test_monitoring_has_our_rules_and_finds_our_services(chart: Path) -> None:
    alerts = yaml.safe_load((chart / "files" / "alerts.yml").read_text())
    with rendered(chart, **EVERYTHING) as found:
        assert found["PrometheusRule", "shop"]["spec"] == alerts
        board = found["ConfigMap", "shop-dashboard"]["data"]["clipper.json"]
        assert json.loads(board) == json.loads((chart / "files" / "dashboard.json").read_text())
        monitor = found["ServiceMonitor", "shop"]
        assert monitor["metadata"]["labels"] == {"release": "prometheus"}
        (wanted,) = monitor["spec"]["selector"]["matchExpressions"]
        services = {
            name
            for (kind, name), one in found.items()
            if kind == "Service" and one["metadata"]["labels"][wanted["key"]] in wanted["values"]
        }
        assert services == {"shop", "shop-node"}
        triggers = found["ScaledObject", "shop-model-big-model"]["spec"]["triggers"]
        assert {one["metadata"]["query"]: one["metadata"]["threshold"] for one in triggers} == {
            'max(clipper_queue_wait_seconds{model="big.model",namespace="prod"})': "0.05",
            'sum(clipper_queue_rows{model="big.model",namespace="prod"})': "1000",
            'avg(DCGM_FI_DEV_GPU_UTIL{exported_pod=~"shop-model-big-model-.+",'
            'exported_namespace="prod"})': "80",
        }


def test_an_autoscaler_requests_metrics_that_the_adapter_has_rules_for(chart: Path) -> None:
    rules = yaml.safe_load((chart / "files" / "prometheus-adapter.yaml").read_text())["rules"]
    with rendered(chart, **ADAPTER) as found:
        metrics = found["HorizontalPodAutoscaler", "shop-model-big-model"]["spec"]["metrics"]
    by_name = {one["external"]["metric"]["name"]: one["external"] for one in metrics}
    # the last rule is of nodes
    assert [*by_name] == [one["name"]["as"] for one in rules["external"]][:-1]
    assert {name: one["target"] for name, one in by_name.items()} == {
        "clipper_queue_wait_seconds": {"type": "Value", "value": "0.05"},
        "clipper_queue_rows": {"type": "AverageValue", "averageValue": "1000"},
    }
    for one in by_name.values():
        assert one["metric"]["selector"] == {"matchLabels": {"model": "big.model"}}
