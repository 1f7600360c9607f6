"""A consumer of a Redis Stream: one thread reads entries, one settles them, in the stream's
order."""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, Self, TypeVar

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
        self._stopping = False
        self._give_up_s: float | None = None
        self._logged = ""
        self._counts = dict.fromkeys(
            ("read", "answered", "refused", "duplicates", "settled_elsewhere"), 0
        )
        self._reader = threading.Thread(
            target=self._run, args=(self._read_on,), name=f"clipper-{name}", daemon=True
        )
        self._worker = threading.Thread(
            target=self._run, args=(self._settle_on,), name=f"clipper-{name}-out", daemon=True
        )

    # -- for the handler

    @property
    def is_stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping

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
        """Start the threads."""
        self._reader.start()
        self._worker.start()
        return self

    def stop(self, drain_s: float = 5.0) -> None:
        """Read no more entries and stop.

        Entries in progress have `drain_s` seconds; the rest stay pending for other consumers.
        Idempotent.
        """
        with self._changed:
            if self._give_up_s is None:
                self._give_up_s = time.monotonic() + drain_s
            self._stopping = True
            self._changed.notify_all()
        self._worker.join(max(0.0, self._give_up_s - time.monotonic()) + _CHECK_S)
        self._group.stop_waiting()
        self._worker.join()
        self._reader.join()
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
            "running": self._worker.is_alive() and not self._stopping,
        }

    # -- the threads

    def _run(self, turn: Callable[[], bool]) -> None:
        """Call `turn()` until it returns False. Errors are logged, and the thread goes on."""
        while True:
            try:
                if not turn():
                    return
            except Exception:
                _log.exception("stream %s: an error; it continues", self.name)
                with self._changed:
                    self._changed.wait(_CHECK_S)

    def _read_on(self) -> bool:
        if self._stopping:
            return False
        self._refresh()
        with self._changed:
            room = self._handler.room - len(self._mine)
            if room <= 0:
                self._changed.wait(_CHECK_S)
                return True
        for entry in self._group.read(min(room, _READ_MAX), self._mine):
            self._counts["read"] += 1
            with self._changed:
                self._mine[entry.id] = time.monotonic() + self._group.refresh_s
            item = self._started(entry)
            with self._changed:
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
                if self._stopping and not self._reader.is_alive():
                    return False
                self._changed.wait(_CHECK_S)
        entries: list[str] = []
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
        self._count(outcomes, self._group.settle(outcomes, self._give_up_s) if outcomes else [])
        with self._changed:
            for id in entries:
                self._mine.pop(id, None)
            self._changed.notify_all()
        return True

    def _count(self, outcomes: list[EntryOutcome], results: list[int] | None) -> None:
        for outcome, result in zip(outcomes, results or (), strict=False):
            name = {ELSEWHERE: "settled_elsewhere", DUPLICATE: "duplicates"}.get(result, "")
            if result == DONE:
                name = "refused" if outcome.kind == "refuse" else "answered"
            self._counts[name] += 1
