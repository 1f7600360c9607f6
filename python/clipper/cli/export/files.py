"""`clipper export` and `clipper import`: files for other tools and other servers."""

import json
import os
import sys
from pathlib import Path

import click

from clipper.cli.command_group import CommandGroup
from clipper.cli.output import dry
from clipper.cli.server_command import ServerCommand, with_server


@click.group(cls=CommandGroup)
def export() -> None:
    """Write files for other tools or another server.

    \b
    clipper export state state.json                     models, applications, learned state
    clipper export grafana > clipper-dashboard.json     a dashboard for Grafana
    clipper export alerts > clipper-alerts.yml          alert rules for Prometheus
    clipper export openapi > clipper-openapi.json       the HTTP interface, for code generators
    """


@export.command(short_help="Print the OpenAPI document.")
@click.option(
    "--management",
    is_flag=True,
    help="Of the management address, instead of the query address.",
)
@click.option("--plain", is_flag=True, help="Without applications; needs no server.")
@with_server
def openapi(command: ServerCommand, management: bool, plain: bool) -> None:
    """Print the OpenAPI 3.1 document of the running server, with its applications, as JSON.

    \b
    clipper export openapi > clipper-openapi.json
    clipper export openapi --plain
    """
    if plain:
        from clipper.manage.http.described import plain_document

        click.echo(json.dumps(plain_document(management=management), indent=2))
    else:
        click.echo(json.dumps(command.server.openapi(management=management), indent=2))


@export.command(short_help="Print a Grafana dashboard.")
def grafana() -> None:
    """Print a Grafana dashboard as JSON: Dashboards, New, Import in Grafana. Its data are what
    Prometheus scrapes from GET /metrics.

    \b
    clipper export grafana > clipper-dashboard.json
    """
    from clipper.metrics.grafana import dashboard

    click.echo(json.dumps(dashboard(), indent=2))


@export.command(short_help="Print Prometheus alert rules.")
def alerts() -> None:
    """Print alert rules as YAML: a file for `rule_files` of prometheus.yml.

    \b
    clipper export alerts > clipper-alerts.yml
    """
    import importlib.resources

    click.echo((importlib.resources.files("clipper.metrics") / "alerts.yml").read_text(), nl=False)


@export.command("state", short_help="Write the state of a server as one file.")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@with_server
def export_state(command: ServerCommand, file: Path) -> None:
    """Write models, applications and learned state to FILE, or - for stdout.

    \b
    clipper export state state.json
    """
    state = command.server.export_state()
    if str(file) == "-":
        click.echo(state, nl=False)
        return
    with open(
        os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb"
    ) as out:
        out.write(state)
    command.output.show(
        {"file": str(file), "bytes": len(state)}, lambda: f"wrote {len(state)} bytes to {file}"
    )


@click.command("import", short_help="Add an exported state.")
@click.argument(
    "file", type=click.Path(dir_okay=False, exists=True, allow_dash=True, path_type=Path)
)
@dry
@with_server
def import_(command: ServerCommand, file: Path, dry_run: bool) -> None:
    """Add the state that `clipper export state` wrote. The models in FILE are executable code:
    import only files that you trust.

    \b
    clipper import state.json
    """
    state = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    command.show_change(command.server.import_state(state, dry_run=dry_run))
