# The queues of the models. A lane is one ring of tasks of one model whose SLOs are alike (within a
# factor of two); a ring cell is the task: its row is sent as it is, and its side cell has the
# deadline and the slot of the result. A ticket, which is a lane id and a position, identifies it.
#
# Arrays have lanes of their own, whose cells hold many rows: a cell is a *chunk* of an array, one
# task with a slot for each of its rows, one deadline and one entry in the wheel. Batches take spans
# of it. A span is consecutive rows of one task: the one row of a single task, or some rows of a
# chunk. A chunk's cell is freed when none of its rows waits or is in flight. Its rows do not join
# equal rows; they are looked up in the cache once, at submit.
#
# A task's phase:
#   claimed by a submitter -> published -> WAITING -> SENT -> released
#                                       \-> JOINED to an equal row, WAITING or SENT -> released
# Joined tasks are in a list of the task that is evaluated (its owner), so equal queries in flight
# cost one evaluation, each with its own deadline. The wheel ends tasks at their deadline wherever
# they are. A row stays until no task needs it.
#
# Threads: lane_submit and lane_new from any thread (lane_new under the caller's lock); everything
# else loop only.
from libcpp.deque cimport deque
from clipper_core.cache.clock_cache cimport CacheState, Key
from clipper_core.results.completion cimport Block, CompletionState
from clipper_core.results.ensemble_call cimport Timers
from clipper_core.runtime.histogram cimport Histogram
from clipper_core.runtime.machine cimport atomic, u16, u32, u64, u8
from clipper_core.runtime.ring cimport Cells, Ring, Spsc, ring_row, ring_side
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.status cimport Status
from clipper_core.runtime.timer_wheel cimport Wheel
from clipper_core.wire.prediction cimport Blob, Value

# -- Evaluations in flight: by key, the ticket of the task that evaluates it. Threads: the loop;
# pending_has, pending_touch: any.
cdef struct PendingTable      # lane.pyx

cdef PendingTable* pending_new(u64 entries_max) noexcept nogil
cdef void pending_free(PendingTable* table) noexcept nogil
# As cache_touch, for a part of the table from slot `start` on. Return the slot to continue with; 0
# at the end of the table.
cdef u64 pending_touch(PendingTable* table, u64 start) noexcept nogil
# Return the ticket of the task that evaluates the row of the key; 0 if there is none.
cdef u64 pending_find(const PendingTable* table, const Key* key) noexcept nogil
# Add or replace the ticket of a key. ticket: not 0.
cdef Status pending_put(PendingTable* table, const Key* key, u64 ticket) noexcept nogil
# Remove the key if its ticket is still this one.
cdef void pending_remove(PendingTable* table, const Key* key, u64 ticket) noexcept nogil
# Return whether the row is being evaluated. While the loop removes other entries, it may return
# True for a row that is not. Threads: any.
cdef bint pending_has(const PendingTable* table, const Key* key) noexcept nogil
cdef u64 pending_count(const PendingTable* table) noexcept nogil

# -- Data structures: tasks, spans of tasks, lanes, and all lanes of an engine.
#
# Threads: a task belongs to its submitter until it is published, then to the loop.
cdef enum:
    LANES_MAX = 65535
    TRIES_MAX = 8               # of rows whose containers died
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
    u64 due_us                  # latest deadline of this task and those joined to it
    u64 submit_us
    u64 refused_us              # not 0: admission refused it, so it may only join; another try may
                                # succeed after this time
    u64 salt                    # salt of its query; for models that take sessions, the session's
                                # number
    u64 next                    # ticket of the next task joined to the same row; 0: none
    u64 prev                    # ticket of the previous one, for the first one of the owner; 0:
                                # this is the owner
    void* heap                  # the row, when rows differ in length
    u32 bytes                   # length of the row
    u32 slot
    u32 rows                    # of a chunk; of a row with a cost: its cost
    u32 next_row                # of a chunk: rows before it were sent or have ended
    u32 left                    # of a chunk: rows that wait or are in flight; of a row with a cost
                                # that is retried: the connection to avoid
    u32 counted                 # of a chunk: rows that the loop has ended
    u32* slots                  # of a chunk, one per row; NULL: a single task
    Key* keys                   # of a chunk, one per row, if keyed
    u8 phase
    u8 tries                    # how often it was sent
    u16 together                # as of a span
    bint keyed                  # cache and joining are on
    bint answered               # its slot has ended
    bint in_ensemble            # its slot is one of an ensemble call's

cdef struct Span:           # consecutive rows of one task
    u64 ticket
    u32 first
    u16 rows
    u16 tries                   # of a chunk: how often these rows were sent
    u32 failed_on               # of rows that are retried: the connection whose container failed
                                # them; 0: the container died
    u16 together                # of rows whose container died: how many of them may be sent at
                                # once, with no others; 0: any number, with any others

cdef cppclass Tally:        # counters of one model; any thread reads them; the loop writes all
                            # except refused and hits
    atomic[u64] ended[18]       # in the loop, by Status
    atomic[u64] refused[18]     # at submit, by Status
    atomic[u64] hits            # answered by the cache at submit
    atomic[u64] arrived         # rows accepted: each of them ends once
    atomic[u64] joined          # rows answered by the evaluation of an equal one
    atomic[u64] evaluated       # rows that a container answered
    atomic[u64] failed          # rows that ended with the failure of their batch; counted before
    atomic[u64] batches
    atomic[u64] retried         # rows that were retried on another replica
    atomic[u64] cost            # sum of the costs of rows in batches, where rows differ in cost
    atomic[u64] cost_padded     # cost of these batches, with padding
    atomic[u64] queued
    atomic[u64] streams         # queries in parts that the loop took in
    atomic[u64] parts           # that containers sent for them
    atomic[u32] replicas
    Histogram first_part        # us, from such a query to its first part
    Histogram latency           # us, of tasks that ended OK, cache hits at submit excluded
    Histogram batch_rows

cdef cppclass Lane:
    atomic[u32] dirty           # rows were published since the loop last read the lane
    u32 id
    u32 model
    u32 band                    # of its rows (bands.pxd)
    u32 chunk_rows              # rows that a cell can hold; 0: its tasks are single rows
    u64 slo_us                  # loop: the tightest recent SLO; at first the upper bound of the
                                # class
    Ring* ring
    Tally* tally
    u64 seen                    # loop: positions before it were read
    atomic[u64] taken       # `seen`, for other threads; tasks before it that wait are in the table
                            # of evaluations in flight
    u64 head                    # loop: positions before it were sent, joined or ended
    u64 waiting                 # loop: rows in phase WAITING
    u64 used_us                 # loop: last time that rows arrived
    deque[Span]* retry          # loop: rows whose replica died or failed; they are sent first

cdef cppclass Lanes:        # all lanes of an engine, and the structures that their tasks share
    Lane** by_id
    u32 count                   # number of ids in use or used; `by_id` has NULL for lanes that were
                                # freed
    atomic[u32] live            # lanes that exist
    Spsc* unused                # first tickets of new lanes with the ids of freed ones: from the
                                # loop to lane_new
    # submitters that run without the GIL: the engine frees its lanes after them
    atomic[u32] submitters
    Wheel* wheel                # its tickets are those of tasks and of `timers`
    Timers* timers              # of ensemble calls
    CacheState* cache
    PendingTable* pending
    CompletionState* completion
    Ring* ready                 # ids of lanes with published tasks, from any thread
    u64 ready_head
    int wake_fd                 # wakes the loop from epoll
    atomic[u64] heap_bytes      # bytes of rows of variable length that are allocated now
    u64 heap_bytes_max
    atomic[u32] logging         # batches are written to `log`: replica.pxd
    Spsc* log
    atomic[u64] log_lost
    atomic[u32] weights[16]     # of the shares, by number, of all models

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

# Return the number of rows in the memory of a lane.
cdef inline u64 lane_places(const Lane* lane) noexcept nogil:
    return (lane.ring.mask + 1) * (lane.chunk_rows if lane.chunk_rows else 1)

# Return the index of a span's first row in the memory of its lane.
cdef inline u64 span_place(const Lane* lane, const Span* span) noexcept nogil:
    return (span.ticket & lane.ring.mask) * (lane.chunk_rows if lane.chunk_rows else 1) + span.first

cdef inline bint span_is_first_try(Lanes* lanes, const Span* span) noexcept nogil:
    cdef Task* task = task_of(lanes, span.ticket)
    return (task.tries if task.slots == NULL else span.tries) <= 1

# Return the connection whose container failed the rows at the head; 0: none.
cdef inline u32 lane_avoids(const Lane* lane) noexcept nogil:
    return 0 if lane.retry.empty() else lane.retry.front().failed_on

# Return how many of the rows at the head, whose ticket is this, may be sent at once, with no
# others; 0: any number.
cdef inline u16 lane_together(Lanes* lanes, const Lane* lane, u64 ticket) noexcept nogil:
    if lane.chunk_rows == 0:
        return task_of(lanes, ticket).together
    return 0 if lane.retry.empty() else lane.retry.front().together

# -- A chunk: one cell of a lane that holds many rows of an array, as one task. It is claimed and
# published like any cell; batches take spans of it, and its rows end together where possible.
#
# Each slot keeps the guarantee of completion.pxd: it ends once, by one compare-and-swap of one
# byte, whichever thread is first. Everything else is done once per chunk instead of once per row:
# one addition per counter, one reference count, one timer, one latency.
#
# Threads: chunk_claim, chunk_publish and slots_fill: the submitter. Everything else: loop only.
# Round up to whole cache lines.
cdef inline u64 lines_of(u64 nbytes) noexcept nogil:
    return (nbytes + 63) & ~<u64> 63

# Claim a cell. NULL: the lane is full.
cdef Task* chunk_claim(Lane* lane, u64* pos) noexcept nogil
# Publish a chunk that has at least one row.
cdef void chunk_publish(Lane* lane, u64 pos) noexcept nogil
# End the slots first + i with chosen[i] with values[i], before any thread can wait for them. Takes
# over the references of the values.
cdef void slots_fill(CompletionState* d, Block* block, u32 first, u32 n, const Value* values,
                     const u8* chosen, Status status) noexcept nogil

# Return whether rows wait to be sent. Releases rows that have ended.
cdef bint chunk_waits(Lanes* lanes, Lane* lane, u64 pos) noexcept nogil
# Return how many rows from `first` on have ended already.
cdef u32 chunk_ended_from(Task* task, u32 first, u32 end) noexcept nogil
# End all rows.
cdef void chunk_close(Lanes* lanes, Lane* lane, u64 pos, Status status, u64 now_us) noexcept nogil
# End n rows with the same status and value; each gets a reference of its own to the value.
cdef void chunk_end_rows(Lanes* lanes, Lane* lane, Task* task, u32 first, u32 n, Status status,
                         Value* value, u64 now_us) noexcept nogil
# End all rows of the span as OK, with scalars of `size` bytes. Return False for a single task,
# which is not changed.
cdef bint chunk_end_words(Lanes* lanes, const Span* span, const u8* data, u32 size, u8 tag,
                          u64 now_us) noexcept nogil
# The same with the rows of a blob, whose references it takes over.
cdef void chunk_end_blob(Lanes* lanes, const Span* span, Blob* blob, u64 now_us) noexcept nogil
# Note that so many rows neither wait nor are at a container; the last one frees the chunk.
cdef void chunk_leave(Lanes* lanes, Lane* lane, u64 pos, u32 rows) noexcept nogil
# The same for all rows of a chunk's span; does nothing for a single task.
cdef void span_leave(Lanes* lanes, const Span* span) noexcept nogil

# -- Lanes: any thread adds rows, and the loop takes them.
cdef enum:
    SHARED_ROW_BYTES_MIN = 512  # smaller rows are as fast over a socket (docs/design.md)

# -- Functions that run concurrently without a lock (lane.hpp; tests/schedules checks them).
cdef extern from "scheduling/lane.hpp" namespace "clipper" nogil:
    bint lane_announce(Lane& lane, Cells& ready, u64* ids, u64 id) noexcept
    bint lane_next(Cells& ready, u64* ids, u64* head, u64* id) noexcept
    void lane_clear_dirty(Lane& lane) noexcept
    void lane_took_in(Lane& lane, u64 seen) noexcept
    bint lane_all_taken_in(Lane& lane, u64 tail) noexcept
    bint submitter_enter(Lanes& lanes, atomic[u32]& refusing) noexcept
    void submitter_leave(Lanes& lanes) noexcept
    void submitters_stop(Lanes& lanes, atomic[u32]& refusing, u32 why) noexcept

cdef Lanes* lanes_new(CompletionState* completion, CacheState* cache, u64 now_us, u64 tasks_max,
                      u64 heap_bytes_max) noexcept nogil
cdef void lanes_free(Lanes* lanes) noexcept nogil
cdef Lane* lane_new(Lanes* lanes, u32 model, u64 slo_us, u64 cells, u64 row_bytes, u32 chunk_rows,
                    Tally* tally, u32 band,
                    bint shared=*) noexcept nogil      # shared: containers may map the rows, if
                                                       # rows are large enough and shared memory is
                                                       # available

# Submit a row. Return OK or FULL. key NULL: neither cached nor joined. refused_us: 0; else the row
# only joins an equal one, and without an equal one it ends as FULL, with this as the time after
# which another try may succeed. cost: of the row, where rows differ in cost.
cdef Status lane_submit(Lanes* lanes, Lane* lane, const void* row, u32 nbytes, const Key* key,
                        Block* block, u32 slot,
                        u64 deadline_us, u64 now_us, u64 salt, u64 refused_us,
                        u32 cost) noexcept nogil
# Note that something was published in the lane.
cdef void lane_has_news(Lanes* lanes, Lane* lane) noexcept nogil
# Wake the loop, so that it reads what was published.
cdef void lanes_wake(Lanes* lanes) noexcept nogil

# Return a lane in which something was published, or NULL.
cdef Lane* lanes_next_ready(Lanes* lanes) noexcept nogil
# Read what was published in a lane. Return how many rows need an evaluation of their own.
cdef u64 lane_take_in(Lanes* lanes, Lane* lane, u64 now_us) noexcept nogil
cdef void lanes_expire(Lanes* lanes, u64 now_us) noexcept nogil

# Get the row to send next. Return False if no row waits.
cdef bint lane_head(Lanes* lanes, Lane* lane, u64* ticket) noexcept nogil
# Take rows from the head, and mark them SENT.
cdef void lane_take(Lanes* lanes, Lane* lane, u32 rows_max, Span* span) noexcept nogil
# Take the waiting row of this ticket, anywhere in the lane, and mark it SENT.
cdef void lane_take_row(Lanes* lanes, Lane* lane, u64 ticket, Span* span) noexcept nogil
# End rows at the head as DROPPED.
cdef void lane_shed(Lanes* lanes, Lane* lane, u32 rows_max, u64 now_us) noexcept nogil
cdef void lane_close(Lanes* lanes, Lane* lane, Status status, u64 now_us) noexcept nogil  # all end

# Set a timer. Return False if the wheel is full.
cdef bint lanes_set_timer(Lanes* lanes, u64 deadline_us, u64 ticket) noexcept nogil
# Return whether a caller still waits for this row.
cdef bint task_needed(Lanes* lanes, Task* task) noexcept nogil
# Return the earliest deadline that is still open.
cdef u64 task_due_us(Task* task) noexcept nogil
# End all rows of a span with the same status and value.
cdef void span_end(Lanes* lanes, const Span* span, Status status, Value* value,
                   u64 now_us) noexcept nogil
# End row k of the span. Call span_leave after the last row.
cdef void span_row_end(Lanes* lanes, const Span* span, u32 k, Status status, Value* value,
                       u64 now_us) noexcept nogil
# Return the key of row k of the span; NULL if it is not cached.
cdef const Key* span_key(Lanes* lanes, const Span* span, u32 k) noexcept nogil
# Put the span back to the front of its lane, if a caller still waits for it and this was its first
# try. failed_on: the connection to avoid.
cdef bint span_retry(Lanes* lanes, const Span* span, u32 failed_on, u64 now_us) noexcept nogil
# Put a span whose container died back, if a caller still waits for it. together: as of a span.
# counts: the container may have been at work on it.
cdef bint span_again(Lanes* lanes, const Span* span, u16 together, bint counts,
                     u64 now_us) noexcept nogil
# End the task and all joined to it, each with a reference of its own to the value, and release
# their cells.
cdef void row_end(Lanes* lanes, u64 ticket, Status status, Value* value, u64 now_us) noexcept nogil
# End the row of that key that still waits to be sent, if there is one, with a prediction from
# another source.
cdef void row_found(Lanes* lanes, const Key* key, Value* value, u64 now_us) noexcept nogil
