"""The files that this server's models are packed in, and their removal.

A file is named NAME-VERSION-SHA12 and belongs to that version alone. It goes when the version is
retired and its containers have stopped, or when its deployment fails. After a crash the next start
removes what was left. Nothing is removed only because the catalog lacks its record: a store that
has lost its data may come back with them. So a deployment under way leaves a mark beside its files
until they have a record.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from clipper.catalog.view import View
from clipper.deploy.packages.package import STORED, check_model_name
from clipper.errors import ClipperError, DeployFailed
from clipper.types import Model, VersionedModel

_log = logging.getLogger(__name__)
_ENDINGS: Final = "|".join(re.escape(ending) for ending in STORED)
_FILE: Final = re.compile(rf"(.+)-([0-9]+)-[0-9a-f]{{12}}(?:{_ENDINGS})")
_MARK: Final = re.compile(r"\.(.+)-([0-9]+)\.new")
_HINTS: Final = {
    errno.EMFILE: "Raise the limit: ulimit -n 65536.",
    errno.ENFILE: "The machine has no more: close other programs, or raise fs.file-max.",
    errno.ENOSPC: "Free room on the disk, and deploy again.",
    errno.EDQUOT: "Free room on the disk, and deploy again.",
    errno.EFBIG: "Raise the limit: ulimit -f unlimited.",
}
_UNFINISHED: Final = re.compile(r"\..*\.tmp")


class ModelFiles:
    """The packed files in one folder, which belongs to this server. Threads: any; of one version
    one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def packing(self, id_: VersionedModel) -> Iterator[None]:
        """Mark the files of a version as new while they are written, until `keep` or `remove`. If
        the block fails, they are removed. Raises: PackagingError for a name that no file may
        have; DeployFailed for an OSError, such as a full disk."""
        check_model_name(id_.name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._mark(id_).touch(mode=0o600)
            yield
        except BaseException as error:
            self.remove(id_)
            if isinstance(error, OSError) and not isinstance(error, ClipperError):
                raise _failed(id_, self.folder, error) from error
            raise

    def keep(self, id_: VersionedModel) -> None:
        """Note that a version's files have a record."""
        self._mark(id_).unlink(missing_ok=True)

    def remove(self, id_: VersionedModel) -> None:
        """Remove the files of a version, whose containers have stopped."""
        for entry in self._entries():
            if _id_of(entry.name) == id_:
                _remove(entry)
        with contextlib.suppress(OSError):  # a start tries again
            self._mark(id_).unlink(missing_ok=True)

    def sweep(self, view: View) -> int:
        """Remove, at the start of a server, what a crash left and the files of versions that were
        retired meanwhile. Return how many there were."""
        new = {
            VersionedModel(found[1], int(found[2]))
            for entry in self._entries()
            if (found := _MARK.fullmatch(entry.name))
        }
        removed = 0
        for entry in self._entries():
            id_ = _id_of(entry.name)
            if _UNFINISHED.fullmatch(entry.name) or (
                id_ is not None and _is_unused(view, id_, entry.name, id_ in new)
            ):
                removed += _remove(entry)
        for id_ in new:
            self._mark(id_).unlink(missing_ok=True)
        if removed:
            _log.info("%d files of models that do not run any more were removed", removed)
        return removed

    def _mark(self, id_: VersionedModel) -> Path:
        return self.folder / f".{id_.name}-{id_.version}.new"

    def _entries(self) -> list["os.DirEntry[str]"]:
        try:
            return list(os.scandir(self.folder))
        except OSError:  # nothing was packed yet
            return []


def _failed(id_: VersionedModel, folder: Path, error: OSError) -> DeployFailed:
    what = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    hint = _HINTS.get(error.errno or 0, "")
    return DeployFailed(f"model '{id_}' cannot be packed into {folder}: {what}.", hint=hint)


def _id_of(name: str) -> VersionedModel | None:
    found = _FILE.fullmatch(name)
    return VersionedModel(found[1], int(found[2])) if found else None


def _is_unused(view: View, id_: VersionedModel, name: str, is_new: bool) -> bool:
    """Return whether no container will need a file any more."""
    for model in view.versions.get(id_.name, ()):
        if model.version == id_.version:
            return bool(model.retired_us) or name not in _files_of(model)
    return is_new


def _files_of(model: Model) -> set[str]:
    """Return the names of what a model's record refers to."""
    return {Path(model.target).name, *(Path(folder).parent.name for folder in model.code)}


def _remove(entry: "os.DirEntry[str]") -> bool:
    """Remove a file or a folder; return False if that is not possible now."""
    try:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
    except OSError as error:
        _log.warning("cannot remove %s, which no model needs any more: %s", entry.path, error)
        return False
    return True
