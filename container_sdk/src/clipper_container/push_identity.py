"""Who a client of a parameter server is: shards tell a push from its repetition by its worker
number and sequence.

Two clients with one number would have each other's pushes taken for repetitions: acknowledged, and
dropped. So a client says its incarnation as well, a number of its own: a shard refuses a second
live client of one worker number. A child that is forked is another client than its parent.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from typing import Protocol

SEQUENCE_MAX = (1 << 64) - 1


class PushIdentity:
    """The worker number of one client, and the sequence of its pushes. Threads: any.

    worker: its number; made up when 0.  incarnation: of this client alone.
    """

    def __init__(self, worker: int = 0) -> None:
        self.worker = worker or secrets.randbits(63) | 1
        self.incarnation = secrets.randbits(63) | 1
        self._lock = threading.Lock()
        self._sequence = 0

    @property
    def has_pushed(self) -> bool:
        return self._sequence > 0

    def begin(self, seen: int) -> None:
        """Go on after the highest sequence that any shard has seen of this worker number: it may
        have been another process's."""
        with self._lock:
            self._sequence = max(self._sequence, seen)

    def next(self) -> int:
        """Return the sequence of a new push. Raises: OverflowError when none is left."""
        with self._lock:
            if self._sequence >= SEQUENCE_MAX:
                raise OverflowError(
                    f"worker number {self.worker} has no sequence left: choose another"
                )
            self._sequence += 1
            return self._sequence


class Forked(Protocol):
    def forked(self) -> None:
        """Become another client: this process is a child of the one that made it."""


_clients: weakref.WeakSet[Forked] = weakref.WeakSet()


def renew_after_fork(client: Forked) -> None:
    """Call client.forked() in each child process, before any of its own code runs."""
    _clients.add(client)


def _renew_all() -> None:
    for client in list(_clients):
        client.forked()


os.register_at_fork(after_in_child=_renew_all)
