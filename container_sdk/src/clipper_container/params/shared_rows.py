"""Memory into which a shard writes the rows that this process pulls.

The memory is a file of sealed size (memfd) whose descriptor is sent once over the unix socket. Each
request gets a block, and the caller's array is a view of it: nothing is copied. A block is reused
when no array refers to it. Without a free block rows come over the socket.

After a fork both processes map the same memory: a child must copy rows that it pulled before.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys

import numpy as np
from numpy.typing import NDArray

BYTES_MIN = 1 << 24
BYTES_MAX = 1 << 28
BLOCK_BYTES_MIN = 1 << 12
_NOEXEC_SEAL = 0x0008  # MFD_NOEXEC_SEAL
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")

Bytes = NDArray[np.uint8]


def can_share() -> bool:
    """Return True if this system has memory files with sealed sizes."""
    return (
        sys.platform == "linux"
        and hasattr(os, "memfd_create")
        and all(hasattr(fcntl, name) for name in _SEALS)
    )


def block_bytes(nbytes: int) -> int:
    """Round a size up to a block size: four sizes between two powers of two, so that similar
    requests share blocks.
    """
    step = max(BLOCK_BYTES_MIN, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


class SharedRows:
    """One memory file, for one connection. nbytes: its size. Raises: OSError when it cannot be
    made.

    Threads: one at a time; arrays may be released on any.
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
        """Close the descriptor. The mapping lasts until the last array over it is released."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def take(self, nbytes: int) -> tuple[int, Bytes] | None:
        """Return (offset, u8[nbytes]), the caller's while any array over it lives; None when
        there is no room.
        """
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
        """Return True if an array over any block is alive."""
        for blocks in self._blocks.values():
            for _, block in blocks:
                if sys.getrefcount(block) != _OWN:
                    return True
        return False


class SharedRowsAllocator:
    """Creates the shared memory of a connection on first use and replaces it by a larger one when
    needed.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self.rows: SharedRows | None = None
        self._most = 0

    def enable(self, most: int) -> None:
        """Start a new connection to a shard that accepts `most` bytes in all; 0: the shard does
        not share.
        """
        self.disable()
        self._most = min(most, BYTES_MAX) if can_share() else 0

    def disable(self) -> None:
        """Stop sharing; pulled rows stay valid. The next connection uses other memory, so a late
        answer cannot overwrite anything.
        """
        if self.rows is not None:
            self.rows.close()
        self.rows, self._most = None, 0

    def place(self, nbytes: int) -> tuple[int, Bytes, int | None] | None:
        """Return (offset, u8[nbytes], descriptor to send first or None); None: use the socket."""
        if not self._most:
            return None
        taken = self.rows.take(nbytes) if self.rows is not None else None
        if taken is not None:
            return *taken, None
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
    """Return the reference count of a block that nobody else holds, as `take` sees it."""
    blocks: list[tuple[int, object]] = [(0, np.empty(0, np.uint8))]
    (own,) = [sys.getrefcount(block) for _, block in blocks]
    return own


_OWN = _own()
