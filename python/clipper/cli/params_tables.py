"""`clipper params create`, `alter`, `drop`, `erase`, `export` and others: tables of a set."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

if TYPE_CHECKING:
    from clipper.params import Client


@contextlib.contextmanager
def client_of(folder: Path) -> Iterator["Client"]:
    """A client of the set in a folder, for the time of a command."""
    from clipper.params import Client

    with Client(folder) as client:
        yield client


def create(
    folder: Path, table: str, dim: int, settings: tuple[str, ...], given: Mapping[str, object]
) -> dict[str, object]:
    """Create a table. Return its specification."""
    from clipper.params.tables import TableSpec

    fields = {**given, "name": table, "dim": dim, "optimizer_settings": _numbers(settings)}
    spec = msgspec.convert(fields, TableSpec)
    with client_of(folder) as client:
        client.create(spec)
    return dict(msgspec.to_builtins(spec))


def _numbers(settings: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in settings:
        key, equals, value = one.partition("=")
        try:
            found[key] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise click.BadParameter(f"{one!r} is not NAME=NUMBER, such as rate=0.01.")
    return found


def alter(
    folder: Path,
    table: str,
    settings: tuple[str, ...],
    given: Mapping[str, int | None],
) -> dict[str, object]:
    """Change settings of a table. Return its specification."""
    changes: dict[str, object] = {}
    if optimizer := _numbers(settings):
        changes["optimizer_settings"] = optimizer
    changes |= {key: value for key, value in given.items() if value is not None}
    if not changes:
        raise click.UsageError(
            "nothing to change: give --set, --rows-max, --quota-rows or another option."
        )
    with client_of(folder) as client:
        found: dict[str, object] = msgspec.to_builtins(client.alter(table, **changes))
    return found


def drop(folder: Path, table: str) -> int:
    """Remove a table. Return how many rows it had."""
    with client_of(folder) as client:
        return client.drop(table)


def erase(folder: Path, table: str, ids: tuple[int, ...], file: Path | None) -> int:
    """Remove rows by their ids, and by the ids that a text file has, one a line."""
    each = list(ids)
    if file is not None:
        try:
            each += [int(line) for line in file.read_text().split()]
        except ValueError as error:
            raise click.BadParameter(f"{file}: {error}; write one id per line.") from None
    if not each:
        raise click.UsageError("no ids: give IDS, or --file with one id per line.")
    with client_of(folder) as client:
        return client.erase(table, each)


def export_rows(folder: Path, table: str, path: Path) -> int:
    """Write a table to a file."""
    from clipper.params.client.table_files import export_table

    with client_of(folder) as client:
        return export_table(client, table, path)


def import_rows(folder: Path, table: str, path: Path, *, create: bool) -> int:
    """Write the rows of a file into a table."""
    from clipper.params.client.table_files import create_for, import_table

    with client_of(folder) as client:
        if create:
            create_for(client, table, path)
        return import_table(client, table, path)


def copy(folder: Path, table: str, name: str) -> int:
    """Copy a table, with the state of its rows."""
    from clipper.params.client.table_files import copy_table

    with client_of(folder) as client:
        return copy_table(client, table, name)
