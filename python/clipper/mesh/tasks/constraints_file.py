"""The file of placement constraints (`mesh.constraints`), read again when it changes."""

import logging
from pathlib import Path

import msgspec

from clipper.credentials.credential_file import stamp_of
from clipper.mesh.decisions.placement import Constraint, Constraints

_log = logging.getLogger(__name__)


class ConstraintsFile:
    """Placement constraints by model type, as in the last version of the file that could be read.

    path: empty when there is no file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self.constraints: Constraints = {}

    def refresh(self) -> None:
        """Read the file if it has changed. An unreadable version is logged once and ignored."""
        stamp = stamp_of(self._path)
        if not self._path or stamp == self._seen:
            return
        self._seen = stamp
        try:
            data = Path(self._path).read_bytes()
            self.constraints = msgspec.json.decode(data, type=dict[str, Constraint])
        except (OSError, msgspec.MsgspecError) as error:
            _log.error(
                "mesh.constraints: cannot read %s; the previous constraints stay: %s",
                self._path,
                error,
            )
