"""Creates an engine, passes commands of Python to it, and has functions for simulators. The
decisions are in `scheduler`."""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from libcpp.unordered_set cimport unordered_set
from libcpp.vector cimport vector
from posix.unistd cimport close

import os

from clipper_core.cache.clock_cache cimport (
    Policy, cache_bytes, cache_entries, cache_evictions, cache_free, cache_new, cache_touch,
    policy_of,
)
from clipper_core.results.completion cimport ENGINES_MAX, completion_close, completion_flush
from clipper_core.runtime.histogram cimport histogram_snapshot
from clipper_core.runtime.machine cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, acquire, aligned_new, atomic, eventfd, eventfd_drain, monotonic_us,
    relaxed, release, seq_cst, u32, u64, u8,
)
from clipper_core.runtime.ring cimport ring_free, ring_new, ring_row, spsc_free, spsc_new
from clipper_core.runtime.row_hash cimport variant_best
from clipper_core.runtime.status cimport (
    BAD_INPUT, CLOSED, FULL, NO_MEMORY, REPLICA_LOST, UNKNOWN, raise_for,
)
from clipper_core.scheduling.bands cimport SHARES_MAX
from clipper_core.scheduling.batcher cimport TIMINGS_MAX
from clipper_core.scheduling.container_connection cimport (
    ContainerConnection, connection_free, connection_sent, spare_free,
)
from clipper_core.scheduling.deferred_calls cimport deferred_calls_close
from clipper_core.scheduling.lane cimport (
    STATUSES, Lanes, Tally, lane_close, lanes_free, lanes_new, pending_touch, submitters_stop,
)
from clipper_core.scheduling.model_state cimport (
    ModelState, model_state_clear, model_state_free, model_state_init, retired_models_free,
    retired_models_init,
)
from clipper_core.scheduling.part_streams cimport (
    part_streams_close, part_streams_free, part_streams_new,
)
from clipper_core.scheduling.replica cimport (
    PROFILE_BUCKETS, RECORD_HEAD, Gauge, batch_log_open, replica_free,
)
from clipper_core.scheduling.scheduler cimport (
    ADOPT_CONNECTION, ATTACH, CLOSE_CONNECTION, CONNECTIONS_MAX, DRAIN, MOVE_CONNECTION, REFUSE_ROW,
    REFUSE_CONNECTION, SEND_ANSWER, SEND_FEEDBACK, SET_EARLIEST_REPLICA, ConnectionState,
    PendingEvent,
    engine_command, engine_connection, engine_lost, engine_open, engine_receive_copy, engine_step,
)
from clipper_core.scheduling.submit cimport row_bytes_end
from clipper_core.wire.lz4 cimport LITERALS, QUICK, THOROUGH

from clipper_core.runtime.status import Status as StatusName
from clipper_core.scheduling.scheduler import EngineEvent

cdef enum:
    COMMANDS_MAX = 8192
    KEY_BYTES = 16              # of a row
    EVENTS_QUEUED_MAX = 16384
    CALLS_QUEUED_MAX = 65536    # calls of models that wait to be read

# near, far
cdef dict _searches = {"auto": (LITERALS, QUICK), "none": (LITERALS, LITERALS),
                       "full": (THOROUGH, THOROUGH)}


cdef int _make_room(EngineState* e, u64 connections, u64 models) except -1:
    """Reserve address space for all connections and models in the loop's vectors, so that they can
    grow without an allocation."""
    e.free_slots.reserve(connections)
    e.writers.reserve(connections)
    e.closing.reserve(connections)
    e.watched.reserve(connections)
    e.hot.reserve(models)
    e.waits.reserve(models)
    e.moves.reserve(COMMANDS_MAX)
    return 0


@cython.no_gc_clear                  # __dealloc__ needs `completion`
cdef class Engine:
    """The engine: queues, cache and connections of models. Threads: any, except step, receive,
    outgoing, lost, which belong to the loop (or to a simulator in its place).

    `limits` names every bound: cache_bytes_max, tasks_max, queue_bytes_max (rows of variable
    length), frame_bytes_max, row_bytes_max (of one input), rows_max (of a batch), output_bytes_max,
    connections_max, models_max, parts_ahead_max (parts of an answer that were not read),
    answer_bytes_max (of all parts of one answer), streams_max (answers in parts that a container
    makes at a time); and heartbeat_ms, hello_ms. A replica whose model fails
    `eject_after` batches in a row gets no rows for a while (0: never). `cache_policy` is clock or
    sieve. `compression` of the strings sent: "auto" (between hosts, quickly), "none", or "full"
    (everywhere, as small as possible). With `manual_clock` the time is the argument of step
    (microseconds). `number`: among the engines of one server, see `link_peer`. Raises BAD_INPUT: no
    such policy, compression or number. Source: docs/architecture.md, "Flow".
    """

    def __cinit__(self, *, u64 cache_bytes_max=256 << 20, str cache_policy="clock",
                  u64 tasks_max=1 << 20,
                  u64 queue_bytes_max=1 << 30, u64 frame_bytes_max=64 << 20,
                  u64 row_bytes_max=1 << 32, u32 rows_max=1 << 16,
                  u64 output_bytes_max=16 << 20, u64 connections_max=4096, u32 models_max=65535,
                  u64 heartbeat_ms=500,
                  u64 hello_ms=10000, u32 eject_after=3, bint manual_clock=False, seed=None,
                  str compression="auto", u32 number=0, u64 parts_ahead_max=32,
                  u64 answer_bytes_max=16 << 20, u32 streams_max=64):
        cdef EngineState* e
        cdef Policy policy = policy_of(cache_policy)
        cdef object noise = os.urandom(16) if seed is None else int(seed).to_bytes(16, "little")
        cdef u64 now = 0 if manual_clock else monotonic_us()
        if compression not in _searches:
            raise_for(BAD_INPUT,
                      f"compression is one of {', '.join(_searches)}, not {compression!r}")
        if number >= ENGINES_MAX:
            raise_for(BAD_INPUT, f"engines are numbered from 0 to {ENGINES_MAX - 1}, not {number}")
        self.completion = Completion(number)
        self.models = []
        self.peers = []
        self.limits = {"models_max": models_max, "tasks_max": tasks_max,
                       "connections_max": min(connections_max, CONNECTIONS_MAX - 2)}
        self.state = e = <EngineState*> aligned_new(sizeof(EngineState))
        if e == NULL:
            raise_for(NO_MEMORY, "no memory for the engine")
        e.completion = self.completion.state
        e.manual = manual_clock
        e.now_us.store(now, relaxed)
        e.limits.payload_bytes_max = frame_bytes_max
        e.limits.rows_max = rows_max
        e.row_bytes_max = row_bytes_max
        e.limits.output_bytes_max = output_bytes_max
        e.connections_max = self.limits["connections_max"]
        e.search_near, e.search_far = _searches[compression]
        e.heartbeat_us = heartbeat_ms * 1000
        e.hello_us = hello_ms * 1000
        e.eject_after = eject_after
        e.housekeeping_us = now
        e.cache = cache_new(cache_bytes_max, int.from_bytes(noise[:8], "little"),
                            int.from_bytes(noise[8:], "little"),
                            variant_best(), policy)
        e.models = <ModelState**> aligned_new(<u64> models_max * sizeof(void*))
        e.connections = <ConnectionState*> aligned_new(CONNECTIONS_MAX * sizeof(ConnectionState))
        e.commands = ring_new(COMMANDS_MAX, sizeof(Command), 0)
        e.events = spsc_new(EVENTS_QUEUED_MAX)
        e.events_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        e.calls = spsc_new(CALLS_QUEUED_MAX)
        e.calls_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        e.free_slots = new vector[u32]()
        e.writers = new vector[u32]()
        e.closing = new vector[u32]()
        e.hot = new vector[u32]()
        e.watched = new vector[u32]()
        e.waits = new vector[u32]()
        e.spare = new vector[void*]()
        e.moves = new vector[Command]()
        e.streams = part_streams_new(parts_ahead_max, answer_bytes_max, streams_max)
        _make_room(e, self.limits["connections_max"] + 2, models_max)
        if e.cache != NULL:
            e.lanes = lanes_new(e.completion, e.cache, now, tasks_max, queue_bytes_max)
        if (e.cache == NULL or e.models == NULL or e.connections == NULL or e.commands == NULL
            or e.events == NULL or e.calls == NULL or e.calls_fd < 0 or e.streams == NULL
                or not retired_models_init(&e.retired) or e.lanes == NULL or e.events_fd < 0):
            raise_for(NO_MEMORY,
                      "no memory (or no file descriptor) for the engine; lower cache_bytes_max or "
                      "tasks_max")

    def __dealloc__(self):
        cdef EngineState* e = self.state
        cdef u32 i
        if e == NULL:
            return
        if e.lanes != NULL and e.streams != NULL:
            _finish(e)              # a future may outlive its engine, but must not wait for it
        self._free_connections()
        part_streams_free(e.streams)
        for i in range(e.model_count.load(relaxed)):
            model_state_free(e.models[i])
        lanes_free(e.lanes)
        if e.cache != NULL:
            cache_free(e.cache)
        self._free_event()
        ring_free(e.commands)
        spsc_free(e.events)
        spsc_free(e.calls)
        retired_models_free(&e.retired)
        if e.events_fd > 0:
            close(e.events_fd)
        if e.calls_fd > 0:
            close(e.calls_fd)
        del e.free_slots
        del e.writers
        del e.closing
        del e.hot
        del e.watched
        del e.waits
        spare_free(e.spare)
        del e.moves
        free(e.models)
        free(e.connections)
        free(e)

    cdef int _free_connections(self) except -1:
        cdef EngineState* e = self.state
        cdef u32 i
        for i in range(1, e.slots_used + 1 if e.connections != NULL else 1):
            if e.connections[i].replica != NULL:
                replica_free(e.connections[i].replica)
            connection_free(e.connections[i].connection)
            free(e.connections[i].attached)
            free(e.connections[i].gone)
        return 0

    cdef int _free_event(self) except -1:
        cdef u64 word
        cdef Command* command
        while self.state.events != NULL and self.state.events.pop(&word):
            free(<PendingEvent*> word)
        while self.state.calls != NULL and self.state.calls.pop(&word):
            free(<PendingEvent*> word)
        while (self.state.commands != NULL
               and self.state.commands.cells.published(self.state.commands_head)):
            command = <Command*> ring_row(self.state.commands, self.state.commands_head)
            if command.kind == ADOPT_CONNECTION:
                close(command.fd)
            free(command.data)
            self.state.commands.cells.release(self.state.commands_head)
            self.state.commands_head += 1
        return 0

    cdef ModelState* new_model(self) except NULL:
        """Return the state of a new model. Its number is that of a freed model, or the next one.
        The loop sees it with the first row or replica that refers to it."""
        cdef EngineState* e = self.state
        cdef ModelState* model
        cdef u64 index
        if e.retired.unused.pop(&index):
            model_state_clear(e.models[index])
            e.models[index].row_bytes_end = row_bytes_end(e)
            return e.models[index]
        index = e.model_count.load(relaxed)
        if index >= <u32> self.limits["models_max"]:
            raise_for(FULL,
                      f"models_max = {self.limits['models_max']} models are registered; raise it "
                      f"in [limits]")
        model = <ModelState*> aligned_new(sizeof(ModelState))
        if model == NULL:
            raise_for(NO_MEMORY, f"no memory for a model beside the {index} that there are")
        if not model_state_init(model):
            model_state_free(model)
            raise_for(NO_MEMORY, f"no memory for a model beside the {index} that there are")
        model.index = <u32> index
        model.row_bytes_end = row_bytes_end(e)
        e.models[index] = model
        e.model_count.store(model.index + 1, release)
        return model

    cdef int command(self, Command* command) except -1:
        if not engine_command(self.state, command):
            free(command.data)
            raise_for(FULL, f"{COMMANDS_MAX} commands are waiting for the loop; is it running?")
        return 0

    def link_peer(self, Engine other):
        """Allow futures over models of this engine and of `other`. Called before the loops run."""
        cdef u32 theirs = other.completion.state.number
        cdef u32 ours = self.completion.state.number
        if (ours == theirs or self.completion.state.peers[theirs] != NULL
            or other.completion.state.peers[ours] != NULL):
            raise_for(BAD_INPUT,
                      f"engine {ours} cannot be linked to engine {theirs}: the engines of a "
                      f"server have numbers of their own")
        self.peers.append(other.completion)
        other.peers.append(self.completion)
        self.completion.state.peers[theirs] = other.completion.state
        other.completion.state.peers[ours] = self.completion.state
        self.completion.state.has_peers = other.completion.state.has_peers = True

    # -- commands and events, for the control thread

    def attach(self, u32 conn, u32 model, bytes welcome, *, u32 number=0, u8 protocol=2,
               bint checked=False,
               bint shared=False, bint sessions=False, bint quiet=False, u32 heartbeat_ms=0,
               timings=(), u32 mode=0,
               u32 size_max=4096, u32 step=8, double backoff=0.9, u32 delay_us=0,
               double budget_share=0.5, u64 cost_max=0, bint parts=False, bint cancels=False,
               u32 concurrency=0, u32 calls_max=0):
        """Accept connection `conn` as a replica of `model`; `welcome` is the payload of its
        WELCOME.

        shared: it can map rows; they are shared with it if its connection passes descriptors.
        sessions: it gets the salt of each row as its session; nothing is shared with it then.
        quiet: neither side sends heartbeats or checks for silence, because the end of its process
        is detected in another way. heartbeat_ms: of this connection; 0: the engine's. timings:
        (rows, microseconds) of batches that the container ran before it was ready, at most 32, the
        smallest first; with their cost as a third number where rows differ in cost. cost_max: of a
        batch of rows that differ in cost; 0: no bound. parts: it can answer queries in parts.
        cancels: it gets CANCEL for a batch of which nobody waits for a row. concurrency: batches
        that it works at, and answers in any order; 0: one. calls_max: calls of its model that
        may be open; 0: it may not call.
        """
        cdef Command command
        cdef u32 i
        if model >= self.state.model_count.load(acquire):
            raise_for(UNKNOWN, f"no model with index {model}")
        memset(&command, 0, sizeof(Command))
        command.kind = ATTACH
        command.heartbeat_us = <u64> heartbeat_ms * 1000
        command.timing_count = <u32> min(len(timings), TIMINGS_MAX)
        for i in range(command.timing_count):
            command.timings[i].rows, command.timings[i].time_us = timings[i][:2]
            command.timings[i].cost = timings[i][2] if len(timings[i]) > 2 else 0
        command.conn = conn
        command.model = model
        command.number = number
        command.protocol = protocol
        command.checked = checked
        command.shared = shared
        command.sessions = sessions
        command.quiet = quiet
        command.parts = parts
        command.cancels = cancels
        command.concurrency = concurrency
        command.calls_max = calls_max
        command.batching.mode = mode
        command.batching.size_max = min(size_max, self.state.limits.rows_max)
        command.batching.step = step
        command.batching.backoff = backoff
        command.batching.delay_us = delay_us
        command.batching.budget_share = budget_share
        command.batching.by_cost = self.state.models[model].by_cost != NULL
        command.batching.cost_max = <u32> min(cost_max, <u64> 0xFFFFFFFF)
        self._with_data(&command, welcome)

    def refuse(self, u32 conn, str reason):
        """Reject connection `conn` with a reason, which its container prints."""
        self._order(REFUSE_CONNECTION, conn, reason.encode())

    def move_connection(self, u32 conn, Engine other, bytes hello):
        """Move connection `conn`, of which only a HELLO has arrived (`hello`: its frame), to the
        engine `other`, as if it had connected there.

        `other` must outlive this engine's loop. A connection that has sent more by then is closed.
        """
        cdef Command command
        memset(&command, 0, sizeof(Command))
        command.kind = MOVE_CONNECTION
        command.conn = conn
        command.to = other.state
        self._with_data(&command, hello)

    def drain(self, u32 conn):
        """Send no new batches to this replica, and GOODBYE after its last reply."""
        self._order(DRAIN, conn, b"")

    def send_feedback(self, u32 conn, bytes feedback, u32 rows):
        """Send a container the payload of a FEEDBACK frame (correction.encode_feedback) of so many
        rows, when nothing else is to be sent to it. It is dropped, and counted, while too much
        feedback waits."""
        cdef Command command
        memset(&command, 0, sizeof(Command))
        command.kind = SEND_FEEDBACK
        command.conn = conn
        command.number = rows
        self._with_data(&command, feedback)

    def refuse_row(self, u32 model, bytes key, u64 when_us):
        """Refuse the row of `model` with this key (of a DISCONNECTED event) before `when_us` of
        `now_us()`: a query with it ends at once with REPLICA_LOST."""
        cdef Command command
        if len(key) != KEY_BYTES:
            raise_for(BAD_INPUT, f"a row's key has {KEY_BYTES} bytes, not {len(key)}")
        if model >= self.state.model_count.load(acquire):
            raise_for(UNKNOWN, f"no model with index {model}")
        memset(&command, 0, sizeof(Command))
        command.kind = REFUSE_ROW
        command.model = model
        command.when_us = when_us
        self._with_data(&command, key)

    def disconnect(self, u32 conn):
        self._order(CLOSE_CONNECTION, conn, b"")

    def set_weights(self, list weights not None):
        """Set the weights of the shares, by their numbers: whole numbers from 1. Threads: any."""
        cdef u32 share, weight
        if len(weights) > SHARES_MAX + 1:
            raise ValueError(f"{len(weights)} shares: at most {SHARES_MAX + 1}")
        for share, weight in enumerate(weights):
            self.state.lanes.weights[share].store(weight, relaxed)

    def set_earliest_replica(self, u32 model, u64 when_us):
        """Set the time `when_us` (of `now_us()`) before which no replica of `model` can connect,
        while there is none. Queries due earlier, including waiting ones, end at once with
        NO_REPLICA. 0: the time is unknown, and queries wait. It is valid until a replica connects.
        """
        cdef Command command
        if model >= self.state.model_count.load(acquire):
            raise_for(UNKNOWN, f"no model with index {model}")
        memset(&command, 0, sizeof(Command))
        command.kind = SET_EARLIEST_REPLICA
        command.model = model
        command.when_us = when_us
        self._with_data(&command, b"")

    def _order(self, u32 kind, u32 conn, bytes data):
        cdef Command command
        memset(&command, 0, sizeof(Command))
        command.kind = kind
        command.conn = conn
        self._with_data(&command, data)

    cdef int _with_data(self, Command* command, bytes data) except -1:
        command.nbytes = len(data)
        command.data = malloc(command.nbytes + 1)
        if command.data == NULL:
            raise_for(NO_MEMORY, "no memory for a command")
        memcpy(command.data, <const char*> data, command.nbytes)
        self.command(command)
        return 0

    @property
    def events_fd(self):
        """An eventfd, readable when `events()` has something."""
        return self.state.events_fd

    def events(self):
        """Return what the loop reports, oldest first: (EngineEvent, conn, model, Status, data)
        tuples. One reader.

        The data of DISCONNECTED, if rows were in flight: how many (u32), the model's number (u32),
        and whether one of them is blamed (u32), because it was alone in two containers that died,
        with its key."""
        cdef u64 word
        cdef PendingEvent* item
        cdef list events = []
        eventfd_drain(self.state.events_fd)
        while self.state.events.pop(&word):
            item = <PendingEvent*> word
            events.append((EngineEvent(item.kind), item.conn, item.model, StatusName(item.status),
                           PyBytes_FromStringAndSize(<char*> item.data, <Py_ssize_t> item.nbytes)))
            free(item)
        return events

    # -- calls of models, for one thread

    @property
    def calls_fd(self):
        """An eventfd, readable when `calls()` has something."""
        return self.state.calls_fd

    def calls(self):
        """Return the calls of models that have arrived, oldest first: (EngineEvent, conn, id of
        the call, payload) tuples, of CALL_RECEIVED, CALL_CANCELLED, and DISCONNECTED for a
        container that had open calls. One reader."""
        cdef u64 word
        cdef PendingEvent* item
        cdef list found = []
        eventfd_drain(self.state.calls_fd)
        while self.state.calls.pop(&word):
            item = <PendingEvent*> word
            found.append((EngineEvent(item.kind), item.conn, item.id,
                          PyBytes_FromStringAndSize(<char*> item.data, <Py_ssize_t> item.nbytes)))
            free(item)
        return found

    def send_answer(self, u32 conn, u64 id, bytes payload):
        """Send a container the ANSWER to its call `id`, once."""
        cdef Command command
        memset(&command, 0, sizeof(Command))
        command.kind = SEND_ANSWER
        command.conn = conn
        command.id = id
        self._with_data(&command, payload)

    # -- time and bytes: for a simulator or a test; the IO loop calls the same functions without
    # Python

    def step(self, u64 now_us):
        """Run a step: decide everything that is due. Return the latest time of the next step (us).
        """
        return engine_step(self.state, now_us)

    def open(self, u64 now_us, *, bint remote=False, bint passes=False):
        """Add a connection. Return its number, 0 when connections_max is reached. remote: it is
        from another host.  passes: it can pass descriptors."""
        cdef u32 conn = engine_open(self.state, -1, now_us)
        if conn:
            engine_connection(self.state, conn).remote = remote
            engine_connection(self.state, conn).passes = passes
        return conn

    def receive(self, u32 conn, bytes data, u64 now_us):
        """Process bytes received from connection `conn`. Return False if they are no frames; then
        close it."""
        return engine_receive_copy(self.state, conn, <const u8*> (<const char*> data), len(data),
                                   now_us)

    def outgoing(self, u32 conn, u64 now_us, list passed=None):
        """Return all bytes that are to be sent to connection `conn`; they count as sent.

        passed: copies of the descriptors that go with them are added, in order; the caller closes
        them.
        """
        cdef ContainerConnection* connection = engine_connection(self.state, conn)
        cdef list chunks = []
        cdef u64 total = 0
        cdef size_t i
        if connection == NULL:
            return b""
        connection.queued = False
        if passed is not None:
            for i in range(connection.passing.size()):
                passed.append(os.dup(connection.passing[0][i].fd))
        for i in range(connection.tx_at, connection.tx.size()):
            chunks.append(PyBytes_FromStringAndSize(<char*> connection.tx[0][i].iov_base,
                                                    <Py_ssize_t> connection.tx[0][i].iov_len))
            total += connection.tx[0][i].iov_len
        if total:
            connection_sent(connection, total, now_us)
        return b"".join(chunks)

    def wants_close(self, u32 conn):
        """Return True once the connection must be closed (after its last bytes were sent), or when
        it is closed already."""
        cdef ContainerConnection* connection = engine_connection(self.state, conn)
        return connection == NULL or bool(connection.closing)

    def lost(self, u32 conn, u64 now_us):
        """Note that connection `conn` is closed. Its rows in flight go to other replicas, once, if
        time allows."""
        engine_lost(self.state, conn, REPLICA_LOST, now_us)

    # -- closing

    def refuse_new(self):
        """End every new query at once with CLOSED, from now on; those in flight continue."""
        self.state.refusing.store(CLOSED, seq_cst)

    def finish(self):
        """End every task that is still open with CLOSED. The loop must not be running any more."""
        _finish(self.state)

    def end_tasks(self):
        """Run the first half of finish(): the futures of connected engines still complete."""
        _end_tasks(self.state)

    def kill(self, int status):
        """Disable the engine in a forked child, where its threads do not exist."""
        self.completion.kill(status)

    def touch_cache(self, u64 start=0):
        """Do `ClockCache.touch` for the engine's cache. Threads: any but a loop's, as it may take
        milliseconds."""
        with nogil:
            start = cache_touch(self.state.cache, start)
        return start

    def touch_pending(self, u64 start=0):
        """Do `Pending.touch` for the table of evaluations in flight. Threads: as for
        touch_cache."""
        with nogil:
            start = pending_touch(self.state.lanes.pending, start)
        return start

    def now_us(self):
        """The engine's time: the monotonic clock, or the last argument of step."""
        return self.state.now_us.load(relaxed) if self.state.manual else monotonic_us()

    # -- snapshots

    def snapshot(self):
        """Return the current counters and gauges, as plain dicts: `cache`, `models` (in order,
        without those unlisted), `issued`, `answered`, `lanes` (queues that exist), `unlisted`
        (models that are not listed and not freed)."""
        cdef EngineState* e = self.state
        return {
            "issued": self.completion.issued,
            "answered": self.completion.answered,
            "events_lost": e.events_lost.load(relaxed),
            "lanes": e.lanes.live.load(relaxed),
            "unlisted": e.retired.unlisted.load(relaxed),
            "queue_bytes": e.lanes.heap_bytes.load(relaxed),
            "cache": {"bytes": cache_bytes(e.cache), "entries": cache_entries(e.cache),
                      "evictions": cache_evictions(e.cache)},
            "models": [_model_snapshot(e.models[i]) for i in range(e.model_count.load(acquire))
                       if not e.models[i].unlisted],
        }

    def model_counts(self, u32 model):
        """Return the counts of one model, listed or not: rows `submitted`, of these `answered` in
        any way and `in_flight` (some `queued`); `hits`, `joined`, `evaluated`, `failed` (with
        their batch, counted before they end), `batches`, `refused` (at submission, by status
        name), `replicas`, `delay_us` (forecast wait of a row that is submitted now). Counters are
        read one by one, so they may be inconsistent by concurrent events."""
        if model >= self.state.model_count.load(acquire):
            raise_for(UNKNOWN, f"no model with index {model}")
        return _model_counts(self.state.models[model])

    def model_latency(self, u32 model):
        """Return a histogram.Snapshot of one model, listed or not: from submit to answer, us, of
        rows that the cache did not have."""
        if model >= self.state.model_count.load(acquire):
            raise_for(UNKNOWN, f"no model with index {model}")
        return histogram_snapshot(&self.state.models[model].tally.latency)

    def replica(self, u32 conn):
        """Return the batcher of connection `conn`: its limit, counts, fit and latency profile.

        `failures` are batches that its model failed, `ejected` is whether it is ejected for them,
        and `ejections` how often it was. `accuracy` is what its model reports (None:
        nothing). `feedback_sent` and `feedback_dropped` count rows of feedback; of those sent, the
        container `learned` some and `failed` at others. None when it is not attached.
        """
        cdef Gauge seen
        cdef u32 number
        cdef u64 accuracy
        if not _look(self.state, conn, &seen, &number):
            return None
        accuracy = seen.progress.accuracy.load(relaxed)
        return {
            "number": number,
            "limit": seen.limit.load(relaxed),
            "limit_cost": seen.limit_cost.load(relaxed),
            "row_cost": seen.unit.load(relaxed),
            "batches": seen.batches.load(relaxed),
            "misses": seen.misses.load(relaxed),
            "in_flight": seen.in_flight.load(relaxed),
            "suspect": bool(seen.suspect.load(relaxed)),
            "ejected": bool(seen.ejected.load(relaxed)),
            "ejections": seen.ejections.load(relaxed),
            "failures": seen.failures.load(relaxed),
            "accuracy": (accuracy - 1) / 1e9 if accuracy else None,
            "feedback_sent": seen.taught.load(relaxed),
            "feedback_dropped": seen.untaught.load(relaxed),
            "learned": seen.progress.learned.load(relaxed),
            "failed": seen.progress.failed.load(relaxed),
            "fit_us": (seen.fit_a_ns.load(relaxed) / 1000, seen.fit_b_ns.load(relaxed) / 1000),
            "profile": [(1 << i, seen.profile_us[i].load(relaxed), seen.profile_n[i].load(relaxed))
                        for i in range(PROFILE_BUCKETS) if seen.profile_n[i].load(relaxed)],
        }


cdef inline void _copy(atomic[u64]* to, atomic[u64]* value) noexcept nogil:
    to.store(value.load(relaxed), relaxed)


cdef void _copy_gauge(Gauge* to, Gauge* gauge) noexcept nogil:
    cdef u32 i
    _copy(&to.limit, &gauge.limit)
    _copy(&to.limit_cost, &gauge.limit_cost)
    _copy(&to.unit, &gauge.unit)
    _copy(&to.batches, &gauge.batches)
    _copy(&to.misses, &gauge.misses)
    _copy(&to.in_flight, &gauge.in_flight)
    _copy(&to.suspect, &gauge.suspect)
    _copy(&to.failures, &gauge.failures)
    _copy(&to.ejected, &gauge.ejected)
    _copy(&to.ejections, &gauge.ejections)
    _copy(&to.progress.accuracy, &gauge.progress.accuracy)
    _copy(&to.progress.learned, &gauge.progress.learned)
    _copy(&to.progress.failed, &gauge.progress.failed)
    _copy(&to.taught, &gauge.taught)
    _copy(&to.untaught, &gauge.untaught)
    _copy(&to.fit_a_ns, &gauge.fit_a_ns)
    _copy(&to.fit_b_ns, &gauge.fit_b_ns)
    for i in range(PROFILE_BUCKETS):
        _copy(&to.profile_us[i], &gauge.profile_us[i])
        _copy(&to.profile_n[i], &gauge.profile_n[i])


cdef bint _look(EngineState* e, u32 conn, Gauge* seen, u32* number) noexcept nogil:
    """Copy the gauges of a replica, since the loop frees it when its container ends. Return False
    if there is none."""
    cdef ConnectionState* slot = &e.connections[conn & 0xFFFF]
    cdef bint found
    e.replica_lock.lock()
    found = slot.replica != NULL and slot.conn == conn
    if found:
        number[0] = slot.replica.number
        _copy_gauge(seen, &slot.replica.gauge)
    e.replica_lock.unlock()
    return found


cdef void _finish(EngineState* e) noexcept nogil:
    _end_tasks(e)
    completion_close(e.completion, CLOSED)


cdef void _end_tasks(EngineState* e) noexcept nogil:
    cdef u32 i
    submitters_stop(e.lanes[0], e.refusing, CLOSED)
    for i in range(1, e.slots_used + 1):
        if e.connections[i].connection != NULL:
            engine_lost(e, e.connections[i].conn, CLOSED, e.now_us.load(relaxed))
    part_streams_close(e.streams, CLOSED, e.now_us.load(relaxed))
    for i in range(1, e.lanes.count + 1):
        if e.lanes.by_id[i] != NULL:
            lane_close(e.lanes, e.lanes.by_id[i], CLOSED, e.now_us.load(relaxed))
    deferred_calls_close(e.lanes)
    completion_flush(e.completion)


cdef object _model_counts(ModelState* model):
    cdef Tally* t = &model.tally
    cdef u32 i
    cdef u64 ended = 0, refused = 0, hits = t.hits.load(relaxed)
    for i in range(STATUSES):
        ended += t.ended[i].load(relaxed)
        refused += t.refused[i].load(relaxed)
    cdef u64 arrived = max(t.arrived.load(relaxed), ended)
    return {
        "submitted": hits + refused + arrived,
        "answered": hits + refused + ended,
        "in_flight": arrived - ended,
        "queued": t.queued.load(relaxed),
        "hits": hits,
        "joined": t.joined.load(relaxed),
        "evaluated": t.evaluated.load(relaxed),
        "failed": t.failed.load(relaxed),
        "batches": t.batches.load(relaxed),
        "retried": t.retried.load(relaxed),
        "refused": {StatusName(i).name: t.refused[i].load(relaxed) for i in range(1, STATUSES)
                    if t.refused[i].load(relaxed)},
        "replicas": t.replicas.load(relaxed),
        "delay_us": model.replica_set.delay_us.load(relaxed),
    }


cdef object _model_snapshot(ModelState* model):
    cdef Tally* t = &model.tally
    return {
        "index": model.index,
        "uid": model.spec.uid,
        "replicas": t.replicas.load(relaxed),
        "queued": t.queued.load(relaxed),
        "delay_us": model.replica_set.delay_us.load(relaxed),
        "slo_us": model.replica_set.slo_us.load(relaxed),
        "margin": model.replica_set.margin_1000.load(relaxed) / 1000.0,
        "hits": t.hits.load(relaxed),
        "joined": t.joined.load(relaxed),
        "evaluated": t.evaluated.load(relaxed),
        "batches": t.batches.load(relaxed),
        "retried": t.retried.load(relaxed),
        "streams": t.streams.load(relaxed),
        "parts": t.parts.load(relaxed),
        "first_part_us": histogram_snapshot(&t.first_part),
        "cost": t.cost.load(relaxed),
        "cost_padded": t.cost_padded.load(relaxed),
        "ended": {StatusName(i).name: t.ended[i].load(relaxed)
                  + t.refused[i].load(relaxed) for i in range(1, STATUSES)},
        "latency_us": histogram_snapshot(&t.latency),
        "batch_rows": histogram_snapshot(&t.batch_rows),
    }


@cython.final
cdef class BatchLog:
    """The log of an engine's batches from now on. It remembers `keep` words, and as many may wait
    to be read. Threads: one at a time.

    Each engine has one at most. Raises BAD_INPUT for a second one, or a `keep` that is no power of
    two from 64 to 2^26.
    """

    cdef Engine engine              # kept alive
    cdef Lanes* lanes
    cdef u64* kept                  # the words that were read
    cdef u64 kept_size
    cdef u64 kept_head
    cdef u64 kept_tail

    def __cinit__(self, Engine engine not None, u64 keep=1 << 18):
        if keep < 64 or keep > 1 << 26 or keep & (keep - 1):
            raise_for(BAD_INPUT, f"keep is a power of two from 64 to 2^26, not {keep}")
        self.engine = engine
        self.lanes = engine.state.lanes
        self.kept = <u64*> malloc(keep * sizeof(u64))
        self.kept_size = keep
        if self.lanes.log != NULL:
            raise_for(BAD_INPUT, "the batches of this engine are logged already")
        if self.kept == NULL or not batch_log_open(self.lanes, keep):
            raise_for(NO_MEMORY, "no memory for the log of batches")

    def __dealloc__(self):
        free(self.kept)

    @property
    def lost(self):
        """Number of batches since the start that were not logged, because the log was full."""
        return self.lanes.log_lost.load(relaxed)

    cdef void _read(self) noexcept nogil:
        cdef u64 mask = self.kept_size - 1
        cdef u64 word = 0
        while self.lanes.log.pop(&word):
            # the oldest record is dropped as a whole
            if self.kept_tail - self.kept_head == self.kept_size:
                self.kept_head += self.kept[self.kept_head & mask] + 1
            self.kept[self.kept_tail & mask] = word
            self.kept_tail += 1

    def find(self, ids):
        """Return the batches in which the tasks with these ids were sent. The ids of a Future are
        `id`, and one more for each further task.

        Returns {id: (replica, rows, sent_us, begun_us, ended_us)}, times by the monotonic clock;
        begun: when the container had no earlier batch left. A task whose batch has not ended,
        or ended too long ago, is not in it.
        """
        cdef unordered_set[u64] wanted
        cdef dict found = {}
        cdef u64 id, at, n, i
        cdef u64 mask = self.kept_size - 1
        cdef object batch
        for id in ids:
            wanted.insert(id)
        with nogil:
            self._read()
        at = self.kept_head
        while at < self.kept_tail and at + self.kept[at & mask] < self.kept_tail:
            n = self.kept[at & mask]
            batch = None
            for i in range(at + 1 + RECORD_HEAD, at + 1 + n):
                if wanted.count(self.kept[i & mask]):
                    if batch is None:
                        batch = (self.kept[(at + 1) & mask] >> 32,
                                 self.kept[(at + 1) & mask] & 0xFFFFFFFF,
                                 self.kept[(at + 2) & mask], self.kept[(at
                                                                        + 3) & mask], self.kept[(at
                                                                                + 4) & mask])
                    found[self.kept[i & mask]] = batch
            at += n + 1
        return found
