"""The shards of a parameter server for Kubernetes: a base of Kustomize around a StatefulSet.

Each shard is a pod with a name that stays and a volume of its own; where all of them are, their
settings and their token are one file, shards.json, in a secret that shards and workers mount.
Shards start at once, not one after the other: to recover they need each other. So the headless
Service names those too that are not ready. A pod is ready when it serves and its replicas are
whole, so that a rolling update, or a drained machine, takes the next only then.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from clipper.deploy import sdk
from clipper.deploy.manifests import (
    CONFINED,
    SERVER_IMAGE,
    TMP_MOUNT,
    budget,
    meta_of,
    mine,
    pod,
    probe,
    server_dockerfile,
    service,
    written,
)
from clipper.deploy.yaml import to_yaml
from clipper.errors import InvalidInput
from clipper.settings.params import ParamsSettings, grpc_address

PORT: Final = 7300
METRICS_PORT: Final = 7301
CLIENTS: Final = {"clipper/params": "client"}  # the label of pods that may talk to shards
NAME: Final = "clipper-params"
SHARDS_FILE: Final = "shards.json"  # by which shards and clients look for it
_SET: Final = "/etc/clipper-params"
_STATE: Final = "/state"
_ALIVE: Final = "/tmp/shard.alive"
_HOST: Final = "kubernetes.io/hostname"
_PRIORITY: Final = (
    1_000_000  # workers, which have none, make room for shards and not the other way round
)
_GIB: Final = 1024
_SCRAPED: Final = {
    "prometheus.io/scrape": "true",
    "prometheus.io/port": str(METRICS_PORT),
    "prometheus.io/path": "/metrics",
}
_RECOVER_S: Final = 30.0  # until the names of pods that start together are known to all
_WRITES_MIB_S: Final = 50  # of a last snapshot, on a slow volume


@dataclass(frozen=True, slots=True)
class ParamsShipment:
    """settings: of the set; its folder and address say nothing here.  memory_mib: of each shard.
    storage_gib: of each shard's volume; 0: for the snapshots that are kept, of a shard that fills
    its memory.  together: shards may share a machine where there are too few."""

    settings: ParamsSettings = field(default_factory=ParamsSettings)
    memory_mib: int = 4096
    storage_gib: int = 0
    together: bool = False

    def __post_init__(self) -> None:
        settings = self.settings
        if settings.replicas >= settings.shards:
            raise InvalidInput(
                f"{settings.replicas} replicas of each of {settings.shards} shards: they are in"
                " other shards."
            )
        if settings.grpc_tls_cert or settings.grpc_keys_file:
            why = (
                "what is exported holds neither certificates nor keys, and params.grpc_tls_cert or"
                " grpc_keys_file is set."
            )
            raise InvalidInput(
                why, hint="Leave them out, and let the cluster encrypt between pods."
            )

    @property
    def addresses(self) -> list[str]:
        return [f"tcp:{NAME}-{number}.{NAME}:{PORT}" for number in range(self.settings.shards)]

    @property
    def grpc_addresses(self) -> list[str]:
        """[]: without."""
        each = range(self.settings.shards) if self.settings.grpc else ()
        ports = [grpc_address(self.settings, number).rpartition(":")[2] for number in each]
        return [f"{NAME}-{number}.{NAME}:{port}" for number, port in enumerate(ports)]

    @property
    def volume_gib(self) -> int:
        whole = -(-self.memory_mib // _GIB)
        return self.storage_gib or whole * (self.settings.snapshots_max + 2)


def write_params(shipment: ParamsShipment, folder: Path) -> list[str]:
    """-> the files, relative to the folder. The token stays what it was in that folder."""
    token = shipment.settings.token or _token_in(folder) or secrets.token_urlsafe(24)
    (folder / "secrets" / SHARDS_FILE).unlink(missing_ok=True)
    sources: dict[str, str | bytes] = {
        "server/Dockerfile": server_dockerfile(("grpc",) if shipment.settings.grpc else ()),
        f"server/wheels/{sdk.WHEEL}": sdk.wheel(),
    }
    files = {name: to_yaml(*documents) for name, documents in params(shipment).items()}
    return written(folder, {**sources, **files}, {SHARDS_FILE: shards_json(shipment, token)})


def _token_in(folder: Path) -> str:
    try:
        return str(json.loads((folder / "secrets" / SHARDS_FILE).read_text())["token"])
    except (OSError, ValueError, KeyError):
        return ""


def shards_json(shipment: ParamsShipment, token: str) -> str:
    """What shards and workers read: `Client("/etc/clipper-params")`."""
    settings = shipment.settings
    patience_s = max(settings.recover_s, _RECOVER_S)
    here = {"token": "", "folder": _SET, "recover_s": patience_s, "grpc": _grpc(settings)}
    public = msgspec.to_builtins(msgspec.structs.replace(settings, **here))
    said = {
        "addresses": shipment.addresses,
        "token": token,
        "settings": public,
        "grpc": shipment.grpc_addresses,
    }
    return json.dumps(said, indent=1)


def _grpc(settings: ParamsSettings) -> str:
    """On all of a pod's addresses, where it is wanted at all: pod i at PORT + i."""
    return f"0.0.0.0:{grpc_address(settings, 0).rpartition(':')[2]}" if settings.grpc else ""


def params(shipment: ParamsShipment) -> dict[str, list[dict[str, Any]]]:
    """The documents of each file of the base."""
    network = _network(shipment.settings)
    files = {
        "shards.yaml": list(_objects(shipment)),
        "network.yaml": [network],
        "priority.yaml": [_priority()],
    }
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*files],
        # Without a suffix: pods of workers, which are not of this base, mount it by its name.
        # Said for all generators, of which there is one: kubectl before 1.21 knows no other place
        # for it.
        "generatorOptions": {"disableNameSuffixHash": True},
        "secretGenerator": [{"name": NAME, "files": [f"secrets/{SHARDS_FILE}"]}],
    }
    return {"kustomization.yaml": [base], **files}


def _objects(shipment: ParamsShipment) -> Iterator[dict[str, Any]]:
    meta = meta_of(NAME, "params")
    # A last snapshot goes with a good end.
    spec = pod(
        [_container(shipment)],
        [{"name": "set", "secret": {"secretName": NAME, "defaultMode": 0o440}}],
        30 + shipment.memory_mib // _WRITES_MIB_S,
    )
    spec |= {"priorityClassName": NAME, "affinity": {"podAntiAffinity": _apart(shipment)}}
    spec["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": mine(NAME)},
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
            "serviceName": NAME,
            "replicas": shipment.settings.shards,
            "selector": {"matchLabels": mine(NAME)},
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
    yield service(NAME, NAME, {"params": PORT}, clusterIP="None", publishNotReadyAddresses=True)
    yield budget(NAME, "params")


def _container(shipment: ParamsShipment) -> dict[str, Any]:
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
        # As much as the limit: one that asks for less is the first to go when its machine runs out.
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
    """What a pod runs, after `clipper`. Its number is what its name ends in."""
    words = ["--folder", _SET, "--keep", _STATE, "--listen", f"0.0.0.0:{PORT}", "--alive", _ALIVE]
    return ["params", "shard", "$(POD_NAME)", *words, "--metrics", f"0.0.0.0:{METRICS_PORT}"]


def _touched(path: str, within_s: int) -> dict[str, Any]:
    """The shard touches it four times a second."""
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


def _patient(action: dict[str, Any], period_s: int, failures: int) -> dict[str, Any]:
    return {**probe(action, period_s, failures), "timeoutSeconds": 10}


def _apart(shipment: ParamsShipment) -> dict[str, Any]:
    """Kubernetes cannot say `not beside the shard before`: so no two are on one machine."""
    term = {"labelSelector": {"matchLabels": mine(NAME)}, "topologyKey": _HOST}
    if shipment.together or not shipment.settings.replicas:
        return {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": term}
            ]
        }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _network(settings: ParamsSettings) -> dict[str, Any]:
    """Shards, and pods that say that they are clients; a token is asked of both, and nothing is
    encrypted. Figures, which name tables and hold no rows, are for whoever scrapes."""
    shards = {"podSelector": {"matchLabels": mine(NAME)}}
    some = [shards, {"podSelector": {"matchLabels": CLIENTS}}]
    ports: list[dict[str, Any]] = [{"port": PORT, "protocol": "TCP"}]
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
        "metadata": meta_of(NAME, "params"),
        "spec": spec,
    }


def _priority() -> dict[str, Any]:
    meta = meta_of(NAME, "params")
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": meta,
        "value": _PRIORITY,
        "description": "Shards of parameters: before the workers that train with them.",
    }
