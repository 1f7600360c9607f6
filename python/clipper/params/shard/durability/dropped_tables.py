"""Record of the tables that a shard has dropped, so that no older snapshot brings one back.

A snapshot or a replica that is not as new as the drop still has the table when the shard recovers
from it. Each entry says at which (epoch, position) a table went; a state before it loses that
table.
"""

import json
from pathlib import Path
from typing import NamedTuple

from clipper.errors import StoreError
from clipper.params.shard.durability.recovery import write_atomically
from clipper.params.shard.parameters import Parameters
from clipper_container.params.frames import TABLES_MAX

FILE = "dropped.json"
ENTRIES_MAX = 4096  # of drops; older ones are in every snapshot that is kept


class Drop(NamedTuple):
    """A table that went: its number, and the state of the shard (change_log) before that."""

    number: int
    epoch: int
    position: int


class DroppedTables:
    """The file in a shard's folder. Threads: one at a time. folder: None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE if folder is not None else None

    def note(self, drop: Drop) -> None:
        """Write an entry, durably. Raises StoreError; nothing has changed then."""
        if self._path is None:
            return
        entries = [*self._read(), drop][-ENTRIES_MAX:]
        try:
            write_atomically(self._path, json.dumps(entries).encode())
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}; no table was dropped.") from None

    def apply(self, parameters: Parameters, epoch: int, position: int) -> None:
        """Drop from the state of a position what was dropped since. Raises StoreError."""
        for drop in self._read():
            place = drop.number % TABLES_MAX
            is_later = (epoch, position) <= (drop.epoch, drop.position)
            if is_later and parameters.table_numbers[place : place + 1] == [drop.number]:
                parameters.drop(place)

    def _read(self) -> list[Drop]:
        if self._path is None or not self._path.exists():
            return []
        try:
            return [Drop(*map(int, each)) for each in json.loads(self._path.read_bytes())]
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(
                f"{self._path}: {error}.",
                hint="Without this file, tables that were dropped since the last snapshot return.",
            ) from None


def forget_drops(folder: Path) -> None:
    """Remove the records of all shards of a set: an older state is wanted back."""
    for path in folder.glob(f"shard-*/{FILE}"):
        path.unlink()
