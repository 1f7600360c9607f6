"""Folders that are exported with secrets, which only their owner can read."""

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from clipper.deploy.docker.image import write_files


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(24)


def written(
    folder: Path,
    files: Mapping[str, str | bytes],
    secret: Mapping[str, str],
    *,
    are_mounted: bool = False,
) -> list[str]:
    """Write all files; return their paths relative to the folder.

    secret: values for the folder secrets/, which only its owner can read. An existing value stays,
    since a new token would lock out running containers. are_mounted: containers read the files
    themselves, as other users; only the folder is the owner's.
    """
    write_files(folder, files)
    (folder / "secrets").mkdir(mode=0o700, exist_ok=True)
    (folder / "secrets").chmod(0o700)
    for name, content in secret.items():
        path = folder / "secrets" / name
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(content)
        path.chmod(0o444 if are_mounted else 0o600)
    (folder / ".gitignore").write_text("secrets/\n")
    return sorted([*files, *(f"secrets/{name}" for name in secret), ".gitignore"])


def token_of(folder: Path, name: str) -> str:
    """Return the token that an earlier export into the folder has, or a new one."""
    path = folder / "secrets" / name
    return path.read_text().strip() if path.exists() else new_token()
