"""Commands for the applications of a running server."""

import click

from clipper.cli.amounts import Share
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


@click.command(short_help="Link a model to an application.")
@click.argument("application", metavar="APP")
@click.argument("model")
@click.option(
    "--role",
    default="",
    help="primary, shadow, canary or challenger(share=0.1): see docs/selection.md.",
)
@dry
@with_server
def link(command: ServerCommand, application: str, model: str, role: str, dry_run: bool) -> None:
    """Link MODEL to APP: NAME for the latest version, or NAME:VERSION.

    \b
    clipper link digits svm
    """
    command.show_change(command.server.link(application, model, role, dry_run=dry_run))


@click.command(short_help="Remove a model from an application.")
@click.argument("application", metavar="APP")
@click.argument("model")
@dry
@with_server
def unlink(command: ServerCommand, application: str, model: str, dry_run: bool) -> None:
    """Remove MODEL from APP. The model keeps running.

    \b
    clipper unlink digits svm
    """
    command.show_change(command.server.unlink(application, model, dry_run=dry_run))


@click.command(short_help="Let a model answer a share of an application's queries.")
@click.argument("application", metavar="APP")
@click.argument("model")
@click.option(
    "--share",
    type=Share(0, 1, min_open=True, max_open=True),
    default=0.1,
    metavar="SHARE",
    help="Share of the queries, as 5% or 0.05.  [10%]",
)
@dry
@with_server
def challenge(
    command: ServerCommand, application: str, model: str, share: float, dry_run: bool
) -> None:
    """Let MODEL alone answer a share of APP's queries. `clipper stats` shows its results.

    \b
    clipper deploy svm svm.onnx --behind
    clipper challenge digits svm:2 --share 5%
    """
    command.show_change(command.server.challenge(application, model, share, dry_run=dry_run))


@click.command(short_help="Send queries to a model without using its predictions.")
@click.argument("application", metavar="APP")
@click.argument("model")
@click.option(
    "--share",
    type=Share(0, 1, min_open=True),
    default=1.0,
    metavar="SHARE",
    help="Share of the queries, as 5% or 0.05.  [100%]",
)
@dry
@with_server
def shadow(
    command: ServerCommand, application: str, model: str, share: float, dry_run: bool
) -> None:
    """Send APP's queries to MODEL too, without using its predictions. `clipper stats` shows how
    often it agreed.

    \b
    clipper shadow digits svm:2
    """
    command.show_change(command.server.shadow(application, model, share, dry_run=dry_run))


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


@click.command("remove")
@click.argument("name")
@dry
@with_server
def app_remove(command: ServerCommand, name: str, dry_run: bool) -> None:
    """Delete application NAME. Its models keep running.

    \b
    clipper app remove digits
    """
    command.show_change(command.server.remove_application(name, dry_run=dry_run))
