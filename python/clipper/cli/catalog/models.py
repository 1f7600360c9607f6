"""Commands that change the models of a running server."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.catalog.specification import members_of, with_options_of
from clipper.cli.output import dry
from clipper.cli.server_command import ServerCommand, with_server
from clipper.errors import ClipperError
from clipper.spec.model import ModelSpec

if TYPE_CHECKING:
    from clipper.manage.client import Client

_PROGRESS_S = 0.5


@click.command(short_help="Deploy a model, or a new version of it.")
@click.argument("name")
@click.argument("target", required=False)
@with_options_of(ModelSpec)
@click.option(
    "--no-warmup",
    is_flag=True,
    help="Evaluate nothing before it is ready, for calls with side effects.",
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
    no_warmup: bool,
    behind: bool,
    no_wait: bool,
    dry_run: bool,
    **values: object,
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
    settings = members_of(ModelSpec, values)
    if (target is None) == ("command" not in settings):
        raise click.UsageError("Give either TARGET, or a program by --command.")
    if "schema" in settings and settings.keys() & {"input", "output"}:
        raise click.BadParameter(
            "it cannot be combined with --input or --output-type.", param_hint="--schema"
        )
    if no_warmup:
        settings.setdefault("warmup", False)
    if "command" in settings:
        settings.setdefault("folder", str(Path.cwd()))
    code = [str(Path(place).absolute()) for place in settings.pop("code", ())]
    if code := code or home_of(target or ""):
        settings["code"] = code
    settings |= {"promote": not behind, "wait": not no_wait, "dry_run": dry_run}
    shows = sys.stderr.isatty() and not dry_run
    with _progress(command, name) if shows else contextlib.nullcontext():
        change = command.server.deploy(name, target, **settings)
    command.show_change(change)


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
