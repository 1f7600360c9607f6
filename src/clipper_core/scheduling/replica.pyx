"""Handles the replies of one container, and its batches when no reply arrives."""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove, memset, strlen

from clipper_core.cache.clock_cache cimport cache_fill, cache_prefetch, key_of
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.dtype cimport ANY, BYTES, F64, STR, itemsize
from clipper_core.runtime.histogram cimport histogram_note, note
from clipper_core.runtime.machine cimport acquire, aligned_new, relaxed, release, u16
from clipper_core.runtime.ring cimport spsc_new
from clipper_core.runtime.status cimport (
    BAD_FRAME, BAD_OUTPUT, MODEL_ERROR, NO_MEMORY, OK, PENDING, REPLICA_LOST, TOO_LARGE,
)
from clipper_core.scheduling.batcher cimport (
    batcher_cost_learn, batcher_cost_predict_us, batcher_fits, batcher_init, batcher_learn,
    batcher_predict_us, batcher_rows, batcher_seed,
)
from clipper_core.scheduling.container_connection cimport (
    connection_next_bare, connection_send, connection_send_later, connection_send_owned,
    connection_send_region, connection_send_with_id,
)
from clipper_core.scheduling.lane cimport (
    WAITING, Lane, Task, chunk_end_blob, chunk_end_rows, chunk_end_words, chunk_ended_from, lane_of,
    lane_places, lane_take_row, pos_of, row_end, row_found, span_again, span_end, span_is_first_try,
    span_key, span_leave, span_place, span_retry, span_row_end, span_rows, task_needed, task_of,
    task_row, ticket_of,
)
from clipper_core.scheduling.refused_rows cimport refused_rows_has
from clipper_core.wire.codec cimport (
    ACCURACY, CANCEL, CHECKED, COMPRESSED, CONFIDENCE, FAILURE, FEEDBACK, HEADER_BYTES, PARTIAL,
    PREDICT, QUALIFIERS, ROW_STATUS, RUN_BYTES, SESSIONS, SHARED, VARIABLE, Rows, accuracy_read,
    compressed_bound, compressed_encode, crc32, header_encode, rows_open, v1_bound, v1_compress,
    v1_encode, variable_encode, variable_payload_bytes,
)
from clipper_core.wire.lz4 cimport LITERALS, LZ4_BYTES_MAX
from clipper_core.wire.prediction cimport (
    TAG_BLOB, TAG_NONE, Blob, Value, blob_new, blob_of_rows, blob_qualified, value_drop,
)

# -- The log of batches: a queue of words.

cdef bint batch_log_open(Lanes* lanes, u64 words) noexcept nogil:
    if lanes.log == NULL:
        lanes.log = spsc_new(words)
    if lanes.log != NULL:
        lanes.logging.store(1, release)
    return lanes.log != NULL


cdef void batch_log_put(Lanes* lanes, const Span* spans, u32 span_count, u32 rows, u32 replica,
                        u64 sent_us, u64 begun_us,
                        u64 now_us) noexcept nogil:
    cdef u64 ids[LOGGED_TASKS_MAX]
    cdef u64 n = 0
    cdef u64 i
    cdef u32 s
    cdef Task* task
    for s in range(span_count):
        task = task_of(lanes, spans[s].ticket)
        while task != NULL and n < LOGGED_TASKS_MAX:
            ids[n] = task.block.first_id + (task.slot if task.slots == NULL else task.slots[0])
            n += 1
            task = task_of(lanes, task.next) if task.next else NULL
    if lanes.log.room() < n + RECORD_HEAD + 1:
        lanes.log_lost.fetch_add(1, relaxed)
        return
    lanes.log.push(n + RECORD_HEAD)
    lanes.log.push((<u64> replica << 32) | rows)
    lanes.log.push(sent_us)
    lanes.log.push(begun_us)
    lanes.log.push(now_us)
    for i in range(n):
        lanes.log.push(ids[i])


cdef const char* OUTPUT_TOO_LARGE = (b"the model returned an output beyond output_bytes_max, or "
                                     b"qualifiers beyond 1 KiB")

cdef enum:
    AHEAD = 8                   # cache buckets that are prefetched before they are filled


ctypedef const void* ConstPointer


cdef Replica* replica_new(ContainerConnection* connection, Tally* tally, u32 number,
                          u32 concurrency) noexcept nogil:
    cdef Replica* r = <Replica*> aligned_new(sizeof(Replica))
    if r == NULL:
        return NULL
    r.connection = connection
    r.tally = tally
    r.number = number
    r.next_id = 1
    r.concurrency = min(concurrency, <u32> CONCURRENCY_MAX)
    r.flight = <Batch**> malloc(max(r.concurrency, <u32> IN_FLIGHT_MAX) * sizeof(Batch*))
    r.rows = make[vector[ConstPointer]]()
    r.row_bytes = make[vector[u64]]()
    r.row_bytes32 = make[vector[u32]]()
    r.runs = make[vector[Run]]()
    r.regions = make[vector[u32]]()
    if (r.flight == NULL or r.rows == NULL or r.row_bytes == NULL or r.row_bytes32 == NULL
        or r.runs == NULL or r.regions == NULL):
        replica_free(r)
        return NULL
    return r


cdef void replica_free(Replica* r) noexcept nogil:
    cdef u32 i
    for i in range(r.in_flight):
        batch_free(r.flight[i])
    free(r.flight)
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


# -- replies
# --------------------------------------------------------------------------------------------------

cdef u32 _place(const Replica* r, u64 id) noexcept nogil:
    """Return the place of a batch in `flight`, or of the first one after it."""
    cdef u32 low = 0, high = r.in_flight, middle
    while low < high:
        middle = (low + high) / 2
        if r.flight[middle].id < id:
            low = middle + 1
        else:
            high = middle
    return low


cdef u64 _begun_us(const Replica* r, const Batch* batch) noexcept nogil:
    """Return when the container began a batch."""
    return batch.sent_us if r.concurrency else max(batch.sent_us, r.idle_since_us)


cdef void _foresee(Replica* r, u64 now_us) noexcept nogil:
    """Predict when a further batch could begin, after one has ended, or with a concurrency."""
    r.busy_until_us = now_us
    if r.concurrency and r.in_flight == r.concurrency:
        r.busy_until_us = max(now_us, r.flight[0].sent_us
                              + <u64> batch_predict_us(r, r.flight[0]))
    elif r.concurrency == 0 and r.in_flight:
        r.busy_until_us += <u64> batch_predict_us(r, r.flight[0])


cdef Batch* _take(Replica* r, Lanes* lanes, u32 place, u64 slo_us, u64 now_us,
                  bint learn) noexcept nogil:
    """Take a batch that was answered out of `flight`."""
    cdef Batch* batch = r.flight[place]
    cdef u64 begun = _begun_us(r, batch)
    if lanes.logging.load(acquire) and batch.keys == NULL:
        batch_log_put(lanes, batch.spans, batch.span_count, batch.n - batch.answered, r.number,
                      batch.sent_us, begun, now_us)
    r.in_flight -= 1
    if place < r.in_flight:
        memmove(r.flight + place, r.flight + place + 1, (r.in_flight - place) * sizeof(Batch*))
    r.exclusive = r.exclusive and r.in_flight > 0
    r.idle_since_us = now_us
    if learn:
        _learn(r, batch, <double> (now_us - begun if now_us > begun else 0),
               <double> min(slo_us, batch.slo_us), now_us)
        _publish(r, batch.n)
    _foresee(r, now_us)
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
    """Publish the gauges for snapshots, after a batch of n rows."""
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
    cdef u32 place = 0
    if header.kind == ACCURACY:
        return accuracy_read(payload, header.payload_bytes, &r.gauge.progress)
    if r.concurrency:
        place = _place(r, header.id)
    if header.id >= r.next_id or (place < r.in_flight and header.id > r.flight[place].id):
        return BAD_FRAME            # an id that was never sent, or out of order: the batches before
                                    # it would never be answered
    if place >= r.in_flight or header.id < r.flight[place].id:
        return OK                   # a second reply to a batch is dropped
    if r.connection.bytes_out < r.flight[place].end_bytes:
        return BAD_FRAME            # answered before it was sent completely: its rows must stay
                                    # until they are sent
    if header.kind == FAILURE:
        batch = _take(r, lanes, place, slo_us, now_us, False)
        if batch.cancelled_us == 0:         # else nobody waits, and it is no fault of the model
            _failed(r, lanes, batch, MODEL_ERROR, <const char*> payload, header.payload_bytes,
                    elsewhere, now_us)
        batch_free(batch)
        return OK
    status = rows_open(header, payload, &r.connection.limits, &rows)
    if status != OK and status != TOO_LARGE:
        return status
    if rows.output_bytes_max:
        status = OK                 # only the rows that are too large fail
    batch = r.flight[place]
    if header.flags & PARTIAL and status == OK and rows.n < batch.n - batch.answered:
        return _answer_first(r, lanes, spec, header, batch, &rows, now_us)
    batch = _take(r, lanes, place, slo_us, now_us, True)
    if status == TOO_LARGE:         # every output is too large: the stream is valid, and another
                                    # replica would fail too
        _end_all_text(lanes, batch, TOO_LARGE, OUTPUT_TOO_LARGE, now_us)
    elif rows.n != batch.n - batch.answered:
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


cdef Status _answer_first(Replica* r, Lanes* lanes, const RowSpec* spec, Header* header,
                          Batch* batch, const Rows* rows, u64 now_us) noexcept nogil:
    """End the first rows of a batch by a PARTIAL reply; the others stay in flight. Return
    NO_MEMORY if they cannot be told apart."""
    cdef Batch* first = batch_new(rows.n)
    if first == NULL:
        return NO_MEMORY
    # a reply may also be partial because its rows are of several types
    if batch.answered == 0 and 2 * header.payload_bytes > r.connection.limits.payload_bytes_max:
        batcher_fits(&r.batcher, rows.n)
        _publish_fit(r)
    first.n = rows.n
    first.shared = batch.shared
    first.keys = batch.keys
    _move_spans(first, batch)
    batch.answered += rows.n
    if lanes.logging.load(acquire) and batch.keys == NULL:
        batch_log_put(lanes, first.spans, first.span_count, first.n, r.number, batch.sent_us,
                      _begun_us(r, batch), now_us)
    if _is_declared(spec, header):
        _recover(r)
        _end_rows(r, lanes, header, first, rows, now_us)
    else:
        _end_all_text(lanes, first, BAD_OUTPUT,
                      b"the model returned another type or shape than its declared output", now_us)
    first.keys = NULL               # they are the batch's
    batch_free(first)
    if batch.keys != NULL:
        memmove(batch.keys, batch.keys + rows.n,
                <u64> (batch.n - batch.answered) * sizeof(Key))
    return OK


cdef void _move_spans(Batch* first, Batch* batch) noexcept nogil:
    """Move the first rows of a batch, as many as `first` has, to that one."""
    cdef u32 left = first.n, s = 0
    while left:
        first.spans[first.span_count] = batch.spans[s]
        if batch.spans[s].rows > left:
            first.spans[first.span_count].rows = <u16> left
            batch.spans[s].first += left
            batch.spans[s].rows -= <u16> left
        else:
            s += 1
        left -= first.spans[first.span_count].rows
        first.span_count += 1
    batch.span_count -= s
    memmove(batch.spans, batch.spans + s, <u64> batch.span_count * sizeof(Span))


cdef bint _is_declared(const RowSpec* spec, Header* header) noexcept nogil:
    """Return whether the reply is of the declared type. For records, its header is set to their
    type, which every output then has."""
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
    cdef bint alike = not header.flags & (VARIABLE | QUALIFIERS | ROW_STATUS) and batch.keys == NULL
    if rows.status != NULL:
        _output_text(<const char*> rows.text, rows.text_bytes, &why)
    note(&r.tally.evaluated, rows.n)
    for s in range(batch.span_count):
        if (_end_words(lanes, &batch.spans[s], rows.data + at, <u32> rows.row_bytes, header.dtype,
                       now_us) if words
                else alike and _end_rows_of(lanes, header, &batch.spans[s], rows, i, now_us)):
            at += rows.row_bytes * batch.spans[s].rows
            i += batch.spans[s].rows
            continue
        for k in range(batch.spans[s].rows):
            at += _end_row_by_status(lanes, header, batch, &batch.spans[s], k, i, rows, at, beside,
                                     &why, now_us)
            if rows.qualifier_bytes != NULL:
                beside += rows.qualifier_bytes[i]
            i += 1
        if batch.keys == NULL:
            span_leave(lanes, &batch.spans[s])
    if rows.status != NULL:
        value_drop(&why)


cdef bint _end_words(Lanes* lanes, const Span* span, const u8* data, u32 size, u8 tag,
                     u64 now_us) noexcept nogil:
    """End rows of an array with scalars: the cache is filled, then all of them end at once. Return
    False for a single row."""
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


cdef bint _end_rows_of(Lanes* lanes, const Header* header, const Span* span, const Rows* rows,
                       u32 i, u64 now_us) noexcept nogil:
    """End rows of an array, from row i of the batch on, with outputs of one shape: one blob has
    them all. Return False for a single row, if each is to be cached, or when there is no memory."""
    cdef Task* task = task_of(lanes, span.ticket)
    cdef Blob* blob
    if task.slots == NULL or task.keyed:
        return False
    blob = blob_of_rows(rows.data + i * rows.row_bytes, rows.row_bytes, span.rows,
                        rows.confidence + i if rows.confidence != NULL else NULL)
    if blob == NULL:
        return False
    blob.dtype = header.dtype
    blob.rank = header.rank
    memcpy(blob.dims, header.dims, sizeof(header.dims))
    chunk_end_blob(lanes, span, blob, now_us)
    span_leave(lanes, span)
    return True


cdef u64 _end_row_by_status(Lanes* lanes, const Header* header, Batch* batch, const Span* span,
                            u32 k, u32 i, const Rows* rows, u64 at, const u8* beside, Value* why,
                            u64 now_us) noexcept nogil:
    """End row k of the span, which is row i of the batch. Its output is at `at`, its qualifiers are
    at `beside`. Return the number of bytes of its output."""
    cdef u64 nbytes = rows.row_bytes
    cdef Value value
    if header.flags & VARIABLE:
        nbytes = <u64> rows.lengths[i] * itemsize(header.dtype)
    if rows.status != NULL and rows.status[i]:
        _end_row(lanes, batch, span, k, i, MODEL_ERROR, why, now_us)
    elif rows.output_bytes_max and nbytes > rows.output_bytes_max:
        _output_text(OUTPUT_TOO_LARGE, strlen(OUTPUT_TOO_LARGE), &value)
        _end_row(lanes, batch, span, k, i, TOO_LARGE, &value, now_us)
        value_drop(&value)
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
    """Return whether the cell still has the task of this ticket. If so, rows that were read from
    the cell before are those of the task."""
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
    """Handle a batch that the model failed as a whole. Rows on their first try are sent to another
    replica. If another replica had failed all of its rows too, the rows are at fault, and this
    replica is not charged."""
    cdef u32 i, first_tries = 0
    cdef Value value
    _output_text(text, n, &value)
    for i in range(batch.span_count if batch.keys == NULL else 0):
        first_tries += span_is_first_try(lanes, &batch.spans[i])
        if not (elsewhere and span_retry(lanes, &batch.spans[i], r.conn, now_us)):
            note(&r.tally.failed, batch.spans[i].rows)
            span_end(lanes, &batch.spans[i], status, &value, now_us)
    value_drop(&value)
    r.gauge.failures.fetch_add(1, relaxed)
    if first_tries or batch.keys != NULL:
        _count_failure(r, elsewhere, now_us)


cdef void _count_failure(Replica* r, bint elsewhere, u64 now_us) noexcept nogil:
    """Eject the replica after too many failures in a row, unless it is the last one that accepts
    rows."""
    if now_us < r.ejected_until_us:
        return                      # it was in flight when the replica was ejected
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
    """Note that the replica answered a batch."""
    if r.failed == 0:
        return
    r.failed = 0
    r.ejections /= 2                # a replica that fails again soon is ejected for longer than at
                                    # first
    r.ejected_until_us = 0
    r.gauge.ejected.store(0, relaxed)


cdef Status replica_bare(Replica* r, Lanes* lanes, const RowSpec* spec, u64 slo_us,
                         u64 now_us) noexcept nogil:
    cdef Header header
    cdef Rows rows
    cdef Batch* batch
    cdef u8* bytes
    if r.in_flight == 0 or r.connection.bytes_out < r.flight[0].end_bytes:
        # protocol 1 has only replies
        return (PENDING if r.connection.rx_len == r.connection.rx_at + r.connection.rx_frame
                else BAD_FRAME)
    bytes = connection_next_bare(r.connection, <u64> r.flight[0].n * 8)
    if bytes == NULL:
        return PENDING
    memset(&header, 0, sizeof(Header))
    memset(&rows, 0, sizeof(Rows))
    batch = _take(r, lanes, 0, slo_us, now_us, True)
    header.dtype = F64
    rows.n = batch.n
    rows.row_bytes = 8
    rows.data = bytes
    _recover(r)
    _end_rows(r, lanes, &header, batch, &rows, now_us)
    batch_free(batch)
    return OK


# -- failures
# ------------------------------------------------------------------------------------------------

cdef void _let_go(Lanes* lanes, Batch* batch, u64 now_us) noexcept nogil:
    """Free the rows of an overdue batch, and keep their keys for a late reply. Equal rows with
    later deadlines may have joined since. They are sent elsewhere; otherwise a popular row would
    wait for a hung container forever."""
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
    """Put a span back into its lane, once, if a caller still waits for these rows; else they
    end."""
    cdef Value nothing
    nothing.word = 0
    nothing.tag = TAG_NONE
    if not span_retry(lanes, span, 0, now_us):
        span_end(lanes, span, REPLICA_LOST, &nothing, now_us)


cdef bint _is_unheard(const Batch* batch, u64 now_us) noexcept nogil:
    """Return whether a container goes on with a batch that it was told to cancel."""
    return batch.cancelled_us and now_us > batch.cancelled_us + UNHEARD_US


cdef bint replica_late(const Replica* r) noexcept nogil:
    cdef u32 i
    if r.concurrency == 0:
        return r.in_flight > 0 and r.flight[0].keys != NULL
    for i in range(r.in_flight):
        if _is_unheard(r.flight[i], r.connection.received_us):
            return True
    return False


cdef bint _is_wanted(Lanes* lanes, const Batch* batch) noexcept nogil:
    """Return whether somebody waits for a row of a batch."""
    cdef const Span* span
    cdef Task* task
    cdef u32 i
    for i in range(batch.span_count):
        span = &batch.spans[i]
        task = task_of(lanes, span.ticket)
        if task.slots == NULL:
            if task_needed(lanes, task):
                return True
        elif chunk_ended_from(task, span.first, span.first + span.rows) < span.rows:
            return True
    return False


cdef void _cancel(Replica* r, Batch* batch, u64 now_us) noexcept nogil:
    """Tell the container that nobody wants a batch, whose rows were let go."""
    # without memory it goes on, as a container does that takes no CANCEL
    if connection_send_with_id(r.connection, CANCEL, batch.id, NULL, 0, now_us) == OK:
        batch.cancelled_us = now_us


cdef bint replica_overdue(Replica* r, Lanes* lanes, u64 now_us) noexcept nogil:
    cdef u32 i
    cdef Batch* batch
    cdef bint late
    for i in range(r.in_flight):
        batch = r.flight[i]
        late = now_us > batch.due_us
        if batch.keys != NULL:
            r.suspect = r.suspect or (r.concurrency and _is_unheard(batch, now_us))
            continue
        if not late and (not r.cancels or _is_wanted(lanes, batch)):
            continue
        r.suspect = r.suspect or (late and r.concurrency == 0)
        if r.connection.bytes_out < batch.end_bytes:
            if late:
                return True
            continue
        _let_go(lanes, batch, now_us)
        if r.cancels and batch.keys != NULL:
            _cancel(r, batch, now_us)
    return False


cdef void replica_lost(Replica* r, Lanes* lanes, const RowSpec* spec, Blame* blame,
                       u64 now_us) noexcept nogil:
    cdef u32 i, k, begun = 0
    cdef Batch* batch
    memset(blame, 0, sizeof(Blame))
    # without a concurrency it evaluates its batches in order: the second one has not begun
    for i in range(r.in_flight if r.concurrency else min(r.in_flight, <u32> 1)):
        begun += r.flight[i].n - r.flight[i].answered
    for i in range(r.in_flight):
        batch = r.flight[i]
        blame.rows += batch.n - batch.answered
        for k in range(batch.span_count if batch.keys == NULL else 0):
            if i == 0 or r.concurrency:
                _died_with(r, lanes, spec, batch, &batch.spans[k], begun, blame, now_us)
            elif not span_again(lanes, &batch.spans[k], batch.spans[k].together, False, now_us):
                _lost_with(lanes, &batch.spans[k], b"", now_us)
        batch_free(batch)
    r.in_flight = 0


cdef const char* DIED_TWICE = (b"the process of its container ended twice with this row, which was "
                               b"alone there")
cdef const char* REFUSED = (b"an earlier query with this row ended the process of its container "
                            b"twice; the row is refused for a while")


cdef void _died_with(Replica* r, Lanes* lanes, const RowSpec* spec, const Batch* batch,
                     const Span* span, u32 begun, Blame* blame, u64 now_us) noexcept nogil:
    """Handle a span of a batch at which a container was at work when it died. begun: the rows of
    all such batches."""
    cdef u16 together = _together(r, batch, begun, now_us)
    if span.together == 1 and begun == 1:
        blame.blamed = 1
        blame.key = _row_key(lanes, spec, span, 0)
        _lost_with(lanes, span, DIED_TWICE, now_us)
        return
    if span.together:
        together = <u16> max(1, min(<u32> together, <u32> span.together // 2))
    if not span_again(lanes, span, together, True, now_us):
        _lost_with(lanes, span, b"", now_us)


cdef u16 _together(const Replica* r, const Batch* batch, u32 n, u64 now_us) noexcept nogil:
    """Return how many of n rows, those of a batch among them, are sent again at once: one, unless
    there is no time for all of them one after another."""
    cdef double one_us, left_us = 1
    if r.batcher.config.by_cost:
        return 1
    one_us = batcher_predict_us(&r.batcher, 1)
    if batch.first_due_us > now_us:
        left_us = <double> (batch.first_due_us - now_us) / 2
    return <u16> min(<double> min(n, <u32> 0xFFFF), 1 + one_us * n / left_us)


cdef Key _row_key(Lanes* lanes, const RowSpec* spec, const Span* span, u32 k) noexcept nogil:
    """Return the key of row k of a span, whatever its query's salt."""
    cdef Task* task = task_of(lanes, span.ticket)
    cdef const u8* row = span_rows(lanes, span, task.bytes)
    return key_of(lanes.cache, spec.uid, 0, row + <u64> k * task.bytes, task.bytes)


cdef void _lost_with(Lanes* lanes, const Span* span, const char* text, u64 now_us) noexcept nogil:
    """End a span because its container died. text: why it is not sent again; empty: there is no
    time, or nobody waits."""
    cdef Value why
    why.word = 0
    why.tag = TAG_NONE
    if text[0]:
        _output_text(text, strlen(text), &why)
    span_end(lanes, span, REPLICA_LOST, &why, now_us)
    value_drop(&why)


cdef bint _is_refused(Lanes* lanes, const RowSpec* spec, RefusedRows* refused, const Span* span,
                      u32 k, u64 now_us) noexcept nogil:
    cdef Key key = _row_key(lanes, spec, span, k)
    return refused_rows_has(refused, &key, now_us)


cdef u64 _refuse_single(Lanes* lanes, Lane* lane, const RowSpec* spec, RefusedRows* refused,
                        Span* span, u64 now_us) noexcept nogil:
    """End a task that waits, if it is refused. Return 1 if it was."""
    if not _is_refused(lanes, spec, refused, span, 0, now_us):
        return 0
    lane_take_row(lanes, lane, span.ticket, span)
    _lost_with(lanes, span, REFUSED, now_us)
    return 1


cdef u64 _refuse_rows(Lanes* lanes, Lane* lane, const RowSpec* spec, RefusedRows* refused,
                      const Span* span, u64 now_us) noexcept nogil:
    """End the slots of the rows of a chunk that are refused. The lane passes over them later, as
    over cancelled ones. Return how many there were."""
    cdef Task* task = task_of(lanes, span.ticket)
    cdef Value why
    cdef u64 found = 0
    cdef u32 k, row
    for k in range(span.rows):
        row = span.first + k
        if chunk_ended_from(task, row, row + 1) or not _is_refused(lanes, spec, refused, span, k,
                                                                   now_us):
            continue
        _output_text(REFUSED, strlen(REFUSED), &why)
        chunk_end_rows(lanes, lane, task, row, 1, REPLICA_LOST, &why, now_us)
        value_drop(&why)
        found += 1
    return found


cdef u64 lane_refuse(Lanes* lanes, Lane* lane, const RowSpec* spec, RefusedRows* refused, u64 first,
                     u64 now_us) noexcept nogil:
    cdef Task* task
    cdef Span span
    cdef u64 pos, found = 0
    memset(&span, 0, sizeof(Span))
    for pos in range(first, lane.seen):
        span.ticket = ticket_of(lane.id, pos)
        task = task_of(lanes, span.ticket)
        if task == NULL or task.phase != WAITING:
            continue
        span.first, span.rows = 0, 1
        if task.slots == NULL:
            found += _refuse_single(lanes, lane, spec, refused, &span, now_us)
            continue
        span.first = task.next_row
        span.rows = <u16> (task.rows - task.next_row)
        found += _refuse_rows(lanes, lane, spec, refused, &span, now_us)
    return found


cdef void lane_refuse_all(Lanes* lanes, Lane* lane, const RowSpec* spec, RefusedRows* refused,
                          u64 now_us) noexcept nogil:
    cdef size_t i = lane.retry.size()
    cdef Span span
    cdef Task* task
    while i:
        i -= 1
        span = lane.retry[0][i]
        task = task_of(lanes, span.ticket)
        if task == NULL:
            continue
        if task.slots != NULL:
            _refuse_rows(lanes, lane, spec, refused, &span, now_us)
        elif task.phase == WAITING:
            _refuse_single(lanes, lane, spec, refused, &span, now_us)
    lane_refuse(lanes, lane, spec, refused, lane.head, now_us)


cdef bint batch_leave_out(Batch* batch, Lanes* lanes, const RowSpec* spec, RefusedRows* refused,
                          u64 now_us) noexcept nogil:
    cdef Span* kept = <Span*> malloc(<u64> batch.n * sizeof(Span))
    cdef Span run, one
    cdef Task* task
    cdef u32 s, k, n = 0, count = 0
    if kept == NULL:
        return True                 # it is sent as it is
    for s in range(batch.span_count):
        run = batch.spans[s]
        run.rows = 0
        task = task_of(lanes, run.ticket)
        for k in range(batch.spans[s].rows):
            if not (task.slots != NULL and chunk_ended_from(task, run.first + run.rows,
                                                            run.first + run.rows + 1)
                    or refused.count and _is_refused(lanes, spec, refused, &batch.spans[s], k,
                                                     now_us)):
                run.rows += 1
                continue
            if run.rows:
                kept[count] = run
                count += 1
                n += run.rows
            one = run
            one.first = batch.spans[s].first + k
            one.rows = 1
            _lost_with(lanes, &one, REFUSED, now_us)
            run.first = one.first + 1
            run.rows = 0
        if run.rows:
            kept[count] = run
            count += 1
            n += run.rows
    free(batch.spans)
    batch.spans = kept
    batch.span_count = count
    batch.n = n
    return n > 0


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


cdef bint reply_value(const Header* header, const Rows* rows, Value* value) noexcept nogil:
    cdef u64 nbytes = rows.row_bytes
    if header.flags & VARIABLE:
        nbytes = <u64> rows.lengths[0] * itemsize(header.dtype)
    return _output_value(header, rows, 0, 0, nbytes, rows.qualifiers, value)


cdef void _output_text(const char* text, u64 n, Value* value) noexcept nogil:
    cdef Blob* blob = blob_new(text, n)
    value.word = 0
    value.tag = TAG_NONE
    if blob != NULL:
        blob.dtype = STR
        value.word = <u64> blob
        value.tag = TAG_BLOB


# -- A batch of rows as a frame, or as a message of protocol 1, on its container's connection.

cdef extern from *:
    """
    static const unsigned char clipper_zeros[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    """
    const u8* ZEROS "clipper_zeros"

cdef u64 NOTHING = ~<u64> 0

cdef enum:
    SEGMENT_BYTES = 1400        # size of a TCP segment: compressing less than that saves nothing


cdef Status replica_send(Replica* r, Lanes* lanes, const RowSpec* spec, Batch* batch,
                         u64 now_us) noexcept nogil:
    cdef Status status
    batch.id = r.next_id
    batch.sent_us = now_us
    if r.connection.protocol == 1:
        status = _send_v1(r, lanes, spec, batch)
    elif spec.variable:
        status = _send_variable(r, lanes, spec, batch, now_us)
    elif r.shared and _find_runs(r, lanes, batch):
        status = _send_shared(r, lanes, spec, batch, now_us)
    else:
        status = _send_fixed(r, lanes, spec, batch, now_us)
    if status != OK:
        return status
    batch.end_bytes = r.connection.bytes_queued
    r.next_id += 1
    r.flight[r.in_flight] = batch
    r.in_flight += 1
    if r.concurrency:
        _foresee(r, now_us)
    else:
        r.busy_until_us = max(r.busy_until_us, now_us) + <u64> batch_predict_us(r, batch)
    r.gauge.in_flight.store(r.in_flight, relaxed)
    note(&r.tally.batches, 1)
    histogram_note(&r.tally.batch_rows, batch.n)
    return OK


cdef Header _header(Replica* r, const RowSpec* spec, Batch* batch, u64 payload_bytes,
                    u64 now_us) noexcept nogil:
    cdef Header header
    memset(&header, 0, sizeof(Header))
    header.kind = PREDICT
    header.dtype = spec.dtype
    header.id = batch.id
    header.rows = batch.n
    header.payload_bytes = payload_bytes
    header.time_us = batch.first_due_us - now_us if batch.first_due_us > now_us else 0
    if spec.variable:
        header.flags = VARIABLE
        header.rank = 1
    else:
        header.rank = spec.rank
        memcpy(header.dims, spec.dims, sizeof(header.dims))
    if r.sessions:
        header.flags |= SESSIONS
        header.payload_bytes += <u64> batch.n * sizeof(u64)
    return header


cdef void _put_sessions(Lanes* lanes, const Batch* batch, u8* out) noexcept nogil:
    """Write the session of each row: the salt of its query."""
    cdef u32 i, k
    cdef u64 session
    for i in range(batch.span_count):
        session = task_of(lanes, batch.spans[i].ticket).salt
        for k in range(batch.spans[i].rows):
            memcpy(out + k * sizeof(u64), &session, sizeof(u64))
        out += batch.spans[i].rows * sizeof(u64)


cdef Status _send_fixed(Replica* r, Lanes* lanes, const RowSpec* spec, Batch* batch,
                        u64 now_us) noexcept nogil:
    cdef u64 data = spec.row_bytes * batch.n
    cdef u64 padding = (0 - data) & 7
    cdef Header header = _header(r, spec, batch, data + padding, now_us)
    cdef u64 nbytes
    cdef u32 i, crc = 0
    cdef const u8* rows
    cdef u8* sessions = NULL
    if header.payload_bytes > r.connection.limits.payload_bytes_max:
        return TOO_LARGE
    if r.sessions:
        sessions = <u8*> malloc(<u64> batch.n * sizeof(u64))
        if sessions == NULL:
            return NO_MEMORY
        _put_sessions(lanes, batch, sessions)
    connection_send(r.connection, batch.header, HEADER_BYTES)
    for i in range(batch.span_count):
        rows = span_rows(lanes, &batch.spans[i], spec.row_bytes)
        nbytes = spec.row_bytes * batch.spans[i].rows
        connection_send(r.connection, rows, nbytes)
        if r.connection.checked:
            crc = crc32(crc, rows, nbytes)
    connection_send(r.connection, ZEROS, padding)
    if r.connection.checked:
        header.flags |= CHECKED
        header.payload_crc = crc32(crc32(crc, ZEROS, padding), sessions,
                                   header.payload_bytes - data - padding)
    if r.sessions:
        connection_send_owned(r.connection, sessions, <u64> batch.n * sizeof(u64))
    header_encode(&header, batch.header)
    return OK


cdef bint _find_runs(Replica* r, Lanes* lanes, Batch* batch) noexcept nogil:
    """Write the batch as runs of rows in regions. Return False if some of its rows cannot be
    shared, or there is no memory."""
    cdef Run run
    cdef Lane* lane
    cdef Span* span
    cdef u32 i
    if not make_room(r.runs[0], batch.span_count):
        return False
    r.runs.clear()
    run.region = run.count = 0
    run.first = 0
    for i in range(batch.span_count):
        span = &batch.spans[i]
        lane = lane_of(lanes, span.ticket)
        if lane.ring.fd < 0:
            return False
        if run.count and lane.id == run.region and span_place(lane, span) == run.first + run.count:
            run.count += span.rows
            continue
        if run.count:
            r.runs.push_back(run)
        run.region = lane.id
        run.count = span.rows
        run.first = span_place(lane, span)
    r.runs.push_back(run)
    return True


cdef Status _announce_region(Replica* r, Lane* lane, u64 row_bytes, u64 now_us) noexcept nogil:
    """Send the region of a lane before its first use on this connection."""
    cdef size_t i
    cdef Status status
    for i in range(r.regions.size()):
        if r.regions[0][i] == lane.id:
            return OK
    if not make_room(r.regions[0], r.regions.size() + 1):
        return NO_MEMORY
    status = connection_send_region(r.connection, lane.id, lane_places(lane), row_bytes,
                                    lane.ring.fd, now_us)
    if status == OK:
        r.regions.push_back(lane.id)
    return status


cdef Status _send_shared(Replica* r, Lanes* lanes, const RowSpec* spec, Batch* batch,
                         u64 now_us) noexcept nogil:
    cdef u64 payload_bytes = r.runs.size() * RUN_BYTES
    cdef Header header = _header(r, spec, batch, payload_bytes, now_us)
    cdef Status status
    cdef size_t i
    cdef u8* frame
    if max(payload_bytes, spec.row_bytes * batch.n) > r.connection.limits.payload_bytes_max:
        return TOO_LARGE
    for i in range(r.runs.size()):
        status = _announce_region(r, lanes.by_id[r.runs[0][i].region], spec.row_bytes, now_us)
        if status != OK:
            return status
    frame = <u8*> malloc(HEADER_BYTES + payload_bytes)
    if frame == NULL:
        return NO_MEMORY
    memcpy(frame + HEADER_BYTES, r.runs.data(), payload_bytes)
    header.flags = SHARED
    if r.connection.checked:
        header.flags |= CHECKED
        header.payload_crc = crc32(0, frame + HEADER_BYTES, payload_bytes)
    header_encode(&header, frame)
    connection_send_owned(r.connection, frame, HEADER_BYTES + payload_bytes)
    batch.shared = True
    return OK


cdef u64 _gather(Replica* r, Lanes* lanes, Batch* batch) noexcept nogil:
    """Put pointers and lengths of the batch's rows into the scratch vectors. Return the number of
    bytes of all rows; NOTHING if there is no memory."""
    cdef u32 i, k, n = 0
    cdef u64 total = 0
    cdef Task* task
    cdef const u8* row
    if not (make_room(r.rows[0], batch.n) and make_room(r.row_bytes[0], batch.n)
            and make_room(r.row_bytes32[0], batch.n)):
        return NOTHING
    r.rows.resize(batch.n)
    r.row_bytes.resize(batch.n)
    r.row_bytes32.resize(batch.n)
    for i in range(batch.span_count):
        task = task_of(lanes, batch.spans[i].ticket)
        row = <const u8*> task_row(lanes, batch.spans[i].ticket,
                                   task) + <u64> batch.spans[i].first * task.bytes
        for k in range(batch.spans[i].rows):
            r.rows[0][n] = row + <u64> k * task.bytes
            r.row_bytes[0][n] = task.bytes
            r.row_bytes32[0][n] = task.bytes
            total += task.bytes
            n += 1
    return total


cdef Status _send_variable(Replica* r, Lanes* lanes, const RowSpec* spec, Batch* batch,
                           u64 now_us) noexcept nogil:
    cdef u64 data_bytes = _gather(r, lanes, batch)
    cdef u64 payload_bytes = variable_payload_bytes(batch.n, data_bytes)
    cdef Header header = _header(r, spec, batch, payload_bytes, now_us)
    cdef u8* frame
    if data_bytes == NOTHING:
        return NO_MEMORY
    if header.payload_bytes > r.connection.limits.payload_bytes_max:
        return TOO_LARGE
    frame = <u8*> malloc(HEADER_BYTES + header.payload_bytes)
    if frame == NULL:
        return NO_MEMORY
    if r.sessions:
        _put_sessions(lanes, batch, frame + HEADER_BYTES + payload_bytes)
    variable_encode(batch.n, r.rows.data(), r.row_bytes.data(), itemsize(spec.dtype),
                    frame + HEADER_BYTES)
    if spec.dtype == STR and _is_searched(r, data_bytes):
        frame = _compressed(r, &header, frame, data_bytes)
    if r.connection.checked:
        header.flags |= CHECKED
        header.payload_crc = crc32(0, frame + HEADER_BYTES, header.payload_bytes)
    header_encode(&header, frame)
    connection_send_owned(r.connection, frame, HEADER_BYTES + header.payload_bytes)
    return OK


cdef bint _is_searched(const Replica* r, u64 text_bytes) noexcept nogil:
    return (r.connection.search != LITERALS and not r.sessions
            and SEGMENT_BYTES <= text_bytes <= LZ4_BYTES_MAX)


cdef u8* _compressed(Replica* r, Header* header, u8* frame, u64 data_bytes) noexcept nogil:
    """Return the frame with its strings as an LZ4 block; unchanged if that is no smaller, or there
    is no memory."""
    cdef u8* packed = <u8*> malloc(HEADER_BYTES + compressed_bound(header.rows, data_bytes))
    cdef u64 payload_bytes
    if packed == NULL:
        return frame
    payload_bytes = compressed_encode(header.rows, frame + HEADER_BYTES, data_bytes,
                                      r.connection.search,
                                      packed + HEADER_BYTES)
    if payload_bytes >= header.payload_bytes:
        free(packed)
        return frame
    free(frame)
    header.flags |= COMPRESSED
    header.payload_bytes = payload_bytes
    return packed


cdef Status _send_v1(Replica* r, Lanes* lanes, const RowSpec* spec, Batch* batch) noexcept nogil:
    cdef u64 data_bytes = _gather(r, lanes, batch)
    cdef u64 bound = v1_bound(r.v1_format, batch.n, data_bytes)
    cdef u64 n
    cdef u8* message
    cdef u8* packed = NULL
    if data_bytes == NOTHING:
        return NO_MEMORY
    if bound > r.connection.limits.payload_bytes_max:
        return TOO_LARGE
    message = <u8*> malloc(bound)
    if message == NULL:
        return NO_MEMORY
    n = v1_encode(r.v1_format, batch.n, r.rows.data(), r.row_bytes32.data(), message, bound)
    if n == 0:
        free(message)
        return TOO_LARGE
    if spec.dtype == STR and _is_searched(r, data_bytes):
        packed = <u8*> malloc(bound)
    if packed != NULL:
        n = v1_compress(message, n, r.connection.search, packed)
        free(message)
        message = packed
    connection_send_owned(r.connection, message, n)
    return OK
