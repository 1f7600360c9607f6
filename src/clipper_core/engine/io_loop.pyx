"""The loop's body: epoll, read, write, accept. What to do with the bytes is the engine's affair;
which thread does it, that of runtime/loop_owner."""
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdlib cimport free
from posix.unistd cimport close, usleep

from clipper_core.results.completion cimport (
    CompletionState, completion_open_tasks, completion_wake_loop_thread, waiter_epoch, waiters_now,
)
from clipper_core.runtime.allocation cimport make
from clipper_core.runtime.machine cimport (
    eventfd_drain, eventfd_signal, futex_wait, monotonic_us, passes_descriptors, relaxed,
    send_iovecs, seq_cst, timer_slack_min, u8,
)
from clipper_core.runtime.reactor cimport (
    CONNECTION_TAG, EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, LISTENER_TAG, WAKE_UP_TAG, epoll_event,
    tag_kind, tag_number, tag_of,
)
from clipper_core.runtime.spin cimport spin_begin, spin_init, spin_on, spin_paid
from clipper_core.runtime.status cimport BAD_FRAME, NO_MEMORY, OK, REPLICA_LOST, raise_for
from clipper_core.scheduling.container_connection cimport (
    ContainerConnection, connection_has_unsent, connection_iovecs, connection_reserve,
    connection_sent,
)
from clipper_core.scheduling.scheduler cimport (
    ADOPT_CONNECTION, MOVE_CONNECTION, Command, ConnectionState, EngineState, engine_command,
    engine_connection, engine_idle, engine_longest_waiting, engine_lost, engine_open,
    engine_receive_copy, engine_received, engine_slot, engine_step,
)

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int fd, void* buffer, size_t n, int flags) noexcept

cdef extern from *:
    """
    #include <netinet/in.h>
    #include <netinet/tcp.h>
    static inline void clipper_no_delay(int fd) {  // a no-op error on unix sockets
        // A connection without heartbeats has no other way to notice that its host is gone.
        int one = 1, idle_s = 5;
        unsigned patience_ms = 1500;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience_ms, sizeof patience_ms);
        setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &one, sizeof one);
    }
    """
    void clipper_no_delay(int fd) noexcept nogil

cdef enum:
    IOVECS_MAX = 1024           # IOV_MAX
    READS_MAX = 16              # per turn and connection, so that one cannot starve the others
    WRITE_BYTES = 1048576       # likewise
    ACCEPTS_MAX = 8             # in one turn: the rest comes after the bytes of others
    STRANGER_US_MIN = 100000    # every connection has so long to say HELLO, however many come after
                                # it
    SPIN_US = 40
    SPIN_TASKS_MAX = 2
    PARK_US = 500               # a parked loop thread looks this often whether anybody leads
    QUIET_MAX = 8               # ticks without a leader before it goes back to epoll


cdef void _close(LoopState* s, EngineState* e, u32 conn, u32 status, u64 now_us) noexcept nogil:
    cdef ContainerConnection* connection = engine_connection(e, conn)
    cdef int fd
    if connection == NULL:
        return
    fd = connection.fd
    engine_lost(e, conn, status, now_us)
    s.reactor.close(fd)


# -- in
# --------------------------------------------------------------------------------------------------

cdef void _read(LoopState* s, EngineState* e, u32 conn, u64 now_us) noexcept nogil:
    cdef ContainerConnection* connection
    cdef u8* at
    cdef u64 room
    cdef ssize_t n
    cdef u32 _i
    for _i in range(READS_MAX):
        connection = engine_connection(e, conn)
        if connection == NULL:
            return
        room = connection_reserve(connection, &at)
        n = recv(connection.fd, at, room, 0) if room else 0
        if n < 0 and errno == EAGAIN:
            return
        if n < 0 and errno == EINTR:
            continue
        if n <= 0:
            _close(s, e, conn, REPLICA_LOST, now_us)
            return
        if not engine_received(e, conn, <u64> n, now_us):
            _close(s, e, conn, BAD_FRAME, now_us)
            return
        if <u64> n < room:
            return


cdef void _make_way(LoopState* s, EngineState* e, u64 now_us) noexcept nogil:
    """Close, at connections_max, the connection that waits longest to be accepted, so that
    connections that send nothing do not keep others out for long."""
    cdef ConnectionState* oldest
    if e.connection_count < e.connections_max:
        return
    oldest = engine_longest_waiting(e)
    if oldest != NULL and now_us - oldest.connection.opened_us >= STRANGER_US_MIN:
        _close(s, e, oldest.conn, REPLICA_LOST, now_us)


cdef void _accept(LoopState* s, EngineState* e, u32 listener, u64 now_us) noexcept nogil:
    cdef int fd
    cdef u32 _i
    for _i in range(ACCEPTS_MAX):
        fd = s.reactor.accept(listener)
        if fd < 0:
            return
        _make_way(s, e, now_us)
        _open(s, e, fd, now_us)


cdef u32 _open(LoopState* s, EngineState* e, int fd, u64 now_us) noexcept nogil:
    cdef u32 conn = engine_open(e, fd, now_us)
    if conn == 0:
        close(fd)
        return 0
    engine_connection(e, conn).passes = passes_descriptors(fd)
    engine_connection(e, conn).remote = not engine_connection(e, conn).passes
    clipper_no_delay(fd)
    s.reactor.watch(fd, EPOLLIN, tag_of(CONNECTION_TAG, conn))
    return conn


# -- out
# --------------------------------------------------------------------------------------------------

cdef void _write(LoopState* s, EngineState* e, u32 conn, u64 now_us) noexcept nogil:
    cdef ContainerConnection* connection = engine_connection(e, conn)
    cdef ssize_t n = 0
    cdef u64 iovecs, written = 0
    cdef int passed
    if connection == NULL:
        return
    connection.queued = False
    while connection_has_unsent(connection) and written < WRITE_BYTES:
        iovecs = connection_iovecs(connection, &passed)
        n = send_iovecs(connection.fd, connection.tx.data() + connection.tx_at,
                        min(iovecs, <u64> IOVECS_MAX), passed)
        if n < 0:
            if errno == EINTR:
                continue
            break
        connection_sent(connection, <u64> n, now_us)
        written += <u64> n
    if n < 0 and errno != EAGAIN:
        _close(s, e, conn, REPLICA_LOST, now_us)
    elif connection_has_unsent(connection) != connection.waits_out:
        connection.waits_out = not connection.waits_out
        s.reactor.change(connection.fd, EPOLLIN | (EPOLLOUT if connection.waits_out else 0),
                         tag_of(CONNECTION_TAG, conn))


cdef void _flush(LoopState* s, EngineState* e, u64 now_us) noexcept nogil:
    cdef size_t i
    for i in range(e.writers.size()):
        _write(s, e, e.writers[0][i], now_us)
    e.writers.clear()
    while e.closing.size():
        _close(s, e, e.closing.back(), OK, now_us)
        e.closing.pop_back()


# -- to and from other engines
# -----------------------------------------------------------------------------------------

cdef void _move_connection(LoopState* s, EngineState* e, Command* command,
                           u64 now_us) noexcept nogil:
    cdef ConnectionState* slot = engine_slot(e, command.conn)
    cdef int fd
    if (slot == NULL or slot.replica != NULL or slot.connection.closing
        or slot.connection.rx_at + slot.connection.rx_frame != slot.connection.rx_len):
        free(command.data)
        if slot != NULL and slot.replica == NULL:
            # it has sent more than a HELLO before it was welcome
            _close(s, e, command.conn, BAD_FRAME, now_us)
        return
    fd = slot.connection.fd
    s.reactor.unwatch(fd)
    engine_lost(e, command.conn, OK, now_us)
    command.kind = ADOPT_CONNECTION
    command.fd = fd
    if not engine_command(<EngineState*> command.to, command):
        free(command.data)
        close(fd)


cdef void _adopt(LoopState* s, EngineState* e, Command* command, u64 now_us) noexcept nogil:
    cdef u32 conn = _open(s, e, command.fd, now_us)
    if conn and not engine_receive_copy(e, conn, <const u8*> command.data, command.nbytes, now_us):
        _close(s, e, conn, BAD_FRAME, now_us)
    free(command.data)


cdef void _move(LoopState* s, EngineState* e, u64 now_us) noexcept nogil:
    cdef Command command
    while e.moves.size():
        command = e.moves.back()
        e.moves.pop_back()
        if command.kind == MOVE_CONNECTION:
            _move_connection(s, e, &command, now_us)
        else:
            _adopt(s, e, &command, now_us)


# -- the turn
# --------------------------------------------------------------------------------------------------

cdef void _handle(LoopState* s, EngineState* e, const epoll_event* event,
                  u64 now_us) noexcept nogil:
    cdef u32 number = tag_number(event.data.u64)
    if tag_kind(event.data.u64) == WAKE_UP_TAG:
        eventfd_drain(e.lanes.wake_fd)
    elif tag_kind(event.data.u64) == LISTENER_TAG:
        _accept(s, e, number, now_us)
    else:
        if event.events & EPOLLOUT:
            _write(s, e, number, now_us)
        if event.events & (EPOLLIN | EPOLLHUP | EPOLLERR):
            _read(s, e, number, now_us)


cdef bint _begin_spin(LoopState* s, EngineState* e, u64 until_us) noexcept nogil:
    """Begin to spin, until then at most. Return False if that is not worth its time, or if the core
    is needed, because a submitter that runs, or a container with much to do, comes first."""
    cdef u64 now
    if (completion_open_tasks(e.completion) > SPIN_TASKS_MAX
            and e.completion.waiters.load(relaxed) == 0):
        return False
    now = monotonic_us()
    if until_us <= now or not spin_begin(&s.spin, now):
        return False
    s.spin.end = min(s.spin.end, until_us)
    return True


cdef int _spin(LoopState* s, EngineState* e) noexcept nogil:
    """Poll instead of sleeping. Return the number of events; 0 when other work is published or the
    time is over."""
    cdef int n
    while True:
        n = s.reactor.wait(0)
        if n or not engine_idle(e) or s.stop.load(relaxed):
            spin_paid(&s.spin)
            return max(n, 0)
        if not spin_on(&s.spin, monotonic_us()):
            return 0


cdef int _sleep(LoopState* s, EngineState* e, u64 until_us, const u32* epoch) noexcept nogil:
    """Wait for events, for work that another thread publishes, or until the time. Return the number
    of events; -1 after a signal. A leading thread does not wait if an epoch has ended since
    `epoch`."""
    cdef u64 now = monotonic_us()
    cdef u64 woken
    cdef int n
    e.completion.loop_owner.mark_asleep()
    if (not engine_idle(e) or s.stop.load(seq_cst)
            or (epoch != NULL and waiter_epoch(e.completion[0]) != epoch[0])):
        until_us = now
    n = s.reactor.wait(until_us - now if until_us > now else 0)
    e.completion.loop_owner.mark_awake()
    woken = monotonic_us()
    if (n == 0 and until_us > now and woken > until_us
        and woken - until_us > s.late_us_max.load(relaxed)):
        s.late_us_max.store(woken - until_us, relaxed)
    return n


cdef void _step(LoopState* s, EngineState* e, u64 now_us) noexcept nogil:
    s.until_us = engine_step(e, now_us)
    if e.moves.size():
        _move(s, e, now_us)
    _flush(s, e, now_us)
    s.steps.fetch_add(1, relaxed)


cdef bint _turn(LoopState* s, EngineState* e, u64 until_us, const u32* epoch) noexcept nogil:
    """Wait for events until then at most, and let the engine step. True: a signal came instead."""
    cdef u64 now
    cdef int i, n
    until_us = min(until_us, s.until_us)
    n = _spin(s, e) if until_us and _begin_spin(s, e, until_us) else 0
    if n == 0 and until_us and engine_idle(e) and s.stop.load(relaxed) == 0:
        n = _sleep(s, e, until_us, epoch)
    elif n == 0:
        n = s.reactor.wait(0)
    now = monotonic_us()
    for i in range(n):
        _handle(s, e, &s.reactor.events[i], now)
    _step(s, e, now)
    return n < 0


# -- the lead
# --------------------------------------------------------------------------------------------------

cdef bint _led_turn(void* mover, u64 until_us, u32 epoch) noexcept nogil:
    cdef LoopState* s = <LoopState*> mover
    return _turn(s, s.engine, until_us, &epoch) or s.stop.load(seq_cst)


cdef bint _let_go(LoopState* s, bint by_waiter) noexcept nogil:
    """Give up the ownership of the loop, unless work was published while this thread held it.
    Return True if no thread owns the loop now."""
    cdef EngineState* e = s.engine
    cdef u64 ready, commands
    while True:
        ready = e.lanes.ready_head
        commands = e.commands_head
        e.completion.loop_owner.leave()
        if not e.lanes.ready.cells.published(ready) and not e.commands.cells.published(commands):
            return True
        if not e.completion.loop_owner.take():
            return False
        e.completion.loop_owner.by_waiter = by_waiter
        _step(s, e, monotonic_us())


cdef bint _is_waited_for(CompletionState* d, u32 mine) noexcept nogil:
    """Return whether other threads than the leader are blocked, and not just because they have not
    noticed yet that they are answered."""
    return waiters_now(d[0]) > mine and completion_open_tasks(d) != 0


cdef void _leave(LoopState* s, bint by_waiter, bint for_good) noexcept nogil:
    cdef CompletionState* d = s.engine.completion
    if _let_go(s, by_waiter) and (_is_waited_for(d, by_waiter)
                                  or (for_good and completion_open_tasks(d))
                                  or s.stop.load(seq_cst)):
        completion_wake_loop_thread(d)
    d.loop_owner.gone()


cdef void _leave_waiter(void* mover, bint for_good) noexcept nogil:
    _leave(<LoopState*> mover, True, for_good)


cdef void _tend(void* mover) noexcept nogil:
    cdef LoopState* s = <LoopState*> mover
    _step(s, s.engine, monotonic_us())
    _leave(s, False, False)


cdef bint _expects_an_owner(LoopState* s, CompletionState* d) noexcept nogil:
    if s.batches_seen != d.batches.load(relaxed):
        s.batches_seen = d.batches.load(relaxed)
        s.quiet = 0
    return d.loop_owner.expects_an_owner() and s.quiet < QUIET_MAX and completion_open_tasks(d) == 0


cdef void _park(LoopState* s, CompletionState* d) noexcept nogil:
    """The loop thread leaves the ownership of the loop to whoever comes, until it is called or
    nobody came for a tick; then it has it again."""
    cdef u32 bell = 0
    cdef u32 taken = d.loop_owner.taken.load(relaxed)
    cdef bint rung
    d.loop_owner.was_woken(&bell)
    rung = not _let_go(s, False) or _is_waited_for(d, 0) or s.stop.load(seq_cst)
    while True:
        if not rung:
            futex_wait(&d.loop_owner.wakeups, bell, PARK_US)
        rung = d.loop_owner.was_woken(&bell) or rung or s.stop.load(seq_cst)
        if not rung and d.loop_owner.taken.load(relaxed) != taken:
            taken = d.loop_owner.taken.load(relaxed)
            s.quiet = 0
        elif d.loop_owner.take():
            break
        rung = False
    d.loop_owner.by_waiter = False
    if rung or completion_open_tasks(d):
        d.loop_owner.was_wrong()
    s.quiet += 1


cdef void _run(LoopState* s, EngineState* e) noexcept nogil:
    timer_slack_min()
    _step(s, e, monotonic_us())
    while s.stop.load(seq_cst) == 0:
        if _expects_an_owner(s, e.completion):
            _park(s, e.completion)
            _turn(s, e, 0, NULL)
        else:
            _turn(s, e, s.until_us, NULL)
    e.completion.loop_owner.close()
    while not e.completion.loop_owner.is_alone():
        usleep(20)


cdef class IoLoop:
    """The loop that moves bytes. Threads: run() is the body of one thread; the other methods any.

    Moves bytes between the engine and its containers. `listen(fd)` takes over a listening socket
    (unix or TCP); `run()` releases the GIL and returns after `stop()`.
    """

    def __cinit__(self, Engine engine):
        cdef LoopState* s
        self.engine = engine
        self.state = s = make[LoopState]()
        if s == NULL:
            raise_for(NO_MEMORY, "no memory for the IO loop")
        s.engine = engine.state
        spin_init(&s.spin, SPIN_US)
        if not (s.reactor.open()
                and s.reactor.watch(engine.state.lanes.wake_fd, EPOLLIN, tag_of(WAKE_UP_TAG, 0))):
            raise OSError(errno, "no descriptors for the IO loop")
        engine.state.completion.loop = s
        engine.state.completion.run_turn = &_led_turn
        engine.state.completion.leave_loop = &_leave_waiter
        engine.state.completion.step_and_leave = &_tend

    def __dealloc__(self):
        if self.state != NULL:
            self.state.reactor.close_listeners()
            del self.state

    def listen(self, int fd):
        """Accept connections from listening socket `fd`, which now belongs to the loop. Before
        run(), or while it runs."""
        if not self.state.reactor.listen(fd):
            raise OSError(errno, f"descriptor {fd} cannot be listened at")

    def run(self):
        """Move bytes until stop(). Takes no GIL in between."""
        with nogil:
            _run(self.state, self.engine.state)

    def stop(self):
        """Ask run() to return; it does so at once."""
        self.state.stop.store(1, seq_cst)
        eventfd_signal(self.engine.state.lanes.wake_fd)
        completion_wake_loop_thread(self.engine.state.completion)

    def close_connections(self):
        """Close the sockets of all containers, and those that listen. Only when run() has
        returned."""
        cdef EngineState* e = self.engine.state
        cdef u32 i
        self.state.reactor.close_listeners()
        for i in range(1, e.slots_used + 1):
            if e.connections[i].connection != NULL:
                _close(self.state, e, e.connections[i].conn, OK, monotonic_us())

    def snapshot(self):
        """Return counts of the loop since its start.

        steps: turns; led: times that a caller ran them itself; late_us_max: the longest oversleep,
        microseconds; batches: of answers, with mailbox_writes and futex_wakes: the system calls
        that woke event loops and blocked threads for them.
        """
        cdef CompletionState* d = self.engine.state.completion
        return {
            "steps": self.state.steps.load(relaxed),
            "led": d.loop_owner.taken.load(relaxed),
            "late_us_max": self.state.late_us_max.load(relaxed),
            "batches": d.batches.load(relaxed),
            "mailbox_writes": d.mailbox_writes.load(relaxed),
            "futex_wakes": d.futex_wakes.load(relaxed),
        }
