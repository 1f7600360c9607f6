"""Pushes, sent to followers before they are applied.

What an optimizer computes depends on the row, its state and the gradient alone, to the last bit
(optimizer.hpp), so a follower that has exactly the rows from before a push has those from after it
when it has applied the push. A push has half the bytes of the rows with their state or fewer, and
the follower works while the shard does. The factors of a step are sent, since a library's `pow` may
differ. A push whose result depends on what a copy does not have is sent as rows (shard_stream): how
often ids were pushed (`admit_after`), and which rows go when a table is full.

Source: state machine replication, Schneider 1990; PostgreSQL's write-ahead log with full pages
against logical records.
"""
from libc.string cimport memset

from clipper_core.params.row_arena cimport arena_limit, arena_used
from clipper_core.params.shard_log cimport Follower
from clipper_core.params.shard_state cimport (
    HEAD_BYTES, SHARD_REPLAY, PartWork, ReplayPart, ShardConnection, kDenseBit, shard_answer,
)
from clipper_core.params.shard_stream cimport UNSENT_MAX
from clipper_core.runtime.machine cimport iovec, relaxed, u32

cdef extern from "<sys/socket.h>" nogil:
    int MSG_NOSIGNAL
    cdef struct msghdr:
        iovec* msg_iov
        size_t msg_iovlen
    ssize_t sendmsg(int fd, const msghdr* message, int flags) noexcept

cdef enum:
    FOLLOWERS = 11
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
    """What the socket does not take at once is left to the loop."""
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
