"""The folder in which a replica was deployed: it is kept open, so that a replica starts there again
after the folder was moved or removed, or the server has changed its own.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

ROOT: Final = "/"


class StartFolder:
    """An open folder. path: it, or the current one; one that cannot be opened is only named.

    Threads: any. It is closed with its last reference.
    """

    def __init__(self, path: str = "") -> None:
        self.fd = -1
        self.path = path
        if not path:
            with contextlib.suppress(OSError):  # it was removed
                self.path = os.getcwd()
        with contextlib.suppress(OSError):
            self.fd = os.open(path or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder; it keeps its name."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def for_child(self) -> str:
        """The path by which a child that has this process's descriptors enters it."""
        return f"/proc/self/fd/{self.fd}" if self.fd >= 0 else self.path or ROOT
