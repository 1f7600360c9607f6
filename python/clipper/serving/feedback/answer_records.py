"""Answers as records in the store that servers share, so that feedback about them counts when the
server that gave them is gone.

While a server lives, it alone knows what its answers are about (forwarding.py). Behind that it
writes them to the store in batches, every `feedback.records_ms`: what was not written yet is lost
with a kill, and nothing with an end in good order. A batch is compressed and has one key for each
256 numbers of answers, so that the id of an answer determines where its record is. Records expire
when the server would have forgotten the answer.

A server that learns from feedback about an answer in the store first claims its number there. One
claim of a number succeeds, so feedback counts once, whichever servers receive it, and also when a
server is killed before it acknowledged feedback that is in its journal. A server waits CLAIM_S for
the claims of its own answers, and learns without them while the store does not answer.

Written are the answers of policies that learn, without late predictions and without records of more
than RECORD_BYTES_MAX; at the end of a server also those of other policies.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import Final

import lz4.block
import msgspec

from clipper.component import Health, Stop, WakeFlag, Worker
from clipper.errors import LeaseLost, StoreError, UnknownPrediction
from clipper.selection import Observation, Truth
from clipper.serving.feedback.journal_records import written
from clipper.serving.feedback.states import Learner, Seen
from clipper.serving.feedback.window import FeedbackWindow, seen_of
from clipper.store.expiring import ExpiringLists, expiring_lists
from clipper.store.store import Store
from clipper_container.backoff import Backoff
from clipper_core.learning.answer_window import Joined

_log = logging.getLogger(__name__)
PREFIX: Final = "feedback/answers/"
SIZES: Final = "feedback/sizes/"  # of the records of each server, in bytes
CHUNK_BITS: Final = 8  # of the number in an id: 256 answers of a key
RECORD_BYTES_MAX: Final = 16 << 10
BATCH_BYTES_MAX: Final = 512 << 10  # of a value, uncompressed
BATCH_MAX: Final = 4096  # answers that are written before the interval is over
CLAIM_S: Final = 0.05  # for a claim of an answer of this server
SIZES_S: Final = 10.0  # between two looks at the sizes of all servers
AGAIN_S_MIN, AGAIN_S_MAX = 0.1, 5.0
_BATCH: Final = msgspec.msgpack.Decoder(dict[int, bytes])
Read = Callable[[bytes], tuple[Learner, str, Seen] | None]
Answered = tuple[str, Joined]  # an answer of this server, with its id


class RecordLimits(msgspec.Struct, frozen=True):
    """Limits of the records of a server.

    window_s: how long answers are remembered.  every_s: between two writes; 0: write at the end
    only.  waiting_max: answers that wait to be written.  bytes_max: of this server's records.
    total_bytes_max: of all servers' records.
    """

    window_s: float
    every_s: float
    waiting_max: int
    bytes_max: int
    total_bytes_max: int


class _Claims:
    """Numbers to be claimed together. done: set when it is known which of them were free."""

    __slots__ = ("done", "numbers", "taken")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.numbers: dict[str, set[int]] = {}
        self.taken: dict[str, set[int]] = {}


class AnswerRecords:
    """Threads: any. One of its own writes.

    node: of the ids of this server's answers.  read: decodes a record of the journal.
    """

    def __init__(self, store: Store, node: str, limits: RecordLimits, read: Read) -> None:
        self._store, self._node, self._limits, self._read = store, node, limits, read
        self._opened: ExpiringLists | None = None
        self._fresh: deque[Answered] = deque(maxlen=limits.waiting_max)
        self._claims = _Claims()
        self._claiming = threading.Lock()
        self._worker = Worker(
            "clipper-answer-records", self._run, again=Backoff(AGAIN_S_MIN, AGAIN_S_MAX)
        )
        self._wake = WakeFlag(self._worker.stop)
        self._closing = False
        self._starting = threading.Lock()
        self._is_away = False
        self._sizes: OrderedDict[str, list[float]] = OrderedDict()  # bytes and end of each key
        self._bytes_max = limits.bytes_max
        self._checked_s, self._posted = float("-inf"), 0
        self._lease = ""
        self.nbytes = 0  # of this server's records in the store
        self.written = 0  # records, ever

    @property
    def is_writing(self) -> bool:
        """Return whether answers are written while the server lives."""
        return self._limits.every_s > 0

    @property
    def _lists(self) -> ExpiringLists:
        if self._opened is None:
            self._opened = expiring_lists(self._store, self._limits.window_s)
        return self._opened

    # -- answers of this server

    def add(self, id: str, joined: Joined) -> None:
        """Have an answer written with the next batch. On the path of every query."""
        fresh = self._fresh
        fresh.append((id, joined))
        if len(fresh) == BATCH_MAX:
            self._wake.set()

    def start(self) -> None:
        """Start the thread that writes, if anything is to be written. Once."""
        with self._starting:  # a server may be closed while its store returns
            if self.is_writing and not (self._worker.is_started or self._closing):
                self._worker.start()

    def health(self) -> list[Health]:
        """Return the state of the thread, if there is one."""
        return [self._worker.health()] if self._worker.is_started else []

    def claim(self, found: Sequence[tuple[str, Joined]]) -> list[bool]:
        """Claim answers of this server that are taken for feedback; return which of them count.

        False: another server learned about it, since it took this one for dead.
        """
        keys: list[tuple[str, int] | None] = []
        for id, joined in found:
            is_there = joined.is_written and not joined.is_claimed
            keys.append(self._place(_number_of(id)) if is_there else None)
        if not any(keys):
            return [True] * len(found)
        with self._claiming:
            claims = self._claims
            for place in keys:
                if place is not None:
                    claims.numbers.setdefault(place[0], set()).add(place[1])
        self._wake.set()
        if not self._is_away and not claims.done.wait(CLAIM_S):
            _log.info("the store has not taken the claims of feedback within %g s", CLAIM_S)
        counts: list[bool] = []
        for place, (_, joined) in zip(keys, found, strict=True):
            joined.is_claimed = joined.is_claimed or place is not None
            counts.append(place is None or place[1] not in claims.taken.get(place[0], ()))
        return counts

    def _place(self, number: int, node: str = "") -> tuple[str, int]:
        """Return the key of an answer's batches, and its number among theirs."""
        key = f"{PREFIX}{node or self._node}/{number >> CHUNK_BITS:x}"
        return key, number & ((1 << CHUNK_BITS) - 1)

    # -- writing

    def _run(self, stop: Stop) -> None:
        backoff = Backoff(AGAIN_S_MIN, AGAIN_S_MAX)
        write_s = monotonic() + self._limits.every_s
        while not stop.requested:
            self._wake.take(max(0.0, write_s - monotonic()))
            try:
                self._write_claims()
                if monotonic() >= write_s or len(self._fresh) >= BATCH_MAX:
                    self._write_fresh()
                    write_s = monotonic() + self._limits.every_s
                if self._is_away:
                    _log.info("records of answers are written to %s again", self._store.name)
                self._is_away = False
                backoff.reset()
            except StoreError as error:
                if not self._is_away:
                    _log.warning("records of answers wait for the store: %s", error)
                self._is_away = True
                write_s = monotonic() + backoff.next_s()
            except Exception:
                _log.exception("records of answers could not be written")
                write_s = monotonic() + AGAIN_S_MAX

    def _write_claims(self) -> None:
        with self._claiming:
            claims = self._claims
            if not claims.numbers:
                return
            self._claims = _Claims()
        try:
            free = self._lists.claim({key: sorted(some) for key, some in claims.numbers.items()})
        except BaseException:  # also without memory: whoever waits is released
            claims.done.set()
            with self._claiming:  # unless there are more than answers are remembered
                if sum(map(len, self._claims.numbers.values())) < self._limits.waiting_max:
                    for key, some in claims.numbers.items():
                        self._claims.numbers.setdefault(key, set()).update(some)
            raise
        claims.taken = {key: some - free[key] for key, some in claims.numbers.items()}
        claims.done.set()

    def _write_fresh(self) -> None:
        batch: list[Answered] = []
        while self._fresh and len(batch) < BATCH_MAX:
            batch.append(self._fresh.popleft())
        if not batch:
            return
        try:
            self._write(_encoded(batch))
        except StoreError:
            room = self._limits.waiting_max - len(self._fresh)
            self._fresh.extendleft(reversed(batch[-room:] if room > 0 else []))
            raise
        if len(self._fresh) >= BATCH_MAX:
            self._wake.set()
        self._check_sizes()

    def _write(self, records: Iterable[tuple[int, bytes]]) -> int:
        """Write records by the numbers of their answers, in batches; return how many."""
        parts: dict[str, dict[int, bytes]] = {}
        sizes: dict[str, int] = {}
        count = 0
        values: dict[str, bytes] = {}
        for number, record in records:
            if len(record) > RECORD_BYTES_MAX:
                continue
            count += 1
            key, place = self._place(number)
            if sizes.get(key, 0) + len(record) > BATCH_BYTES_MAX:
                self._append({key: _packed(parts.pop(key))})
                sizes[key] = 0
            parts.setdefault(key, {})[place] = record
            sizes[key] = sizes.get(key, 0) + len(record)
        for key, part in parts.items():
            values[key] = _packed(part)
            if sum(map(len, values.values())) > BATCH_BYTES_MAX:
                self._append(values)
                values = {}
        self._append(values)
        self.written += count
        return count

    def _append(self, values: dict[str, bytes]) -> None:
        """Write batches, and delete the oldest ones beyond the limit."""
        if not values:
            return
        self._lists.append(values)
        now = monotonic()
        for key, value in values.items():
            size = self._sizes.setdefault(key, [0.0, 0.0])
            size[0] += len(value)
            size[1] = now + self._limits.window_s
            self.nbytes += len(value)
        gone: list[str] = []
        for key, (nbytes, until_s) in list(self._sizes.items()):
            if self.nbytes <= self._bytes_max and until_s > now:
                break
            if until_s > now:
                gone.append(key)
            del self._sizes[key]
            self.nbytes -= int(nbytes)
        self._lists.drop(gone)

    def _check_sizes(self) -> None:
        """Tell the others how much this server keeps, and keep a share if all keep too much."""
        now = monotonic()
        if now < self._checked_s + SIZES_S:
            return
        self._checked_s = now
        if self.nbytes != self._posted:
            self._post_size()
        sizes = [int(record.value) for record in self._store.range(SIZES)[0]]
        share = self._limits.total_bytes_max // max(1, len(sizes))
        is_over = sum(sizes) > self._limits.total_bytes_max
        self._bytes_max = min(self._limits.bytes_max, share) if is_over else self._limits.bytes_max

    def _post_size(self) -> None:
        """Write how much this server keeps; it stays for as long as that."""
        try:
            if self._lease:
                self._store.renew(self._lease)
        except LeaseLost:
            self._lease = ""
        if not self._lease:
            self._lease, _ = self._store.grant(max(self._limits.window_s, 2 * SIZES_S))
        self._store.put(SIZES + self._node, b"%d" % self.nbytes, self._lease)
        self._posted = self.nbytes

    # -- the end of this server

    def leave(self, window: FeedbackWindow) -> int:
        """Write the answers that are not written and may still get feedback; return how many.

        What the store does not take is forgotten. Stops the thread. Once.
        """
        with self._starting:
            self._closing = True
        self._worker.end()
        try:
            self._write_claims()
            waiting = list(self._fresh)
            self._fresh.clear()
            return self._write(_encoded(waiting)) + self._write(window.records(self._node))
        except StoreError as error:
            _log.warning("feedback about answers of this server is not taken any more: %s", error)
            return 0

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
            key, number = self._place(int(digits, 16), node)
            if by_key.setdefault(key, {}).setdefault(number, i) != i:
                found[i] = None
        for key, places in by_key.items():
            for number, one in self._take(key, set(places), application).items():
                found[places[number]] = one
        return found

    def _take(self, key: str, numbers: set[int], application: str) -> dict[int, Joined | None]:
        found: dict[int, Joined | None] = {}
        for data in self._lists.read(key):
            batch = _unpacked(key, data)
            for number in numbers & batch.keys():
                joined = self._joined(batch[number])
                if joined is None or joined.learner.application == application:
                    found[number] = joined
        waiting = [number for number, joined in found.items() if joined is not None]
        if waiting:
            free = self._lists.claim({key: waiting})[key]
            found.update(dict.fromkeys(set(waiting) - free))
        return found

    def _joined(self, record: bytes) -> Joined | None:
        found = self._read(record) if record else None
        if found is None:
            return None
        learner, user, seen = found
        if not isinstance(seen, Observation):
            return None
        return Joined(learner, user, seen.plan, dict(seen.predictions), seen.answer, (), 0.0, True)


def _encoded(batch: Sequence[Answered]) -> Iterator[tuple[int, bytes]]:
    """Yield the records of these answers; empty ones for those whose feedback has come.

    `is_written` is set first: feedback that comes from then on claims the number.
    """
    for id, joined in batch:
        if joined.nbytes <= 2 * RECORD_BYTES_MAX:
            joined.is_written = True
            seen = seen_of(joined, Truth())
            yield (
                _number_of(id),
                b"" if joined.has_feedback else written(joined.learner, joined.user, seen),
            )


def _number_of(id: str) -> int:
    return int(id.rpartition("-")[2], 16)


def _packed(batch: dict[int, bytes]) -> bytes:
    data = msgspec.msgpack.encode(batch)
    packed: bytes = lz4.block.compress(data, store_size=False)
    return len(data).to_bytes(4, "little") + packed


def _unpacked(key: str, data: bytes) -> dict[int, bytes]:
    """Return what `_packed` wrote; nothing, and an error in the log, for anything else."""
    size = int.from_bytes(data[:4], "little")
    try:
        if size > 2 * BATCH_BYTES_MAX:
            raise ValueError(f"{size} bytes")
        return _BATCH.decode(lz4.block.decompress(data[4:], uncompressed_size=size))
    except (msgspec.MsgspecError, lz4.block.LZ4BlockError, ValueError) as error:
        _log.error("the records of answers in %s cannot be read: %s", key, error)
        return {}


def _unknown(id: str) -> UnknownPrediction:
    hint = (
        "The server that answered has ended too long ago, was killed before it wrote the answer to"
        " the store, or shares no store."
    )
    return UnknownPrediction(f"no prediction {id[:64]!r} is waiting for feedback.", hint=hint)
