# Batches of rows that differ in what they cost: the cost of a row, and which of the rows that wait
# make the next batch.
#
# The cost of a row is its bytes, its length, or what the caller gave, in whole units, 1 at least. A
# batch costs the sum of its rows; with `padded`, as many times its dearest row as it has rows,
# since the model fills all rows up to the longest.
#
# Threads: row_cost: any; everything else: the loop.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.scheduling.batcher cimport Batcher
from clipper_core.scheduling.model_queue cimport ModelQueue
from clipper_core.scheduling.task cimport Lanes

cdef enum CostKind:
    COST_BYTES = 1              # of the row, as it travels
    COST_LENGTH = 2             # its elements; of str and bytes their bytes
    COST_GIVEN = 3              # by the caller, with each row

cdef struct Candidate:          # a row that may go into the batch
    u64 ticket
    u64 due_us
    u32 cost
    bint must                   # it is due too soon to wait for another batch
    bint chosen

cdef struct Choice:             # the rows of the batch; their tickets are the chosen candidates'
    u32 n
    double cost                 # of the batch, with padding
    double useful               # the sum of its rows' costs
    bint full                   # rows were left out because of the limit
    double worth                # useful cost per microsecond

cdef cppclass CostBatch:        # of one model
    u8 kind
    bint padded
    u32 item_bytes
    Choice choice
    vector[Candidate]* rows     # candidates, the one due first at the front
    vector[u64]* keys           # scratch: what is sorted, with the index of the candidate
    vector[double]* sums        # scratch: costs of the others, added up

# NULL: no memory.
cdef CostBatch* cost_batch_new(u8 kind, bint padded, u32 item_bytes) noexcept nogil
cdef void cost_batch_free(CostBatch* c) noexcept nogil
cdef u32 row_cost(const CostBatch* c, u64 nbytes, u32 given) noexcept nogil
# Collect the first rows that wait, except those that the container of `avoid` has failed. False:
# there is none.
cdef bint cost_batch_collect(CostBatch* c, ModelQueue* queue, Lanes* lanes, u32 avoid,
                             u64 now_us) noexcept nogil
# Choose a batch of at most so many rows and this cost, with the row that is due first; that row
# goes alone if it costs more. start_us: when the replica is free.
cdef void cost_batch_choose(CostBatch* c, const Batcher* b, u32 rows_max, double limit,
                            u64 start_us) noexcept nogil
# Choose the row that is due first, alone.
cdef void cost_batch_alone(CostBatch* c) noexcept nogil
