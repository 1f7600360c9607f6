"""Deciders of the user's own at work: on threads of their own, so that one that hangs keeps nobody
else waiting.

The core reports arrivals on the callback thread; that only puts the query into a queue here. A few
threads take queries from it and call the decider. One that does not return in its query's time is
given up for lost, and another takes its place. Each decider has its own threads, so that one that
hangs keeps only the queries of its own applications waiting, and nobody once it is replaced. The
query itself is not held up by any of this: the core answers it when all its models have ended, or
at the deadline.
"""

import heapq
import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING

from clipper.selection.deciders.decider import AnswerFrom, View, check_decision
from clipper.selection.policy import Prediction, is_usable
from clipper.serving.query.qualifiers import prediction_of
from clipper.types import VersionedModel
from clipper_container.errors import fails_call_only
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status

if TYPE_CHECKING:
    from clipper.serving.query.speculation import EnsembleCall

THREADS_MAX = 4  # of one decider, at work or waiting for work
LOST_MAX = 16  # of its threads that do not come back; beyond that it is not called any more
IDLE_S = 1.0  # after which a thread without work ends
OWN_STEP = 1  # of a verdict: the schedule beneath has one step, number 0

_log = logging.getLogger(__name__)


class Listener:
    """One query that a decider of the user's own decides."""

    __slots__ = ("again", "at_work", "call", "failed", "future", "queued_s", "state")

    def __init__(self, future: Future, call: "EnsembleCall", state: object) -> None:
        self.future, self.call, self.state = future, call, state
        self.queued_s = float("inf")  # when it is called next
        self.at_work = self.again = self.failed = False

    @property
    def decider(self) -> str:
        """The decider's name, by which threads and lost threads are counted."""
        return self.call.speculation.failures.owner

    @property
    def lost_s(self) -> float:
        """The time after which the result is not needed any more."""
        return self.call.started_s + self.call.slo_us * 1e-6

    def decide(self) -> float | None:
        """Call the decider, and rule if it has an answer. Return when to call it again even if
        nothing arrives; None if it set no time."""
        call, future = self.call, self.future
        view = view_of(future, call, time.monotonic())
        try:
            reason = check_decision(call.speculation.own(self.state, view), view)
        except BaseException as error:  # then the query waits for all its models
            if not fails_call_only(error):
                raise
            call.speculation.failures.failed("decide", error)
            self.failed = True
            return None
        if isinstance(reason, AnswerFrom):
            mask = sum(1 << i for i, model in enumerate(view.models) if model in reason.models)
            future.rule(OWN_STEP, mask, round((time.monotonic() - call.started_s) * 1e6))
            return None
        return None if reason.until_ms is None else call.started_s + reason.until_ms * 1e-3


def view_of(future: Future, call: "EnsembleCall", now_s: float) -> View:
    """Return the view of a query that a decider gets."""
    arrived: dict[VersionedModel, Prediction] = {}
    failed: list[VersionedModel] = []
    outstanding: list[VersionedModel] = []
    for i, model in enumerate(call.models):
        status = future.status(i)
        if status is Status.OK and is_usable((prediction := prediction_of(future, i)).output):
            arrived[model] = prediction
        else:
            (outstanding if status is Status.PENDING else failed).append(model)
    elapsed_ms = (now_s - call.started_s) * 1e3
    return View(
        call.models,
        arrived,
        tuple(failed),
        tuple(outstanding),
        elapsed_ms,
        call.slo_us / 1000,
    )


class DeciderThreads:
    """Threads: any. The deciders of the user's own, each with its queries and its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, DeciderPool] = {}
        self._closing = False

    def pool(self, decider: str) -> "DeciderPool":
        """Return the queries and threads of one decider, made at first use; those of deciders
        without work are forgotten."""
        with self._lock:
            found = self._pools.get(decider)
            if found is None:
                self._pools = {name: pool for name, pool in self._pools.items() if pool.threads}
                found = self._pools[decider] = DeciderPool()
                if self._closing:
                    found.close()
            return found

    def listen(self, listener: Listener) -> None:
        """Call the decider for this query now, and after each arrival."""
        self.pool(listener.decider).listen(listener)

    def close(self) -> None:
        """Accept no more calls. Threads that do not come back are left to the process's end."""
        with self._lock:
            self._closing = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()


class DeciderPool:
    """The queries that wait for one user-defined decider, and the threads that call it. Threads:
    any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, Listener]] = []
        self._order = itertools.count()
        self._at_work: dict[threading.Thread, float] = {}  # until when it is expected back
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._lost = 0
        self._closing = False

    @property
    def threads(self) -> int:
        """The number of threads, lost ones included."""
        return len(self._threads)

    def listen(self, listener: Listener) -> None:
        """Call the decider for this query now, and after each arrival."""
        listener.future.on_vote(lambda _: self._put(listener, 0.0))
        self._put(listener, 0.0)

    def _put(self, listener: Listener, when_s: float) -> None:
        with self._changed:
            if listener.at_work:
                listener.again = True
                return
            if (
                self._closing
                or listener.failed
                or when_s >= listener.queued_s
                or listener.future.done()
            ):
                return
            listener.queued_s = when_s
            heapq.heappush(self._queue, (when_s, next(self._order), listener))
            self._find_hands()
            self._changed.notify()

    def _find_hands(self) -> None:
        """Start another thread, if none is free and there may be one more. The caller holds the
        lock."""
        now = time.monotonic()
        for thread in [thread for thread, until in self._at_work.items() if until < now]:
            del self._at_work[thread]
            self._lost += 1
            _log.error(
                "a user-defined decider has not returned by its query's deadline; another thread"
                " continues"
                " (%d lost)",
                self._lost,
            )
        if not self._idle and len(self._at_work) < THREADS_MAX and self._lost < LOST_MAX:
            thread = threading.Thread(target=self._work, name="clipper-deciding", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:
                # a thread that works now takes the query, or its deadline ends it
                _log.error("no further thread for a user-defined decider: %s", error)
                return
            self._threads.add(thread)
            self._idle += 1

    def _work(self) -> None:
        me = threading.current_thread()
        try:
            while (listener := self._next()) is not None:
                again_s = listener.decide()
                with self._changed:
                    if self._at_work.pop(me, None) is None:  # lost, and found again
                        self._lost -= 1
                        return
                    self._idle += 1
                    listener.at_work = False
                if listener.again:
                    listener.again = False
                    again_s = 0.0
                if again_s is not None:
                    self._put(listener, again_s)
        finally:
            with self._changed:
                self._threads.discard(me)
                self._at_work.pop(me, None)

    def _next(self) -> Listener | None:
        """Return the next query to decide; None when there has been no work for a while. This
        thread is idle until it returns."""
        with self._changed:
            idle_until = time.monotonic() + IDLE_S
            while True:
                now = time.monotonic()
                if self._closing or (not self._queue and now >= idle_until):
                    self._idle -= 1
                    return None
                if self._queue and self._queue[0][0] <= now:
                    when_s, _, listener = heapq.heappop(self._queue)
                    if (
                        when_s != listener.queued_s or listener.future.done()
                    ):  # called earlier meanwhile, or decided
                        continue
                    listener.queued_s, listener.at_work = float("inf"), True
                    self._idle -= 1
                    self._at_work[threading.current_thread()] = max(listener.lost_s, now + 0.001)
                    if self._queue:  # came before this thread had begun
                        self._find_hands()
                    return listener
                self._changed.wait((self._queue[0][0] if self._queue else idle_until) - now)

    def close(self) -> None:
        """Accept no more calls. Threads that do not come back are left to the process's end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            waiting = [thread for thread in self._threads if thread not in self._at_work]
        for thread in waiting:
            if thread is not threading.current_thread():
                thread.join(IDLE_S)
