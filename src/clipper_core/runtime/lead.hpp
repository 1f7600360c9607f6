// Who runs the turns of the loop: one word, the baton, and the few atomic steps on it.
//
// Why. A query that one thread waits for used to cross threads twice: the caller wakes the loop
// thread to send it, the loop thread wakes the caller with the answer. Each wake-up of a sleeping
// thread costs more than all the engine does for a query. Leader/follower (Schmidt et al.,
// "Leader/Followers", PLoP 2000): whoever waits alone runs the turns itself, on the same epoll, and
// is woken by the container's bytes. The loop thread is parked meanwhile, not in epoll, where each
// reply would wake it too: then both cores have a runnable thread too many, and the round trip
// takes twice as long instead of half.
//
// The baton guards all that is the loop's own. Whoever holds it is "the loop thread" of every
// comment that says so; taking it acquires, leaving it releases. Its values say what somebody with
// news has to do:
//     HELD     nothing: the holder looks for news before it sleeps, and again after it has left
//     ASLEEP   the holder sleeps in epoll: the first who turns this into HELD writes the eventfd
//     FREE     nobody runs turns and the loop thread is parked: take the baton, or ring the bell
//     CLOSED   nothing, for ever
//
// Nothing is missed. Each side writes, then reads what the other wrote, in the one order of
// seq_cst: news is published, then the baton read; the holder writes ASLEEP or FREE, then looks for
// news once more (and, having left, takes the baton back for it, or leaves it to whoever took it
// since). A thread that is about to sleep on the epoch counts itself as a waiter, then reads the
// baton; whoever leaves writes FREE, then reads the count, and rings. Who ends a slot without the
// baton (cancel, kill) ends an epoch, then reads the baton; who leads writes ASLEEP, then reads the
// epoch, and sleeps only if it is the one of its last look at its slots. Who stops the loop says
// so, then reads the baton; the loop thread read the bell before it left, looks for a stop after,
// and sleeps on the bell it has read. tests/schedules has all of this without clocks: no tick is
// needed for any of it.
//
// When. The loop thread guesses: while every batch of news lately ended the last open task, and for
// one blocked thread alone, the next query will be such a one too, so it parks instead of sleeping
// in epoll (`lone`). A query's submitter then steps and sends at once, with the baton for these
// microseconds, and its wait takes the baton again for the answer. The guess was wrong when others
// wait, an event loop registers, many tasks are open, or nobody comes: the bell, or the next tick,
// brings the loop thread back, and for a few batches it stays. So a submit is sent at once in every
// mode, and an answer that nobody is blocked on is read within two ticks at worst: PARK_US each, in
// io_loop.
//
// Given up: leading on behalf of several waiters by turns (promoting a follower costs the wake-up
// that leading saves).
#pragma once
#include "runtime/machine.hpp"

namespace clipper {

template <class Atomics = StdAtomics>
struct Lead {
    using Word = typename Atomics::template atomic<std::uint32_t>;
    enum : std::uint32_t { kHeld = 0, kAsleep = 1, kFree = 2, kClosed = 3 };
    enum : int { kLoneMin = 4, kLoneMax = 16 };

    alignas(kLine) Word baton;
    Word bell;    // bumped to call the loop thread back; what it is parked on
    Word inside;  // threads between enter() and gone(): they touch the engine; who closes waits for
                  // them
    Word taken;   // times somebody else than the loop thread took the baton; written by the holder
    int lone;     // holder only: batches in a row that ended all there was, for one blocked thread
    bool by_waiter;  // holder only: the holder is counted among the waiters

    // -- anybody
    bool is_free() const { return baton.load(std::memory_order_seq_cst) == kFree; }
    bool take() {
        std::uint32_t free = kFree;
        return baton.compare_exchange_strong(free, kHeld, std::memory_order_seq_cst);
    }
    bool enter(bool waits) {
        // who closes has it by the baton, which it took after us
        inside.fetch_add(1, std::memory_order_relaxed);
        if (!take()) {
            gone();
            return false;
        }
        taken.store(taken.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        by_waiter = waits;
        return true;
    }
    void gone() { inside.fetch_sub(1, std::memory_order_release); }
    bool is_alone() const { return inside.load(std::memory_order_acquire) == 0; }
    // After publishing news. True: the holder sleeps, and the caller is the one to write the
    // eventfd.
    bool rouse() {
        std::uint32_t asleep = kAsleep;
        return baton.load(std::memory_order_seq_cst) == kAsleep &&
               // lets one of those who look go on
               baton.compare_exchange_strong(asleep, kHeld, std::memory_order_relaxed);
    }
    // Nobody reads by the bell what its ringer wrote: whoever hears it takes the baton, and the
    // baton is ordered. order: two rings that become one are heard as one; who rang had found the
    // baton free, and is looked after by who took it then
    void ring() { bell.fetch_add(1, std::memory_order_relaxed); }
    // The loop thread: has it rung since? One look both tells and is remembered: of two, the second
    // would swallow a ring.
    bool hears(std::uint32_t* heard) const {
        std::uint32_t before = *heard;
        *heard = bell.load(std::memory_order_relaxed);
        return *heard != before;
    }

    // -- the holder
    void doze() { baton.store(kAsleep, std::memory_order_seq_cst); }
    // seen late, it costs a wake-up too many
    void rise() { baton.store(kHeld, std::memory_order_relaxed); }
    void leave() { baton.store(kFree, std::memory_order_seq_cst); }
    // held, so nobody can take it in between
    void close() { baton.store(kClosed, std::memory_order_relaxed); }

    // -- the guess
    void learn(bool alone) {
        if (alone)
            lone = lone < kLoneMax ? lone + 1 : kLoneMax;
        else if (lone > 0)
            lone = 0;
    }
    void was_wrong() { lone = -kLoneMin; }
    bool expects_a_leader() const { return lone >= kLoneMin; }
};

}  // namespace clipper
