"""Changes of a shard, as a follower receives them: rows that are written as they are, and pushes
that are applied (shard_stream).

The copy is a ShardLoop that does not run: it has the tables and variables, and the record of the
pushes that were seen.
"""
from collections import namedtuple

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from clipper_core.params.embedding_rows cimport (
    Distinct, Pushed, Rows, distinct_init, rows_push, rows_remove, rows_write,
)
from clipper_core.params.optimizer cimport Stride, all_finite, optimizer_step, state_floats
from clipper_core.params.shard_state cimport (
    DENSE_TABLE, EXACT, HEAD_BYTES, REPLY_WANTED, SHARD_CHANGES, SHARD_RECEIVED, SHARD_REPLAY,
    STREAM_ENDS, ChangedPart, DenseVariable, ReplayPart, ShardLoopState, kDenseBit, padded,
    shard_answer,
    shard_head_is_one,
)
from clipper_core.runtime.machine cimport i64, monotonic_us, relaxed, u32, u8
from clipper_core.runtime.spin cimport spin_begin, spin_init, spin_on, spin_paid
from clipper_core.runtime.status cimport BAD_FRAME, NO_MEMORY, raise_for

cdef extern from "<sys/socket.h>" nogil:
    int MSG_NOSIGNAL
    ssize_t recv(int fd, void* to, size_t n, int flags) noexcept
    ssize_t send(int fd, const void* from_, size_t n, int flags) noexcept

cdef extern from "<poll.h>" nogil:
    cdef struct pollfd:
        int fd
        short events
    short POLLIN
    int poll(pollfd* each, unsigned long n, int timeout) noexcept

cdef enum:
    READ_BYTES = 65536
    KEEP_BYTES = 1048576        # of the buffer, between large messages
    PUSH_BYTES = 16             # worker and sequence of a push that is replayed

Changes = namedtuple("Changes", "position version epoch exact ends clock_s")


cdef int _readable(int fd, int wait_ms) noexcept nogil:
    cdef pollfd one
    one.fd, one.events = fd, POLLIN
    return poll(&one, 1, wait_ms)


cdef i64 _apply_rows(ShardLoopState* s, const ChangedPart* part, const u8* at,
                     const u8* end) noexcept nogil:
    """Apply a part of changed rows. Return its number of bytes; -1 if it does not fit the table."""
    cdef Rows* rows
    cdef u64 i, n = part.n, stamps_at = 8 * n, found_at = stamps_at + padded(4 * n)
    cdef u64 rows_at = found_at + padded(n), whole
    cdef const i64* ids = <const i64*> at
    cdef const u32* stamps = <const u32*> (at + stamps_at)
    cdef const u8* found = at + found_at
    cdef Pushed pushed
    cdef bint all_found = True
    if part.table >= s.place_count.load(relaxed):
        return -1
    rows = s.places[part.table].rows
    whole = rows_at + padded(4 * n * rows.width)
    if <u64> (end - at) < whole:
        return -1
    memset(&pushed, 0, sizeof(pushed))
    for i in range(n):
        all_found = all_found and found[i]
    if all_found:
        rows_write(rows, ids, n, <const float*> (at + rows_at), rows.width, stamps, &pushed)
    else:
        for i in range(n):
            if found[i]:
                rows_write(rows, ids + i, 1, <const float*> (at + rows_at) + i * rows.width,
                           rows.width, stamps + i, &pushed)
            else:
                rows_remove(rows, ids + i, 1)
    s.places[part.table].pushes.store(part.steps, relaxed)
    s.log.append(part.table, ids, <u32> n, 0, 0)
    return <i64> whole


cdef i64 _apply_variable(ShardLoopState* s, const ChangedPart* part, const u8* at,
                         const u8* end) noexcept nogil:
    cdef DenseVariable* one
    cdef i64 number = part.table ^ kDenseBit
    cdef u64 state, whole
    if <u64> number >= s.variables.size() or s.variables[number].n != part.n:
        return -1
    one = &s.variables[number]
    state = state_floats(s.dense_rule, one.n)
    whole = 16 + padded(4 * one.n) + padded(4 * state)
    if <u64> (end - at) < whole:
        return -1
    memcpy(one.marks, at, 16)
    memcpy(one.value, at + 16, 4 * one.n)
    memcpy(one.state, at + 16 + padded(4 * one.n), 4 * state)
    s.log.append(DENSE_TABLE, &number, 1, 0, 0)
    return <i64> whole


cdef bint _apply(ShardLoopState* s, const ShardHead* h, const u8* at) noexcept nogil:
    """Apply changes. Return False if a part does not fit."""
    cdef const u8* end = at + h.payload_bytes
    cdef const u64* pushes = <const u64*> at
    cdef const ChangedPart* part
    cdef u64 i
    cdef i64 whole
    if h.worker > h.payload_bytes // 16:
        return False
    at += 16 * h.worker
    for _ in range(h.rows):
        part = <const ChangedPart*> at
        if <u64> (end - at) < sizeof(part[0]):
            return False
        at += sizeof(part[0])
        if part.table & kDenseBit:
            whole = _apply_variable(s, part, at, end)
        else:
            whole = _apply_rows(s, part, at, end)
        if whole < 0:
            return False
        at += whole
    for i in range(h.worker):
        s.log.mark(pushes[2 * i], pushes[2 * i + 1])
    s.model.store(h.model, relaxed)
    return at == end


# -- a push
# --------------------------------------------------------------------------------------------------

cdef bint _replay_fits(ShardLoopState* s, const ShardHead* h, const u8* at) noexcept nogil:
    """Return whether all parts fit their tables and variables."""
    cdef const u8* end = at + h.payload_bytes
    cdef const ReplayPart* parts = <const ReplayPart*> (at + PUSH_BYTES)
    cdef u64 i, floats
    cdef u32 number
    at += PUSH_BYTES + h.rows * sizeof(ReplayPart)
    if h.worker != 1 or h.payload_bytes < PUSH_BYTES + h.rows * sizeof(ReplayPart):
        return False
    for i in range(h.rows):
        number, floats = parts[i].table, parts[i].n
        if number & kDenseBit:
            number ^= kDenseBit
            if number >= s.variables.size() or s.variables[number].n != floats:
                return False
        elif number >= s.place_count.load(relaxed) or <u64> (end - at) < 8 * floats:
            return False
        else:
            at += 8 * floats
            floats *= s.places[number].rows.dim
        if <u64> (end - at) < padded(4 * floats) or not all_finite(<const float*> at, floats):
            return False
        at += padded(4 * floats)
    return at == end


cdef bint _replay_rows(ShardLoopState* s, const ReplayPart* part, const Stride* stride,
                       const i64* ids, const float* gradients) noexcept nogil:
    """Replay a part of a push. Return False when there is no memory."""
    cdef Distinct distinct
    cdef Pushed pushed
    memset(&pushed, 0, sizeof(pushed))
    if not distinct_init(&distinct, ids, part.n):
        return False
    rows_push(s.places[part.table].rows, stride, ids, &distinct, gradients,
              s.places[part.table].spare, part.steps, part.stamp, &pushed)
    free(distinct.slots)
    s.places[part.table].pushes.store(part.steps, relaxed)
    s.log.append(part.table, ids, part.n, 0, 0)
    return pushed.refused == 0


cdef bint _replay(ShardLoopState* s, const ShardHead* h, const u8* at) noexcept nogil:
    """Apply it as the shard does, part by part. False: there is no memory."""
    cdef const u64* push = <const u64*> at
    cdef const ReplayPart* parts = <const ReplayPart*> (at + PUSH_BYTES)
    cdef DenseVariable* one
    cdef Stride stride
    cdef u64 i, n
    cdef i64 number
    cdef bint room = True
    at += PUSH_BYTES + h.rows * sizeof(ReplayPart)
    for i in range(h.rows):
        n = parts[i].n
        stride.rate, stride.first, stride.second = parts[i].rate, parts[i].first, parts[i].second
        stride.gradient = 1.0
        if parts[i].table & kDenseBit:
            number = parts[i].table ^ kDenseBit
            one = &s.variables[number]
            one.marks[0], one.marks[1] = parts[i].steps, h.model
            optimizer_step(s.dense_rule, stride, one.value, one.state, n, <const float*> at, n)
            s.log.append(DENSE_TABLE, &number, 1, 0, 0)
        else:
            room = room and _replay_rows(s, &parts[i], &stride, <const i64*> at,
                                         <const float*> (at + 8 * n))
            at += 8 * n
            n *= s.places[parts[i].table].rows.dim
        at += padded(4 * n)
    s.log.mark(push[0], push[1])
    s.model.store(h.model, relaxed)
    return room


cdef bint _acknowledge(int fd, u64 position, u8 flags) noexcept nogil:
    """Send a position, with the time of this clock, which the next changes return."""
    cdef ShardHead request, head
    cdef u64 sent = 0
    cdef ssize_t n = 0
    memset(&request, 0, sizeof(request))
    head = shard_answer(request, SHARD_RECEIVED, 0, 0)
    head.sequence, head.id, head.flags = position, monotonic_us(), flags
    while sent < HEAD_BYTES:
        n = send(fd, <const u8*> &head + sent, HEAD_BYTES - sent, MSG_NOSIGNAL)
        if n > 0:
            sent += <u64> n
        elif not (n < 0 and errno == EINTR):
            return False
    return True


cdef class ChangeReceiver:
    """Receives what a shard streams, and writes it into a copy of that shard.

    fd: a connected socket, which stays the caller's; no request is under way on it. copy: has the
    tables and dense variables, in the order of their numbers. frame_bytes_max: of a message.
    spin_us: time to poll for a message before it sleeps, while that pays.
    """

    def __cinit__(self, int fd, ShardLoop copy not None, *, u64 frame_bytes_max=1 << 28,
                  u64 spin_us=0):
        self.fd, self.copy, self.frame_bytes_max = fd, copy, frame_bytes_max
        spin_init(&self.spin, spin_us)

    def receive(self, double wait_s):
        """Return the next message, for `apply`; None if none arrives within the time.

        Raises ConnectionError if the connection ends; StatusError (BAD_FRAME, NO_MEMORY) for bytes
        that are no message.
        """
        cdef int ready = 0
        cdef ssize_t n
        cdef u8* to
        cdef bint whole = False, bad = False
        cdef u64 wanted
        with nogil:
            while not whole and not bad:
                wanted = HEAD_BYTES
                if self.input.size() >= HEAD_BYTES:
                    memcpy(&self.head, self.input.at(), HEAD_BYTES)
                    bad = (not shard_head_is_one(self.head)
                           or self.head.kind not in (SHARD_CHANGES, SHARD_REPLAY)
                           or self.head.payload_bytes > self.frame_bytes_max)
                    wanted += self.head.payload_bytes
                whole = not bad and self.input.size() >= wanted
                if whole or bad:
                    break
                ready = self.comes(<int> (wait_s * 1000))
                if ready == 0:
                    break
                to = self.input.reserve(max(<u64> READ_BYTES, wanted - self.input.size()))
                if to == NULL:
                    break
                n = recv(self.fd, to, self.input.room - self.input.end, 0)
                if n > 0:
                    self.input.end += <u64> n
                elif n == 0 or errno not in (EAGAIN, EINTR):
                    ready = -2
                    break
        if bad:
            raise_for(BAD_FRAME, "changes of a shard: bytes that are no message")
        if self.input.lost:
            raise_for(NO_MEMORY, "changes of a shard")
        if not whole and ready == -2:
            raise ConnectionError("the shard closed the connection")
        if not whole:
            return None
        return Changes(self.head.sequence, self.head.model, self.head.epoch,
                       self.head.kind == SHARD_REPLAY or bool(self.head.flags & EXACT),
                       bool(self.head.flags & STREAM_ENDS), self.head.id * 1e-6)

    def apply(self):
        """Write the message that `receive` has returned, and acknowledge it; a push is acknowledged
        when it fits the copy, before it is applied.

        Raises StatusError (BAD_FRAME) if it does not fit the copy, or finds no memory: the copy is
        broken then; ConnectionError.
        """
        cdef bint fits, sent = True
        with nogil:
            if self.head.kind == SHARD_REPLAY:
                fits = _replay_fits(self.copy.state, &self.head, self.input.at() + HEAD_BYTES)
                if fits:
                    sent = self.send_position(self.head.sequence, 0)
                    fits = _replay(self.copy.state, &self.head, self.input.at() + HEAD_BYTES)
            else:
                fits = _apply(self.copy.state, &self.head, self.input.at() + HEAD_BYTES)
                if fits:
                    sent = self.send_position(self.head.sequence, 0)
            self.input.drop(HEAD_BYTES + self.head.payload_bytes)
            if not self.input.size():
                self.input.shrink(KEEP_BYTES)
        if not fits:
            raise_for(BAD_FRAME, "changes of a shard do not fit its copy")
        if not sent:
            raise ConnectionError("the shard does not read")

    def acknowledge(self, u64 position, *, bint wants_reply=False):
        """Send the shard the position up to which all changes are written. wants_reply: it replies
        at once, also if nothing has changed. Threads: any. Raises ConnectionError."""
        cdef bint sent
        with nogil:
            sent = self.send_position(position, REPLY_WANTED if wants_reply else 0)
        if not sent:
            raise ConnectionError("the shard does not read")

    cdef bint send_position(self, u64 position, u8 flags) noexcept nogil:
        cdef bint sent
        self.guard.lock()
        sent = _acknowledge(self.fd, position, flags)
        self.guard.unlock()
        return sent

    cdef int comes(self, int wait_ms) noexcept nogil:
        """Wait for a message; returns as poll does."""
        cdef int ready = _readable(self.fd, 0)
        if ready or not spin_begin(&self.spin, monotonic_us()):
            return ready or _readable(self.fd, wait_ms)
        while not ready and spin_on(&self.spin, monotonic_us()):
            ready = _readable(self.fd, 0)
        if ready > 0:
            spin_paid(&self.spin)
        return ready or _readable(self.fd, wait_ms)
