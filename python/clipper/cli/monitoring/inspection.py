"""Commands that inspect a running server: models, counters, history."""

from pathlib import Path

import click

from clipper.cli.output import table
from clipper.cli.server_command import ServerCommand, with_server
from clipper.manage.change_words import moment_of, subject_of
from clipper.manage.rows import ChangedRecord


@click.command(short_help="List models: versions, replicas, applications.")
@click.argument("name", required=False, default="")
@with_server
def models(command: ServerCommand, name: str) -> None:
    """List each version in service, of NAME or of all models. `*` marks the latest version, which
    NAME without a version refers to.

    \b
    clipper models
    clipper models svm -o json
    """
    rows = command.server.models(name)
    head = ("MODEL", "", "INPUT", "REPLICAS", "APPLICATIONS", "SOURCE")
    lines = [
        (
            f"{row['name']}:{row['version']}",
            "*" if row["latest"] else "",
            row["input"],
            f"{row['has']}/{row['wanted']}",
            ",".join(row["applications"]) or "-",
            Path(row["target"]).name or "started elsewhere",
        )
        for row in rows
    ]
    command.output.show(
        rows,
        lambda: table([head, *lines], "no models. To add one: clipper deploy NAME module:function"),
    )


@click.command(short_help="Show counters of models and applications.")
@with_server
def stats(command: ServerCommand) -> None:
    """Show counters of models and applications. With -o json, all statistics of the server.

    \b
    clipper stats -o json
    """
    stats_now = command.server.stats()
    models_ = [("MODEL", "REPLICAS", "QUEUED", "P50 ms", "P99 ms")] + [
        (
            name,
            f"{row['has']}/{row['wanted']}",
            row.get("queued", 0),
            *_quantiles(row.get("latency_us")),
        )
        for name, row in stats_now["models"].items()
    ]
    apps_ = [("APPLICATION", "QUERIES", "OK", "DEFAULTS")] + [
        (
            name,
            row.get("queries", 0),
            row["answers"].get("ok", 0),
            _total(row["answers"].get("default", {})),
        )
        for name, row in stats_now["applications"].items()
    ]
    command.output.show(
        stats_now, lambda: f"{table(models_, 'no models')}\n\n{table(apps_, 'no applications')}"
    )


def _quantiles(histogram: object) -> tuple[str, str]:
    found = histogram if isinstance(histogram, dict) else {}
    low, high = (f"{found[key] / 1000:.2f}" if key in found else "-" for key in ("p50", "p99"))
    return low, high


def _total(counts: dict[str, int] | int) -> int:
    return sum(counts.values()) if isinstance(counts, dict) else int(counts)


def _what(one: ChangedRecord) -> str:
    """Return what a record that changed is about; of a rollout, also why."""
    subject, after = subject_of(one["key"]), one["after"]
    if one["key"].startswith("rollout/") and isinstance(after, dict):
        return f"{subject} ({after['state']}: {after['reason']})"
    return subject


@click.command(short_help="List who changed what, and when.")
@click.option(
    "-n",
    "--count",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of changes, newest last.",
)
@with_server
def history(command: ServerCommand, count: int) -> None:
    """List changes: who changed what, and when. With -o json, each record before and after.

    The last 1000 changes are stored.

    \b
    clipper history -n 5
    """
    rows = command.server.history(count)
    head = ("#", "WHEN", "WHO", "VERB", "WHAT")
    lines = [
        (
            row["number"],
            moment_of(row["time_us"]),
            row["actor"],
            row["verb"],
            ", ".join(dict.fromkeys(map(_what, row["changed"]))),
        )
        for row in rows
    ]
    command.output.show(rows, lambda: table([head, *lines], "nothing has changed yet"))
