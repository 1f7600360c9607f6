"""An error at the entry of one thread of the product, for tests."""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clipper.component import Worker

ERRORS: dict[str, Callable[[], Exception]] = {
    "memory": lambda: MemoryError("injected"),
    "descriptors": lambda: OSError(errno.EMFILE, "injected"),
    "unexpected": lambda: ZeroDivisionError("injected"),
}


def bare(name: str) -> str:
    """Return a thread's name without its number."""
    return re.sub(r"-\d+$", "", name)


class Injected:
    """Lets the first `times` calls of the functions of threads of one name raise."""

    def __init__(self, name: str, error: Callable[[], Exception], times: int = 1) -> None:
        self.name = name
        self.error = error
        self.known = Worker._has_ended
        self.left, self.count = times, 0

    def has_ended(self, worker: Worker) -> bool:
        if bare(worker.name) == self.name and self.left:
            self.left -= 1
            self.count += 1
            function = worker._function

            def fail(stop: Any) -> None:
                worker._function = function
                raise self.error()

            worker._function = fail
        return self.known(worker)


@contextlib.contextmanager
def injected(name: str, kind: str, times: int = 1) -> Iterator[Injected]:
    """Let a thread fail at its entry while this context lasts. kind: of ERRORS."""
    found = Injected(name, ERRORS[kind], times)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Worker, "_has_ended", lambda self: found.has_ended(self))
        yield found


@contextlib.contextmanager
def names_seen() -> Iterator[dict[str, None]]:
    """Collect the names of all threads that start while this context lasts, without numbers."""
    seen: dict[str, None] = {}
    known = Worker.start

    def start(self: Worker, limit_s: float = 10.0) -> None:
        seen[bare(self.name)] = None
        known(self, limit_s)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Worker, "start", start)
        yield seen
