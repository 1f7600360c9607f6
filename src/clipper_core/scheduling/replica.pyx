"""Replies in, for one container, and what becomes of its batches when none comes."""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset, strlen

from clipper_core.cache.clock_cache cimport cache_fill, cache_prefetch
from clipper_core.runtime.allocation cimport make
from clipper_core.runtime.dtype cimport ANY, BYTES, F64, STR, itemsize
from clipper_core.runtime.histogram cimport note
from clipper_core.runtime.machine cimport acquire, aligned_new, relaxed, u16
from clipper_core.runtime.status cimport (
    BAD_FRAME, BAD_OUTPUT, MODEL_ERROR, NO_MEMORY, OK, PENDING, REPLICA_LOST, TOO_LARGE,
)
from clipper_core.scheduling.array_chunk cimport chunk_end_words, span_leave
from clipper_core.scheduling.batch_log cimport batch_log_put
from clipper_core.scheduling.batcher cimport (
    batcher_cost_learn, batcher_cost_predict_us, batcher_init, batcher_learn, batcher_predict_us,
    batcher_rows, batcher_seed,
)
from clipper_core.scheduling.container_connection cimport (
    connection_next_bare, connection_send_later,
)
from clipper_core.scheduling.lane cimport (
    row_end, row_found, span_end, span_key, span_retry, span_row_end,
)
from clipper_core.scheduling.task cimport Task, lane_of, pos_of, span_is_first_try, task_of
from clipper_core.wire.codec cimport (
    ACCURACY, CONFIDENCE, FAILURE, FEEDBACK, QUALIFIERS, ROW_STATUS, VARIABLE, Rows, accuracy_read,
    rows_open,
)
from clipper_core.wire.prediction cimport (
    TAG_BLOB, TAG_NONE, Blob, Value, blob_new, blob_qualified, value_drop,
)

cdef enum:
    AHEAD = 8                   # cache buckets asked for before they are filled


ctypedef const void* ConstPointer


cdef Replica* replica_new(ContainerConnection* connection, Tally* tally, u32 number) noexcept nogil:
    cdef Replica* r = <Replica*> aligned_new(sizeof(Replica))
    if r == NULL:
        return NULL
    r.connection = connection
    r.tally = tally
    r.number = number
    r.next_id = 1
    r.rows = make[vector[ConstPointer]]()
    r.row_bytes = make[vector[u64]]()
    r.row_bytes32 = make[vector[u32]]()
    r.runs = make[vector[Run]]()
    r.regions = make[vector[u32]]()
    if (r.rows == NULL or r.row_bytes == NULL or r.row_bytes32 == NULL or r.runs == NULL
        or r.regions == NULL):
        replica_free(r)
        return NULL
    return r


cdef void replica_free(Replica* r) noexcept nogil:
    cdef u32 i
    for i in range(r.in_flight):
        batch_free(r.flight[i])
    del r.rows
    del r.row_bytes
    del r.row_bytes32
    del r.runs
    del r.regions
    free(r)


cdef Batch* batch_new(u32 n) noexcept nogil:
    cdef Batch* batch = <Batch*> malloc(sizeof(Batch))
    if batch == NULL:
        return NULL
    memset(batch, 0, sizeof(Batch))
    batch.spans = <Span*> malloc(<u64> n * sizeof(Span))
    if batch.spans == NULL:
        free(batch)
        return NULL
    return batch


cdef void batch_free(Batch* batch) noexcept nogil:
    free(batch.spans)
    free(batch.keys)
    free(batch)


cdef void replica_send_feedback(Replica* r, const void* feedback, u64 nbytes, u32 rows,
                        u64 now_us) noexcept nogil:
    if connection_send_later(r.connection, FEEDBACK, feedback, nbytes, now_us):
        r.gauge.taught.fetch_add(rows, relaxed)
    else:
        r.gauge.untaught.fetch_add(rows, relaxed)


# -- what it says
# --------------------------------------------------------------------------------------------------

cdef Batch* _take_oldest(Replica* r, Lanes* lanes, u64 slo_us, u64 now_us,
                         bint learn) noexcept nogil:
    cdef Batch* batch = r.flight[0]
    cdef u64 begun = max(batch.sent_us, r.idle_since_us)
    if lanes.logging.load(acquire) and batch.keys == NULL:
        batch_log_put(lanes, batch.spans, batch.span_count, batch.n, r.number, batch.sent_us, begun,
                      now_us)
    r.flight[0] = r.flight[1]
    r.in_flight -= 1
    r.idle_since_us = now_us
    if learn:
        _learn(r, batch, <double> (now_us - begun if now_us > begun else 0),
               <double> min(slo_us, batch.slo_us), now_us)
        _publish(r, batch.n)
    r.busy_until_us = now_us
    if r.in_flight:
        r.busy_until_us += <u64> batch_predict_us(r, r.flight[0])
    r.gauge.in_flight.store(r.in_flight, relaxed)
    return batch


cdef double batch_predict_us(const Replica* r, const Batch* batch) noexcept nogil:
    if r.batcher.config.by_cost:
        return batcher_cost_predict_us(&r.batcher, batch.cost)
    return batcher_predict_us(&r.batcher, batch.n)


cdef void _learn(Replica* r, const Batch* batch, double took_us, double slo_us,
                 u64 now_us) noexcept nogil:
    if r.batcher.config.by_cost:
        batcher_cost_learn(&r.batcher, batch.n, batch.cost, batch.full, took_us, slo_us, now_us)
    else:
        batcher_learn(&r.batcher, batch.n, took_us, slo_us, now_us)


cdef void _publish(Replica* r, u32 n) noexcept nogil:
    """What a snapshot shows of this replica, after a batch of n rows."""
    cdef u32 bucket = 0
    while (n >> 1) >> bucket and bucket < PROFILE_BUCKETS - 1:
        bucket += 1
    _publish_fit(r)
    r.gauge.profile_us[bucket].store(<u64> r.batcher.profile_us[bucket], relaxed)
    r.gauge.profile_n[bucket].store(r.batcher.profile_n[bucket], relaxed)


cdef void _publish_fit(Replica* r) noexcept nogil:
    r.gauge.limit.store(batcher_rows(&r.batcher), relaxed)
    r.gauge.limit_cost.store(<u64> r.batcher.limit if r.batcher.config.by_cost else 0, relaxed)
    r.gauge.unit.store(<u64> r.batcher.unit, relaxed)
    r.gauge.batches.store(r.batcher.batches, relaxed)
    r.gauge.misses.store(r.batcher.misses, relaxed)
    r.gauge.fit_a_ns.store(<u64> max(0.0, r.batcher.fit_a * 1000), relaxed)
    r.gauge.fit_b_ns.store(<u64> max(0.0, r.batcher.fit_b * r.batcher.unit * 1000), relaxed)


cdef void replica_begin(Replica* r, const BatcherConfig* config, const Timing* timings, u32 n,
                        u64 now_us) noexcept nogil:
    cdef u32 i, bucket
    batcher_init(&r.batcher, config)
    for i in range(n):
        batcher_seed(&r.batcher, &timings[i], now_us)
    _publish_fit(r)
    for bucket in range(PROFILE_BUCKETS):
        r.gauge.profile_us[bucket].store(<u64> r.batcher.profile_us[bucket], relaxed)
        r.gauge.profile_n[bucket].store(r.batcher.profile_n[bucket], relaxed)


cdef Status replica_frame(Replica* r, Lanes* lanes, const RowSpec* spec, Header* header,
                          const u8* payload,
                          u64 slo_us, bint elsewhere, u64 now_us) noexcept nogil:
    cdef Batch* batch
    cdef Rows rows
    cdef Status status
    if header.kind == ACCURACY:
        return accuracy_read(payload, header.payload_bytes, &r.gauge.progress)
    if header.id >= r.next_id or (r.in_flight and header.id > r.flight[0].id):
        return BAD_FRAME            # an id we never gave, or not in turn: what it passed over would
                                    # never be answered
    if r.in_flight == 0 or header.id < r.flight[0].id:
        return OK                   # a late twin is dropped
    if r.connection.bytes_out < r.flight[0].end_bytes:
        return BAD_FRAME            # answered before it was sent: its rows must stay until they
                                    # have left
    if header.kind == FAILURE:
        batch = _take_oldest(r, lanes, slo_us, now_us, False)
        _failed(r, lanes, batch, MODEL_ERROR, <const char*> payload, header.payload_bytes,
                elsewhere, now_us)
        batch_free(batch)
        return OK
    status = rows_open(header, payload, &r.connection.limits, &rows)
    if status != OK and status != TOO_LARGE:
        return status
    batch = _take_oldest(r, lanes, slo_us, now_us, True)
    if status == TOO_LARGE:         # one output is: the stream itself is sound, and another replica
                                    # would say the same
        _end_all_text(lanes, batch, TOO_LARGE,
                      b"the model returned an output beyond output_bytes_max, or qualifiers beyond "
                      b"1 KiB",
                      now_us)
    elif rows.n != batch.n:
        _failed_text(r, lanes, batch,
                     b"the model returned another number of outputs than the batch has inputs",
                     elsewhere,
                     now_us)
    elif not _is_declared(spec, header):
        _failed_text(r, lanes, batch,
                     b"the model returned another type or shape than its declared output",
                     elsewhere, now_us)
    else:
        _recover(r)
        _end_rows(r, lanes, header, batch, &rows, now_us)
    batch_free(batch)
    return OK


cdef bint _is_declared(const RowSpec* spec, Header* header) noexcept nogil:
    """Is the reply of the declared type? Of records, its header gets their type, which every output
    then has."""
    cdef u32 i
    if spec.output_dtype == ANY:
        return True
    if header.dtype != spec.output_dtype:
        return False
    if spec.output_shaped:
        if header.flags & VARIABLE or header.rank != spec.output_rank:
            return False
        for i in range(header.rank):
            if header.dims[i] != spec.output_dims[i]:
                return False
    if spec.output_record:
        header.dims[3] = spec.output_record
    return True


cdef void _end_rows(Replica* r, Lanes* lanes, const Header* header, Batch* batch, const Rows* rows,
                    u64 now_us) noexcept nogil:
    cdef u32 s, k, i = 0
    cdef u64 at = 0
    cdef Value why
    cdef const u8* beside = rows.qualifiers
    cdef bint words = (header.rank == 0
                       and not header.flags & (VARIABLE | CONFIDENCE | QUALIFIERS | ROW_STATUS)
                       and batch.keys == NULL)
    if rows.status != NULL:
        _output_text(<const char*> rows.text, rows.text_bytes, &why)
    note(&r.tally.evaluated, batch.n)
    for s in range(batch.span_count):
        if words and _end_words(lanes, &batch.spans[s], rows.data + at, <u32> rows.row_bytes,
                                header.dtype, now_us):
            at += rows.row_bytes * batch.spans[s].rows
            i += batch.spans[s].rows
            continue
        for k in range(batch.spans[s].rows):
            at += _end_as_told(lanes, header, batch, &batch.spans[s], k, i, rows, at, beside, &why,
                               now_us)
            if rows.qualifier_bytes != NULL:
                beside += rows.qualifier_bytes[i]
            i += 1
        if batch.keys == NULL:
            span_leave(lanes, &batch.spans[s])
    if rows.status != NULL:
        value_drop(&why)


cdef bint _end_words(Lanes* lanes, const Span* span, const u8* data, u32 size, u8 tag,
                     u64 now_us) noexcept nogil:
    """Scalars for rows of an array: the cache is filled, then all of them end at once. False: it is
    a single row."""
    cdef Task* task = task_of(lanes, span.ticket)
    cdef u32 k
    cdef Value value
    if task.slots == NULL:
        return False
    value.word = 0
    value.tag = tag
    for k in range(span.rows if task.keyed else 0):
        if k + AHEAD < span.rows:
            cache_prefetch(lanes.cache, &task.keys[span.first + k + AHEAD])
        memcpy(&value.word, data + <u64> k * size, size)
        cache_fill(lanes.cache, &task.keys[span.first + k], &value)
    chunk_end_words(lanes, span, data, size, tag, now_us)
    span_leave(lanes, span)
    return True


cdef u64 _end_as_told(Lanes* lanes, const Header* header, Batch* batch, const Span* span, u32 k,
                      u32 i, const Rows* rows, u64 at,
                      const u8* beside, Value* why, u64 now_us) noexcept nogil:
    """Row k of the span, i of the batch, whose output is at `at` and whose qualifiers are `beside`;
    -> bytes of its output."""
    cdef u64 nbytes = rows.row_bytes
    cdef Value value
    if header.flags & VARIABLE:
        nbytes = <u64> rows.lengths[i] * itemsize(header.dtype)
    if rows.status != NULL and rows.status[i]:
        _end_row(lanes, batch, span, k, i, MODEL_ERROR, why, now_us)
    elif _output_value(header, rows, i, at, nbytes, beside, &value):
        _end_row(lanes, batch, span, k, i, OK, &value, now_us)
        value_drop(&value)
    else:
        value.tag = TAG_NONE
        _end_row(lanes, batch, span, k, i, NO_MEMORY, &value, now_us)
    return nbytes


cdef void _end_row(Lanes* lanes, Batch* batch, const Span* span, u32 k, u32 i, Status status,
                   Value* value,
                   u64 now_us) noexcept nogil:
    cdef Task* task
    if batch.keys != NULL:
        if status == OK and (batch.keys[i].lo or batch.keys[i].hi) and (not batch.shared
                or _is_intact(lanes, span.ticket)):
            cache_fill(lanes.cache, &batch.keys[i], value)
            row_found(lanes, &batch.keys[i], value, now_us)
        return
    task = task_of(lanes, span.ticket)
    if status == OK and task.keyed:
        cache_fill(lanes.cache, &task.key if task.slots == NULL else &task.keys[span.first + k],
                   value)
    if task.slots == NULL:
        row_end(lanes, span.ticket, status, value, now_us)
    else:
        span_row_end(lanes, span, k, status, value, now_us)


cdef bint _is_intact(Lanes* lanes, u64 ticket) noexcept nogil:
    """What this ticket named lies in its cell still, so whoever read rows of it before now has read
    those."""
    return lane_of(lanes, ticket).ring.cells.untouched(pos_of(ticket))


cdef void _end_all(Lanes* lanes, Batch* batch, Status status, const char* text, u64 n,
                   u64 now_us) noexcept nogil:
    cdef u32 i
    cdef Value value
    _output_text(text, n, &value)
    for i in range(batch.span_count if batch.keys == NULL else 0):
        span_end(lanes, &batch.spans[i], status, &value, now_us)
    value_drop(&value)


cdef void batch_drop(Lanes* lanes, Batch* batch, Status status, u64 now_us) noexcept nogil:
    _end_all_text(lanes, batch, status, b"", now_us)
    batch_free(batch)


cdef void _end_all_text(Lanes* lanes, Batch* batch, Status status, const char* text,
                        u64 now_us) noexcept nogil:
    _end_all(lanes, batch, status, text, strlen(text), now_us)


cdef void _failed_text(Replica* r, Lanes* lanes, Batch* batch, const char* text, bint elsewhere,
                       u64 now_us) noexcept nogil:
    _failed(r, lanes, batch, BAD_OUTPUT, text, strlen(text), elsewhere, now_us)


cdef void _failed(Replica* r, Lanes* lanes, Batch* batch, Status status, const char* text, u64 n,
                  bint elsewhere,
                  u64 now_us) noexcept nogil:
    """The model failed a whole batch. Rows on their first try go elsewhere; where only rows that
    another replica failed as well were in it, they are to blame, and this one is not."""
    cdef u32 i, first_tries = 0
    cdef Value value
    _output_text(text, n, &value)
    for i in range(batch.span_count if batch.keys == NULL else 0):
        first_tries += span_is_first_try(lanes, &batch.spans[i])
        if not (elsewhere and span_retry(lanes, &batch.spans[i], r.conn, now_us)):
            span_end(lanes, &batch.spans[i], status, &value, now_us)
    value_drop(&value)
    r.gauge.failures.fetch_add(1, relaxed)
    if first_tries or batch.keys != NULL:
        _count_failure(r, elsewhere, now_us)


cdef void _count_failure(Replica* r, bint elsewhere, u64 now_us) noexcept nogil:
    """Eject it after too many in a row, unless it is the last that takes rows."""
    if now_us < r.ejected_until_us:
        return                      # it was on its way when the replica was ejected
    r.failed += 1
    if r.eject_after == 0 or not elsewhere or (r.failed < r.eject_after
                                               and r.ejected_until_us == 0):
        return
    r.ejected_until_us = now_us + min(<u64> EJECT_US_MIN << min(r.ejections, <u32> 16),
                                      <u64> EJECT_US_MAX)
    r.ejections += 1
    r.gauge.ejected.store(1, relaxed)
    r.gauge.ejections.fetch_add(1, relaxed)


cdef void _recover(Replica* r) noexcept nogil:
    """It answered a batch."""
    if r.failed == 0:
        return
    r.failed = 0
    r.ejections /= 2                # one that fails again soon is left alone for longer than one
                                    # that never did
    r.ejected_until_us = 0
    r.gauge.ejected.store(0, relaxed)


cdef Status replica_bare(Replica* r, Lanes* lanes, const RowSpec* spec, u64 slo_us,
                         u64 now_us) noexcept nogil:
    cdef Header header
    cdef Rows rows
    cdef Batch* batch
    cdef u8* bytes
    if r.in_flight == 0 or r.connection.bytes_out < r.flight[0].end_bytes:
        # it speaks when asked only
        return (PENDING if r.connection.rx_len == r.connection.rx_at + r.connection.rx_frame
                else BAD_FRAME)
    bytes = connection_next_bare(r.connection, <u64> r.flight[0].n * 8)
    if bytes == NULL:
        return PENDING
    memset(&header, 0, sizeof(Header))
    memset(&rows, 0, sizeof(Rows))
    batch = _take_oldest(r, lanes, slo_us, now_us, True)
    header.dtype = F64
    rows.n = batch.n
    rows.row_bytes = 8
    rows.data = bytes
    _recover(r)
    _end_rows(r, lanes, &header, batch, &rows, now_us)
    batch_free(batch)
    return OK


# -- when it goes wrong
# ------------------------------------------------------------------------------------------------

cdef void _let_go(Lanes* lanes, Batch* batch, u64 now_us) noexcept nogil:
    """Free the rows of an overdue batch; keep their keys for a late reply. Equal rows may have
    joined since, with more time: were they left to wait for it, a popular row would wait for a hung
    container for ever."""
    cdef u32 s, k, i = 0
    cdef const Key* key
    batch.keys = <Key*> malloc(<u64> batch.n * sizeof(Key))
    if batch.keys == NULL:
        return
    memset(batch.keys, 0, <u64> batch.n * sizeof(Key))
    for s in range(batch.span_count):
        for k in range(batch.spans[s].rows):
            key = span_key(lanes, &batch.spans[s], k)
            if key != NULL:
                batch.keys[i] = key[0]
            i += 1
        _again(lanes, &batch.spans[s], now_us)


cdef void _again(Lanes* lanes, const Span* span, u64 now_us) noexcept nogil:
    """Back into its lane, once, if somebody still waits for these rows; else they end."""
    cdef Value nothing
    nothing.word = 0
    nothing.tag = TAG_NONE
    if not span_retry(lanes, span, 0, now_us):
        span_end(lanes, span, REPLICA_LOST, &nothing, now_us)


cdef bint replica_late(const Replica* r) noexcept nogil:
    return r.in_flight > 0 and r.flight[0].keys != NULL


cdef bint replica_overdue(Replica* r, Lanes* lanes, u64 now_us) noexcept nogil:
    cdef u32 i
    for i in range(r.in_flight):
        if r.flight[i].keys != NULL or now_us <= r.flight[i].due_us:
            continue
        r.suspect = True
        if r.connection.bytes_out < r.flight[i].end_bytes:
            return True
        _let_go(lanes, r.flight[i], now_us)
    return False


cdef void replica_lost(Replica* r, Lanes* lanes, u64 now_us) noexcept nogil:
    cdef u32 i, k
    for i in range(r.in_flight):
        for k in range(r.flight[i].span_count if r.flight[i].keys == NULL else 0):
            _again(lanes, &r.flight[i].spans[k], now_us)
        batch_free(r.flight[i])
    r.in_flight = 0


# -- outputs
# --------------------------------------------------------------------------------------------------

cdef bint _output_value(const Header* header, const Rows* rows, u32 i, u64 at, u64 nbytes,
                       const u8* beside,
                       Value* value) noexcept nogil:
    cdef Blob* blob
    value.word = 0
    if header.rank == 0 and not header.flags & (VARIABLE | CONFIDENCE | QUALIFIERS):
        memcpy(&value.word, rows.data + at, nbytes)
        value.tag = header.dtype
        return True
    blob = blob_qualified(rows.data + at, nbytes, beside,
                          <u16> rows.qualifier_bytes[i] if rows.qualifier_bytes != NULL else 0)
    if blob == NULL:
        return False
    blob.dtype = header.dtype
    blob.rank = header.rank
    memcpy(blob.dims, header.dims, sizeof(header.dims))
    if header.flags & VARIABLE:
        blob.rank = 0 if header.dtype == STR or header.dtype == BYTES else 1
        blob.dims[0] = <u32> (nbytes / itemsize(header.dtype))
    if rows.confidence != NULL:
        blob.has_confidence = 1
        blob.confidence = rows.confidence[i]
    value.word = <u64> blob
    value.tag = TAG_BLOB
    return True


cdef void _output_text(const char* text, u64 n, Value* value) noexcept nogil:
    cdef Blob* blob = blob_new(text, n)
    value.word = 0
    value.tag = TAG_NONE
    if blob != NULL:
        blob.dtype = STR
        value.word = <u64> blob
        value.tag = TAG_BLOB
