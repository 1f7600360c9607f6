# A piece: a cell of a lane that holds many rows of one array, as one task. It is claimed and
# published like any cell; batches take spans of it; its rows end together where they can.
#
# Slot by slot the promise is that of future.pxd: PENDING -> status happens once, by one
# compare-and-swap on one byte, whoever comes first. Saved is all the rest: one addition to each
# counter, one reference count, one entry in the wheel, one latency.
#
# Threads: piece_claim, piece_publish and slots_fill: the submitter; everything else loop only.
from clipper_core.results.delivery cimport Block, DeliveryState
from clipper_core.runtime.machine cimport u8, u32, u64
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.task cimport Lane, Lanes, Span, Task
from clipper_core.wire.prediction cimport Value

# rounded up to whole cache lines
cdef inline u64 lines_of(u64 nbytes) noexcept nogil:
    return (nbytes + 63) & ~<u64> 63

# NULL: the lane is full
cdef Task* piece_claim(Lane* lane, u64* pos) noexcept nogil
# with at least one row
cdef void piece_publish(Lane* lane, u64 pos) noexcept nogil
cdef void slots_fill(DeliveryState* d, Block* block, u32 first, u32 n, const Value* values,
                     const u8* chosen,
                     Status status) noexcept nogil
# ^ before anyone can wait: slots first + i with chosen[i] end with values[i], whose reference they
# take over

# rows to be sent? Those that ended leave here
cdef bint piece_waits(Lanes* lanes, Lane* lane, u64 pos) noexcept nogil
# how many rows from `first` on have ended already
cdef u32 piece_ended_from(Task* task, u32 first, u32 end) noexcept nogil
# all its rows end
cdef void piece_close(Lanes* lanes, Lane* lane, u64 pos, Status status, u64 now_us) noexcept nogil
cdef void piece_end_rows(Lanes* lanes, Lane* lane, Task* task, u32 first, u32 n, Status status,
                         Value* value,
                         u64 now_us) noexcept nogil
# ^ alike, each with a reference of its own to the value
cdef bint piece_end_words(Lanes* lanes, const Span* span, const u8* data, u32 size, u8 tag,
                          u64 now_us) noexcept nogil
# ^ all OK, with scalars of `size` bytes; False, and nothing done, for a single task
cdef void piece_leave(Lanes* lanes, Lane* lane, u64 pos, u32 rows) noexcept nogil
# ^ so many rows neither wait nor are on their way any more; the last frees it
# all rows of a piece's span; a single task has none
cdef void span_leave(Lanes* lanes, const Span* span) noexcept nogil
