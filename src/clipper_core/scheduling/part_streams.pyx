"""Queries that are answered in parts, as the loop sees them."""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset, strlen

from clipper_core.results.part_stream cimport (
    STREAM_CLOSING, STREAM_GONE, STREAM_NEW, STREAM_OPEN, STREAM_WAITING, part_stream_add,
    part_stream_end, part_stream_is_ended, part_stream_release, part_streams_take,
)
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.dtype cimport ANY, itemsize
from clipper_core.runtime.histogram cimport histogram_note, note
from clipper_core.runtime.machine cimport acquire, aligned_new, release, seq_cst
from clipper_core.runtime.status cimport (
    BAD_FRAME, BAD_OUTPUT, CANCELLED, CLOSED, DEADLINE, FULL, MODEL_ERROR, NO_MEMORY, NO_REPLICA,
    OK, REPLICA_LOST, TOO_LARGE,
)
from clipper_core.runtime.timer_wheel cimport NEVER
from clipper_core.scheduling.container_connection cimport connection_send_owned
from clipper_core.scheduling.model_state cimport ModelState, replica_accepts
from clipper_core.scheduling.replica cimport reply_value
from clipper_core.wire.codec cimport (
    ALLOWANCE_BYTES, CANCEL, CHECKED, HEADER_BYTES, PART, PARTS, PREDICT, SESSIONS, VARIABLE, Rows,
    crc32, header_encode, rows_open, variable_encode, variable_payload_bytes,
)
from clipper_core.wire.prediction cimport Value

cdef enum:
    INDEX_BITS = 16             # of an id: the place in `all`

cdef u64 QUERY = <u64> 1 << 63  # in their ids, so that none is that of a batch

cdef const char* TOO_MANY_BYTES = (b"the parts have more bytes in all than limits.answer_bytes_max "
                                   b"allows")
cdef const char* NO_PARTS = b"the containers of this model that are connected answer in one part"
cdef const char* OTHER_TYPE = b"the model gave a part of another type than its declared output"
cdef const char* FIRST_LATE = b"the first part did not arrive by its deadline (slo_ms)"
cdef const char* NEXT_LATE = b"the next part did not arrive by its deadline (part_slo_ms)"
cdef const char* WHOLE_LATE = b"the answer was not complete by its deadline (slo_total_ms)"


cdef PartStreams* part_streams_new(u64 ahead, u64 bytes_max, u32 per_replica) noexcept nogil:
    cdef PartStreams* p = <PartStreams*> aligned_new(sizeof(PartStreams))
    if p == NULL:
        return NULL
    p.all = make[vector[PartStreamPointer]]()
    p.free = make[vector[u32]]()
    p.touched = make[vector[u32]]()
    p.line = make[vector[PartStreamPointer]]()
    p.due_us = NEVER
    p.ahead = ahead
    p.bytes_max = bytes_max
    p.per_replica = per_replica
    p.next_serial = 1
    if p.all == NULL or p.free == NULL or p.touched == NULL or p.line == NULL:
        part_streams_free(p)
        return NULL
    return p


cdef void part_streams_free(PartStreams* p) noexcept nogil:
    if p == NULL:
        return
    if p.all != NULL and p.free != NULL:
        part_streams_close(p, CLOSED, 0)
    del p.all
    del p.free
    del p.touched
    del p.line
    free(p)


cdef void part_streams_close(PartStreams* p, Status status, u64 now_us) noexcept nogil:
    cdef PartStream* s = part_streams_take(&p.inbox)
    cdef PartStream* after
    cdef size_t i
    while s != NULL:
        after = s.next_listed
        s.listed.store(0, seq_cst)
        if s.place == STREAM_NEW:
            s.place = STREAM_GONE
            part_stream_end(s, status, b"", 0, now_us)
        part_stream_release(s)
        s = after
    for i in range(p.all.size()):
        if p.all[0][i] != NULL:
            _end(p, p.all[0][i], status, b"", now_us)
            _forget(p, p.all[0][i])


cdef ModelState* _model(const PartStream* s) noexcept nogil:
    return <ModelState*> s.model


cdef Replica* _replica(const PartStream* s) noexcept nogil:
    """Return the replica that makes the parts; NULL without one."""
    cdef ModelState* m = _model(s)
    cdef size_t i
    for i in range(m.replicas.size() if s.place == STREAM_OPEN or s.place == STREAM_CLOSING else 0):
        if m.replicas[0][i] == s.conn:
            return m.replica_set.members[0][i]
    return NULL


# -- what is sent
# --------------------------------------------------------------------------------------------------

cdef void _touch(PartStreams* p, u32 conn) noexcept nogil:
    if make_room(p.touched[0], p.touched.size() + 1):
        p.touched.push_back(conn)       # else the next frame of the connection takes it along


cdef bint _send(PartStreams* p, Replica* r, Header* header, const u8* payload, u8* frame,
                u64 now_us) noexcept nogil:
    """Send a frame whose payload lies at frame + HEADER_BYTES."""
    if r.connection.checked and header.payload_bytes:
        header.flags |= CHECKED
        header.payload_crc = crc32(0, frame + HEADER_BYTES, header.payload_bytes)
    header_encode(header, frame)
    connection_send_owned(r.connection, frame, HEADER_BYTES + header.payload_bytes)
    r.connection.sent_us = now_us
    _touch(p, r.conn)
    return True


cdef void _send_control(PartStreams* p, Replica* r, int kind, u64 id, u64 number, u64 nbytes,
                        u64 now_us) noexcept nogil:
    cdef Header header
    cdef u8* frame = <u8*> malloc(HEADER_BYTES + nbytes)
    if frame == NULL:
        return              # a CANCEL less: the container goes on until it may send no more
    memset(&header, 0, sizeof(Header))
    header.kind = <u8> kind
    header.id = id
    header.payload_bytes = nbytes
    memcpy(frame + HEADER_BYTES, &number, nbytes)
    _send(p, r, &header, NULL, frame, now_us)


cdef Status _send_query(PartStreams* p, Replica* r, PartStream* s, u64 now_us) noexcept nogil:
    cdef const RowSpec* spec = &_model(s).spec
    cdef Header header
    cdef const void* row = s.row
    cdef u64 nbytes = s.row_bytes, body
    cdef u8* frame
    memset(&header, 0, sizeof(Header))
    header.kind = PREDICT
    header.flags = PARTS
    header.dtype = spec.dtype
    header.rows = 1
    header.id = s.id
    header.time_us = s.due_us.load(acquire) - min(s.due_us.load(acquire), now_us)
    body = (nbytes + 7) & ~<u64> 7
    if spec.variable:
        header.flags |= VARIABLE
        header.rank = 1
        body = variable_payload_bytes(1, nbytes)
    else:
        header.rank = spec.rank
        memcpy(header.dims, spec.dims, sizeof(header.dims))
    header.payload_bytes = body
    if r.sessions:
        header.flags |= SESSIONS
        header.payload_bytes += sizeof(u64)
    if header.payload_bytes > r.connection.limits.payload_bytes_max:
        return TOO_LARGE
    frame = <u8*> malloc(HEADER_BYTES + header.payload_bytes)
    if frame == NULL:
        return NO_MEMORY
    memset(frame + HEADER_BYTES + body - 8 if body else frame, 0, 8)
    if spec.variable:
        variable_encode(1, &row, &nbytes, itemsize(spec.dtype), frame + HEADER_BYTES)
    else:
        memcpy(frame + HEADER_BYTES, row, nbytes)
    if r.sessions:
        memcpy(frame + HEADER_BYTES + body, &s.session, sizeof(u64))
    _send(p, r, &header, NULL, frame, now_us)
    return OK


# -- the life of a query
# --------------------------------------------------------------------------------------------------

cdef void _end(PartStreams* p, PartStream* s, Status status, const char* text,
               u64 now_us) noexcept nogil:
    """End the query for its reader; a container that still works on it is told."""
    cdef Replica* r
    if part_stream_is_ended(s):
        return
    part_stream_end(s, status, text, strlen(text), now_us)
    if s.place == STREAM_OPEN and status != OK:
        r = _replica(s)
        if r != NULL:
            _send_control(p, r, CANCEL, s.id, 0, 0, now_us)
        s.place = STREAM_CLOSING
        s.due_us.store(NEVER, release)


cdef void _forget(PartStreams* p, PartStream* s) noexcept nogil:
    """Take a query that has ended off the table."""
    cdef Replica* r = _replica(s)
    if r != NULL:
        r.streams -= 1
    if s.place == STREAM_WAITING:
        _leave_line(p, s)
    s.place = STREAM_GONE
    p.all[0][s.id & ((1 << INDEX_BITS) - 1)] = NULL
    p.free.push_back(<u32> (s.id & ((1 << INDEX_BITS) - 1)))
    p.count -= 1
    p.look = p.look or not p.line.empty()
    part_stream_release(s)


cdef void _leave_line(PartStreams* p, const PartStream* s) noexcept nogil:
    cdef size_t i
    for i in range(p.line.size()):
        if p.line[0][i] == s:
            p.line.erase(p.line.begin() + i)
            return


cdef void _due(PartStreams* p, PartStream* s, u64 due_us) noexcept nogil:
    s.due_us.store(due_us, release)
    p.due_us = min(p.due_us, due_us)


cdef bint _take_in(PartStreams* p, PartStream* s, u64 now_us) noexcept nogil:
    """Put a new query on the table; takes over its reference. False: there is no place."""
    cdef u32 i
    if p.free.empty():
        i = <u32> p.all.size()
        if (i >= STREAMS_MAX or not make_room(p.all[0], i + 1) or not make_room(p.free[0], i + 1)
                or not make_room(p.line[0], i + 1)):
            s.place = STREAM_GONE
            part_stream_end(s, FULL, b"", 0, now_us)
            return False
        p.all.push_back(s)
    else:
        i = p.free.back()
        p.free.pop_back()
        p.all[0][i] = s
    s.id = QUERY | p.next_serial << INDEX_BITS | i
    p.next_serial += 1
    s.place = STREAM_WAITING
    p.count += 1
    note(&_model(s).tally.streams, 1)
    p.line.push_back(s)         # all that there are fit
    p.look = True
    _due(p, s, s.begun_us + min(s.first_us, s.total_us))
    return True


cdef void _heard(PartStreams* p, PartStream* s, u64 now_us) noexcept nogil:
    """Handle what its reader wants."""
    cdef u64 allowed = s.allowed.load(acquire), wanted
    cdef Replica* r
    if s.place == STREAM_NEW and not _take_in(p, s, now_us):
        part_stream_release(s)
        return
    if s.cancelled.load(seq_cst):
        _end(p, s, CANCELLED, b"", now_us)
        if s.place == STREAM_WAITING:
            _forget(p, s)
        return
    wanted = s.taken.load(seq_cst) + s.ahead
    if s.place != STREAM_OPEN or wanted <= allowed:
        return
    r = _replica(s)
    if r == NULL:
        return
    if allowed == s.parts.size():       # it could not go on until now
        _due(p, s, _next_due_us(s, now_us))
    s.allowed.store(wanted, release)
    _send_control(p, r, PART, s.id, wanted - allowed, ALLOWANCE_BYTES, now_us)


cdef u64 _next_due_us(const PartStream* s, u64 now_us) noexcept nogil:
    return min(now_us + s.part_us, s.begun_us + s.total_us)


cdef Replica* _with_room(const PartStreams* p, ModelState* m, bint* gives_parts) noexcept nogil:
    """Return the replica with the fewest sequences that has room for one more."""
    cdef Replica* best = NULL
    cdef Replica* r
    cdef size_t i
    gives_parts[0] = m.replica_set.members.empty()
    for i in range(m.replica_set.members.size()):
        r = m.replica_set.members[0][i]
        gives_parts[0] = gives_parts[0] or r.parts
        if (r.parts and replica_accepts(r) and r.streams < p.per_replica
                and (best == NULL or r.streams < best.streams)):
            best = r
    return best


cdef void _open(PartStreams* p, PartStream* s, u64 now_us) noexcept nogil:
    """Send a query that waits to a container, if one has room."""
    cdef bint gives_parts = False
    cdef Replica* r = _with_room(p, _model(s), &gives_parts)
    cdef Status status
    if r == NULL:
        if not gives_parts:
            _end(p, s, NO_REPLICA, NO_PARTS, now_us)
            _forget(p, s)
        return
    status = _send_query(p, r, s, now_us)
    if status != OK:
        _end(p, s, status, b"", now_us)
        _forget(p, s)
        return
    _leave_line(p, s)
    s.place = STREAM_OPEN
    s.conn = r.conn
    s.tries += 1
    s.allowed.store(s.ahead, release)
    r.streams += 1


cdef void _overdue(PartStreams* p, PartStream* s, u64 now_us) noexcept nogil:
    cdef bint is_connected = not _model(s).replica_set.members.empty()
    if now_us >= s.begun_us + s.total_us:
        _end(p, s, DEADLINE, WHOLE_LATE, now_us)
    elif not s.parts.empty():
        _end(p, s, DEADLINE, NEXT_LATE, now_us)
    elif is_connected:
        _end(p, s, DEADLINE, FIRST_LATE, now_us)
    else:
        _end(p, s, NO_REPLICA, b"", now_us)
    if s.place == STREAM_WAITING:
        _forget(p, s)


cdef void _end_overdue(PartStreams* p, u64 now_us) noexcept nogil:
    cdef PartStream* s
    cdef size_t i
    p.due_us = NEVER
    for i in range(p.all.size()):
        s = p.all[0][i]
        if s == NULL:
            continue
        if now_us >= s.due_us.load(acquire):
            _overdue(p, s, now_us)
        else:
            p.due_us = min(p.due_us, s.due_us.load(acquire))


cdef PartStream* _turned(PartStream* newest) noexcept nogil:
    """Return a list of announced streams with the oldest first."""
    cdef PartStream* first = NULL
    cdef PartStream* after
    while newest != NULL:
        after = newest.next_listed
        newest.next_listed = first
        first = newest
        newest = after
    return first


cdef void part_streams_step(PartStreams* p, u64 now_us) noexcept nogil:
    cdef PartStream* s = _turned(part_streams_take(&p.inbox))
    cdef PartStream* after
    while s != NULL:
        after = s.next_listed
        if s.place == STREAM_NEW:
            s.refs.fetch_add(1, relaxed)        # of the table
        s.listed.store(0, seq_cst)
        _heard(p, s, now_us)
        part_stream_release(s)
        s = after
    if now_us >= p.due_us:
        _end_overdue(p, now_us)
    if p.look:
        p.look = False
        _open_all(p, now_us)


cdef void _open_all(PartStreams* p, u64 now_us) noexcept nogil:
    """Send the queries that wait to containers, the oldest first."""
    cdef size_t i = 0
    cdef PartStream* s
    while i < p.line.size():
        s = p.line[0][i]
        _open(p, s, now_us)
        i += i < p.line.size() and p.line[0][i] == s


# -- what containers send
# --------------------------------------------------------------------------------------------------

cdef PartStream* _found(const PartStreams* p, const Replica* r, u64 id) noexcept nogil:
    cdef u64 i = id & ((1 << INDEX_BITS) - 1)
    if i >= p.all.size() or p.all[0][i] == NULL:
        return NULL
    if p.all[0][i].id != id or p.all[0][i].conn != r.conn:
        return NULL
    return p.all[0][i]


cdef Status part_streams_frame(PartStreams* p, Replica* r, const RowSpec* spec,
                               const Header* header, const u8* payload,
                               u64 now_us) noexcept nogil:
    cdef PartStream* s = _found(p, r, header.id)
    cdef Status status
    if not r.parts or s == NULL or (s.place != STREAM_OPEN and s.place != STREAM_CLOSING):
        return BAD_FRAME            # each ends once, by the container
    if header.rows == 0:
        if not part_stream_is_ended(s):
            part_stream_end(s, MODEL_ERROR if header.payload_bytes else OK, <const char*> payload,
                            header.payload_bytes, now_us)
            note(&_model(s).tally.evaluated, 1)
        _forget(p, s)
        return OK
    if s.place == STREAM_CLOSING:
        return OK                   # it was sent before the CANCEL was read
    if s.parts.size() >= s.allowed.load(acquire):
        return BAD_FRAME
    status = _add(p, r, spec, header, payload, s, now_us)
    if status == BAD_FRAME:
        return BAD_FRAME
    if status == TOO_LARGE:
        _end(p, s, TOO_LARGE, TOO_MANY_BYTES, now_us)
    elif status == BAD_OUTPUT:
        _end(p, s, BAD_OUTPUT, OTHER_TYPE, now_us)
    elif status != OK:
        _end(p, s, status, b"", now_us)
    return OK


cdef Status _add(PartStreams* p, Replica* r, const RowSpec* spec, const Header* header,
                 const u8* payload, PartStream* s, u64 now_us) noexcept nogil:
    cdef Rows rows
    cdef Value part
    cdef Status status = rows_open(header, payload, &r.connection.limits, &rows)
    if status != OK:
        return status
    if spec.output_dtype != ANY and spec.output_dtype != header.dtype:
        return BAD_OUTPUT
    s.bytes += header.payload_bytes
    if s.bytes > p.bytes_max:
        return TOO_LARGE
    if not reply_value(header, &rows, &part):
        return NO_MEMORY
    if not part_stream_add(s, &part, now_us):
        return NO_MEMORY
    note(&_model(s).tally.parts, 1)
    if s.parts.size() == 1:
        histogram_note(&_model(s).tally.first_part, now_us - s.begun_us)
    if s.parts.size() < s.allowed.load(acquire):
        _due(p, s, _next_due_us(s, now_us))
    else:
        _due(p, s, s.begun_us + s.total_us)     # it waits for its reader
    return OK


cdef void part_streams_lost(PartStreams* p, u32 conn, Status status, u64 now_us) noexcept nogil:
    cdef PartStream* s
    cdef size_t i
    for i in range(p.all.size() if p.count else 0):
        s = p.all[0][i]
        if s == NULL or s.conn != conn or (s.place != STREAM_OPEN and s.place != STREAM_CLOSING):
            continue
        if (s.place == STREAM_OPEN and s.parts.empty() and s.tries < STREAM_TRIES_MAX
                and status != CLOSED):
            s.place = STREAM_WAITING    # nothing was read of it: another container begins it
            s.conn = 0
            p.line.insert(p.line.begin(), s)
            p.look = True
            continue
        s.conn = 0                      # there is nobody to tell
        _end(p, s, CLOSED if status == CLOSED else REPLICA_LOST, b"", now_us)
        _forget(p, s)
