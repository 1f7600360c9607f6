"""`clipper serve`: serve models at once, from their files, without a configuration."""

import ast
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from clipper.cli.servers.addresses import with_addresses
from clipper.cli.servers.reloading import SourceWatch, reload
from clipper.errors import InvalidInput
from clipper_container.artifacts import is_url
from clipper_container.loading import files
from clipper_container.loading.errors import LoadError
from clipper_container.loading.kinds import ENDINGS
from clipper_container.model import UserValue

if TYPE_CHECKING:
    from clipper.server import ClipperServer
    from clipper.spec.model import ModelSpec

_CHECK_S: Final = 0.5
_SLO_MS: Final = 1000.0
_IN_A_NAME: Final = re.compile(r"[^a-z0-9._-]+")
# in a folder, only those that are models count
_AMBIGUOUS: Final = (".json", ".txt")
_Table = dict[str, UserValue]


@click.command(short_help="Serve models at once, from their files.")
@click.argument("targets", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--slo-ms",
    type=click.FloatRange(min=0.1),
    default=_SLO_MS,
    show_default=True,
    help="Time from a query to its answer.",
)
@click.option(
    "--default", metavar="VALUE", help="Answer, as JSON, when no prediction arrives in time."
)
@click.option(
    "--replicas",
    metavar="N|MIN-MAX",
    default="1",
    show_default=True,
    help="Number of processes for each model; MIN-MAX scales with the load.",
)
@click.option(
    "--name",
    "names",
    metavar="NAME",
    multiple=True,
    help="Name of the model and its application; once for each FILE.  [from the file]",
)
@click.option(
    "--input",
    "input_type",
    metavar="TYPE",
    default="",
    help="Type of one row, such as f64[64] or str.  [from the model]",
)
@click.option(
    "--reload", "follow", is_flag=True, help="Deploy a new version when code or a file changes."
)
@click.option("--http", metavar="HOST:PORT", help="Address for queries.  [127.0.0.1:8000]")
@click.option("--grpc", metavar="HOST:PORT", help="Address for gRPC; http: that of HTTP.  [http]")
@click.option("--admin", metavar="HOST:PORT", help="Address for management.  [127.0.0.1:8002]")
@click.option("--insecure", is_flag=True, help="Accept queries from other hosts without keys.")
def serve(
    targets: tuple[str, ...],
    slo_ms: float,
    default: str | None,
    replicas: str,
    names: tuple[str, ...],
    input_type: str,
    follow: bool,
    http: str | None,
    grpc: str | None,
    admin: str | None,
    insecure: bool,
) -> None:
    """Serve models over HTTP, gRPC and management until Ctrl-C, each as an application of its name.

    FILE is a model's file, a folder of MLflow or one with such files, `module:function` of a module
    of this folder, or a URL: s3://, gs://, https:// (docs/models.md). Nothing is kept at the end;
    what is to stay is declared in a file for `clipper up`.

    gRPC is served if its packages are installed. If a port is taken, the next free one of 8010,
    8020, ... is used, and printed. `.joblib`, `.pkl` and MLflow models can run code when they are
    loaded: serve only files that you trust.

    \b
    clipper serve svm.onnx
    clipper serve mine:total --input "f64[3]" --reload
    clipper serve a.skops b.joblib --slo-ms 50 --default -1 --replicas 1-4
    """
    from clipper.cli.server_command import bounds, read_json
    from clipper.cli.servers.up import Start, refuse_open
    from clipper.config import load
    from clipper.log_output import log_to_terminal
    from clipper.manage.checking import check_declared
    from clipper.types import InputType

    log_to_terminal(quiet=True)
    if input_type:
        InputType.parse(input_type)
    chosen = _named([*_models_in(targets)], names)
    counts = bounds(replicas)
    least, most = counts if isinstance(counts, tuple) else (counts, 0)
    model: _Table = {"replicas": least, "replicas_max": most, "input": input_type}
    app: _Table = {"slo_ms": slo_ms}
    if default is not None:
        app["default"] = read_json(default, "--default")
    loaded = load(
        models={name: {**model, **_located(target)} for name, target in chosen.items()},
        apps={name: {**app, "models": [name]} for name in chosen},
        http=http,
        grpc=grpc,
        admin=admin,
    )
    refuse_open(loaded, insecure)
    check_declared(loaded, str(Path.cwd()))
    config = with_addresses(loaded, grpc=True)
    is_made_up = not loaded.http.admin and not loaded.http.token
    start = Start(config, ", ".join(targets), made_up=is_made_up, must_load=not follow)
    # before the models are read: what changes from now on is noticed
    sources = SourceWatch(config.models if follow else {})
    with start.running() as server:
        if follow:
            _follow(server, config.models, sources, start.stopping)
        start.stopping.wait()


def _follow(
    server: "ClipperServer",
    models: Mapping[str, "ModelSpec"],
    sources: SourceWatch,
    stopping: threading.Event,
) -> None:
    """Deploy new versions of what changes, until the end."""
    while not stopping.wait(_CHECK_S):
        for line in reload(server, sources.changed(models), models):
            click.echo(line)


# -- what the arguments name


def _models_in(targets: Sequence[str]) -> Iterator[str]:
    """Yield the models that arguments name: those in a folder one by one. Raises InvalidInput."""
    for target in targets:
        path = Path(target)
        if is_url(target) or not path.is_dir() or files.kind_by_name(path):
            _check_no_script(target)
            yield target
            continue
        found = [str(one) for one in sorted(path.iterdir()) if _is_model(one)]
        if not found:
            raise InvalidInput(
                f"no model is in the folder {target!r}.",
                hint=f"A model is an MLmodel folder, or a file that ends in {_endings()}.",
            )
        yield from found


def _is_model(path: Path) -> bool:
    """Return whether an entry of a folder is a model."""
    kind = files.kind_by_name(path)
    if not kind or path.name.startswith("."):
        return False
    if path.suffix.lower() not in _AMBIGUOUS or path.is_dir():
        return True
    try:
        files.read(path)
    except (LoadError, OSError):
        return False
    return True


def _check_no_script(target: str) -> None:
    """Raise InvalidInput, with a function of it, for a Python file."""
    if not target.endswith(".py") or not Path(target).is_file():
        return
    function = next(_functions(Path(target)), "FUNCTION")
    raise InvalidInput(
        f"{target!r} is a module; name the function or class in it that predicts.",
        hint=f"In its folder: clipper serve {Path(target).stem}:{function}",
    )


def _functions(path: Path) -> Iterator[str]:
    """Yield the public functions and classes of a file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def _endings() -> str:
    return ", ".join(sorted(ENDINGS))


def _named(targets: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the models by name. Raises InvalidInput for two of one name."""
    if names and len(names) != len(targets):
        raise InvalidInput(
            f"{len(names)} names are given for {len(targets)} models.",
            hint="Give --name once for each, in their order.",
        )
    found: dict[str, str] = {}
    for target, name in zip(targets, names or map(_name_of, targets), strict=True):
        if name in found:
            raise InvalidInput(
                f"{found[name]!r} and {target!r} would both be {name!r}.",
                hint="Give --name once for each, in their order.",
            )
        found[name] = target
    return found


def _name_of(target: str) -> str:
    """Return a name for the model of an argument: `svm` of models/svm.onnx and of mine:svm."""
    plain = target.partition("#")[0].partition("?")[0].rstrip("/")
    last = plain.rpartition("/")[2]
    if not is_url(target) and not Path(target).exists():
        last = last.rpartition(":")[2].partition("@")[0]
    if any(last.lower().endswith(ending) for ending in ENDINGS):
        last = last.rpartition(".")[0]
    return _IN_A_NAME.sub("-", last.lower()).strip("-._")[:128] or "model"


def _located(target: str) -> _Table:
    """Return where a model is, as [models.NAME] does; a module of this folder with the folder."""
    from clipper.deploy.packages.sources import holds

    if is_url(target):
        return {"target": target}
    if Path(target).exists():
        return {"target": str(Path(target).absolute())}
    here = str(Path.cwd())
    module, colon, _ = target.partition(":")
    return {"target": target, "code": [here] if colon and holds([here], module) else []}
