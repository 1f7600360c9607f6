"""`clipper ps` and `clipper logs`."""

import sys
import time

import click

from clipper.cli.output import table
from clipper.cli.server_command import ServerCommand, until_interrupted, with_server
from clipper.errors import ClipperError, NoServer, UnknownModel
from clipper.foreign_text import printable
from clipper.manage.rows import ProcessRow, ReplicaLines

_CHECK_S = 0.3
_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "bright_red")


@click.command(short_help="Show what runs: state, replicas, memory, queue, batch, last error.")
@with_server
def ps(command: ServerCommand) -> None:
    """Show each version in service, its state, and the command that helps if it has a problem.

    BATCH is the current limit of the batch size; in brackets are the batching mode, the SLO, and
    the latency of the rows. RSS is the memory of its processes on the server's host; in brackets
    PSS, in which a page that n processes share counts 1/n. START is how its processes were started:
    forked from a process that has imported their frameworks, or plain; -o json has the reason.

    \b
    clipper ps
    clipper ps -o json
    """
    rows = command.server.ps()
    if warning := command.server.about()["store"]:
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    command.output.show(
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


def ps_line(row: ProcessRow) -> tuple[str, ...]:
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


@click.command(short_help="Print the output of a model's containers.")
@click.argument("model")
@click.option(
    "--replica",
    type=click.IntRange(min=0),
    help="Only this replica.  [all with -f, else the first]",
)
@click.option(
    "-f", "--follow", is_flag=True, help="Print new lines as they are written, until Ctrl-C."
)
@with_server
def logs(command: ServerCommand, model: str, replica: int | None, follow: bool) -> None:
    """Print the last lines that a container of MODEL wrote. With -f, print new lines of all its
    containers.

    Followed lines begin with the name of their container. Following continues after a restart of a
    container or of the server. The server keeps the last 200 lines of each container; if more come
    between two reads, the number of lost lines is printed. With -o json, each line is an object.

    \b
    clipper logs svm:2 --replica 1
    clipper logs svm -f
    """
    if follow:
        with until_interrupted():
            _follow(command, model, replica)
        return
    lines = command.server.logs(model, replica or 0)
    command.output.show(
        lines,
        lambda: (
            "\n".join(map(_for_terminal, lines)) or f"{model}/{replica or 0} has written nothing"
        ),
    )


def _for_terminal(line: str) -> str:
    """Return a line that a model has written as it may be printed: unchanged for a file or a pipe,
    and without what a terminal would obey."""
    return printable(line) if sys.stdout.isatty() else line


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


def _print(command: ServerCommand, container: str, one: ReplicaLines) -> None:
    if one["lost"]:
        _print_status(
            True,
            command,
            f"{container}: {one['lost']} lines are lost: they were written faster than they were"
            " read",
        )
    colour = _COLOURS[one["replica"] % len(_COLOURS)]
    for line in one["lines"]:
        if command.output.is_data:
            command.output.emit({"container": container, "line": line}, one_of_many=True)
        else:
            click.echo(f"{click.style(container, fg=colour)} | {_for_terminal(line)}")
    sys.stdout.flush()
