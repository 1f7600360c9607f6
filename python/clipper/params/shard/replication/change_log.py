"""Logs of changed rows, which let a copy that was away for a while catch up by difference.

A shard counts its changes. A copy says how far it has come by a pair (epoch, position), as a
PostgreSQL standby does by (timeline, LSN): the epoch is the number of the shard's life, the
position is the number of changes. Positions go on counting when a shard starts again from a copy
or a snapshot; the history says at which position each epoch began. A copy of an earlier epoch can
be brought up to date if its position is not above the one at which the next epoch began.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from clipper.params.shard.parameters import DENSE, Ids, Parameters, Piece
from clipper_container.params.frames import TABLES_MAX
from clipper_core.params.shard_loop import ShardLoop, each_once

SLOT = 9  # follower number in the shard's log; see also snapshots and change_watchers
EPOCHS_MAX = 64  # limit of a history


class History(NamedTuple):
    """The epochs of a shard: (epoch, position at which it began), oldest first."""

    epochs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def decode(cls, value: Sequence[Sequence[int]] | None) -> "History":
        """Return the history that a message holds; an empty one for None."""
        return cls(tuple((int(epoch), int(start)) for epoch, start in value or ()))

    def encode(self) -> list[list[int]]:
        """Return the history as lists, for a message."""
        return [list(pair) for pair in self.epochs]

    def then(self, epoch: int, position: int) -> "History":
        """Return this history with one more epoch, which begins at `position`."""
        return History((*self.epochs, (epoch, position))[-EPOCHS_MAX:])

    def contains(self, epoch: int, position: int) -> bool:
        """Return whether the shard was in this state on its way to the present one."""
        for n, (number, _) in enumerate(self.epochs):
            if number == epoch:
                return n + 1 == len(self.epochs) or position <= self.epochs[n + 1][1]
        return False


class ChangeLog:
    """Ids that changed, by position. The oldest are dropped beyond `ids_max`.

    Threads: one at a time. first: the position from which on changes are known; None while none
    are. pending: changes that are not part of a position yet.
    """

    def __init__(self, ids_max: int) -> None:
        self._ids_max = ids_max
        self._entries: deque[tuple[int, dict[int, Ids]]] = deque()
        self._pending: list[dict[int, Ids]] = []
        self._size = 0
        self.first: int | None = None
        self.position = 0

    def restart(self, position: int) -> None:
        """Forget all; changes are known from `position` on."""
        self._entries.clear()
        self._pending.clear()
        self._size = 0
        self.first = self.position = position

    def add(self, changed: Mapping[int, Ids], position: int | None = None) -> None:
        """Note changed ids by table. position: the changes up to it are complete now."""
        if self.first is None:
            return
        if changed:
            self._pending.append(dict(changed))
            self._size += _count(changed)
        if position is not None and position > self.position:
            self.position = position
            if self._pending:
                self._entries.append((position, union(self._pending)))
                self._size += _count(self._entries[-1][1]) - sum(map(_count, self._pending))
                self._pending = []
        while self._size > self._ids_max:
            if not self._entries:
                self.first = None  # the pending changes alone are too many
                self._pending, self._size = [], 0
                return
            self.first, gone = self._entries.popleft()
            self._size -= _count(gone)

    def since(self, position: int) -> dict[int, Ids] | None:
        """Return all ids that changed after `position`; None if the log does not reach back."""
        if self.first is None or not self.first <= position <= self.position:
            return None
        later = [changed for at, changed in self._entries if at > position]
        return union([*later, *self._pending])


def union(each: list[dict[int, Ids]]) -> dict[int, Ids]:
    """Return the union of sets of ids by table: sorted, each id once."""
    numbers = {number for changed in each for number in changed}
    return {
        number: each_once(np.concatenate([one[number] for one in each if number in one]))
        for number in sorted(numbers)
    }


def ids_in(piece: Piece, parameters: Parameters) -> dict[int, Ids]:
    """Return the ids by table that a piece speaks of; of variables, all that there are."""
    parts = [
        {
            part["table"] % TABLES_MAX: np.concatenate(
                [part["ids"], part.get("gone", part["ids"][:0])]
            )
        }
        for part in piece.get("rows", ())
    ]
    if piece.get("variables"):
        parts.append({DENSE: np.arange(len(parameters.dense))})
    return union(parts)


def _count(changed: Mapping[int, Ids]) -> int:
    return sum(ids.size for ids in changed.values())


class PrimaryLog:
    """The history of one shard and its newest changes, for followers that come back.

    Threads: the shard's answering thread. ids_max: ids that are kept; 0 keeps none.
    """

    def __init__(self, core: ShardLoop, ids_max: int) -> None:
        self._core, self._changes, self._on = core, ChangeLog(ids_max), ids_max > 0
        self._base = 0  # the core counts from 0 in each process
        self.history = History()

    def start(
        self, history: History, position: int, first: int, changed: Mapping[int, Ids]
    ) -> None:
        """Begin this epoch at `position`. changed: ids since the position `first`."""
        self.history = history.then(self._core.epoch, position)
        self._base = position - self._core.position
        if self._on:
            self._changes.restart(first)
            self._changes.add(changed, position)
            self._core.follow(SLOT)

    def position_of(self, core_position: int) -> int:
        """Return the position in the history for one that the core counts."""
        return self._base + core_position

    @property
    def position(self) -> int:
        """Position of the shard now."""
        return self.position_of(self._core.position)

    def read(self) -> None:
        """Take what the core has noted; to be called now and then, and before `since`."""
        if not self._on or self._core.position == self._changes.position - self._base:
            return
        found = self._core.changed(SLOT)
        if found is None:  # the core's log overflowed
            self._core.follow(SLOT)
            self._changes.restart(self.position)
        else:
            self._changes.add(found[1], self.position_of(found[0]))

    def since(self, epoch: int, position: int) -> dict[int, Ids] | None:
        """Return the ids that a copy of that state lacks; None if that is not known."""
        if not self._on or not self.history.contains(epoch, position):
            return None
        self.read()
        return self._changes.since(position)
