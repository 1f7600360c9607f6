// Who may touch a row: the lock of its bucket, and the gate of its table.
//
// The word of a bucket of rows: a lock, and what only its holder changes: how many ids are in the
// bucket, and whether one had to go on to the next. One word, so that who takes the lock has read
// the rest.
//
// The holder stores the word while others may or the lock's bit into it: they set what is set, so
// nothing is lost.
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

// The gate: how many threads are inside; one bit for who waits to be alone there, to move a part of
// the index; and one for a thread that came when nobody was inside. Nobody follows it before it
// says so, so it needs no locks: they would cost a third of what a pull takes. It looks often
// whether somebody waits, then goes on with locks.
template <class Atomics = StdAtomics>
struct RowGate {
    static constexpr std::uint32_t kAlone = 0x80000000u, kSole = 0x40000000u, kInside = kSole - 1;
    typename Atomics::template atomic<std::uint32_t> word;

    bool enter_sole() {
        std::uint32_t nobody = 0;
        return word.compare_exchange_strong(nobody, kSole | 1u, std::memory_order_acquire);
    }
    bool others() const { return (word.load(std::memory_order_relaxed) & kInside) > 1u; }
    void share() { word.fetch_sub(kSole, std::memory_order_release); }  // by the sole one
    void leave(bool sole) { word.fetch_sub(sole ? kSole | 1u : 1u, std::memory_order_release); }

    bool enter() {  // then wait until it is shared().  False: wait while it is closed(), and come
                    // again
        if (!(word.fetch_add(1u, std::memory_order_relaxed) & kAlone)) return true;
        word.fetch_sub(1u, std::memory_order_relaxed);
        return false;
    }
    bool shared() const { return !(word.load(std::memory_order_acquire) & kSole); }
    bool closed() const { return word.load(std::memory_order_relaxed) & kAlone; }

    // from outside.  False: another one did
    bool close() { return !(word.fetch_or(kAlone, std::memory_order_relaxed) & kAlone); }
    bool alone() const { return word.load(std::memory_order_acquire) == kAlone; }
    void open() { word.fetch_sub(kAlone, std::memory_order_release); }
};

}  // namespace clipper
