"""Servers and their models for Docker Compose. Management stays inside the server's container:
`docker compose exec server clipper models`."""

from pathlib import Path
from typing import Final

from clipper.deploy.docker.image import Image
from clipper.deploy.kubernetes.helm import CHART, label_of, threads_of
from clipper.deploy.kubernetes.images import SERVER_IMAGE, build_contexts
from clipper.deploy.kubernetes.secret_files import new_token, written
from clipper.deploy.kubernetes.shipment import Shipment
from clipper.deploy.processes.command import THREAD_LIMITS
from clipper.settings.ports import ADMIN_PORT, HTTP_PORT
from clipper.types import Model
from clipper.yaml_text import Document, to_yaml

_PORT: Final = 7000
_CONFINED: Final[Document] = {
    "read_only": True,
    "tmpfs": ["/tmp"],
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
}


def write_compose(shipment: Shipment, folder: Path) -> list[str]:
    """Write the files for Compose; return their paths relative to the folder."""
    files = {
        "clipper.toml": f"{(CHART / 'files/server.toml').read_text()}\n{shipment.settings()}",
        **build_contexts(shipment.models),
        "docker-compose.yml": to_yaml(compose(shipment)),
    }
    return written(folder, files, {"clipper_token": new_token()}, are_mounted=True)


def compose(shipment: Shipment) -> Document:
    """Return the contents of docker-compose.yml."""
    services = {"server": _server(shipment)}
    for name, (model, image) in shipment.models.items():
        services[f"model-{label_of(name)}"] = _model(name, model, image)
    volumes: Document = {"state": {}}
    if shipment.redis:
        keeps = ["redis-server", "--appendonly", "yes", "--appendfsync", "always"]
        services["redis"] = {
            "image": "redis:7.4-bookworm",
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


def _server(shipment: Shipment) -> Document:
    state = {"CLIPPER_SERVER__STATE": "/state"}
    if shipment.redis:
        state = {
            "CLIPPER_SERVER__STATE": "redis://redis:6379/0",
            "CLIPPER_SERVER__FOLDER": "/state",
        }
    return {
        "image": SERVER_IMAGE,
        "build": "./server",
        "environment": {**state, "CLIPPER_HTTP__ADMIN": f"127.0.0.1:{ADMIN_PORT}"},
        "ports": [f"127.0.0.1:{HTTP_PORT}:{HTTP_PORT}"],
        "networks": ["queries", "models"],
        "volumes": ["./clipper.toml:/etc/clipper/clipper.toml:ro", "state:/state"],
        "secrets": ["clipper_token"],
        **_CONFINED,
        "stop_grace_period": "30s",
        "restart": "unless-stopped",
        **({"depends_on": ["redis"]} if shipment.redis else {}),
    }


def _model(name: str, model: Model, image: Image) -> Document:
    limits: Document = {"memory": f"{model.memory_mib}M"} if model.memory_mib else {}
    limits |= {"cpus": f"{model.cpus:g}"} if model.cpus else {}
    resources: Document = {"limits": limits} if limits else {}
    if model.gpus:
        resources["reservations"] = {
            "devices": [{"driver": "nvidia", "capabilities": ["gpu"], **_devices(model.gpus)}]
        }
    threads = f"{threads_of(model)}"
    address = f"tcp:server:{_PORT}"
    variables = dict(model.env)
    if model.command:
        variables |= {"CLIPPER_ADDRESS": address, **dict.fromkeys(THREAD_LIMITS, threads)}
    return {
        "image": image.name,
        "build": f"./models/{name}",
        **({"environment": variables} if variables else {}),
        **({} if model.command else {"command": ["--connect", address, "--threads", threads]}),
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
