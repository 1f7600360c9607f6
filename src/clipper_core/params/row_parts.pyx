"""Ids and rows of a worker: each id once, and by shard."""
from libc.stdlib cimport free
from libc.string cimport memcpy
from libcpp.vector cimport vector

cimport numpy as cnp

import numpy as np

from clipper_core.params.embedding_rows cimport Distinct, distinct_init
from clipper_core.params.optimizer cimport add_row
from clipper_core.runtime.machine cimport i64, u32, u64
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, raise_for

cnp.import_array()

cdef enum:
    SHARDS_MAX = 65536


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


def distinct(ids):
    """Return (i64[m]: each id once, in the order in which they first come; i64[n]: the place of
    each id among them).

    ids: i64[n] or u64[n]. Takes time in proportion to n. Raises StatusError (BAD_INPUT,
    NO_MEMORY).
    """
    cdef cnp.ndarray given = _ids(ids)
    cdef u64 n = cnp.PyArray_SIZE(given), u
    cdef u32 i
    cdef const i64* each = <const i64*> cnp.PyArray_DATA(given)
    cdef cnp.ndarray where = np.empty(n, np.int64), once
    cdef i64* places = <i64*> cnp.PyArray_DATA(where)
    cdef i64* to
    cdef Distinct d
    if not distinct_init(&d, each, n):
        raise_for(NO_MEMORY, f"{n} ids")
    once = np.empty(d.n, np.int64)
    to = <i64*> cnp.PyArray_DATA(once)
    with nogil:
        for u in range(d.n):
            i = d.first[u]
            to[u] = each[i]
            while i != <u32> 0xFFFFFFFF:
                places[i] = u
                i = d.next[i]
        free(d.slots)
    return once, where


def combine(ids, gradients):
    """Return (i64[m]: each id once; f32[m, dim]: the sum of its gradients).

    ids: i64[n] or u64[n]. gradients: f32[n, dim]. Raises StatusError (BAD_INPUT, NO_MEMORY).
    """
    cdef cnp.ndarray given = _ids(ids)
    cdef cnp.ndarray rows = np.ascontiguousarray(gradients, np.float32)
    cdef u64 n = cnp.PyArray_SIZE(given), dim, u
    cdef u32 i
    if rows.ndim != 2 or rows.shape[0] != n:
        raise_for(BAD_INPUT,
                  f"gradients: expected f32[{n}, dim], got"
                  f" {[rows.shape[k] for k in range(rows.ndim)]}")
    dim = rows.shape[1]
    cdef const i64* each = <const i64*> cnp.PyArray_DATA(given)
    cdef const float* values = <const float*> cnp.PyArray_DATA(rows)
    cdef Distinct d
    if not distinct_init(&d, each, n):
        raise_for(NO_MEMORY, f"{n} ids")
    cdef cnp.ndarray once = np.empty(d.n, np.int64), sums = np.empty((d.n, dim), np.float32)
    cdef i64* to = <i64*> cnp.PyArray_DATA(once)
    cdef float* sum = <float*> cnp.PyArray_DATA(sums)
    with nogil:
        for u in range(d.n):
            i = d.first[u]
            to[u] = each[i]
            memcpy(sum + u * dim, values + i * dim, dim * sizeof(float))
            while d.next[i] != <u32> 0xFFFFFFFF:
                i = d.next[i]
                add_row(sum + u * dim, values + i * dim, dim)
        free(d.slots)
    return once, sums


def split_parts(parts, u32 shards):
    """Return (shard, numbers of the parts that have ids there, how many ids each, i64[m]: the ids,
    i64[m]: the place of each in its part) for each shard that has some.

    parts: sequence of ids, i64[n] or u64[n]. An id is on the shard id mod `shards`. Ids of one part
    keep their order. Raises StatusError (BAD_INPUT).
    """
    cdef list given = [_ids(part) for part in parts]
    cdef u64 count = len(given), p, i, n, shard
    cdef vector[u64] sizes
    cdef vector[i64*] ids_to, places_to
    cdef const i64* each
    cdef list out = [], whole = []
    if not 1 <= shards <= SHARDS_MAX:
        raise_for(BAD_INPUT, f"{shards} shards")
    sizes.resize(count * shards)
    for p in range(count):
        each = <const i64*> cnp.PyArray_DATA(<cnp.ndarray> given[p])
        n = cnp.PyArray_SIZE(<cnp.ndarray> given[p])
        with nogil:
            for i in range(n):
                sizes[_shard_of(each[i], shards) * count + p] += 1
    for shard in range(shards):
        n = 0
        for p in range(count):
            n += sizes[shard * count + p]
        ids, places = np.empty(n, np.int64), np.empty(n, np.int64)
        whole.append((ids, places))
        ids_to.push_back(<i64*> cnp.PyArray_DATA(<cnp.ndarray> ids))
        places_to.push_back(<i64*> cnp.PyArray_DATA(<cnp.ndarray> places))
    for p in range(count):
        each = <const i64*> cnp.PyArray_DATA(<cnp.ndarray> given[p])
        n = cnp.PyArray_SIZE(<cnp.ndarray> given[p])
        with nogil:
            for i in range(n):
                shard = _shard_of(each[i], shards)
                ids_to[shard][0], places_to[shard][0] = each[i], <i64> i
                ids_to[shard] += 1
                places_to[shard] += 1
    for shard in range(shards):
        numbers = [p for p in range(count) if sizes[shard * count + p]]
        if numbers:
            ids, places = whole[shard]
            out.append((shard, numbers, [sizes[shard * count + p] for p in numbers], ids, places))
    return out


cdef inline u64 _shard_of(i64 id, u32 shards) noexcept nogil:
    cdef i64 rest = id - (id // <i64> shards) * <i64> shards
    return <u64> (rest + <i64> shards if rest < 0 else rest)


def put_rows(cnp.ndarray out not None, cnp.ndarray places not None, cnp.ndarray rows not None):
    """Copy rows, f32[m, dim], to their places, i64[m], in out, f32[n, dim]; all contiguous.

    Raises StatusError (BAD_INPUT) for other shapes, and for a place outside of `out`.
    """
    cdef u64 m = cnp.PyArray_SIZE(places), dim, i, n
    cdef const i64* at = <const i64*> cnp.PyArray_DATA(places)
    cdef bint sound = True
    if not (out.ndim == 2 and rows.ndim == 2 and out.dtype == rows.dtype
            and out.dtype == np.float32 and places.dtype == np.int64 and rows.shape[0] == m
            and out.shape[1] == rows.shape[1]
            and all(cnp.PyArray_IS_C_CONTIGUOUS(a) for a in (out, places, rows))):
        raise_for(BAD_INPUT, "rows, places and what they go to do not fit each other")
    n, dim = out.shape[0], out.shape[1]
    cdef float* to = <float*> cnp.PyArray_DATA(out)
    cdef const float* each = <const float*> cnp.PyArray_DATA(rows)
    with nogil:
        for i in range(m):
            if <u64> at[i] >= n:
                sound = False
                break
            memcpy(to + <u64> at[i] * dim, each + i * dim, dim * sizeof(float))
    if not sound:
        raise_for(BAD_INPUT, f"a place outside of {n} rows")
