"""Commands for the Redis streams of a running server."""

import click

from clipper.cli.catalog.specification import members_of, with_options_of
from clipper.cli.output import dry, table
from clipper.cli.server_command import ServerCommand, short, with_server
from clipper.manage.rows import StreamRow
from clipper.settings.streams import ModelStreamSettings, StreamSettings


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


@click.command("create", short_help="Answer the records of a stream by an application.")
@click.argument("name")
@with_options_of(StreamSettings)
@dry
@with_server
def stream_create(command: ServerCommand, name: str, dry_run: bool, **values: object) -> None:
    """Answer the records of a Redis stream by an application, until the stream is stopped or the
    server ends. To have it at each start, declare [streams.NAME] in the file.

    \b
    clipper stream create digits --app digits --redis redis://127.0.0.1:6379/0
    """
    given = members_of(StreamSettings, values)
    command.show_change(command.server.streams.create(name, dry_run=dry_run, **given))


@click.command("create-models", short_help="Deploy the models of a stream.")
@click.argument("name")
@with_options_of(ModelStreamSettings)
@dry
@with_server
def stream_create_models(
    command: ServerCommand, name: str, dry_run: bool, **values: object
) -> None:
    """Deploy the models of a Redis stream as next versions, until the stream is stopped or the
    server ends. To have it at each start, declare [model_streams.NAME] in the file.

    \b
    clipper stream create-models live --redis redis://127.0.0.1:6379/0
    """
    given = members_of(ModelStreamSettings, values)
    command.show_change(command.server.streams.create_models(name, dry_run=dry_run, **given))


@click.command("stop", short_help="Stop a stream.")
@click.argument("name")
@dry
@with_server
def stream_stop(command: ServerCommand, name: str, dry_run: bool) -> None:
    """Read no more records of stream NAME, answer those that were read, and stop. Records that were
    not read stay in Redis.

    \b
    clipper stream stop digits
    """
    command.show_change(command.server.streams.stop(name, dry_run=dry_run))
