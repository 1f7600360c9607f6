"""Answers that a server leaves in the store when it ends, so that feedback about them still counts.

While a server lives, it alone knows what its answers are about (forwarding.py). When it ends in
good order, as in an upgrade, it writes those that still wait for feedback as records of the
journal, in chunks by the number in their id; they stay for as long as the server would have
remembered them. Who is told about one of them claims it, by replacing its record with an empty one
if nobody wrote since, and then learns from it as from an answer of its own. So it counts once; if
the claiming server is killed in between, it does not count.

A server that is killed leaves nothing.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from clipper.errors import LeaseLost, StoreError, UnknownPrediction
from clipper.selection import Observation
from clipper.serving.feedback.states import Learner, Seen
from clipper.serving.feedback.window import FeedbackWindow, Joined
from clipper.store.store import VALUE_BYTES_MAX, Compare, Put, Store

_log = logging.getLogger(__name__)
PREFIX: Final = "feedback/left/"
CHUNK_BITS: Final = 8  # of the number in an id: 256 answers of a chunk
LEFT_BYTES_MAX: Final = 64 << 20  # of one server
_TRIES: Final = 100
_Chunk = dict[int, bytes]
_CHUNK: Final = msgspec.msgpack.Decoder(_Chunk)
Read = Callable[[bytes], tuple[Learner, str, Seen] | None]


class Handover:
    """Threads: any.

    read: decodes a record of the journal. window_s: how long answers are remembered.
    """

    def __init__(self, store: Store, node: str, window_s: float, read: Read) -> None:
        self._store, self._node, self._window_s, self._read = store, node, window_s, read

    # -- at the end of this server

    def leave(self, window: FeedbackWindow) -> int:
        """Write the answers that still wait for feedback; return how many. What the store does not
        take is forgotten."""
        chunks: dict[int, _Chunk] = {}
        total = 0
        for number, record in window.records(self._node):
            total += len(record)
            if total > LEFT_BYTES_MAX:
                break
            chunks.setdefault(number >> CHUNK_BITS, {})[number] = record
        count = 0
        try:
            lease, _ = self._store.grant(self._window_s) if chunks else ("", 0.0)
            for chunk, answers in chunks.items():
                data = msgspec.msgpack.encode(answers)
                if len(data) <= VALUE_BYTES_MAX:
                    self._store.txn((), (Put(self._key(self._node, chunk), data, lease),))
                    count += len(answers)
        except StoreError as error:
            _log.warning("feedback about answers of this server is not taken any more: %s", error)
        return count

    def _key(self, node: str, chunk: int) -> str:
        return f"{PREFIX}{node}/{chunk:x}"

    # -- about answers of a server that has ended

    def take(self, id: str, application: str) -> Joined | None:
        """Claim an answer; None when feedback about it came before. Raises UnknownPrediction,
        StoreError."""
        (found,) = self.take_many([id], application)
        if isinstance(found, UnknownPrediction):
            raise found
        return found

    def take_many(
        self, ids: Sequence[str], application: str
    ) -> list[Joined | UnknownPrediction | None]:
        """Claim answers, each as take() does. Raises StoreError."""
        found: list[Joined | UnknownPrediction | None] = [_unknown(id) for id in ids]
        by_key: dict[str, dict[int, int]] = {}
        for i, id in enumerate(ids):
            node, _, digits = id.partition("-")
            number = int(digits, 16)
            places = by_key.setdefault(self._key(node, number >> CHUNK_BITS), {})
            if places.setdefault(number, i) != i:
                found[i] = None
        for key, places in by_key.items():
            for number, one in self._claim(key, set(places), application).items():
                found[places[number]] = one
        return found

    def _claim(self, key: str, numbers: set[int], application: str) -> dict[int, Joined | None]:
        for _ in range(_TRIES):
            record = self._store.get(key)
            if record is None:
                return {}
            chunk = _CHUNK.decode(record.value)
            there = {number: self._joined(chunk[number]) for number in numbers & chunk.keys()}
            mine = {
                number: one
                for number, one in there.items()
                if one is None or one.learner.application == application
            }
            claimed = {number: b"" for number, one in mine.items() if one is not None}
            if not claimed:
                return mine
            data = msgspec.msgpack.encode({**chunk, **claimed})
            unchanged = Compare(key, record.revision)
            try:
                if self._store.txn((unchanged,), (Put(key, data, record.lease),)).ok:
                    return mine
            except LeaseLost:
                return {}
        raise StoreError(f"{key} was changed by others {_TRIES} times in a row.")

    def _joined(self, record: bytes) -> Joined | None:
        found = self._read(record) if record else None
        if found is None:
            return None
        learner, user, seen = found
        if not isinstance(seen, Observation):
            return None
        return Joined(learner, user, seen.plan, dict(seen.predictions), seen.answer, (), 0.0, True)


def _unknown(id: str) -> UnknownPrediction:
    hint = "The server that answered was killed, or ended too long ago, or shares no store."
    return UnknownPrediction(f"no prediction {id[:64]!r} is waiting for feedback.", hint=hint)
