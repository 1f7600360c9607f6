"""Limits of pulls and of their cache, from the environment of the process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "CLIPPER_ARTIFACTS__"  # as clipper reads its section [artifacts]


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Limits of pulls.

    folder: of the cache. cache_mib: size of the cache. mib_max: size of one model, all files
    together. files_max: files of one model. pull_s: time of one pull, with all tries. tries: of one
    pull, before a broken transfer is an error.
    """

    folder: Path
    cache_mib: int = 10_240
    mib_max: int = 10_240
    files_max: int = 1000
    pull_s: float = 600.0
    tries: int = 5

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> PullLimits:
        """Read CLIPPER_ARTIFACTS__FOLDER, __CACHE_MIB, __MIB_MAX, __FILES_MAX, __PULL_S and
        __TRIES. Raises: ValueError for a value that is no number.
        """
        given = os.environ if environment is None else environment
        usual = Path(tempfile.gettempdir()) / f"clipper-artifacts-{os.getuid()}"
        found = {
            name: kind(given[variable])
            for name, kind in _KINDS.items()
            if given.get(variable := PREFIX + name.upper())
        }
        return cls(Path(given.get(PREFIX + "FOLDER") or usual), **found)

    def environment(self) -> dict[str, str]:
        """Return the variables for a process that is to have the same limits and cache."""
        named = {PREFIX + name.upper(): f"{getattr(self, name):g}" for name in _KINDS}
        return {PREFIX + "FOLDER": str(self.folder), **named}


_KINDS = {"cache_mib": int, "mib_max": int, "files_max": int, "pull_s": float, "tries": int}
