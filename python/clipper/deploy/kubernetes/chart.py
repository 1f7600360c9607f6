"""A Helm chart of servers and their models, and of mesh nodes and parameter shards where wanted.

Templates are made of the same objects as the bases for Kustomize. Two marks stand for what Helm
fills in: `_RELEASE` for the name of the release, and `"@{EXPRESSION}@"` for an expression of a
template. The store is one for all parts: an existing one (`state.url`), or a Redis of the chart.
"""

import json
import re
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Final

from clipper.deploy.docker.image import write_files
from clipper.deploy.kubernetes.manifests import (
    SERVER_IMAGE,
    Shipment,
    build_contexts,
    kubernetes,
    label_of,
    meta_of,
    mine,
    redis_objects,
    server_toml,
)
from clipper.deploy.kubernetes.mesh import MeshShipment, mesh, node_toml
from clipper.deploy.kubernetes.params import SHARDS_FILE, ParamsShipment, params, shards_json
from clipper.deploy.kubernetes.yaml import Document, to_yaml
from clipper.errors import InvalidInput
from clipper.types import VERSION

_RELEASE: Final = "release-name"
_STORE: Final = f"redis://{_RELEASE}-redis:6379/0"
_TOKEN: Final = "token-of-the-release"
_NAME: Final = '{{ include "clipper.name" . }}'
_HELPERS: Final = """\
{{/* The name with which names of objects begin: short, since names of models follow it. */}}
{{- define "clipper.name" -}}
{{- .Release.Name | trunc 20 | trimSuffix "-" -}}
{{- end -}}

{{/* A token: the given one, else that of the last release, else a new one. */}}
{{- define "clipper.token" -}}
{{- $old := (lookup "v1" "Secret" .root.Release.Namespace .secret).data | default dict -}}
{{- $kept := index $old .key | default "" | b64dec -}}
{{- .given | default $kept | default (randAlphaNum 32) -}}
{{- end -}}
"""
_SECRET: Final = """\
apiVersion: v1
kind: Secret
metadata:
  name: {{ include "clipper.name" . }}-%(part)s
stringData:
%(lines)s"""
_GIVEN_TOKEN: Final = (
    '{{ include "clipper.token" (dict "root" . "secret" (printf "%%s-%(part)s" (include'
    ' "clipper.name" .)) "key" "%(key)s" "given" .Values.tokens.%(value)s) | quote }}'
)
_URL: Final = (
    '{{ .Values.state.url | default (printf "redis://%s-redis:6379/0" (include "clipper.name" .))'
    " | quote }}"
)
_ADAPTER_NOTE: Final = (
    "# Values for the chart prometheus-adapter, for autoscaling.kind = adapter: the same for all\n"
    "# releases of a cluster.\n"
)
# What a model is scaled by: the value with its threshold, and how the series of servers add up.
_SCALED_BY: Final = (
    ("waitSeconds", "Value", "max", "clipper_queue_wait_seconds"),
    ("queueRows", "AverageValue", "sum", "clipper_queue_rows"),
)
_KINDS: Final = ("hpa", "adapter", "keda")  # with another one, nothing would scale a model
_SCHEMA: Final = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "properties": {"autoscaling": {"properties": {"kind": {"enum": _KINDS}}}},
}
_MONITORING: Final = {
    "templates/prometheus-rule.yaml": """\
{{- if .Values.monitoring.prometheusRule.enabled }}
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {{ include "clipper.name" . }}
  labels: {{ toJson .Values.monitoring.labels }}
spec:
{{ .Files.Get "files/alerts.yml" | indent 2 }}
{{- end }}
""",
    "templates/dashboard.yaml": """\
{{- if .Values.monitoring.dashboard.enabled }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "clipper.name" . }}-dashboard
  labels: {"grafana_dashboard": "1"}
data:
  clipper.json: {{ .Files.Get "files/dashboard.json" | toJson }}
{{- end }}
""",
}


@dataclass(frozen=True, slots=True)
class ChartContents:
    """Contents of a chart. servers: with their models. nodes, shards: None for none of them."""

    servers: Shipment
    nodes: MeshShipment | None = None
    shards: ParamsShipment | None = None


def write_chart(contents: ChartContents, folder: Path) -> list[str]:
    """Write the chart, and the build contexts of its images beside it; return their paths."""
    files = {**chart(contents), **build_contexts(contents.servers.models, "images/")}
    write_files(folder, files)
    return sorted(files)


def chart(contents: ChartContents) -> dict[str, str]:
    """Return the files of the chart."""
    from clipper.metrics.grafana import dashboard

    shipment = replace(contents.servers, name=_RELEASE, redis=False, store=_STORE)
    alerts = (files("clipper.metrics") / "alerts.yml").read_text()
    made = {
        "Chart.yaml": to_yaml(_about()),
        "values.yaml": to_yaml(_values(contents)),
        "values.schema.json": json.dumps(_SCHEMA, indent=1) + "\n",
        ".helmignore": "images/\n",
        "files/alerts.yml": alerts,
        "files/prometheus-adapter.yaml": _ADAPTER_NOTE
        + to_yaml({"rules": {"external": adapter_rules()}}),
        "files/dashboard.json": json.dumps(dashboard(), indent=1),
        "templates/_helpers.tpl": _HELPERS,
        "templates/service-monitor.yaml": _if(
            ".Values.monitoring.serviceMonitor.enabled", _service_monitor()
        ),
        "templates/settings.yaml": _settings("settings", "clipper.toml", _toml(shipment)),
        "templates/store.yaml": _secret("store", {"url": _URL}),
        "templates/token.yaml": _tokens("token", clipper_token="models", admin_token="admin"),
        "templates/redis.yaml": _if("not .Values.state.url", *redis_objects(f"{_RELEASE}-redis")),
        **_MONITORING,
        **_server_templates(shipment),
    }
    if contents.nodes is not None:
        made |= _node_templates(replace(contents.nodes, name=_RELEASE, store=_STORE))
    if contents.shards is not None:
        made |= _shard_templates(replace(contents.shards, export=_RELEASE))
    return made


def semantic(version: str) -> str:
    """Return a version of Python's (0.2.0rc1, 0.2.0.dev0) as Helm needs it: 0.2.0-rc.1,
    0.2.0-dev.0."""
    return re.sub(r"(?<=\d)\.?(a|b|rc|dev)(\d+)$", r"-\1.\2", version)


def _about() -> Document:
    about = "Clipper: predictions from models in containers of their own, each by its deadline."
    return {
        "apiVersion": "v2",
        "name": "clipper",
        "description": about,
        "type": "application",
        "version": semantic(VERSION),
        "appVersion": VERSION,
        "kubeVersion": ">=1.27.0-0",
    }


def _values(contents: ChartContents) -> Document:
    """Return the values that a release may change."""
    shipment = contents.servers
    part = {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
    values: Document = {
        "image": SERVER_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [],
        "state": {"url": ""},
        "tokens": {"models": "", "admin": ""},
        "servers": {"replicas": shipment.servers, "resources": part},
        "models": {
            name: {
                "image": image.name,
                "replicas": max(model.replicas, 1),
                "maxReplicas": model.replicas_max,
                "waitSeconds": 0.05,
                "queueRows": 1000,
                **({"gpuPercent": 80} if model.gpus else {}),
            }
            for name, (model, image) in shipment.models.items()
        },
        "autoscaling": {
            "kind": "hpa",
            "prometheus": "http://prometheus-operated.monitoring.svc:9090",
        },
        "monitoring": {
            "labels": {},
            "serviceMonitor": {"enabled": False},
            "prometheusRule": {"enabled": False},
            "dashboard": {"enabled": False},
        },
        "networkPolicy": {"enabled": True},
    }
    if contents.nodes is not None:
        values["nodes"] = {"replicas": contents.nodes.nodes}
    return values


# -- templates


def _template(*documents: Document) -> str:
    """Write documents, with Helm's expressions in the place of the marks."""
    text = to_yaml(*documents).replace("{{", '{{ "{{" }}')
    text = re.sub(r'"@\{(.*?)\}@"', _expression, text)
    return text.replace(_RELEASE, _NAME)


def _expression(found: re.Match[str]) -> str:
    text = json.loads(f'"{found[1]}"')
    return f"{{{{ {text} }}}}"


def _if(condition: str, *documents: Document) -> str:
    return f"{{{{- if {condition} }}}}\n{_template(*documents)}{{{{- end }}}}\n"


def _value(expression: str) -> str:
    return f"@{{{expression}}}@"


def _settings(part: str, file: str, text: str) -> str:
    meta = {"name": f"{_RELEASE}-{part}"}
    head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}
    body = text.replace("{{", '{{ "{{" }}').replace(_RELEASE, _NAME)
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.splitlines())
    return f"{_template(head)}data:\n  {file}: |\n{lines}"


def _toml(shipment: Shipment) -> str:
    return server_toml(shipment, f"{_RELEASE}-redis", "0.0.0.0:8002")


def _secret(part: str, lines: dict[str, str]) -> str:
    data = "".join(f"  {key}: {value}\n" for key, value in lines.items())
    return _SECRET % {"part": part, "lines": data}


def _tokens(part: str, **keys: str) -> str:
    each = {key: _GIVEN_TOKEN % {"part": part, "key": key, "value": keys[key]} for key in keys}
    return _secret(part, each)


def _server_templates(shipment: Shipment) -> dict[str, str]:
    found = kubernetes(shipment)
    del found["kustomization.yaml"]
    made: dict[str, str] = {}
    for documents in found.values():
        for one in documents:
            if one["kind"] == "Deployment":
                _image_and_more(one)
    server = found["server.yaml"][0]
    server["spec"]["replicas"] = _value(".Values.servers.replicas")
    _container_of(server)["resources"] = _value("toJson .Values.servers.resources")
    _roll_on_change(server, "settings.yaml", "store.yaml")
    made["templates/server.yaml"] = _template(*found["server.yaml"])
    made["templates/network.yaml"] = _if(".Values.networkPolicy.enabled", *found["network.yaml"])
    for name in shipment.models:
        documents = found[f"model-{label_of(name)}.yaml"]
        made[f"templates/model-{label_of(name)}.yaml"] = _model_template(
            name, documents, has_gpu=bool(shipment.models[name][0].gpus)
        )
    return made


def _model_template(name: str, documents: list[Document], *, has_gpu: bool) -> str:
    """Write a model's objects; its scaler is an autoscaler of Kubernetes, by CPU or by external
    metrics, or of KEDA."""
    values = f"(index .Values.models {json.dumps(name)})"
    deployed = next(one for one in documents if one["kind"] == "Deployment")
    _container_of(deployed)["image"] = _value(f"{values}.image")
    deployed["spec"]["replicas"] = _value(f"{values}.replicas")
    text = _template(deployed)
    line = next(one for one in text.splitlines() if one.startswith("  replicas:"))
    fixed = f"{{{{- if not {values}.maxReplicas }}}}\n{line}\n{{{{- end }}}}"
    text = text.replace(line, fixed)
    target = deployed["metadata"]["name"]
    least, most = _value(f"{values}.replicas"), _value(f"{values}.maxReplicas")
    scaled = f"{values}.maxReplicas"
    meta = meta_of(target, "model")
    text += "---\n" + _if(f"gt (int {values}.replicas) 1", _budget(target))
    by_cpu = {"type": "Utilization", "averageUtilization": 70}
    metrics = {
        "hpa": [{"type": "Resource", "resource": {"name": "cpu", "target": by_cpu}}],
        "adapter": _external_metrics(name, values),
    }
    for kind, each in metrics.items():
        hpa = {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": meta,
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
                "minReplicas": least,
                "maxReplicas": most,
                "metrics": each,
            },
        }
        text += "---\n" + _if(f'and {scaled} (eq .Values.autoscaling.kind "{kind}")', hpa)
    keda = {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": meta,
        "spec": {
            "scaleTargetRef": {"name": target},
            "minReplicaCount": least,
            "maxReplicaCount": most,
            "triggers": scaler_triggers(
                name, "@NAMESPACE@", values, gpu_pods=f"{target}-.+" if has_gpu else ""
            ),
        },
    }
    text += "---\n" + _if(f'and {scaled} (eq .Values.autoscaling.kind "keda")', keda)
    return text.replace("@NAMESPACE@", "{{ .Release.Namespace }}")


def scaler_triggers(
    name: str, namespace: str, values: str = "", gpu_pods: str = ""
) -> list[Document]:
    """Return KEDA's triggers of a model: the expected wait of its queries, its waiting rows for
    each pod, and the mean use of its GPUs in percent, as NVIDIA's DCGM exporter measures it.

    values: expression of Helm for the thresholds. gpu_pods: regular expression of the names of
    pods with GPUs; empty: the model has none.
    """
    of = f'model="{name}",namespace="{namespace}"'
    gpu = f'exported_pod=~"{gpu_pods}",exported_namespace="{namespace}"'
    queries = [
        *((value, kind, f"{how}({series}{{{of}}})") for value, kind, how, series in _SCALED_BY),
        *([("gpuPercent", "Value", f"avg(DCGM_FI_DEV_GPU_UTIL{{{gpu}}})")] if gpu_pods else ()),
    ]
    address = _value(".Values.autoscaling.prometheus | quote")
    return [
        {
            "type": "prometheus",
            "metricType": kind,
            "metadata": {
                "serverAddress": address,
                "query": query,
                "threshold": _value(f"{values}.{threshold} | quote"),
            },
        }
        for threshold, kind, query in queries
    ]


def _external_metrics(name: str, values: str) -> list[Document]:
    """Return the metrics of a model's autoscaler, which the API of external metrics serves by the
    rules of `adapter_rules`."""
    selected = {"matchLabels": {"model": name}}
    found: list[Document] = []
    for threshold, kind, _, series in _SCALED_BY:
        at = _value(f"{values}.{threshold} | quote")
        target = {"type": kind, "value" if kind == "Value" else "averageValue": at}
        metric = {"name": series, "selector": selected}
        found.append({"type": "External", "external": {"metric": metric, "target": target}})
    return found


def adapter_rules() -> list[Document]:
    """Return the rules by which prometheus-adapter serves what models are scaled by. It fills in
    the namespace of the autoscaler and its selector."""
    return [
        {
            "seriesQuery": f'{series}{{namespace!="",model!=""}}',
            "resources": {"overrides": {"namespace": {"resource": "namespace"}}},
            "name": {"as": series},
            "metricsQuery": f"{joined}(<<.Series>>{{<<.LabelMatchers>>}})",
        }
        for _, _, joined, series in _SCALED_BY
    ]


def _budget(name: str) -> Document:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta_of(name, "model"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": mine(name)}},
    }


def _node_templates(shipment: MeshShipment) -> dict[str, str]:
    found = mesh(shipment)
    del found["kustomization.yaml"]
    nodes = found["node.yaml"][0]
    _image_and_more(nodes)
    if "replicas" in nodes["spec"]:
        nodes["spec"]["replicas"] = _value(".Values.nodes.replicas")
    _roll_on_change(nodes, "node-settings.yaml", "node-store.yaml")
    network = _if(".Values.networkPolicy.enabled", *found.pop("network.yaml"))
    toml = node_toml(shipment)
    return {
        **{f"templates/node-{name}": _template(*documents) for name, documents in found.items()},
        "templates/node-network.yaml": network,
        "templates/node-settings.yaml": _settings("node", "node.toml", toml),
        "templates/node-store.yaml": _secret("node-store", {"url": _URL}),
        "templates/node-token.yaml": _tokens("node-token", admin_token="admin"),
    }


def _shard_templates(shipment: ParamsShipment) -> dict[str, str]:
    if shipment.settings.token:
        raise InvalidInput("params.token is set: a chart makes the token of its shards itself.")
    found = params(shipment)
    del found["kustomization.yaml"]
    _image_and_more(found["shards.yaml"][0])
    # the class is the cluster's, so that a release of this name in another namespace has another
    classed = _value('printf "%s-%s-params" .Release.Namespace (include "clipper.name" .) | quote')
    found["priority.yaml"][0]["metadata"]["name"] = classed
    found["shards.yaml"][0]["spec"]["template"]["spec"]["priorityClassName"] = classed
    network = _if(".Values.networkPolicy.enabled", *found.pop("network.yaml"))
    document = json.dumps(json.loads(shards_json(shipment, _TOKEN)))
    head, tail = (json.dumps(part) for part in document.split(_TOKEN))
    token = (
        '(include "clipper.token" (dict "root" . "secret" (printf "%s-params-token" (include'
        ' "clipper.name" .)) "key" "token" "given" .Values.tokens.models))'
    )
    return {
        **{f"templates/{name}": _template(*documents) for name, documents in found.items()},
        "templates/shards-network.yaml": network,
        "templates/shards-secret.yaml": _shards_secret(head, tail, token),
    }


def _shards_secret(head: str, tail: str, token: str) -> str:
    """Write the secret of all shards, and the token in another one, by which the next release finds
    it."""
    name = '(include "clipper.name" .)'
    parts = f"(replace {json.dumps(_RELEASE)} {name} {head})", "$token", tail
    secret = _secret("params", {SHARDS_FILE: f"{{{{ print {' '.join(parts)} | quote }}}}"})
    remaining = _secret("params-token", {"token": "{{ $token | quote }}"})
    return f"{{{{- $token := {token} }}}}\n{secret}---\n{remaining}"


def _container_of(deployed: Document) -> Document:
    container: Document = deployed["spec"]["template"]["spec"]["containers"][0]
    return container


def _image_and_more(deployed: Document) -> None:
    container, spec = _container_of(deployed), deployed["spec"]["template"]["spec"]
    if container["image"] == SERVER_IMAGE:
        container["image"] = _value(".Values.image")
    container["imagePullPolicy"] = _value(".Values.imagePullPolicy")
    spec["imagePullSecrets"] = _value("toJson .Values.imagePullSecrets")


def _roll_on_change(deployed: Document, *templates: str) -> None:
    """Replace the pods when what they read at the start changes."""
    parts = " ".join(
        f'(include (print $.Template.BasePath "/{template}") .)' for template in templates
    )
    meta = deployed["spec"]["template"]["metadata"]
    meta["annotations"] = {
        **meta.get("annotations", {}),
        "clipper/settings": _value(f"print {parts} | sha256sum | quote"),
    }


def _service_monitor() -> Document:
    endpoints = [{"port": "http", "path": "/metrics", "interval": "15s"}]
    instances = [_RELEASE, f"{_RELEASE}-node"]  # of the Services that take queries
    one = {"key": "app.kubernetes.io/instance", "operator": "In", "values": instances}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {"name": _RELEASE, "labels": _value("toJson .Values.monitoring.labels")},
        "spec": {"selector": {"matchExpressions": [one]}, "endpoints": endpoints},
    }
