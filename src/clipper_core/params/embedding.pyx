"""Embedding tables: `Table("users", 64)`, then pull(ids) and push(ids, gradients) from any
thread."""
cimport numpy as cnp
from libc.math cimport isfinite
from libc.stdlib cimport free, malloc
from libc.string cimport memset

import hashlib

import numpy as np

from clipper_core.params.embedding_rows cimport (
    GATHER_MAX, PULL_BF16, PULL_F16, PULL_F32, PULL_I8, Distinct, Pulled, Pushed, Rows, arena_limit,
    arena_reserve, distinct_init, rows_bound, rows_bytes, rows_count, rows_expire, rows_free,
    rows_init, rows_pull, rows_push, rows_read, rows_remove, rows_walk, rows_write, spare_floats,
)
from clipper_core.params.optimizer cimport (
    Initializer, Optimizer, Stride, all_finite, state_floats, stride_of,
)
from clipper_core.runtime.machine cimport acq_rel, aligned_new, i64, relaxed, u32, u64, u8
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, raise_for

from clipper_core.runtime.dtype import given_type

cnp.import_array()

cdef enum:
    FLOATS_MAX = 1 << 20        # of a row with its state
    SEEN_MAX = 255

_DTYPES = {"f32": (PULL_F32, np.float32), "f16": (PULL_F16, np.float16),
           "bf16": (PULL_BF16, np.uint16), "i8": (PULL_I8, np.int8)}


def key_of(str name not None, u64 seed=0):
    """Return the u64 key of a table of this name and seed, by which its initial rows are drawn and
    a name is assigned to a shard. It never changes."""
    digest = hashlib.blake2b(name.encode(), digest_size=8,
                           salt=int(seed).to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


cdef class Table:
    """A shard of an embedding table: f32[dim] by a 64-bit id, with the optimizer's state. Threads:
    any.

    name, seed: the initial value of a row depends only on these and the id.
    dtype: type in which weights are stored: f32, f16, bf16 or i8 (multiples of one power of two per
    row). The optimizer's state is f32, and so are rows that are read or written whole. An update of
    f16, bf16 and i8 is rounded at random, without bias, by name, seed, id and step.
    rows_max: bound of the rows.
    evicts: if the table is full, the oldest row by its stamp (of a sample of some twenty) is
    evicted for a new one; otherwise new ids are refused, and counted.
    admit_after: number of pushes, up to 255, at which an id gets a row; earlier gradients are
    ignored.

    Memory of a row: its weights (f32: 4 bytes x dim), 4 bytes x dim x slots of the optimizer, and
    20 to 24 bytes more. Errors: StatusError (BAD_INPUT) for settings out of range; (NO_MEMORY).
    """

    def __cinit__(self, str name not None, u32 dim, *, Optimizer optimizer=None,
                  Initializer initializer=None, u64 seed=0, str dtype not None="f32",
                  u64 rows_max=1 << 32, bint evicts=False, u32 admit_after=1):
        self.optimizer = optimizer or Optimizer("adagrad")
        self.initializer = initializer or Initializer("uniform")
        if not 1 <= dim + state_floats(self.optimizer.rule, dim) <= FLOATS_MAX:
            raise_for(BAD_INPUT,
                      f"table {name!r}: a row of {dim} floats and its state: 1 to {FLOATS_MAX} "
                      f"floats")
        if not 1 <= rows_max <= 1 << 32 or not 1 <= admit_after <= SEEN_MAX:
            raise_for(BAD_INPUT,
                      f"table {name!r}: rows_max is 1 to 2^32, admit_after 1 to {SEEN_MAX}")
        if dtype not in _DTYPES:
            raise_for(BAD_INPUT,
                      f"table {name!r}: no dtype {dtype!r}: rows are {', '.join(_DTYPES)}")
        self.name, self.seed, self.rows_max = name, seed, min(rows_max, (1 << 32) - 1)
        self.rows = <Rows*> aligned_new(sizeof(Rows))
        if self.rows == NULL:
            raise_for(NO_MEMORY, f"table {name!r}")
        self.rows.rule = self.optimizer.rule
        self.rows.start = self.initializer.of_rows(dim)
        self.rows.key = key_of(name, seed)
        self.rows.dim = dim
        self.rows.width = <u32> (dim + state_floats(self.optimizer.rule, dim))
        self.rows.stored = <Pulled> <int> _DTYPES[dtype][0]
        self.rows.evicts = evicts
        self.rows.admit_after = admit_after
        if not rows_init(self.rows, self.rows_max,
                         _counters(self.rows_max) if admit_after > 1 else 0):
            raise_for(NO_MEMORY, f"table {name!r} of {rows_max} rows")

    def __dealloc__(self):
        if self.rows != NULL:
            rows_free(self.rows)
            free(self.rows)

    def __len__(self):
        cdef u64 count
        with nogil:
            count = rows_count(self.rows)
        return count

    def __repr__(self):
        return (f"Table({self.name!r}, {self.rows.dim}, optimizer={self.optimizer!r}, "
                f"rows={len(self)})")

    @property
    def dim(self):
        return self.rows.dim

    @property
    def width(self):
        """Floats of a row with its state: the weights, then each slot of the optimizer."""
        return self.rows.width

    @property
    def row_bytes(self):
        """Bytes of a stored row with its state, without its entry in the index."""
        return self.rows.arena.row_bytes

    @property
    def steps(self):
        """Pushes so far. Adam corrects its bias by it, so it is part of a snapshot."""
        return self.pushes.load(relaxed)

    @steps.setter
    def steps(self, u64 value):
        self.pushes.store(value, relaxed)

    @property
    def bounded(self):
        """True if rows_max is enforced. A copy of a table gets new rows before the removals, so it
        is off there. Turning it on evicts the excess rows, if the table evicts."""
        return arena_limit(&self.rows.arena) <= self.rows_max

    @bounded.setter
    def bounded(self, bint value):
        with nogil:
            rows_bound(self.rows, self.rows_max if value else self.rows.arena.room)

    def alter(self, Optimizer optimizer not None, *, u64 rows_max, bint evicts):
        """Change the settings of the optimizer, not its kind, and the limit of rows, up to four
        times what the table began with. If it evicts, the oldest rows beyond the limit go.

        No push may run meanwhile. Raises StatusError (BAD_INPUT); nothing has changed then.
        """
        if optimizer.name != self.optimizer.name:
            raise_for(BAD_INPUT, f"table {self.name!r}: its optimizer is {self.optimizer.name}, "
                                 f"and its rows have the state of that")
        if not 1 <= rows_max or min(rows_max, (1 << 32) - 1) > self.rows.arena.room:
            raise_for(BAD_INPUT, f"table {self.name!r}: rows_max is 1 to {self.rows.arena.room}")
        bounded = self.bounded
        self.optimizer, self.rows.rule = optimizer, optimizer.rule
        self.rows.evicts, self.rows_max = evicts, min(rows_max, (1 << 32) - 1)
        if bounded:
            self.bounded = True

    @property
    def nbytes(self):
        cdef u64 count
        with nogil:
            count = rows_bytes(self.rows)
        return count

    def pull(self, ids, str dtype not None="f32", out=None, *, u32 stamp=0):
        """Return the weights of n ids, [n, dim]; of an id without a row, its initial weights.

        ids: i64[n] or u64[n], any values, repeated ones too. dtype: f32, f16, bf16 (as u16), or i8:
        then (i8[n, dim], f32[n]), to be multiplied; the type of the table returns the stored
        values. out: f32[n, dim] to fill instead. stamp: marks the rows as in use at that time,
        above 0.
        """
        cdef cnp.ndarray wanted = _ids(ids)
        cdef cnp.npy_intp n = cnp.PyArray_SIZE(wanted)
        cdef cnp.ndarray scales = None, made
        cdef Pulled kind
        if dtype not in _DTYPES:
            raise_for(BAD_INPUT, f"no dtype {dtype!r}: {', '.join(_DTYPES)}")
        kind, numpy_dtype = _DTYPES[dtype]
        made = _out(out, n, self.rows.dim) if out is not None else np.empty((n, self.rows.dim),
                                                                            numpy_dtype)
        if out is not None and kind != PULL_F32:
            raise_for(BAD_INPUT, f"`out` is f32, and dtype is {dtype}")
        if kind == PULL_I8:
            scales = np.empty(n, np.float32)
        cdef float* fresh = <float*> malloc(spare_floats(self.rows.dim) * sizeof(float))
        if fresh == NULL:
            raise_for(NO_MEMORY, f"table {self.name!r}")
        cdef const i64* each = <const i64*> cnp.PyArray_DATA(wanted)
        cdef void* to = cnp.PyArray_DATA(made)
        cdef float* by = <float*> cnp.PyArray_DATA(scales) if kind == PULL_I8 else NULL
        with nogil:
            rows_pull(self.rows, each, n, kind, to, by, fresh, stamp)
            free(fresh)
        return made if scales is None else (made, scales)

    def push(self, ids, gradients, *, double scale=1.0, u64 step=0, u32 stamp=0, list gone=None):
        """Take one step of the optimizer for each distinct id, by the sum of its gradients f32[n,
        dim].

        scale: factor of the rate, for a stale push.
        step: number of this step, from 1; 0: the next one.
        gone: list to which the ids of evicted rows, i64[evicted], are appended.

        Return a dict of counts: applied (distinct ids), made (new rows), unadmitted, refused (no
        room), evicted. Errors: StatusError (BAD_INPUT) for another shape, and for NaN or infinity,
        with the id; nothing has changed then.
        """
        cdef cnp.ndarray given = _ids(ids)
        cdef cnp.npy_intp n = cnp.PyArray_SIZE(given)
        cdef cnp.ndarray g = _out(np.ascontiguousarray(gradients, np.float32), n, self.rows.dim)
        if not (scale > 0.0 and isfinite(scale)):
            raise_for(BAD_INPUT, f"scale = {scale}: a finite number above 0")
        cdef const i64* each = <const i64*> cnp.PyArray_DATA(given)
        cdef const float* by = <const float*> cnp.PyArray_DATA(g)
        cdef Distinct distinct
        cdef Pushed pushed
        cdef Stride stride
        cdef float* sum = <float*> malloc(spare_floats(self.rows.dim) * sizeof(float))
        cdef u64 number
        cdef bint sound = False, room = False
        cdef cnp.ndarray left = np.empty(n if gone is not None and self.rows.evicts else 0,
                                         np.int64)
        memset(&pushed, 0, sizeof(pushed))
        if gone is not None and self.rows.evicts:
            pushed.gone, pushed.gone_max = <i64*> cnp.PyArray_DATA(left), n
        with nogil:
            sound = all_finite(by, <u64> n * self.rows.dim)
            if sound and sum != NULL:
                room = distinct_init(&distinct, each, n)
            if room:
                number = step if step else self.pushes.fetch_add(1, acq_rel) + 1
                stride = stride_of(&self.rows.rule, number, scale)
                rows_push(self.rows, &stride, each, &distinct, by, sum, number, stamp, &pushed)
                free(distinct.slots)
            free(sum)
        if not sound:
            bad = given[~np.isfinite(g).all(axis=1)][0]
            raise_for(BAD_INPUT,
                      f"table {self.name!r}: the gradient of id {bad} holds NaN or infinity")
        if not room:
            raise_for(NO_MEMORY, f"table {self.name!r}: a push of {n} gradients")
        if step and step > self.pushes.load(relaxed):
            self.pushes.store(step, relaxed)
        if pushed.gone != NULL and pushed.evicted:
            gone.append(left[:pushed.evicted])
        return _counts(&pushed)

    def write(self, ids, values, stamps=None):
        """Write rows as they are given: f32[n, dim], which keeps the present state, or f32[n,
        width] with the state. Return counts, as push does."""
        cdef cnp.ndarray given = _ids(ids)
        cdef cnp.npy_intp n = cnp.PyArray_SIZE(given)
        array = np.ascontiguousarray(values, np.float32)
        cdef u32 width = (self.rows.dim if array.ndim == 2
                          and array.shape[1] == self.rows.dim else self.rows.width)
        cdef cnp.ndarray rows = _out(array, n, width)
        cdef cnp.ndarray marks = np.ascontiguousarray(stamps if stamps is not None else np.zeros(n),
                                                      np.uint32)
        if cnp.PyArray_SIZE(marks) != n:
            raise_for(BAD_INPUT, f"{n} ids, and {marks.size} stamps")
        if not np.isfinite(rows).all():
            raise_for(BAD_INPUT, f"table {self.name!r}: a row holds NaN or infinity")
        cdef const i64* each = <const i64*> cnp.PyArray_DATA(given)
        cdef const float* by = <const float*> cnp.PyArray_DATA(rows)
        cdef const u32* at = <const u32*> cnp.PyArray_DATA(marks)
        cdef Pushed pushed
        memset(&pushed, 0, sizeof(pushed))
        with nogil:
            rows_write(self.rows, each, n, by, width, at, &pushed)
        return _counts(&pushed)

    def read(self, ids):
        """Return whole rows with their state: (found bool[n], rows f32[n, width], stamps u32[n]);
        zeros for those not found."""
        cdef cnp.ndarray given = _ids(ids)
        cdef cnp.npy_intp n = cnp.PyArray_SIZE(given)
        cdef cnp.ndarray rows = np.zeros((n, self.rows.width), np.float32)
        cdef cnp.ndarray stamps = np.zeros(n, np.uint32), found = np.zeros(n, np.uint8)
        cdef const i64* each = <const i64*> cnp.PyArray_DATA(given)
        cdef float* to = <float*> cnp.PyArray_DATA(rows)
        cdef u32* marks = <u32*> cnp.PyArray_DATA(stamps)
        cdef u8* there = <u8*> cnp.PyArray_DATA(found)
        with nogil:
            rows_read(self.rows, each, n, to, marks, there)
        return found.astype(bool), rows, stamps

    def walk(self, u64 position=0, u64 rows=4096):
        """Return some of the rows, from a position on: (ids i64[n], rows f32[n, width], stamps
        u32[n], next position or None).

        Each row is of one version, also while others push. A row that exists from the first call to
        the last is returned exactly once.
        """
        cdef u64 room = max(rows, <u64> GATHER_MAX), n, hash = position
        cdef cnp.ndarray ids = np.empty(room, np.int64), values = np.empty((room, self.rows.width),
                                                                           np.float32)
        cdef cnp.ndarray stamps = np.empty(room, np.uint32)
        cdef i64* each = <i64*> cnp.PyArray_DATA(ids)
        cdef float* to = <float*> cnp.PyArray_DATA(values)
        cdef u32* marks = <u32*> cnp.PyArray_DATA(stamps)
        cdef bint ended = False
        with nogil:
            n = rows_walk(self.rows, &hash, &ended, room, each, to, marks)
        return ids[:n], values[:n], stamps[:n], None if ended else hash

    def remove(self, ids):
        """Remove the rows of the ids. Return how many of the ids had a row."""
        cdef cnp.ndarray given = _ids(ids)
        cdef const i64* each = <const i64*> cnp.PyArray_DATA(given)
        cdef u64 n = cnp.PyArray_SIZE(given), gone
        with nogil:
            gone = rows_remove(self.rows, each, n)
        return gone

    def expire(self, u32 before):
        """Remove the rows with a smaller stamp. Return how many were removed."""
        cdef u64 gone
        with nogil:
            gone = rows_expire(self.rows, before)
        return gone

    def reserve(self, u64 rows):
        """Reserve memory for so many more rows and touch its pages, on a thread that no request
        waits for. Errors: StatusError (NO_MEMORY)."""
        cdef bint made
        with nogil:
            made = arena_reserve(&self.rows.arena, rows)
        if not made:
            raise_for(NO_MEMORY,
                      f"table {self.name!r}: {rows} more rows of {self.row_bytes} bytes")


cdef cnp.ndarray _ids(ids):
    """Return the ids as a contiguous i64[n]; u64 as the same bits."""
    array = np.asarray(ids)
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    elif array.dtype.kind not in "iu" and array.size:
        raise_for(BAD_INPUT, f"ids are whole numbers, not {array.dtype}")
    if array.ndim != 1:
        raise_for(BAD_INPUT, f"ids: expected [n], got {list(array.shape)}")
    return np.ascontiguousarray(array, np.int64)


cdef cnp.ndarray _out(array, cnp.npy_intp n, u32 width):
    if (array.dtype != np.float32 or array.shape != (n, width)
        or not cnp.PyArray_IS_C_CONTIGUOUS(array)):
        raise_for(BAD_INPUT,
                  f"expected contiguous f32[{n}, {width}], got {given_type(array)}")
    return array


cdef dict _counts(const Pushed* pushed):
    return {"applied": pushed.applied, "made": pushed.made, "unadmitted": pushed.unadmitted,
            "refused": pushed.refused,
            "evicted": pushed.evicted}


def _counters(rows_max):
    """Return the size of the sketch that counts ids without a row: some counters for each row, up
    to 256 MiB."""
    return 1 << min(max(4 * rows_max - 1, 1023).bit_length(), 28)
