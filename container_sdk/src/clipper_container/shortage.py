"""Shortages of a process that starts others: of descriptors, processes, memory or disk. A shortage
is no fault of what is started; it is waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

_OWN: Final = frozenset(
    {
        errno.EAGAIN,
        errno.EDQUOT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ETOOMANYREFS,
    }
)
SPARE_MAX: Final = 8  # a start takes two pipes, a pair of sockets and a pidfd


def is_own(error: BaseException) -> bool:
    """Return whether an error says that this process, or its machine, lacks something."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, RuntimeError):
        return "can't start new thread" in str(error)
    return isinstance(error, OSError) and error.errno in _OWN


class SpareDescriptors:
    """Descriptors that are kept for a start, while others of this process take all the rest.
    Threads: one at a time.
    """

    def __init__(self, most: int = SPARE_MAX) -> None:
        self._most = most
        self._kept: list[int] = []
        self._borrowers = 0
        self._fill()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._kept) < self._most:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Give the descriptors up for the time of a start, and take as many again after it, or
        after the start that this one is a part of."""
        self._borrowers += 1
        self.close()
        try:
            yield
        finally:
            self._borrowers -= 1
            if not self._borrowers:
                self._fill()

    def close(self) -> None:
        """Close the descriptors."""
        while self._kept:
            os.close(self._kept.pop())
