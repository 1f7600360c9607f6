"""Commands that change the models of a running server."""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.server_command import ServerCommand, bounds, dry, with_server
from clipper.errors import ClipperError
from clipper.schema import InvalidTensor, Schema

if TYPE_CHECKING:
    from clipper.manage.client import Client

_PROGRESS_S = 0.5


@click.command(short_help="Deploy a model, or a new version of it.")
@click.argument("name")
@click.argument("target", required=False)
@click.option(
    "--command",
    "program",
    metavar="COMMAND",
    help="Program to run as the container, instead of TARGET; it runs in this folder.",
)
@click.option("--version", type=click.IntRange(min=1), help="Version number.  [the next]")
@click.option(
    "--replicas",
    metavar="N|MIN-MAX",
    default="1",
    show_default=True,
    help="Number of containers; MIN-MAX scales with the load.",
)
@click.option(
    "--input",
    metavar="TYPE",
    default="",
    help="Type of one row, such as f64[64] or str.  [from the model]",
)
@click.option(
    "--schema",
    metavar="IN -> OUT",
    help="Input and output types instead of --input; named tensors as JSON.",
)
@click.option(
    "--warmup",
    metavar="ROWS",
    default="",
    help="JSON list of rows to evaluate before it is ready.  [generated rows]",
)
@click.option(
    "--no-warmup",
    is_flag=True,
    help="Evaluate nothing before it is ready, for calls with side effects.",
)
@click.option(
    "--batching",
    metavar="MODE|KEY=VALUE,..",
    help=(
        "Mode (aimd, fit, quantile, static) or settings: cost=length,padded=true.  [the server's]"
    ),
)
@click.option(
    "--code",
    metavar="DIR",
    multiple=True,
    help="Folder that the model imports from; may be repeated.",
)
@click.option(
    "--requirements",
    metavar="FILE",
    help="Requirements file: the model runs in its own environment with these packages.",
)
@click.option(
    "--python",
    metavar="VERSION",
    default="",
    help="Python version of that environment, such as 3.12.  [the server's]",
)
@click.option(
    "--deployer",
    type=click.Choice(["process", "docker", "podman"]),
    help="Engine that runs its containers.  [the server's]",
)
@click.option(
    "--memory",
    metavar="MIB",
    type=click.IntRange(min=0),
    help="Memory of each container of docker or podman.  [no limit]",
)
@click.option(
    "--cpus",
    metavar="N",
    type=click.FloatRange(min=0),
    help="Cores of each container of docker or podman.  [no limit]",
)
@click.option(
    "--gpus", metavar="all|N|IDS", help="GPUs of each container of docker or podman.  [none]"
)
@click.option(
    "--reads",
    metavar="TABLE=COLUMNS",
    multiple=True,
    help="Table rows that a prediction depends on, such as taste=0,1.",
)
@click.option(
    "--tolerance",
    metavar="X",
    type=click.FloatRange(min=0),
    help=("Change of these rows, relative to their norm, that keeps predictions cached.  [0]"),
)
@click.option(
    "--retry-singly", is_flag=True, help="Evaluate the rows of a batch that fails one by one."
)
@click.option(
    "--trust",
    metavar="TYPE",
    multiple=True,
    help="Type that a .skops file may load; may be repeated.",
)
@click.option(
    "--behind",
    is_flag=True,
    help="Do not make it the latest version; `clipper promote` does that later.",
)
@click.option("--no-wait", is_flag=True, help="Return before its containers are connected.")
@dry
@with_server
def deploy(
    command: ServerCommand,
    name: str,
    target: str | None,
    program: str | None,
    version: int | None,
    replicas: str,
    input: str,
    schema: str | None,
    warmup: str,
    no_warmup: bool,
    batching: str | None,
    code: tuple[str, ...],
    requirements: str | None,
    python: str,
    deployer: str | None,
    memory: int | None,
    cpus: float | None,
    gpus: str | None,
    reads: tuple[str, ...],
    tolerance: float | None,
    retry_singly: bool,
    trust: tuple[str, ...],
    behind: bool,
    no_wait: bool,
    dry_run: bool,
) -> None:
    """Deploy TARGET as a new version of model NAME.

    TARGET is module:attribute on the server's host, a model file of this host, or a URL that the
    server pulls: s3://, gs://, https:// (docs/models.md). It runs as the server's user: who may
    deploy may run any code there. A server on this host also finds modules in this folder. The new
    version becomes the latest once it runs; applications that link NAME without a version then use
    it.

    \b
    clipper deploy doubler doubler:double --input "f64[3]"
    clipper deploy svm svm.onnx --replicas 1-4 --behind
    clipper deploy svm s3://bucket/svm.onnx#sha256=HEX
    clipper deploy svm svm.onnx --deployer docker --memory 512 --cpus 2
    clipper deploy svm --command "java -jar svm.jar"
    clipper deploy homes homes.pkl --schema '{"rooms": "i64", "city": "str"} -> f64'
    """
    if (target is None) == (program is None):
        raise click.UsageError("Give either TARGET, or a program by --command.")
    settings: dict[str, object] = {
        "replicas": bounds(replicas),
        "promote": not behind,
        "wait": not no_wait,
    }
    settings |= {"version": version} if version else {}
    settings |= {"input": input} if input else {}
    settings |= _sides(schema, input) if schema else {}
    settings |= {"warmup": _rows(warmup)} if warmup else {"warmup": False} if no_warmup else {}
    settings |= {"batching": _batching(batching)} if batching else {}
    settings |= {"retry_singly": True} if retry_singly else {}
    settings |= {"trusted": trust} if trust else {}
    settings |= {"reads": dict(map(_columns, reads))} if reads else {}
    settings |= {"tolerance": tolerance} if tolerance is not None else {}
    settings |= {"requirements": requirements} if requirements else {}
    settings |= {"python": python} if python else {}
    placed = {"deployer": deployer, "memory_mib": memory, "cpus": cpus, "gpus": gpus}
    settings |= {key: value for key, value in placed.items() if value is not None}
    settings |= {"folder": str(Path.cwd())} if program else {}
    places = [str(Path(place).absolute()) for place in code] or home_of(target or "")
    settings |= {"code": places} if places else {}
    with (
        _progress(command, name)
        if sys.stderr.isatty() and not dry_run
        else contextlib.nullcontext()
    ):
        change = command.server.deploy(name, target, command=program, dry_run=dry_run, **settings)
    command.show_change(change)


def _sides(schema: str, input: str) -> dict[str, str]:
    """Parse the text `inputs -> outputs` of a schema."""
    if input:
        raise click.BadParameter("it cannot be combined with --input.", param_hint="--schema")
    try:
        found = Schema.parse(schema)
    except InvalidTensor as error:
        raise click.BadParameter(str(error), param_hint="--schema") from None
    return {"input": found.input, "output": found.output}


def _rows(text: str) -> list[object]:
    """Parse rows of a warm-up, given as JSON."""
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"this is not JSON: {error}", param_hint="--warmup") from None
    if not isinstance(rows, list):
        raise click.BadParameter(
            "it is not a list of rows, such as [[1.0, 2.0]].", param_hint="--warmup"
        )
    return rows


def _batching(text: str) -> str | dict[str, object]:
    """Parse a mode, or `cost=length,padded=true`."""
    if "=" not in text:
        return text
    found: dict[str, object] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise click.BadParameter(
                f"{part!r} is not KEY=VALUE, such as cost=length.", param_hint="--batching"
            )
        try:
            found[key.strip()] = json.loads(value)
        except ValueError:
            found[key.strip()] = value.strip()
    return found


def _columns(text: str) -> tuple[str, list[int]]:
    """Parse `taste=0,1`."""
    table, _, columns = text.rpartition("=")
    if not table or not all(part.strip().isdecimal() for part in columns.split(",")):
        raise click.BadParameter(
            f"{text!r} is not TABLE=COLUMNS, such as taste=0,1.", param_hint="--reads"
        )
    return table, [int(part) for part in columns.split(",")]


@contextlib.contextmanager
def _progress(command: ServerCommand, name: str) -> Iterator[None]:
    """Show the progress of a deployment on stderr: pulling, packing, building environment,
    starting, loading, warm.
    """
    over = threading.Event()
    teller = threading.Thread(
        target=_print_progress,
        args=(command.server, name, over),
        name="clipper-teller",
        daemon=True,
    )
    teller.start()
    try:
        yield
    finally:
        over.set()
        # it may wait for the server; it is a daemon
        teller.join(_PROGRESS_S)


def _print_progress(server: "Client", name: str, over: threading.Event) -> None:
    shown = ""
    while not over.wait(_PROGRESS_S):
        with contextlib.suppress(ClipperError):
            stages = server.stages(name)
            latest = stages[-1] if stages else {"stage": "", "detail": ""}
            text = " ".join(word for word in (latest["stage"], latest["detail"][:100]) if word)
            if text and text != shown:
                shown = text
                click.echo(f"deploying {name}: {text}", err=True)


def home_of(target: str) -> list[str]:
    """Return this folder if it contains the module."""
    module, colon, _ = target.partition(":")
    top = module.partition(".")[0]
    here = (
        bool(colon and top)
        and "://" not in target
        and (Path(f"{top}.py").is_file() or Path(top, "__init__.py").is_file())
    )
    return [str(Path.cwd())] if here else []


@click.command(short_help="Make a version the latest.")
@click.argument("model", metavar="NAME:VERSION")
@click.option(
    "--app",
    "application",
    metavar="APP",
    help="Link only this application to the version.",
)
@dry
@with_server
def promote(command: ServerCommand, model: str, application: str | None, dry_run: bool) -> None:
    """Make NAME:VERSION the latest version, which NAME without a version refers to, until another
    one is deployed or promoted.

    \b
    clipper promote svm:2
    """
    command.show_change(command.server.promote(model, application, dry_run=dry_run))


@click.command(short_help="Make the previous version the latest again.")
@click.argument("name")
@dry
@with_server
def rollback(command: ServerCommand, name: str, dry_run: bool) -> None:
    """Make the next lower version of NAME that is in service the latest.

    \b
    clipper rollback svm
    """
    command.show_change(command.server.rollback(name, dry_run=dry_run))


@click.command(short_help="Set the number of containers of a model.")
@click.argument("model")
@click.argument("replicas", metavar="N|MIN-MAX")
@dry
@with_server
def scale(command: ServerCommand, model: str, replicas: str, dry_run: bool) -> None:
    """Run N containers of MODEL, or between MIN and MAX depending on the load. Containers that
    failed are started again.

    \b
    clipper scale svm 2
    clipper scale svm:1 1-4
    """
    command.show_change(command.server.scale(model, bounds(replicas), dry_run=dry_run))


@click.command(short_help="Drain and remove a version.")
@click.argument("model")
@click.option(
    "--force",
    is_flag=True,
    help="Retire it even if applications use it: the version before follows, or it is unlinked.",
)
@dry
@with_server
def retire(command: ServerCommand, model: str, force: bool, dry_run: bool) -> None:
    """Drain and stop a version of MODEL. Its number is never used again.

    \b
    clipper retire svm:1
    """
    command.show_change(command.server.retire(model, force=force, dry_run=dry_run))
