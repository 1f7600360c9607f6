"""Rows in memory that the server shares: a region is mapped once, read-only, and batches refer to
runs of rows.

The server writes a row before it refers to it and does not change it until the batch is answered. A
model may keep its inputs longer: before the reply is sent, the pages it keeps are replaced by
copies at the same address, and the region is mapped again. A model that does this often
(LEAVES_MAX) receives copies from the start.

Everything the server sends is checked against the region before a byte is read: a run beyond it, or
memory that shrinks, would end this process by SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import sys

import numpy as np

from clipper_container.wire.frames import (
    NUMPY_TYPES,
    BadFrame,
    Bytes,
    DType,
    FrameTooLarge,
    Header,
    Rows,
    open_region,
    open_runs,
)

# per connection; a server has two per class of deadlines: one for queries, one for arrays
REGIONS_MAX = 128
LEAVES_MAX = 8
_MAYMOVE_FIXED = 3  # MREMAP_MAYMOVE | MREMAP_FIXED


class CannotShare(BadFrame):
    """Shared memory was agreed on but cannot be mapped; reconnect without it."""


def can_share() -> bool:
    """Return True if this system can map regions and verify that they cannot shrink."""
    return (
        sys.platform == "linux"
        and os.uname().machine in ("x86_64", "aarch64")
        and hasattr(fcntl, "F_GET_SEALS")
    )


class Region:
    """One mapping. Takes ownership of `fd`."""

    def __init__(self, fd: int, rows: int, row_bytes: int) -> None:
        self._fd, self.rows, self.row_bytes = fd, rows, row_bytes
        self._map()

    def _map(self) -> None:
        memory = mmap.mmap(self._fd, self.rows * self.row_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self.bytes: Bytes = np.frombuffer(memory, np.uint8)
        self._own_refs = sys.getrefcount(self.bytes)

    def view(self, first: int, count: int) -> Bytes:
        """Return the bytes of a run that has been checked."""
        return self.bytes[first * self.row_bytes : (first + count) * self.row_bytes]

    def is_lent(self) -> bool:
        """Return True if anything else refers to the mapping."""
        return sys.getrefcount(self.bytes) > self._own_refs

    def leave(self, first: int, count: int) -> None:
        """Leave a copy of the run to whatever refers to it, and map the region again."""
        page = mmap.PAGESIZE
        start = first * self.row_bytes // page * page
        size = (-(-(first + count) * self.row_bytes // page)) * page - start
        _exchange(self.bytes.ctypes.data + start, size)
        self._map()

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last view."""
        os.close(self._fd)
        del self.bytes


def _exchange(address: int, size: int) -> None:
    """Replace pages of a shared mapping by private copies at the same address, atomically for
    all threads.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    nowhere, readwrite, read = (
        ctypes.c_void_p(-1).value,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.PROT_READ,
    )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = libc.mmap(None, ctypes.c_size_t(size), readwrite, flags, -1, ctypes.c_long(0))
    if copy == nowhere:
        raise MemoryError("no memory to copy inputs that the model keeps")
    ctypes.memmove(copy, address, size)
    libc.mprotect(ctypes.c_void_p(copy), ctypes.c_size_t(size), read)
    sizes = ctypes.c_size_t(size), ctypes.c_size_t(size)
    if (
        libc.mremap(ctypes.c_void_p(copy), *sizes, _MAYMOVE_FIXED, ctypes.c_void_p(address))
        == nowhere
    ):
        libc.munmap(ctypes.c_void_p(copy), ctypes.c_size_t(size))
        raise MemoryError("no memory to copy inputs that the model keeps")


class Regions:
    """The regions of one connection. Threads: one."""

    def __init__(self, payload_bytes_max: int) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._regions: dict[int, Region] = {}
        self._leaves = 0

    def add(self, payload: Bytes, fd: int | None) -> None:
        """Map the region that a REGION frame announces.

        fd: the descriptor that came with the frame; ownership is taken.

        Raises: BadFrame; CannotShare when there is no descriptor, or no room to map it.
        """
        if fd is None:
            raise CannotShare("a region came without its descriptor")
        try:
            number, rows, row_bytes = open_region(payload)
            if number in self._regions or len(self._regions) == REGIONS_MAX:
                raise BadFrame(
                    f"region {number} exists already, or there are more than {REGIONS_MAX}"
                )
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise BadFrame(f"region {number} could shrink")
            if rows * row_bytes > os.fstat(fd).st_size:
                raise BadFrame(f"region {number} is smaller than announced")
            self._regions[number] = Region(fd, rows, row_bytes)
        except OSError as error:  # no memory file; or the limit of this process's address space
            os.close(fd)
            raise CannotShare(f"a region cannot be mapped: {error}") from error
        except BaseException:
            os.close(fd)
            raise

    def open(self, header: Header, payload: Bytes) -> Rows:
        """Return the rows of a SHARED batch: a view of the region if they are contiguous, else a
        copy.

        Raises: BadFrame, FrameTooLarge.
        """
        runs = open_runs(header, payload)
        kind = NUMPY_TYPES[header.dtype]
        row_bytes = math.prod(header.shape) * kind.itemsize
        if header.rows * row_bytes > self._payload_bytes_max:
            raise FrameTooLarge(
                f"rows of {header.rows * row_bytes} bytes; the limit is {self._payload_bytes_max}"
            )
        views = [self._run(row_bytes, *run) for run in runs]
        data = views[0] if len(views) == 1 else np.concatenate(views)
        if self._leaves >= LEAVES_MAX and len(views) == 1:
            data = data.copy()
        if header.dtype == DType.BOOL and data.max(initial=0) > 1:
            raise BadFrame("a bool is 0 or 1")
        return Rows(header.dtype, header.rows, data.view(kind).reshape(header.rows, *header.shape))

    def _run(self, row_bytes: int, number: int, first: int, count: int) -> Bytes:
        region = self._regions.get(number)
        if region is None:
            raise BadFrame(f"region {number} is unknown")
        if row_bytes != region.row_bytes:
            raise BadFrame(f"rows of {row_bytes} bytes in a region of rows of {region.row_bytes}")
        if first + count > region.rows:
            raise BadFrame(f"rows {first} to {first + count} of a region of {region.rows}")
        return region.view(first, count)

    def are_lent(self) -> bool:
        """Return True if anything refers to a view of a region."""
        return any(map(Region.is_lent, self._regions.values()))

    def leave(self, header: Header, payload: Bytes) -> None:
        """Give the model its own copy of the inputs it has kept. Raises: MemoryError."""
        self._leaves += 1
        for number, first, count in open_runs(header, payload):
            if self._regions[number].is_lent():
                self._regions[number].leave(first, count)

    def close(self) -> None:
        """Close all regions."""
        for region in self._regions.values():
            region.close()
        self._regions.clear()
