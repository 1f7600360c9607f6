"""The part of a folder that goes into an image: all but hidden files, environments, caches, logs,
exports, files that look like keys, and what a `.dockerignore` or `.gitignore` leaves out.
"""

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clipper.errors import PackagingError

CONTEXT_BYTES_MAX: Final = 2 << 30
# The first of these that exists counts, as for Docker.
IGNORE_FILES: Final = (".dockerignore", ".gitignore")
# A folder with one of these is an environment, or was written by `clipper export`.
_APART: Final = ("pyvenv.cfg", "docker-compose.yml", "kustomization.yaml", "Chart.yaml")
_LEFT_OUT: Final = (
    "__pycache__",
    "node_modules",
    "*.pyc",
    "*.pem",
    "*.key",
    "*.env",
    "*.log",
    "*.out",
    "*.pid",
    "secrets",  # in exports of Clipper
    "id_rsa*",
    "id_ed25519*",
    "*.egg-info",
)


def files_under(root: Path, model: str, budget: int | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield the paths in a folder, and the contents, of the files that go into an image.

    Raises: PackagingError for more than `budget` bytes (CONTEXT_BYTES_MAX).
    """
    yield from contents_of(root, names_under(root), model, budget)


def contents_of(
    root: Path, names: Iterable[str], model: str, budget: int | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield files of a folder with their contents. Raises: PackagingError for more than `budget`
    bytes (CONTEXT_BYTES_MAX)."""
    left = CONTEXT_BYTES_MAX if budget is None else budget
    for name in names:
        path = root / name
        left -= path.stat().st_size
        if left < 0:
            hint = (
                "Put what the model imports into a folder of its own: code=[...], clipper deploy"
                " --code FOLDER."
            )
            raise PackagingError(
                f"model '{model}': {root} holds more than {CONTEXT_BYTES_MAX >> 20} MiB.", hint=hint
            )
        yield name, path.read_bytes()


def names_under(root: Path) -> Iterator[str]:
    """Yield the paths of these files, relative to the folder, in one order on every machine. Links
    to folders are not followed, except those in a copy of sources."""
    ignored = ignored_in(root)
    for folder, folders, names in os.walk(root):
        below = Path(folder).relative_to(root)
        kept = []
        for name in sorted(folders):
            is_apart = any(os.path.exists(os.path.join(folder, name, mark)) for mark in _APART)
            if goes_in(name) and not is_apart and not ignored((below / name).as_posix(), True):
                kept.append(name)
        folders[:] = kept
        for name in sorted(filter(goes_in, names)):
            path = (below / name).as_posix()
            if Path(folder, name).is_file() and not ignored(path, False):
                yield path


def goes_in(name: str) -> bool:
    """Return True if a file or folder of this name may go into an image."""
    return not name.startswith(".") and not any(
        fnmatch.fnmatchcase(name, pattern) for pattern in _LEFT_OUT
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    """One line of an ignore file."""

    pattern: re.Pattern[str]
    keeps: bool
    only_folders: bool

    @classmethod
    def parse(cls, line: str) -> "_Rule | None":
        text = line.strip()
        if not text or text.startswith("#"):
            return None
        keeps = text.startswith("!")
        text = text.removeprefix("!")
        only_folders = text.endswith("/")
        anchored = "/" in text.rstrip("/")
        text = text.strip("/")
        prefix = "" if anchored else "(?:.*/)?"
        return cls(re.compile(prefix + _expression(text)), keeps, only_folders)


def _expression(glob: str) -> str:
    """Return a regular expression for a pattern in which `*` stops at a slash and `**` does not."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        parts.get(part) or (part if part.startswith("[") else re.escape(part))
        for part in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]/]+\]|.", glob)
    )


def ignored_in(root: Path) -> Callable[[str, bool], bool]:
    """Return the function that says whether the ignore file of a folder leaves out a path below it,
    given whether that is a folder. Patterns are as in git; the last one that fits counts."""
    rules: list[_Rule] = []
    for name in IGNORE_FILES:
        try:
            text = (root / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        rules = [rule for line in text.splitlines() if (rule := _Rule.parse(line))]
        break

    def ignored(path: str, is_folder: bool) -> bool:
        found = False
        for rule in rules:
            if (is_folder or not rule.only_folders) and rule.pattern.fullmatch(path):
                found = not rule.keeps
        return found

    return ignored
