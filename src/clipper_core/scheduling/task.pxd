# What lanes are made of: tasks, spans of them, lanes, and all the lanes of an engine. How they move
# is lane.pxd and array_chunk.pxd.
#
# Threads: a task is its submitter's until published, then the loop's.
from libcpp.deque cimport deque
from clipper_core.cache.clock_cache cimport CacheState, Key
from clipper_core.results.completion cimport Block, CompletionState
from clipper_core.results.ensemble_call cimport Timers
from clipper_core.runtime.histogram cimport Histogram
from clipper_core.runtime.machine cimport atomic, u16, u32, u64, u8
from clipper_core.runtime.ring cimport Ring, Spsc, ring_row, ring_side
from clipper_core.runtime.timer_wheel cimport Wheel
from clipper_core.scheduling.pending cimport PendingTable

cdef enum:
    LANES_MAX = 65535
    STATUSES = 18

cdef enum Phase:
    IDLE = 0
    WAITING = 1
    JOINED = 2
    SENT = 3

cdef struct Task:
    Key key                     # of the row, if keyed
    Block* block                # the slot that its prediction fills
    u64 deadline_us
    u64 due_us                  # latest deadline among it and those joined to it
    u64 submit_us
    u64 refused_us              # 0, or admission refused it, and another try may succeed after this
                            # time: it may only join
    u64 salt                    # that it was asked with: a session's number, for models that take
                            # sessions
    u64 next                    # ticket of the next task joined to the same row; 0: none
    u64 prev                    # ticket of the one before (the owner at last); 0: this is the owner
    void* heap                  # the row, when rows differ in length
    u32 bytes                   # length of the row
    u32 slot
    u32 rows                    # of a chunk; of a row with a cost: its cost
    u32 next_row                # of a chunk: rows before it were sent or are gone
    u32 left                    # of a chunk: rows that wait or are on their way; of a row with a
                                # cost that is tried once more: the connection to avoid
    u32 counted                 # of a chunk: rows that the loop has ended
    u32* slots                  # of a chunk, one a row; NULL: a single task
    Key* keys                   # of a chunk, one a row, if keyed
    u8 phase
    u8 tries                    # times it was sent
    bint keyed                  # cache and joining are on
    bint answered               # its slot has ended
    bint heard                  # its slot is one of an ensemble call's

cdef struct Span:           # consecutive rows of one task
    u64 ticket
    u32 first
    u16 rows
    u16 tries                   # of a chunk's: times these rows were sent
    u32 failed_on               # of rows that are tried once more: the connection whose container
                            # failed them; 0: it was lost

cdef cppclass Tally:        # counters of one model; any thread reads them, the loop writes all but
                            # refused and hits
    atomic[u64] ended[18]       # in the loop, by Status
    atomic[u64] refused[18]     # at submit, by Status
    atomic[u64] hits            # answered by the cache at submit
    atomic[u64] arrived         # rows taken in: each of them ends once
    atomic[u64] joined          # answered by another's evaluation
    atomic[u64] evaluated       # rows that a container answered
    atomic[u64] batches
    atomic[u64] retried         # rows that were to be tried on another replica
    atomic[u64] cost            # of the rows in batches, where they differ in it
    atomic[u64] cost_padded     # of these batches, with padding
    atomic[u64] queued
    atomic[u32] replicas
    Histogram latency           # us, of tasks that ended OK, cache hits at submit excluded
    Histogram batch_rows

cdef cppclass Lane:
    atomic[u32] dirty           # news since the loop last looked
    u32 id
    u32 model
    u32 chunk_rows              # rows that a cell can hold; 0: its tasks are single rows
    u64 slo_us                  # loop: the tightest SLO of late; at first the class's upper bound
    Ring* ring
    Tally* tally
    u64 seen                    # loop: positions before it have been taken in
    atomic[u64] taken       # `seen`, for other threads; what is before it and waits is in the table
                            # of evaluations in flight
    u64 head                    # loop: positions before it are sent, joined or gone
    u64 waiting                 # loop: rows in phase WAITING
    u64 used_us                 # loop: last time rows came
    deque[Span]* retry          # loop: rows whose replica was lost; they go first

cdef cppclass Lanes:        # all lanes of an engine, and what their tasks meet in
    Lane** by_id
    u32 count                   # ids that were given out; those of lanes that are gone name none
    atomic[u32] live            # lanes that are
    Spsc* unused                # first tickets of the next lanes of such ids: loop -> lane_new
    # submitters at work without the GIL: the engine ends its lanes after them
    atomic[u32] submitters
    Wheel* wheel                # tickets without a lane are those of `timers`
    Timers* timers              # of ensemble calls
    CacheState* cache
    PendingTable* pending
    CompletionState* completion
    Ring* ready                 # ids of lanes with news: any thread -> loop
    u64 ready_head
    int wake_fd                 # wakes the loop from epoll
    atomic[u64] heap_bytes      # rows of variable length held now
    u64 heap_bytes_max
    atomic[u32] logging         # batches are written to `log`: batch_log.pxd
    Spsc* log
    atomic[u64] log_lost

cdef inline u64 ticket_of(u32 lane, u64 pos) noexcept nogil:
    return (<u64> lane << 48) | (pos & ((<u64> 1 << 48) - 1))

cdef inline Lane* lane_of(Lanes* lanes, u64 ticket) noexcept nogil:
    return lanes.by_id[ticket >> 48]

cdef inline u64 pos_of(u64 ticket) noexcept nogil:
    return ticket & ((<u64> 1 << 48) - 1)

cdef inline Task* task_of(Lanes* lanes, u64 ticket) noexcept nogil:                # NULL: stale
    cdef Lane* lane = lane_of(lanes, ticket)
    if not lane.ring.cells.published(pos_of(ticket)):
        return NULL
    return <Task*> ring_side(lane.ring, pos_of(ticket))

cdef inline const void* task_row(Lanes* lanes, u64 ticket, Task* task) noexcept nogil:
    return task.heap if task.heap != NULL else <void*> ring_row(lane_of(lanes, ticket).ring,
                                                                pos_of(ticket))

cdef inline u8* span_rows(Lanes* lanes, const Span* span, u64 row_bytes) noexcept nogil:
    return <u8*> task_row(lanes, span.ticket, task_of(lanes, span.ticket)) + span.first * row_bytes

# rows of its memory, numbered one after another
cdef inline u64 lane_places(const Lane* lane) noexcept nogil:
    return (lane.ring.mask + 1) * (lane.chunk_rows if lane.chunk_rows else 1)

# where its first row lies among them
cdef inline u64 span_place(const Lane* lane, const Span* span) noexcept nogil:
    return (span.ticket & lane.ring.mask) * (lane.chunk_rows if lane.chunk_rows else 1) + span.first

cdef inline bint span_is_first_try(Lanes* lanes, const Span* span) noexcept nogil:
    cdef Task* task = task_of(lanes, span.ticket)
    return (task.tries if task.slots == NULL else span.tries) <= 1

# the connection that failed the rows at the head
cdef inline u32 lane_avoids(const Lane* lane) noexcept nogil:
    return 0 if lane.retry.empty() else lane.retry.front().failed_on
