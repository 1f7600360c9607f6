"""The Python face of the core engines: their loop threads, event loops that await their futures,
and callbacks.

A loop thread never takes the GIL. An event loop is woken for its awaited futures by one readable
descriptor per batch; callbacks run on one thread, started with the first callback.
"""

import asyncio
import functools
import logging
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from clipper import errors
from clipper.component import Backoff, Health, Stop, Worker
from clipper_container.errors import fails_call_only
from clipper_core.engine.engine import Engine
from clipper_core.engine.io_loop import IoLoop
from clipper_core.results.future import Future, MailboxReader
from clipper_core.runtime.status import Status, bind_errors, bind_keywords

_log = logging.getLogger(__name__)
FORK_HINT = "Start a server of its own in the child, or fork before clipper.start()."


def lost(detail: str) -> errors.ReplicaLost:
    """Return the error of a row whose container was lost. detail: the text of the engine."""
    is_blamed = "the process of its container" in detail  # as the engine says it
    return errors.ContainerDied(detail) if is_blamed else errors.ReplicaLost(detail)


bind_keywords(errors.refuse_unknown)
bind_errors(
    {
        Status.FULL: errors.Overloaded,
        Status.DEADLINE: errors.DeadlineExceeded,
        Status.DROPPED: errors.DeadlineExceeded,
        Status.NO_REPLICA: errors.NoReplica,
        Status.MODEL_ERROR: errors.ModelFailed,
        Status.BAD_OUTPUT: errors.BadOutput,
        Status.REPLICA_LOST: lost,
        Status.CANCELLED: errors.Cancelled,
        Status.CLOSED: errors.ShuttingDown,
        Status.FORKED: errors.ForkedProcess,
        Status.BAD_INPUT: errors.InvalidInput,
        Status.BAD_FRAME: errors.FrameError,
        Status.TOO_LARGE: errors.TooLarge,
        Status.NO_MEMORY: errors.OutOfMemory,
    }
)

_live: "weakref.WeakSet[Dispatch]" = weakref.WeakSet()

_Latest = tuple[Callable[[], asyncio.AbstractEventLoop | None], MailboxReader | None]
_NO_LOOP: _Latest = ((lambda: None), None)


class Dispatch:
    """Engines that have met and the threads that serve them: a loop thread each, and one for all
    callbacks. Threads: any."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        self.loops = [IoLoop(engine) for engine in engines]
        self._workers = [_worker_of(loop) for loop in self.loops]
        self._callbacks: _CallbackThread | None = None
        self._guard = threading.Lock()
        for i, engine in enumerate(engines):
            engine.completion.on_await = _Awaits(engine).awaited
            engine.completion.on_callback = functools.partial(self._call_back, i)
        _live.add(self)

    @property
    def loop(self) -> IoLoop:
        """The first engine's loop: where containers dial in."""
        return self.loops[0]

    def start(self) -> None:
        """Start the loop threads. Raises NotStarted."""
        for worker in self._workers:
            worker.start()

    def health(self) -> list[Health]:
        """Return the state of the threads."""
        callbacks = self._callbacks
        found = [worker.health() for worker in self._workers]
        return found if callbacks is None else [*found, callbacks.health()]

    def stop(self) -> None:
        """End every open task with CLOSED and join the threads. Idempotent."""
        for loop, worker in zip(self.loops, self._workers, strict=True):
            worker.request_stop()
            loop.stop()
            worker.end()
        for loop in self.loops:
            loop.close_connections()
        for engine in (
            self.engines
        ):  # a future may have tasks in several: all of them end before any engine is dead
            engine.end_tasks()
        for engine in self.engines:
            engine.finish()
        with self._guard:
            callbacks, self._callbacks = self._callbacks, None
        if callbacks is not None:
            callbacks.stop()
        for engine in self.engines:
            engine.completion.on_await = None
            engine.completion.on_callback = None

    def snapshot(self) -> dict[str, int]:
        """Return the sum of `IoLoop.snapshot()` over all loops; of `late_us_max` the largest."""
        each = [loop.snapshot() for loop in self.loops]
        return {
            key: (max if key.endswith("_max") else sum)(one[key] for one in each) for key in each[0]
        }

    def _call_back(self, which: int, future: Future, fn: Callable[[Future], object]) -> None:
        with self._guard:
            if self._callbacks is None:
                self._callbacks = _CallbackThread(self.engines)
            added = self._callbacks.mailboxes[which].add(future, fn)
        if not added:
            _run(fn, future)


def _worker_of(loop: IoLoop) -> Worker:
    def run(stop: Stop) -> None:
        loop.run()

    return Worker("clipper-loop", run, vital=True)


class _Awaits:
    """The event loops that await futures of one engine. Threads: any."""

    def __init__(self, engine: Engine) -> None:
        self._delivery = engine.completion
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, MailboxReader] = (
            weakref.WeakKeyDictionary()
        )
        self._latest: _Latest = _NO_LOOP  # most programs have one event loop, or one at a time

    def awaited(self, future: Future) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        its_loop, mailbox = self._latest
        if mailbox is None or its_loop() is not loop:
            mailbox = self._mailbox_of(loop)
        waiter: asyncio.Future[None] = loop.create_future()
        if not mailbox.add(future, waiter):
            waiter.set_result(None)
        return waiter

    def _mailbox_of(self, loop: asyncio.AbstractEventLoop) -> MailboxReader:
        self._latest = (
            _NO_LOOP  # a loop that has ended must not hold its mailbox: their number is limited
        )
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            for closed in [other for other in self._mailboxes if other.is_closed()]:
                del self._mailboxes[closed]  # the garbage collector may find it much later
            mailbox = self._mailboxes[loop] = MailboxReader(self._delivery)
            loop.add_reader(mailbox.fd, _resolve, mailbox)
        self._latest = weakref.ref(loop), mailbox
        return mailbox


def _run(fn: Callable[[Future], object], future: Future) -> None:
    try:
        fn(future)
    except BaseException as error:
        if not fails_call_only(error):
            raise
        _log.exception("a done-callback of %r raised", future)


def _resolve(mailbox: MailboxReader) -> None:
    for _, waiter in mailbox.drain():
        if not waiter.done():
            waiter.set_result(None)


class _CallbackThread:
    """Runs done-callbacks, one after another. A callback that raises is logged and harms no
    other."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.mailboxes = [MailboxReader(engine.completion) for engine in engines]
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._worker = Worker("clipper-callbacks", self._run, again=Backoff(0.01, 1.0), vital=True)
        try:
            self._worker.start()
        except BaseException:
            os.close(self._wake)
            raise

    def health(self) -> Health:
        return self._worker.health()

    def _run(self, stop: Stop) -> None:
        poll = select.poll()
        for mailbox in self.mailboxes:
            poll.register(mailbox.fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not stop.requested:
            poll.poll()
            self._deliver()

    def _deliver(self) -> None:
        for mailbox in self.mailboxes:
            for future, fn in mailbox.drain():
                _run(fn, future)

    def stop(self) -> None:
        self._worker.request_stop()
        os.eventfd_write(self._wake, 1)
        has_ended = self._worker.end()
        self._deliver()
        if has_ended:
            os.close(self._wake)


def as_completed(futures: Iterable[Future], timeout: float | None = None) -> Iterator[Future]:
    """Yield the futures in the order in which they are done. Raises TimeoutError when `timeout`
    seconds are over first."""
    done: queue.SimpleQueue[Future] = queue.SimpleQueue()
    waiting = list(futures)
    for future in waiting:
        future.add_done_callback(done.put)
    until = None if timeout is None else time.monotonic() + timeout
    for _ in waiting:
        try:
            yield done.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(
                f"not all of {len(waiting)} futures were done within {timeout} s"
            ) from None


def _dead_after_fork() -> None:
    """End an engine in a fork, which has no loop thread: everything in flight, and every later
    call, ends with ForkedProcess."""
    for dispatch in list(_live):
        for engine in dispatch.engines:
            engine.kill(Status.FORKED)
            engine.completion.on_await = _refuse_in_fork
            engine.completion.on_callback = _refuse_in_fork


def _refuse_in_fork(*_: object) -> NoReturn:
    raise errors.ForkedProcess(
        "the query was in flight when this process was forked.", hint=FORK_HINT
    )


os.register_at_fork(after_in_child=_dead_after_fork)
