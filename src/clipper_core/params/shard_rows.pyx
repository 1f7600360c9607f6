"""Pulls and pushes of rows: of one table, or of several in one message, with dense variables.

A pull is read where the rows lie into the bytes that leave; a push is applied from the bytes that
came. A message about several tables is looked through before anything of it is done: a refusal
changes nothing. What a message about one table says is what one about several says of one.

A step is applied as one: it makes one version, and whoever holds `still` sees all of it or nothing.
"""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from clipper_core.params.embedding_rows cimport (
    PULL_I8, Pulled, distinct_init, rows_pull, rows_push,
)
from clipper_core.params.optimizer cimport all_finite, optimizer_step, stride_of
from clipper_core.params.shard_answers cimport (
    answer_push, answer_room, push_is_known, push_is_new, shard_refuse,
)
from clipper_core.params.shard_state cimport (
    DENSE_TABLE, OVER_QUOTA, TABLES_MAX, DenseVariable, PartWork, Place, ShardPart, counts_push,
    kDenseBit, padded, place_of, quotas_exceeded,
)
from clipper_core.params.shard_stream cimport replay_is_exact, replay_send
from clipper_core.runtime.allocation cimport make_room
from clipper_core.runtime.histogram cimport count, note
from clipper_core.runtime.machine cimport acq_rel, i64, relaxed, u32, u64, u8
from clipper_core.runtime.status cimport BAD_FRAME, BAD_INPUT, NO_MEMORY, UNKNOWN

cdef int[4] _element = [4, 2, 2, 1]    # bytes, by kind of pull


# -- pull
# --------------------------------------------------------------------------------------------------

cdef inline u64 _data_bytes(Place* place, u64 n, u8 dtype) noexcept nogil:
    return padded(n * place.rows.dim * _element[dtype])


cdef inline u64 _scale_bytes(u64 n, u8 dtype) noexcept nogil:
    return padded(4 * n) if dtype == PULL_I8 else 0


cdef inline Place* _place(ShardLoopState* s, u32 table) noexcept nogil:
    """Of a number that was looked for."""
    return &s.places[table & (TABLES_MAX - 1)]


cdef void _pull(ShardLoopState* s, const ShardPart* part, const i64* ids, u8 dtype,
                u8* to) noexcept nogil:
    cdef u32 table = part.table & (TABLES_MAX - 1)
    cdef Place* place = &s.places[table]
    cdef u64 n = part.n, data = _data_bytes(place, n, dtype), scales = _scale_bytes(n, dtype)
    cdef u64 whole = data + scales, missed
    if whole:
        memset(to + data - min(<u64> 8, data), 0, min(<u64> 8, data))
        memset(to + whole - min(<u64> 8, whole), 0, min(<u64> 8, whole))
    missed = rows_pull(place.rows, ids, n, <Pulled> dtype, to, <float*> (to + data), place.spare,
                       s.stamp.load(relaxed))
    note(&s.counts.tables[table].pulled, n)
    note(&s.counts.tables[table].missed, missed)
    s.pulled.fetch_add(n, relaxed)


cdef void pull_rows(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil:
    cdef ShardPart part
    cdef u8* to
    part.table, part.n = h.table, h.rows
    if h.dtype > PULL_I8 or h.payload_bytes != 8 * <u64> part.n:
        shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return
    to = answer_room(s, c, h, _data_bytes(_place(s, part.table), part.n, h.dtype)
                     + _scale_bytes(part.n, h.dtype))
    if to == NULL:
        return
    _pull(s, &part, <const i64*> payload, h.dtype, to)
    s.pulls.fetch_add(1, relaxed)


cdef void pull_tables(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      const u8* payload) noexcept nogil:
    cdef const ShardPart* parts = <const ShardPart*> payload
    cdef u64 i, n = h.rows, said = 8 * n, whole = 0
    cdef const i64* ids = <const i64*> (payload + 8 * n)
    cdef u8* to
    if h.dtype > PULL_I8 or said > h.payload_bytes:
        shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return
    for i in range(n):
        if place_of(s, parts[i].table) < 0:
            shard_refuse(s, c, h, UNKNOWN, parts[i].table)
            return
        said += 8 * <u64> parts[i].n
        if said > h.payload_bytes:
            break
        whole += (_data_bytes(_place(s, parts[i].table), parts[i].n, h.dtype)
                  + _scale_bytes(parts[i].n, h.dtype))
    if said != h.payload_bytes:
        shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return
    to = answer_room(s, c, h, whole)
    if to == NULL:
        return
    for i in range(n):
        _pull(s, &parts[i], ids, h.dtype, to)
        ids += parts[i].n
        to += (_data_bytes(_place(s, parts[i].table), parts[i].n, h.dtype)
               + _scale_bytes(parts[i].n, h.dtype))
    s.pulls.fetch_add(1, relaxed)


cdef void pull_dense(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil:
    """Dense variables that a version from `model` on has changed; the payload says first whether
    there are any at all."""
    cdef ShardHead asked = h[0]
    cdef ShardPart part
    cdef const DenseVariable* one
    cdef u64 i, floats = 0
    cdef u64 has_model
    cdef u8* to
    cdef u8* values
    s.still.lock()
    has_model = s.has_model
    asked.rows, asked.flags = 0, 0
    for i in range(s.variables.size()):
        one = &s.variables[i]
        if one.marks[1] >= h.model:
            asked.rows += 1
            floats += padded(4 * one.n)
    to = answer_room(s, c, &asked, 8 + 8 * <u64> asked.rows + floats)
    if to != NULL:
        memcpy(to, &has_model, 8)
        values = to + 8 + 8 * <u64> asked.rows
        to += 8
        for i in range(s.variables.size()):
            one = &s.variables[i]
            if one.marks[1] >= h.model:
                part.table, part.n = <u32> i, <u32> one.n
                memcpy(to, &part, 8)
                memcpy(values, one.value, 4 * one.n)
                memset(values + 4 * one.n, 0, padded(4 * one.n) - 4 * one.n)
                to += 8
                values += padded(4 * one.n)
    s.still.unlock()


# -- push
# --------------------------------------------------------------------------------------------------

cdef i64 _first_bad(const i64* ids, const float* gradients, u64 n, u64 dim) noexcept nogil:
    cdef u64 i
    for i in range(n):
        if not all_finite(gradients + i * dim, dim):
            return ids[i]
    return 0


cdef bint _look_through(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                        const ShardPart* parts, u64 n, const u8* at,
                        const u8* end) noexcept nogil:
    """Whether all parts fit their tables and variables, and their gradients are finite; else it is
    refused. What is to be done with each is in `works` then."""
    cdef PartWork work
    cdef u64 i, floats
    cdef i64 place
    s.works.clear()
    if not make_room(s.works, n):
        shard_refuse(s, c, h, NO_MEMORY, <i64> n)
        return False
    memset(&work, 0, sizeof(work))
    for i in range(n):
        work.table, work.n = parts[i].table, parts[i].n
        if work.table & kDenseBit:
            work.table ^= kDenseBit
            if work.table >= s.variables.size() or s.variables[work.table].n != work.n:
                shard_refuse(s, c, h, BAD_FRAME, work.n)
                return False
            floats, work.variable = work.n, True
        else:
            place = place_of(s, work.table)
            if place < 0:
                shard_refuse(s, c, h, UNKNOWN, work.table)
                return False
            work.table = <u32> place
            floats, work.variable = <u64> work.n * s.places[work.table].rows.dim, False
            work.ids = <const i64*> at
            if <u64> (end - at) < 8 * <u64> work.n:
                shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
                return False
            at += 8 * <u64> work.n
        work.gradients = <const float*> at
        if <u64> (end - at) < padded(4 * floats):
            shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
            return False
        at += padded(4 * floats)
        s.works.push_back(work)
    if at != end:
        shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return False
    return True


cdef bint _is_finite(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil:
    cdef PartWork* work
    cdef u64 dim
    cdef u64 i
    for i in range(s.works.size()):
        work = &s.works[i]
        dim = 1 if work.variable else s.places[work.table].rows.dim
        if not all_finite(work.gradients, work.n * dim):
            shard_refuse(s, c, h, BAD_INPUT, 0 if work.variable
                         else _first_bad(work.ids, work.gradients, work.n, dim))
            return False
    return True


cdef void _forget_works(ShardLoopState* s) noexcept nogil:
    cdef u64 i
    for i in range(s.works.size()):
        free(s.works[i].distinct.slots)
        free(s.works[i].pushed.gone)
    s.works.clear()


cdef bint _has_memory(ShardLoopState* s) noexcept nogil:
    cdef PartWork* work
    cdef u64 i
    for i in range(s.works.size()):
        work = &s.works[i]
        if work.variable:
            continue
        if not distinct_init(&work.distinct, work.ids, work.n):
            work.distinct.slots = NULL
            return False
        if s.places[work.table].rows.evicts:
            work.pushed.gone = <i64*> malloc((<u64> work.n + 1) * sizeof(i64))
            work.pushed.gone_max = work.n
            if work.pushed.gone == NULL:
                return False
    return True


cdef void _count_steps(ShardLoopState* s, double scale) noexcept nogil:
    """Which step each part is, and by what it is multiplied."""
    cdef PartWork* work
    cdef u64 i
    cdef u32 stamp = s.stamp.load(relaxed)
    for i in range(s.works.size()):
        work = &s.works[i]
        work.stamp = stamp
        if work.variable:
            s.variables[work.table].marks[0] += 1
            work.steps = s.variables[work.table].marks[0]
            work.stride = stride_of(&s.dense_rule, work.steps, scale)
        else:
            work.steps = s.places[work.table].pushes.fetch_add(1, acq_rel) + 1
            work.stride = stride_of(&s.places[work.table].rows.rule, work.steps, scale)


cdef void _apply_rows(ShardLoopState* s, PartWork* work) noexcept nogil:
    cdef Place* place = &s.places[work.table]
    rows_push(place.rows, &work.stride, work.ids, &work.distinct, work.gradients, place.spare,
              work.steps, work.stamp, &work.pushed)
    s.pushed.fetch_add(work.pushed.applied, relaxed)
    counts_push(s.counts, work.table, work.pushed.applied, work.pushed.made,
                work.pushed.unadmitted, work.pushed.refused, work.pushed.evicted)


cdef void _apply_dense(ShardLoopState* s, const PartWork* work, u64 version) noexcept nogil:
    cdef DenseVariable* one = &s.variables[work.table]
    one.marks[1] = version
    optimizer_step(s.dense_rule, work.stride, one.value, one.state, one.n, work.gradients, one.n)


cdef void _note(ShardLoopState* s, const ShardHead* h) noexcept nogil:
    """Under the log's guard: the last entry is the push's own, so followers know of the push when
    they have all of it."""
    cdef PartWork* work
    cdef u64 i, last = s.works.size() - 1 if s.works.size() else 0
    cdef u64 worker, sequence
    cdef i64 number = 0
    for i in range(s.works.size()):
        work = &s.works[i]
        if work.pushed.gone != NULL and work.pushed.evicted:
            s.log.append(work.table, work.pushed.gone, <u32> work.pushed.evicted, 0, 0)
        worker, sequence = (h.worker if i == last else 0), (h.sequence if i == last else 0)
        if work.variable:
            number = work.table
            s.log.append(DENSE_TABLE, &number, 1, worker, sequence)
        else:
            s.log.append(work.table, work.ids, work.n, worker, sequence)
    if not s.works.size():
        s.log.append(DENSE_TABLE, &number, 0, h.worker, h.sequence)


cdef bint _send_ahead(ShardLoopState* s, const ShardHead* h, u64 version, const u8* data,
                      const u8* end) noexcept nogil:
    """To followers that apply it themselves; it is noted then."""
    cdef u64 begin
    if not (s.replays and replay_is_exact(s, <u64> (end - data))):
        return False
    s.log.guard.lock()
    begin = s.log.position()
    _note(s, h)
    s.log.guard.unlock()
    replay_send(s, h, begin, version, data, end)
    return True


cdef bint _apply(ShardLoopState* s, ShardConnection* c, const ShardHead* h, double scale,
                 const u8* data, const u8* end) noexcept nogil:
    """False: a quota would be exceeded, and nothing has changed."""
    cdef u32[4] counted = [0, 0, 0, 0]
    cdef i64 about = 0
    cdef PartWork* work
    cdef u64 i, version
    cdef bint noted
    s.still.lock()
    if quotas_exceeded(s, s.works.data(), s.works.size(), &about):
        s.still.unlock()
        shard_refuse(s, c, h, OVER_QUOTA, about)
        return False
    version = s.model.load(relaxed) + 1
    _count_steps(s, scale)
    noted = _send_ahead(s, h, version, data, end)
    for i in range(s.works.size()):
        work = &s.works[i]
        if work.variable:
            _apply_dense(s, work, version)
            continue
        _apply_rows(s, work)
        counted[0] += <u32> work.pushed.applied
        counted[1] += <u32> work.pushed.unadmitted
        counted[2] += <u32> work.pushed.refused
        counted[3] += <u32> work.pushed.evicted
    s.model.store(version, relaxed)
    s.log.guard.lock()
    if not noted or counted[2] or counted[3]:   # it went otherwise: their rows follow
        _note(s, h)
    answer_push(s, c, h, counted)
    s.log.guard.unlock()
    s.still.unlock()
    return True


cdef bint _push(ShardLoopState* s, ShardConnection* c, const ShardHead* h, const ShardPart* parts,
                u64 n, const u8* data, const u8* end) noexcept nogil:
    """Whether it was applied now."""
    cdef double scale = 1.0
    cdef bint ready
    if not (_look_through(s, c, h, parts, n, data, end) and push_is_new(s, c, h, &scale)
            and _is_finite(s, c, h)):
        return False
    ready = push_is_known(s, h) and _has_memory(s)
    if ready:
        ready = _apply(s, c, h, scale, data, end)
    else:
        shard_refuse(s, c, h, NO_MEMORY, h.rows)
    _forget_works(s)
    return ready


cdef void push_rows(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil:
    cdef ShardPart part
    part.table, part.n = h.table, h.rows
    if _push(s, c, h, &part, 1, payload, payload + h.payload_bytes):
        s.pushes.fetch_add(1, relaxed)


cdef void push_step(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                    const u8* payload) noexcept nogil:
    cdef u64 n = h.rows
    if 8 * n > h.payload_bytes:
        shard_refuse(s, c, h, BAD_FRAME, h.payload_bytes)
        return
    if _push(s, c, h, <const ShardPart*> payload, n, payload + 8 * n, payload + h.payload_bytes):
        count(&s.counts.taken, 1)
