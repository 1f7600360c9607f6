"""Answers the servers that watch rows: which ids have changed?

A server that caches predictions requests the changes since a position, again and again; the
question stays open until something has. All watchers share one place in the shard's log, which is
emptied into a list here. Each has its own position in the list; one that is too far behind gets
a notice that it has missed changes. Pushes do not wait for watchers, and nothing is kept without
watchers.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from clipper.errors import InvalidInput
from clipper.params.shard.parameters import Ids, Parameters, Piece
from clipper_container.params.frames import packed
from clipper_core.params.shard_loop import ShardLoop

SLOT = 8  # follower number in the shard's log
IDS_MAX = 1 << 20  # kept for watchers that are behind
IDLE_S = 30.0  # without a question, nothing is kept
CHECK_S = 0.01  # between two reads of the log, while a question is open
WAIT_S_MAX = 5.0
CallId = tuple[int, int, int]
WaitingCall = tuple[CallId, int, float]  # call, position, deadline


class ChangeWatchers:
    """Watchers of one shard. Threads: the answering one.

    parameters: returns the current ones. answer: sends (call, payload) later.
    """

    def __init__(
        self,
        core: ShardLoop,
        parameters: Callable[[], Parameters],
        answer: Callable[..., None],
    ) -> None:
        self._core, self._parameters, self._answer = core, parameters, answer
        self._on = False
        self._first = self._position = self._size = 0
        # (position, ids that changed up to it)
        self._changes: deque[tuple[int, dict[int, Ids]]] = deque()
        self._waiting: dict[int, WaitingCall] = {}  # by connection
        self._received_s = 0.0

    @property
    def check_s(self) -> float:
        """Longest time for which the answering thread may sleep."""
        return CHECK_S if self._waiting else float("inf")

    def watch(self, message: Piece, call_id: CallId, now: float) -> Piece | None:
        """Return the answer to a question; None if it is sent later. Raises InvalidInput."""
        since = message.get("since", -1)
        if not isinstance(since, int):
            raise InvalidInput(f"watch: since is a position, or -1, not {since!r:.100}.")
        self._received_s = now
        if not self._on:
            self._subscribe()
        self._take()
        if message.get("epoch") != self._core.epoch or not self._first <= since <= self._position:
            return self._reply({}, lost=True)
        found = self._since(since)
        wait_s = min(float(message.get("wait_s", 0.0)), WAIT_S_MAX)
        if found or wait_s <= 0:
            return self._reply(found)
        self._waiting[call_id[0]] = (call_id, since, now + wait_s)
        return None

    def answer_open_questions(self, now: float) -> None:
        """Answer the questions for which something has changed, or whose time is over."""
        if not self._on:
            return
        self._take()
        for conn, (call_id, since, until) in list(self._waiting.items()):
            lost = since < self._first
            found = {} if lost else self._since(since)
            if found or lost or now >= until:
                del self._waiting[conn]
                self._answer(call_id, packed(self._reply(found, lost=lost)))
        if not self._waiting and now - self._received_s > IDLE_S:
            self._unsubscribe()

    def lose(self) -> None:
        """Tell watchers that they have missed changes: a table was dropped."""
        if self._on:
            self._unsubscribe()
            self._subscribe()

    def _subscribe(self) -> None:
        self._core.follow(SLOT)
        self._on, self._first = True, self._core.position
        self._position = self._first

    def _unsubscribe(self) -> None:
        self._core.unfollow(SLOT)
        self._on, self._size = False, 0
        self._changes.clear()

    def _take(self) -> None:
        """Move new changes from the shard's log into the list."""
        if self._core.position == self._position:
            return
        found = self._core.changed(SLOT)
        if found is None:  # the core's log overflowed
            self._unsubscribe()
            self._subscribe()
            return
        self._position = found[0]
        size = sum(ids.size for ids in found[1].values())
        self._changes.append((self._position, found[1]))
        self._size += size
        while self._size > IDS_MAX:
            self._first, gone = self._changes.popleft()
            self._size -= sum(ids.size for ids in gone.values())

    def _since(self, since: int) -> dict[str, Ids]:
        later = []
        for position, changed in reversed(self._changes):
            if position <= since:
                break
            later.append(changed)
        places = enumerate(self._parameters().specs)
        parts = {
            spec.name: [one[place] for one in later if place in one]
            for place, spec in places
            if spec.name
        }
        return {name: np.unique(np.concatenate(each)) for name, each in parts.items() if each}

    def _reply(self, rows: dict[str, Ids], *, lost: bool = False) -> Piece:
        return {"position": self._position, "epoch": self._core.epoch, "lost": lost, "rows": rows}
