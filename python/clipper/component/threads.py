"""The threads and the clock that components run on, which a simulation replaces by virtual ones.

A mirror, a lease and a store in memory take their waits, threads and times from `Store.threads`.
"""

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Protocol


class ThreadEvent(Protocol):
    """A flag that threads wait for, as `threading.Event`."""

    def set(self) -> None:
        """Set the flag and wake all waiters."""

    def is_set(self) -> bool:
        """Return whether the flag is set."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the flag; return False on timeout."""


class ThreadCondition(AbstractContextManager[bool, None], Protocol):
    """A reentrant lock with waits for changes, as `threading.Condition`."""

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock and wait for a notification; return False on timeout."""

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        """Wait until the predicate is true; return its last value."""

    def notify_all(self) -> None:
        """Wake all waiters."""


class RunningThread(Protocol):
    """A thread that was started, as `threading.Thread`."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, at most `timeout` seconds."""

    def is_alive(self) -> bool:
        """Return whether the thread has not ended."""


class Threads(Protocol):
    """The source of time, waits, threads and chance. Threads: any.

    random: draws the lengths of pauses.
    """

    random: random.Random

    def now_s(self) -> float:
        """Return the time in seconds of a clock that never goes back."""

    def event(self) -> ThreadEvent:
        """Return a new event."""

    def condition(self) -> ThreadCondition:
        """Return a new condition."""

    def start(self, target: Callable[[], None], name: str) -> RunningThread:
        """Start a thread that does not keep the process alive."""

    def is_current(self, thread: RunningThread) -> bool:
        """Return whether this code runs in a thread."""


class SystemThreads:
    """The threads and the monotonic clock of the operating system."""

    def __init__(self) -> None:
        self.random = random.Random()

    def now_s(self) -> float:
        """Return `time.monotonic()`."""
        return monotonic()

    def event(self) -> ThreadEvent:
        """Return a `threading.Event`."""
        return threading.Event()

    def condition(self) -> ThreadCondition:
        """Return a `threading.Condition`."""
        return threading.Condition()

    def start(self, target: Callable[[], None], name: str) -> RunningThread:
        """Start a daemon thread."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def is_current(self, thread: RunningThread) -> bool:
        """Return whether this code runs in a thread."""
        return thread is threading.current_thread()


SYSTEM_THREADS = SystemThreads()
