"""Commands for the applications of a running server."""

import click

from clipper.cli.catalog.specification import members_of, with_options_of
from clipper.cli.output import dry, table
from clipper.cli.server_command import ServerCommand, short, with_server
from clipper.manage.rows import ApplicationRow
from clipper.spec.application import ApplicationSpec


@click.command(short_help="List applications.")
@with_server
def apps(command: ServerCommand) -> None:
    """List the applications: models, SLO, and default answer.

    \b
    clipper apps
    """
    rows = command.server.applications()
    head = ("APPLICATION", "INPUT", "MODELS", "SLO", "POLICY", "DEFAULT")
    lines = [
        (
            row["name"],
            row["input"],
            ",".join(_role_settings(row)) or "-",
            f"{row['slo_ms']:g} ms",
            row["policy"],
            short(row["default"]),
        )
        for row in rows
    ]
    command.output.show(
        rows,
        lambda: table(
            [head, *lines], "no applications. To create one: clipper app set NAME --model MODEL"
        ),
    )


def _role_settings(row: ApplicationRow) -> list[str]:
    return [
        f"{model} ({row['roles'][model]})" if model in row["roles"] else model
        for model in row["models"]
    ]


@click.command("set", short_help="Create or change an application.")
@click.argument("name")
@with_options_of(ApplicationSpec)
@dry
@with_server
def app_set(command: ServerCommand, name: str, dry_run: bool, **values: object) -> None:
    """Create application NAME, or change the given settings of it.

    \b
    clipper app set digits --model svm --model forest:2 --slo-ms 20 --default -1
    """
    given = members_of(ApplicationSpec, values)
    command.show_change(command.server.set_application(name, dry_run=dry_run, **given))


@click.command("show")
@click.argument("name")
@with_server
def app_show(command: ServerCommand, name: str) -> None:
    """Show all settings of application NAME.

    \b
    clipper app show digits
    """
    row = command.server.application(name)
    command.output.show(
        row, lambda: "\n".join(f"{key:16}{short(value)}" for key, value in row.items())
    )
