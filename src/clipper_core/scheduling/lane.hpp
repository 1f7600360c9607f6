// The steps by which a submitter notifies the loop of its row, as templates over the atomics of
// what they are given, so that a schedule-exploring checker runs this very source
// (tests/schedules).
//
// With two words a notification costs two loads while the loop is busy. `dirty`, a lane's, says
// that the lane is in the ready ring, or being put there. The loop clears it before it takes the
// lane's rows in, so the row of a submitter that publishes it and finds `dirty` set is taken in
// with them.
// The ownership of the loop (loop_owner.hpp): the loop looks at the ready ring after it has written
// there that it sleeps or leaves; a submitter reads it after it has published. All of it is
// sequentially consistent.
#pragma once
#include "runtime/machine.hpp"

namespace clipper {

// After a row was published. True: the lane was put into the ready ring, and a loop that sleeps is
// to be woken.
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
// The loop: finds the next lane with published rows; false if there is none. Its rows are to be
// read after lane_clear_dirty().
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

// The loop: rows before `seen` have been taken in, so what of them waits or is in flight is in the
// table of evaluations.
template <class Lane>
inline void lane_took_in(Lane& lane, std::uint64_t seen) {
    lane.taken.store(seen, std::memory_order_release);
}
// Another thread: whether all rows before `tail` have been taken in. If so, it finds in that table
// what waits or is in flight.
template <class Lane>
inline bool lane_all_taken_in(Lane& lane, std::uint64_t tail) {
    return lane.taken.load(std::memory_order_acquire) == tail;
}

// Submitters at work without the GIL: the engine ends its lanes after the last of them. Each counts
// itself, then looks at `refusing`; the engine sets that, then looks at the count, all of it
// sequentially consistent; so whoever goes on is waited for.
template <class Lanes, class Flag>
inline bool submitter_enter(Lanes& lanes, Flag& refusing) {  // false: nothing is taken in any more
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
// they look at `refusing` often, and wait for nobody
inline void submitters_stop(Lanes& lanes, Flag& refusing, std::uint32_t why) {
    refusing.store(why, std::memory_order_seq_cst);
    while (lanes.submitters.load(std::memory_order_seq_cst)) pause();
}

}  // namespace clipper
