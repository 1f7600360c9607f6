"""The chart for Helm in the folder chart/: what is exported are its values.

`write_chart` copies it beside them. `write_base` has Helm render it, as a base for Kustomize.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Traversable
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from clipper.deploy.docker.image import Image, write_files
from clipper.deploy.kubernetes.secret_files import token_of, written
from clipper.deploy.kubernetes.shipment import Shipment
from clipper.deploy.processes.command import THREAD_LIMITS
from clipper.errors import InvalidInput, PackagingError
from clipper.settings.params import LOG_FULL, ParamsSettings, grpc_address
from clipper.types import Model, UserValue
from clipper.yaml_text import to_yaml
from clipper_container.artifacts import ArtifactUrl, is_url

CHART: Final = files("clipper.deploy.kubernetes") / "chart"
_SOURCE: Final = re.compile(r"^---\n# Source: clipper/templates/(\S+)\n", re.MULTILINE)
_GIB: Final = 1024
RENDER_S: Final = 120
Values = dict[str, UserValue]


# -- values


def server_values(shipment: Shipment) -> Values:
    """Return the values of servers and their models."""
    models = {name: _model_values(model, image) for name, (model, image) in shipment.models.items()}
    return {"servers": {"settings": shipment.settings()}, "models": models}


def _model_values(model: Model, image: Image) -> Values:
    found = {
        "image": image.name,
        "version": model.version,
        "replicas": max(model.replicas, 1),
        "maxReplicas": model.replicas_max,
        "memoryMib": model.memory_mib,
        "cpus": model.cpus,
        "gpus": _gpus(model.gpus),
        "environment": model.env,
    }
    if model.command:
        limits = dict.fromkeys(THREAD_LIMITS, f"{threads_of(model)}")
        found |= {"program": True, "environment": {**model.env, **limits}}
    elif is_url(model.target):
        url = ArtifactUrl.parse(model.target)
        found |= {"claim": url.place} if url.scheme == "pvc" else {"pulls": True}
    return {name: value for name, value in found.items() if value}


def _gpus(stated: str) -> int:
    if stated.isdecimal():
        return int(stated)
    return len(stated.split(",")) if stated else 0


def threads_of(model: Model) -> int:
    """Return the number of threads of each of its containers."""
    return max(1, int(model.cpus))


def label_of(name: str) -> str:
    """Convert a name to a DNS label."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]


def shard_values(
    settings: ParamsSettings, memory_mib: int = 4096, storage_gib: int = 0, together: bool = False
) -> Values:
    """Return the values of a set of shards. storage_gib: of a volume; 0: as its memory needs."""
    if settings.replicas >= settings.shards:
        raise InvalidInput(
            f"{settings.replicas} replicas of each of {settings.shards} shards: they are in other"
            " shards."
        )
    certificates = settings.tls_cert, settings.grpc_tls_cert
    if any((*certificates, settings.grpc_keys_file, settings.tokens_file)):
        raise InvalidInput(
            "what is exported holds neither certificates nor keys, and params.tls_cert,"
            " grpc_tls_cert, grpc_keys_file or tokens_file is set.",
            hint="Leave them out, and let the cluster encrypt between pods.",
        )
    found = msgspec.to_builtins(settings)
    for of_the_chart in ("shards", "folder", "token", "grpc"):
        del found[of_the_chart]
    port = grpc_address(settings, 0).rpartition(":")[2] if settings.grpc else "0"
    return {
        "enabled": True,
        "count": settings.shards,
        "memoryMib": memory_mib,
        "storageGib": storage_gib or volume_gib(settings, memory_mib),
        "together": together,
        "grpcPort": int(port),
        "settings": found,
    }


def volume_gib(settings: ParamsSettings, memory_mib: int) -> int:
    """Return the size of the volume that holds the retained snapshots of a full shard."""
    whole = -(-memory_mib // _GIB)
    logs = LOG_FULL * settings.log_bytes_max if settings.durability == "disk" else 0
    return whole * (settings.snapshots_max + 2) - (-logs >> 30)


# -- files


def chart_files() -> dict[str, str | bytes]:
    """Return the files of the chart: those of its folder, and what its monitoring shows."""
    from clipper.metrics.grafana import dashboard

    return {
        **dict(_below(CHART, "")),
        "files/alerts.yml": (files("clipper.metrics") / "alerts.yml").read_text(),
        "files/dashboard.json": json.dumps(dashboard(), indent=1),
    }


def _below(folder: Traversable, at: str) -> Iterator[tuple[str, bytes]]:
    for one in folder.iterdir():
        if one.is_dir():
            yield from _below(one, f"{at}{one.name}/")
        else:
            yield f"{at}{one.name}", one.read_bytes()


def write_chart(values: Values, images: Mapping[str, str | bytes], folder: Path) -> list[str]:
    """Write the chart, values.json and what its images are built from; return their paths."""
    found = {**chart_files(), "values.json": json.dumps(values, indent=1) + "\n", **images}
    write_files(folder, found)
    return sorted(found)


def rendered(values: Values, name: str, sets: Sequence[str] = ()) -> dict[str, str]:
    """Return what Helm makes of the chart, by template. sets: as of `helm template --set`.

    Raises: PackagingError if there is no Helm, or with what it says of the values.
    """
    program = _program()
    with tempfile.TemporaryDirectory(prefix="clipper-chart-") as place:
        write_files(Path(place), chart_files())
        words = [*program, "template", name, place, "--values", "-"]
        words += [word for one in sets for word in ("--set", one)]
        text = json.dumps(values)
        try:
            done = subprocess.run(
                words, input=text, capture_output=True, text=True, timeout=RENDER_S, check=True
            )
        except subprocess.CalledProcessError as error:
            raise PackagingError(f"helm: {error.stderr.strip().removeprefix('Error: ')}") from None
        except subprocess.TimeoutExpired:
            raise PackagingError(f"helm has not rendered the chart in {RENDER_S} s.") from None
    _, *parts = _SOURCE.split(done.stdout)
    found: dict[str, str] = {}
    for template, document in zip(parts[::2], parts[1::2], strict=True):
        before = found.get(template, "")
        found[template] = f"{before}---\n{document}"
    return found


def _program() -> list[str]:
    """Return the command of Helm: the program `helm`, or else its engine as a library. Raises:
    PackagingError if there is neither."""
    if (helm := shutil.which("helm")) is not None:
        return [helm]
    if importlib.util.find_spec("helm_python") is not None:
        return [sys.executable, "-P", "-m", "clipper.deploy.kubernetes.helm_template"]
    raise PackagingError(
        "there is no `helm` on PATH, which renders manifests, nor its engine as a package.",
        hint='pip install "clipper-serving[helm]", or https://helm.sh/docs/intro/install. Or, for'
        " another machine that has it: clipper export chart FOLDER",
    )


def write_base(
    values: Values,
    images: Mapping[str, str | bytes],
    folder: Path,
    name: str,
    sets: Sequence[str] = (),
    token: str = "",
) -> list[str]:
    """Write what Helm makes of the chart as a base for Kustomize; return the paths relative to the
    folder.

    Tokens are made once, and stay. token: of connections of models and shards, if it is given.
    """
    tokens = {
        "models": token or token_of(folder, "clipper_token"),
        "admin": token_of(folder, "admin_token"),
    }
    found = rendered({**values, "tokens": tokens}, name, sets)
    secret = {
        "secrets.yaml": found.pop("secrets.yaml"),
        "clipper_token": tokens["models"],
        "admin_token": tokens["admin"],
    }
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*sorted(found), "secrets/secrets.yaml"],
    }
    shown = {
        "kustomization.yaml": to_yaml(base),
        "prometheus-adapter.yaml": (CHART / "files/prometheus-adapter.yaml").read_text(),
    }
    for changed in ("secrets.yaml", "clipper_token"):
        (folder / "secrets" / changed).unlink(missing_ok=True)
    return written(folder, {**images, **shown, **found}, secret)
