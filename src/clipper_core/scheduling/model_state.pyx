"""A model's state, from the first row that may come to the last that has ended.

Why the loop frees and nobody else: tickets lie in its wheel, in its batches and in lists of joined
rows, and it alone knows when none of them is followed any more. Why a stack of dropped models, and
no command: commands may be full, and who drops a model (its last reference goes) can neither wait
nor be told so.
"""
from libc.stdlib cimport free
from libc.string cimport memset

from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.machine cimport acquire, relaxed, release
from clipper_core.runtime.ring cimport ring_free, spsc_free, spsc_new
from clipper_core.scheduling.cost_batch cimport cost_batch_free
from clipper_core.scheduling.model_queue cimport (
    GatePointer, LanePointer, model_queue_free, model_queue_init,
)
from clipper_core.scheduling.replica_set cimport (
    ReplicaPointer, replica_set_free, replica_set_init, replica_set_reset,
)
from clipper_core.scheduling.task cimport ticket_of

ctypedef void* Pointer

cdef enum:
    UNUSED_MAX = 4096           # numbers of models that were given back, kept for others; beyond it
                                # such models stay a while


cdef bint model_state_init(ModelState* m) noexcept nogil:
    cdef bint has_queue = model_queue_init(&m.queue)
    cdef bint has_replica_set = replica_set_init(&m.replica_set)
    m.replicas = make[vector[u32]]()
    return has_queue and has_replica_set and m.replicas != NULL


cdef void _release(ModelState* m) noexcept nogil:
    del m.replicas
    model_queue_free(&m.queue)
    replica_set_free(&m.replica_set)
    cost_batch_free(m.by_cost)


cdef void model_state_clear(ModelState* m) noexcept nogil:
    """Its lists are empty and stay, so this needs no memory."""
    cdef u32 index = m.index
    cdef vector[u32]* replicas = m.replicas
    cdef vector[LanePointer]* lanes = m.queue.lanes
    cdef vector[GatePointer]* gates = m.queue.gates
    cdef vector[ReplicaPointer]* members = m.replica_set.members
    cdef vector[double]* free_us = m.replica_set.free_us
    cost_batch_free(m.by_cost)
    memset(<void*> m, 0, sizeof(ModelState))
    m.index, m.replicas, m.queue.lanes, m.queue.gates = index, replicas, lanes, gates
    m.replica_set.members, m.replica_set.free_us = members, free_us
    replica_set_reset(&m.replica_set)


cdef void model_state_free(ModelState* m) noexcept nogil:
    _release(m)
    free(m)


cdef bint retired_models_init(RetiredModels* d) noexcept nogil:
    d.leaving = make[vector[Pointer]]()
    d.unused = spsc_new(UNUSED_MAX)
    return d.leaving != NULL and d.unused != NULL


cdef void retired_models_free(RetiredModels* d) noexcept nogil:
    del d.leaving
    spsc_free(d.unused)


cdef void model_drop(RetiredModels* d, ModelState* m) noexcept nogil:
    cdef u64 first = d.dropped.load(relaxed)
    m.next_dropped = first
    # what was submitted before is seen with it
    while not d.dropped.compare_exchange_strong(first, <u64> m, release):
        m.next_dropped = first


cdef bint _is_idle(Lane* lane) noexcept nogil:
    """No cell of it is in use, and the loop has taken in what there was."""
    return (lane == NULL or lane.dirty.load(acquire) == 0
            and lane.seen == lane.ring.cells.tail.load(relaxed)
            and lane.ring.cells.idle())


cdef void _free_lane(Lanes* lanes, Lane* lane) noexcept nogil:
    if lane == NULL:
        return
    # entries of the wheel that are left name nothing
    lanes.by_id[lane.id] = NULL
    lanes.unused.push(ticket_of(lane.id, lane.seen))        # there is room: _give_back has looked
    lanes.live.fetch_sub(1, relaxed)
    del lane.retry
    ring_free(lane.ring)
    free(lane)


cdef bint _give_back(Lanes* lanes, ModelState* m) noexcept nogil:
    cdef u32 i
    if not m.replicas.empty() or m.hot or m.waits or lanes.unused.room() < 2 * LANE_CLASSES:
        return False
    for i in range(LANE_CLASSES):
        if not (_is_idle(m.lanes[i]) and _is_idle(m.array_lanes[i])):
            return False
    m.queue.lanes.clear()
    m.queue.gates.clear()
    for i in range(LANE_CLASSES):
        _free_lane(lanes, m.lanes[i])
        _free_lane(lanes, m.array_lanes[i])
        m.lanes[i] = m.array_lanes[i] = NULL
    return True


cdef void models_give_back(RetiredModels* d, Lanes* lanes) noexcept nogil:
    """One just heard of waits for the next call: commands from before it was dropped are obeyed by
    then."""
    cdef size_t i = 0
    cdef u64 at, following
    while i < d.leaving.size():
        if d.unused.room() and _give_back(lanes, <ModelState*> d.leaving[0][i]):
            d.unlisted.fetch_sub(1, relaxed)
            d.unused.push((<ModelState*> d.leaving[0][i]).index)
            d.leaving[0][i] = d.leaving.back()
            d.leaving.pop_back()
        else:
            i += 1
    at = d.dropped.exchange(0, acquire) if d.dropped.load(relaxed) else 0
    while at:
        following = (<ModelState*> at).next_dropped
        if make_room(d.leaving[0], d.leaving.size() + 1):
            d.leaving.push_back(<void*> at)
        else:
            model_drop(d, <ModelState*> at)             # heard of again at the next call
        at = following
