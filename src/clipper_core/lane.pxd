# The queues of the models. A lane is one ring of tasks of one model whose SLOs are alike (within a factor of two); a ring cell
# is the task: its row is the wire's, its side cell says whose slot it fills and by when. A ticket names it: lane id and position.
#
# A task's phase:   claimed by a submitter -> published -> WAITING -> SENT -> released
#                                                      \-> JOINED to an equal row that is WAITING or SENT -> released
# Joined tasks hang in a list off the task that is evaluated (its owner), so identical queries in the air cost one evaluation,
# each with its own deadline. The wheel ends tasks at their deadline wherever they are; a row stays until nobody needs it.
#
# Threads: lane_submit and lane_new from any thread (lane_new under the caller's lock); everything else loop only.
from libcpp.deque cimport deque
from clipper_core.clock_cache cimport CacheState, Key
from clipper_core.delivery cimport Block, DeliveryState
from clipper_core.histogram cimport Histogram
from clipper_core.machine cimport atomic, u8, u32, u64
from clipper_core.pending cimport PendingTable
from clipper_core.prediction cimport Value
from clipper_core.ring cimport Cells, Ring
from clipper_core.status cimport Status
from clipper_core.timer_wheel cimport Wheel

cdef enum:
    LANES_MAX = 65535
    STATUSES = 17
    SHARED_ROW_BYTES_MIN = 512      # smaller rows travel as fast over a socket (docs/design.md)

cdef enum Phase:
    IDLE = 0
    WAITING = 1
    JOINED = 2
    SENT = 3

cdef struct Task:
    Key key                 # of the row, if keyed
    Block* block            # the slot that its prediction fills
    u64 deadline_us
    u64 due_us              # latest deadline among it and those joined to it
    u64 submit_us
    u64 next                # ticket of the next task joined to the same row; 0: none
    u64 prev                # ticket of the one before (the owner at last); 0: this is the owner
    void* heap              # the row, when rows differ in length
    u32 bytes               # length of the row
    u32 slot
    u8 phase
    u8 tries                # times it was sent
    bint keyed              # cache and joining are on
    bint answered           # its slot has ended

cdef cppclass Tally:        # counters of one model; any thread reads them, the loop writes all but refused and hits
    atomic[u64] ended[17]   # in the loop, by Status
    atomic[u64] refused[17]  # at submit, by Status
    atomic[u64] hits        # answered by the cache at submit
    atomic[u64] joined      # answered by another's evaluation
    atomic[u64] evaluated   # rows that a container answered
    atomic[u64] batches
    atomic[u64] queued
    atomic[u32] replicas
    Histogram latency       # us, of tasks that ended OK, cache hits at submit excluded
    Histogram batch_rows

cdef cppclass Lane:
    atomic[u32] dirty       # news since the loop last looked
    u32 id
    u32 model
    u64 slo_us              # loop: the tightest SLO of late; at first the class's upper bound
    Ring* ring
    Tally* tally
    u64 seen                # loop: positions before it have been taken in
    u64 head                # loop: positions before it are sent, joined or gone
    u64 waiting             # loop: rows in phase WAITING
    u64 used_us             # loop: last time rows came
    deque[u64]* retry       # loop: positions whose replica was lost; they go first

cdef cppclass Lanes:        # all lanes of an engine, and what their tasks meet in
    Lane** by_id
    u32 count
    Wheel* wheel
    CacheState* cache
    PendingTable* pending
    DeliveryState* delivery
    Ring* ready             # ids of lanes with news: any thread -> loop
    u64 ready_head
    int wake_fd             # wakes the loop from epoll
    atomic[u64] heap_bytes  # rows of variable length held now
    u64 heap_bytes_max

# -- the steps that threads race on: lane.hpp, the source that tests/schedules checks
cdef extern from "lane.hpp" namespace "clipper" nogil:
    bint lane_announce(Lane& lane, Cells& ready, u64* ids, u64 id) noexcept
    bint lane_next(Cells& ready, u64* ids, u64* head, u64* id) noexcept
    void lane_heard(Lane& lane) noexcept

cdef inline u64 ticket_of(u32 lane, u64 pos) noexcept nogil:
    return (<u64> lane << 48) | (pos & ((<u64> 1 << 48) - 1))

cdef Lanes* lanes_new(DeliveryState* delivery, CacheState* cache, u64 now_us, u64 tasks_max, u64 heap_bytes_max) noexcept nogil
cdef void lanes_free(Lanes* lanes) noexcept nogil
cdef Lane* lane_new(Lanes* lanes, u32 model, u64 slo_us, u64 rows, u64 row_bytes, Tally* tally,
                    bint shared=*) noexcept nogil      # shared: rows that containers may map, if that pays and can be had

cdef Status lane_submit(Lanes* lanes, Lane* lane, const void* row, u32 nbytes, const Key* key, Block* block, u32 slot,
                        u64 deadline_us, u64 now_us) noexcept nogil       # OK or FULL; key NULL: neither cached nor joined
cdef void lanes_wake(Lanes* lanes) noexcept nogil                         # see that somebody looks at the news

cdef Lane* lanes_next_ready(Lanes* lanes) noexcept nogil                  # a lane with news, or NULL
cdef void lane_take_in(Lanes* lanes, Lane* lane, u64 now_us) noexcept nogil
cdef void lanes_expire(Lanes* lanes, u64 now_us) noexcept nogil

cdef bint lane_head(Lanes* lanes, Lane* lane, u64* ticket) noexcept nogil  # the row to send next; False: none waits
cdef void lane_pop(Lanes* lanes, Lane* lane) noexcept nogil               # the head is SENT from here on
cdef void lane_shed(Lanes* lanes, Lane* lane, u64 now_us) noexcept nogil  # the head and its joined end as DROPPED
cdef void lane_requeue(Lanes* lanes, u64 ticket) noexcept nogil           # SENT -> WAITING, in front

cdef Task* task_of(Lanes* lanes, u64 ticket) noexcept nogil               # NULL: stale
cdef const void* task_row(Lanes* lanes, u64 ticket, Task* task) noexcept nogil
cdef bint task_needed(Lanes* lanes, Task* task) noexcept nogil            # somebody still waits for this row
cdef u64 task_due_us(Task* task) noexcept nogil                           # earliest deadline that is still open
cdef void row_end(Lanes* lanes, u64 ticket, Status status, Value* value, u64 now_us) noexcept nogil
# ^ ends the task and all joined to it, each with a reference of its own to the value, and releases their cells
cdef void row_found(Lanes* lanes, const Key* key, Value* value, u64 now_us) noexcept nogil
# ^ a prediction came by another way: ends the row of that key that still waits to be sent, if there is one
