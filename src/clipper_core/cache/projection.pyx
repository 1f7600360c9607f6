"""Random projections -> cells -> the key of a cache entry that near rows share; and what that costs
in truth.

Why a key and not a search. The cells go through the same 120-bit hash as a row does, so that the
table, its policies, the joining of equal queries and the bulk lookups know nothing of similarity.
The price: two near rows on either side of a boundary miss each other, so the width must be several
times the distance that is meant to be near.

The checks evaluate behind the answer, not before it: a hit is as fast as ever, and an overloaded
model skips its checks (at most WAITING_MAX are in flight) rather than its queries.

Source: Datar, Immorlica, Indyk, Mirrokni, "Locality-sensitive hashing scheme based on p-stable
distributions", SoCG 2004.
"""
from libc.stdlib cimport free

import math
import threading
from collections import deque

import numpy as np

from clipper_core.runtime.machine cimport i32, relaxed, u32, u64
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, OK, raise_for

cdef enum:
    WAITING_MAX = 8


def difference(cached, fresh):
    """Return how far apart two outputs are: the largest |a - b| of numbers or arrays of one shape;
    of others 0.0 or, unequal, inf."""
    a, b = np.asarray(cached), np.asarray(fresh)
    if a.dtype.kind not in "biuf" or b.dtype.kind not in "biuf" or a.shape != b.shape:
        return 0.0 if type(cached) is type(fresh) and np.array_equal(a, b) else math.inf
    if a.size == 0 or np.array_equal(a, b, equal_nan=True):
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.where(a == b, 0.0, np.abs(a.astype("f8") - b.astype("f8")))
    return math.inf if np.isnan(apart).any() else float(apart.max())


cdef class Similarity:
    """Rows that fall into the same `projections` cells of `width` are one to the cache; for one
    model. Threads: any.

    `width` is in the units of Euclidean distance between rows: two rows r apart share an entry with
    probability about (1 - 0.8 r / width) ** projections while r is much less than width.
    `projections`: 8, 16, 24 or 32. `check_share` of the hits of single queries (0 to 1) are
    evaluated too; outputs further apart than `tolerance` have disagreed. Raises the error of
    Status.BAD_INPUT.

    >>> near = Similarity(width=0.5, projections=8)
    >>> near.bind("f32", 2, seed=1)
    >>> near.cells(np.array([1.0, 2.0], "f4")) == near.cells(np.array([1.0, 2.0], "f4"))
    True
    """

    def __cinit__(self, double width, u32 projections=16, double check_share=0.01,
                  double tolerance=0.0):
        if not 0 < width < math.inf:
            raise_for(BAD_INPUT,
                      f"width {width} of a similarity: a positive number, in units of distance "
                      f"between rows")
        if projections not in (8, 16, 24, 32):
            raise_for(BAD_INPUT, f"{projections} projections of a similarity: 8, 16, 24 or 32")
        if not 0 <= check_share <= 1 or not 0 <= tolerance < math.inf:
            raise_for(BAD_INPUT,
                      f"check_share {check_share}, tolerance {tolerance}: a share from 0 to 1, and "
                      f"a number from 0")
        self.width, self.projections, self.check_share, self.tolerance = (width, projections,
                check_share, tolerance)
        self.waiting = deque()
        self.counting = threading.Lock()

    def __dealloc__(self):
        free(self.state.planes)

    cdef int draw(self, bint wide, u64 n, u64 seed) except -1:
        if self.drawn:
            raise_for(BAD_INPUT, "a similarity belongs to one model; make another")
        self.state.n, self.state.count, self.state.wide = n, self.projections, wide
        if n >> 32 or not projection_draw(&self.state, self.width, seed):
            raise_for(NO_MEMORY,
                      f"no memory for {self.projections} projections of rows of {n} numbers")
        self.drawn = True
        return 0

    def bind(self, str dtype, u64 n, u64 seed):
        """Draw the projections for rows of n elements, f32 or f64. A model does this itself."""
        if dtype not in ("f32", "f64"):
            raise_for(BAD_INPUT, f"similar rows are f32 or f64 of one shape, not {dtype}")
        self.draw(dtype == "f64", n, seed)

    def cells(self, row):
        """The cells of a C-contiguous row as a tuple of ints; None for one with NaN, infinities, or
        too far out."""
        cdef i32 found[32]
        cdef const unsigned char[::1] data = memoryview(row).cast("B")
        if not self.drawn or <u64> data.shape[0] != self.state.n * (8 if self.state.wide else 4):
            raise_for(BAD_INPUT,
                      f"a row of {self.state.n} elements was expected, got {data.shape[0]} bytes")
        if not projection_cells(self.state, &data[0], found):
            return None
        return tuple([found[i] for i in range(self.projections)])

    # -- what it costs in truth

    cdef bint check_is_due(self) noexcept:
        """Return whether this hit is one of the share to check. These are spread evenly: hit h is
        one where h x share passes a whole number."""
        cdef u64 h = self.hits.fetch_add(1, relaxed)
        return (<u64> ((h + 1) * self.check_share) != <u64> (h * self.check_share)
                and len(self.waiting) < WAITING_MAX)

    cdef int remember(self, object future, object cached) except -1:
        self.waiting.append((future, cached))
        self.compare()
        return 0

    def compare(self):
        """Compare what has been evaluated by now. An evaluation that ended without an output counts
        for nothing."""
        with self.counting:
            for _ in range(len(self.waiting)):
                future, cached = self.waiting.popleft()
                if not future.done():
                    self.waiting.append((future, cached))
                elif future.status(0) == OK:
                    apart = difference(cached, future.output(0))
                    self.checked += 1
                    self.disagreed += apart > self.tolerance
                    self.worst = max(self.worst, apart)

    def stats(self):
        """`hits` of single queries, and of those `checked`, `disagreed`, and the `worst` difference
        seen."""
        self.compare()
        return {"hits": self.hits.load(relaxed), "checked": self.checked,
                "disagreed": self.disagreed, "worst": self.worst}
