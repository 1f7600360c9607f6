# What a shard counts, by table: how often rows were there that were asked for, what became of
# pushes, why requests were refused, how old gradients were.
#
# Threads: any reads. Of a table, who pulls is one (the loop), and who pushes has the shard to
# itself (ShardLoopState.still), so a load and a store are enough; refusals and lags come from
# anywhere, and are added.
from clipper_core.runtime.histogram cimport Histogram
from clipper_core.runtime.machine cimport atomic, u32, u64

cdef enum:
    COUNTED_MAX = 1024          # tables
    REASONS_MAX = 128           # a Status, or a refusal of shard_state.hpp

cdef cppclass TableCounts:
    atomic[u64] pulled          # rows asked for
    atomic[u64] missed          # of them, those of ids without a row
    atomic[u64] applied         # distinct ids whose rows a push changed
    atomic[u64] made            # rows that are new
    atomic[u64] unadmitted      # ids not seen often enough yet
    atomic[u64] refused         # ids for which there was no room
    atomic[u64] evicted
    atomic[u64] expired

cdef cppclass ShardCounts:
    TableCounts[1024] tables
    atomic[u64] refused[128]    # by the number that says why
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
