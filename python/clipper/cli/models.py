"""Commands that change the models of a running server."""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from clipper.cli.server_command import ServerCommand, bounds, dry, with_server
from clipper.errors import ClipperError
from clipper.schema import InvalidTensor, Schema

_PROGRESS_S = 0.5


@click.command(short_help="Start a model, or a new version of one.")
@click.argument("name")
@click.argument("target", required=False)
@click.option(
    "--command",
    "program",
    metavar="COMMAND",
    help="A program that is the container, instead of TARGET; it runs in this folder.",
)
@click.option("--version", type=click.IntRange(min=1), help="Its number.  [the next]")
@click.option(
    "--replicas",
    metavar="N|LEAST-MOST",
    default="1",
    show_default=True,
    help="Containers; bounds follow the load.",
)
@click.option(
    "--input",
    metavar="TYPE",
    default="",
    help="Of one row, as f64[64] or str.  [as the model says]",
)
@click.option(
    "--schema",
    metavar="IN -> OUT",
    help="Instead: types of named tensors as JSON, or of one tensor.",
)
@click.option(
    "--warmup",
    metavar="ROWS",
    default="",
    help="JSON: rows it runs before it is ready.  [made-up ones]",
)
@click.option(
    "--no-warmup",
    is_flag=True,
    help="It runs nothing before it is ready: its calls have side effects.",
)
@click.option(
    "--batching",
    metavar="MODE|KEY=VALUE,..",
    help="aimd, fit, quantile or static; or settings: cost=length,padded=true.  [the server's]",
)
@click.option(
    "--code",
    metavar="DIR",
    multiple=True,
    help="A folder that the model imports from; several times if need be.",
)
@click.option(
    "--requirements",
    metavar="FILE",
    help="For pip: it runs in an environment of its own, with these.",
)
@click.option(
    "--python", metavar="VERSION", default="", help="Of that environment, as 3.12.  [the server's]"
)
@click.option(
    "--deployer",
    type=click.Choice(["process", "docker", "podman"]),
    help="What runs its containers.  [the server's]",
)
@click.option(
    "--memory",
    metavar="MIB",
    type=click.IntRange(min=0),
    help="Of each container of docker or podman.  [no limit]",
)
@click.option(
    "--cpus", metavar="N", type=click.FloatRange(min=0), help="Cores of each of them.  [no limit]"
)
@click.option("--gpus", metavar="all|N|IDS", help="Of each of them.  [none]")
@click.option(
    "--reads",
    metavar="TABLE=COLUMNS",
    multiple=True,
    help="Rows of it that a prediction is made of, as taste=0,1.",
)
@click.option(
    "--tolerance",
    metavar="X",
    type=click.FloatRange(min=0),
    help="How far they may move, of their norm.  [0]",
)
@click.option(
    "--trust", metavar="TYPE", multiple=True, help="A type that a .skops file may ask for."
)
@click.option("--behind", is_flag=True, help="Do not make it the latest: promote does that.")
@click.option("--no-wait", is_flag=True, help="Do not wait until its containers are connected.")
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
    trust: tuple[str, ...],
    behind: bool,
    no_wait: bool,
    dry_run: bool,
) -> None:
    """Serve TARGET as NAME: module:attribute on the server's host, a model's file of this one,
    or a URL that the server pulls: s3://, gs://, https:// (docs/models.md).

    A module in this folder is found by a server on this host. The new version is the latest once it
    runs; what links NAME without a version then asks it.

    \b
    clipper deploy doubler doubler:double --input "f64[3]"
    clipper deploy svm svm.onnx --replicas 1-4 --behind
    clipper deploy svm s3://bucket/svm.onnx#sha256=HEX
    clipper deploy svm svm.onnx --deployer docker --memory 512 --cpus 2
    clipper deploy svm --command "java -jar svm.jar"
    clipper deploy homes homes.pkl --schema '{"rooms": "i64", "city": "str"} -> f64'
    """
    if (target is None) == (program is None):
        raise click.UsageError("Give TARGET, or a program by --command.")
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
    """Parse `inputs -> outputs`."""
    if input:
        raise click.BadParameter("give this or --input, not both.", param_hint="--schema")
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
        raise click.BadParameter(f"this is no JSON: {error}", param_hint="--warmup") from None
    if not isinstance(rows, list):
        raise click.BadParameter("write a list of rows, as [[1.0, 2.0]].", param_hint="--warmup")
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
                f"{part!r}: write KEY=VALUE, as cost=length.", param_hint="--batching"
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
            f"{text!r}: write TABLE=COLUMNS, as taste=0,1.", param_hint="--reads"
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
        teller.join()


def _print_progress(server: Any, name: str, over: threading.Event) -> None:
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
    help="For this application alone: it links that very version.",
)
@dry
@with_server
def promote(command: ServerCommand, model: str, application: str | None, dry_run: bool) -> None:
    """Make NAME:VERSION what NAME means, from the next query on, until another is deployed or
    promoted.

    \b
    clipper promote svm:2
    """
    command.show_change(command.server.promote(model, application, dry_run=dry_run))


@click.command(short_help="Go back to the version before.")
@click.argument("name")
@dry
@with_server
def rollback(command: ServerCommand, name: str, dry_run: bool) -> None:
    """Make the version before NAME's latest the latest: the highest below it that is in service.

    \b
    clipper rollback svm
    """
    command.show_change(command.server.rollback(name, dry_run=dry_run))


@click.command(short_help="Change how many containers run a model.")
@click.argument("model")
@click.argument("replicas", metavar="N|LEAST-MOST")
@dry
@with_server
def scale(command: ServerCommand, model: str, replicas: str, dry_run: bool) -> None:
    """Run N containers of MODEL, or as many of LEAST to MOST as the load asks for.

    \b
    clipper scale svm 2
    clipper scale svm:1 1-4
    """
    command.show_change(command.server.scale(model, bounds(replicas), dry_run=dry_run))


@click.command(short_help="Take a version out of service for good.")
@click.argument("model")
@click.option("--force", is_flag=True, help="Even if an application asks it: it is unlinked.")
@dry
@with_server
def retire(command: ServerCommand, model: str, force: bool, dry_run: bool) -> None:
    """Drain and stop a version of MODEL; its number is never used again.

    \b
    clipper retire svm:1
    """
    command.show_change(command.server.retire(model, force=force, dry_run=dry_run))
