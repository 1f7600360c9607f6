# The state of a shard's loop: its tables, dense variables and connections, the log of its changes,
# its counters and quotas, and the head of its messages.
#
# Threads: the loop's, except atomic fields, the message queues and the log.
from libcpp.deque cimport deque
from libcpp.vector cimport vector
from clipper_core.params.embedding_rows cimport Distinct, Pushed, Rows
from clipper_core.params.optimizer cimport Rule, Stride
from clipper_core.runtime.byte_buffer cimport Bytes, Post
from clipper_core.runtime.histogram cimport Histogram
from clipper_core.runtime.machine cimport acquire, atomic, i64, u32, u64, u8
from clipper_core.runtime.reactor cimport Reactor
from clipper_core.runtime.spin cimport Spin

# The log of a shard: the changes since its last message to each follower, and the pushes it has
# seen (shard_log.hpp).
#
# Threads: any, under `guard`.

cdef extern from "<mutex>" namespace "std" nogil:
    cdef cppclass mutex:
        void lock() noexcept
        void unlock() noexcept

cdef extern from "params/shard_log.hpp" namespace "clipper" nogil:
    cdef enum Sighting:
        NEW_PUSH
        SEEN_PUSH
        OLD_PUSH
    cdef cppclass Sequences:
        u64 touched
        u64 high
        Sighting look(u64 n) noexcept
        void mark(u64 n) noexcept
    cdef cppclass Change:
        u32 table
        u32 n
        u64 worker
        u64 sequence
    cdef cppclass Held:
        u64 position
        u32 conn
        u32 generation
        u64[10] words
    cdef cppclass Follower:
        bint on
        bint waited             # pushes are answered only when it has them
        bint lost               # too far behind: it must copy everything again
        u64 taken
        u64 acknowledged
        bint streams            # its connection is sent changes as they come; set by the loop
        bint ends               # the stream is to end
        bint replays            # it gets pushes and applies them; set by the loop
        bint apart              # it reads on a thread of its own
        u32 conn                # the connection
        u32 messages            # received on this connection
        u64 clock               # of its last message; sent back with the next changes
        bint wants_reply        # it wants a message at once, even if nothing has changed
    cdef cppclass ShardLog:
        mutex guard
        deque[Change] changes
        deque[i64] ids
        u64 first
        u64 ids_max
        u64 held_max
        u64 workers_max
        Follower[12] followers
        deque[Held] held
        u64 clock               # of `window`
        int fd
        int wake_fd             # written at the next change if `asleep`
        bint asleep
        u64 position() noexcept
        bint waits() noexcept
        bint polled() noexcept      # whether a follower that pushes wait for polls instead of
                                    # having a stream
        Sighting look(u64 worker, u64 sequence) noexcept
        bint mark(u64 worker, u64 sequence) noexcept    # False: no memory
        Sequences* window(u64 worker) noexcept  # NULL: no memory
        const Sequences* find(u64 worker) noexcept      # NULL: unknown
        u64 highest(u64 worker) noexcept        # highest sequence seen of a worker; 0: none
        bint known(vector[u64]& into) noexcept  # False: no memory
        # Append a change. Return False if there is no memory to recognize a repetition of this
        # push. If there is no memory for the ids, all followers must copy everything again.
        bint append(u32 table, const i64* ids, u32 n, u64 worker, u64 sequence) noexcept
        # False: no memory
        bint gather(Follower& one, vector[vector[i64]]& ids, vector[u64]& pushes, u64 most) noexcept
        void trim() noexcept
        u64 sure() noexcept

# Memory that a worker shares with a shard, into which the shard writes the rows that the worker
# pulls (shard_region.hpp).
#
# Threads: the loop's.

cdef extern from "params/shard_region.hpp" namespace "clipper" nogil:
    cdef enum RegionFault:
        REGION_MAPPED
        REGION_ABSENT           # no descriptor was received
        REGION_UNSEALED         # not a memory file of ordinary pages whose size is sealed
        REGION_TOO_LARGE
        REGION_UNMAPPED
    cdef cppclass Region:
        u8* memory
        u64 bytes
        int descriptor
        void take(int fd) noexcept
        RegionFault map(u64 most) noexcept
        void unmap() noexcept
        void drop() noexcept
        u8* at(u64 offset, u64 n) noexcept      # NULL: not completely inside, or not at the start
                                                # of a cache line of 64 bytes
    void calm_loopback(int fd) noexcept     # no congestion control between two ends of one host
    ssize_t receive_with(int fd, void* to, size_t n, Region& region) noexcept

# Counters of a shard, by table: how often requested rows existed, the results of pushes, the
# reasons of refusals, the age of gradients.
#
# Threads: any thread may read them. Counters of pulls are written by the loop only, and those of
# pushes under ShardLoopState.still, so a load and a store are enough. Refusals and lags are counted
# by any thread, with atomic additions.

cdef enum:
    COUNTED_MAX = 1024          # tables
    REASONS_MAX = 128           # a Status, or a refusal of shard_state.hpp

cdef cppclass TableCounts:
    atomic[u64] pulled          # rows requested
    atomic[u64] missed          # requested rows of ids without a row
    atomic[u64] applied         # distinct ids whose rows a push changed
    atomic[u64] made            # rows that were created
    atomic[u64] unadmitted      # ids that were not pushed often enough yet
    atomic[u64] refused         # ids for which the table had no room
    atomic[u64] evicted
    atomic[u64] expired

cdef cppclass ShardCounts:
    TableCounts[1024] tables
    atomic[u64] refused[128]    # by the number of the reason
    atomic[u64] taken           # pushes of all variables of a model, which Python applied or
                                # gathered
    Histogram lags              # of pushes with a version: how many versions they were behind

cdef class Counts:
    cdef ShardCounts* state

    cdef TableCounts* _table(self, u32 table) except NULL

cdef void counts_refuse(ShardCounts* counts, u32 why) noexcept nogil
cdef void counts_push(ShardCounts* counts, u32 table, u64 applied, u64 made, u64 unadmitted,
                      u64 refused,
                      u64 evicted) noexcept nogil

cdef extern from "params/shard_state.hpp" namespace "clipper" nogil:
    cdef enum ShardKind:
        SHARD_PULL
        SHARD_PUSH
        SHARD_CALL
        SHARD_ANSWER
        SHARD_REFUSED
        SHARD_SHARE
        SHARD_PULL_TABLES
        SHARD_PUSH_STEP
        SHARD_PULL_DENSE
        SHARD_CHANGES
        SHARD_RECEIVED
        SHARD_REPLAY
    cdef enum ShardRefusal:
        NOT_ADMITTED
        NOT_READY
        OTHER_EPOCH
        TOO_STALE
        TOO_OLD
        NOT_SHARED
        WORKER_IN_USE
        STATE_LOST
        READS_ONLY
        OVER_QUOTA
        MOVED
    cdef cppclass ShardHead:
        u8 kind
        u8 dtype
        u8 flags
        u32 table
        u32 rows
        u64 id
        u64 epoch               # 0: any epoch
        u64 worker
        u64 sequence            # number of a push by that worker, from 1; 0: repetitions are not
                                # recognized. With IN_REGION: the offset
        u64 model               # version with which a push was computed, 0 for none; in an answer:
                                # version of the shard
        float scale             # of the rate
        u32 payload_bytes
    cdef cppclass ShardPart:
        u32 table
        u32 n
    u32 kDenseBit
    cdef cppclass ChangedPart:
        u32 table
        u32 n
        u64 steps
    cdef cppclass ReplayPart:
        u32 table
        u32 n
        u64 steps
        float rate
        float first
        float second
        u32 stamp
    bint shard_head_is_one(const ShardHead& head) noexcept
    ShardHead shard_answer(const ShardHead& to, u8 kind, u64 epoch, u64 model) noexcept
    u64 padded(u64 nbytes) noexcept

cdef enum:
    HEAD_BYTES = 64
    TABLES_MAX = 1024           # places; the number of a table is its place, and in the high bits a
                                # generation: see place_of
    DENSE_TABLE = 1024          # stands for the dense variables in the log
    DUPLICATE = 1               # flag of an answer: this push was applied before
    IN_REGION = 2               # flag of a pull, and of its answer: the rows are in shared memory,
                                # not after the head
    EXACT = 1                   # flag of changes: nothing else has changed by then
    STREAM_ENDS = 2             # flag of changes: the stream ends
    REPLY_WANTED = 1            # flag of a follower's message: reply even if nothing has changed
    PUSHED_BYTES = 16           # payload of the answer to a push that was applied now: ids applied,
                                # unadmitted, refused, evicted
    BY_PYTHON = 1               # flag of a table: Python applies its pushes
    NO_TABLE = 0x7FFFFFFF
    ACCESS_OPEN = 0               # access of a shard, which is reduced while its rows move to
                                  # another set: all requests
    ACCESS_SEALED = 1             # no pushes
    ACCESS_CLOSED = 2             # no pulls either
    ACCESS_MOVED = 3              # no requests at all

cdef cppclass Place:            # a table as the loop sees it
    atomic[u32] number          # number of its table; NO_TABLE: the table was dropped
    Rows* rows
    atomic[u64]* pushes
    float* spare                # spare_floats
    u32 flags
    u64 quota                   # of rows; 0: none
    u64 coming                  # rows, with those that the push being checked would create

cdef cppclass DenseVariable:    # its memory belongs to Python
    float* value
    float* state
    u64* marks                  # [2]: steps, and the version that last changed its value
    u64 n

cdef cppclass PartWork:         # one part of a push, and its result
    u32 table                   # or the number of a variable
    u32 n
    bint variable
    const i64* ids
    const float* gradients
    u64 steps                   # of the table or the variable, with this push
    u32 stamp                   # of its rows
    Stride stride
    Distinct distinct
    Pushed pushed

cdef cppclass ShardConnection:
    int fd
    u32 number
    u32 generation              # generation of this number: answers to earlier connections with the
                                # number are dropped
    bint admitted
    bint pushes                 # it may push; set when it was admitted
    bint closing                # it is closed when its output is sent
    bint behind                 # complete frames may be left, which the next turn handles
    u32 watched                 # events that epoll reports
    u32 calls                   # calls that Python handles now
    atomic[u32] unanswered      # generation of a connection for which an answer could not be made;
                                # it is closed
    u64 skip                    # bytes of a payload that was refused as too large: they are read
                                # and dropped
    u64 worker                  # worker number of its hello; 0: it does not push
    u64 incarnation             # of the client that has this worker number; 0: unknown
    u64 since_us                # accepted
    u32 stream                  # number, from 1, of the follower that gets its changes on it; 0:
                                # none
    # neighbours in the list of connections that are not admitted yet, by the time at which they
    # were accepted
    ShardConnection* older
    ShardConnection* newer
    bint local                  # a unix socket
    Region region               # the shared memory of the connection
    Bytes input
    Bytes output

cdef cppclass Call:             # a request that Python answers
    u32 conn
    u32 generation
    ShardHead head
    Bytes body

cdef cppclass Reply:            # an answer that is passed to the loop
    u32 conn
    u32 generation
    bint admit
    bint close
    u32 stream                  # number, from 1, of the follower that gets changes from now on; 0:
                                # none
    bint replays                # it also gets pushes, which it applies
    bint pushes                 # the client that is admitted may push
    u64 worker                  # of the client that is admitted
    u64 incarnation
    Bytes bytes

cdef cppclass ShardLoopState:
    Reactor reactor
    Spin spin
    bint had_events             # whether the previous turn had events
    atomic[u64] spins           # number of times that the loop polled
    # reserved for connections_max from the start, so that any thread may read it
    vector[ShardConnection*] callers
    vector[u32] unused
    Place[1024] places
    atomic[u32] place_count
    Post post                   # queue of Reply, to the loop
    Post calls                  # queue of Call, to Python
    atomic[u32] starved         # a connection is unanswered
    ShardLog log
    mutex still                 # held while a push is applied and logged, so that its holder reads
                                # rows of one version
    vector[PartWork] works      # parts of the push that is being applied
    vector[DenseVariable] variables     # this and the following under `still`
    Rule dense_rule
    bint has_model              # dense variables are initialized
    bint steps_by_python        # Python applies steps of a model
    u32 streams                 # followers that changes are sent to
    u32 replays                 # followers that pushes are sent to
    atomic[u32] streaming       # the same, for other threads
    bint received               # a follower has acknowledged since answers were last released
    atomic[u32] python_waits    # an answer of Python waits for followers
    u64 frame_bytes_max
    u64 shared_bytes_max        # largest size of all shared memory
    u32 connections_max
    u32 strangers_max           # connections that are not admitted yet
    u32 strangers
    ShardConnection* oldest     # of the connections that are not admitted yet
    ShardConnection* newest
    u64 hello_us                # a connection that is not admitted within this time is closed
    atomic[u32] stop
    atomic[u32] ready           # 0: the shard recovers, and refuses pulls and pushes
    atomic[u32] access          # ACCESS_OPEN and so on; a push checks it again under `still`
    atomic[u32] state_lost      # not ready because it recovered nothing although it once had data
    atomic[u64] epoch
    atomic[u64] model           # version: pushes applied
    atomic[u32] stamp           # marks rows in use
    atomic[u32] lag_max         # pushes that are more versions behind are refused; 0: no limit
    atomic[u32] slows           # a stale push has a smaller rate
    atomic[u64] pulls
    atomic[u64] pulled
    atomic[u64] pushes
    atomic[u64] pushed
    atomic[u64] repeated
    atomic[u64] replayed        # pushes replayed by followers, counted once per follower
    atomic[u64] refused
    atomic[u64] turned_away     # connections that were closed before they were admitted, or
                                # rejected at the limit
    atomic[u64] shared_bytes
    atomic[u32] connections
    ShardCounts* counts
    bint has_quotas             # under `still`, as those of the tables
    u64 quota_rows              # of all tables; 0: none
    u64 quota_bytes
    atomic[u32] running
    atomic[u64] turns           # turns that were started

cdef inline i64 place_of(ShardLoopState* s, u32 table) noexcept nogil:
    """Return the place of a table; -1 if no table has this number. When a table was dropped, its
    place is used again with TABLES_MAX added to the number, so that a number never refers to
    another table."""
    cdef u32 at = table & (TABLES_MAX - 1)
    if at < s.place_count.load(acquire) and s.places[at].number.load(acquire) == table:
        return at
    return -1

cdef enum:
    QUOTA_ROW_BYTES = 24        # of a row besides its floats: its stamp, and its entry in the index

# Return whether the rows that the parts of a push would create exceed a quota. about: set to the
# number of the table; -1: the quota of the shard.
cdef bint quotas_exceeded(ShardLoopState* s, const PartWork* works, u64 n,
                          i64* about) noexcept nogil

# -- How a shard answers: at once, when followers have a push, or with a refusal.
#
# Threads: the loop's.
cdef void put_answer(ShardLoopState* s, ShardConnection* c, const ShardHead* to,
                     u8 flags) noexcept nogil
# Refuse a request. In the head, `rows` is the reason; the payload is the id, the lag or the limit
# concerned.
cdef void shard_refuse(ShardLoopState* s, ShardConnection* c, const ShardHead* to, u32 why,
                       i64 about) noexcept nogil
# Return where to write the rows of an answer, whose head is written already. NULL: the request was
# refused, or the connection is closed.
cdef u8* answer_room(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                     u64 whole) noexcept nogil
# Return whether to apply a push; otherwise it was answered. scale: set to the factor of the rate,
# which depends on the age of the push.
cdef bint push_is_new(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      double* scale) noexcept nogil
# Reserve memory for the worker, so that a repetition of this push is recognized. Return False if
# there is none.
cdef bint push_is_known(ShardLoopState* s, const ShardHead* h) noexcept nogil
# Answer a push that is applied and logged: now, or when followers have it. Call it under the log's
# guard.
cdef void answer_push(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      const u32* counted) noexcept nogil
