"""Servers with their models, as they are exported: checks, and the tables of their settings file.

Every model is in containers of its own. It connects to the servers over TCP with a token from a
secret; nothing connects to the models.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from clipper.deploy.docker.image import Image
from clipper.errors import InvalidInput
from clipper.spec.application import ApplicationSpec
from clipper.spec.field import fields
from clipper.spec.model import ModelSpec
from clipper.types import Application, Batching, InputType, Model, UserValue

# Fields of a model that its image or its containers have, and not the servers; and what needs
# tables, which exported servers have not.
_LEFT_OUT: Final = frozenset(
    (
        *("target", "command", "folder", "data", "kind", "trusted", "sha256", "code", "env"),
        *("replicas_max", "inputs", "outputs", "schema", "tables", "warmup", "requirements"),
        *("python", "deployer", "memory_mib", "cpus", "gpus", "reads", "tolerance"),
    )
)
_SHARED: Final = ("etcd", "etcds", "redis", "rediss")


@dataclass(frozen=True, slots=True)
class Shipment:
    """Models with their images, and applications. redis: store the state in a Redis that is
    exported too, instead of in a volume."""

    models: Mapping[str, tuple[Model, Image]]
    applications: tuple[Application, ...]
    redis: bool = False

    def __post_init__(self) -> None:
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

    def settings(self) -> str:
        """Return the tables of models and applications of the servers' settings file."""
        models = [
            toml_table(("models", name), _model_table(model))
            for name, (model, _) in self.models.items()
        ]
        apps = [toml_table(("apps", app.name), _app_table(app)) for app in self.applications]
        return "".join([*models, *apps])


def check_export_name(name: str) -> None:
    """Raise InvalidInput for a name with which names of objects cannot begin."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", name):
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


def _model_table(model: Model) -> dict[str, UserValue]:
    """Return what differs from the defaults; a version and replicas are always stated."""
    stated = {
        one.name: _plain(value)
        for one in fields(ModelSpec)
        if one.name not in _LEFT_OUT and (value := getattr(model, one.name)) != one.default
    }
    return {**stated, "version": model.version, "replicas": max(model.replicas, 1)}


def _app_table(app: Application) -> dict[str, UserValue]:
    table = {one.name: _plain(getattr(app, one.name)) for one in fields(ApplicationSpec)}
    roles = [f"{model} = {role}" for model, role in app.roles.items()]
    return {**table, "models": [str(link) for link in app.models], "roles": roles}


def _plain(value: UserValue) -> UserValue:
    """Return a value as a settings file states it."""
    if isinstance(value, InputType):
        return "" if str(value) == "any" else str(value)
    if isinstance(value, Batching):
        default = msgspec.structs.asdict(Batching())
        every = msgspec.structs.asdict(value).items()
        return {name: one for name, one in every if one != default[name]}
    return "" if value == "any" else msgspec.to_builtins(value, builtin_types=(bytes,))


def toml_table(at: tuple[str, ...], values: Mapping[str, UserValue]) -> str:
    """Format a TOML table. Values that are empty are left out."""
    name = ".".join(map(_key, at))
    given = {key: value for key, value in values.items() if value not in (None, "", [], {})}
    try:
        lines = [f"{key} = {_toml(value)}\n" for key, value in given.items()]
    except TypeError:
        raise InvalidInput(
            f"[{name}] holds bytes, which a settings file cannot hold.",
            hint="Give it another default.",
        ) from None
    return f"[{name}]\n{''.join(lines)}\n"


def _key(part: str) -> str:
    return part if re.fullmatch(r"[\w-]+", part, re.ASCII) else json.dumps(part)


def _toml(value: UserValue) -> str:
    if not isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    pairs = ", ".join(f"{_key(key)} = {_toml(one)}" for key, one in value.items())
    return f"{{ {pairs} }}"
