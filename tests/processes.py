"""Programs that tests and benchmarks start: waited for, and ended with what they have started.

The output is a file in memory, so that no program waits for its reader.
"""

import contextlib
import fcntl
import os
import pty
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from clipper.processes.handle import End
from clipper.processes.spawned import StartCommand, spawn
from clipper_container.start_folder import StartFolder
from tests.signals import is_frozen

PATIENCE_S = 60.0
_PAUSE_S = 0.002
# no seed of a test makes two of them draw the same
_draw = random.SystemRandom()
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Program:
    """A program that runs; a context manager that kills it at the end. Threads: one at a time.

    until: what is awaited before this returns, see `until`. environment: variables besides those of
    this process. folder: where it starts; None: here. apart: its stderr is that of this process,
    instead of a part of `output`. terminal: it has one, of 40 lines of 120 columns.
    session: it has one of its own.

    Raises: OSError; AssertionError as `until`. Then nothing runs.
    """

    def __init__(
        self,
        *words: object,
        until: str | Callable[[], object] = "",
        limit_s: float = PATIENCE_S,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        apart: bool = False,
        terminal: bool = False,
        session: bool = False,
    ) -> None:
        self._seen = bytearray()
        self._next = 0
        self._terminal = terminal
        self._end: End | None = None
        with contextlib.ExitStack() as opened:
            theirs, self._input = pty.openpty()[::-1] if terminal else os.pipe()
            opened.callback(self.end_input)
            try:
                self._output = os.dup(self._input) if terminal else _file_in_memory()
                opened.callback(os.close, self._output)
                os.set_blocking(self._output, not terminal)
                screen = {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"} if terminal else {}
                command = StartCommand(
                    [str(word) for word in words],
                    {**os.environ, **screen, **(environment or {})},
                    stdin=theirs,
                    stderr=2 if apart else -1,
                    session=session,
                )
                output = theirs if terminal else self._output
                self._process = spawn(command, output, StartFolder(str(folder or "")))
            finally:
                os.close(theirs)
            opened.callback(self._process.end)
            self.pid = self._process.pid
            self.until(until, limit_s=limit_s)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    @property
    def lives(self) -> bool:
        """Return whether it runs."""
        if self._end is None:
            self._end = self._process.reap()
        return self._end is None

    @property
    def output(self) -> str:
        """All that it has printed until now."""
        self._read()
        return self._seen.decode("utf-8", "replace")

    def _read(self) -> None:
        while self._output >= 0 and (data := self._more()):
            self._seen += data

    def _more(self) -> bytes:
        if not self._terminal:
            return os.pread(self._output, 1 << 20, len(self._seen))
        with contextlib.suppress(OSError):  # there is nothing now, or it has ended
            return os.read(self._output, 1 << 16)
        return b""

    @property
    def lines(self) -> list[str]:
        """The whole lines that it has printed until now."""
        return self.output.split("\n")[:-1]

    def until(self, *conditions: str | Callable[[], object], limit_s: float = PATIENCE_S) -> Any:
        """Wait until it has printed texts, and conditions are true; return what the last gave.

        Raises: AssertionError with its output at the limit, or if it ends before.
        """
        found, give_up = None, time.monotonic() + limit_s
        for condition in conditions:
            while True:
                late = time.monotonic() > give_up or not self.lives
                found = condition in self.output if isinstance(condition, str) else condition()
                if found:
                    break
                if late:
                    why = self._end.detail if self._end else f"not within {limit_s:g} s"
                    raise AssertionError(f"{condition!r}: {why}\n{self.output[-4000:]}")
                time.sleep(_PAUSE_S)
        return found

    def see(self, pattern: str) -> "re.Match[str]":
        """Wait for a regular expression behind all that was seen, without escape sequences."""

        def found() -> "re.Match[str] | None":
            return re.search(pattern, _ESCAPE.sub("", self.output)[self._next :])

        match: re.Match[str] = self.until(found)
        self._next += match.end()
        return match

    def line(self, limit_s: float = PATIENCE_S) -> str:
        """Wait for the next line that it prints. Raises as `until`."""
        end = self.until(self._line_end, limit_s=limit_s)
        line, self._next = self._seen[self._next : end - 1], end
        return line.decode()

    def _line_end(self) -> int:
        self._read()
        return self._seen.find(b"\n", self._next) + 1

    def say(self, line: object = "") -> None:
        """Write a line to its input."""
        self.press(f"{line}\n")

    def press(self, keys: str) -> None:
        """Write to its input."""
        os.write(self._input, keys.encode())

    def end_input(self) -> None:
        """Close its input. Idempotent."""
        line, self._input = self._input, -1
        if line >= 0:
            os.close(line)

    def send(self, number: signal.Signals) -> None:
        """Signal it; SIGKILL also what it has started. None of its threads runs after SIGSTOP."""
        self._process.signal(number)
        if number == signal.SIGSTOP:
            self.until(lambda: is_frozen(self.pid))

    def wait(self, limit_s: float = PATIENCE_S) -> int:
        """Wait for its end; return its exit code, negative for a signal. One that is late is
        killed: AssertionError."""
        give_up = time.monotonic() + limit_s
        while (late := self.lives) and time.monotonic() < give_up:
            time.sleep(_PAUSE_S)
            self._seen += self._more()  # a terminal holds little
        text = self.output
        self._opened.close()
        self._output = -1
        self._end = self._end or End(-signal.SIGKILL, "late, and killed")
        assert not late, f"no end within {limit_s:g} s\n{text[-4000:]}"
        assert self._end.code is not None
        return self._end.code

    def stop(self, number: signal.Signals = signal.SIGTERM, limit_s: float = PATIENCE_S) -> int:
        """Signal it, and return as `wait`. Idempotent."""
        self.send(number)
        self.send(signal.SIGCONT)
        return self.wait(limit_s)

    def kill(self) -> int:
        """Kill it, with what it has started in its group."""
        return self.stop(signal.SIGKILL)


def _file_in_memory() -> int:
    """Return a file to whose end all is written. Without O_APPEND, Linux does not lock the position
    of such a file: of two writes at the same time, from threads or processes, one goes over the
    other."""
    file = os.memfd_create("output")
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def free_ports(count: int) -> list[int]:
    """Return so many successive ports of 127.0.0.1 that are free, below those that the system gives
    to connections: none of these takes one of them later."""
    while True:
        first = _draw.randrange(10_000, 32_768 - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return [*range(first, first + count)]
