"""`clipper ps` and `clipper logs`."""

import json
import sys
import time
from typing import Any

import click

from clipper.cli.server_command import ServerCommand, table, until_interrupted, with_server
from clipper.errors import ClipperError, NoServer, UnknownModel

_CHECK_S = 0.3
_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "bright_red")
_STATE_COLOURS = {"ready": "green", "failed": "red", "failing": "red"}


@click.command(short_help="What runs: state, replicas, memory, queue, batch, last error.")
@with_server
def ps(command: ServerCommand) -> None:
    """Each version in service, how it does, and the command that helps where it does not.

    BATCH is the largest batch that a replica takes now, and why: how the size is found, the SLO it
    has to keep, and how long its rows take. RSS is the memory of its processes on the server's
    host; in brackets PSS, in which a page that n processes share counts 1/n. START is how its
    processes were started: forked from one that had imported their frameworks, or plain; -o json
    has the reason.

    \b
    clipper ps
    clipper ps -o json
    """
    rows = command.server.ps()
    command.show(
        rows,
        lambda: table(
            [PS_HEAD, *map(ps_line, rows)],
            "no models. To add one: clipper deploy NAME module:function",
        ),
    )


PS_HEAD = (
    "NAME",
    "VER",
    "ROLE",
    "STATE",
    "REPL",
    "RSS (PSS)",
    "START",
    "QUEUE",
    "BATCH (why)",
    "LAST ERROR",
)


def ps_line(row: dict[str, Any]) -> tuple[str, ...]:
    """Format a row of `ps`."""
    named = {role for role in row["roles"].values() if role != "primary"}
    role = ",".join(sorted(named)) if named else "latest" if row["latest"] else "-"
    batch = f"{row['batch']} ({row['why']})" if row["batch"] else "-"
    error = row["error"] + (f"  -> {row['next']}" if row["next"] and row["error"] else "")
    memory = f"{row['rss_bytes'] / 1e6:.0f} MB" if row["rss_bytes"] else "-"
    if row.get("pss_bytes"):
        memory += f" ({row['pss_bytes'] / 1e6:.0f})"
    starts = {start.partition(":")[0] for start in row.get("starts", {}).values()}
    replicas = f"{row['ready']}/{row['wanted']}"
    return (
        row["name"],
        str(row["version"]),
        role,
        row["state"],
        replicas,
        memory,
        ",".join(sorted(starts)) or "-",
        str(row["queued"]),
        batch,
        error or "-",
    )


@click.command(short_help="What the containers of a model write.")
@click.argument("model")
@click.option(
    "--replica",
    type=click.IntRange(min=0),
    help="Of this container alone.  [of all with -f, else of the first]",
)
@click.option(
    "-f", "--follow", is_flag=True, help="Go on with what they write from now, until Ctrl-C."
)
@with_server
def logs(command: ServerCommand, model: str, replica: int | None, follow: bool) -> None:
    """The last lines that a container of MODEL wrote; with -f, what all of them write.

    Followed lines begin with their container. A container's restart does not end it, nor the
    server's: it waits. The server keeps the last 200 lines of each; when more come in between, it
    says how many are lost. With -o json, an object a line.

    \b
    clipper logs svm:2 --replica 1
    clipper logs svm -f
    """
    if follow:
        with until_interrupted():
            _follow(command, model, replica)
        return
    lines = command.server.logs(model, replica or 0)
    command.show(lines, lambda: "\n".join(lines) or f"{model}/{replica or 0} has written nothing")


def _follow(command: ServerCommand, model: str, replica: int | None) -> None:
    after, gone, seen = "", False, False
    while True:
        try:
            found = command.server.follow(model, after)
            _print_status(gone, command, "the server is back")
            gone, seen, after = False, True, found["after"] or after
            for one in found["replicas"]:
                if replica in (None, one["replica"]):
                    _print(command, f"{found['model']}/{one['replica']}", one)
        except (NoServer, UnknownModel) as error:
            if not seen:
                raise
            _print_status(not gone, command, f"{error.message} Waiting for it; Ctrl-C ends this.")
            gone = True
        except ClipperError:  # the server is closing
            if not seen:
                raise
        time.sleep(_CHECK_S)


def _print_status(wanted: bool, command: ServerCommand, text: str) -> None:
    if wanted:
        click.secho(f"-- {text}", dim=True, err=True)


def _print(command: ServerCommand, container: str, one: dict[str, Any]) -> None:
    if one["lost"]:
        _print_status(
            True,
            command,
            f"{container}: {one['lost']} lines are lost: they came faster than they were read",
        )
    colour = _COLOURS[one["replica"] % len(_COLOURS)]
    for line in one["lines"]:
        if command.as_json:
            click.echo(json.dumps({"container": container, "line": line}))
        else:
            click.echo(f"{click.style(container, fg=colour)} | {line}")
    sys.stdout.flush()


def state_colour(state: str) -> str:
    """Return the colour of a state."""
    return _STATE_COLOURS.get(state, "yellow")
