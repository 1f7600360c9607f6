"""`clipper config`: show, check and describe settings."""

import json
from pathlib import Path

import click

from clipper.cli.command_group import CommandGroup
from clipper.cli.output import CommandOutput, with_output
from clipper.cli.servers.up import file_or_default, refuse_open


@click.group(cls=CommandGroup)
def config() -> None:
    """Show or check settings.

    \b
    clipper config show                  every setting with its value and origin
    clipper config check clipper.toml    check a file
    clipper config schema                print a JSON Schema, for editors
    CLIPPER_LIMITS__TASKS_MAX=1000 clipper config show
    """


@config.command(short_help="Print every setting, its value and its origin.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--changed", is_flag=True, help="Only settings that differ from the default.")
@with_output
def show(file: Path | None, changed: bool, output: CommandOutput) -> None:
    """Print every setting with its value, unit, default and origin: FILE (or ./clipper.toml), the
    environment, or default.

    \b
    clipper config show clipper.toml --changed
    """
    from clipper.config import load
    from clipper.config_schema import settings_of

    rows = [
        row
        for row in settings_of(load(file_or_default(file)))
        if not changed or row["origin"] != "default"
    ]
    if output.is_data:
        output.emit(rows)
    else:
        _print_settings(rows)


@config.command(short_help="Check a file.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@with_output
def check(file: Path | None, output: CommandOutput) -> None:
    """Check FILE (or ./clipper.toml), with all that `clipper up` would refuse: files, modules,
    policies, deciders, links, certificates, keys, and addresses that are taken or open to all. An
    error has the line and a suggestion. Addresses that a running server of this file has are not
    tried.

    \b
    clipper config check clipper.toml
    error: clipper.toml:14: unknown key 'slo' in [apps.digits] - did you mean 'slo_ms'?
    """
    from clipper.config import load
    from clipper.manage.checking import check_declared, check_start

    chosen = file_or_default(file)
    loaded = load(chosen)
    folder = str(chosen.absolute().parent) if chosen else ""
    refuse_open(loaded, insecure=False)
    notes = [*check_declared(loaded, folder), *check_start(loaded)]
    counted = (("key", loaded.origins), ("model", loaded.models), ("application", loaded.apps))
    counts = ", ".join(
        f"{len(things)} {noun}{'' if len(things) == 1 else 's'}" for noun, things in counted
    )
    found = {f"{noun}s": len(things) for noun, things in counted}
    lines = [*(f"note: {note}" for note in notes), f"ok: {chosen or 'defaults'}: {counts}"]
    output.say({"file": str(chosen or ""), "notes": notes, **found}, "\n".join(lines))


@config.command(short_help="Print a JSON Schema of the file.")
def schema() -> None:
    """Print a JSON Schema of the TOML file, for editors that complete and check.

    \b
    clipper config schema > clipper.schema.json
    """
    from clipper.config_schema import schema as schema_of

    click.echo(json.dumps(schema_of(), indent=2))


_UNBROKEN = 10_000  # columns, where no terminal breaks lines


def _print_settings(rows: list[dict[str, object]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim")
    for title in ("key", "value", "unit", "default", "origin"):
        table.add_column(title, overflow="fold")
    for row in rows:
        style = "bold" if row["origin"] != "default" else None
        plain = [_plain(row["value"]), str(row["unit"]), _plain(row["default"])]
        table.add_row(str(row["key"]), *plain, str(row["origin"]), style=style)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # one line per setting, for grep and cut
        console.width = _UNBROKEN
    console.print(table)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return str(value.get("mode", value))
    return value if isinstance(value, str) and value else json.dumps(value)
