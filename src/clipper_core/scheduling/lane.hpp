// Operations by which a submitter notifies the loop of its row, as templates over the atomics of
// their arguments, so that the checker of schedules (tests/schedules) can run the same source.
//
// A notification needs two words, and costs two loads while the loop is busy. The first is `dirty`
// of the lane: the lane is in the ready ring, or is being put there. The loop clears it before it
// reads the lane's rows. So if a submitter finds `dirty` set after it has published a row, the loop
// will read this row too.
// The second is the ownership of the loop (loop_owner.hpp): the loop reads the ready ring after it
// has written there that it sleeps or leaves; a submitter reads it after it has published. All of
// it is sequentially consistent.
#pragma once
#include "runtime/machine.hpp"

namespace clipper {

// Called after a row was published. True: the lane was put into the ready ring, and the caller
// wakes the loop if it sleeps.
template <class Lane, class Cells, class Id>
inline bool lane_announce(Lane& lane, Cells& ready, Id* ids, std::uint64_t id) {
    if (lane.dirty.load(std::memory_order_seq_cst)) return false;
    // order: relaxed would do: the load above decides, the exchange only selects one thread
    if (lane.dirty.exchange(1, std::memory_order_seq_cst)) return false;
    std::uint64_t pos;
    CLIPPER_CHECK(ready.claim(&pos), "the ready ring holds every lane once");
    ids[pos & (ready.size - 1)] = id;
    ready.publish(pos);
    return true;
}
// Called by the loop: find the next lane with published rows; false if there is none. Call
// lane_clear_dirty() before reading its rows.
template <class Cells, class Id>
inline bool lane_next(Cells& ready, Id* ids, std::uint64_t* head, std::uint64_t* id) {
    std::uint64_t pos = *head;
    if (!ready.published(pos)) return false;
    *id = ids[pos & (ready.size - 1)];
    ready.release(pos);
    *head = pos + 1;
    return true;
}
template <class Lane>
inline void lane_clear_dirty(Lane& lane) {
    lane.dirty.store(0, std::memory_order_seq_cst);
}

// Called by the loop: publish that all rows before `seen` were read, so those that wait or are in
// flight are in the table of evaluations.
template <class Lane>
inline void lane_took_in(Lane& lane, std::uint64_t seen) {
    lane.taken.store(seen, std::memory_order_release);
}
// Called by other threads: whether all rows before `tail` were read. If so, those that wait or are
// in flight are in the table of evaluations.
template <class Lane>
inline bool lane_all_taken_in(Lane& lane, std::uint64_t tail) {
    return lane.taken.load(std::memory_order_acquire) == tail;
}

// Submitters that run without the GIL: the engine frees its lanes after the last of them. Each
// increments the count, then reads `refusing`; the engine sets `refusing`, then reads the count,
// all of it sequentially consistent. So the engine waits for every submitter that continues.
template <class Lanes, class Flag>
inline bool submitter_enter(Lanes& lanes, Flag& refusing) {  // false: nothing is accepted any more
    lanes.submitters.fetch_add(1, std::memory_order_seq_cst);
    if (refusing.load(std::memory_order_seq_cst) == 0) return true;
    lanes.submitters.fetch_sub(1, std::memory_order_relaxed);
    return false;
}
template <class Lanes>
inline void submitter_leave(Lanes& lanes) {
    lanes.submitters.fetch_sub(1, std::memory_order_release);
}
template <class Lanes, class Flag>
// submitters check `refusing` often, and wait for no other thread
inline void submitters_stop(Lanes& lanes, Flag& refusing, std::uint32_t why) {
    refusing.store(why, std::memory_order_seq_cst);
    while (lanes.submitters.load(std::memory_order_seq_cst)) pause();
}

}  // namespace clipper
