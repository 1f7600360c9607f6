"""Words that came from elsewhere (a model, a container), made fit to be logged and to be sent to a
client."""

import re
import threading
from collections.abc import Callable
from typing import Final

LINE_CHARS_MAX: Final = 500
_PATH = re.compile(r"""(?<![\w.:/])(?:/[^\s/'":,()]+)+/([^\s/'":,()]+)""")
# the first half of a pair, without the second
_HALF = re.compile(r"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")
_TAIL: Final = 32
# of an object's repr(): where the memory of a process lies
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-fA-F]{6,16}\b")


def why_no_json(error: Exception, text: "bytes | bytearray | memoryview | str") -> str:
    """Return why a text is not JSON, in words. error: of msgspec, which takes a text that ends soon
    after the first half of a surrogate pair for one that was cut off."""
    tail = text[-_TAIL:] if isinstance(text, str) else bytes(text[-_TAIL:]).decode("latin-1")
    half = _HALF.search(tail)
    if half is not None and "truncated" in str(error):
        return f"a string has half of a surrogate pair: {half[0]}"
    return str(error)


def last_line(text: str) -> str:
    """Return the last line of a traceback: the error itself.

    Characters that a terminal would obey are escaped, of the path of a file only its name is left,
    an address in memory is left out, and the line is cut at LINE_CHARS_MAX. The whole text stays in
    the container's own log (`clipper logs`).
    """
    text = text.strip()
    start = text.rfind("\n") + 1
    line = _PATH.sub(r"\1", text[start : start + 4 * LINE_CHARS_MAX])
    line = _ADDRESS.sub("0x...", line) or "no reason given"
    return printable(line.replace("\t", "\\t"))[:LINE_CHARS_MAX]


def printable(text: str) -> str:
    """Return the text with all characters escaped that a terminal would obey or hide, except ends
    of lines and tabs."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


class Sampler:
    """Lets a few lines a second through to a log, and counts the others. Threads: any."""

    def __init__(self, lines_max: int, now_s: Callable[[], float]) -> None:
        self._lines_max, self._now_s = lines_max, now_s
        self._lock = threading.Lock()
        self._second = 0
        self._lines = self._left_out = 0

    def admit(self) -> int:
        """Say how many lines were left out before this one; -1: this one is to be left out too."""
        second = int(self._now_s())
        with self._lock:
            if second != self._second:
                self._second, self._lines = second, 0
            if self._lines >= self._lines_max:
                self._left_out += 1
                return -1
            self._lines += 1
            left_out, self._left_out = self._left_out, 0
            return left_out
