"""Servers and their models for Docker Compose and Kubernetes: manifests and build contexts.

Every model is a service (Compose) or a Deployment (Kubernetes). It connects to the servers over TCP
with a token from a secret; nothing connects to the models. In Compose management stays inside the
server's container: `docker compose exec server clipper models`. In Kubernetes it is a Service of
its own, with another token.

Names of objects begin with the name of the export, so that several fit into one namespace.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clipper.deploy.docker.image import ALIVE_FILE, TOKEN_FILE, USER, Image, write_files
from clipper.deploy.docker.program_image import HEALTHY
from clipper.deploy.kubernetes.yaml import Document, to_yaml
from clipper.deploy.packages import sdk
from clipper.deploy.processes.command import THREAD_LIMITS
from clipper.errors import InvalidInput
from clipper.settings.ports import ADMIN_PORT, HTTP_PORT
from clipper.types import VERSION, Application, InputType, Model
from clipper_container.artifacts import ArtifactUrl, is_url
from clipper_container.artifacts.url import PVC_FOLDER

PORT: Final = 7000
EXTRAS: Final = ("etcd", "grpc", "redis", "onnx", "skops")  # of the one image of all exports
NAME: Final = "clipper"
AWAY_S: Final = 5  # until all proxies know that a pod left its Service
SERVER_IMAGE: Final = f"clipper/server:{VERSION}"
REDIS_IMAGE: Final = "redis:7.4-bookworm"
_TOML: Final = "/etc/clipper/clipper.toml"
_DRAIN_S: Final = 10
_PULL_S: Final = 1800
_SHARED: Final = ("etcd", "etcds", "redis", "rediss")
_RECREATE: Final = {"type": "Recreate"}
_EXPORT: Final = "clipper/export"
_HEALTHY: Final = ["python", "-m", "clipper_container", "healthy", ALIVE_FILE]
_PART: Final = "app.kubernetes.io/component"
_LIVE: Final = [
    "python",
    "-c",
    f"import urllib.request as r; r.urlopen('http://127.0.0.1:{HTTP_PORT}/v2/health/live',"
    " timeout=2)",
]


@dataclass(frozen=True, slots=True)
class Shipment:
    """Models with their images, and applications. redis: store the state there instead of in a
    volume. store: URL of an existing Redis or etcd, which pods reach; instead of both. servers: of
    those that share a store; with a volume there is one. name: with which names of objects begin.
    """

    models: Mapping[str, tuple[Model, Image]]
    applications: tuple[Application, ...]
    redis: bool = False
    store: str = ""
    servers: int = 2
    name: str = NAME

    @property
    def is_shared(self) -> bool:
        """Return whether several servers can use the state."""
        return bool(self.redis or self.store)

    def __post_init__(self) -> None:
        check_export_name(self.name)
        if self.store:
            check_shared(self.store)
        there = {str(model.id) for model, _ in self.models.values()} | set(self.models)
        for app in self.applications:
            for link in app.models:
                if str(link) not in there:
                    hint = (
                        "One version of a model is exported. Unlink it, or link the latest:"
                        f" clipper unlink {app.name} {link}"
                    )
                    raise InvalidInput(
                        f"application {app.name!r} links '{link}', which is not exported.",
                        hint=hint,
                    )


def check_export_name(name: str) -> None:
    """Raise InvalidInput for a name with which names of objects cannot begin."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", name) and "{{" not in name:
        raise InvalidInput(
            f"--name {name[:60]!r}: a lower-case letter, then letters, digits and dashes, at most"
            " 20, as for objects of Kubernetes."
        )


def check_shared(store: str) -> None:
    """Raise InvalidInput for a URL that is not a store that several pods share."""
    kind, host = store.partition(":")[0], store.partition("://")[2].partition("/")[0]
    if kind not in _SHARED or not host:
        hint = "Name one that pods reach: etcd://etcd.default:2379/clipper."
        raise InvalidInput(
            f"{store.partition('@')[2] or store!r} is not a store that several pods share.",
            hint=hint,
        )


def write_compose(shipment: Shipment, folder: Path) -> list[str]:
    """Write the files for Compose; return their paths relative to the folder."""
    return written(
        folder,
        {**_sources(shipment, "redis"), "docker-compose.yml": to_yaml(compose(shipment))},
        _token(),
        are_mounted=True,
    )


def write_kubernetes(shipment: Shipment, folder: Path) -> list[str]:
    """Write a base for Kustomize; return the paths relative to the folder."""
    files = {name: to_yaml(*documents) for name, documents in kubernetes(shipment).items()}
    sources = _sources(shipment, f"{shipment.name}-redis", admin=f"0.0.0.0:{ADMIN_PORT}")
    own = {**_token(), "admin_token": secrets.token_urlsafe(24)}
    if shipment.store:
        (folder / "secrets" / "store_url").unlink(missing_ok=True)
        own["store_url"] = shipment.store
    return written(folder, {**sources, **files}, own)


def _token() -> dict[str, str]:
    return {"clipper_token": secrets.token_urlsafe(24)}


def written(
    folder: Path,
    files: Mapping[str, str | bytes],
    secret: Mapping[str, str],
    *,
    are_mounted: bool = False,
) -> list[str]:
    """Write all files; return their paths relative to the folder.

    secret: values for the folder secrets/, which only its owner can read. An existing value stays,
    since a new token would lock out running containers. are_mounted: containers read the files
    themselves, as other users; only the folder is the owner's.
    """
    write_files(folder, files)
    (folder / "secrets").mkdir(mode=0o700, exist_ok=True)
    (folder / "secrets").chmod(0o700)
    for name, content in secret.items():
        path = folder / "secrets" / name
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(content)
        path.chmod(0o444 if are_mounted else 0o600)
    (folder / ".gitignore").write_text("secrets/\n")
    return sorted([*files, *(f"secrets/{name}" for name in secret), ".gitignore"])


def _sources(
    shipment: Shipment, redis: str, admin: str = f"127.0.0.1:{ADMIN_PORT}"
) -> dict[str, str | bytes]:
    """Return the server's settings and the build contexts."""
    return {"clipper.toml": server_toml(shipment, redis, admin), **build_contexts(shipment.models)}


def build_contexts(
    models: Mapping[str, tuple[Model, Image]], folder: str = ""
) -> dict[str, str | bytes]:
    """Return the files from which the images of the server and of models are built.

    folder: where they are, with a slash at the end.
    """
    found: dict[str, str | bytes] = {
        f"{folder}server/Dockerfile": server_dockerfile(EXTRAS),
        f"{folder}server/wheels/{sdk.WHEEL}": sdk.wheel(),
    }
    for name, (_, image) in models.items():
        found |= {f"{folder}models/{name}/{path}": data for path, data in image.files.items()}
    return found


def server_dockerfile(extras: Sequence[str]) -> str:
    """Return the Dockerfile of the server's image, with extras of the package."""
    some = f"[{','.join(extras)}]" if extras else ""
    what = f'"clipper-serving{some}=={VERSION}"'
    return f"""\
# The clipper server. Where no index has clipper-serving, put the wheels of `make wheels` here:
#   cp PATH-OF-THE-CHECKOUT/dist/*.whl server/wheels/
ARG BASE=python:3.11-slim-bookworm

FROM ${{BASE}} AS packages
COPY wheels/ /tmp/wheels/
RUN python -m venv /opt/server \\
 && /opt/server/bin/python -m pip install --no-cache-dir --disable-pip-version-check --find-links /tmp/wheels {what}

FROM ${{BASE}}
ENV PATH=/opt/server/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
COPY --from=packages /opt/server /opt/server
RUN python -c "import os; os.mkdir('/state'); os.chown('/state', {USER}, {USER})"
WORKDIR /tmp
USER {USER}:{USER}
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD {json.dumps(_LIVE)}
ENTRYPOINT ["clipper"]
CMD ["up", "{_TOML}"]
"""  # noqa: E501


# -- the server's settings


def server_toml(shipment: Shipment, redis: str, admin: str = f"127.0.0.1:{ADMIN_PORT}") -> str:
    """Return the configuration file of the server in its container. The URL of an existing store is
    in a secret."""
    server = {
        "state": f"redis://{redis}:6379/0"
        if shipment.redis
        else ""
        if shipment.store
        else "/state",
        **({"folder": "/state"} if shipment.is_shared else {}),
        "drain_s": float(_DRAIN_S),
        "address": f"tcp://0.0.0.0:{PORT}",
        "token_file": TOKEN_FILE,
    }
    note = "# Models have no target: each runs in containers of its own, which dial in.\n"
    parts = [note, toml_table(("server",), server), logging_toml(), http_toml(admin)]
    parts += [
        toml_table(("models", name), _model_table(model))
        for name, (model, _) in shipment.models.items()
    ]
    parts += [toml_table(("apps", app.name), _app_table(app)) for app in shipment.applications]
    return "".join(parts)


def _model_table(model: Model) -> Document:
    return {
        "version": model.version,
        "replicas": max(model.replicas, 1),
        "input": _typed(model.input),
        "output": "" if model.output == "any" else model.output,
        "cache": model.cache,
        "retry_singly": model.retry_singly,
    }


def _app_table(app: Application) -> Document:
    return {
        "models": [str(link) for link in app.models],
        "slo_ms": app.slo_ms,
        "default": app.default,
        "input": _typed(app.input),
        "policy": app.policy,
        "decider": app.decider,
        "confidence_min": app.confidence_min,
        "missing": app.missing,
        "roles": [f"{model} = {role}" for model, role in app.roles.items()],
        "coverage": app.coverage,
        "context_table": app.context_table,
        "output": app.output,
    }


def _typed(input: InputType) -> str:
    return "" if str(input) == "any" else str(input)


def http_toml(admin: str) -> str:
    """Return the [http] section of a pod's configuration. admin: address of management."""
    settings = {
        "address": f"0.0.0.0:{HTTP_PORT}",
        "admin": admin,
        "metrics": True,
        "insecure": True,
    }
    note = (
        "# insecure: anyone who reaches the port may query. With http.api_keys_file only holders"
        " of a key may.\n"
    )
    return note + toml_table(("http",), settings)


def logging_toml() -> str:
    """Return the section [logging] of servers in containers, whose lines programs read."""
    return toml_table(("logging",), {"format": "json"})


def toml_table(at: tuple[str, ...], values: Mapping[str, object]) -> str:
    """Format a TOML table."""
    name = ".".join(
        part if re.fullmatch(r"[\w-]+", part, re.ASCII) else json.dumps(part) for part in at
    )
    given = {key: value for key, value in values.items() if value not in (None, "", [])}
    try:
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in given.items()
        ]
    except TypeError:
        raise InvalidInput(
            f"[{name}] holds bytes, which a settings file cannot hold.",
            hint="Give it another default.",
        ) from None
    return f"[{name}]\n{''.join(lines)}\n"


# -- Docker Compose


_CONFINED: Final[Document] = {
    "read_only": True,
    "tmpfs": ["/tmp"],
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
}


def compose(shipment: Shipment) -> Document:
    """Return the contents of docker-compose.yml."""
    services = {"server": _compose_server(shipment)}
    for name, (model, image) in shipment.models.items():
        services[f"model-{label_of(name)}"] = _compose_model(name, model, image)
    volumes: Document = {"state": {}}
    if shipment.redis:
        keeps = ["redis-server", "--appendonly", "yes", "--appendfsync", "always"]
        services["redis"] = {
            "image": REDIS_IMAGE,
            "command": keeps,
            "volumes": ["redis:/data"],
            "networks": ["models"],
            "restart": "unless-stopped",
        }
        volumes["redis"] = {}
    return {
        "name": "clipper",
        "services": services,
        "networks": {"queries": {}, "models": {"internal": True}},
        "volumes": volumes,
        "secrets": {"clipper_token": {"file": "./secrets/clipper_token"}},
    }


def _compose_server(shipment: Shipment) -> Document:
    return {
        "image": SERVER_IMAGE,
        "build": "./server",
        "ports": [f"127.0.0.1:{HTTP_PORT}:{HTTP_PORT}"],
        "networks": ["queries", "models"],
        "volumes": [f"./clipper.toml:{_TOML}:ro", "state:/state"],
        "secrets": ["clipper_token"],
        **_CONFINED,
        "stop_grace_period": "30s",
        "restart": "unless-stopped",
        **({"depends_on": ["redis"]} if shipment.redis else {}),
    }


def _compose_model(name: str, model: Model, image: Image) -> Document:
    limits: Document = {"memory": f"{model.memory_mib}M"} if model.memory_mib else {}
    limits |= {"cpus": f"{model.cpus:g}"} if model.cpus else {}
    resources: Document = {"limits": limits} if limits else {}
    if model.gpus:
        resources["reservations"] = {
            "devices": [{"driver": "nvidia", "capabilities": ["gpu"], **_devices(model.gpus)}]
        }
    variables = {**model.env, **(_of_a_program(model, "server") if model.command else {})}
    connect = ["--connect", f"tcp:server:{PORT}"]
    return {
        "image": image.name,
        "build": f"./models/{name}",
        **({"environment": variables} if variables else {}),
        **({} if model.command else {"command": [*connect, "--threads", str(_threads(model))]}),
        "networks": ["models"],
        "secrets": ["clipper_token"],
        **_CONFINED,
        "deploy": {
            "replicas": max(model.replicas, 1),
            **({"resources": resources} if resources else {}),
        },
        "depends_on": ["server"],
        "restart": "unless-stopped",
    }


def _devices(gpus: str) -> Document:
    if gpus == "all":
        return {"count": "all"}
    return (
        {"count": int(gpus)}
        if gpus.isdecimal()
        else {"device_ids": [one.strip() for one in gpus.split(",")]}
    )


def _threads(model: Model) -> int:
    return max(1, int(model.cpus))


def _of_a_program(model: Model, host: str, **more: str) -> dict[str, str]:
    """Return environment variables of the container of a program; its image has the others."""
    threads = dict.fromkeys(THREAD_LIMITS, str(_threads(model)))
    return {"CLIPPER_ADDRESS": f"tcp:{host}:{PORT}", **more, **threads}


def label_of(name: str) -> str:
    """Convert a name to a DNS label."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]


# -- Kubernetes


def kubernetes(shipment: Shipment) -> dict[str, list[Document]]:
    """Return the documents of each file of the base."""
    name = shipment.name
    files = {"server.yaml": list(_server_objects(shipment)), "network.yaml": [_network(shipment)]}
    if shipment.redis:
        files["redis.yaml"] = list(redis_objects(f"{name}-redis"))
    for model, (record, image) in shipment.models.items():
        files[f"model-{label_of(model)}.yaml"] = list(model_objects(name, model, record, image))
    secret = ["secrets/clipper_token", "secrets/admin_token"]
    stores = [{"name": f"{name}-store", "files": ["url=secrets/store_url"]}]
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*files],
        "configMapGenerator": [{"name": f"{name}-settings", "files": ["clipper.toml"]}],
        "secretGenerator": [
            {"name": f"{name}-token", "files": secret},
            *(stores if shipment.store else ()),
        ],
    }
    return {"kustomization.yaml": [base], **files}


def mine(name: str) -> dict[str, str]:
    """Return the labels of a component."""
    return {"app.kubernetes.io/name": "clipper", "app.kubernetes.io/instance": name}


def meta_of(name: str, part: str, **more: object) -> Document:
    """Return the metadata of an object."""
    return {"name": name, "labels": {**mine(name), _PART: part}, **more}


def pod(
    containers: list[Document], volumes: list[Document], grace_s: int, user: int = USER
) -> Document:
    """Return a pod specification with restricted rights."""
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": containers,
        "volumes": [*volumes, {"name": "tmp", "emptyDir": {}}],
    }


CONFINED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def _token_volume(name: str) -> Document:
    one = [{"key": "clipper_token", "path": "clipper_token"}]
    secret = {"secretName": f"{name}-token", "defaultMode": 0o440, "items": one}
    return {"name": "token", "secret": secret}


_TOKEN_MOUNT: Final = {"name": "token", "mountPath": str(Path(TOKEN_FILE).parent), "readOnly": True}
TMP_MOUNT: Final = {"name": "tmp", "mountPath": "/tmp"}


def probe(action: Mapping[str, object], period_s: int, failures: int) -> Document:
    """Return a probe."""
    return {**action, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


def deployment(meta: Document, replicas: int | None, pod: Document, strategy: Document) -> Document:
    """Return a Deployment."""
    name = meta["name"]
    template = {"metadata": _labels_of(meta), "spec": pod}
    spec = {"selector": {"matchLabels": mine(name)}, "strategy": strategy, "template": template}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": spec if replicas is None else {"replicas": replicas, **spec},
    }


def _labels_of(meta: Mapping[str, object]) -> Document:
    return {key: value for key, value in meta.items() if key in ("labels", "annotations")}


def service(name: str, of: str, ports: Mapping[str, int], **more: object) -> Document:
    """Return a Service."""
    listed = [{"name": port, "port": number, "targetPort": port} for port, number in ports.items()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta_of(name, "server"),
        "spec": {"selector": mine(of), "ports": listed, **more},
    }


def budget(name: str, part: str) -> Document:
    """Return a PodDisruptionBudget."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta_of(name, part),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": mine(name)}},
    }


def spread(name: str) -> list[Document]:
    """Return constraints that spread a component over zones and machines."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": mine(name)},
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]


ONE_AT_A_TIME: Final = {  # after its successor is ready
    "type": "RollingUpdate",
    "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
}


def _server_objects(shipment: Shipment) -> Iterator[Document]:
    export, name = shipment.name, f"{shipment.name}-server"
    state = f"{export}-state"
    volumes = [
        {"name": "settings", "configMap": {"name": f"{export}-settings"}},
        _token_volume(export),
        {"name": "state", "emptyDir": {}}
        if shipment.is_shared
        else {"name": "state", "persistentVolumeClaim": {"claimName": state}},
    ]
    spec = pod([_server_container(shipment)], volumes, AWAY_S + _DRAIN_S + 15)
    spec["topologySpreadConstraints"] = spread(name)
    count, how = (shipment.servers, ONE_AT_A_TIME) if shipment.is_shared else (1, _RECREATE)
    yield deployment(meta_of(name, "server"), count, spec, how)
    yield service(export, name, {"http": HTTP_PORT})
    yield service(f"{export}-admin", name, {"admin": ADMIN_PORT})
    # Publish pods that are not ready: models connect before the server is ready. Models connect to
    # every address of this name.
    yield service(
        f"{export}-models", name, {"models": PORT}, clusterIP="None", publishNotReadyAddresses=True
    )
    if not shipment.is_shared:
        yield _claim(state, "server")
    yield budget(name, "server")


def _server_container(shipment: Shipment) -> Document:
    live, ready = (
        {"httpGet": {"path": f"/v2/health/{one}", "port": "http"}} for one in ("live", "ready")
    )
    env = [from_secret("CLIPPER_HTTP__TOKEN", f"{shipment.name}-token", "admin_token")]
    if shipment.store:
        env.append(from_secret("CLIPPER_SERVER__STATE", f"{shipment.name}-store", "url"))
    return {
        "name": "server",
        "image": SERVER_IMAGE,
        "args": ["up", _TOML],
        "env": env,
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT},
            {"name": "admin", "containerPort": ADMIN_PORT},
            {"name": "models", "containerPort": PORT},
        ],
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "startupProbe": probe(live, 2, 60),
        "livenessProbe": probe(live, 10, 3),
        "readinessProbe": probe(ready, 2, 2),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(AWAY_S)]}}},
        "securityContext": CONFINED,
        "volumeMounts": [
            {"name": "settings", "mountPath": "/etc/clipper", "readOnly": True},
            _TOKEN_MOUNT,
            {"name": "state", "mountPath": "/state"},
            TMP_MOUNT,
        ],
    }


def from_secret(variable: str, name: str, key: str) -> Document:
    """Return an environment variable whose value is in a secret."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _network(shipment: Shipment) -> Document:
    """Return the network policy of the servers: queries from anywhere; models, which use a token
    without TLS, from pods of models; management from pods that are labelled so."""
    models = {"podSelector": {"matchLabels": {_PART: "model", _EXPORT: shipment.name}}}
    admins = {"podSelector": {"matchLabels": {f"{shipment.name}/admin": "client"}}}
    allowed = [
        {"ports": [{"port": HTTP_PORT, "protocol": "TCP"}]},
        {"from": [models], "ports": [{"port": PORT, "protocol": "TCP"}]},
        {"from": [admins], "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}]},
    ]
    spec = {
        "podSelector": {"matchLabels": mine(f"{shipment.name}-server")},
        "policyTypes": ["Ingress"],
        "ingress": allowed,
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta_of(f"{shipment.name}-server", "server"),
        "spec": spec,
    }


def _claim(name: str, part: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta_of(name, part),
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}},
    }


def redis_objects(name: str) -> Iterator[Document]:
    """Yield the objects of a Redis on a volume."""
    alive = {"tcpSocket": {"port": "redis"}}
    container = {
        "name": "redis",
        "image": REDIS_IMAGE,
        "args": ["--appendonly", "yes", "--appendfsync", "always"],
        "ports": [{"name": "redis", "containerPort": 6379}],
        "securityContext": CONFINED,
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "livenessProbe": probe(alive, 10, 3),
        "readinessProbe": probe(alive, 5, 2),
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, TMP_MOUNT],
    }
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]
    yield deployment(meta_of(name, "redis"), 1, pod([container], volumes, 30, user=999), _RECREATE)
    yield service(name, name, {"redis": 6379})
    yield _claim(name, "redis")


def _pulling(export: str, target: str, container: Document) -> list[Document]:
    """Let a container pull its model: with the credentials of a Secret, or from the volume of a
    claim, which is returned.
    """
    url = ArtifactUrl.parse(target)
    if url.scheme == "pvc":
        mount = {"name": "artifact", "mountPath": f"{PVC_FOLDER}/{url.place}", "readOnly": True}
        container["volumeMounts"] = [*container["volumeMounts"], mount]
        claim = {"claimName": url.place, "readOnly": True}
        return [{"name": "artifact", "persistentVolumeClaim": claim}]
    container["envFrom"] = [{"secretRef": {"name": f"{export}-artifacts", "optional": True}}]
    pull = {"name": "CLIPPER_ARTIFACTS__PULL_S", "value": str(_PULL_S)}
    container["env"] = [*container.get("env", ()), pull]
    healthy = {"exec": {"command": _HEALTHY}}
    container["startupProbe"] = probe(healthy, 5, 60 + _PULL_S // 5)
    return []


def model_objects(export: str, name: str, model: Model, image: Image) -> Iterator[Document]:
    """Yield the objects of a model, which connects to all servers of the export."""
    called = f"{export}-model-{label_of(name)}"
    memory = f"{model.memory_mib or 1024}Mi"
    resources: Document = {
        "requests": {"cpu": f"{model.cpus or 1:g}", "memory": f"{model.memory_mib or 256}Mi"},
        "limits": {"memory": memory},
    }
    if model.gpus:
        count = (
            int(model.gpus)
            if model.gpus.isdecimal()
            else 1
            if model.gpus == "all"
            else len(model.gpus.split(","))
        )
        resources["limits"]["nvidia.com/gpu"] = count
    healthy = {"exec": {"command": [*HEALTHY] if model.command else _HEALTHY}}
    host = f"{export}-models"
    own = _of_a_program(model, host, CLIPPER_ALL_SERVERS="1") if model.command else {}
    variables = [{"name": key, "value": value} for key, value in {**model.env, **own}.items()]
    container = {
        "name": "model",
        "image": image.name,
        **({"env": variables} if variables else {}),
        **(
            {}
            if model.command
            else {
                "args": [
                    "--connect",
                    f"tcp:{host}:{PORT}",
                    "--all-servers",
                    "--threads",
                    str(_threads(model)),
                ]
            }
        ),
        "resources": resources,
        "securityContext": CONFINED,
        "startupProbe": probe(healthy, 5, 60),
        "livenessProbe": probe(healthy, 20, 6),
        "readinessProbe": probe(healthy, 10, 2),
        "volumeMounts": [_TOKEN_MOUNT, TMP_MOUNT],
    }
    volumes = [_token_volume(export)]
    if not model.command and is_url(model.target):
        volumes += _pulling(export, model.target, container)
    meta = meta_of(called, "model", annotations={"clipper/model": str(model.id)})
    meta["labels"] |= {_EXPORT: export}
    few, many = max(model.replicas, 1), model.replicas_max
    spec = pod([container], volumes, 30)
    spec["topologySpreadConstraints"] = spread(called)
    yield deployment(meta, None if many else few, spec, ONE_AT_A_TIME)
    if few > 1:
        yield budget(called, "model")
    if many:
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": called}
        busy = {
            "type": "Resource",
            "resource": {
                "name": "cpu",
                "target": {"type": "Utilization", "averageUtilization": 70},
            },
        }
        yield {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": meta_of(called, "model"),
            "spec": {
                "scaleTargetRef": target,
                "minReplicas": few,
                "maxReplicas": many,
                "metrics": [busy],
            },
        }
