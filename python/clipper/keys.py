"""Single keys from a terminal, without Enter and without echo; the terminal is given back as it
was."""

import os
import select
import termios
import tty
from typing import Self, TextIO


class Keys:
    """Use it in a `with` block. Does nothing where `stream` is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno() if stream.isatty() else -1
        self._before: termios._AttrReturn = []

    def __enter__(self) -> Self:
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._fd >= 0:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self, wait_s: float) -> str:
        """Return the keys pressed until now, after `wait_s` at most; empty when there is none."""
        watched = [self._fd] if self._fd >= 0 else []
        ready, _, _ = select.select(watched, [], [], wait_s)
        if not ready:
            return ""
        data = os.read(self._fd, 64)
        if not data:  # the terminal was hung up
            self._fd = -1
            return "q"
        return data.decode(errors="replace")
