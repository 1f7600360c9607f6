"""The output of a process: a pipe, read as lines of bounded length."""

import contextlib
import os
from typing import Final

from clipper.processes.handle import Told

LINE_BYTES_MAX: Final = 4096
_READ_BYTES: Final = 64 << 10
_READS_MAX: Final = 64  # at the end: a process that is left may hold the pipe, and write on


class LineSplitter:
    """Splits output into lines of bounded length."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, data: bytes) -> list[str]:
        """Return the lines that end in what has come."""
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > LINE_BYTES_MAX:
            lines.append(rest[:LINE_BYTES_MAX])
            rest = rest[LINE_BYTES_MAX:]
        self._rest = rest
        return [line[:LINE_BYTES_MAX].decode("utf-8", "replace") for line in lines]

    def end(self) -> list[str]:
        """Return the last line, if it has not ended."""
        return self.split(b"\n") if self._rest else []


class Output:
    """Reads what a process writes, and tells it as lines.

    Raises: OSError if there is no descriptor; then nothing is open. Threads: the supervisor's.
    """

    def __init__(self, told: Told) -> None:
        self._told, self._lines = told, LineSplitter()
        self._fd, self._for_child = os.pipe2(os.O_CLOEXEC)
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            undo.callback(self.handed_over)
            os.set_blocking(self._fd, False)
            told.watch(self._fd, self._read)
            undo.pop_all()

    @property
    def for_child(self) -> int:
        """The end that the process gets as its standard output and error; -1 once it has it."""
        return self._for_child

    def handed_over(self) -> None:
        """Close the process's end: the process has it."""
        fd, self._for_child = self._for_child, -1
        if fd >= 0:
            os.close(fd)

    def finish(self) -> None:
        """Tell what is left in the pipe of a process that has ended, and close it. Idempotent."""
        self.handed_over()
        for _ in range(_READS_MAX):
            if self._fd < 0 or not self._read():
                break
        self._tell(self._lines.end())
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._told.unwatch(fd)
            os.close(fd)

    def _read(self) -> bool:
        """Read what the pipe holds; return False when nothing is left."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:  # the process has closed its output, and may still run
            self._close()
            return False
        self._tell(self._lines.split(data))
        return True

    def _tell(self, lines: list[str]) -> None:
        if lines:
            self._told.wrote(lines)
