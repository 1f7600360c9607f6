"""The identity of a parameter-server client: worker number, incarnation, push sequence.

A shard recognises a repeated push by worker number and sequence. Two clients with one number would
lose pushes as supposed repetitions, so each client also sends a random incarnation, and a shard
refuses a second live client of a number. A forked child is a client of its own.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import threading
import weakref
from typing import Protocol

SEQUENCE_MAX = (1 << 64) - 1
JUMP = 2048  # sequences that are left out when a set has moved: twice what shards remember
UNSENT_MAX = 1024  # pushes that are known not to have been sent


class PushIdentity:
    """Worker number of one client and the sequence of its pushes. Threads: any.

    worker: chosen at random when 0. incarnation: unique to this object.
    """

    def __init__(self, worker: int = 0) -> None:
        self.worker = worker or secrets.randbits(63) | 1
        self.incarnation = secrets.randbits(63) | 1
        self._lock = threading.Lock()
        self._sequence = 0
        self._unsent: set[int] = set()

    @property
    def has_pushed(self) -> bool:
        """Return True once a sequence has been used."""
        return self._sequence > 0

    def start_after(self, seen: int) -> None:
        """Continue after the highest sequence that any shard has seen of this worker number;
        another process may have used it before.
        """
        with self._lock:
            self._sequence = max(self._sequence, seen)

    def jump(self) -> int:
        """Leave JUMP sequences out, and return the last one before them."""
        with self._lock:
            last = self._sequence
            self._sequence = min(last + JUMP, SEQUENCE_MAX) if last else 0
            return last

    def next(self) -> int:
        """Return the sequence of a new push. Raises: OverflowError when none is left."""
        with self._lock:
            if self._sequence >= SEQUENCE_MAX:
                raise OverflowError(
                    f"worker number {self.worker} has no sequence left: choose another"
                )
            self._sequence += 1
            self._unsent.add(self._sequence)
            if len(self._unsent) > UNSENT_MAX:
                self._unsent.remove(min(self._unsent))
            return self._sequence

    def sent(self, sequence: int) -> bool:
        """Note that a push is sent. Return True if no part of it had been sent before."""
        if sequence not in self._unsent:
            return False
        with self._lock:
            self._unsent.discard(sequence)
        return True


def origin_worker(worker: int, generation: int, shard: int) -> int:
    """Return the worker number under which a push that was made to a shard is sent again to the
    set of the next generation, which has that shard's rows and knows what it has seen."""
    data = struct.pack("<3Q", worker, generation, shard)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") | 1


class Forked(Protocol):
    """A client that must be renewed in a forked child."""

    def forked(self) -> None:
        """Take a new identity and new connections. Called in the child."""


_clients: weakref.WeakSet[Forked] = weakref.WeakSet()


def renew_after_fork(client: Forked) -> None:
    """Call client.forked() in each child process, before any other code of it runs."""
    _clients.add(client)


def _renew_all() -> None:
    for client in list(_clients):
        client.forked()


os.register_at_fork(after_in_child=_renew_all)
