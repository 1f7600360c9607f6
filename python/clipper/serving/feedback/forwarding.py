"""Feedback about an answer that another server gave, on its way there and back through the store
that both share.

Only the server that gave an answer knows the query, and whether feedback has come before. So
another server that receives the feedback writes it under that server's prefix in the store. That
server learns it as its own, with its journal, and replaces it with a reply, in one transaction. The
first server acknowledges the feedback with the reply: then it is as safe as feedback that was sent
to the right server, and counts once. Without a reply in time it is withdrawn and refused; if it is
sent again, it still counts once. Requests and replies are written with the lease of the requesting
server, and expire with it.

A server that has ended takes nothing: see answer_records.py.
"""

import contextlib
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from clipper import errors
from clipper.component import Stop
from clipper.errors import (
    AlreadyExists,
    ClipperError,
    LeaseLost,
    Overloaded,
    StoreError,
    UnknownPrediction,
)
from clipper.serving.feedback.journal_records import packed, unpacked
from clipper.serving.feedback.presence import LEASE_S, NODES, Presence
from clipper.store.follower import Follower
from clipper.store.store import Compare, Delete, Event, Get, Put, Record, Store
from clipper.types import UserValue

_log = logging.getLogger(__name__)
PREFIX: Final = "feedback/to/"
WAITING_MAX: Final = 64  # requests of one server that wait for replies
IDS_MAX: Final = 1024  # of a request
BYTES_MAX: Final = 768 << 10  # of a request
NODES_MAX: Final = 16  # servers that the ids of one call are of
# for a reply; then its server gets no request until its lease would have ended
REPLY_S: Final = 3.0
_ID = re.compile("([0-9a-f]{8})-[0-9a-f]{1,16}")


class ForwardedFeedback(msgspec.Struct, array_like=True):
    """Feedback of one application. `ids` and `labels` go together; one with a score or a weight has
    one id."""

    application: str
    ids: list[str]
    labels: list[UserValue]
    score: float | None = None
    weight: float = 1.0
    alone: bool = False


class Reply(msgspec.Struct, array_like=True):
    """Outcome of forwarded feedback: counts, or the error with which it was refused."""

    counted: int = 0
    duplicates: int = 0
    unknown: int = 0
    error: str = ""
    message: str = ""
    hint: str = ""


_ENCODER = msgspec.msgpack.Encoder(enc_hook=packed)
_DECODER = msgspec.msgpack.Decoder(ForwardedFeedback, ext_hook=unpacked)
_REPLY = msgspec.msgpack.Decoder(Reply)


class _Waiting:
    """One request: done is set with the reply."""

    __slots__ = ("done", "reply")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reply = Reply(
            error="StoreError", message="no reply can be read: the server is closing."
        )


class Forwarding:
    """Threads: any. One of its own takes requests and replies, and keeps the server's names in the
    store.

    refused: called once the server's name belongs to another that lives: what it learned must not
    be written any more.
    """

    def __init__(self, store: Store, presence: Presence, refused: Callable[[str], None]) -> None:
        self._store, self._presence, self._refused = store, presence, refused
        self.node = presence.node
        self._inbox = f"{PREFIX}{self.node}/"
        self._learn: Callable[[ForwardedFeedback], Reply] = lambda feedback: Reply(
            unknown=len(feedback.ids)
        )
        self._numbers = itertools.count(1)
        self._waiting: dict[str, _Waiting] = {}
        self._slots = threading.BoundedSemaphore(WAITING_MAX)
        self._silent: dict[
            str, float
        ] = {}  # servers that did not reply, until when they get no request
        self._unsent: dict[str, Reply] = {}  # replies that the store has not taken yet
        self._stop = Stop()
        self._starting = threading.Lock()
        self._follower = Follower(store, self._inbox, self, name="clipper-forwarding")
        self._has_listed = False

    # -- another server's answers

    def node_of(self, id: str) -> str:
        """Return the server that an answer of this id may be of; empty for this one and for what is
        no id."""
        found = _ID.fullmatch(id)
        return "" if found is None or found[1] == self.node else found[1]

    def send(self, node: str, feedback: ForwardedFeedback) -> Reply:
        """Have that server learn the feedback and return the counts. Raises what it raised;
        UnknownPrediction when the server has ended, Overloaded, StoreError when it is not known
        whether the feedback was learned: if it is sent again, it counts once."""
        total = Reply()
        for data in _parts(feedback):
            reply = self._send(node, data)
            if reply.error:
                raise _raised(reply)
            total.counted += reply.counted
            total.duplicates += reply.duplicates
            total.unknown += reply.unknown
        return total

    def _send(self, node: str, data: bytes) -> Reply:
        if self._silent.get(node, 0.0) > time.monotonic() and self._store.get(NODES + node):
            raise _no_reply(node)
        if not self._is_listening:
            raise StoreError(
                f"replies in {self._store.name} cannot be read at present.",
                hint="Try again in a moment.",
            )
        if not self._slots.acquire(blocking=False):
            raise Overloaded(
                f"{WAITING_MAX} requests wait for other servers to take their feedback."
            )
        name, waiting = f"{self.node}-{next(self._numbers):x}", _Waiting()
        self._waiting[name] = waiting
        try:
            key = f"{PREFIX}{node}/q/{name}"
            self._put(node, key, data)
            if not waiting.done.wait(REPLY_S):
                if len(self._silent) >= WAITING_MAX:
                    self._silent.clear()
                self._silent[node] = time.monotonic() + LEASE_S
                self._store.delete(key)
                raise _no_reply(node)
            return waiting.reply
        except LeaseLost as error:
            raise StoreError(error.message, hint="Try again in a moment.") from None
        finally:
            del self._waiting[name]
            self._slots.release()

    def _put(self, node: str, key: str, data: bytes) -> None:
        """Put the data into the store, only if that server runs."""
        while True:
            there = self._store.get(NODES + node)
            if there is None:
                hint = "The server that answered has ended, or shares no store with this one."
                raise UnknownPrediction(
                    f"no prediction of server {node} is waiting for feedback.", hint=hint
                )
            put = Put(key, data, self._presence.lease)
            if self._store.txn((Compare(NODES + node, there.revision),), (put,)).ok:
                return

    # -- this server's answers

    def start(self, learn: Callable[[ForwardedFeedback], Reply]) -> None:
        """Hold the names, and learn feedback that other servers received. learn: called with it; it
        raises nothing. Raises AlreadyExists. A second call does nothing."""
        if not self._follower.is_started and not self._stop.requested:
            try:
                self._presence.enter(self._stop)
            except StoreError as error:  # its thread tries again
                _log.warning("feedback of other servers is not taken yet: %s", error)
            self._learn = learn
            with self._starting:  # a server may be closed while its store returns
                if not self._stop.requested:
                    self._follower.start()

    @property
    def _is_listening(self) -> bool:
        """Return whether replies are read at present."""
        return self._has_listed and self._follower.trouble is None

    # -- a sink of the follower

    @property
    def known(self) -> int:
        """Return 0: what is taken is deleted."""
        return 0

    def begin(self, stop: Stop) -> bool:
        """Acquire the names of this server; end if another one that runs has them."""
        self._has_listed = False
        try:
            self._presence.enter(stop)
        except AlreadyExists as error:
            self._refused(str(error))
            _log.error(
                "what is learned stays in the journal until this server is started again: %s",
                error,
            )
            return False
        return not stop.requested

    def reset(self, records: Sequence[Record], revision: int) -> None:
        """Take all requests and replies."""
        self._has_listed = True
        for record in records:
            self._take(record)

    def changed(self, events: Sequence[Event]) -> None:
        """Take new requests and replies."""
        for event in events:
            if event.record is not None and not self._stop.requested:
                self._take(event.record)

    def poll(self) -> None:
        """Start again when the names are lost."""
        if not self._presence.is_held:
            raise StoreError(
                f"this server's names in {self._store.name} were lost.",
                hint="They are taken again.",
            )

    def _take(self, record: Record) -> None:
        kind, _, name = record.key.removeprefix(self._inbox).partition("/")
        if kind == "q":
            self._reply(record, name)
            return
        waiting = self._waiting.get(name)
        if waiting is not None:
            with contextlib.suppress(msgspec.MsgspecError):
                waiting.reply = _REPLY.decode(record.value)
            waiting.done.set()
        self._store.delete(record.key)

    def _reply(self, record: Record, name: str) -> None:
        """Learn the feedback of a request, and replace the request with the reply. If the store
        refuses, the reply is saved for when the request is found again."""
        reply = self._unsent.get(name)
        if reply is None:
            if self._store.get(record.key) is None:  # withdrawn, or replied to
                return
            try:
                feedback = _DECODER.decode(record.value)
                if any(map(self.node_of, feedback.ids)) or len(feedback.ids) != len(
                    feedback.labels
                ):
                    raise ValueError("it is not about answers of this server")
                reply = self._learn(feedback)
            except (msgspec.MsgspecError, ValueError) as error:
                reply = Reply(error="InvalidInput", message=f"no feedback can be read: {error}")
            if len(self._unsent) >= IDS_MAX:
                self._unsent.clear()
            self._unsent[name] = reply
        caller = name.partition("-")[0]
        answer = Put(f"{PREFIX}{caller}/a/{name}", _ENCODER.encode(reply), record.lease)
        try:
            self._store.txn(
                (Compare(record.key, record.revision),),
                (Delete(record.key), answer),
                (Get(record.key),),
            )
        except LeaseLost:  # the requesting server has ended
            _log.debug("nobody waits for the reply to %s", name)
        del self._unsent[name]

    def stop(self) -> None:
        """Take nothing more, and refuse those that wait. Idempotent."""
        with self._starting:
            self._stop.request()
        self._follower.end()
        for waiting in list(self._waiting.values()):
            waiting.done.set()

    def close(self) -> None:
        """Stop, and give the server's names back. Idempotent."""
        self.stop()
        self._presence.leave()


def _parts(feedback: ForwardedFeedback) -> Iterator[bytes]:
    """Yield the feedback as requests of bounded size."""
    data = _ENCODER.encode(feedback) if len(feedback.ids) <= IDS_MAX else b""
    if len(feedback.ids) == 1 or (data and len(data) <= BYTES_MAX):
        yield data
        return
    middle = len(feedback.ids) // 2
    for part in (slice(middle), slice(middle, None)):
        yield from _parts(
            msgspec.structs.replace(feedback, ids=feedback.ids[part], labels=feedback.labels[part])
        )


def _no_reply(node: str) -> StoreError:
    hint = "Send it again: it counts once."
    return StoreError(f"server {node} did not take its feedback within {REPLY_S:g} s.", hint=hint)


def refusal(error: ClipperError) -> Reply:
    """Return an error as a reply."""
    return Reply(error=type(error).__name__, message=error.message, hint=error.hint)


def _raised(reply: Reply) -> ClipperError:
    kind = getattr(errors, reply.error, None)
    if not (isinstance(kind, type) and issubclass(kind, ClipperError)):
        kind = StoreError
    return kind(reply.message, hint=reply.hint)


def by_node(
    forwarding: Forwarding, ids: Sequence[str], places: Sequence[int]
) -> dict[str, list[int]]:
    """Return those of the places that are of other servers' answers, by server: of so many servers
    at most, those that come first."""
    found: dict[str, list[int]] = {}
    for i in places:
        node = forwarding.node_of(ids[i])
        if node and (node in found or len(found) < NODES_MAX):
            found.setdefault(node, []).append(i)
    return found
