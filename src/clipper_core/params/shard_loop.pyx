"""A shard's loop, and Python's side of it. What requests do is shard_connection's."""
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from libcpp.vector cimport vector
cimport numpy as cnp
from posix.unistd cimport close as close_fd, usleep

from clipper_core.params.embedding cimport Table
from clipper_core.params.embedding_rows cimport distinct_init, spare_floats
from clipper_core.params.shard_connection cimport (
    connection_accept, connection_admit, connection_close, is_busy, strangers_expire, take_frames,
)
from clipper_core.params.optimizer cimport Optimizer, state_floats
from clipper_core.params.shard_state cimport (
    BY_PYTHON, HEAD_BYTES, NO_TABLE, SHARD_ANSWER, SHARD_REFUSED, TABLES_MAX, WORKER_IN_USE, Call,
    Counts, DenseVariable, Held, PartWork, Reply, Sequences, ShardConnection, ShardHead,
    counts_refuse, padded, place_of, quotas_exceeded, receive_with, shard_answer,
)
from clipper_core.params.shard_stream cimport stream_begin, stream_changes
from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.histogram cimport note
from clipper_core.runtime.machine cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, acq_rel, acquire, eventfd, eventfd_signal, i64, monotonic_us,
    relaxed, release, u64, u8,
)
from clipper_core.runtime.reactor cimport (
    EPOLLIN, EPOLLOUT, LISTENER_TAG, WAKE_UP_TAG, connection_tag, epoll_event, tag_kind,
    tag_number, tag_of,
)
from clipper_core.runtime.spin cimport spin_begin, spin_init, spin_on, spin_paid
from clipper_core.runtime.status cimport BAD_INPUT, FULL, NO_MEMORY, TOO_LARGE, UNKNOWN, raise_for

import numpy as np

cnp.import_array()

cdef extern from "<sys/socket.h>" nogil:
    int MSG_NOSIGNAL
    ssize_t recv(int fd, void* to, size_t n, int flags) noexcept
    ssize_t send(int fd, const void* from_, size_t n, int flags) noexcept

cdef enum:
    READ_BYTES = 65536
    KEEP_BYTES = 1048576        # of a buffer, between large frames
    TURN_BYTES = 1048576        # of frames and their answers, that one connection gets in a turn;
                                # and as many are sent
    FOLLOWERS = 12
    SEQUENCES_BYTES = 144
    TURN_US = 50                # between two looks whether the loop has begun a turn


# -- connections
# --------------------------------------------------------------------------------------------------

cdef bint _write(ShardLoopState* s, ShardConnection* c) noexcept nogil:
    """Send up to TURN_BYTES. False: it is gone."""
    cdef ssize_t n
    cdef u64 left = TURN_BYTES
    while c.output.size() and left:
        n = send(c.fd, c.output.at(), min(c.output.size(), left), MSG_NOSIGNAL)
        if n > 0:
            c.output.drop(n)
            left -= <u64> n
        elif n < 0 and errno == EAGAIN:
            break
        elif not (n < 0 and errno == EINTR):
            return False
    c.output.shrink(KEEP_BYTES)
    return not c.output.lost


cdef void _settle(ShardLoopState* s, ShardConnection* c) noexcept nogil:
    """Send pending output, handle frames that waited for room or for this turn, and watch for the
    next event."""
    cdef i64 left = TURN_BYTES
    _go_on(s, c, _write(s, c), &left)


cdef void _go_on(ShardLoopState* s, ShardConnection* c, bint alive, i64* left) noexcept nogil:
    """Take and answer what `left` bytes of this turn allow."""
    cdef u64 before
    cdef u32 events = 0
    while alive and c.input.size() >= HEAD_BYTES and not is_busy(c) and not c.closing and (
            left[0] > 0):
        before = c.input.size()
        alive = take_frames(s, c, left) and _write(s, c)
        if c.input.size() == before:
            break
    if not alive or (c.closing and not c.output.size()):
        connection_close(s, c)
        return
    c.behind = left[0] <= 0 and c.input.size() >= HEAD_BYTES
    if c.output.size() or c.behind:
        events |= EPOLLOUT              # epoll reports it again, after the others
    if not (c.behind or c.closing or is_busy(c)):
        events |= EPOLLIN
    if events != c.watched:
        c.watched = events
        s.reactor.change(c.fd, events, connection_tag(c.number, c.generation))


cdef void _read(ShardLoopState* s, ShardConnection* c) noexcept nogil:
    cdef u8* to
    cdef u64 room
    cdef ssize_t n
    cdef i64 left = TURN_BYTES
    to = c.input.reserve(READ_BYTES)
    if to == NULL:
        connection_close(s, c)
        return
    room = c.input.room - c.input.end
    n = receive_with(c.fd, to, room, c.region) if c.local else recv(c.fd, to, room, 0)
    if n > 0:
        c.input.end += <u64> n
        if not take_frames(s, c, &left):
            connection_close(s, c)
            return
        if not c.input.size():
            c.input.shrink(KEEP_BYTES)
        _go_on(s, c, _write(s, c), &left)
        return
    if n == 0 or (errno != EAGAIN and errno != EINTR):
        connection_close(s, c)


cdef void _admit(ShardLoopState* s, ShardConnection* c, Reply* reply) noexcept nogil:
    """Admit a connection that Python has admitted; refuse it if another client has its worker
    number."""
    cdef const ShardHead* answer = <const ShardHead*> reply.bytes.at()
    cdef ShardHead head
    cdef i64 about = <i64> reply.worker
    if answer == NULL or connection_admit(s, c, reply.worker, reply.incarnation):
        return
    head = shard_answer(answer[0], SHARD_REFUSED, answer.epoch, answer.model)
    head.rows, head.payload_bytes = WORKER_IN_USE, sizeof(about)
    reply.bytes.clear()
    reply.bytes.put(&head, HEAD_BYTES)
    reply.bytes.put(&about, sizeof(about))
    c.closing = True
    counts_refuse(s.counts, WORKER_IN_USE)


cdef void _deliver(ShardLoopState* s) noexcept nogil:
    """Send the answers of Python, and those that waited for followers."""
    cdef vector[void*] replies
    cdef Reply* reply
    cdef ShardConnection* c
    cdef size_t i
    s.post.take_all(replies)
    for i in range(replies.size()):
        reply = <Reply*> replies[i]
        c = s.callers[reply.conn]
        if c.fd >= 0 and c.generation == reply.generation:
            if reply.admit:
                c.pushes = reply.pushes
                _admit(s, c, reply)
            if c.calls:
                c.calls -= 1
            c.closing = c.closing or reply.close
            c.output.put(reply.bytes.at(), reply.bytes.size())
            if reply.stream:
                stream_begin(s, c, reply.stream, reply.replays)
            c.output.lost = c.output.lost or reply.bytes.lost
            _settle(s, c)
        del reply
    if s.starved.exchange(0, acquire):
        _close_unanswered(s)


cdef void _close_unanswered(ShardLoopState* s) noexcept nogil:
    """Close connections whose answers found no memory: their clients notice, and retry."""
    cdef ShardConnection* c
    cdef size_t i
    for i in range(s.callers.size()):
        c = s.callers[i]
        if c.fd >= 0 and c.unanswered.load(relaxed) == c.generation:
            connection_close(s, c)


cdef void _stream(ShardLoopState* s) noexcept nogil:
    """Answer pushes that followers have, and send followers what they have not."""
    cdef ShardConnection* c
    cdef vector[Held] due
    cdef Held held
    cdef u64 sure
    cdef size_t i
    if s.received:
        s.received = False
        s.log.guard.lock()
        sure = s.log.sure()
        while s.log.held.size() and s.log.held.front().position <= sure:
            if not make_room(due, due.size() + 1):
                break                   # the next turn goes on
            due.push_back(s.log.held.front())
            s.log.held.pop_front()
        s.log.guard.unlock()
        for i in range(due.size()):
            held = due[i]
            c = s.callers[held.conn]
            if c.fd >= 0 and c.generation == held.generation:
                c.output.put(&held.words[0],
                             HEAD_BYTES + (<ShardHead*> &held.words[0]).payload_bytes)
                _settle(s, c)
        if s.python_waits.load(relaxed):
            eventfd_signal(s.log.fd)
    for i in range(FOLLOWERS if s.streams else 0):
        c = stream_changes(s, <u32> i)
        if c != NULL:
            _settle(s, c)


cdef int _wait(ShardLoopState* s) noexcept nogil:
    """Wait for events; after a message, poll for a moment first."""
    cdef int n = 0
    if s.had_events and spin_begin(&s.spin, monotonic_us()):
        note(&s.spins, 1)
        n = s.reactor.wait(0)
        while n == 0 and spin_on(&s.spin, monotonic_us()):
            n = s.reactor.wait(0)
        if n > 0:
            spin_paid(&s.spin)
    return n if n else s.reactor.wait(500000)


cdef void _handle(ShardLoopState* s, const epoll_event* event) noexcept nogil:
    cdef u64 tag = event.data.u64
    cdef ShardConnection* c
    if tag_kind(tag) == WAKE_UP_TAG:
        _deliver(s)
    elif tag_kind(tag) == LISTENER_TAG:
        connection_accept(s, tag_number(tag), monotonic_us())
    else:
        c = s.callers[tag_number(tag)]
        if connection_tag(c.number, c.generation) != tag:
            return
        if event.events & ~EPOLLOUT and not c.behind:
            _read(s, c)
        else:
            _settle(s, c)


cdef void _turn(ShardLoopState* s) noexcept nogil:
    cdef int i, n
    s.turns.fetch_add(1, acq_rel)
    n = _wait(s)
    s.had_events = n > 0
    for i in range(n):
        _handle(s, &s.reactor.events[i])
    if s.streams or s.received:
        _stream(s)
    if s.oldest != NULL:
        strangers_expire(s, monotonic_us())


# -- Python's side
# --------------------------------------------------------------------------------------------------

cdef void _unanswered(ShardLoopState* s, u32 conn, u32 generation) noexcept nogil:
    s.callers[conn].unanswered.store(generation, relaxed)
    s.starved.store(1, release)
    eventfd_signal(s.post.fd)


cdef void _give(ShardLoopState* s, Reply* reply, u32 conn, u32 generation) noexcept nogil:
    """Pass a reply to the loop. If it is NULL, or there is no memory, the connection is closed."""
    if reply == NULL or not s.post.put(reply):
        del reply
        _unanswered(s, conn, generation)


cdef void _release(ShardLoopState* s) noexcept nogil:
    """Release the answers to changes that all followers that are waited for have. The caller holds
    the log's guard."""
    cdef u64 sure = s.log.sure()
    cdef Reply* reply
    cdef Held held
    while s.log.held.size() and s.log.held.front().position <= sure:
        held = s.log.held.front()
        s.log.held.pop_front()
        reply = make[Reply]()
        if reply != NULL:
            reply.conn, reply.generation = held.conn, held.generation
            reply.bytes.put(&held.words[0],
                            HEAD_BYTES + (<ShardHead*> &held.words[0]).payload_bytes)
        _give(s, reply, held.conn, held.generation)


cdef object _array(const vector[i64]& ids):
    cdef cnp.ndarray array = np.empty(ids.size(), np.int64)
    memcpy(cnp.PyArray_DATA(array), ids.data(), ids.size() * sizeof(i64))
    return array


def each_once(ids):
    """Return the distinct ids, i64[n], sorted. np.unique takes fifteen times as long where numpy
    sorts by vector instructions."""
    ids = np.sort(ids)
    return ids[np.concatenate([ids[:1] == ids[:1], ids[1:] != ids[:ids.size - 1]])]


cdef class ShardLoop:
    """Connections of a shard, and its tables as they are reached from elsewhere. Threads: run() has
    its own; the rest any.

    frame_bytes_max: of a payload, either way.  connections_max: more are closed at once.
    shared_bytes_max: of all memory that callers over unix sockets share, to have rows written
    there.  spin_us: to poll after a message for the next, before it sleeps. hello_us: a connection
    that is not admitted within this time is closed; a quarter of all may be waiting for it (at
    least 4). A request that is neither a pull nor a push of rows is a call, which
    Python answers: see `calls`.
    """

    def __cinit__(self, *, u64 frame_bytes_max=1 << 28, u32 connections_max=1024,
                  u64 log_ids_max=1 << 24,
                  u64 shared_bytes_max=1 << 30, u64 spin_us=0, u64 hello_us=5_000_000):
        cdef ShardLoopState* s = make[ShardLoopState]()
        self.state, self.tables, self.variables, self.counts = s, [], [], Counts()
        if s == NULL or not (make_room(s.callers, connections_max)
                             and make_room(s.unused, connections_max)):
            raise_for(NO_MEMORY, f"no memory for a shard's {connections_max} connections")
        s.counts = self.counts.state
        s.post.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        s.calls.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        s.log.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        s.frame_bytes_max = min(frame_bytes_max, (<u64> 1 << 32) - 8)
        s.connections_max, s.log.ids_max, s.shared_bytes_max = (connections_max, log_ids_max,
                shared_bytes_max)
        s.strangers_max, s.hello_us = max(<u32> 4, connections_max // 4), hello_us
        s.epoch.store(1, relaxed)
        if s.calls.fd < 0 or s.log.fd < 0 or not (
                s.reactor.open() and s.reactor.watch(s.post.fd, EPOLLIN, tag_of(WAKE_UP_TAG, 0))):
            raise_for(NO_MEMORY, "no descriptors for a shard")
        spin_init(&s.spin, spin_us)

    def __dealloc__(self):
        cdef ShardLoopState* s = self.state
        cdef vector[void*] rest
        cdef Reply* reply
        cdef Call* call
        cdef size_t i
        if s == NULL:
            return
        s.post.take_all(rest)
        for i in range(rest.size()):
            reply = <Reply*> rest[i]
            del reply
        rest.clear()
        s.calls.take_all(rest)
        for i in range(rest.size()):
            call = <Call*> rest[i]
            del call
        for i in range(s.callers.size()):
            if s.callers[i].fd >= 0:
                close_fd(s.callers[i].fd)
            del s.callers[i]
        for i in range(s.place_count.load(relaxed)):
            free(s.places[i].spare)
        for fd in (s.post.fd, s.calls.fd, s.log.fd):
            if fd >= 0:
                close_fd(fd)
        del s

    # -- the loop

    def listen(self, int fd):
        """A listening socket, non-blocking; it stays the caller's to close, after stop()."""
        if not self.state.reactor.listen(fd):
            raise_for(BAD_INPUT, f"descriptor {fd} cannot be listened at")

    def run(self):
        """Run until stop(); then close the connections."""
        cdef size_t i
        with nogil:
            self.state.running.store(1, release)
            while not self.state.stop.load(acquire):
                _turn(self.state)
            self.state.running.store(0, release)
            for i in range(self.state.callers.size()):
                if self.state.callers[i].fd >= 0:
                    connection_close(self.state, self.state.callers[i])

    def stop(self):
        self.state.stop.store(1, release)
        self.state.post.close()
        eventfd_signal(self.state.post.fd)

    # -- tables

    def add_table(self, Table table not None, number=None, *, bint by_python=False):
        """Add a table and return its number for pulls and pushes. number: None for the next number;
        else this one, which is the next, or that of a dropped table (in a loop that does not run,
        any).  by_python: pushes of it call Python, for a caller that sums gradients of several
        workers."""
        cdef ShardLoopState* s = self.state
        cdef u32 count = s.place_count.load(relaxed)
        cdef u32 new = count if number is None else number
        cdef u32 at = new & (TABLES_MAX - 1)
        cdef float* spare
        if count >= TABLES_MAX and (number is None or at >= count):
            raise_for(FULL, f"a shard has at most {TABLES_MAX} tables")
        if at > count or (at < count and s.running.load(acquire)
                          and s.places[at].number.load(relaxed) != NO_TABLE):
            raise_for(BAD_INPUT, f"table {table.name!r}: {new} is no free place")
        spare = <float*> malloc(max(<u64> 64, spare_floats(table.rows.dim) * sizeof(float)))
        if spare == NULL:
            raise_for(NO_MEMORY, f"table {table.name!r}")
        with nogil:
            s.still.lock()
        free(s.places[at].spare)
        s.places[at].spare = spare
        s.places[at].rows, s.places[at].pushes = table.rows, &table.pushes
        s.places[at].flags = BY_PYTHON if by_python else 0
        self.tables[at:at + 1] = [table]
        if at == count:
            s.place_count.store(count + 1, release)
        else:
            self.counts.clear(at)
        s.places[at].number.store(new, release)
        s.still.unlock()
        return new

    def drop_table(self, u32 number, Table empty not None):
        """Refuse pulls and pushes of a table from now on. When this returns, the loop has let go of
        it: its rows may be freed. empty: is in its place, until another table is added there.

        Not while pushes are held. Raises StatusError (UNKNOWN) if there is no such table.
        """
        cdef ShardLoopState* s = self.state
        cdef i64 at = place_of(s, number)
        cdef u64 turn
        if at < 0:
            raise_for(UNKNOWN, f"no table of number {number}")
        s.places[at].number.store(NO_TABLE, release)
        with nogil:
            turn = s.turns.fetch_add(0, acq_rel)
            eventfd_signal(s.post.fd)
            while s.running.load(acquire) and s.turns.load(acquire) == turn:
                usleep(TURN_US)
            s.still.lock()
        s.places[at].rows, s.places[at].pushes = empty.rows, &empty.pushes
        s.still.unlock()
        self.tables[at] = empty

    def set_quotas(self, list tables not None, u64 rows=0, u64 nbytes=0):
        """Refuse pushes that would make more rows than these: of each table by its place, and rows
        and bytes of all tables; 0: no limit. Not while pushes are held."""
        cdef ShardLoopState* s = self.state
        cdef vector[u64] each = tables
        cdef size_t i
        with nogil:
            s.still.lock()
            for i in range(min(each.size(), <size_t> s.place_count.load(relaxed))):
                s.places[i].quota = each[i]
        s.quota_rows, s.quota_bytes = rows, nbytes
        s.has_quotas = bool(rows or nbytes or any(tables))
        s.still.unlock()

    def over_quota(self, u32 place, ids):
        """Return the number of the table, or -1 for the shard, whose quota rows of these ids would
        exceed; None if they fit. While pushes are held."""
        cdef cnp.ndarray each = np.ascontiguousarray(ids, np.int64)
        cdef ShardLoopState* s = self.state
        cdef PartWork work
        cdef i64 about = 0
        cdef bint exceeded
        if not s.has_quotas:
            return None
        memset(&work, 0, sizeof(work))
        work.table, work.n = place, <u32> cnp.PyArray_SIZE(each)
        work.ids = <const i64*> cnp.PyArray_DATA(each)
        if not distinct_init(&work.distinct, work.ids, work.n):
            raise_for(NO_MEMORY, f"{work.n} ids")
        with nogil:
            exceeded = quotas_exceeded(s, &work, 1, &about)
            free(work.distinct.slots)
        return about if exceeded else None

    def set_variables(self, list variables not None, Optimizer optimizer=None, *,
                      bint by_python=False):
        """Take dense variables, in the order of their numbers, as what steps change and pulls read.

        variables: (value f32[...], state f32[slots, n], marks u64[2]: its steps, and the version
        that changed it last), all contiguous; whoever else reads or changes their memory holds
        pushes meanwhile. optimizer: of all of them; None: no worker has initialized them yet.
        by_python: steps are calls. Not while pushes are held. Raises StatusError (BAD_INPUT) for
        arrays of another shape, dtype or order.
        """
        cdef ShardLoopState* s = self.state
        cdef vector[DenseVariable] each
        cdef DenseVariable one
        cdef cnp.ndarray value, state, marks
        for value, state, marks in variables:
            n = cnp.PyArray_SIZE(value)
            floats = state_floats(optimizer.rule, n) if optimizer is not None else 0
            if (value.dtype != np.float32 or state.dtype != np.float32 or marks.dtype != np.uint64
                    or marks.size != 2 or state.size != floats
                    or not all(cnp.PyArray_IS_C_CONTIGUOUS(a) for a in (value, state, marks))):
                raise_for(BAD_INPUT, "a dense variable is f32, with its state f32 and marks u64[2]")
            one.value = <float*> cnp.PyArray_DATA(value)
            one.state = <float*> cnp.PyArray_DATA(state)
            one.marks = <u64*> cnp.PyArray_DATA(marks)
            one.n = cnp.PyArray_SIZE(value)
            each.push_back(one)
        with nogil:
            s.still.lock()
        s.variables.swap(each)
        s.has_model, s.steps_by_python = optimizer is not None, by_python
        if optimizer is not None:
            s.dense_rule = optimizer.rule
        s.still.unlock()
        self.variables = variables

    # -- what is known of it

    @property
    def epoch(self):
        """The epoch since the last start of the shard. A request with another epoch is refused."""
        return self.state.epoch.load(relaxed)

    @epoch.setter
    def epoch(self, u64 value):
        self.state.epoch.store(value, release)

    @property
    def ready(self):
        """True if pulls and pushes are taken."""
        return bool(self.state.ready.load(relaxed))

    @ready.setter
    def ready(self, bint value):
        self.state.ready.store(value, release)

    @property
    def state_lost(self):
        """True if pulls and pushes are refused because what this shard had was not found again.
        Counts while it is not ready."""
        return bool(self.state.state_lost.load(relaxed))

    @state_lost.setter
    def state_lost(self, bint value):
        self.state.state_lost.store(value, release)

    @property
    def access(self):
        """The requests that are taken while rows move to another set: 0, all; 1, no pushes; 2, no
        pulls either; 3, they have moved. After a change, hold() waits for the push that is applied
        now."""
        return self.state.access.load(relaxed)

    @access.setter
    def access(self, u32 value):
        self.state.access.store(value, release)

    @property
    def version(self):
        """The version of the model: the number of pushes applied."""
        return self.state.model.load(relaxed)

    @version.setter
    def version(self, u64 value):
        self.state.model.store(value, release)

    @property
    def stamp(self):
        """The stamp of rows that are pulled or pushed now, for `Table.expire`."""
        return self.state.stamp.load(relaxed)

    @stamp.setter
    def stamp(self, u32 value):
        self.state.stamp.store(value, relaxed)

    def stale(self, *, u32 lag_max=0, bint slows=False):
        """Set the rule for pushes with gradients of an older version: refuse those more than
        lag_max behind; slow the rate."""
        self.state.lag_max.store(lag_max, relaxed)
        self.state.slows.store(slows, relaxed)

    @property
    def spins(self):
        """The number of spins so far: at most one after each message."""
        return self.state.spins.load(relaxed)

    def stats(self):
        cdef ShardLoopState* s = self.state
        return {"connections": s.connections.load(relaxed), "pulls": s.pulls.load(relaxed),
                "pulled_rows": s.pulled.load(relaxed),
                "pushes": s.pushes.load(relaxed), "pushed_rows": s.pushed.load(relaxed),
                "repeated": s.repeated.load(relaxed), "replayed": s.replayed.load(relaxed),
                "refused": s.refused.load(relaxed), "turned_away": s.turned_away.load(relaxed),
                "shared_bytes": s.shared_bytes.load(relaxed),
                "version": s.model.load(relaxed), "epoch": s.epoch.load(relaxed)}

    # -- calls

    @property
    def calls_fd(self):
        """Readable when calls() has something."""
        return self.state.calls.fd

    def calls(self):
        """Return the calls for Python: list of ((conn, generation, id), (kind, table, rows, epoch,
        worker, sequence, model, scale), payload). Each is answered once."""
        cdef vector[void*] taken
        cdef Call* call
        cdef size_t i
        cdef list out = []
        self.state.calls.take_all(taken)
        for i in range(taken.size()):
            call = <Call*> taken[i]
            h = call.head
            try:
                out.append(((call.conn, call.generation, h.id),
                            (h.kind, h.table, h.rows, h.epoch, h.worker, h.sequence, h.model,
                             h.scale),
                            (<const char*> call.body.at())[:call.body.size()]))
            except MemoryError:
                _unanswered(self.state, call.conn, call.generation)
            del call
        return out

    def close_connection(self, u32 number, u32 generation):
        """Close the connection of this number, if it still has this generation: as of calls().
        Requests under way are not answered."""
        if number < self.state.callers.size():
            _unanswered(self.state, number, generation)

    def answer(self, whom, bytes payload=b"", *, u32 refused=0, bint admit=False, bint close=False,
               u32 rows=0, u64 sequence=0,
               u64 worker=0, u64 incarnation=0, u32 stream=0, bint replays=False,
               bint pushes=True):
        """Reply to one of calls(). payload: padded to 8 bytes here; `rows` and `sequence` come back
        in the head. refused: why not. admit: it may pull and push from now on, as `worker`, unless
        another live client (of another incarnation) is that. stream: number of the follower, from
        1, that is sent changes over this connection from now on; 0: none. replays: it applies
        pushes itself, and is sent them where that gives the same. pushes: the one that is admitted
        may push; else it may pull only."""
        cdef u64 size = len(payload), end = padded(size), nothing = 0
        cdef ShardLoopState* s = self.state
        cdef ShardHead request, head
        if end > s.frame_bytes_max:
            raise_for(TOO_LARGE,
                      f"an answer of {size} bytes; frame_bytes_max is {s.frame_bytes_max}")
        conn, generation, request.id = whom
        request.dtype, request.table, request.rows, request.worker = 0, 0, rows, 0
        request.sequence = sequence
        head = shard_answer(request, SHARD_REFUSED if refused else SHARD_ANSWER,
                            s.epoch.load(relaxed), s.model.load(relaxed))
        head.payload_bytes = <u32> end
        if refused:
            head.rows = refused
            counts_refuse(s.counts, refused)
        if stream:
            self._follower(stream - 1).ends = False
        cdef Reply* reply = make[Reply]()
        if reply != NULL:
            reply.conn, reply.generation, reply.admit, reply.close = conn, generation, admit, close
            reply.worker, reply.incarnation, reply.stream = worker, incarnation, stream
            reply.replays, reply.pushes = replays, pushes
            reply.bytes.put(&head, HEAD_BYTES)
            reply.bytes.put(<const char*> payload, size)
            reply.bytes.put(&nothing, end - size)
        _give(s, reply, conn, generation)

    # -- followers

    def hold(self):
        """Hold pushes until resume(), by the same thread, so that something can be read or changed
        as a whole. Not twice."""
        with nogil:
            self.state.still.lock()

    def resume(self):
        self.state.still.unlock()

    @property
    def log_fd(self):
        """Readable when an answer waits for followers."""
        return self.state.log.fd

    @property
    def position(self):
        """Changes so far."""
        self.state.log.guard.lock()
        position = self.state.log.position()
        self.state.log.guard.unlock()
        return position

    def look(self, u64 worker, u64 sequence):
        """Look a push up: 0, it is new; 1, it was applied; 2, it is too old to know."""
        self.state.log.guard.lock()
        sight = <int> self.state.log.look(worker, sequence)
        self.state.log.guard.unlock()
        return sight

    def note(self, u32 table, ids, u64 worker=0, u64 sequence=0):
        """Note that Python changed rows, for a push or not. Return the position from which on
        followers have them; see `sure`."""
        cdef cnp.ndarray each = np.ascontiguousarray(ids, np.int64)
        cdef bint marked
        self.state.log.guard.lock()
        marked = self.state.log.append(table, <const i64*> cnp.PyArray_DATA(each),
                                       <u32> cnp.PyArray_SIZE(each), worker, sequence)
        position = self.state.log.position()
        self.state.log.guard.unlock()
        eventfd_signal(self.state.log.fd)
        if self.state.streaming.load(relaxed):
            eventfd_signal(self.state.post.fd)
        if not marked:
            raise_for(NO_MEMORY,
                      f"no memory to recognize a repetition of push {sequence} of worker {worker}")
        return position

    def sure(self):
        """The position up to which every follower that is waited for has all."""
        self.state.log.guard.lock()
        position = self.state.log.sure()
        self.state.log.guard.unlock()
        return position

    def highest(self, u64 worker):
        """The highest sequence number seen of that worker; 0: none."""
        self.state.log.guard.lock()
        found = self.state.log.highest(worker)
        self.state.log.guard.unlock()
        return found

    def pushes_seen(self):
        """Return by worker what is known of its pushes, as bytes for `saw` of another shard
        door."""
        cdef dict found = {}
        cdef vector[u64] workers
        cdef size_t i
        self.state.log.guard.lock()
        try:
            if not self.state.log.known(workers):
                raise_for(NO_MEMORY, "what is known of pushes")
            for i in range(workers.size()):
                window = <const char*> self.state.log.find(workers[i])
                found[workers[i]] = window[:SEQUENCES_BYTES]
        finally:
            self.state.log.guard.unlock()
        return found

    def saw(self, u64 worker, bytes seen):
        cdef Sequences* window
        if len(seen) != SEQUENCES_BYTES:
            raise_for(BAD_INPUT,
                      f"pushes seen of worker {worker}: {len(seen)} bytes, not {SEQUENCES_BYTES}")
        self.state.log.guard.lock()
        window = self.state.log.window(worker)
        if window != NULL:
            memcpy(window, <const char*> seen, SEQUENCES_BYTES)
            self.state.log.clock = max(self.state.log.clock, window.touched)
        self.state.log.guard.unlock()
        if window == NULL:
            raise_for(NO_MEMORY, f"pushes seen of worker {worker}")

    def follow(self, u32 number, *, bint waited=False):
        """Send follower `number` (below 12) changes from now on; waited: a push is answered when
        the follower has it. It counts as empty until it acknowledges a position."""
        cdef Follower* one = self._follower(number)
        self.state.log.guard.lock()
        one.on, one.waited, one.lost = True, waited, False
        one.taken, one.acknowledged = self.state.log.position(), 0
        _release(self.state)
        self.state.log.guard.unlock()

    def wait_for(self, u32 number):
        """Answer pushes from now on when follower `number` has them; it gets changes already."""
        cdef Follower* one = self._follower(number)
        self.state.log.guard.lock()
        one.waited = True
        self.state.log.guard.unlock()

    def unfollow(self, u32 number):
        """Remove a follower: no push waits for it any more."""
        cdef Follower* one = self._follower(number)
        self.state.log.guard.lock()
        one.on = False
        self.state.log.trim()
        _release(self.state)
        self.state.log.guard.unlock()

    def changed(self, u32 number, u64 most=1 << 63):
        """Return what follower `number` has not been sent: (position, {table: ids i64[n], each
        once}, [(worker, sequence)]); None when it fell too far behind, and must begin anew. Tell
        `acknowledge` the position when it has these rows. most: of ids, and the rest of the last
        push among them."""
        cdef Follower* one = self._follower(number)
        cdef vector[vector[i64]] ids
        cdef vector[u64] pushes
        cdef u64 position = 0
        cdef bint lost, gathered = True
        cdef size_t i
        with nogil:
            self.state.log.guard.lock()
            lost = one.lost or not one.on
            if not lost:
                gathered = self.state.log.gather(one[0], ids, pushes, most)
                position = one.taken
            self.state.log.guard.unlock()
        if lost:
            return None
        if not gathered:
            raise_for(NO_MEMORY, f"no memory for the changes of follower {number}")
        tables = {i: each_once(_array(ids[i])) for i in range(ids.size()) if ids[i].size()}
        return position, tables, [(pushes[i], pushes[i + 1]) for i in range(0, pushes.size(), 2)]

    def acknowledge(self, u32 number, u64 position):
        """Note that follower `number` has all changes up to `position`."""
        cdef Follower* one = self._follower(number)
        self.state.log.guard.lock()
        one.acknowledged = max(one.acknowledged, position)
        _release(self.state)
        self.state.log.guard.unlock()

    def sleep_at(self, u32 number, int fd):
        """Return whether follower `number` has been sent all. Then the eventfd `fd` is written at
        the next change, once; -1 for none any more. For one follower that reads on a thread of its
        own."""
        cdef Follower* one = self._follower(number)
        self.state.log.guard.lock()
        one.apart = True
        idle = not one.lost and one.taken == self.state.log.position()
        self.state.log.wake_fd, self.state.log.asleep = fd, idle and fd >= 0
        self.state.log.guard.unlock()
        return bool(idle)

    def end_stream(self, u32 number):
        """Stop sending follower `number` changes as they come, and notify it if it is connected.
        Its acknowledgements no longer count."""
        cdef Follower* one = self._follower(number)
        self.state.log.guard.lock()
        one.ends = True
        self.state.log.guard.unlock()
        eventfd_signal(self.state.post.fd)

    def streams(self, u32 number):
        """Return whether follower `number` is sent changes as they come, the position up to which
        it has all, and how many messages it has sent meanwhile."""
        cdef Follower* one = self._follower(number)
        self.state.log.guard.lock()
        found = bool(one.streams and not one.ends), one.acknowledged, one.messages
        self.state.log.guard.unlock()
        return found

    @property
    def python_waits(self):
        """True if log_fd becomes readable when followers that are sent changes as they come have
        more of them."""
        return bool(self.state.python_waits.load(relaxed))

    @python_waits.setter
    def python_waits(self, bint value):
        self.state.python_waits.store(value, relaxed)

    cdef Follower* _follower(self, u32 number) except NULL:
        if number >= FOLLOWERS:
            raise_for(BAD_INPUT, f"follower {number}: a shard has up to {FOLLOWERS}")
        return &self.state.log.followers[number]
