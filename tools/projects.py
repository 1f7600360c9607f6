"""Read what the pyproject.toml files of this checkout declare, by the standard library alone.

python3.11 tools/projects.py peers      # prints the lines for pip of an extra or of a group
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Of the distributions, each after those that it depends on.
FOLDERS = tuple(
    folder
    for folder in ("container_sdk", "python/clipper_client", ".")
    if (ROOT / folder / "pyproject.toml").exists()
)


def declared(folder: str = ".") -> dict[str, Any]:
    """Return the content of the pyproject.toml in a folder of the checkout."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def names() -> tuple[str, ...]:
    """Return the names of our distributions."""
    return tuple(declared(folder)["project"]["name"] for folder in FOLDERS)


def lines_of(name: str) -> list[str]:
    """Return the lines for pip of an extra, which users install, or of a dependency group, which
    only a checkout has. Raises KeyError when there is neither."""
    server = declared()
    extras: dict[str, list[str]] = server["project"]["optional-dependencies"]
    groups: dict[str, list[str]] = server["dependency-groups"]
    return extras[name] if name in extras else groups[name]


if __name__ == "__main__":
    print(*lines_of(sys.argv[1]))
