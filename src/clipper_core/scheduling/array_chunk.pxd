# A chunk: one cell of a lane that holds many rows of an array, as one task. It is claimed and
# published like any cell, batches take spans of it, and its rows end together where possible.
#
# Each slot keeps the guarantee of completion.pxd: PENDING -> status happens once, by one
# compare-and-swap on one byte, whichever thread is first. All else is paid once per chunk instead
# of once per row: one addition per counter, one reference count, one timer, one latency.
#
# Threads: chunk_claim, chunk_publish and slots_fill: the submitter. Everything else: loop only.
from clipper_core.results.completion cimport Block, CompletionState
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.task cimport Lane, Lanes, Span, Task
from clipper_core.wire.prediction cimport Value

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

# True: rows wait to be sent. Rows that have ended leave here.
cdef bint chunk_waits(Lanes* lanes, Lane* lane, u64 pos) noexcept nogil
# Return how many rows from `first` on have ended already.
cdef u32 chunk_ended_from(Task* task, u32 first, u32 end) noexcept nogil
# End all rows.
cdef void chunk_close(Lanes* lanes, Lane* lane, u64 pos, Status status, u64 now_us) noexcept nogil
# End n rows alike; each gets a reference of its own to the value.
cdef void chunk_end_rows(Lanes* lanes, Lane* lane, Task* task, u32 first, u32 n, Status status,
                         Value* value, u64 now_us) noexcept nogil
# End all rows of the span as OK, with scalars of `size` bytes. False for a single task: nothing
# done.
cdef bint chunk_end_words(Lanes* lanes, const Span* span, const u8* data, u32 size, u8 tag,
                          u64 now_us) noexcept nogil
# Note that so many rows neither wait nor are at a container; the last one frees the chunk.
cdef void chunk_leave(Lanes* lanes, Lane* lane, u64 pos, u32 rows) noexcept nogil
# The same for all rows of a chunk's span; does nothing for a single task.
cdef void span_leave(Lanes* lanes, const Span* span) noexcept nogil
