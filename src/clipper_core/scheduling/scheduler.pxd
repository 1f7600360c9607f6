# The scheduler decides which rows go to which container now, and what ends when. Bytes and time are
# arguments: the IO loop, which has a clock and sockets, or a test with a simulated network calls
# engine_step and passes the bytes that it has received.
#
# Threads: loop only. Commands and events pass between Python and the loop through queues. Rows are
# submitted by `model` to the lanes, from which the scheduler reads them.
from libcpp.vector cimport vector
from clipper_core.cache.clock_cache cimport CacheState
from clipper_core.results.completion cimport CompletionState
from clipper_core.runtime.machine cimport atomic, u16, u32, u64, u8
from clipper_core.runtime.ring cimport Ring, Spsc
from clipper_core.scheduling.batcher cimport TIMINGS_MAX, BatcherConfig, Timing
from clipper_core.scheduling.container_connection cimport ContainerConnection
from clipper_core.scheduling.lane cimport Lanes
from clipper_core.scheduling.model_state cimport ModelState, RetiredModels
from clipper_core.scheduling.part_streams cimport PartStreams
from clipper_core.scheduling.replica cimport Replica
from clipper_core.wire.codec cimport Limits

cdef extern from "<mutex>" namespace "std" nogil:
    cdef cppclass mutex:
        void lock() noexcept
        void unlock() noexcept

cdef enum:
    CONNECTIONS_MAX = 65536

cpdef enum EngineEvent:         # from the loop to Python
    HELLO_RECEIVED = 1          # data: payload of the HELLO frame
    ATTACHED = 2
    DISCONNECTED = 3            # status: reason; data: optional message of the container
    CONNECTION_REJECTED = 4     # the limit `connections_max` was reached
    CALL_RECEIVED = 5           # data: payload of a CALL
    CALL_CANCELLED = 6          # the container does not want its answer any more

cdef enum CommandKind:          # from Python to the loop
    ATTACH = 1
    REFUSE_CONNECTION = 2
    DRAIN = 3
    CLOSE_CONNECTION = 4
    SET_EARLIEST_REPLICA = 5    # no replica of the model can connect before when_us
    MOVE_CONNECTION = 6         # to the engine `to`, which gets its HELLO again
    ADOPT_CONNECTION = 7        # the receiving side of MOVE_CONNECTION
    SEND_FEEDBACK = 8           # FEEDBACK frame (data) with `number` rows; sent when idle
    REFUSE_ROW = 9              # of `model`, whose key is `data`: refused before when_us
    SEND_ANSWER = 10            # ANSWER frame (data) to the call `id`

cdef struct Command:
    u32 kind
    u32 conn
    u32 model
    u32 number
    u8 protocol
    bint checked
    bint shared                 # the container can map rows
    bint sessions               # the container gets the session of each row; it maps none then
    bint quiet                  # no heartbeats on this connection
    bint parts                  # the container answers queries in parts
    bint cancels                # the container takes CANCEL of batches
    u32 calls_max               # calls of its model that may be open; 0: it may not call
    u32 concurrency             # batches that it works at, and answers in any order; 0: one
    u64 heartbeat_us            # 0: the engine's interval
    u32 timing_count
    Timing timings[TIMINGS_MAX]     # measured by the container's warm-up
    BatcherConfig batching
    void* data                  # payload of the WELCOME or REFUSE frame (malloc); the loop frees it
    u64 nbytes
    u64 when_us
    u64 id
    void* to                    # EngineState*
    int fd

# An event on its way to Python (malloc); the reader frees it.
cdef struct PendingEvent:
    u32 kind
    u32 conn
    u32 model
    u32 status
    u64 id                      # of a call
    u64 nbytes
    u8* data

cdef struct ConnectionState:
    ContainerConnection* connection
    Replica* replica            # NULL until attached; changed under `replica_lock`
    # Allocated when the connection was opened, so that sending these events needs no memory. NULL:
    # sent.
    PendingEvent* attached
    PendingEvent* gone
    u32 model
    u32 conn
    u64 heartbeat_us            # longest silence of either side
    # neighbours on the engine's list of connections that have no replica, by the order in which
    # they came; 0: none
    u32 earlier, later
    u8 quiet                    # neither side sends heartbeats
    u8 watched                  # is on the engine's list of this name
    u8 leaving                  # the container has sent GOODBYE and still answers batches

cdef cppclass EngineState:
    Lanes* lanes
    CacheState* cache
    CompletionState* completion
    Limits limits
    u64 row_bytes_max           # of one input
    u64 connections_max
    # LZ4 search of strings, on connections of this host and on remote ones.
    u8 search_near, search_far
    u64 heartbeat_us
    u32 eject_after             # consecutive failed batches after which a replica is ejected for a
                                # while; 0: never
    u64 hello_us                # a connection without HELLO is closed after this
    ModelState** models
    atomic[u32] model_count     # model numbers in use or used
    RetiredModels retired       # dropped models that wait to be freed
    ConnectionState* connections    # by conn & 0xFFFF; the high bits of conn count the reuse
    u32 connection_count
    u32 first_unattached, last_unattached   # the list of connections that have no replica
    vector[u32]* free_slots
    u32 slots_used
    vector[u32]* writers        # connections with something to send, for the IO loop
    vector[u32]* closing        # connections to close after their last byte
    vector[u32]* hot            # models to look at in this step
    vector[u32]* watched        # connections that housekeeping checks: all but quiet, idle ones
    vector[void*]* spare        # receive buffers of idle connections
    vector[u32]* waits          # models with waiting rows
    vector[Command]* moves      # connections that move between engines, for the IO loop
    PartStreams* streams        # queries that are answered in parts
    Ring* commands
    u64 commands_head
    Spsc* events                # PendingEvent* as words
    int events_fd
    atomic[u64] events_lost
    Spsc* calls                 # PendingEvent* as words, about calls of models
    int calls_fd
    u64 housekeeping_us         # time of the next housekeeping
    u64 frames_bad
    atomic[u32] refusing        # Status.CLOSED: nothing new is accepted; tasks in flight continue
    bint manual                 # time comes from step only
    atomic[u64] now_us          # the last time passed to step
    mutex replica_lock          # guards `replica` for readers on other threads

# -- for the owner of the engine. Threads: any
# False: the queue is full.
cdef bint engine_command(EngineState* e, const Command* command) noexcept nogil

# -- for the IO loop. Threads: loop only
# The connection that has waited longest for its replica, of those that are not closing. NULL: none.
cdef ConnectionState* engine_longest_waiting(EngineState* e) noexcept nogil
# Return the number of a new connection. 0: connections_max was reached.
cdef u32 engine_open(EngineState* e, int fd, u64 now_us) noexcept nogil
# Return NULL if the connection was released.
cdef ConnectionState* engine_slot(EngineState* e, u32 conn) noexcept nogil
# Return NULL if the connection was released.
cdef ContainerConnection* engine_connection(EngineState* e, u32 conn) noexcept nogil
# Process n bytes received into the connection's buffer. False: close it.
cdef bint engine_received(EngineState* e, u32 conn, u64 n, u64 now_us) noexcept nogil
# The same for bytes that lie elsewhere; they are copied.
cdef bint engine_receive_copy(EngineState* e, u32 conn, const u8* data, u64 n,
                              u64 now_us) noexcept nogil
# Release a connection that was closed.
cdef void engine_lost(EngineState* e, u32 conn, u32 status, u64 now_us) noexcept nogil
# Run one step. Return the latest time of the next.
cdef u64 engine_step(EngineState* e, u64 now_us) noexcept nogil
# Return True if other threads have sent nothing new.
cdef bint engine_idle(EngineState* e) noexcept nogil
