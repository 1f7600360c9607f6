"""A process that becomes a shard when it is told which: `python -m clipper.params.standby`.

To start Python and import what a shard needs takes longer than to recover one, so a supervisor keeps one such process waiting.
It reads one line, {"number": I, "folder": DIR}, and is that shard from then on; at the end of its input it ends.
"""

import contextlib
import json
import logging
import os
import sys
from pathlib import Path

import msgspec

from clipper.errors import ClipperError, InvalidInput
from clipper.params.line import SHARDS_FILE, addresses_in
from clipper.params.places import told_in
from clipper.params.server import EXIT_FAILED, Beside, die_with, folder_of, run
from clipper.params.shard import Place
from clipper.settings.params import ParamsSettings


def place_in(folder: Path, number: int, keep: Path | None = None) -> Place:
    """Shard `number` of the set whose file is there. keep: where its epoch and snapshots go, if not there too. Raises
    InvalidInput."""
    addresses, token = addresses_in(folder)
    try:
        said = told_in(folder)
        settings = msgspec.convert(said.get("settings", {}), ParamsSettings)
    except ValueError as error:
        raise InvalidInput(f"{folder / SHARDS_FILE}: {error}.") from None
    if not 0 <= number < len(addresses):
        raise InvalidInput(f"no shard {number} in {folder}: it has {len(addresses)}.")
    book = folder if said.get("engine") else None
    return Place(number, tuple(addresses), settings, token, folder_of(keep or folder, number), book=book)


def log_to(path: Path) -> None:
    """What this process says from here on goes there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def main(beside: Beside = contextlib.nullcontext) -> int:
    """beside: see `clipper.params.server.run`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    die_with(int(sys.argv[1]))
    line = sys.stdin.readline()
    if not line:
        return 0
    said = json.loads(line)
    folder, number = Path(said["folder"]), int(said["number"])
    try:
        log_to(folder / f"shard-{number}.log")
        return run(place_in(folder, number), beside)
    except ClipperError as error:
        logging.getLogger("clipper.params").error("shard %d: %s", number, error)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
