"""Threads that wait in turn: one leads, takes what has come, and does it itself, one after another,
as long as it is quick.

When all of them waited in one epoll, each query woke another thread while the last still ran, and
both wanted Python's lock: a query cost up to 7 switches, and now 0.4 at most. Only the leader
waits. Before work that may take its time it hands the lead over, to a thread that follows or to a
new one, so that a slow model does not keep the others waiting; of work that was thought quick and
is not, a timer takes the lead away. That two lead for a moment is possible, and harmless: each
takes other items.

Given up: quick models are evaluated one after another, also where there are more cores.
Source: leader/followers, as in Schmidt et al., Pattern-Oriented Software Architecture 2; the timer
as `sysmon` in Go's runtime.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from clipper_container.line import Inbox
from clipper_container.timers import Timers

THREADS_MAX = 64
LOOK_S = (
    0.01  # between two looks at the leader, while there is work; so long may quick work be slow
)
QUIET_LOOKS = 100  # without work, and nobody looks any more
_NOBODY = 0

_T = TypeVar("_T")


class Crew(Generic[_T]):
    """wait: blocks until there is something, -> what.  work: does one of it; raises nothing.

    Threads: those it starts; `hand_over` is for `work`, all else for any.
    """

    def __init__(
        self, wait: Callable[[], Iterable[_T]], work: Callable[[_T, Inbox], None], timers: Timers
    ) -> None:
        self._wait, self._work, self._timers = wait, work, timers
        self._ready: deque[_T] = deque()  # taken, and not yet begun
        self._lead = threading.Lock()  # held by who leads; those who follow wait for it
        self._lock = threading.Lock()  # of the next three
        self._leader = _NOBODY
        self._followers = 0
        self._threads: list[threading.Thread] = []
        self._turns = 0  # items begun, by whoever led
        self._at_work = False  # the leader is
        self._looked = False  # somebody looks at it, now and then
        self._stopping = False
        self._start_thread()

    def hand_over(self) -> None:
        """What comes now may take its time. Nothing happens when the caller leads no more."""
        self._take_from(threading.get_ident())

    def stop(self) -> None:
        """No more is begun. `wait` must return, and the threads end once what they do is done."""
        self._stopping = True
        self._take_from(self._leader)

    def join(self, seconds: float) -> None:
        """Wait for them to end, at most this long."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _start_thread(self) -> None:
        with self._lock:
            if len(self._threads) >= THREADS_MAX or self._stopping:
                return
            self._followers += 1
            thread = threading.Thread(
                target=self._run, name=f"clipper-host-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        me, inbox = threading.get_ident(), Inbox()
        while not self._stopping:
            self._lead.acquire()
            with self._lock:
                self._followers -= 1
                self._leader = me
            while self._leader == me and not self._stopping:
                self._step(inbox)
            with self._lock:
                self._followers += 1
        self._take_from(me)

    def _step(self, inbox: Inbox) -> None:
        if not self._ready:
            self._at_work = False
            self._ready.extend(self._wait())
            return
        self._turns += 1
        self._at_work = True
        if not self._looked:
            self._looked = True
            self._look_later(self._turns, 0)
        try:
            item = self._ready.popleft()
        except IndexError:  # two led for a moment
            return
        self._work(item, inbox)

    def _take_from(self, leader: int) -> None:
        """Let another lead, if this one does."""
        with self._lock:
            if leader == _NOBODY or self._leader != leader:
                return
            self._leader, self._at_work = _NOBODY, False
            alone = self._followers == 0
        if alone:
            self._start_thread()
        self._lead.release()

    # -- work that was thought quick

    def _look_later(self, turns: int, quiet: int) -> None:
        self._timers.after(LOOK_S, lambda: self._look(turns, quiet))

    def _look(self, before: int, quiet: int) -> None:
        leader, turns = self._leader, self._turns
        if self._at_work and turns == before:
            self._take_from(leader)
        quiet = 0 if turns != before or self._at_work else quiet + 1
        if quiet > QUIET_LOOKS:
            # before the next line, as a leader begins before it asks: one of us sees the other
            self._looked = False
            if self._turns == turns:
                return
            self._looked = True
        if not self._stopping:
            self._look_later(turns, quiet)
