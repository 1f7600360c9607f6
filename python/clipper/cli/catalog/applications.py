"""Commands for the applications of a running server."""

import click

from clipper.cli.amounts import Share
from clipper.cli.output import dry, table
from clipper.cli.server_command import ServerCommand, read_json, short, with_server
from clipper.manage.rows import ApplicationRow

_SETTINGS = (
    "slo_ms",
    "policy",
    "confidence_min",
    "input",
    "decider",
    "missing",
    "coverage",
    "context_table",
)


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
@click.option(
    "--model",
    "models_",
    metavar="MODEL",
    multiple=True,
    help="A model to query; may be repeated.",
)
@click.option("--slo-ms", type=float, help="Milliseconds from a query to its answer.")
@click.option("--default", metavar="JSON", help="The answer if no prediction arrives in time.")
@click.option("--policy", help="Selection policy, such as stacking or exp3(eta=0.05).")
@click.option("--decider", help="When to answer, such as 'majority within 12 ms, else first'.")
@click.option(
    "--confidence-min",
    type=float,
    help="Answers with a lower confidence are replaced by the default.",
)
@click.option("--input", metavar="TYPE", help="Type of one row.  [that of the first model]")
@click.option(
    "--missing",
    type=click.Choice(["mean", "skip"]),
    help="What replaces a number that is missing at the deadline.",
)
@click.option(
    "--coverage", type=float, help="Share of the prediction sets that must contain the truth."
)
@click.option(
    "--context-table",
    metavar="TABLE",
    help="Parameter table whose row of a user is the context of that user's queries.",
)
@click.option(
    "--output-tensor",
    metavar="NAME",
    help="CommandOutput that the policy combines, for models with several outputs.",
)
@dry
@with_server
def app_set(
    command: ServerCommand,
    name: str,
    models_: tuple[str, ...],
    default: str | None,
    output_tensor: str | None,
    dry_run: bool,
    **settings: object,
) -> None:
    """Create application NAME, or change the given settings of it.

    \b
    clipper app set digits --model svm --model forest:2 --slo-ms 20 --default -1
    """
    given = {key: settings[key] for key in _SETTINGS if settings[key] is not None}
    given |= {"default": read_json(default, "the default")} if default is not None else {}
    given |= {"output": output_tensor} if output_tensor is not None else {}
    command.show_change(
        command.server.set_application(name, models_ or None, dry_run=dry_run, **given)
    )


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
