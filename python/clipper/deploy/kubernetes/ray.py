"""Servers on Ray in Kubernetes: a RayJob of the KubeRay operator, its Services and its image.

The job's cluster has a head, where the entry point `clipper up --on ray` runs, and a worker for
each server. The ingress is in the entry point, so its Services select the head. If the entry point
ends, it is started again in the same cluster and takes over the servers that run; if the head is
lost, the operator makes a new cluster (`backoffLimit`), and queries fail until it is ready. A
RayCluster beside a RayJob was rejected: a job that selects a cluster is not retried after its head
was lost. A RayService was rejected: it deploys applications of Ray Serve, whose proxies would take
the place of the servers' own HTTP and gRPC.
"""

import math
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clipper.deploy.kubernetes.manifests import (
    EXTRAS,
    NAME,
    TMP_MOUNT,
    check_export_name,
    check_shared,
    from_secret,
    meta_of,
    pod,
    redis_objects,
    service,
    written,
)
from clipper.deploy.kubernetes.yaml import Document, to_yaml
from clipper.deploy.needs import python_here
from clipper.deploy.packages import sdk
from clipper.settings.ports import ADMIN_PORT, HTTP_PORT
from clipper.types import VERSION

RAY: Final = "2.52.0"
IMAGE: Final = f"clipper/ray:{VERSION}"
APP: Final = "/app"
_USER: Final = 1000  # of Ray's images
_RETRIES: Final = 1000  # of the cluster, after its head was lost
_EXPORT: Final = "clipper/export"
_DASHBOARD_PORT: Final = 8265
_OPERATOR: Final = {"app.kubernetes.io/name": "kuberay-operator"}


@dataclass(frozen=True, slots=True)
class RayShipment:
    """Servers of one configuration on Ray.

    files: of the folder of the configuration, by relative path; with the code of models. file: the
    configuration among them. requirements: lines for pip of what models need. servers, servers_max:
    bounds of their number; each has a worker. cpus, memory_mib: of a worker. store: URL of an
    existing Redis or etcd; empty: a Redis of the export. name: with which names of objects begin.
    """

    files: Mapping[str, bytes]
    file: str
    requirements: tuple[str, ...] = ()
    servers: int = 2
    servers_max: int = 0
    cpus: float = 1.0
    memory_mib: int = 4096
    store: str = ""
    name: str = NAME

    def __post_init__(self) -> None:
        check_export_name(self.name)
        if self.store:
            check_shared(self.store)

    @property
    def group(self) -> str:
        """Return the name with which names of its objects begin, besides those of other exports."""
        return f"{self.name}-ray"

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return max(self.servers, self.servers_max)


def write_ray(shipment: RayShipment, folder: Path) -> list[str]:
    """Write a base for Kustomize and the build context of its image; return their paths relative to
    the folder."""
    files: dict[str, str | bytes] = {
        "image/Dockerfile": dockerfile(),
        "image/requirements.txt": "".join(f"{line}\n" for line in shipment.requirements),
        f"image/wheels/{sdk.WHEEL}": sdk.wheel(),
        **{f"image/app/{name}": content for name, content in shipment.files.items()},
        **{name: to_yaml(*documents) for name, documents in ray(shipment).items()},
    }
    url = shipment.store or f"redis://{shipment.group}-redis:6379/0"
    (folder / "secrets" / "store_url").unlink(missing_ok=True)
    return written(folder, files, {"admin_token": secrets.token_urlsafe(24), "store_url": url})


def dockerfile() -> str:
    """Return the Dockerfile of head and workers: Ray, the server, its models and what they need."""
    return f"""\
# A clipper server in Ray's own image. Where no index has clipper-serving, put the wheels of
# `make wheels` into wheels/ first:  cp PATH-OF-THE-CHECKOUT/dist/*.whl image/wheels/
ARG BASE=rayproject/ray:{RAY}-py{python_here().replace(".", "")}

FROM ${{BASE}}
COPY wheels/ /tmp/wheels/
COPY requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --find-links /tmp/wheels \\
    "clipper-serving[{",".join(EXTRAS)},ray]=={VERSION}" "ray[default]=={RAY}" -r /tmp/requirements.txt
COPY app {APP}
WORKDIR {APP}
"""  # noqa: E501


def ray(shipment: RayShipment) -> dict[str, list[Document]]:
    """Return the documents of each file of the base."""
    group = shipment.group
    head = {_EXPORT: shipment.name, "ray.io/node-type": "head"}
    files: dict[str, list[Document]] = {
        "ray.yaml": [
            _job(shipment),
            service(group, "", {"http": HTTP_PORT}, selector=head),
            service(f"{group}-admin", "", {"admin": ADMIN_PORT}, selector=head),
            _network(shipment),
        ]
    }
    if not shipment.store:
        files["redis.yaml"] = list(redis_objects(f"{group}-redis"))
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*files],
        # Kustomize does not know where a RayJob names Secrets, so their names cannot have a hash.
        "generatorOptions": {"disableNameSuffixHash": True},
        "secretGenerator": [
            {"name": f"{group}-token", "files": ["admin_token=secrets/admin_token"]},
            {"name": f"{group}-store", "files": ["url=secrets/store_url"]},
        ],
    }
    return {"kustomization.yaml": [base], **files}


def entry_point(shipment: RayShipment) -> str:
    """Return the shell command that the job runs on the head."""
    words = ["clipper", "up", f"{APP}/{shipment.file}", "--on", "ray", "--insecure"]
    words += ["--http", f"0.0.0.0:{HTTP_PORT}", "--admin", f"0.0.0.0:{ADMIN_PORT}"]
    words += ["--servers", f"{shipment.servers}", "--servers-max", f"{shipment.workers}"]
    words += ["--cpus", f"{shipment.cpus:g}"]
    return f"until {shlex.join(words)}; do sleep 2; done"


def _job(shipment: RayShipment) -> Document:
    cores = max(1, math.ceil(shipment.cpus))
    settings = [
        from_secret("CLIPPER_SERVER__STATE", f"{shipment.group}-store", "url"),
        from_secret("CLIPPER_HTTP__TOKEN", f"{shipment.group}-token", "admin_token"),
        {"name": "CLIPPER_SERVER__FOLDER", "value": "/tmp/clipper"},
    ]
    ports = {"http": HTTP_PORT, "admin": ADMIN_PORT, "dashboard": _DASHBOARD_PORT}
    head = _container("head", "500m", 2048)
    head |= {"env": settings, "ports": [{"name": k, "containerPort": n} for k, n in ports.items()]}
    worker = _container("worker", f"{shipment.cpus:g}", shipment.memory_mib)
    cluster = {
        "rayVersion": RAY,
        "headGroupSpec": {
            # no server is placed on the head
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _template(shipment, head),
        },
        "workerGroupSpecs": [
            {
                "groupName": "servers",
                **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), shipment.workers),
                "rayStartParams": {"num-cpus": str(cores)},
                "template": _template(shipment, worker),
            }
        ],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": meta_of(shipment.group, "server"),
        "spec": {
            "entrypoint": entry_point(shipment),
            "submissionMode": "HTTPMode",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": _RETRIES,
            "rayClusterSpec": cluster,
        },
    }


def _container(name: str, cpu: str, memory_mib: int) -> Document:
    memory = {"memory": f"{memory_mib}Mi"}
    return {
        "name": f"ray-{name}",
        "image": IMAGE,
        "resources": {"requests": {"cpu": cpu, **memory}, "limits": memory},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [TMP_MOUNT],
    }


def _template(shipment: RayShipment, container: Document) -> Document:
    labels = {_EXPORT: shipment.name}
    return {"metadata": {"labels": labels}, "spec": pod([container], [], 30, user=_USER)}


def _network(shipment: RayShipment) -> Document:
    """Return the network policy of head and workers: queries from anywhere; everything among them;
    the dashboard, which can run code, from the operator; management from pods that are labelled
    so."""
    ours = {"matchLabels": {_EXPORT: shipment.name, "ray.io/is-ray-node": "yes"}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR}}
    admins = {"podSelector": {"matchLabels": {f"{shipment.name}/admin": "client"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta_of(shipment.group, "server"),
        "spec": {
            "podSelector": ours,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": HTTP_PORT, "protocol": "TCP"}]},
                {"from": [{"podSelector": ours}]},
                {"from": [operator], "ports": [{"port": _DASHBOARD_PORT, "protocol": "TCP"}]},
                {"from": [admins], "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}]},
            ],
        },
    }
