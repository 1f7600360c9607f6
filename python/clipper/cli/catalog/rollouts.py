"""`clipper rollout`: move an application's queries to a new version in stages, with automatic
rollback.
"""

import time
from collections.abc import Iterator

import click

from clipper.cli.command_group import CommandGroup
from clipper.cli.output import table
from clipper.cli.server_command import ServerCommand, with_server
from clipper.manage.rows import RolloutRow, SideRow


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
