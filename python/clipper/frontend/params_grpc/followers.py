"""Clients that follow a shard's rows by `synchronize_embedding`: the ids that changed for each.

The design document has one set of updated keys per replica, cleared by each call. Here each
follower has a set of its own, and ids of a reply that was not confirmed are sent again. The shard's
change log has one slot for all followers; its ids are distributed to their sets.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from google.protobuf.message import Message

from clipper.errors import DoesNotFit
from clipper.frontend.params_grpc.tensors import Ids, tensor_of
from clipper.params.shard.parameters import DENSE, Parameters, Piece
from clipper.params.shard.shard import Shard
from clipper_container.params.frames import TABLES_MAX

FOLLOWERS_MAX: Final = 16
IDS_MAX: Final = 1 << 22  # unsent ids of a follower; beyond that it needs a full sync
FORGET_S: Final = 600.0  # a follower silent for so long is removed
_SNAPSHOTS: Final = 7  # slots of the log below are replicas; from here on, snapshots


class RowFollower:
    """One follower.

    serial: of the last reply. unconfirmed: the ids in that reply. confirmed: the last reply known
    to have arrived. count: of pending ids. last_call_s: time of its last call.
    """

    def __init__(self, last_call_s: float) -> None:
        self.last_call_s, self.serial, self.confirmed, self.count = last_call_s, 0, 0, 0
        self.pending: dict[int, list[Ids]] = {}
        self.unconfirmed: list[tuple[int, Ids]] = []

    def add(self, table: int, ids: Ids) -> None:
        """Add changed ids of a table."""
        self.pending.setdefault(table, []).append(ids)
        self.count += ids.size

    def acknowledge(self, serial: int | None) -> bool:
        """Confirm the reply `serial`, which the follower has received; None confirms the last one.

        Returns False if the follower must start a full sync.
        """
        if serial not in (None, self.serial, self.confirmed):
            return False
        if serial in (None, self.serial):
            self.confirmed = self.serial
        else:
            for table, ids in self.unconfirmed:
                self.add(table, ids)
        self.unconfirmed = []
        return True

    def news(self, parameters: Parameters, bytes_max: int) -> Iterator[Message]:
        """Yield tensors of the changed rows, as many as fit; the others stay pending."""
        pending, self.pending, self.count, size = self.pending, {}, 0, 0
        for table, parts in pending.items():
            ids = np.unique(np.concatenate(parts))
            if not parameters.specs[table].name:
                continue  # it was dropped
            each = 4 * parameters.specs[table].dim + 8
            n = max(0, min(ids.size, (bytes_max - size) // each))
            size += n * each
            if n < ids.size:
                self.add(table, ids[n:])
            if n:
                self.unconfirmed.append((table, ids[:n]))
                yield from changed(parameters, table, ids[:n])
        self.serial += 1


class RowFollowers:
    """The followers of a shard, by name. Threads: the event loop's. now: returns seconds."""

    def __init__(self, shard: Shard, now: Callable[[], float] = time.monotonic) -> None:
        self._shard, self._now = shard, now
        self._each: dict[str, RowFollower] = {}
        self._slot = shard.config.replicas
        self._on = False

    def of(self, name: str, serial: int | None) -> RowFollower | None:
        """Return a follower with all its changes; None if it must start a full sync."""
        self.gather()
        found = self._each.get(name)
        if found is None or not found.acknowledge(serial):
            return None
        found.last_call_s = self._now()
        return found

    def start_sync(self, name: str) -> RowFollower:
        """Start a full sync: collect this follower's changes from now on. Raises DoesNotFit."""
        if self._slot >= _SNAPSHOTS:
            raise DoesNotFit(
                f"a shard with {self._slot} replicas has no place for others that follow."
            )
        self.gather()
        if not self._on:
            self._shard.core.follow(self._slot)
            self._on = True
        if name not in self._each and len(self._each) >= FOLLOWERS_MAX:
            del self._each[min(self._each, key=lambda one: self._each[one].last_call_s)]
        made = self._each[name] = RowFollower(self._now())
        return made

    def gather(self) -> None:
        """Distribute the changed ids to all followers, and forget those that are silent or too far
        behind.

        Called at regular intervals, so that the shard's log does not grow.
        """
        if not self._on:
            return
        core, now = self._shard.core, self._now()
        self._each = {
            name: one
            for name, one in self._each.items()
            if now - one.last_call_s < FORGET_S and one.count <= IDS_MAX
        }
        if not self._each:
            core.unfollow(self._slot)
            self._on = False
            return
        found = core.changed(self._slot)
        if found is None:  # too many changes for the log
            self._each.clear()
            core.follow(self._slot)
            return
        _, tables, _ = found
        for one in self._each.values():
            for table, ids in tables.items():
                if table != DENSE:
                    one.add(table, ids)


def changed(parameters: Parameters, table: int, ids: Ids) -> Iterator[Message]:
    """Yield the current rows of some ids; ids without a row are a tensor of width 0."""
    (part,) = parameters.of({table: ids})["rows"]
    if part["ids"].size:
        yield weights(parameters, part)
    if part.get("gone", ids[:0]).size:
        name = parameters.specs[table].name
        yield tensor_of(name, np.empty((part["gone"].size, 0), np.float32), part["gone"].tolist())


def weights(parameters: Parameters, part: Piece) -> Message:
    """Return the weights of some rows as a tensor, without the optimizer's state."""
    spec = parameters.specs[part["table"] % TABLES_MAX]
    return tensor_of(
        spec.name, np.ascontiguousarray(part["rows"][:, : spec.dim]), part["ids"].tolist()
    )
