"""The file of placement constraints (`mesh.constraints`), read again when it changes."""

import logging
import os
from pathlib import Path

import msgspec

from clipper.mesh.decisions.placement import Constraint, Constraints

_log = logging.getLogger(__name__)


class ConstraintsFile:
    """Placement constraints by model type. path: empty when there is no file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read_version = (0, 0)  # modification time and size of the file that was read
        self._reported = ""
        self._constraints: Constraints = {}

    @property
    def constraints(self) -> Constraints:
        """The constraints of the last version of the file that could be read."""
        return self._constraints

    def refresh(self) -> None:
        """Read the file if it has changed. An unreadable file is logged once and ignored."""
        if not self._path:
            return
        try:
            stat = os.stat(self._path)
            version = stat.st_mtime_ns, stat.st_size
            if version == self._read_version:
                return
            self._read_version = version
            data = Path(self._path).read_bytes()
            self._constraints = msgspec.json.decode(data, type=dict[str, Constraint])
        except (OSError, msgspec.MsgspecError) as error:
            if self._reported != str(error):
                self._reported = str(error)
                _log.error(
                    "mesh.constraints: cannot read %s; the previous constraints stay: %s",
                    self._path,
                    error,
                )
