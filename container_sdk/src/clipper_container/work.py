"""Which models are at work in a host, in a file that its node can read after the host has died.

The file is mapped memory of SLOTS slots, one for each thread that evaluates or loads: a byte with
the length of the model's id, 0 while the thread does nothing, and the id in UTF-8. The system keeps
the last content when the process is killed.
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
    """Threads: any. path: of a file of SLOTS * SLOT_BYTES bytes; empty: nobody reads it. A 513th
    thread is not recorded."""

    def __init__(self, path: str = "") -> None:
        self._memory = mmap.mmap(-1, SLOTS * SLOT_BYTES)
        if path:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), SLOTS * SLOT_BYTES)
        self._own = threading.local()
        self._count = itertools.count()

    @contextmanager
    def on(self, model: str) -> Iterator[None]:
        """The calling thread works on this model."""
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
        """Where the slot of the calling thread begins; -1: there is none left."""
        at: int | None = getattr(self._own, "at", None)
        if at is None:
            slot = next(self._count)
            at = self._own.at = slot * SLOT_BYTES if slot < SLOTS else -1
        return at
