// Ownership of the loop, that is, which thread runs its turns: one atomic word, `state`, and its
// transitions.
//
// Why. A query that one thread waits for used to cross threads twice: the caller wakes the loop
// thread to send it, the loop thread wakes the caller with the answer. Each wake-up of a sleeping
// thread costs more than everything else that the engine does for a query. So a thread that waits
// alone runs the turns itself, on the same epoll, and is woken by the container's bytes
// (leader/follower; Schmidt et al., "Leader/Followers", PLoP 2000). Meanwhile the loop thread is
// parked on a futex, not in epoll: there each reply would wake it too, both cores would have one
// runnable thread too many, and the round trip would take twice as long instead of half.
//
// The owner of the loop is "the loop" of every comment that says so. Taking the ownership acquires,
// leaving it releases. `state` defines what a thread that has published something must do:
//     HELD     nothing: the owner checks for work before it sleeps, and again after it has left
//     ASLEEP   the owner sleeps in epoll: the first thread that turns this into HELD writes the
//              eventfd
//     FREE     no thread runs turns, and the loop thread is parked: take the ownership, or wake the
//              loop thread
//     CLOSED   nothing; the engine has ended
//
// No wake-up is lost. Each side writes, then reads what the other wrote, in the single order of
// seq_cst operations:
// - Work is published, then `state` is read. The owner writes ASLEEP or FREE, then checks for work
//   once more. If it finds some after it has left, it takes the ownership back, unless another
//   thread has taken it since.
// - A thread that is about to sleep on the epoch counts itself as a waiter, then reads `state`. An
//   owner that leaves writes FREE, then reads that count, and wakes the loop thread.
// - A thread that ends a slot without the ownership (cancel, close) ends an epoch, then reads
//   `state`. The owner writes ASLEEP, then reads the epoch, and sleeps only if it is still the
//   epoch at which it last checked its slots.
// - A thread that stops the loop sets its flag, then reads `state`. The loop thread reads `wakeups`
//   before it leaves, checks the flag afterwards, and parks on the value that it has read.
// tests/schedules checks all of this without clocks: no tick is needed for any of it.
//
// When. The loop thread predicts: if each recent batch of results ended the last open task, and a
// single blocked thread waited for it, the next query will be of the same kind. So it parks instead
// of sleeping in epoll (`lone` counts such batches). The thread that submits then runs a step and
// sends at once, as the owner for these microseconds, and becomes the owner again while it waits.
// The prediction was wrong if others wait, an event loop registers, many tasks are open, or no
// thread becomes the owner: then a wake-up or the next tick makes the loop thread the owner again,
// and it stays so for a few batches. So a row is sent at once in either mode, and an answer that no
// thread is blocked on is read within two ticks (PARK_US in io_loop) at worst.
//
// Not done: passing the ownership from waiter to waiter. Waking the next one costs what the
// ownership saves.
#pragma once
#include "runtime/machine.hpp"

namespace clipper {

template <class Atomics = StdAtomics>
struct LoopOwner {
    using Word = typename Atomics::template atomic<std::uint32_t>;
    enum : std::uint32_t { kHeld = 0, kAsleep = 1, kFree = 2, kClosed = 3 };
    enum : int { kLoneMin = 4, kLoneMax = 16 };

    alignas(kLine) Word state;
    Word wakeups;    // incremented to wake the parked loop thread, which waits on this futex
    Word inside;     // threads between enter() and gone(): they use the engine
    Word taken;      // how often another thread than the loop's became the owner; written by the
                     // owner
    int lone;        // owner only: consecutive batches that ended all tasks, for one blocked thread
    bool by_waiter;  // owner only: the owner is counted among the waiters

    // -- any thread
    bool is_free() const { return state.load(std::memory_order_seq_cst) == kFree; }
    bool take() {
        std::uint32_t free = kFree;
        return state.compare_exchange_strong(free, kHeld, std::memory_order_seq_cst);
    }
    bool enter(bool waits) {
        // relaxed: the thread that closes sees it through `state`, which it takes after us
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
    // After something was published. True: the owner sleeps, and the caller must write the eventfd.
    bool wake_owner() {
        std::uint32_t asleep = kAsleep;
        return state.load(std::memory_order_seq_cst) == kAsleep &&
               // order: relaxed, it only selects one of the threads that saw ASLEEP
               state.compare_exchange_strong(asleep, kHeld, std::memory_order_relaxed);
    }
    // No data is read through this word: a thread that sees it takes the ownership, which orders.
    // The caller had found FREE; if another thread has taken the ownership since, that one
    // checks for work.
    // order: relaxed, two increments that are seen as one wake the loop thread once
    void wake_loop_thread() { wakeups.fetch_add(1, std::memory_order_relaxed); }
    // Called by the loop thread: whether it was woken since *seen. One load both answers and
    // updates *seen; with two, the second could miss a wake-up.
    bool was_woken(std::uint32_t* seen) const {
        std::uint32_t before = *seen;
        *seen = wakeups.load(std::memory_order_relaxed);
        return *seen != before;
    }

    // -- the owner
    void mark_asleep() { state.store(kAsleep, std::memory_order_seq_cst); }
    // order: relaxed, seen late it costs one wake-up too many
    void mark_awake() { state.store(kHeld, std::memory_order_relaxed); }
    void leave() { state.store(kFree, std::memory_order_seq_cst); }
    // order: relaxed, the caller is the owner, so no thread can take it in between
    void close() { state.store(kClosed, std::memory_order_relaxed); }

    // -- the prediction
    void learn(bool alone) {
        if (alone)
            lone = lone < kLoneMax ? lone + 1 : kLoneMax;
        else if (lone > 0)
            lone = 0;
    }
    void was_wrong() { lone = -kLoneMin; }
    bool expects_an_owner() const { return lone >= kLoneMin; }
};

}  // namespace clipper
