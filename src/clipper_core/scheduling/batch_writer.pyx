"""A batch of rows as a frame, or as a message of protocol 1, on its container's connection."""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from clipper_core.runtime.allocation cimport make_room
from clipper_core.runtime.dtype cimport STR, itemsize
from clipper_core.runtime.histogram cimport histogram_note, note
from clipper_core.runtime.machine cimport relaxed, u32, u8
from clipper_core.runtime.status cimport NO_MEMORY, OK, TOO_LARGE
from clipper_core.scheduling.container_connection cimport (
    connection_send, connection_send_owned, connection_send_region,
)
from clipper_core.scheduling.replica cimport Run, batch_predict_us
from clipper_core.scheduling.task cimport (
    Lane, Span, Task, lane_of, lane_places, span_place, span_rows, task_of, task_row,
)
from clipper_core.wire.codec cimport (
    CHECKED, COMPRESSED, HEADER_BYTES, PREDICT, RUN_BYTES, SESSIONS, SHARED, VARIABLE, Header,
    compressed_bound, compressed_encode, crc32, header_encode, v1_bound, v1_compress, v1_encode,
    variable_encode, variable_payload_bytes,
)
from clipper_core.wire.lz4 cimport LITERALS, LZ4_BYTES_MAX

cdef extern from *:
    """
    static const unsigned char clipper_zeros[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    """
    const u8* ZEROS "clipper_zeros"

cdef u64 NOTHING = ~<u64> 0

cdef enum:
    SEGMENT_BYTES = 1400        # what one TCP segment carries: making less of it smaller saves
                                # nothing


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
    """Whose query each row is: the salt that it was asked with."""
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
    """The batch as runs of rows in regions; False: some of its rows cannot be shared, or there is
    no memory."""
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


cdef Status _tell_region(Replica* r, Lane* lane, u64 row_bytes, u64 now_us) noexcept nogil:
    """Before its first use on this connection."""
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
        status = _tell_region(r, lanes.by_id[r.runs[0][i].region], spec.row_bytes, now_us)
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
    """Pointers and lengths of the batch's rows into the scratch vectors; -> bytes of all, NOTHING
    when there is no memory."""
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
    """The frame with its strings as an LZ4 block; as it was when that is no smaller, or memory is
    out."""
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
