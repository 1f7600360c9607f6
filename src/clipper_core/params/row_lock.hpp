// Access to rows: the lock of a bucket of rows, and the gate of a table.
//
// The word of a bucket of rows has a lock bit, the number of ids in the bucket, and whether an id
// had to be stored in the next bucket. Only the holder of the lock changes the last two. It is one
// word, so that taking the lock also reads the rest.
//
// The holder stores the word while other threads may set the lock bit by an atomic or. The bit is
// set already, so nothing is lost.
#pragma once

#include <cstdint>
#include <sched.h>

#include "runtime/machine.hpp"

namespace clipper {

template <class Atomics = StdAtomics>
struct RowLock {
    static constexpr std::uint32_t kLocked = 0x80000000u, kOverflowed = 0x40000000u, kCount = 7u;
    typename Atomics::template atomic<std::uint32_t> word;

    bool take() { return !(word.fetch_or(kLocked, std::memory_order_acquire) & kLocked); }
    void give() {
        word.store(word.load(std::memory_order_relaxed) & ~kLocked, std::memory_order_release);
    }

    std::uint32_t count() const { return word.load(std::memory_order_relaxed) & kCount; }
    bool overflowed() const { return word.load(std::memory_order_relaxed) & kOverflowed; }
    void overflow() {
        word.store(word.load(std::memory_order_relaxed) | kOverflowed, std::memory_order_relaxed);
    }
    void more(std::uint32_t ids) {
        word.store(word.load(std::memory_order_relaxed) + ids, std::memory_order_relaxed);
    }
};

// The word of the gate has the number of threads inside, a bit for a thread that waits to be alone
// (to move a part of the index), and a bit for a thread that entered when no other was inside. No
// other thread enters until that one permits it, so it needs no locks, which would cost a third of
// the time of a pull. It checks often whether a thread waits, and then continues with locks.
template <class Atomics = StdAtomics>
struct RowGate {
    static constexpr std::uint32_t kAlone = 0x80000000u, kSole = 0x40000000u, kInside = kSole - 1;
    typename Atomics::template atomic<std::uint32_t> word;

    bool enter_sole() {
        std::uint32_t nobody = 0;
        return word.compare_exchange_strong(nobody, kSole | 1u, std::memory_order_acquire);
    }
    bool others() const { return (word.load(std::memory_order_relaxed) & kInside) > 1u; }
    void share() { word.fetch_sub(kSole, std::memory_order_release); }  // called by the thread that
                                                                        // is alone
    void leave(bool sole) { word.fetch_sub(sole ? kSole | 1u : 1u, std::memory_order_release); }

    bool enter() {  // true: wait until it is shared(). false: wait while it is closed(), and call
                    // it again
        if (!(word.fetch_add(1u, std::memory_order_relaxed) & kAlone)) return true;
        word.fetch_sub(1u, std::memory_order_relaxed);
        return false;
    }
    bool shared() const { return !(word.load(std::memory_order_acquire) & kSole); }
    bool closed() const { return word.load(std::memory_order_relaxed) & kAlone; }

    // called from outside. false: another thread has closed it
    bool close() { return !(word.fetch_or(kAlone, std::memory_order_relaxed) & kAlone); }
    bool alone() const { return word.load(std::memory_order_acquire) == kAlone; }
    void open() { word.fetch_sub(kAlone, std::memory_order_release); }
};

}  // namespace clipper
