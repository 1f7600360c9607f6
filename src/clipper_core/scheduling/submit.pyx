"""The last step of submitting queries, for callers with Python (engine/model) and without
(http/http_route)."""
from cpython.exc cimport PyErr_CheckSignals
from libc.string cimport memcpy, memset

from clipper_core.cache.clock_cache cimport (
    CELLS_MAX, Key, cache_lookup_many, key_marked, key_of, projection_cells,
)
from clipper_core.results.completion cimport (
    block_drop, completion_wake_loop_thread, waiter_enters, waiter_epoch, waiter_leaves,
)
from clipper_core.runtime.dtype cimport F64
from clipper_core.runtime.histogram cimport count
from clipper_core.runtime.machine cimport futex_wait, i32, monotonic_us, relaxed
from clipper_core.runtime.ring cimport ring_row
from clipper_core.runtime.status cimport CANCELLED, FULL, NO_MEMORY, OK, PENDING, TOO_LARGE
from clipper_core.scheduling.admission cimport lane_offer, lane_offer_cost, lane_wait_us
from clipper_core.scheduling.lane cimport (
    Task, chunk_claim, chunk_publish, lane_has_news, lane_new, slots_fill, submitter_enter,
    submitter_leave,
)
from clipper_core.scheduling.model_state cimport (
    LANE_CLASSES, BandLanes, band_lanes, band_lanes_make, row_cost,
)
from clipper_core.wire.prediction cimport value_drop

# -- Submitting arrays: hash, look up, pack.

cdef enum:
    LOOK_ROWS = 256             # rows that are looked up together
    LOOK_BYTES = 65536          # bytes of rows made of columns at a time, so that they stay in
                                # the processor's cache
    CHUNK_BYTES = 262144        # most bytes of a chunk: copying them takes some 100 us
    CHUNK_ROWS_MAX = 1024
    PIECES_MAX = 1024           # of a lane
    RUN_ROWS = 65536            # rows of an array between two checks for signals
    RUN_BYTES = 33554432
    NOGIL_BYTES = 65536         # fewer bytes are hashed and copied without releasing the GIL,
                                # because that is faster
    QUEUE_WAIT_US = 2000        # interval at which a submitter checks a full lane for space

cdef struct Look:               # rows [at, at + n) of an array
    u32 n
    const u8* rows              # NULL: they are made of columns directly in the chunk
    Key[LOOK_ROWS] keys
    Value[LOOK_ROWS] values
    u8[LOOK_ROWS] found

cdef struct Packing:            # the chunk that is being filled
    Task* task                  # NULL: none is
    u64 pos


cdef u32 chunk_rows_of(u64 row_bytes) noexcept nogil:
    return <u32> min(max(CHUNK_BYTES // row_bytes, <u64> 1), <u64> CHUNK_ROWS_MAX)


cdef u64 chunk_cells_of(u64 row_bytes, u64 bytes_max) noexcept nogil:
    cdef u64 cell_bytes = chunk_rows_of(row_bytes) * (row_bytes + sizeof(Key) + 4)
    cdef u64 cells = PIECES_MAX
    while cells > 2 and cells * cell_bytes > bytes_max:
        cells >>= 1
    return cells


cdef u32 look_rows_of(u64 row_bytes) noexcept nogil:
    return <u32> min(max(LOOK_BYTES // row_bytes, <u64> 1), <u64> LOOK_ROWS)


cdef void _gather(const Intake* intake, u32 first, u32 n, u8* to) noexcept nogil:
    """Copy rows [first, first + n) of columns, one after another."""
    cdef const TensorColumn* column
    cdef const TensorColumn* end = intake.columns + intake.column_count
    cdef i64 i
    for i in range(first, <i64> first + n):
        column = intake.columns
        while column < end:
            if column.bytes == 8:
                memcpy(to + column.offset, column.data + i * column.stride, 8)
            else:
                memcpy(to + column.offset, column.data + i * column.stride, column.bytes)
            if column.padding:
                memset(to + column.offset + column.bytes, 0, column.padding)
            column += 1
        to += intake.row_bytes


cdef Key _key(const Intake* intake, u32 i, const u8* row) noexcept nogil:
    cdef i32[CELLS_MAX] cells
    cdef Key key
    if intake.near != NULL and projection_cells(intake.near[0], row, cells):
        return key_of(intake.cache, intake.near_uid, intake.salt, cells, 4 * intake.near.count)
    key = key_of(intake.cache, intake.uid, intake.salt, row, intake.row_bytes)
    return key_marked(key, intake.marks[i]) if intake.marks != NULL and intake.marks[i] else key


cdef void _look(Intake* intake, Look* look, u32 rows_max) noexcept nogil:
    cdef u32 i
    look.n = min(min(intake.n - intake.at, rows_max), <u32> LOOK_ROWS)
    look.rows = NULL
    if intake.columns == NULL:
        look.rows = intake.rows + intake.at * intake.row_bytes
    elif intake.cache != NULL:
        look.n = min(look.n, look_rows_of(intake.row_bytes))
        look.rows = intake.scratch
        _gather(intake, intake.at, look.n, intake.scratch)
    memset(look.found, 0, look.n)
    if intake.cache == NULL:
        return
    for i in range(look.n):
        look.keys[i] = _key(intake, intake.at + i, look.rows + i * intake.row_bytes)
    cache_lookup_many(intake.cache, look.keys, look.n, look.values, look.found)


cdef void _settle(Intake* intake, Look* look, u32 n) noexcept nogil:
    """Handle the first n of them: hits end here. The results for the others are dropped; they are
    looked up again later."""
    cdef u32 i, hits = 0
    for i in range(n):
        hits += look.found[i]
    for i in range(n, look.n):
        if look.found[i]:
            value_drop(&look.values[i])
    if hits:
        slots_fill(intake.lanes.completion, intake.block, intake.slot + intake.at, n, look.values,
                   look.found, OK)
        block_drop(intake.lanes.completion, intake.block, hits)
        count(&intake.tally.hits, hits)
    intake.at += n


cdef void _finish_chunk(Intake* intake, Packing* packing) noexcept nogil:
    if packing.task != NULL:
        chunk_publish(intake.lane, packing.pos)
        lane_has_news(intake.lanes, intake.lane)
        packing.task = NULL


cdef bint _begin_chunk(Intake* intake, Packing* packing) noexcept nogil:
    packing.task = chunk_claim(intake.lane, &packing.pos)
    if packing.task == NULL:
        return False
    packing.task.block = intake.block
    packing.task.bytes = <u32> intake.row_bytes
    packing.task.submit_us = intake.now_us
    packing.task.salt = intake.salt
    packing.task.deadline_us = intake.deadline_us
    packing.task.keyed = intake.cache != NULL
    return True


cdef u32 _pack(Intake* intake, Packing* packing, Look* look, u32 first, u32 end) noexcept nogil:
    """Pack rows [first, end) of those looked up, all of them misses, into chunks. Return the first
    row for which there is no space, or `end`."""
    cdef u32 i, n, slot
    cdef Task* task
    cdef u8* to
    while first < end:
        if packing.task == NULL and not _begin_chunk(intake, packing):
            return first
        task = packing.task
        n = min(end - first, intake.lane.chunk_rows - task.rows)
        to = <u8*> ring_row(intake.lane.ring, packing.pos) + task.rows * intake.row_bytes
        if look.rows != NULL:
            memcpy(to, look.rows + first * intake.row_bytes, n * intake.row_bytes)
        else:
            _gather(intake, intake.at + first, n, to)
        slot = intake.slot + intake.at + first
        for i in range(n):
            task.slots[task.rows + i] = slot + i
        if intake.cache != NULL:
            memcpy(&task.keys[task.rows], &look.keys[first], n * sizeof(Key))
        task.rows += n
        first += n
        if task.rows == intake.lane.chunk_rows:
            _finish_chunk(intake, packing)
    return end


cdef u32 _pack_misses(Intake* intake, Packing* packing, Look* look) noexcept nogil:
    """Pack the misses into chunks. Return the first row without room, or the number of rows."""
    cdef u32 first = 0, end
    while first < look.n:
        if look.found[first]:
            first += 1
            continue
        end = first + 1
        while end < look.n and not look.found[end]:
            end += 1
        first = _pack(intake, packing, look, first, end)
        if first < end:
            return first
    return look.n


cdef void intake_run(Intake* intake, u32 rows_max) noexcept nogil:
    cdef Look look
    cdef Packing packing
    cdef u32 stop = intake.at + min(intake.n - intake.at, rows_max)
    cdef u32 done
    packing.task = NULL
    if not submitter_enter(intake.lanes[0], intake.refusing[0]):
        return
    while intake.at < stop and intake.refusing.load(relaxed) == 0:
        _look(intake, &look, stop - intake.at)
        done = _pack_misses(intake, &packing, &look)
        _settle(intake, &look, done)
        if done < look.n:
            break
    _finish_chunk(intake, &packing)
    submitter_leave(intake.lanes[0])


cdef void intake_end(Intake* intake, Status status) noexcept nogil:
    cdef Look look
    cdef Value[LOOK_ROWS] nothing
    cdef u32 i, at, misses
    memset(&nothing, 0, sizeof(nothing))
    while intake.at < intake.n:
        _look(intake, &look, intake.n)
        at = intake.slot + intake.at
        _settle(intake, &look, look.n)
        misses = 0
        for i in range(look.n):
            look.found[i] = not look.found[i]
            misses += look.found[i]
        slots_fill(intake.lanes.completion, intake.block, at, look.n, nothing, look.found, status)
        count(&intake.tally.refused[<u32> status], misses)
        block_drop(intake.lanes.completion, intake.block, misses)


# -- feeding
# --------------------------------------------------------------------------------------------------

cdef int wait_for_room(Lanes* lanes, Lane* lane, atomic[u32]* refusing, u64 until_us) except -1:
    cdef u32 epoch
    while (lane.ring.cells.full() and monotonic_us() < until_us and refusing.load(relaxed) == 0
           and lanes.completion.dead.load(relaxed) == 0):
        waiter_enters(lanes.completion[0])
        epoch = waiter_epoch(lanes.completion[0])
        if lane.ring.cells.full():
            completion_wake_loop_thread(lanes.completion)
            with nogil:
                futex_wait(&lanes.completion.epoch, epoch, QUEUE_WAIT_US)
        waiter_leaves(lanes.completion[0])
        PyErr_CheckSignals()
    return 0


cdef int intakes_feed(vector[Intake]& intakes, u64 until_us) except -1:
    cdef size_t i
    cdef Status why = PENDING
    try:
        while intakes.size() and why == PENDING:
            i = 0
            while i < intakes.size():
                _run(&intakes[i])
                if intakes[i].at == intakes[i].n:
                    intakes.erase(intakes.begin() + i)
                else:
                    i += 1
            PyErr_CheckSignals()
            if intakes.size():
                why = _what_now(&intakes[0], until_us)
    except BaseException:               # a signal's
        intakes_end(intakes, CANCELLED)
        raise
    intakes_end(intakes, why)
    return 0


cdef void _run(Intake* intake) noexcept:
    cdef u32 rows_max = <u32> min(max(RUN_BYTES // intake.row_bytes, <u64> 1), <u64> RUN_ROWS)
    if intake.lane == NULL:
        return
    if (intake.n - intake.at) * (intake.row_bytes + 32) < NOGIL_BYTES:
        intake_run(intake, rows_max)
    else:
        with nogil:
            intake_run(intake, rows_max)


cdef Status _what_now(Intake* intake, u64 until_us) except? OK:
    """Wait for space. Return PENDING to continue, or the reason why the remaining rows are refused.
    """
    cdef Status why = <Status> (intake.lanes.completion.dead.load(relaxed)
                                or intake.refusing.load(relaxed))
    if why != PENDING:
        return why
    if intake.lane == NULL:
        return NO_MEMORY
    if not intake.lane.ring.cells.full():
        return PENDING
    if not intake.patient or monotonic_us() >= until_us:
        return FULL
    wait_for_room(intake.lanes, intake.lane, intake.refusing, until_us)
    return PENDING


cdef int intakes_end(vector[Intake]& intakes, Status status) noexcept:
    cdef size_t i
    for i in range(intakes.size()):
        intake_end(&intakes[i], status)
    return 0


cdef extern from *:
    """
    static inline int clipper_log2(unsigned long long n) { return 63 - __builtin_clzll(n | 1); }
    """
    int log2_of "clipper_log2"(u64 n) noexcept nogil


cdef Status _shut(EngineState* e) noexcept nogil:
    """Return the reason why no row is accepted, or PENDING."""
    return <Status> (e.completion.dead.load(relaxed) or e.refusing.load(relaxed))


cdef u64 row_bytes_end(const EngineState* e) noexcept nogil:
    return min(min(e.limits.payload_bytes_max, e.row_bytes_max) + 1, <u64> 1 << 32)


cdef void lane_prepare(EngineState* e, ModelState* m, u64 slo_us, u32 band) noexcept nogil:
    cdef int klass = log2_of(slo_us)
    cdef BandLanes* b
    if _shut(e) != PENDING or not band_lanes_make(m, band):
        return
    b = band_lanes(m, band)
    if b.lanes[klass] == NULL:
        b.lanes[klass] = lane_new(e.lanes, m.index, <u64> 2 << klass,
                                  <u64> 1 << log2_of(m.lane_rows | 2), m.spec.row_bytes, 0,
                                  &m.tally, band, m.shares.load(relaxed) != 0)


cdef Lane* array_lane_prepare(EngineState* e, ModelState* m, u64 slo_us, u32 band,
                              u64 lane_bytes_max) noexcept nogil:
    cdef int klass = log2_of(slo_us)
    cdef BandLanes* b
    if not band_lanes_make(m, band):
        return NULL
    b = band_lanes(m, band)
    if b.array_lanes[klass] == NULL:
        b.array_lanes[klass] = lane_new(e.lanes, m.index, <u64> 2 << klass,
                                        chunk_cells_of(m.spec.row_bytes, lane_bytes_max),
                                        m.spec.row_bytes, chunk_rows_of(m.spec.row_bytes),
                                        &m.tally, band, m.shares.load(relaxed) != 0)
    return b.array_lanes[klass]


cdef Lane* lane_at(ModelState* m, u64 slo_us, u32 band) noexcept nogil:
    cdef BandLanes* b = band_lanes(m, band)
    if b == NULL:
        return NULL
    return b.lanes[log2_of(slo_us)]


cdef Gate* gate_at(ModelState* m, u64 slo_us, u32 band) noexcept nogil:
    cdef BandLanes* b = band_lanes(m, band)
    if b == NULL:
        return NULL
    return &b.gates[log2_of(slo_us)]


cdef u32 lane_class(u64 slo_us) noexcept nogil:
    return <u32> log2_of(slo_us)


cdef u64 lanes_there(ModelState* m, u32 band) noexcept:
    cdef u64 found = 0
    cdef u32 klass
    cdef BandLanes* b = band_lanes(m, band)
    for klass in range(LANE_CLASSES if b != NULL else 0):
        if b.lanes[klass] != NULL:
            found |= <u64> 1 << klass
    return found


cdef Status row_submit(EngineState* e, ModelState* m, const void* row, u64 nbytes, const Key* key,
                       u64 salt, u64 slo_us, u32 band,
                       u64 now_us, Block* block, u32 slot, u32 cost) noexcept nogil:
    cdef int klass = log2_of(slo_us)
    cdef BandLanes* b = band_lanes(m, band)
    cdef Status status = _shut(e)
    if status != PENDING:
        return status
    if nbytes >= m.row_bytes_end:
        return _submit_cost(e, m, row, nbytes, key, salt, slo_us, band, now_us, block, slot, cost)
    if b == NULL or b.lanes[klass] == NULL:
        return FULL
    return lane_offer(e.lanes, b.lanes[klass], &b.gates[klass], row, <u32> nbytes,
                      key if m.cached else NULL, salt, now_us + slo_us, now_us, block, slot)


cdef Status _submit_cost(EngineState* e, ModelState* m, const void* row, u64 nbytes, const Key* key,
                         u64 salt, u64 slo_us, u32 band, u64 now_us, Block* block, u32 slot,
                         u32 cost) noexcept nogil:
    """Submit a row that differs in cost from others, or is too large."""
    cdef Lane* lane = lane_at(m, slo_us, band)
    if nbytes >= row_bytes_end(e):
        return TOO_LARGE        # even if rows wait
    if lane == NULL:
        return FULL
    return lane_offer_cost(e.lanes, lane, gate_at(m, slo_us, band), row, <u32> nbytes,
                           key if m.cached else NULL, salt, now_us + slo_us, now_us, block, slot,
                           row_cost(m.by_cost, nbytes, cost))


cdef void row_refused(ModelState* m, Status status, u64 slo_us, u32 band, u64 now_us,
                      Value* value) noexcept nogil:
    cdef Lane* lane = lane_at(m, slo_us, band)
    cdef Gate* gate = gate_at(m, slo_us, band)
    cdef double wait_s
    count(&m.tally.refused[<u32> status], 1)
    if gate == NULL:
        return
    gate.refused_us.store(now_us, relaxed)
    if status != FULL or lane == NULL or gate.size.load(relaxed) == 0:
        return
    wait_s = lane_wait_us(lane, gate, now_us + slo_us, now_us) / 1e6
    memcpy(&value.word, &wait_s, 8)
    value.tag = F64
