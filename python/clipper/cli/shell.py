"""The `clipper` command. Subcommands import what they need when they run."""

import json
import sys

import click

from clipper.cli.applications import app, apps, challenge, link, shadow, unlink
from clipper.cli.bench import bench
from clipper.cli.cluster import cluster
from clipper.cli.command_group import CommandGroup
from clipper.cli.config import config
from clipper.cli.evaluating import evaluate
from clipper.cli.export import export, import_
from clipper.cli.inspection import history, models, stats
from clipper.cli.key import key
from clipper.cli.manifests import chart, compose, dockerfile, kubernetes
from clipper.cli.mesh import mesh
from clipper.cli.models import deploy, promote, retire, rollback, scale
from clipper.cli.node import node
from clipper.cli.params import params
from clipper.cli.profiling import profile
from clipper.cli.project import down, init
from clipper.cli.queries import feedback, predict
from clipper.cli.registry import registry
from clipper.cli.rollouts import rollout
from clipper.cli.status import logs, ps
from clipper.cli.top import top
from clipper.cli.up import up
from clipper.errors import ClipperError


def _version() -> str:
    from clipper import __version__

    return __version__


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"clipper {_version()}")
        ctx.exit()


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
def main() -> None:
    """Predictions from models in any framework, each by its own deadline.

    \b
    clipper demo                    see it work: five models, live
    clipper init                    write a first clipper.toml, and a model that works
    clipper doctor                  see whether this machine is ready
    clipper up clipper.toml         serve what a file declares
    clipper node --store URL        be one node of a mesh of many models
    clipper deploy NAME TARGET      add a model to the server that runs here
    clipper ps, clipper top         how what it serves does, now and second by second
    clipper mesh ps                 thousands of models, loaded when they are asked for
    clipper bench APP --rate 500    how fast it answers
    clipper profile MODEL           how long a model takes, and what an SLO needs
    clipper config show             every setting, with its unit and origin
    clipper VERB --help             more about one of them, with an example
    """


@main.command()
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    help="Stop after so long  [10 without a terminal, else at q]",
)
@click.option(
    "--rate",
    type=click.FloatRange(1, 5000),
    default=300,
    show_default=True,
    help="Queries a second, on average.",
)
@click.option(
    "--state",
    metavar="DIR",
    default="",
    help="Keep the models in DIR; the next demo finds them there.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the summary as JSON, and nothing else, on stdout.",
)
@click.option(
    "--plot",
    metavar="FILE.png",
    default="",
    help="Draw what was learned, and what happened when, as a PNG.",
)
def demo(seconds: float | None, rate: float, state: str, as_json: bool, plot: str) -> None:
    """Serve five scikit-learn models of handwritten digits, and watch.

    Trains them on scikit-learn's own scans, starts each in processes of its own, sends queries, and
    shows what happens: rate, latency, batches, cache, and how many answers came by the deadline;
    and how two policies learn from feedback whom to ask (exp3) and whom to believe (stacking).
    Keys: d makes the best model give wrong labels, and mends it; k kills a container, s freezes one
    for 3 s, v changes the view, + and - the rate, q quits.

    \b
    clipper demo
    clipper demo --seconds 10 --rate 500
    clipper demo --seconds 5 --json | python -m json.tool
    clipper demo --seconds 30 --plot shares.png

    Exit code 1 when nothing was answered, or nonsense. It needs scikit-learn: pip install
    "clipper-serving[demo]"
    """
    from clipper.demo import DemoOptions, run

    sys.exit(run(DemoOptions(seconds, rate, state, as_json, _version(), plot)))


@main.command(short_help="Try what a server needs on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def doctor(as_json: bool) -> None:
    """Try what a server needs on this machine: the compiled core, a container that answers, a disk
    that keeps.

    Each line is ok, warn, fail or skip, with the next step. Exit code 1 when something fails.

    \b
    clipper doctor
    """
    from clipper.cli.doctor import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red", "skip": None}
        for finding in findings:
            click.echo(
                f"{click.style(f'{finding.verdict:4}', fg=colours[finding.verdict])} "
                f" {finding.text}"
            )
    sys.exit(any(finding.verdict == "fail" for finding in findings))


@main.command(short_help="Print what makes a shell complete verbs.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script for SHELL, after which the tab key completes verbs and options.

    \b
    clipper completion bash >> ~/.bashrc
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise ClipperError(f"no completion for {shell!r}.", hint="Shells: bash, zsh, fish.")
    root = ctx.find_root()
    click.echo(kind(root.command, {}, "clipper", "_CLIPPER_COMPLETE").source())


for _verb in (
    init,
    up,
    down,
    config,
    export,
    import_,
    models,
    apps,
    app,
    deploy,
    promote,
    rollback,
    scale,
    retire,
    link,
    unlink,
    challenge,
    shadow,
    ps,
    top,
    logs,
    history,
    stats,
    predict,
    feedback,
    evaluate,
    key,
    bench,
    profile,
    rollout,
    mesh,
    registry,
    node,
    cluster,
    params,
):
    main.add_command(_verb)
for _verb in (dockerfile, compose, kubernetes, chart):
    export.add_command(_verb)
