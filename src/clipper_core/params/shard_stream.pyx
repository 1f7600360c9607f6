"""Sends changes to followers as they are made.

A follower that has a complete copy requests the stream. From then on the loop sends it, after each
turn, the rows whose ids the log has for it (shard_log.hpp), as they are now: whole rows with their
state, so that a row may be sent twice, and pushes of one turn share a message. The follower writes
them and acknowledges the position up to which it has all; then the loop answers the pushes that
waited for it. Messages do not wait for each other. Changes that are not sent yet are in the log,
which is bounded. If it does not reach back to a follower's position any more, the loop ends the
stream, and the follower resyncs as after a disconnection.

Rows are read while pushes are paused, so a copy agrees with the pushes that it has seen.

Pushes may be sent to followers before they are applied. What an optimizer computes depends on the
row, its state and the gradient alone, to the last bit (optimizer.hpp), so a follower that has
exactly the rows from before a push has those from after it when it has applied the push. A push has
half the bytes of the rows with their state or fewer, and the follower works while the shard does.
The factors of a step are sent, since a library's `pow` may differ. A push is sent as rows if its
result depends on data that a copy does not have: how often ids were pushed (`admit_after`), and
which rows are evicted when a table is full.

Source: state machine replication, Schneider 1990; PostgreSQL's write-ahead log with full pages
against logical records.
"""
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from libcpp.vector cimport vector

from clipper_core.params.embedding_rows cimport (
    Distinct, Rows, arena_limit, arena_used, distinct_init, rows_read,
)
from clipper_core.params.optimizer cimport state_floats
from clipper_core.params.shard_state cimport (
    DENSE_TABLE, EXACT, HEAD_BYTES, REPLY_WANTED, SHARD_CHANGES, SHARD_REPLAY, STREAM_ENDS,
    ChangedPart,
    DenseVariable, Follower, PartWork, ReplayPart, ShardConnection, kDenseBit, padded, shard_answer,
)
from clipper_core.runtime.machine cimport eventfd_signal, i64, iovec, relaxed, u32, u64, u8
from clipper_core.runtime.reactor cimport EPOLLOUT

cdef enum:
    IDS_MAX = 65536             # of one message, and the rest of the last push among them


cdef void stream_begin(ShardLoopState* s, ShardConnection* c, u32 stream,
                       bint replays) noexcept nogil:
    cdef Follower* one = &s.log.followers[stream - 1]
    if one.streams:
        stream_closed(s, s.callers[one.conn])
    s.log.guard.lock()
    one.streams, one.conn, one.replays, one.clock = True, c.number, replays, 0
    s.log.guard.unlock()
    c.stream = stream
    s.streams += 1
    s.replays += replays
    s.streaming.store(s.streams, relaxed)


cdef void stream_closed(ShardLoopState* s, ShardConnection* c) noexcept nogil:
    if not c.stream:
        return
    s.log.guard.lock()
    s.log.followers[c.stream - 1].streams = False
    s.replays -= s.log.followers[c.stream - 1].replays
    s.log.guard.unlock()
    c.stream = 0
    s.streams -= 1
    s.streaming.store(s.streams, relaxed)
    eventfd_signal(s.log.fd)


cdef void stream_received(ShardLoopState* s, ShardConnection* c, const ShardHead* h) noexcept nogil:
    cdef Follower* one
    if not c.stream:
        return
    one = &s.log.followers[c.stream - 1]
    s.log.guard.lock()
    if not one.ends and h.sequence <= one.taken:        # no follower has what was not sent
        one.acknowledged = max(one.acknowledged, h.sequence)
        one.clock, one.wants_reply = max(one.clock, h.id), one.wants_reply or h.flags & REPLY_WANTED
        one.messages += 1
        s.received = True
    s.log.guard.unlock()


# -- a message
# --------------------------------------------------------------------------------------------------

cdef bint _put_rows(ShardLoopState* s, ShardConnection* c, u32 table,
                    const vector[i64]& ids) noexcept nogil:
    """Write the rows of ids, each once, and a removal for ids without a row. Without ids, only the
    steps. False: no memory."""
    cdef Rows* rows = s.places[table].rows
    cdef ChangedPart part
    cdef Distinct distinct
    cdef u64 i, n, whole, stamps_at, found_at, rows_at
    cdef i64* each
    cdef u8* to
    if not distinct_init(&distinct, ids.data(), ids.size()):
        return False
    n = distinct.n
    stamps_at = sizeof(part) + 8 * n
    found_at = stamps_at + padded(4 * n)
    rows_at = found_at + padded(n)
    whole = rows_at + padded(4 * n * rows.width)
    to = c.output.reserve(whole)
    if to != NULL:
        part.table, part.n, part.steps = table, <u32> n, s.places[table].pushes.load(relaxed)
        memset(to, 0, whole)
        memcpy(to, &part, sizeof(part))
        each = <i64*> (to + sizeof(part))
        for i in range(n):
            each[i] = ids[distinct.first[i]]
        rows_read(rows, each, n, <float*> (to + rows_at), <u32*> (to + stamps_at), to + found_at)
        c.output.end += whole
    free(distinct.slots)
    return to != NULL


cdef u64 _put_variables(ShardLoopState* s, ShardConnection* c,
                        const vector[i64]& numbers) noexcept nogil:
    """Put the variables of these numbers into the connection's output. Return the number of
    parts."""
    cdef const DenseVariable* one
    cdef ChangedPart part
    cdef u64 i, k, count = 0, state, nothing = 0
    for i in range(s.variables.size()):
        for k in range(numbers.size()):
            if numbers[k] == <i64> i:
                break
        else:
            continue
        one = &s.variables[i]
        state = state_floats(s.dense_rule, one.n)
        part.table, part.n, part.steps = kDenseBit | <u32> i, <u32> one.n, 0
        c.output.put(&part, sizeof(part))
        c.output.put(one.marks, 16)
        c.output.put(one.value, 4 * one.n)
        c.output.put(&nothing, padded(4 * one.n) - 4 * one.n)
        c.output.put(one.state, 4 * state)
        c.output.put(&nothing, padded(4 * state) - 4 * state)
        count += 1
    return count


cdef void _put_head(ShardLoopState* s, ShardConnection* c, u64 at, u64 position, u32 parts,
                    u64 pushes, u8 flags, u64 clock) noexcept nogil:
    """Write the head into the room that was left for it, `at` bytes from the front."""
    cdef ShardHead request, head
    memset(&request, 0, sizeof(request))
    head = shard_answer(request, SHARD_CHANGES, s.epoch.load(relaxed), s.model.load(relaxed))
    head.rows, head.sequence, head.worker, head.flags = parts, position, pushes, flags
    head.id = clock
    head.payload_bytes = <u32> (c.output.size() - at - HEAD_BYTES)
    memcpy(<void*> (c.output.at() + at), &head, HEAD_BYTES)


cdef void _put_changes(ShardLoopState* s, ShardConnection* c, vector[vector[i64]]& ids,
                       const vector[u64]& pushes, u64 position, bint exact,
                       u64 clock) noexcept nogil:
    cdef u8[64] room
    cdef u64 at = c.output.size(), parts = 0
    cdef u32 table
    memset(room, 0, sizeof(room))
    c.output.put(room, HEAD_BYTES)
    c.output.put(pushes.data(), 8 * pushes.size())
    for table in range(<u32> ids.size()):
        if table == DENSE_TABLE:
            parts += _put_variables(s, c, ids[table])
        elif ids[table].size() or (table < s.place_count.load(relaxed)
                                   and s.places[table].rows.rule.slots >= 2):
            if not _put_rows(s, c, table, ids[table]):
                c.output.lost = True
            parts += 1
    if c.output.size() - at > s.frame_bytes_max:
        c.output.lost = True                    # it is closed, and resyncs as after a disconnection
    if not c.output.lost:
        _put_head(s, c, at, position, <u32> parts, pushes.size() // 2, EXACT if exact else 0,
                  clock)


cdef void _put_end(ShardLoopState* s, ShardConnection* c) noexcept nogil:
    cdef u8[64] room
    cdef u64 at = c.output.size()
    memset(room, 0, sizeof(room))
    c.output.put(room, HEAD_BYTES)
    if not c.output.lost:
        _put_head(s, c, at, 0, 0, 0, STREAM_ENDS, 0)
    stream_closed(s, c)


cdef ShardConnection* stream_changes(ShardLoopState* s, u32 number) noexcept nogil:
    cdef Follower* one = &s.log.followers[number]
    cdef ShardConnection* c
    cdef vector[vector[i64]] ids
    cdef vector[u64] pushes
    cdef bint quiet, over, gathered = True, exact = True
    cdef u64 position = 0, clock = 0
    if not one.streams:
        return NULL
    c = s.callers[one.conn]
    s.log.guard.lock()
    over = one.ends or one.lost or not one.on
    quiet = one.taken == s.log.position() and not one.wants_reply
    s.log.guard.unlock()
    if not over and (quiet or c.output.size() > UNSENT_MAX):
        return c if c.output.lost or (c.output.size() and not c.watched & EPOLLOUT) else NULL
    s.still.lock()
    s.log.guard.lock()
    over = one.ends or one.lost or not one.on
    if not over:
        clock, one.wants_reply = one.clock, False
        gathered = s.log.gather(one[0], ids, pushes, IDS_MAX)
        position, exact = one.taken, one.taken == s.log.position()
    s.log.guard.unlock()
    if over:
        _put_end(s, c)
    elif gathered:
        _put_changes(s, c, ids, pushes, position, exact, clock)
    else:
        c.output.lost = True
    s.still.unlock()
    return c


# -- pushes before they are applied
# --------------------------------------------------------------------------------------------------

cdef extern from "<sys/socket.h>" nogil:
    int MSG_NOSIGNAL
    cdef struct msghdr:
        iovec* msg_iov
        size_t msg_iovlen
    ssize_t sendmsg(int fd, const msghdr* message, int flags) noexcept

cdef enum:
    FOLLOWERS = 12
    PIECES = 4                  # of a message: head, push, heads of its parts, its parts
    PARTS_MAX = 64              # of a push that is replayed: their heads lie on the stack


cdef bint replay_is_exact(ShardLoopState* s, u64 nbytes) noexcept nogil:
    cdef PartWork* work
    cdef u64 i
    if (s.works.size() > PARTS_MAX
            or nbytes + s.works.size() * sizeof(ReplayPart) + 16 > s.frame_bytes_max):
        return False
    for i in range(s.works.size()):
        work = &s.works[i]
        if work.variable:
            continue
        rows = s.places[work.table].rows
        if rows.admit_after > 1 or (arena_used(&rows.arena) + work.distinct.n
                                    > arena_limit(&rows.arena)):
            return False
    return True


cdef void _send(ShardConnection* c, iovec* parts) noexcept nogil:
    """Send at once what the socket takes; the loop sends the rest."""
    cdef msghdr message
    cdef ssize_t sent = 0
    cdef u64 left, i
    if not c.output.size():
        memset(&message, 0, sizeof(message))
        message.msg_iov, message.msg_iovlen = parts, PIECES
        sent = max(<ssize_t> 0, sendmsg(c.fd, &message, MSG_NOSIGNAL))
    left = <u64> sent
    for i in range(PIECES):
        if left < parts[i].iov_len:
            c.output.put(<const u8*> parts[i].iov_base + left, parts[i].iov_len - left)
        left -= min(left, <u64> parts[i].iov_len)


cdef void replay_send(ShardLoopState* s, const ShardHead* h, u64 begin, u64 version,
                      const u8* data, const u8* end) noexcept nogil:
    cdef u64[2] push = [h.worker, h.sequence]
    cdef ReplayPart[PARTS_MAX] parts
    cdef iovec[4] pieces
    cdef ShardHead head = shard_answer(h[0], SHARD_REPLAY, s.epoch.load(relaxed), version)
    cdef ShardConnection* c
    cdef Follower* one
    cdef PartWork* work
    cdef u64 i, n = s.works.size(), position
    for i in range(n):
        work = &s.works[i]
        parts[i].table = work.table | (kDenseBit if work.variable else 0)
        parts[i].n, parts[i].steps, parts[i].stamp = work.n, work.steps, work.stamp
        parts[i].rate, parts[i].first = work.stride.rate, work.stride.first
        parts[i].second = work.stride.second
    s.log.guard.lock()
    position = s.log.position()
    head.rows, head.sequence, head.worker = <u32> n, position, 1
    head.payload_bytes = <u32> (sizeof(push) + n * sizeof(ReplayPart) + <u64> (end - data))
    for i in range(FOLLOWERS):
        one = &s.log.followers[i]
        if not (one.replays and one.streams and one.on) or one.ends or one.lost:
            continue
        c = s.callers[one.conn]
        if one.taken != begin or c.output.size() > UNSENT_MAX:
            continue            # it is sent rows
        one.taken, head.id = position, one.clock
        pieces[0].iov_base, pieces[0].iov_len = &head, HEAD_BYTES
        pieces[1].iov_base, pieces[1].iov_len = push, sizeof(push)
        pieces[2].iov_base, pieces[2].iov_len = parts, n * sizeof(ReplayPart)
        pieces[3].iov_base, pieces[3].iov_len = <void*> data, <u64> (end - data)
        _send(c, pieces)
        s.replayed.fetch_add(1, relaxed)
    s.log.trim()
    s.log.guard.unlock()
