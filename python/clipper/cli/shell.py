"""The `clipper` command. Subcommands import what they need when they run."""

import platform
import sys
from typing import Final

import click

from clipper.cli.catalog.applications import apps
from clipper.cli.catalog.models import deploy
from clipper.cli.catalog.queries import feedback, predict
from clipper.cli.catalog.registry import registry
from clipper.cli.catalog.rollouts import rollout
from clipper.cli.catalog.verbs import command_of
from clipper.cli.command_group import CommandGroup
from clipper.cli.export.files import export, import_
from clipper.cli.export.manifests import chart, compose, dockerfile, kubernetes, ray
from clipper.cli.measurement.bench import bench
from clipper.cli.measurement.evaluating import evaluate
from clipper.cli.measurement.profiling import profile
from clipper.cli.mesh.cluster import cluster
from clipper.cli.mesh.models import mesh
from clipper.cli.monitoring.inspection import history, models, stats
from clipper.cli.monitoring.status import logs, ps
from clipper.cli.monitoring.top import top
from clipper.cli.nouns import NOUNS, placed
from clipper.cli.output import CommandOutput, with_output
from clipper.cli.params.shards import params
from clipper.cli.servers.config import config
from clipper.cli.servers.dashboard import dashboard
from clipper.cli.servers.key import key
from clipper.cli.servers.project import down, init
from clipper.cli.servers.serve import serve
from clipper.cli.servers.up import up
from clipper.errors import ClipperError
from clipper.manage.verbs.table import VERBS
from clipper.version import VERSION

_SECTIONS: Final = {
    "Start": ("serve", "init", "up", "down", "dashboard", "demo", "doctor", "config", "cluster"),
    "Things": (
        *("model", "app", "stream", "name", "table", "node", "store", "key"),
        *("mesh", "params", "rollout"),
    ),
    "Queries": ("predict", "feedback"),
    "Status": ("ps", "top", "logs", "stats", "history"),
    "Measuring": ("bench", "profile", "evaluate"),
    "Files": ("export", "import"),
    "Short forms": (
        *("models", "deploy", "promote", "rollback", "scale", "retire"),
        *("apps", "link", "unlink", "challenge", "shadow", "registry"),
    ),
    "Help": ("help", "version", "completion"),
}


@click.group(
    cls=CommandGroup,
    sections=_SECTIONS,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)
@click.version_option(VERSION, "--version", "-V", message=f"clipper {VERSION}")
def main() -> None:
    """Serve predictions from models in any framework, each by its own deadline.

    \b
    clipper serve svm.onnx                   serve a model at once
    clipper init, then clipper up            serve what a file declares
    clipper model deploy svm svm.onnx        clipper NOUN VERB changes a running server
    clipper help model deploy                explain a command, with an example
    """


@main.command("help", short_help="Explain a command.")
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def help_(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Explain a command with an example, as its --help does.

    \b
    clipper help model deploy
    """
    root = ctx.find_root()
    main.main([*words, "--help"], prog_name=root.info_name, standalone_mode=False)


@main.command(short_help="Print the version.")
@with_output
def version(output: CommandOutput) -> None:
    """Print the version, with that of Python and the platform.

    \b
    clipper version
    """
    python = platform.python_version()
    found = {"clipper": VERSION, "python": python, "platform": platform.platform()}
    output.say(found, f"clipper {VERSION}, Python {python}, {platform.platform()}")


@main.command(short_help="Serve five scikit-learn models, with a live table.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    help="Seconds until it stops.  [10 without a terminal, else at q]",
)
@click.option(
    "--rate",
    type=click.FloatRange(1, 5000),
    default=300,
    show_default=True,
    help="Queries per second, on average.",
)
@click.option(
    "--state",
    metavar="DIR",
    default="",
    help="Keep the models in DIR for the next demo.",
)
@click.option(
    "--plot",
    metavar="FILE.png",
    default="",
    help="Draw the learned shares and the events over time, as a PNG.",
)
@with_output
def demo(seconds: float | None, rate: float, state: str, output: CommandOutput, plot: str) -> None:
    """Serve five scikit-learn models of handwritten digits, with a live table.

    Trains them on scikit-learn's digits, starts each in its own processes, and sends queries. Shows
    rate, latency, batches, cache, the share of answers by the deadline, and how two policies learn
    from feedback: exp3 which model to query, stacking how to weigh all of them. Keys: d makes the
    best model return wrong labels, and restores it; k kills a container, s freezes one for 3 s, v
    changes the view, + and - the rate, q quits.

    \b
    clipper demo
    clipper demo --seconds 10 --rate 500
    clipper demo --seconds 5 -o json | python -m json.tool
    clipper demo --seconds 30 --plot shares.png

    Exit code 1 when nothing was answered, or nonsense. It needs scikit-learn: pip install
    "clipper-serving[demo]"
    """
    from clipper_demo import DemoOptions, run

    sys.exit(run(DemoOptions(seconds, rate, state, output.is_data, VERSION, plot)))


@main.command(short_help="Check what a server needs on this machine.")
@with_output
def doctor(output: CommandOutput) -> None:
    """Check what a server needs on this machine: the compiled core, a container that answers, a
    disk that syncs.

    Each line is ok, warn, fail or skip, with the next step. Exit code 1 if a check fails.

    \b
    clipper doctor
    """
    from clipper.cli.servers.doctor import examine

    findings = examine()
    if output.is_data:
        output.emit([finding._asdict() for finding in findings])
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red", "skip": None}
        for finding in findings:
            click.echo(
                f"{click.style(f'{finding.verdict:4}', fg=colours[finding.verdict])} "
                f" {finding.text}"
            )
    sys.exit(any(finding.verdict == "fail" for finding in findings))


@main.command(short_help="Print the script for shell completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script for SHELL that completes commands and options with the tab key.

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
    *NOUNS,
    init,
    serve,
    up,
    down,
    dashboard,
    config,
    export,
    import_,
    models,
    apps,
    deploy,
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
    cluster,
    params,
):
    main.add_command(_verb)
for _verb in (dockerfile, compose, kubernetes, chart, ray):
    export.add_command(_verb)
for _row in VERBS:
    if _row.command and "command" not in _row.by_hand:
        _noun, _word = _row.command.split()
        _group = main.commands[_noun]
        assert isinstance(_group, CommandGroup)
        _made = command_of(_row)
        _group.add_command(_made)
        if _noun in ("model", "app") and _word in _SECTIONS["Short forms"]:
            main.add_command(placed(_made, f"clipper {_row.command}", f"clipper {_word}"))
