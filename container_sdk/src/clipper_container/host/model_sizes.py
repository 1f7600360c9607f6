"""Memory of a model: measured while it loads, estimated before.

A process has one memory counter for all its models, so a model's share is the growth while it loads
and nothing else does: the first ALONE loads of a type run alone, and so do loads of large files. A
line fitted to these (size over file size) estimates loads that ran beside others.

The first load of a type also imports modules, which later models share: what memory grows by during
imports is not counted as the model's. What it holds besides is, whatever the size of its file.

A measurement is the larger of two counters: resident memory, which misses memory that was already
free in the heap, and allocated memory, which misses mapped files. It takes half a millisecond where
many models are loaded, so most small models of a type that is known are estimated.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import ModuleType

from clipper_container.machine import PAGE, resident_bytes

DEFAULT_BYTES = 1 << 20  # estimate without any measurement
ALONE = 5  # first loads of a type, which run alone
LARGE_BYTES = 32 << 20  # files of this size always load alone
REMEMBERED = 64  # last loads of a type that the fit uses
FIXED_BYTES = 64 << 10  # prior of the fit: size = FIXED_BYTES + RATIO * file bytes
RATIO = 2.0
RATIO_MIN, RATIO_MAX = 0.5, 20.0
SAMPLED = 8  # of small models of a type that is known, one of so many is measured
SPREAD_BYTES = 64 << 10  # files whose sizes differ by less cannot determine the ratio
COLLECT_BYTES, COLLECT_S = 32 << 20, 30.0  # unloaded bytes, or seconds, between collections
GROWN_SHARE = 4  # the part of the capacity by which memory may grow beyond what models occupy
_SMALL_BLOCK = 64  # mean bytes of a block of Python's small-object allocator
_Import = Callable[..., ModuleType]


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


def allocated_bytes() -> int:
    """Return the memory that malloc and Python's allocator have handed out; 0 without glibc
    2.33.
    """
    if _allocator is None:
        return 0
    info = _allocator()
    return int(info.uordblks + info.hblkhd) + sys.getallocatedblocks() * _SMALL_BLOCK


def trim() -> None:
    """Return free heap memory to the system (malloc_trim)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class UnloadedModel:
    """A model that was unloaded, without a reference to it: tells whether its memory is free."""

    def __init__(self, model: object) -> None:
        self._parts: list[weakref.ref[object]] = []
        self._is_known = model is not None
        for part in (model, *getattr(model, "__dict__", {}).values()):
            if gc.is_tracked(part):
                try:
                    self._parts.append(weakref.ref(part))
                except TypeError:  # a list, a dict, or a class of its own kind
                    self._is_known &= isinstance(part, (list, dict, tuple, set))

    def is_gone(self) -> bool:
        """Return whether the model and its attributes are freed; otherwise they may be in a cycle,
        which the garbage collector has to find. A cycle among parts of an attribute is not seen.
        """
        return self._is_known and all(part() is None for part in self._parts)


class CollectionSchedule:
    """Decides when to run a full garbage collection after unloads that left something. A collection
    stops all threads: 0.1 s with 2000 models.

    capacity_bytes: of the host. Cycles that UnloadedModel does not see are known by their memory: a
    collection runs when a GROWN_SHARE-th of the capacity more is used than models occupy.
    """

    def __init__(self, now_s: float, capacity_bytes: int) -> None:
        self._bytes, self._since_s = 0, now_s
        self._grown_max = max(COLLECT_BYTES, capacity_bytes // GROWN_SHARE)
        self._least_other = sys.maxsize

    def add(self, size_bytes: int) -> None:
        """Count the bytes of an unloaded model."""
        self._bytes += size_bytes

    def wait_s(self, now_s: float, other_bytes: int) -> float | None:
        """Return the seconds until the next collection, 0 for now; None when none is needed.

        other_bytes: memory of this process that no loaded model is known to occupy.
        """
        self._least_other = min(self._least_other, other_bytes)
        if self._bytes >= COLLECT_BYTES or other_bytes - self._least_other >= self._grown_max:
            return 0.0
        return max(0.0, self._since_s + COLLECT_S - now_s) if self._bytes else None

    def clear(self, now_s: float) -> None:
        """Record that a collection ran at now_s."""
        self._bytes, self._since_s, self._least_other = 0, now_s, sys.maxsize


class _Learned:
    """Fit of one type: size = fixed + ratio * file bytes, over the last measured loads."""

    def __init__(self) -> None:
        self.loads = 0
        self._seen: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)
        self._fit: tuple[float, float] | None = None  # of what was seen

    def guess(self, file: int) -> int:
        fixed, ratio = self._fit = self._fit or self._line()
        return max(PAGE, int(fixed + ratio * file))

    def _line(self) -> tuple[float, float]:
        n = len(self._seen)
        if not n:
            return FIXED_BYTES, RATIO
        file_mean, size_mean = (sum(each) / n for each in zip(*self._seen, strict=True))
        spread = sum((file - file_mean) ** 2 for file, _ in self._seen) / n
        ratio = RATIO
        if spread > SPREAD_BYTES**2:  # sizes differ enough to determine the ratio
            together = sum((file - file_mean) * (size - size_mean) for file, size in self._seen) / n
            ratio = min(max(together / spread, RATIO_MIN), RATIO_MAX)
        elif file_mean > SPREAD_BYTES:
            ratio = min(max(size_mean / file_mean, RATIO_MIN), RATIO_MAX)
        # the median ignores loads that also allocated other memory
        fixed = median(size - ratio * file for file, size in self._seen)
        return max(0.0, fixed), ratio

    def learn(self, file: int, size: int) -> None:
        """Add a measurement. The first one of a type may hold more of the framework than its
        imports, so that small files do not learn from it.
        """
        self.loads += 1
        if self.loads > 1 or file >= LARGE_BYTES:
            self._seen.append((file, size))
            self._fit = None

    def mean(self) -> float:
        return (
            sum(size for _, size in self._seen) / len(self._seen) if self._seen else DEFAULT_BYTES
        )


class _Imports:
    """Measures the memory that imports of modules take, in the thread that made it.

    It replaces `__import__`; `end` puts the function before it back.
    """

    def __init__(self) -> None:
        self.grown_bytes = 0
        self._thread, self._depth = threading.get_ident(), 0
        self._before: _Import = builtins.__import__
        self._mine: _Import = self._import
        self._put(self._mine)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        outermost = threading.get_ident() == self._thread and not self._depth
        if not outermost or name in sys.modules:
            return self._before(name, globals, locals, fromlist, level)
        self._depth = 1
        resident, allocated = resident_bytes(), allocated_bytes()
        try:
            return self._before(name, globals, locals, fromlist, level)
        finally:
            self._depth = 0
            grown = max(resident_bytes() - resident, allocated_bytes() - allocated)
            self.grown_bytes += max(grown, 0)

    @staticmethod
    def _put(function: _Import) -> None:
        builtins.__import__ = function

    def end(self) -> None:
        """Measure no more imports. Threads: any."""
        if builtins.__import__ == self._mine:
            self._put(self._before)


class SizeMeasurement:
    """Measures one load, from its turn to its end. Threads: the one that loads."""

    def __init__(self, sizes: ModelSizes, type: str, path: str) -> None:
        self._sizes, self._type, self._path, self._file = sizes, type, path, file_bytes(path)
        self._alone, self._number = sizes._enter(type, self._file)
        self._held = True
        self._imports = _Imports() if self._number >= 0 and sizes._is_new(type) else None
        self._resident, self._allocated = (
            (resident_bytes(), allocated_bytes()) if self._number >= 0 else (0, 0)
        )

    def take(self) -> int:
        """Return the growth in bytes if nothing else was loading, and learn from it; else the
        estimate of the type.
        """
        if not self._sizes._was_alone(self._number):
            return self._sizes.predict(self._type, self._path)
        grown = max(resident_bytes() - self._resident, allocated_bytes() - self._allocated)
        shared = self._imports.grown_bytes if self._imports is not None else 0
        found = max(PAGE, grown - shared)
        self._sizes._learn(self._type, self._file, found)
        return found

    def end(self) -> None:
        """Let other loads go on. Threads: any, any number of times."""
        with self._sizes._change:
            if self._held:
                self._held = False
                if self._imports is not None:
                    self._imports.end()
                self._sizes._leave(self._alone)


class ModelSizes:
    """Measured and estimated sizes of models, by type. Threads: any."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._learned: dict[str, _Learned] = {}
        self._loading = 0
        self._started_count = 0  # loads so far
        self._alone = False  # the running load must be the only one

    def default_bytes(self) -> int:
        """Return the mean size of measured models, the estimate for a model without a file."""
        with self._change:
            means = [one.mean() for one in self._learned.values() if one.loads > 1]
        return int(sum(means) / len(means)) if means else DEFAULT_BYTES

    def predict(self, type: str, path: str) -> int:
        """Estimate the bytes of a model of this type whose file is at `path`."""
        size = file_bytes(path)
        if not size:
            return self.default_bytes()
        with self._change:
            return self._learned.get(type, _Learned()).guess(size)

    def start(self, type: str, path: str) -> SizeMeasurement:
        """Wait for the load's turn, then start to measure it."""
        return SizeMeasurement(self, type, path)

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
            self._started_count += 1
            is_known = size < SPREAD_BYTES and learned.loads >= REMEMBERED
            is_passed_over = beside or (is_known and self._started_count % SAMPLED)
            return alone, -1 if is_passed_over else self._started_count

    def _leave(self, alone: bool) -> None:
        self._loading -= 1
        if alone:
            self._alone = False
        self._change.notify_all()

    def _was_alone(self, number: int) -> bool:
        with self._change:
            return number == self._started_count

    def _is_new(self, type: str) -> bool:
        with self._change:
            return not self._learned[type].loads

    def _learn(self, type: str, size: int, measured: int) -> None:
        with self._change:
            self._learned[type].learn(size, measured)


def file_bytes(path: str) -> int:
    """Return the size of a file, or of all files in a folder; 0 for neither."""
    try:
        if not os.path.isdir(path):
            return os.stat(path).st_size
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    except OSError:
        return 0
