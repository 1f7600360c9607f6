"""What a model occupies, measured while it loads, and guessed before it does.

The memory of a process is one number for all its models, so a model's share is what came while it
loaded and nothing else did: the first few loads of a type run alone, and so do those of large
files. From these is learned how models of the type follow the size of their files; what loads
beside others is told by it. What is measured is the larger of what the kernel counts as resident,
which misses memory that was free in the heap already, and what the allocator has handed out, which
misses what is mapped.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from statistics import median

PAGE = os.sysconf("SC_PAGE_SIZE")
DEFAULT_BYTES = 1 << 20  # of a model of which nothing is known
ALONE = 5  # loads of a type that are measured before any run beside others
LARGE_BYTES = 32 << 20  # of files whose loads always are
REMEMBERED = 64  # loads of a type, the last ones
FIXED_BYTES, RATIO = (
    64 << 10,
    2.0,
)  # of a type of which nothing is known: the file's bytes, and the model made of them
RATIO_MIN, RATIO_MAX = 0.5, 20.0
SPREAD_BYTES = 64 << 10  # files that differ by less tell nothing of the ratio
COLLECT_BYTES, COLLECT_S = 32 << 20, 30.0  # of unloaded models; or so long after the last time
_SMALL_BLOCK = 64  # bytes of one of Python's own small objects, about


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _mallinfo() -> Callable[[], _Mallinfo] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)  # since glibc 2.33
    if function is not None:
        function.restype = _Mallinfo
    return function


_allocator = _mallinfo()


def resident_bytes() -> int:
    """Of this process, as the kernel counts."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE


def allocated_bytes() -> int:
    """Of this process, as its allocators count; 0 where they do not."""
    if _allocator is None:
        return 0
    info = _allocator()
    return int(info.uordblks + info.hblkhd) + sys.getallocatedblocks() * _SMALL_BLOCK


def trim() -> None:
    """Give free memory of the heap back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Leftovers:
    """When to look for what unloaded models have left in circles. All stand still meanwhile: 0.1 s
    among 2000 models."""

    def __init__(self, now_s: float) -> None:
        self._bytes, self._since_s = 0, now_s

    def add(self, size_bytes: int) -> None:
        self._bytes += size_bytes

    def wait_s(self, now_s: float) -> float | None:
        """Until it is worth it: for much at once, for little once in a while. None: nothing was
        unloaded."""
        if not self._bytes:
            return None
        return 0.0 if self._bytes >= COLLECT_BYTES else max(0.0, self._since_s + COLLECT_S - now_s)

    def clear(self, now_s: float) -> None:
        """It is done now."""
        self._bytes, self._since_s = 0, now_s


class _Learned:
    """Of one type: size = fixed + ratio x the bytes of the file, by the last loads that were
    measured."""

    def __init__(self) -> None:
        self.loads = 0
        self._seen: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)

    def guess(self, file: int) -> int:
        fixed, ratio = self._line()
        return max(PAGE, int(fixed + ratio * file))

    def _line(self) -> tuple[float, float]:
        n = len(self._seen)
        if not n:
            return FIXED_BYTES, RATIO
        file_mean, size_mean = (sum(each) / n for each in zip(*self._seen, strict=True))
        spread = sum((file - file_mean) ** 2 for file, _ in self._seen) / n
        ratio = RATIO
        if spread > SPREAD_BYTES**2:  # files that differ enough to tell
            together = sum((file - file_mean) * (size - size_mean) for file, size in self._seen) / n
            ratio = min(max(together / spread, RATIO_MIN), RATIO_MAX)
        elif file_mean > SPREAD_BYTES:
            ratio = min(max(size_mean / file_mean, RATIO_MIN), RATIO_MAX)
        fixed = median(
            size - ratio * file for file, size in self._seen
        )  # now and then a load brings more than its own
        return max(0.0, fixed), ratio

    def learn(self, file: int, size: int) -> int:
        """-> what to take it for. With a type's first load much comes that is not the model's."""
        self.loads += 1
        if self.loads == 1 and file < LARGE_BYTES:
            return min(size, self.guess(file))
        self._seen.append((file, size))
        return size

    def mean(self) -> float:
        return (
            sum(size for _, size in self._seen) / len(self._seen) if self._seen else DEFAULT_BYTES
        )


class Measure:
    """One load, from its turn to its end."""

    def __init__(self, sizes: Sizes, type: str, path: str) -> None:
        self._sizes, self._type, self._path, self._file = sizes, type, path, file_bytes(path)
        self._alone, self._number = sizes._enter(type, self._file)
        self._held = True
        self._resident, self._allocated = resident_bytes(), allocated_bytes()

    def take(self) -> int:
        """The bytes that have come: measured if nothing else was loading, and learned from; else as
        the type has them."""
        found = max(PAGE, resident_bytes() - self._resident, allocated_bytes() - self._allocated)
        if self._sizes._was_alone(self._number):
            return self._sizes._learn(self._type, self._file, found)
        return self._sizes.predict(self._type, self._path)

    def end(self) -> None:
        """Let others go on, also when the load never ends. Threads: any, any number of times."""
        with self._sizes._change:
            if self._held:
                self._held = False
                self._sizes._leave(self._alone)


class Sizes:
    """Threads: any."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._learned: dict[str, _Learned] = {}
        self._loading = 0
        self._begun = 0  # loads so far
        self._alone = False  # the one that runs wants no other beside it

    def default_bytes(self) -> int:
        """Of a model without a file, by those that were measured."""
        with self._change:
            means = [one.mean() for one in self._learned.values() if one.loads > 1]
        return int(sum(means) / len(means)) if means else DEFAULT_BYTES

    def predict(self, type: str, path: str) -> int:
        size = file_bytes(path)
        if not size:
            return self.default_bytes()
        with self._change:
            return self._learned.get(type, _Learned()).guess(size)

    def begin(self, type: str, path: str) -> Measure:
        """Wait for the load's turn."""
        return Measure(self, type, path)

    def _enter(self, type: str, size: int) -> tuple[bool, int]:
        with self._change:
            learned = self._learned.setdefault(type, _Learned())
            self._change.wait_for(lambda: not self._alone)
            alone = size >= LARGE_BYTES or learned.loads < ALONE
            self._alone = alone
            if alone:
                self._change.wait_for(lambda: not self._loading)
            beside = self._loading
            self._loading += 1
            self._begun += 1
            return alone, -1 if beside else self._begun

    def _leave(self, alone: bool) -> None:
        self._loading -= 1
        if alone:
            self._alone = False
        self._change.notify_all()

    def _was_alone(self, number: int) -> bool:
        with self._change:
            return number == self._begun

    def _learn(self, type: str, size: int, measured: int) -> int:
        with self._change:
            return self._learned[type].learn(size, measured)


def file_bytes(path: str) -> int:
    """Of a file, or of all files in a folder; 0 for what is neither."""
    try:
        if not os.path.isdir(path):
            return os.stat(path).st_size
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    except OSError:
        return 0
