"""A consumer of a Redis Stream: one thread reads entries, one settles them, in the stream's
order."""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, Self, TypeVar

from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import ClipperError
from clipper.frontend.streams.consumer_group import (
    DONE,
    DUPLICATE,
    ELSEWHERE,
    ConsumerGroup,
    EntryOutcome,
    StreamEntry,
    refusal,
)

_log = logging.getLogger(__name__)
AGAIN_S_MAX = 5.0  # between two tries of a thread after an error
_SETTLE_MAX: Final = 64  # outcomes per script call, during which Redis is blocked
_READ_MAX: Final = 256
_CHECK_S: Final = 0.1
_T = TypeVar("_T")
_R = TypeVar("_R")


class EntryHandler(Protocol[_T]):
    """Processes the entries of a stream. A ClipperError refuses the entry; other errors are logged.

    Threads: `accept` is called on the consumer's reader thread, `outcome` on the other one.
    """

    @property
    def room(self) -> int:
        """The number of entries that may be in progress now."""

    def accept(self, entry: StreamEntry) -> _T:
        """Start processing an entry, without waiting. Raises ClipperError for an invalid entry."""

    def is_ready(self, item: _T) -> bool:
        """Return whether `outcome` would return without waiting."""

    def outcome(
        self, entry: StreamEntry, item: _T, consumer: "StreamConsumer[_T]"
    ) -> EntryOutcome | None:
        """Return the outcome of an entry; may wait. None leaves the entry pending, as the consumer
        stops.

        Raises ClipperError for an invalid entry.
        """


class StreamConsumer(Generic[_T]):
    """Reads a stream and settles its entries, on two threads. Threads: any.

    deliveries_max: an entry that was delivered more often without an outcome is refused.
    is_stopping: `stop` was called.
    """

    def __init__(
        self,
        name: str,
        group: ConsumerGroup,
        handler: EntryHandler[_T],
        deliveries_max: int = 1 << 30,
    ) -> None:
        self.name = name
        self._group = group
        self._handler = handler
        self._deliveries_max = deliveries_max
        self._queue: deque[tuple[StreamEntry, _T | EntryOutcome]] = deque()
        self._mine: dict[str, float] = {}  # entries in progress -> time of the next renewal
        self._changed = threading.Condition()
        self.is_stopping = False
        self._give_up_s: float | None = None
        self._logged = ""
        self._counts = dict.fromkeys(
            ("read", "answered", "refused", "duplicates", "settled_elsewhere"), 0
        )
        self._reader = self._thread(f"clipper-{name}", self._read_on)
        self._worker = self._thread(f"clipper-{name}-out", self._settle_on)

    # -- for the handler

    @property
    def is_over(self) -> bool:
        """True once the remaining entries are left to other consumers."""
        return self._give_up_s is not None and time.monotonic() >= self._give_up_s

    def pause(self, seconds: float) -> None:
        """Wait for some time, or until the time for the remaining entries is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over, seconds)

    def report(self, trouble: str) -> None:
        """Log the reason of a delay, once."""
        if trouble != self._logged:
            _log.warning("stream %s waits: %s", self.name, trouble)
            self._logged = trouble

    # -- life

    def start(self) -> Self:
        """Start both threads, or none. Raises NotStarted."""
        self._reader.start()
        try:
            self._worker.start()
        except BaseException:
            self.stop(0.0)
            raise
        return self

    def health(self) -> list[Health]:
        """Return the states of the threads."""
        return [self._reader.health(), self._worker.health()]

    def _thread(self, name: str, turn: Callable[[], bool]) -> Worker:
        def run(stop: Stop) -> None:
            while turn():
                pass

        return Worker(name, run, once=True, again=Backoff(_CHECK_S, AGAIN_S_MAX))

    def stop(self, drain_s: float = 5.0) -> None:
        """Read no more entries and stop.

        Entries in progress have `drain_s` seconds; the rest stay pending for other consumers.
        Idempotent.
        """
        with self._changed:
            if self._give_up_s is None:
                self._give_up_s = time.monotonic() + drain_s
            self.is_stopping = True
            self._changed.notify_all()
        self._reader.request_stop()
        self._worker.join(max(self._give_up_s, time.monotonic()) + _CHECK_S)
        self._group.stop_waiting()
        self._worker.end()
        self._reader.end()
        if not self._group.trouble:
            self._group.leave()
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stats(self) -> dict[str, int | str]:
        """Return counts since the start.

        `in_flight` and `room` are current; `trouble` is why Redis cannot be used now, or "".
        """
        group = self._group
        return {
            **self._counts,
            "reclaimed": group.reclaimed_count,
            "trimmed": group.trimmed_count,
            "reconnects": group.reconnect_count,
            "in_flight": len(self._mine),
            "room": self._handler.room,
            "trouble": group.trouble,
            "running": self._worker.is_running and not self.is_stopping,
        }

    # -- the threads

    def _read_on(self) -> bool:
        if self.is_stopping:
            return False
        self._refresh()
        with self._changed:
            room = self._handler.room - len(self._mine)
            if room <= 0:
                self._changed.wait(_CHECK_S)
                return True
        for entry in self._group.read(min(room, _READ_MAX), self._mine):
            self._counts["read"] += 1
            item = self._started(entry)
            with self._changed:
                self._mine[entry.id] = time.monotonic() + self._group.refresh_s
                self._queue.append((entry, item))
                self._changed.notify_all()
        return True

    def _started(self, entry: StreamEntry) -> _T | EntryOutcome:
        if entry.deliveries > self._deliveries_max:
            why = f"it was delivered {entry.deliveries} times, and never answered"
            return refusal(entry, self._group.names.source, "poison", why)
        return self._guarded(entry, lambda: self._handler.accept(entry))

    def _guarded(self, entry: StreamEntry, fn: Callable[[], _R]) -> _R | EntryOutcome:
        """Return `fn()`, or the refusal of the entry if it raised."""
        source = self._group.names.source
        try:
            return fn()
        except ClipperError as error:
            return refusal(entry, source, error.slug, str(error))
        except Exception as error:
            _log.exception("stream %s: entry %s", self.name, entry.id)
            return refusal(entry, source, "internal", f"{type(error).__name__}: {error}")

    def _refresh(self) -> None:
        now = time.monotonic()
        with self._changed:
            due = [id for id, when in self._mine.items() if when <= now]
            for id in due:
                self._mine[id] = now + self._group.refresh_s
        self._group.refresh(due)

    def _settle_on(self) -> bool:
        with self._changed:
            while not self._queue:
                if self.is_stopping and not self._reader.is_running:
                    return False
                self._changed.wait(_CHECK_S)
        entries: list[str] = []
        try:
            outcomes = self._outcomes(entries)
            self._count(outcomes, self._group.settle(outcomes, self._give_up_s) if outcomes else [])
        finally:  # after an error they are pending, and are delivered again
            with self._changed:
                for id in entries:
                    self._mine.pop(id, None)
                self._changed.notify_all()
        return True

    def _outcomes(self, entries: list[str]) -> list[EntryOutcome]:
        """Take entries from the queue, add their ids to `entries`, and return their outcomes."""
        outcomes: list[EntryOutcome] = []
        while self._queue and len(entries) < _SETTLE_MAX:
            entry, item = self._queue[0]
            if entries and not (isinstance(item, EntryOutcome) or self._handler.is_ready(item)):
                break
            self._queue.popleft()
            entries.append(entry.id)
            outcome = (
                item
                if isinstance(item, EntryOutcome)
                else self._guarded(
                    entry, functools.partial(self._handler.outcome, entry, item, self)
                )
            )
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def _count(self, outcomes: list[EntryOutcome], results: list[int] | None) -> None:
        for outcome, result in zip(outcomes, results or (), strict=False):
            name = {ELSEWHERE: "settled_elsewhere", DUPLICATE: "duplicates"}.get(result, "")
            if result == DONE:
                name = "refused" if outcome.kind == "refuse" else "answered"
            self._counts[name] += 1
