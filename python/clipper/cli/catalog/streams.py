"""Commands for the Redis streams of a running server."""

import click

from clipper.cli.output import table
from clipper.cli.server_command import ServerCommand, short, with_server
from clipper.manage.rows import StreamRow


@click.command(short_help="List the streams that run.")
@with_server
def streams(command: ServerCommand) -> None:
    """List the Redis streams that the server reads: of records, which an application answers, and
    of models, which are deployed.

    \b
    clipper stream ls
    """
    rows = command.server.streams.list()
    head = ("STREAM", "KIND", "READS", "FOR", "READ", "DONE", "REFUSED", "TROUBLE")
    command.output.show(
        rows,
        lambda: table(
            [head, *map(_line, rows)],
            "no streams. To start one: clipper stream create NAME --app APP --redis URL",
        ),
    )


def _line(row: StreamRow) -> tuple[object, ...]:
    settings, stats = row["settings"], row["stats"]
    is_models = row["kind"] == "models"
    return (
        row["name"],
        row["kind"],
        settings["stream"] if is_models else settings["source"],
        "-" if is_models else settings["app"],
        stats["read"],
        stats["answered"],
        stats["refused"],
        stats["trouble"] or "-",
    )


@click.command("show", short_help="Show the settings and counts of a stream.")
@click.argument("name")
@with_server
def stream_show(command: ServerCommand, name: str) -> None:
    """Show all settings of stream NAME, and the counts of its records since its start.

    \b
    clipper stream show digits
    """
    row = command.server.streams.get(name)
    parts = {**row["settings"], **row["stats"]}
    lines = [f"{key:18}{short(value)}" for key, value in parts.items()]
    command.output.show(row, lambda: "\n".join([f"{name}, a stream of {row['kind']}", *lines]))
