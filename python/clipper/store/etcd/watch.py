"""A watch on an etcd cluster that resumes after the last event it received.

Its thread reads one stream from one endpoint and reconnects to the next when the stream ends. A
hung server does not end a stream. So after one second of silence the watch requests a progress
notification, and reconnects if none comes within two seconds. The notification is used for nothing
else: etcd 3.4 may send it before pending events (etcd issue 15220), so only events move the cursor.

RESET is delivered when etcd cannot replay events, after a compaction, or has another history, after
a restore from an older copy: a watch that connects again asks for the newest record that it knows.
SYNC is delivered after the newest record that existed at the start; an earlier deletion may follow
it.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

import grpc

from clipper.component import Backoff, Stop, Worker
from clipper.errors import StoreError
from clipper.store.etcd.channel import EtcdChannel
from clipper.store.etcd.protocol import Message, message
from clipper.store.store import EVENTS_MAX, Event, Record

_END_S = 10.0  # for the thread, whose stream is cancelled
SILENCE_S: Final = 1.0  # then a progress notification is requested
WATCHDOG_S = 2.0  # timeout of that notification
_SLICE_S: Final = 0.25
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 1.0


class EtcdWatch:
    """A watch on a prefix. Threads: any may close it; one reads it.

    key, record: convert etcd's key and KeyValue.
    """

    def __init__(
        self,
        channel: EtcdChannel,
        prefix: bytes,
        cursor: int,
        key: Callable[[bytes], str],
        record: Callable[[Message], Record],
    ) -> None:
        self._channel, self._prefix, self._key, self._record = channel, prefix, key, record
        self._end = prefix[:-1] + bytes([prefix[-1] + 1])
        self._cursor = cursor  # changes up to this revision have been taken
        self._cluster = 0
        self._seen: Message | None = None  # the newest record that this watch knows
        self._synced = False
        # SYNC when events up to this revision have come; -1 while that is not known
        self._sync_at = -1
        self._sync_revision = 0
        self._ready: deque[Event] = deque()
        self._error: StoreError | None = None
        # since when a notification is pending; infinite if none is
        self._pending_since_s = float("inf")
        self.contact_s = monotonic()
        # of the stream, for gRPC's thread; None ends it
        self._requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._call: grpc.Call | None = None
        self._changed = threading.Condition()
        self._worker = Worker("clipper-etcd-watch", self._run, once=True)
        self._worker.start()

    # -- called by the reader

    def next(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None on timeout or after `close`.

        Raises StoreError once for each loss of the connection; the watch reconnects by itself, and
        further calls continue.
        """
        give_up = float("inf") if timeout_s is None else monotonic() + timeout_s
        with self._changed:
            while not self.closed:
                if self._ready:
                    return self._ready.popleft()
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                now_s = monotonic()
                if now_s >= give_up:
                    return None
                self._check_alive(now_s)
                self._changed.wait(min(give_up - now_s, _SLICE_S))
        return None

    def _check_alive(self, now_s: float) -> None:
        if now_s - self._pending_since_s > WATCHDOG_S:
            self._pending_since_s = float("inf")
            self._error = StoreError(
                f"store {self._channel.name} has not answered for {WATCHDOG_S:g} s.",
                hint="Check whether etcd hangs.",
            )
            self._cancel()
        elif self._pending_since_s == float("inf") and now_s - self.contact_s > SILENCE_S:
            self._pending_since_s = now_s
            self._requests.put(message("WatchRequest")(progress_request={}))

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._worker.stop.requested

    def close(self) -> None:
        """End the stream and its thread."""
        self._worker.request_stop()
        with self._changed:
            self._changed.notify_all()
            self._cancel()
        self._worker.end(_END_S)

    def _cancel(self) -> None:
        self._requests.put(None)
        if self._call is not None:
            self._call.cancel()

    # -- run by the watch's thread

    def _run(self, stop: Stop) -> None:
        backoff = Backoff(PAUSE_S_MIN, PAUSE_S_MAX)
        while not stop.requested:
            at, contact_s = self._channel.at, self.contact_s
            try:
                self._follow(at)
            except grpc.RpcError as problem:
                self._trouble(self._channel.explained(problem))
            except StoreError as error:
                self._trouble(error)
            except ValueError:  # the channel was closed
                stop.request()
            else:
                continue  # it restarts at another revision
            if self.contact_s != contact_s:
                backoff.reset()
            self._channel.leave(at)
            self._channel.forget_token()  # an expired token may be the reason
            stop.wait(backoff.next_s())

    def _trouble(self, error: StoreError) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _follow(self, at: int) -> None:
        """Read one stream, until it fails or the watch has to restart at another revision."""
        with self._changed:
            self._requests = queue.SimpleQueue()
            self._pending_since_s = monotonic()
            create = {
                "key": self._prefix,
                "range_end": self._end,
                "start_revision": self._cursor + 1,
            }
            self._requests.put(message("WatchRequest")(create_request=create))
            self._call = self._channel.stream(at, "Watch.Watch", iter(self._requests.get, None))
            if self.closed:
                self._cancel()
        try:
            for answer in self._call:
                if self._take(answer):
                    return
        finally:
            self._cancel()
        raise StoreError(f"store {self._channel.name} ended the watch.")

    def _take(self, answer: Message) -> bool:
        """Process a response; return True if the watch must restart."""
        behind = answer.created and self._other_history(answer.header)
        gone = answer.canceled and bool(answer.compact_revision)
        if answer.canceled and not gone:
            raise StoreError(
                f"store {self._channel.name} refused the watch: {answer.cancel_reason}."
            )
        if behind or gone:
            self._reset(self._newest(0)[1])
            return True
        if answer.created and not self._synced:
            self._sync_at, self._sync_revision = self._newest(self._cursor)
        self._seen = next((e.kv for e in reversed(answer.events) if not e.type), self._seen)
        events = [self._event(event) for event in answer.events]
        with self._changed:
            self.contact_s, self._pending_since_s = monotonic(), float("inf")
            if events:
                self._cursor = events[-1].revision
                self._ready.extend(events)
            if len(self._ready) > EVENTS_MAX:  # without a reader, keep no more than a store does
                self._ready.clear()
                self._ready.append(Event("RESET", self._cursor))
            self._sync()
            self._changed.notify_all()
        return False

    def _sync(self) -> None:
        if not self._synced and 0 <= self._sync_at <= self._cursor:
            self._synced = True
            self._ready.append(Event("SYNC", self._sync_revision))

    def _other_history(self, header: Message) -> bool:
        """Return True if the cursor belongs to another history of the cluster: its revision was
        not reached, or what it had written is not there.
        """
        known, self._cluster = self._cluster, header.cluster_id
        if self._cursor > header.revision or (known and known != header.cluster_id):
            return True
        return bool(known and self._seen is not None and not self._is_there(self._seen))

    def _is_there(self, seen: Message) -> bool:
        """Return whether a record was there at its revision, or is now if that is compacted."""
        for revision in (seen.mod_revision, 0):
            request = message("RangeRequest")(key=seen.key, revision=revision)
            try:
                return seen in self._channel.call("KV.Range", request, again=True).kvs
            except StoreError as error:
                if "future revision" in error.message:  # it has fewer revisions than before
                    return False
                if "compacted" not in error.message:
                    raise
        return False

    def _newest(self, after: int) -> tuple[int, int]:
        """Return the revision of the newest record after `after` (or `after`), and the store's
        revision; keep that record.
        """
        newest = {
            "sort_order": "DESCEND",
            "sort_target": "MOD",
            "limit": 1,
        }
        request = message("RangeRequest")(key=self._prefix, range_end=self._end, **newest)
        answer = self._channel.call("KV.Range", request, again=True)
        if not answer.kvs:
            return after, answer.header.revision
        self._seen = answer.kvs[0]
        return max(self._seen.mod_revision, after), answer.header.revision

    def _reset(self, revision: int) -> None:
        with self._changed:
            self._cursor = self._sync_at = self._sync_revision = revision
            self._ready.append(Event("RESET", revision))
            self.contact_s, self._pending_since_s = monotonic(), float("inf")
            self._sync()
            self._changed.notify_all()

    def _event(self, event: Message) -> Event:
        key, revision = self._key(event.kv.key), event.kv.mod_revision
        return (
            Event("DELETE", revision, key)
            if event.type
            else Event("PUT", revision, key, self._record(event.kv))
        )
