"""A watch over an etcd cluster, that comes back behind the last event it took.

Its thread holds one stream to one endpoint and goes to the next when that ends. A server that hangs
ends nothing: so after a second of silence the stream is asked for a sign of life (a progress
notification), and one that owes it for two seconds is given up. That sign says no more: etcd 3.4
sends it ahead of events it has yet to send (issue 15220), so only events move the cursor.

What etcd cannot tell any more, because it was compacted or was restored from an older copy, is
RESET. SYNC comes once the newest of the records that were there at the beginning has come; a
deletion from before may follow it.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Final

import grpc

from clipper.errors import StoreError
from clipper.store.etcd_channel import EtcdChannel
from clipper.store.protocol import message
from clipper.store.store import EVENTS_MAX, Event, Record

SILENCE_S: Final = 1.0  # then a sign of life is asked for
WATCHDOG_S = 2.0  # within which it must come
_SLICE_S: Final = 0.25
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.05, 1.0


class _Requests:
    """What the stream sends: an iterator that gRPC's thread takes from, until None."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put = self._queue.put

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue.get, None)


class EtcdWatch:
    """Threads: any may close it; one reads it. key, record: what etcd's bytes and KeyValue are in
    the store."""

    def __init__(
        self,
        line: EtcdChannel,
        prefix: bytes,
        cursor: int,
        key: Callable[[bytes], str],
        record: Callable[[Any], Record],
    ) -> None:
        self._line, self._prefix, self._key, self._record = line, prefix, key, record
        self._end = prefix[:-1] + bytes([prefix[-1] + 1])
        self._cursor = cursor  # changes up to this revision have been taken
        self._cluster = 0
        self._synced = False
        self._sync_at = (
            -1
        )  # SYNC when events up to this revision have come; -1 while that is not known
        self._sync_revision = 0
        self._ready: deque[Event] = deque()
        self._error: StoreError | None = None
        self._asked_s = float("inf")  # since when a sign of life is owed
        self.heard_s = monotonic()
        self._requests = _Requests()
        self._call: Any = None
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clipper-etcd-watch", daemon=True)
        self._thread.start()

    # -- the reader's side

    def next(self, timeout_s: float | None = None) -> Event | None:
        """StoreError once each time that etcd was lost; it is looked for all the same, and asking
        again goes on."""
        give_up = float("inf") if timeout_s is None else monotonic() + timeout_s
        with self._changed:
            while not self._stop.is_set():
                if self._ready:
                    return self._ready.popleft()
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                now_s = monotonic()
                if now_s >= give_up:
                    return None
                self._look_after(now_s)
                self._changed.wait(min(give_up - now_s, _SLICE_S))
        return None

    def _look_after(self, now_s: float) -> None:
        if now_s - self._asked_s > WATCHDOG_S:
            self._asked_s = float("inf")
            self._error = StoreError(
                f"store {self._line.name} has not answered for {WATCHDOG_S:g} s.",
                hint="Does etcd hang?",
            )
            self._cancel()
        elif self._asked_s == float("inf") and now_s - self.heard_s > SILENCE_S:
            self._asked_s = now_s
            self._requests.put(message("WatchRequest")(progress_request={}))

    @property
    def closed(self) -> bool:
        return self._stop.is_set()

    def close(self) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
            self._cancel()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _cancel(self) -> None:
        self._requests.put(None)
        if self._call is not None:
            self._call.cancel()

    def __iter__(self) -> Iterator[Event]:
        while (event := self.next()) is not None:
            yield event

    # -- the thread's side

    def _run(self) -> None:
        pause_s = _PAUSE_S_MIN
        while not self._stop.is_set():
            at, heard_s = self._line.at, self.heard_s
            try:
                self._follow(at)
            except grpc.RpcError as problem:
                self._trouble(self._line.explained(problem))
            except StoreError as error:
                self._trouble(error)
            except ValueError:  # the channel was closed
                self._stop.set()
            else:
                continue  # it begins anew at another revision
            if self.heard_s != heard_s:
                pause_s = _PAUSE_S_MIN
            self._line.leave(at)
            self._line.forget_token()  # it may be the reason
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _trouble(self, error: StoreError) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _follow(self, at: int) -> None:
        """One stream, until it fails, or until the watch has to begin at another revision."""
        with self._changed:
            self._requests = _Requests()
            self._asked_s = monotonic()
            create = {
                "key": self._prefix,
                "range_end": self._end,
                "start_revision": self._cursor + 1,
            }
            self._requests.put(message("WatchRequest")(create_request=create))
            self._call = self._line.stream(at, "Watch.Watch", iter(self._requests))
            if self._stop.is_set():
                self._cancel()
        try:
            for answer in self._call:
                if self._take(answer):
                    return
        finally:
            self._cancel()
        raise StoreError(f"store {self._line.name} ended the watch.")

    def _take(self, answer: Any) -> bool:
        """Whether the watch must begin anew."""
        behind = answer.created and self._other_history(answer.header)
        gone = answer.canceled and bool(answer.compact_revision)
        if answer.canceled and not gone:
            raise StoreError(f"store {self._line.name} refused the watch: {answer.cancel_reason}.")
        if behind or gone:
            self._reset(self._newest(0)[1])
            return True
        if answer.created and not self._synced:
            self._sync_at, self._sync_revision = self._newest(self._cursor)
        events = [self._event(event) for event in answer.events]
        with self._changed:
            self.heard_s, self._asked_s = monotonic(), float("inf")
            if events:
                self._cursor = events[-1].revision
                self._ready.extend(events)
            if len(self._ready) > EVENTS_MAX:  # nobody reads: do not hold more than a store would
                self._ready.clear()
                self._ready.append(Event("RESET", self._cursor))
            self._sync()
            self._changed.notify_all()
        return False

    def _sync(self) -> None:
        if not self._synced and 0 <= self._sync_at <= self._cursor:
            self._synced = True
            self._ready.append(Event("SYNC", self._sync_revision))

    def _other_history(self, header: Any) -> bool:
        """Whether this is not the history that the cursor is of."""
        known, self._cluster = self._cluster, header.cluster_id
        return bool(self._cursor > header.revision or (known and known != header.cluster_id))

    def _newest(self, after: int) -> tuple[int, int]:
        """(revision of the newest record written after that one, or `after`; the store's
        revision)."""
        newest = {
            "sort_order": "DESCEND",
            "sort_target": "MOD",
            "limit": 1,
            "keys_only": True,
            "min_mod_revision": after + 1,
        }
        request = message("RangeRequest")(key=self._prefix, range_end=self._end, **newest)
        answer = self._line.ask("KV.Range", request, again=True)
        return (answer.kvs[0].mod_revision if answer.kvs else after), answer.header.revision

    def _reset(self, revision: int) -> None:
        with self._changed:
            self._cursor = self._sync_at = self._sync_revision = revision
            self._ready.append(Event("RESET", revision))
            self.heard_s, self._asked_s = monotonic(), float("inf")
            self._sync()
            self._changed.notify_all()

    def _event(self, event: Any) -> Event:
        key, revision = self._key(event.kv.key), event.kv.mod_revision
        return (
            Event("DELETE", revision, key)
            if event.type
            else Event("PUT", revision, key, self._record(event.kv))
        )
