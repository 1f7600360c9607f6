# The state of a shard's loop: its tables, dense variables and connections, the log of its changes,
# its counters and quotas, and the head of its messages.
#
# Threads: the loop's, but for what is atomic, the posts and the log.
from libcpp.deque cimport deque
from libcpp.vector cimport vector
from clipper_core.params.embedding_rows cimport Distinct, Pushed, Rows
from clipper_core.params.optimizer cimport Rule, Stride
from clipper_core.runtime.byte_buffer cimport Bytes, Post
from clipper_core.runtime.histogram cimport Histogram
from clipper_core.runtime.machine cimport acquire, atomic, i64, u32, u64, u8
from clipper_core.runtime.spin cimport Spin

# What a shard has changed since its last message to each follower, and which pushes it has seen:
# shard_log.hpp.
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
        bint waited             # pushes are answered when it has them
        bint lost               # too far behind: it must begin anew
        u64 taken
        u64 acknowledged
        bint streams            # its connection is sent changes as they come; set by the loop
        bint ends               # that is to end
        bint replays            # it is sent pushes, and applies them; set by the loop
        bint apart              # it reads on a thread of its own
        u32 conn                # the connection
        u32 messages            # received there
        u64 clock               # of its last message; sent back with the next changes
        bint wants_reply        # at once, even if nothing has changed
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
        bint polled() noexcept      # a follower that is waited for polls, and is not sent changes
        Sighting look(u64 worker, u64 sequence) noexcept
        bint mark(u64 worker, u64 sequence) noexcept    # False: no memory
        Sequences* window(u64 worker) noexcept  # NULL: no memory
        const Sequences* find(u64 worker) noexcept      # NULL: unknown
        u64 highest(u64 worker) noexcept        # sequence seen of it; 0: none
        bint known(vector[u64]& into) noexcept  # False: no memory
        # Append a change. Return False when there is no memory to recognize a repetition of this
        # push. Without memory for the ids all followers are lost.
        bint append(u32 table, const i64* ids, u32 n, u64 worker, u64 sequence) noexcept
        # False: no memory
        bint gather(Follower& one, vector[vector[i64]]& ids, vector[u64]& pushes, u64 most) noexcept
        void trim() noexcept
        u64 sure() noexcept

# Memory that a worker shares with a shard, to have the rows it pulls written there:
# shard_region.hpp says why.
#
# Threads: the loop's.

cdef extern from "params/shard_region.hpp" namespace "clipper" nogil:
    cdef enum RegionFault:
        REGION_MAPPED
        REGION_ABSENT           # no descriptor came
        REGION_UNSEALED         # no memory file of ordinary pages whose size is sealed
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
        u8* at(u64 offset, u64 n) noexcept      # NULL: not all of it lies inside, or not at the
                                                # start of a line of 64 bytes
    bint is_local(int fd) noexcept
    void calm_loopback(int fd) noexcept     # no congestion control between two ends of one host
    ssize_t receive_with(int fd, void* to, size_t n, Region& region) noexcept

# What a shard counts, by table: how often requested rows existed, what became of pushes, why
# requests were refused, how old gradients were.
#
# Threads: any reads. Of a table, who pulls is one (the loop), and who pushes has the shard to
# itself (ShardLoopState.still), so a load and a store are enough; refusals and lags come from
# anywhere, and are added.

cdef enum:
    COUNTED_MAX = 1024          # tables
    REASONS_MAX = 128           # a Status, or a refusal of shard_state.hpp

cdef cppclass TableCounts:
    atomic[u64] pulled          # rows requested
    atomic[u64] missed          # of them, those of ids without a row
    atomic[u64] applied         # distinct ids whose rows a push changed
    atomic[u64] made            # rows that are new
    atomic[u64] unadmitted      # ids not seen often enough yet
    atomic[u64] refused         # ids for which there was no room
    atomic[u64] evicted
    atomic[u64] expired

cdef cppclass ShardCounts:
    TableCounts[1024] tables
    atomic[u64] refused[128]    # by the number of the reason
    atomic[u64] taken           # pushes of a whole model, which Python applied or gathered
    Histogram lags              # of pushes that say of which version they are: how many versions
                                # they were behind

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
        u64 epoch               # 0: of any
        u64 worker
        u64 sequence            # of a push by that worker, from 1; 0: repetitions are not
                                # recognized. IN_REGION: where
        u64 model               # the version it was computed at, 0 for none; of an answer: the
                                # shard's
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
    TABLES_MAX = 1024           # places; a number is a place, and above that a generation: see
                                # place_of
    DENSE_TABLE = 1024          # of dense variables in the log
    DUPLICATE = 1               # flag of an answer: this push was applied before
    IN_REGION = 2               # flag of a pull, and of its answer: the rows are in the shared
                                # memory, not behind the head
    EXACT = 1                   # flag of changes: these are all there are
    STREAM_ENDS = 2             # flag of changes: no more will come
    REPLY_WANTED = 1            # flag of a follower's message: reply even if nothing has changed
    PUSHED_BYTES = 16           # payload of the answer to a push that was applied now: ids applied,
                                # unadmitted, refused, evicted
    BY_PYTHON = 1               # flag of a table: its pushes are Python's to apply
    NO_TABLE = 0x7FFFFFFF
    ACCESS_OPEN = 0               # what a shard takes while its rows move to another set
    ACCESS_SEALED = 1             # no pushes
    ACCESS_CLOSED = 2             # no pulls either
    ACCESS_MOVED = 3              # nothing any more

cdef cppclass Place:            # a table as the loop has it
    atomic[u32] number          # of the table that is here; NO_TABLE: it was dropped
    Rows* rows
    atomic[u64]* pushes
    float* spare                # spare_floats
    u32 flags
    u64 quota                   # of rows; 0: none
    u64 coming                  # rows with those of the push that is looked at

cdef cppclass DenseVariable:    # its memory belongs to Python
    float* value
    float* state
    u64* marks                  # [2]: steps, and the version that last changed its value
    u64 n

cdef cppclass PartWork:         # one part of a push, and what became of it
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
    u32 generation              # of this number: answers to the one before it go nowhere
    bint admitted
    bint pushes                 # it may; set when it was admitted
    bint closing                # when its output is sent
    bint watched                # for room to write
    bint behind                 # whole frames may be left: they are handled in the next turn
    u32 events                  # that epoll reports
    u32 calls                   # with Python now
    atomic[u32] unanswered      # the generation of a connection that an answer could not be made
                                # for: it is closed
    u64 skip                    # bytes of a payload that was refused as too large: they are read
                                # and dropped
    u64 worker                  # from its hello; 0: it pushes nothing
    u64 incarnation             # of the client that has this worker number; 0: unknown
    u64 since_us                # accepted
    u32 stream                  # number of the follower that it is sent changes as, from 1; 0: none
    # of those that are not admitted yet, in the order in which they were accepted
    ShardConnection* older
    ShardConnection* newer
    bint local                  # a unix socket
    Region region               # that it shares
    Bytes input
    Bytes output

cdef cppclass Call:             # what Python is to answer
    u32 conn
    u32 generation
    ShardHead head
    Bytes body

cdef cppclass Reply:            # an answer on its way to the loop
    u32 conn
    u32 generation
    bint admit
    bint close
    u32 stream                  # number of the follower that changes are sent to from now on, from
                                # 1; 0: none
    bint replays                # and pushes, to be applied there
    bint pushes                 # the one that is admitted may push
    u64 worker                  # of the one that is admitted
    u64 incarnation
    Bytes bytes

cdef cppclass ShardLoopState:
    int epoll_fd
    vector[int] listeners
    Spin spin
    bint had_events             # in the turn before
    atomic[u64] spins           # of polling
    # with room for connections_max from the beginning: any thread may look one up
    vector[ShardConnection*] callers
    vector[u32] unused
    Place[1024] places
    atomic[u32] place_count
    Post post                   # of Reply
    Post calls                  # of Call
    atomic[u32] starved         # a connection is unanswered
    ShardLog log
    mutex still                 # held while a push is applied and noted: who has it reads rows that
                                # belong together
    vector[PartWork] works      # of the push that is applied now
    vector[DenseVariable] variables     # under `still`, as all of these
    Rule dense_rule
    bint has_model              # dense variables are initialized
    bint steps_by_python        # steps of a model are Python's to apply
    u32 streams                 # followers that changes are sent to
    u32 replays                 # of them, those that are sent pushes
    atomic[u32] streaming       # the same, for other threads
    bint received               # a follower has acknowledged since answers were last released
    atomic[u32] python_waits    # an answer of Python waits for followers
    u64 frame_bytes_max
    u64 shared_bytes_max        # of all regions
    u32 connections_max
    u32 strangers_max           # connections that are not admitted yet
    u32 strangers
    ShardConnection* oldest     # of them
    ShardConnection* newest
    u64 hello_us                # a connection that is not admitted within this time is closed
    int spare_fd                # closed and opened again to refuse a connection when there are no
                                # descriptors
    atomic[u32] stop
    atomic[u32] ready           # else pulls and pushes are refused: it recovers
    atomic[u32] access          # ACCESS_OPEN and so on; a push looks again under `still`
    atomic[u32] state_lost      # and this is why: it has recovered nothing, and there was something
    atomic[u64] epoch
    atomic[u64] model           # version: pushes applied
    atomic[u32] stamp           # marks rows in use
    atomic[u32] lag_max         # pushes that are staler are refused; 0: none
    atomic[u32] slows           # a stale push has a smaller rate
    atomic[u64] pulls
    atomic[u64] pulled
    atomic[u64] pushes
    atomic[u64] pushed
    atomic[u64] repeated
    atomic[u64] replayed        # pushes, by followers: each counts
    atomic[u64] refused
    atomic[u64] turned_away     # connections closed before they were admitted, and such as found no
                                # room
    atomic[u64] shared_bytes
    atomic[u32] connections
    ShardCounts* counts
    bint has_quotas             # under `still`, as those of the tables
    u64 quota_rows              # of all tables; 0: none
    u64 quota_bytes
    atomic[u32] running
    atomic[u64] turns           # begun

cdef inline i64 place_of(ShardLoopState* s, u32 table) noexcept nogil:
    """Return the place of a table; -1 if there is none of that number. A place is used again when
    its table was dropped, with TABLES_MAX added to its number, so that no number ever means another
    table."""
    cdef u32 at = table & (TABLES_MAX - 1)
    if at < s.place_count.load(acquire) and s.places[at].number.load(acquire) == table:
        return at
    return -1

cdef enum:
    QUOTA_ROW_BYTES = 24        # of a row beside its floats: its stamp, and its place in the index

# whether the rows that parts of a push would make exceed a quota. about: the number of the table;
# -1: the quota of the shard
cdef bint quotas_exceeded(ShardLoopState* s, const PartWork* works, u64 n,
                          i64* about) noexcept nogil

# -- How a shard answers: at once, when followers have a push, or with a refusal.
#
# Threads: the loop's.
cdef void put_answer(ShardLoopState* s, ShardConnection* c, const ShardHead* to,
                     u8 flags) noexcept nogil
# `rows` is the reason; the payload is the id, the lag or the limit that it is about
cdef void shard_refuse(ShardLoopState* s, ShardConnection* c, const ShardHead* to, u32 why,
                       i64 about) noexcept nogil
# where the rows of an answer go, whose head is written already. NULL: the request was refused, or
# the connection is lost
cdef u8* answer_room(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                     u64 whole) noexcept nogil
# whether a push is to be applied; else it is answered. scale: of the rate, by its age
cdef bint push_is_new(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      double* scale) noexcept nogil
# there is memory for its worker, so that a repetition of this push will be recognized
cdef bint push_is_known(ShardLoopState* s, const ShardHead* h) noexcept nogil
# it is applied and noted: answer now, or when followers have it. Under the log's guard
cdef void answer_push(ShardLoopState* s, ShardConnection* c, const ShardHead* h,
                      const u32* counted) noexcept nogil
