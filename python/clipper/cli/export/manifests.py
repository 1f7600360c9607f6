"""`clipper export dockerfile`, `compose` and `k8s`: images and manifests of models."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from clipper.cli.amounts import Size
from clipper.cli.command_group import with_options
from clipper.cli.server_command import ServerCommand, with_server
from clipper.errors import InvalidInput, UnknownModel, UnknownVersion
from clipper.manage.moving import ExportedState, applications_of, read
from clipper.types import Application, InputType, Model, UserValue, VersionedModel

if TYPE_CHECKING:
    from clipper.deploy.kubernetes.shipment import Shipment


_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
_FROM = click.option(
    "--from",
    "file",
    metavar="FILE",
    type=_FILE,
    help="Export what a TOML file declares.  [what the server runs]",
)


@click.command(short_help="Write the image of a model.")
@click.argument("model", metavar="NAME[:VERSION]")
@click.argument(
    "folder", metavar="[FOLDER]", required=False, type=click.Path(file_okay=False, path_type=Path)
)
@click.option(
    "--base",
    metavar="IMAGE",
    default="",
    help="Python base image.  [python:VERSION-slim-bookworm]",
)
@_FROM
@with_server
def dockerfile(
    command: ServerCommand, model: str, folder: Path | None, base: str, file: Path | None
) -> None:
    """Print the Dockerfile of a model, or write it into FOLDER with all that it is built from.

    Packages are pinned to what is installed here. The image holds no secret: its container reads
    the token from a file.

    \b
    clipper export dockerfile svm
    clipper export dockerfile svm:3 svm-image && docker build -t svm:3 svm-image
    clipper export dockerfile svm --from clipper.toml
    """
    from clipper.deploy.docker.program_image import image_of_model

    with tempfile.TemporaryDirectory(prefix="clipper-image-") as place:
        if file is None:
            state = read(command.server.export_state())
            found = placed(chosen(state.models, state.latest, model), state, Path(place))
        else:
            models, _, _ = _declared(file, Path(place), redis=False, pulls=False)
            found = chosen(models, {}, model)
        image = image_of_model(found, base)
    if folder is None:
        click.echo(image.dockerfile, nl=False)
        return
    image.write(folder)
    summary = {"folder": str(folder), "image": image.name, "files": sorted(image.files)}
    command.output.show(
        summary,
        lambda: (
            f"wrote {len(image.files)} files to {folder}\nbuild it: docker build -t {image.name}"
            f" {folder}"
        ),
    )


def chosen(models: Sequence[Model], latest: Mapping[str, int], name: str) -> Model:
    """Return the version of that name, or the latest. Raises: UnknownModel, UnknownVersion."""
    wanted = VersionedModel.parse(name)
    versions = {model.version: model for model in models if model.name == wanted.name}
    if not versions:
        raise UnknownModel.named(wanted.name, {model.name for model in models})
    version = wanted.version or latest.get(wanted.name) or max(versions)
    if version not in versions:
        raise UnknownVersion.named(name, [str(model.id) for model in versions.values()])
    return versions[version]


def placed(model: Model, state: ExportedState, folder: Path) -> Model:
    """Copy the model's file to this host."""
    name = Path(model.target).name
    if not model.sha256 or name not in state.files:
        return model
    (folder / name).write_bytes(state.files[name])
    return msgspec.structs.replace(model, target=str(folder / name))


_BASE = click.option("--base", metavar="IMAGE", default="", help="Python base image of the models.")
_SERVERS = click.option(
    "--servers", type=click.IntRange(1), default=2, show_default=True, help="Number of servers."
)
_SETS = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="VALUE=...",
    help="Set a value of the chart, as for Helm; may be repeated.",
)
_PUSH = "docker build {0}/server\npush it, then: kubectl apply -k {0}"


# shared by `compose` and `k8s`
_exports = with_options(
    click.argument("folder", type=_FOLDER),
    _FROM,
    click.option(
        "--redis",
        is_flag=True,
        help="Keep the state in Redis, which is exported too.  [in a volume]",
    ),
    _BASE,
    with_server,
)


@click.command(short_help="Write files for Docker Compose.")
@_exports
def compose(
    command: ServerCommand, folder: Path, file: Path | None, redis: bool, base: str
) -> None:
    """Write FOLDER with a docker-compose.yml: the server, a service for each model, the images they
    are built from.

    \b
    clipper export compose deploy && docker compose --project-directory deploy up --build
    clipper export compose deploy --from clipper.toml --redis
    """
    from clipper.deploy.kubernetes.compose import write_compose

    with _shipment(command, file, redis, base) as shipment:
        files = write_compose(shipment, folder)
    _print_next_steps(
        command, folder, files, f"docker compose --project-directory {folder} up --build"
    )


@click.command("k8s", short_help="Write manifests for Kubernetes.")
@_exports
@click.option(
    "--mesh",
    "store",
    metavar="STORE",
    help="Export nodes of a mesh instead, on the store etcd://HOST:2379/PREFIX.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="With --mesh: minimum number of nodes.",
)
@click.option(
    "--nodes-max",
    type=click.IntRange(0),
    default=0,
    help="With --mesh: maximum number of nodes, for autoscaling.",
)
@click.option(
    "--capacity",
    "--capacity-mib",
    "capacity_mib",
    type=Size(64),
    default=2048,
    metavar="SIZE",
    help="With --mesh: memory for models, as 8Gi.  [2Gi]",
)
@click.option(
    "--lru-age",
    type=click.IntRange(1),
    default=3600,
    metavar="S",
    help=("With --nodes-max: seconds that a model should stay loaded after its last use.  [3600]"),
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="WORD",
    help="With --mesh: label of the nodes; may be repeated.",
)
@click.option("--gpus", type=click.IntRange(0), default=0, help="With --mesh: GPUs of each node.")
@click.option(
    "--shards",
    type=click.IntRange(1, 1024),
    help="Export this number of parameter server shards instead.",
)
@click.option(
    "--replicas",
    type=click.IntRange(0, 7),
    help="With --shards: replicas of each shard.  [params.replicas]",
)
@click.option(
    "--memory",
    "--memory-mib",
    "memory_mib",
    type=Size(128),
    default=4096,
    metavar="SIZE",
    help="With --shards: memory of each shard, as 8Gi.  [4Gi]",
)
@click.option(
    "--storage-gib",
    type=click.IntRange(0),
    default=0,
    help="With --shards: size of each volume.  [by its memory]",
)
@click.option("--together", is_flag=True, help="With --shards: allow several on one machine.")
@click.option(
    "--state",
    "shared",
    metavar="URL",
    default="",
    help="Keep the state in this Redis or etcd.  [in a volume]",
)
@click.option(
    "--servers",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="With --redis or --state: number of servers.",
)
@click.option(
    "--name",
    metavar="NAME",
    default="clipper",
    show_default=True,
    help=("Prefix of the names of all objects; use another one for each export into a namespace."),
)
@_SETS
def kubernetes(
    command: ServerCommand,
    folder: Path,
    file: Path | None,
    redis: bool,
    base: str,
    store: str | None,
    nodes: int,
    nodes_max: int,
    capacity_mib: int,
    lru_age: int,
    labels: tuple[str, ...],
    gpus: int,
    shards: int | None,
    shared: str,
    servers: int,
    name: str,
    sets: tuple[str, ...],
    **given: UserValue,
) -> None:
    """Write FOLDER with a base for Kustomize, which `helm` renders: the servers, a Deployment for
    each model, the images they are built from. With --mesh: a Deployment of nodes, their Service,
    disruption budget, network policy and autoscaler; no server is needed. With --shards: a
    StatefulSet of shards, with what [params] of --from says.

    \b
    clipper export k8s cluster && kubectl apply -k cluster
    clipper export k8s cluster --from clipper.toml --redis --servers 3
    clipper export k8s nodes --mesh etcd://etcd.default:2379/clipper --nodes 3 --nodes-max 10
    clipper export k8s shop --shards 4 --replicas 1 --memory-mib 8192
    """
    from clipper.deploy.kubernetes.helm import server_values, write_base
    from clipper.deploy.kubernetes.images import build_contexts
    from clipper.deploy.kubernetes.shipment import check_export_name, check_shared

    check_export_name(name)
    for url in filter(None, (shared, store)):
        check_shared(url)
    no_servers = {"servers": {"enabled": False}}
    if shards is not None:
        if store or redis or base:
            raise click.UsageError(
                "--shards cannot be combined with --mesh, --redis or --base: shards run no models"
            )
        values, token = _shards(file, shards, **given)
        images = build_contexts({})
        files = write_base({**no_servers, "shards": values}, images, folder, name, sets, token)
        _print_next_steps(command, folder, files, _PUSH.format(folder))
        return
    if store is not None:
        if file or redis or base:
            raise click.UsageError(
                "--mesh cannot be combined with --from, --redis or --base: models of a mesh have no"
                " images"
            )
        some = {
            "enabled": True,
            "replicas": nodes,
            "maxReplicas": nodes_max,
            "capacityMib": capacity_mib,
            "lruAgeSeconds": lru_age,
            "labels": labels,
            "gpus": gpus,
        }
        values = {**no_servers, "state": {"url": store}, "nodes": some}
        files = write_base(values, build_contexts({}), folder, name, sets)
        _print_next_steps(command, folder, files, _PUSH.format(folder))
        return
    with _shipment(command, file, redis, base, pulls=True) as shipment:
        values = server_values(shipment)
        values["servers"]["replicas"] = servers
        kind = "redis" if shipment.redis else "volume"
        values["state"] = {"url": shared} if shared else {"kind": kind}
        files = write_base(values, build_contexts(shipment.models), folder, name, sets)
        built = [
            f"docker build -t {image.name} {folder}/models/{name}"
            for name, (_, image) in shipment.models.items()
        ]
    _print_next_steps(
        command,
        folder,
        files,
        "\n".join(
            [*built, f"docker build {folder}/server", f"push them, then: kubectl apply -k {folder}"]
        ),
    )


@click.command(short_help="Write a Helm chart.")
@click.argument("folder", type=_FOLDER)
@_FROM
@_BASE
@_SERVERS
@click.option("--nodes", type=click.IntRange(0), default=0, help="Number of mesh nodes to include.")
@click.option(
    "--shards", type=click.IntRange(0), default=0, help="Number of parameter shards to include."
)
@with_server
def chart(
    command: ServerCommand,
    folder: Path,
    file: Path | None,
    base: str,
    servers: int,
    nodes: int,
    shards: int,
) -> None:
    """Write FOLDER with a Helm chart: the servers on a Redis of the chart or a store of yours, a
    Deployment for each model. values.json has what is exported; images/, what the images are built
    from.

    \b
    clipper export chart shop --from clipper.toml
    helm upgrade --install shop ./shop --values shop/values.json
    """
    from clipper.deploy.kubernetes.helm import server_values, write_chart
    from clipper.deploy.kubernetes.images import build_contexts

    with _shipment(command, file, redis=True, base=base, pulls=True) as found:
        values = server_values(found)
        values["servers"]["replicas"] = servers
        if nodes:
            values["nodes"] = {"enabled": True, "replicas": nodes}
        if shards:
            values["shards"], token = _shards(file, shards)
            if token:
                why = "params.token is set: a chart makes the token of its shards itself."
                raise InvalidInput(why, hint="Leave it out, and set tokens.models of the release.")
        files = write_chart(values, build_contexts(found.models, "images/"), folder)
        built = [
            f"docker build -t {image.name} {folder}/images/models/{name}"
            for name, (_, image) in found.models.items()
        ]
    then = [*built, f"docker build {folder}/images/server"]
    upgrade = f"helm upgrade --install NAME {folder} --values {folder}/values.json"
    then.append(f"push them, then: {upgrade}")
    _print_next_steps(command, folder, files, "\n".join(then))


@click.command(short_help="Write manifests for KubeRay.")
@click.argument("folder", type=_FOLDER)
@click.option(
    "--from",
    "file",
    metavar="FILE",
    type=_FILE,
    required=True,
    help="TOML file; the image holds it and what it names.",
)
@click.option(
    "--state",
    "store",
    metavar="URL",
    default="",
    help="Keep the state in this Redis or etcd.  [a Redis that is exported too]",
)
@_SERVERS
@click.option(
    "--servers-max", type=click.IntRange(0), default=0, help="Most servers under load.  [--servers]"
)
@click.option(
    "--cpus",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Cores of each server and its models.",
)
@click.option(
    "--memory-mib",
    type=click.IntRange(512),
    default=4096,
    show_default=True,
    help="Memory of each server and its models.",
)
@click.option(
    "--name",
    metavar="NAME",
    default="clipper",
    show_default=True,
    help="Prefix of the names of all objects.",
)
@_SETS
@with_server
def ray(
    command: ServerCommand,
    folder: Path,
    file: Path,
    store: str,
    servers: int,
    servers_max: int,
    cpus: float,
    memory_mib: int,
    name: str,
    sets: tuple[str, ...],
) -> None:
    """Write FOLDER with a base for Kustomize, which `helm` renders: a RayJob that runs `clipper up
    FILE --on ray` on a cluster of the KubeRay operator, Services of its ingress, and the image of
    all its pods.

    \b
    clipper export ray shop --from clipper.toml --servers 2 --servers-max 8
    """
    from clipper.deploy.kubernetes.helm import write_base
    from clipper.deploy.kubernetes.images import RAY_IMAGE, ray_context
    from clipper.deploy.kubernetes.named_files import named_in
    from clipper.deploy.kubernetes.shipment import check_export_name, check_shared
    from clipper.deploy.needs import needs_of
    from clipper.deploy.packages.pins import pinned

    check_export_name(name)
    if store:
        check_shared(store)
    with tempfile.TemporaryDirectory(prefix="clipper-image-") as place:
        models, _, _ = _declared(file, Path(place), redis=False, pulls=True)
        ours = (one for one in models if not (one.command or one.requirements or one.python))
        lines = {line for model in ours for line in pinned(needs_of(model))}
    job = {
        "enabled": True,
        "file": file.name,
        "servers": servers,
        "workers": max(servers, servers_max),
        "cpus": cpus,
        "memoryMib": memory_mib,
    }
    values = {"servers": {"enabled": False}, "state": {"url": store}, "ray": job}
    files = write_base(values, ray_context(named_in(file), sorted(lines)), folder, name, sets)
    then = f"docker build -t {RAY_IMAGE} {folder}/image\npush it, then: kubectl apply -k {folder}"
    _print_next_steps(command, folder, files, then)


def _shards(
    file: Path | None, shards: int, replicas: int | None = None, **more: UserValue
) -> tuple[dict[str, UserValue], str]:
    """Return the chart's values of shards, and the token that the file states."""
    from clipper.config import load
    from clipper.deploy.kubernetes.helm import shard_values

    wanted = {"shards": shards, **({"replicas": replicas} if replicas is not None else {})}
    settings = load(file, params=wanted).params
    return shard_values(settings, **more), settings.token


def _print_next_steps(command: ServerCommand, folder: Path, files: list[str], then: str) -> None:
    command.output.show(
        {"folder": str(folder), "files": files},
        lambda: f"wrote {len(files)} files to {folder}\n{then}",
    )


@contextmanager
def _shipment(
    command: ServerCommand, file: Path | None, redis: bool, base: str, pulls: bool = False
) -> Iterator["Shipment"]:
    """Yield the declared or the running models and applications; model files are in a temporary
    folder. pulls: containers pull models that are named by a URL.
    """
    from clipper.deploy.docker.program_image import image_of_model
    from clipper.deploy.kubernetes.shipment import Shipment

    with tempfile.TemporaryDirectory(prefix="clipper-image-") as place:
        if file is None:
            state = read(command.server.export_state())
            names = dict.fromkeys(model.name for model in state.models if model.target)
            models = [
                placed(chosen(state.models, state.latest, name), state, Path(place))
                for name in names
            ]
            models = [_pulled_from(model) if pulls else model for model in models]
            applications = tuple(applications_of(state))
        else:
            models, applications, redis = _declared(file, Path(place), redis, pulls)
        made = {model.name: (model, image_of_model(model, base)) for model in models}
        yield Shipment(made, applications, redis)


def _pulled_from(model: Model) -> Model:
    """Return a running model as a pod pulls it, if it was pulled."""
    if model.source is None:
        return model
    target = f"{model.source.url}#sha256={model.source.sha256}"
    return msgspec.structs.replace(model, target=target, sha256="")


def _declared(
    file: Path, place: Path, redis: bool, pulls: bool
) -> tuple[list[Model], tuple[Application, ...], bool]:
    """Return what a TOML file declares, as a server would read it."""
    from clipper.config import load
    from clipper.deploy.packages.package import Package, pack
    from clipper.deploy.packages.pulling import PullLimits, pod_url, pulled, url_of
    from clipper.deploy.processes.command import command_of
    from clipper.manage.application_record import changes_of
    from clipper.manage.declared import application_settings
    from clipper.manage.model_record import input_of, record_fields

    config, models = load(file), []
    for name, wanted in config.models.items():
        command = command_of(name, wanted.command, wanted.folder) if wanted.command else None
        if not wanted.target and command is None:
            continue
        version = wanted.version or 1
        limits = PullLimits.from_environment(config.artifacts.environment(None))
        if command is not None:
            package = Package(command.text, "")
        elif not (url := url_of(wanted.target)):
            package = pack(wanted.target, name, version, place, wanted.code)
        elif pulls:
            package = Package(pod_url(url, limits), "")
        else:
            with pulled(url, limits, lambda done: None) as found:
                package = pack(found.path, name, version, place, wanted.code)
        # a pod has limits of its own, whatever runs the containers of a server
        limits_of_pod = {key: getattr(wanted, key) for key in ("memory_mib", "cpus", "gpus")}
        unlimited = msgspec.structs.replace(wanted, memory_mib=0, cpus=0.0, gpus="", deployer="")
        fields = record_fields(name, unlimited, config, is_program=command is not None)
        models.append(
            Model(
                name,
                version,
                InputType.parse(input_of(wanted) or package.input or "any"),
                target=package.target,
                sha256=package.sha256,
                code=package.code,
                command=command.words if command else (),
                folder=command.folder if command else "",
                **{**fields, **limits_of_pod, "deployer": ""},
            )
        )
    applications = []
    for name, app in config.apps.items():
        longest = config.limits.slo_ms_max
        settings = changes_of(name, app.models, application_settings(app), None, longest)
        links = tuple(VersionedModel.parse(link) for link in settings.pop("models"))
        settings["input"] = InputType.parse(settings.get("input", "any"))
        applications.append(Application(name, links, **settings))
    return models, tuple(applications), redis or config.server.state.startswith("redis")
