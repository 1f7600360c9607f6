"""A mapped file that names the models a host is executing, for the node to read after a crash.

The file has SLOTS slots, one per thread that loads or evaluates: a byte with the length of the
model's id (0: idle), then the id in UTF-8. The kernel keeps the content when the process is killed.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SLOTS = 512
SLOT_BYTES = 256


class WorkRecord:
    """Writer of the file. Threads: any; threads beyond SLOTS are not recorded.

    path: a file of SLOTS * SLOT_BYTES bytes; empty for none.
    """

    def __init__(self, path: str = "") -> None:
        self._memory = mmap.mmap(-1, SLOTS * SLOT_BYTES)
        if path:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), SLOTS * SLOT_BYTES)
        self._own = threading.local()
        self._count = itertools.count()

    @contextmanager
    def on(self, model: str) -> Iterator[None]:
        """Record that the calling thread works on `model` within the `with` block."""
        at = self._at()
        if at < 0:
            yield
            return
        name = model.encode()[: SLOT_BYTES - 1]
        self._memory[at + 1 : at + 1 + len(name)] = name
        self._memory[at] = len(name)
        try:
            yield
        finally:
            self._memory[at] = 0

    def _at(self) -> int:
        """Return the offset of the calling thread's slot; -1 when none is left."""
        at: int | None = getattr(self._own, "at", None)
        if at is None:
            slot = next(self._count)
            at = self._own.at = slot * SLOT_BYTES if slot < SLOTS else -1
        return at
