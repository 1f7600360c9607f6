"""Turns at a model that several servers use: first come, first served."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock that threads get in the order in which they asked for it, so that a server that always
    has a batch does not keep others waiting; a Lock goes to whoever is awake. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next two; held briefly
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        """Number of threads that wait for their turn."""
        return len(self._waiting)

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
