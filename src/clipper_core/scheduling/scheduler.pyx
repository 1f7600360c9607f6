"""The scheduler: a sans-io state machine over lanes, replicas and connections.

A step handles commands from Python, rows from submitters and deadlines; then, for every model with
events, it sends batches to free replicas; then it wakes the waiters of all tasks that ended, once.
It never allocates per query and never takes the GIL.

Choice of the replica: the one that is predicted to finish first (`replica set`).

Choice of the rows: the lane whose head is due first, of the band whose turn it is (bands.pxd); the
batch is filled in the same order. Before a batch is formed, rows at the head that cannot finish by
their deadline in a batch of that size are shed (docs/design.md, "Early drop").
"""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from clipper_core.results.completion cimport completion_flush
from clipper_core.runtime.allocation cimport make_room
from clipper_core.runtime.histogram cimport note
from clipper_core.runtime.machine cimport aligned_new, eventfd_signal, i32, relaxed, seq_cst, u16
from clipper_core.runtime.ring cimport ring_row
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.status cimport (
    BAD_FRAME, DROPPED, FULL, NO_MEMORY, NO_REPLICA, OK, PENDING, Status,
)
from clipper_core.runtime.timer_wheel cimport NEVER, wheel_next_us
from clipper_core.scheduling.admission cimport Gate
from clipper_core.scheduling.bands cimport BANDS, band_turns_rate
from clipper_core.scheduling.batcher cimport (
    batcher_cost_must_shed, batcher_cost_worst_us, batcher_hold_until, batcher_know_slo,
    batcher_predict_us, batcher_rows,
)
from clipper_core.scheduling.container_connection cimport (
    connection_free, connection_has_unsent, connection_new, connection_next_frame,
    connection_received, connection_reserve, connection_rest, connection_send_frame,
    connection_send_with_id,
)
from clipper_core.scheduling.deferred_calls cimport deferred_calls_step
from clipper_core.scheduling.lane cimport (
    Lane, Span, Task, lane_close, lane_head, lane_of, lane_shed, lane_take, lane_take_in,
    lane_take_row, lane_together, lanes_expire, lanes_next_ready, lanes_wake, span_end, task_due_us,
    task_of,
)
from clipper_core.scheduling.model_state cimport (
    LANE_CLASSES, BandLanes, Candidate, CostBatch, another_can_finish, band_lanes,
    cost_batch_alone, cost_batch_choose, cost_batch_collect, model_queue_add,
    model_queue_ahead, model_queue_at_once, model_queue_charge, model_queue_earliest,
    model_queue_end_before, model_queue_is_active, model_queue_is_behind, model_queue_next,
    model_queue_slo_us, model_queue_tightest, model_queue_waiting, models_give_back,
    replica_set_batch_rows, replica_set_count_arrivals, replica_set_forecast,
    replica_set_has_other, replica_set_learn, replica_set_must_pass, replica_set_pick,
    replica_set_reserve, replica_set_speed, replica_set_update_ejections, too_late,
)
from clipper_core.scheduling.part_streams cimport (
    part_streams_frame, part_streams_have_news, part_streams_lost, part_streams_step,
)
from clipper_core.scheduling.refused_rows cimport RefusedRows, refused_rows_add
from clipper_core.scheduling.replica cimport (
    Batch, Blame, batch_drop, batch_free, batch_leave_out, batch_new, lane_refuse, lane_refuse_all,
    replica_bare, replica_begin, replica_frame, replica_free,
    replica_late, replica_lost, replica_new, replica_overdue, replica_send, replica_send_feedback,
)
from clipper_core.wire.codec cimport (
    ACCURACY, ANSWER, CALL, CANCEL, FAILURE, GOODBYE, HEARTBEAT, HELLO, PART, REFUSE, REPLY,
    WELCOME, Header, v1_format,
)
from clipper_core.wire.prediction cimport TAG_NONE, Value

cdef enum:
    HELLO_BYTES_MAX = 262144    # largest frame before a connection is attached; Python refuses a
                                # HELLO above 64 KiB with a reason
    HOUSEKEEPING_US = 25000           # interval of checks for overdue batches, heartbeats and
                                      # silence
    HELD_US = 1000000           # longest time between two steps

cdef double LONG_BATCH_US = 10000       # a container that waits for its next batch is idle for less
                                        # than a tenth of such a batch
cdef double SENT_LATELY = 1e-6          # rows per microsecond of a band
cdef double NEXT_TO = 0.7       # share of the value of the best batch, above which a shorter one
                                # that saves the row that is due first is used


# -- connections
# --------------------------------------------------------------------------------------------------

cdef ConnectionState* engine_slot(EngineState* e, u32 conn) noexcept nogil:
    cdef ConnectionState* slot = &e.connections[conn & 0xFFFF]
    return slot if slot.conn == conn and slot.connection != NULL else NULL


cdef ContainerConnection* engine_connection(EngineState* e, u32 conn) noexcept nogil:
    cdef ConnectionState* slot = engine_slot(e, conn)
    if slot == NULL:
        return NULL
    return slot.connection


cdef bint _has_room(EngineState* e) noexcept nogil:
    """Reserve space for one more connection on each of the loop's lists. A connection is on a list
    at most once, but released connections may still be on it."""
    cdef size_t n = e.connection_count + 1
    return (make_room(e.watched[0], e.watched.size() + n)
            and make_room(e.writers[0], e.writers.size() + n)
            and make_room(e.closing[0], e.closing.size() + n))


cdef u32 engine_open(EngineState* e, int fd, u64 now_us) noexcept nogil:
    cdef u32 i
    cdef ConnectionState* slot
    if e.connection_count >= e.connections_max:
        _add_event(e, CONNECTION_REJECTED, 0, 0, FULL, NULL, 0)
        return 0
    if not _has_room(e):
        return 0
    if e.free_slots.size():
        i = e.free_slots.back()
        e.free_slots.pop_back()
    else:
        e.slots_used += 1
        i = e.slots_used
    slot = &e.connections[i]
    slot.attached, slot.gone = (<PendingEvent*> malloc(sizeof(PendingEvent)),
                                <PendingEvent*> malloc(sizeof(PendingEvent) + sizeof(Blame)))
    slot.connection = (connection_new(&e.limits, now_us) if slot.attached != NULL
                       and slot.gone != NULL else NULL)
    if slot.connection == NULL:
        _forget_events(slot)
        e.free_slots.push_back(i)
        return 0
    slot.connection.spare = e.spare
    # until it is attached
    slot.connection.limits.payload_bytes_max = min(e.limits.payload_bytes_max,
                                                   <u64> HELLO_BYTES_MAX)
    slot.conn = ((slot.conn & <u32> 0xFFFF0000) + 0x10000) | i
    slot.connection.fd = fd
    slot.model = 0
    slot.quiet = slot.watched = slot.leaving = False
    _list_unattached(e, slot, i)
    _watch(e, slot)
    e.connection_count += 1
    return slot.conn


cdef void _list_unattached(EngineState* e, ConnectionState* slot, u32 i) noexcept nogil:
    slot.earlier, slot.later = e.last_unattached, 0
    if e.last_unattached:
        e.connections[e.last_unattached].later = i
    else:
        e.first_unattached = i
    e.last_unattached = i


cdef void _unlist_unattached(EngineState* e, ConnectionState* slot) noexcept nogil:
    if slot.earlier:
        e.connections[slot.earlier].later = slot.later
    else:
        e.first_unattached = slot.later
    if slot.later:
        e.connections[slot.later].earlier = slot.earlier
    else:
        e.last_unattached = slot.earlier
    slot.earlier = slot.later = 0


cdef ConnectionState* engine_longest_waiting(EngineState* e) noexcept nogil:
    cdef u32 i = e.first_unattached
    while i and e.connections[i].connection.closing:
        i = e.connections[i].later
    return &e.connections[i] if i else NULL


cdef void _watch(EngineState* e, ConnectionState* slot) noexcept nogil:
    if not slot.watched:
        slot.watched = True
        e.watched.push_back(slot.conn)


cdef void _want_write(EngineState* e, ConnectionState* slot) noexcept nogil:
    if not slot.connection.queued and connection_has_unsent(slot.connection):
        slot.connection.queued = True
        e.writers.push_back(slot.conn)


cdef void _send_control(EngineState* e, ConnectionState* slot, int kind, const void* payload, u64 n,
                        u64 now_us) noexcept nogil:
    connection_send_frame(slot.connection, kind, payload, n, now_us)
    _want_write(e, slot)


cdef void _close_soon(EngineState* e, ConnectionState* slot) noexcept nogil:
    if not slot.connection.closing:
        slot.connection.closing = True
        e.closing.push_back(slot.conn)


cdef void _place(EngineState* e, ConnectionState* slot, Replica* replica) noexcept nogil:
    e.replica_lock.lock()
    slot.replica = replica
    e.replica_lock.unlock()


cdef void engine_lost(EngineState* e, u32 conn, u32 status, u64 now_us) noexcept nogil:
    cdef ConnectionState* slot = engine_slot(e, conn)
    cdef Replica* gone
    cdef ModelState* model
    cdef Blame blame
    cdef size_t i
    if slot == NULL:
        return
    gone = slot.replica
    memset(&blame, 0, sizeof(Blame))
    if gone != NULL:
        model = e.models[slot.model]
        for i in range(model.replicas.size()):
            if model.replicas[0][i] == conn:
                model.replicas.erase(model.replicas.begin() + i)
                model.replica_set.members.erase(model.replica_set.members.begin() + i)
                break
        model.tally.replicas.fetch_sub(1, relaxed)
        replica_lost(gone, e.lanes, &model.spec, &blame, now_us)
        part_streams_lost(e.streams, conn, <Status> status, now_us)
        blame.model = slot.model
        if gone.calls_open:
            _report_call(e, DISCONNECTED, conn, 0, NULL, 0)
        _place(e, slot, NULL)
        replica_free(gone)
        _mark_ready(e, model)
    else:
        _unlist_unattached(e, slot)
    if slot.connection.protocol != 0 or slot.attached == NULL:
        if slot.gone != NULL:
            memcpy(<u8*> slot.gone + sizeof(PendingEvent), &blame, sizeof(Blame))
        _add_prepared_event(e, &slot.gone, DISCONNECTED, conn, slot.model, status,
                            sizeof(Blame) if blame.rows else 0)
    _forget_events(slot)                # a connection without HELLO was not reported
    connection_free(slot.connection)
    slot.connection = NULL
    e.connection_count -= 1
    e.free_slots.push_back(conn & 0xFFFF)


# -- events
# --------------------------------------------------------------------------------------------------

cdef void _add_event(EngineState* e, u32 kind, u32 conn, u32 model, u32 status, const void* data,
                     u64 nbytes) noexcept nogil:
    cdef PendingEvent* event = <PendingEvent*> malloc(sizeof(PendingEvent) + nbytes)
    if event == NULL:
        e.events_lost.fetch_add(1, relaxed)
        return
    event.nbytes = nbytes
    if nbytes:
        memcpy(<u8*> event + sizeof(PendingEvent), data, nbytes)
    _put_event(e, event, kind, conn, model, status)


cdef void _add_prepared_event(EngineState* e, PendingEvent** prepared, u32 kind, u32 conn,
                              u32 model, u32 status, u64 nbytes) noexcept nogil:
    """Add an event that was allocated when the connection was opened, with its data: so it cannot
    be lost if there is no memory."""
    cdef PendingEvent* event = prepared[0]
    prepared[0] = NULL
    if event != NULL:
        event.nbytes = nbytes
        _put_event(e, event, kind, conn, model, status)


cdef void _forget_events(ConnectionState* slot) noexcept nogil:
    free(slot.attached)
    free(slot.gone)
    slot.attached = slot.gone = NULL


cdef void _put_event(EngineState* e, PendingEvent* event, u32 kind, u32 conn, u32 model,
                    u32 status) noexcept nogil:
    event.kind = kind
    event.conn = conn
    event.model = model
    event.status = status
    event.data = <u8*> event + sizeof(PendingEvent)
    if not e.events.push(<u64> event):
        e.events_lost.fetch_add(1, relaxed)
        free(event)
    eventfd_signal(e.events_fd)


cdef Status _report_call(EngineState* e, u32 kind, u32 conn, u64 id, const u8* payload,
                         u64 nbytes) noexcept nogil:
    """Report a call of a model, or the end of its container. FULL, NO_MEMORY: it was not."""
    cdef PendingEvent* event = <PendingEvent*> malloc(sizeof(PendingEvent) + nbytes)
    if event == NULL:
        return NO_MEMORY
    event.kind = kind
    event.conn = conn
    event.model = event.status = 0
    event.id = id
    event.nbytes = nbytes
    event.data = <u8*> event + sizeof(PendingEvent)
    if nbytes:
        memcpy(event.data, payload, nbytes)
    if not e.calls.push(<u64> event):
        free(event)
        return FULL
    eventfd_signal(e.calls_fd)
    return OK


# -- what arrives
# --------------------------------------------------------------------------------------------------

cdef bint engine_received(EngineState* e, u32 conn, u64 n, u64 now_us) noexcept nogil:
    cdef ConnectionState* slot = engine_slot(e, conn)
    cdef Header header
    cdef u8* payload = NULL
    cdef Status status = OK
    if slot == NULL:
        return False
    connection_received(slot.connection, n, now_us)
    while status == OK:
        if slot.replica != NULL and slot.connection.protocol == 1:
            status = _bare(e, slot, now_us)
            continue
        status = connection_next_frame(slot.connection, &header, &payload)
        if status == OK:
            status = _frame(e, slot, &header, payload, now_us)
    if status != PENDING:
        e.frames_bad += 1
        return False
    if slot.replica == NULL:
        connection_rest(slot.connection)            # its HELLO has arrived, or a part of it
    _trust(e, slot)
    return True


cdef bint engine_receive_copy(EngineState* e, u32 conn, const u8* data, u64 n,
                              u64 now_us) noexcept nogil:
    cdef ContainerConnection* connection
    cdef u8* at
    cdef u64 room, taken, done = 0
    while done < n:
        connection = engine_connection(e, conn)
        room = 0 if connection == NULL else connection_reserve(connection, &at)
        if room == 0:
            return False
        taken = min(room, n - done)
        memcpy(at, data + done, taken)
        if not engine_received(e, conn, taken, now_us):
            return False
        done += taken
    return True


cdef void _trust(EngineState* e, ConnectionState* slot) noexcept nogil:
    """Note that a frame has arrived. A heartbeat does not answer a batch, so an overdue replica
    stays suspect."""
    if slot.replica != NULL and slot.replica.suspect and not replica_late(slot.replica):
        slot.replica.suspect = False
        slot.replica.gauge.suspect.store(0, relaxed)
        _mark_ready(e, e.models[slot.model])


cdef Status _bare(EngineState* e, ConnectionState* slot, u64 now_us) noexcept nogil:
    cdef ModelState* model = e.models[slot.model]
    _mark_ready(e, model)
    return replica_bare(slot.replica, e.lanes, &model.spec,
                        model_queue_slo_us(&model.queue, now_us),
                        now_us)


cdef Status _frame(EngineState* e, ConnectionState* slot, Header* header, u8* payload,
                   u64 now_us) noexcept nogil:
    cdef ModelState* model
    if header.kind == HEARTBEAT:
        return OK
    if header.kind == HELLO and slot.connection.protocol == 0:
        slot.connection.protocol = 2
        _add_event(e, HELLO_RECEIVED, slot.conn, 0, OK, payload, header.payload_bytes)
        return OK
    if header.kind == GOODBYE:
        if slot.replica != NULL:
            slot.replica.draining = True
        if slot.quiet and slot.replica.in_flight:
            slot.leaving = True         # a model host still answers its batches: it leaves one of
                                        # several servers
        else:
            _close_soon(e, slot)
        return OK
    if slot.replica == NULL or (header.kind != REPLY and header.kind != FAILURE
                                and header.kind != ACCURACY):
        return _beside_batches(e, slot, header, payload, now_us)
    model = e.models[slot.model]
    _mark_ready(e, model)
    return replica_frame(slot.replica, e.lanes, &model.spec, header, payload,
                         model_queue_slo_us(&model.queue, now_us),
                         replica_set_has_other(&model.replica_set, slot.replica), now_us)


cdef Status _beside_batches(EngineState* e, ConnectionState* slot, const Header* header,
                            const u8* payload, u64 now_us) noexcept nogil:
    """Take in a part of an answer, or a call. Other frames are not allowed here."""
    cdef Replica* r = slot.replica
    if r == NULL:
        return BAD_FRAME
    if header.kind == CALL:
        if r.calls_open >= r.calls_max:
            return BAD_FRAME
        r.calls_open += 1
        return _report_call(e, CALL_RECEIVED, slot.conn, header.id, payload, header.payload_bytes)
    if header.kind == CANCEL and r.calls_max:
        return _report_call(e, CALL_CANCELLED, slot.conn, header.id, NULL, 0)
    if header.kind != PART:
        return BAD_FRAME
    return part_streams_frame(e.streams, slot.replica, &e.models[slot.model].spec, header, payload,
                              now_us)


# -- commands
# --------------------------------------------------------------------------------------------------

cdef bint engine_command(EngineState* e, const Command* command) noexcept nogil:
    cdef u64 pos = 0
    if not e.commands.cells.claim(&pos):
        return False
    memcpy(ring_row(e.commands, pos), command, sizeof(Command))
    e.commands.cells.publish(pos)
    lanes_wake(e.lanes)
    return True


cdef void _apply_commands(EngineState* e, u64 now_us) noexcept nogil:
    cdef Command* command
    while e.commands.cells.published(e.commands_head) and e.moves.size() < e.moves.capacity():
        command = <Command*> ring_row(e.commands, e.commands_head)
        if command.kind == MOVE_CONNECTION or command.kind == ADOPT_CONNECTION:
            e.moves.push_back(command[0])           # with its data
        else:
            _apply_command(e, command, now_us)
            free(command.data)
        e.commands.cells.release(e.commands_head)
        e.commands_head += 1


cdef void _apply_command(EngineState* e, Command* command, u64 now_us) noexcept nogil:
    cdef ConnectionState* slot = engine_slot(e, command.conn)
    if command.kind == SET_EARLIEST_REPLICA:
        e.models[command.model].replica_set.earliest_replica_us = command.when_us
        _mark_ready(e, e.models[command.model])
    elif command.kind == REFUSE_ROW:
        _refuse_row(e, e.models[command.model], <const Key*> command.data, command.when_us, now_us)
    if slot == NULL:
        return
    if command.kind == ATTACH:
        _attach(e, slot, command, now_us)
    elif command.kind == REFUSE_CONNECTION:
        _send_control(e, slot, REFUSE, command.data, command.nbytes, now_us)
        _close_soon(e, slot)
    elif command.kind == DRAIN and slot.replica != NULL:
        slot.replica.draining = True
        _watch(e, slot)
        _mark_ready(e, e.models[slot.model])
        _finish_draining(e, slot, now_us)
    elif command.kind == SEND_FEEDBACK and slot.replica != NULL:
        replica_send_feedback(slot.replica, command.data, command.nbytes, command.number, now_us)
        _want_write(e, slot)
    elif command.kind == SEND_ANSWER and slot.replica != NULL:
        slot.replica.calls_open -= slot.replica.calls_open > 0
        connection_send_with_id(slot.connection, ANSWER, command.id, command.data, command.nbytes,
                                now_us)
        _want_write(e, slot)
    elif command.kind == CLOSE_CONNECTION:
        _close_soon(e, slot)


cdef void _refuse_row(EngineState* e, ModelState* model, const Key* key, u64 until_us,
                      u64 now_us) noexcept nogil:
    cdef size_t i
    if model.refused == NULL:
        model.refused = <RefusedRows*> aligned_new(sizeof(RefusedRows))
    if model.refused == NULL:
        return                  # no memory: it is not refused
    refused_rows_add(model.refused, key, until_us, now_us)
    for i in range(model.queue.lanes.size()):
        lane_refuse_all(e.lanes, model.queue.lanes[0][i], &model.spec, model.refused, now_us)
    _mark_ready(e, model)


cdef void _attach(EngineState* e, ConnectionState* slot, Command* command,
                  u64 now_us) noexcept nogil:
    cdef ModelState* model = e.models[command.model]
    if slot.replica != NULL:
        return
    slot.connection.limits = e.limits
    slot.connection.checked = command.checked
    slot.connection.search = e.search_far if slot.connection.remote else e.search_near
    if replica_set_reserve(&model.replica_set) and make_room(model.replicas[0],
            model.replicas.size() + 1):
        _place(e, slot, replica_new(slot.connection, &model.tally, command.number,
                                    command.concurrency if command.protocol == 2 else 0))
    if slot.replica == NULL:
        _close_soon(e, slot)
        return
    _unlist_unattached(e, slot)
    slot.model = command.model
    slot.quiet = command.quiet and command.protocol == 2
    slot.heartbeat_us = command.heartbeat_us if command.heartbeat_us else e.heartbeat_us
    slot.replica.conn = slot.conn
    slot.replica.eject_after = e.eject_after
    replica_begin(slot.replica, &command.batching, command.timings, command.timing_count, now_us)
    slot.replica.sessions = command.sessions and command.protocol == 2
    slot.replica.parts = command.parts and command.protocol == 2
    slot.replica.cancels = command.cancels and command.protocol == 2
    slot.replica.calls_max = command.calls_max if command.protocol == 2 else 0
    if slot.replica.parts:
        model.parts.store(1, relaxed)
    e.streams.look = True
    slot.replica.shared = (command.shared and command.protocol == 2 and slot.connection.passes
                           and not command.sessions)
    if slot.replica.shared:
        model.shares.store(1, relaxed)
    slot.replica.v1_format = <u8> v1_format(model.spec.dtype, model.spec.variable)
    _send_control(e, slot, WELCOME, command.data, command.nbytes, now_us)
    slot.connection.protocol = command.protocol
    model.replicas.push_back(slot.conn)
    model.replica_set.members.push_back(slot.replica)
    model.replica_set.earliest_replica_us = 0
    model.tally.replicas.fetch_add(1, relaxed)
    _add_prepared_event(e, &slot.attached, ATTACHED, slot.conn, command.model, OK, 0)
    _mark_ready(e, model)


cdef void _finish_draining(EngineState* e, ConnectionState* slot, u64 now_us) noexcept nogil:
    if (slot.replica.draining and slot.replica.in_flight == 0 and slot.replica.streams == 0
            and not slot.connection.closing):
        if slot.connection.protocol == 2:
            _send_control(e, slot, GOODBYE, NULL, 0, now_us)
        _close_soon(e, slot)


# -- sending
# --------------------------------------------------------------------------------------------------

cdef void _mark_ready(EngineState* e, ModelState* model) noexcept nogil:
    if not model.hot:
        model.hot = True
        e.hot.push_back(model.index)


cdef Lane* _shed(EngineState* e, ModelState* model, Replica* r, u64* ticket, u64* waiting,
                 u64 tight, u32* n,
                 u64 now_us) noexcept nogil:
    """Drop rows that cannot finish in time. Return the lane to begin with; NULL if there is nothing
    for this replica. n: set to the size of the batch."""
    cdef Lane* lane = model_queue_next(&model.queue, e.lanes, ticket)
    cdef u64 due
    while lane != NULL:
        due = task_of(e.lanes, ticket[0]).due_us
        n[0] = replica_set_batch_rows(&model.replica_set, r, waiting[0], tight)
        if not too_late(r, n[0], due, now_us):
            return lane
        if another_can_finish(&model.replica_set, r, waiting[0], due, now_us):
            n[0] = 1                                # a slow replica may still be in time with a
                                                    # single row, so it is probed
            if not too_late(r, 1, due, now_us):
                return lane
            r.passed = model.replica_set.round
            return NULL
        lane_shed(e.lanes, lane, <u32> max(waiting[0] - n[0], <u64> 1), now_us)
        lane = model_queue_next(&model.queue, e.lanes, ticket)
        waiting[0] = model_queue_waiting(&model.queue)
    return NULL


cdef inline bint _dear(const Replica* r, double cost, bint alone, u64 due_us,
                       u64 now_us) noexcept nogil:
    """Return whether a batch of that cost would be too late, as too_late does."""
    return batcher_cost_must_shed(&r.batcher, now_us,
                                  max(now_us, r.busy_until_us if r.in_flight else now_us), cost,
                                  alone, due_us)


cdef Lane* _shed_by_cost(EngineState* e, ModelState* model, Replica* r, u64* ticket, u64* waiting,
                         u64 tight, u32* n, u64 now_us) noexcept nogil:
    """Drop rows that would be late, as _shed does, where rows differ in cost. `model.by_cost`
    chooses the rows of the batch."""
    cdef CostBatch* c = model.by_cost
    cdef u64 due, start = max(now_us, r.busy_until_us if r.in_flight else now_us)
    cdef u32 rows, rows_max
    cdef double limit, worth
    cdef u32 avoid = r.conn if replica_set_has_other(&model.replica_set, r) else 0
    cdef Lane* lane = model_queue_next(&model.queue, e.lanes, ticket)
    while lane != NULL:
        rows = replica_set_batch_rows(&model.replica_set, r, 0xFFFFFFFF, tight)
        if not cost_batch_collect(c, &model.queue, e.lanes, avoid, rows, now_us):
            r.passed = model.replica_set.round
            return NULL
        ticket[0] = c.rows[0][0].ticket
        lane = lane_of(e.lanes, ticket[0])
        due = c.rows[0][0].due_us
        rows_max = r.batcher.config.size_max
        limit = r.batcher.limit
        if rows < batcher_rows(&r.batcher):     # a probe, or space for queries with short SLOs
            rows_max = rows
            limit = rows * r.batcher.unit
        cost_batch_choose(c, &r.batcher, rows_max, limit, start)
        c.choice.full = c.choice.full and limit >= r.batcher.limit
        n[0] = c.choice.n
        if not _dear(r, c.choice.cost, n[0] == 1, due, now_us):
            return lane
        worth = c.choice.worth
        if n[0] > 1 and due > start:            # a shorter batch, if it is almost as good
            limit = _cost_within(r, <double> (due - start), limit)
            cost_batch_choose(c, &r.batcher, rows_max, limit, start)
            c.choice.full = False
            n[0] = c.choice.n
            if c.choice.worth >= NEXT_TO * worth and not _dear(r, c.choice.cost, n[0] == 1, due,
                                                               now_us):
                return lane
        if another_can_finish(&model.replica_set, r, waiting[0], due, now_us):
            cost_batch_alone(c)
            n[0] = 1
            if not _dear(r, c.choice.cost, True, due, now_us):
                return lane
            r.passed = model.replica_set.round
            return NULL
        _drop_row(e, lane, ticket[0], now_us)
        lane = model_queue_next(&model.queue, e.lanes, ticket)
        waiting[0] = model_queue_waiting(&model.queue)
    return NULL


cdef double _cost_within(const Replica* r, double time_us, double limit) noexcept nogil:
    """Return the largest cost, at most `limit`, of a batch that takes no longer than this in 99 of
    100 cases."""
    cdef double none_us = batcher_cost_worst_us(&r.batcher, 0)
    cdef double full_us = batcher_cost_worst_us(&r.batcher, limit)
    if full_us <= time_us:
        return limit
    return limit * (time_us - none_us) / (full_us - none_us) if time_us > none_us else 0


cdef void _drop_row(EngineState* e, Lane* lane, u64 ticket, u64 now_us) noexcept nogil:
    cdef Span span
    cdef Value nothing
    nothing.word = 0
    nothing.tag = TAG_NONE
    lane_take_row(e.lanes, lane, ticket, &span)
    span_end(e.lanes, &span, DROPPED, &nothing, now_us)


cdef bint _would_hold_up(const ModelState* model, const Replica* r) noexcept nogil:
    """Return whether a batch behind the one in flight would hold up rows of another band that come
    meanwhile: a batch takes long, and rows of several bands were sent lately."""
    cdef u32 band, active = 0
    if model.queue.turns == NULL or r.in_flight == 0 or r.concurrency:
        return False
    if batcher_predict_us(&r.batcher, batcher_rows(&r.batcher)) < LONG_BATCH_US:
        return False
    for band in range(BANDS):
        active += model.queue.turns.rate[band] > SENT_LATELY
    return active > 1


cdef void _pump(EngineState* e, ModelState* model, u64 now_us) noexcept nogil:
    cdef u64 waiting = model_queue_waiting(&model.queue)
    cdef u64 tight = model_queue_tightest(&model.queue, now_us, &model.replica_set.tight_us)
    cdef u64 ticket
    cdef u32 n
    cdef u16 together
    cdef i32 who
    cdef ConnectionState* slot
    cdef Lane* lane
    model.replica_set.round += 1
    replica_set_update_ejections(&model.replica_set)
    if (waiting and model.replica_set.members.empty()
        and model.replica_set.earliest_replica_us > now_us):
        # no replica will connect in time for them
        model_queue_end_before(&model.queue, e.lanes, model.replica_set.earliest_replica_us,
                               NO_REPLICA, now_us)
        waiting = model_queue_waiting(&model.queue)
    while waiting:
        who = replica_set_pick(&model.replica_set, waiting, now_us, &model.hold_until_us)
        if who < 0:
            break
        slot = engine_slot(e, model.replicas[0][who])
        if _would_hold_up(model, slot.replica):
            slot.replica.passed = model.replica_set.round
            continue
        if slot.replica.batcher.seeded:
            batcher_know_slo(&slot.replica.batcher,
                             <double> model_queue_slo_us(&model.queue, now_us))
        if model.by_cost == NULL:
            lane = _shed(e, model, slot.replica, &ticket, &waiting, tight, &n, now_us)
        else:
            lane = _shed_by_cost(e, model, slot.replica, &ticket, &waiting, tight, &n, now_us)
        if lane == NULL and slot.replica.passed == model.replica_set.round:
            continue
        if lane == NULL:
            break
        if model.by_cost == NULL and replica_set_must_pass(&model.replica_set, slot.replica, lane):
            slot.replica.passed = model.replica_set.round
            continue
        together = lane_together(e.lanes, lane, ticket)
        if (slot.replica.in_flight and (together or slot.replica.exclusive)
                and not _may_join(slot.replica, together)):
            slot.replica.passed = model.replica_set.round
            continue
        if together:
            n = min(n, <u32> together)
        model.hold_until_us = batcher_hold_until(&slot.replica.batcher, <u32> waiting,
                                                 task_of(e.lanes, ticket).submit_us,
                                                 task_due_us(task_of(e.lanes, ticket)))
        if model.hold_until_us > now_us:
            break
        model.hold_until_us = 0
        if not _send(e, model, slot, lane, ticket, n, together, now_us):
            break
        waiting = model_queue_waiting(&model.queue)
        tight = model_queue_tightest(&model.queue, now_us, &model.replica_set.tight_us)
    model.tally.queued.store(waiting, relaxed)
    _forecast(e, model, waiting, now_us)


cdef inline bint _may_join(const Replica* r, u16 together) noexcept nogil:
    """Return whether a row whose container died may go beside others of that kind, of which so
    many may be in flight."""
    return r.concurrency > 0 and r.exclusive and r.in_flight < together


cdef void _forecast(EngineState* e, ModelState* model, u64 waiting, u64 now_us) noexcept nogil:
    """Publish forecasts to submitters. Snapshots have the forecast for the tightest SLO."""
    cdef size_t i
    cdef u64 ahead
    cdef u64 tightest = model_queue_slo_us(&model.queue, now_us)
    cdef double speed = 0
    cdef Lane* lane
    if model.queue.turns != NULL:
        band_turns_rate(model.queue.turns, now_us)
        speed = replica_set_speed(&model.replica_set)
    replica_set_learn(&model.replica_set, e.lanes, &model.tally, now_us)
    for i in range(model.queue.lanes.size()):
        lane = model.queue.lanes[0][i]
        if model_queue_is_active(&model.queue, i, now_us) or model.replica_set.members.empty():
            ahead = model_queue_ahead(&model.queue, e.lanes, lane, speed, now_us)
            replica_set_forecast(&model.replica_set, e.lanes, lane, model.queue.gates[0][i], ahead,
                          waiting - min(ahead, waiting),
                          lane.slo_us == tightest,
                          not model_queue_is_behind(&model.queue, lane), now_us)


cdef u64 _wire_bytes(ModelState* model, ConnectionState* slot, Task* task) noexcept nogil:
    """Return how many bytes this row adds to a payload at most, including its length, its share of
    the padding, and the overhead of LZ4."""
    if slot.connection.protocol == 2 and not model.spec.variable:
        return task.bytes
    return task.bytes + task.bytes / 128 + 40


cdef bint _send(EngineState* e, ModelState* model, ConnectionState* slot, Lane* lane, u64 ticket,
                u32 n, u16 together,
                u64 now_us) noexcept nogil:
    cdef Batch* batch = batch_new(n)
    cdef Status status
    if batch == NULL:
        return False
    if model.by_cost == NULL:
        _fill(e, model, slot, batch, lane, ticket, n, now_us)
    else:
        _fill_by_cost(e, model, slot, batch)
    if model.refused != NULL and not batch_leave_out(batch, e.lanes, &model.spec, model.refused,
                                                     now_us):
        batch_free(batch)
        return True
    slot.replica.exclusive = together > 0
    status = replica_send(slot.replica, e.lanes, &model.spec, batch, now_us)
    if status != OK:
        batch_drop(e.lanes, batch, status, now_us)
        return True
    _watch(e, slot)
    _want_write(e, slot)
    return True


cdef void _fill(EngineState* e, ModelState* model, ConnectionState* slot, Batch* batch, Lane* lane,
                u64 ticket, u32 n,
                u64 now_us) noexcept nogil:
    """Put up to n rows into the batch, beginning with `ticket`, which is known to be in time. The
    rows of a chunk are due together."""
    cdef Task* task
    cdef Span* span
    cdef u64 nbytes = 0, fitting
    cdef u32 rows
    cdef u16 together = lane_together(e.lanes, lane, ticket)
    batch.slo_us = batch.first_due_us = NEVER
    while lane != NULL and batch.n < n:
        if lane_together(e.lanes, lane, ticket) != together:
            break
        task = task_of(e.lanes, ticket)
        if batch.n and replica_set_must_pass(&model.replica_set, slot.replica, lane):
            break
        if batch.n and too_late(slot.replica, n, task.due_us, now_us):
            if another_can_finish(&model.replica_set, slot.replica, n, task.due_us, now_us):
                break
            lane_shed(e.lanes, lane, 0xFFFF, now_us)
        else:
            fitting = (e.limits.payload_bytes_max
                       - min(nbytes + 8, e.limits.payload_bytes_max)) / _wire_bytes(model, slot,
                               task)
            if batch.n and fitting == 0:
                break
            span = &batch.spans[batch.span_count]
            rows = min(n - batch.n, model_queue_at_once(&model.queue))
            lane_take(e.lanes, lane, <u32> min(<u64> rows, max(fitting, <u64> 1)), span)
            model_queue_charge(&model.queue, e.lanes, lane, span.rows)
            batch.span_count += 1
            batch.n += span.rows
            nbytes += _wire_bytes(model, slot, task) * span.rows
            batch.due_us = max(batch.due_us, task.due_us)
            batch.first_due_us = min(batch.first_due_us, task_due_us(task))
            batch.slo_us = min(batch.slo_us, lane.slo_us)
        if model.queue.lanes.size() > 1 or not lane_head(e.lanes, lane, &ticket):
            lane = model_queue_next(&model.queue, e.lanes, &ticket)


cdef void _fill_by_cost(EngineState* e, ModelState* model, ConnectionState* slot,
                        Batch* batch) noexcept nogil:
    """Take the chosen rows that fit into a frame."""
    cdef CostBatch* c = model.by_cost
    cdef size_t i
    cdef Candidate* row
    cdef Task* task
    cdef Lane* lane
    cdef u64 nbytes = 8, more
    cdef double dearest = 0, useful = 0
    batch.slo_us = batch.first_due_us = NEVER
    batch.full = c.choice.full
    for i in range(c.rows.size()):
        row = &c.rows[0][i]
        if not row.chosen:
            continue
        task = task_of(e.lanes, row.ticket)
        more = _wire_bytes(model, slot, task)
        if batch.n and nbytes + more > e.limits.payload_bytes_max:
            break
        lane = lane_of(e.lanes, row.ticket)
        lane_take_row(e.lanes, lane, row.ticket, &batch.spans[batch.span_count])
        batch.span_count += 1
        batch.n += 1
        nbytes += more
        useful += row.cost
        model_queue_charge(&model.queue, e.lanes, lane,
                           row.cost / max(slot.replica.batcher.unit, 1.0))
        dearest = max(dearest, <double> row.cost)
        batch.due_us = max(batch.due_us, task.due_us)
        batch.first_due_us = min(batch.first_due_us, row.due_us)
        batch.slo_us = min(batch.slo_us, lane.slo_us)
    batch.cost = batch.n * dearest if c.padded else useful
    note(&model.tally.cost, <u64> useful)
    note(&model.tally.cost_padded, <u64> batch.cost)


# -- the step
# --------------------------------------------------------------------------------------------------

cdef void _take_in(EngineState* e, u64 now_us) noexcept nogil:
    cdef Lane* lane = lanes_next_ready(e.lanes)
    cdef ModelState* model
    cdef u64 own, first
    while lane != NULL:
        model = e.models[lane.model]
        first = lane.seen
        if lane.used_us == 0:
            if not model_queue_add(&model.queue, lane, _gate_of(model, lane)):
                lane_close(e.lanes, lane, NO_MEMORY, now_us)
                lane.used_us = 0        # as if no row had arrived; later rows try again
                lane = lanes_next_ready(e.lanes)
                continue
        own = lane_take_in(e.lanes, lane, now_us)
        if model.refused != NULL and model.refused.count:
            own -= min(own, lane_refuse(e.lanes, lane, &model.spec, model.refused, first, now_us))
        if lane.chunk_rows == 0:        # an array arrives at once: the forecast counts its waiting
                                        # rows
            # joined rows cost no replica time
            replica_set_count_arrivals(&model.replica_set, own, now_us)
        _mark_ready(e, model)
        lane = lanes_next_ready(e.lanes)


cdef Gate* _gate_of(ModelState* model, Lane* lane) noexcept nogil:
    cdef u32 klass = 0
    cdef BandLanes* b
    if lane.chunk_rows:
        return NULL                     # rows of an array are accepted whatever the forecast;
                                        # further ones wait with their caller
    b = band_lanes(model, lane.band)
    while klass < LANE_CLASSES - 1 and b.lanes[klass] != lane:
        klass += 1
    return &b.gates[klass]


cdef void _housekeeping(EngineState* e, u64 now_us) noexcept nogil:
    """Check the connections and models that need it, because a node of a mesh has thousands of idle
    ones."""
    cdef size_t i = 0
    cdef ConnectionState* slot
    cdef u64 away_us = now_us - e.housekeeping_us         # the loop did not read meanwhile, so
                                                          # containers were not silent
    while i < e.watched.size():
        slot = engine_slot(e, e.watched[0][i])
        if slot != NULL:
            slot.connection.received_us = min(slot.connection.received_us + away_us, now_us)
            _check_connection(e, slot, now_us)
            if _needs_housekeeping(slot):
                i += 1
                continue
            slot.watched = False
            connection_rest(slot.connection)
        e.watched[0][i] = e.watched.back()
        e.watched.pop_back()
    i = 0
    while i < e.waits.size():
        if _still_waits(e, e.models[e.waits[0][i]]):
            i += 1
            continue
        e.models[e.waits[0][i]].waits = False
        e.waits[0][i] = e.waits.back()
        e.waits.pop_back()
    models_give_back(&e.retired, e.lanes)
    e.housekeeping_us = now_us + HOUSEKEEPING_US


cdef bint _needs_housekeeping(const ConnectionState* slot) noexcept nogil:
    cdef const Replica* r = slot.replica
    return (r == NULL or not slot.quiet or r.in_flight > 0 or r.suspect or r.draining
            or connection_has_unsent(slot.connection))


cdef bint _still_waits(EngineState* e, ModelState* model) noexcept nogil:
    cdef u64 ticket
    # frees cancelled rows at the heads, even without replicas
    model_queue_earliest(&model.queue, e.lanes, &ticket)
    cdef u64 waiting = model_queue_waiting(&model.queue)
    model.tally.queued.store(waiting, relaxed)
    return waiting > 0


cdef void _check_connection(EngineState* e, ConnectionState* slot, u64 now_us) noexcept nogil:
    cdef Replica* r = slot.replica
    cdef u64 received_us = slot.connection.received_us
    cdef u64 silent = now_us - received_us if now_us > received_us else 0
    if r == NULL:
        if now_us > slot.connection.opened_us + e.hello_us:
            _close_soon(e, slot)
        return
    if replica_overdue(r, e.lanes, now_us):
        _close_soon(e, slot)
    _want_write(e, slot)
    if r.suspect:
        r.gauge.suspect.store(1, relaxed)
        _mark_ready(e, e.models[slot.model])              # its rows are sent to other replicas
    _finish_draining(e, slot, now_us)
    if slot.leaving and replica_late(r):
        _close_soon(e, slot)
    if slot.connection.protocol == 1 or slot.quiet:
        return
    if silent > 2 * slot.heartbeat_us:
        r.suspect = True
        r.gauge.suspect.store(1, relaxed)
    if silent > 3 * slot.heartbeat_us and (r.in_flight == 0 or now_us > r.flight[0].due_us):
        _close_soon(e, slot)
    if (now_us > slot.connection.sent_us + slot.heartbeat_us
        and not connection_has_unsent(slot.connection)):
        _send_control(e, slot, HEARTBEAT, NULL, 0, now_us)


cdef void _send_touched(EngineState* e) noexcept nogil:
    """Have the IO loop send what the queries in parts have put on connections."""
    cdef ConnectionState* slot
    cdef size_t i
    for i in range(e.streams.touched.size()):
        slot = engine_slot(e, e.streams.touched[0][i])
        if slot != NULL:
            _want_write(e, slot)
    e.streams.touched.clear()


cdef bint engine_idle(EngineState* e) noexcept nogil:
    return not (e.lanes.ready.cells.published(e.lanes.ready_head)
                or e.commands.cells.published(e.commands_head)
                or e.completion.calls.load(seq_cst) or e.streams.inbox.newest.load(seq_cst))


cdef u64 engine_step(EngineState* e, u64 now_us) noexcept nogil:
    cdef u64 next_us = now_us + HELD_US
    cdef size_t i
    cdef ModelState* model
    e.now_us.store(now_us, relaxed)
    _apply_commands(e, now_us)
    _take_in(e, now_us)
    lanes_expire(e.lanes, now_us)
    if deferred_calls_step(e.lanes, now_us):
        _take_in(e, now_us)
    if part_streams_have_news(e.streams, now_us):
        part_streams_step(e.streams, now_us)
    if not e.streams.touched.empty():
        _send_touched(e)
    if now_us >= e.housekeeping_us:
        _housekeeping(e, now_us)
    i = 0
    while i < e.hot.size():
        model = e.models[e.hot[0][i]]
        _pump(e, model, now_us)
        if not model.waits and model_queue_waiting(&model.queue):
            model.waits = True
            e.waits.push_back(model.index)
        if model.hold_until_us:
            next_us = min(next_us, model.hold_until_us)
            i += 1
        else:
            model.hot = False
            e.hot[0][i] = e.hot.back()
            e.hot.pop_back()
    completion_flush(e.completion)
    return min(next_us, e.housekeeping_us, wheel_next_us(e.lanes.wheel), e.streams.due_us)
