// The atomic operations of the two rings, as templates over an Atomics policy, so that the checker
// of schedules (tests/schedules) can run the same source.
//
// Cells: many producers, one consumer, by ticket (Vyukov's bounded queue, producer half). A cell's
// turn, counted from the start of its lap (base = pos with the low bits cleared), marks its owner:
//     base          free, for the producer that claims position pos
//     base + 1      published: row and side cell may be read by the consumer
//     base + size   released: free again, one lap later
// A new ring is all zeros, so its memory need not be written. Cells are released one by one and in
// any order: a row in flight blocks a producer only when the ring has come round to its cell. A
// claim in a full ring fails; it never waits.
#pragma once
#include "runtime/machine.hpp"

namespace clipper {

template <class Atomics = StdAtomics>
struct Cells {
    using Turn = typename Atomics::template atomic<std::uint64_t>;
    alignas(kLine) Turn tail;
    alignas(kLine) Turn* turns;
    std::uint64_t size;

    // `first` is the first position
    void init(Turn* zeros, std::uint64_t n, std::uint64_t first = 0) {
        turns = zeros;
        size = n;
        tail.store(first, std::memory_order_relaxed);
        for (std::uint64_t pos = first; first && pos < first + n; ++pos)
            turn(pos).store(base(pos), std::memory_order_relaxed);
    }
    std::uint64_t base(std::uint64_t pos) const { return pos & ~(size - 1); }
    Turn& turn(std::uint64_t pos) const { return turns[pos & (size - 1)]; }

    bool claim(std::uint64_t* pos) {
        std::uint64_t t = tail.load(std::memory_order_relaxed);
        for (;;) {
            std::uint64_t turn_now = turn(t).load(std::memory_order_acquire);
            if (turn_now == base(t)) {
                if (tail.compare_exchange_weak(t, t + 1, std::memory_order_relaxed)) {
                    *pos = t;
                    return true;
                }
            } else if (turn_now < base(t)) {
                return false;
            } else {
                t = tail.load(std::memory_order_relaxed);
            }
        }
    }
    bool full() const {  // may be outdated when it returns
        std::uint64_t t = tail.load(std::memory_order_relaxed);
        // order: relaxed would do, claim() looks again
        return turn(t).load(std::memory_order_acquire) < base(t);
    }
    // Sequentially consistent, because the producer next reads whether the consumer sleeps (a
    // store, then a load, as the consumer does).
    void publish(std::uint64_t pos) { turn(pos).store(base(pos) + 1, std::memory_order_seq_cst); }
    bool published(std::uint64_t pos) const {
        return turn(pos).load(std::memory_order_seq_cst) == base(pos) + 1;
    }
    bool idle() const {  // all claimed cells are released; called by the consumer, while no thread
                         // claims
        std::uint64_t t = tail.load(std::memory_order_relaxed);
        for (std::uint64_t pos = t; pos < t + size; ++pos) {
            if (turn(pos).load(std::memory_order_relaxed) != base(pos)) return false;
        }
        return true;
    }
    // Return whether the cell has not been claimed again since position `pos`; then it still has
    // the row that was written for `pos`, whether released or not. If it returns true after another
    // thread has read the row, that thread has read the original row: a claim is a locked
    // instruction that precedes the writes of the new row, so new bytes can only be seen after the
    // new tail. Machines without this order of stores return false.
    bool untouched(std::uint64_t pos) const {
#if defined(__x86_64__)
        // order: relaxed would do here, it is the claim's locked instruction and the machine's
        // order of stores that count
        return tail.load(std::memory_order_seq_cst) <= pos + size;
#else
        return pos != pos;
#endif
    }
    void release(std::uint64_t pos) {
        turn(pos).store(base(pos) + size, std::memory_order_release);
    }
};

// One producer, one consumer, words of 64 bits. Each side caches the index of the other one in its
// own cache line.
template <class Atomics = StdAtomics>
struct Spsc {
    using Index = typename Atomics::template atomic<std::uint64_t>;
    using Word = typename Atomics::template atomic<std::uint64_t>;
    alignas(kLine) Index head;
    std::uint64_t tail_seen;
    alignas(kLine) Index tail;
    std::uint64_t head_seen;
    alignas(kLine) Word* words;
    std::uint64_t size;

    void init(Word* storage, std::uint64_t n) {
        words = storage;
        size = n;
        head.store(0, std::memory_order_relaxed);
        tail.store(0, std::memory_order_relaxed);
        tail_seen = head_seen = 0;
    }
    bool push(std::uint64_t word) {
        std::uint64_t t = tail.load(std::memory_order_relaxed);
        if (t - head_seen == size) {
            head_seen = head.load(std::memory_order_acquire);
            if (t - head_seen == size) return false;
        }
        words[t & (size - 1)].store(word, std::memory_order_relaxed);
        tail.store(t + 1, std::memory_order_seq_cst);
        return true;
    }
    std::uint64_t room() {  // called by the writer: number of words that fit
        head_seen = head.load(std::memory_order_acquire);
        return size - (tail.load(std::memory_order_relaxed) - head_seen);
    }
    bool tail_moved() const {
        return tail.load(std::memory_order_seq_cst) != head.load(std::memory_order_relaxed);
    }
    bool pop(std::uint64_t* word) {
        std::uint64_t h = head.load(std::memory_order_relaxed);
        if (h == tail_seen) {
            // order: acquire would do, a reader that sleeps calls tail_moved()
            tail_seen = tail.load(std::memory_order_seq_cst);
            if (h == tail_seen) return false;
        }
        *word = words[h & (size - 1)].load(std::memory_order_relaxed);
        head.store(h + 1, std::memory_order_release);
        return true;
    }
};

}  // namespace clipper
