"""Shards of a parameter server for Kubernetes: a base for Kustomize with a StatefulSet.

Each shard is a pod with a stable name and its own volume. Addresses, settings and token are one
file, shards.json, in a secret that shards and workers mount. All shards start at once, because
recovery needs the others; the headless Service therefore also publishes pods that are not ready. A
pod is ready when it serves and its copies are complete, so rolling updates and drains wait for
that.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from clipper.deploy.kubernetes.manifests import (
    CONFINED,
    NAME,
    SERVER_IMAGE,
    TMP_MOUNT,
    budget,
    build_contexts,
    check_export_name,
    meta_of,
    mine,
    pod,
    probe,
    service,
    written,
)
from clipper.deploy.kubernetes.yaml import Document, to_yaml
from clipper.errors import InvalidInput
from clipper.settings.params import LOG_FULL, ParamsSettings, grpc_address

PORT: Final = 7300
METRICS_PORT: Final = 7301
CLIENTS: Final = {"clipper/params": "client"}  # the label of pods that may talk to shards
SHARDS_FILE: Final = "shards.json"  # by which shards and clients look for it
_SET: Final = "/etc/clipper-params"
_STATE: Final = "/state"
_ALIVE: Final = "/tmp/shard.alive"
_HOST: Final = "kubernetes.io/hostname"
_PRIORITY: Final = (
    1_000_000  # above workers, which have no priority class, so they are evicted first
)
_GIB: Final = 1024
_SCRAPED: Final = {
    "prometheus.io/scrape": "true",
    "prometheus.io/port": str(METRICS_PORT),
    "prometheus.io/path": "/metrics",
}
_RECOVER_S: Final = 30.0  # until DNS knows pods that start together
_WRITES_MIB_S: Final = 50  # writing the last snapshot to a slow volume


@dataclass(frozen=True, slots=True)
class ParamsShipment:
    """Parameters. settings: of the set, except folder and address. memory_mib: per shard.
    storage_gib: per volume; 0: enough for the retained snapshots of a full shard. together:
    allow two shards on one machine. export: with which names of objects begin.
    """

    settings: ParamsSettings = field(default_factory=ParamsSettings)
    memory_mib: int = 4096
    storage_gib: int = 0
    together: bool = False
    export: str = NAME

    @property
    def name(self) -> str:
        """The name of the shards' objects."""
        return f"{self.export}-params"

    def __post_init__(self) -> None:
        check_export_name(self.export)
        settings = self.settings
        if settings.replicas >= settings.shards:
            raise InvalidInput(
                f"{settings.replicas} replicas of each of {settings.shards} shards: they are in"
                " other shards."
            )
        if any(
            (
                settings.tls_cert,
                settings.grpc_tls_cert,
                settings.grpc_keys_file,
                settings.tokens_file,
            )
        ):
            why = (
                "what is exported holds neither certificates nor keys, and params.tls_cert,"
                " grpc_tls_cert, grpc_keys_file or tokens_file is set."
            )
            raise InvalidInput(
                why, hint="Leave them out, and let the cluster encrypt between pods."
            )

    @property
    def addresses(self) -> list[str]:
        """Return the address of each shard."""
        return [
            f"tcp:{self.name}-{number}.{self.name}:{PORT}" for number in range(self.settings.shards)
        ]

    @property
    def grpc_addresses(self) -> list[str]:
        """Return the gRPC address of each shard; empty without gRPC."""
        each = range(self.settings.shards) if self.settings.grpc else ()
        ports = [grpc_address(self.settings, number).rpartition(":")[2] for number in each]
        return [f"{self.name}-{number}.{self.name}:{port}" for number, port in enumerate(ports)]

    @property
    def volume_gib(self) -> int:
        """Return the size of a shard's volume in GiB."""
        whole = -(-self.memory_mib // _GIB)
        logs = LOG_FULL * self.settings.log_bytes_max if self.settings.durability == "disk" else 0
        return self.storage_gib or whole * (self.settings.snapshots_max + 2) - (-logs >> 30)


def write_params(shipment: ParamsShipment, folder: Path) -> list[str]:
    """Write the files; return their paths relative to the folder. An existing token stays."""
    token = shipment.settings.token or _token_in(folder) or secrets.token_urlsafe(24)
    (folder / "secrets" / SHARDS_FILE).unlink(missing_ok=True)
    files = {name: to_yaml(*documents) for name, documents in params(shipment).items()}
    own = {SHARDS_FILE: shards_json(shipment, token)}
    return written(folder, {**build_contexts({}), **files}, own)


def _token_in(folder: Path) -> str:
    try:
        return str(json.loads((folder / "secrets" / SHARDS_FILE).read_text())["token"])
    except (OSError, ValueError, KeyError):
        return ""


def shards_json(shipment: ParamsShipment, token: str) -> str:
    """Return shards.json, which shards and workers read: `Client("/etc/clipper-params")`."""
    settings = shipment.settings
    patience_s = max(settings.recover_s, _RECOVER_S)
    here = {"token": "", "folder": _SET, "recover_s": patience_s, "grpc": _grpc(settings)}
    public = msgspec.to_builtins(msgspec.structs.replace(settings, **here))
    document = {
        "addresses": shipment.addresses,
        "token": token,
        "settings": public,
        "grpc": shipment.grpc_addresses,
    }
    return json.dumps(document, indent=1)


def _grpc(settings: ParamsSettings) -> str:
    """Return the gRPC address of a pod, on all its interfaces, or ""; pod i listens at PORT + i."""
    return f"0.0.0.0:{grpc_address(settings, 0).rpartition(':')[2]}" if settings.grpc else ""


def params(shipment: ParamsShipment) -> dict[str, list[Document]]:
    """Return the documents of each file of the base."""
    files = {
        "shards.yaml": list(_objects(shipment)),
        "network.yaml": [_network(shipment)],
        "priority.yaml": [_priority(shipment)],
    }
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*files],
        # No hash suffix: worker pods outside this base mount it by name.
        # Said for all generators, of which there is one: kubectl before 1.21 knows no other place
        # for it.
        "generatorOptions": {"disableNameSuffixHash": True},
        "secretGenerator": [{"name": shipment.name, "files": [f"secrets/{SHARDS_FILE}"]}],
    }
    return {"kustomization.yaml": [base], **files}


def _objects(shipment: ParamsShipment) -> Iterator[Document]:
    name = shipment.name
    meta = meta_of(name, "params")
    # Time for a last snapshot.
    spec = pod(
        [_container(shipment)],
        [{"name": "set", "secret": {"secretName": name, "defaultMode": 0o440}}],
        30 + shipment.memory_mib // _WRITES_MIB_S,
    )
    spec |= {"priorityClassName": name, "affinity": {"podAntiAffinity": _apart(shipment)}}
    spec["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": mine(shipment.name)},
        },
    ]
    size = {"requests": {"storage": f"{shipment.volume_gib}Gi"}}
    claim = {
        "metadata": {"name": "state"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": size},
    }
    yield {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta,
        "spec": {
            "serviceName": name,
            "replicas": shipment.settings.shards,
            "selector": {"matchLabels": mine(shipment.name)},
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "persistentVolumeClaimRetentionPolicy": {
                "whenDeleted": "Retain",
                "whenScaled": "Retain",
            },
            "template": {
                "metadata": {"labels": meta["labels"], "annotations": _SCRAPED},
                "spec": spec,
            },
            "volumeClaimTemplates": [claim],
        },
    }
    yield service(name, name, {"params": PORT}, clusterIP="None", publishNotReadyAddresses=True)
    yield budget(name, "params")


def _container(shipment: ParamsShipment) -> Document:
    memory = f"{shipment.memory_mib}Mi"
    alive, ready = (
        _touched(path, within_s) for path, within_s in ((_ALIVE, 60), (f"{_ALIVE}.ready", 10))
    )
    return {
        "name": "shard",
        "image": SERVER_IMAGE,
        "args": shard_args(),
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [
            {"name": "params", "containerPort": PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "securityContext": CONFINED,
        # Equal to the limit: a pod that requests less is evicted first.
        "resources": {"requests": {"cpu": "1", "memory": memory}, "limits": {"memory": memory}},
        # A shard that restores for an hour is alive all the time: it answers, and says that it is
        # not ready.
        "startupProbe": _patient(alive, 5, 60),
        "livenessProbe": _patient(alive, 20, 3),
        "readinessProbe": _patient(ready, 5, 2),
        "volumeMounts": [
            {"name": "set", "mountPath": _SET, "readOnly": True},
            {"name": "state", "mountPath": _STATE},
            TMP_MOUNT,
        ],
    }


def shard_args() -> list[str]:
    """Return the arguments of `clipper` in a pod. The shard's number is the suffix of the pod's
    name.
    """
    words = ["--folder", _SET, "--keep", _STATE, "--listen", f"0.0.0.0:{PORT}", "--alive", _ALIVE]
    return ["params", "shard", "$(POD_NAME)", *words, "--metrics", f"0.0.0.0:{METRICS_PORT}"]


def _touched(path: str, within_s: int) -> Document:
    """Return the command that checks the alive file, which the shard touches four times a
    second.
    """
    return {
        "exec": {
            "command": [
                "python",
                "-m",
                "clipper_container",
                "healthy",
                path,
                "--within",
                str(within_s),
            ]
        }
    }


def _patient(action: Document, period_s: int, failures: int) -> Document:
    return {**probe(action, period_s, failures), "timeoutSeconds": 10}


def _apart(shipment: ParamsShipment) -> Document:
    """Return the anti-affinity that puts no two shards on one machine; Kubernetes has no finer
    rule.
    """
    term = {"labelSelector": {"matchLabels": mine(shipment.name)}, "topologyKey": _HOST}
    if shipment.together or not shipment.settings.replicas:
        return {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": term}
            ]
        }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _network(shipment: ParamsShipment) -> Document:
    """Return the network policy: shards and pods labelled as clients. Both need a token; traffic
    is not encrypted. Metrics are open, since they contain no rows.
    """
    settings = shipment.settings
    shards = {"podSelector": {"matchLabels": mine(shipment.name)}}
    some = [shards, {"podSelector": {"matchLabels": CLIENTS}}]
    ports: list[Document] = [{"port": PORT, "protocol": "TCP"}]
    if settings.grpc:
        first = int(_grpc(settings).rpartition(":")[2])
        ports.append({"port": first, "endPort": first + settings.shards - 1, "protocol": "TCP"})
    allowed = [
        {"from": some, "ports": ports},
        {"ports": [{"port": METRICS_PORT, "protocol": "TCP"}]},
    ]
    spec = {**shards, "policyTypes": ["Ingress"], "ingress": allowed}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta_of(shipment.name, "params"),
        "spec": spec,
    }


def _priority(shipment: ParamsShipment) -> Document:
    meta = meta_of(shipment.name, "params")
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": meta,
        "value": _PRIORITY,
        "description": "Shards of parameters: before the workers that train with them.",
    }
