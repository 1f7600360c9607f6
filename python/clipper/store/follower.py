"""Following a part of the store: everything is listed, then its changes come by a watch.

One class does it for all that follow the store: mirrors, the catalog, the selection states,
forwarded feedback. Each is a sink. The follower lists again after a RESET, after an error of the
store that ended the watch, and after any error of the sink, so that one entry that cannot be read
neither ends the thread nor is forgotten. It never waits without a limit.

A store that lost its content while its server was away answers as one whose content was deleted.
So a follower that knows something asks `accepts` before a listing replaces it, and before many
deletions at once are applied: its owner, which knows what the store held before, may refuse, and
the known content stays.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from clipper.component import START_S, Health, Stop, Worker
from clipper.errors import StoreError
from clipper.store.store import Event, Record, Store, Watch
from clipper_container.backoff import Backoff

POLL_S: Final = 0.5  # timeout of one wait for events
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 1.0
STEADY_S: Final = 2.0  # after so long without an error the next pause is short again
DELETIONS_MIN: Final = 2  # fewer deletions at once are applied without calling `accepts`
_BATCH: Final = 1000
_log = logging.getLogger(__name__)


class Sink(Protocol):
    """A receiver of the content of a part of the store. Threads: one at a time.

    All methods may raise StoreError, and whatever they raise is logged; the content is then listed
    again.
    """

    @property
    def known(self) -> int:
        """Return how many records are known here; 0 if none is kept."""

    def begin(self, stop: Stop) -> bool:
        """Prepare for a listing; return False to end. stop: of the follower's thread."""

    def reset(self, records: Sequence[Record], revision: int) -> None:
        """Take in a listing, which replaces what is known; changes after `revision` come next."""

    def changed(self, events: Sequence[Event]) -> None:
        """Take in changes (PUT, DELETE), in their order."""

    def poll(self) -> None:
        """Check what else may have changed; called every POLL_S at least."""


class Follower:
    """A thread that keeps a sink up to date. Threads: any.

    accepts: raises StoreError if the store does not continue what is known, and is called again
    later. It returns the history of the store's content: a listing during which that changes,
    because the store was emptied and restored, is repeated.
    reads_itself: the sink reads what it needs of the store in `reset`, which gets no records.
    vital: see Component.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        sink: Sink,
        *,
        name: str,
        accepts: Callable[[], object] | None = None,
        reads_itself: bool = False,
        vital: bool = False,
    ) -> None:
        self.name, self.vital = name, vital
        self._store, self._prefix = store, prefix
        self._sink, self._reads_itself = sink, reads_itself
        self._accepts = accepts
        self._threads = store.threads
        self._watch: Watch | None = None
        self._has_listed = False
        self.contact_s = float("-inf")  # when the store last answered; by the clock of its threads
        self.trouble: StoreError | None = None  # why the sink is stale; None: it is not
        self._worker = Worker(
            name,
            self._run,
            once=True,
            again=Backoff(PAUSE_S_MIN, PAUSE_S_MAX),
            vital=vital,
            threads=store.threads,
        )

    # -- a component

    def start(self, limit_s: float = START_S) -> None:
        """Start the thread, which lists everything unless `list` was called before. Raises
        NotStarted, ShuttingDown.
        """
        self._worker.start(limit_s)

    def request_stop(self) -> None:
        """End the watch, and with it the thread."""
        self._worker.request_stop()
        watch = self._watch
        if watch is not None:
            watch.close()

    def join(self, until_s: float) -> bool:
        """Wait for the end of the thread; return whether it has ended."""
        return self._worker.join(until_s)

    def end(self, limit_s: float = START_S) -> bool:
        """Stop, and wait for the thread; return whether it has ended. In the thread itself it only
        asks. Idempotent.
        """
        self.request_stop()
        return self._worker.end(limit_s)

    def health(self) -> Health:
        """Return the state of the thread."""
        return self._worker.health()

    @property
    def is_started(self) -> bool:
        """Return whether the thread was started."""
        return self._worker.is_started

    @property
    def is_stopping(self) -> bool:
        """Return whether the end was requested."""
        return self._worker.stop.requested

    # -- following

    def list(self) -> None:
        """List everything, hand it to the sink, and watch from there. Raises StoreError, and what
        the sink raises.
        """
        origin = self._origin()
        if self._reads_itself:
            records, revision = list[Record](), self._store.revision
        else:
            records, revision = self._store.range(self._prefix)
        if origin != self._origin():
            raise StoreError(
                f"store {self._store.name} was restored while {self._prefix!r} was listed.",
                hint="It is listed again.",
            )
        watch = self._store.watch(self._prefix, revision)
        try:
            self._sink.reset(records, revision)
        except BaseException:
            watch.close()
            raise
        self._watch, self._has_listed = watch, True
        self._has_contact(self._threads.now_s())
        if self.is_stopping:
            watch.close()

    def _origin(self) -> object:
        """Return the history of the store's content; None while nothing is known."""
        return self._accepts() if self._accepts is not None and self._has_listed else None

    def _run(self, stop: Stop) -> None:
        backoff = Backoff(PAUSE_S_MIN, PAUSE_S_MAX, steady_s=STEADY_S, rng=self._threads.random)
        while not stop.requested:
            began_s = self._threads.now_s()
            try:
                if self._watch is None:
                    if not self._sink.begin(stop):
                        return
                    self.list()
                if not self._follow(stop):
                    return  # the store was closed
            except StoreError as error:
                self._is_stale(error)
                stop.wait(backoff.ended(self._threads.now_s() - began_s))
            except Exception as error:
                self._leave_watch()
                self._is_stale(
                    StoreError(f"{self._prefix!r} cannot be taken in: {error!r}."), error
                )
                stop.wait(backoff.ended(self._threads.now_s() - began_s))

    def _follow(self, stop: Stop) -> bool:
        """Hand on events until the store is closed (False) or must be listed again (True)."""
        watch = self._watch
        assert watch is not None
        while not stop.requested:
            event = watch.next(POLL_S)
            if event is None and watch.closed:
                return False
            contact_s, batch = watch.contact_s, list[Event]()
            trouble: StoreError | None = None
            while event is not None and event.kind != "RESET":
                if event.kind != "SYNC":
                    batch.append(event)
                try:
                    event = watch.next(0) if len(batch) < _BATCH else None
                except StoreError as error:  # after what it has told, which it does not repeat
                    event, trouble = None, error
            self._take(batch)
            self._has_contact(contact_s)
            if trouble is not None:
                raise trouble
            if event is not None:  # the listing is newer than all pending events
                self._leave_watch()
                return True
        return False

    def _take(self, batch: Sequence[Event]) -> None:
        """Hand changes to the sink. If that fails, everything is listed again."""
        try:
            if self._accepts is not None and self._are_many_deletions(batch):
                self._accepts()
            if batch:
                self._sink.changed(batch)
            self._sink.poll()
        except BaseException:
            self._leave_watch()
            raise

    def _are_many_deletions(self, events: Sequence[Event]) -> bool:
        """Return True if the events delete most of what is known, as emptying a store does."""
        deletions = sum(event.kind == "DELETE" for event in events)
        return deletions >= DELETIONS_MIN and 2 * deletions > self._sink.known

    def _leave_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _has_contact(self, at_s: float) -> None:
        """Record the time of an answer of the store that the sink has taken in; a timeout is no
        answer."""
        if at_s <= self.contact_s:
            return
        self.contact_s = at_s
        if self.trouble is not None:
            self.trouble = None
            _log.info("%s: %r is up to date again", self.name, self._prefix)

    def _is_stale(self, error: StoreError, cause: Exception | None = None) -> None:
        """Record why the sink is stale; log it if the reason is a new one."""
        known, self.trouble = self.trouble, error
        if self._worker.stop.requested:
            return
        if known is None or (cause is not None and known.message != error.message):
            _log.warning("%s: %r is stale: %s", self.name, self._prefix, error, exc_info=cause)
