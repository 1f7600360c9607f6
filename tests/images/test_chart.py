"""The Helm chart, rendered by Helm's own engine: what Kubernetes gets of it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clipper.config import load
from tests.images.exports import by_kind_and_name, export, yaml

helm = pytest.importorskip("helm_python", reason="python tools/fetch.py clients")
validate = pytest.importorskip("kubernetes_validate", reason="python tools/fetch.py clients")
OF_OTHERS = ("monitoring.coreos.com", "keda.sh")  # kinds that are no part of Kubernetes
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
    with helm.Chart.load(str(chart)) as loaded:
        texts = loaded.render(values, name=name, namespace="prod")
        yield by_kind_and_name(
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


@pytest.mark.parametrize(
    "values", [{}, ADAPTER, EVERYTHING], ids=["defaults", "adapter", "everything"]
)
def test_kubernetes_takes_each_object(chart: Path, values: dict[str, Any]) -> None:
    with rendered(chart, **values) as found:
        for one in found.values():
            if not one["apiVersion"].startswith(OF_OTHERS):
                for version in ("1.28", "1.33"):
                    validate.validate(one, version, strict=True)
        kinds = {kind for kind, _ in found}
        everything = values is EVERYTHING
        assert ("ScaledObject" in kinds) == ("ServiceMonitor" in kinds) == everything
        assert ("HorizontalPodAutoscaler" in kinds) == (not everything)
        assert (("Deployment", "shop-redis") in found) == (not everything)
        assert "replicas" not in found["Deployment", "shop-model-big-model"]["spec"]
        assert found["Deployment", "shop-model-sums"]["spec"]["replicas"] == 2
    assert not helm.lint(str(chart))["errors"]


def test_a_kind_of_autoscaler_that_there_is_not_is_refused(chart: Path) -> None:
    with pytest.raises(helm.HelmError, match="kind"), rendered(chart, autoscaling={"kind": "kedo"}):
        pass


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
        environment = {
            "CLIPPER_SERVER__STATE": found["Secret", "shop-store"]["stringData"]["url"],
            "CLIPPER_HTTP__TOKEN": secrets["admin_token"],
            "CLIPPER_SERVER__TOKEN_FILE": str(tmp_path / "token"),
        }
        config = load(tmp_path / "clipper.toml", environment)
        assert config.server.state == "redis://shop-redis:6379/0"
        assert config.apps["total"].default == "{{ not a template }}"
        assert min(map(len, (config.server.token, config.http.token))) == 32
        shards = json.loads(found["Secret", "shop-params"]["stringData"]["shards.json"])
        assert shards["addresses"][1] == "tcp:shop-params-1.shop-params:7300"
        assert shards["token"] == found["Secret", "shop-params-token"]["stringData"]["token"]
    with rendered(chart, state={"url": "redis://mine:1/0"}, tokens={"admin": "a"}) as found:
        assert found["Secret", "shop-store"]["stringData"]["url"] == "redis://mine:1/0"
        assert found["Secret", "shop-token"]["stringData"]["admin_token"] == "a"


def test_the_pods_are_those_of_the_base_for_kustomize(
    chart: Path, declared: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    words = ["--from", declared, "--state", "redis://shop-redis:6379/0", "--name", "shop"]
    assert export("k8s", base, *words).exit_code == 0
    with rendered(chart) as found:
        for file in ("server.yaml", "model-sums.yaml", "model-big-model.yaml"):
            for one in yaml.safe_load_all((base / file).read_text()):
                if one["kind"] != "Deployment":
                    continue
                ours = found["Deployment", one["metadata"]["name"]]["spec"]
                assert ours["strategy"] == one["spec"]["strategy"]
                pod = ours["template"]["spec"]
                del pod["imagePullSecrets"], pod["containers"][0]["imagePullPolicy"]
                assert pod == one["spec"]["template"]["spec"]


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
    assert by_name.keys() == {one["name"]["as"] for one in rules["external"]}
    assert {name: one["target"] for name, one in by_name.items()} == {
        "clipper_queue_wait_seconds": {"type": "Value", "value": "0.05"},
        "clipper_queue_rows": {"type": "AverageValue", "averageValue": "1000"},
    }
    for one in by_name.values():
        assert one["metric"]["selector"] == {"matchLabels": {"model": "big.model"}}
