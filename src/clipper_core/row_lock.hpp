// The word of a bucket of rows: a lock, and what only its holder changes: how many ids are in the bucket, and whether one had to go
// on to the next. One word, so that who takes the lock has read the rest.
//
// The holder stores the word while others may or the lock's bit into it: they set what is set, so nothing is lost.
#pragma once

#include <cstdint>
#include <sched.h>

#include "machine.hpp"

namespace clipper {

template <class Atomics = StdAtomics>
struct RowLock {
    static constexpr std::uint32_t kLocked = 0x80000000u, kOverflowed = 0x40000000u, kCount = 7u;
    typename Atomics::template atomic<std::uint32_t> word;

    bool take() { return !(word.fetch_or(kLocked, std::memory_order_acquire) & kLocked); }
    void give() { word.store(word.load(std::memory_order_relaxed) & ~kLocked, std::memory_order_release); }

    std::uint32_t count() const { return word.load(std::memory_order_relaxed) & kCount; }
    bool overflowed() const { return word.load(std::memory_order_relaxed) & kOverflowed; }
    void overflow() { word.store(word.load(std::memory_order_relaxed) | kOverflowed, std::memory_order_relaxed); }
    void more(std::uint32_t ids) { word.store(word.load(std::memory_order_relaxed) + ids, std::memory_order_relaxed); }
};

}  // namespace clipper
