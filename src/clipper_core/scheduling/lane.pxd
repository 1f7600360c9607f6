# The queues of the models. A lane is one ring of tasks of one model whose SLOs are alike (within a
# factor of two); a ring cell is the task: its row is the wire's, its side cell says whose slot it
# fills and by when. A ticket names it: lane id and position.
#
# Arrays have lanes of their own, whose cells hold many rows: a cell is a *chunk* of an array, one
# task with a slot for each of its rows, one deadline and one entry in the wheel. Batches take spans
# of it. A span is consecutive rows of one task: all of a single one (its one row), part of a chunk.
# A chunk's cell is freed when none of its rows waits or is on its way. Its rows do not join equal
# ones: they are looked up once, at submit.
#
# A task's phase:   claimed by a submitter -> published -> WAITING -> SENT -> released
# \-> JOINED to an equal row that is WAITING or SENT -> released Joined tasks hang in a list off the
# task that is evaluated (its owner), so identical queries in the air cost one evaluation, each with
# its own deadline. The wheel ends tasks at their deadline wherever they are; a row stays until
# nobody needs it.
#
# Threads: lane_submit and lane_new from any thread (lane_new under the caller's lock); everything
# else loop only.
from clipper_core.cache.clock_cache cimport CacheState, Key
from clipper_core.results.completion cimport Block, CompletionState
from clipper_core.runtime.machine cimport atomic, u32, u64
from clipper_core.runtime.ring cimport Cells
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.task cimport Lane, Lanes, Span, Tally, Task
from clipper_core.wire.prediction cimport Value

cdef enum:
    SHARED_ROW_BYTES_MIN = 512  # smaller rows travel as fast over a socket (docs/design.md)

# -- the steps that threads race on: lane.hpp, the source that tests/schedules checks
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
                    Tally* tally,
                    bint shared=*) noexcept nogil      # shared: rows that containers may map, if
                                                       # that pays and can be had

cdef Status lane_submit(Lanes* lanes, Lane* lane, const void* row, u32 nbytes, const Key* key,
                        Block* block, u32 slot,
                        u64 deadline_us, u64 now_us, u64 salt, u64 refused_us,
                        u32 cost) noexcept nogil
# ^ OK or FULL; key NULL: neither cached nor joined. refused_us: 0, or the row only joins an equal
# one; without one it ends as
#   FULL, and this is after how long another try may succeed. cost: where rows differ in it
# something was published in it
cdef void lane_has_news(Lanes* lanes, Lane* lane) noexcept nogil
# see that somebody looks at the news
cdef void lanes_wake(Lanes* lanes) noexcept nogil

# a lane with news, or NULL
cdef Lane* lanes_next_ready(Lanes* lanes) noexcept nogil
# -> rows that asked for an evaluation of their own
cdef u64 lane_take_in(Lanes* lanes, Lane* lane, u64 now_us) noexcept nogil
cdef void lanes_expire(Lanes* lanes, u64 now_us) noexcept nogil

# the row to send next; False: none waits
cdef bint lane_head(Lanes* lanes, Lane* lane, u64* ticket) noexcept nogil
# rows of the head; they are SENT
cdef void lane_take(Lanes* lanes, Lane* lane, u32 rows_max, Span* span) noexcept nogil
# the row of this ticket, which waits anywhere in the lane; it is SENT
cdef void lane_take_row(Lanes* lanes, Lane* lane, u64 ticket, Span* span) noexcept nogil
# rows of the head end as DROPPED
cdef void lane_shed(Lanes* lanes, Lane* lane, u32 rows_max, u64 now_us) noexcept nogil
cdef void lane_close(Lanes* lanes, Lane* lane, Status status, u64 now_us) noexcept nogil  # all end

# False: the wheel is full
cdef bint lanes_set_timer(Lanes* lanes, u64 deadline_us, u64 ticket) noexcept nogil
# somebody still waits for this row
cdef bint task_needed(Lanes* lanes, Task* task) noexcept nogil
# earliest deadline that is still open
cdef u64 task_due_us(Task* task) noexcept nogil
# rows all alike
cdef void span_end(Lanes* lanes, const Span* span, Status status, Value* value,
                   u64 now_us) noexcept nogil
cdef void span_row_end(Lanes* lanes, const Span* span, u32 k, Status status, Value* value,
                       u64 now_us) noexcept nogil
# ^ its row k; after the last of them span_leave
# of its row k; NULL: not cached
cdef const Key* span_key(Lanes* lanes, const Span* span, u32 k) noexcept nogil
cdef bint span_retry(Lanes* lanes, const Span* span, u32 failed_on, u64 now_us) noexcept nogil
# ^ back into its lane, in front, if somebody still waits for it and this was its first try.
# failed_on: the connection to avoid
cdef void row_end(Lanes* lanes, u64 ticket, Status status, Value* value, u64 now_us) noexcept nogil
# ^ ends the task and all joined to it, each with a reference of its own to the value, and releases
# their cells
cdef void row_found(Lanes* lanes, const Key* key, Value* value, u64 now_us) noexcept nogil
# ^ a prediction came by another way: ends the row of that key that still waits to be sent, if there
# is one
