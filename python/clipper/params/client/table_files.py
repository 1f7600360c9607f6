"""Tables in files: .npz, .safetensors and .parquet, with ids i64[n] and rows f32[n, dim].

An .npy file has rows alone; their ids are 0, 1, 2 ... . A file has no state of the optimizer.
"""

import importlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import numpy.typing as npt

from clipper.errors import DoesNotFit, InvalidInput
from clipper.params.client.client import Client
from clipper.spec.table import TableSpec
from clipper_container.params.rows import Ids
from clipper_container.tensor_spec import given_type

BATCH = 8192  # rows of one message
SUFFIXES = (".npy", ".npz", ".safetensors", ".parquet")
Rows = npt.NDArray[np.float32]


def export_table(client: Client, table: str, path: Path) -> int:
    """Write the rows of a table to a file, by ascending id. Return how many there are.

    The file is replaced when it is complete. Raises UnknownTable, InvalidInput, DoesNotFit (a
    package is missing), OSError, ShardAway.
    """
    kind = _suffix(path)
    if kind == ".npy":
        raise InvalidInput(f"{path}: an .npy file has no ids.", hint="Write .npz.")
    dim = client.spec(table).dim
    parts = [(ids, rows[:, :dim]) for ids, rows in client.walk(table)]
    ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in parts)])
    rows = np.concatenate([np.empty((0, dim), np.float32), *(rows for _, rows in parts)])
    order = np.argsort(ids)
    ids, rows = ids[order], np.ascontiguousarray(rows[order])
    unfinished = path.with_name(f".{path.name}.part{kind}")
    try:
        _write(kind, unfinished, ids, rows)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return int(ids.size)


def import_table(client: Client, table: str, path: Path) -> int:
    """Write the rows of a file into a table, over those of the same ids. Return how many.

    Raises UnknownTable, InvalidInput (the file, or its width), DoesNotFit (a package is missing,
    or a table is full), ShardAway; rows before the error were written.
    """
    ids, rows = read_rows(path)
    dim = client.spec(table).dim
    if rows.shape != (ids.size, dim):
        raise InvalidInput(
            f"{path}: rows {list(rows.shape)} for {ids.size} ids; table {table!r} has"
            f" f32[n, {dim}]."
        )
    for part, values in _batches(ids, rows):
        no_room = client.write(table, part, values)
        if no_room:
            raise DoesNotFit(
                f"table {table!r}: {no_room} ids found no room.",
                hint=f"Raise its limit: clipper params alter {table} --rows-max N.",
            )
    return int(ids.size)


def copy_table(client: Client, table: str, name: str) -> int:
    """Create a table like another one, with its rows and their state. Return how many.

    Rows that are pushed meanwhile may be copied as they were before. Raises UnknownTable,
    TypeConflict, InvalidInput, ShardAway.
    """
    client.create(msgspec.structs.replace(client.spec(table), name=name))
    tables = (answer["tables"] for _, answer in client.call_all("stats"))
    steps, count = max(int(each[table]["steps"]) for each in tables), 0
    for ids, rows in client.walk(table):
        for part, values in _batches(ids, rows):
            client.write(name, part, values, steps=steps)
            count += part.size
    return count


def create_for(client: Client, table: str, path: Path) -> TableSpec:
    """Create a table as wide as the rows of a file, with the default settings."""
    spec = TableSpec(table, read_rows(path)[1].shape[1])
    client.create(spec)
    return spec


def read_rows(path: Path) -> tuple[Ids, Rows]:
    """Return the ids and rows of a file. Raises InvalidInput, DoesNotFit, OSError."""
    kind = _suffix(path)
    try:
        if kind == ".npy":
            rows = np.load(path, allow_pickle=False)
            ids = np.arange(len(rows))
        elif kind == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
                ids, rows = found["ids"], found["rows"]
        elif kind == ".safetensors":
            each = _optional("safetensors.numpy").load_file(path)
            ids, rows = each["ids"], each["rows"]
        else:
            columns = _optional("pyarrow.parquet").read_table(path, columns=["id", "row"])
            ids = columns["id"].to_numpy()
            rows = np.stack(columns["row"].to_numpy(zero_copy_only=False)) if len(ids) else ids[:0]
    except KeyError as error:
        raise InvalidInput(f"{path}: it has no {error}; ids and rows are needed.") from None
    except (ValueError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{path}: {error}.") from None
    if rows.ndim != 2 or ids.ndim != 1 or ids.dtype.kind not in "iu" or rows.dtype.kind != "f":
        raise InvalidInput(
            f"{path}: ids {given_type(ids)} and rows {given_type(rows)}, not"
            " whole numbers [n] and floats [n, dim]."
        )
    return np.ascontiguousarray(ids).view(np.int64), np.ascontiguousarray(rows, np.float32)


def _write(kind: str, path: Path, ids: Ids, rows: Rows) -> None:
    if kind == ".npz":
        np.savez(path, ids=ids, rows=rows)
    elif kind == ".safetensors":
        _optional("safetensors.numpy").save_file({"ids": ids, "rows": rows}, path)
    else:
        pyarrow, parquet = _optional("pyarrow"), _optional("pyarrow.parquet")
        column = pyarrow.FixedSizeListArray.from_arrays(rows.reshape(-1), rows.shape[1])
        parquet.write_table(pyarrow.table({"id": ids, "row": column}), path)


def _suffix(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        raise InvalidInput(f"{path}: no format {path.suffix!r}: {', '.join(SUFFIXES)}.")
    return path.suffix


def _batches(ids: Ids, rows: Rows) -> Iterator[tuple[Ids, Rows]]:
    for at in range(0, ids.size, BATCH):
        yield ids[at : at + BATCH], rows[at : at + BATCH]


def _optional(module: str) -> ModuleType:
    """Return a module that may be absent. Raises DoesNotFit."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DoesNotFit(
            f"this format needs the package {package}.", hint=f"pip install {package}"
        ) from None
