"""Servers that have ended: their names leave the states that the others share.

A state in the store records for each server up to which of its observations it has learned
(stored_state.Stored). A server that has not held its name (presence.py) for `ended_s` is left out
of the states that others use. Its number moves from the state to a key of its own, in one
transaction, unless the server has recorded that all its observations up to that one are in the
store. So it is always known, in one of three places, which observations of a server a state has.
One that returns after any time, or was never gone, reads there what the states have, and adds the
rest.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from clipper.errors import StoreConflict
from clipper.serving.feedback.presence import NAMES
from clipper.serving.feedback.stored_state import LEFT_OUT, resealed, unsealed
from clipper.store.store import Store, Transaction

LEARNED: Final = "feedback/learned/"  # by server: up to where all its observations are in states
NUMBERS: Final = "feedback/left-out/"  # by server and state: where the state had more
WRITE_S: Final = 1.0  # between two writes of the former
READ_S_MAX: Final = 600.0  # between two reads of who has ended
AT_ONCE_MAX: Final = 32  # servers that leave a state in one transaction
TRIES: Final = 3  # of a transaction between those of servers that learn


class EndedServers:
    """Leaves servers that have ended out of the states. Threads: one at a time.

    name: under which this server learns.  ended_s: time without its name after which a server is
    left out.  now_s: a clock that does not jump.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        ended_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._name, self._ended_s, self._now_s = store, name, ended_s, now_s
        self._missing: dict[str, float] = {}  # since when
        self._written, self._wrote_s, self._read_s = 0, 0.0, now_s()

    def number_in(self, key: str) -> int:
        """Return up to which of this server's observations a state has that names it no more.
        StoreError.
        """
        return max(_number(self._store, key) for key in _keys(self._name, key))

    def write_learned(self, upto: int, *, at_once: bool) -> None:
        """Write that all observations up to a number are in the store, if that is due. StoreError.

        at_once: this server ends.
        """
        if upto > self._written and (at_once or self._now_s() - self._wrote_s >= WRITE_S):
            self._store.put(LEARNED + self._name, msgspec.msgpack.encode(upto))
            self._written, self._wrote_s = upto, self._now_s()

    @property
    def is_due(self) -> bool:
        """True when it is time to read who has ended."""
        return self._now_s() - self._read_s >= min(READ_S_MAX, self._ended_s / 4)

    def read(self, names: Collection[str]) -> set[str]:
        """Return which of these servers have ended. StoreError."""
        self._read_s = now_s = self._now_s()
        alive = {record.key.removeprefix(NAMES) for record in self._store.range(NAMES)[0]}
        self._missing = {
            name: self._missing.get(name, now_s) for name in {*names} - alive - {LEFT_OUT}
        }
        return {name for name, since_s in self._missing.items() if now_s - since_s >= self._ended_s}

    def leave_out(self, key: str, ended: Collection[str]) -> None:
        """Take the names of servers that have ended out of a state of the store. StoreError."""

        def decide(transaction: Transaction) -> None:
            record = transaction.get(key)
            if record is None:
                return
            try:
                stored = unsealed(record.value)
            except (msgspec.MsgspecError, ValueError):
                return  # the reader of the state reports it
            names = [name for name in stored.applied if name in ended][:AT_ONCE_MAX]
            if not names:
                return
            for name in names:
                number = stored.applied.pop(name)
                number_key, learned = _keys(name, key)
                # not a part of what must be unchanged: that number only grows
                if number > _number(self._store, learned):
                    transaction.put(number_key, msgspec.msgpack.encode(number))
            stored.applied[LEFT_OUT] = stored.applied.get(LEFT_OUT, 0) + 1
            transaction.put(key, resealed(stored))

        with contextlib.suppress(StoreConflict):  # it is left out the next time
            self._store.transact(decide, tries=TRIES)


def _keys(name: str, key: str) -> tuple[str, str]:
    """Return the keys that record how many of a server's observations are in a state, or in all."""
    state = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return f"{NUMBERS}{name}/{state}", LEARNED + name


def _number(store: Store, key: str) -> int:
    record = store.get(key)
    if record is not None:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(record.value, type=int)
    return 0
