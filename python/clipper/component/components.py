"""The components of one owner, closed in the reverse order of their starts."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from clipper.component.component import Component, Health
from clipper.component.threads import SYSTEM_THREADS, Threads
from clipper.component.worker import START_S
from clipper.errors import ShuttingDown

RESERVE_S: Final = 0.2  # kept for each component that is closed later
CLOSE_S: Final = 30.0
_log = logging.getLogger(__name__)
C = TypeVar("C", bound=Component)


class Components:
    """A stack of components, with functions to call between their ends.

    `close` goes on after an error, so that one part cannot keep others, a lock or a file open.
    Threads: any.
    """

    def __init__(self, name: str, threads: Threads = SYSTEM_THREADS) -> None:
        self.name = name
        self._threads, self._pid = threads, os.getpid()
        self._lock = threading.RLock()  # so that one thread at a time closes
        self._stack: list[Component | _Callback] = []
        self._sources: list[Callable[[], Iterable[Health]]] = []
        self._closing = False

    def enter(self, component: C, limit_s: float = START_S) -> C:
        """Start a component and return it.

        If it cannot start, all that were entered before are closed, and its error is raised.
        """
        if self._closing:
            raise ShuttingDown(f"{self.name} is closing.")
        try:
            component.start(limit_s)
        except BaseException:
            try:
                self.close(self._threads.now_s() + CLOSE_S)
            except BaseException:  # the first error is the one that matters
                _log.exception("%s: after %s had not started", self.name, component.name)
            raise
        self._stack.append(component)
        return component

    def callback(self, name: str, function: Callable[[], object]) -> None:
        """Add a function that is called once, when all components above it have ended."""
        self._stack.append(_Callback(name, function))

    def watch(self, source: Callable[[], Iterable[Health]]) -> None:
        """Add components of others to health()."""
        self._sources.append(source)

    def health(self) -> list[Health]:
        """Return the state of all components, in the order of their starts."""
        each = [one.health() for one in tuple(self._stack) if not isinstance(one, _Callback)]
        for source in tuple(self._sources):
            each.extend(source())
        return each

    def close(self, until_s: float | None = None) -> list[str]:
        """End all, the last one first; return the names of those that have not ended.

        until_s: a time of the monotonic clock; None: in CLOSE_S. A component may use what is left
        but for RESERVE_S of each that comes after it. Errors are collected and raised as one group
        when all had their turn. It can be called again: then it waits for those that had not
        ended. Does nothing in a child of fork(), where the threads do not exist.
        """
        if os.getpid() != self._pid:
            return []
        if until_s is None:
            until_s = self._threads.now_s() + CLOSE_S
        errors: list[BaseException] = []
        left: list[Component | _Callback] = []
        with self._closes_alone(until_s):
            self._closing = True
            while self._stack:
                one = self._stack.pop()
                try:
                    one.request_stop()
                    if not one.join(until_s - RESERVE_S * len(self._stack)):
                        left.append(one)
                except BaseException as error:
                    _log.error("%s: closing %s", self.name, one.name, exc_info=error)
                    errors.append(error)
            self._stack.extend(reversed(left))
        names = [one.name for one in left]
        if names:
            _log.warning("%s: not ended in time: %s", self.name, ", ".join(names))
        if errors:
            raise BaseExceptionGroup(f"{self.name} is closed; {len(errors)} parts failed", errors)
        return names

    @contextlib.contextmanager
    def _closes_alone(self, until_s: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, until_s - self._threads.now_s())):
            raise TimeoutError(
                f"{self.name} is being closed by another thread, which has not ended"
            )
        try:
            yield
        finally:
            self._lock.release()


class _Callback:
    """A function that has its place in the stack."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self.name, self._function = name, function

    def request_stop(self) -> None:
        """Do nothing: the function is called when all above it have ended."""

    def join(self, until_s: float) -> bool:
        """Call the function."""
        self._function()
        return True
