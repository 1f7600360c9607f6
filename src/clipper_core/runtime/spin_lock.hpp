// A lock for a few instructions: who waits spins. A thread that holds it calls nothing that may
// wait or run Python. A template, so that the checker of schedules can run the same source.
#pragma once
#include "runtime/machine.hpp"

namespace clipper {

template <class Word>
inline void spin_lock(Word& lock) {
    while (lock.exchange(1, std::memory_order_acquire) != 0) pause();
}
template <class Word>
inline void spin_unlock(Word& lock) {
    lock.store(0, std::memory_order_release);
}

}  // namespace clipper
