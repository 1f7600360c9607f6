"""Nodes of a mesh for Kubernetes: a base for Kustomize. The nodes share an existing etcd.

Nodes are alike and keep all state in the store, so they are a Deployment. Each announces its pod's
address; any node takes queries. A pod that ends is first removed from the Service, then has its
models loaded elsewhere; the termination grace period covers both. The autoscaler compares the age
of the least recently used model of the mesh with the target: nodes are added when recently used
models must be evicted.
"""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clipper.deploy.kubernetes.manifests import (
    AWAY_S,
    CONFINED,
    NAME,
    ONE_AT_A_TIME,
    PORT,
    SERVER_IMAGE,
    TMP_MOUNT,
    budget,
    build_contexts,
    check_export_name,
    check_shared,
    deployment,
    from_secret,
    http_toml,
    logging_toml,
    meta_of,
    mine,
    pod,
    probe,
    service,
    spread,
    toml_table,
    written,
)
from clipper.deploy.kubernetes.yaml import Document, to_yaml
from clipper.errors import InvalidInput
from clipper.settings.ports import ADMIN_PORT, GRPC_PORT, HTTP_PORT

PEERS_PORT: Final = 7001
METRIC: Final = "clipper_mesh_pressure"
_TOML: Final = "/etc/clipper/node.toml"
_QUERIES_S: Final = 10
_FULL: Final = 0.9  # share of the capacity above which the age is meaningful


@dataclass(frozen=True, slots=True)
class MeshShipment:
    """Parameters. store: URL reachable from pods. nodes, nodes_max: without nodes_max there is
    no autoscaler. capacity_mib: memory for models per node. drain_s: time to load models
    elsewhere. lru_age_s: target age. labels: of the nodes. gpus: per node. name: with which names
    of objects begin.
    """

    store: str
    nodes: int = 3
    nodes_max: int = 0
    capacity_mib: int = 2048
    drain_s: int = 30
    lru_age_s: int = 3600
    labels: tuple[str, ...] = ()
    gpus: int = 0
    name: str = NAME

    @property
    def node(self) -> str:
        """The name of the nodes' objects."""
        return f"{self.name}-node"

    def __post_init__(self) -> None:
        check_export_name(self.name)
        check_shared(self.store)
        if self.nodes_max and self.nodes_max < self.nodes:
            raise InvalidInput(
                f"nodes_max is {self.nodes_max}, and nodes are {self.nodes} already."
            )


def write_mesh(shipment: MeshShipment, folder: Path) -> list[str]:
    """Write the files; return their paths relative to the folder."""
    sources: dict[str, str | bytes] = {
        "node.toml": node_toml(shipment),
        **build_contexts({}),
    }
    if shipment.nodes_max:
        sources["prometheus-adapter.yaml"] = _adapter_rules(shipment)
    files = {name: to_yaml(*documents) for name, documents in mesh(shipment).items()}
    (folder / "secrets" / "store_url").unlink(missing_ok=True)
    own = {"store_url": shipment.store, "admin_token": secrets.token_urlsafe(24)}
    return written(folder, {**sources, **files}, own)


def node_toml(shipment: MeshShipment) -> str:
    """Return the nodes' configuration file. Node-specific settings are arguments; the store's
    URL is in a secret.
    """
    server = {
        "folder": "/state",
        "address": f"tcp://0.0.0.0:{PORT}",
        "drain_s": float(_QUERIES_S),
    }
    mesh_settings = {
        "enabled": True,
        "peers": f"tcp:0.0.0.0:{PEERS_PORT}",
        "capacity_mib": shipment.capacity_mib,
        "drain_s": float(shipment.drain_s),
        "labels": list(shipment.labels),
    }
    return "".join(
        [
            toml_table(("server",), server),
            logging_toml(),
            http_toml(f"0.0.0.0:{ADMIN_PORT}"),
            toml_table(("grpc",), {"address": f"0.0.0.0:{GRPC_PORT}"}),
            toml_table(("mesh",), mesh_settings),
        ]
    )


def mesh(shipment: MeshShipment) -> dict[str, list[Document]]:
    """Return the documents of each file of the base."""
    files = {
        "node.yaml": list(_node_objects(shipment)),
        "models.yaml": [_models_claim(shipment)],
        "network.yaml": [_network(shipment)],
    }
    if shipment.nodes_max:
        files["autoscaler.yaml"] = [_autoscaler(shipment)]
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*files],
        "configMapGenerator": [{"name": shipment.node, "files": ["node.toml"]}],
        "secretGenerator": [
            {"name": f"{shipment.node}-store", "files": ["url=secrets/store_url"]},
            {"name": f"{shipment.node}-token", "files": ["secrets/admin_token"]},
        ],
    }
    return {"kustomization.yaml": [base], **files}


def _node_objects(shipment: MeshShipment) -> Iterator[Document]:
    name = shipment.node
    meta = meta_of(name, "node")
    volumes = [
        {"name": "settings", "configMap": {"name": name}},
        {
            "name": "etcd-certificates",
            "secret": {"secretName": "clipper-etcd", "optional": True, "defaultMode": 0o440},
        },
        {
            "name": "models",
            "persistentVolumeClaim": {"claimName": f"{name}-models", "readOnly": True},
        },
        {"name": "state", "emptyDir": {}},
    ]
    grace_s = AWAY_S + shipment.drain_s + _QUERIES_S + 10
    spec = pod([_container(shipment)], volumes, grace_s)
    spec["topologySpreadConstraints"] = spread(name)
    # One at a time, after its successor is ready, so that its models have a place to go.
    yield deployment(meta, None if shipment.nodes_max else shipment.nodes, spec, ONE_AT_A_TIME)
    yield service(name, name, {"http": HTTP_PORT, "grpc": GRPC_PORT})
    yield service(f"{name}-admin", name, {"admin": ADMIN_PORT})
    yield budget(name, "node")


def _container(shipment: MeshShipment) -> Document:
    live, ready = (
        {"httpGet": {"path": f"/v2/health/{one}", "port": "http"}} for one in ("live", "ready")
    )
    memory = shipment.capacity_mib + 1024
    resources: Document = {
        "requests": {"cpu": "1", "memory": f"{memory}Mi"},
        "limits": {"memory": f"{memory}Mi"},
    }
    if shipment.gpus:
        resources["limits"]["nvidia.com/gpu"] = shipment.gpus
    return {
        "name": "node",
        "image": SERVER_IMAGE,
        "args": ["node", _TOML, "--name", "$(POD_NAME)", "--advertise", "$(POD_IP)"],
        "env": [
            _field("POD_NAME", "metadata.name"),
            _field("POD_IP", "status.podIP"),
            from_secret("CLIPPER_SERVER__STATE", f"{shipment.node}-store", "url"),
            from_secret("CLIPPER_HTTP__TOKEN", f"{shipment.node}-token", "admin_token"),
        ],
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT},
            {"name": "grpc", "containerPort": GRPC_PORT},
            {"name": "admin", "containerPort": ADMIN_PORT},
            {"name": "peers", "containerPort": PEERS_PORT},
            {"name": "models", "containerPort": PORT},
        ],
        "resources": resources,
        "securityContext": CONFINED,
        "startupProbe": probe(live, 2, 60),
        "livenessProbe": probe(live, 10, 3),
        "readinessProbe": probe(ready, 5, 2),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(AWAY_S)]}}},
        "volumeMounts": [
            {"name": "settings", "mountPath": "/etc/clipper", "readOnly": True},
            {"name": "etcd-certificates", "mountPath": "/etc/clipper-etcd", "readOnly": True},
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "state", "mountPath": "/state"},
            TMP_MOUNT,
        ],
    }


def _field(name: str, path: str) -> Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _models_claim(shipment: MeshShipment) -> Document:
    """Return the volume claim of model files, which all nodes mount at the same path."""
    spec = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "10Gi"}}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta_of(f"{shipment.node}-models", "models"),
        "spec": spec,
    }


def _network(shipment: MeshShipment) -> Document:
    """Return the network policy: queries from anywhere; peers and model hosts, which use a token
    without TLS, from nodes only; management from pods that are labelled so.
    """
    among = [{"port": port, "protocol": "TCP"} for port in (PEERS_PORT, PORT)]
    ports = [{"port": port, "protocol": "TCP"} for port in (HTTP_PORT, GRPC_PORT)]
    nodes = {"podSelector": {"matchLabels": mine(shipment.node)}}
    admins = {"podSelector": {"matchLabels": {f"{shipment.name}/admin": "client"}}}
    managed = [{"port": ADMIN_PORT, "protocol": "TCP"}]
    spec = {
        **nodes,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": ports},
            {"from": [nodes], "ports": among},
            {"from": [admins], "ports": managed},
        ],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta_of(shipment.node, "node"),
        "spec": spec,
    }


def _autoscaler(shipment: MeshShipment) -> Document:
    pressure = {"metric": {"name": METRIC}, "target": {"type": "Value", "value": "1"}}
    behavior = {
        "scaleUp": {
            "stabilizationWindowSeconds": 60,
            "policies": [{"type": "Pods", "value": 2, "periodSeconds": 120}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": 1800,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 600}],
        },
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": shipment.node},
        "minReplicas": shipment.nodes,
        "maxReplicas": shipment.nodes_max,
        "behavior": behavior,
        "metrics": [{"type": "External", "external": pressure}],
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": meta_of(shipment.node, "node"),
        "spec": spec,
    }


def pressure_query(lru_age_s: int) -> str:
    """Return the PromQL query for memory pressure: target age over actual age; 0 while there is
    room.
    """
    age = "clamp_min(min(clipper_mesh_lru_age_seconds > 0), 1)"
    full = f"(sum(clipper_mesh_used_bytes) / sum(clipper_mesh_capacity_bytes) > bool {_FULL})"
    return f"({lru_age_s} / {age}) * {full} or vector(0)"


def _adapter_rules(shipment: MeshShipment) -> str:
    rule: Mapping[str, object] = {
        "seriesQuery": "clipper_mesh_lru_age_seconds",
        "name": {"as": METRIC},
        "resources": {"namespaced": False},
        "metricsQuery": pressure_query(shipment.lru_age_s),
    }
    note = (
        "# Not of the base: values for the chart prometheus-adapter, which gives the autoscaler"
        " the metrics of Prometheus.\n"
    )
    return note + to_yaml({"rules": {"external": [rule]}})
