# One model as the engine keeps it: the type of its rows, its lanes, its counters, its replicas; and
# how all of that is given back once nobody can ask it any more.
#
# A model that was dropped is looked at by the loop now and then. When it has no replica, and all
# cells of its lanes are free, its lanes are freed, and their ids and its own number may be used
# again. A lane that gets an id of an old one goes on counting positions where that one stopped, so
# a ticket still names one task, ever; and the state itself is never freed before the engine, so
# whoever counts there late counts for nobody.
#
# Threads: model_drop: any; models_give_back: the loop; all else: under the GIL.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport atomic, u32, u64
from clipper_core.runtime.ring cimport Spsc
from clipper_core.scheduling.admission cimport Gate
from clipper_core.scheduling.cost_batch cimport CostBatch
from clipper_core.scheduling.model_queue cimport ModelQueue
from clipper_core.scheduling.replica cimport RowSpec
from clipper_core.scheduling.replica_set cimport ReplicaSet
from clipper_core.scheduling.task cimport Lane, Lanes, Tally

cdef enum:
    LANE_CLASSES = 44           # SLOs from 1 us to 2^43 us (100 days), one class per power of two

cdef cppclass ModelState:
    u32 index
    RowSpec spec
    bint cached
    bint finite                 # refuse NaN and infinities
    u64 row_bytes_end           # rows of fewer bytes are taken in without a further look; 0 where
                                # each has a cost
    u64 lane_rows               # capacity of each lane
    Lane* lanes[44]             # by class of SLO; made at first use, by the submitter
    Lane* array_lanes[44]       # the same, for arrays
    Tally tally
    Gate gates[44]              # by class of SLO: what a row submitted now can expect
    atomic[u32] shares          # a replica that maps rows has come: new lanes are made to be shared
    vector[u32]* replicas       # loop: conns
    ReplicaSet replica_set      # loop: those replicas themselves, in the same order
    ModelQueue queue            # loop: its lanes that have had rows
    CostBatch* by_cost          # NULL: all rows cost the same
    u64 hold_until_us           # loop: rows wait until then for company, or for a faster replica;
                                # 0: none do
    bint hot                    # loop: on the list of models to look at
    bint waits                  # loop: on the list of models with rows that wait
    bint unlisted               # snapshots of all models leave it out; it is given back when it is
                                # dropped
    u64 next_dropped            # ModelState*, of those that the loop has not heard of yet

cdef cppclass RetiredModels:         # of an engine: models that nobody asks any more
    atomic[u64] dropped         # ModelState*: a list of those that the loop has not heard of
    vector[void*]* leaving      # loop: those that it has, until they are given back
    Spsc* unused                # numbers of those that were given back: loop -> whoever makes a
                                # model
    atomic[u32] unlisted        # models that will come here, and have not been given back

# m is all zeros. False: no memory; it can be freed
cdef bint model_state_init(ModelState* m) noexcept nogil
cdef void model_state_clear(ModelState* m) noexcept nogil        # as new, with its number
cdef void model_state_free(ModelState* m) noexcept nogil
# all zeros; False: no memory
cdef bint retired_models_init(RetiredModels* d) noexcept nogil
cdef void retired_models_free(RetiredModels* d) noexcept nogil
# nobody submits to it any more, ever
cdef void model_drop(RetiredModels* d, ModelState* m) noexcept nogil
cdef void models_give_back(RetiredModels* d, Lanes* lanes) noexcept nogil
