# What batches were made of and when they went, for who traces queries: a bounded queue of words
# from the loop to one reader. Off until somebody asks for it, and then a few words a batch and one
# a row; a batch that finds no room is counted, and nobody waits.
#
# A record: how many words follow it; replica << 32 | rows; sent, begun, ended (us, monotonic); the
# id of each task's slot, those included that joined a row (a task of an array: of its first slot).
from clipper_core.runtime.machine cimport u32, u64
from clipper_core.scheduling.task cimport Lanes, Span

cdef enum:
    LOGGED_TASKS_MAX = 4096     # of one batch
    RECORD_HEAD = 4             # words before the ids, the count excluded

# a power of two; False: no memory. Threads: one at a time
cdef bint batch_log_open(Lanes* lanes, u64 words) noexcept nogil
cdef void batch_log_put(Lanes* lanes, const Span* spans, u32 span_count, u32 rows, u32 replica,
                        u64 sent_us, u64 begun_us,
                        u64 now_us) noexcept nogil
# ^ before its tasks end. Threads: loop only
