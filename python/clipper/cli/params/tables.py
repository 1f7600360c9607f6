"""`clipper params create`, `alter`, `drop`, `erase`, `export` and others: commands on the tables of
a set, and what the commands of a set share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from clipper.cli.catalog.specification import members_of, with_options_of
from clipper.cli.output import CommandOutput, dry, with_output, would
from clipper.cli.servers.up import file_or_default
from clipper.spec.table import ALTERABLE, DIM_MAX, TableSpec

if TYPE_CHECKING:
    from clipper.params import Client

FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


def _chosen(ctx: click.Context, option: click.Parameter, given: Path | None) -> Path:
    from clipper.config import load

    return given if given is not None else Path(load(file_or_default(None)).params.folder)


in_folder = click.option(
    "--folder",
    type=FOLDER,
    callback=_chosen,
    help="Folder of the set.  [params.folder of clipper.toml, else .clipper-params]",
)


def of_set(verb: Callable[..., None]) -> Callable[..., None]:
    """Add the options --folder and -o to a command, which receives an CommandOutput."""
    return in_folder(with_output(verb))


def client_of(folder: Path) -> "Client":
    """Return a client of the set of a folder."""
    from clipper.params import Client

    return Client(folder)


@click.command(short_help="Print rows of a table by id.")
@click.argument("table")
@click.argument("ids", nargs=-1, required=True, type=int)
@of_set
def pull(table: str, ids: tuple[int, ...], folder: Path, output: CommandOutput) -> None:
    """Print rows of TABLE.

    \b
    clipper params pull users 3 17 --folder shop
    """
    with client_of(folder) as client:
        rows = client.pull(table, ids).tolist()
    text = "\n".join(
        f"{one}: {' '.join(f'{value:.6g}' for value in row)}"
        for one, row in zip(ids, rows, strict=True)
    )
    output.say({str(one): row for one, row in zip(ids, rows, strict=True)}, text)


@click.command(short_help="Create a table.")
@click.argument("table")
@click.argument("dim", type=click.IntRange(1, DIM_MAX))
@with_options_of(TableSpec)
@dry
@of_set
def create(
    table: str, dim: int, folder: Path, output: CommandOutput, dry_run: bool, **values: object
) -> None:
    """Create TABLE with rows of DIM floats on all shards. If it exists with the same settings,
    nothing changes.

    \b
    clipper params create users 64 --dtype f16 --set rate=0.05 --folder shop
    """
    from clipper.params.tables import checked

    spec = checked(TableSpec(table, dim, **members_of(TableSpec, values)))
    with client_of(folder) as client:
        if not dry_run:
            client.create(spec)
    _show_spec(spec, output, dry_run)


def _show_spec(spec: TableSpec, output: CommandOutput, dry_run: bool) -> None:
    found = msgspec.to_builtins(spec)
    text = ", ".join(f"{key} {value}" for key, value in found.items() if key != "name")
    output.say(found, f"{would(dry_run)}{spec.name}: {text}")


@click.command(short_help="Change settings of a table while it is trained.")
@click.argument("table")
@with_options_of(TableSpec, ALTERABLE)
@dry
@of_set
def alter(table: str, folder: Path, output: CommandOutput, dry_run: bool, **values: object) -> None:
    """Change settings of TABLE on all shards. Workers continue.

    \b
    clipper params alter users --set rate=0.001 --folder shop
    """
    from clipper.params.tables import altered

    changes = members_of(TableSpec, values)
    if not changes:
        raise click.UsageError(
            "nothing to change: give --set, --rows-max, --quota-rows or another option."
        )
    with client_of(folder) as client:
        after = altered(client.spec(table), changes) if dry_run else client.alter(table, **changes)
    _show_spec(after, output, dry_run)


@click.command(short_help="Remove a table.")
@click.argument("table")
@dry
@of_set
def drop(table: str, folder: Path, output: CommandOutput, dry_run: bool) -> None:
    """Remove TABLE and its rows from shards and replicas. Its name can be used again at once.
    Earlier snapshots contain it until they are deleted.

    \b
    clipper params drop users-before --folder shop
    """
    with client_of(folder) as client:
        count = _rows_of(client, table) if dry_run else client.drop(table)
    output.say({"rows": count}, f"{would(dry_run)}table {table} is dropped, with {count} rows")


def _rows_of(client: "Client", table: str) -> int:
    """Return the rows that a table has on all shards. Raises UnknownTable."""
    client.spec(table)
    stats = [answer["tables"] for _, answer in client.call_all("stats")]
    return sum(int(each.get(table, {}).get("rows", 0)) for each in stats)


@click.command(short_help="Remove rows of a table.")
@click.argument("table")
@click.argument("ids", nargs=-1, type=int)
@click.option("--file", type=FILE, help="File with one id per line.")
@dry
@of_set
def erase(
    table: str,
    ids: tuple[int, ...],
    file: Path | None,
    folder: Path,
    output: CommandOutput,
    dry_run: bool,
) -> None:
    """Remove rows of TABLE from shards and replicas. Later whole snapshots do not contain them;
    earlier snapshots do, until they are deleted.

    \b
    clipper params erase users 3 17 --folder shop
    clipper params snapshot --whole --folder shop
    """
    each = list(ids)
    if file is not None:
        try:
            each += [int(line) for line in file.read_text().split()]
        except ValueError as error:
            raise click.BadParameter(f"{file}: {error}; write one id per line.") from None
    if not each:
        raise click.UsageError("no ids: give IDS, or --file with one id per line.")
    with client_of(folder) as client:
        if dry_run:
            client.spec(table)
            output.say({"ids": len(each)}, f"dry run: rows of {len(each)} ids are erased")
            return
        count = client.erase(table, each)
    output.say({"erased": count}, f"{count} rows are erased")


@click.command(short_help="Write a table to a file.")
@click.argument("table")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@of_set
def export(table: str, path: Path, folder: Path, output: CommandOutput) -> None:
    """Write the ids and rows of TABLE to PATH: .npz, .safetensors or .parquet.

    \b
    clipper params export users users.npz --folder shop
    """
    from clipper.params.client.table_files import export_table

    with client_of(folder) as client:
        count = export_table(client, table, path)
    output.say({"rows": count}, f"{count} rows in {path}")


@click.command("import", short_help="Read rows of a table from a file.")
@click.argument("table")
@click.argument("path", type=FILE)
@click.option("--create", is_flag=True, help="Create the table, with the width of the rows.")
@dry
@of_set
def import_(
    table: str, path: Path, create: bool, folder: Path, output: CommandOutput, dry_run: bool
) -> None:
    """Write the rows of PATH into TABLE, over those with the same ids. An .npy file has only rows,
    with the ids 0, 1, 2 and so on.

    \b
    clipper params import words glove.npy --create --folder shop
    """
    from clipper.params.client.table_files import create_for, import_table, read_rows

    with client_of(folder) as client:
        if dry_run:
            if not create:
                client.spec(table)
            count = len(read_rows(path)[0])
        else:
            if create:
                create_for(client, table, path)
            count = import_table(client, table, path)
    output.say({"rows": count}, f"{would(dry_run)}{count} rows of {path} are in {table}")


@click.command(short_help="Copy a table.")
@click.argument("table")
@click.argument("name")
@dry
@of_set
def copy(table: str, name: str, folder: Path, output: CommandOutput, dry_run: bool) -> None:
    """Create table NAME as a copy of TABLE: settings, rows, and their optimizer state.

    \b
    clipper params copy users users-before --folder shop
    """
    from clipper.params.client.table_files import copy_table
    from clipper.params.tables import checked

    with client_of(folder) as client:
        if dry_run:
            checked(msgspec.structs.replace(client.spec(table), name=name))
            count = _rows_of(client, table)
        else:
            count = copy_table(client, table, name)
    output.say({"rows": count}, f"{would(dry_run)}{count} rows of {table} are in {name}")


TABLE_COMMANDS = (pull, create, alter, drop, erase, export, import_, copy)
