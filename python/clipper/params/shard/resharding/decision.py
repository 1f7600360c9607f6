"""The decision about a move to another set of shards: one file in the folder of the new set.

Whoever links it first decides, `commit` or `abort`, for all: the supervisor that moves the set, a
shard that has waited too long, or one that has just restarted and knows nothing of the move's
progress. The file is complete when it has its name, so a kill leaves it decided or not. Both
decisions are written before any shard is sealed, so that a full disk has room for either.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Literal

from clipper.params.shard.durability.recovery import fsync_folder, write_atomically

FILE = "decision"
MOVE_FILE = "move.json"  # in the folder of the old set, from before any of its shards is sealed
Decision = Literal["", "commit", "abort"]


def decision_in(folder: Path) -> Decision:
    """Return what was decided; empty if nothing was. A folder that was removed is an abort."""
    try:
        return "commit" if (folder / FILE).read_text() == "commit" else "abort"
    except OSError:
        return "" if folder.is_dir() else "abort"


def durable_decision(folder: Path) -> Decision:
    """Return what was decided; empty if nothing was, or if a failure of power may undo it."""
    word = decision_in(folder)
    try:
        if word == "commit":
            fsync_folder(folder)
    except OSError:
        return ""
    return word


def prepare_decision(folder: Path) -> None:
    """Write both decisions, of which `decide` links one. Raises OSError."""
    for word in ("commit", "abort"):
        write_atomically(_prepared(folder, word), word.encode())


def decide(folder: Path, word: Decision) -> Decision:
    """Decide, if nobody has, durably. Return the decision, which may be another's. Raises
    OSError."""
    try:
        with contextlib.suppress(FileExistsError):
            os.link(_prepared(folder, word), folder / FILE)
        fsync_folder(folder)
    except FileNotFoundError:
        if decision_in(folder):
            return decision_in(folder)
        prepare_decision(folder)  # of a release that did not
        return decide(folder, word)
    return decision_in(folder)


def _prepared(folder: Path, word: str) -> Path:
    return folder / f".{FILE}-{word}"


def note_move(folder: Path, to: Path) -> None:
    """Note in the folder of a set that its rows move to the set in another folder. Raises
    OSError."""
    write_atomically(folder / MOVE_FILE, json.dumps({"to": str(to)}).encode())


def noted_move(folder: Path) -> Path | None:
    """Return the folder of the set that this one's rows move to, or have moved to; None if they do
    not."""
    try:
        return Path(json.loads((folder / MOVE_FILE).read_bytes())["to"])
    except FileNotFoundError:
        return None
