"""A leader/followers thread pool for many connections and mostly fast models.

If all threads waited in one epoll, each query would wake another thread while the last still runs,
and both would compete for the GIL: up to 7 context switches per query, against at most 0.4 here.
Only the leader waits for events, and it runs fast work itself. Before slow work it promotes a
follower, or a new thread, to leader. A timer does the same when work that was expected to be fast
is not. Two leaders may overlap for a moment; that is harmless, because each takes other items.

The cost: fast models are evaluated one after another even on several cores.

Source: leader/followers, as in Schmidt et al., Pattern-Oriented Software Architecture 2; the timer
as `sysmon` in Go's runtime.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from clipper_container.host.server_connection import Inbox
from clipper_container.host.timers import Timers
from clipper_container.threads import KeptThread

THREADS_MAX = 64
# between two looks at the leader, while there is work; so long may quick work be slow
CHECK_S = 0.01
QUIET_CHECKS = 100  # checks without work after which the timer stops
AGAIN_S = 0.1  # after a step that failed
_NOBODY = 0

_T = TypeVar("_T")


class WorkerPool(Generic[_T]):
    """A pool of threads that take turns as leader.

    wait: blocks until there are items, and returns them. work: handles one item; must not raise.

    Threads: `hand_over` is for `work`; all other methods for any thread.
    """

    def __init__(
        self, wait: Callable[[], Iterable[_T]], work: Callable[[_T, Inbox], None], timers: Timers
    ) -> None:
        self._wait, self._work, self._timers = wait, work, timers
        self._ready: deque[_T] = deque()  # received, not started
        self._lead = threading.Lock()  # held by the leader; followers wait for it
        self._lock = threading.Lock()  # guards the next three
        self._leader = _NOBODY
        self._followers = 0
        self._threads: list[KeptThread] = []
        self._turns = 0  # items started, by any leader
        self._at_work = False  # the leader is running an item
        self._checked_s = False  # the timer that checks the leader is active
        self._stopping = False
        self._start_thread()

    def hand_over(self) -> None:
        """Promote another thread: the caller is about to run slow work. Does nothing if the
        caller is not the leader.
        """
        self._take_from(threading.get_ident())

    def stop(self) -> None:
        """Start no more items. `wait` must return; the threads end after their current item."""
        self._stopping = True
        self._take_from(self._leader)

    def join(self, seconds: float) -> None:
        """Wait for the threads to end, at most `seconds`."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _start_thread(self) -> None:
        with self._lock:
            if len(self._threads) >= THREADS_MAX or self._stopping:
                return
            thread = KeptThread(f"clipper-host-{len(self._threads)}", self._run)
            # counted only once it runs
            self._followers += 1
            self._threads.append(thread)

    def _run(self) -> None:
        me, inbox = threading.get_ident(), Inbox()
        try:
            while not self._stopping:
                self._lead.acquire()
                with self._lock:
                    self._followers -= 1
                    self._leader = me
                while self._leader == me and not self._stopping:
                    self._try_step(inbox)
                with self._lock:
                    self._followers += 1
        finally:
            self._take_from(me)

    def _try_step(self, inbox: Inbox) -> None:
        """Do one step; an error of it, such as a lack of memory, is not the end of the leader."""
        try:
            self._step(inbox)
        except BaseException:  # also SystemExit of a model
            traceback.print_exc(file=sys.stderr)
            time.sleep(AGAIN_S)

    def _step(self, inbox: Inbox) -> None:
        if not self._ready:
            self._at_work = False
            self._ready.extend(self._wait())
            return
        self._turns += 1
        self._at_work = True
        if not self._checked_s:
            self._checked_s = True
            self._check_later(self._turns, 0)
        try:
            item = self._ready.popleft()
        except IndexError:  # another leader took it
            return
        self._work(item, inbox)

    def _take_from(self, leader: int) -> None:
        """Promote another thread if `leader` is the leader."""
        with self._lock:
            if leader == _NOBODY or self._leader != leader:
                return
            self._leader, self._at_work = _NOBODY, False
            alone = self._followers == 0
        try:
            if alone:
                self._start_thread()
        except (RuntimeError, MemoryError) as error:
            # the system has no thread now: whoever finishes its work first leads
            print(f"no further thread for this host: {error}", file=sys.stderr, flush=True)
        finally:
            self._lead.release()

    # -- the check for items that take unexpectedly long

    def _check_later(self, turns: int, quiet: int) -> None:
        self._timers.after(CHECK_S, lambda: self._check(turns, quiet))

    def _check(self, before: int, quiet: int) -> None:
        leader, turns = self._leader, self._turns
        if self._at_work and turns == before:
            self._take_from(leader)
        quiet = 0 if turns != before or self._at_work else quiet + 1
        if quiet > QUIET_CHECKS:
            # clear the flag, then compare: a leader counts first and checks the flag second,
            # so one of the two sees the other
            self._checked_s = False
            if self._turns == turns:
                return
            self._checked_s = True
        if not self._stopping:
            self._check_later(turns, quiet)
