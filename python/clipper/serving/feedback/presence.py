"""The names of a server in a store that several servers share, held by a lease for as long as it
lives.

A server has two names. Its node is a part of the id of every answer that it gives, and new at each
start. Its name is kept in its folder, and numbers what it learned in the states of the store: two
servers with one name would take each other's observations for their own. So a server whose name is
held by another that lives, as after a folder was copied, is refused.
"""

import os
import time
from pathlib import Path
from typing import Final

import msgspec

from clipper.component import Stop
from clipper.errors import AlreadyExists, StoreError
from clipper.store.lease import Lease
from clipper.store.store import ABSENT, Compare, Get, Put, Store

NODES: Final = "feedback/nodes/"  # of the servers that live, by the node of their answers' ids
NAMES: Final = "feedback/names/"  # the same, by the names under which they learn
LEASE_S: Final = 5.0
_AGAIN_S: Final = 0.1


class Holder(msgspec.Struct):
    """Holder of a server's name. folder: its state folder, on the machine that runs it."""

    node: str
    folder: str


class Presence:
    """Threads: any; enter: one at a time.

    name: under which the server learns.  node: of the ids of its answers.  folder: its own; None
    when it keeps nothing.
    """

    def __init__(self, store: Store, name: str, node: str, folder: Path | None) -> None:
        self.node = node
        self._store, self._name, self._folder = store, name, folder
        self._lease: Lease | None = None

    @property
    def lease(self) -> str:
        """The id of the lease that holds the names. StoreError while they are not held."""
        lease = self._lease
        if lease is None or not lease.alive:
            raise StoreError(
                f"this server is not known in {self._store.name} at present.",
                hint="Try again in a moment.",
            )
        return lease.id

    @property
    def is_held(self) -> bool:
        """Return whether this server holds the names, by a lease that lives."""
        return self._lease is not None and self._lease.alive

    def enter(self, stop: Stop) -> None:
        """Hold the names. One that the same folder held before, locked as it is, is taken over at
        once; that of another is waited for as long as its lease lives. Raises AlreadyExists when it
        is renewed meanwhile, StoreError.
        """
        if self.is_held:
            return
        lease = self._store.lease(LEASE_S)
        try:
            self._claim(lease, stop)
        except BaseException:
            self._end(lease)
            raise
        self._lease = lease.renew_in_background()

    def _claim(self, lease: Lease, stop: Stop) -> None:
        key, own = NAMES + self._name, Holder(self.node, _identity(self._folder))
        puts = (
            Put(key, msgspec.msgpack.encode(own), lease.id),
            Put(NODES + self.node, b"", lease.id),
        )
        give_up, revision = time.monotonic() + 2 * lease.ttl_s, ABSENT
        while True:
            found = self._store.txn((Compare(key, revision),), puts, (Get(key),))
            if found.ok:
                return
            record = found.results[0]
            if record is None:
                revision = ABSENT
                continue
            holder = msgspec.msgpack.decode(record.value, type=Holder)
            if holder.folder == own.folder and revision != record.revision:
                revision = record.revision
                continue
            if time.monotonic() > give_up or stop.requested:
                raise AlreadyExists(
                    f"another server that is running learns under the name {self._name} in"
                    f" {self._store.name}.",
                    hint=(
                        f"If {self._folder} is a copy of its folder: remove `node` and `journal`"
                        " from the copy."
                    ),
                )
            lease.keep()
            stop.wait(_AGAIN_S)

    def _end(self, lease: Lease) -> None:
        try:
            lease.revoke()
        except StoreError:  # it ends by itself
            return

    def leave(self) -> None:
        """Give the names back. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._end(lease)


def _identity(folder: Path | None) -> str:
    """Return an identity of the folder: on this machine, since it was started. A copy of it,
    wherever it lies, has another one."""
    if folder is None:
        return os.urandom(8).hex()
    found = folder.stat()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{found.st_dev}:{found.st_ino}"  # noqa: E501
