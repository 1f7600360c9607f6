# The scheduler decides: which rows go to which container now, what ends and when. Bytes and time
# are arguments; whoever has a clock and sockets (the IO loop), or a simulated network (a test),
# calls step and hands bytes over.
#
# Threads: step, received, lost, open and what they call: the loop. Commands and notices pass
# between Python and the loop by rings. Submitting is the business of `model`; it meets the loop in
# the lanes.
from libcpp.vector cimport vector
from clipper_core.cache.clock_cache cimport CacheState
from clipper_core.results.delivery cimport DeliveryState
from clipper_core.runtime.machine cimport atomic, u8, u16, u32, u64
from clipper_core.runtime.ring cimport Ring, Spsc
from clipper_core.scheduling.batcher cimport TIMINGS_MAX, BatcherConfig, Timing
from clipper_core.scheduling.link cimport Link
from clipper_core.scheduling.model_state cimport Departed, ModelState
from clipper_core.scheduling.replica cimport Replica
from clipper_core.scheduling.task cimport Lanes
from clipper_core.wire.codec cimport Limits

cdef extern from "<mutex>" namespace "std" nogil:
    cdef cppclass mutex:
        void lock() noexcept
        void unlock() noexcept

cdef enum:
    LINKS_MAX = 65536

cpdef enum Notice:              # loop -> Python
    SAID_HELLO = 1              # data: the HELLO payload
    ATTACHED = 2
    GONE = 3                    # status says why; data may hold text
    TURNED_AWAY = 4             # links_max reached: a connection was closed unheard

cdef enum CommandKind:          # Python -> loop
    ATTACH = 1
    REFUSE_LINK = 2
    DRAIN = 3
    CLOSE_LINK = 4
    EXPECT = 5                  # of a model without a replica: none comes before when_us
    HAND_OVER = 6               # a connection to the engine `to`, which hears its HELLO again; for
                                # the mover, as is
    ADOPT = 7                   # the other side of it
    TEACH = 8                   # a FEEDBACK payload (data) of `number` rows, when nothing else is
                                # to be sent

cdef struct Command:
    u32 kind
    u32 conn
    u32 model
    u32 number
    u8 protocol
    bint checked
    bint shared                 # the container can map rows
    bint sessions               # and wants to know whose query each row is; it maps none then
    bint quiet                  # no heartbeats on this connection
    u64 heartbeat_us            # 0: the engine's
    u32 timing_count
    Timing timings[TIMINGS_MAX]          # of the warm-up in the container
    BatcherConfig batching
    void* data                  # WELCOME or REFUSE payload, malloc'd; the loop frees it
    u64 nbytes
    u64 when_us
    void* to                    # EngineState*
    int fd

cdef struct News:               # a notice on its way to Python, malloc'd; the reader frees it
    u32 kind
    u32 conn
    u32 model
    u32 status
    u64 nbytes
    u8* data

cdef struct LinkState:
    Link* link
    Replica* replica            # once attached; changed under `looking`
    News* attached              # made when it was opened, to be told whatever memory there is then;
                                # NULL: told
    News* gone
    u32 model
    u32 conn
    u64 heartbeat_us            # each side says something at least this often
    u8 quiet                    # neither side sends heartbeats, nor minds silence
    u8 watched                  # on the engine's list
    u8 leaving                  # its container said GOODBYE, and has batches to answer

cdef cppclass EngineState:
    Lanes* lanes
    CacheState* cache
    DeliveryState* delivery
    Limits limits
    u64 links_max
    u8 search_near, search_far  # of strings, for LZ4: on links of this host, and on remote ones
    u64 heartbeat_us
    u32 eject_after             # batches that a replica fails in a row before it is left alone for
                                # a while; 0: it never is
    u64 hello_us                # a connection that says nothing is closed after this
    ModelState** models
    atomic[u32] model_count     # numbers of models that were given out
    Departed departed           # models that nobody asks any more
    LinkState* links            # by conn & 0xFFFF; conn's high bits count the reuse
    u32 link_count
    vector[u32]* free_slots
    u32 slots_used
    vector[u32]* writers        # conns with something to send, for the mover
    vector[u32]* closing        # conns to close once sent
    vector[u32]* hot            # models to look at in this step
    vector[u32]* watched        # conns that chores look at: all but those that are quiet and have
                                # nothing in hand
    vector[void*]* spare        # receive buffers of links that rest
    vector[u32]* waits          # models with rows that wait
    vector[Command]* moves      # connections that go to a peer or come from one, for the mover
    Ring* commands
    u64 commands_head
    Spsc* news                  # News* as words
    int news_fd
    atomic[u64] news_lost
    u64 chores_us               # when the periodic chores are next due
    u64 frames_bad
    atomic[u32] refusing        # Status.CLOSED: nothing new is taken in, what is in flight goes on
    bint manual                 # time comes from step only
    atomic[u64] now_us          # last time step was told
    mutex looking               # who holds it finds each replica as it is: for those who look in
                                # from other threads

# -- for its owner
# False: full. Threads: any
cdef bint engine_order(EngineState* e, const Command* command) noexcept nogil

# -- for the mover of bytes (loop only)
# conn; 0: no room
cdef u32 engine_open(EngineState* e, int fd, u64 now_us) noexcept nogil
cdef LinkState* engine_slot(EngineState* e, u32 conn) noexcept nogil                 # NULL: gone
cdef Link* engine_link(EngineState* e, u32 conn) noexcept nogil                      # NULL: gone
# False: close it
cdef bint engine_received(EngineState* e, u32 conn, u64 n, u64 now_us) noexcept nogil
# copied; as received
cdef bint engine_given(EngineState* e, u32 conn, const u8* data, u64 n, u64 now_us) noexcept nogil
# the connection is closed
cdef void engine_lost(EngineState* e, u32 conn, u32 status, u64 now_us) noexcept nogil
# when to step again at the latest
cdef u64 engine_step(EngineState* e, u64 now_us) noexcept nogil
# nothing new from other threads
cdef bint engine_idle(EngineState* e) noexcept nogil
