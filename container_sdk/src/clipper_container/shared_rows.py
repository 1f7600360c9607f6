"""Memory in which a shard of a parameter server writes the rows that this process pulls.

It is this process's: a memory file of a sealed size, whose descriptor goes once over the unix
socket. Each request has a block of it, which is what the caller gets, as an array; a block is used
again when no array has it any more, so rows last for as long as anyone looks at them and nothing is
copied. When there is no block to be had, rows come over the socket.

After a fork both processes have the same memory: what a child keeps of rows from before, it copies.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTES_MIN = 1 << 24
BYTES_MAX = 1 << 28
BLOCK_BYTES_MIN = 1 << 12
_NOEXEC_SEAL = 0x0008  # MFD_NOEXEC_SEAL
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")

Bytes = NDArray[np.uint8]


def can_share() -> bool:
    """Can this process make memory whose size nobody changes?"""
    return (
        sys.platform == "linux"
        and hasattr(os, "memfd_create")
        and all(hasattr(fcntl, name) for name in _SEALS)
    )


def block_bytes(nbytes: int) -> int:
    """Of a block for so many: one of four sizes between two powers of two, so that requests of like
    sizes share blocks."""
    step = max(BLOCK_BYTES_MIN, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


class SharedRows:
    """One memory, for one connection. nbytes: of all its blocks. Raises: OSError, when there is no
    such memory.

    Threads: one at a time; arrays may go from any.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = _memory_file()
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(
                self.fd,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            self._memory = mmap.mmap(self.fd, nbytes)
        except BaseException:
            self.close()
            raise
        self._blocks: dict[int, list[tuple[int, Bytes]]] = {}  # size -> (where, it)
        self._cut = 0

    def close(self) -> None:
        """The descriptor; the memory goes with the last array over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def take(self, nbytes: int) -> tuple[int, Bytes] | None:
        """(where it is, u8[nbytes]): the caller's while any array of it lives. None: there is no
        room."""
        size = block_bytes(nbytes)
        for offset, block in self._blocks.get(size, ()):
            if sys.getrefcount(block) == _OWN:
                return offset, block[:nbytes]
        if self._cut + size > self.nbytes and not self.are_lent():
            self._blocks.clear()
            self._cut = 0
        if self._cut + size > self.nbytes:
            return None
        offset, self._cut = self._cut, self._cut + size
        block = np.frombuffer(self._memory, np.uint8, size, offset)
        self._blocks.setdefault(size, []).append((offset, block))
        return offset, block[:nbytes]

    def are_lent(self) -> bool:
        for blocks in self._blocks.values():
            for _, block in blocks:
                if sys.getrefcount(block) != _OWN:
                    return True
        return False


class Sharing:
    """Whether a connection shares memory, and how much: made when it is first asked for, and made
    larger when it is too small.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self.rows: SharedRows | None = None
        self._most = 0

    def begin(self, most: int) -> None:
        """Of a new connection, to a shard that has `most` bytes for all; 0: it does not share."""
        self.end()
        self._most = min(most, BYTES_MAX) if can_share() else 0

    def end(self) -> None:
        """Rows that came stay. The next connection has other memory, so that a late answer over
        this one harms nobody."""
        if self.rows is not None:
            self.rows.close()
        self.rows, self._most = None, 0

    def place(self, nbytes: int) -> tuple[int, Bytes, int] | None:
        """(where, u8[nbytes], a descriptor that the shard must have first, or -1). None: over the
        socket."""
        if not self._most:
            return None
        taken = self.rows.take(nbytes) if self.rows is not None else None
        if taken is not None:
            return *taken, -1
        size = self.rows.nbytes * 2 if self.rows is not None else BYTES_MIN
        while size < 4 * nbytes:
            size *= 2
        if size > self._most:
            return None
        try:
            self.rows = SharedRows(size)
        except OSError:
            self._most = 0
            return None
        taken = self.rows.take(nbytes)
        return (*taken, self.rows.fd) if taken is not None else None


def _memory_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("clipper-rows", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 6.3
            raise
        return os.memfd_create("clipper-rows", flags)


def _own() -> int:
    """References that a block has when nobody else has it, as `take` counts them."""
    blocks: list[tuple[int, Any]] = [(0, np.empty(0, np.uint8))]
    for _, block in blocks:
        return sys.getrefcount(block)
    return 0


_OWN = _own()
