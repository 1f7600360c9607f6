"""Virtual time: an event loop whose clock jumps, and threads of which one runs at a time.

The loop never waits: when nothing is ready, its clock jumps to the next timer. A virtual thread is
a greenlet that runs only while the loop waits for it, from one wait to the next, so the order of
everything follows from the timers alone. What a killed life has started never runs again.
"""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from greenlet import getcurrent, greenlet

from clipper.component import Health, Tasks
from clipper.errors import ShuttingDown
from clipper.mesh.node_loop import STORE_THREADS

P = ParamSpec("P")
T = TypeVar("T")
WALL_START_MS = 1_700_000_000_000
RESOLUTION_S: Final = 1e-9  # of the clock: timers that are so close are due together
CANCELLED_MIN: Final = 100  # timers, of which most are cancelled before these are dropped


class Life:
    """One life of a process: what runs in its context ends with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.over = False
        self.clock_ms = 0  # by which its wall clock is ahead
        self.drift = 0.0  # seconds by which it gains on time in each second
        self.drifts_from_s = 0.0
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in the order of their starts

    def ahead_ms(self, now_s: float) -> int:
        """Return by how much its wall clock is ahead now."""
        return self.clock_ms + int(1000 * self.drift * (now_s - self.drifts_from_s))


LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class Call:
    """A call that a loop has to make: an `asyncio.TimerHandle`, as far as asyncio uses one."""

    __slots__ = ("_loop", "args", "callback", "context", "is_cancelled", "is_timer")

    def __init__(
        self, loop: "VirtualLoop", callback: Any, args: tuple[Any, ...], context: Any
    ) -> None:
        self._loop, self.callback, self.args = loop, callback, args
        self.context = contextvars.copy_context() if context is None else context
        self.is_cancelled = self.is_timer = False

    def __lt__(self, other: "Call") -> bool:
        """Return False: calls of one time have no order."""
        return False

    def cancel(self) -> None:
        """Do not make the call."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self._loop.cancelled_timers += self.is_timer
            self.callback, self.args = None, ()


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time. It makes calls in the order of asyncio's own loops."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._until_s = 0.0
        self._soon: deque[Call] = deque()
        self._timers: list[tuple[float, Call]] = []
        self.cancelled_timers = 0
        self.errors: list[str] = []
        self.set_task_factory(self._new_task)
        self.set_exception_handler(lambda _, context: self.errors.append(repr(context)))

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Run what happens in the next seconds."""
        self._until_s = self._now_s + seconds
        self.call_at(self._until_s, self.stop)
        self.run_forever()

    def close(self) -> None:
        self._soon.clear()
        self._timers.clear()
        super().close()

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Call:
        call = Call(self, callback, args, context)
        self._soon.append(call)
        life = call.context.get(LIFE)
        if life is not None and life.over:
            call.cancel()
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Call:
        call = Call(self, callback, args, context)
        call.is_timer = True
        heapq.heappush(self._timers, (when, call))
        life = call.context.get(LIFE)
        if life is not None and life.over:
            call.cancel()
        return call

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> Call:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Make calls until the loop is to stop."""
        soon = self._soon
        while not self._stopping:  # type: ignore[attr-defined]
            self._drop_cancelled()
            timers = self._timers
            if not soon and not self._jump():
                self.stop()
            due_s = self._now_s + RESOLUTION_S
            while timers and timers[0][0] < due_s:
                call = heapq.heappop(timers)[1]
                call.is_timer = False
                soon.append(call)
            for _ in range(len(soon)):
                call = soon.popleft()
                if call.is_cancelled:
                    continue
                try:
                    call.context.run(call.callback, *call.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    what = {"message": f"{call.callback} has failed", "exception": error}
                    self.call_exception_handler(what)

    def _jump(self) -> bool:
        """Let time pass to the next timer, at most to the end of `advance` (False)."""
        if not self._timers:
            return False
        when_s = self._timers[0][0]
        if self._now_s + (when_s - self._now_s) > self._until_s:
            self._now_s = self._until_s
            return False
        self._now_s = max(self._now_s, when_s)
        return True

    def _drop_cancelled(self) -> None:
        """Drop cancelled timers, as asyncio's loops do: the order of timers of one time, which is
        that of the heap, follows from it.
        """
        timers = self._timers
        if self.cancelled_timers > len(timers) / 2 and len(timers) > CANCELLED_MIN:
            self._timers = [entry for entry in timers if not entry[1].is_cancelled]
            heapq.heapify(self._timers)
            self.cancelled_timers = 0
        else:
            while timers and timers[0][1].is_cancelled:
                heapq.heappop(timers)
                self.cancelled_timers -= 1

    def end(self, life: Life) -> None:
        """End a life at once: nothing that it has started runs any more."""
        life.over = True
        for call in (*self._soon, *(call for _, call in self._timers)):
            if call.context.get(LIFE) is life:
                call.cancel()

    def _new_task(self, loop: Any, work: Any, context: Any = None) -> "asyncio.Task[Any]":
        task = asyncio.Task(work, loop=loop, context=context)
        life = context.get(LIFE) if context is not None else LIFE.get()
        if life is not None:
            life.tasks[task] = None
            task.add_done_callback(lambda one: life.tasks.pop(one, None))
        return task


class ThreadEnded(BaseException):
    """Ends a virtual thread of a life that is over."""


class VirtualThread:
    """A thread that runs while the loop waits for it."""

    def __init__(self, threads: "VirtualThreads", target: Callable[[], None]) -> None:
        self._threads, self._target = threads, target
        self.life = LIFE.get()
        self._context = contextvars.copy_context()
        self.greenlet = greenlet(self._run, threads.greenlet)
        self.turn = 0  # grows with each wait
        self.woken = False
        self.done = False
        self._joining: list[VirtualThread] = []

    @property
    def over(self) -> bool:
        return self._threads.closed or (self.life is not None and self.life.over)

    def _run(self) -> None:
        """Run to the end, as a greenlet."""
        try:
            if not self.over:
                self._context.run(self._target)
        except ThreadEnded:
            pass
        finally:
            self.done = True
            for one in self._joining:
                self._threads.wake(one, one.turn)
            self._joining.clear()

    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        return not self.done

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end."""
        while not self.done:
            self._joining.append(self._threads.current())
            self._threads.wait(None)


class VirtualThreads:
    """Virtual threads on a loop: `clipper.component.threads.Threads`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.greenlet = loop, getcurrent()
        self.now_s = loop.time
        self.random = Random(0)
        self._parked: set[VirtualThread] = set()
        self.running: VirtualThread | None = None
        self.closed = False

    # -- clipper.component.threads.Threads

    def event(self) -> "VirtualEvent":
        return VirtualEvent(self)

    def condition(self) -> "VirtualCondition":
        return VirtualCondition(self)

    def start(self, target: Callable[[], None], name: str = "") -> VirtualThread:
        thread = VirtualThread(self, target)
        self.loop.call_soon(self._switch, thread)
        return thread

    def is_current(self, thread: Any) -> bool:
        return thread is self.running

    # -- running

    def current(self) -> VirtualThread:
        if self.running is None:
            raise RuntimeError("only a virtual thread may wait")
        return self.running

    def _switch(self, thread: VirtualThread) -> None:
        """Let a thread run to its next wait. It has no event loop, as a thread of the system."""
        known, self.running = self.running, thread
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            thread.greenlet.switch()
        finally:
            asyncio._set_running_loop(loop)
            self.running = known

    def wait(self, timeout_s: float | None) -> bool:
        """Let others run until this thread is woken, or the time is over (False)."""
        thread = self.current()
        if thread.over:
            raise ThreadEnded
        thread.turn += 1
        thread.woken = False
        if timeout_s is not None:
            self.loop.call_later(max(timeout_s, 0.0), self._resume, thread, thread.turn, False)
        self._parked.add(thread)
        self.greenlet.switch()
        if thread.over:
            raise ThreadEnded
        return thread.woken

    def wake(self, thread: VirtualThread, turn: int) -> None:
        """Continue a thread soon, unless it has gone on."""
        self.loop.call_soon(self._resume, thread, turn, True, context=contextvars.Context())

    def _resume(self, thread: VirtualThread, turn: int, woken: bool) -> None:
        if thread in self._parked and thread.turn == turn and not thread.over:
            self._parked.discard(thread)
            thread.woken = woken
            self._switch(thread)

    def sleep(self, seconds: float) -> None:
        """Wait, in a virtual thread; elsewhere return at once."""
        if self.running is not None:
            turn_until = self.loop.time() + seconds
            while self.loop.time() < turn_until:
                self.wait(turn_until - self.loop.time())

    def close(self) -> None:
        """End all threads."""
        self.closed = True
        while self._parked:
            thread = self._parked.pop()
            self._switch(thread)


class VirtualCondition:
    """A condition without a lock: only one thread runs, and none waits while it holds one."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._threads = threads
        self._waiting: deque[tuple[VirtualThread, int]] = deque()

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        thread = self._threads.current()
        entry = thread, thread.turn + 1
        self._waiting.append(entry)
        found = self._threads.wait(timeout)
        if not found and entry in self._waiting:
            self._waiting.remove(entry)
        return found

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        give_up = None if timeout is None else self._threads.now_s() + timeout
        while not (found := predicate()):
            left = None if give_up is None else give_up - self._threads.now_s()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify_all(self) -> None:
        while self._waiting:
            self._threads.wake(*self._waiting.popleft())


class VirtualEvent:
    """An event."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._condition = VirtualCondition(threads)
        self._set = False

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._condition.wait_for(self.is_set, timeout))


class VirtualNodeLoop:
    """A `clipper.mesh.node_loop.NodeLoop` on the loop that all nodes share."""

    def __init__(self, loop: VirtualLoop, threads: VirtualThreads, life: Life) -> None:
        self._loop, self._threads, self._life = loop, threads, life
        self._places = asyncio.Semaphore(STORE_THREADS)
        self._stopping = False
        self.tasks = Tasks("the mesh")

    @property
    def stopping(self) -> bool:
        return self._stopping

    def start(self) -> None:
        pass

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._stopping = True
        self._wait(self._end(last()))

    def close(self) -> None:
        pass

    def health(self) -> list[Health]:
        return []

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        await last
        rest = [task for task in self._life.tasks if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._stopping:
            work.close()
            raise ShuttingDown("this node has left the mesh.", hint="Use another node.")
        return self._wait(work)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        task = self._loop.create_task(work)
        thread = self._threads.current()
        task.add_done_callback(lambda _: self._threads.wake(thread, thread.turn))
        while not task.done():
            self._threads.wait(None)
        if task.cancelled():
            raise ShuttingDown("this node has left the mesh.", hint="Use another node.")
        return task.result()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon(function, *args)

    def call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        self._loop.call_later(seconds, function, *args)

    async def run_blocking(
        self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs
    ) -> T:
        result: asyncio.Future[T] = self._loop.create_future()

        def call() -> None:
            try:
                found = function(*args, **keywords)
            except Exception as error:
                if not result.done():
                    result.set_exception(error)
                else:
                    return
            else:
                if not result.done():
                    result.set_result(found)

        async with self._places:
            self._threads.start(call)
            return await result
