"""`clipper rollout`: move an application's queries to a new version in stages, with automatic
rollback.
"""

import time
from collections.abc import Callable, Iterator

import click

from clipper.cli.command_group import CommandGroup
from clipper.cli.output import dry, table
from clipper.cli.server_command import ServerCommand, with_server
from clipper.manage.rollouts.decisions import ERROR_RATE, GUARD
from clipper.manage.rows import ChangeResult, RolloutRow, SideRow


@click.group(
    cls=CommandGroup,
    default="start",
    short_help="Replace a version step by step; revert it automatically.",
)
def rollout() -> None:
    """Replace a version for an application step by step while guards hold. A violated guard reverts
    it.

    \b
    clipper deploy svm svm.onnx --behind
    clipper rollout svm:2 --app digits --canary 5% --hold 60s
    --guard "p99<20ms, error<1%, reward>=-1%"
    clipper rollout status
    """


@rollout.command("start", short_help="Start a rollout; the word `start` is optional.")
@click.argument("model", metavar="NAME:VERSION")
@click.option(
    "--app", "application", metavar="APP", required=True, help="Application to roll out to."
)
@click.option("--canary", metavar="SHARE", help="First share, such as 5%.  [the first of --stages]")
@click.option(
    "--stages", metavar="SHARES", help="Shares in percent, such as 5,25,50,100.  [5,25,50,100]"
)
@click.option(
    "--hold",
    metavar="TIME",
    default="60s",
    show_default=True,
    help="Minimum time of each stage: 60s, 5m, 1h.",
)
@click.option(
    "--guard",
    default=GUARD,
    show_default=True,
    help="Conditions that revert it when violated: see docs/managing.md.",
)
@click.option(
    "--error-rate",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=ERROR_RATE,
    show_default=True,
    help="Maximum probability of reverting a version that satisfies its guards.",
)
@dry
@with_server
def start(
    command: ServerCommand,
    model: str,
    application: str,
    canary: str | None,
    stages: str | None,
    hold: str,
    guard: str,
    error_rate: float,
    dry_run: bool,
) -> None:
    """Send a growing share of APP's queries to NAME:VERSION instead of the version that APP uses
    now.

    A user stays with one version. A stage ends when its time is over and every guard holds with
    enough observations. If a guard is violated, all queries return to the old version.

    \b
    clipper rollout start svm:2 --app digits --stages 5,50,100 --guard "p99<20ms, error<1%"
    """
    settings: dict[str, object] = {"hold": hold, "guard": guard, "error_rate": error_rate}
    settings |= {"canary": canary} if canary else {}
    settings |= {"stages": stages} if stages else {}
    command.show_change(command.server.rollout(application, model, dry_run=dry_run, **settings))


@rollout.command("status", short_help="Show the progress of rollouts, and what they wait for.")
@click.argument("application", metavar="[APP]", required=False, default="")
@with_server
def status(command: ServerCommand, application: str) -> None:
    """Show the last rollout of each application, or of APP: its stage, figures and guards, and what
    it waits for.

    \b
    clipper rollout status digits
    """
    rows = command.server.rollouts(application)
    none = "no rollouts. To start one: clipper rollout NAME:VERSION --app APP"
    command.output.show(rows, lambda: "\n\n".join("\n".join(_lines(row)) for row in rows) or none)


def _lines(row: RolloutRow) -> Iterator[str]:
    stages = " -> ".join(
        f"[{share:.4g}]" if i == row["stage"] else f"{share:.4g}"
        for i, share in enumerate(row["stages"])
    )
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["stage_us"] / 1e6))
    yield (
        f"{row['application']}: {row['model']} instead of {row['control']}: {row['state']},"
        f" {stages}, since {since}"
    )
    yield f"  {row['waits'] if 'waits' in row else row['reason']}"
    head = ("  SIDE", "ANSWERS", "DEFAULTS", "P50", "P99", "FEEDBACK", "REWARD")
    if row["new"] and row["before"]:
        sides = _side(row["model"], row["new"]), _side(row["control"], row["before"])
        yield table([head, *sides], "")
    for guard in row["guards"]:
        yield f"  {guard['guard']}: {guard['outcome']} ({guard['reason']})"


def _side(name: str, counts: SideRow) -> tuple[str, ...]:
    times = [
        "-" if us is None else f"{us / 1000:.2f} ms" for us in (counts["p50_us"], counts["p99_us"])
    ]
    reward = f"{counts['reward'] / counts['feedbacks']:.3f}" if counts["feedbacks"] else "-"
    return (
        f"  {name}",
        str(counts["answers"]),
        str(counts["defaults"]),
        *times,
        f"{counts['feedbacks']:g}",
        reward,
    )


def _mover(name: str, short: str, long: str) -> click.Command:
    @click.argument("application", metavar="APP")
    @dry
    @with_server
    def move(command: ServerCommand, application: str, dry_run: bool) -> None:
        verb: Callable[..., ChangeResult] = getattr(command.server, f"{name}_rollout")
        command.show_change(verb(application, dry_run=dry_run))

    return click.command(
        name, short_help=short, help=f"{long}\n\n\b\nclipper rollout {name} digits"
    )(move)


for _name, _short, _long in (
    (
        "pause",
        "Keep the current share.",
        "Keep APP's rollout at its share; a broken guard reverts it all the same.",
    ),
    ("resume", "Continue after a pause.", "Let APP's rollout grow again; its stage starts again."),
    (
        "abort",
        "Return to the old version now.",
        "Send all of APP's queries to the version before again.",
    ),
    (
        "promote",
        "Use the new version for all queries now.",
        "Send all of APP's queries to the new version, whatever the guards report.",
    ),
):
    rollout.add_command(_mover(_name, _short, _long))
